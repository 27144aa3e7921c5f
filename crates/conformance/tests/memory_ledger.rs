//! The ledger suite against the smallest ledger that keeps the protocol, beside queues of another store.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness, MemoryLedger, MemoryStore};
use hapax_core::{Ledger, ManualClock, QueueAdmin};

struct Beside {
    clock: Arc<ManualClock>,
    store: Arc<MemoryStore>,
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

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(self.store())
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        self.ledger()
    }

    async fn quiet(&self) {}

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

    fn exact_time(&self) -> bool {
        true
    }
}

struct LedgersBeside;

#[async_trait]
impl Factory for LedgersBeside {
    async fn fresh(&self) -> Box<dyn Harness> {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let ledger = Arc::new(MemoryLedger::new(clock.clone()));
        Box::new(Beside { store: MemoryStore::new(Arc::clone(&clock)), clock, ledger })
    }
}

/// It does not survive its process, its fences start again with it, and the queues are in another store.
const SKIPS: &[&str] = &[
    "l00_operators::entries_are_counted_after_a_crash",
    "l02_claims::a_claim_survives_a_crash",
    "l02_claims::each_answer_of_many_rounds_survives_a_crash",
    "l03_leases::an_open_claim_gets_a_full_lease_after_a_restart",
    "l03_leases::what_was_in_doubt_stays_so_after_a_crash",
    "l03_leases::a_claim_that_stands_long_in_a_stopped_store_is_held_when_it_opens",
    "l04_tokens::a_stale_token_stays_stale_after_a_crash",
    "l05_doubt::a_resolution_survives_a_crash",
    "l05_doubt::a_takeover_survives_a_crash",
    "l06_settle::*",
    "l07_fences::fences_grow_through_restarts_and_crashes",
    "l07_fences::fences_grow_when_the_wall_clock_was_set_back",
    "l09_fingerprints::a_fingerprint_survives_takeover_and_crash",
    "l13_retention::a_time_that_was_over_while_the_store_was_down_is_over",
    "l13_retention::the_entry_of_a_live_message_is_kept",
    "l13_retention::the_entry_of_an_acked_message_is_kept_for_its_time",
    "l13_retention::the_entry_of_a_dead_letter_is_kept",
    "l13_retention::a_redrive_clears_a_final_failure",
    "l13_retention::a_redrive_keeps_what_was_completed",
    "l13_retention::a_redrive_leaves_a_doubt_to_be_resolved",
    "l13_retention::a_redrive_that_leaves_a_letter_leaves_its_entry",
];

fn main() -> ExitCode {
    hapax_conformance::main(LedgersBeside, &[hapax_conformance::ledger_cases()], SKIPS)
}
