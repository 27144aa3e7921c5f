//! The ledger fails before, during and after a run; compared with the usual middleware.
#![cfg(feature = "proxy")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use common::naive::{self, Naive};
use common::outage::SwitchedLedger;
use common::proxied::{Proxied, with_policy};
use common::{Client, Gate, Store, serve, until};
use hapax_core::{EntryFilter, Ledger};
use hapax_http::{OnOutage, Policy};

fn gated(gate: &Arc<Gate>) -> Router {
    let gate = gate.clone();
    Router::new().fallback(any(move || async move { format!("call {}", gate.pass().await) }))
}

async fn proxied(policy: Policy, gate: &Arc<Gate>) -> (Store, Arc<SwitchedLedger>, Proxied) {
    let store = Store::new();
    let ledger = SwitchedLedger::new(store.ledger());
    let proxy = Proxied::router(gated(gate), ledger.clone(), with_policy(policy)).await;
    (store, ledger, proxy)
}

#[tokio::test]
async fn closed_runs_nothing_and_says_when_to_come_back() {
    let gate = Gate::opened();
    let (_store, ledger, proxy) = proxied(Policy::default(), &gate).await;
    let client = Client::new();
    ledger.down(true);
    let mut waits = Vec::new();
    for _ in 0..20 {
        let answer = client.post(proxy.address, "/orders", "k", "{}").await;
        assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (503, "ledger-unavailable"));
        waits.push(answer.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap());
    }
    assert!(waits.iter().all(|wait| (1..=10).contains(wait)), "{waits:?}");
    assert!(waits.iter().any(|wait| *wait != waits[0]), "not jittered: {waits:?}");
    assert_eq!((gate.arrived(), proxy.layer.counters().refused_by_outage), (0, 20), "duplicates of ours");
    // A request without a key needs no protection.
    let plain = http::Request::post(format!("http://{}/orders", proxy.address));
    let plain = client.send(plain.body(http_body_util::Full::default()).unwrap()).await;
    assert_eq!(plain.text(), "call 1");
    ledger.down(false);
    assert_eq!(client.post(proxy.address, "/orders", "k", "{}").await.text(), "call 2");
    assert!(client.post(proxy.address, "/orders", "k", "{}").await.is_replay());
}

#[tokio::test]
async fn open_runs_unprotected_and_counts_it() {
    let gate = Gate::opened();
    let (_store, ledger, proxy) =
        proxied(Policy { on_outage: OnOutage::Open, ..Policy::default() }, &gate).await;
    let client = Client::new();
    ledger.down(true);
    for call in 1..=2 {
        let answer = client.post(proxy.address, "/orders", "k", "{}").await;
        assert_eq!((answer.text(), answer.is_replay()), (format!("call {call}"), false));
    }
    assert_eq!(proxy.layer.counters().ran_unprotected, 2);
}

#[tokio::test]
async fn the_usual_middleware_lets_every_duplicate_through() {
    let gate = Gate::opened();
    let naive = Naive::default();
    let layer = axum::middleware::from_fn_with_state(naive.clone(), naive::middleware);
    let to = serve(gated(&gate).layer(layer)).await;
    naive.go_down();
    let client = Client::new();
    for _ in 0..20 {
        assert_eq!(client.post(to, "/orders", "k", "{}").await.status.as_u16(), 200);
    }
    assert_eq!(gate.arrived() - 1, 19, "duplicates of the usual middleware");
}

#[tokio::test]
async fn an_outcome_that_cannot_be_recorded_is_not_given_away() {
    let gate = Gate::closed();
    let policy = Policy { lease: Duration::from_millis(500), ..Policy::default() };
    let (_store, ledger, proxy) = proxied(policy, &gate).await;
    let (to, client) = (proxy.address, Client::new());
    let call = tokio::spawn(async move { Client::new().post(to, "/orders", "k", "{}").await });
    gate.wait(1).await;
    ledger.down(true);
    gate.open();
    let answer = call.await.unwrap();
    assert_eq!(answer.status.as_u16() / 100, 5, "{answer:?}");
    assert!(
        ["outcome-unrecorded", "run-interrupted"].contains(&answer.problem().as_str()),
        "{}",
        answer.text()
    );
    ledger.down(false);
    // Its lease expired: in doubt, and by default it stays so.
    let again = client.post(to, "/orders", "k", "{}").await;
    assert_eq!((again.status.as_u16(), again.problem().as_str()), (409, "in-doubt"));
    assert_eq!(gate.arrived(), 1);
}

