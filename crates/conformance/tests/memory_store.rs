//! The suites against a store that is obvious and keeps everything in memory: the cases do not contradict each other.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness, MemoryStore};
use hapax_core::store::SharedStore;
use hapax_core::{Documents, Ledger, ManualClock, QueueAdmin};

struct InMemory {
    clock: Arc<ManualClock>,
    store: Arc<MemoryStore>,
}

#[async_trait]
impl Harness for InMemory {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        Arc::clone(&self.store) as Arc<dyn QueueAdmin>
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(Arc::clone(&self.store) as Arc<dyn Documents>)
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::clone(&self.store) as Arc<dyn Ledger>)
    }

    fn whole(&self) -> Option<SharedStore> {
        Some(self.store.clone())
    }

    fn second_whole(&self) -> Option<SharedStore> {
        self.whole()
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(self.store())
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        self.ledger()
    }

    async fn quiet(&self) {
        // The runtime has one thread: calls that were woken have looked again.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
    }

    async fn restart(&mut self) {
        self.store = self.store.after_restart();
    }

    async fn crash(&mut self) {
        self.restart().await;
    }

    fn fast_time(&self) -> bool {
        true
    }

    fn exact_time(&self) -> bool {
        true
    }

    fn can_set_wall_back(&self) -> bool {
        true
    }

    fn set_wall_back(&self, ms: u64) {
        use hapax_core::Clock as _;
        self.clock.set_wall_ms(self.clock.wall_ms() - ms);
    }
}

struct InMemoryStores;

#[async_trait]
impl Factory for InMemoryStores {
    async fn fresh(&self) -> Box<dyn Harness> {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        Box::new(InMemory { store: MemoryStore::new(clock.clone()), clock })
    }
}

/// What is in memory is not moved to another store.
const SKIPS: &[&str] = &["p13_transfer::*", "p14_copy::*"];

fn main() -> ExitCode {
    hapax_conformance::main(
        InMemoryStores,
        &[
            hapax_conformance::cases(),
            hapax_conformance::ledger_cases(),
            hapax_conformance::document_cases(),
            hapax_conformance::observed_cases(),
        ],
        SKIPS,
    )
}
