//! Transactions: everything that is not a single statement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hapax_core::{GroupId, MessageId, StoreError};
use sqlx::{Executor as _, PgConnection, Row as _};

use super::row::{Message, Table, halves};
use super::work::Work;
use super::write::{self, GroupOf};
use super::{Inner, Queue, entries};
use crate::BoxFuture;
use crate::error::{Access, Failure};
use crate::transaction::Transaction;

/// The plans of the rare statements, too, must not depend on statistics: tables that are empty at times mislead them.
const PLANS: &str =
    "SET LOCAL enable_seqscan = off; SET LOCAL enable_hashjoin = off; SET LOCAL enable_mergejoin = off";

impl Inner {
    /// Runs a transaction, in a task of its own: a caller that is dropped does not interrupt it. If it loses against
    /// another one, it is repeated.
    pub(super) async fn transact<T, F>(&self, what: &'static str, run: F) -> Result<T, StoreError>
    where
        T: Send + 'static,
        F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync + 'static,
    {
        let run = Arc::new(run);
        self.base
            .pool
            .repeat(what, Access::Write, move |db| {
                let run = run.clone();
                Box::pin(async move { once(db, &*run).await })
            })
            .await
    }
}

async fn once<T, F>(connection: &mut PgConnection, run: &F) -> Result<T, Failure>
where
    F: for<'c> Fn(&'c mut PgConnection) -> BoxFuture<'c, Result<T, Failure>> + Send + Sync,
{
    let mut transaction = Transaction::begin(connection).await?;
    let done = match transaction.execute(PLANS).await {
        Ok(_) => run(&mut transaction).await,
        Err(error) => Err(error.into()),
    };
    transaction.end(done).await
}

/// What a transaction holds locked.
#[derive(Default)]
pub(super) struct Held {
    pub groups: BTreeSet<GroupOf>,
}

/// What a transaction did that calls outside of it have to know.
#[derive(Debug, Clone, Default)]
pub(super) struct Effects {
    pub queue_id: i32,
    pub totals: hapax_core::store::QueueTotals,
    /// Queues in which something can be received that could not before.
    pub freed: BTreeSet<i32>,
}

impl Effects {
    pub(super) fn of(work: &Work<'_>, held: &Held) -> Self {
        let mut freed = BTreeSet::new();
        freed.extend(work.freed.then_some(work.queue.id));
        freed.extend(work.dead.filter(|_| work.died).map(|dead| dead.id));
        freed.extend(held.groups.iter().map(|(queue_id, _)| *queue_id).filter(|_| !work.decided.is_empty()));
        Self { queue_id: work.queue.id, totals: work.totals, freed }
    }
}

impl Inner {
    /// After the commit: counts, and wakes who waits.
    pub(super) fn publish(&self, effects: &Effects) {
        self.count(effects.queue_id, &effects.totals);
        for queue_id in &effects.freed {
            self.freed(*queue_id);
        }
    }
}

/// The groups that changes to messages may touch: their own, the same in the dead-letter queue, and groups that wait for
/// them elsewhere.
pub(super) async fn groups(
    db: &mut PgConnection,
    queue: &Queue,
    dead: Option<&Queue>,
    names: &[GroupId],
    ids: &[MessageId],
) -> Result<BTreeSet<GroupOf>, Failure> {
    let mut all: BTreeSet<GroupOf> = names.iter().map(|group| (queue.id, group.clone())).collect();
    if let Some(dead) = dead {
        all.extend(names.iter().map(|group| (dead.id, group.clone())));
    }
    let (highs, lows): (Vec<i64>, Vec<i64>) =
        ids.iter().map(|id| halves(*id)).map(|(high, low)| (high as i64, low as i64)).unzip();
    let sql = "SELECT queue_id, grp FROM hapax.q_undecided u WHERE (u.id_lo, u.id_hi) IN \
               (SELECT * FROM unnest($1::bigint[], $2::bigint[]))";
    for row in sqlx::query(sql).bind(lows).bind(highs).fetch_all(db).await? {
        let group = GroupId::new(row.try_get::<String, _>("grp")?);
        all.extend(group.ok().map(|group| (row.get("queue_id"), group)));
    }
    Ok(all)
}

/// Locks messages, on a FIFO queue with all that their groups have in flight, and does first what time has caused.
pub(super) async fn work_on<'q>(
    db: &mut PgConnection,
    queue: &'q Queue,
    dead: Option<&'q Queue>,
    seqs: &[u64],
    ids: &[MessageId],
) -> Result<(Work<'q>, Held), Failure> {
    let mut held = Held::default();
    let mut found: BTreeMap<u64, (Table, Message)> = BTreeMap::new();
    if queue.config.is_fifo() {
        let names = write::groups_of(db, queue.id, seqs).await?;
        held.groups = groups(db, queue, dead, &names, ids).await?;
        write::lock_groups(db, &held.groups).await?;
        let flight = write::in_flight(db, queue.id, &names).await?;
        found.extend(flight.into_iter().map(|message| (message.seq, (Table::Claim, message))));
    }
    let missing: Vec<u64> = seqs.iter().copied().filter(|seq| !found.contains_key(seq)).collect();
    let locked = write::lock(db, queue.id, &missing).await?;
    found.extend(locked.into_iter().map(|(table, message)| (message.seq, (table, message))));
    let (now_ms, numbers) = write::draw(db, 2 * found.len()).await?;
    let started_ms = write::started_ms(db).await?;
    let mut work = Work::new(now_ms, queue, dead, numbers);
    for (table, message) in found.into_values() {
        work.add(table, message);
    }
    work.lapse(started_ms);
    Ok((work, held))
}

/// The deliveries of FIFO groups, locked; what time has caused is done.
pub(super) async fn work_on_groups<'q>(
    db: &mut PgConnection,
    queue: &'q Queue,
    dead: Option<&'q Queue>,
    names: &[GroupId],
) -> Result<(Work<'q>, Held), Failure> {
    let mut held = Held { groups: groups(db, queue, dead, names, &[]).await? };
    write::lock_groups(db, &held.groups).await?;
    // A user's transaction may be ending a delivery of a group, and may take long; its group is left alone until then.
    let busy = write::busy_groups(db, queue.id, names).await?;
    held.groups.retain(|(queue_id, group)| *queue_id != queue.id || !busy.contains(group));
    let names: Vec<GroupId> = names.iter().filter(|name| !busy.contains(name)).cloned().collect();
    let flight = write::in_flight(db, queue.id, &names).await?;
    let (now_ms, numbers) = write::draw(db, 2 * flight.len()).await?;
    let started_ms = write::started_ms(db).await?;
    let mut work = Work::new(now_ms, queue, dead, numbers);
    for message in flight {
        work.add(Table::Claim, message);
    }
    work.lapse(started_ms);
    Ok((work, held))
}

/// Writes what was decided, and announces what can be delivered then.
pub(super) async fn finish(db: &mut PgConnection, work: &Work<'_>, held: &Held) -> Result<Effects, Failure> {
    write::write(db, work).await?;
    entries::follow(db, work).await?;
    let mut groups = held.groups.clone();
    groups.extend(write::unhalt_everywhere(db, &work.decided, work.now_ms).await?);
    write::announce(db, &groups, work.change()).await?;
    Ok(Effects::of(work, held))
}
