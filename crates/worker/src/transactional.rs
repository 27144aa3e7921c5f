//! The `transactional` tier: business write, ledger entry and outcome in one transaction of the user's database,
//! through the blocking or the async form of the seam.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hapax_core::inbox::TransactionEnd;
use hapax_core::{AsyncInbox, BlockingInbox, InboxEntry, InboxError, InboxLookup, RecordedOutcome, Tier};
use serde::de::DeserializeOwned;

use crate::builder::WorkerBuilder;
use crate::cx::{Cx, InTransaction, Job};
use crate::handler::{Boxed, Handler, parse};
use crate::outcome::{IntoOutcome, RunResult, StopReason, panic_text};
use crate::point::Point;

/// Delay of a delivery that is put back because its transaction could not begin in time.
const BUSY_MS: std::ops::RangeInclusive<u64> = 50..=500;
/// Delay of a delivery that is put back because the database cannot be reached.
const DOWN_MS: std::ops::RangeInclusive<u64> = 500..=2_000;
/// How often a run whose transaction lost against another one is started again before its delivery is put back.
const RESTARTS_MAX: u32 = 10;
/// How long the result of an unknown commit is looked for. After that the next delivery of the message finds it.
const LOOK_MS_MAX: u64 = 30_000;

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
        let (can, asked) = (inbox.inbox_capabilities(), inbox.clone());
        let in_doubt = move |job: &Arc<Job>| {
            let (inbox, entry) = (asked.clone(), entry(job));
            let look = move || inbox.in_transaction(|tx| (inbox.enter(tx, &entry), TransactionEnd::Rollback));
            Box::pin(async move {
                let looked = tokio::task::spawn_blocking(look).await;
                let looked = looked.map_err(|error| InboxError::Unavailable(error.to_string()))?;
                Ok(matches!(looked??, InboxLookup::InDoubt { .. }))
            }) as Boxed<Result<bool, InboxError>>
        };
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
        let in_doubt = Arc::new(in_doubt);
        self.transactional(Handler::Transactional { run: Arc::new(run), inbox: can, in_doubt })
    }

    /// As [`transactional_handler`](Self::transactional_handler), for a database whose transactions may live across an
    /// `await`, such as PostgreSQL. If the queue is in the same database, the delivery is settled in the same transaction,
    /// too. A transaction that loses against another one is started again, so a handler may run several times; what its
    /// earlier runs have written is rolled back.
    pub fn async_transactional_handler<T, I, F, O>(self, inbox: &I, handler: F) -> Self
    where
        T: DeserializeOwned + Send + 'static,
        I: AsyncInbox + Clone,
        F: for<'t> Fn(T, &'t mut I::Connection, Cx) -> TxFuture<'t, O> + Send + Sync + 'static,
        O: IntoOutcome,
    {
        let (can, asked) = (inbox.inbox_capabilities(), inbox.clone());
        let in_doubt = move |job: &Arc<Job>| {
            let (inbox, entry) = (asked.clone(), entry(job));
            Box::pin(async move {
                let mut tx = inbox.begin(&entry).await?;
                let looked = inbox.enter(&mut tx, &entry).await;
                inbox.rollback(tx).await;
                Ok(matches!(looked?, InboxLookup::InDoubt { .. }))
            }) as Boxed<Result<bool, InboxError>>
        };
        let (inbox, handler) = (inbox.clone(), Arc::new(handler));
        let run = move |job: &Arc<Job>, _record: bool| {
            let (inbox, handler, job) = (inbox.clone(), handler.clone(), job.clone());
            Box::pin(async move { run_async(&inbox, &job, &*handler).await }) as Boxed<RunResult>
        };
        let in_doubt = Arc::new(in_doubt);
        self.transactional(Handler::Transactional { run: Arc::new(run), inbox: can, in_doubt })
    }

    fn transactional(mut self, handler: Handler) -> Self {
        self.handler = Some(handler);
        self.tier(Tier::Transactional)
    }
}

