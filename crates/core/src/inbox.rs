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
use crate::name::{Fingerprint, Receipt};

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
    /// Another transaction held the database or the key for longer than the lock timeout. Nothing was done.
    #[error("the database or the key was locked for longer than the lock timeout of {timeout_ms} ms")]
    Locked {
        /// The timeout.
        timeout_ms: u64,
    },
    /// The database cannot be reached, or the connection broke before the commit. Nothing was done.
    #[error("the database cannot be reached: {0}")]
    Unavailable(String),
    /// The transaction lost against another one and is rolled back: a serialization failure or a deadlock. The run can
    /// be started again at once.
    #[error("the transaction lost against another one and was rolled back: {0}")]
    Conflict(String),
    /// The connection broke during the commit: the transaction may have been committed. The key tells, see
    /// [`AsyncInbox::commit`].
    #[error("the transaction may have been committed: {0}")]
    Unknown(String),
    /// The delivery that was to end in the transaction is over: its message has passed to another consumer.
    #[error("the transaction was rolled back: {0}")]
    Superseded(String),
    /// The handler ended the transaction or rolled it back, which only its worker may do. What the handler wrote after
    /// that is not part of any transaction with the outcome.
    #[error("the handler ended the transaction that it was given: {0}")]
    EndedByHandler(String),
    /// The database may lose committed transactions, so it cannot support the tier.
    #[error("{0}")]
    NotDurable(String),
}

impl InboxError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Database(_) | Self::EndedByHandler(_) => "refused",
            Self::Locked { .. } => "overloaded",
            Self::Unavailable(_) | Self::Conflict(_) => "unavailable",
            Self::Unknown(_) => "outcome-unknown",
            Self::Superseded(_) => "stale-receipt",
            Self::NotDurable(_) => "ledger-not-durable",
        }
    }
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
    /// The part of a transaction that a handler writes through.
    type Connection: Send;

    /// The durability of its entries, for the tier check.
    fn inbox_capabilities(&self) -> LedgerCapabilities;

    /// Begins a transaction that will enter this key, or has entered it with its first round trip. Duplicates in the same
    /// process wait here, for a bounded time, so that they occupy no connection while the handler of the first one runs;
    /// then [`InboxError::Locked`].
    async fn begin(&self, entry: &InboxEntry) -> Result<Self::Tx, InboxError>;

    /// The connection of a transaction.
    fn connection(tx: &mut Self::Tx) -> &mut Self::Connection;

    /// Commits it. After [`InboxError::Unknown`] the caller enters the key again in a new transaction: that waits for the
    /// end of the first one, and finds its outcome if it was committed.
    async fn commit(&self, tx: Self::Tx) -> Result<(), InboxError>;

    /// Rolls it back. As dropping it, but the connection can be used again.
    async fn rollback(&self, tx: Self::Tx);

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

    /// Keeps the row of a delivery as it is until the transaction ends, where an isolation level of the database would
    /// otherwise let [`settle`](Self::settle) fail after each heartbeat. Called first in a transaction. A delivery that
    /// is over is [`InboxError::Superseded`].
    async fn hold(&self, _tx: &mut Self::Tx, _receipt: &Receipt) -> Result<(), InboxError> {
        Ok(())
    }

    /// Acks a delivery in the caller's transaction, as its last statement, if its queue is in the same database. `false`:
    /// the queue is elsewhere, and the delivery is acked after the commit. A delivery that is over is
    /// [`InboxError::Superseded`].
    async fn settle(&self, _tx: &mut Self::Tx, _receipt: &Receipt) -> Result<bool, InboxError> {
        Ok(false)
    }

    /// [`record`](Self::record), [`settle`](Self::settle), then [`commit`](Self::commit), in fewer round trips where the
    /// database allows that. Returns whether the delivery was settled. After an error other than
    /// [`InboxError::Unknown`] nothing was committed.
    async fn complete(
        &self,
        mut tx: Self::Tx,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        ttl_ms: u64,
        receipt: &Receipt,
    ) -> Result<bool, InboxError> {
        let settled = match self.record(&mut tx, entry, outcome, ttl_ms).await {
            Ok(()) => self.settle(&mut tx, receipt).await,
            Err(error) => Err(error),
        };
        match settled {
            Ok(settled) => self.commit(tx).await.map(|()| settled),
            Err(error) => {
                self.rollback(tx).await;
                Err(error)
            }
        }
    }

    /// Whether a delivery's queue is in the inbox's database, so that [`settle`](Self::settle) ends it.
    fn is_own(&self, _receipt: &Receipt) -> bool {
        false
    }

    /// Whether the error of a handler says that its transaction lost against another one: the run is started again.
    fn is_conflict(&self, _error: &str) -> bool {
        false
    }
}
