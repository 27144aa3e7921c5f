//! Claims for deliveries, and waiting for a running duplicate.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use hapax_claim::ClaimResponse;
use hapax_core::{ClaimError, ClaimRequest, Settlement, StoreError, policy};
use tokio::sync::Notify;

use crate::cx::Job;
use crate::decide;
use crate::limits::Slot;
use crate::outcome::{RunResult, StopReason};
use crate::point::Point;
use crate::state::{RunPermit, WorkerState};

/// Maximum delay of a delivery that is put back because its running duplicate had not ended after the wait. The next
/// delivery waits again.
const DUPLICATE_DEFER_MS_MAX: u64 = 1_000;

/// What to do with a delivery after its claim.
#[derive(Debug)]
pub(crate) enum DeliveryAction {
    /// It may run.
    Run,
    /// Another delivery with the same key is running.
    WaitForDuplicate { retry_after_ms: u64 },
    /// It ends in this way without running.
    End(Settlement),
}

/// Limits the deliveries that wait for a running duplicate. They hold no slot: the duplicate has one, here or elsewhere.
pub(crate) struct DuplicateWaiters {
    max: usize,
    count: AtomicUsize,
    left: Notify,
}

/// The permit of one waiting delivery; returned when dropped.
pub(crate) struct WaitPermit(Arc<DuplicateWaiters>);

impl DuplicateWaiters {
    pub fn new(max: usize) -> Arc<Self> {
        Arc::new(Self { max, count: AtomicUsize::new(0), left: Notify::new() })
    }

    /// `None`: as many wait already as may.
    pub fn enter(self: &Arc<Self>) -> Option<WaitPermit> {
        let more = |count: usize| (count < self.max).then_some(count + 1);
        let entered = self.count.fetch_update(Ordering::SeqCst, Ordering::SeqCst, more);
        entered.is_ok().then(|| WaitPermit(self.clone()))
    }

    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::SeqCst) == 0
    }

    pub async fn wait_until_empty(&self) {
        loop {
            let left = self.left.notified();
            tokio::pin!(left);
            left.as_mut().enable();
            if self.is_empty() {
                return;
            }
            left.await;
        }
    }
}

impl Drop for WaitPermit {
    fn drop(&mut self) {
        self.0.count.fetch_sub(1, Ordering::SeqCst);
        self.0.left.notify_waiters();
    }
}

impl WorkerState {
    /// Claims the keys of these deliveries.
    pub async fn claim(&self, jobs: &[Arc<Job>], wait_ms: u64) -> Vec<DeliveryAction> {
        let Some(claims) = &self.claims else { unreachable!("checked when the worker was built") };
        let requests = jobs.iter().map(|job| self.claim_request(job, wait_ms)).collect();
        let answers = claims.claim(requests).await;
        let mut put_back = None;
        let mut actions = Vec::with_capacity(jobs.len());
        for (job, answer) in jobs.iter().zip(answers) {
            let action = match self.action(job, answer) {
                Ok(action) => action,
                Err(error) => {
                    let settlement = put_back.get_or_insert_with(|| self.fail_closed(&error));
                    self.stats.fail_closed.add();
                    DeliveryAction::End(settlement.clone())
                }
            };
            if matches!(action, DeliveryAction::Run) && !self.env.hooks.is_empty() {
                self.env.hooks.pass(Point::AfterClaim).await;
            }
            actions.push(action);
        }
        if put_back.is_none() {
            self.ledger_failures.store(0, Ordering::Relaxed);
        }
        actions
    }

    fn claim_request(&self, job: &Job, wait_ms: u64) -> ClaimRequest {
        // A ledger in another store does not know the delivery.
        let queue = self.own_ledger.then(|| self.queue.clone()).flatten();
        let delivery = queue.map(|queue| (queue, job.delivery.receipt.clone()));
        ClaimRequest {
            fingerprint: Some(job.fingerprint()),
            on_doubt: self.policy.on_doubt,
            wait_ms,
            delivery,
            ..ClaimRequest::new(job.entry().clone(), self.owners.next(), self.lease.ms())
        }
    }

    /// An error: the ledger was unavailable.
    fn action(&self, job: &Job, answer: ClaimResponse) -> Result<DeliveryAction, StoreError> {
        Ok(match answer {
            ClaimResponse::Granted(granted) => {
                if granted.grant.takeover {
                    self.stats.takeovers.add();
                }
                job.granted(granted);
                // The claim may be due before all leases that the heartbeat knows so far.
                self.lease_keeper.check_by(job.lease.renew_at_us().min(job.lease.until_us()));
                DeliveryAction::Run
            }
            ClaimResponse::Completed(_) if hapax_core::mutant::is("ended-key-run") => DeliveryAction::Run,
            ClaimResponse::InProgress { .. } if hapax_core::mutant::is("held-key-run") => DeliveryAction::Run,
            ClaimResponse::InDoubt if hapax_core::mutant::is("doubtful-key-run") => DeliveryAction::Run,
            ClaimResponse::Completed(outcome) => {
                self.stats.replayed.add();
                DeliveryAction::End(decide::replay(&outcome))
            }
            ClaimResponse::InProgress { retry_after_ms } => {
                DeliveryAction::WaitForDuplicate { retry_after_ms }
            }
            ClaimResponse::InDoubt => {
                self.stats.parked.add();
                let reason = format!(
                    "what became of the effect of {} is in doubt; resolve the ledger's entry, then release this",
                    job.entry()
                );
                DeliveryAction::End(Settlement::Park { reason })
            }
            ClaimResponse::Refused(ClaimError::Mismatch) => {
                self.stats.mismatches.add();
                self.stats.rejected.add();
                DeliveryAction::End(decide::mismatch(job.entry().key.as_str()))
            }
            ClaimResponse::Refused(error @ ClaimError::TooManyInDoubt { .. }) => {
                return Err(StoreError::Full(error.to_string()));
            }
            ClaimResponse::Refused(ClaimError::Store(error))
            | ClaimResponse::Unavailable(error)
            | ClaimResponse::Unconfirmed(error) => return Err(error),
            ClaimResponse::Refused(error) => return Err(StoreError::Invalid(error.to_string())),
        })
    }

