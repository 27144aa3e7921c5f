//! Receives, and ends in good order.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_core::policy::tier::Finding;
use hapax_core::{Receive, StoreError, Tier, policy};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::handler::Handler;
use crate::lease::{instant, now_us};
use crate::outcome::Stop;
use crate::settle::{self, Finish};
use crate::state::WorkerState;
use crate::stats::Counts;

/// The most deliveries of one receive.
const RECEIVE_MAX: usize = 256;
/// How many ended deliveries may wait for the store, beyond as many as run at once.
const UNSETTLED_MAX: usize = 1024;
/// How long a stopped handler has to come to an await before it is left alone.
const GRACE_MS: u64 = 1_000;
/// How long the last settles may take once everything has ended.
const LAST_SETTLES_MS: u64 = 10_000;

/// Runs a handler for the deliveries of a queue. Made by [`Worker::builder`]; runs until it is told to stop.
pub struct Worker {
    pub(crate) shared: Arc<WorkerState>,
    pub(crate) finishes: mpsc::UnboundedReceiver<Finish>,
    pub(crate) warnings: Vec<Finding>,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// What it did.
    pub counts: Counts,
    /// Everything that had been received was finished and settled within the drain's bound.
    pub drained: bool,
    /// Deliveries that were put back uncounted because the worker ended: stopped at an await, or not begun.
    pub put_back: u64,
    /// Deliveries whose handler did not come to an await in time: they return when their lease runs out.
    pub left: u64,
    /// Deliveries whose end the store did not confirm in time: they may return.
    pub unsettled: u64,
}

/// A worker could not go on; what it had received was finished first.
#[derive(Debug, Clone, Error)]
#[error("the worker of queue {queue} cannot go on: {error}")]
pub struct Stopped {
    /// The queue.
    pub queue: String,
    /// What the store said.
    #[source]
    pub error: StoreError,
    /// What was done until then.
    pub report: Report,
}

/// A worker's counters, readable while it runs. Cheap to clone.
#[derive(Clone)]
pub struct Watch(Arc<WorkerState>);

impl Watch {
    /// What the worker has done so far.
    pub fn counts(&self) -> Counts {
        self.0.stats.counts()
    }

    /// The lease that it asks for now; changes where it follows the handler's times.
    pub fn lease_ms(&self) -> u64 {
        self.0.lease.ms()
    }
}

impl Worker {
    /// Its counters, to be looked at while it runs.
    pub fn watch(&self) -> Watch {
        Watch(self.shared.clone())
    }

    /// What casts doubt on the tier, though it holds: each with a code, a remedy and a page.
    pub fn warnings(&self) -> &[Finding] {
        &self.warnings
    }

    /// Its name among consumers: new with every start.
    pub fn consumer(&self) -> &str {
        &self.shared.consumer
    }

    /// Receives and runs handlers until `shutdown` completes, then finishes what it has begun, within the bound of
    /// [`drain`](crate::WorkerBuilder::drain).
    ///
    /// Dropped instead, it stops its handlers at their next await and settles nothing more: what it held returns when
    /// its lease runs out.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<Report, Stopped> {
        let Self { shared, finishes, warnings } = self;
        for warning in warnings {
            tracing::warn!(queue = %shared.env.name, code = %warning.code, "{warning}");
        }
        let mut ending = Abandon { shared: shared.clone(), tasks: Vec::new() };
        ending.tasks.push(tokio::spawn(settle::collect(shared.clone(), finishes)));
        ending.tasks.push(tokio::spawn(stop_revoked(shared.clone())));
        let error = shared.receive_until(std::pin::pin!(shutdown)).await;
        let report = shared.drain().await;
        drop(ending);
        match error {
            None => Ok(report),
            Some(error) => Err(Stopped { queue: shared.env.name.clone(), error, report }),
        }
    }
}

