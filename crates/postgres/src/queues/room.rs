//! What a queue with a quota has room for. Its messages are not counted for each send: an upper bound of what the queue holds
//! is kept, which sends add to and acks do not take from. Messages are counted only when the bound leaves no room, and that
//! is the new bound; and once a minute, so that it does not drift.
//!
//! Sends to such a queue, and whatever else brings messages into it, wait for each other: they lock the queue's row.

use std::time::Duration;

use hapax_core::{Quota, SendError};
use sqlx::{PgConnection, Row as _};

use super::Queue;
use super::counted::{TOOK, took, used_for};
use super::row::Table;
use crate::error::Failure;

/// A bound is used for this long.
const BOUND_MS_MAX: i64 = 60_000;

/// Messages and bytes.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Size {
    pub messages: u64,
    pub bytes: u64,
}

/// The room of a queue for one transaction.
pub(super) struct Room {
    queue_id: i32,
    revision: i64,
    quota: Quota,
    /// What the queue holds at most, with what was taken here.
    used: Size,
    /// When its messages were counted, and when they may be counted again; in milliseconds.
    counted_ms: i64,
    again_ms: i64,
    /// Whether [`note`](Self::note) has something to write.
    changed: bool,
}

impl Room {
    /// The room for messages that are `wanted` at most.
    pub async fn of(db: &mut PgConnection, queue: &Queue, wanted: Size) -> Result<Self, Failure> {
        let mut room = Self {
            queue_id: queue.id,
            revision: queue.revision.0 as i64,
            quota: queue.config.quota,
            used: Size::default(),
            counted_ms: 0,
            again_ms: 0,
            changed: false,
        };
        if room.quota == Quota::default() {
            return Ok(room);
        }
        lock(db, queue.id).await?;
        // The newest row by its number: those that were deleted, and cannot be vacuumed yet, lie behind it.
        let sql = "SELECT hapax.now_ms(), r.revision, r.messages, r.bytes, r.counted_ms, r.again_ms \
                   FROM (SELECT 1) one LEFT JOIN LATERAL (SELECT * FROM hapax.q_room r WHERE r.queue_id = $1 \
                   ORDER BY r.queue_id DESC, r.number DESC LIMIT 1) r ON true";
        let row = sqlx::query(sql).bind(queue.id).fetch_one(&mut *db).await?;
        let now_ms: i64 = row.try_get(0)?;
        let mut known = false;
        if row.try_get::<Option<i64>, _>(1)? == Some(room.revision) {
            let (messages, bytes): (i64, i64) = (row.try_get(2)?, row.try_get(3)?);
            room.used = Size { messages: messages as u64, bytes: bytes as u64 };
            (room.counted_ms, room.again_ms) = (row.try_get(4)?, row.try_get(5)?);
            known = now_ms < room.counted_ms + BOUND_MS_MAX;
        }
        if !(known && room.fits(wanted)) && now_ms >= room.again_ms {
            room.count(db, now_ms).await?;
        }
        Ok(room)
    }

    fn fits(&self, wanted: Size) -> bool {
        let fits = |used: u64, max: Option<u64>| max.is_none_or(|max| used <= max);
        fits(self.used.messages + wanted.messages, self.quota.messages_max)
            && fits(self.used.bytes + wanted.bytes, self.quota.bytes_max)
    }

    async fn count(&mut self, db: &mut PgConnection, now_ms: i64) -> Result<(), Failure> {
        let of = |table: Table| format!("SELECT bytes FROM {} WHERE queue_id = $1", table.name());
        let sql = format!(
            "SELECT count(*), coalesce(sum(bytes), 0)::bigint, {TOOK} FROM ({}) AS x",
            Table::ALL.map(of).join(" UNION ALL ")
        );
        let row = sqlx::query(&sql).bind(self.queue_id).fetch_one(db).await?;
        let (messages, bytes): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        self.used = Size { messages: messages as u64, bytes: bytes as u64 };
        // A slow count is used also if it leaves no room: the sends that are refused are repeated by their callers, and
        // counting must not be all that the database does. `now_ms` is the time before it.
        let took = took(&row)?;
        let pause = match used_for(took) {
            Duration::ZERO => Duration::ZERO,
            time => took + time,
        };
        (self.counted_ms, self.again_ms, self.changed) = (now_ms, now_ms + pause.as_millis() as i64, true);
        Ok(())
    }

    /// Takes room for one message, or says which quota it exceeds.
    pub fn take(&mut self, bytes: u64) -> Result<(), SendError> {
        let full = |quota: &str, used, max| SendError::QuotaExceeded { quota: quota.into(), used, max };
        let Size { messages: used, bytes: used_bytes } = self.used;
        if let Some(max) = self.quota.messages_max.filter(|max| used + 1 > *max) {
            return Err(full("quota.messages_max", used, max));
        }
        if let Some(max) = self.quota.bytes_max.filter(|max| used_bytes + bytes > *max) {
            return Err(full("quota.bytes_max", used_bytes, max));
        }
        self.used = Size { messages: used + 1, bytes: used_bytes + bytes };
        self.changed = true;
        Ok(())
    }

    /// Keeps the bound for the next transaction.
    pub async fn note(&self, db: &mut PgConnection) -> Result<(), Failure> {
        if self.quota == Quota::default() || !self.changed {
            return Ok(());
        }
        // Rows are inserted and deleted: an update would be slower with each one while a transaction is open for long.
        let sql = "WITH new AS (INSERT INTO hapax.q_room VALUES ($1, nextval('hapax.q_seq'), $2, $3, $4, $5, $6) RETURNING number) \
                   DELETE FROM hapax.q_room r USING new WHERE r.queue_id = $1 AND r.number < new.number";
        let note = sqlx::query(sql).bind(self.queue_id).bind(self.revision);
        let note = note.bind(self.used.messages as i64).bind(self.used.bytes as i64);
        note.bind(self.counted_ms).bind(self.again_ms).execute(db).await?;
        Ok(())
    }
}

async fn lock(db: &mut PgConnection, queue_id: i32) -> Result<(), sqlx::Error> {
    let lock = "SELECT 1 FROM hapax.q_queue WHERE id = $1 FOR NO KEY UPDATE";
    sqlx::query(lock).bind(queue_id).execute(db).await?;
    Ok(())
}

/// Messages come into a queue that were not sent to it, as dead letters do. The next send counts.
pub(super) async fn forget(db: &mut PgConnection, queue: &Queue) -> Result<(), sqlx::Error> {
    if queue.config.quota == Quota::default() {
        return Ok(());
    }
    lock(db, queue.id).await?;
    sqlx::query("DELETE FROM hapax.q_room WHERE queue_id = $1").bind(queue.id).execute(db).await?;
    Ok(())
}
