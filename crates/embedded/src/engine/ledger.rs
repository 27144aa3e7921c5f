//! The ledger: open entries in memory, ended ones in the storage; the protocol in the core makes every decision.
//!
//! An entry expires at its [`protocol::LedgerEntry::prune_ms`], unless a message in this store needs it. From then on
//! no operation sees it, even if its row was not pruned yet: every decision starts from an [`EntrySnapshot`], which the
//! writer makes, and an expired entry is replaced before a message is linked to its key again.

use std::collections::BTreeSet;

use hapax_core::ledger::protocol::{self, ClaimDecision, EntryChange, Stage};
use hapax_core::{
    ClaimEnding, ClaimError, ClaimRequest, EntryId, EntryState, FailureCause, Fence, LedgerStats,
    RemainingLease, Resolution, ResolveError, TokenError, policy,
};

use super::doubt::{DoubtCounts, NearDoubtLimit};
use super::{Engine, Undo};
use crate::maps::{NumberMap, NumberSet};
use crate::receipt::DeliveryRef;
use crate::record::{FLAG_KEYED, LedgerRow, Record, Tally, parked_cause};
use crate::storage::DueEntry;
use crate::time::Now;

/// Leases whose end is recorded in one wave.
const LAPSE_MAX: usize = 1_000;
/// Entries looked at for pruning in one wave.
pub(crate) const PRUNE_MAX: usize = 500;
/// Minimum interval between two pruning passes, unless a wave left expired entries.
const PRUNE_EVERY_MS: u64 = 1_000;
/// Time until an expired entry that a message needs is checked again.
const NEEDED_AGAIN_MS: u64 = 3_600_000;
/// Time until a damaged entry is checked again; it stays in the storage.
const DAMAGED_AGAIN_MS: u64 = 24 * 3_600_000;
/// Maximum bytes of the operator's name in the audit.
const BY_BYTES_MAX: usize = 256;

/// The open entries, and totals over all entries.
#[derive(Default)]
pub(super) struct Entries {
    open: NumberMap<u128, OpenEntry>,
    /// Open entries by the time when to check whether they can be pruned.
    prune_schedule: BTreeSet<(u64, u128)>,
    /// Open entries by scope, and those in doubt.
    pub doubts: DoubtCounts,
    /// Rows in the storage.
    pub tally: Tally,
    stats: LedgerStats,
    /// When ended entries are checked next.
    prune_ms: Option<u64>,
    pruned_ms: u64,
}

struct OpenEntry {
    row: LedgerRow,
    /// Its time in `prune_schedule`.
    prune_check_ms: Option<u64>,
}

impl Entries {
    pub fn load(&mut self, mut row: LedgerRow, now: Now) {
        row.entry = row.entry.after_restart(now.ms());
        self.set(row.id.hash(), Some(row));
    }

    pub fn load_counts(&mut self, tally: Tally, prune_ms: Option<u64>) {
        (self.tally, self.prune_ms) = (tally, prune_ms);
    }

    /// Sets or removes an open entry in memory; returns the previous one.
    pub fn set(&mut self, hash: u128, row: Option<LedgerRow>) -> Option<LedgerRow> {
        let prune_check_ms = row.as_ref().and_then(|row| row.entry.prune_ms());
        let before = self.open.remove(&hash);
        if let Some(before) = &before {
            self.doubts.remove(hash, &before.row);
            if let Some(at_ms) = before.prune_check_ms {
                self.prune_schedule.remove(&(at_ms, hash));
            }
        }
        if let Some(row) = row {
            self.doubts.add(hash, &row);
            self.open.insert(hash, OpenEntry { row, prune_check_ms });
        }
        self.prune_schedule.extend(prune_check_ms.map(|at_ms| (at_ms, hash)));
        before.map(|before| before.row)
    }

    /// Checks an expired entry again later.
    fn check_later(&mut self, hash: u128, at_ms: u64) {
        let Some(open) = self.open.get_mut(&hash) else { return };
        if let Some(before) = open.prune_check_ms.replace(at_ms) {
            self.prune_schedule.remove(&(before, hash));
        }
        self.prune_schedule.insert((at_ms, hash));
    }

