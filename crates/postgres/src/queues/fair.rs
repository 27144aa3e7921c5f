//! Fair sharing between the groups of a standard queue: a group that has more than its share of the deliveries is served after
//! the others. The deliveries are counted by each receive; while deleted ones make that slow, a count is used again for a time.

use std::time::{Duration, Instant};

use sqlx::{PgConnection, Row as _};

use super::{Inner, Queue, lock};
use crate::error::Failure;

/// A count that read at most this many deleted deliveries is not used again.
const GONE_MAX: i64 = 500;
/// Another count is used this many times as long as it took,
const TIMES: u32 = 50;
/// and at most this long.
const USED_MAX: Duration = Duration::from_secs(1);

/// The groups that have more than their share of a queue's deliveries.
#[derive(Debug, Clone)]
pub(super) struct Noisy {
    pub groups: Vec<String>,
    /// How long they may be used.
    used: Duration,
}

/// What a receive of a standard queue with groups has to know.
pub(super) struct Fair {
    /// For each priority the place of the first message that can be delivered, if there is one.
    pub firsts: Vec<Option<u64>>,
    /// If they were counted.
    pub noisy: Option<Noisy>,
}

impl Fair {
    pub(super) async fn read(
        db: &mut PgConnection,
        queue: &Queue,
        floors: &[i64],
        from_ms: i64,
        counts: bool,
    ) -> Result<Self, Failure> {
        let sql = "SELECT firsts, noisy, gone, took_us FROM hapax.q_fair($1, $2, $3, $4, $5)";
        let read = sqlx::query(sql).bind(queue.id).bind(queue.priorities()).bind(floors).bind(from_ms);
        let row = read.bind(counts).fetch_one(db).await?;
        let firsts: Vec<Option<i64>> = row.try_get("firsts")?;
        let noisy = if counts {
            let took = Duration::from_micros(row.try_get::<i64, _>("took_us")?.max(0) as u64);
            Some(Noisy { groups: row.try_get("noisy")?, used: used_for(row.try_get("gone")?, took) })
        } else {
            None
        };
        Ok(Self { firsts: firsts.into_iter().map(|first| first.map(|pos| pos as u64)).collect(), noisy })
    }
}

fn used_for(gone: i64, took: Duration) -> Duration {
    if gone <= GONE_MAX { Duration::ZERO } else { took.saturating_mul(TIMES).min(USED_MAX) }
}

/// The last count of a queue, and until when it is used.
pub(super) type Known = (Vec<String>, Instant);

impl Inner {
    /// The groups that have more than their share, if they need not be counted now.
    pub(super) fn noisy(&self, queue_id: i32) -> Option<Vec<String>> {
        let all = lock(&self.noisy);
        all.get(&queue_id).filter(|(_, until)| Instant::now() < *until).map(|(groups, _)| groups.clone())
    }

    pub(super) fn note_noisy(&self, queue_id: i32, noisy: &Noisy) {
        if noisy.used.is_zero() {
            lock(&self.noisy).remove(&queue_id);
        } else {
            lock(&self.noisy).insert(queue_id, (noisy.groups.clone(), Instant::now() + noisy.used));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_count_is_used_again_only_if_it_read_many_that_are_gone() {
        assert_eq!(used_for(GONE_MAX, Duration::from_secs(9)), Duration::ZERO);
        assert_eq!(used_for(GONE_MAX + 1, Duration::from_millis(2)), Duration::from_millis(100));
        assert_eq!(used_for(i64::MAX, Duration::from_hours(1)), USED_MAX);
    }
}
