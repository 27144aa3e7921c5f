//! The receive loop and the orderly shutdown.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use hapax_core::metrics::{Metrics as _, Sample};
use hapax_core::policy::tier::Finding;
use hapax_core::{Receive, StoreError, Tier, policy};
use thiserror::Error;
use tokio::sync::mpsc;

use crate::handler::Handler;
use crate::observe::{SingleDelivery, StopWhen};
use crate::outcome::StopReason;
use crate::settle::{self, EndedDelivery};
use crate::state::WorkerState;
use crate::stats::Counts;

/// Maximum number of deliveries of one receive.
const RECEIVE_MAX: usize = 256;
/// Maximum number of ended deliveries that may wait for their settle before receiving pauses, where nothing is claimed.
const UNSETTLED_MAX: usize = 1024;
/// How long a stopped handler has to reach an await before the worker stops waiting for it.
const GRACE_MS: u64 = 1_000;
/// Check interval of a busy worker that stops when its queue is empty.
const EMPTY_CHECK_MS: u64 = 500;
/// Timeout of the last settles, after all handlers have ended.
const LAST_SETTLES_MS: u64 = 10_000;

/// Runs a handler for the deliveries of a queue. Created by [`Worker::builder`]; runs until it is told to stop.
pub struct Worker {
    pub(crate) state: Arc<WorkerState>,
    pub(crate) ended_deliveries: mpsc::UnboundedReceiver<EndedDelivery>,
    pub(crate) warnings: Vec<Finding>,
}

/// How a worker ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerReport {
    /// Its counters.
    pub counts: Counts,
    /// All received deliveries were finished and settled within the drain timeout.
    pub drained: bool,
    /// Deliveries put back without counting an attempt because the worker stopped: stopped at an await, or not started.
    pub put_back: u64,
    /// Deliveries whose handler did not reach an await in time: they return when their lease runs out.
    pub left: u64,
    /// Deliveries whose end the store did not confirm in time: they may return.
    pub unsettled: u64,
}

/// A worker stopped because of an error; it finished the received deliveries first.
#[derive(Debug, Clone, Error)]
#[error("the worker of queue {queue} cannot continue: {error}")]
pub struct Stopped {
    /// The queue.
    pub queue: String,
    /// The store's error.
    #[source]
    pub error: StoreError,
    /// The report until then.
    pub report: WorkerReport,
}

/// A worker's counters, readable while it runs. Clones are cheap.
#[derive(Clone)]
pub struct Watch(Arc<WorkerState>);

impl Watch {
    /// The worker's counters so far.
    pub fn counts(&self) -> Counts {
        self.0.stats.read()
    }

    /// The same, as a page of metrics shows it: labelled with the name of the source.
    pub fn samples(&self) -> Vec<Sample> {
        self.counts().samples(&[&self.0.env.name])
    }

    /// The current lease; changes if it adapts to the run times of the handler.
    pub fn lease_ms(&self) -> u64 {
        self.0.lease.ms()
    }
}

impl Worker {
    /// Its counters, readable while it runs.
    pub fn watch(&self) -> Watch {
        Watch(self.state.clone())
    }

    /// Doubts about the tier, although it holds: each with a code, a remedy and a page.
    pub fn warnings(&self) -> &[Finding] {
        &self.warnings
    }

    /// Its consumer name: unique for every start.
    pub fn consumer(&self) -> &str {
        &self.state.consumer
    }

    /// Receives and runs handlers until `shutdown` completes, or until the condition of
    /// [`stop_when`](crate::WorkerBuilder::stop_when); then finishes the running deliveries within the timeout of
    /// [`drain`](crate::WorkerBuilder::drain).
    ///
    /// Dropped instead, it stops its handlers at their next await and settles nothing more: what it held returns when
    /// its lease runs out. Keys that were claimed for handlers that had not begun are given back, since nothing ran.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> Result<WorkerReport, Stopped> {
        let Self { state, ended_deliveries, warnings } = self;
        for warning in warnings {
            tracing::warn!(queue = %state.env.name, code = %warning.code, "{warning}");
        }
        let mut ending = RunGuard { state: state.clone(), tasks: Vec::new() };
        ending.tasks.push(tokio::spawn(settle::collect(state.clone(), ended_deliveries)));
        ending.tasks.push(tokio::spawn(stop_revoked(state.clone())));
        let error = state.receive_until(std::pin::pin!(shutdown)).await;
        let report = state.drain().await;
        drop(ending);
        match error {
            None => Ok(report),
            Some(error) => Err(Stopped { queue: state.env.name.clone(), error, report }),
        }
    }
}

