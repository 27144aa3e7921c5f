//! What this member holds: records that are locked for it, from the fetch to the acknowledgement.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::{Delivery, Receipt, Settled, StoreError};
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::record::SharedRecord;

/// How long a receive lasts that is not to wait: the time for one answer of each broker.
const ROUND_MAX: Duration = Duration::from_secs(10);
/// How often a receive looks whether all brokers have answered.
const LOOK_MIN: Duration = Duration::from_millis(20);
/// Settled deliveries whose result is kept for a settle that is repeated.
const ANSWERED_MAX: usize = 4_096;

/// A partition of a topic, by the topic's id.
pub(super) type Partition = (Uuid, i32);

/// Where a record is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Place {
    pub partition: Partition,
    pub offset: i64,
}

/// A share session: one connection to one broker. Its locks end with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct SessionId {
    pub node: i32,
    /// Grows with every session of this source.
    pub generation: u64,
}

/// A record that is locked for this member.
pub(super) struct Held {
    pub receipt: Receipt,
    pub place: Place,
    pub session: SessionId,
    pub record: SharedRecord,
    /// As the broker counts them, this one included.
    pub delivery_count: u32,
    /// The ordinal of the attempt.
    pub attempt: u32,
    /// All deliveries, those included that the broker did not count.
    pub deliveries: u32,
    /// When the lock ends, counted from before it was asked for.
    until: Mutex<Instant>,
    /// A copy of it is in another topic already.
    pub copied: AtomicBool,
}

impl Held {
    pub fn new(
        receipt: Receipt,
        place: Place,
        session: SessionId,
        record: SharedRecord,
        delivery_count: u32,
        until: Instant,
    ) -> Self {
        let (attempts_before, deliveries_before) = record.before;
        Self {
            receipt,
            place,
            session,
            record,
            delivery_count,
            attempt: attempts_before.saturating_add(delivery_count),
            deliveries: deliveries_before.saturating_add(delivery_count),
            until: Mutex::new(until),
            copied: AtomicBool::new(false),
        }
    }

    /// The same record for another delivery under the same lock.
    pub fn again(&self, receipt: Receipt) -> Self {
        Self {
            receipt,
            place: self.place,
            session: self.session,
            record: self.record.clone(),
            delivery_count: self.delivery_count,
            attempt: self.attempt,
            deliveries: self.deliveries.saturating_add(1),
            until: Mutex::new(self.until()),
            copied: AtomicBool::new(self.copied.load(Ordering::SeqCst)),
        }
    }

