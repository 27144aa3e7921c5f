//! Deliveries that a user's transaction has ended, and what follows from that after its commit.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use hapax_core::store::QueueTotals;
use hapax_core::{GroupId, MessageId, QueueName, Receipt, StoreError};
use sqlx::postgres::PgArguments;
use sqlx::query::Query;
use sqlx::{PgConnection, Postgres, Row as _};

use super::receipt::Named;
use super::row::id_of;
use super::transaction::{Effects, Held, finish, groups};
use super::work::Work;
use super::{Inner, Queue, Queues, lock, write};
use crate::BoxFuture;
use crate::error::{Access, Failure};

/// Ends followed in one transaction.
const BATCH: i64 = 200;

/// A delivery that a user's transaction is about to end. While it exists, heartbeats of this process leave the delivery
/// alone: its row is locked.
pub(crate) struct Ending {
    inner: Arc<Inner>,
    named: Named,
}

impl Queues {
    /// Whether this database made the receipt.
    pub fn is_own(&self, receipt: &Receipt) -> bool {
        Named::parse(&self.inner.base.seal, receipt).is_some()
    }

    /// The delivery of a receipt, if this database made it.
    pub fn ending(&self, receipt: &Receipt) -> Option<Ending> {
        let named = Named::parse(&self.inner.base.seal, receipt)?;
        lock(&self.inner.ending).insert((named.seq, named.fence));
        Some(Ending { inner: self.inner.clone(), named })
    }
}

impl Ending {
    /// Locks the delivery's row until the caller's transaction ends; `false`: the delivery is over.
    pub async fn hold(&self, db: &mut PgConnection) -> Result<bool, sqlx::Error> {
        let Named { queue_id, seq, fence, .. } = self.named;
        let sql =
            "SELECT 1 FROM hapax.q_claim WHERE seq = $1 AND fence = $2 AND queue_id + 0 = $3 FOR UPDATE";
        let hold = sqlx::query(sql).bind(seq as i64).bind(fence as i64).bind(queue_id);
        Ok(hold.fetch_optional(db).await?.is_some())
    }

    /// The parameters of `hapax.q_settle`, which acks the delivery in the caller's transaction, and fails if the delivery is
    /// over: queue, number and fence.
    pub fn numbers(&self) -> (i32, i64, i64) {
        let Named { queue_id, seq, fence, .. } = self.named;
        (queue_id, seq as i64, fence as i64)
    }

    /// Adds those parameters to a statement.
    pub fn bind<'q>(&self, settle: Query<'q, Postgres, PgArguments>) -> Query<'q, Postgres, PgArguments> {
        let (queue_id, seq, fence) = self.numbers();
        settle.bind(queue_id).bind(seq).bind(fence)
    }

    /// After the commit: counts, and lets the next message of a FIFO group be delivered. If this does not happen, the
    /// sweeper does it.
    pub fn committed(self) {
        let (inner, queue_id, seq) = (self.inner.clone(), self.named.queue_id, self.named.seq);
        inner.count(queue_id, &QueueTotals { acked: 1, ..QueueTotals::default() });
        drop(self);
        lock(&inner.settled).entry(queue_id).or_default().push(seq as i64);
        inner.base.pool.runtime().clone().spawn(async move {
            if let Err(error) = inner.follow_settled_of(queue_id).await {
                tracing::debug!(%error, "the next message of a group is announced by the sweeper");
            }
        });
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        lock(&self.inner.ending).remove(&(self.named.seq, self.named.fence));
    }
}

impl Inner {
    /// Whether a transaction of this process is ending the delivery.
    pub(super) fn is_ending(&self, named: &Named) -> bool {
        lock(&self.ending).contains(&(named.seq, named.fence))
    }

    async fn follow_settled_of(&self, queue_id: i32) -> Result<(), StoreError> {
        let known = lock(&self.known).values().find(|queue| queue.id == queue_id).cloned();
        let queue = if let Some(queue) = known {
            queue
        } else {
            let read = self.base.pool.run("read a queue", Access::Read, move |db| {
                Box::pin(async move { Queue::by_id(db, queue_id).await })
            });
            let Some(queue) = read.await? else {
                lock(&self.settled).remove(&queue_id);
                return Ok(());
            };
            Arc::new(queue)
        };
        // Those that are ending now, together. They are named: a look at all would read those that are gone, too.
        loop {
            let named = lock(&self.settled).remove(&queue_id).unwrap_or_default();
            if named.is_empty() || !queue.config.is_fifo() {
                return Ok(());
            }
            for some in named.chunks(BATCH as usize) {
                self.follow_some(&queue, Some(some.to_vec())).await?;
            }
        }
    }

    /// Does what follows from deliveries of a FIFO queue that users' transactions have ended.
    pub(super) async fn follow_settled(&self, queue: &Queue) -> Result<(), StoreError> {
        while self.follow_some(queue, None).await? == BATCH as usize {}
        Ok(())
    }

    /// The same for these deliveries, or for some; gives how many there were.
    async fn follow_some(&self, queue: &Queue, ended: Option<Vec<i64>>) -> Result<usize, StoreError> {
        let name = queue.name.clone();
        let followed = self.transact("follow ended deliveries", move |db| {
            let (name, ended) = (name.clone(), ended.clone());
            Box::pin(async move { follow(db, &name, ended).await }) as BoxFuture<'_, _>
        });
        let (count, effects): (usize, Effects) = followed.await?;
        self.publish(&effects);
        Ok(count)
    }
}

async fn follow(
    db: &mut PgConnection,
    name: &QueueName,
    ended: Option<Vec<i64>>,
) -> Result<(usize, Effects), Failure> {
    let Some(queue) = Queue::find(db, name).await? else { return Ok((0, Effects::default())) };
    let columns = "SELECT seq, grp, id_hi, id_lo, source FROM hapax.q_settled";
    let rows = if let Some(ended) = ended {
        let sql = format!("{columns} WHERE seq = ANY($1) AND queue_id + 0 = $2");
        sqlx::query(&sql).bind(ended).bind(queue.id).fetch_all(&mut *db).await?
    } else {
        let sql = format!("{columns} WHERE queue_id = $1 LIMIT $2");
        sqlx::query(&sql).bind(queue.id).bind(BATCH).fetch_all(&mut *db).await?
    };
    if rows.is_empty() {
        return Ok((0, Effects { queue_id: queue.id, ..Effects::default() }));
    }
    let (mut seqs, mut names, mut decided) = (Vec::new(), BTreeSet::new(), Vec::<MessageId>::new());
    for row in &rows {
        seqs.push(row.try_get::<i64, _>("seq")?);
        names.extend(GroupId::new(row.try_get::<String, _>("grp")?).ok());
        let id = id_of(row.try_get::<i64, _>("id_hi")? as u64, row.try_get::<i64, _>("id_lo")? as u64);
        let is_letter = row.try_get::<Option<String>, _>("source")?.is_some();
        decided.extend(is_letter.then_some(id));
    }
    let names: Vec<GroupId> = names.into_iter().collect();
    let held = Held { groups: groups(db, &queue, None, &names, &decided).await? };
    write::lock_groups(db, &held.groups).await?;
    sqlx::query("DELETE FROM hapax.q_settled WHERE seq = ANY($1)").bind(&seqs).execute(&mut *db).await?;
    let (now_ms, _) = write::draw(db, 0).await?;
    let mut work = Work::new(now_ms, &queue, None, VecDeque::new());
    (work.decided, work.freed) = (decided, true);
    let effects = finish(db, &work, &held).await?;
    Ok((rows.len(), effects))
}
