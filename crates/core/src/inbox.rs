//! The transactional seam: `enter` and `record` on the caller's own connection, so that the ledger entry and the
//! business write are one transaction.
//!
//! There are two traits over one [`Entered`], since databases differ in one point that Rust can see: a SQLite
//! transaction belongs to its thread and cannot live across an `await` ([`BlockingInbox`]), a Postgres transaction can
//! ([`AsyncInbox`]). One trait with an associated future was rejected: without a `Send` bound a worker could not spawn
//! it, with one SQLite could not implement it. The conformance suite runs the same cases over both.

use async_trait::async_trait;
use thiserror::Error;

use crate::ledger::{EntryId, LedgerCapabilities, RecordedOutcome};
use crate::name::Fingerprint;

/// What the database knows about a key, as the caller's transaction sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Entered {
    /// Nothing is known: the effect may happen, in this transaction.
    Fresh,
    /// The effect has ended before; this is its outcome.
    Completed(RecordedOutcome),
    /// Another transaction works on the key and did not end within the lock timeout. The delivery is deferred,
    /// uncounted.
    InProgress {
        /// When to try again.
        retry_after_ms: u64,
    },
    /// An operator has to decide first whether the effect happened.
    InDoubt {
        /// Since when, in milliseconds since 1970.
        since_ms: u64,
    },
    /// The key was used for a message with another content.
    Mismatch,
}

/// One intended effect: what an inbox looks up and records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InboxEntry {
    /// Scope and key.
    pub id: EntryId,
    /// The content of the message, hashed.
    pub fingerprint: Fingerprint,
}

/// Why an inbox could not be asked or written.
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
    /// The database may lose what it has committed, so it cannot carry the tier.
    #[error("{0}")]
    NotDurable(String),
}

/// How a transaction ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TxEnd {
    /// Everything in it takes effect.
    Commit,
    /// Nothing in it does.
    Rollback,
}

/// An inbox whose transactions block their thread and cannot leave it: SQLite's form of the seam.
pub trait BlockingInbox: Send + Sync + 'static {
    /// A transaction of the user's database.
    type Tx<'t>;

    /// What its entries survive, for the check of the tier.
    fn inbox_capabilities(&self) -> LedgerCapabilities;

    /// Runs `work` in one transaction that excludes other writers, and ends it as `work` says. A panic in `work` rolls
    /// it back. Waits at most the lock timeout for the transaction to begin: then [`InboxError::Locked`].
    fn in_transaction<R>(&self, work: impl FnOnce(&Self::Tx<'_>) -> (R, TxEnd)) -> Result<R, InboxError>;

    /// Looks a key up, in the caller's transaction.
    fn enter(&self, tx: &Self::Tx<'_>, entry: &InboxEntry) -> Result<Entered, InboxError>;

    /// Records the outcome of a key that [`enter`](Self::enter) found fresh, in the caller's transaction, beside its
    /// own writes. Kept for `ttl_ms`.
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
    /// An open transaction of the user's database. Dropped, it is rolled back.
    type Tx: Send;

    /// What its entries survive, for the check of the tier.
    fn inbox_capabilities(&self) -> LedgerCapabilities;

    /// Begins a transaction.
    async fn begin(&self) -> Result<Self::Tx, InboxError>;

    /// Commits it. After an error that leaves the result open, the entry says whether it happened.
    async fn commit(&self, tx: Self::Tx) -> Result<(), InboxError>;

    /// Looks a key up, in the caller's transaction, and keeps others from entering it until that ends. Waits at most a
    /// bounded lock timeout: then [`Entered::InProgress`].
    async fn enter(&self, tx: &mut Self::Tx, entry: &InboxEntry) -> Result<Entered, InboxError>;

    /// Records the outcome of a key that [`enter`](Self::enter) found fresh, in the caller's transaction, beside its
    /// own writes. Kept for `ttl_ms`.
    async fn record(
        &self,
        tx: &mut Self::Tx,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
    ) -> Result<(), InboxError>;
}
