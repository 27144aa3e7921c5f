//! Helpers for testing handlers: run one delivery and inspect its result, send a duplicate, crash at a named point and
//! deliver again. They run the real worker over any store, for example an embedded one in a temporary folder.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # use std::sync::Arc;
//! # use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, Tier};
//! # use hapax_embedded::{Embedded, Options};
//! use hapax_worker::testing::Trial;
//! use hapax_worker::{Cx, Point, Worker};
//!
//! async fn greet(name: String, cx: Cx) -> Result<String, std::io::Error> {
//!     Ok(format!("hello {name}{}", if cx.is_takeover() { " again" } else { "" }))
//! }
//!
//! let folder = tempfile::tempdir()?;
//! let store = Arc::new(Embedded::open(folder.path(), Options::default())?);
//! let queue = QueueName::new("names")?;
//! let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() };
//! store.create_queue(&queue, config).await?;
//! let trial = Trial::new(Worker::builder(store, queue).handler(greet));
//!
//! // One delivery, and its duplicate: the same outcome, no second run.
//! let ada = NewMessage::new("\"Ada\"").idempotency_key(&"greet-ada".parse()?);
//! let first = trial.send_and_run(ada.clone()).await?;
//! assert_eq!(first.value::<String>()?, "hello Ada");
//! assert!(trial.send_and_run(ada).await?.is_replay());
//!
//! // A crash right after the effect, then the message comes back: the second run is told.
//! trial.send_and_crash(NewMessage::new("\"Bob\""), Point::AfterEffect).await?;
//! assert_eq!(trial.run().await?.value::<String>()?, "hello Bob again");
//! # Ok(())
//! # }
//! ```

use std::future::pending;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::{
    Batch, ClaimEnding, Delivery, Extend, NewMessage, Receive, RemainingLease, SendError, Settle,
    SettleError, Settled, Settlement, Source, SourceDescription, StoreError,
};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::{Notify, mpsc};

use crate::builder::{BuildError, WorkerBuilder};
use crate::point::{Halt, Point};
use crate::worker::Stopped;

/// The lease of a trial: a crash delays its message by this time.
const LEASE_MS: u64 = 1_000;
/// Timeout for a delivery to arrive and to end.
const PATIENCE_MS: u64 = 60_000;

/// Why a trial failed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TrialError {
    /// The worker could not be built.
    #[error(transparent)]
    Build(#[from] BuildError),
    /// The store could not be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The message was not accepted.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The worker stopped because of an error.
    #[error(transparent)]
    Stopped(Box<Stopped>),
    /// The worker is built from a source that a trial cannot send to.
    #[error("the worker has a source of its own; send to that, then call `run` or `crash_at`")]
    NoQueue,
    /// No message was delivered, or the delivery did not end.
    #[error(
        "nothing was delivered and settled within {PATIENCE_MS} ms; is a message there, and the handler not stuck?"
    )]
    Nothing,
    /// The delivery ended before it reached the point.
    #[error("the delivery ended without passing {0}; does its tier have that point?")]
    NotPassed(Point),
}

/// The result of one delivery.
#[derive(Debug, Clone)]
pub struct TrialRun {
    /// How the delivery was settled; for `at-most-once`, how it would have been.
    pub settlement: Settlement,
    /// How its claim was meant to end; `None` if the handler did not run.
    pub ending: Option<ClaimEnding>,
    /// The effect of the settle; `None` if the store refused it, or there was nothing to settle.
    pub settled: Option<Settled>,
}

impl TrialRun {
    /// The handler ran and succeeded.
    pub fn is_done(&self) -> bool {
        self.settlement == Settlement::Ack && self.ending.is_some()
    }

    /// The outcome was recorded earlier: acked without running the handler.
    pub fn is_replay(&self) -> bool {
        self.settlement == Settlement::Ack && self.ending.is_none()
    }

    /// Its key was in progress, so it was put back.
    fn waits(&self) -> bool {
        self.ending.is_none() && matches!(self.settlement, Settlement::Defer { .. })
    }

    /// The handler's return value, as recorded. The error describes any other result.
    pub fn value<R: DeserializeOwned>(&self) -> Result<R, String> {
        match &self.ending {
            Some(ClaimEnding::Complete { outcome, .. }) if !outcome.failed => {
                let json = outcome.value.as_ref().ok_or("the value cannot be written as JSON")?;
                json.get().map_err(|error| format!("{json:?} is not of this type: {error}"))
            }
            _ => Err(format!("the handler did not end well: {self:?}")),
        }
    }
}

/// Reports the result of a delivery to a trial, after the delivery has passed its last point.
#[derive(Clone)]
pub(crate) struct Observer {
    ended: Arc<Mutex<Vec<TrialRun>>>,
    tell: mpsc::UnboundedSender<TrialRun>,
}

