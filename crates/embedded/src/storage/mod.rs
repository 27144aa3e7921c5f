//! The narrow interface between the engine and its storage. Tests inject faults here, and another storage could
//! implement it.

mod attempts;
mod documents;
pub(crate) mod ledger;
mod migrate;
mod migrate_keys;
mod rows;
pub(crate) mod schema;
pub(crate) mod sqlite;
mod write;

pub(crate) use rows::{DEDUP_COLUMNS, MESSAGE_COLUMNS, body, dead, dedup, header, history, message};
pub(crate) use write::put_header;

use thiserror::Error;

use crate::engine::Loader;
use crate::record::{BodyRow, DeadRow, DedupRow, Header, LedgerRow, Record};

/// How a commit failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum CommitError {
    /// No space left; the commit was rolled back.
    #[error("{0}")]
    Full(String),
    /// The rows may or may not be on the disk. Nothing may be retried before the store is reopened.
    #[error("{0}")]
    Unknown(String),
}

/// A read failed permanently: the medium failed, not the content.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct ReadError(pub String);

/// Result of reading a body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FoundBody {
    Sound(BodyRow),
    /// The body is missing, or its bytes do not match their checksum.
    Damaged(String),
}

/// Result of looking up a ledger entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FoundEntry {
    Absent,
    Sound(LedgerRow),
    /// The entry exists, but its bytes do not match their checksum.
    Damaged(String),
}

/// An ended entry that has expired and is due for pruning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DueEntry {
    pub hash: u128,
    pub fence: u64,
    /// A message still needs the entry.
    pub linked: bool,
    pub damaged: bool,
}

/// Whether a commit waits for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// Survives a power cut once committed.
    PowerLoss,
    /// Survives the death of the process; a power cut may undo it.
    ProcessDeath,
}

/// Holds the rows.
pub(crate) trait Storage: Send {
    /// The store's counters.
    fn header(&mut self) -> Result<Header, ReadError>;

    /// Passes every row except bodies to the loader. These rows must survive a power cut, because the engine answers
    /// from them.
    fn load(&mut self, loader: &mut Loader) -> Result<(), ReadError>;

    /// Writes all records or none.
    fn commit(&mut self, records: &[Record], durability: Durability) -> Result<(), CommitError>;

    /// The bodies of these messages, one for each, in the same order.
    fn bodies(&mut self, seqs: &[u64]) -> Result<Vec<FoundBody>, ReadError>;

    fn body(&mut self, seq: u64) -> Result<FoundBody, ReadError> {
        Ok(self.bodies(&[seq])?.pop().expect("one for each"))
    }

    fn dead(&mut self, seq: u64) -> Result<Option<DeadRow>, ReadError>;

    /// The latest error in a message's history.
    fn last_error(&mut self, seq: u64) -> Result<Option<String>, ReadError>;

    fn dedup(&mut self, queue: u32, key: u128) -> Result<Option<DedupRow>, ReadError>;

    /// The entry with this hash.
    fn entry(&mut self, hash: u128) -> Result<FoundEntry, ReadError>;

    /// Whether [`Record::DropDamaged`] can remove the damaged entry.
    fn can_drop(&mut self, hash: u128) -> Result<bool, ReadError>;

    /// Messages that need an entry, each with its queue, in their order; at most `limit`, those after `after`.
    fn links(&mut self, hash: u128, after: u64, limit: usize) -> Result<Vec<(u64, u32)>, ReadError>;

    /// Ended entries that have expired, at most `limit`, and the time when the next one expires.
    fn due_entries(&mut self, now_ms: u64, limit: usize) -> Result<(Vec<DueEntry>, Option<u64>), ReadError>;

    /// Free space on the medium, if known.
    fn free_bytes(&self) -> Option<u64>;
}
