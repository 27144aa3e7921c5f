use hapax_core::policy::{self, AfterFailure};
use hapax_core::{FailureCause, RemainingLease, SettleError, Settled, Settlement};

use super::groups::Slot;
use super::{Engine, Undo};
use crate::receipt::DeliveryRef;
use crate::record::{FLAG_DEAD, FLAG_OWN_LEASE, MessageMeta, Record, State, parked_cause};
use crate::time::Now;

impl Engine {
    /// The slot of the message that a receipt names, unless a newer delivery holds it.
    pub(super) fn held(&self, queue: u32, delivery: DeliveryRef) -> Result<Slot, SettleError> {
        if delivery.queue != queue {
            return Err(SettleError::Malformed);
        }
        let table = &self.queue(queue).table;
        let Some(slot) = table.delivered(delivery.seq) else {
            return Err(if self.died(queue, delivery.seq) { SettleError::Dead } else { SettleError::Gone });
        };
        let entry = table.get(slot);
        match parked_cause(entry.flags) {
            _ if entry.fence != delivery.fence && !hapax_core::mutant::is("stale-receipt-accepted") => {
                Err(SettleError::Stale)
            }
            Some(FailureCause::Retry | FailureCause::Expired | FailureCause::Rejected) => {
                Err(SettleError::Dead)
            }
            _ => Ok(slot),
        }
    }

    /// Whether a message of this queue is among its dead letters.
    fn died(&self, queue: u32, seq: u64) -> bool {
        let dead_letter = self.queue(queue).config.dead_letter.as_ref();
        let Some(&target) = dead_letter.and_then(|dead| self.names.get(&dead.queue)) else { return false };
        let table = &self.queue(target).table;
        table.delivered(seq).is_some_and(|slot| table.get(slot).flags & FLAG_DEAD != 0)
    }

    fn held_or_counted(&mut self, queue: u32, delivery: DeliveryRef) -> Result<Slot, SettleError> {
        let held = self.held(queue, delivery);
        if held == Err(SettleError::Stale) {
            self.queue_and_wave(queue).0.totals.stale += 1;
        }
        held
    }

    /// Ends a delivery. `random` is uniform over all `u64` values.
    pub fn settle(
        &mut self,
        now: Now,
        queue: u32,
        delivery: DeliveryRef,
        settlement: &Settlement,
        random: u64,
    ) -> Result<Settled, SettleError> {
        let slot = self.held_or_counted(queue, delivery)?;
        let entry = *self.queue(queue).table.get(slot);
        let fifo = self.queue(queue).config.is_fifo();
        match (settlement, entry.state) {
            // No other delivery holds it, so a late ack still counts. In a FIFO group, later messages may have been
            // delivered since.
            (Settlement::Ack, State::Ready | State::Delayed) if fifo => return Err(SettleError::Expired),
            (Settlement::Ack, State::Ready | State::Delayed) | (_, State::InFlight) => {}
            _ => return Err(SettleError::NotInFlight),
        }
        self.wave.durable = true;
        match settlement {
            Settlement::Ack => {
                self.clear_waits(now, queue, slot);
                let (queue, wave) = self.queue_and_wave(queue);
                queue.delete(wave, slot);
                queue.totals.acked += 1;
                Ok(Settled::Acked)
            }
            Settlement::Retry { after_ms, error } => {
                self.put_back_later_in_group(now, queue, &entry);
                let (queue_ref, wave) = self.queue_and_wave(queue);
                queue_ref.totals.retried += 1;
                // The consumer gave it up: unlike one that ran out of its lease, it cannot be extended any more.
                queue_ref.replace(wave, slot, MessageMeta { received_ms: 0, ..entry });
                Ok(self.fail(now, queue, slot, FailureCause::Retry, error.as_deref(), *after_ms, random))
            }
            Settlement::Defer { after_ms } => {
                self.queue_and_wave(queue).0.totals.deferred += 1;
                self.put_back_later_in_group(now, queue, &entry);
                let after_ms = (*after_ms).min(policy::LEASE_MS_MAX);
                self.wait_behind(queue, slot);
                self.put_back(now, queue, slot, after_ms);
                Ok(Settled::Returned { after_ms })
            }
            Settlement::Reject { reason } => {
                self.put_back_later_in_group(now, queue, &entry);
                let (queue_ref, wave) = self.queue_and_wave(queue);
                let mut entry = entry;
                queue_ref.record_failure(wave, &mut entry, now.ms(), FailureCause::Rejected, Some(reason));
                queue_ref.replace(wave, slot, entry);
                Ok(self.move_to_dead_letters(now, queue, slot, FailureCause::Rejected, Some(reason)))
            }
            Settlement::Park { reason } => {
                self.put_back_later_in_group(now, queue, &entry);
                let (queue_ref, wave) = self.queue_and_wave(queue);
                let mut entry = entry;
                queue_ref.record_failure(wave, &mut entry, now.ms(), FailureCause::InDoubt, Some(reason));
                entry.attempts -= 1;
                queue_ref.replace(wave, slot, entry);
                self.park(now, queue, slot, FailureCause::InDoubt);
                Ok(Settled::Parked)
            }
        }
    }