impl Observer {
    fn new() -> (Self, mpsc::UnboundedReceiver<TrialRun>) {
        let (tell, told) = mpsc::unbounded_channel();
        (Self { ended: Arc::default(), tell }, told)
    }

    pub fn ended(&self, ran: TrialRun) {
        self.ended.lock().unwrap_or_else(PoisonError::into_inner).push(ran);
    }

    pub fn passed(&self) {
        for ran in self.ended.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            // The trial may have ended already.
            let _ = self.tell.send(ran);
        }
    }
}

/// Runs a worker for one delivery at a time.
pub struct Trial {
    builder: WorkerBuilder,
}

impl Trial {
    /// Tests a worker that is configured as for production, except for a lease of 1 s.
    pub fn new(builder: WorkerBuilder) -> Self {
        Self { builder: builder.concurrency(1).lease(Duration::from_millis(LEASE_MS)) }
    }

    /// Sends a message.
    pub async fn send(&self, message: NewMessage) -> Result<(), TrialError> {
        let Some((store, queue)) = &self.builder.queue else { return Err(TrialError::NoQueue) };
        let sent = store.send(queue, vec![message]).await?;
        for sent in sent {
            sent?;
        }
        Ok(())
    }

    /// Sends a message, then runs the next delivery.
    pub async fn send_and_run(&self, message: NewMessage) -> Result<TrialRun, TrialError> {
        self.send(message).await?;
        self.run().await
    }

    /// Sends a message, then crashes at a point of the next delivery.
    pub async fn send_and_crash(&self, message: NewMessage, at: Point) -> Result<(), TrialError> {
        self.send(message).await?;
        self.crash_at(at).await
    }

    /// Runs the next delivery to its end. If its key is in progress, for example shortly after a crash, this waits for
    /// the next delivery.
    pub async fn run(&self) -> Result<TrialRun, TrialError> {
        loop {
            let ran = self.run_once().await?;
            if !ran.waits() {
                return Ok(ran);
            }
        }
    }

    async fn run_once(&self) -> Result<TrialRun, TrialError> {
        let (observer, mut told) = Observer::new();
        let mut builder = self.one_delivery();
        builder.hooks.observer = Some(observer);
        let worker = builder.build().await?;
        let ran = Arc::new(Mutex::new(None));
        let found = ran.clone();
        let done = async move {
            let ran = tokio::time::timeout(Duration::from_millis(PATIENCE_MS), told.recv()).await;
            *found.lock().unwrap_or_else(PoisonError::into_inner) = ran.ok().flatten();
        };
        worker.run(done).await.map_err(|stopped| TrialError::Stopped(Box::new(stopped)))?;
        let ran = ran.lock().unwrap_or_else(PoisonError::into_inner).take();
        ran.ok_or(TrialError::Nothing)
    }

    /// Runs the next delivery up to a point and drops everything there, as if the process had died: nothing is settled,
    /// heartbeats end, and the message returns when its lease has run out.
    pub async fn crash_at(&self, at: Point) -> Result<(), TrialError> {
        while let Some(ran) = self.crash_once(at).await? {
            if !ran.waits() {
                return Err(TrialError::NotPassed(at));
            }
        }
        Ok(())
    }

    /// `None`: it crashed at the point. `Some`: the delivery ended earlier.
    async fn crash_once(&self, at: Point) -> Result<Option<TrialRun>, TrialError> {
        let halt = Arc::new(Halt { at, reached: Notify::new() });
        let (observer, mut told) = Observer::new();
        let mut builder = self.one_delivery();
        builder.hooks.halt = Some(halt.clone());
        builder.hooks.observer = Some(observer);
        let worker = builder.build().await?;
        tokio::select! {
            biased;
            () = halt.reached.notified() => Ok(None),
            ran = told.recv() => ran.map(Some).ok_or(TrialError::Nothing),
            stopped = worker.run(pending()) => Err(stopped.map_or_else(|stopped| TrialError::Stopped(Box::new(stopped)), |_| TrialError::Nothing)),
            () = tokio::time::sleep(Duration::from_millis(PATIENCE_MS)) => Err(TrialError::Nothing),
        }
    }

    fn one_delivery(&self) -> WorkerBuilder {
        let one = OneDelivery { source: self.builder.source.clone(), given: AtomicBool::new(false) };
        self.builder.clone().source(Arc::new(one))
    }
}

/// A source that returns only one delivery.
struct OneDelivery {
    source: Arc<dyn Source>,
    given: AtomicBool,
}

#[async_trait]
impl Source for OneDelivery {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        self.source.describe().await
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        if self.given.load(Ordering::SeqCst) {
            return pending().await;
        }
        let deliveries = self.source.next(Receive { max: 1, ..receive }).await?;
        self.given.store(!deliveries.is_empty(), Ordering::SeqCst);
        Ok(deliveries)
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.source.settle(batch).await
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.source.extend(batch).await
    }
}
