//! What time causes: leases and delays end, messages and remembered ids become too old, redrives move on. One task per
//! process; several processes share the work by skipping what another has locked.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hapax_core::store::QueueTotals;
use hapax_core::{GroupId, QueueName, StoreError};
use sqlx::{PgConnection, Row as _};
use tokio::sync::{Notify, watch};

use super::row::{COLUMNS, Message, Table};
use super::transaction::{Effects, finish, work_on_groups};
use super::work::Work;
use super::write;
use super::{Inner, Queue, catalogue, entries, lock};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);
/// Looks between two searches for redrives that another process has started.
const REDRIVE_EVERY: u64 = 4;
/// Messages of one transaction.
const BATCH: i64 = 200;
/// Shortest time between two searches for messages of a queue that are too old.
const AGE_PAUSE: Duration = Duration::from_secs(5);
/// Stands for the queues that were deleted. No queue has this number.
const GONE: i32 = 0;
/// Time between two looks for what was written to them.
const GONE_PAUSE: Duration = Duration::from_mins(1);

/// Settlement others reach the sweeper.
#[derive(Default)]
pub(super) struct Signals {
    wake: Notify,
    /// Rounds that were asked for, and rounds that are done.
    asked: Mutex<u64>,
    done: Done,
}

struct Done(watch::Sender<u64>);

impl Default for Done {
    fn default() -> Self {
        Self(watch::Sender::new(0))
    }
}

impl Signals {
    /// Something may be over earlier than at the next look.
    pub(super) fn sooner(&self) {
        self.wake.notify_one();
    }

    /// A whole round, as soon as possible.
    pub(super) fn now(&self) {
        *lock(&self.asked) += 1;
        self.wake.notify_one();
    }

    /// Waits for a whole round that begins now or later.
    pub(super) async fn done(&self) {
        self.now();
        let asked = *lock(&self.asked);
        let mut done = self.done.0.subscribe();
        // The sender lives as long as this.
        let _ = done.wait_for(|done| *done >= asked).await;
    }
}

/// Runs until the store is closed.
pub(super) async fn run(inner: Weak<Inner>) {
    let mut ages: HashMap<i32, Instant> = HashMap::new();
    let mut redrives = false;
    for number in 0u64.. {
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_closed()) else { return };
        let asked = *lock(&inner.sweeper.asked);
        let whole = asked > *inner.sweeper.done.0.borrow();
        if whole {
            ages.clear();
        }
        let look = whole || redrives || number.is_multiple_of(REDRIVE_EVERY);
        match round(&inner, &mut ages, look).await {
            Ok(running) => redrives = running,
            Err(error) => tracing::debug!(%error, "what time causes in the queues is done later"),
        }
        inner.sweeper.done.0.send_replace(asked);
        let again = *lock(&inner.sweeper.asked) > asked;
        let wait =
            tokio::time::timeout(if again { Duration::ZERO } else { PAUSE }, inner.sweeper.wake.notified());
        let _ = wait.await;
    }
}

/// One look at everything; says whether a redrive is running.
async fn round(
    inner: &Arc<Inner>,
    ages: &mut HashMap<i32, Instant>,
    redrives: bool,
) -> Result<bool, StoreError> {
    let all = inner.all_queues().await?;
    for (queue, due, settled) in &all {
        if *settled {
            inner.follow_settled(queue).await?;
        }
        if *due {
            inner.sweep(queue).await?;
        }
    }
    for (queue, ..) in &all {
        let pause = Duration::from_millis(queue.config.retention_ms / 100).max(AGE_PAUSE);
        if ages.get(&queue.id).is_none_or(|last| last.elapsed() >= pause) {
            ages.insert(queue.id, Instant::now());
            inner.drop_old(queue).await?;
        }
    }
    if ages.get(&GONE).is_none_or(|last| last.elapsed() >= GONE_PAUSE) {
        ages.insert(GONE, Instant::now());
        inner.empty_gone().await?;
    }
    ages.retain(|id, _| *id == GONE || all.iter().any(|(queue, ..)| queue.id == *id));
    if redrives { inner.redrive_on().await } else { Ok(false) }
}

