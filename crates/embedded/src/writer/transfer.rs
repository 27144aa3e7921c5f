//! Imports: each item is compared with what is there, so that an import can be repeated.

use std::collections::HashSet;

use hapax_core::transfer::RefusedGroups;
use hapax_core::{
    DedupScope, EntryId, ExportedEntry, ExportedItem, ExportedMessage, GroupId, Imported, MessageId,
    QueueName, RememberedId, SendError, StoreError, TransferScope, policy,
};

use super::ledger::SnapshotError;
use super::{PendingReply, Reply, Writer};
use crate::record::{Content, ImportedRow, Record};
use crate::storage::{ReadError, Storage};
use crate::time::Now;
use crate::transfer::PreparedItem;

type Answers = Vec<Result<Imported, SendError>>;
/// The answer to one item; the medium may fail.
type ImportResult = Result<Result<Imported, SendError>, ReadError>;

fn invalid(problem: impl Into<String>) -> Result<Imported, SendError> {
    Err(SendError::Invalid(problem.into()))
}

impl<S: Storage> Writer<S> {
    pub(super) fn import(
        &mut self,
        now: Now,
        to: &TransferScope,
        items: Vec<PreparedItem>,
        reply: Reply<Answers>,
    ) {
        let answers = self.check_import(to).and_then(|queue| {
            self.import_all(now, queue, items).map_err(|error| {
                self.stop_unread(&error);
                self.stopped.clone().expect("just stopped")
            })
        });
        match answers {
            Ok(answers) => self.pending_replies.push(PendingReply::Imported(reply, answers)),
            Err(error) => drop(reply.send(Err(error))),
        }
    }

    /// The queue to import to; `None` for the ledger.
    fn check_import(&mut self, to: &TransferScope) -> Result<Option<u32>, StoreError> {
        let queue = match (to, &self.stopped) {
            (_, Some(stopped)) => return Err(stopped.clone()),
            (TransferScope::Queue(queue), None) => Some(self.engine.find_for_import(queue)?),
            (TransferScope::Ledger, None) => {
                self.engine.check_ledger()?;
                None
            }
        };
        self.check_room().map(|()| queue)
    }

    fn import_all(
        &mut self,
        now: Now,
        queue: Option<u32>,
        items: Vec<PreparedItem>,
    ) -> Result<Answers, ReadError> {
        let ids = items.iter().filter_map(|item| match &item.item {
            ExportedItem::Message(message) => Some(message.id),
            ExportedItem::Undecided { id, .. } => *id,
            _ => None,
        });
        // Ids that this store gave out itself, or that it imported to a queue which is deleted: the messages may be in
        // another queue.
        let unsure = |id: MessageId| match self.ids.imported(id) {
            Some(row) if self.engine.has_queue(row.queue, row.at_ms) => None,
            Some(row) => Some(row.seq),
            None => self.ids.own_seq(id),
        };
        let unsure: HashSet<u64> = ids.filter_map(unsure).collect();
        let live = if unsure.is_empty() { unsure } else { self.engine.live(&unsure) };
        let fifo = queue.is_some_and(|queue| self.engine.queue(queue).config.is_fifo());
        let (mut refused, mut answers) = (RefusedGroups::default(), Answers::with_capacity(items.len()));
        for item in items {
            let group = item.item.group().filter(|_| fifo).cloned();
            let answer = match refused.check(&item.item) {
                Ok(()) => self.import_one(now, queue, item, &live)?,
                Err(error) => Err(error),
            };
            if answer.is_err() {
                refused.add(group);
            }
            answers.push(answer);
        }
        Ok(answers)
    }

    fn import_one(
        &mut self,
        now: Now,
        queue: Option<u32>,
        item: PreparedItem,
        live: &HashSet<u64>,
    ) -> ImportResult {
        match (item.item, queue) {
            (ExportedItem::Message(message), Some(queue)) => {
                let content = item.content.expect("a message was prepared");
                self.import_message(now, queue, *message, content, live)
            }
            (ExportedItem::Undecided { group, id }, Some(queue)) => {
                self.import_undecided(now, queue, &group, id, live)
            }
            (ExportedItem::Dedup(remembered), Some(queue)) => self.import_dedup(now, queue, &remembered),
            (ExportedItem::Entry(entry), None) => self.import_entry(now, *entry),
            (ExportedItem::Damaged { what, problem }, _) => {
                Ok(invalid(format!("{what} was damaged when it was exported ({problem})")))
            }
            (ExportedItem::Entry(_), Some(_)) => Ok(invalid("an entry of the ledger is not for a queue")),
            (_, None) => Ok(invalid("what belongs to a queue is not for the ledger")),
        }
    }

    fn import_message(
        &mut self,
        now: Now,
        queue: u32,
        message: ExportedMessage,
        content: Content,
        live: &HashSet<u64>,
    ) -> ImportResult {
        let id = message.id;
        if self.is_there(id, live) {
            return Ok(Ok(Imported::AlreadyThere));
        }
        // As before a send: what is over is gone, so that the message does not bring it back. What it needed in its former
        // store it needs here.
        let own = EntryId::of_queue(&self.engine.queue(queue).name, message.key.clone());
        if !message.entries.contains(&own) {
            self.clear_entry(now, &own, false)?;
        }
        Ok(self.engine.import(now, queue, message, content).map(|seq| {
            self.note_imported(ImportedRow { seq, id, queue, gone: false, at_ms: now.ms() });
            Imported::Added
        }))
    }

