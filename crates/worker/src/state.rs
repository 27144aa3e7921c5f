//! The life of one delivery: claimed, run, ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hapax_claim::{Claims, Lease, LeaseKeeper, LeasedItem, Owners, Phase, Timer};
use hapax_core::{Delivery, GroupId, OnDoubt, QueueName, Settled, Settlement, Source, Tier};
use tokio::sync::{Notify, mpsc, oneshot, watch};
use tracing::Instrument as _;

use crate::auto::LeaseTime;
use crate::claiming::{DeliveryAction, DuplicateWaiters};
use crate::cx::{Env, Job};
use crate::decide::Policy;
use crate::guard::guard;
use crate::handler::{Handler, RunMany, RunOne};
use crate::limits::{Admission, PerKey, Rate, Slot, Slots};
use crate::observe::{OnSettled, SettledDelivery, SingleDelivery, StopWhen};
use crate::outcome::{RunResult, StopReason};
use crate::point::Point;
use crate::settle::EndedDelivery;
use crate::stats::Stats;

/// State shared by all tasks of one worker.
pub(crate) struct WorkerState {
    pub env: Arc<Env>,
    pub source: Arc<dyn Source>,
    /// The Hapax queue behind the source, if there is one.
    pub queue: Option<QueueName>,
    /// The ledger's claims (`effectively-once`).
    pub claims: Option<Claims>,
    pub owners: Owners,
    /// The ledger is the queue's own store.
    pub own_ledger: bool,
    /// A settle ends the claim in the same transaction.
    pub same_store: bool,
    pub fifo: bool,
    /// The source's deliveries have leases.
    pub leased: bool,
    pub policy: Policy,
    pub handler: Handler,
    pub run_us_max: Option<u64>,
    pub consumer: String,
    pub lease: Arc<LeaseTime>,
    pub stats: Arc<Stats>,
    pub lease_keeper: Arc<LeaseKeeper>,
    pub duplicate_waiters: Arc<DuplicateWaiters>,
    pub slots: Arc<Slots>,
    pub rate: Option<Rate>,
    pub per_key: Option<PerKey>,
    pub drain_ms: u64,
    pub ended_deliveries: mpsc::UnboundedSender<EndedDelivery>,
    pub unsettled: AtomicUsize,
    pub settled: Notify,
    pub put_back: AtomicUsize,
    pub abandoned: AtomicBool,
    pub ledger_failures: AtomicU32,
    pub draining: watch::Sender<bool>,
    pub stop_when: StopWhen,
    pub single_delivery: watch::Sender<SingleDelivery>,
    /// When the last delivery that was deferred behind a running duplicate returns.
    pub returns_us: AtomicU64,
    pub on_settled: Option<OnSettled>,
}

impl WorkerState {
    pub fn claims(&self) -> bool {
        self.policy.tier == Tier::EffectivelyOnce
    }

    pub fn timer(&self) -> &Timer {
        &self.env.timer
    }

    fn records(&self) -> bool {
        let recorded = matches!(self.policy.tier, Tier::EffectivelyOnce | Tier::Transactional);
        recorded || self.env.hooks.observer.is_some()
    }

    /// Starts processing deliveries. `true` if some were put back because too many of their key are waiting.
    pub fn start(self: &Arc<Self>, deliveries: Vec<Delivery>, asked_us: u64) -> bool {
        self.stats.delivered.add_many(deliveries.len());
        let answered_us = self.timer().now_us();
        let take = |delivery: Delivery| {
            let lease_ms = delivery.lease_ms;
            let lease = match self.policy.tier {
                Tier::AtMostOnce => Lease::without_expiry(),
                _ if !self.leased => Lease::without_expiry(),
                _ if (answered_us - asked_us) * 4 <= lease_ms * 1000 => Lease::new(asked_us, lease_ms),
                _ => Lease::of_unknown_age(answered_us, lease_ms),
            };
            let job = Job::new(self.env.clone(), delivery, lease, answered_us);
            job.has_token.store(self.rate.is_some(), Ordering::SeqCst);
            Arc::new(job)
        };
        let jobs: Vec<_> = deliveries.into_iter().map(take).collect();
        self.lease_keeper.add(jobs.iter().map(|job| job.clone() as Arc<dyn LeasedItem>));
        if matches!(self.handler, Handler::Many { .. }) {
            for chunk in self.chunks(jobs) {
                tokio::spawn(self.clone().process_batch(chunk, self.slots.enter()));
            }
            false
        } else if self.fifo {
            for group_queue in by_group(jobs) {
                tokio::spawn(self.clone().process_group_queue(group_queue, self.slots.enter()));
            }
            false
        } else {
            self.admit(jobs)
        }
    }

