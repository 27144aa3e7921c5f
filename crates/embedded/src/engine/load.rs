//! Rebuilds the engine from its rows in one scan.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};

use hapax_core::{Document, GroupId, QueueName, RedriveTask};

use super::{Counters, Engine, Queue, StoreQuota, Table, Wave, dedup};
use crate::record::{
    AttemptRow, DedupRow, Header, LedgerRow, MessageMeta, MessageRow, QueueRow, Tally, park_flags,
};
use crate::time::Now;

/// Upper bound for sequence numbers; no store reaches it. A larger number comes from a flipped bit.
const SEQ_END: u64 = 1 << 60;

/// One row read from the storage.
pub(crate) enum LoadedRow {
    Queue(QueueRow),
    /// `damaged` is set if the row's checksum does not match.
    Message {
        row: MessageRow,
        damaged: bool,
    },
    /// A FIFO group is halted because of a message.
    Halted {
        queue: u32,
        group: GroupId,
        seq: u64,
    },
    /// A deduplication id recent enough for memory; ascending by `sent_ms`, after [`LoadedRow::DedupMinute`].
    Dedup {
        queue: u32,
        row: DedupRow,
    },
    /// How many older ids of one minute are in the index.
    DedupMinute {
        queue: u32,
        minute: u64,
        rows: u64,
    },
    /// A receive that may be repeated.
    Attempt {
        queue: u32,
        row: AttemptRow,
    },
    /// A queue of this name was deleted a short time ago.
    DeletedQueue {
        name: QueueName,
        at_ms: u64,
    },
    Document(Document),
    Redrive {
        task: RedriveTask,
        upto: u64,
        cursor: u64,
    },
    /// An open entry of the ledger.
    Entry(LedgerRow),
    /// Messages after this one are still parked for an entry whose doubt is over.
    Released {
        hash: u128,
        after: u64,
    },
    /// How many entries the ledger has, and when to look for some to prune.
    Entries {
        tally: Tally,
        prune_ms: Option<u64>,
    },
}

/// Takes the rows and builds the engine. Queues come first, the rest in any order.
pub(crate) struct Loader {
    engine: Engine,
    now: Now,
    redrives: Vec<(RedriveTask, u64, u64)>,
    damaged_rows: Vec<MessageRow>,
    seen_rows: u64,
    pub damaged: u64,
    pub warnings: Vec<String>,
}

