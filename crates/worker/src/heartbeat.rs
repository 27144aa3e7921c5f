//! The heartbeat: one thread of its own for all workers of a process, so that a handler that blocks its thread, or
//! all threads of its runtime, keeps its lease.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use hapax_core::{EntryId, Extend, Ledger, Receipt, Renew, SettleError, Source, Token, TokenError};
use tokio::sync::Notify;

use crate::auto::LeaseTime;
use crate::lease::{Lease, NEVER, Phase, instant, now_us};
use crate::outcome::Stop;
use crate::stats::Stats;

/// The longest that one heartbeat waits for its store.
const BEAT_MS_MAX: u64 = 30_000;

/// Something that is held by a lease.
pub(crate) trait Held: Send + Sync {
    fn lease(&self) -> &Lease;
    /// The delivery, if there is one.
    fn receipt(&self) -> Option<&Receipt>;
    /// The claim, if there is one.
    fn claim(&self) -> Option<(&EntryId, &Token)>;
}

/// What one worker holds.
pub(crate) struct Beats {
    pub source: Option<Arc<dyn Source>>,
    pub ledger: Option<Arc<dyn Ledger>>,
    pub lease: Arc<LeaseTime>,
    pub stats: Arc<Stats>,
    held: Mutex<Vec<Arc<dyn Held>>>,
    beating: AtomicBool,
    heartbeat: Arc<Heartbeat>,
}

struct Heartbeat {
    workers: Mutex<Vec<Weak<Beats>>>,
    /// When the thread looks again by itself.
    planned_us: AtomicU64,
    wake: Notify,
}

static HEART: Mutex<Option<Arc<Heartbeat>>> = Mutex::new(None);

