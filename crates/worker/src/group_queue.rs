//! A FIFO group's deliveries, one after another.

use std::sync::Arc;

use hapax_claim::Phase;
use hapax_core::{Settled, Settlement, Tier};
use tokio::sync::oneshot;

use crate::claiming::{DeliveryAction, WaitPermit};
use crate::cx::Job;
use crate::limits::Slot;
use crate::outcome::{RunResult, StopReason};
use crate::state::WorkerState;

/// What a group queue holds while it is processed: a slot, or a permit to wait for a running duplicate. It has one of
/// them until it ends, so that a worker that drains waits for it.
struct SlotOrPermit {
    slot: Option<Slot>,
    permit: Option<WaitPermit>,
}

/// The next step for a group queue's next delivery.
enum GroupStep {
    Run,
    End(Settlement),
    NotStarted(StopReason),
}

impl WorkerState {
    /// Each delivery is settled before the next starts: what fails is not overtaken.
    pub async fn process_group_queue(self: Arc<Self>, group_queue: Vec<Arc<Job>>, mut slot: Slot) {
        self.after_receive(group_queue.len()).await;
        if !self.hold_unless_draining(&mut slot).await {
            return self.put_back_all(group_queue);
        }
        let mut held = SlotOrPermit { slot: Some(slot), permit: None };
        let mut group_queue = group_queue.into_iter();
        let mut went_back = false;
        for job in group_queue.by_ref() {
            let (reply, settled) = oneshot::channel();
            match self.next_in_group_queue(&job, &mut held).await {
                GroupStep::Run => {
                    let ended = self.run(&job).await;
                    self.end(job, ended, Some(reply));
                }
                GroupStep::End(settlement) => self.queue_settle(job, settlement, None, Some(reply)),
                GroupStep::NotStarted(stop) => self.end(job, RunResult::NotStarted(stop), Some(reply)),
            }
            if self.policy.tier == Tier::AtMostOnce {
                continue;
            }
            match settled.await {
                Ok(Some(Settled::Acked)) => {}
                settled => {
                    // A retry or a deferral has returned those behind it.
                    went_back = matches!(settled, Ok(Some(Settled::Returned { .. })));
                    break;
                }
            }
        }
        for job in group_queue {
            if went_back {
                self.return_token(&job);
                job.lease.set_phase(Phase::Over);
            } else {
                self.stats.deferred.add();
                self.end_as(job, Settlement::Defer { after_ms: 0 });
            }
        }
        drop(held);
    }

    /// Claims the key of a group queue's next delivery, and waits for a running duplicate in another group or worker
    /// without a slot.
    async fn next_in_group_queue(&self, job: &Arc<Job>, held: &mut SlotOrPermit) -> GroupStep {
        let mut action = Some(DeliveryAction::Run);
        if self.claims() {
            action = self.claim(std::slice::from_ref(job), 0).await.pop();
        }
        if let Some(DeliveryAction::WaitForDuplicate { retry_after_ms }) = action {
            if held.permit.is_none() {
                held.permit = self.duplicate_waiters.enter();
            }
            if held.permit.is_none() {
                return GroupStep::End(self.defer_without_wait(job, retry_after_ms));
            }
            drop(held.slot.take());
            self.return_token(job);
            action = self.claim_after_duplicate(job).await;
        }
        match action {
            Some(DeliveryAction::Run) if held.slot.is_some() => GroupStep::Run,
            Some(DeliveryAction::Run) => match self.start_unless_draining(job).await {
                Some(slot) => {
                    *held = SlotOrPermit { slot: Some(slot), permit: None };
                    GroupStep::Run
                }
                None => GroupStep::NotStarted(StopReason::Drained),
            },
            Some(DeliveryAction::End(settlement)) => GroupStep::End(settlement),
            Some(DeliveryAction::WaitForDuplicate { retry_after_ms }) => {
                GroupStep::End(self.defer_behind_duplicate(retry_after_ms))
            }
            None => GroupStep::NotStarted(job.lease.stop().unwrap_or(StopReason::Drained)),
        }
    }
}
