//! The heartbeat: one thread for all holders of a process. A handler that blocks its thread, or all threads of its
//! runtime, therefore keeps its lease.

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use hapax_core::{EntryId, Extend, Ledger, Receipt, Renew, SettleError, Source, Token, TokenError};
use tokio::runtime::Handle;
use tokio::sync::Notify;

use crate::lease::{Lease, NEVER, Phase, StopReason};
use crate::time::Timer;

/// Timeout of one heartbeat's call to the store.
const BEAT_MS_MAX: u64 = 30_000;
/// Heartbeats of one holder that may be under way at once.
const BEATS_MAX: usize = 16;
/// Of these, how many may be about leases whose last heartbeat has no answer yet.
const REPEATS_MAX: usize = 12;
/// Leases whose heartbeat has no answer are asked for again in this many calls at most: each call without the one that
/// hangs is answered.
const REPEAT_CALLS_MAX: usize = 8;

/// An object held under a lease: a delivery, a claim, or both.
pub trait LeasedItem: Send + Sync {
    /// The lease, as this process knows it.
    fn lease(&self) -> &Lease;
    /// The lease that each renewal requests.
    fn lease_ms(&self) -> u64;
    /// The delivery, if there is one.
    fn receipt(&self) -> Option<&Receipt>;
    /// The claim, if there is one.
    fn claim(&self) -> Option<(&EntryId, &Token)>;
}

/// Callbacks for a holder's counters.
pub trait HeartbeatEvents: Send + Sync {
    /// A heartbeat was sent for all leases that were due.
    fn beat(&self) {}
    /// A heartbeat failed or got no answer in time.
    fn failed(&self) {}
    /// A run was stopped.
    fn stopped(&self, _stop: StopReason) {}
}

impl HeartbeatEvents for () {}

/// Renews the leases of one worker, one HTTP layer or one call.
pub struct LeaseKeeper {
    source: Option<Arc<dyn Source>>,
    ledger: Option<Arc<dyn Ledger>>,
    timer: Timer,
    events: Arc<dyn HeartbeatEvents>,
    held: Mutex<Vec<Arc<dyn LeasedItem>>>,
    /// Heartbeats under way.
    calls_in_flight: AtomicUsize,
    /// When the thread looks at this again by itself.
    planned_us: AtomicU64,
    heartbeat: Arc<Heartbeat>,
}

struct Heartbeat {
    lease_keepers: Mutex<Vec<Weak<LeaseKeeper>>>,
    wake: Arc<Notify>,
    runtime: Handle,
}

static HEARTBEAT: Mutex<Option<Arc<Heartbeat>>> = Mutex::new(None);

