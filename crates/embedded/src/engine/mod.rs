//! The state machine: pure and deterministic. Time and randomness are passed in, changes to store come out as records,
//! and nothing here does I/O.
//!
//! Work happens in waves. A wave applies operations to memory, journals what it overwrites and collects records. The
//! writer commits the records. Then the wave is either kept ([`Engine::commit`]) or undone ([`Engine::rollback`]), so
//! memory never runs ahead of the disk.

mod admin;
mod attempts;
mod copy;
mod dead;
mod dedup;
mod documents;
mod doubt;
mod groups;
mod ledger;
mod load;
mod queue;
mod receive;
mod redrive;
mod send;
mod settle;
#[cfg(test)]
mod snapshot;
mod table;
mod timers;
mod transfer;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use hapax_core::{QueueName, RedriveState, StoreError};

pub(crate) use dedup::content_id;
pub(crate) use doubt::{NearDoubtLimit, PER_SCOPE_MAX_DEFAULT};
pub(crate) use ledger::{CachedEntry, EntrySnapshot, PRUNE_MAX};
pub(crate) use load::{LoadedRow, Loader};
pub(crate) use queue::Queue;
pub(crate) use receive::{Leased, ReceiveRequest};
pub(crate) use redrive::Candidate;
use redrive::Task;
pub(crate) use send::{PreparedMessage, SenderKey};
use table::Table;
pub(crate) use transfer::{ExportStep, GroupWait, PageMessage, PageMetadata, Undecided};

use crate::record::{Header, MessageMeta, Record};
use crate::time::Now;

/// Limits for all queues of the store together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreQuota {
    /// Maximum number of messages. Default: no limit.
    pub messages_max: Option<u64>,
    /// Maximum bytes of bodies and attributes. Default: no limit.
    pub bytes_max: Option<u64>,
    /// Maximum memory for messages in bytes, at [`MEMORY_BYTES_A_MESSAGE`] each. Default: no limit.
    pub memory_bytes_max: Option<u64>,
}

/// Estimated memory per message, in bytes.
pub const MEMORY_BYTES_A_MESSAGE: u64 = 200;

/// How far ahead of the fences in use the durable fence floor is set: 10 s.
const FENCE_AHEAD_US: u64 = 10_000_000;

/// Counters of the whole store; a rollback restores them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Counters {
    pub next_seq: u64,
    pub fence: u64,
    pub messages: u64,
    pub bytes: u64,
}

/// How to undo one change.
enum Undo {
    Entry {
        queue: u32,
        slot: u32,
        before: Option<MessageMeta>,
    },
    Totals {
        queue: u32,
        totals: hapax_core::store::QueueTotals,
    },
    /// The previous content of a queue's row.
    Row(Box<crate::record::QueueRow>),
    Deletion {
        name: QueueName,
        before: Option<u64>,
    },
    Document {
        name: hapax_core::DocumentName,
        before: Option<Box<hapax_core::Document>>,
    },
    Table {
        queue: u32,
        table: Box<Table>,
        purged_before: u64,
    },
    Created {
        queue: u32,
    },
    Deleted(Box<Queue>),
    Undecided {
        queue: u32,
        group: u32,
        seq: u64,
        was: bool,
    },
    /// A deleted queue no longer waits for a message.
    NotAwaited {
        seq: u64,
        queue: u32,
    },
    GroupRequeueOrder {
        queue: u32,
        group: u32,
        before: u64,
    },
    MessageRequeueOrder {
        queue: u32,
        seq: u64,
        before: Option<u64>,
    },
    DedupAdded {
        queue: u32,
        key: u128,
        before: Option<dedup::DedupEntry>,
        sent_ms: u64,
    },
    DedupPruned {
        queue: u32,
        minute: u64,
        count: u64,
    },
    Attempt {
        queue: u32,
        key: u128,
        before: Option<Box<crate::record::AttemptRow>>,
    },
    Task {
        id: u64,
        before: Option<Box<Task>>,
    },
    Swept(Vec<(u64, u8)>),
    Forgotten(Vec<u32>),
    Paused(Option<String>),
    OpenEntry {
        hash: u128,
        before: Option<Box<crate::record::LedgerRow>>,
    },
    Release {
        hash: u128,
        before: Option<u64>,
    },
}

/// The changes of the current wave.
#[derive(Default)]
pub(crate) struct Wave {
    number: u64,
    pub counters: Counters,
    saved: Counters,
    saved_floor: u64,
    pub records: Vec<Record>,
    /// Sequence numbers inserted in this wave and the positions of their records, ascending.
    inserted: Vec<(u64, usize)>,
    journal: Vec<Undo>,
    touched: BTreeSet<u32>,
    /// Rows to delete in small steps once this wave is committed.
    purged: Vec<(u64, u8)>,
    /// The wave's changes to the ledger, except those to open entries.
    pub ledger: ledger::LedgerChanges,
    /// The wave holds a change whose loss in a power cut would break a promise.
    pub durable: bool,
}

impl Wave {
    fn next_seq(&mut self) -> u64 {
        self.counters.next_seq += 1;
        self.counters.next_seq - 1
    }

