//! The `transactional` tier: business write, ledger entry and outcome in one transaction of the user's database,
//! through the blocking or the async form of the seam.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use hapax_core::inbox::TransactionEnd;
use hapax_core::{AsyncInbox, BlockingInbox, InboxEntry, InboxError, InboxLookup, RecordedOutcome, Tier};
use serde::de::DeserializeOwned;

use crate::builder::WorkerBuilder;
use crate::cx::{Cx, Job};
use crate::handler::{Boxed, Handler, parse};
use crate::outcome::{IntoOutcome, RunResult, StopReason, panic_text};
use crate::point::Point;

/// Delay of a delivery that is put back because its transaction could not begin in time.
const BUSY_MS: std::ops::RangeInclusive<u64> = 50..=500;

/// The future of an async transactional handler: resolves to its outcome, and borrows the transaction while it runs.
pub type TxFuture<'t, O> = Pin<Box<dyn Future<Output = O> + Send + 't>>;

impl WorkerBuilder {
    /// The handler of each message inside a transaction of the inbox's database: the tier `transactional`. Business
    /// writes use the given transaction. It is committed together with the outcome when the handler succeeds, right
    /// after a last check of the lease, and rolled back otherwise.
    ///
    /// This form is for databases whose transactions block their thread, such as SQLite; each run has its own thread.
    /// For others see [`async_transactional_handler`](Self::async_transactional_handler).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::sync::Arc;
    /// # use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore};
    /// # let folder = tempfile::tempdir()?;
    /// # let store = Arc::new(hapax_embedded::Embedded::open(folder.path(), hapax_embedded::Options::default())?);
    /// # let queue = QueueName::new("charges")?;
    /// # store.create_queue(&queue, QueueConfig::default()).await?;
    /// # store.send(&queue, vec![NewMessage::new("1999")]).await?;
    /// # let connection = rusqlite::Connection::open(folder.path().join("shop.db"))?;
    /// # connection.execute_batch("CREATE TABLE ledger_lines (cents INTEGER)")?;
    /// use hapax_sqlite::SqliteInbox;
    /// use hapax_worker::{Cx, Worker};
    /// use rusqlite::Transaction;
    ///
    /// fn book(cents: u64, tx: &Transaction<'_>, _cx: &Cx) -> Result<(), rusqlite::Error> {
    ///     tx.execute("INSERT INTO ledger_lines VALUES (?1)", [cents as i64]).map(drop)
    /// }
    ///
    /// let inbox = SqliteInbox::new(connection)?;
    /// let worker = Worker::over(store, queue).transactional_handler(&inbox, book).build().await?;
    /// # let watch = worker.watch();
    /// # worker.run(async move { while watch.counts().done < 1 { tokio::task::yield_now().await } }).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn transactional_handler<T, I, F, O>(self, inbox: &I, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        I: BlockingInbox + Clone,
        F: for<'t> Fn(T, &I::Tx<'t>, &Cx) -> O + Send + Sync + 'static,
        O: IntoOutcome,
    {
        let can = inbox.inbox_capabilities();
        let (inbox, handler) = (inbox.clone(), Arc::new(handler));
        let run = move |job: &Arc<Job>, _record: bool| {
            let (inbox, handler, job) = (inbox.clone(), handler.clone(), job.clone());
            let blocking = move || {
                let value = match parse(&job) {
                    Ok(value) => value,
                    Err(unparsable) => return unparsable,
                };
                run_blocking(&inbox, &job, |tx, cx| RunResult::of(handler(value, tx, cx), true))
            };
            Box::pin(async move {
                match tokio::task::spawn_blocking(blocking).await {
                    Ok(ended) => ended,
                    Err(error) if error.is_panic() => RunResult::Panicked(panic_text(&*error.into_panic())),
                    // The runtime is shutting down: nothing was committed.
                    Err(_) => RunResult::NotStarted(StopReason::Abandoned),
                }
            }) as Boxed<RunResult>
        };
        self.transactional(Handler::Transactional { run: Arc::new(run), inbox: can })
    }

    /// As [`transactional_handler`](Self::transactional_handler), for a database whose transactions may live across an
    /// `await`.
    pub fn async_transactional_handler<T, I, F, O>(self, inbox: &I, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        I: AsyncInbox + Clone,
        F: for<'t> Fn(T, &'t mut I::Tx, Cx) -> TxFuture<'t, O> + Send + Sync + 'static,
        O: IntoOutcome,
    {
        let can = inbox.inbox_capabilities();
        let (inbox, handler) = (inbox.clone(), Arc::new(handler));
        let run = move |job: &Arc<Job>, _record: bool| {
            let (inbox, handler, job) = (inbox.clone(), handler.clone(), job.clone());
            Box::pin(async move {
                match parse(&job) {
                    Ok(value) => run_async(&inbox, &job, value, &*handler).await,
                    Err(unparsable) => unparsable,
                }
            }) as Boxed<RunResult>
        };
        self.transactional(Handler::Transactional { run: Arc::new(run), inbox: can })
    }

    fn transactional(mut self, handler: Handler) -> Self {
        self.handler = Some(handler);
        self.tier(Tier::Transactional)
    }
}

