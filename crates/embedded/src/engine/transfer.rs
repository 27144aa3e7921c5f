//! Export and import: what memory knows of a queue that is exported, and messages that come from another store.

use std::collections::{BTreeSet, HashSet};

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::ledger::{DOUBT_MS, TTL_MS_MAX};
use hapax_core::transfer::{FENCE_BOUND_MAX, MOVE_MS_MAX};
use hapax_core::{
    AdminError, EntryId, ExportedEntry, ExportedMessage, ExportedStage, Fence, GroupId, QueueName, SendError,
    Tier, policy, validate,
};

use super::ledger::Known;
use super::send::within_quotas;
use super::{Engine, dedup};
use crate::record::{
    Content, DeadRow, DedupRow, FLAG_DEAD, FLAG_HISTORY, FLAG_KEYED, MessageMeta, Record, State, park_flags,
};
use crate::time::Now;

/// What memory knows of one page of a queue.
pub(crate) struct PageOf {
    pub queue: u32,
    pub name: QueueName,
    pub now_ms: u64,
    /// Numbers of the page's messages, in order of their places.
    pub seqs: Vec<u64>,
    /// Places from here on belong to a later page; `None`: this is the last page.
    pub upto: Option<u64>,
    /// Halted groups and the messages that they wait for.
    pub undecided: Vec<(GroupId, Vec<u64>)>,
    /// Messages that are parked because their rows are damaged.
    pub damaged: Vec<u64>,
    pub purged_before: u64,
    pub dedup_window_ms: u64,
}

impl Engine {
    /// The messages of a paused queue behind a place, at most `limit`.
    pub fn export(&self, now: Now, name: &QueueName, after: u64, limit: usize) -> Result<PageOf, AdminError> {
        let id = self.find(name)?;
        let queue = self.queue(id);
        if queue.paused.is_none() {
            let problem =
                format!("queue {name} is not paused, so it changes while it is exported; pause it first");
            return Err(AdminError::Refused(problem));
        }
        // The smallest places behind `after`: one look at each message, and no more memory than a page.
        let mut first = BTreeSet::new();
        for (_, entry) in queue.table.iter().filter(|(_, entry)| entry.order > after) {
            first.insert((entry.order, entry.seq));
            if first.len() > limit + 1 {
                first.pop_last();
            }
        }
        let upto = (first.len() > limit).then(|| first.pop_last().expect("more than a page").0);
        Ok(PageOf {
            queue: id,
            name: name.clone(),
            now_ms: now.ms(),
            seqs: first.into_iter().map(|(_, seq)| seq).collect(),
            upto,
            undecided: queue.table.groups.halted(),
            damaged: queue.table.parked_for(hapax_core::Cause::Damaged),
            purged_before: queue.purged_before,
            dedup_window_ms: queue.config.dedup.window_ms,
        })
    }

    pub fn fence_bound(&self) -> Fence {
        Fence(self.header.fence_floor)
    }

    pub fn raise_fence(&mut self, now: Now, bound: Fence) -> Result<(), hapax_core::StoreError> {
        validate::within("fence", bound.0, 0, FENCE_BOUND_MAX)?;
        let fence = &mut self.wave.counters.fence;
        if bound.0 > *fence {
            *fence = bound.0;
            let what = format!("raised fences to {bound} for an import");
            self.wave.records.push(Record::Audit { at_ms: now.ms(), by: "import".into(), what });
            self.wave.durable = true;
        }
        Ok(())
    }

    /// Whether a queue exists, and did so at a time: numbers of deleted queues may be used again.
    pub fn has_queue(&self, id: u32, at_ms: u64) -> bool {
        let queue = self.queues.get(id as usize).and_then(Option::as_ref);
        queue.is_some_and(|queue| queue.created_ms <= at_ms)
    }

    /// Which of these numbers are messages of any queue. Looks at every message.
    pub fn live(&self, seqs: &HashSet<u64>) -> HashSet<u64> {
        let tables = self.queues.iter().flatten().map(|queue| &queue.table);
        let all = tables.flat_map(super::table::Table::iter).map(|(_, entry)| entry.seq);
        all.filter(|seq| seqs.contains(seq)).collect()
    }

