//! Receives that wait for a message. Each has a deadline and nothing polls: the operation that makes a message
//! available serves the receive that has waited longest.

use std::collections::{BTreeMap, BTreeSet};

use crate::engine::ReceiveRequest;
use crate::maps::NumberMap;
use crate::writer::{RawDelivery, Reply};

pub(crate) struct Waiter {
    pub id: u64,
    pub queue: u32,
    pub request: ReceiveRequest,
    pub deadline_ms: u64,
    pub reply: Reply<Vec<RawDelivery>>,
}

#[derive(Default)]
pub(crate) struct Waiters {
    /// By queue, then by id: ids grow, so the first has waited longest.
    queues: NumberMap<u32, BTreeMap<u64, Waiter>>,
    deadlines: BTreeSet<(u64, u64, u32)>,
    by_id: NumberMap<u64, u32>,
}

impl Waiters {
    pub fn add(&mut self, waiter: Waiter) {
        self.deadlines.insert((waiter.deadline_ms, waiter.id, waiter.queue));
        self.by_id.insert(waiter.id, waiter.queue);
        self.queues.entry(waiter.queue).or_default().insert(waiter.id, waiter);
    }

    pub fn any(&self, queue: u32) -> bool {
        self.queues.contains_key(&queue)
    }

    /// Removes and returns the receive of a queue that has waited longest and whose caller still waits.
    pub fn next(&mut self, queue: u32) -> Option<Waiter> {
        loop {
            let id = *self.queues.get(&queue)?.first_key_value()?.0;
            let waiter = self.remove(id)?;
            if !waiter.reply.is_closed() {
                return Some(waiter);
            }
        }
    }

    /// Takes out one of a queue that waits under an attempt id and whose caller is still there.
    pub fn next_attempt(&mut self, queue: u32, attempt_id: &str) -> Option<Waiter> {
        loop {
            let same = |waiter: &&Waiter| waiter.request.attempt_id.as_deref() == Some(attempt_id);
            let id = self.queues.get(&queue)?.values().find(same)?.id;
            let waiter = self.remove(id)?;
            if !waiter.reply.is_closed() {
                return Some(waiter);
            }
        }
    }

    pub fn remove(&mut self, id: u64) -> Option<Waiter> {
        let queue = self.by_id.remove(&id)?;
        let waiting = self.queues.get_mut(&queue)?;
        let waiter = waiting.remove(&id)?;
        if waiting.is_empty() {
            self.queues.remove(&queue);
        }
        self.deadlines.remove(&(waiter.deadline_ms, id, queue));
        Some(waiter)
    }

    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline_ms, ..)| *deadline_ms)
    }

    /// Removes and returns a receive whose deadline has passed.
    pub fn overdue(&mut self, now_ms: u64) -> Option<Waiter> {
        let (_, id, _) = *self.deadlines.first().filter(|(deadline_ms, ..)| *deadline_ms <= now_ms)?;
        self.remove(id)
    }

    pub fn drain(&mut self) -> Vec<Waiter> {
        self.deadlines.clear();
        self.by_id.clear();
        self.queues.drain().flat_map(|(_, waiting)| waiting.into_values()).collect()
    }
}
