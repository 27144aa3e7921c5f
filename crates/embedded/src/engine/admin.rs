use std::collections::HashSet;
use std::fmt::Write as _;
use std::sync::Arc;

use hapax_core::{
    AdminError, GroupId, QueueConfig, QueueName, QueuePause, Revision, StoreError, policy, validate,
};

use super::table::Table;
use super::{Engine, Queue, Undo};
use crate::record::{FLAG_HISTORY, MessageMeta, QueueRow, Record, State, parked_cause, unpark_flags};
use crate::time::Now;

/// Maximum number of queues per store.
const QUEUES_MAX: usize = 100_000;

impl Engine {
    pub fn create_queue(
        &mut self,
        now: Now,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        self.validate(name, &config)?;
        self.check_new_queue()?;
        if let Ok(id) = self.find(name) {
            return match self.queue(id).config.first_difference(&config) {
                None => Ok(false),
                Some(field) => Err(AdminError::Exists(name.clone(), field)),
            };
        }
        if self.names.len() >= QUEUES_MAX {
            return Err(AdminError::Refused(format!(
                "the store has {QUEUES_MAX} queues, the most it may have"
            )));
        }
        let deleted = || format!("queue {name} was deleted");
        validate::interval(now.ms(), self.deletions.get(name).copied(), interval_ms, deleted)?;
        let id = self.queues.len() as u32;
        let mut queue = Box::new(Queue::new(id, name.clone(), Arc::new(config), now.ms()));
        queue.revision = self.wave.next_seq();
        self.wave.records.push(Record::Queue(queue.row()));
        self.wave.journal.push(Undo::Created { queue: id });
        self.wave.durable = true;
        self.names.insert(name.clone(), id);
        self.queues.push(Some(queue));
        Ok(true)
    }

    pub fn set_queue(
        &mut self,
        now: Now,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        let id = self.find_open(name)?;
        let actual = Revision(self.queue(id).revision);
        if let Some(expected) = expected.filter(|expected| *expected != actual) {
            return Err(AdminError::RevisionConflict { what: format!("queue {name}"), expected, actual });
        }
        self.validate(name, &config)?;
        if *self.queue(id).config == config {
            return Ok(actual);
        }
        let (queue, wave) = self.queue_and_wave(id);
        wave.journal.push(Undo::Row(Box::new(queue.row())));
        queue.config = Arc::new(config);
        queue.modified_ms = now.ms();
        queue.revision = wave.next_seq();
        wave.records.push(Record::Queue(queue.row()));
        wave.durable = true;
        Ok(Revision(queue.revision))
    }

    pub fn pause_queue(
        &mut self,
        now: Now,
        name: &QueueName,
        by: &str,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        let id = self.find_open(name)?;
        if self.queue(id).paused.is_some() {
            return Ok(());
        }
        let pause = QueuePause::new(now.ms(), by, reason);
        let why = pause.reason.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let what = format!("paused queue {name}{why}");
        self.set_paused(now, id, pause.by.clone(), Some(pause), what);
        Ok(())
    }

    pub fn resume_queue(&mut self, now: Now, name: &QueueName, by: &str) -> Result<(), StoreError> {
        let id = self.find_open(name)?;
        if self.queue(id).paused.is_some() {
            self.set_paused(
                now,
                id,
                policy::truncate(by, 256).to_owned(),
                None,
                format!("resumed queue {name}"),
            );
        }
        Ok(())
    }

    pub(super) fn set_paused(
        &mut self,
        now: Now,
        id: u32,
        by: String,
        paused: Option<QueuePause>,
        what: String,
    ) {
        let (queue, wave) = self.queue_and_wave(id);
        wave.journal.push(Undo::Row(Box::new(queue.row())));
        queue.paused = paused;
        queue.end_export();
        wave.records.push(Record::Queue(queue.row()));
        wave.records.push(Record::Audit { at_ms: now.ms(), by, what });
        wave.durable = true;
    }

    fn validate(&self, name: &QueueName, config: &QueueConfig) -> Result<(), AdminError> {
        let find = |dead: &QueueName| self.find(dead).ok().map(|id| &*self.queue(id).config);
        validate::queue(name, config, find)
    }