    /// When to look for entries whose time is over.
    fn next_prune_ms(&self) -> Option<u64> {
        let next =
            self.prune_ms.into_iter().chain(self.prune_schedule.first().map(|(at_ms, _)| *at_ms)).min()?;
        Some(next.max(self.pruned_ms))
    }

    /// When time acts on the ledger next.
    pub fn next_ms(&self) -> Option<u64> {
        self.next_prune_ms().into_iter().chain(self.doubts.next_ms()).min()
    }

    pub fn no_changes(&self) -> LedgerChanges {
        LedgerChanges { tally: self.tally, stats: self.stats, ..LedgerChanges::default() }
    }

    pub fn take_back(&mut self, changes: &LedgerChanges) {
        (self.tally, self.stats) = (changes.tally, changes.stats);
        // The entries that this wave was to prune still exist.
        (self.prune_ms, self.pruned_ms) = (Some(0), 0);
    }

    #[cfg(test)]
    pub fn check(&self) {
        assert!(self.open.len() as u64 <= self.tally.rows);
        for (hash, open) in &self.open {
            assert!(*hash == open.row.id.hash() && matches!(open.row.entry.stage, Stage::Processing { .. }));
            assert!(open.prune_check_ms.is_none_or(|at_ms| self.prune_schedule.contains(&(at_ms, *hash))));
        }
        assert_eq!(
            self.open.values().filter(|open| open.prune_check_ms.is_some()).count(),
            self.prune_schedule.len()
        );
        self.doubts.check(self.open.iter().map(|(hash, open)| (*hash, &open.row)));
    }
}

/// A wave's changes to the ledger.
#[derive(Default)]
pub(crate) struct LedgerChanges {
    /// Entries that ended in this wave; `None` for removed ones. The storage does not have these changes yet.
    ended: NumberMap<u128, Option<LedgerRow>>,
    /// Entries whose holder released them in this wave; waiting claims are retried.
    freed: Vec<u128>,
    /// Entries whose doubt ended in this wave; the messages parked for them are released.
    cleared: Vec<u128>,
    /// Messages that were linked to an entry in this wave.
    linked: NumberMap<u128, Vec<u64>>,
    /// Messages that were deleted in this wave.
    unlinked: NumberSet<u64>,
    tally: Tally,
    stats: LedgerStats,
}

impl LedgerChanges {
    pub fn tally_before(&self) -> Tally {
        self.tally
    }

    pub fn unlink(&mut self, seq: u64) {
        self.unlinked.insert(seq);
    }

    pub fn unlinked(&self) -> &NumberSet<u64> {
        &self.unlinked
    }

    pub fn is_linked(&self, hash: u128) -> bool {
        self.linked.get(&hash).is_some_and(|seqs| seqs.iter().any(|seq| !self.unlinked.contains(seq)))
    }

    pub fn take_cleared(&mut self) -> Vec<u128> {
        std::mem::take(&mut self.cleared)
    }

    pub fn take_freed(&mut self) -> Vec<u128> {
        std::mem::take(&mut self.freed)
    }
}

/// The state of a key from which a decision starts.
#[derive(Debug, Clone)]
pub(crate) struct EntrySnapshot {
    pub id: EntryId,
    pub hash: u128,
    /// The stored row.
    pub row: Option<LedgerRow>,
    /// The entry has expired and no message needs it: it counts as absent.
    pub over: bool,
}

/// What memory knows about a key.
pub(crate) enum CachedEntry {
    Present(LedgerRow),
    Removed,
    NotCached,
}

impl EntrySnapshot {
    pub fn entry(&self) -> Option<&protocol::LedgerEntry> {
        if self.over { None } else { self.row.as_ref().map(|row| &row.entry) }
    }
}

impl Engine {
    /// What memory knows about a key.
    pub fn cached_entry(&self, hash: u128) -> CachedEntry {
        if let Some(open) = self.ledger.open.get(&hash) {
            return CachedEntry::Present(open.row.clone());
        }
        match self.wave.ledger.ended.get(&hash) {
            Some(Some(row)) => CachedEntry::Present(row.clone()),
            Some(None) => CachedEntry::Removed,
            None => CachedEntry::NotCached,
        }
    }

