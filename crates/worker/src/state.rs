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
use crate::claiming::{Twins, Verdict};
use crate::cx::{Env, Job};
use crate::decide::Policy;
use crate::guard::guard;
use crate::handler::{Handler, RunMany, RunOne};
use crate::limits::{Admission, PerKey, Rate, Slot, Slots};
use crate::observe::{OnSettled, One, SettledDelivery, StopWhen};
use crate::outcome::{Ended, StopReason};
use crate::point::Point;
use crate::settle::Finish;
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
    pub twins: Arc<Twins>,
    pub slots: Arc<Slots>,
    pub rate: Option<Rate>,
    pub per_key: Option<PerKey>,
    pub drain_ms: u64,
    pub finishes: mpsc::UnboundedSender<Finish>,
    pub unsettled: AtomicUsize,
    pub settled: Notify,
    pub put_back: AtomicUsize,
    pub abandoned: AtomicBool,
    pub ledger_failures: AtomicU32,
    pub draining: watch::Sender<bool>,
    pub stop_when: StopWhen,
    pub one: watch::Sender<One>,
    /// When the last delivery that was deferred behind a twin returns.
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
            for lane in by_group(jobs) {
                tokio::spawn(self.clone().process_lane(lane, self.slots.enter()));
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
                Admission::Free => starting.push((job, self.turn(None))),
                Admission::Turn(key) => starting.push((job, self.turn(Some(key)))),
                Admission::Waits => {}
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

    fn turn(self: &Arc<Self>, key: Option<String>) -> Turn {
        Turn { slot: Some(self.slots.enter()), key, shared: self.clone() }
    }

    /// Starts these, each as soon as its slot may be used.
    fn spawn(self: &Arc<Self>, starting: Vec<(Arc<Job>, Turn)>) {
        let (at_once, later): (Vec<_>, Vec<_>) = starting.into_iter().partition(|(_, turn)| turn.is_held());
        for (job, turn) in later {
            tokio::spawn(self.clone().process_later(job, turn));
        }
        if self.claims() && !at_once.is_empty() {
            tokio::spawn(self.clone().claim_and_process(at_once));
        } else {
            for (job, turn) in at_once {
                tokio::spawn(self.clone().process(job, turn));
            }
        }
    }

    /// No slot was free: a delivery that had waited for its twin took it while the receive was open.
    async fn process_later(self: Arc<Self>, job: Arc<Job>, mut turn: Turn) {
        let may_start = match &mut turn.slot {
            Some(slot) => self.hold_unless_draining(slot).await,
            None => true,
        };
        if may_start {
            self.spawn(vec![(job, turn)]);
        } else {
            self.put_back(job);
            drop(turn);
        }
    }

    async fn claim_and_process(self: Arc<Self>, starting: Vec<(Arc<Job>, Turn)>) {
        let (jobs, turns): (Vec<_>, Vec<_>) = starting.into_iter().unzip();
        self.after_receive(jobs.len()).await;
        let verdicts = self.claim(&jobs, 0).await;
        for ((job, turn), verdict) in jobs.into_iter().zip(turns).zip(verdicts) {
            match verdict {
                Verdict::Run => drop(tokio::spawn(self.clone().process_claimed(job, turn))),
                Verdict::Twin { retry_after_ms } => self.wait_behind_twin(job, turn, retry_after_ms),
                Verdict::End(settlement) => self.end_as(job, settlement),
            }
        }
    }

    async fn process(self: Arc<Self>, job: Arc<Job>, turn: Turn) {
        self.after_receive(1).await;
        self.process_claimed(job, turn).await;
    }

    pub async fn process_claimed(self: Arc<Self>, job: Arc<Job>, turn: Turn) {
        let ended = self.run(&job).await;
        self.end(job, ended, None);
        drop(turn);
    }

    /// Deliveries for one call of a batch handler.
    async fn process_batch(self: Arc<Self>, jobs: Vec<Arc<Job>>, mut slot: Slot) {
        self.after_receive(jobs.len()).await;
        if !self.hold_unless_draining(&mut slot).await {
            return self.put_back_all(jobs);
        }
        let Handler::Many { run, .. } = &self.handler else { unreachable!("only batch handlers") };
        let verdicts = if self.claims() {
            self.claim(&jobs, 0).await
        } else {
            jobs.iter().map(|_| Verdict::Run).collect()
        };
        let (mut running, mut blocked) = (Vec::with_capacity(jobs.len()), false);
        for (job, verdict) in jobs.into_iter().zip(verdicts) {
            match verdict {
                // In a FIFO group no message may overtake one that is put back.
                Verdict::Run if blocked => self.end(job, Ended::NotStarted(StopReason::Lost), None),
                Verdict::Run => running.push(job),
                Verdict::Twin { retry_after_ms } if blocked || (self.fifo && !running.is_empty()) => {
                    // When it comes back it is the first of its group, and may wait.
                    blocked = true;
                    let settlement = self.defer_behind_twin(retry_after_ms);
                    self.end_as(job, settlement);
                }
                Verdict::Twin { retry_after_ms } => {
                    blocked |= self.fifo;
                    let turn = Turn { slot: None, key: None, shared: self.clone() };
                    self.wait_behind_twin(job, turn, retry_after_ms);
                }
                Verdict::End(settlement) => {
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
        if !self.env.hooks.none() {
            for _ in 0..count {
                self.env.hooks.pass(Point::AfterReceive).await;
            }
        }
    }

    pub async fn run(&self, job: &Arc<Job>) -> Ended {
        let run: &RunOne = match &self.handler {
            Handler::One(run) | Handler::Transactional { run, .. } => run,
            // A delivery that waited for its twin is a batch of one.
            Handler::Many { run, .. } => {
                let ended = self.run_many(run, std::slice::from_ref(job)).await.pop();
                return ended.unwrap_or(Ended::NotStarted(StopReason::Lost));
            }
        };
        self.prepare(std::slice::from_ref(job)).await;
        let leases = std::iter::once(&job.lease);
        let running = guard(leases, self.timer(), &self.stats, || job.begin(), run(job, self.records()))
            .instrument(job.span());
        let ended = running.await.unwrap_or_else(|stopped| stopped);
        self.ran(std::slice::from_ref(job)).await;
        ended
    }

    async fn run_many(&self, run: &RunMany, jobs: &[Arc<Job>]) -> Vec<Ended> {
        self.prepare(jobs).await;
        let leases = jobs.iter().map(|job| &job.lease);
        let span = tracing::info_span!("batch", queue = %self.env.name, messages = jobs.len());
        let begin = || {
            for job in jobs {
                job.begin();
            }
        };
        let ended =
            guard(leases, self.timer(), &self.stats, begin, run(jobs, self.records())).instrument(span).await;
        self.ran(jobs).await;
        let each = |stopped: &Ended| match stopped {
            Ended::Panicked(error) => Ended::Panicked(error.clone()),
            Ended::Stopped(stop) => Ended::Stopped(*stop),
            _ => Ended::NotStarted(StopReason::Lost),
        };
        ended.unwrap_or_else(|stopped| jobs.iter().map(|_| each(&stopped)).collect())
    }

    async fn prepare(&self, jobs: &[Arc<Job>]) {
        if !self.env.hooks.none() {
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

    async fn ran(&self, jobs: &[Arc<Job>]) {
        for job in jobs {
            job.lease.set_phase(Phase::Settling);
            self.lease.record(self.timer().now_us().saturating_sub(job.received_us));
        }
        if !self.env.hooks.none() {
            for _ in jobs {
                self.env.hooks.pass(Point::AfterEffect).await;
            }
        }
    }

    /// Ends a delivery whose handler ended.
    pub fn end(&self, job: Arc<Job>, ended: Ended, tell: Option<oneshot::Sender<Option<Settled>>>) {
        self.count(&job, &ended);
        let ran = ended.ran();
        let decision = self.policy.decide(ended);
        self.finish(job, decision.settlement, ran.then_some(decision.ending), tell);
    }

    /// Ends a delivery whose handler did not run.
    pub fn end_as(&self, job: Arc<Job>, settlement: Settlement) {
        self.finish(job, settlement, None, None);
    }

    /// Puts back a delivery that was never started.
    pub fn put_back(&self, job: Arc<Job>) {
        self.end(job, Ended::NotStarted(StopReason::Drained), None);
    }

    /// The same for many.
    pub fn put_back_all(&self, jobs: Vec<Arc<Job>>) {
        for job in jobs {
            self.put_back(job);
        }
    }

    pub fn finish(
        &self,
        job: Arc<Job>,
        settlement: Settlement,
        ending: Option<hapax_core::ClaimEnding>,
        tell: Option<oneshot::Sender<Option<Settled>>>,
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
                observer.ended(crate::testing::Ran { settlement, ending: ran, settled: None });
                observer.passed();
            }
            return;
        }
        job.lease.set_phase(Phase::Settling);
        self.unsettled.fetch_add(1, Ordering::SeqCst);
        // The collector runs as long as the worker; after that nothing is settled any more.
        let _ = self.finishes.send(Finish { job, settlement, ending, ran, tell });
    }

    /// Reports how a delivery ended.
    pub fn settled(
        &self,
        job: &Job,
        settlement: &Settlement,
        settled: Option<Settled>,
        error: Option<String>,
    ) {
        let ran = job.began.load(Ordering::SeqCst);
        if let Some(tell) = &self.on_settled {
            let held = Duration::from_micros(self.timer().now_us().saturating_sub(job.received_us));
            let (delivery, key) = (&job.delivery, &job.entry().key);
            tell(&SettledDelivery { delivery, key, ran, held, settlement, settled, error });
        }
        if self.stop_when == StopWhen::AfterOne {
            // The delivery was put back without a run: another run of its key is not over, or the ledger was
            // unavailable.
            let put_back = !ran && matches!(settlement, Settlement::Defer { .. });
            self.one.send_replace(if put_back { One::Free } else { One::Done });
        }
    }

    fn count(&self, job: &Job, ended: &Ended) {
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
            Ended::Done(_) => stats.done.add(),
            Ended::Retry { .. } => stats.retried.add(),
            Ended::Reject { .. } | Ended::Unparsable(_) => stats.rejected.add(),
            Ended::Failed { .. } => match self.policy.on_error {
                crate::OnError::Reject => stats.rejected.add(),
                crate::OnError::Retry => stats.retried.add(),
                crate::OnError::InDoubt => doubt(),
            },
            Ended::Panicked(error) => {
                tracing::error!(%error, message_id = %job.delivery.id, queue = %self.env.name, "a handler panicked");
                stats.panics.add();
                doubt();
            }
            Ended::Deferred { reason, after_ms } => {
                let (queue, message) = (&self.env.name, job.delivery.id);
                tracing::info!(%queue, message_id = %message, after_ms, reason, "a delivery is put back, uncounted");
                stats.deferred.add();
            }
            Ended::Interrupted { .. } | Ended::Stopped(StopReason::Drained) => {
                self.put_back.fetch_add(1, Ordering::SeqCst);
                if self.claims() {
                    stats.in_doubt.add();
                }
                stats.deferred.add();
            }
            Ended::InDoubt { .. } | Ended::Stopped(_) => doubt(),
            Ended::NotStarted(stop) => {
                if *stop == StopReason::Drained {
                    self.put_back.fetch_add(1, Ordering::SeqCst);
                }
                stats.deferred.add();
            }
            Ended::Replayed(_) => stats.replayed.add(),
            Ended::Held(_) => stats.parked.add(),
            Ended::Mismatch(_) => {
                stats.mismatches.add();
                stats.rejected.add();
            }
        }
    }
}

/// The right of one delivery to run: a slot, and one of its key's permits. Dropping it starts the next delivery that
/// waits for the key.
pub(crate) struct Turn {
    pub slot: Option<Slot>,
    key: Option<String>,
    shared: Arc<WorkerState>,
}

impl Turn {
    /// It waits for no slot.
    fn is_held(&self) -> bool {
        self.slot.as_ref().is_none_or(Slot::is_held)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (Some(key), Some(limit)) = (self.key.take(), &self.shared.per_key) else { return };
        let Some(job) = limit.next(&key) else { return };
        let slot = self.slot.take().unwrap_or_else(|| self.shared.slots.enter());
        let turn = Turn { slot: Some(slot), key: Some(key), shared: self.shared.clone() };
        let shared = self.shared.clone();
        if shared.abandoned.load(Ordering::SeqCst) || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        shared.spawn(vec![(job, turn)]);
    }
}

/// Splits deliveries by group, each in the order of its receive.
fn by_group(jobs: Vec<Arc<Job>>) -> Vec<Vec<Arc<Job>>> {
    let mut places: HashMap<Option<GroupId>, usize> = HashMap::new();
    let mut lanes: Vec<Vec<Arc<Job>>> = Vec::new();
    for job in jobs {
        let place = *places.entry(job.delivery.group.clone()).or_insert_with(|| {
            lanes.push(Vec::new());
            lanes.len() - 1
        });
        lanes[place].push(job);
    }
    lanes
}
