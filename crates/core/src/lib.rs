//! The vocabulary of Hapax as types, its policies as pure functions, and the seams that every store implements.
//!
//! Nothing here does I/O, reads a clock or draws a random number: time and randomness are arguments. Therefore one
//! conformance suite and one simulation can test every store.
//!
//! | module | holds |
//! |---|---|
//! | [`name`] | identifiers: queue, message, group, keys, receipt, fence |
//! | [`message`] | messages as sent and as delivered |
//! | [`queue`] | a queue's configuration and its validation |
//! | [`policy`] | backoff, dead-letter decision, deduplication window, lease bounds, tier check |
//! | [`capabilities`] | what a store can do |
//! | [`store`] | the seams: [`QueueStore`], [`QueueAdmin`] and what they answer |
//! | [`validate`] | what may be asked of a store, the same for each |
//! | [`ledger`] | the ledger seam, and its protocol as pure functions |
//! | [`inbox`] | the transactional seam: a ledger entry in the caller's own transaction |
//! | [`outbox`] | the outbox seam: messages of business transactions, and the sinks they are published to |
//! | [`positions`] | positions in a partitioned log, advanced in the caller's own transaction |
//! | [`transfer`] | export and import, to move queues and ledger to another store |
//! | [`copy`] | what is closed in two stores while one is copied to the other |
//! | [`documents`] | small named JSON documents with compare-and-set |
//! | [`cancel_safe`] | a receive that takes nothing when it is dropped, for stores behind a network |
//! | [`source`] | the worker's only input, and the adapter from a queue |
//! | [`mod@metrics`] | counters and gauges, declared once and read alike |
//! | [`error`] | one narrow error per operation |
//! | [`clock`] | time as a parameter |

pub mod cancel_safe;
pub mod capabilities;
pub mod clock;
pub mod copy;
pub mod documents;
mod durations;
pub mod error;
pub mod inbox;
pub mod ledger;
pub mod message;
pub mod metrics;
#[doc(hidden)]
pub mod mutant;
pub mod name;
pub mod outbox;
pub mod policy;
pub mod positions;
pub mod queue;
pub mod source;
pub mod store;
pub mod transfer;
pub mod validate;

pub use capabilities::{Capabilities, CounterScope, Order, SupportedSettlements, WakeUp};
pub use clock::{Clock, ManualClock, SystemClock};
pub use copy::CopyState;
pub use documents::{Document, DocumentError, DocumentFilter, DocumentPage, Documents, ExpectedRevision};
pub use error::{AdminError, SendError, SettleError, StoreError};
pub use inbox::{AsyncInbox, BlockingInbox, InboxEntry, InboxError, InboxLookup};
pub use ledger::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryState, EntryView,
    Grant, Json, Ledger, LedgerCapabilities, LedgerStats, OnDoubt, RecordedOutcome, Renew, Resolution,
    ResolveError, Store, TokenError,
};
pub use message::{
    Attribute, AttributeValue, Attributes, Delivery, KeySource, MessageKey, NewMessage, Priority,
    TRACE_ATTRIBUTE, TRACE_BYTES_MAX,
};
pub use name::{
    DedupId, DocumentName, Fence, Fingerprint, GroupId, IdempotencyKey, MessageId, Owner, QueueName, Receipt,
    Revision, Scope, Token,
};
pub use queue::{
    DeadLetterPolicy, DedupPolicy, DedupScope, OnDead, QueueConfig, QueueKind, Quota, RedriveAllow, Tier,
};
pub use source::{QueueSource, Source, SourceDescription};
pub use store::{
    Batch, Browse, DeadLetter, Discarded, Examination, Extend, FailureCause, Maintenance, MessageState,
    MessageView, Page, QueueAdmin, QueueInfo, QueuePause, QueueStats, QueueStore, Receive, RedriveFilter,
    RedriveRequest, RedriveState, RedriveTask, RemainingLease, Sent, Settle, Settled, Settlement,
    StoreStatus, StoreTotals,
};
pub use transfer::{
    ExportPage, ExportedEntry, ExportedItem, ExportedMessage, ExportedStage, Imported, RememberedId,
    Transfer, TransferScope,
};
