use std::collections::HashSet;
use std::sync::Arc;

use hapax_core::{AdminError, GroupId, QueueConfig, QueueName, RedriveAllow, StoreError};

use super::table::Table;
use super::{Engine, Queue, Undo};
use crate::record::{FLAG_HISTORY, MessageMeta, QueueRow, Record, State, parked_cause, unpark_flags};
use crate::time::Now;

/// The most queues of one store.
const QUEUES_MAX: usize = 100_000;

impl Engine {
    pub fn create_queue(
        &mut self,
        now: Now,
        name: &QueueName,
        config: QueueConfig,
    ) -> Result<bool, AdminError> {
        self.validate(name, &config)?;
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
        let id = self.queues.len() as u32;
        let queue = Box::new(Queue::new(id, name.clone(), Arc::new(config), now.ms()));
        self.wave.records.push(Record::Queue(queue.row()));
        self.wave.journal.push(Undo::Created { queue: id });
        self.wave.durable = true;
        self.names.insert(name.clone(), id);
        self.queues.push(Some(queue));
        Ok(true)
    }

    pub fn set_queue(&mut self, now: Now, name: &QueueName, config: QueueConfig) -> Result<(), AdminError> {
        let id = self.find(name)?;
        self.validate(name, &config)?;
        let (queue, wave) = self.at(id);
        let before = Undo::Config { queue: id, config: queue.config.clone(), modified_ms: queue.modified_ms };
        queue.config = Arc::new(config);
        queue.modified_ms = now.ms();
        wave.journal.push(before);
        wave.records.push(Record::Queue(queue.row()));
        wave.durable = true;
        Ok(())
    }

    fn validate(&self, name: &QueueName, config: &QueueConfig) -> Result<(), AdminError> {
        config.validate(name)?;
        let Some(dead) = &config.dead_letter else { return Ok(()) };
        let problem = match self.find(&dead.queue) {
            Err(_) => "does not exist; create it first",
            Ok(id) => match &self.queue(id).config.redrive_allow {
                RedriveAllow::None => "takes no dead letters (redrive_allow is none)",
                RedriveAllow::Queues(queues) if !queues.contains(name) => {
                    "takes no dead letters of this queue (redrive_allow)"
                }
                _ => return Ok(()),
            },
        };
        Err(AdminError::Config {
            field: "dead_letter.queue",
            problem: format!("queue {} {problem}", dead.queue),
        })
    }

    pub fn delete_queue(&mut self, name: &QueueName) -> Result<(), StoreError> {
        let id = self.find(name)?;
        self.take_table(id);
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

    /// Empties the queue at once; the rows go away bit by bit.
    pub fn purge(&mut self, name: &QueueName) -> Result<u64, StoreError> {
        let id = self.find(name)?;
        let count = self.take_table(id);
        let (queue, wave) = self.at(id);
        wave.records.push(Record::Queue(queue.row()));
        wave.durable = true;
        Ok(count)
    }

    fn take_table(&mut self, id: u32) -> u64 {
        // Dead letters that other queues' groups wait for are decided about.
        let awaited: Vec<_> = if self.undecided.is_empty() {
            Vec::new()
        } else {
            let of_other =
                |entry: &MessageMeta| self.undecided.get(&entry.seq).is_some_and(|queue| *queue != id);
            let entries = self.queue(id).table.iter().filter(|(_, entry)| of_other(entry));
            entries.map(|(slot, _)| slot).collect()
        };
        for slot in awaited {
            self.decide(id, slot);
        }
        let halted = self.queue(id).table.groups.halted();
        for seq in halted.iter().flat_map(|(_, seqs)| seqs) {
            if self.undecided.remove(seq).is_some() {
                self.wave.journal.push(Undo::NotAwaited { seq: *seq, queue: id });
            }
        }
        let (queue, wave) = self.at(id);
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

    /// Deletes messages by number; looks at every message once, however many are asked for.
    pub fn discard(&mut self, id: u32, seqs: &[u64]) -> u64 {
        let seqs: HashSet<u64> = seqs.iter().copied().collect();
        let found: Vec<_> = self
            .queue(id)
            .table
            .iter()
            .filter(|(_, e)| seqs.contains(&e.seq))
            .map(|(slot, _)| slot)
            .collect();
        for &slot in &found {
            self.decide(id, slot);
        }
        let (queue, wave) = self.at(id);
        for &slot in &found {
            queue.delete(wave, slot);
        }
        wave.durable |= !found.is_empty();
        found.len() as u64
    }

    /// Puts parked messages back with a clean slate.
    pub fn release(&mut self, now: Now, id: u32, seqs: &[u64]) -> u64 {
        let mut released = 0;
        for seq in seqs {
            let Some(slot) = self.queue(id).table.parked(*seq) else { continue };
            self.decide(id, slot);
            let (queue, wave) = self.at(id);
            let mut entry = *queue.table.get(slot);
            if parked_cause(entry.flags) == Some(hapax_core::Cause::Damaged) {
                wave.records.push(Record::AcceptBody { seq: *seq });
            }
            if entry.flags & FLAG_HISTORY != 0 {
                wave.records.push(Record::ForgetHistory { seq: *seq });
            }
            entry.flags = unpark_flags(entry.flags) & !FLAG_HISTORY;
            entry.state = State::Ready;
            entry.due_ms = now.ms();
            entry.attempts = 0;
            entry.received_ms = 0;
            queue.update(wave, slot, entry);
            released += 1;
        }
        self.wave.durable |= released > 0;
        released
    }

    pub fn release_group(&mut self, id: u32, group: &GroupId) -> Result<(), AdminError> {
        let queue = self.queue(id);
        let halted = queue.table.groups.find(group).filter(|at| queue.table.groups.is_halted(*at));
        let at = halted
            .ok_or_else(|| AdminError::NotFound(format!("halted group {group} in queue {}", queue.name)))?;
        let undecided: Vec<u64> = queue.table.groups.undecided(at).iter().copied().collect();
        for seq in undecided {
            self.decided(id, group, seq);
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

    /// Sets aside a message whose stored bytes do not match their checksum.
    pub fn park_damaged(&mut self, now: Now, named: crate::receipt::DeliveryRef) {
        let (queue, wave) = self.at(named.queue);
        if let Some(slot) = queue.table.delivered(named.seq) {
            let mut entry = *queue.table.get(slot);
            // No consumer saw this delivery.
            entry.attempts = entry.attempts.saturating_sub(1);
            entry.deliveries = entry.deliveries.saturating_sub(1);
            queue.replace(wave, slot, entry);
            queue.totals.delivered -= 1;
            queue.totals.damaged += 1;
            self.park(now, named.queue, slot, hapax_core::Cause::Damaged);
        }
    }
}
