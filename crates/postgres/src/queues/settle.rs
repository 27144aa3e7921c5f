//! Settlements and extensions. Acks are merged with other calls (`merged`), and so are extensions of leases that have not
//! ended; everything else is a transaction per call.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::store::QueueTotals;
use hapax_core::{
    Batch, EndClaim, EntryId, Extend, MessageId, QueueName, RemainingLease, Settle, SettleError, Settled,
    Settlement, validate,
};
use sqlx::{PgConnection, Row as _};

use super::merged::Write;
use super::receipt::Named;
use super::transaction::{Effects, finish, work_on};
use super::write::seqs_of;
use super::{Inner, Queue, entries, sweep, write};
use crate::error::{Access, Failure};
use crate::ledger::{ClaimsEnded, PostgresLedger};
use crate::merge::Merger;
use crate::seal::Seal;
use crate::transaction::Transaction;
use crate::{Base, BoxFuture};

/// How often, and how far apart, a delivery's row is looked at before its lock is taken for one of a user's transaction.
const LOCKED_LOOKS: u32 = 10;
const LOCKED_PAUSE: Duration = Duration::from_millis(50);

/// The acks of one call.
pub(super) struct Acks {
    pub queue_id: i32,
    pub named: Vec<Named>,
}

/// The extensions of one call; a receipt occurs once.
pub(super) struct Extends {
    queue_id: i32,
    named: Vec<(Named, u64, bool)>,
}

/// An extension: the fence, the lease, and whether it is the delivery's own.
type Wanted = (u64, u64, bool);

/// Receipts of one statement.
const WEIGHT_MAX: usize = 2_000;

pub(super) fn extend_merger(base: &Base) -> Merger<Extends, Vec<(u64, u64)>> {
    let unsynced = !base.options.syncs_receives();
    Merger::new(base.pool.clone(), "extend", Access::Write, WEIGHT_MAX, move |db, calls| {
        Box::pin(async move { extend_all(db, &calls, unsynced).await })
    })
}

async fn extend_all(
    db: &mut PgConnection,
    calls: &[Extends],
    unsynced: bool,
) -> Result<Vec<Vec<(u64, u64)>>, Failure> {
    let mut answers = vec![Vec::new(); calls.len()];
    // The last extension of a delivery holds. One of another fence is left to a closer look.
    let mut queues: BTreeMap<i32, BTreeMap<u64, Wanted>> = BTreeMap::new();
    for call in calls {
        for (named, lease_ms, own) in &call.named {
            let of_queue = queues.entry(call.queue_id).or_default();
            let own =
                *own || of_queue.get(&named.seq).is_some_and(|(fence, _, own)| *own && *fence == named.fence);
            of_queue.insert(named.seq, (named.fence, *lease_ms, own));
        }
    }
    if queues.len() == 1 {
        extend_queues(db, calls, queues, unsynced, &mut answers).await?;
    } else {
        let mut transaction = Transaction::begin(db).await?;
        let done = extend_queues(&mut transaction, calls, queues, unsynced, &mut answers).await;
        transaction.end(done).await?;
    }
    Ok(answers)
}

async fn extend_queues(
    db: &mut PgConnection,
    calls: &[Extends],
    queues: BTreeMap<i32, BTreeMap<u64, Wanted>>,
    unsynced: bool,
    answers: &mut [Vec<(u64, u64)>],
) -> Result<(), Failure> {
    for (queue_id, named) in queues {
        let column = |of: fn(&Wanted) -> u64| named.values().map(|one| of(one) as i64).collect::<Vec<i64>>();
        let sql = "SELECT seq, fence FROM hapax.q_extend($1, $2, $3, $4, $5, $6, $7)";
        let rows = sqlx::query(sql)
            .bind(queue_id)
            .bind(named.keys().map(|seq| *seq as i64).collect::<Vec<i64>>())
            .bind(column(|(fence, ..)| *fence))
            .bind(column(|(_, lease_ms, _)| *lease_ms))
            .bind(named.values().map(|(.., own)| *own).collect::<Vec<bool>>())
            .bind(LEASE_MS_MAX as i64)
            .bind(unsynced)
            .fetch_all(&mut *db)
            .await?;
        for row in rows {
            let (seq, fence): (i64, i64) = (row.try_get("seq")?, row.try_get("fence")?);
            let its = |named: &Named| (named.seq, named.fence) == (seq as u64, fence as u64);
            for (answers, call) in answers.iter_mut().zip(calls) {
                if call.queue_id == queue_id && call.named.iter().any(|(named, ..)| its(named)) {
                    answers.push((seq as u64, fence as u64));
                }
            }
        }
    }
    Ok(())
}