    /// Changes a lease. Zero returns the message immediately, regardless of the retry policy. On a standard queue an
    /// expired lease can be resumed while no newer delivery holds the message, as in SQS.
    pub fn extend(
        &mut self,
        now: Now,
        queue: u32,
        delivery: DeliveryRef,
        lease_ms: u64,
        own_lease: bool,
    ) -> Result<RemainingLease, SettleError> {
        let slot = self.held_or_counted(queue, delivery)?;
        let mut entry = *self.queue(queue).table.get(slot);
        match entry.state {
            State::InFlight => {}
            // Without the time of its receive, the delivery was given up or taken back: there is none to resume.
            State::Ready | State::Delayed
                if entry.received_ms != 0 && !self.queue(queue).config.is_fifo() =>
            {
                return self.extend_late(now, queue, slot, lease_ms);
            }
            _ => return Err(SettleError::NotInFlight),
        }
        if lease_ms == 0 {
            self.queue_and_wave(queue).0.totals.retried += 1;
            self.fail(now, queue, slot, FailureCause::Retry, None, Some(0), 0);
            return Ok(RemainingLease { lease_ms: 0 });
        }
        entry.due_ms = policy::extend_deadline(entry.received_ms, now.ms(), lease_ms)?;
        if own_lease {
            entry.flags |= FLAG_OWN_LEASE;
        }
        let (queue, wave) = self.queue_and_wave(queue);
        queue.update(wave, slot, entry);
        Ok(RemainingLease { lease_ms: entry.due_ms - now.ms() })
    }

    /// Resumes a delivery whose lease ran out. The failure that was noted then is taken back: it is noted again if the
    /// lease runs out again, so that a delivery has one in the history however often it is resumed.
    fn extend_late(
        &mut self,
        now: Now,
        queue: u32,
        slot: Slot,
        lease_ms: u64,
    ) -> Result<RemainingLease, SettleError> {
        let (queue, wave) = self.queue_and_wave(queue);
        let mut entry = *queue.table.get(slot);
        if lease_ms == 0 {
            (entry.state, entry.due_ms) = (State::Ready, now.ms());
        } else {
            entry.due_ms = policy::extend_deadline(entry.received_ms, now.ms(), lease_ms)?;
            entry.state = State::InFlight;
            wave.records.push(Record::TakeBackFailure { seq: entry.seq, deliveries: entry.deliveries });
        }
        queue.update(wave, slot, entry);
        Ok(RemainingLease { lease_ms: entry.due_ms - now.ms() })
    }

