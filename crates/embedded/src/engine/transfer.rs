//! Export and import: what memory knows of a queue that is exported, and messages that come from another store.

use std::collections::HashSet;

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::ledger::{DOUBT_RETENTION_MS, TTL_MS_MAX};
use hapax_core::transfer::{FENCE_BOUND_MAX, IMPORTED_MS_MIN};
use hapax_core::{
    AdminError, EntryId, ExportedEntry, ExportedMessage, ExportedStage, FailureCause, Fence, GroupId,
    MessageId, QueueName, SendError, Tier, policy, validate,
};

use super::ledger::EntrySnapshot;
use super::send::within_quotas;
use super::{Engine, Queue, dedup};
use crate::record::{
    Content, DeadRow, DedupRow, FLAG_DEAD, FLAG_HISTORY, FLAG_KEYED, MessageMeta, Record, State, park_flags,
    parked_cause,
};
use crate::time::Now;

/// A message of a page.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PageMessage {
    pub seq: u64,
    pub order: u64,
    /// Its group is halted for it.
    pub undecided: bool,
    /// It is parked because its row is damaged.
    pub damaged: bool,
}

/// A group of the queue waits for a message that is not in the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GroupWait {
    /// The message's place in the queue; 0 if that is not known.
    pub place: u64,
    pub group: GroupId,
    pub seq: u64,
    /// `None`: the message is not known any more.
    pub id: Option<MessageId>,
}

/// Halted groups and the messages that they wait for.
pub(crate) type Undecided = Vec<(GroupId, Vec<u64>)>;

/// What memory says to a request for a page.
pub(crate) enum ExportStep {
    /// The places of what these groups wait for have to be read first.
    ReadWaits {
        queue: u32,
        name: QueueName,
        undecided: Undecided,
    },
    Page(PageMetadata),
}

/// What memory knows of one page of a queue.
pub(crate) struct PageMetadata {
    pub queue: u32,
    pub now_ms: u64,
    /// When the queue was paused. What is in flight counts as returned then: it is the same time on every page.
    pub paused_ms: u64,
    /// The page's messages, in order of their places.
    pub messages: Vec<PageMessage>,
    /// What groups wait for at places of this page.
    pub waits: Vec<GroupWait>,
    /// Places from here on belong to a later page; `None`: this is the last page.
    pub upto: Option<u64>,
    pub purged_before: u64,
    pub dedup_window_ms: u64,
}

impl Queue {
    /// Forgets what is kept in memory for an export.
    pub fn end_export(&mut self) {
        self.waits = None;
        self.table.forget_places();
    }

    /// The messages behind a place and what groups wait for there, at most `limit` of each.
    fn page(&mut self, after: u64, limit: usize) -> (Vec<PageMessage>, Vec<GroupWait>, Option<u64>) {
        let found: Vec<MessageMeta> = self.table.behind(after).take(limit + 1).copied().collect();
        let mut upto = found.get(limit).map(|entry| entry.order);
        let groups = &self.table.groups;
        let all = self.waits.as_deref().unwrap_or_default();
        let first = all.partition_point(|wait| wait.place <= after && (wait.place, after) != (0, 0));
        let own = |wait: &&GroupWait| upto.is_none_or(|upto| wait.place < upto);
        // Some may have been decided about since the export began.
        let waits = |wait: &&GroupWait| {
            groups.find(&wait.group).is_some_and(|at| groups.undecided(at).contains(&wait.seq))
        };
        let mut waits: Vec<GroupWait> =
            all[first..].iter().take_while(own).filter(waits).take(limit + 1).cloned().collect();
        if let Some(last) = waits.get(limit).map(|wait| wait.place).filter(|place| *place > 0) {
            upto = Some(last);
            waits.retain(|wait| wait.place < last);
        }
        let message = |entry: &MessageMeta| PageMessage {
            seq: entry.seq,
            order: entry.order,
            undecided: groups.undecided(entry.group).contains(&entry.seq),
            damaged: parked_cause(entry.flags) == Some(FailureCause::Damaged),
        };
        let own = |entry: &&MessageMeta| upto.is_none_or(|upto| entry.order < upto);
        (found.iter().filter(own).map(message).collect(), waits, upto)
    }
}

impl Engine {
    /// What is behind a place in a paused queue, at most `limit`; without `after`, only what is needed for the page's
    /// deduplication ids. `waits` answers [`ExportStep::ReadWaits`].
    pub fn export(
        &mut self,
        now: Now,
        name: &QueueName,
        after: Option<u64>,
        limit: usize,
        waits: Option<Vec<GroupWait>>,
    ) -> Result<ExportStep, AdminError> {
        let id = self.find(name)?;
        let queue = self.queue_and_wave(id).0;
        let Some(paused_ms) = queue.paused.as_ref().map(|paused| paused.since_ms) else {
            let problem =
                format!("queue {name} is not paused, so it changes while it is exported; pause it first");
            return Err(AdminError::Refused(problem));
        };
        // What is kept for an export is built again when one begins, or where it is missing.
        if after.is_none() || (after == Some(0) && waits.is_none()) {
            queue.end_export();
        }
        if let Some(waits) = waits {
            queue.waits = Some(waits);
        }
        let mut page = PageMetadata {
            queue: id,
            now_ms: now.ms(),
            paused_ms,
            messages: Vec::new(),
            waits: Vec::new(),
            upto: None,
            purged_before: queue.purged_before,
            dedup_window_ms: queue.config.dedup.window_ms,
        };
        if let Some(after) = after {
            if queue.waits.is_none() {
                let undecided = queue.table.groups.halted();
                return Ok(ExportStep::ReadWaits { queue: id, name: name.clone(), undecided });
            }
            (page.messages, page.waits, page.upto) = queue.page(after, limit);
        }
        Ok(ExportStep::Page(page))
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
        let (queue, wave) = self.queue_and_wave(id);
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
        let base_min_ms = (now.ms() + retention_ms.min(IMPORTED_MS_MIN)).saturating_sub(retention_ms);
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
        let (queue, wave) = self.queue_and_wave(id);
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
        known: &EntrySnapshot,
        exported: ExportedEntry,
    ) -> Result<(), SendError> {
        validate::import_entry(&exported)?;
        // Its time may be over because a message needed it, which may come later.
        let kept_ms = now.ms() + IMPORTED_MS_MIN;
        let stage = match exported.stage {
            ExportedStage::InDoubt { since_ms, on_doubt } => {
                self.ledger.doubts.check_import(&exported.id)?;
                let until_ms = since_ms.max(kept_ms.saturating_sub(DOUBT_RETENTION_MS));
                Stage::Processing { lease_ms: 1, until_ms, on_doubt, doubted: true }
            }
            ExportedStage::Completed { at_ms, ttl_ms, outcome } => {
                let end_ms = (at_ms + ttl_ms).clamp(kept_ms, now.ms() + TTL_MS_MAX);
                Stage::Completed {
                    at_ms,
                    ttl_ms: end_ms.saturating_sub(at_ms),
                    outcome: outcome.without_oversize_value(),
                }
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