    /// The ledger is unavailable: nothing runs; the deliveries are put back for a while without counting an attempt.
    fn fail_closed(&self, error: &StoreError) -> Settlement {
        let failures = self.ledger_failures.fetch_add(1, Ordering::Relaxed);
        let queue = &self.env.name;
        tracing::warn!(%queue, %error, "the ledger cannot be asked; deliveries are put back");
        let ceiling_ms = (500u64 << failures.min(6)).min(30_000);
        Settlement::Defer { after_ms: fastrand::u64(ceiling_ms / 2..=ceiling_ms) }
    }

    /// Claims again and waits until the running duplicate has ended, at most the ledger's maximum wait. `None`: the
    /// worker shuts down, or the lease of the delivery ends.
    pub async fn claim_after_duplicate(&self, job: &Arc<Job>) -> Option<DeliveryAction> {
        let mut draining = self.draining.subscribe();
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => None,
            () = job.lease.cancelled() => None,
            mut actions = self.claim(std::slice::from_ref(job), policy::WAIT_MS_MAX) => actions.pop(),
        }
    }

    /// The settle of a delivery whose duplicate is still running.
    pub fn defer_behind_duplicate(&self, retry_after_ms: u64) -> Settlement {
        self.defer_for(retry_after_ms.min(DUPLICATE_DEFER_MS_MAX))
    }

    fn defer_for(&self, after_ms: u64) -> Settlement {
        self.stats.deferred.add();
        let after_ms = after_ms.max(1);
        let returns_us = self.timer().now_us() + after_ms * 1000;
        self.returns_us.fetch_max(returns_us, Ordering::SeqCst);
        Settlement::Defer { after_ms }
    }

    /// How a delivery ends whose duplicate is running and that finds no room to wait for it: it comes back after 1 s,
    /// then 2 s, 4 s and so on up to 32 s, not later than the duplicate's claim lapses.
    pub fn defer_without_wait(&self, job: &Job, retry_after_ms: u64) -> Settlement {
        let doublings = job.delivery.deliveries.saturating_sub(1).min(5);
        self.defer_for(retry_after_ms.min(DUPLICATE_DEFER_MS_MAX << doublings))
    }

    /// Lets a delivery wait for its running duplicate without a slot, and then run or end as the duplicate did.
    pub fn wait_for_duplicate(
        self: &Arc<Self>,
        job: Arc<Job>,
        mut run_permit: RunPermit,
        retry_after_ms: u64,
    ) {
        let Some(permit) = self.duplicate_waiters.enter() else {
            let settlement = self.defer_without_wait(&job, retry_after_ms);
            return self.end_as(job, settlement);
        };
        drop(run_permit.slot.take());
        self.return_token(&job);
        let state = self.clone();
        tokio::spawn(async move {
            match state.claim_after_duplicate(&job).await {
                None => {
                    let stop = job.lease.stop().unwrap_or(StopReason::Drained);
                    state.end(job, RunResult::NotStarted(stop), None);
                }
                Some(DeliveryAction::End(settlement)) => state.end_as(job, settlement),
                Some(DeliveryAction::WaitForDuplicate { retry_after_ms }) => {
                    let settlement = state.defer_behind_duplicate(retry_after_ms);
                    state.end_as(job, settlement);
                }
                Some(DeliveryAction::Run) => match state.start_unless_draining(&job).await {
                    Some(slot) => {
                        run_permit.slot = Some(slot);
                        drop(permit);
                        return state.process_claimed(job, run_permit).await;
                    }
                    None => state.put_back(job),
                },
            }
            drop(permit);
        });
    }

    /// Waits for a slot and for a start of the rate, for a delivery that gave up its own while it waited. `None`: the
    /// worker ends.
    pub async fn start_unless_draining(&self, job: &Job) -> Option<Slot> {
        let mut draining = self.draining.subscribe();
        let starting = async {
            let mut slot = self.slots.enter();
            slot.hold().await;
            if let Some(rate) = &self.rate {
                rate.acquire(1, self.timer()).await;
                job.has_token.store(true, Ordering::SeqCst);
            }
            slot
        };
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => None,
            slot = starting => Some(slot),
        }
    }

    /// Waits until a slot may be used. `false`: the worker ends; what waited for it is to be put back before the slot is
    /// dropped, so that the drain waits for that.
    pub async fn hold_unless_draining(&self, slot: &mut Slot) -> bool {
        let mut draining = self.draining.subscribe();
        if slot.is_held() {
            return true;
        }
        tokio::select! {
            biased;
            _ = draining.wait_for(|draining| *draining) => false,
            () = slot.hold() => true,
        }
    }

    /// A delivery that does not start, or not yet, leaves its start of the rate to another.
    pub fn return_token(&self, job: &Job) {
        if let Some(rate) = &self.rate
            && job.has_token.swap(false, Ordering::SeqCst)
        {
            rate.give_back(1);
        }
    }
}
