//! Untyped handlers.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use hapax_core::{InboxError, LedgerCapabilities};
use serde::de::DeserializeOwned;

use crate::cx::{Cx, Job};
use crate::outcome::{IntoOutcome, RunResult};

pub(crate) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Runs one delivery; the flag tells whether its value is recorded.
pub(crate) type RunOne = Arc<dyn Fn(&Arc<Job>, bool) -> Boxed<RunResult> + Send + Sync>;
/// Runs several deliveries; returns one result each, in order.
pub(crate) type RunMany = Arc<dyn Fn(&[Arc<Job>], bool) -> Boxed<Vec<RunResult>> + Send + Sync>;

/// Asks the inbox of a transactional handler whether a delivery's key is in doubt now.
pub(crate) type AskDoubt = Arc<dyn Fn(&Arc<Job>) -> Boxed<Result<bool, InboxError>> + Send + Sync>;

/// The handler of a worker.
#[derive(Clone)]
pub(crate) enum Handler {
    One(RunOne),
    Many {
        run: RunMany,
        max: usize,
    },
    /// Commits its own effect together with the ledger entry.
    Transactional {
        run: RunOne,
        /// The durability of the inbox's entries.
        inbox: LedgerCapabilities,
        in_doubt: AskDoubt,
    },
}

impl Handler {
    /// The inbox of a transactional handler.
    pub fn inbox(&self) -> Option<&LedgerCapabilities> {
        match self {
            Self::One(_) | Self::Many { .. } => None,
            Self::Transactional { inbox, .. } => Some(inbox),
        }
    }

    /// How a transactional handler's inbox is asked for doubts.
    pub fn asks_doubt(&self) -> Option<&AskDoubt> {
        match self {
            Self::One(_) | Self::Many { .. } => None,
            Self::Transactional { in_doubt, .. } => Some(in_doubt),
        }
    }
}

pub(crate) fn parse<T: DeserializeOwned>(job: &Job) -> Result<T, RunResult> {
    serde_json::from_slice(&job.delivery.body).map_err(|error| {
        RunResult::Unparsable(format!(
            "the body is not what the handler takes: {error}; fix its sender, or the type"
        ))
    })
}

pub(crate) fn one<T, F, Fut>(handler: F) -> RunOne
where
    T: DeserializeOwned + Send,
    F: Fn(T, Cx) -> Fut + Send + Sync + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoOutcome,
{
    let handler = Arc::new(handler);
    Arc::new(move |job, record| {
        let (handler, job) = (handler.clone(), job.clone());
        Box::pin(async move {
            // The value moves into the handler and must not be held across the await.
            let running = match parse::<T>(&job) {
                Ok(value) => handler(value, Cx { job }),
                Err(ended) => return ended,
            };
            RunResult::of(running.await, record)
        })
    })
}

pub(crate) fn raw<F, Fut>(handler: F) -> RunOne
where
    F: Fn(Bytes, Cx) -> Fut + Send + Sync + 'static,
    Fut: Future + Send + 'static,
    Fut::Output: IntoOutcome,
{
    let handler = Arc::new(handler);
    Arc::new(move |job, record| {
        let (handler, job) = (handler.clone(), job.clone());
        Box::pin(async move {
            let running = handler(job.delivery.body.clone(), Cx { job });
            RunResult::of(running.await, record)
        })
    })
}

pub(crate) fn many<T, F, Fut, O>(handler: F) -> RunMany
where
    T: DeserializeOwned + Send,
    F: Fn(Vec<(T, Cx)>) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Vec<O>> + Send + 'static,
    O: IntoOutcome,
{
    let handler = Arc::new(handler);
    Arc::new(move |jobs, record| {
        let (handler, jobs) = (handler.clone(), jobs.to_vec());
        Box::pin(async move {
            let mut ended: Vec<Option<RunResult>> = Vec::with_capacity(jobs.len());
            let mut values = Vec::with_capacity(jobs.len());
            for job in jobs {
                match parse::<T>(&job) {
                    Ok(value) => {
                        values.push((value, Cx { job }));
                        ended.push(None);
                    }
                    Err(unparsable) => ended.push(Some(unparsable)),
                }
            }
            if values.is_empty() {
                return ended.into_iter().flatten().collect();
            }
            let wanted = values.len();
            let running = handler(values);
            let outcomes = running.await;
            let given = outcomes.len();
            let mut outcomes = outcomes.into_iter().map(|outcome| RunResult::of(outcome, record));
            // Without one outcome per message, it is unknown which outcome belongs to which
            // message.
            let unknown = || RunResult::InDoubt {
                error: format!(
                    "the batch handler returned {given} outcomes for {wanted} messages; return one each"
                ),
            };
            let fill = |ended: Option<RunResult>| match ended {
                Some(ended) => ended,
                None if given == wanted => outcomes.next().unwrap_or_else(unknown),
                None => unknown(),
            };
            ended.into_iter().map(fill).collect()
        })
    })
}