/// The process's heartbeat. Its thread starts on first use.
fn heartbeat() -> io::Result<Arc<Heartbeat>> {
    let mut known = HEARTBEAT.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(heartbeat) = &*known {
        return Ok(heartbeat.clone());
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let heartbeat = Arc::new(Heartbeat {
        lease_keepers: Mutex::default(),
        wake: Arc::default(),
        runtime: runtime.handle().clone(),
    });
    let on_thread = heartbeat.clone();
    std::thread::Builder::new()
        .name("hapax-heartbeat".into())
        .spawn(move || runtime.block_on(on_thread.beat()))?;
    *known = Some(heartbeat.clone());
    Ok(heartbeat)
}

/// Runs a background task that must outlive the caller's runtime.
pub(crate) fn spawn(task: impl Future<Output = ()> + Send + 'static) {
    match heartbeat() {
        Ok(heartbeat) => drop(heartbeat.runtime.spawn(task)),
        Err(error) => tracing::error!(%error, "no heartbeat thread: a claim is not given back"),
    }
}

impl Heartbeat {
    async fn beat(self: Arc<Self>) {
        loop {
            let lease_keepers: Vec<_> = {
                let mut lease_keepers = self.lease_keepers.lock().unwrap_or_else(PoisonError::into_inner);
                lease_keepers.retain(|lease_keeper| lease_keeper.strong_count() > 0);
                lease_keepers.iter().filter_map(Weak::upgrade).collect()
            };
            let mut soonest: Option<Duration> = None;
            for lease_keeper in &lease_keepers {
                // If `add` adds a lease during this check, it reads `NEVER` here and wakes the thread again.
                lease_keeper.planned_us.store(NEVER, Ordering::SeqCst);
                let next_us = lease_keeper.check_leases();
                lease_keeper.planned_us.store(next_us, Ordering::SeqCst);
                // With a clock that is moved by hand, each move wakes this thread.
                let real = (next_us != NEVER).then(|| lease_keeper.timer.real_until(next_us)).flatten();
                soonest = match (soonest, real) {
                    (Some(soonest), Some(real)) => Some(soonest.min(real)),
                    (soonest, real) => soonest.or(real),
                };
            }
            drop(lease_keepers);
            // The calls that were just started come before the next check, also if that is due at once.
            tokio::task::yield_now().await;
            match soonest {
                Some(soonest) => {
                    let _ = tokio::time::timeout(soonest, self.wake.notified()).await;
                }
                None => self.wake.notified().await,
            }
        }
    }
}

/// A heartbeat under way. However it ends, by a panic of the store too, another one can start.
struct HeartbeatCall(Arc<LeaseKeeper>);

impl Drop for HeartbeatCall {
    fn drop(&mut self) {
        self.0.calls_in_flight.fetch_sub(1, Ordering::SeqCst);
        self.0.heartbeat.wake.notify_one();
    }
}

impl HeartbeatCall {
    /// One heartbeat: claims first, then deliveries, so that a claim outlives its delivery.
    async fn renew(self, due: Vec<Arc<dyn LeasedItem>>) {
        let lease_keeper = &self.0;
        let each_ms = due.iter().map(|one| (one.lease_ms() / 3).max(20));
        let bound_ms = each_ms.min().unwrap_or(BEAT_MS_MAX).min(BEAT_MS_MAX);
        lease_keeper.events.beat();
        let asked_us = lease_keeper.timer.now_us();
        let renewed = lease_keeper.timer.timeout(bound_ms, lease_keeper.renew_claims(&due)).await;
        let kept = lease_keeper.timer.timeout(bound_ms, lease_keeper.renew_deliveries(&due)).await;
        match (renewed, kept) {
            (Some(true), Some(true)) => {
                for one in &due {
                    one.lease().heartbeat_answered(asked_us, one.lease_ms());
                }
            }
            (Some(_), Some(_)) => {
                lease_keeper.events.failed();
                lease_keeper.repeat_soon(&due);
            }
            _ => {
                lease_keeper.events.failed();
                let leases = due.len();
                tracing::warn!(leases, "a heartbeat got no response within {bound_ms} ms; trying again");
            }
        }
    }
}

/// What a heartbeat is to be sent for.
#[derive(Default)]
struct Due {
    fresh: Vec<Arc<dyn LeasedItem>>,
    /// Not due yet, but soon: they go along with what is.
    soon: Vec<Arc<dyn LeasedItem>>,
    /// Their last heartbeat has no answer.
    unanswered: Vec<Arc<dyn LeasedItem>>,
}

impl Due {
    /// Takes in what is due; when to look at this one again.
    fn add(&mut self, one: &Arc<dyn LeasedItem>, now_us: u64) -> u64 {
        let (at_us, unanswered) = (one.lease().renew_at_us(), one.lease().is_unanswered());
        if at_us <= now_us {
            if unanswered { &mut self.unanswered } else { &mut self.fresh }.push(one.clone());
            return NEVER;
        }
        if !unanswered && at_us <= now_us + one.lease_ms() * 1000 / 8 {
            self.soon.push(one.clone());
        }
        at_us
    }

    /// The calls to make while this many are under way. What finds no room is due again when one of those ends, which
    /// wakes the heartbeat.
    fn calls(mut self, under_way: usize) -> Vec<Vec<Arc<dyn LeasedItem>>> {
        let mut calls = Vec::new();
        if !self.fresh.is_empty() && under_way < BEATS_MAX {
            self.fresh.append(&mut self.soon);
            calls.push(self.fresh);
        }
        let parts = REPEATS_MAX.saturating_sub(under_way + calls.len()).min(REPEAT_CALLS_MAX);
        if !self.unanswered.is_empty() && parts > 0 {
            let size = self.unanswered.len().div_ceil(parts);
            calls.extend(self.unanswered.chunks(size).map(<[_]>::to_vec));
        }
        calls
    }
}

impl LeaseKeeper {
    /// Renews deliveries of `source` and claims of `ledger`. Fails if the operating system starts no thread.
    pub fn new(
        source: Option<Arc<dyn Source>>,
        ledger: Option<Arc<dyn Ledger>>,
        timer: Timer,
        events: Arc<dyn HeartbeatEvents>,
    ) -> io::Result<Arc<Self>> {
        let heartbeat = heartbeat()?;
        let wake = heartbeat.wake.clone();
        timer.on_moved(move || wake.notify_one());
        let lease_keeper = Arc::new(Self {
            source,
            ledger,
            timer,
            events,
            held: Mutex::default(),
            calls_in_flight: AtomicUsize::new(0),
            planned_us: AtomicU64::new(NEVER),
            heartbeat: heartbeat.clone(),
        });
        let mut lease_keepers = heartbeat.lease_keepers.lock().unwrap_or_else(PoisonError::into_inner);
        lease_keepers.retain(|lease_keeper| lease_keeper.strong_count() > 0);
        lease_keepers.push(Arc::downgrade(&lease_keeper));
        Ok(lease_keeper)
    }

    /// Renews these leases from now on, until they reach [`Phase::Over`].
    pub fn add(&self, more: impl IntoIterator<Item = Arc<dyn LeasedItem>>) {
        let mut soonest_us = NEVER;
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        if held.len() >= 64 && held.len() == held.capacity() {
            held.retain(|one| one.lease().phase() != Phase::Over);
        }
        for one in more {
            soonest_us = soonest_us.min(one.lease().renew_at_us()).min(one.lease().until_us());
            held.push(one);
        }
        drop(held);
        self.check_by(soonest_us);
    }

    /// Makes sure that the heartbeat thread checks at this time.
    pub fn check_by(&self, us: u64) {
        if us < self.planned_us.load(Ordering::SeqCst) && us != NEVER {
            self.heartbeat.wake.notify_one();
        }
    }

    /// Stops all runs that have not ended; returns how many this call stopped.
    pub fn stop_all(&self, stop: StopReason) -> usize {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let running =
            held.iter().filter(|one| matches!(one.lease().phase(), Phase::Waiting | Phase::Running));
        running.filter(|one| one.lease().stop_because(stop)).count()
    }

    /// Handles deliveries that the source has taken back.
    pub fn revoked(&self, receipts: &[Receipt]) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for one in held {
            if !one.receipt().is_some_and(|receipt| receipts.contains(receipt)) {
                continue;
            }
            // The claim gives the right to act, and is renewed further.
            if one.claim().is_some() {
                one.lease().mark_delivery_gone();
            } else {
                self.report_lost(&*one, &"its source has taken the delivery back");
            }
        }
    }

    /// Number of runs that have not ended.
    pub fn unfinished(&self) -> usize {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.iter().filter(|one| matches!(one.lease().phase(), Phase::Waiting | Phase::Running)).count()
    }

    /// Ends all leases without settling: no more heartbeats.
    pub fn release_all(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner));
        for one in held {
            one.lease().set_phase(Phase::Over);
        }
    }

    /// Stops runs whose time is over and renews the leases that are due. Returns the time of the next check.
    fn check_leases(self: &Arc<Self>) -> u64 {
        let now_us = self.timer.now_us();
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|one| one.lease().phase() != Phase::Over);
        let mut next_us = NEVER;
        let mut due = Due::default();
        for one in held.iter() {
            let lease = one.lease();
            if let Some(stop) = lease.check(now_us) {
                self.events.stopped(stop);
            }
            let settling = lease.phase() == Phase::Settling;
            match lease.stop() {
                Some(StopReason::Lost | StopReason::Abandoned) => continue,
                Some(StopReason::TimedOut | StopReason::Drained) if !settling => continue,
                _ => {}
            }
            if !settling {
                next_us = next_us.min(lease.until_us()).min(lease.run_until_us());
            }
            next_us = next_us.min(due.add(one, now_us));
        }
        drop(held);
        for call in due.calls(self.calls_in_flight.load(Ordering::SeqCst)) {
            for one in &call {
                let again_us = now_us + (one.lease_ms() * 1000 / 8).max(2_000);
                one.lease().renewing(again_us);
                next_us = next_us.min(again_us);
            }
            self.calls_in_flight.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(HeartbeatCall(self.clone()).renew(call));
        }
        next_us
    }

    /// The store did not renew these: the next try is not far.
    fn repeat_soon(&self, due: &[Arc<dyn LeasedItem>]) {
        for one in due {
            let again_us = self.timer.now_us() + (one.lease_ms() * 100).max(2_000);
            one.lease().set_renew_at(one.lease().renew_at_us().min(again_us));
        }
    }

    /// `false`: the ledger could not be asked.
    async fn renew_claims(&self, due: &[Arc<dyn LeasedItem>]) -> bool {
        let Some(ledger) = &self.ledger else { return true };
        let claims: Vec<_> = due.iter().filter_map(|one| Some((one, one.claim()?))).collect();
        if claims.is_empty() {
            return true;
        }
        let renew = |(one, (id, token)): &(&Arc<dyn LeasedItem>, (&EntryId, &Token))| Renew {
            id: (*id).clone(),
            token: (*token).clone(),
            lease_ms: one.lease_ms(),
        };
        let asked_us = self.timer.now_us();
        match ledger.renew(claims.iter().map(renew).collect()).await {
            Ok(answers) => {
                for ((one, _), answer) in claims.iter().zip(answers) {
                    match answer {
                        Ok(left) => one.lease().claim_renewed(asked_us, left.lease_ms),
                        // The claim ended while this heartbeat was running.
                        Err(TokenError::Ended) => {}
                        Err(error) => self.report_lost(&***one, &error),
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, claims = claims.len(), "claims could not be renewed; trying again");
                return false;
            }
        }
        true
    }

    /// `false`: the source could not be asked.
    async fn renew_deliveries(&self, due: &[Arc<dyn LeasedItem>]) -> bool {
        let Some(source) = &self.source else { return true };
        let wanted = |one: &&Arc<dyn LeasedItem>| {
            let lease = one.lease();
            lease.stop() != Some(StopReason::Lost)
                && lease.phase() != Phase::Over
                && !lease.is_delivery_gone()
                && !lease.never_expires()
        };
        let kept: Vec<_> = due.iter().filter(wanted).filter_map(|one| Some((one, one.receipt()?))).collect();
        if kept.is_empty() {
            return true;
        }
        let extend = |(one, receipt): &(&Arc<dyn LeasedItem>, &Receipt)| Extend {
            receipt: (*receipt).clone(),
            lease_ms: one.lease_ms(),
            own_lease: false,
        };
        let asked_us = self.timer.now_us();
        match source.extend(kept.iter().map(extend).collect()).await {
            Ok(answers) => {
                for ((one, _), answer) in kept.iter().zip(answers) {
                    match answer {
                        Ok(left) => one.lease().delivery_renewed(asked_us, left.lease_ms),
                        // The claim gives the right to act, and is renewed further; a consumer that now has the
                        // delivery finds its key in progress.
                        Err(_) if one.claim().is_some() => one.lease().mark_delivery_gone(),
                        Err(SettleError::LeaseTooLong { .. }) => one.lease().set_renew_at(NEVER),
                        Err(error) => self.report_lost(&***one, &error),
                    }
                }
            }
            Err(error) => {
                tracing::warn!(%error, deliveries = kept.len(), "leases could not be renewed; trying again");
                return false;
            }
        }
        true
    }

    fn report_lost(&self, one: &dyn LeasedItem, why: &dyn std::fmt::Display) {
        let lease = one.lease();
        if matches!(lease.phase(), Phase::Waiting | Phase::Running) && lease.stop_because(StopReason::Lost) {
            self.events.stopped(StopReason::Lost);
            tracing::warn!(%why, "a lease was lost; its handler is stopped at its next await");
        }
    }
}
