//! The storage trait in memory, with the faults of a real disk: a power cut and a killed process leave different
//! states, and a commit may fail in every way that the trait allows.

use std::collections::{BTreeMap, BTreeSet};

use hapax_core::ledger::protocol::Stage;
use hapax_core::store::FailedAttempt;
use hapax_core::{Document, DocumentName, GroupId, QueueName, RedriveTask};

use crate::engine::{LoadedRow, Loader};
use crate::record::{
    AttemptRow, BodyRow, DeadRow, DedupRow, FLAG_DEAD, FLAG_HISTORY, FLAG_KEYED, Header, LedgerRow,
    MessageRow, QueueRow, Record, Tally,
};
use crate::storage::{CommitError, DueEntry, Durability, FoundBody, FoundEntry, ReadError, Storage};

/// How the next commit fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    /// No space left; rolled back.
    Full,
    /// The write failed, but the rows exist.
    UnknownApplied,
    /// The write failed, and the rows do not exist.
    UnknownLost,
    /// The process dies before the commit.
    CrashBefore,
    /// The process dies after the commit, before any answer was sent.
    CrashAfter,
}

impl Fault {
    pub const ALL: [Self; 5] =
        [Self::Full, Self::UnknownApplied, Self::UnknownLost, Self::CrashBefore, Self::CrashAfter];
}

/// The rows. Stricter than SQL: an update of a missing row, or of a column that never changes, panics.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Tables {
    pub header: Header,
    pub queues: BTreeMap<u32, QueueRow>,
    pub messages: BTreeMap<u64, MessageRow>,
    pub bodies: BTreeMap<u64, BodyRow>,
    pub dead: BTreeMap<u64, DeadRow>,
    history: BTreeMap<u64, Vec<FailedAttempt>>,
    dedup: BTreeMap<(u32, u128), DedupRow>,
    pub attempts: BTreeMap<(u32, u128), AttemptRow>,
    halted: BTreeSet<(u32, GroupId, u64)>,
    redrives: BTreeMap<u64, (RedriveTask, u64, u64)>,
    /// By fence, with the time when to check whether it can be pruned.
    pub ledger: BTreeMap<u64, (LedgerRow, Option<u64>)>,
    tally: Tally,
    pub keyed: BTreeSet<(u64, u128)>,
    pub released: BTreeMap<u128, u64>,
    deleted: BTreeMap<QueueName, u64>,
    documents: BTreeMap<DocumentName, Document>,
}

