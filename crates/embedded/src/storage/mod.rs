//! The narrow seam between the engine and what holds its rows. Faults are injected here in tests, and another
//! storage could stand here.

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

/// How a commit ended, if not well.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub(crate) enum CommitError {
    /// No room; rolled back.
    #[error("{0}")]
    Full(String),
    /// The rows may or may not be on the disk. Nothing may be tried again before the store is opened anew.
    #[error("{0}")]
    Unknown(String),
}

/// A read failed for good: the medium, not the content.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{0}")]
pub(crate) struct ReadError(pub String);

/// A body as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FoundBody {
    Sound(BodyRow),
    /// Missing, or its bytes do not match their checksum.
    Damaged(String),
}

/// An entry of the ledger as it was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum FoundEntry {
    Absent,
    Sound(LedgerRow),
    /// There is one, but its bytes do not match their checksum.
    Damaged(String),
}

/// An ended entry that is to be looked at, because its time is over or was over before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DueEntry {
    pub hash: u128,
    pub fence: u64,
    /// A message needs it.
    pub linked: bool,
    pub damaged: bool,
}

/// Whether a commit waits for the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Durability {
    /// Survives a power cut once committed.
    PowerLoss,
    /// Survives the death of the process; a power cut may take it back.
    ProcessDeath,
}

/// What holds the rows.
pub(crate) trait Storage: Send {
    /// The store's counters.
    fn header(&mut self) -> Result<Header, ReadError>;

    /// Gives every row but bodies to the loader. What it gives survives a power cut: the engine answers from it.
    fn load(&mut self, loader: &mut Loader) -> Result<(), ReadError>;

    /// Writes all records or none.
    fn commit(&mut self, records: &[Record], durability: Durability) -> Result<(), CommitError>;

    fn body(&mut self, seq: u64) -> Result<FoundBody, ReadError>;

    fn dead(&mut self, seq: u64) -> Result<Option<DeadRow>, ReadError>;

    /// The last error in a message's history.
    fn last_error(&mut self, seq: u64) -> Result<Option<String>, ReadError>;

    fn dedup(&mut self, queue: u32, key: u128) -> Result<Option<DedupRow>, ReadError>;

    /// The entry with this hash.
    fn entry(&mut self, hash: u128) -> Result<FoundEntry, ReadError>;

    /// Whether a damaged entry can be removed by [`Record::DropDamaged`].
    fn can_drop(&mut self, hash: u128) -> Result<bool, ReadError>;

    /// Messages that need an entry, each with its queue, in their order; at most `limit`, those after `after`.
    fn links(&mut self, hash: u128, after: u64, limit: usize) -> Result<Vec<(u64, u32)>, ReadError>;

    /// Ended entries whose time is over, at most `limit`; and when the next one's is.
    fn due_entries(&mut self, now_ms: u64, limit: usize) -> Result<(Vec<DueEntry>, Option<u64>), ReadError>;

    /// Room left on the medium, where that can be told.
    fn free_bytes(&self) -> Option<u64>;
}