    pub fn delete_queue(&mut self, now: Now, name: &QueueName) -> Result<(), StoreError> {
        let id = self.find(name)?;
        self.note_deletion(now, name);
        self.take_table(now, id);
        let mut queue = self.queues[id as usize].take().expect("a named queue is there");
        self.names.remove(name);
        if let Some(at_ms) = queue.timer.take() {
            self.timers.remove(&(at_ms, id));
        }
        self.tombstones.push(id);
        self.deleted.push((id, name.clone()));
        self.wave.records.push(Record::Queue(QueueRow { deleted: true, ..queue.row() }));
        self.wave.journal.push(Undo::Deleted(queue));
        self.wave.durable = true;
        Ok(())
    }

    /// Empties the queue at once; the rows are deleted in small steps.
    pub fn purge(&mut self, now: Now, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        let id = self.find_open(name)?;
        let last = Some(self.queue(id).purged_ms).filter(|at_ms| *at_ms > 0);
        validate::interval(now.ms(), last, interval_ms, || format!("queue {name} was purged"))?;
        let count = self.take_table(now, id);
        let (queue, wave) = self.queue_and_wave(id);
        wave.journal.push(Undo::Row(Box::new(queue.row())));
        queue.purged_ms = now.ms();
        wave.records.push(Record::Queue(queue.row()));
        wave.durable = true;
        Ok(count)
    }

    /// Records when a queue of this name was deleted, and removes records that are too old to matter.
    fn note_deletion(&mut self, now: Now, name: &QueueName) {
        let before_ms = now.ms().saturating_sub(policy::INTERVAL_MS_MAX);
        let known = self.deletions.len();
        // Not journaled: records this old are not needed, whether or not the wave is committed.
        self.deletions.retain(|_, at_ms| *at_ms >= before_ms);
        if self.deletions.len() < known {
            self.wave.records.push(Record::PruneDeletedQueues { before_ms });
        }
        let before = self.deletions.insert(name.clone(), now.ms());
        self.wave.journal.push(Undo::Deletion { name: name.clone(), before });
        self.wave.records.push(Record::DeletedQueue { name: name.clone(), at_ms: now.ms() });
    }

    fn take_table(&mut self, now: Now, id: u32) -> u64 {
        // Dead letters that other queues' groups wait for are decided about.
        let awaited: Vec<_> = if self.undecided.is_empty() {
            Vec::new()
        } else {
            let of_other = |entry: &MessageMeta| self.waiting_for(entry.seq).any(|queue| queue != id);
            let entries = self.queue(id).table.iter().filter(|(_, entry)| of_other(entry));
            entries.map(|(slot, _)| slot).collect()
        };
        for slot in awaited {
            self.clear_waits(now, id, slot);
        }
        let halted = self.queue(id).table.groups.halted();
        for seq in halted.iter().flat_map(|(_, seqs)| seqs) {
            if self.not_awaited(*seq, id) {
                self.wave.journal.push(Undo::NotAwaited { seq: *seq, queue: id });
            }
        }
        let (queue, wave) = self.queue_and_wave(id);
        let fresh = Table::new(queue.config.is_fifo());
        let table = std::mem::replace(&mut queue.table, fresh);
        let purged_before = std::mem::replace(&mut queue.purged_before, wave.counters.next_seq);
        queue.holders.clear();
        wave.purged.extend(table.iter().map(|(_, entry)| (entry.seq, entry.flags)));
        for (group, seqs) in halted {
            let unhalt = |seq| Record::Unhalt { queue: id, group: group.clone(), seq };
            wave.records.extend(seqs.into_iter().map(unhalt));
        }
        wave.counters.messages -= table.len() as u64;
        wave.counters.bytes -= table.counts().bytes;
        let count = table.len() as u64;
        wave.journal.push(Undo::Table { queue: id, table: Box::new(table), purged_before });
        count
    }

    pub fn queues(&self) -> Vec<&Queue> {
        let mut queues: Vec<_> = self.queues.iter().flatten().map(Box::as_ref).collect();
        queues.sort_by(|a, b| a.name.cmp(&b.name));
        queues
    }

