//! The records that the engine passes to the storage: one list per wave, committed together.

use std::sync::Arc;

use bytes::Bytes;
use hapax_core::ledger::protocol;
use hapax_core::store::FailedAttempt;
use hapax_core::{
    Attributes, Document, DocumentName, EntryId, FailureCause, GroupId, KeySource, MessageId, MessageKey,
    QueueConfig, QueueInfo, QueueName, QueuePause, RedriveTask, Revision,
};

use crate::crc::Crc;

/// A message's state in the engine and in its row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum State {
    /// Can be received.
    Ready = 0,
    /// Invisible until `due_ms`. The row keeps this state afterwards; the message becomes ready by time alone.
    Delayed = 1,
    /// Leased until `due_ms`.
    InFlight = 2,
    /// Set aside until an operator decides.
    Parked = 3,
}

impl State {
    pub fn from_u8(value: u8) -> Option<Self> {
        [Self::Ready, Self::Delayed, Self::InFlight, Self::Parked].get(value as usize).copied()
    }
}

/// Set when the message has rows in `history`.
pub(crate) const FLAG_HISTORY: u8 = 1;
/// Set when the message has a row in `dead`.
pub(crate) const FLAG_DEAD: u8 = 2;
/// Set when the message has rows in `keyed`.
pub(crate) const FLAG_KEYED: u8 = 4;
/// Set while the message is in flight under a lease of its own ([`hapax_core::Extend::own`]).
pub(crate) const FLAG_OWN_LEASE: u8 = 8;
/// Bits that hold why the message is parked.
const PARK_SHIFT: u8 = 4;

pub(crate) fn park_flags(flags: u8, cause: FailureCause) -> u8 {
    let bits = match cause {
        FailureCause::Retry => 1,
        FailureCause::Expired => 2,
        FailureCause::Rejected => 3,
        FailureCause::Damaged => 4,
        FailureCause::InDoubt => 5,
    };
    (flags & 0x0f) | (bits << PARK_SHIFT)
}

pub(crate) fn parked_cause(flags: u8) -> Option<FailureCause> {
    match flags >> PARK_SHIFT {
        1 => Some(FailureCause::Retry),
        2 => Some(FailureCause::Expired),
        3 => Some(FailureCause::Rejected),
        4 => Some(FailureCause::Damaged),
        5 => Some(FailureCause::InDoubt),
        _ => None,
    }
}

pub(crate) fn unpark_flags(flags: u8) -> u8 {
    flags & 0x0f
}

/// The metadata of one live message. The engine keeps it in memory for each message, so every byte counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MessageMeta {
    /// The message's number in the store; its id is derived from it.
    pub seq: u64,
    /// Its position in its queue; taken from the same counter as `seq` each time it enters a queue.
    pub order: u64,
    pub sent_ms: u64,
    /// Start of its retention.
    pub base_ms: u64,
    /// When it becomes visible, or when its lease expires.
    pub due_ms: u64,
    /// The fence of its last delivery; 0 before the first.
    pub fence: u64,
    /// When it was first delivered in this queue; 0 before that.
    pub first_ms: u64,
    /// Time of its latest delivery; limits how far a lease can be extended.
    pub received_ms: u64,
    /// Deliveries in this queue that count against the limit.
    pub attempts: u32,
    /// All deliveries, in this queue and in the one where it died; never fewer than the attempts.
    pub deliveries: u32,
    /// Size of body and attributes, in bytes.
    pub bytes: u32,
    /// Index of its group in its queue's table.
    pub group: u32,
    pub state: State,
    pub priority: u8,
    pub flags: u8,
}

impl MessageMeta {
    /// A placeholder for a message whose row is unreadable except for the key.
    pub fn unreadable(seq: u64) -> Self {
        Self {
            seq,
            order: seq,
            sent_ms: 0,
            base_ms: 0,
            due_ms: 0,
            fence: 0,
            first_ms: 0,
            received_ms: 0,
            attempts: 0,
            deliveries: 0,
            bytes: 0,
            group: 0,
            state: State::Parked,
            priority: 0,
            flags: 0,
        }
    }
}

/// A row of `message`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MessageRow {
    pub queue: u32,
    pub entry: MessageMeta,
    pub group: Option<GroupId>,
}

