//! Settles ended deliveries. A collector groups those that are ready: an idle worker does not wait, and a busy one
//! needs fewer calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hapax_claim::{EndError, LeasedItem as _, Phase};
use hapax_core::{
    ClaimEnding, EndClaim, EntryId, MessageId, Settle, SettleError, Settled, Settlement, StoreError,
};
use tokio::sync::{mpsc, oneshot};

use crate::cx::Job;
use crate::point::Point;
use crate::state::WorkerState;

/// Maximum number of settles in one call.
const BATCH_MAX: usize = 256;
/// How long a settle is retried. After that it is abandoned, and the message returns when its lease ends.
const SETTLE_MS_MAX: u64 = 60_000;
/// Timeout of one call.
const CALL_MS_MAX: u64 = 30_000;

/// An ended delivery.
pub(crate) struct Finish {
    pub job: Arc<Job>,
    pub settlement: Settlement,
    /// How its claim ends, if it has one that has not ended yet.
    pub ending: Option<ClaimEnding>,
    /// How the claim of a run was meant to end, for the observer of a trial.
    pub ran: Option<ClaimEnding>,
    /// Receives the effect of the settle; `None` if it failed.
    pub tell: Option<oneshot::Sender<Option<Settled>>>,
}

/// Settles until all senders are dropped.
pub(crate) async fn collect(shared: Arc<WorkerState>, mut finishes: mpsc::UnboundedReceiver<Finish>) {
    let mut batch = Vec::new();
    while finishes.recv_many(&mut batch, BATCH_MAX).await > 0 {
        if batch.len() < BATCH_MAX / 4 {
            // Lets other tasks end first, to settle them in the same call; costs nothing if there are none.
            tokio::task::yield_now().await;
            while batch.len() < BATCH_MAX
                && let Ok(more) = finishes.try_recv()
            {
                batch.push(more);
            }
        }
        shared.settle(std::mem::take(&mut batch)).await;
    }
}

/// A delivery that is not settled yet.
struct Open {
    finish: Finish,
    /// A settle for it was sent without an answer: it may have taken effect.
    unknown: bool,
}

impl WorkerState {
    async fn settle(&self, batch: Vec<Finish>) {
        let count = batch.len();
        if !self.env.hooks.none() {
            for _ in &batch {
                self.env.hooks.pass(Point::BeforeSettle).await;
            }
        }
        let mut open: Vec<Open> = batch.into_iter().map(|finish| Open { finish, unknown: false }).collect();
        if !self.same_store {
            self.end_claims(&mut open).await;
            if !self.env.hooks.none() {
                for _ in open.iter().filter(|one| one.finish.job.claim().is_some()) {
                    self.env.hooks.pass(Point::AfterComplete).await;
                }
            }
        }
        let deadline_us = self.timer().now_us() + SETTLE_MS_MAX * 1000;
        let mut tries = 0;
        while !open.is_empty() {
            open = self.settle_once(open, tries, deadline_us).await;
            tries += 1;
        }
        self.unsettled.fetch_sub(count, Ordering::SeqCst);
        self.settled.notify_one();
        if !self.env.hooks.none() {
            for _ in 0..count {
                self.env.hooks.pass(Point::AfterSettle).await;
            }
        }
        if let Some(observer) = &self.env.hooks.observer {
            observer.passed();
        }
    }

