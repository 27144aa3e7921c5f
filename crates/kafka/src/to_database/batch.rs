//! One transaction of the database: ledger entries, business writes and the position, for records of one partition.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::inbox::TransactionEnd;
use hapax_core::positions::{AsyncPositions, BlockingPositions, LogPartition};
use hapax_core::{InboxEntry, InboxError, InboxLookup, Json, RecordedOutcome};

use crate::consumer::Record;

/// Why a handler failed.
pub type HandlerError = Box<dyn std::error::Error + Send + Sync>;

/// The future of an async handler: borrows the record and the transaction while it runs.
pub type HandlerFuture<'t> = Pin<Box<dyn Future<Output = Result<(), HandlerError>> + Send + 't>>;

/// Records that take effect together.
pub(super) struct Batch {
    pub partition: LogPartition,
    /// The position before, and after.
    pub from: Option<i64>,
    pub to: i64,
    pub records: Vec<(Record, InboxEntry)>,
    /// The handler does not run: this failure is recorded as the outcome of each record.
    pub failed: Option<String>,
    pub ttl_ms: u64,
}

impl Batch {
    fn outcome(&self) -> RecordedOutcome {
        match &self.failed {
            None => RecordedOutcome { failed: false, value: None, omitted_bytes: None },
            Some(error) => RecordedOutcome { failed: true, value: Json::of(error).ok(), omitted_bytes: None },
        }
    }
}

/// Why a batch was rolled back.
#[derive(Debug)]
pub(super) enum Stopped {
    Database(InboxError),
    /// The handler failed at this record.
    Handler {
        place: usize,
        error: String,
    },
    /// The key of a record is taken by another transaction.
    InProgress {
        retry_after_ms: u64,
    },
    /// An operator has to decide about the key of a record first.
    InDoubt {
        place: usize,
    },
}

impl From<InboxError> for Stopped {
    fn from(error: InboxError) -> Self {
        Self::Database(error)
    }
}

/// What a lookup means; `true`: the handler runs.
fn is_fresh(place: usize, found: &InboxLookup) -> Result<bool, Stopped> {
    match found {
        InboxLookup::Fresh => Ok(true),
        InboxLookup::Completed(_) => Ok(false),
        InboxLookup::InProgress { retry_after_ms } => {
            Err(Stopped::InProgress { retry_after_ms: *retry_after_ms })
        }
        InboxLookup::InDoubt { .. } => Err(Stopped::InDoubt { place }),
        InboxLookup::Mismatch => Err(Stopped::Handler {
            place,
            error: "its idempotency key was used for a record with another value".into(),
        }),
    }
}

/// What an advance has found; the known-bad variant does not mind.
fn as_found(moved: Result<(), InboxError>) -> Result<(), InboxError> {
    match moved {
        Err(InboxError::Superseded(_)) if hapax_core::mutant::is(super::TRUSTS_THE_BROKER) => Ok(()),
        moved => moved,
    }
}

/// A database with a handler.
#[async_trait]
pub(super) trait Database: Send + Sync {
    async fn position(&self, of: &LogPartition) -> Result<Option<i64>, InboxError>;

    /// Returns how many records took effect now; the others did earlier.
    async fn apply(&self, batch: &Arc<Batch>) -> Result<usize, Stopped>;
}

/// One whose transactions may live across an `await`.
pub(super) struct AsyncDatabase<I, F> {
    pub inbox: I,
    pub handler: F,
}

impl<I, F> AsyncDatabase<I, F>
where
    I: AsyncPositions,
    F: for<'t> Fn(&'t Record, &'t mut I::Connection) -> HandlerFuture<'t> + Send + Sync,
{
    async fn run(&self, tx: &mut I::Tx, batch: &Batch) -> Result<usize, Stopped> {
        let mut fresh = 0;
        for (place, (record, entry)) in batch.records.iter().enumerate() {
            if !is_fresh(place, &self.inbox.enter(tx, entry).await?)? {
                continue;
            }
            if batch.failed.is_none() {
                let handled = (self.handler)(record, I::connection(tx)).await;
                handled.map_err(|error| Stopped::Handler { place, error: error.to_string() })?;
            }
            self.inbox.record(tx, entry, batch.outcome(), batch.ttl_ms).await?;
            fresh += 1;
        }
        as_found(self.inbox.advance(tx, &batch.partition, batch.from, batch.to).await)?;
        Ok(fresh)
    }
}