/// The end of a run whose transaction did not begin, or was not committed.
fn failed(error: &InboxError) -> RunResult {
    match error {
        InboxError::Locked { .. } => {
            RunResult::Deferred { after_ms: fastrand::u64(BUSY_MS), reason: error.to_string() }
        }
        _ => RunResult::Retry { after_ms: None, error: format!("the transaction was rolled back: {error}") },
    }
}

/// How the run ends without the handler; `None`: the handler runs.
fn not_fresh(entered: InboxLookup, cx: &Cx) -> Option<RunResult> {
    match entered {
        InboxLookup::Fresh => None,
        InboxLookup::Completed(outcome) => Some(RunResult::Replayed(outcome)),
        InboxLookup::InProgress { retry_after_ms } => Some(RunResult::Deferred {
            after_ms: retry_after_ms,
            reason: "another transaction works on the key".into(),
        }),
        InboxLookup::InDoubt { .. } => Some(RunResult::ParkedInDoubt(format!(
            "what became of the effect of {} is in doubt; resolve it, then release this",
            cx.entry_id()
        ))),
        InboxLookup::Mismatch => Some(RunResult::Mismatch(cx.idempotency_key().as_str().to_owned())),
    }
}

fn entry(cx: &Cx) -> InboxEntry {
    InboxEntry { id: cx.entry_id().clone(), fingerprint: cx.job.fingerprint() }
}

/// One run in a blocking transaction: looks the key up, runs the handler, records the outcome, commits.
fn run_blocking<I: BlockingInbox>(
    inbox: &I,
    job: &Arc<Job>,
    handler: impl FnOnce(&I::Tx<'_>, &Cx) -> RunResult,
) -> RunResult {
    let cx = Cx { job: job.clone() };
    let ran = inbox.in_transaction(|tx| match in_blocking(inbox, tx, &cx, handler) {
        Ok((ended, end)) => (Ok((ended, end)), end),
        Err(error) => (Err(error), TransactionEnd::Rollback),
    });
    match ran {
        Ok(Ok((ended, TransactionEnd::Commit))) => committed(job, ended),
        Ok(Ok((ended, TransactionEnd::Rollback))) => ended,
        Ok(Err(error)) | Err(error) => failed(&error),
    }
}

fn in_blocking<I: BlockingInbox>(
    inbox: &I,
    tx: &I::Tx<'_>,
    cx: &Cx,
    handler: impl FnOnce(&I::Tx<'_>, &Cx) -> RunResult,
) -> Result<(RunResult, TransactionEnd), InboxError> {
    let job = &cx.job;
    if job.is_lost() {
        return Ok((
            RunResult::NotStarted(job.lease.stop().unwrap_or(StopReason::Lost)),
            TransactionEnd::Rollback,
        ));
    }
    let entry = entry(cx);
    if let Some(ended) = not_fresh(inbox.enter(tx, &entry)?, cx) {
        return Ok((ended, TransactionEnd::Rollback));
    }
    let ended = handler(tx, cx);
    let RunResult::Done(value) = &ended else { return Ok((ended, TransactionEnd::Rollback)) };
    let outcome = RecordedOutcome { failed: false, value: value.clone(), omitted_bytes: None };
    inbox.record(tx, &entry, outcome, job.env.ttl_ms)?;
    Ok(before_commit(job, ended))
}

/// One run in a transaction that lives across awaits.
async fn run_async<T, I, F, O>(inbox: &I, job: &Arc<Job>, value: T, handler: &F) -> RunResult
where
    I: AsyncInbox,
    F: for<'t> Fn(T, &'t mut I::Tx, Cx) -> TxFuture<'t, O>,
    O: IntoOutcome,
{
    let run = async {
        let cx = Cx { job: job.clone() };
        let entry = entry(&cx);
        let mut tx = inbox.begin().await?;
        if let Some(ended) = not_fresh(inbox.enter(&mut tx, &entry).await?, &cx) {
            return Ok(ended);
        }
        let running = handler(value, &mut tx, cx);
        let ended = RunResult::of(running.await, true);
        let RunResult::Done(value) = &ended else { return Ok(ended) };
        let outcome = RecordedOutcome { failed: false, value: value.clone(), omitted_bytes: None };
        inbox.record(&mut tx, &entry, outcome, job.env.ttl_ms).await?;
        match before_commit(job, ended) {
            (ended, TransactionEnd::Commit) => {
                inbox.commit(tx).await?;
                Ok(committed(job, ended))
            }
            (ended, TransactionEnd::Rollback) => Ok(ended),
        }
    };
    run.await.unwrap_or_else(|error: InboxError| failed(&error))
}

/// The last check of the lease. If another worker has the message by now, it runs the message itself; a commit after
/// this check is found there by its key.
fn before_commit(job: &Job, ended: RunResult) -> (RunResult, TransactionEnd) {
    if !job.env.hooks.pass_blocking(Point::BeforeCommit) {
        return (RunResult::NotStarted(StopReason::Abandoned), TransactionEnd::Rollback);
    }
    if job.is_lost() {
        return (RunResult::Stopped(job.lease.stop().unwrap_or(StopReason::Lost)), TransactionEnd::Rollback);
    }
    (ended, TransactionEnd::Commit)
}

fn committed(job: &Job, ended: RunResult) -> RunResult {
    if job.env.hooks.pass_blocking(Point::AfterCommit) {
        ended
    } else {
        RunResult::NotStarted(StopReason::Abandoned)
    }
}
