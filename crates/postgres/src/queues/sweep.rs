//! What time causes: leases and delays end, messages and remembered ids become too old, redrives move on. One task per
//! process; several processes share the work by skipping what another has locked. Its look at all queues, one statement,
//! also finds what calls of this process wait for, so that many waiting calls cost no more than one.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use hapax_core::store::QueueTotals;
use hapax_core::{GroupId, QueueName, StoreError};
use sqlx::{PgConnection, Row as _};
use tokio::sync::{Notify, OwnedMutexGuard, watch};

use super::row::{COLUMNS, Message, Table};
use super::transaction::{Effects, finish, work_on_groups};
use super::work::Work;
use super::write;
use super::{Inner, Queue, catalogue, entries, floors, lock};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(500);
/// A look foresees what ends within this time, in milliseconds; see `hapax.q_probe`.
pub(super) const FORESEEN_MS: u64 = 1_000;
/// The shortest, while calls wait, no hints arrive, and something was found.
const PAUSE_MIN: Duration = Duration::from_millis(50);
/// The shortest time until a look for a lease or a delay that ends soon.
const NEXT_MIN: Duration = Duration::from_millis(20);
/// Messages of one transaction.
const BATCH: i64 = 200;
/// Empty groups that are removed by one transaction.
const GROUPS: i64 = 1_000;
/// Shortest time between two searches for messages of a queue that are too old.
const AGE_PAUSE: Duration = Duration::from_secs(5);
/// Stands for the queues that were deleted. No queue has this number.
const GONE: i32 = 0;
/// Time between two looks for what was written to them.
const GONE_PAUSE: Duration = Duration::from_mins(1);

/// How others reach the sweeper.
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
    let ages = Arc::new(tokio::sync::Mutex::new(Ages::new()));
    let mut pause = PAUSE;
    loop {
        let Some(inner) = inner.upgrade().filter(|inner| !inner.is_closed()) else { return };
        let asked = *lock(&inner.sweeper.asked);
        let whole = asked > *inner.sweeper.done.0.borrow();
        let mut next = PAUSE;
        inner.keep_floor().await;
        match inner.look_at_all().await {
            Ok(look) => {
                // Without hints, what other processes send is found by looking: more often after something was found.
                let alone = look.waits && !inner.base.hints.is_listening();
                pause = match (alone, look.found) {
                    (false, _) => PAUSE,
                    (true, true) => PAUSE_MIN,
                    (true, false) => (pause * 2).min(PAUSE),
                };
                next = look.next.map_or(pause, |next| next.clamp(NEXT_MIN, pause));
                if whole {
                    let mut ages = ages.clone().lock_owned().await;
                    ages.clear();
                    work(&inner, ages, look).await;
                } else if let Ok(ages) = ages.clone().try_lock_owned() {
                    // In a task of its own: calls that wait are looked after meanwhile.
                    let worker = inner.clone();
                    inner.base.pool.runtime().spawn(async move { work(&worker, ages, look).await });
                }
            }
            Err(error) => tracing::debug!(%error, "what time causes in the queues is done later"),
        }
        inner.sweeper.done.0.send_replace(asked);
        let again = *lock(&inner.sweeper.asked) > asked;
        let wait =
            tokio::time::timeout(if again { Duration::ZERO } else { next }, inner.sweeper.wake.notified());
        let _ = wait.await;
    }
}

/// When the messages of each queue were last looked through for those that are too old.
type Ages = HashMap<i32, Instant>;

/// What one look at all queues has found.
struct LookAround {
    /// Every queue, whether time has something to do there, and whether a user's transaction has ended a delivery whose end
    /// was not followed.
    queues: Vec<(Queue, bool, bool)>,
    /// A redrive is running.
    redrives: bool,
    /// Calls of this process wait.
    waits: bool,
    /// Some of them have something to receive.
    found: bool,
    /// The time until a lease or a delay ends in a queue that calls wait for, if it is short.
    next: Option<Duration>,
}

/// Does what a look has found to do. What fails is done after another look.
async fn work(inner: &Arc<Inner>, mut ages: OwnedMutexGuard<Ages>, look: LookAround) {
    for (queue, due, settled) in &look.queues {
        if *settled && let Err(error) = inner.follow_settled(queue).await {
            tracing::debug!(%error, queue = %queue.name, "what users' transactions have ended is followed later");
        }
        if *due && let Err(error) = inner.sweep(queue).await {
            tracing::debug!(%error, queue = %queue.name, "leases and delays are ended later");
        }
    }
    for (queue, ..) in &look.queues {
        let pause = Duration::from_millis(queue.config.retention_ms / 100).max(AGE_PAUSE);
        if ages.get(&queue.id).is_none_or(|last| last.elapsed() >= pause) {
            ages.insert(queue.id, Instant::now());
            if let Err(error) = inner.drop_old(queue).await {
                tracing::debug!(%error, queue = %queue.name, "what is too old is dropped later");
            }
        }
    }
    if ages.get(&GONE).is_none_or(|last| last.elapsed() >= GONE_PAUSE) {
        ages.insert(GONE, Instant::now());
        if let Err(error) = inner.empty_gone().await {
            tracing::debug!(%error, "deleted queues are emptied later");
        }
    }
    ages.retain(|id, _| *id == GONE || look.queues.iter().any(|(queue, ..)| queue.id == *id));
    if look.redrives
        && let Err(error) = inner.redrive_on().await
    {
        tracing::debug!(%error, "redrives are continued later");
    }
}

