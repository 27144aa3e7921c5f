//! Settles ended deliveries. A collector groups those that are ready: an idle worker does not wait, and a busy one
//! needs fewer calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use hapax_claim::{EndError, LeasedItem as _, Phase};
use hapax_core::{
    Attribute, ClaimEnding, EndClaim, InboxError, Settle, SettleError, Settled, Settlement, StoreError,
};
use tokio::sync::{mpsc, oneshot};

use crate::cx::{InTransaction, Job};
use crate::point::Point;
use crate::state::WorkerState;

/// Maximum number of settles in one call.
const BATCH_MAX: usize = 256;
/// How long a settle is retried. After that it is abandoned, and the message returns when its lease ends.
const SETTLE_MS_MAX: u64 = 60_000;
/// Timeout of one call.
const CALL_MS_MAX: u64 = 30_000;

/// An ended delivery.
pub(crate) struct EndedDelivery {
    pub job: Arc<Job>,
    pub settlement: Settlement,
    /// How its claim ends, if it has one that has not ended yet.
    pub ending: Option<ClaimEnding>,
    /// How the claim of a run was meant to end, for the observer of a trial.
    pub ran: Option<ClaimEnding>,
    /// Receives the effect of the settle; `None` if it failed.
    pub reply: Option<oneshot::Sender<Option<Settled>>>,
}

/// Settles until all senders are dropped.
pub(crate) async fn collect(
    state: Arc<WorkerState>,
    mut ended_deliveries: mpsc::UnboundedReceiver<EndedDelivery>,
) {
    let mut batch = Vec::new();
    while ended_deliveries.recv_many(&mut batch, BATCH_MAX).await > 0 {
        if batch.len() < BATCH_MAX / 4 {
            // Lets other tasks end first, to settle them in the same call; costs nothing if there are none.
            tokio::task::yield_now().await;
            while batch.len() < BATCH_MAX
                && let Ok(more) = ended_deliveries.try_recv()
            {
                batch.push(more);
            }
        }
        state.settle(std::mem::take(&mut batch)).await;
    }
}

/// A delivery that is not settled yet.
struct UnsettledDelivery {
    ended: EndedDelivery,
    /// A settle for it was sent without an answer: it may have taken effect.
    unknown: bool,
}

impl WorkerState {
    async fn settle(&self, batch: Vec<EndedDelivery>) {
        let count = batch.len();
        if !self.env.hooks.is_empty() {
            for _ in &batch {
                self.env.hooks.pass(Point::BeforeSettle).await;
            }
        }
        let mut unsettled: Vec<UnsettledDelivery> = Vec::with_capacity(count);
        for ended in batch {
            let unknown = ended.job.is_settled(InTransaction::Unknown);
            let settled = ended.job.is_settled(InTransaction::Yes);
            let one = UnsettledDelivery { ended, unknown };
            if settled {
                // The transaction of its run has settled it.
                self.answered(self.timer().now_us(), one, Ok(Settled::Acked));
            } else {
                unsettled.push(one);
            }
        }
        if !self.same_store {
            self.end_claims(&mut unsettled).await;
            if !self.env.hooks.is_empty() {
                for _ in unsettled.iter().filter(|one| one.ended.job.claim().is_some()) {
                    self.env.hooks.pass(Point::AfterComplete).await;
                }
            }
        }
        let deadline_us = self.timer().now_us() + SETTLE_MS_MAX * 1000;
        let mut tries = 0;
        while !unsettled.is_empty() {
            unsettled = self.settle_once(unsettled, tries, deadline_us).await;
            tries += 1;
        }
        self.unsettled.fetch_sub(count, Ordering::SeqCst);
        self.settled.notify_one();
        if !self.env.hooks.is_empty() {
            for _ in 0..count {
                self.env.hooks.pass(Point::AfterSettle).await;
            }
        }
        if let Some(observer) = &self.env.hooks.observer {
            observer.passed();
        }
    }

