//! The ledger suite against the smallest ledger that keeps the protocol, beside queues of another store.

mod reference;

use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness, MemoryLedger};
use hapax_core::{Ledger, ManualClock, QueueAdmin};
use reference::Reference;

struct Beside {
    clock: Arc<ManualClock>,
    store: Arc<Reference>,
    ledger: Arc<MemoryLedger>,
}

#[async_trait]
impl Harness for Beside {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        Arc::clone(&self.store) as Arc<dyn QueueAdmin>
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::clone(&self.ledger) as Arc<dyn Ledger>)
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
    }

    async fn restart(&mut self) {
        unreachable!("the ledger does not say that it survives its process")
    }

    async fn crash(&mut self) {
        self.restart().await;
    }

    fn fast_time(&self) -> bool {
        true
    }
}

struct LedgersBeside;

#[async_trait]
impl Factory for LedgersBeside {
    async fn fresh(&self) -> Box<dyn Harness> {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let ledger = Arc::new(MemoryLedger::new(clock.clone()));
        Box::new(Beside { store: Reference::new(Arc::clone(&clock)), clock, ledger })
    }
}

hapax_conformance::ledger_suite!(LedgersBeside);