    fn next_fence(&mut self, now: Now) -> u64 {
        self.counters.fence = hapax_core::Fence(self.counters.fence).next(now.us).0;
        self.counters.fence
    }
}

/// The queues of one store.
pub(crate) struct Engine {
    queues: Vec<Option<Box<Queue>>>,
    names: HashMap<QueueName, u32>,
    timers: BTreeSet<(u64, u32)>,
    tasks: BTreeMap<u64, Task>,
    /// Parked messages and dead letters for which a FIFO group is halted, and the queue of that group.
    undecided: BTreeSet<(u64, u32)>,
    /// Those among them whose retention is over, and the queue that keeps them nevertheless. Not journaled: what is in
    /// here needlessly is looked at in vain.
    kept_letters: HashMap<u64, u32>,
    /// Rows of purged and deleted queues that are still to be deleted.
    sweep: VecDeque<(u64, u8)>,
    /// Deleted queues whose rows still exist.
    tombstones: Vec<u32>,
    /// Queues deleted since the last call of [`Engine::take_deleted`]; receives may wait on them.
    deleted: Vec<(u32, QueueName)>,
    /// Queues, and with `None` the ledger, that were closed since the last call of [`Engine::take_closed`].
    closed: Vec<(Option<u32>, StoreError)>,
    /// Deletion times of queues by name, kept as long as creating a queue of that name may have to wait.
    deletions: HashMap<QueueName, u64>,
    documents: documents::DocumentMap,
    header: Header,
    /// Damaged rows that belong to no message. They stay in the file, so they count as rows.
    unclaimed_rows: u64,
    ledger: ledger::Entries,
    /// Entries whose doubt is over while messages are parked for it, and up to which message they have been released.
    releases: BTreeMap<u128, u64>,
    quota: StoreQuota,
    pub wave: Wave,
}

impl Engine {
    pub fn header(&self) -> &Header {
        &self.header
    }