impl MessageRow {
    /// Covers every column, so that a flipped bit anywhere is detected. The deliveries are included only if they differ
    /// from the attempts, so that rows written by version 2 stay valid.
    pub fn crc(&self) -> u32 {
        let e = &self.entry;
        let mut fixed = [0u8; 80];
        let words = [e.seq, e.order, e.sent_ms, e.base_ms, e.due_ms, e.fence, e.first_ms, e.received_ms];
        for (at, word) in words.iter().enumerate() {
            fixed[at * 8..at * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        fixed[64..68].copy_from_slice(&e.attempts.to_le_bytes());
        fixed[68..72].copy_from_slice(&e.bytes.to_le_bytes());
        fixed[72..76].copy_from_slice(&self.queue.to_le_bytes());
        fixed[76..80].copy_from_slice(&[e.state as u8, e.priority, e.flags, u8::from(self.group.is_some())]);
        let mut crc = Crc::new();
        crc.bytes(&fixed);
        if let Some(group) = &self.group {
            crc.bytes(group.as_str().as_bytes());
        }
        deliveries_crc(&mut crc, e.attempts, e.deliveries);
        crc.end()
    }
}

fn deliveries_crc(crc: &mut Crc, attempts: u32, deliveries: u32) {
    if deliveries != attempts {
        crc.word(u64::from(deliveries));
    }
}

/// A row of `body`. `origin` is the queue to which the message was sent; it stays the same when the message moves.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BodyRow {
    pub seq: u64,
    pub origin: u32,
    pub content: Content,
}

/// The sender's content, with a checksum computed on the sender's thread, not on the writer's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Content {
    pub dedup: Option<String>,
    /// JSON; `None` if there are no attributes.
    pub attributes: Option<String>,
    /// The idempotency key, if it cannot be derived from the other fields and the message id: it was found in the body
    /// by a pointer that may have changed since, or it is the message's id before a redrive.
    pub key: Option<MessageKey>,
    pub body: Bytes,
    pub crc: u32,
}

impl Content {
    pub fn new(
        dedup: Option<String>,
        attributes: Option<String>,
        key: Option<MessageKey>,
        body: Bytes,
    ) -> Self {
        let mut crc = Crc::new();
        crc.text(dedup.as_deref()).text(attributes.as_deref());
        if let Some(key) = &key {
            // A body without a key adds nothing: rows written before keys existed keep their checksum.
            crc.text(Some(key.key.as_str())).word(u64::from(key_source_code(key.source)));
        }
        crc.bytes(&body);
        let crc = crc.end();
        Self { dedup, attributes, key, body, crc }
    }

    /// The idempotency key that was decided when the message was sent.
    pub fn decided_key(&self, attributes: &Attributes, id: MessageId) -> MessageKey {
        let sender_key = self.key.clone().or_else(|| MessageKey::explicit(attributes, &self.body, None));
        MessageKey::decide(sender_key, self.dedup.as_deref(), id)
    }
}

/// A key source's code in the row.
pub(crate) fn key_source_code(source: KeySource) -> u8 {
    match source {
        KeySource::Attribute => 0,
        KeySource::Body => 1,
        KeySource::DedupId => 2,
        KeySource::MessageId => 3,
    }
}

pub(crate) fn key_source_of(code: u64) -> Option<KeySource> {
    [KeySource::Attribute, KeySource::Body, KeySource::DedupId, KeySource::MessageId]
        .into_iter()
        .find(|source| u64::from(key_source_code(*source)) == code)
}

impl BodyRow {
    /// The row's checksum: id, queue, and the checksum of the content.
    pub fn crc(seq: u64, origin: u32, content_crc: u32) -> u32 {
        let mut crc = Crc::new();
        crc.bytes(&seq.to_le_bytes()).bytes(&origin.to_le_bytes()).bytes(&content_crc.to_le_bytes());
        crc.end()
    }
}

/// A row of `dead`: where a dead letter came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DeadRow {
    pub seq: u64,
    pub source: QueueName,
    /// Its position in the source queue. It returns there if its group is halted for it.
    pub source_order: u64,
    pub cause: FailureCause,
    pub error: Option<String>,
    pub attempts: u32,
    pub deliveries: u32,
    pub first_ms: u64,
    pub died_ms: u64,
}

impl DeadRow {
    pub fn crc(&self) -> u32 {
        let mut crc = Crc::new();
        for word in [self.seq, self.source_order, u64::from(self.attempts), self.first_ms, self.died_ms] {
            crc.word(word);
        }
        crc.text(Some(self.source.as_str())).text(Some(self.cause.as_str())).text(self.error.as_deref());
        deliveries_crc(&mut crc, self.attempts, self.deliveries);
        crc.end()
    }
}