    /// Deletes waiting and parked messages by number and returns those that are in flight. Scans the messages once,
    /// regardless of how many are requested.
    pub fn discard(
        &mut self,
        now: Now,
        id: u32,
        seqs: &[u64],
        by: &str,
        ids: impl Fn(u64) -> hapax_core::MessageId,
    ) -> (u64, Vec<u64>) {
        let seqs: HashSet<u64> = seqs.iter().copied().collect();
        let (mut found, mut in_flight) = (Vec::new(), Vec::new());
        for (slot, entry) in self.queue(id).table.iter().filter(|(_, entry)| seqs.contains(&entry.seq)) {
            if entry.state == State::InFlight {
                in_flight.push(entry.seq);
            } else {
                found.push(slot);
            }
        }
        for &slot in &found {
            self.clear_waits(now, id, slot);
        }
        let (queue, wave) = self.queue_and_wave(id);
        let mut what = format!("discarded from queue {}:", queue.name);
        for &slot in &found {
            let entry = queue.delete(wave, slot);
            let _ = write!(what, " {}", ids(entry.seq));
        }
        if !found.is_empty() {
            let by = policy::truncate(by, 256).to_owned();
            wave.records.push(Record::Audit { at_ms: now.ms(), by, what });
            wave.durable = true;
        }
        (found.len() as u64, in_flight)
    }

    /// Puts parked messages back with a clean slate. Their retention begins again: it may have ended while they waited for
    /// a decision.
    pub fn release(&mut self, now: Now, id: u32, seqs: &[u64]) -> u64 {
        let mut released = 0;
        for seq in seqs {
            let Some(slot) = self.queue(id).table.parked(*seq) else { continue };
            self.clear_waits_here(now, id, slot);
            let (queue, wave) = self.queue_and_wave(id);
            let mut entry = *queue.table.get(slot);
            if parked_cause(entry.flags) == Some(hapax_core::FailureCause::Damaged) {
                wave.records.push(Record::AcceptBody { seq: *seq });
            }
            if entry.flags & FLAG_HISTORY != 0 {
                wave.records.push(Record::ForgetHistory { seq: *seq });
            }
            entry.flags = unpark_flags(entry.flags) & !FLAG_HISTORY;
            entry.state = State::Ready;
            entry.due_ms = now.ms();
            entry.base_ms = now.ms();
            entry.attempts = 0;
            entry.received_ms = 0;
            queue.update(wave, slot, entry);
            released += 1;
        }
        self.wave.durable |= released > 0;
        released
    }

    pub fn release_group(&mut self, now: Now, id: u32, group: &GroupId) -> Result<(), AdminError> {
        let queue = self.queue(id);
        let halted = queue.table.groups.find(group).filter(|at| queue.table.groups.is_halted(*at));
        let at = halted
            .ok_or_else(|| AdminError::NotFound(format!("halted group {group} in queue {}", queue.name)))?;
        let undecided: Vec<u64> = queue.table.groups.undecided(at).iter().copied().collect();
        for seq in undecided {
            self.clear_wait(now, id, Some(group), seq);
        }
        Ok(())
    }

    pub fn resume(&mut self, now: Now, by: &str) {
        if let Some(paused) = self.header.paused.take() {
            let what = format!("resumed; it was paused because {paused}");
            self.wave.journal.push(Undo::Paused(Some(paused)));
            self.wave.records.push(Record::Audit { at_ms: now.ms(), by: by.to_owned(), what });
            self.wave.durable = true;
        }
    }

    /// Parks a message whose stored bytes do not match their checksum.
    pub fn park_damaged(&mut self, now: Now, delivery: crate::receipt::DeliveryRef) {
        let (queue, wave) = self.queue_and_wave(delivery.queue);
        if let Some(slot) = queue.table.delivered(delivery.seq) {
            let mut entry = *queue.table.get(slot);
            // No consumer received this delivery.
            entry.attempts = entry.attempts.saturating_sub(1);
            entry.deliveries = entry.deliveries.saturating_sub(1);
            queue.replace(wave, slot, entry);
            queue.totals.delivered -= 1;
            queue.totals.damaged += 1;
            self.park(now, delivery.queue, slot, hapax_core::FailureCause::Damaged);
        }
    }
}
