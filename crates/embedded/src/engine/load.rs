//! Rebuilding the engine from its rows, by one scan.

use std::collections::{BTreeSet, HashMap, VecDeque};

use hapax_core::{GroupId, RedriveTask};

use super::{Counters, Engine, Queue, StoreQuota, Wave, dedup};
use crate::record::{DedupRow, Header, MessageRow, QueueRow, State, park_flags};
use crate::time::Now;

/// One row as it comes out of the storage.
pub(crate) enum Loaded {
    Queue(QueueRow),
    /// `damaged` when the row's checksum does not fit.
    Message {
        row: MessageRow,
        damaged: bool,
    },
    Halted {
        queue: u32,
        group: GroupId,
    },
    /// A deduplication id that is young enough for memory; ascending by `sent_ms`, after [`Loaded::DedupMinute`].
    Dedup {
        queue: u32,
        row: DedupRow,
    },
    /// How many older ids of a minute the index holds.
    DedupMinute {
        queue: u32,
        minute: u64,
        rows: u64,
    },
    Redrive {
        task: RedriveTask,
        upto: u64,
        cursor: u64,
    },
}

/// Takes rows and gives the engine. Queues come first, then the rest in any order.
pub(crate) struct Loader {
    engine: Engine,
    now: Now,
    redrives: Vec<(RedriveTask, u64, u64)>,
    pub damaged: u64,
}

impl Loader {
    pub fn new(header: Header, quota: StoreQuota, now: Now) -> Self {
        let wave = Wave {
            counters: Counters {
                next_seq: header.next_seq.max(1),
                fence: header.fence_floor,
                ..Counters::default()
            },
            ..Wave::default()
        };
        let engine = Engine {
            queues: Vec::new(),
            names: HashMap::new(),
            timers: BTreeSet::new(),
            tasks: std::collections::BTreeMap::new(),
            sweep: VecDeque::new(),
            tombstones: Vec::new(),
            deleted: Vec::new(),
            header,
            quota,
            wave,
        };
        Self { engine, now, redrives: Vec::new(), damaged: 0 }
    }

    pub fn add(&mut self, loaded: Loaded) {
        let engine = &mut self.engine;
        match loaded {
            Loaded::Queue(row) => {
                let at = row.id as usize;
                if engine.queues.len() <= at {
                    engine.queues.resize_with(at + 1, || None);
                }
                if row.deleted {
                    engine.tombstones.push(row.id);
                    return;
                }
                engine.names.insert(row.name.clone(), row.id);
                let mut queue = Queue::new(row.id, row.name, row.config, row.created_ms);
                queue.modified_ms = row.modified_ms;
                queue.purged_before = row.purged_before;
                engine.queues[at] = Some(Box::new(queue));
            }
            Loaded::Message { row, damaged } => self.add_message(&row, damaged),
            Loaded::Halted { queue, group } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    let at = queue.table.groups.intern(Some(&group));
                    queue.table.groups.set_halted(at, true);
                }
            }
            Loaded::Dedup { queue, row } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    queue.dedup.add(row);
                }
            }
            Loaded::DedupMinute { queue, minute, rows } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    queue.dedup.count(minute, rows);
                }
            }
            Loaded::Redrive { task, upto, cursor } => self.redrives.push((task, upto, cursor)),
        }
    }

    fn add_message(&mut self, row: &MessageRow, damaged: bool) {
        let engine = &mut self.engine;
        let mut entry = row.entry;
        if damaged {
            self.damaged += 1;
        }
        let Some(queue) = engine.queues.get_mut(row.queue as usize).and_then(Option::as_mut) else {
            // Of a deleted queue. A damaged row may name any queue: it stays in the file for whoever looks.
            if !damaged {
                engine.sweep.push_back((entry.seq, entry.flags));
            }
            return;
        };
        let counters = &mut engine.wave.counters;
        if damaged {
            // Nothing in the row can be trusted but its key: keep it out of every order and count.
            entry.state = State::Parked;
            entry.flags = park_flags(0, hapax_core::Cause::Damaged);
            entry.order = entry.seq;
            entry.fence = entry.fence.min(counters.fence);
            entry.group = queue.table.groups.intern(None);
        } else if entry.order < queue.purged_before {
            engine.sweep.push_back((entry.seq, entry.flags));
            return;
        } else {
            entry.group = queue.table.groups.intern(row.group.as_ref());
        }
        counters.next_seq = counters.next_seq.max(entry.seq + 1).max(entry.order + 1);
        counters.messages += 1;
        counters.bytes += u64::from(entry.bytes);
        queue.table.insert(entry);
    }

    /// The engine, with every queue's timer set.
    pub fn finish(mut self) -> Engine {
        for (task, upto, cursor) in std::mem::take(&mut self.redrives) {
            self.engine.load_task(task, upto, cursor, self.now);
        }
        for id in 0..self.engine.queues.len() as u32 {
            self.engine.reschedule(id);
            if let Some(queue) = &mut self.engine.queues[id as usize] {
                queue.table.groups.sweep();
            }
        }
        self.engine.commit();
        self.engine
    }

    /// From when on deduplication ids belong into memory.
    pub fn dedup_memory_from_ms(&self) -> u64 {
        self.now.ms().saturating_sub(dedup::MEMORY_MS)
    }
}
