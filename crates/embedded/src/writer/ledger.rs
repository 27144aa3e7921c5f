//! The ledger operations of the writer: reads what memory does not hold, lets the engine decide, and makes claims wait.

use hapax_core::ledger::protocol::ClaimDecision;
use hapax_core::{
    ClaimError, EntryId, RemainingLease, ResolveError, SettleError, Settled, Settlement, StoreError,
    TokenError,
};

use super::{PendingReply, Reply, SettleOp, Writer, with_key};
use crate::claims::{ClaimReply, ClaimWaiter, EndOp, LedgerOp, RenewOp};
use crate::engine::{CachedEntry, EntrySnapshot, PRUNE_MAX};
use crate::storage::{FoundBody, FoundEntry, ReadError, Storage};
use crate::time::Now;

/// Messages that one wave releases after a doubt is over; the rest follows in the next ones, also after a crash.
const RELEASE_STEP: usize = 1_000;

/// Why nothing is known about a key.
pub(super) enum SnapshotError {
    /// The medium failed: the store stops.
    Unread(ReadError),
    /// The entry exists but its content is unreadable.
    Damaged(StoreError),
}

impl From<ReadError> for SnapshotError {
    fn from(error: ReadError) -> Self {
        Self::Unread(error)
    }
}

impl<S: Storage> Writer<S> {
    /// What there is about a key, at this point of the wave.
    pub(super) fn entry_snapshot(
        &mut self,
        now: Now,
        id: &EntryId,
        hash: u128,
    ) -> Result<EntrySnapshot, SnapshotError> {
        let damaged = |problem: &str| {
            SnapshotError::Damaged(StoreError::Damaged(format!(
                "the ledger's entry {id}: {problem}; what became of its effect cannot be told, `forget` it to let it \
                 happen again"
            )))
        };
        let row = match self.engine.cached_entry(hash) {
            CachedEntry::Present(row) => Some(row),
            CachedEntry::Removed => None,
            CachedEntry::NotCached => match self.storage.entry(hash)? {
                FoundEntry::Absent => None,
                FoundEntry::Sound(row) => Some(row),
                FoundEntry::Damaged(problem) => return Err(damaged(&problem)),
            },
        };
        if row.as_ref().is_some_and(|row| row.id != *id) {
            return Err(damaged("another entry is in its place"));
        }
        let is_over = row.as_ref().is_some_and(|row| row.is_over(now.ms()));
        let over = is_over && !self.is_linked(hash)?;
        Ok(EntrySnapshot { id: id.clone(), hash, row, over })
    }

    /// Prepares a key for a message that arrives or comes back: an expired entry is removed, so that the message does not
    /// revive it. One that an operator sends back (`again`) must not meet its recorded failure.
    pub(super) fn clear_entry(&mut self, now: Now, id: &EntryId, again: bool) -> Result<(), ReadError> {
        match self.entry_snapshot(now, id, id.hash()) {
            Ok(snapshot) => self.engine.clear_entry(now, &snapshot, again),
            Err(SnapshotError::Unread(error)) => return Err(error),
            // The next claim on the entry reports the damage.
            Err(SnapshotError::Damaged(_)) => {}
        }
        Ok(())
    }

    /// Lets parked messages continue, and clears the recorded failures of their keys.
    pub(super) fn release(&mut self, now: Now, queue: u32, seqs: &[u64], reply: Reply<u64>) {
        let released = self.try_release(now, queue, seqs).map_err(SnapshotError::from);
        self.answer_result(reply, released);
    }

    fn try_release(&mut self, now: Now, queue: u32, seqs: &[u64]) -> Result<u64, ReadError> {
        let mut released = 0;
        for &seq in seqs {
            if self.engine.release(now, queue, &[seq]) == 0 {
                continue;
            }
            released += 1;
            // The key of a damaged message cannot be told.
            if let FoundBody::Sound(body) = self.storage.body(seq)? {
                let (_, key) = with_key(self.ids.id(seq), body.content);
                let entry = EntryId::of_queue(&self.engine.queue(queue).name, key);
                self.clear_entry(now, &entry, true)?;
            }
        }
        Ok(released)
    }

