//! A holder's view of its lease, counted on its own monotonic clock from before the request was sent.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::task::Waker;

use tokio::sync::Notify;

/// A time that is never reached.
pub const NEVER: u64 = u64::MAX;

/// Why a run was stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// Its lease has ended, or another holder has it.
    Lost,
    /// It exceeded its maximum run time.
    TimedOut,
    /// Its worker shuts down, and the drain timeout is over.
    Drained,
    /// Its worker was dropped: nothing more is settled.
    Abandoned,
}

/// The phase of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Phase {
    /// Received; being claimed, or waiting for its turn.
    Waiting = 0,
    /// The handler runs.
    Running = 1,
    /// The handler has ended; its result is not yet stored.
    Settling = 2,
    /// The lease is no longer held.
    Over = 3,
}

/// The lease on a delivery, on a claim, or on both.
pub struct Lease {
    delivery_until_us: AtomicU64,
    /// `NEVER` without a claim; with one, the claim gives the right to act.
    claim_until_us: AtomicU64,
    renew_at_us: AtomicU64,
    /// Renewals that were asked for since the last one that was answered.
    unanswered: AtomicU32,
    run_until_us: AtomicU64,
    phase: AtomicU8,
    stop: AtomicU8,
    waker: Mutex<Option<Waker>>,
    stopped: Notify,
}

impl Lease {
    /// A lease that was requested at `asked_us` and had `lease_ms` left in the answer.
    pub fn new(asked_us: u64, lease_ms: u64) -> Self {
        Self {
            delivery_until_us: AtomicU64::new(asked_us + lease_ms * 1000),
            claim_until_us: AtomicU64::new(NEVER),
            renew_at_us: AtomicU64::new(asked_us + lease_ms * 1000 / 3),
            unanswered: AtomicU32::new(0),
            run_until_us: AtomicU64::new(NEVER),
            phase: AtomicU8::new(Phase::Waiting as u8),
            stop: AtomicU8::new(0),
            waker: Mutex::new(None),
            stopped: Notify::new(),
        }
    }

    /// The lease of a claim without a delivery.
    pub fn of_claim(asked_us: u64, lease_ms: u64) -> Self {
        let lease = Self::new(asked_us, lease_ms);
        lease.claim_granted(asked_us, lease_ms);
        lease
    }

    /// A lease without an end: the delivery was acked when it was received, or its source has no leases.
    pub fn without_expiry() -> Self {
        let lease = Self::new(0, 0);
        lease.delivery_until_us.store(NEVER, Ordering::Relaxed);
        lease.renew_at_us.store(NEVER, Ordering::Relaxed);
        lease
    }

    /// The lease of a delivery whose receive waited long for a message: the age of the lease is unknown, so it is
    /// renewed early, unless the handler is quick.
    pub fn of_unknown_age(answered_us: u64, lease_ms: u64) -> Self {
        let lease = Self::new(answered_us, lease_ms);
        lease.renew_at_us.store(answered_us + lease_ms * 1000 / 20, Ordering::Relaxed);
        lease
    }

    /// Another consumer has the delivery, but this holder still has the claim: the delivery is not renewed any more.
    pub fn mark_delivery_gone(&self) {
        self.delivery_until_us.store(0, Ordering::SeqCst);
    }

    /// Whether the delivery's lease never ends.
    pub fn never_expires(&self) -> bool {
        self.delivery_until_us.load(Ordering::SeqCst) == NEVER
    }

    /// Whether another consumer has the delivery.
    pub fn is_delivery_gone(&self) -> bool {
        self.delivery_until_us.load(Ordering::SeqCst) == 0
    }

    /// Records that a claim was granted.
    pub fn claim_granted(&self, asked_us: u64, lease_ms: u64) {
        self.claim_until_us.store(asked_us + lease_ms * 1000, Ordering::SeqCst);
        // Without a lease on the delivery, `renew_at_us` was `NEVER`.
        self.renew_at_us.fetch_min(asked_us + lease_ms * 1000 / 3, Ordering::SeqCst);
    }

    /// Records that the claim was renewed.
    pub fn claim_renewed(&self, asked_us: u64, lease_ms: u64) {
        self.claim_until_us.store(asked_us + lease_ms * 1000, Ordering::SeqCst);
    }

    /// Records that the delivery was renewed.
    pub fn delivery_renewed(&self, asked_us: u64, lease_ms: u64) {
        // A late answer does not bring back what has passed to another consumer meanwhile.
        let kept = |until_us: u64| (until_us != 0).then_some(asked_us + lease_ms * 1000);
        let _ = self.delivery_until_us.fetch_update(Ordering::SeqCst, Ordering::SeqCst, kept);
    }