/// The checksum of a row of `history`.
pub(crate) fn history_crc(seq: u64, failed: &FailedAttempt) -> u32 {
    let mut crc = Crc::new();
    crc.word(seq).word(u64::from(failed.attempt)).word(failed.at_ms).text(Some(failed.cause.as_str()));
    crc.text(failed.error.as_deref()).text(failed.consumer.as_deref());
    deliveries_crc(&mut crc, failed.attempt, failed.deliveries);
    crc.end()
}

/// The checksum of a row of `halted`.
pub(crate) fn halted_crc(queue: u32, group: &str, seq: u64) -> u32 {
    let mut crc = Crc::new();
    crc.word(u64::from(queue)).text(Some(group)).word(seq);
    crc.end()
}

/// A row of `imported`: an id that came from another store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ImportedRow {
    pub seq: u64,
    pub id: MessageId,
    /// The queue that it was imported to.
    pub queue: u32,
    /// Only the id came, with a deduplication id that is remembered: the message was gone before.
    pub gone: bool,
    pub at_ms: u64,
}

impl ImportedRow {
    pub fn crc(&self) -> u32 {
        let mut crc = Crc::new();
        crc.word(self.seq).bytes(&self.id.0.to_le_bytes());
        crc.word(self.queue.into()).word(self.gone.into()).word(self.at_ms);
        crc.end()
    }
}

/// The checksum of a row of `redrive`.
pub(crate) fn redrive_crc(id: u64, task: &str, upto: u64, cursor: u64) -> u32 {
    let mut crc = Crc::new();
    crc.word(id).word(upto).word(cursor).text(Some(task));
    crc.end()
}

/// A row of `queue`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueueRow {
    pub id: u32,
    pub name: QueueName,
    pub config: Arc<QueueConfig>,
    pub created_ms: u64,
    pub modified_ms: u64,
    /// Messages with a smaller order were purged; their rows are deleted in small steps.
    pub purged_before: u64,
    /// The queue is deleted; its rows are deleted in small steps.
    pub deleted: bool,
    /// The configuration's revision; 0 if it was written before revisions existed.
    pub revision: u64,
    /// When it was last purged, in ms; 0 if never.
    pub purged_ms: u64,
    pub paused: Option<QueuePause>,
}

/// The checksum of a row of `deleted_queue`.
pub(crate) fn deleted_queue_crc(name: &str, at_ms: u64) -> u32 {
    let mut crc = Crc::new();
    crc.word(at_ms).text(Some(name));
    crc.end()
}

/// The checksum of a row of `document`.
pub(crate) fn document_crc(document: &Document) -> u32 {
    let mut crc = Crc::new();
    crc.word(document.revision.0).word(document.modified_ms);
    crc.text(Some(document.name.as_str())).text(Some(document.value.as_str()));
    crc.end()
}

impl QueueRow {
    pub fn info(&self) -> QueueInfo {
        QueueInfo {
            name: self.name.clone(),
            config: (*self.config).clone(),
            revision: Revision(self.revision),
            created_ms: self.created_ms,
            modified_ms: self.modified_ms,
            paused: self.paused.clone(),
        }
    }
}

/// A row of `dedup`: a remembered deduplication id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DedupRow {
    pub key: u128,
    pub seq: u64,
    pub order: u64,
    pub sent_ms: u64,
}

impl DedupRow {
    pub fn crc(&self, queue: u32) -> u32 {
        let mut crc = Crc::new();
        crc.bytes(&self.key.to_le_bytes()).word(u64::from(queue));
        crc.word(self.seq).word(self.order).word(self.sent_ms);
        crc.end()
    }
}

/// A row of `receive_attempt`: a receive that may be repeated, and what it gave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AttemptRow {
    /// Hash of the attempt id.
    pub key: u128,
    /// When it was first answered.
    pub at_ms: u64,
    /// Number and fence of each delivery, in order.
    pub deliveries: Vec<(u64, u64)>,
}

impl AttemptRow {
    pub fn crc(&self, queue: u32) -> u32 {
        let mut crc = Crc::new();
        crc.bytes(&self.key.to_le_bytes()).word(u64::from(queue)).word(self.at_ms);
        for (seq, fence) in &self.deliveries {
            crc.word(*seq).word(*fence);
        }
        crc.end()
    }
}

/// Tells the rows of `ledger` from fewer or others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Tally {
    pub rows: u64,
    /// Exclusive or of the rows' hashes.
    pub sum: u128,
}

