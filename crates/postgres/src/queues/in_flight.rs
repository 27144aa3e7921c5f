//! The limit of messages in flight. There is no row that every delivery would update: each process counts leases from time to
//! time, and in between relies on the last count for as long as the limit is far away.

use std::time::{Duration, Instant};

use hapax_core::StoreError;
use hapax_core::policy::IN_FLIGHT_MAX;
use sqlx::Row as _;

use super::counted::{TOOK, took, used_for};
use super::{Inner, Queue, lock};
use crate::error::Access;

/// The longest use of a count that was not slow: other processes deliver too.
const KNOWN_MAX: Duration = Duration::from_secs(5);
/// A process delivers this part of the room that it has counted, then it counts again. So as many processes do not exceed
/// the limit together.
const PART: u64 = 8;

/// The last count of a queue.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counted {
    in_flight: u64,
    /// Deliveries of this process since.
    delivered: u64,
    until: Instant,
}

impl Counted {
    /// How many more can be delivered without another count.
    fn room(&self, now: Instant) -> u64 {
        let room = IN_FLIGHT_MAX.saturating_sub(self.in_flight) / PART;
        if now < self.until { room.saturating_sub(self.delivered) } else { 0 }
    }
}

impl Inner {
    /// How many messages of a queue may be leased now, at most as many as asked for.
    pub(super) async fn in_flight_room(&self, queue: &Queue, asked: u64) -> Result<u64, StoreError> {
        let known = lock(&self.in_flight).get(&queue.id).map(|counted| counted.room(Instant::now()));
        if known.is_some_and(|room| room >= asked) {
            return Ok(asked);
        }
        let id = queue.id;
        let count = self.base.pool.run_here("count leases", Access::Read, move |db| {
            Box::pin(async move {
                // Behind the time, so that leases which have ended long ago, and are only not vacuumed, are not walked over.
                let sql = format!(
                    "SELECT count(*), {TOOK} FROM (SELECT 1 FROM hapax.q_claim WHERE queue_id = $1 \
                     AND until_ms > (SELECT hapax.now_ms()) LIMIT $2) x"
                );
                let count = sqlx::query(&sql).bind(id).bind(IN_FLIGHT_MAX as i64);
                let row = count.fetch_one(db).await?;
                Ok((row.try_get::<i64, _>(0)? as u64, took(&row)?))
            })
        });
        let (in_flight, took) = count.await?;
        let until = Instant::now() + KNOWN_MAX.max(used_for(took));
        lock(&self.in_flight).insert(queue.id, Counted { in_flight, delivered: 0, until });
        Ok(IN_FLIGHT_MAX.saturating_sub(in_flight).min(asked))
    }

    /// This process has delivered so much.
    pub(super) fn note_delivered(&self, queue_id: i32, delivered: u64) {
        if let Some(counted) = lock(&self.in_flight).get_mut(&queue_id) {
            counted.delivered += delivered;
        }
    }
}
