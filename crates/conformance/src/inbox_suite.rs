//! The suite for transactional inboxes, blocking and async.
//!
//! A new inbox implements an [`InboxHarness`], usually through [`BlockingHarness`] or [`AsyncHarness`], and then needs its own test
//! file:
//!
//! ```text
//! hapax_conformance::inbox_suite!(fresh); // async fn fresh() -> Box<dyn InboxHarness>
//! ```

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::inbox::TransactionEnd;
use hapax_core::ledger::OUTCOME_BYTES_MAX;
use hapax_core::{
    AsyncInbox, BlockingInbox, EntryId, Fingerprint, InboxEntry, InboxError, InboxLookup, Json,
    RecordedOutcome,
};

/// One transaction of a case: enter; if the key is fresh, a business write and the outcome; then the end.
#[derive(Debug, Clone)]
pub struct Attempt {
    /// The intended effect.
    pub entry: InboxEntry,
    /// The outcome to record if the key is fresh.
    pub outcome: RecordedOutcome,
    /// How the transaction ends.
    pub end: TransactionEnd,
}

/// One inbox under test.
#[async_trait]
pub trait InboxHarness: Send + Sync {
    /// Runs the attempt and returns the result of `enter`.
    async fn attempt(&self, attempt: Attempt) -> Result<InboxLookup, InboxError>;

    /// Number of committed business writes.
    async fn effects(&self) -> u64;

    /// Reopens the same database, as another process would.
    async fn reopen(&mut self);

    /// Runs the attempt while another transaction that has entered `entry` is open. The inbox's lock timeout must be
    /// short.
    async fn attempt_while_entered(&self, attempt: Attempt) -> Result<InboxLookup, InboxError>;
}

fn attempt(key: &str, content: &str) -> Attempt {
    let id = EntryId::new("suite".parse().expect("a scope"), key.parse().expect("a key"));
    let fingerprint = Fingerprint::new(content).expect("a fingerprint");
    let outcome = RecordedOutcome::done(Json::of(key).expect("a text is JSON"));
    Attempt { entry: InboxEntry { id, fingerprint }, outcome, end: TransactionEnd::Commit }
}

/// The first attempt is fresh, each later one gets the outcome of the first, and the effect happens once.
pub async fn a_duplicate_gets_the_outcome(inbox: Box<dyn InboxHarness>) {
    let first = attempt("order-1", "a");
    assert_eq!(inbox.attempt(first.clone()).await.unwrap(), InboxLookup::Fresh);
    for _ in 0..3 {
        let later = Attempt { outcome: RecordedOutcome::done(Json::of("other").unwrap()), ..first.clone() };
        assert_eq!(inbox.attempt(later).await.unwrap(), InboxLookup::Completed(first.outcome.clone()));
    }
    assert_eq!(inbox.effects().await, 1);
}

/// A transaction that is rolled back leaves neither the effect nor the entry.
pub async fn a_rollback_leaves_nothing(inbox: Box<dyn InboxHarness>) {
    let undone = Attempt { end: TransactionEnd::Rollback, ..attempt("order-1", "a") };
    for _ in 0..2 {
        assert_eq!(inbox.attempt(undone.clone()).await.unwrap(), InboxLookup::Fresh);
        assert_eq!(inbox.effects().await, 0);
    }
    assert_eq!(inbox.attempt(attempt("order-1", "a")).await.unwrap(), InboxLookup::Fresh);
    assert_eq!(inbox.effects().await, 1);
}

/// A different content under the same key is refused, and a failed outcome stays failed.
pub async fn another_content_is_a_mismatch(inbox: Box<dyn InboxHarness>) {
    let failed = RecordedOutcome::failed(Json::of("no account").unwrap());
    let first = Attempt { outcome: failed.clone(), ..attempt("order-1", "a") };
    inbox.attempt(first.clone()).await.unwrap();
    assert_eq!(inbox.attempt(attempt("order-1", "b")).await.unwrap(), InboxLookup::Mismatch);
    assert_eq!(inbox.attempt(first).await.unwrap(), InboxLookup::Completed(failed));
    assert_eq!(inbox.effects().await, 1);
}

/// A key is valid only within its scope.
pub async fn scopes_do_not_share_keys(inbox: Box<dyn InboxHarness>) {
    let first = attempt("order-1", "a");
    let mut other = first.clone();
    other.entry.id.scope = "elsewhere".parse().expect("a scope");
    assert_eq!(inbox.attempt(first).await.unwrap(), InboxLookup::Fresh);
    assert_eq!(inbox.attempt(other).await.unwrap(), InboxLookup::Fresh);
    assert_eq!(inbox.effects().await, 2);
}