/// The places behind which to look for what waiting calls can receive, one for each queue and priority.
#[derive(Default)]
struct Waiting {
    queues: Vec<i32>,
    priorities: Vec<i16>,
    floors: Vec<i64>,
}

impl Inner {
    /// The queues that calls of this process wait for, with the versions that it knows.
    fn waited_for(&self) -> HashMap<i32, Option<Arc<Queue>>> {
        let waited: Vec<i32> = lock(&self.feeds)
            .iter()
            .filter(|(_, feed)| feed.is_waited_for())
            .map(|(queue_id, _)| *queue_id)
            .collect();
        let known: HashMap<i32, Arc<Queue>> =
            lock(&self.known).values().map(|queue| (queue.id, queue.clone())).collect();
        waited.into_iter().map(|id| (id, known.get(&id).cloned())).collect()
    }

    fn waiting<'q>(&self, waited: impl Iterator<Item = &'q Arc<Queue>>) -> Waiting {
        let mut waiting = Waiting::default();
        for queue in waited {
            let priorities = floors::priorities(queue);
            let floors = self.floors(queue, &priorities);
            waiting.queues.extend(std::iter::repeat_n(queue.id, priorities.len()));
            waiting.priorities.extend(priorities);
            waiting.floors.extend(floors);
        }
        waiting
    }

    /// One statement that looks at all queues: what time has to do, and whether there is something for calls that wait. They
    /// are woken if so.
    async fn look_at_all(&self) -> Result<LookAround, StoreError> {
        let ids: Vec<i32> = lock(&self.floors).keys().copied().collect();
        let from: Vec<i64> = ids.iter().map(|id| self.sweep_from(*id)).collect();
        let waited = self.waited_for();
        let asked = Arc::new((ids, from, self.waiting(waited.values().flatten())));
        let args = asked.clone();
        let read = self.base.pool.run_here("look at the queues", Access::Read, move |db| {
            Box::pin(async move { Seen::read(db, &args.0, &args.1, &args.2).await })
        });
        let all = read.await.inspect_err(|_| {
            // A look further back is made only now and then.
            for id in waited.keys() {
                self.note_seen(*id, asked.2.of(*id).filter(floors::is_bounded));
            }
        })?;
        let is_here = |id: &i32| all.iter().any(|seen| seen.queue.id == *id);
        for id in asked.0.iter().filter(|id| !is_here(id)) {
            self.forget_places(*id);
        }
        let mut look = LookAround {
            queues: Vec::new(),
            redrives: all.iter().any(|seen| seen.redrives),
            waits: !waited.is_empty(),
            found: false,
            next: None,
        };
        let mut gone: BTreeSet<i32> = waited.keys().copied().collect();
        for seen in all {
            let id = seen.queue.id;
            if seen.swept {
                self.note_swept(id, seen.now_ms);
            }
            if let Some(known) = waited.get(&id) {
                gone.remove(&id);
                let changed = known.as_ref().is_none_or(|known| known.version != seen.queue.version);
                if seen.ready || seen.queue.paused.is_some() {
                    self.note_seen(id, asked.2.of(id));
                }
                if seen.ready || changed {
                    look.found = true;
                    self.kick(id);
                }
                let next = seen.next_ms.map(|ms| Duration::from_millis(ms.saturating_sub(seen.now_ms)));
                look.next = look.next.into_iter().chain(next).min();
            }
            look.queues.push((seen.queue, seen.due, seen.settled));
        }
        // Who waits for a queue that is gone is told so.
        for id in gone {
            self.kick(id);
        }
        Ok(look)
    }
}

impl Waiting {
    /// The places of a queue.
    fn of(&self, queue_id: i32) -> impl Iterator<Item = (i16, i64)> {
        let places = self.priorities.iter().copied().zip(self.floors.iter().copied());
        let own = self.queues.iter().zip(places).filter(move |(id, _)| **id == queue_id);
        own.map(|(_, place)| place)
    }
}