    /// Makes one call; returns the settles to send again.
    async fn settle_once(&self, mut open: Vec<Open>, tries: u32, deadline_us: u64) -> Vec<Open> {
        let settles = open.iter().map(|one| self.as_settle(&one.finish)).collect();
        let call = self.timer().timeout(CALL_MS_MAX, self.source.settle(settles)).await;
        let unanswered = || Err(StoreError::OutcomeUnknown("the store did not answer in time".into()));
        let error = match call.unwrap_or_else(unanswered) {
            Ok(answers) => {
                let parked: Vec<_> = open.iter().zip(&answers).filter_map(parked).collect();
                if !self.same_store {
                    self.release_decided(parked).await;
                }
                let answered = open.drain(..).zip(answers);
                return answered.filter_map(|(one, answer)| self.answered(one, answer)).collect();
            }
            Err(error) => error,
        };
        if !error.is_retryable() && open.len() > 1 {
            // One of them is invalid; settle each on its own, so that the others succeed.
            let mut again = Vec::new();
            for one in open {
                again.append(&mut Box::pin(self.settle_once(vec![one], tries, deadline_us)).await);
            }
            return again;
        }
        let give_up = !error.is_retryable() || self.timer().now_us() > deadline_us || self.is_abandoned();
        if give_up {
            tracing::error!(%error, deliveries = open.len(), "deliveries could not be settled; they return by their lease");
            self.stats.settle_failures.add_many(open.len());
            for one in open {
                self.over(one.finish, None, Some(error.to_string()));
            }
            return Vec::new();
        }
        self.stats.settle_repeats.add_many(open.len());
        let unknown = matches!(error, StoreError::OutcomeUnknown(_));
        for one in &mut open {
            one.unknown |= unknown;
        }
        self.pause(tries).await;
        open
    }

    fn as_settle(&self, finish: &Finish) -> Settle {
        let claim = self.same_store.then(|| claim_end(finish)).flatten();
        let receipt = finish.job.delivery.receipt.clone();
        // A store with a ledger of its own would look for the entry there.
        let in_doubt = self.same_store && matches!(finish.settlement, Settlement::Park { .. });
        let parked_for = in_doubt.then(|| finish.job.entry().clone());
        Settle { receipt, settlement: finish.settlement.clone(), claim, parked_for }
    }

    /// The ledger is elsewhere: whoever resolved a key before its message was parked did not find it there, and nothing
    /// would wake it. So the ledger is asked again.
    async fn release_decided(&self, parked: Vec<(EntryId, MessageId)>) {
        let Some(claims) = &self.claims else { return };
        let mut decided = Vec::new();
        for (entry, message) in parked {
            match claims.is_in_doubt(&entry).await {
                Ok(true) => {}
                Ok(false) => decided.push(message),
                Err(error) => {
                    tracing::warn!(%error, %entry, message_id = %message, "whether a parked message is still in doubt cannot be told");
                }
            }
        }
        if decided.is_empty() {
            return;
        }
        let (queue, count) = (&self.env.name, decided.len());
        match self.timer().timeout(CALL_MS_MAX, self.source.release(decided)).await {
            Some(Ok(())) => tracing::info!(%queue, count, "parked messages go on: their doubt was over"),
            Some(Err(error)) => {
                tracing::error!(%queue, count, %error, "parked messages whose doubt is over could not be released; release them");
            }
            None => tracing::error!(%queue, count, "the release of parked messages was not answered in time"),
        }
    }

    /// Handles one result; returns a settle to send instead, if any.
    fn answered(&self, one: Open, answer: Result<Settled, SettleError>) -> Option<Open> {
        let Open { finish, unknown } = one;
        match answer {
            Ok(settled) => {
                self.near_expiry(&finish.job);
                log_failure(&finish, settled);
                self.over(finish, Some(settled), None);
                None
            }
            Err(SettleError::Claim(error)) if finish.ending.is_some() => {
                self.stats.stale_settles.add();
                tracing::warn!(%error, id = %finish.job.delivery.id, "an outcome was refused: the claim passed to another holder");
                // The next delivery finds the outcome of the other holder.
                let settlement = Settlement::Defer { after_ms: 0 };
                Some(Open { finish: Finish { settlement, ending: None, ..finish }, unknown })
            }
            Err(
                error @ (SettleError::Gone
                | SettleError::Stale
                | SettleError::NotInFlight
                | SettleError::Dead),
            ) if unknown => {
                // Only an acked message is gone. In any other case the messages behind it in its group must not
                // continue.
                let acked = finish.settlement == Settlement::Ack && error == SettleError::Gone;
                self.over(finish, acked.then_some(Settled::Acked), Some(error.to_string()));
                None
            }
            Err(error) => {
                self.stats.stale_settles.add();
                tracing::warn!(%error, id = %finish.job.delivery.id, "a settle was refused");
                self.over(finish, None, Some(error.to_string()));
                None
            }
        }
    }

    fn near_expiry(&self, job: &Job) {
        let fifth_us = self.lease.ms() * 1000 / 5;
        if job.lease.until_us() < self.timer().now_us() + fifth_us {
            self.stats.near_expiry.add();
        }
    }