/// Twenty concurrent attempts have one effect. One that waited too long, or lost against another one, may report that; it
/// then finds the outcome.
pub async fn concurrent_duplicates_have_one_effect(inbox: Box<dyn InboxHarness>) {
    let inbox: Arc<dyn InboxHarness> = inbox.into();
    let tasks: Vec<_> = (0..20)
        .map(|_| {
            let inbox = inbox.clone();
            tokio::spawn(async move {
                loop {
                    match inbox.attempt(attempt("order-1", "a")).await {
                        Ok(InboxLookup::InProgress { .. })
                        | Err(InboxError::Locked { .. } | InboxError::Conflict(_)) => {}
                        entered => return entered.unwrap(),
                    }
                }
            })
        })
        .collect();
    let mut fresh = 0;
    for task in tasks {
        match task.await.expect("no panic") {
            InboxLookup::Fresh => fresh += 1,
            entered => assert!(matches!(entered, InboxLookup::Completed(_)), "{entered:?}"),
        }
    }
    assert_eq!((fresh, inbox.effects().await), (1, 1));
}

/// An entry survives its process; one that was not committed does not appear.
pub async fn entries_survive_a_restart(mut inbox: Box<dyn InboxHarness>) {
    let first = attempt("order-1", "a");
    inbox.attempt(first.clone()).await.unwrap();
    inbox.attempt(Attempt { end: TransactionEnd::Rollback, ..attempt("order-2", "a") }).await.unwrap();
    inbox.reopen().await;
    assert_eq!(inbox.attempt(first.clone()).await.unwrap(), InboxLookup::Completed(first.outcome));
    assert_eq!(inbox.attempt(attempt("order-2", "a")).await.unwrap(), InboxLookup::Fresh);
    assert_eq!(inbox.effects().await, 2);
}

/// If an outcome is too large, the fact of completion is stored, so the effect never runs again.
pub async fn a_large_outcome_becomes_a_marker(inbox: Box<dyn InboxHarness>) {
    let outcome = RecordedOutcome::done(Json::of(&"x".repeat(OUTCOME_BYTES_MAX)).unwrap());
    let first = Attempt { outcome: outcome.clone(), ..attempt("order-1", "a") };
    inbox.attempt(first.clone()).await.unwrap();
    assert_eq!(inbox.attempt(first).await.unwrap(), InboxLookup::Completed(outcome.without_oversize_value()));
}

/// A key that another transaction has entered is not entered; the wait is bounded.
pub async fn a_key_in_progress_is_not_entered(inbox: Box<dyn InboxHarness>) {
    let met = inbox.attempt_while_entered(attempt("order-1", "a")).await;
    let in_progress = matches!(met, Ok(InboxLookup::InProgress { .. }) | Err(InboxError::Locked { .. }));
    assert!(in_progress, "{met:?}");
    assert_eq!(inbox.effects().await, 0);
    assert_eq!(inbox.attempt(attempt("order-1", "a")).await.unwrap(), InboxLookup::Fresh);
}

/// Runs one case on its own runtime; called by [`inbox_suite!`](macro@crate::inbox_suite).
pub fn run(case: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(case);
}

/// Defines one `#[test]` per case of the inbox suite, each with a fresh inbox.
#[macro_export]
macro_rules! inbox_suite {
    ($fresh:path) => {
        $crate::inbox_suite!($fresh;
            a_duplicate_gets_the_outcome,
            a_rollback_leaves_nothing,
            another_content_is_a_mismatch,
            scopes_do_not_share_keys,
            concurrent_duplicates_have_one_effect,
            entries_survive_a_restart,
            a_large_outcome_becomes_a_marker,
            a_key_in_progress_is_not_entered,
        );
    };
    ($fresh:path; $($case:ident),* $(,)?) => {
        $(
            #[test]
            fn $case() {
                $crate::inbox::run(async { $crate::inbox::$case($fresh().await).await });
            }
        )*
    };
}

