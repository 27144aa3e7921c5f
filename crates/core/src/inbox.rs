//! The transactional seam: `enter` and `record` on the caller's own connection, so that the ledger entry and the
//! business write are one transaction.
//!
//! There are two traits over one [`InboxLookup`], because databases differ in a point that Rust's types can see: a SQLite
//! transaction belongs to its thread and cannot live across an `await` ([`BlockingInbox`]), a Postgres transaction can
//! ([`AsyncInbox`]). One trait with an associated future was rejected: without a `Send` bound a worker could not spawn
//! it, and with one SQLite could not implement it. The conformance suite runs the same cases over both.

use async_trait::async_trait;
use thiserror::Error;

use crate::ledger::{EntryId, LedgerCapabilities, RecordedOutcome};
use crate::name::Fingerprint;

/// The state of a key, as the caller's transaction sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InboxLookup {
    /// The key is unknown: the effect may happen, in this transaction.
    Fresh,
    /// The effect ended earlier, with this outcome.
    Completed(RecordedOutcome),
    /// Another transaction holds the key and did not end within the lock timeout. The delivery is deferred without
    /// counting an attempt.
    InProgress {
        /// When to try again.
        retry_after_ms: u64,
    },
    /// The effect may have happened; an operator has to decide first.
    InDoubt {
        /// Start of the doubt, in milliseconds since 1970.
        since_ms: u64,
    },
    /// The key was used for a message with other content.
    Mismatch,
}

/// One intended effect: its lookup key, and a hash of its message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InboxEntry {
    /// Scope and key.
    pub id: EntryId,
    /// Hash of the message's content.
    pub fingerprint: Fingerprint,
}

/// Why an inbox could not be read or written.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum InboxError {
    /// The database refused. Its transaction is rolled back.
    #[error("the database refused: {0}")]
    Database(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// Another transaction held the database for longer than the lock timeout. Nothing was done.
    #[error("the database was locked for longer than the lock timeout of {timeout_ms} ms")]
    Locked {
        /// The timeout.
        timeout_ms: u64,
    },
    /// The database may lose committed transactions, so it cannot support the tier.
    #[error("{0}")]
    NotDurable(String),
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransactionEnd {
    /// Everything in it takes effect.
    Commit,
    /// Nothing in it does.
    Rollback,
}

/// An inbox whose transactions block their thread and cannot leave it: SQLite's form of the seam.
pub trait BlockingInbox: Send + Sync + 'static {
    /// A transaction of the user's database.
    type Tx<'t>;

    /// The durability of its entries, for the tier check.
    fn inbox_capabilities(&self) -> LedgerCapabilities;

    /// Runs `work` in one transaction that excludes other writers, and ends it as `work` says. A panic in `work` rolls
    /// it back. Waits at most the lock timeout for the transaction to begin, then fails with [`InboxError::Locked`].
    fn in_transaction<R>(
        &self,
        work: impl FnOnce(&Self::Tx<'_>) -> (R, TransactionEnd),
    ) -> Result<R, InboxError>;

    /// Looks a key up, in the caller's transaction.
    fn enter(&self, tx: &Self::Tx<'_>, entry: &InboxEntry) -> Result<InboxLookup, InboxError>;

    /// Records the outcome of a key that [`enter`](Self::enter) found fresh, in the caller's transaction, together with
    /// the caller's own writes. The outcome is kept for `ttl_ms`.
    fn record(
        &self,
        tx: &Self::Tx<'_>,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError>;
}

/// An inbox whose transactions may live across an `await`: Postgres's form of the seam.
#[async_trait]
pub trait AsyncInbox: Send + Sync + 'static {
    /// An open transaction of the user's database. Dropping it rolls it back.
    type Tx: Send;

    /// The durability of its entries, for the tier check.
    fn inbox_capabilities(&self) -> LedgerCapabilities;

    /// Begins a transaction.
    async fn begin(&self) -> Result<Self::Tx, InboxError>;

    /// Commits it. If an error leaves the result unknown, look the entry up: it exists only if the commit happened.
    async fn commit(&self, tx: Self::Tx) -> Result<(), InboxError>;

    /// Looks a key up in the caller's transaction, and prevents others from entering it until that transaction ends.
    /// Waits at most a bounded lock timeout, then returns [`InboxLookup::InProgress`].
    async fn enter(&self, tx: &mut Self::Tx, entry: &InboxEntry) -> Result<InboxLookup, InboxError>;

    /// Records the outcome of a key that [`enter`](Self::enter) found fresh, in the caller's transaction, together with
    /// the caller's own writes. The outcome is kept for `ttl_ms`.
    async fn record(
        &self,
        tx: &mut Self::Tx,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError>;
}