/// However a run ends, nothing of it goes on behind its back.
struct Abandon {
    shared: Arc<WorkerState>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// Stops the handlers of deliveries that the source has taken back.
async fn stop_revoked(shared: Arc<WorkerState>) {
    loop {
        let receipts = shared.source.lost().await;
        shared.beats.revoked(&receipts);
    }
}

impl Drop for Abandon {
    fn drop(&mut self) {
        self.shared.abandoned.store(true, Ordering::SeqCst);
        self.shared.beats.stop_all(Stop::Abandoned);
        self.shared.beats.release_all();
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl WorkerState {
    /// `None`: told to stop. `Some`: receiving makes no sense any more.
    async fn receive_until(
        self: &Arc<Self>,
        mut shutdown: Pin<&mut impl Future<Output = ()>>,
    ) -> Option<StoreError> {
        let mut failures = 0u32;
        let mut pause_ms = 0;
        loop {
            let receiving = async {
                if pause_ms > 0 {
                    tokio::time::sleep(Duration::from_millis(pause_ms)).await;
                }
                let max = self.room().await;
                let asked_us = now_us();
                (max, asked_us, self.source.next(self.receive(max)).await)
            };
            let (max, asked_us, received) = tokio::select! {
                biased;
                () = &mut shutdown => return None,
                received = receiving => received,
            };
            pause_ms = match received {
                Ok(deliveries) => {
                    failures = 0;
                    if let Some(rate) = &self.rate {
                        rate.give_back(max.saturating_sub(deliveries.len()));
                    }
                    // A source that does not wait must not make this spin.
                    let at_once = deliveries.is_empty() && now_us() - asked_us < 20_000;
                    let crowded = !deliveries.is_empty() && self.start(deliveries, asked_us);
                    if at_once || crowded { 50 } else { 0 }
                }
                Err(error) if error.is_retryable() => {
                    if let Some(rate) = &self.rate {
                        rate.give_back(max);
                    }
                    self.stats.receive_errors.add();
                    tracing::warn!(%error, queue = %self.env.name, "a receive failed; trying again");
                    failures += 1;
                    let ceiling_ms = (50u64 << failures.min(8)).min(10_000);
                    fastrand::u64(ceiling_ms / 2..=ceiling_ms)
                }
                Err(error) => {
                    tracing::error!(%error, queue = %self.env.name, "the worker cannot go on");
                    return Some(error);
                }
            };
        }
    }

    fn receive(&self, max: usize) -> Receive {
        Receive {
            max,
            lease_ms: self.leased.then(|| self.lease.ms()),
            wait_ms: Some(policy::WAIT_MS_MAX),
            consumer: Some(self.consumer.clone()),
            ack_on_receive: self.policy.tier == Tier::AtMostOnce,
            attempt_id: None,
        }
    }

    /// Waits until something may start; how much.
    async fn room(&self) -> usize {
        // Handlers that are about to end do so first: one receive for many, not one for each.
        tokio::task::yield_now().await;
        while self.unsettled.load(Ordering::SeqCst) > UNSETTLED_MAX {
            self.settled.notified().await;
        }
        loop {
            self.slots.wait(1).await;
            let max = if let Handler::Many { max, .. } = &self.handler {
                *max
            } else {
                self.slots.free().clamp(1, RECEIVE_MAX)
            };
            match self.rate.as_ref().map(|rate| rate.take(max, now_us())) {
                None => return max,
                Some(Ok(allowed)) => return allowed,
                Some(Err(at_us)) => tokio::time::sleep_until(instant(at_us).into()).await,
            }
        }
    }

    /// Finishes what was begun, within bounds.
    async fn drain(&self) -> Report {
        let waiting = self.per_key.as_ref().map(crate::limits::PerKey::give_up).unwrap_or_default();
        for job in waiting {
            self.put_back(job);
        }
        let bound = Duration::from_millis(self.drain_ms);
        let mut drained = tokio::time::timeout(bound, self.slots.wait_for_all()).await.is_ok();
        let mut left = 0;
        if !drained {
            self.beats.stop_all(Stop::Drained);
            let grace = Duration::from_millis(GRACE_MS);
            let _ = tokio::time::timeout(grace, self.slots.wait_for_all()).await;
            left = self.beats.unfinished();
        }
        let settled = async {
            while self.unsettled.load(Ordering::SeqCst) > 0 {
                self.settled.notified().await;
            }
        };
        let settled = tokio::time::timeout(Duration::from_millis(LAST_SETTLES_MS), settled).await;
        drained &= settled.is_ok();
        Report {
            counts: self.stats.counts(),
            drained,
            put_back: self.put_back.load(Ordering::SeqCst) as u64,
            left: left as u64,
            unsettled: self.unsettled.load(Ordering::SeqCst) as u64,
        }
    }
}
