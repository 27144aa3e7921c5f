//! Time that a test moves by hand, so that no lease depends on the load of the machine.

use std::sync::Arc;
use std::time::Duration;

use hapax_core::{Clock as _, EntryFilter, EntryState, Ledger, ManualClock, MessageState};

use super::{Rig, until};

pub fn manual_clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at_ms(1_800_000_000_000))
}

/// Runs a future while time passes: one step every two real milliseconds. For waits that need some time to pass,
/// however much.
pub async fn ticking<T>(clock: &ManualClock, step: Duration, future: impl Future<Output = T>) -> T {
    let tick = async {
        loop {
            tokio::time::sleep(Duration::from_millis(2)).await;
            clock.advance_ms(step.as_millis() as u64);
        }
    };
    tokio::select! {
        value = future => value,
        never = tick => never,
    }
}

/// Lets this many leases pass, a sixth at a time; after each step, waits until more than half of the lease is left.
pub async fn pass_leases(clock: &ManualClock, lease: Duration, leases: u32, left_ms: impl AsyncFn() -> u64) {
    let lease_ms = lease.as_millis() as u64;
    for _ in 0..6 * leases {
        clock.advance_ms(lease_ms / 6);
        until("the lease is renewed", async || left_ms().await > lease_ms / 2).await;
    }
}

/// What is left of the claim that ends first; [`u64::MAX`] without one.
pub async fn claim_left_ms(ledger: &dyn Ledger) -> u64 {
    let filter = EntryFilter { limit: 100, ..EntryFilter::default() };
    let entries = ledger.entries(filter).await.unwrap().items;
    let held = entries.into_iter().filter(|entry| entry.state == EntryState::Processing);
    held.map(|entry| entry.lease_ms).min().unwrap_or(u64::MAX)
}

/// Runs a future to its end on a thread of its own, while this thread is blocked.
pub fn block_on_another_thread<F: Future>(future: impl FnOnce() -> F + Send) {
    std::thread::scope(|scope| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        scope.spawn(move || drop(runtime.block_on(future())));
    });
}

impl Rig {
    /// What is left of the delivery whose lease ends first; [`u64::MAX`] without one.
    pub async fn delivery_left_ms(&self, clock: &ManualClock) -> u64 {
        let messages = self.messages(self.queue.as_str()).await.into_iter();
        let held = messages.filter(|message| message.state == MessageState::InFlight);
        held.map(|message| message.due_ms.saturating_sub(clock.wall_ms())).min().unwrap_or(u64::MAX)
    }
}
