//! A service that honours keys acts once for each caller's key, whether or not the ledger could be reached.
#![cfg(feature = "proxy")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::State;
use axum::routing::any;
use common::outage::SwitchedLedger;
use common::proxied::{Proxied, with_policy};
use common::{Client, Store, TestResponse, post, serve};
use hapax_core::OnDoubt;
use hapax_http::{IdempotencyLayer, KeyedRun, OnOutage, Policy};
use http::{HeaderMap, StatusCode, Uri};

/// The requests of one tenant to one path.
#[derive(Default)]
struct Seen {
    /// Every value of every header that a service may read as the key.
    keys: BTreeSet<String>,
    runs: usize,
    effects: usize,
}

/// A service that honours keys: one effect per key. Its first two runs of a path are interrupted after the effect.
#[derive(Clone, Default)]
struct Payments(Arc<Mutex<BTreeMap<(String, String), Seen>>>);

const BROKEN_RUNS: usize = 2;

async fn pay(State(payments): State<Payments>, uri: Uri, headers: HeaderMap) -> StatusCode {
    let tenant = headers["authorization"].to_str().unwrap().to_owned();
    let mut seen = payments.0.lock().unwrap();
    // Keys are global to the service: two tenants with the same key would be one payment there.
    let names = ["idempotency-key", "x-idempotency-key", "idempotency_key"];
    let sent = names.into_iter().flat_map(|name| headers.get_all(name));
    let keys: BTreeSet<String> = sent.map(|key| key.to_str().unwrap().to_owned()).collect();
    let path = uri.path().to_owned();
    let known = seen
        .iter()
        .filter(|((known, _), _)| *known == path)
        .any(|(_, seen)| keys.iter().any(|key| seen.keys.contains(key)));
    let seen = seen.entry((path, tenant)).or_default();
    seen.effects += usize::from(!known);
    seen.runs += 1;
    seen.keys.extend(keys);
    if seen.runs <= BROKEN_RUNS { StatusCode::INTERNAL_SERVER_ERROR } else { StatusCode::CREATED }
}

fn policy() -> Policy {
    Policy { on_outage: OnOutage::Open, on_doubt: OnDoubt::Retry, ..Policy::default() }
}

#[derive(Clone, Copy, Debug)]
enum Front {
    Layer,
    Proxy,
}

async fn send(client: &Client, to: std::net::SocketAddr, path: &str, tenant: &str) -> TestResponse {
    let mut request = post(to, path, "raw-key", "{}");
    request.headers_mut().insert("authorization", tenant.parse().unwrap());
    request.headers_mut().insert("x-idempotency-key", "raw-key".parse().unwrap());
    client.send(request).await
}

/// {ledger up, down} for each of {first run, takeover, takeover, retry of an answered request} x {layer, proxy} x two
/// tenants with the same key.
#[tokio::test]
async fn with_and_without_the_ledger() {
    for front in [Front::Layer, Front::Proxy] {
        let store = Store::new();
        let ledger = SwitchedLedger::new(store.ledger());
        let payments = Payments::default();
        let service = Router::new().fallback(any(pay)).with_state(payments.clone());
        let mut proxy = None;
        let to = match front {
            Front::Layer => {
                let layer = IdempotencyLayer::builder("proxy", ledger.clone()).policy(policy());
                serve(service.layer(layer.build().unwrap())).await
            }
            Front::Proxy => {
                let started = Proxied::router(service, ledger.clone(), with_policy(policy())).await;
                let address = started.address;
                proxy = Some(started);
                address
            }
        };
        let client = Client::new();
        for downs in 0..16_u32 {
            let path = format!("/payments/{downs:04b}");
            for run in 0..4 {
                ledger.down(downs >> run & 1 == 1);
                for tenant in ["a", "b"] {
                    let answer = send(&client, to, &path, tenant).await;
                    let expected = if run < BROKEN_RUNS { 500 } else { 201 };
                    assert_eq!(answer.status.as_u16(), expected, "{front:?} {path} run {run}: {answer:?}");
                }
            }
            let seen = payments.0.lock().unwrap();
            let of = |tenant: &str| &seen[&(path.clone(), tenant.to_owned())];
            for tenant in ["a", "b"] {
                let Seen { keys, effects, .. } = of(tenant);
                assert_eq!((keys.len(), *effects), (1, 1), "{front:?} {path}, tenant {tenant}: {keys:?}");
                assert!(!keys.iter().any(|key| key.contains("raw-key")), "{front:?} {path}: {keys:?}");
            }
            assert!(of("a").keys.is_disjoint(&of("b").keys), "{front:?} {path}: tenants share a key");
        }
        drop(proxy);
    }
}

/// A handler in the same process finds the same key in its request's extensions, and a fence only with a claim.
#[tokio::test]
async fn handlers_find_the_derived_key_without_a_claim_too() {
    let store = Store::new();
    let ledger = SwitchedLedger::new(store.ledger());
    let layer = IdempotencyLayer::builder("shop", ledger.clone()).policy(policy()).build().unwrap();
    let handler = |request: axum::extract::Request| async move {
        let run = request.extensions().get::<KeyedRun>().expect("the run is described").clone();
        let header = request.headers()["idempotency-key"].to_str().unwrap().to_owned();
        assert_eq!(header, format!("\"{}\"", run.derived_key));
        assert_eq!(request.headers().contains_key("hapax-fence"), run.fence.is_some());
        (StatusCode::SERVICE_UNAVAILABLE, format!("{} {}", run.derived_key, run.fence.is_some()))
    };
    let to = serve(Router::new().fallback(any(handler)).layer(layer)).await;
    let client = Client::new();
    let mut keys = BTreeSet::new();
    for down in [true, false, true] {
        ledger.down(down);
        let text = send(&client, to, "/orders", "a").await.text();
        let (key, claimed) = text.split_once(' ').unwrap();
        assert_eq!(claimed, (!down).to_string());
        keys.insert(key.to_owned());
    }
    assert_eq!(keys.len(), 1, "{keys:?}");
}