#[tokio::test]
async fn an_outage_shorter_than_the_lease_is_not_seen() {
    let gate = Gate::closed();
    let (_store, ledger, proxy) = proxied(Policy::default(), &gate).await;
    let to = proxy.address;
    let call = tokio::spawn(async move { Client::new().post(to, "/orders", "k", "{}").await });
    gate.wait(1).await;
    ledger.down(true);
    gate.open();
    tokio::time::sleep(Duration::from_millis(200)).await;
    ledger.down(false);
    assert_eq!(call.await.unwrap().text(), "call 1");
    assert!(Client::new().post(to, "/orders", "k", "{}").await.is_replay());
}

#[tokio::test]
async fn a_claim_whose_response_got_lost_is_repeated_or_given_back() {
    let gate = Gate::opened();
    let (_store, ledger, proxy) = proxied(Policy::default(), &gate).await;
    let client = Client::new();
    ledger.lose_claims(1);
    assert_eq!(client.post(proxy.address, "/orders", "once", "{}").await.text(), "call 1");
    ledger.lose_claims(6);
    let answer = client.post(proxy.address, "/orders", "twice", "{}").await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (503, "ledger-unavailable"));
    // Nothing ran under the claim, so it must not end up in doubt.
    let filter = EntryFilter { limit: 10, ..EntryFilter::default() };
    let mut open = true;
    let deadline = std::time::Instant::now() + common::SOON;
    while open {
        assert!(std::time::Instant::now() < deadline, "the claim was never given back");
        let entries = ledger.entries(filter.clone()).await.unwrap().items;
        open = entries.iter().any(|entry| entry.id.key.as_str() == "twice");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(client.post(proxy.address, "/orders", "twice", "{}").await.text(), "call 2");
}

/// A claim that waited for another claim's end is confirmed before anything runs. If that fails, nothing ran, so the
/// key must become free and not be in doubt.
#[tokio::test]
async fn a_claim_that_cannot_be_confirmed_is_given_back() {
    unconfirmed(OnOutage::Closed).await;
}

/// Another holder may have the key: what lets requests pass in an outage must not let this one run.
#[tokio::test]
async fn an_unconfirmed_claim_does_not_run_with_on_outage_open() {
    unconfirmed(OnOutage::Open).await;
}

async fn unconfirmed(on_outage: OnOutage) {
    let gate = Gate::closed();
    let statuses = gate.clone();
    let router = Router::new().fallback(any(move || async move {
        let first = statuses.pass().await == 1;
        if first { http::StatusCode::TOO_MANY_REQUESTS } else { http::StatusCode::CREATED }
    }));
    let store = Store::new();
    let ledger = SwitchedLedger::new(store.ledger());
    let lease_ms = 9000;
    let policy = Policy { lease: Duration::from_millis(lease_ms), on_outage, ..Policy::default() };
    let proxy = Proxied::router(router, ledger.clone(), with_policy(policy)).await;
    let (client, address) = (Client::new(), proxy.address);
    let send = || {
        let client = client.clone();
        tokio::spawn(async move { client.post(address, "/orders", "k", "{}").await })
    };
    let first = send();
    gate.wait(1).await;
    let waiting = send();
    until("the second claim", || ledger.claims() == 2).await;
    tokio::time::sleep(Duration::from_millis(lease_ms / 3 + 50)).await;
    ledger.renews_fail(true);
    gate.open();
    assert_eq!(first.await.unwrap().status, 429);
    let waiting = waiting.await.unwrap();
    assert_eq!((waiting.status.as_u16(), gate.arrived()), (503, 1), "{}", waiting.text());
    assert_eq!(
        (waiting.problem().as_str(), proxy.layer.counters().ran_unprotected),
        ("ledger-unavailable", 0)
    );
    ledger.renews_fail(false);
    let again = send().await.unwrap();
    assert_eq!((again.status.as_u16(), gate.arrived()), (201, 2), "{}", again.text());
}