impl Tally {
    pub fn add(&mut self, hash: u128) {
        self.rows += 1;
        self.sum ^= hash;
    }

    pub fn remove(&mut self, hash: u128) {
        self.rows = self.rows.saturating_sub(1);
        self.sum ^= hash;
    }
}

/// A row of `ledger`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct LedgerRow {
    pub id: EntryId,
    pub entry: protocol::LedgerEntry,
}

impl LedgerRow {
    /// Whether the entry has expired. An entry that waits for a decision never does.
    pub fn is_over(&self, now_ms: u64) -> bool {
        self.entry.prune_ms().is_some_and(|prune_ms| prune_ms <= now_ms)
    }
}

/// The store's single row: counters that must never go back.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Header {
    pub clock_ms: u64,
    /// All fences issued so far are below this.
    pub fence_floor: u64,
    pub next_seq: u64,
    /// Number of rows in `message`. It is the only way to notice a damaged page that hides rows.
    pub rows: u64,
    /// Why deliveries are paused, or `None`.
    pub paused: Option<String>,
}

/// One change to write.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Record {
    Insert(MessageRow, BodyRow),
    Update(MessageRow),
    Delete {
        seq: u64,
        flags: u8,
    },
    Dead(DeadRow),
    History {
        seq: u64,
        failed: FailedAttempt,
    },
    /// The failure of a delivery is none any more.
    TakeBackFailure {
        seq: u64,
        deliveries: u32,
    },
    ForgetHistory {
        seq: u64,
    },
    /// Recomputes a damaged body's checksum, because an operator decided to accept the body as it is.
    AcceptBody {
        seq: u64,
    },
    Dedup {
        queue: u32,
        row: DedupRow,
    },
    PruneDedup {
        queue: u32,
        before_ms: u64,
        limit: u32,
    },
    Attempt {
        queue: u32,
        row: AttemptRow,
    },
    ForgetAttempt {
        queue: u32,
        key: u128,
    },
    Queue(QueueRow),
    ForgetQueue {
        id: u32,
    },
    /// A queue of this name was deleted.
    DeletedQueue {
        name: QueueName,
        at_ms: u64,
    },
    /// Removes the records of deletions before this time.
    PruneDeletedQueues {
        before_ms: u64,
    },
    Document(Document),
    DropDocument {
        name: DocumentName,
    },
    /// A FIFO group is halted until an operator decides about a message.
    Halt {
        queue: u32,
        group: GroupId,
        seq: u64,
    },
    Unhalt {
        queue: u32,
        group: GroupId,
        seq: u64,
    },
    Redrive {
        task: RedriveTask,
        upto: u64,
        cursor: u64,
    },
    ForgetRedrive {
        id: u64,
    },
    /// A ledger entry. `before` is the fence of the row that it replaces, if there is one.
    Ledger {
        row: Box<LedgerRow>,
        before: Option<u64>,
    },
    DropEntry {
        fence: u64,
    },
    /// Removes an entry whose row is damaged: only its position in the index is reliable.
    DropDamaged {
        hash: u128,
    },
    /// Checks again at `prune_ms` whether the entry can be pruned.
    PostponeEntry {
        fence: u64,
        prune_ms: u64,
    },
    /// Number of rows in `ledger`, and the exclusive or of their hashes.
    LedgerRows(Tally),
    /// Messages after this one are still parked for an entry whose doubt is over; `None`: none are.
    Released {
        hash: u128,
        after: Option<u64>,
    },
    /// A message needs an entry.
    Link {
        seq: u64,
        hash: u128,
    },
    /// A message of another store keeps its id under a number of this one.
    Imported(ImportedRow),
    Header(Header),
    Audit {
        at_ms: u64,
        by: String,
        what: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_stays_small() {
        assert!(size_of::<MessageMeta>() <= 88, "{}", size_of::<MessageMeta>());
        assert_eq!(size_of::<Option<MessageMeta>>(), size_of::<MessageMeta>());
    }

    #[test]
    fn the_reason_for_parking_survives_in_the_flags() {
        for cause in [
            FailureCause::Retry,
            FailureCause::Expired,
            FailureCause::Rejected,
            FailureCause::Damaged,
            FailureCause::InDoubt,
        ] {
            let flags = park_flags(FLAG_DEAD | FLAG_HISTORY, cause);
            assert_eq!(parked_cause(flags), Some(cause));
            assert_eq!(unpark_flags(flags), FLAG_DEAD | FLAG_HISTORY);
        }
        assert_eq!(parked_cause(FLAG_DEAD), None);
    }
}
