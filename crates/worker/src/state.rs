//! One delivery's life: claimed, run, ended.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::{
    Claim, ClaimError, ClaimRequest, Delivery, GroupId, How, Ledger, OnDoubt, Owner, QueueName, Settled,
    Source, StoreError, Tier,
};
use tokio::sync::{Notify, mpsc, oneshot};
use tracing::Instrument as _;

use crate::auto::LeaseTime;
use crate::cx::{Env, Job};
use crate::decide::{self, Policy};
use crate::handler::{Handler, RunMany, RunOne};
use crate::heartbeat::{Beats, Held};
use crate::lease::{Lease, Phase, guard, now_us};
use crate::limits::{Admission, PerKey, Rate, Slot, Slots};
use crate::outcome::{Ended, Stop};
use crate::point::Point;
use crate::settle::Finish;
use crate::stats::Stats;

/// The longest that one claim call may take.
const CLAIM_MS_MAX: u64 = 10_000;
/// How often a claim whose answer was lost is asked for again.
const CLAIM_TRIES: u32 = 5;

/// Everything that the tasks of one worker share.
pub(crate) struct WorkerState {
    pub env: Arc<Env>,
    pub source: Arc<dyn Source>,
    /// The Hapax queue behind the source.
    pub queue: Option<QueueName>,
    pub ledger: Option<Arc<dyn Ledger>>,
    /// The ledger is the queue's own store.
    pub own_ledger: bool,
    /// A settle ends the claim in the same transaction.
    pub same_store: bool,
    pub fifo: bool,
    /// Deliveries are held by leases.
    pub leased: bool,
    pub policy: Policy,
    pub handler: Handler,
    pub run_us_max: Option<u64>,
    pub consumer: String,
    pub lease: Arc<LeaseTime>,
    pub stats: Arc<Stats>,
    pub beats: Arc<Beats>,
    pub slots: Arc<Slots>,
    pub rate: Option<Rate>,
    pub per_key: Option<PerKey>,
    pub drain_ms: u64,
    pub finishes: mpsc::UnboundedSender<Finish>,
    pub unsettled: AtomicUsize,
    pub settled: Notify,
    pub put_back: AtomicUsize,
    pub abandoned: AtomicBool,
    pub claims: AtomicU64,
    pub ledger_failures: AtomicU32,
}

impl WorkerState {
    fn claims(&self) -> bool {
        self.policy.tier == Tier::EffectivelyOnce
    }

    fn records(&self) -> bool {
        let recorded = matches!(self.policy.tier, Tier::EffectivelyOnce | Tier::Transactional);
        recorded || self.env.hooks.observer.is_some()
    }

    /// Takes deliveries in. `true` if some had to be put back because too many of their key wait.
    pub fn start(self: &Arc<Self>, deliveries: Vec<Delivery>, asked_us: u64) -> bool {
        self.stats.delivered.add_many(deliveries.len());
        let answered_us = now_us();
        let take = |delivery: Delivery| {
            let lease_ms = delivery.lease_ms;
            let lease = match self.policy.tier {
                Tier::AtMostOnce => Lease::endless(),
                _ if !self.leased => Lease::endless(),
                _ if (answered_us - asked_us) * 4 <= lease_ms * 1000 => Lease::new(asked_us, lease_ms),
                _ => Lease::of_unknown_age(answered_us, lease_ms),
            };
            Arc::new(Job::new(self.env.clone(), delivery, lease, answered_us))
        };
        let jobs: Vec<_> = deliveries.into_iter().map(take).collect();
        self.beats.keep(jobs.iter().map(|job| job.clone() as Arc<dyn Held>));
        if matches!(self.handler, Handler::Many { .. }) {
            for chunk in self.chunks(jobs) {
                tokio::spawn(self.clone().live_together(chunk, self.slots.take()));
            }
            false
        } else if self.fifo {
            for lane in by_group(jobs) {
                tokio::spawn(self.clone().live_in_order(lane, self.slots.take()));
            }
            false
        } else {
            self.admit(jobs)
        }
    }

    fn chunks(&self, jobs: Vec<Arc<Job>>) -> Vec<Vec<Arc<Job>>> {
        if self.fifo { by_group(jobs) } else { vec![jobs] }
    }