/// Runs the suite on a [`BlockingInbox`].
pub struct BlockingHarness<I: BlockingInbox> {
    /// The inbox under test.
    pub inbox: Arc<I>,
    /// Opens the same database again.
    pub open: Box<dyn Fn() -> I + Send + Sync>,
    /// Makes one business write.
    pub write: fn(&I::Tx<'_>),
    /// Counts the business writes.
    pub count: fn(&I::Tx<'_>) -> u64,
}

impl<I: BlockingInbox> BlockingHarness<I> {
    fn make(inbox: &I, write: fn(&I::Tx<'_>), attempt: Attempt) -> Result<InboxLookup, InboxError> {
        inbox.in_transaction(|tx| {
            let made = inbox.enter(tx, &attempt.entry).and_then(|entered| {
                if entered == InboxLookup::Fresh {
                    write(tx);
                    inbox.record(tx, &attempt.entry, attempt.outcome, 60_000)?;
                }
                Ok(entered)
            });
            let end = if made.is_ok() { attempt.end } else { TransactionEnd::Rollback };
            (made, end)
        })?
    }
}

#[async_trait]
impl<I: BlockingInbox> InboxHarness for BlockingHarness<I> {
    async fn attempt(&self, attempt: Attempt) -> Result<InboxLookup, InboxError> {
        let (inbox, write) = (self.inbox.clone(), self.write);
        tokio::task::spawn_blocking(move || Self::make(&inbox, write, attempt)).await.expect("no panic")
    }

    async fn effects(&self) -> u64 {
        let (inbox, count) = (self.inbox.clone(), self.count);
        let counting = move || inbox.in_transaction(|tx| (count(tx), TransactionEnd::Rollback));
        tokio::task::spawn_blocking(counting).await.expect("no panic").expect("the count")
    }

    async fn reopen(&mut self) {
        self.inbox = Arc::new((self.open)());
    }

    async fn attempt_while_entered(&self, attempt: Attempt) -> Result<InboxLookup, InboxError> {
        let (inbox, other, write) = (self.inbox.clone(), (self.open)(), self.write);
        let holding = move || {
            other.in_transaction(|tx| {
                assert_eq!(other.enter(tx, &attempt.entry).expect("it is entered"), InboxLookup::Fresh);
                (Self::make(&inbox, write, attempt), TransactionEnd::Rollback)
            })
        };
        tokio::task::spawn_blocking(holding).await.expect("no panic")?
    }
}

/// A business read or write in a transaction.
pub type BusinessFuture<'t, T> = Pin<Box<dyn Future<Output = T> + Send + 't>>;

/// Runs the suite on an [`AsyncInbox`].
pub struct AsyncHarness<I: AsyncInbox> {
    /// The inbox under test.
    pub inbox: I,
    /// Opens the same database again.
    pub open: Box<dyn Fn() -> I + Send + Sync>,
    /// Makes one business write.
    pub write: for<'t> fn(&'t mut I::Connection) -> BusinessFuture<'t, ()>,
    /// Counts the business writes.
    pub count: for<'t> fn(&'t mut I::Connection) -> BusinessFuture<'t, u64>,
}

impl<I: AsyncInbox> AsyncHarness<I> {
    async fn make(&self, inbox: &I, attempt: Attempt) -> Result<InboxLookup, InboxError> {
        let mut tx = inbox.begin(&attempt.entry).await?;
        let entered = inbox.enter(&mut tx, &attempt.entry).await?;
        if entered == InboxLookup::Fresh {
            (self.write)(I::connection(&mut tx)).await;
            inbox.record(&mut tx, &attempt.entry, attempt.outcome, 60_000).await?;
        }
        match attempt.end {
            TransactionEnd::Commit => inbox.commit(tx).await?,
            TransactionEnd::Rollback => inbox.rollback(tx).await,
        }
        Ok(entered)
    }
}

#[async_trait]
impl<I: AsyncInbox> InboxHarness for AsyncHarness<I> {
    async fn attempt(&self, attempt: Attempt) -> Result<InboxLookup, InboxError> {
        self.make(&self.inbox, attempt).await
    }

    async fn effects(&self) -> u64 {
        let counting = attempt("counting", "a").entry;
        let mut tx = self.inbox.begin(&counting).await.expect("a transaction");
        let count = (self.count)(I::connection(&mut tx)).await;
        self.inbox.rollback(tx).await;
        count
    }

    async fn reopen(&mut self) {
        self.inbox = (self.open)();
    }

    async fn attempt_while_entered(&self, attempt: Attempt) -> Result<InboxLookup, InboxError> {
        let other = (self.open)();
        let mut tx = other.begin(&attempt.entry).await?;
        assert_eq!(other.enter(&mut tx, &attempt.entry).await?, InboxLookup::Fresh);
        let met = self.make(&self.inbox, attempt).await;
        other.rollback(tx).await;
        met
    }
}
