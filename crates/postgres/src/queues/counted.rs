//! Figures of queues are counted when they are asked for, exactly: a counter in the database would be a row that every batch
//! changes. A count of millions of messages takes long, so it is used again for a time, and counting takes at most a small part
//! of the time however often figures are asked for. The time is that of the database: a process that is stopped, or waits for a
//! connection, would use an old count for twenty times as long.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use hapax_core::{QueueStats, StoreStatus};
use sqlx::Row as _;
use sqlx::postgres::PgRow;

/// A count that took less is not used again.
const SLOW: Duration = Duration::from_millis(100);
/// A slow count is used for this many times as long as it took.
const TIMES: u32 = 20;
/// A statement ends earlier. A clock that was set ahead meanwhile tells another time.
const SLOW_MAX: Duration = Duration::from_mins(1);

/// How long a count is used that took this long.
pub(super) fn used_for(took: Duration) -> Duration {
    if took < SLOW { Duration::ZERO } else { took.min(SLOW_MAX) * TIMES }
}

/// A column of a statement that counts, for [`took`]: how long it took until here, in microseconds.
pub(super) const TOOK: &str =
    "(extract(epoch FROM clock_timestamp() - statement_timestamp()) * 1000000)::bigint AS took_us";

/// How long a statement took.
pub(super) fn took(row: &PgRow) -> Result<Duration, sqlx::Error> {
    Ok(Duration::from_micros(u64::try_from(row.try_get::<i64, _>("took_us")?).unwrap_or(0)))
}

/// A slow count.
#[derive(Debug, Clone)]
struct Slow<T> {
    found: T,
    until: Instant,
}

impl<T: Clone> Slow<T> {
    fn new(found: T, took: Duration) -> Option<Self> {
        let time = used_for(took);
        (!time.is_zero()).then(|| Self { found, until: Instant::now() + time })
    }

    fn get(&self) -> Option<T> {
        (Instant::now() < self.until).then(|| self.found.clone())
    }
}

/// The last counts, where they were slow.
#[derive(Debug, Default)]
pub(super) struct Counted {
    queues: HashMap<i32, Slow<QueueStats>>,
    store: Option<Slow<StoreStatus>>,
}

impl Counted {
    pub(super) fn stats(&self, queue_id: i32) -> Option<QueueStats> {
        self.queues.get(&queue_id)?.get()
    }

    pub(super) fn note_stats(&mut self, queue_id: i32, stats: QueueStats, took: Duration) {
        match Slow::new(stats, took) {
            Some(slow) => drop(self.queues.insert(queue_id, slow)),
            None => drop(self.queues.remove(&queue_id)),
        }
    }

    pub(super) fn status(&self) -> Option<StoreStatus> {
        self.store.as_ref()?.get()
    }

    pub(super) fn note_status(&mut self, status: StoreStatus, took: Duration) {
        self.store = Slow::new(status, took);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_slow_count_is_used_again() {
        let mut counted = Counted::default();
        let many = QueueStats { ready: 1_000_000, ..QueueStats::default() };
        counted.note_stats(1, many, Duration::from_millis(99));
        assert_eq!(counted.stats(1).map(|stats| stats.ready), None);
        counted.note_stats(1, many, Duration::from_mins(1));
        assert_eq!(counted.stats(1).map(|stats| stats.ready), Some(1_000_000));
        assert_eq!(counted.stats(2).map(|stats| stats.ready), None, "another queue");
        counted.note_stats(1, QueueStats::default(), Duration::ZERO);
        assert_eq!(counted.stats(1).map(|stats| stats.ready), None, "the queue is small again");
    }
}