    /// Makes one call; returns the settles to send again.
    async fn settle_once(
        &self,
        mut unsettled: Vec<UnsettledDelivery>,
        tries: u32,
        deadline_us: u64,
    ) -> Vec<UnsettledDelivery> {
        let settles = unsettled.iter().map(|one| self.as_settle(&one.ended)).collect();
        let call = self.timer().timeout(CALL_MS_MAX, self.source.settle(settles)).await;
        let unanswered = || Err(StoreError::OutcomeUnknown("the store did not respond in time".into()));
        let error = match call.unwrap_or_else(unanswered) {
            Ok(answers) => {
                if !self.same_store {
                    self.release_decided(unsettled.iter().zip(&answers).filter_map(parked)).await;
                }
                let now_us = self.timer().now_us();
                let answered = unsettled.drain(..).zip(answers);
                return answered.filter_map(|(one, answer)| self.answered(now_us, one, answer)).collect();
            }
            Err(error) => error,
        };
        if !error.is_retryable() && unsettled.len() > 1 {
            // One of them is invalid; settle each on its own, so that the others succeed.
            let mut again = Vec::new();
            for one in unsettled {
                again.append(&mut Box::pin(self.settle_once(vec![one], tries, deadline_us)).await);
            }
            return again;
        }
        let give_up = !error.is_retryable() || self.timer().now_us() > deadline_us || self.is_abandoned();
        if give_up {
            tracing::error!(%error, deliveries = unsettled.len(), "deliveries could not be settled; they return by their lease");
            self.stats.settle_failures.add_many(unsettled.len());
            for one in unsettled {
                self.complete(one.ended, None, Some(error.to_string()));
            }
            return Vec::new();
        }
        self.stats.settle_repeats.add_many(unsettled.len());
        let unknown = matches!(error, StoreError::OutcomeUnknown(_));
        for one in &mut unsettled {
            one.unknown |= unknown;
        }
        self.pause(tries).await;
        unsettled
    }

    fn as_settle(&self, ended: &EndedDelivery) -> Settle {
        let claim = self.same_store.then(|| claim_end(ended)).flatten();
        let receipt = ended.job.delivery.receipt.clone();
        // A store with a ledger of its own would look for the entry there.
        let here = self.same_store || ended.job.ledger_here.load(Ordering::SeqCst);
        let in_doubt = here && matches!(ended.settlement, Settlement::Park { .. });
        let parked_for = in_doubt.then(|| ended.job.entry().clone());
        Settle { receipt, settlement: ended.settlement.clone(), claim, parked_for }
    }

    /// The ledger is elsewhere: an operator who resolved a key before its message was parked did not find it there, and nothing
    /// would wake it. So the ledger is asked again.
    async fn release_decided(&self, parked: impl Iterator<Item = &Arc<Job>>) {
        let mut decided = Vec::new();
        for job in parked {
            let (entry, message) = (job.entry(), job.delivery.id);
            match self.is_in_doubt(job).await {
                Ok(true) => {}
                Ok(false) => decided.push(message),
                Err(error) => {
                    tracing::warn!(error, %entry, message_id = %message, "whether a parked message is still in doubt cannot be told");
                }
            }
        }
        if decided.is_empty() {
            return;
        }
        let (queue, count) = (&self.env.name, decided.len());
        match self.timer().timeout(CALL_MS_MAX, self.source.release(decided)).await {
            Some(Ok(())) => tracing::info!(%queue, count, "parked messages continue: their doubt was over"),
            Some(Err(error)) => {
                tracing::error!(%queue, count, %error, "parked messages whose doubt is over could not be released; release them");
            }
            None => tracing::error!(%queue, count, "the release of parked messages was not answered in time"),
        }
    }

    /// Asks the ledger, or the inbox of a transactional handler. The inbox is asked again while it cannot be reached.
    async fn is_in_doubt(&self, job: &Arc<Job>) -> Result<bool, String> {
        if let Some(claims) = &self.claims {
            return claims.is_in_doubt(job.entry()).await.map_err(|error| error.to_string());
        }
        let Some(ask) = self.handler.asks_doubt() else { return Ok(true) };
        let asked = async {
            let mut tries = 0;
            loop {
                match ask(job).await {
                    Ok(in_doubt) => return Ok(in_doubt),
                    Err(error @ (InboxError::Unavailable(_) | InboxError::Locked { .. })) => {
                        tracing::info!(%error, entry = %job.entry(), "a doubt is looked up again");
                    }
                    Err(error) => return Err(error.to_string()),
                }
                self.pause(tries).await;
                tries += 1;
            }
        };
        let unanswered = || Err("the database did not answer in time".to_owned());
        self.timer().timeout(CALL_MS_MAX, asked).await.unwrap_or_else(unanswered)
    }

    /// Handles one result; returns a settle to send instead, if any.
    fn answered(
        &self,
        now_us: u64,
        one: UnsettledDelivery,
        answer: Result<Settled, SettleError>,
    ) -> Option<UnsettledDelivery> {
        let UnsettledDelivery { ended, unknown } = one;
        match answer {
            Ok(settled) => {
                self.near_expiry(now_us, &ended.job);
                log_failure(&ended, settled);
                self.complete(ended, Some(settled), None);
                None
            }
            Err(SettleError::Claim(error)) if ended.ending.is_some() => {
                self.stats.stale_settles.add();
                tracing::warn!(%error, id = %ended.job.delivery.id, "an outcome was refused: the claim passed to another holder");
                // The next delivery finds the outcome of the other holder.
                let settlement = Settlement::Defer { after_ms: 0 };
                Some(UnsettledDelivery {
                    ended: EndedDelivery { settlement, ending: None, ..ended },
                    unknown,
                })
            }
            Err(
                error @ (SettleError::Gone
                | SettleError::Stale
                | SettleError::NotInFlight
                | SettleError::Dead),
            ) if unknown => {
                // Only an acked message is gone. In any other case the messages behind it in its group must not
                // continue.
                let acked = ended.settlement == Settlement::Ack && error == SettleError::Gone;
                self.complete(ended, acked.then_some(Settled::Acked), Some(error.to_string()));
                None
            }
            Err(error) => {
                self.stats.stale_settles.add();
                tracing::warn!(%error, id = %ended.job.delivery.id, "a settle was refused");
                self.complete(ended, None, Some(error.to_string()));
                None
            }
        }
    }