    pub fn until(&self) -> Instant {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock was renewed by a request that was sent at this time.
    pub fn renewed(&self, sent: Instant, lock: Duration) {
        *self.until.lock().unwrap_or_else(PoisonError::into_inner) = sent + lock;
    }

    pub fn left_ms(&self) -> u64 {
        u64::try_from(self.until().saturating_duration_since(Instant::now()).as_millis()).unwrap_or(u64::MAX)
    }
}

/// Fetches of a broker.
#[derive(Debug, Clone, Copy, Default)]
struct Fetches {
    begun: u64,
    ended: u64,
}

#[derive(Default)]
struct State {
    /// How many deliveries a receive waits for.
    wanted: usize,
    /// Records that can be delivered, and since when they wait.
    ready: VecDeque<(Arc<Held>, Instant)>,
    /// Delivered and not settled.
    delivered: HashMap<Receipt, Arc<Held>>,
    /// Everything that is locked.
    held: HashMap<Place, Arc<Held>>,
    /// Delivered, but no longer locked: their handlers have to stop.
    revoked: Vec<Receipt>,
    /// Results of settles, for repeated ones.
    answered: HashMap<Receipt, Settled>,
    answered_order: VecDeque<Receipt>,
    /// By broker.
    fetches: BTreeMap<i32, Fetches>,
    /// Partitions were assigned, and their leaders are known.
    is_assigned: bool,
    /// The last failure that another attempt may mend.
    problem: Option<String>,
    /// Nothing can be received any more.
    fatal: Option<StoreError>,
    lock: Duration,
}

/// Shared by the source and its thread.
pub(super) struct Shared {
    state: Mutex<State>,
    /// Something arrived for a receive.
    arrived: Notify,
    /// A receive waits, or a session has to look for something else.
    pub demand: tokio::sync::watch::Sender<u64>,
    revoked: Notify,
}

impl Shared {
    pub fn new(lock_ms: u64) -> Self {
        let lock = Duration::from_millis(lock_ms);
        Self {
            state: Mutex::new(State { lock, ..State::default() }),
            arrived: Notify::new(),
            demand: tokio::sync::watch::Sender::new(0),
            revoked: Notify::new(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the sessions look at what is wanted.
    pub fn wake_sessions(&self) {
        self.demand.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// The next deliveries. If the future is dropped, what arrives meanwhile waits for the next call.
    pub async fn next(&self, max: usize, wait: Duration) -> Result<Vec<Delivery>, StoreError> {
        let start = Instant::now();
        let begun: BTreeMap<i32, u64> =
            self.state().fetches.iter().map(|(node, fetches)| (*node, fetches.begun)).collect();
        let _demand = Demand(self);
        loop {
            let arrived = self.arrived.notified();
            tokio::pin!(arrived);
            arrived.as_mut().enable();
            {
                let mut state = self.state();
                if let Some(error) = &state.fatal {
                    return Err(error.clone());
                }
                let taken = state.take(max);
                if !taken.is_empty() {
                    return Ok(taken);
                }
                let asked = state.is_assigned
                    && state
                        .fetches
                        .iter()
                        .all(|(node, fetches)| fetches.ended > begun.get(node).copied().unwrap_or(0));
                let waited = start.elapsed();
                if waited >= wait && (asked || waited >= ROUND_MAX) {
                    return match state.problem.clone().filter(|_| !asked) {
                        Some(problem) => Err(StoreError::Unavailable(problem)),
                        None if state.is_assigned => Ok(Vec::new()),
                        None => Err(StoreError::Unavailable("no partitions are assigned yet".into())),
                    };
                }
                state.wanted = max;
            }
            self.wake_sessions();
            let next_look = wait.saturating_sub(start.elapsed()).clamp(LOOK_MIN, ROUND_MAX);
            let _ = tokio::time::timeout(next_look, arrived).await;
        }
    }

    pub async fn revoked(&self) -> Vec<Receipt> {
        loop {
            let revoked = self.revoked.notified();
            tokio::pin!(revoked);
            revoked.as_mut().enable();
            let receipts = std::mem::take(&mut self.state().revoked);
            if !receipts.is_empty() {
                return receipts;
            }
            revoked.await;
        }
    }

    /// How many records a session may fetch now, of those that are wanted of all sessions.
    pub fn share(&self, sessions: usize) -> usize {
        let state = self.state();
        if state.fatal.is_some() {
            return 0;
        }
        state.wanted.saturating_sub(state.ready.len()).div_ceil(sessions.max(1))
    }

    pub fn lock(&self) -> Duration {
        self.state().lock
    }

    /// The lock's time, as a broker has told it.
    pub fn set_lock(&self, lock_ms: i32) {
        if let Some(lock_ms) = u64::try_from(lock_ms).ok().filter(|ms| *ms > 0) {
            self.state().lock = Duration::from_millis(lock_ms);
        }
    }

    pub fn fetch_begins(&self, node: i32) {
        if let Some(fetches) = self.state().fetches.get_mut(&node) {
            fetches.begun += 1;
        }
    }

    /// A broker has answered.
    pub fn fetch_ended(&self, node: i32) {
        let mut state = self.state();
        if let Some(fetches) = state.fetches.get_mut(&node) {
            fetches.ended = fetches.begun;
        }
        state.problem = None;
        drop(state);
        self.arrived.notify_waiters();
    }

    /// These are the brokers that are asked.
    pub fn assigned(&self, nodes: &[i32]) {
        let mut state = self.state();
        state.is_assigned = true;
        state.fetches.retain(|node, _| nodes.contains(node));
        for node in nodes {
            state.fetches.entry(*node).or_default();
        }
        drop(state);
        self.arrived.notify_waiters();
    }

    pub fn has_problem(&self, problem: String) {
        tracing::warn!(problem, "a share group's broker cannot be worked with; trying again");
        self.state().problem = Some(problem);
    }

    pub fn fails(&self, error: StoreError) {
        tracing::error!(%error, "the share group cannot be worked on");
        self.state().fatal.get_or_insert(error);
        self.arrived.notify_waiters();
    }

    /// A record was locked. If it was locked before, that lock has ended.
    pub fn acquired(&self, held: &Arc<Held>) {
        let mut state = self.state();
        let Some(before) = state.held.insert(held.place, held.clone()) else { return };
        state.forget_delivery(&before);
        drop(state);
        self.revoked.notify_waiters();
    }

    /// It can be delivered.
    pub fn is_ready(&self, held: Arc<Held>) {
        let mut state = self.state();
        if state.is_held(&held) {
            state.ready.push_back((held, Instant::now()));
            drop(state);
            self.arrived.notify_waiters();
        }
    }

    /// Another delivery takes over the lock of this one. `None`: it is no longer locked.
    pub fn replace(&self, held: &Arc<Held>, receipt: Receipt) -> Option<Arc<Held>> {
        let mut state = self.state();
        if !state.is_held(held) {
            return None;
        }
        let again = Arc::new(held.again(receipt));
        state.held.insert(held.place, again.clone());
        Some(again)
    }

    pub fn is_held(&self, held: &Arc<Held>) -> bool {
        self.state().is_held(held)
    }

    pub fn delivered(&self, receipt: &Receipt) -> Option<Arc<Held>> {
        self.state().delivered.get(receipt).cloned()
    }

    /// The result of a settle that is repeated.
    pub fn answered(&self, receipt: &Receipt) -> Option<Settled> {
        self.state().answered.get(receipt).copied()
    }

    /// It was settled; its lock may be held on.
    pub fn settled(&self, held: &Held, settled: Settled) {
        let mut state = self.state();
        state.delivered.remove(&held.receipt);
        if state.answered.insert(held.receipt.clone(), settled).is_none() {
            state.answered_order.push_back(held.receipt.clone());
        }
        while state.answered_order.len() > ANSWERED_MAX {
            if let Some(oldest) = state.answered_order.pop_front() {
                state.answered.remove(&oldest);
            }
        }
    }

    /// It is no longer locked for us, because we gave it up, or because the broker says so.
    pub fn released(&self, held: &Arc<Held>) {
        let mut state = self.state();
        state.delivered.remove(&held.receipt);
        if state.is_held(held) {
            state.held.remove(&held.place);
        }
    }

    /// Locks have ended: those of a session, or only those of one of its partitions.
    pub fn lost(&self, session: SessionId, partition: Option<Partition>) {
        let mut state = self.state();
        let is_lost = |held: &Held| {
            held.session == session && partition.is_none_or(|partition| held.place.partition == partition)
        };
        let lost: Vec<_> = state.held.values().filter(|held| is_lost(held)).cloned().collect();
        for held in &lost {
            state.held.remove(&held.place);
            state.forget_delivery(held);
        }
        drop(state);
        if !lost.is_empty() {
            tracing::warn!(records = lost.len(), broker = session.node, "locks of a share group have ended");
            self.revoked.notify_waiters();
        }
    }

    /// Records that no receive has taken within this time; they are not ready any more.
    pub fn unwanted(&self, patience: Duration) -> Vec<Arc<Held>> {
        let mut state = self.state();
        let now = Instant::now();
        let mut unwanted = Vec::new();
        state.ready.retain(|(held, since)| {
            let stays = now.saturating_duration_since(*since) < patience;
            if !stays {
                unwanted.push(held.clone());
            }
            stays
        });
        unwanted
    }
}

impl State {
    fn is_held(&self, held: &Arc<Held>) -> bool {
        self.held.get(&held.place).is_some_and(|known| Arc::ptr_eq(known, held))
    }

    /// Its handler has to stop, if it has one.
    fn forget_delivery(&mut self, held: &Arc<Held>) {
        if self.delivered.remove(&held.receipt).is_some() {
            self.revoked.push(held.receipt.clone());
        }
        self.ready.retain(|(ready, _)| !Arc::ptr_eq(ready, held));
    }

    fn take(&mut self, max: usize) -> Vec<Delivery> {
        let count = max.min(self.ready.len());
        let taken: Vec<_> = self.ready.drain(..count).map(|(held, _)| held).collect();
        taken
            .into_iter()
            .map(|held| {
                let delivery = held.record.delivery(&held);
                self.delivered.insert(held.receipt.clone(), held);
                delivery
            })
            .collect()
    }
}

/// While it lives, records are fetched.
struct Demand<'a>(&'a Shared);

impl Drop for Demand<'_> {
    fn drop(&mut self) {
        self.0.state().wanted = 0;
    }
}