    /// The ledger is in another store: claims end before their deliveries are settled. A stale token prevents the ack.
    async fn end_claims(&self, open: &mut [Open]) {
        let Some(claims) = &self.claims else { return };
        let (mut places, mut ends) = (Vec::new(), Vec::new());
        for (at, one) in open.iter().enumerate() {
            if let Some(end) = claim_end(&one.finish) {
                places.push(at);
                ends.push(end);
            }
        }
        if ends.is_empty() {
            return;
        }
        for (at, answer) in places.into_iter().zip(claims.end(ends).await) {
            let finish = &mut open[at].finish;
            match answer {
                Ok(()) => {}
                Err(EndError::Unrecorded(error)) => {
                    // Without a recorded outcome an ack would lose it; the message comes back and finds the key in
                    // progress, then in doubt.
                    tracing::error!(%error, message_id = %finish.job.delivery.id, "an outcome could not be recorded");
                    self.stats.fail_closed.add();
                    finish.settlement = Settlement::Defer { after_ms: self.lease.ms() };
                }
                Err(error) => {
                    self.stats.stale_settles.add();
                    tracing::warn!(%error, message_id = %finish.job.delivery.id, "an outcome was refused: the claim passed to another holder");
                    finish.settlement = Settlement::Defer { after_ms: 0 };
                }
            }
        }
    }

    /// Waits before a retry: 20 ms, doubled up to 2 s, with jitter.
    async fn pause(&self, tries: u32) {
        let ceiling_ms = (20u64 << tries.min(7)).min(2_000);
        self.timer().sleep_ms(fastrand::u64(ceiling_ms / 2..=ceiling_ms)).await;
    }

    fn is_abandoned(&self) -> bool {
        self.abandoned.load(Ordering::SeqCst)
    }

    /// Completes the processing of a delivery.
    fn over(&self, finish: Finish, settled: Option<Settled>, error: Option<String>) {
        if let Some(observer) = &finish.job.env.hooks.observer {
            let (settlement, ending) = (finish.settlement.clone(), finish.ran.clone());
            observer.ended(crate::testing::Ran { settlement, ending, settled });
        }
        finish.job.lease.set_phase(Phase::Over);
        if settled.is_some() && finish.ending.is_some() {
            finish.job.mark_claim_used();
        }
        self.settled(&finish.job, &finish.settlement, settled, error);
        if let Some(tell) = finish.tell {
            // The lane may have ended already.
            let _ = tell.send(settled);
        }
    }
}

/// The entry and the message, if it was parked.
fn parked((one, answer): (&Open, &Result<Settled, SettleError>)) -> Option<(EntryId, MessageId)> {
    let job = &one.finish.job;
    (*answer == Ok(Settled::Parked) && matches!(one.finish.settlement, Settlement::Park { .. }))
        .then(|| (job.entry().clone(), job.delivery.id))
}

/// How the claim of a delivery ends, if it has one.
fn claim_end(finish: &Finish) -> Option<EndClaim> {
    let ((id, token), ending) = (finish.job.claim()?, finish.ending.clone()?);
    Some(EndClaim { id: id.clone(), token: token.clone(), ending })
}

/// Logs one line for each failed attempt: the message, the cause, and the next step.
fn log_failure(finish: &Finish, settled: Settled) {
    let (Settlement::Retry { error: Some(error), .. }
    | Settlement::Reject { reason: error }
    | Settlement::Park { reason: error }) = &finish.settlement
    else {
        return;
    };
    let delivery = &finish.job.delivery;
    let (queue, message, attempt) = (&finish.job.env.name, delivery.id, delivery.attempt);
    match settled {
        Settled::Returned { after_ms } => {
            tracing::warn!(%queue, message_id = %message, attempt, error, next_try_ms = after_ms, "an attempt failed; it is tried again");
        }
        Settled::Dead => {
            tracing::warn!(%queue, message_id = %message, attempt, error, "an attempt failed; the message went to the dead letters");
        }
        Settled::Parked => {
            tracing::warn!(%queue, message_id = %message, attempt, error, "an attempt failed; the message is parked until it is released");
        }
        Settled::Acked => {}
    }
}