    /// Writes an entry in place of what is known.
    pub(super) fn put_entry(&mut self, snapshot: &EntrySnapshot, entry: protocol::LedgerEntry) {
        let row = LedgerRow { id: snapshot.id.clone(), entry };
        let before = snapshot.row.as_ref().map(|row| row.entry.fence.0);
        if before.is_none() {
            self.ledger.tally.add(snapshot.hash);
        }
        let open = matches!(row.entry.stage, Stage::Processing { .. });
        if let (Some(prune_ms), false) = (row.entry.prune_ms(), open) {
            let next = self.ledger.prune_ms.unwrap_or(u64::MAX);
            self.ledger.prune_ms = Some(next.min(prune_ms));
            self.wave.ledger.ended.insert(snapshot.hash, Some(row.clone()));
        }
        self.set_open(snapshot.hash, open.then(|| row.clone()));
        self.wave.records.push(Record::Ledger { row: Box::new(row), before });
    }

    fn set_open(&mut self, hash: u128, row: Option<LedgerRow>) {
        let before = self.ledger.set(hash, row).map(Box::new);
        self.wave.journal.push(Undo::OpenEntry { hash, before });
    }

    /// Removes the known row, if there is one.
    pub fn drop_entry(&mut self, snapshot: &EntrySnapshot) {
        let Some(row) = &snapshot.row else { return };
        self.set_open(snapshot.hash, None);
        self.wave.ledger.ended.insert(snapshot.hash, None);
        self.ledger.tally.remove(snapshot.hash);
        self.wave.records.push(Record::DropEntry { fence: row.entry.fence.0 });
    }

    /// Records that an entry's doubt has ended, unless it is still in doubt.
    fn note_cleared(&mut self, now: Now, snapshot: &EntrySnapshot, after: Option<&protocol::LedgerEntry>) {
        let in_doubt = |entry: &protocol::LedgerEntry| entry.state(now.ms()) == EntryState::InDoubt;
        if snapshot.entry().is_some_and(in_doubt) && !after.is_some_and(in_doubt) {
            self.wave.ledger.cleared.push(snapshot.hash);
        }
    }

    /// An entry for which messages are still to be released, and after which message.
    pub fn next_release(&self) -> Option<(u128, u64)> {
        self.releases.first_key_value().map(|(hash, after)| (*hash, *after))
    }

    /// Whether an entry is in doubt, as memory knows it: every open one is there.
    pub fn is_in_doubt(&self, now: Now, hash: u128) -> bool {
        let state = |open: &OpenEntry| open.row.entry.state(now.ms());
        self.ledger.open.get(&hash).is_some_and(|open| state(open) == EntryState::InDoubt)
    }

    /// Remembers after which message those parked for an entry are still to be released; `None`: all have been.
    pub fn set_release(&mut self, hash: u128, after: Option<u64>) {
        let before = match after {
            Some(after) => self.releases.insert(hash, after),
            None => self.releases.remove(&hash),
        };
        if before != after {
            self.wave.journal.push(Undo::Release { hash, before });
            self.wave.records.push(Record::Released { hash, after });
        }
    }

    /// Lets messages continue that are parked for an entry that was in doubt: `links` names those that need it.
    pub fn release_parked(&mut self, now: Now, links: &[(u64, u32)]) {
        for &(seq, queue) in links {
            let Some(table) =
                self.queues.get(queue as usize).and_then(Option::as_ref).map(|queue| &queue.table)
            else {
                continue;
            };
            let in_doubt = |slot| parked_cause(table.get(slot).flags) == Some(FailureCause::InDoubt);
            if table.parked(seq).is_some_and(in_doubt) {
                self.release(now, queue, &[seq]);
            }
        }
    }