fn put(queue: &mut Queue, counters: &mut Counters, entry: MessageMeta) {
    counters.next_seq = counters.next_seq.max(entry.seq + 1).max(entry.order + 1);
    counters.messages += 1;
    counters.bytes += u64::from(entry.bytes);
    queue.table.insert(entry);
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
            tasks: BTreeMap::new(),
            undecided: BTreeSet::new(),
            kept_letters: HashMap::new(),
            sweep: VecDeque::new(),
            tombstones: Vec::new(),
            deleted: Vec::new(),
            closed: Vec::new(),
            deletions: HashMap::new(),
            documents: super::documents::DocumentMap::default(),
            header,
            unclaimed_rows: 0,
            ledger: super::ledger::Entries::default(),
            releases: BTreeMap::new(),
            quota,
            wave,
        };
        Self {
            engine,
            now,
            redrives: Vec::new(),
            damaged_rows: Vec::new(),
            seen_rows: 0,
            damaged: 0,
            warnings: Vec::new(),
        }
    }

    /// Adds a warning for the operator.
    pub fn warn(&mut self, warning: &str) {
        if self.warnings.len() < 100 {
            self.warnings.push(warning.to_owned());
        }
    }

    pub fn add(&mut self, loaded: LoadedRow) {
        let engine = &mut self.engine;
        match loaded {
            LoadedRow::Queue(row) => {
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
                queue.revision = row.revision;
                queue.purged_ms = row.purged_ms;
                queue.paused = row.paused;
                engine.queues[at] = Some(Box::new(queue));
            }
            LoadedRow::Message { row, damaged } => self.add_message(row, damaged),
            LoadedRow::Halted { queue, group, seq } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    let at = queue.table.groups.intern(Some(&group));
                    queue.table.set_undecided(at, seq, true);
                    if seq != 0 {
                        engine.undecided.insert((seq, queue.id));
                    }
                }
            }
            LoadedRow::Dedup { .. } if hapax_core::mutant::is("dedup-forgotten-on-restart") => {}
            LoadedRow::Dedup { queue, row } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    queue.dedup.add(row);
                }
            }
            LoadedRow::DedupMinute { queue, minute, rows } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    queue.dedup.count(minute, rows);
                }
            }
            LoadedRow::Attempt { queue, row } => {
                if let Some(queue) = engine.queues.get_mut(queue as usize).and_then(Option::as_mut) {
                    queue.attempts.set(row.key, Some(row));
                }
            }
            LoadedRow::DeletedQueue { name, at_ms } => drop(engine.deletions.insert(name, at_ms)),
            LoadedRow::Document(document) => engine.documents.load(document),
            LoadedRow::Redrive { task, upto, cursor } => self.redrives.push((task, upto, cursor)),
            LoadedRow::Entry(row) => engine.ledger.load(row, self.now),
            LoadedRow::Released { hash, after } => drop(engine.releases.insert(hash, after)),
            LoadedRow::Entries { tally, prune_ms } => engine.ledger.load_counts(tally, prune_ms),
        }
    }

    fn add_message(&mut self, row: MessageRow, damaged: bool) {
        self.seen_rows += 1;
        if damaged {
            self.damaged += 1;
            self.damaged_rows.push(row);
            return;
        }
        let engine = &mut self.engine;
        let mut entry = row.entry;
        let queue = engine.queues.get_mut(row.queue as usize).and_then(Option::as_mut);
        let Some(queue) = queue.filter(|queue| entry.order >= queue.purged_before) else {
            // Belongs to a deleted queue, or was purged.
            engine.sweep.push_back((entry.seq, entry.flags));
            return;
        };
        entry.group = queue.table.groups.intern(row.group.as_ref());
        put(queue, &mut engine.wave.counters, entry);
    }

    /// Compares the number of loaded rows with the number written. Call it after all rows were added.
    pub fn check_rows(&mut self) {
        let (written, seen) = (self.engine.header.rows, self.seen_rows);
        if seen < written {
            let missing = written - seen;
            self.warn(&format!(
                "{missing} of {written} messages cannot be found in the file, which is damaged; restore a backup beside \
                 this store to get them back"
            ));
        }
    }

    /// Parks damaged messages after all others were loaded: only the key of such a row is used, and only if no sound
    /// message has it. A row without a known queue, or whose number is in use, stays in the file for inspection.
    fn park_damaged(&mut self) {
        let rows = std::mem::take(&mut self.damaged_rows);
        let keys: HashSet<u64> = rows.iter().map(|row| row.entry.seq).collect();
        let tables = self.engine.queues.iter().flatten().map(|queue| &queue.table);
        let numbers = tables.flat_map(Table::iter).flat_map(|(_, entry)| [entry.seq, entry.order]);
        let mut taken: HashSet<u64> = numbers.filter(|number| keys.contains(number)).collect();
        for row in rows {
            let queue = self.engine.queues.get_mut(row.queue as usize).and_then(Option::as_mut);
            let (Some(queue), seq @ 1..SEQ_END) = (queue, row.entry.seq) else { continue };
            if !taken.insert(seq) {
                continue;
            }
            let now_ms = self.now.ms();
            let entry = MessageMeta {
                flags: park_flags(0, hapax_core::FailureCause::Damaged),
                sent_ms: row.entry.sent_ms.min(now_ms),
                base_ms: now_ms,
                due_ms: now_ms,
                bytes: row.entry.bytes.min(hapax_core::policy::MESSAGE_BYTES_MAX as u32),
                group: queue.table.groups.intern(None),
                ..MessageMeta::unreadable(seq)
            };
            put(queue, &mut self.engine.wave.counters, entry);
        }
    }

    /// Returns the engine with every queue's timer set.
    pub fn finish(mut self) -> Engine {
        self.park_damaged();
        // Missing rows stay in the expected count, so that every opening of the store reports them.
        let rows = self.engine.header.rows.max(self.seen_rows);
        let claimed = self.engine.wave.counters.messages + self.engine.sweep.len() as u64;
        self.engine.unclaimed_rows = rows.saturating_sub(claimed);
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

    /// Deduplication ids since this time belong in memory.
    pub fn dedup_memory_from_ms(&self) -> u64 {
        self.now.ms().saturating_sub(dedup::MEMORY_MS)
    }
}