    /// A counted delivery failed: the message is retried or becomes a dead letter.
    #[expect(clippy::too_many_arguments, reason = "a decision's inputs, each of another type")]
    pub(super) fn fail(
        &mut self,
        now: Now,
        queue: u32,
        slot: Slot,
        cause: FailureCause,
        error: Option<&str>,
        asked_ms: Option<u64>,
        random: u64,
    ) -> Settled {
        let (queue_ref, wave) = self.queue_and_wave(queue);
        let mut entry = *queue_ref.table.get(slot);
        queue_ref.record_failure(wave, &mut entry, now.ms(), cause, error);
        let after = policy::after_failure(&queue_ref.config.retry, entry.attempts, asked_ms, random);
        match after {
            AfterFailure::Retry { after_ms } => {
                self.wait_behind(queue, slot);
                let (queue_ref, wave) = self.queue_and_wave(queue);
                entry.state = if after_ms == 0 { State::Ready } else { State::Delayed };
                entry.due_ms = now.ms() + after_ms;
                queue_ref.update(wave, slot, entry);
                Settled::Returned { after_ms }
            }
            AfterFailure::Dead => {
                queue_ref.replace(wave, slot, entry);
                self.move_to_dead_letters(now, queue, slot, cause, error)
            }
        }
    }

    /// Called when a delivery failed or was deferred: its message moves behind the ready ones, or its FIFO group behind
    /// the other groups, so that a message that keeps failing does not starve the others.
    fn wait_behind(&mut self, queue: u32, slot: Slot) {
        let (queue, wave) = self.queue_and_wave(queue);
        let requeue_order = wave.next_seq();
        if queue.config.is_fifo() {
            let group = queue.table.get(slot).group;
            let before = queue.table.groups.set_requeue_order(group, requeue_order);
            wave.journal.push(Undo::GroupRequeueOrder { queue: queue.id, group, before });
        } else {
            let seq = queue.table.get(slot).seq;
            let before = queue.table.set_requeue_order(slot, requeue_order);
            wave.journal.push(Undo::MessageRequeueOrder { queue: queue.id, seq, before });
        }
    }

    /// Puts a message back without counting the attempt. The fence and the number of deliveries stay, because they only
    /// grow. The receive time is cleared, so that the delivery cannot be extended any more.
    pub(super) fn put_back(&mut self, now: Now, queue: u32, slot: Slot, after_ms: u64) {
        let (queue, wave) = self.queue_and_wave(queue);
        let mut entry = *queue.table.get(slot);
        assert_eq!(entry.state, State::InFlight, "only a delivery can be put back");
        entry.attempts -= 1;
        entry.received_ms = 0;
        entry.state = if after_ms == 0 { State::Ready } else { State::Delayed };
        entry.due_ms = now.ms() + after_ms;
        queue.update(wave, slot, entry);
    }

    /// A message of a FIFO batch failed: the messages behind it in its group must not overtake it, so they are put
    /// back.
    pub(super) fn put_back_later_in_group(&mut self, now: Now, queue: u32, failed: &MessageMeta) {
        if !self.queue(queue).config.is_fifo() {
            return;
        }
        for slot in self.queue(queue).table.groups.in_flight_behind(failed.group, failed.order) {
            self.put_back(now, queue, slot, 0);
        }
    }

    /// A lease ended. The batch's lease ends with the first of it: those behind were perhaps never worked on. A delivery
    /// with a lease of its own is no part of a batch any more.
    pub(super) fn put_back_rest_of_batch(&mut self, now: Now, queue: u32, ended: &MessageMeta) {
        if !self.queue(queue).config.is_fifo() || ended.flags & FLAG_OWN_LEASE != 0 {
            return;
        }
        let table = &self.queue(queue).table;
        let mut behind = table.groups.in_flight_behind(ended.group, ended.order);
        behind.retain(|slot| table.get(*slot).flags & FLAG_OWN_LEASE == 0);
        for slot in behind {
            self.put_back(now, queue, slot, 0);
        }
    }
}