    fn write(&mut self, now: Now, snapshot: &EntrySnapshot, ended: EntryChange) {
        let after = if let EntryChange::Write(entry) = &ended { Some(entry) } else { None };
        if ended != EntryChange::Unchanged {
            self.note_cleared(now, snapshot, after);
        }
        match ended {
            EntryChange::Unchanged => return,
            EntryChange::Write(entry) => self.put_entry(snapshot, entry),
            EntryChange::Delete => self.drop_entry(snapshot),
        }
        self.wave.durable = true;
        self.wave.ledger.freed.push(snapshot.hash);
    }

    /// Decides a claim. `again` is set if the claim has waited and was counted before.
    pub fn claim(
        &mut self,
        now: Now,
        snapshot: &EntrySnapshot,
        request: &ClaimRequest,
        again: bool,
    ) -> Result<ClaimDecision, ClaimError> {
        let wave = &mut self.wave;
        let before = snapshot.entry().map(|entry| entry.fence);
        let claimed = protocol::claim(snapshot.entry(), request, now.ms(), || Fence(wave.next_fence(now)));
        let opens = matches!(claimed, Ok(ClaimDecision::Granted { .. }));
        if opens && !self.ledger.open.contains_key(&snapshot.hash) {
            self.ledger.doubts.check_room(&snapshot.id.scope)?;
        }
        let stats = &mut self.ledger.stats;
        match &claimed {
            Ok(ClaimDecision::Granted { entry, takeover }) => {
                if before != Some(entry.fence) {
                    stats.granted += 1;
                    stats.takeovers += u64::from(*takeover);
                }
                self.note_cleared(now, snapshot, Some(entry));
                self.put_entry(snapshot, entry.clone());
                self.wave.durable = true;
            }
            Ok(ClaimDecision::Completed { .. }) => stats.replayed += 1,
            Ok(ClaimDecision::InProgress { .. }) => stats.conflicts += u64::from(!again),
            Ok(ClaimDecision::InDoubt { .. }) => {
                stats.in_doubt += 1;
                self.note_lapse(now, snapshot.hash);
            }
            Err(ClaimError::Mismatch) => stats.mismatches += 1,
            Err(_) => {}
        }
        claimed
    }

    /// Bounds the open entries of each scope.
    pub fn set_in_doubt_per_scope_max(&mut self, max: u64) {
        self.ledger.doubts.set_per_scope_max(max);
    }

    /// Records which leases have ended, a bounded number at a time: what is in doubt stays so when the store is opened
    /// again.
    pub fn lapse_claims(&mut self, now: Now) {
        for hash in self.ledger.doubts.lapsed(now.ms(), LAPSE_MAX) {
            self.note_lapse(now, hash);
        }
    }

    /// Records that a lease has ended, before anyone is told so.
    pub fn note_lapse(&mut self, now: Now, hash: u128) {
        let Some(row) = self.ledger.open.get(&hash).map(|open| open.row.clone()) else { return };
        if let Some(entry) = row.entry.lapsed(now.ms()) {
            self.put_entry(&EntrySnapshot { id: row.id.clone(), hash, row: Some(row), over: false }, entry);
            self.wave.durable = true;
        }
    }

    /// Scopes that are near their bound.
    pub fn near_bound(&self) -> Vec<NearDoubtLimit> {
        self.ledger.doubts.near_bound()
    }

    /// Scopes that have come near their bound since the last call.
    pub fn take_alarms(&mut self) -> Vec<NearDoubtLimit> {
        self.ledger.doubts.take_alarms()
    }

    /// Keeps the entry as long as the message of this delivery lives.
    pub fn link_delivery(&mut self, delivery: DeliveryRef, hash: u128, granted: bool) {
        let Some(queue) = self.queues.get(delivery.queue as usize).and_then(Option::as_ref) else { return };
        let Some(slot) = queue.table.delivered(delivery.seq) else { return };
        let entry = *queue.table.get(slot);
        let linked = entry.flags & FLAG_KEYED != 0;
        if linked && !granted {
            // The message was linked to its key when it was sent. Only a claim that writes anyway also links it to this
            // entry.
            return;
        }
        if !linked {
            let (queue, wave) = self.queue_and_wave(delivery.queue);
            let mut entry = entry;
            entry.flags |= FLAG_KEYED;
            queue.update(wave, slot, entry);
        }
        self.link(delivery.seq, hash);
    }