    /// Adds a message of another store behind those that are there; gives its number.
    pub fn import(
        &mut self,
        now: Now,
        id: u32,
        message: ExportedMessage,
        content: Content,
    ) -> Result<u64, SendError> {
        let quota = self.quota;
        let (queue, wave) = self.at(id);
        validate::import(&queue.config, &message)?;
        let bytes = message.bytes_counted();
        within_quotas(queue, wave, &quota, bytes)?;
        let seq = wave.next_seq();
        wave.counters.fence = wave.counters.fence.max(message.fence.0);
        let links = links(&queue.name, queue.config.tier, &message);
        let mut flags = if links.is_empty() { 0 } else { FLAG_KEYED };
        flags |= if message.dead.is_some() { FLAG_DEAD } else { 0 };
        flags |= if message.history.is_empty() { 0 } else { FLAG_HISTORY };
        let (state, flags) = match message.parked {
            Some(cause) => (State::Parked, park_flags(flags, cause)),
            None if message.visible_ms > now.ms() => (State::Delayed, flags),
            None => (State::Ready, flags),
        };
        // What will need a message that is over, for example a group that waits for it, may come later.
        let retention_ms = queue.config.retention_ms;
        let base_min_ms = (now.ms() + retention_ms.min(MOVE_MS_MAX)).saturating_sub(retention_ms);
        let entry = MessageMeta {
            seq,
            order: seq,
            sent_ms: message.sent_ms,
            base_ms: message.retained_from_ms.max(base_min_ms),
            due_ms: message.visible_ms,
            fence: message.fence.0,
            first_ms: message.first_received_ms,
            // No delivery of this store can be extended.
            received_ms: 0,
            attempts: message.attempts,
            deliveries: message.deliveries,
            bytes: bytes as u32,
            group: 0,
            state,
            priority: message.priority.0,
            flags,
        };
        queue.add(wave, entry, message.group.clone(), content);
        let history = message.history.into_iter().map(|failed| Record::History { seq, failed });
        wave.records.extend(history);
        if let Some(dead) = message.dead {
            wave.records.push(Record::Dead(DeadRow {
                seq,
                source: dead.source,
                // A group that waits for it says where it returns to: see `place_undecided`.
                source_order: seq,
                cause: dead.cause,
                error: dead.error,
                attempts: dead.attempts,
                deliveries: dead.deliveries,
                first_ms: dead.first_received_ms,
                died_ms: dead.died_ms,
            }));
        }
        if let Some(group) = message.group.filter(|_| message.undecided) {
            self.await_decision(id, &group, seq);
        }
        for entry in links {
            self.link(seq, entry.hash());
        }
        Ok(seq)
    }

    /// Halts a group for a dead letter, or, without one, until the group is released. The dead letter will return to the
    /// place that is next now, which this gives.
    pub fn place_undecided(&mut self, id: u32, group: &GroupId, dead: Option<DeadRow>) -> u64 {
        let seq = dead.as_ref().map_or(0, |dead| dead.seq);
        let source_order = self.wave.next_seq();
        if let Some(dead) = dead {
            self.wave.records.push(Record::Dead(DeadRow { source_order, ..dead }));
        }
        self.await_decision(id, group, seq);
        source_order
    }

    /// Whether a message that was delivered is in some queue.
    pub fn is_live(&self, seq: u64) -> bool {
        self.queues.iter().flatten().any(|queue| queue.table.delivered(seq).is_some())
    }

    /// Whether a group waits for a decision about a message.
    pub fn awaits(&self, id: u32, group: &GroupId, seq: u64) -> bool {
        let groups = &self.queue(id).table.groups;
        groups.find(group).is_some_and(|at| groups.undecided(at).contains(&seq))
    }

    /// The number of a message that is not there any more, and whose id is remembered.
    pub fn number_of_gone(&mut self) -> u64 {
        self.wave.next_seq()
    }

    /// Whether a queue would take a deduplication id from another store: its window is not over.
    pub fn remembers(&self, now: Now, id: u32, hash: u128) -> bool {
        self.queue(id).dedup.seen(hash, now.ms()).is_some()
    }

    /// Remembers a deduplication id that another store has remembered.
    pub fn import_dedup(&mut self, id: u32, key: u128, seq: u64, sent_ms: u64) {
        let (queue, wave) = self.at(id);
        queue.remember(wave, DedupRow { key, seq, order: seq, sent_ms });
        wave.durable = true;
    }

    pub fn in_dedup_window(&self, now: Now, id: u32, sent_ms: u64) -> bool {
        policy::is_duplicate(sent_ms, self.queue(id).config.dedup.window_ms, now.ms())
    }

    pub fn needs_stored_dedup(&self, id: u32) -> bool {
        self.queue(id).config.dedup.window_ms > dedup::MEMORY_MS
    }

    /// Adds an entry of another store under a key that this one does not know.
    pub fn import_entry(
        &mut self,
        now: Now,
        known: &Known,
        exported: ExportedEntry,
    ) -> Result<(), SendError> {
        validate::import_entry(&exported)?;
        // Its time may be over because a message needed it, which may come later.
        let kept_ms = now.ms() + MOVE_MS_MAX;
        let stage = match exported.stage {
            ExportedStage::InDoubt { since_ms, on_doubt } => {
                self.ledger.doubts.check_import(&exported.id)?;
                let until_ms = since_ms.max(kept_ms.saturating_sub(DOUBT_MS));
                Stage::Processing { lease_ms: 1, until_ms, on_doubt, doubted: true }
            }
            ExportedStage::Completed { at_ms, ttl_ms, outcome } => {
                let end_ms = (at_ms + ttl_ms).clamp(kept_ms, now.ms() + TTL_MS_MAX);
                Stage::Completed { at_ms, ttl_ms: end_ms.saturating_sub(at_ms), outcome: outcome.kept() }
            }
        };
        let entry = LedgerEntry {
            fingerprint: exported.fingerprint,
            owner: exported.owner,
            fence: Fence(self.wave.next_fence(now)),
            claimed_ms: exported.claimed_ms,
            takeovers: exported.takeovers,
            stage,
        };
        self.put_entry(known, entry);
        self.wave.durable = true;
        Ok(())
    }
}

/// The entries that a message needs: those it needed in its former store, and the one of its key.
fn links(queue: &QueueName, tier: Tier, message: &ExportedMessage) -> Vec<EntryId> {
    let mut links = message.entries.clone();
    if tier == Tier::EffectivelyOnce {
        let own = EntryId::of_queue(queue, message.key.clone());
        if !links.contains(&own) {
            links.push(own);
        }
    }
    links
}