impl Tables {
    fn apply(&mut self, record: &Record) {
        match record {
            Record::Insert(row, body) => {
                let seq = row.entry.seq;
                assert_eq!(seq, body.seq);
                assert!(self.messages.insert(seq, row.clone()).is_none(), "number {seq} was given out twice");
                assert!(self.bodies.insert(seq, body.clone()).is_none());
            }
            Record::Update(row) => {
                let at = self.messages.get_mut(&row.entry.seq).expect("an updated row is there");
                let fixed = |row: &MessageRow| {
                    (row.entry.sent_ms, row.entry.bytes, row.entry.priority, row.group.clone())
                };
                assert_eq!(fixed(at), fixed(row), "a column changed that never does");
                *at = row.clone();
            }
            Record::Delete { seq, flags } => {
                self.messages.remove(seq);
                self.bodies.remove(seq);
                let history = self.history.remove(seq);
                let dead = self.dead.remove(seq);
                assert!(history.is_none() || flags & FLAG_HISTORY != 0, "history would be left behind");
                assert!(dead.is_none() || flags & FLAG_DEAD != 0, "a dead letter's row would be left behind");
                let links = self.keyed.len();
                self.keyed.retain(|(at, _)| at != seq);
                assert!(links == self.keyed.len() || flags & FLAG_KEYED != 0, "a link would be left behind");
            }
            Record::Dead(row) => {
                let mut row = row.clone();
                let history = self.history.get(&row.seq).into_iter().flatten();
                row.error = row.error.or_else(|| history.rev().find_map(|failed| failed.error.clone()));
                self.dead.insert(row.seq, row);
            }
            Record::History { seq, failed } => self.history.entry(*seq).or_default().push(failed.clone()),
            Record::TakeBackFailure { seq, deliveries } => {
                let history = self.history.get_mut(seq).expect("a failure was noted");
                let count = history.len();
                history.retain(|failed| failed.deliveries != *deliveries);
                assert_eq!(history.len() + 1, count, "a delivery has one failure");
            }
            Record::ForgetHistory { seq } => drop(self.history.remove(seq)),
            Record::AcceptBody { .. } | Record::Audit { .. } | Record::Imported(_) => {}
            Record::Dedup { queue, row } => drop(self.dedup.insert((*queue, row.key), *row)),
            Record::PruneDedup { queue, before_ms, limit } => {
                let old = self.dedup.iter().filter(|((at, _), row)| at == queue && row.sent_ms < *before_ms);
                let old: Vec<_> = old.map(|(key, _)| *key).take(*limit as usize).collect();
                self.dedup.retain(|key, _| !old.contains(key));
            }
            Record::DeletedQueue { name, at_ms } => drop(self.deleted.insert(name.clone(), *at_ms)),
            Record::PruneDeletedQueues { before_ms } => self.deleted.retain(|_, at_ms| *at_ms >= *before_ms),
            Record::Document(document) => {
                drop(self.documents.insert(document.name.clone(), document.clone()));
            }
            Record::DropDocument { name } => drop(self.documents.remove(name)),
            Record::Attempt { queue, row } => drop(self.attempts.insert((*queue, row.key), row.clone())),
            Record::ForgetAttempt { queue, key } => {
                self.attempts.remove(&(*queue, *key)).expect("a forgotten attempt is there");
            }
            Record::Queue(row) => drop(self.queues.insert(row.id, row.clone())),
            Record::ForgetQueue { id } => {
                self.dedup.retain(|(queue, _), _| queue != id);
                self.halted.retain(|(queue, ..)| queue != id);
                self.attempts.retain(|(queue, _), _| queue != id);
                self.queues.remove(id);
            }
            Record::Halt { queue, group, seq } => drop(self.halted.insert((*queue, group.clone(), *seq))),
            Record::Unhalt { queue, group, seq } => {
                self.halted.remove(&(*queue, group.clone(), *seq));
            }
            Record::Redrive { task, upto, cursor } => {
                self.redrives.insert(task.id, (task.clone(), *upto, *cursor));
            }
            Record::ForgetRedrive { id } => drop(self.redrives.remove(id)),
            Record::Ledger { row, before } => {
                let replaced =
                    before.map(|fence| self.ledger.remove(&fence).expect("a replaced entry is there"));
                assert!(replaced.is_none_or(|(before, _)| before.id == row.id), "an entry became another's");
                assert!(self.ledger.values().all(|(other, _)| other.id != row.id), "two entries of one key");
                let ended = matches!(row.entry.stage, Stage::Completed { .. });
                let prune_ms = ended.then(|| row.entry.prune_ms()).flatten();
                let there = self.ledger.insert(row.entry.fence.0, ((**row).clone(), prune_ms));
                assert!(there.is_none(), "a fence was given out twice");
            }
            Record::DropEntry { fence } => {
                self.ledger.remove(fence).expect("a dropped entry is there");
            }
            Record::DropDamaged { .. } => unreachable!("nothing is damaged here"),
            Record::PostponeEntry { fence, prune_ms } => {
                self.ledger.get_mut(fence).expect("a postponed entry is there").1 = Some(*prune_ms);
            }
            Record::LedgerRows(tally) => self.tally = *tally,
            Record::Released { hash, after: Some(after) } => drop(self.released.insert(*hash, *after)),
            Record::Released { hash, after: None } => drop(self.released.remove(hash)),
            Record::Link { seq, hash } => {
                self.keyed.insert((*seq, *hash));
            }
            Record::Header(header) => self.header = header.clone(),
        }
    }

    fn links(&self, hash: u128) -> impl Iterator<Item = (u64, u32)> {
        let links = self.keyed.iter().filter(move |(_, entry)| *entry == hash);
        links.filter_map(|(seq, _)| Some((*seq, self.messages.get(seq)?.queue)))
    }