    pub(super) fn link(&mut self, seq: u64, hash: u128) {
        self.wave.ledger.linked.entry(hash).or_default().push(seq);
        self.wave.records.push(Record::Link { seq, hash });
    }

    pub fn renew_claim(
        &mut self,
        now: Now,
        snapshot: &EntrySnapshot,
        fence: Option<u64>,
        lease_ms: u64,
    ) -> Result<RemainingLease, TokenError> {
        let renewed = fence.ok_or(TokenError::Stale).and_then(|fence| {
            let entry = protocol::renew(snapshot.entry(), Fence(fence), lease_ms, now.ms())?;
            let held_ms = |entry: &protocol::LedgerEntry| match entry.stage {
                Stage::Processing { lease_ms, .. } => lease_ms,
                Stage::Completed { .. } => unreachable!("only an open claim is renewed"),
            };
            let lease_ms = held_ms(&entry);
            // A heartbeat that a power cut takes back is made up for by the full lease that every claim gets when the
            // store is opened; but that must not be a shorter one than was promised, and one that had lapsed gets none.
            self.wave.durable |= snapshot.entry().is_some_and(|before| held_ms(before) < lease_ms);
            self.note_cleared(now, snapshot, Some(&entry));
            self.put_entry(snapshot, entry);
            Ok(RemainingLease { lease_ms })
        });
        self.ledger.stats.stale += u64::from(renewed == Err(TokenError::Stale));
        renewed
    }

    pub fn end_claim(
        &mut self,
        now: Now,
        snapshot: &EntrySnapshot,
        fence: Option<u64>,
        ending: &ClaimEnding,
    ) -> Result<(), TokenError> {
        let ended = fence
            .ok_or(TokenError::Stale)
            .and_then(|fence| protocol::end(snapshot.entry(), Fence(fence), ending, now.ms()));
        self.ledger.stats.stale += u64::from(ended == Err(TokenError::Stale));
        let ended = ended?;
        let completed =
            matches!(&ended, EntryChange::Write(entry) if !matches!(entry.stage, Stage::Processing { .. }));
        self.ledger.stats.completed += u64::from(completed);
        self.write(now, snapshot, ended);
        Ok(())
    }

    /// Applies an operator's decision about an entry in doubt.
    pub fn resolve_entry(
        &mut self,
        now: Now,
        snapshot: &EntrySnapshot,
        resolution: &Resolution,
        by: &str,
    ) -> Result<(), ResolveError> {
        let wave = &mut self.wave;
        let fence = || Fence(wave.next_fence(now));
        let ended = protocol::resolve(&snapshot.id, snapshot.entry(), resolution, now.ms(), fence)?;
        self.write(now, snapshot, ended);
        let decision = match resolution {
            Resolution::Absent => "absent",
            Resolution::Completed { outcome, .. } if outcome.failed => "failed",
            Resolution::Completed { .. } => "completed",
        };
        self.audit(now, by, format!("resolved the ledger's entry {} as {decision}", snapshot.id));
        Ok(())
    }

    pub fn forget_entry(&mut self, now: Now, snapshot: &EntrySnapshot, by: &str) -> Result<(), ResolveError> {
        protocol::forget(&snapshot.id, snapshot.entry(), now.ms())?;
        self.write(now, snapshot, EntryChange::Delete);
        self.audit(now, by, format!("forgot the ledger's entry {}", snapshot.id));
        Ok(())
    }

    pub fn forget_damaged(&mut self, now: Now, id: &EntryId, hash: u128, by: &str) {
        self.wave.ledger.ended.insert(hash, None);
        self.ledger.tally.remove(hash);
        self.wave.records.push(Record::DropDamaged { hash });
        self.wave.durable = true;
        self.audit(now, by, format!("forgot the ledger's entry {id}, which was damaged"));
    }

    fn audit(&mut self, now: Now, by: &str, what: String) {
        let by = policy::truncate(by, BY_BYTES_MAX).to_owned();
        self.wave.records.push(Record::Audit { at_ms: now.ms(), by, what });
        self.wave.durable = true;
    }

