//! An obvious store in memory: one lock, linear scans. It judges the suites, and stands in where a test needs a store and
//! not its durability.

mod documents;
mod operations;
mod seams;
mod state;

use std::sync::{Arc, Mutex, MutexGuard};

use hapax_core::{Clock, ManualClock};
use state::State;
use tokio::sync::Notify;

/// Queues and documents in memory, on a clock that is moved by hand.
///
/// ```
/// # use std::sync::Arc;
/// # use hapax_core::{ManualClock, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive};
/// # tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(async {
/// let store = hapax_conformance::MemoryStore::new(Arc::new(ManualClock::at_ms(1_700_000_000_000)));
/// let orders = QueueName::new("orders")?;
/// store.create_queue(&orders, QueueConfig::default()).await?;
/// store.send(&orders, vec![NewMessage::new("order 1")]).await?;
/// assert_eq!(store.receive(&orders, Receive::up_to(10)).await?.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # }).unwrap();
/// ```
pub struct MemoryStore {
    state: Arc<Mutex<State>>,
    clock: Arc<ManualClock>,
    changed: Arc<Notify>,
}

impl MemoryStore {
    /// An empty store.
    pub fn new(clock: Arc<ManualClock>) -> Arc<Self> {
        let state = State { start_ms: clock.wall_ms(), ..State::default() };
        Self::on(Arc::new(Mutex::new(state)), clock)
    }

    /// The store as it is after a restart: the same data, and counters that begin again.
    pub fn reopened(&self) -> Arc<Self> {
        let mut state = self.state.lock().unwrap();
        for queue in state.queues.values_mut() {
            queue.totals = hapax_core::store::QueueTotals::default();
        }
        drop(state);
        Self::on(Arc::clone(&self.state), Arc::clone(&self.clock))
    }

    fn on(state: Arc<Mutex<State>>, clock: Arc<ManualClock>) -> Arc<Self> {
        let changed = Arc::new(Notify::new());
        let moved = Arc::clone(&changed);
        clock.on_moved(Arc::new(move || moved.notify_waiters()));
        Arc::new(Self { state, clock, changed })
    }

    /// The state as of now; whoever waits looks again afterwards.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        let now_ms = state.start_ms + self.clock.monotonic_us() / 1000;
        state.tick(now_ms);
        state
    }
}