impl Inner {
    pub(super) async fn settle(
        self: &Arc<Self>,
        name: &QueueName,
        batch: Vec<Settle>,
    ) -> Batch<Settled, SettleError> {
        validate::batch("settle", batch.len())?;
        let queue = self.known_or_read(name).await?;
        if batch.is_empty() {
            return Ok(Vec::new());
        }
        let mut answers: Vec<Option<Result<Settled, SettleError>>> = vec![None; batch.len()];
        let plain = |settle: &Settle| settle.settlement == Settlement::Ack && settle.claim.is_none();
        if !queue.config.is_fifo() && batch.iter().all(plain) {
            self.ack_plain(&queue, &batch, &mut answers).await?;
        }
        let rest: Vec<(usize, Settle)> =
            batch.into_iter().enumerate().filter(|(at, _)| answers[*at].is_none()).collect();
        if !rest.is_empty() {
            let some_acked = answers.iter().any(Option::is_some);
            let decided = self.settle_careful(name, rest).await;
            let decided = decided.map_err(|error| if some_acked { in_part(&error) } else { error })?;
            for (at, answer) in decided {
                answers[at] = Some(answer);
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// A queue for an operation on receipts. The number of a queue is never used again, so what is known of it holds,
    /// unless the queue was deleted.
    async fn known_or_read(&self, name: &QueueName) -> Result<Arc<Queue>, hapax_core::StoreError> {
        self.open_queue(name).await
    }

    async fn ack_plain(
        &self,
        queue: &Queue,
        batch: &[Settle],
        answers: &mut [Option<Result<Settled, SettleError>>],
    ) -> Result<(), hapax_core::StoreError> {
        let named: Vec<Option<Named>> =
            batch.iter().map(|settle| Named::of(&self.base.seal, queue.id, &settle.receipt).ok()).collect();
        let all: Vec<Named> = named.iter().flatten().copied().collect();
        if all.is_empty() {
            return Ok(());
        }
        let weight = all.len();
        let acks = Acks { queue_id: queue.id, named: all };
        let mut acked = self.writes.call(Write::Ack(acks), weight).await?.acked();
        self.count(queue.id, &QueueTotals { acked: acked.len() as u64, ..QueueTotals::default() });
        for (answer, named) in answers.iter_mut().zip(&named) {
            let found =
                named.and_then(|named| acked.iter().position(|ended| *ended == (named.seq, named.fence)));
            if let Some(found) = found {
                acked.swap_remove(found);
                *answer = Some(Ok(Settled::Acked));
            }
        }
        Ok(())
    }

    async fn settle_careful(
        &self,
        name: &QueueName,
        batch: Vec<(usize, Settle)>,
    ) -> Result<Vec<(usize, Result<Settled, SettleError>)>, hapax_core::StoreError> {
        let (name, batch) = (name.clone(), Arc::new(batch));
        let (ledger, seal) = (self.ledger.clone(), self.base.seal.clone());
        let settled = self.transact("settle", move |db| {
            let (ledger, seal, name, batch) = (ledger.clone(), seal.clone(), name.clone(), batch.clone());
            Box::pin(async move { careful_settle(db, &seal, &ledger, &name, &batch).await })
                as BoxFuture<'_, _>
        });
        let (answers, effects, ended) = settled.await?;
        self.ledger.ended(&ended);
        self.publish(&effects);
        Ok(answers)
    }

    pub(super) async fn extend(
        self: &Arc<Self>,
        name: &QueueName,
        batch: Vec<Extend>,
    ) -> Batch<RemainingLease, SettleError> {
        validate::batch("extend", batch.len())?;
        let queue = self.known_or_read(name).await?;
        let mut answers: Vec<Option<Result<RemainingLease, SettleError>>> = vec![None; batch.len()];
        let mut seen = HashSet::new();
        let named: Vec<Option<Named>> = batch
            .iter()
            .zip(&mut answers)
            .map(|(extend, answer)| {
                let plain = (1..=LEASE_MS_MAX).contains(&extend.lease_ms);
                let named = Named::of(&self.base.seal, queue.id, &extend.receipt).ok().filter(|_| plain)?;
                if self.is_ending(&named) {
                    // Its row is locked by a transaction of this process, so its lease cannot end before that does.
                    *answer = Some(Ok(RemainingLease { lease_ms: extend.lease_ms }));
                    return None;
                }
                seen.insert(named.seq).then_some(named)
            })
            .collect();
        let once = seen.len() == answers.iter().filter(|answer| answer.is_none()).count();
        let all: Vec<_> = named
            .iter()
            .zip(&batch)
            .filter_map(|(named, extend)| Some(((*named)?, extend.lease_ms, extend.own_lease)))
            .collect();
        if once && !all.is_empty() {
            let weight = all.len();
            let extended = self.extends.call(Extends { queue_id: queue.id, named: all }, weight).await?;
            for ((answer, named), extend) in answers.iter_mut().zip(&named).zip(&batch) {
                if named.is_some_and(|named| extended.contains(&(named.seq, named.fence))) {
                    *answer = Some(Ok(RemainingLease { lease_ms: extend.lease_ms }));
                }
            }
            if batch.iter().any(|extend| extend.lease_ms <= sweep::FORESEEN_MS) {
                // It may end before the next look at all queues.
                self.sweeper.sooner();
                self.kick(queue.id);
            }
        }
        let mut rest: Vec<(usize, Extend)> =
            batch.into_iter().enumerate().filter(|(at, _)| answers[*at].is_none()).collect();
        if !rest.is_empty() {
            let seqs = rest.iter().filter_map(|(at, _)| Some(named[*at].as_ref()?.seq)).collect();
            let locked = self.kept_locked(seqs).await?;
            rest.retain(|(at, extend)| {
                let locked = |named: &Named| locked.contains(&(named.seq, named.fence));
                let is_locked = named[*at].as_ref().is_some_and(locked);
                if is_locked {
                    answers[*at] = Some(Ok(RemainingLease { lease_ms: extend.lease_ms }));
                }
                !is_locked
            });
        }
        if !rest.is_empty() {
            let (seal, name, rest) = (self.base.seal.clone(), name.clone(), Arc::new(rest));
            let extended = self.transact("extend", move |db| {
                let (seal, name, rest) = (seal.clone(), name.clone(), rest.clone());
                Box::pin(async move { careful_extend(db, &seal, &name, &rest).await }) as BoxFuture<'_, _>
            });
            let (decided, effects) = extended.await?;
            self.publish(&effects);
            for (at, answer) in decided {
                answers[at] = Some(answer);
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    /// Which deliveries' rows are locked, and stay so for longer than a transaction of the store takes: a user's transaction
    /// is ending them. Until it ends, they cannot pass to another consumer, and no heartbeat waits for it.
    async fn kept_locked(&self, seqs: Vec<u64>) -> Result<HashSet<(u64, u64)>, hapax_core::StoreError> {
        let seqs: Arc<[i64]> = seqs.into_iter().map(|seq| seq as i64).collect();
        for look in 1.. {
            let asked = seqs.clone();
            let locked = self.base.pool.run("look for locked deliveries", Access::Read, move |db| {
                Box::pin(async move { Ok(write::locked(db, &asked).await?) }) as BoxFuture<'_, _>
            });
            let locked: HashSet<(u64, u64)> = locked.await?;
            if locked.is_empty() || look == LOCKED_LOOKS {
                return Ok(locked);
            }
            tokio::time::sleep(LOCKED_PAUSE).await;
        }
        unreachable!("the last look returns")
    }

    /// Undoes deliveries that reached no receiver.
    pub(super) async fn give_back(&self, name: &QueueName, named: Vec<Named>) {
        let (asked, named) = (name.clone(), Arc::new(named));
        let given = self.transact("give back", move |db| {
            let (name, named) = (asked.clone(), named.clone());
            Box::pin(async move {
                let queue = Queue::get_open(db, &name).await?;
                // Leases that are over end here too, and may end as dead letters.
                let dead = queue.dead_letters(db).await?;
                let seqs: Vec<u64> = named.iter().map(|named| named.seq).collect();
                let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, &[]).await?;
                for named in named.iter() {
                    work.give_back(named);
                }
                finish(db, &work, &held).await
            }) as BoxFuture<'_, _>
        });
        let given: Result<Effects, hapax_core::StoreError> = given.await;
        match given {
            Ok(effects) => {
                self.forget_taken(effects.queue_id);
                self.publish(&effects);
            }
            Err(error) => {
                tracing::debug!(%error, queue = %name, "deliveries of a dropped receive return when their leases end");
            }
        }
    }
}

/// The error of a call of which a part was done: it must not say that nothing was.
fn in_part(error: &hapax_core::StoreError) -> hapax_core::StoreError {
    hapax_core::StoreError::OutcomeUnknown(format!(
        "other deliveries of the same call were acked, then {error}"
    ))
}

type Answers<T> = Vec<(usize, Result<T, SettleError>)>;

async fn careful_settle(
    db: &mut PgConnection,
    seal: &Seal,
    ledger: &PostgresLedger,
    name: &QueueName,
    batch: &[(usize, Settle)],
) -> Result<(Answers<Settled>, Effects, ClaimsEnded), Failure> {
    let queue = Queue::get_open(db, name).await?;
    // A claim that was lost keeps its message; an effect that happened is recorded even if its delivery is stale.
    let ends: Vec<&EndClaim> = batch.iter().filter_map(|(_, settle)| settle.claim.as_ref()).collect();
    let (ends, ended) = if ends.is_empty() { <_>::default() } else { ledger.end_in(db, &ends).await? };
    let mut ends = ends.into_iter();
    let decided = decided(db, batch).await?;
    let dead = queue.dead_letters(db).await?;
    let named: Vec<_> = batch.iter().map(|(_, settle)| Named::of(seal, queue.id, &settle.receipt)).collect();
    let (seqs, ids) = targets(&named);
    let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, &ids).await?;
    let mut answers = Vec::new();
    for (((at, settle), named), decided) in batch.iter().zip(&named).zip(decided) {
        let end = settle.claim.as_ref().map_or(Some(Ok(())), |_| ends.next()).unwrap_or(Ok(()));
        // What would release it has happened already.
        let settlement = if decided { Settlement::Defer { after_ms: 0 } } else { settle.settlement.clone() };
        let settled = end.map_err(SettleError::Claim).and_then(|()| named.clone());
        answers.push((*at, settled.and_then(|named| work.settle(&named, settlement))));
    }
    let effects = finish(db, &work, &held).await?;
    tell_deaths(db, dead.as_ref(), &named, &mut answers).await?;
    Ok((answers, effects, ended))
}

/// Which of these would be parked for an entry that is not in doubt any more.
async fn decided(db: &mut PgConnection, batch: &[(usize, Settle)]) -> Result<Vec<bool>, Failure> {
    let parked_for = |settle: &'_ Settle| {
        let parks = matches!(settle.settlement, Settlement::Park { .. });
        settle.parked_for.clone().filter(|_| parks)
    };
    let ids: Vec<Option<EntryId>> = batch.iter().map(|(_, settle)| parked_for(settle)).collect();
    let asked: Vec<&EntryId> = ids.iter().flatten().collect();
    let mut doubts =
        if asked.is_empty() { Vec::new() } else { entries::in_doubt(db, &asked).await? }.into_iter();
    Ok(ids.iter().map(|id| id.is_some() && !doubts.next().unwrap_or(true)).collect())
}

async fn careful_extend(
    db: &mut PgConnection,
    seal: &Seal,
    name: &QueueName,
    batch: &[(usize, Extend)],
) -> Result<(Answers<RemainingLease>, Effects), Failure> {
    let queue = Queue::get_open(db, name).await?;
    let dead = queue.dead_letters(db).await?;
    let named: Vec<_> = batch.iter().map(|(_, extend)| Named::of(seal, queue.id, &extend.receipt)).collect();
    let (seqs, ids) = targets(&named);
    let (mut work, held) = work_on(db, &queue, dead.as_ref(), &seqs, &ids).await?;
    let mut answers = Vec::new();
    for ((at, extend), named) in batch.iter().zip(&named) {
        let extended = named.clone().and_then(|named| work.extend(&named, extend));
        answers.push((*at, extended));
    }
    let effects = finish(db, &work, &held).await?;
    tell_deaths(db, dead.as_ref(), &named, &mut answers).await?;
    Ok((answers, effects))
}

fn targets(named: &[Result<Named, SettleError>]) -> (Vec<u64>, Vec<MessageId>) {
    named.iter().flatten().map(|named| (named.seq, named.id)).unzip()
}

/// A message that is among the dead letters is not gone.
async fn tell_deaths<T>(
    db: &mut PgConnection,
    dead: Option<&Queue>,
    named: &[Result<Named, SettleError>],
    answers: &mut Answers<T>,
) -> Result<(), Failure> {
    let Some(dead) = dead else { return Ok(()) };
    let gone = |answer: &Result<T, SettleError>| matches!(answer, Err(SettleError::Gone));
    let ids: Vec<MessageId> = named
        .iter()
        .zip(answers.iter())
        .filter(|(_, (_, answer))| gone(answer))
        .filter_map(|(named, _)| named.as_ref().ok().map(|named| named.id))
        .collect();
    if ids.is_empty() {
        return Ok(());
    }
    let found = seqs_of(db, dead.id, &ids).await?;
    for (named, (_, answer)) in named.iter().zip(answers) {
        let id = named.as_ref().ok().map(|named| named.id);
        if gone(answer) && found.iter().any(|(found, _)| Some(*found) == id) {
            *answer = Err(SettleError::Dead);
        }
    }
    Ok(())
}