/// Stops all tasks of a run when it ends in any way.
struct RunGuard {
    state: Arc<WorkerState>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

/// Stops the handlers of deliveries that the source has taken back.
async fn stop_revoked(state: Arc<WorkerState>) {
    loop {
        let receipts = state.source.revoked().await;
        state.lease_keeper.revoked(&receipts);
    }
}

impl Drop for RunGuard {
    fn drop(&mut self) {
        self.state.abandoned.store(true, Ordering::SeqCst);
        self.state.draining.send_replace(true);
        self.state.lease_keeper.stop_all(StopReason::Abandoned);
        self.state.lease_keeper.release_all();
        for task in &self.tasks {
            task.abort();
        }
    }
}

impl WorkerState {
    /// `None`: told to stop. `Some`: the error after which receiving cannot continue.
    async fn receive_until(
        self: &Arc<Self>,
        mut shutdown: Pin<&mut impl Future<Output = ()>>,
    ) -> Option<StoreError> {
        let mut failures = 0u32;
        let mut pause_ms = 0;
        loop {
            let receiving = async {
                if pause_ms > 0 {
                    self.timer().sleep_ms(pause_ms).await;
                }
                if self.one_is_done().await {
                    return None;
                }
                let max = self.room().await;
                let (asked_us, idle) = (self.timer().now_us(), self.is_idle());
                Some((max, asked_us, idle, self.source.next(self.receive(max)).await))
            };
            let received = tokio::select! {
                biased;
                () = &mut shutdown => return None,
                received = receiving => received,
            };
            // `None`: the single delivery of `StopWhen::AfterOne` has ended.
            let (max, asked_us, idle, received) = received?;
            pause_ms = match received {
                Ok(deliveries) => {
                    failures = 0;
                    if let Some(rate) = &self.rate {
                        rate.give_back(max.saturating_sub(deliveries.len()));
                    }
                    if deliveries.is_empty() && self.stop_when == StopWhen::Empty {
                        tokio::select! {
                            biased;
                            () = &mut shutdown => return None,
                            // Only a worker that was idle when it asked knows that the queue is empty: a delivery that ran
                            // meanwhile may have put its message back after the answer.
                            over = self.empty_or_changed() => if over && idle { return None },
                        }
                        continue;
                    }
                    if !deliveries.is_empty() {
                        self.single_delivery.send_replace(SingleDelivery::Taken);
                    }
                    // Pause if the source does not wait, to avoid a busy loop.
                    let at_once = deliveries.is_empty() && self.timer().now_us() - asked_us < 20_000;
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
                    tracing::error!(%error, queue = %self.env.name, "the worker cannot continue");
                    return Some(error);
                }
            };
        }
    }

    /// Whether the single delivery of `StopWhen::AfterOne` has ended; waits while it is running.
    async fn one_is_done(&self) -> bool {
        if self.stop_when != StopWhen::AfterOne {
            return false;
        }
        let one = self
            .single_delivery
            .subscribe()
            .wait_for(|one| *one != SingleDelivery::Taken)
            .await
            .map(|one| *one);
        matches!(one, Ok(SingleDelivery::Done))
    }

    /// `true`: the queue is empty, nothing is running, and no delivery is to return that was deferred behind a running
    /// duplicate. Otherwise waits until that may have changed.
    async fn empty_or_changed(&self) -> bool {
        if !self.slots.all_free() {
            tokio::select! {
                () = self.slots.wait_for_all() => {}
                () = self.settled.notified() => {}
                () = self.timer().sleep_ms(EMPTY_CHECK_MS) => {}
            }
            return false;
        }
        if !self.is_idle() {
            let _ = self.timer().timeout(EMPTY_CHECK_MS, self.settled.notified()).await;
            return false;
        }
        let returns_us = self.returns_us.load(Ordering::SeqCst);
        if returns_us > self.timer().now_us() {
            self.timer().sleep_until(returns_us).await;
            return false;
        }
        true
    }