    /// Starts what may start; the rest waits for its key, or goes back.
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
                    self.end_as(job, How::Defer { after_ms: fastrand::u64(100..=1_000) });
                }
            }
        }
        if self.claims() && !starting.is_empty() {
            tokio::spawn(self.clone().claim_and_live(starting));
        } else {
            for (job, turn) in starting {
                tokio::spawn(self.clone().live(job, turn));
            }
        }
        refused
    }

    fn turn(self: &Arc<Self>, key: Option<String>) -> Turn {
        Turn { slot: Some(self.slots.take()), key, shared: self.clone() }
    }

    async fn claim_and_live(self: Arc<Self>, starting: Vec<(Arc<Job>, Turn)>) {
        let (jobs, turns): (Vec<_>, Vec<_>) = starting.into_iter().unzip();
        self.after_receive(jobs.len()).await;
        let verdicts = self.claim(&jobs).await;
        for ((job, turn), verdict) in jobs.into_iter().zip(turns).zip(verdicts) {
            match verdict {
                None => drop(tokio::spawn(self.clone().process_claimed(job, turn))),
                Some(how) => self.end_as(job, how),
            }
        }
    }

    async fn live(self: Arc<Self>, job: Arc<Job>, turn: Turn) {
        self.after_receive(1).await;
        self.process_claimed(job, turn).await;
    }

    async fn process_claimed(self: Arc<Self>, job: Arc<Job>, turn: Turn) {
        let ended = self.run(&job).await;
        self.end(job, ended, None);
        drop(turn);
    }

    /// A FIFO group's deliveries, one after another, each settled before the next starts: what fails is not overtaken.
    async fn live_in_order(self: Arc<Self>, lane: Vec<Arc<Job>>, slot: Slot) {
        self.after_receive(lane.len()).await;
        let mut lane = lane.into_iter();
        let mut went_back = false;
        for job in lane.by_ref() {
            let (tell, told) = oneshot::channel();
            let verdict = if self.claims() {
                self.claim(std::slice::from_ref(&job)).await.pop().flatten()
            } else {
                None
            };
            if let Some(how) = verdict {
                self.finish(job, how, None, Some(tell));
            } else {
                let ended = self.run(&job).await;
                self.end(job, ended, Some(tell));
            }
            if self.policy.tier == Tier::AtMostOnce {
                continue;
            }
            match told.await {
                Ok(Some(Settled::Acked)) => {}
                settled => {
                    // A retry or a deferral has returned those behind it.
                    went_back = matches!(settled, Ok(Some(Settled::Returned { .. })));
                    break;
                }
            }
        }
        for job in lane {
            if went_back {
                job.lease.enter(Phase::Over);
            } else {
                self.stats.deferred.add();
                self.end_as(job, How::Defer { after_ms: 0 });
            }
        }
        drop(slot);
    }

    /// Deliveries for one call of a batch handler.
    async fn live_together(self: Arc<Self>, jobs: Vec<Arc<Job>>, slot: Slot) {
        self.after_receive(jobs.len()).await;
        let Handler::Many { run, .. } = &self.handler else { unreachable!("only batch handlers") };
        let verdicts = if self.claims() { self.claim(&jobs).await } else { vec![None; jobs.len()] };
        let (mut running, mut blocked) = (Vec::with_capacity(jobs.len()), false);
        for (job, verdict) in jobs.into_iter().zip(verdicts) {
            match verdict {
                // In a FIFO group nobody overtakes one that goes back.
                None if blocked => self.end(job, Ended::NotStarted(Stop::Lost), None),
                None => running.push(job),
                Some(how) => {
                    blocked |= self.fifo && how != How::Ack;
                    self.end_as(job, how);
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

    async fn after_receive(&self, count: usize) {
        if !self.env.hooks.none() {
            for _ in 0..count {
                self.env.hooks.pass(Point::AfterReceive).await;
            }
        }
    }

    async fn run(&self, job: &Arc<Job>) -> Ended {
        let run: &RunOne = match &self.handler {
            Handler::One(run) | Handler::Transactional { run, .. } => run,
            Handler::Many { .. } => unreachable!("a batch handler runs batches"),
        };
        self.begin(std::slice::from_ref(job)).await;
        let leases = std::iter::once(&job.lease);
        let running = guard(leases, &self.stats, run(job, self.records())).instrument(job.span());
        let ended = running.await.unwrap_or_else(|stopped| stopped);
        self.ran(std::slice::from_ref(job)).await;
        ended
    }

    async fn run_many(&self, run: &RunMany, jobs: &[Arc<Job>]) -> Vec<Ended> {
        self.begin(jobs).await;
        let leases = jobs.iter().map(|job| &job.lease);
        let span = tracing::info_span!("batch", queue = %self.env.name, messages = jobs.len());
        let ended = guard(leases, &self.stats, run(jobs, self.records())).instrument(span).await;
        self.ran(jobs).await;
        let each = |stopped: &Ended| match stopped {
            Ended::Panicked(error) => Ended::Panicked(error.clone()),
            Ended::Stopped(stop) => Ended::Stopped(*stop),
            _ => Ended::NotStarted(Stop::Lost),
        };
        ended.unwrap_or_else(|stopped| jobs.iter().map(|_| each(&stopped)).collect())
    }

    async fn begin(&self, jobs: &[Arc<Job>]) {
        if !self.env.hooks.none() {
            for _ in jobs {
                self.env.hooks.pass(Point::BeforeEffect).await;
            }
        }
        for job in jobs {
            if let Some(max_us) = self.run_us_max {
                let until_us = now_us() + max_us;
                job.lease.run_until(until_us);
                self.beats.expect(until_us);
            }
            job.lease.enter(Phase::Running);
        }
    }

    async fn ran(&self, jobs: &[Arc<Job>]) {
        for job in jobs {
            job.lease.enter(Phase::Settling);
            self.lease.record(now_us().saturating_sub(job.received_us));
        }
        if !self.env.hooks.none() {
            for _ in jobs {
                self.env.hooks.pass(Point::AfterEffect).await;
            }
        }
    }

    /// Claims the keys of these; `None`: it may run, `Some`: it ends so without running.
    async fn claim(&self, jobs: &[Arc<Job>]) -> Vec<Option<How>> {
        let Some(ledger) = &self.ledger else { unreachable!("checked when the worker was built") };
        let lease_ms = self.lease.ms();
        let requests: Vec<_> = jobs.iter().map(|job| self.claim_request(job, lease_ms)).collect();
        let mut tries = 0;
        let (asked_us, claims) = loop {
            let asked_us = now_us();
            let call = ledger.claim(requests.clone());
            let call = tokio::time::timeout(Duration::from_millis(CLAIM_MS_MAX), call).await;
            let unanswered = StoreError::OutcomeUnknown("the ledger did not answer in time".into());
            match call.unwrap_or(Err(unanswered)) {
                // The same owner asking again gets the same claim.
                Err(StoreError::OutcomeUnknown(_)) if tries < CLAIM_TRIES => {
                    tokio::time::sleep(Duration::from_millis(fastrand::u64(5..=20 << tries))).await;
                    tries += 1;
                }
                claims => break (asked_us, claims),
            }
        };
        let claims = match claims {
            Ok(claims) => claims,
            Err(error) => return self.fail_closed(jobs.len(), &error),
        };
        self.ledger_failures.store(0, Ordering::Relaxed);
        let mut verdicts = Vec::with_capacity(jobs.len());
        for (job, claim) in jobs.iter().zip(claims) {
            let verdict = self.verdict(job, asked_us, claim);
            if verdict.is_none() && !self.env.hooks.none() {
                self.env.hooks.pass(Point::AfterClaim).await;
            }
            verdicts.push(verdict);
        }
        verdicts
    }

    fn claim_request(&self, job: &Job, lease_ms: u64) -> ClaimRequest {
        let run = self.claims.fetch_add(1, Ordering::Relaxed);
        let owner = Owner::new(format!("{}/{run}", self.consumer)).expect("a consumer's name fits");
        // A ledger elsewhere knows nothing of the delivery.
        let queue = self.own_ledger.then(|| self.queue.clone()).flatten();
        let delivery = queue.map(|queue| (queue, job.delivery.receipt.clone()));
        ClaimRequest {
            fingerprint: Some(job.fingerprint()),
            on_doubt: self.policy.on_doubt,
            delivery,
            ..ClaimRequest::new(job.entry().clone(), owner, lease_ms)
        }
    }

    fn verdict(&self, job: &Job, asked_us: u64, claim: Result<Claim, ClaimError>) -> Option<How> {
        match claim {
            Ok(Claim::Granted(grant)) => {
                if grant.takeover {
                    self.stats.takeovers.add();
                }
                job.granted(asked_us, grant);
                None
            }
            Ok(Claim::Completed { outcome, .. }) => {
                self.stats.replayed.add();
                Some(decide::replay(&outcome))
            }
            Ok(Claim::InProgress { retry_after_ms }) => {
                self.stats.deferred.add();
                Some(How::Defer { after_ms: retry_after_ms })
            }
            Ok(Claim::InDoubt { .. }) => {
                self.stats.parked.add();
                let reason = format!(
                    "what became of the effect of {} is in doubt; resolve the ledger's entry, then release this",
                    job.entry()
                );
                Some(How::Park { reason })
            }
            Err(ClaimError::Mismatch) => {
                self.stats.mismatches.add();
                self.stats.rejected.add();
                Some(decide::mismatch(job.delivery.key.as_str()))
            }
            Err(error) => self.fail_closed(1, &StoreError::Invalid(error.to_string())).pop().flatten(),
        }
    }

    /// The ledger cannot be asked: nothing runs; everything goes back for a while, uncounted.
    fn fail_closed(&self, count: usize, error: &StoreError) -> Vec<Option<How>> {
        let failures = self.ledger_failures.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%error, deliveries = count, "the ledger cannot be asked; deliveries are put back");
        self.stats.fail_closed.add_many(count);
        let ceiling_ms = (500u64 << failures.min(6)).min(30_000);
        let put_back = |()| Some(How::Defer { after_ms: fastrand::u64(ceiling_ms / 2..=ceiling_ms) });
        vec![(); count].into_iter().map(put_back).collect()
    }

    /// Ends a delivery whose handler ended.
    fn end(&self, job: Arc<Job>, ended: Ended, tell: Option<oneshot::Sender<Option<Settled>>>) {
        self.count(&job, &ended);
        let ran = ended.ran();
        let decision = self.policy.decide(ended);
        self.finish(job, decision.how, ran.then_some(decision.ending), tell);
    }

    /// Ends a delivery whose handler did not run.
    pub fn end_as(&self, job: Arc<Job>, how: How) {
        self.finish(job, how, None, None);
    }

    /// Puts back a delivery that never got its turn.
    pub fn put_back(&self, job: Arc<Job>) {
        self.end(job, Ended::NotStarted(Stop::Drained), None);
    }

    fn finish(
        &self,
        job: Arc<Job>,
        how: How,
        ending: Option<hapax_core::Ending>,
        tell: Option<oneshot::Sender<Option<Settled>>>,
    ) {
        let observer = self.env.hooks.observer.as_ref();
        let ran = observer.and(ending.clone());
        if self.policy.tier == Tier::AtMostOnce || job.lease.stop() == Some(Stop::Abandoned) {
            job.lease.enter(Phase::Over);
            if let Some(observer) = observer {
                observer.ended(crate::testing::Ran { how, ending: ran, settled: None });
                observer.passed();
            }
            return;
        }
        job.lease.enter(Phase::Settling);
        self.unsettled.fetch_add(1, Ordering::SeqCst);
        // The collector lives as long as the worker; behind that nothing is settled any more.
        let _ = self.finishes.send(Finish { job, how, ending, ran, tell });
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
                tracing::error!(%error, id = %job.delivery.id, "a handler panicked");
                stats.panics.add();
                doubt();
            }
            Ended::Deferred { reason, after_ms } => {
                let (queue, message) = (&self.env.name, job.delivery.id);
                tracing::info!(%queue, %message, after_ms, reason, "a delivery is put back, uncounted");
                stats.deferred.add();
            }
            Ended::Interrupted { .. } | Ended::Stopped(Stop::Drained) => {
                self.put_back.fetch_add(1, Ordering::SeqCst);
                if self.claims() {
                    stats.in_doubt.add();
                }
                stats.deferred.add();
            }
            Ended::InDoubt { .. } | Ended::Stopped(_) => doubt(),
            Ended::NotStarted(stop) => {
                if *stop == Stop::Drained {
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

/// The right of one delivery to run: a slot, and its key's turn. Dropped, it starts who waits for it.
struct Turn {
    slot: Option<Slot>,
    key: Option<String>,
    shared: Arc<WorkerState>,
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (Some(key), Some(limit)) = (self.key.take(), &self.shared.per_key) else { return };
        let Some(job) = limit.next(&key) else { return };
        let turn = Turn { slot: self.slot.take(), key: Some(key), shared: self.shared.clone() };
        let shared = self.shared.clone();
        if shared.abandoned.load(Ordering::SeqCst) || tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        if shared.claims() {
            tokio::spawn(shared.claim_and_live(vec![(job, turn)]));
        } else {
            tokio::spawn(shared.live(job, turn));
        }
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
