//! A FIFO group's deliveries, one after another.

use std::sync::Arc;

use hapax_claim::Phase;
use hapax_core::{Settled, Settlement, Tier};
use tokio::sync::oneshot;

use crate::claiming::{TwinSeat, Verdict};
use crate::cx::Job;
use crate::limits::Slot;
use crate::outcome::{Ended, StopReason};
use crate::state::WorkerState;

/// By what right a lane is there: a slot, or a seat among those that wait for a twin. It has one of them until it ends, so
/// that a worker that drains waits for it.
struct Place {
    slot: Option<Slot>,
    seat: Option<TwinSeat>,
}

/// What becomes of a lane's next delivery.
enum Next {
    Run,
    End(Settlement),
    NotStarted(StopReason),
}

impl WorkerState {
    /// Each delivery is settled before the next starts: what fails is not overtaken.
    pub async fn process_lane(self: Arc<Self>, lane: Vec<Arc<Job>>, mut slot: Slot) {
        self.after_receive(lane.len()).await;
        if !self.hold_unless_draining(&mut slot).await {
            return self.put_back_all(lane);
        }
        let mut place = Place { slot: Some(slot), seat: None };
        let mut lane = lane.into_iter();
        let mut went_back = false;
        for job in lane.by_ref() {
            let (tell, told) = oneshot::channel();
            match self.next_in_lane(&job, &mut place).await {
                Next::Run => {
                    let ended = self.run(&job).await;
                    self.end(job, ended, Some(tell));
                }
                Next::End(settlement) => self.finish(job, settlement, None, Some(tell)),
                Next::NotStarted(stop) => self.end(job, Ended::NotStarted(stop), Some(tell)),
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
                self.return_token(&job);
                job.lease.set_phase(Phase::Over);
            } else {
                self.stats.deferred.add();
                self.end_as(job, Settlement::Defer { after_ms: 0 });
            }
        }
        drop(place);
    }

    /// Claims the key of a lane's next delivery, and waits for a twin in another group or worker without a slot.
    async fn next_in_lane(&self, job: &Arc<Job>, place: &mut Place) -> Next {
        let mut verdict = Some(Verdict::Run);
        if self.claims() {
            verdict = self.claim(std::slice::from_ref(job), 0).await.pop();
        }
        if let Some(Verdict::Twin { retry_after_ms }) = verdict {
            if place.seat.is_none() {
                place.seat = self.twins.enter();
            }
            if place.seat.is_none() {
                return Next::End(self.defer_unwaited(job, retry_after_ms));
            }
            drop(place.slot.take());
            self.return_token(job);
            verdict = self.claim_behind_twin(job).await;
        }
        match verdict {
            Some(Verdict::Run) if place.slot.is_some() => Next::Run,
            Some(Verdict::Run) => match self.start_unless_draining(job).await {
                Some(slot) => {
                    *place = Place { slot: Some(slot), seat: None };
                    Next::Run
                }
                None => Next::NotStarted(StopReason::Drained),
            },
            Some(Verdict::End(settlement)) => Next::End(settlement),
            Some(Verdict::Twin { retry_after_ms }) => Next::End(self.defer_behind_twin(retry_after_ms)),
            None => Next::NotStarted(job.lease.stop().unwrap_or(StopReason::Drained)),
        }
    }
}