    fn chunks(&self, jobs: Vec<Arc<Job>>) -> Vec<Vec<Arc<Job>>> {
        if self.fifo { by_group(jobs) } else { vec![jobs] }
    }

    /// Starts the deliveries that their key's limit allows; the others wait for their turn or are put back.
    fn admit(self: &Arc<Self>, jobs: Vec<Arc<Job>>) -> bool {
        let mut starting = Vec::with_capacity(jobs.len());
        let mut refused = false;
        for job in jobs {
            match self.per_key.as_ref().map_or(Admission::Free, |limit| limit.admit(&job)) {
                Admission::Free => starting.push((job, self.run_permit(None))),
                Admission::Permit(key) => starting.push((job, self.run_permit(Some(key)))),
                Admission::Queued => {}
                Admission::Refused => {
                    refused = true;
                    self.stats.deferred.add();
                    self.end_as(job, Settlement::Defer { after_ms: fastrand::u64(100..=1_000) });
                }
            }
        }
        self.spawn(starting);
        refused
    }

    fn run_permit(self: &Arc<Self>, key: Option<String>) -> RunPermit {
        RunPermit { slot: Some(self.slots.enter()), key, state: self.clone() }
    }

    /// Starts these, each as soon as its slot may be used.
    fn spawn(self: &Arc<Self>, starting: Vec<(Arc<Job>, RunPermit)>) {
        let (at_once, later): (Vec<_>, Vec<_>) =
            starting.into_iter().partition(|(_, run_permit)| run_permit.is_held());
        for (job, run_permit) in later {
            tokio::spawn(self.clone().process_later(job, run_permit));
        }
        if self.claims() && !at_once.is_empty() {
            tokio::spawn(self.clone().claim_and_process(at_once));
        } else {
            for (job, run_permit) in at_once {
                tokio::spawn(self.clone().process(job, run_permit));
            }
        }
    }

    /// No slot was free: a delivery that had waited for its duplicate took it while the receive was open.
    async fn process_later(self: Arc<Self>, job: Arc<Job>, mut run_permit: RunPermit) {
        let may_start = match &mut run_permit.slot {
            Some(slot) => self.hold_unless_draining(slot).await,
            None => true,
        };
        if may_start {
            self.spawn(vec![(job, run_permit)]);
        } else {
            self.put_back(job);
            drop(run_permit);
        }
    }

    async fn claim_and_process(self: Arc<Self>, starting: Vec<(Arc<Job>, RunPermit)>) {
        let (jobs, run_permits): (Vec<_>, Vec<_>) = starting.into_iter().unzip();
        self.after_receive(jobs.len()).await;
        let actions = self.claim(&jobs, 0).await;
        for ((job, run_permit), action) in jobs.into_iter().zip(run_permits).zip(actions) {
            match action {
                DeliveryAction::Run => drop(tokio::spawn(self.clone().process_claimed(job, run_permit))),
                DeliveryAction::WaitForDuplicate { retry_after_ms } => {
                    self.wait_for_duplicate(job, run_permit, retry_after_ms);
                }
                DeliveryAction::End(settlement) => self.end_as(job, settlement),
            }
        }
    }

    async fn process(self: Arc<Self>, job: Arc<Job>, run_permit: RunPermit) {
        self.after_receive(1).await;
        self.process_claimed(job, run_permit).await;
    }

