//! Moving queues and ledger from one store to another: export, import, and what an exported thing looks like.
//!
//! A move of a store: pause its queues; create the queues in the target, paused where they were; raise the target's fences
//! above the source's ([`Transfer::raise_fence`]); import the ledger, so that no message is delivered before its entry is
//! there; import each queue, dead-letter queues before the queues that they serve. Every import can be repeated: what is
//! there already is left as it is.
//!
//! In the source an entry is kept as long as a message needs it, and a dead letter as long as a group waits for it. Such
//! an entry or letter may be older than its retention, and in the target nothing needs it yet. So what is imported is kept
//! for at least [`IMPORTED_MS_MIN`]: the rest has to follow within that time.

use std::collections::HashSet;

use async_trait::async_trait;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::copy::CopyState;
use crate::error::{AdminError, SendError, StoreError};
use crate::ledger::{EntryId, OnDoubt, RecordedOutcome};
use crate::message::{AttributeValue, Attributes, KeySource, Priority};
use crate::name::{DedupId, Fence, Fingerprint, GroupId, IdempotencyKey, MessageId, Owner, QueueName};
use crate::store::{Batch, DeadLetter, FailedAttempt, FailureCause};

/// Bytes of JSON that the items of one page of an export have at most; one item alone may be larger. Such a page fits into
/// one request of the native API.
pub const PAGE_BYTES_MAX: usize = 3 * 1024 * 1024;
/// What is imported is kept at least this long, or for a queue's whole retention if that is shorter: 1 day.
pub const IMPORTED_MS_MIN: u64 = 24 * 3600 * 1000;
/// The highest fence of an import, and the highest bound that fences can be raised to: far ahead of any clock, and with as
/// much room above it.
pub const FENCE_BOUND_MAX: u64 = 1 << 52;

/// What is exported or imported.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TransferScope {
    /// The messages of a queue, and the deduplication ids that it remembers.
    Queue(QueueName),
    /// The entries of the ledger.
    Ledger,
}

/// One page of an export.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportPage {
    /// What was found, in the order in which it has to be imported.
    pub items: Vec<ExportedItem>,
    /// Pass it as `after` for the next page; `None` at the end. A page may be short, or empty, while there are more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next: Option<String>,
}

/// One exported thing. In JSON an object with one field that names its kind: `{"message": {…}}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportedItem {
    /// A message of the queue.
    Message(Box<ExportedMessage>),
    /// A FIFO group of the queue is halted until someone decides about a message that is among the dead letters. The
    /// message returns to this place.
    Undecided {
        /// The halted group.
        group: GroupId,
        /// The dead letter; `None` if it is not known any more: then the group waits until it is released.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        id: Option<MessageId>,
    },
    /// A deduplication id that the queue remembers, also of a message that is gone.
    Dedup(RememberedId),
    /// An entry of the ledger.
    Entry(Box<ExportedEntry>),
    /// What is stored here does not match its checksum: it is not exported. An import refuses it.
    Damaged {
        /// What it is, for example a message's id.
        what: String,
        /// What is wrong with it.
        problem: String,
    },
}

/// A message as it is exported. One in flight is exported as returned: its delivery counts, and it can be received.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportedMessage {
    /// Its id, which it keeps.
    pub id: MessageId,
    /// Its place in the source queue. The target gives it a place of its own, in the order of the import.
    pub sequence: u64,
    /// The payload.
    #[serde(serialize_with = "body_out", deserialize_with = "body_in")]
    pub body: Bytes,
    /// Named values beside the body.
    #[serde(default, skip_serializing_if = "Attributes::is_empty")]
    pub attributes: Attributes,
    /// The group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupId>,
    /// The deduplication id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupId>,
    /// Urgency.
    #[serde(default)]
    pub priority: Priority,
    /// Identity of the intended effect.
    pub key: IdempotencyKey,
    /// Where the key came from.
    pub key_source: KeySource,
    /// When it was sent.
    pub sent_ms: u64,
    /// What its retention counts from.
    pub retained_from_ms: u64,
    /// When it can be received; in the past: at once.
    pub visible_ms: u64,
    /// When it was first delivered; 0 if it was not.
    #[serde(default)]
    pub first_received_ms: u64,
    /// Deliveries that count against the queue's limit.
    #[serde(default)]
    pub attempts: u32,
    /// All deliveries.
    #[serde(default)]
    pub deliveries: u32,
    /// The fence of its last delivery; 0 if there was none.
    pub fence: Fence,
    /// Set if it is parked: why.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked: Option<FailureCause>,
    /// It is parked, and its FIFO group is halted until someone decides about it.
    #[serde(default)]
    pub undecided: bool,
    /// Where it came from and why, if it is a dead letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<DeadLetter>,
    /// Its failed attempts, oldest first; at most [`HISTORY_MAX`](crate::policy::HISTORY_MAX).
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub history: Vec<FailedAttempt>,
    /// Entries of the ledger that are kept as long as it lives.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub entries: Vec<EntryId>,
}

/// A deduplication id that a queue remembers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RememberedId {
    /// [`dedup_hash`](crate::policy::dedup_hash) of the id, in hexadecimal.
    pub hash: String,
    /// The message that was sent with it.
    pub id: MessageId,
    /// When that was; the queue's window counts from then.
    pub sent_ms: u64,
}