/// What the look has seen of a queue.
struct Seen {
    queue: Queue,
    now_ms: u64,
    /// A lease or a delay is over.
    due: bool,
    /// When the next one is, if within a second.
    next_ms: Option<u64>,
    /// No lease and no delay is over.
    swept: bool,
    /// There is something to receive.
    ready: bool,
    /// A user's transaction has ended a delivery whose end was not followed.
    settled: bool,
    /// A redrive is running, in any queue.
    redrives: bool,
}

impl Seen {
    async fn read(
        db: &mut PgConnection,
        ids: &[i32],
        from: &[i64],
        waiting: &Waiting,
    ) -> Result<Vec<Self>, Failure> {
        let sql = format!(
            "SELECT {}, p.due, p.blocked, p.next_ms, p.now_ms AS at_ms, \
               paused IS NULL AND q.id = ANY(ARRAY(SELECT hapax.q_waiting($3, $4, $5))) AS ready, \
               EXISTS (SELECT 1 FROM hapax.q_settled s WHERE s.queue_id = q.id) AS settled, \
               EXISTS (SELECT 1 FROM hapax.q_redrive r WHERE r.running) AS redrives \
             FROM hapax.q_queue q, LATERAL \
             hapax.q_probe(q.id, coalesce(($2::bigint[])[array_position($1::int[], q.id)], 0)) p",
            catalogue::COLUMNS
        );
        let look = sqlx::query(&sql).bind(ids).bind(from).bind(&waiting.queues).bind(&waiting.priorities);
        let mut all = Vec::new();
        for row in look.bind(&waiting.floors).fetch_all(db).await? {
            let queue = match Queue::read(&row) {
                Ok(queue) => queue,
                Err(error) => {
                    // The other queues are not held up by it.
                    tracing::error!(%error, "a queue's row cannot be read");
                    continue;
                }
            };
            let (due, blocked): (bool, bool) = (row.try_get("due")?, row.try_get("blocked")?);
            all.push(Self {
                queue,
                now_ms: row.try_get::<i64, _>("at_ms")? as u64,
                due,
                next_ms: row.try_get::<Option<i64>, _>("next_ms")?.map(|ms| ms as u64),
                swept: !due && !blocked,
                ready: row.try_get("ready")?,
                settled: row.try_get("settled")?,
                redrives: row.try_get("redrives")?,
            });
        }
        Ok(all)
    }
}

impl Inner {
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
    // The time as a subquery: it is asked for once, and ends the walk through the index.
    let sql = format!(
        "SELECT {COLUMNS} FROM hapax.q_claim WHERE queue_id = $1 AND until_ms > $3 AND until_ms <= (SELECT hapax.now_ms()) \
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
               AND until_ms <= (SELECT hapax.now_ms()) AND hapax.started_ms() + coalesce(lease_ms, 0) <= hapax.now_ms() \
               ORDER BY until_ms LIMIT $2) UNION ALL \
               (SELECT grp FROM hapax.q_head WHERE queue_id = $1 AND due_ms > $3 AND due_ms <= (SELECT hapax.now_ms()) ORDER BY due_ms LIMIT $2)) x";
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

/// Deletes the rows of FIFO groups that have no message. A row is locked first, and looked at by a statement that begins after
/// that: what a holder of the lock has added before is seen, and who waits for the lock finds the row gone and makes it again.
async fn drop_empty_groups(db: &mut PgConnection, queue_id: i32) -> Result<(), Failure> {
    // With EXISTS, PostgreSQL 18 reads a table from end to end, though it was told not to.
    let has = |(table, behind): (&str, &str)| {
        format!(
            "(SELECT 1 FROM hapax.{table} x WHERE x.queue_id = g.queue_id AND x.grp = g.grp{behind} LIMIT 1) IS NOT NULL"
        )
    };
    let tables = [
        ("q_fifo", " AND x.seq >= g.low"),
        ("q_claim", " AND x.seq >= g.low"),
        ("q_undecided", ""),
        ("q_head", " AND x.turn >= g.low"),
        ("q_parked", ""),
    ];
    let used = tables.map(has).join(" OR ");
    let sql = format!(
        "SELECT g.grp FROM hapax.q_group g WHERE g.queue_id = $1 AND NOT ({used}) ORDER BY g.grp LIMIT $2 \
         FOR UPDATE OF g SKIP LOCKED"
    );
    let empty: Vec<String> = sqlx::query_scalar(&sql).bind(queue_id).bind(GROUPS).fetch_all(&mut *db).await?;
    if !empty.is_empty() {
        let sql =
            format!("DELETE FROM hapax.q_group g WHERE g.queue_id = $1 AND g.grp = ANY($2) AND NOT ({used})");
        sqlx::query(&sql).bind(queue_id).bind(empty).execute(db).await?;
    }
    Ok(())
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
        drop_empty_groups(db, queue.id).await?;
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