    pub async fn process_claimed(self: Arc<Self>, job: Arc<Job>, run_permit: RunPermit) {
        let ended = self.run(&job).await;
        self.end(job, ended, None);
        drop(run_permit);
    }

    /// Deliveries for one call of a batch handler.
    async fn process_batch(self: Arc<Self>, jobs: Vec<Arc<Job>>, mut slot: Slot) {
        self.after_receive(jobs.len()).await;
        if !self.hold_unless_draining(&mut slot).await {
            return self.put_back_all(jobs);
        }
        let Handler::Many { run, .. } = &self.handler else { unreachable!("only batch handlers") };
        let actions = if self.claims() {
            self.claim(&jobs, 0).await
        } else {
            jobs.iter().map(|_| DeliveryAction::Run).collect()
        };
        let (mut running, mut blocked) = (Vec::with_capacity(jobs.len()), false);
        for (job, action) in jobs.into_iter().zip(actions) {
            match action {
                // In a FIFO group no message may overtake one that is put back.
                DeliveryAction::Run if blocked => {
                    self.end(job, RunResult::NotStarted(StopReason::Lost), None);
                }
                DeliveryAction::Run => running.push(job),
                DeliveryAction::WaitForDuplicate { retry_after_ms }
                    if blocked || (self.fifo && !running.is_empty()) =>
                {
                    // When it comes back it is the first of its group, and may wait.
                    blocked = true;
                    let settlement = self.defer_behind_duplicate(retry_after_ms);
                    self.end_as(job, settlement);
                }
                DeliveryAction::WaitForDuplicate { retry_after_ms } => {
                    blocked |= self.fifo;
                    let run_permit = RunPermit { slot: None, key: None, state: self.clone() };
                    self.wait_for_duplicate(job, run_permit, retry_after_ms);
                }
                DeliveryAction::End(settlement) => {
                    blocked |= self.fifo && settlement != Settlement::Ack;
                    self.end_as(job, settlement);
                }
            }
        }
        if !running.is_empty() {
            let ended = self.run_many(run, &running).await;
            for (job, ended) in running.into_iter().zip(ended) {
                self.end(job, ended, None);
            }
        }
        drop(slot);
    }

    pub async fn after_receive(&self, count: usize) {
        if !self.env.hooks.is_empty() {
            for _ in 0..count {
                self.env.hooks.pass(Point::AfterReceive).await;
            }
        }
    }

    pub async fn run(&self, job: &Arc<Job>) -> RunResult {
        let run: &RunOne = match &self.handler {
            Handler::One(run) | Handler::Transactional { run, .. } => run,
            // A delivery that waited for its duplicate is a batch of one.
            Handler::Many { run, .. } => {
                let ended = self.run_many(run, std::slice::from_ref(job)).await.pop();
                return ended.unwrap_or(RunResult::NotStarted(StopReason::Lost));
            }
        };
        self.before_run(std::slice::from_ref(job)).await;
        let leases = std::iter::once(&job.lease);
        let running = guard(leases, self.timer(), &self.stats, || job.begin(), run(job, self.records()))
            .instrument(job.span());
        let ended = running.await.unwrap_or_else(|stopped| stopped);
        self.after_run(std::slice::from_ref(job)).await;
        ended
    }

    async fn run_many(&self, run: &RunMany, jobs: &[Arc<Job>]) -> Vec<RunResult> {
        self.before_run(jobs).await;
        let leases = jobs.iter().map(|job| &job.lease);
        let span = tracing::info_span!("batch", queue = %self.env.name, messages = jobs.len());
        let begin = || {
            for job in jobs {
                job.begin();
            }
        };
        let ended =
            guard(leases, self.timer(), &self.stats, begin, run(jobs, self.records())).instrument(span).await;
        self.after_run(jobs).await;
        let each = |stopped: &RunResult| match stopped {
            RunResult::Panicked(error) => RunResult::Panicked(error.clone()),
            RunResult::Stopped(stop) => RunResult::Stopped(*stop),
            _ => RunResult::NotStarted(StopReason::Lost),
        };
        ended.unwrap_or_else(|stopped| jobs.iter().map(|_| each(&stopped)).collect())
    }