    /// Whether a message is in some queue, or was imported to one that exists.
    fn is_there(&self, id: MessageId, live: &HashSet<u64>) -> bool {
        match self.ids.imported(id) {
            Some(row) => self.engine.has_queue(row.queue, row.at_ms) || live.contains(&row.seq),
            None => self.ids.own_seq(id).is_some_and(|seq| live.contains(&seq)),
        }
    }

    fn note_imported(&mut self, row: ImportedRow) {
        self.ids.add_imported(row);
        self.imported.push(row);
        self.engine.wave.records.push(Record::Imported(row));
    }

    fn import_undecided(
        &mut self,
        now: Now,
        queue: u32,
        group: &GroupId,
        id: Option<MessageId>,
        live: &HashSet<u64>,
    ) -> ImportResult {
        if !self.engine.queue(queue).config.is_fifo() {
            return Ok(invalid("only a FIFO queue has groups that can be halted"));
        }
        let done = halt_id(&self.engine.queue(queue).name, group, id);
        let seq = id.map_or(Some(0), |id| self.ids.seq(id));
        if self.is_there(done, live) || seq.is_some_and(|seq| self.engine.awaits(queue, group, seq)) {
            return Ok(Ok(Imported::AlreadyThere));
        }
        let mut letter = None;
        if let Some(id) = id {
            let Some(seq) = seq.filter(|seq| self.engine.is_live(*seq)) else {
                return Ok(invalid(format!(
                    "dead letter {id}, which group {group} waits for, is not there; import its queue first, and do not \
                     discard it before its group is imported"
                )));
            };
            letter = match self.engine.wave.fresh_dead(seq).cloned() {
                Some(dead) => Some(dead),
                None => self.storage.dead(seq)?,
            };
            if letter.is_none() {
                // It is not among the dead letters any more: it was decided about.
                return Ok(Ok(Imported::AlreadyThere));
            }
        }
        let seq = self.engine.place_undecided(queue, group, letter);
        self.note_imported(ImportedRow { seq, id: done, queue, gone: false, at_ms: now.ms() });
        Ok(Ok(Imported::Added))
    }

    fn import_dedup(&mut self, now: Now, queue: u32, remembered: &RememberedId) -> ImportResult {
        let RememberedId { hash, id, sent_ms } = remembered;
        let Some(key) = u128::from_str_radix(hash, 16).ok().filter(|_| hash.len() == 32) else {
            return Ok(invalid(format!("hash {hash:?} is not valid: use 32 hexadecimal digits")));
        };
        if *sent_ms > now.ms() + policy::RETENTION_MS_MAX {
            return Ok(invalid(format!("sent_ms: {sent_ms} is more than 14 days ahead")));
        }
        let over = !self.engine.in_dedup_window(now, queue, *sent_ms);
        let mut there = self.engine.remembers(now, queue, key);
        if !over && !there && self.engine.needs_stored_dedup(queue) {
            let stored = self.storage.dedup(queue, key)?;
            there = stored.is_some_and(|row| self.engine.in_dedup_window(now, queue, row.sent_ms));
        }
        if over || there {
            return Ok(Ok(Imported::AlreadyThere));
        }
        let imported = self.ids.imported(*id).map(|row| row.seq);
        let seq = imported.unwrap_or_else(|| self.number_of_gone(now, queue, *id));
        self.engine.import_dedup(queue, key, seq, *sent_ms);
        Ok(Ok(Imported::Added))
    }

    /// A number for a message that was gone before, so that its id is known.
    fn number_of_gone(&mut self, now: Now, queue: u32, id: MessageId) -> u64 {
        let seq = self.engine.number_of_gone();
        self.note_imported(ImportedRow { seq, id, queue, gone: true, at_ms: now.ms() });
        seq
    }

    fn import_entry(&mut self, now: Now, entry: ExportedEntry) -> ImportResult {
        let hash = entry.id.hash();
        match self.entry_snapshot(now, &entry.id, hash) {
            Err(SnapshotError::Unread(error)) => Err(error),
            Err(SnapshotError::Damaged(error)) => Ok(invalid(error.to_string())),
            Ok(known) if known.entry().is_some() => Ok(Ok(Imported::AlreadyThere)),
            Ok(known) => Ok(self.engine.import_entry(now, &known, entry).map(|()| Imported::Added)),
        }
    }
}

/// What a halt that was imported is remembered under, so that a repeated import does not halt a group again that was
/// released since.
fn halt_id(queue: &QueueName, group: &GroupId, id: Option<MessageId>) -> MessageId {
    let what = format!("halted {queue} {}", id.map_or_else(String::new, |id| id.to_string()));
    MessageId(policy::dedup_hash(DedupScope::Group, Some(group), &what))
}