/// The process's heartbeat; its thread is started when it is first needed.
fn heartbeat() -> io::Result<Arc<Heartbeat>> {
    let mut known = HEART.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(heartbeat) = &*known {
        return Ok(heartbeat.clone());
    }
    let heartbeat = Arc::new(Heartbeat {
        workers: Mutex::default(),
        planned_us: AtomicU64::new(NEVER),
        wake: Notify::new(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let beating = heartbeat.clone();
    std::thread::Builder::new()
        .name("hapax-heartbeat".into())
        .spawn(move || runtime.block_on(beating.beat()))?;
    *known = Some(heartbeat.clone());
    Ok(heartbeat)
}

impl Heartbeat {
    async fn beat(self: Arc<Self>) {
        loop {
            // Whoever adds something while this looks finds `NEVER` here and wakes it again.
            self.planned_us.store(NEVER, Ordering::SeqCst);
            let workers: Vec<_> = {
                let mut workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
                workers.retain(|worker| worker.strong_count() > 0);
                workers.iter().filter_map(Weak::upgrade).collect()
            };
            let next_us = workers.iter().map(|beats| beats.look(now_us())).min().unwrap_or(NEVER);
            drop(workers);
            self.planned_us.store(next_us, Ordering::SeqCst);
            if next_us == NEVER {
                self.wake.notified().await;
            } else {
                let _ = tokio::time::timeout_at(instant(next_us).into(), self.wake.notified()).await;
            }
        }
    }
}

/// A heartbeat under way. However it ends, by a panic of the store too, the next one can start.
struct Beating<'a>(&'a Beats);

impl Drop for Beating<'_> {
    fn drop(&mut self) {
        self.0.beating.store(false, Ordering::SeqCst);
        self.0.heartbeat.wake.notify_one();
    }
}

impl Beats {
    pub fn new(
        source: Option<Arc<dyn Source>>,
        ledger: Option<Arc<dyn Ledger>>,
        lease: Arc<LeaseTime>,
        stats: Arc<Stats>,
    ) -> io::Result<Arc<Self>> {
        let heartbeat = heartbeat()?;
        let (held, beating) = (Mutex::default(), AtomicBool::new(false));
        let beats =
            Arc::new(Self { source, ledger, lease, stats, held, beating, heartbeat: heartbeat.clone() });
        let mut workers = heartbeat.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(&beats));
        Ok(beats)
    }

    /// Keeps these from now on, until their lease says that it is over.
    pub fn keep(&self, more: impl IntoIterator<Item = Arc<dyn Held>>) {
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
        self.expect(soonest_us);
    }

    /// Makes sure that the heartbeat looks at this time.
    pub fn expect(&self, us: u64) {
        if us < self.heartbeat.planned_us.load(Ordering::SeqCst) && us != NEVER {
            self.heartbeat.wake.notify_one();
        }
    }

    /// Stops everything that is still held; how many were stopped just now.
    pub fn stop_all(&self, stop: Stop) -> usize {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let running =
            held.iter().filter(|one| matches!(one.lease().phase(), Phase::Waiting | Phase::Running));
        running.filter(|one| one.lease().stop_for(stop)).count()
    }

    /// The source has taken these deliveries back.
    pub fn revoked(&self, receipts: &[Receipt]) {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for one in held {
            if !one.receipt().is_some_and(|receipt| receipts.contains(receipt)) {
                continue;
            }
            // The claim is the right to act and is kept on.
            if one.claim().is_some() {
                one.lease().delivery_gone();
            } else {
                self.lost(&*one, &"its source has taken the delivery back");
            }
        }
    }

    /// How many have not ended.
    pub fn unfinished(&self) -> usize {
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.iter().filter(|one| matches!(one.lease().phase(), Phase::Waiting | Phase::Running)).count()
    }

    /// Lets go of everything: no more heartbeats.
    pub fn release_all(&self) {
        let held = std::mem::take(&mut *self.held.lock().unwrap_or_else(PoisonError::into_inner));
        for one in held {
            one.lease().enter(Phase::Over);
        }
    }

    /// Stops what has run out of time, renews what is due; when to look again.
    fn look(self: &Arc<Self>, now_us: u64) -> u64 {
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|one| one.lease().phase() != Phase::Over);
        let beating = self.beating.load(Ordering::SeqCst);
        // What is due soon goes along.
        let soon_us = now_us + self.lease.ms() * 1000 / 8;
        let mut next_us = NEVER;
        let (mut due, mut soon) = (Vec::new(), Vec::new());
        for one in held.iter() {
            let lease = one.lease();
            lease.look(now_us).into_iter().for_each(|stop| self.stats.stopped(stop));
            let settling = lease.phase() == Phase::Settling;
            match lease.stop() {
                Some(Stop::Lost | Stop::Abandoned) => continue,
                Some(Stop::TimedOut | Stop::Drained) if !settling => continue,
                _ => {}
            }
            if !settling {
                next_us = next_us.min(lease.until_us()).min(lease.run_until_us());
            }
            match lease.renew_at_us() {
                at_us if at_us <= now_us => due.push(one.clone()),
                at_us if at_us <= soon_us => {
                    next_us = next_us.min(at_us);
                    soon.push(one.clone());
                }
                at_us => next_us = next_us.min(at_us),
            }
        }
        drop(held);
        // A heartbeat under way wakes the heartbeat when it has its answer.
        if !due.is_empty() && !beating {
            due.append(&mut soon);
            self.beating.store(true, Ordering::SeqCst);
            tokio::spawn(self.clone().renew(due));
        }
        next_us
    }

    /// One heartbeat: claims first, then deliveries, so that a claim outlives its delivery.
    async fn renew(self: Arc<Self>, due: Vec<Arc<dyn Held>>) {
        let lease_ms = self.lease.ms();
        let bound = Duration::from_millis((lease_ms / 2).clamp(20, BEAT_MS_MAX));
        let again_us = lease_ms * 1000 / 10;
        for one in &due {
            // If nothing comes of this beat, the next is not far.
            one.lease().renew_at(now_us() + again_us.max(2_000));
        }
        self.stats.heartbeats.add();
        let _beating = Beating(&self);
        let _ = tokio::time::timeout(bound, self.renew_claims(&due, lease_ms)).await;
        let _ = tokio::time::timeout(bound, self.renew_deliveries(&due, lease_ms)).await;
    }

    async fn renew_claims(&self, due: &[Arc<dyn Held>], lease_ms: u64) {
        let Some(ledger) = &self.ledger else { return };
        let claims: Vec<_> = due.iter().filter_map(|one| Some((one, one.claim()?))).collect();
        if claims.is_empty() {
            return;
        }
        let renew = |(_, (id, token)): &(_, (&EntryId, &Token))| Renew {
            id: (*id).clone(),
            token: (*token).clone(),
            lease_ms,
        };
        let asked_us = now_us();
        match ledger.renew(claims.iter().map(renew).collect()).await {
            Ok(answers) => {
                for ((one, _), answer) in claims.iter().zip(answers) {
                    match answer {
                        Ok(left) => one.lease().claim_renewed(asked_us, left.lease_ms),
                        // It ended while this beat was under way.
                        Err(TokenError::Ended) => {}
                        Err(error) => self.lost(&***one, &error),
                    }
                }
            }
            Err(error) => {
                self.stats.heartbeat_errors.add();
                tracing::warn!(%error, claims = claims.len(), "claims could not be renewed; trying again");
            }
        }
    }

    async fn renew_deliveries(&self, due: &[Arc<dyn Held>], lease_ms: u64) {
        let Some(source) = &self.source else { return };
        let wanted = |one: &&Arc<dyn Held>| {
            let lease = one.lease();
            lease.stop() != Some(Stop::Lost) && lease.phase() != Phase::Over && !lease.is_delivery_gone()
        };
        let kept: Vec<_> = due.iter().filter(wanted).filter_map(|one| Some((one, one.receipt()?))).collect();
        if kept.is_empty() {
            return;
        }
        let extend = |(_, receipt): &(_, &Receipt)| Extend { receipt: (*receipt).clone(), lease_ms };
        let asked_us = now_us();
        match source.keep(kept.iter().map(extend).collect()).await {
            Ok(answers) => {
                for ((one, _), answer) in kept.iter().zip(answers) {
                    match answer {
                        Ok(left) => one.lease().delivery_renewed(asked_us, left.lease_ms),
                        // The claim is the right to act and is kept on; whoever has the delivery finds it in progress.
                        Err(_) if one.claim().is_some() => one.lease().delivery_gone(),
                        Err(SettleError::LeaseTooLong { .. }) => one.lease().renew_at(NEVER),
                        Err(error) => self.lost(&***one, &error),
                    }
                }
            }
            Err(error) => {
                self.stats.heartbeat_errors.add();
                tracing::warn!(%error, deliveries = kept.len(), "leases could not be renewed; trying again");
            }
        }
    }

    fn lost(&self, one: &dyn Held, why: &dyn std::fmt::Display) {
        let lease = one.lease();
        if matches!(lease.phase(), Phase::Waiting | Phase::Running) && lease.stop_for(Stop::Lost) {
            self.stats.lost_leases.add();
            tracing::warn!(%why, "a lease was lost; its handler is stopped at its next await");
        }
    }
}
