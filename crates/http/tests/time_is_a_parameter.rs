//! The layer on a clock that is moved by hand: nothing here waits for a lease.

mod common;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use common::{Client, Gate, serve, until};
use hapax_conformance::MemoryStore;
use hapax_core::{EntryFilter, Ledger as _, ManualClock};
use hapax_http::{IdempotencyLayer, Policy};

#[tokio::test]
async fn a_claim_is_renewed_and_a_run_is_bounded_by_the_clock_that_was_given() {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let ledger = MemoryStore::new(clock.clone());
    let run_max = Duration::from_mins(10);
    let policy = Policy { lease: Duration::from_mins(1), wait: Duration::ZERO, run_max, ..Policy::default() };
    let builder = IdempotencyLayer::builder("shop", ledger.clone()).policy(policy).clock(clock.clone());
    let layer = builder.build().unwrap();
    let gate = Gate::closed();
    let held = gate.clone();
    let router = Router::new().fallback(any(move || async move { format!("call {}", held.pass().await) }));
    let to = serve(router.layer(layer.clone())).await;
    let call = tokio::spawn(async move { Client::new().post(to, "/orders", "k", "{}").await });
    gate.wait(1).await;
    let left_ms = async || {
        let filter = EntryFilter { limit: 1, ..EntryFilter::default() };
        ledger.entries(filter).await.unwrap().items[0].lease_ms
    };
    // Half a lease at a time, and the heartbeat renews it each time.
    for _ in 0..10 {
        clock.advance_ms(30_000);
        let deadline = std::time::Instant::now() + common::SOON;
        while left_ms().await < 60_000 {
            assert!(std::time::Instant::now() < deadline, "it is not renewed");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    assert!(!call.is_finished(), "five minutes are less than its limit");
    assert_eq!(Client::new().post(to, "/orders", "k", "{}").await.problem(), "in-progress");
    assert_eq!((gate.arrived(), layer.counters().ended_in_doubt), (1, 0));
    clock.advance_ms(300_000);
    let answer = call.await.unwrap();
    assert!([502, 504].contains(&answer.status.as_u16()), "{}", answer.text());
    until("it is in doubt", || layer.counters().ended_in_doubt == 1).await;
}