/// An entry of the ledger as it is exported.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportedEntry {
    /// Scope and key.
    pub id: EntryId,
    /// Who holds or held it.
    pub owner: Owner,
    /// What the request said, hashed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprint: Option<Fingerprint>,
    /// When its last claim was made.
    pub claimed_ms: u64,
    /// How often a lapsed claim was taken over.
    #[serde(default)]
    pub takeovers: u32,
    /// Where it stands.
    pub stage: ExportedStage,
}

/// Where an exported entry stands. A claim that is held is exported as in doubt: its holder may act, and cannot reach the
/// target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExportedStage {
    /// Its holder may have acted.
    InDoubt {
        /// Since when; for a claim that is held, the time of the export.
        since_ms: u64,
        /// What its holder wanted done about doubt.
        on_doubt: OnDoubt,
    },
    /// Ended.
    Completed {
        /// When.
        at_ms: u64,
        /// How long it is kept.
        ttl_ms: u64,
        /// The outcome, which duplicates get.
        outcome: RecordedOutcome,
    },
}

/// What an import did with one item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Imported {
    /// It is there now.
    Added,
    /// It was there, or was imported before and is gone since: nothing was changed.
    AlreadyThere,
}

/// Extension of a store whose content can be moved to another store.
#[async_trait]
pub trait Transfer: Send + Sync {
    /// A number that every fence which this store has given out is below.
    async fn fence_bound(&self) -> Result<Fence, StoreError>;

    /// Makes every fence that this store gives out from now on at least `bound`; durable when it returns.
    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError>;

    /// Closes a queue or the ledger for a copy, changes the state of what is closed, or opens it (`None`); durable when it
    /// returns, and no operation that began before is under way then. Refused while a redrive moves messages from or to
    /// the queue.
    async fn set_copy(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError>;

    /// Why the ledger is closed, if it is. What is said of a queue is in its [`QueueInfo`](crate::QueueInfo).
    async fn ledger_copy(&self) -> Result<Option<CopyState>, StoreError>;

    /// One page of a queue, or of the ledger. A queue has to be paused: else messages would be exported and delivered at
    /// the same time. `limit` is 1 to 1,000.
    async fn export(
        &self,
        from: &TransferScope,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError>;

    /// Takes exported things over, each atomically and durably, in the order of the batch. Safe to repeat. Messages go
    /// behind those that are there. In a FIFO queue, an item whose group has an earlier item in the batch that was refused
    /// is refused too: the group would lose its order. A caller that continues with another batch has to see to that itself
    /// ([`RefusedGroups`]).
    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError>;
}

impl ExportedMessage {
    /// What counts towards the size limit, as [`NewMessage::bytes`](crate::NewMessage::bytes).
    pub fn bytes_counted(&self) -> u64 {
        self.as_new().bytes()
    }

    /// What its sender gave.
    pub(crate) fn as_new(&self) -> crate::NewMessage {
        crate::NewMessage {
            body: self.body.clone(),
            attributes: self.attributes.clone(),
            group: self.group.clone(),
            dedup: self.dedup.clone(),
            priority: self.priority,
            ..crate::NewMessage::default()
        }
    }
}

impl ExportedItem {
    /// Bytes of its JSON, for the bounds of pages. It costs as much as writing the JSON.
    pub fn bytes(&self) -> usize {
        let mut counter = ByteCounter(0);
        serde_json::to_writer(&mut counter, self).expect("an item is plain data");
        counter.0
    }

    /// The group of a message, or the group that is halted.
    pub fn group(&self) -> Option<&GroupId> {
        match self {
            Self::Message(message) => message.group.as_ref(),
            Self::Undecided { group, .. } => Some(group),
            Self::Dedup(_) | Self::Entry(_) | Self::Damaged { .. } => None,
        }
    }
}

/// Counts what is written, and keeps none of it.
struct ByteCounter(usize);

impl std::io::Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Groups of a FIFO queue of which an import has refused an item. What comes behind it in its group is refused too: else
/// the refused one would come behind the others when the import is repeated.
#[derive(Debug, Default)]
pub struct RefusedGroups(HashSet<GroupId>);

impl RefusedGroups {
    /// Whether an item may be imported.
    pub fn check(&self, item: &ExportedItem) -> Result<(), SendError> {
        match item.group().filter(|group| self.0.contains(*group)) {
            None => Ok(()),
            Some(group) => Err(SendError::Invalid(format!(
                "an earlier item of group {group} was refused, so this one was not imported: the group would lose its \
                 order; remove the cause and repeat the import"
            ))),
        }
    }

    /// An item of this group was refused.
    pub fn add(&mut self, group: Option<GroupId>) {
        self.0.extend(group);
    }
}

/// Text as text, anything else as base64.
fn body_out<S: Serializer>(body: &Bytes, to: S) -> Result<S::Ok, S::Error> {
    match std::str::from_utf8(body) {
        Ok(text) => AttributeValue::Text(text.to_owned()),
        Err(_) => AttributeValue::Binary(body.clone()),
    }
    .serialize(to)
}

fn body_in<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
    Ok(match AttributeValue::deserialize(from)? {
        AttributeValue::Text(text) => Bytes::from(text),
        AttributeValue::Binary(bytes) => bytes,
    })
}