    async fn before_run(&self, jobs: &[Arc<Job>]) {
        if !self.env.hooks.is_empty() {
            for _ in jobs {
                self.env.hooks.pass(Point::BeforeEffect).await;
            }
        }
        for job in jobs {
            if let Some(max_us) = self.run_us_max {
                let until_us = self.timer().now_us() + max_us;
                job.lease.set_run_deadline(until_us);
                self.lease_keeper.check_by(until_us);
            }
            job.lease.set_phase(Phase::Running);
        }
    }

    async fn after_run(&self, jobs: &[Arc<Job>]) {
        for job in jobs {
            job.lease.set_phase(Phase::Settling);
            self.lease.record(self.timer().now_us().saturating_sub(job.received_us));
        }
        if !self.env.hooks.is_empty() {
            for _ in jobs {
                self.env.hooks.pass(Point::AfterEffect).await;
            }
        }
    }

    /// Ends a delivery whose handler ended.
    pub fn end(&self, job: Arc<Job>, ended: RunResult, reply: Option<oneshot::Sender<Option<Settled>>>) {
        self.count(&job, &ended);
        let ran = ended.ran();
        let decision = self.policy.decide(ended);
        self.queue_settle(job, decision.settlement, ran.then_some(decision.ending), reply);
    }

    /// Ends a delivery whose handler did not run.
    pub fn end_as(&self, job: Arc<Job>, settlement: Settlement) {
        self.queue_settle(job, settlement, None, None);
    }

    /// Puts back a delivery that was never started.
    pub fn put_back(&self, job: Arc<Job>) {
        self.end(job, RunResult::NotStarted(StopReason::Drained), None);
    }

    /// The same for many.
    pub fn put_back_all(&self, jobs: Vec<Arc<Job>>) {
        for job in jobs {
            self.put_back(job);
        }
    }

    pub fn queue_settle(
        &self,
        job: Arc<Job>,
        settlement: Settlement,
        ending: Option<hapax_core::ClaimEnding>,
        reply: Option<oneshot::Sender<Option<Settled>>>,
    ) {
        self.return_token(&job);
        let observer = self.env.hooks.observer.as_ref();
        let ran = observer.and(ending.clone());
        if self.policy.tier == Tier::AtMostOnce || job.lease.stop() == Some(StopReason::Abandoned) {
            job.lease.set_phase(Phase::Over);
            if self.policy.tier == Tier::AtMostOnce {
                self.settled(&job, &settlement, Some(Settled::Acked), None);
            }
            if let Some(observer) = observer {
                observer.ended(crate::testing::TrialRun { settlement, ending: ran, settled: None });
                observer.passed();
            }
            return;
        }
        job.lease.set_phase(Phase::Settling);
        self.unsettled.fetch_add(1, Ordering::SeqCst);
        // The collector runs as long as the worker; after that nothing is settled any more.
        let _ = self.ended_deliveries.send(EndedDelivery { job, settlement, ending, ran, reply });
    }

    /// Reports how a delivery ended.
    pub fn settled(
        &self,
        job: &Job,
        settlement: &Settlement,
        settled: Option<Settled>,
        error: Option<String>,
    ) {
        if let (Settlement::Retry { .. }, Some(Settled::Dead | Settled::Parked)) = (settlement, settled) {
            self.stats.died.add();
        }
        let ran = job.began.load(Ordering::SeqCst);
        if let Some(on_settled) = &self.on_settled {
            let held = Duration::from_micros(self.timer().now_us().saturating_sub(job.received_us));
            let (delivery, key) = (&job.delivery, &job.entry().key);
            on_settled(&SettledDelivery { delivery, key, ran, held, settlement, settled, error });
        }
        if self.stop_when == StopWhen::AfterOne {
            // The delivery was put back without a run: another run of its key is not over, or the ledger was
            // unavailable.
            let put_back = !ran && matches!(settlement, Settlement::Defer { .. });
            self.single_delivery.send_replace(if put_back {
                SingleDelivery::Free
            } else {
                SingleDelivery::Done
            });
        }
    }