    /// Prepares a key for a message that arrives or comes back: an expired entry is removed for good, so that the message
    /// does not revive it. A redrive or a release (`again`) also clears the recorded failure; otherwise the message would
    /// fail without running.
    pub fn clear_entry(&mut self, now: Now, snapshot: &EntrySnapshot, again: bool) {
        let failed = snapshot.entry().is_some_and(|entry| entry.state(now.ms()) == EntryState::Failed);
        if snapshot.over || (again && failed) {
            self.drop_entry(snapshot);
        }
    }

    pub fn prune_due(&self, now: Now) -> bool {
        self.ledger.next_prune_ms().is_some_and(|next_ms| next_ms <= now.ms())
    }

    /// Open entries that have expired.
    pub fn expired_entries(&self, now: Now) -> Vec<u128> {
        let due = self.ledger.prune_schedule.iter().take_while(|(at_ms, _)| *at_ms <= now.ms());
        due.map(|(_, hash)| *hash).take(PRUNE_MAX).collect()
    }

    /// Prunes an expired open entry, or checks it again later if it is still needed.
    pub fn prune_open(&mut self, now: Now, hash: u128, needed: bool) {
        if needed {
            // Not journaled: a reminder need not be rolled back.
            return self.ledger.check_later(hash, now.ms() + NEEDED_AGAIN_MS);
        }
        let Some(row) = self.ledger.open.get(&hash).map(|open| open.row.clone()) else { return };
        self.drop_entry(&EntrySnapshot { id: row.id.clone(), hash, row: Some(row), over: true });
        self.ledger.stats.pruned += 1;
    }

    /// Prunes expired ended entries that no message needs.
    pub fn prune(&mut self, now: Now, due: &[DueEntry], next_ms: Option<u64>) {
        for entry in due {
            if entry.linked || entry.damaged {
                let again_ms = if entry.damaged { DAMAGED_AGAIN_MS } else { NEEDED_AGAIN_MS };
                let prune_ms = now.ms() + again_ms;
                self.wave.records.push(Record::PostponeEntry { fence: entry.fence, prune_ms });
                continue;
            }
            self.wave.ledger.ended.insert(entry.hash, None);
            self.wave.records.push(Record::DropEntry { fence: entry.fence });
            self.ledger.tally.remove(entry.hash);
            self.ledger.stats.pruned += 1;
        }
        let postponed = due.iter().any(|entry| entry.linked || entry.damaged);
        let again_ms = postponed.then_some(now.ms() + NEEDED_AGAIN_MS);
        let left = due.len() >= PRUNE_MAX || self.expired_entries(now).len() >= PRUNE_MAX;
        self.ledger.prune_ms = next_ms.into_iter().chain(again_ms).min();
        if left {
            (self.ledger.prune_ms, self.ledger.pruned_ms) = (Some(0), 0);
        } else {
            self.ledger.pruned_ms = now.ms() + PRUNE_EVERY_MS;
        }
    }

    pub fn ledger_stats(&self) -> LedgerStats {
        LedgerStats {
            entries: self.ledger.tally.rows,
            open: self.ledger.open.len() as u64,
            ..self.ledger.stats
        }
    }

    /// The open entries among these, as they are now.
    pub fn open_entries(&mut self, now: Now, hashes: &[u128]) -> Vec<Option<protocol::LedgerEntry>> {
        for hash in hashes {
            self.note_lapse(now, *hash);
        }
        hashes.iter().map(|hash| self.ledger.open.get(hash).map(|open| open.row.entry.clone())).collect()
    }

    /// The open entries as they would be if the store were reopened now, and the total count.
    #[cfg(test)]
    pub fn ledger_snapshot(&self, now: Now) -> Vec<String> {
        let reopened =
            |row: &LedgerRow| format!("entry {} {:?}", row.id, row.entry.clone().after_restart(now.ms()));
        let mut lines: Vec<_> = self.ledger.open.values().map(|open| reopened(&open.row)).collect();
        lines.sort();
        lines.push(format!("entries {:?}", self.ledger.tally));
        lines.push(format!("released {:?}", self.releases));
        lines
    }
}