#[async_trait]
impl<I, F> Database for AsyncDatabase<I, F>
where
    I: AsyncPositions,
    F: for<'t> Fn(&'t Record, &'t mut I::Connection) -> HandlerFuture<'t> + Send + Sync,
{
    async fn position(&self, of: &LogPartition) -> Result<Option<i64>, InboxError> {
        self.inbox.position(of).await
    }

    async fn apply(&self, batch: &Arc<Batch>) -> Result<usize, Stopped> {
        let (_, first) = batch.records.first().expect("a batch has records");
        let mut tx = self.inbox.begin(first).await?;
        match self.run(&mut tx, batch).await {
            Ok(fresh) => {
                self.inbox.commit(tx).await?;
                Ok(fresh)
            }
            Err(stopped) => {
                self.inbox.rollback(tx).await;
                Err(stopped)
            }
        }
    }
}

/// One whose transactions block their thread.
pub(super) struct BlockingDatabase<I, F> {
    pub inbox: I,
    pub handler: Arc<F>,
}

fn run_blocking<I, F>(inbox: &I, handler: &F, tx: &I::Tx<'_>, batch: &Batch) -> Result<usize, Stopped>
where
    I: BlockingPositions,
    F: for<'t> Fn(&Record, &I::Tx<'t>) -> Result<(), HandlerError>,
{
    let mut fresh = 0;
    for (place, (record, entry)) in batch.records.iter().enumerate() {
        if !is_fresh(place, &inbox.enter(tx, entry)?)? {
            continue;
        }
        if batch.failed.is_none() {
            handler(record, tx).map_err(|error| Stopped::Handler { place, error: error.to_string() })?;
        }
        inbox.record(tx, entry, batch.outcome(), batch.ttl_ms)?;
        fresh += 1;
    }
    as_found(inbox.advance(tx, &batch.partition, batch.from, batch.to))?;
    Ok(fresh)
}

/// Runs on a thread that may block.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Stopped> + Send + 'static,
) -> Result<T, Stopped> {
    match tokio::task::spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => Err(Stopped::Handler { place: 0, error: format!("the handler panicked: {error}") }),
    }
}

#[async_trait]
impl<I, F> Database for BlockingDatabase<I, F>
where
    I: BlockingPositions + Clone,
    F: for<'t> Fn(&Record, &I::Tx<'t>) -> Result<(), HandlerError> + Send + Sync + 'static,
{
    async fn position(&self, of: &LogPartition) -> Result<Option<i64>, InboxError> {
        let (inbox, of) = (self.inbox.clone(), of.clone());
        let read = move || {
            let found = inbox.in_transaction(|tx| (inbox.position(tx, &of), TransactionEnd::Rollback))?;
            Ok(found?)
        };
        match blocking(read).await {
            Ok(position) => Ok(position),
            Err(Stopped::Database(error)) => Err(error),
            Err(other) => Err(InboxError::Unavailable(format!("{other:?}"))),
        }
    }

    async fn apply(&self, batch: &Arc<Batch>) -> Result<usize, Stopped> {
        let (inbox, handler, batch) = (self.inbox.clone(), self.handler.clone(), batch.clone());
        let work = move || {
            inbox.in_transaction(|tx| match run_blocking(&inbox, &*handler, tx, &batch) {
                Ok(fresh) => (Ok(fresh), TransactionEnd::Commit),
                Err(stopped) => (Err(stopped), TransactionEnd::Rollback),
            })?
        };
        blocking(work).await
    }
}