    /// Whether no delivery is running, waiting or still to be settled.
    fn is_idle(&self) -> bool {
        let waiting = self.per_key.as_ref().is_some_and(crate::limits::PerKey::is_waiting);
        let settled = self.unsettled.load(Ordering::SeqCst) == 0;
        !waiting && settled && self.duplicate_waiters.is_empty() && self.slots.all_free()
    }

    fn receive(&self, max: usize) -> Receive {
        let max = if self.stop_when == StopWhen::AfterOne { 1 } else { max };
        let wait_ms = if self.stop_when == StopWhen::Empty { 0 } else { policy::WAIT_MS_MAX };
        Receive {
            max,
            lease_ms: self.leased.then(|| self.lease.ms()),
            wait_ms: Some(wait_ms),
            consumer: Some(self.consumer.clone()),
            ack_on_receive: self.policy.tier == Tier::AtMostOnce || hapax_core::mutant::is("ack-before-run"),
            attempt_id: None,
        }
    }

    /// Waits until handlers may start; returns their number.
    async fn room(&self) -> usize {
        // Lets handlers that are about to end do so first: one receive for many slots instead of one each.
        tokio::task::yield_now().await;
        loop {
            self.slots.wait_for_room().await;
            // After the wait: handlers that have ended since are among those to be settled.
            if self.unsettled.load(Ordering::SeqCst) > self.unsettled_max() {
                self.settled.notified().await;
                continue;
            }
            let max = match &self.handler {
                Handler::Many { max, .. } => *max,
                _ => self.slots.room().clamp(1, RECEIVE_MAX),
            };
            let Some(rate) = &self.rate else { return max };
            let allowed = rate.acquire(max, self.timer()).await;
            if self.slots.room() > 0 {
                return allowed;
            }
            // A delivery that had waited for its duplicate took the slot meanwhile.
            rate.give_back(allowed);
        }
    }

    /// Maximum number of ended deliveries that may wait for their settle before receiving pauses. With claims as many as may
    /// run: a claim whose outcome is not recorded is in doubt after a crash, so at most twice as many are.
    fn unsettled_max(&self) -> usize {
        if !self.claims() {
            return UNSETTLED_MAX;
        }
        let each = match &self.handler {
            Handler::Many { max, .. } => *max,
            _ => 1,
        };
        self.slots.all().saturating_mul(each).min(UNSETTLED_MAX)
    }

    /// Finishes the running deliveries, within the timeouts.
    async fn drain(&self) -> WorkerReport {
        self.draining.send_replace(true);
        let waiting = self.per_key.as_ref().map(crate::limits::PerKey::give_up).unwrap_or_default();
        for job in waiting {
            self.put_back(job);
        }
        let ended = async {
            loop {
                self.duplicate_waiters.wait_until_empty().await;
                self.slots.wait_for_all().await;
                // One that had a slot may have met its running duplicate since: it gave up the slot for a place behind
                // it.
                if self.duplicate_waiters.is_empty() {
                    return;
                }
            }
        };
        let mut drained = self.timer().timeout(self.drain_ms, ended).await.is_some();
        let mut left = 0;
        if !drained {
            self.lease_keeper.stop_all(StopReason::Drained);
            let _ = self.timer().timeout(GRACE_MS, self.slots.wait_for_all()).await;
            left = self.lease_keeper.unfinished();
        }
        let settled = async {
            while self.unsettled.load(Ordering::SeqCst) > 0 {
                self.settled.notified().await;
            }
        };
        drained &= self.timer().timeout(LAST_SETTLES_MS, settled).await.is_some();
        WorkerReport {
            counts: self.stats.read(),
            drained,
            put_back: self.put_back.load(Ordering::SeqCst) as u64,
            left: left as u64,
            unsettled: self.unsettled.load(Ordering::SeqCst) as u64,
        }
    }
}
