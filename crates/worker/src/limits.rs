//! Limits on concurrent runs, and on starts per second.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_claim::Timer;
use hapax_core::Delivery;
use tokio::sync::Notify;

use crate::cx::Job;

/// How many runs may start, and how many deliveries wait until they may.
pub(crate) struct Slots {
    all: usize,
    state: Mutex<SlotCounts>,
    changed: Notify,
}

struct SlotCounts {
    free: usize,
    waiting: usize,
}

impl SlotCounts {
    fn take(&mut self) -> bool {
        let taken = self.free > 0;
        self.free -= usize::from(taken);
        taken
    }
}

impl Slots {
    pub fn new(all: usize) -> Arc<Self> {
        Arc::new(Self {
            all,
            state: Mutex::new(SlotCounts { free: all, waiting: 0 }),
            changed: Notify::new(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many runs may go on at the same time.
    pub fn all(&self) -> usize {
        self.all
    }

    /// How many more deliveries could start at once: those that wait come first.
    pub fn room(&self) -> usize {
        let state = self.lock();
        state.free.saturating_sub(state.waiting)
    }

    /// Takes a slot if one is free; otherwise a place among those that wait for one.
    pub fn enter(self: &Arc<Self>) -> Slot {
        let mut state = self.lock();
        let held = state.take();
        state.waiting += usize::from(!held);
        Slot { slots: self.clone(), held }
    }

    async fn wait_until(&self, holds: impl Fn(&mut SlotCounts) -> bool) {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if holds(&mut self.lock()) {
                return;
            }
            changed.await;
        }
    }

    pub async fn wait_for_room(&self) {
        self.wait_until(|state| state.free > state.waiting).await;
    }

    /// Nothing runs, and nothing waits to run.
    pub fn all_free(&self) -> bool {
        self.room() == self.all
    }

    pub async fn wait_for_all(&self) {
        self.wait_until(|state| state.free == self.all && state.waiting == 0).await;
    }
}

/// The right of one run, or of one batch, to continue, or a place among those that wait for it; given up when dropped.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    held: bool,
}

impl Slot {
    pub fn is_held(&self) -> bool {
        self.held
    }

    /// Waits until the slot may be used.
    pub async fn hold(&mut self) {
        if !self.held {
            let take = |state: &mut SlotCounts| {
                let taken = state.take();
                state.waiting -= usize::from(taken);
                taken
            };
            self.slots.wait_until(take).await;
            self.held = true;
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.slots.lock();
        if self.held {
            state.free += 1;
        } else {
            state.waiting -= 1;
        }
        drop(state);
        self.slots.changed.notify_waiters();
    }
}

/// Maximum number of starts per second, evenly spread: a burst is at most a tenth of a second's worth.
pub(crate) struct Rate {
    per_us: f64,
    burst: f64,
    state: Mutex<(f64, u64)>,
    given_back: Notify,
}

impl Rate {
    pub fn new(per_second: f64, now_us: u64) -> Self {
        let burst = (per_second / 10.0).max(1.0);
        Self {
            per_us: per_second / 1e6,
            burst,
            state: Mutex::new((burst, now_us)),
            given_back: Notify::new(),
        }
    }

    /// Takes up to `max` starts. If there is none, the error is the time of the next one.
    pub fn take(&self, max: usize, now_us: u64) -> Result<usize, u64> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (tokens, then_us) = &mut *state;
        *tokens = (*tokens + now_us.saturating_sub(*then_us) as f64 * self.per_us).min(self.burst);
        *then_us = now_us;
        let taken = tokens.floor().min(max as f64);
        if taken < 1.0 {
            return Err(now_us + ((1.0 - *tokens) / self.per_us).ceil() as u64);
        }
        *tokens -= taken;
        Ok(taken as usize)
    }

    /// Takes up to `max`, and waits until there is at least one.
    pub async fn acquire(&self, max: usize, timer: &Timer) -> usize {
        loop {
            let given_back = self.given_back.notified();
            tokio::pin!(given_back);
            given_back.as_mut().enable();
            match self.take(max, timer.now_us()) {
                Ok(taken) => return taken,
                Err(at_us) => tokio::select! {
                    () = timer.sleep_until(at_us) => {}
                    () = given_back => {}
                },
            }
        }
    }

    pub fn give_back(&self, unused: usize) {
        if unused > 0 {
            self.state.lock().unwrap_or_else(PoisonError::into_inner).0 += unused as f64;
            self.given_back.notify_waiters();
        }
    }
}

/// The key that a delivery counts for; `None`: it is not limited.
pub(crate) type KeyOf = Arc<dyn Fn(&Delivery) -> Option<String> + Send + Sync>;

/// Maximum number of concurrent runs per key.
pub(crate) struct PerKey {
    of: KeyOf,
    max: usize,
    waiting_max: usize,
    state: Mutex<KeyCounts>,
}

#[derive(Default)]
struct KeyCounts {
    running: HashMap<String, usize>,
    waiting: HashMap<String, VecDeque<Arc<Job>>>,
    waiting_count: usize,
}

/// Whether a delivery may start.
pub(crate) enum Admission {
    Free,
    Permit(String),
    /// It is queued, and starts when its turn comes.
    Queued,
    /// Too many deliveries are already waiting.
    Refused,
}

impl PerKey {
    pub fn new(of: KeyOf, max: usize, waiting_max: usize) -> Self {
        Self { of, max, waiting_max, state: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, KeyCounts> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn admit(&self, job: &Arc<Job>) -> Admission {
        let Some(key) = (self.of)(&job.delivery) else { return Admission::Free };
        let mut keys = self.lock();
        let running = keys.running.entry(key.clone()).or_default();
        if *running < self.max {
            *running += 1;
            return Admission::Permit(key);
        }
        if keys.waiting_count >= self.waiting_max {
            return Admission::Refused;
        }
        keys.waiting.entry(key).or_default().push_back(job.clone());
        keys.waiting_count += 1;
        Admission::Queued
    }

    /// Call this when a run of the key has ended. The delivery that has waited longest takes over its permit; without
    /// one the permit is freed.
    pub fn next(&self, key: &str) -> Option<Arc<Job>> {
        let mut keys = self.lock();
        if let Some(queue) = keys.waiting.get_mut(key) {
            let next = queue.pop_front();
            if queue.is_empty() {
                keys.waiting.remove(key);
            }
            if next.is_some() {
                keys.waiting_count -= 1;
                return next;
            }
        }
        if let Some(running) = keys.running.get_mut(key) {
            *running -= 1;
            if *running == 0 {
                keys.running.remove(key);
            }
        }
        None
    }

    pub fn is_waiting(&self) -> bool {
        self.lock().waiting_count > 0
    }

    /// Removes and returns all waiting deliveries.
    pub fn give_up(&self) -> Vec<Arc<Job>> {
        let mut keys = self.lock();
        keys.waiting_count = 0;
        keys.waiting.drain().flat_map(|(_, queue)| queue).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_kept_in_every_window() {
        let rate = Rate::new(50.0, 0);
        let mut starts = Vec::new();
        let mut now_us = 0;
        while now_us < 4_000_000 {
            match rate.take(3, now_us) {
                Ok(taken) => starts.extend(vec![now_us; taken]),
                Err(at_us) => {
                    assert!(at_us > now_us, "it asks again later");
                    now_us = at_us;
                }
            }
        }
        for from in &starts {
            let in_window = starts.iter().filter(|at| (*from..from + 1_000_000).contains(at)).count();
            assert!(in_window <= 56, "{in_window} starts within a second");
        }
        assert!((200..=206).contains(&starts.len()), "{}", starts.len());
    }

    #[test]
    fn what_was_not_used_is_given_back() {
        let rate = Rate::new(10.0, 0);
        assert_eq!(rate.take(5, 0), Ok(1));
        rate.give_back(1);
        assert_eq!(rate.take(5, 0), Ok(1));
        assert_eq!(rate.take(5, 0), Err(100_000));
    }
}