impl Inner {
    /// Every queue, whether time has something to do there, and whether a user's transaction has ended a delivery whose end
    /// was not followed.
    async fn all_queues(&self) -> Result<Vec<(Queue, bool, bool)>, StoreError> {
        let ids: Vec<i32> = lock(&self.floors).keys().copied().collect();
        let from: Vec<i64> = ids.iter().map(|id| self.sweep_from(*id)).collect();
        let read = self.base.pool.run_here("look at the queues", Access::Read, move |db| {
            Box::pin(async move {
                let sql = format!(
                    "SELECT {}, p.due, p.blocked, p.now_ms AS at_ms, \
                     EXISTS (SELECT 1 FROM hapax.q_settled s WHERE s.queue_id = q.id) AS settled \
                     FROM hapax.q_queue q, LATERAL \
                     hapax.q_probe(q.id, coalesce(($2::bigint[])[array_position($1::int[], q.id)], 0)) p",
                    catalogue::COLUMNS
                );
                let rows = sqlx::query(&sql).bind(ids).bind(from).fetch_all(db).await?;
                let read = |row: &sqlx::postgres::PgRow| {
                    let (due, blocked): (bool, bool) = (row.try_get("due")?, row.try_get("blocked")?);
                    let at_ms: i64 = row.try_get("at_ms")?;
                    let swept = (!due && !blocked).then_some(at_ms as u64);
                    Ok((Queue::read(row)?, due, row.try_get("settled")?, swept))
                };
                rows.iter().map(read).collect::<Result<Vec<_>, Failure>>()
            })
        });
        let all = read.await?;
        for (queue, .., swept) in &all {
            if let Some(at_ms) = swept {
                self.note_swept(queue.id, *at_ms);
            }
        }
        Ok(all.into_iter().map(|(queue, due, settled, _)| (queue, due, settled)).collect())
    }

    /// Does what time has caused in a queue. Returns whether anything was done.
    pub(super) async fn sweep(&self, queue: &Queue) -> Result<bool, StoreError> {
        let turn = lock(&self.sweeps).entry(queue.id).or_default().clone();
        let _turn = turn.lock().await;
        let mut any = false;
        loop {
            let (name, fifo, from) = (queue.name.clone(), queue.config.is_fifo(), self.swept_from(queue.id));
            let swept = self.transact("end leases and delays", move |db| {
                let name = name.clone();
                Box::pin(async move {
                    if fifo {
                        sweep_groups(db, &name, from).await
                    } else {
                        sweep_plain(db, &name, from).await
                    }
                }) as BoxFuture<'_, _>
            });
            let (count, effects): (usize, Effects) = swept.await?;
            self.publish(&effects);
            any |= count > 0;
            if count < BATCH as usize {
                return Ok(any);
            }
        }
    }

    /// Deletes what is too old: messages and remembered deduplication ids.
    async fn drop_old(&self, queue: &Queue) -> Result<(), StoreError> {
        loop {
            let name = queue.name.clone();
            let dropped = self.transact("drop what is too old", move |db| {
                let name = name.clone();
                Box::pin(async move { drop_old(db, &name).await }) as BoxFuture<'_, _>
            });
            let (count, effects): (u64, Effects) = dropped.await?;
            self.publish(&effects);
            if count < BATCH as u64 {
                return Ok(());
            }
        }
    }
}

/// A queue that time changes: it exists, and is not closed.
async fn open_queue(db: &mut PgConnection, name: &QueueName) -> Result<Option<Queue>, Failure> {
    Ok(Queue::find(db, name).await?.filter(|queue| !queue.is_closed()))
}

/// Ends leases and delays of a standard queue; gives how many messages it moved.
async fn sweep_plain(
    db: &mut PgConnection,
    name: &QueueName,
    from: i64,
) -> Result<(usize, Effects), Failure> {
    let Some(queue) = open_queue(db, name).await? else { return Ok((0, Effects::default())) };
    let sql = format!(
        "SELECT {COLUMNS} FROM hapax.q_claim WHERE queue_id = $1 AND until_ms > $3 AND until_ms <= hapax.now_ms() \
         AND hapax.started_ms() + coalesce(lease_ms, 0) <= hapax.now_ms() \
         ORDER BY until_ms LIMIT $2 FOR UPDATE SKIP LOCKED"
    );
    let rows = sqlx::query(&sql).bind(queue.id).bind(BATCH).bind(from).fetch_all(&mut *db).await?;
    let lapsed = rows.iter().map(Message::read).collect::<Result<Vec<_>, _>>()?;
    let dead = if lapsed.is_empty() { None } else { queue.dead_letters(db).await? };
    let mut count = lapsed.len();
    let mut effects = Effects { queue_id: queue.id, ..Effects::default() };
    if !lapsed.is_empty() {
        let (now_ms, numbers) = write::draw(db, 2 * lapsed.len()).await?;
        let started_ms = write::started_ms(db).await?;
        let mut work = Work::new(now_ms, &queue, dead.as_ref(), numbers);
        for message in lapsed {
            work.add(Table::Claim, message);
        }
        work.lapse(started_ms);
        effects = finish(db, &work, &super::transaction::Held::default()).await?;
    }
    let promoted: i64 = sqlx::query_scalar("SELECT hapax.q_promote($1, $2, $3)")
        .bind(queue.id)
        .bind(from)
        .bind(BATCH as i32)
        .fetch_one(db)
        .await?;
    effects.freed.extend((promoted > 0).then_some(queue.id));
    count = count.max(promoted as usize);
    Ok((count, effects))
}