/// The end of a run whose transaction did not begin, or was not committed.
fn failed(error: &InboxError) -> RunResult {
    let deferred =
        |after_ms| RunResult::Deferred { after_ms: fastrand::u64(after_ms), reason: error.to_string() };
    match error {
        InboxError::Locked { .. } | InboxError::Conflict(_) => deferred(BUSY_MS),
        InboxError::Unavailable(_) | InboxError::Unknown(_) => deferred(DOWN_MS),
        InboxError::Superseded(_) => RunResult::Stopped(StopReason::Lost),
        // To try it again would repeat what the handler has done outside of its transaction.
        InboxError::EndedByHandler(_) => RunResult::Reject { reason: error.to_string() },
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

fn entry(job: &Job) -> InboxEntry {
    InboxEntry { id: job.entry().clone(), fingerprint: job.fingerprint() }
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
    let entry = entry(job);
    if let Some(ended) = not_fresh(inbox.enter(tx, &entry)?, cx) {
        return Ok((ended, TransactionEnd::Rollback));
    }
    let ended = handler(tx, cx);
    let RunResult::Done(value) = &ended else { return Ok((ended, TransactionEnd::Rollback)) };
    let outcome = RecordedOutcome { failed: false, value: value.clone(), omitted_bytes: None };
    inbox.record(tx, &entry, outcome, job.env.ttl_ms)?;
    Ok(before_commit(job, ended))
}

/// One run in a transaction that lives across awaits. It is started again if the transaction lost against another one, and
/// if it is unknown whether the transaction was committed: to enter the key again waits for the end of that transaction, and
/// finds its outcome.
async fn run_async<T, I, F, O>(inbox: &I, job: &Arc<Job>, handler: &F) -> RunResult
where
    T: DeserializeOwned + Send,
    I: AsyncInbox,
    F: for<'t> Fn(T, &'t mut I::Connection, Cx) -> TxFuture<'t, O> + Sync,
    O: IntoOutcome,
{
    let timer = &job.env.timer;
    let (mut restarts, mut unknown_since_us) = (0, None);
    loop {
        let looking = unknown_since_us.is_some_and(|since| timer.now_us() < since + LOOK_MS_MAX * 1000);
        let error = match attempt(inbox, job, handler, unknown_since_us.is_some()).await {
            Ok(RunResult::Deferred { reason, .. }) if looking => reason,
            Ok(ended) => return ended,
            Err(InboxError::Conflict(error)) if restarts < RESTARTS_MAX => {
                restarts += 1;
                error
            }
            Err(InboxError::Unknown(error)) if unknown_since_us.is_none() || looking => {
                unknown_since_us.get_or_insert(timer.now_us());
                error
            }
            Err(error @ (InboxError::Unavailable(_) | InboxError::Locked { .. })) if looking => {
                error.to_string()
            }
            Err(error) => return failed(&error),
        };
        let (queue, message) = (&job.env.name, job.delivery.id);
        tracing::info!(%queue, message_id = %message, error, "a transaction is started again");
        timer.sleep_ms(fastrand::u64(BUSY_MS) / 5).await;
    }
}

/// One transaction: looks the key up, runs the handler, records the outcome, settles the delivery if its queue is in the same
/// database, commits. `again`: it is unknown whether an earlier one was committed.
async fn attempt<T, I, F, O>(
    inbox: &I,
    job: &Arc<Job>,
    handler: &F,
    again: bool,
) -> Result<RunResult, InboxError>
where
    T: DeserializeOwned + Send,
    I: AsyncInbox,
    F: for<'t> Fn(T, &'t mut I::Connection, Cx) -> TxFuture<'t, O> + Sync,
    O: IntoOutcome,
{
    let cx = Cx { job: job.clone() };
    let entry = entry(job);
    let mut tx = inbox.begin(&entry).await?;
    let (ended, outcome) = match in_transaction(inbox, &mut tx, &cx, &entry, handler).await {
        Ok((ended, Some(outcome))) => (ended, outcome),
        Ok((RunResult::Replayed(outcome), None)) if again && !outcome.failed => {
            inbox.rollback(tx).await;
            // Either the first transaction has settled the delivery, too, or the delivery is still there.
            return Ok(RunResult::Done(outcome.value));
        }
        Ok((RunResult::Failed { error }, None)) if inbox.is_conflict(&error) => {
            inbox.rollback(tx).await;
            return Err(InboxError::Conflict(error));
        }
        Ok((ended, None)) => {
            inbox.rollback(tx).await;
            if matches!(ended, RunResult::ParkedInDoubt(_)) && inbox.is_own(&job.delivery.receipt) {
                job.ledger_here.store(true, Ordering::SeqCst);
            }
            return Ok(ended);
        }
        Err(error) => {
            inbox.rollback(tx).await;
            return Err(error);
        }
    };
    let (ttl_ms, receipt) = (job.env.ttl_ms, &job.delivery.receipt);
    if inbox.is_own(receipt) {
        job.set_settled(InTransaction::Unknown);
    }
    let settled = match inbox.complete(tx, &entry, outcome, ttl_ms, receipt).await {
        Ok(settled) => settled,
        Err(error @ InboxError::Unknown(_)) => return Err(error),
        Err(error) => {
            job.set_settled(if again { InTransaction::Unknown } else { InTransaction::No });
            return Err(error);
        }
    };
    let ended = committed(job, ended);
    if settled && matches!(ended, RunResult::Done(_)) {
        job.set_settled(InTransaction::Yes);
    }
    Ok(ended)
}

/// The part between begin and end. With an outcome the transaction is to be completed, else rolled back.
async fn in_transaction<T, I, F, O>(
    inbox: &I,
    tx: &mut I::Tx,
    cx: &Cx,
    entry: &InboxEntry,
    handler: &F,
) -> Result<(RunResult, Option<RecordedOutcome>), InboxError>
where
    T: DeserializeOwned + Send,
    I: AsyncInbox,
    F: for<'t> Fn(T, &'t mut I::Connection, Cx) -> TxFuture<'t, O> + Sync,
    O: IntoOutcome,
{
    let job = &cx.job;
    inbox.hold(tx, &job.delivery.receipt).await?;
    if let Some(ended) = not_fresh(inbox.enter(tx, entry).await?, cx) {
        return Ok((ended, None));
    }
    let running = match parse(job) {
        Ok(value) => handler(value, I::connection(tx), cx.clone()),
        Err(unparsable) => return Ok((unparsable, None)),
    };
    let ended = RunResult::of(running.await, true);
    let RunResult::Done(value) = &ended else { return Ok((ended, None)) };
    let outcome = RecordedOutcome { failed: false, value: value.clone(), omitted_bytes: None };
    let (ended, end) = before_commit(job, ended);
    Ok((ended, (end == TransactionEnd::Commit).then_some(outcome)))
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