    /// Checks the invariants between the tables; call it after every commit.
    pub fn check(&self) {
        assert!(
            self.messages.keys().eq(self.bodies.keys()),
            "a message without a body, or a body without one"
        );
        for (seq, row) in &self.messages {
            let dead = row.entry.flags & FLAG_DEAD != 0;
            assert_eq!(
                dead,
                self.dead.contains_key(seq),
                "message {seq} moved without its death, or died in place"
            );
        }
        assert!(self.dead.keys().all(|seq| self.messages.contains_key(seq)));
        let mut tally = Tally::default();
        self.ledger.values().for_each(|(row, _)| tally.add(row.id.hash()));
        assert_eq!(self.tally, tally, "the ledger is not counted right");
        for (seq, _) in &self.keyed {
            let message = self.messages.get(seq).expect("a link's message is there");
            assert!(message.entry.flags & FLAG_KEYED != 0, "message {seq} does not know of its link");
        }
    }
}

pub(super) struct SimStorage {
    /// The state that a reader sees and that a killed process leaves.
    pub committed: Tables,
    /// The state that survives a power cut for sure.
    durable: Tables,
    unsynced: Vec<Vec<Record>>,
    pub commits: u64,
    pub fault: Option<Fault>,
    pub fail_reads: bool,
    pub free_bytes: Option<u64>,
    /// The process is dead: its answers must not be read.
    pub crashed: bool,
    broken: bool,
}

impl SimStorage {
    pub fn new() -> Self {
        let header = Header { next_seq: 1, fence_floor: 1, ..Header::default() };
        let committed = Tables { header, ..Tables::default() };
        Self {
            durable: committed.clone(),
            committed,
            unsynced: Vec::new(),
            commits: 0,
            fault: None,
            fail_reads: false,
            free_bytes: None,
            crashed: false,
            broken: false,
        }
    }

    fn keep(&mut self, records: &[Record]) {
        for record in records {
            self.committed.apply(record);
        }
        self.unsynced.push(records.to_vec());
        self.commits += 1;
    }

    fn sync(&mut self) {
        for record in self.unsynced.drain(..).flatten() {
            self.durable.apply(&record);
        }
    }

    /// Number of commits that a power cut may undo.
    pub fn unsynced(&self) -> u64 {
        self.unsynced.len() as u64
    }

    /// The process was killed: every commit survives.
    pub fn after_process_death(mut self) -> Self {
        (self.fault, self.fail_reads, self.crashed, self.broken) = (None, false, false, false);
        self
    }

    /// A power cut: of the commits that were not synced, the last `lost` are gone.
    pub fn after_power_loss(mut self, lost: u64) -> Self {
        self.unsynced.truncate(self.unsynced.len() - lost as usize);
        self.commits -= lost;
        self.sync();
        self.committed = self.durable.clone();
        self.after_process_death()
    }
}

impl Storage for SimStorage {
    fn header(&mut self) -> Result<Header, ReadError> {
        Ok(self.committed.header.clone())
    }

    fn load(&mut self, loader: &mut Loader) -> Result<(), ReadError> {
        // The trait's guarantee: loaded rows survive a power cut.
        self.sync();
        let tables = &self.committed;
        tables.queues.values().for_each(|row| loader.add(LoadedRow::Queue(row.clone())));
        for row in tables.messages.values() {
            loader.add(LoadedRow::Message { row: row.clone(), damaged: false });
        }
        for (queue, group, seq) in &tables.halted {
            loader.add(LoadedRow::Halted { queue: *queue, group: group.clone(), seq: *seq });
        }
        let from_ms = loader.dedup_memory_from_ms();
        let mut dedup: Vec<_> = tables.dedup.iter().map(|((queue, _), row)| (*queue, *row)).collect();
        dedup.sort_unstable_by_key(|(_, row)| row.sent_ms);
        for (queue, row) in dedup {
            loader.add(if row.sent_ms < from_ms {
                LoadedRow::DedupMinute { queue, minute: row.sent_ms / 60_000, rows: 1 }
            } else {
                LoadedRow::Dedup { queue, row }
            });
        }
        for ((queue, _), row) in &tables.attempts {
            loader.add(LoadedRow::Attempt { queue: *queue, row: row.clone() });
        }
        for (task, upto, cursor) in tables.redrives.values() {
            loader.add(LoadedRow::Redrive { task: task.clone(), upto: *upto, cursor: *cursor });
        }
        for (row, prune_ms) in tables.ledger.values() {
            if prune_ms.is_none() {
                loader.add(LoadedRow::Entry(row.clone()));
            }
        }
        for (hash, after) in &tables.released {
            loader.add(LoadedRow::Released { hash: *hash, after: *after });
        }
        for (name, at_ms) in &tables.deleted {
            loader.add(LoadedRow::DeletedQueue { name: name.clone(), at_ms: *at_ms });
        }
        tables.documents.values().for_each(|document| loader.add(LoadedRow::Document(document.clone())));
        loader.add(LoadedRow::Entries { tally: tables.tally, prune_ms: Some(0) });
        Ok(())
    }

