use hapax_core::{FailureCause, policy};

use super::Engine;
use super::groups::Slot;
use crate::receipt::DeliveryRef;
use crate::record::{FLAG_OWN_LEASE, MessageMeta, State};
use crate::time::Now;

/// A receive as the engine sees it: all defaults are filled in, and the caller does the waiting.
#[derive(Debug, Clone)]
pub(crate) struct ReceiveRequest {
    pub max: usize,
    pub lease_ms: Option<u64>,
    pub consumer: Option<std::sync::Arc<str>>,
    pub ack_on_receive: bool,
    pub attempt_id: Option<String>,
}

/// A delivery that was just made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Leased {
    pub delivery: DeliveryRef,
    pub entry: MessageMeta,
}

/// The most bytes that one receive hands out, but for a single message: bodies are held in memory on their way.
const RECEIVE_BYTES_MAX: u64 = 16 * 1024 * 1024;

impl Engine {
    /// Leases up to `max` messages. Messages without attempts left are moved to the dead letters instead.
    pub fn receive(&mut self, now: Now, queue: u32, request: &ReceiveRequest) -> Vec<Leased> {
        let again = self.receive_again(now, queue, request);
        if !again.is_empty() {
            return again;
        }
        if self.queue(queue).paused.is_some() {
            return Vec::new();
        }
        let mut leased = Vec::new();
        let mut bytes = 0;
        while leased.len() < request.max && bytes < RECEIVE_BYTES_MAX {
            let room = self.in_flight_room(queue).min((request.max - leased.len()) as u64) as usize;
            let next = self.queue(queue).table.groups.next(room);
            if next.is_empty() || room == 0 {
                break;
            }
            let spent = |slot: Slot| {
                let queue = self.queue(queue);
                queue.max_attempts().is_some_and(|max| queue.table.get(slot).attempts >= max)
            };
            // The limit was lowered while a message waited. It becomes a dead letter when its turn comes, not while
            // messages ahead of it are handed out: otherwise halting its group would take those back at once.
            if spent(next[0]) {
                self.move_to_dead_letters(now, queue, next[0], FailureCause::Retry, None);
                continue;
            }
            let fit =
                next.iter().take(self.batch_max(queue, next[0])).take_while(|slot| !spent(**slot)).count();
            for slot in &next[..fit] {
                bytes += u64::from(self.queue(queue).table.get(*slot).bytes);
                if bytes > RECEIVE_BYTES_MAX && !leased.is_empty() {
                    break;
                }
                leased.push(self.lease(now, queue, *slot, request));
            }
        }
        leased
    }

    /// Maximum number of messages that one receive may take from a group whose first message is `head`. On a queue with
    /// a limit on attempts, a head that has failed is delivered alone. A crash counts as an attempt of the first
    /// message of a batch, regardless of which one caused it, and healthy messages must not become dead letters because
    /// of a poison message in their batch.
    fn batch_max(&self, queue: u32, head: Slot) -> usize {
        let queue = self.queue(queue);
        let failed = queue.table.get(head).attempts > 0;
        match queue.max_attempts() {
            Some(limit) if queue.config.is_fifo() && (failed || limit == 1) => 1,
            _ => usize::MAX,
        }
    }

    fn lease(&mut self, now: Now, queue: u32, slot: Slot, request: &ReceiveRequest) -> Leased {
        let (queue, wave) = self.queue_and_wave(queue);
        let mut entry = *queue.table.get(slot);
        assert_eq!(entry.state, State::Ready, "only a ready message is leased");
        let repeats = hapax_core::mutant::is("delivery-fence-repeated") && entry.fence > 0;
        let fence = if repeats { entry.fence } else { wave.next_fence(now) };
        assert!(fence > entry.fence || repeats, "fences only grow");
        entry.fence = fence;
        entry.attempts += 1;
        entry.deliveries += 1;
        entry.state = State::InFlight;
        entry.flags &= !FLAG_OWN_LEASE;
        entry.received_ms = now.ms();
        entry.due_ms = policy::lease_deadline(now.ms(), request.lease_ms.unwrap_or(queue.config.lease_ms));
        if entry.first_ms == 0 {
            entry.first_ms = now.ms();
        }
        queue.totals.delivered += 1;
        if request.ack_on_receive {
            // In memory only: `ack_leased` follows in the same wave, once the body was found to be sound.
            queue.replace(wave, slot, entry);
        } else {
            let is_cut = hapax_core::mutant::is("lease-cut-short");
            let due_ms = if is_cut { entry.received_ms.midpoint(entry.due_ms) } else { entry.due_ms };
            queue.update(wave, slot, MessageMeta { due_ms, ..entry });
            if let Some(consumer) = &request.consumer {
                queue.holders.insert(entry.seq, consumer.clone());
            }
        }
        Leased { delivery: DeliveryRef { queue: queue.id, seq: entry.seq, fence }, entry }
    }

    /// Acks what was just leased for an `ack_on_receive`: gone before it is handed out, and durably so. It may be lost
    /// but never repeated.
    pub fn ack_leased(&mut self, now: Now, delivery: DeliveryRef) {
        let slot = self.held(delivery.queue, delivery).expect("it was leased in this wave");
        self.clear_waits(now, delivery.queue, slot);
        let (queue, wave) = self.queue_and_wave(delivery.queue);
        queue.delete(wave, slot);
        queue.totals.acked += 1;
        wave.durable = true;
    }

    /// Whether a delivery still holds its message.
    pub fn is_current(&self, delivery: DeliveryRef) -> bool {
        let in_flight = |slot| self.queue(delivery.queue).table.get(slot).state == State::InFlight;
        self.held(delivery.queue, delivery).is_ok_and(in_flight)
    }

    /// How many more messages of the queue can be in flight.
    pub fn in_flight_room(&self, queue: u32) -> u64 {
        policy::IN_FLIGHT_MAX.saturating_sub(self.queue(queue).table.counts().in_flight)
    }

    /// Takes back a delivery whose receiver went away before it saw it: neither the attempt nor the delivery counts for the
    /// message. The queue's counter stays: counters only grow.
    pub fn give_back(&mut self, now: Now, delivery: DeliveryRef) {
        let queue = self.queues.get(delivery.queue as usize).and_then(Option::as_ref);
        if queue.is_none_or(|queue| queue.is_closed()) {
            return;
        }
        if let Ok(slot) = self.held(delivery.queue, delivery)
            && self.queue(delivery.queue).table.get(slot).state == State::InFlight
        {
            let (queue, wave) = self.queue_and_wave(delivery.queue);
            let mut entry = *queue.table.get(slot);
            entry.deliveries -= 1;
            queue.replace(wave, slot, entry);
            self.put_back(now, delivery.queue, slot, 0);
        }
    }
}