/// The same for a FIFO queue.
async fn sweep_groups(
    db: &mut PgConnection,
    name: &QueueName,
    from: i64,
) -> Result<(usize, Effects), Failure> {
    let Some(queue) = open_queue(db, name).await? else { return Ok((0, Effects::default())) };
    let dead = queue.dead_letters(db).await?;
    let sql = "SELECT DISTINCT grp FROM ((SELECT grp FROM hapax.q_claim WHERE queue_id = $1 AND until_ms > $3 \
               AND until_ms <= hapax.now_ms() AND hapax.started_ms() + coalesce(lease_ms, 0) <= hapax.now_ms() ORDER BY until_ms LIMIT $2) UNION ALL \
               (SELECT grp FROM hapax.q_head WHERE queue_id = $1 AND due_ms > $3 AND due_ms <= hapax.now_ms() ORDER BY due_ms LIMIT $2)) x";
    let groups: Vec<String> =
        sqlx::query_scalar(sql).bind(queue.id).bind(BATCH).bind(from).fetch_all(&mut *db).await?;
    let groups: Vec<GroupId> = groups.into_iter().filter_map(|group| GroupId::new(group).ok()).collect();
    if groups.is_empty() {
        return Ok((0, Effects { queue_id: queue.id, ..Effects::default() }));
    }
    let (work, held) = work_on_groups(db, &queue, dead.as_ref(), &groups).await?;
    let mut effects = finish(db, &work, &held).await?;
    effects.freed.insert(queue.id);
    Ok((groups.len(), effects))
}

/// Deletes messages that wait and are too old, unless their group is halted or waits for them.
async fn drop_old(db: &mut PgConnection, name: &QueueName) -> Result<(u64, Effects), Failure> {
    let Some(queue) = open_queue(db, name).await? else { return Ok((0, Effects::default())) };
    let (now_ms, _) = write::draw(db, 0).await?;
    let before_ms = now_ms.saturating_sub(queue.config.retention_ms) as i64;
    let mut count = 0;
    let mut effects = Effects { queue_id: queue.id, ..Effects::default() };
    if queue.config.is_fifo() {
        let sql = "SELECT f.seq FROM hapax.q_fifo f WHERE f.queue_id = $1 AND f.retained_ms < $2 \
                   AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.queue_id = $1 AND u.grp = f.grp) \
                   AND NOT EXISTS (SELECT 1 FROM hapax.q_undecided u WHERE u.id_hi = f.id_hi \
                     AND u.id_lo = coalesce(f.id_lo, (1::bigint << 63) | f.seq)) LIMIT $3";
        let seqs: Vec<i64> =
            sqlx::query_scalar(sql).bind(queue.id).bind(before_ms).bind(BATCH).fetch_all(&mut *db).await?;
        if !seqs.is_empty() {
            let seqs: Vec<u64> = seqs.into_iter().map(|seq| seq as u64).collect();
            let dead = queue.dead_letters(db).await?;
            let (mut work, held) = super::transaction::work_on(db, &queue, dead.as_ref(), &seqs, &[]).await?;
            let still: Vec<u64> = work
                .items
                .values()
                .filter(|item| item.table == Some(Table::Fifo) && item.message.retained_ms < before_ms as u64)
                .map(|item| item.message.seq)
                .filter(|seq| seqs.contains(seq))
                .collect();
            for seq in &still {
                work.end(*seq);
            }
            count = still.len() as u64;
            effects = finish(db, &work, &held).await?;
            effects.totals.retention_dropped += count;
        }
    } else {
        for table in ["hapax.q_ready", "hapax.q_due"] {
            let sql = format!(
                "DELETE FROM {table} WHERE ctid = ANY(ARRAY(SELECT ctid FROM {table} WHERE queue_id = $1 \
                 AND retained_ms < $2 LIMIT $3 FOR UPDATE SKIP LOCKED)) RETURNING seq"
            );
            let rows =
                sqlx::query(&sql).bind(queue.id).bind(before_ms).bind(BATCH).fetch_all(&mut *db).await?;
            count += rows.len() as u64;
        }
        effects.totals = QueueTotals { retention_dropped: count, ..QueueTotals::default() };
    }
    entries::forget_gone(db, &queue).await?;
    let over_ms = now_ms.saturating_sub(queue.config.dedup.window_ms) as i64;
    let sql = "DELETE FROM hapax.q_dedup WHERE ctid = ANY(ARRAY(SELECT ctid FROM hapax.q_dedup WHERE queue_id = $1 \
               AND first_ms <= $2 LIMIT 2000 FOR UPDATE SKIP LOCKED))";
    sqlx::query(sql).bind(queue.id).bind(over_ms).execute(&mut *db).await?;
    let sql = "DELETE FROM hapax.q_attempt WHERE queue_id = $1 AND since_ms + $2 <= $3";
    let attempts = sqlx::query(sql).bind(queue.id).bind(hapax_core::policy::ATTEMPT_ID_MS as i64);
    attempts.bind(now_ms as i64).execute(db).await?;
    Ok((count, effects))
}