    /// A heartbeat was answered, for claim and delivery: the next one is due after a third of what ends first,
    /// and not before a tenth of the lease: what has ended meanwhile is not renewed any more.
    pub(crate) fn heartbeat_answered(&self, asked_us: u64, lease_ms: u64) {
        self.unanswered.store(0, Ordering::SeqCst);
        if self.renew_at_us() == NEVER {
            return;
        }
        let delivery_until_us = match self.delivery_until_us.load(Ordering::SeqCst) {
            0 => NEVER,
            until_us => until_us,
        };
        let until_us = self.claim_until_us.load(Ordering::SeqCst).min(delivery_until_us);
        if until_us != NEVER {
            let third_us = until_us.saturating_sub(asked_us) / 3;
            self.set_renew_at(asked_us + third_us.max(lease_ms * 100).max(2_000));
        }
    }

    /// A renewal is asked for; without an answer it is asked for again at this time.
    pub(crate) fn renewing(&self, again_us: u64) {
        self.renew_at_us.store(again_us, Ordering::SeqCst);
        self.unanswered.fetch_add(1, Ordering::SeqCst);
    }

    /// Whether the last renewal that was asked for has no answer.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.unanswered.load(Ordering::SeqCst) > 0
    }

    /// When the next heartbeat is due.
    pub fn renew_at_us(&self) -> u64 {
        self.renew_at_us.load(Ordering::SeqCst)
    }

    /// Sets when the next heartbeat is due.
    pub fn set_renew_at(&self, us: u64) {
        self.renew_at_us.store(us, Ordering::SeqCst);
    }

    /// When the right to act ends.
    pub fn until_us(&self) -> u64 {
        match self.claim_until_us.load(Ordering::SeqCst) {
            NEVER => self.delivery_until_us.load(Ordering::SeqCst),
            claim => claim,
        }
    }

    /// The phase of the run.
    pub fn phase(&self) -> Phase {
        match self.phase.load(Ordering::SeqCst) {
            0 => Phase::Waiting,
            1 => Phase::Running,
            2 => Phase::Settling,
            _ => Phase::Over,
        }
    }

    /// Sets the phase of the run.
    pub fn set_phase(&self, phase: Phase) {
        self.phase.store(phase as u8, Ordering::SeqCst);
    }

    /// Sets the time at which the run times out.
    pub fn set_run_deadline(&self, us: u64) {
        self.run_until_us.store(us, Ordering::SeqCst);
    }

    /// When the run times out; [`NEVER`] without a limit.
    pub fn run_until_us(&self) -> u64 {
        self.run_until_us.load(Ordering::SeqCst)
    }

    /// Why the handler has to stop, if it has to.
    pub fn stop(&self) -> Option<StopReason> {
        match self.stop.load(Ordering::SeqCst) {
            0 => None,
            1 => Some(StopReason::Lost),
            2 => Some(StopReason::TimedOut),
            3 => Some(StopReason::Drained),
            _ => Some(StopReason::Abandoned),
        }
    }

    /// Stops the handler at its next await. The first reason wins; returns whether this call was the first.
    pub fn stop_because(&self, stop: StopReason) -> bool {
        let code = match stop {
            StopReason::Lost => 1,
            StopReason::TimedOut => 2,
            StopReason::Drained => 3,
            StopReason::Abandoned => 4,
        };
        let first = self.stop.compare_exchange(0, code, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        if first {
            self.stopped.notify_waiters();
            let waker = self.waker.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        first
    }

    /// Checks the clock: stops a run whose time is over. Returns the reason if this call stopped it.
    pub fn check(&self, now_us: u64) -> Option<StopReason> {
        let stop = match self.phase() {
            Phase::Running if self.run_until_us() <= now_us => StopReason::TimedOut,
            Phase::Waiting | Phase::Running if self.until_us() <= now_us => StopReason::Lost,
            _ => return None,
        };
        self.stop_because(stop).then_some(stop)
    }

    /// Whether the right to act is lost, as far as this process can know.
    pub fn is_lost(&self, now_us: u64) -> bool {
        self.stop().is_some() || self.until_us() <= now_us
    }

    /// Completes when the handler has to stop.
    pub async fn cancelled(&self) {
        let stopped = self.stopped.notified();
        tokio::pin!(stopped);
        stopped.as_mut().enable();
        if self.stop().is_none() {
            stopped.await;
        }
    }

    /// Registers the waker to call when the handler has to stop.
    pub fn register_waker(&self, waker: &Waker) {
        let mut known = self.waker.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.as_ref().is_some_and(|known| known.will_wake(waker)) {
            *known = Some(waker.clone());
        }
    }
}