    fn near_expiry(&self, now_us: u64, job: &Job) {
        let fifth_us = self.lease.ms() * 1000 / 5;
        if job.lease.until_us() < now_us + fifth_us {
            self.stats.near_expiry.add();
        }
    }

    /// The ledger is in another store: claims end before their deliveries are settled. A stale token prevents the ack.
    async fn end_claims(&self, unsettled: &mut [UnsettledDelivery]) {
        let Some(claims) = &self.claims else { return };
        let (mut places, mut ends) = (Vec::new(), Vec::new());
        for (at, one) in unsettled.iter().enumerate() {
            if let Some(end) = claim_end(&one.ended) {
                places.push(at);
                ends.push(end);
            }
        }
        if ends.is_empty() {
            return;
        }
        for (at, answer) in places.into_iter().zip(claims.end(ends).await) {
            let ended = &mut unsettled[at].ended;
            match answer {
                Ok(()) => {}
                Err(EndError::Unrecorded(error)) => {
                    // Without a recorded outcome an ack would lose it; the message comes back and finds the key in
                    // progress, then in doubt.
                    tracing::error!(%error, message_id = %ended.job.delivery.id, "an outcome could not be recorded");
                    self.stats.fail_closed.add();
                    ended.settlement = Settlement::Defer { after_ms: self.lease.ms() };
                }
                Err(error) => {
                    self.stats.stale_settles.add();
                    tracing::warn!(%error, message_id = %ended.job.delivery.id, "an outcome was refused: the claim passed to another holder");
                    ended.settlement = Settlement::Defer { after_ms: 0 };
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
    fn complete(&self, ended: EndedDelivery, settled: Option<Settled>, error: Option<String>) {
        if let Some(observer) = &ended.job.env.hooks.observer {
            let (settlement, ending) = (ended.settlement.clone(), ended.ran.clone());
            observer.ended(crate::testing::TrialRun { settlement, ending, settled });
        }
        ended.job.lease.set_phase(Phase::Over);
        if settled.is_some() && ended.ending.is_some() {
            ended.job.mark_claim_used();
        }
        self.settled(&ended.job, &ended.settlement, settled, error);
        if let Some(reply) = ended.reply {
            // The group queue may have ended already.
            let _ = reply.send(settled);
        }
    }
}

/// The delivery, if its message was parked and its store did not compare that with the entry.
fn parked<'a>((one, answer): (&'a UnsettledDelivery, &Result<Settled, SettleError>)) -> Option<&'a Arc<Job>> {
    let job = &one.ended.job;
    let elsewhere = !job.ledger_here.load(Ordering::SeqCst);
    let parked = *answer == Ok(Settled::Parked) && matches!(one.ended.settlement, Settlement::Park { .. });
    (parked && elsewhere).then_some(job)
}

/// How the claim of a delivery ends, if it has one.
fn claim_end(ended: &EndedDelivery) -> Option<EndClaim> {
    let ((id, token), ending) = (ended.job.claim()?, ended.ending.clone()?);
    Some(EndClaim { id: id.clone(), token: token.clone(), ending })
}

/// Logs one line for each failed attempt: the message, the cause, and the next step.
fn log_failure(ended: &EndedDelivery, settled: Settled) {
    let (Settlement::Retry { error: Some(error), .. }
    | Settlement::Reject { reason: error }
    | Settlement::Park { reason: error }) = &ended.settlement
    else {
        return;
    };
    let delivery = &ended.job.delivery;
    let (queue, message, attempt) = (&ended.job.env.name, delivery.id, delivery.attempt);
    let traceparent =
        delivery.attributes.get(hapax_core::outbox::TRACEPARENT_HEADER).and_then(Attribute::as_text);
    match settled {
        Settled::Returned { after_ms } => {
            tracing::warn!(%queue, message_id = %message, attempt, traceparent, error, next_try_ms = after_ms, "an attempt failed; it is tried again");
        }
        Settled::Dead => {
            tracing::warn!(%queue, message_id = %message, attempt, traceparent, error, "an attempt failed; the message went to the dead letters");
        }
        Settled::Parked => {
            tracing::warn!(%queue, message_id = %message, attempt, traceparent, error, "an attempt failed; the message is parked until it is released");
        }
        Settled::Acked => {}
    }
}