    fn commit(&mut self, records: &[Record], durability: Durability) -> Result<(), CommitError> {
        assert!(!self.broken, "a commit after one that failed");
        let fault = self.fault.take();
        let unknown = || Err(CommitError::Unknown("simulated".into()));
        match fault {
            Some(Fault::Full) => return Err(CommitError::Full("simulated".into())),
            None | Some(Fault::UnknownApplied | Fault::CrashAfter) => self.keep(records),
            Some(Fault::UnknownLost | Fault::CrashBefore) => {}
        }
        self.crashed = matches!(fault, Some(Fault::CrashBefore | Fault::CrashAfter));
        self.broken = fault.is_some();
        if durability == Durability::PowerLoss && matches!(fault, None | Some(Fault::CrashAfter)) {
            self.sync();
        }
        if fault.is_some() { unknown() } else { Ok(()) }
    }

    fn bodies(&mut self, seqs: &[u64]) -> Result<Vec<FoundBody>, ReadError> {
        if self.fail_reads && !seqs.is_empty() {
            return Err(ReadError("simulated".into()));
        }
        let find = |seq: &u64| match self.committed.bodies.get(seq) {
            Some(body) => FoundBody::Sound(body.clone()),
            None => FoundBody::Damaged("missing".into()),
        };
        Ok(seqs.iter().map(find).collect())
    }

    fn dead(&mut self, seq: u64) -> Result<Option<DeadRow>, ReadError> {
        Ok(self.committed.dead.get(&seq).cloned())
    }

    fn last_error(&mut self, seq: u64) -> Result<Option<String>, ReadError> {
        let history = self.committed.history.get(&seq).into_iter().flatten();
        Ok(history.rev().find_map(|failed| failed.error.clone()))
    }

    fn dedup(&mut self, queue: u32, key: u128) -> Result<Option<DedupRow>, ReadError> {
        if self.fail_reads {
            return Err(ReadError("simulated".into()));
        }
        Ok(self.committed.dedup.get(&(queue, key)).copied())
    }

    fn entry(&mut self, hash: u128) -> Result<FoundEntry, ReadError> {
        if self.fail_reads {
            return Err(ReadError("simulated".into()));
        }
        let found = self.committed.ledger.values().find(|(row, _)| row.id.hash() == hash);
        Ok(found.map_or(FoundEntry::Absent, |(row, _)| FoundEntry::Sound(row.clone())))
    }

    fn can_drop(&mut self, _hash: u128) -> Result<bool, ReadError> {
        unreachable!("nothing is damaged here")
    }

    fn links(&mut self, hash: u128, after: u64, limit: usize) -> Result<Vec<(u64, u32)>, ReadError> {
        Ok(self.committed.links(hash).filter(|(seq, _)| *seq > after).take(limit).collect())
    }

    fn due_entries(&mut self, now_ms: u64, limit: usize) -> Result<(Vec<DueEntry>, Option<u64>), ReadError> {
        if self.fail_reads {
            return Err(ReadError("simulated".into()));
        }
        let ended = self.committed.ledger.values().filter_map(|(row, prune_ms)| Some(((*prune_ms)?, row)));
        let mut ended: Vec<_> = ended.collect();
        ended.sort_by_key(|(prune_ms, row)| (*prune_ms, row.entry.fence));
        let next_ms = ended.iter().map(|(prune_ms, _)| *prune_ms).find(|prune_ms| *prune_ms > now_ms);
        let due = ended.iter().take_while(|(prune_ms, _)| *prune_ms <= now_ms).take(limit).map(|(_, row)| {
            let hash = row.id.hash();
            let linked = self.committed.links(hash).next().is_some();
            DueEntry { hash, fence: row.entry.fence.0, linked, damaged: false }
        });
        Ok((due.collect(), next_ms))
    }

    fn free_bytes(&self) -> Option<u64> {
        self.free_bytes
    }
}