    pub fn find(&self, name: &QueueName) -> Result<u32, StoreError> {
        self.names.get(name).copied().ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    pub fn queue(&self, id: u32) -> &Queue {
        self.queues[id as usize].as_ref().expect("a named queue is there")
    }

    /// The queue and the wave, both mutable.
    fn queue_and_wave(&mut self, id: u32) -> (&mut Queue, &mut Wave) {
        let queue = self.queues[id as usize].as_mut().expect("a named queue is there");
        queue.touch(&mut self.wave);
        (queue, &mut self.wave)
    }

    pub fn take_deleted(&mut self) -> Vec<(u32, QueueName)> {
        std::mem::take(&mut self.deleted)
    }

    pub fn usage(&self) -> Counters {
        self.wave.counters
    }

    pub fn has_available(&self, queue: u32) -> bool {
        let available = |queue: &Queue| queue.paused.is_none() && queue.table.groups.any_available();
        self.queues[queue as usize].as_deref().is_some_and(available)
    }

    /// Queues that this wave changed and that still exist.
    pub fn touched(&self) -> Vec<u32> {
        self.wave.touched.iter().copied().filter(|&id| self.queues[id as usize].is_some()).collect()
    }

    /// Completes the wave's records. The header is part of every commit, so that time, sequence numbers and fences
    /// never go back. Returns `false` if there is nothing to commit.
    pub fn finish_records(&mut self, now: Now) -> bool {
        if self.wave.records.is_empty() {
            return false;
        }
        if self.wave.counters.fence >= self.header.fence_floor {
            // The floor reaches the disk before any fence of this wave reaches a consumer.
            self.header.fence_floor = self.wave.counters.fence + FENCE_AHEAD_US;
            self.wave.durable = true;
        }
        self.header.clock_ms = now.ms();
        self.header.next_seq = self.wave.counters.next_seq;
        let to_sweep = self.sweep.len() + self.wave.purged.len();
        self.header.rows = self.wave.counters.messages + to_sweep as u64 + self.unclaimed_rows;
        if self.ledger.tally != self.wave.ledger.tally_before() {
            self.wave.records.push(Record::LedgerRows(self.ledger.tally));
        }
        self.wave.records.push(Record::Header(self.header.clone()));
        true
    }

    pub fn commit(&mut self) {
        for queue in std::mem::take(&mut self.wave.touched) {
            self.reschedule(queue);
            if let Some(queue) = &mut self.queues[queue as usize] {
                queue.table.groups.sweep();
            }
        }
        self.sweep.extend(self.wave.purged.drain(..));
        self.wave.records.clear();
        self.wave.inserted.clear();
        self.wave.journal.clear();
        self.wave.saved = self.wave.counters;
        self.wave.saved_floor = self.header.fence_floor;
        self.wave.durable = false;
        self.wave.ledger = self.ledger.no_changes();
        self.wave.number += 1;
    }

    /// Undoes the wave: memory returns to its state before it.
    pub fn rollback(&mut self) {
        for undo in std::mem::take(&mut self.wave.journal).into_iter().rev() {
            self.undo(undo);
        }
        // A fence is never used again, not even one of a wave that was taken back.
        self.wave.counters = Counters { fence: self.wave.counters.fence, ..self.wave.saved };
        // A floor that did not reach the disk gives no protection.
        self.header.fence_floor = self.wave.saved_floor;
        self.wave.purged.clear();
        self.ledger.take_back(&self.wave.ledger);
        self.commit();
    }

    fn undo(&mut self, undo: Undo) {
        match undo {
            Undo::Entry { queue, slot, before } => {
                let table = &mut self.queue_mut(queue).table;
                match before {
                    None => drop(table.remove(slot)),
                    Some(entry) if table.holds(slot, entry.seq).is_some() => drop(table.replace(slot, entry)),
                    Some(entry) => table.restore(slot, entry),
                }
            }
            Undo::Totals { queue, totals } => self.queue_mut(queue).totals = totals,
            Undo::Row(row) => self.queue_mut(row.id).restore(*row),
            Undo::Deletion { name, before: Some(at_ms) } => drop(self.deletions.insert(name, at_ms)),
            Undo::Deletion { name, before: None } => drop(self.deletions.remove(&name)),
            Undo::Document { name, before } => drop(self.documents.set(&name, before.map(|before| *before))),
            Undo::Table { queue, table, purged_before } => {
                let queue = self.queue_mut(queue);
                (queue.table, queue.purged_before) = (*table, purged_before);
            }
            Undo::Created { queue } => {
                let gone = self.queues[queue as usize].take().expect("a created queue is there");
                self.names.remove(&gone.name);
                self.timers.retain(|(_, id)| *id != queue);
            }
            Undo::Deleted(queue) => {
                self.tombstones.retain(|id| *id != queue.id);
                self.names.insert(queue.name.clone(), queue.id);
                let at = queue.id as usize;
                self.queues[at] = Some(queue);
            }
            Undo::Undecided { queue, group, seq, was } => {
                self.queue_mut(queue).table.set_undecided(group, seq, was);
                if was {
                    self.undecided.insert((seq, queue));
                } else {
                    self.not_awaited(seq, queue);
                }
            }
            Undo::NotAwaited { seq, queue } => drop(self.undecided.insert((seq, queue))),
            Undo::GroupRequeueOrder { queue, group, before } => {
                self.queue_mut(queue).table.groups.set_requeue_order(group, before);
            }
            Undo::MessageRequeueOrder { queue, seq, before } => {
                self.queue_mut(queue).table.restore_requeue_order(seq, before);
            }
            Undo::DedupAdded { queue, key, before, sent_ms } => {
                self.queue_mut(queue).dedup.undo_add(key, before, sent_ms);
            }
            Undo::DedupPruned { queue, minute, count } => {
                self.queue_mut(queue).dedup.undo_prune(minute, count);
            }
            Undo::Attempt { queue, key, before } => {
                self.queue_mut(queue).attempts.set(key, before.map(|row| *row));
            }
            Undo::Task { id, before: Some(task) } => drop(self.tasks.insert(id, *task)),
            Undo::Task { id, before: None } => drop(self.tasks.remove(&id)),
            Undo::Swept(rows) => rows.into_iter().rev().for_each(|row| self.sweep.push_front(row)),
            Undo::Forgotten(ids) => self.tombstones.extend(ids),
            Undo::Paused(paused) => self.header.paused = paused,
            Undo::OpenEntry { hash, before } => drop(self.ledger.set(hash, before.map(|row| *row))),
            Undo::Release { hash, before: Some(after) } => drop(self.releases.insert(hash, after)),
            Undo::Release { hash, before: None } => drop(self.releases.remove(&hash)),
        }
    }

    fn queue_mut(&mut self, id: u32) -> &mut Queue {
        self.queues[id as usize].as_mut().expect("a queue in the journal is there")
    }

    /// Checks every invariant; slow, for tests.
    #[cfg(test)]
    pub fn check(&self) {
        let queues = || self.queues.iter().flatten();
        assert_eq!(queues().map(|queue| queue.table.len() as u64).sum::<u64>(), self.wave.counters.messages);
        assert_eq!(queues().map(|queue| queue.table.counts().bytes).sum::<u64>(), self.wave.counters.bytes);
        assert_eq!(queues().count(), self.names.len());
        for queue in queues() {
            queue.table.check();
            for (_, entry) in queue.table.iter() {
                assert!(entry.seq < self.wave.counters.next_seq && entry.order < self.wave.counters.next_seq);
                assert!(entry.fence <= self.wave.counters.fence);
                assert!(entry.order >= queue.purged_before, "a purged message came back");
            }
        }
        for queue in queues() {
            let awaited = |seq: &u64| self.waiting_for(*seq).next().is_some();
            assert!(queue.table.kept_for_others().all(|seq| awaited(&seq)), "a message is kept for nothing");
            for (_, seqs) in queue.table.groups.halted() {
                assert!(seqs.iter().all(|seq| *seq == 0 || self.undecided.contains(&(*seq, queue.id))));
            }
        }
        self.ledger.check();
    }
}
