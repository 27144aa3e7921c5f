//! An obvious queue store in memory: one lock, linear scans, state kept by whoever holds it.

mod documents;
mod operations;
mod seams;
mod state;

use std::sync::{Arc, Mutex, MutexGuard};

use hapax_core::{Clock, ManualClock};
use state::State;
use tokio::sync::Notify;

pub struct Reference {
    state: Arc<Mutex<State>>,
    clock: Arc<ManualClock>,
    changed: Arc<Notify>,
}

impl Reference {
    pub fn new(clock: Arc<ManualClock>) -> Arc<Self> {
        let state = State { start_ms: clock.wall_ms(), ..State::default() };
        Self::on(Arc::new(Mutex::new(state)), clock)
    }

    /// Another store on the same data.
    #[allow(dead_code, reason = "not every test restarts it")]
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