    /// Whether a message in this store needs the entry.
    fn is_linked(&mut self, hash: u128) -> Result<bool, ReadError> {
        let wave = &self.engine.wave.ledger;
        if wave.is_linked(hash) {
            return Ok(true);
        }
        let gone = wave.unlinked();
        let links = self.storage.links(hash, 0, gone.len() + 1)?;
        Ok(links.iter().any(|(seq, _)| !gone.contains(seq)))
    }

    /// Returns the error to answer with. After a failed read it stops the store.
    fn refused(&mut self, unknown: SnapshotError) -> StoreError {
        match unknown {
            SnapshotError::Damaged(error) => error,
            SnapshotError::Unread(error) => {
                self.stop_unread(&error);
                self.stopped.clone().expect("just stopped")
            }
        }
    }

    /// Answers after the commit.
    fn answer_later<T: Send + 'static>(&mut self, reply: Reply<T>, value: T) {
        let done = move |failed: Option<StoreError>| drop(reply.send(failed.map_or(Ok(value), Err)));
        self.pending_replies.push(PendingReply::Ledger(Box::new(done)));
    }

    /// Answers after the commit, or with the error at once.
    fn answer_result<T: Send + 'static>(&mut self, reply: Reply<T>, result: Result<T, SnapshotError>) {
        match result {
            Ok(value) => self.answer_later(reply, value),
            Err(unknown) => {
                let error = self.refused(unknown);
                let _ = reply.send(Err(error));
            }
        }
    }

    pub(super) fn apply_ledger(&mut self, now: Now, op: LedgerOp) {
        let changes = !matches!(op, LedgerOp::Read { .. });
        let stopped = self.stopped.clone().or_else(|| self.engine.check_ledger().err().filter(|_| changes));
        match op {
            LedgerOp::Claim { claiming, asked, reply } => {
                let paused = self.engine.header().paused.clone().map(StoreError::Paused);
                if let Some(error) = stopped.or(paused).or_else(|| self.check_room().err()) {
                    return drop(reply.send(Err(error)));
                }
                self.stats.operations += 1;
                let deadline_ms = asked.ms() + claiming.request.wait_ms;
                self.try_claim(now, None, ClaimWaiter { claiming, deadline_ms, reply });
            }
            LedgerOp::Renew { batch, reply } => {
                if let Some(error) = stopped {
                    return drop(reply.send(Err(error)));
                }
                self.stats.operations += batch.len() as u64;
                let renewed = self.renew(now, batch);
                self.answer_result(reply, renewed.map_err(SnapshotError::Unread));
            }
            LedgerOp::End { batch, reply } => {
                if let Some(error) = stopped {
                    return drop(reply.send(Err(error)));
                }
                self.stats.operations += batch.len() as u64;
                let ended: Result<Vec<_>, _> = batch.iter().map(|end| self.end_claim(now, end)).collect();
                self.answer_result(reply, ended.map_err(SnapshotError::Unread));
            }
            LedgerOp::Read { id, reply } => {
                if let Some(error) = stopped {
                    return drop(reply.send(Err(error)));
                }
                if self.engine.ledger_copy().is_none() {
                    self.engine.note_lapse(now, id.hash());
                }
                let snapshot = self.entry_snapshot(now, &id, id.hash());
                let view = snapshot.map(|snapshot| snapshot.entry().map(|entry| entry.view(id, now.ms())));
                self.answer_result(reply, view);
            }
            LedgerOp::Resolve { id, resolution, by, reply } => {
                if let Some(error) = stopped {
                    return drop(reply.send(Err(error)));
                }
                let hash = id.hash();
                let snapshot = self.entry_snapshot(now, &id, hash);
                let resolved =
                    snapshot.map(|snapshot| self.engine.resolve_entry(now, &snapshot, &resolution, &by));
                self.answer_result(reply, resolved);
            }
            LedgerOp::Forget { id, by, reply } => {
                if let Some(error) = stopped {
                    return drop(reply.send(Err(error)));
                }
                let hash = id.hash();
                let forgotten = match self.entry_snapshot(now, &id, hash) {
                    Ok(snapshot) => Ok(self.engine.forget_entry(now, &snapshot, &by)),
                    Err(SnapshotError::Damaged(_)) => self.forget_damaged(now, &id, &by),
                    Err(unread) => Err(unread),
                };
                self.answer_result(reply, forgotten);
            }
        }
    }

    fn forget_damaged(
        &mut self,
        now: Now,
        id: &EntryId,
        by: &str,
    ) -> Result<Result<(), ResolveError>, SnapshotError> {
        if !self.storage.can_drop(id.hash())? {
            return Err(SnapshotError::Damaged(StoreError::Damaged(format!(
                "the ledger's entry {id} is so damaged that it cannot be removed; restore a backup"
            ))));
        }
        self.engine.forget_damaged(now, id, id.hash(), by);
        Ok(Ok(()))
    }

    fn renew(
        &mut self,
        now: Now,
        batch: Vec<RenewOp>,
    ) -> Result<Vec<Result<RemainingLease, TokenError>>, ReadError> {
        let renew = |keep: RenewOp| {
            Ok(match self.known_by_token(now, &keep.id, keep.hash)? {
                Ok(snapshot) => self.engine.renew_claim(now, &snapshot, keep.fence, keep.lease_ms),
                Err(damaged) => Err(damaged),
            })
        };
        batch.into_iter().map(renew).collect()
    }

    /// What there is about a claim that its holder names. A damaged entry is an error of its own claim alone.
    fn known_by_token(
        &mut self,
        now: Now,
        id: &EntryId,
        hash: u128,
    ) -> Result<Result<EntrySnapshot, TokenError>, ReadError> {
        match self.entry_snapshot(now, id, hash) {
            Ok(snapshot) => Ok(Ok(snapshot)),
            Err(SnapshotError::Damaged(_)) => Ok(Err(TokenError::Damaged)),
            Err(SnapshotError::Unread(error)) => Err(error),
        }
    }

    fn end_claim(&mut self, now: Now, end: &EndOp) -> Result<Result<(), TokenError>, ReadError> {
        Ok(match self.known_by_token(now, &end.id, end.hash)? {
            Ok(snapshot) => self.engine.end_claim(now, &snapshot, end.fence, &end.ending),
            Err(damaged) => Err(damaged),
        })
    }

    /// Ends deliveries and their claims, both in this wave.
    pub(super) fn settle(
        &mut self,
        now: Now,
        queue: u32,
        batch: &[SettleOp],
        reply: Reply<Vec<Result<Settled, SettleError>>>,
    ) {
        // What is recorded here after the ledger was copied would be missing there.
        if batch.iter().any(|settling| settling.claim.is_some())
            && let Err(error) = self.engine.check_ledger()
        {
            return drop(reply.send(Err(error)));
        }
        self.stats.operations += batch.len() as u64;
        let settled: Result<_, ReadError> =
            batch.iter().map(|settling| self.settle_one(now, queue, settling)).collect();
        match settled {
            Ok(settled) => self.pending_replies.push(PendingReply::Settled(reply, settled)),
            Err(error) => {
                let error = self.refused(SnapshotError::Unread(error));
                let _ = reply.send(Err(error));
            }
        }
    }

    fn settle_one(
        &mut self,
        now: Now,
        queue: u32,
        settling: &SettleOp,
    ) -> Result<Result<Settled, SettleError>, ReadError> {
        if let Some(end) = &settling.claim
            // A holder that lost the claim must not take the message away from the one that has it now. The other way
            // round the effect has happened, whichever delivery holds the message.
            && let Err(error) = self.end_claim(now, end)?
        {
            return Ok(Err(SettleError::Claim(error)));
        }
        let Some(delivery) = settling.delivery else { return Ok(Err(SettleError::Malformed)) };
        let decided = settling.parked_for.is_some_and(|hash| !self.engine.is_in_doubt(now, hash));
        let settlement = match &settling.settlement {
            // What would release it has happened already.
            Settlement::Park { .. } if decided => &Settlement::Defer { after_ms: 0 },
            settlement => settlement,
        };
        Ok(self.engine.settle(now, queue, delivery, settlement, self.rng.u64(..)))
    }

    /// Decides a claim or makes it wait. `number` is its position in the wait queue, if it has waited before.
    fn try_claim(&mut self, now: Now, number: Option<u64>, waiter: ClaimWaiter) {
        if waiter.reply.is_closed() {
            return;
        }
        let claimed = match self.decide_claim(now, number.is_some(), &waiter) {
            Ok(claimed) => claimed,
            Err(unknown) => {
                let error = self.refused(unknown);
                return drop(waiter.reply.send(Err(error)));
            }
        };
        let left = match &claimed {
            Ok((ClaimDecision::InProgress { retry_after_ms }, _)) if now.ms() < waiter.deadline_ms => {
                *retry_after_ms
            }
            _ => return self.answer_later(waiter.reply, claimed),
        };
        let wake_ms = waiter.deadline_ms.min(now.ms() + left);
        match number {
            Some(number) => self.claims.put(number, waiter, wake_ms),
            None => {
                if let Err(waiter) = self.claims.add(waiter, wake_ms) {
                    self.answer_later(waiter.reply, claimed);
                }
            }
        }
    }

    fn decide_claim(
        &mut self,
        now: Now,
        again: bool,
        waiter: &ClaimWaiter,
    ) -> Result<ClaimReply, SnapshotError> {
        let claiming = &waiter.claiming;
        let snapshot = match self.entry_snapshot(now, &claiming.request.id, claiming.hash) {
            Err(SnapshotError::Damaged(error)) => return Ok(Err(ClaimError::Store(error))),
            snapshot => snapshot?,
        };
        let claimed = self.engine.claim(now, &snapshot, &claiming.request, again);
        let request = claiming.request.delivery.as_ref();
        let queue = request.and_then(|(queue, _)| self.engine.find(queue).ok());
        let delivery = claiming.delivery.filter(|delivery| Some(delivery.queue) == queue);
        if let (Some(delivery), Ok(claimed)) = (delivery, &claimed) {
            let granted = matches!(claimed, ClaimDecision::Granted { .. });
            self.engine.link_delivery(delivery, claiming.hash, granted);
        }
        Ok(claimed.map(|claimed| (claimed, now.ms())))
    }

    /// When a doubt ends, by a decision or because the holder was only slow, the messages parked for it are released.
    pub(super) fn release_parked(&mut self, now: Now) {
        for hash in self.engine.wave.ledger.take_cleared() {
            if let Err(error) = self.release_step(now, hash, 0) {
                return self.stop_unread(&error);
            }
        }
    }

    /// Continues to release messages parked for an entry that has more of them than one wave releases.
    pub(super) fn step_releases(&mut self, now: Now) {
        let Some((hash, after)) = self.engine.next_release() else { return };
        if self.engine.is_in_doubt(now, hash) {
            // In doubt again: what is still parked is parked for this doubt, and continues when it is over.
            return self.engine.set_release(hash, None);
        }
        if let Err(error) = self.release_step(now, hash, after) {
            self.stop_unread(&error);
        }
    }

    fn release_step(&mut self, now: Now, hash: u128, after: u64) -> Result<(), ReadError> {
        let links = self.storage.links(hash, after, RELEASE_STEP)?;
        self.engine.release_parked(now, &links);
        let last = links.last().filter(|_| links.len() == RELEASE_STEP);
        self.engine.set_release(hash, last.map(|(seq, _)| *seq));
        Ok(())
    }

    /// Tries claims again whose entry was freed or whose time has come.
    pub(super) fn serve_claims(&mut self, now: Now) {
        for hash in self.engine.wave.ledger.take_freed() {
            for (number, waiter) in self.claims.of_entry(hash) {
                self.try_claim(now, Some(number), waiter);
            }
        }
        for (number, waiter) in self.claims.due(now.ms()) {
            self.try_claim(now, Some(number), waiter);
        }
    }

    /// Prunes expired entries, a bounded number at a time.
    pub(super) fn prune(&mut self, now: Now) {
        if !self.engine.prune_due(now) {
            return;
        }
        if let Err(error) = self.try_prune(now) {
            self.stop_unread(&error);
        }
    }

    fn try_prune(&mut self, now: Now) -> Result<(), ReadError> {
        for hash in self.engine.expired_entries(now) {
            let needed = self.is_linked(hash)?;
            self.engine.prune_open(now, hash, needed);
        }
        let (due, next_ms) = self.storage.due_entries(now.ms(), PRUNE_MAX)?;
        let damaged = due.iter().filter(|entry| entry.damaged).count();
        if damaged > 0 {
            self.damaged.push(format!(
                "{damaged} ledger entries are damaged; claims on them are refused until someone forgets them"
            ));
        }
        self.engine.prune(now, &due, next_ms);
        Ok(())
    }
}
