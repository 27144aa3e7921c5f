//! An obvious store in memory: one lock, linear scans. It judges the suites, and stands in where a test needs a store and
//! not its durability.

mod documents;
mod ledger;
mod operations;
mod seams;
mod state;

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use hapax_core::{Capabilities, Clock};
use state::State;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

/// Queues, ledger and documents in memory, behind one lock. What it holds outlives a handle, as a disk would:
/// [`after_restart`](Self::after_restart) gives the store as it is after a restart.
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
    clock: Arc<dyn Clock>,
    changed: Arc<Notify>,
    /// Takes away what the store is not to declare.
    lacks: fn(&mut Capabilities),
}

impl MemoryStore {
    /// An empty store. Its time begins at the clock's wall time and follows the clock's monotonic time.
    pub fn new(clock: Arc<dyn Clock>) -> Arc<Self> {
        let start_ms = clock.wall_ms().saturating_sub(clock.monotonic_us() / 1000);
        let state = State { start_ms, ..State::default() };
        Self::on(Arc::new(Mutex::new(state)), clock, |_| {})
    }

    /// An empty store that declares less than it has: `lacks` takes features away. For tests of what is refused then.
    pub fn lacking(clock: Arc<dyn Clock>, lacks: fn(&mut Capabilities)) -> Arc<Self> {
        let store = Self::new(clock);
        Self::on(Arc::clone(&store.state), Arc::clone(&store.clock), lacks)
    }

    /// The store as it is after a restart: the same data, and counters that begin again.
    pub fn after_restart(&self) -> Arc<Self> {
        let mut state = self.now();
        let now_ms = state.now_ms;
        state.ledger.reopen(now_ms);
        for queue in state.queues.values_mut() {
            queue.totals = hapax_core::store::QueueTotals::default();
        }
        drop(state);
        Self::on(Arc::clone(&self.state), Arc::clone(&self.clock), self.lacks)
    }

    fn on(state: Arc<Mutex<State>>, clock: Arc<dyn Clock>, lacks: fn(&mut Capabilities)) -> Arc<Self> {
        let changed = Arc::new(Notify::new());
        let moved = Arc::clone(&changed);
        clock.on_moved(Arc::new(move || moved.notify_waiters()));
        Arc::new(Self { state, clock, changed, lacks })
    }

    /// The state as of now.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        let now_ms = state.start_ms + self.clock.monotonic_us() / 1000;
        state.tick(now_ms);
        state
    }

    /// The state as of now, about to be changed: calls that wait look again as soon as the lock is free.
    fn change(&self) -> MutexGuard<'_, State> {
        let state = self.now();
        self.changed.notify_waiters();
        state
    }

    /// Waits until something has changed, or for `ms` on a clock that runs by itself.
    async fn wait(&self, changed: Pin<&mut Notified<'_>>, ms: u64) {
        match self.clock.sleep_for(ms.saturating_mul(1000)) {
            Some(real) => drop(tokio::time::timeout(real.max(Duration::from_millis(1)), changed).await),
            None => changed.await,
        }
    }
}