    fn count(&self, job: &Job, ended: &RunResult) {
        let stats = &self.stats;
        let doubt = || {
            if self.claims() {
                stats.in_doubt.add();
                if self.policy.on_doubt == OnDoubt::Park {
                    return stats.parked.add();
                }
            }
            stats.retried.add();
        };
        match ended {
            RunResult::Done(_) => stats.done.add(),
            RunResult::Retry { .. } => stats.retried.add(),
            RunResult::Reject { .. } | RunResult::Unparsable(_) => stats.rejected.add(),
            RunResult::Failed { .. } => match self.policy.on_error {
                crate::OnError::Reject => stats.rejected.add(),
                crate::OnError::Retry => stats.retried.add(),
                crate::OnError::InDoubt => doubt(),
            },
            RunResult::Panicked(error) => {
                tracing::error!(%error, message_id = %job.delivery.id, queue = %self.env.name, "a handler panicked");
                stats.panics.add();
                doubt();
            }
            RunResult::Deferred { reason, after_ms } => {
                let (queue, message) = (&self.env.name, job.delivery.id);
                tracing::info!(%queue, message_id = %message, after_ms, reason, "a delivery is put back, uncounted");
                stats.deferred.add();
            }
            RunResult::Interrupted { .. } | RunResult::Stopped(StopReason::Drained) => {
                self.put_back.fetch_add(1, Ordering::SeqCst);
                if self.claims() {
                    stats.in_doubt.add();
                }
                stats.deferred.add();
            }
            RunResult::InDoubt { .. } | RunResult::Stopped(_) => doubt(),
            RunResult::NotStarted(stop) => {
                if *stop == StopReason::Drained {
                    self.put_back.fetch_add(1, Ordering::SeqCst);
                }
                stats.deferred.add();
            }
            RunResult::Replayed(_) => stats.replayed.add(),
            RunResult::ParkedInDoubt(_) => stats.parked.add(),
            RunResult::Mismatch(_) => {
                stats.mismatches.add();
                stats.rejected.add();
            }
        }
    }
}

/// The right of one delivery to run: a slot, and one of its key's permits. Dropping it starts the next delivery that
/// waits for the key.
pub(crate) struct RunPermit {
    pub slot: Option<Slot>,
    key: Option<String>,
    state: Arc<WorkerState>,
}

impl RunPermit {
    /// It waits for no slot.
    fn is_held(&self) -> bool {
        self.slot.as_ref().is_none_or(Slot::is_held)
    }
}

impl Drop for RunPermit {
    fn drop(&mut self) {
        let (Some(key), Some(limit)) = (self.key.take(), &self.state.per_key) else { return };
        let Some(job) = limit.next(&key) else { return };
        let slot = self.slot.take().unwrap_or_else(|| self.state.slots.enter());
        let run_permit = RunPermit { slot: Some(slot), key: Some(key), state: self.state.clone() };
        let state = self.state.clone();
        if state.abandoned.load(Ordering::SeqCst) || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        state.spawn(vec![(job, run_permit)]);
    }
}

/// Splits deliveries by group, each in the order of its receive.
fn by_group(jobs: Vec<Arc<Job>>) -> Vec<Vec<Arc<Job>>> {
    let mut places: HashMap<Option<GroupId>, usize> = HashMap::new();
    let mut group_queues: Vec<Vec<Arc<Job>>> = Vec::new();
    for job in jobs {
        let place = *places.entry(job.delivery.group.clone()).or_insert_with(|| {
            group_queues.push(Vec::new());
            group_queues.len() - 1
        });
        group_queues[place].push(job);
    }
    group_queues
}
