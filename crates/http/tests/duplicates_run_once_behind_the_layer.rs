//! The layer in an axum service: concurrent duplicates run once, whereas the usual middleware runs them all.

mod common;

use std::sync::Arc;

use axum::routing::post;
use axum::{Extension, Router};
use common::naive::{self, Naive};
use common::{Client, Gate, Store, TestResponse, serve, soon};
use hapax_http::{IdempotencyLayer, KeyedRun, Policy, Tenant};
use http::StatusCode;

const CALLERS: usize = 50;

fn payments(gate: &Arc<Gate>) -> Router {
    let gate = gate.clone();
    let pay = move || async move { (StatusCode::CREATED, format!("payment {}", gate.pass().await)) };
    Router::new().route("/payments", post(pay))
}

/// Sends the same request from many callers at once; lets the service respond when `arrivals` of them have reached it.
async fn at_once(to: std::net::SocketAddr, gate: &Gate, arrivals: usize) -> Vec<TestResponse> {
    let calls: Vec<_> = (0..CALLERS)
        .map(|_| {
            tokio::spawn(async move { Client::new().post(to, "/payments", "\"k1\"", r#"{"cents":5}"#).await })
        })
        .collect();
    gate.wait(arrivals).await;
    gate.open();
    let mut answers = Vec::new();
    for call in calls {
        answers.push(soon(call).await.unwrap());
    }
    answers
}

#[tokio::test]
async fn fifty_at_once_run_once_and_get_the_same_response() {
    let gate = Gate::closed();
    let store = Store::new();
    let layer = IdempotencyLayer::builder("shop", store.ledger()).build().unwrap();
    let to = serve(payments(&gate).layer(layer.clone())).await;
    let answers = at_once(to, &gate, 1).await;
    assert_eq!(gate.arrived(), 1, "duplicates of ours");
    for answer in &answers {
        assert_eq!((answer.status, answer.text()), (StatusCode::CREATED, "payment 1".to_owned()));
    }
    assert_eq!(answers.iter().filter(|answer| answer.is_replay()).count(), CALLERS - 1);
    let counters = layer.counters();
    assert_eq!((counters.ran, counters.replayed), (1, CALLERS as u64 - 1));
}

#[tokio::test]
async fn the_usual_middleware_runs_all_fifty() {
    let gate = Gate::closed();
    let naive = axum::middleware::from_fn_with_state(Naive::default(), naive::middleware);
    let to = serve(payments(&gate).layer(naive)).await;
    // All of them reach the service before any response is stored.
    at_once(to, &gate, CALLERS).await;
    let duplicates = gate.arrived() - 1;
    assert_eq!(duplicates, CALLERS - 1, "duplicates of the usual middleware");
}

#[tokio::test]
async fn the_handler_is_told_its_key_and_fence_and_a_forged_one_is_dropped() {
    let app = Router::new().route(
        "/payments",
        post(|Extension(run): Extension<KeyedRun>, headers: http::HeaderMap| async move {
            assert_eq!(headers["hapax-fence"], run.fence.unwrap().to_string().as_str());
            assert_eq!(headers["idempotency-key"], format!("\"{}\"", run.derived_key).as_str());
            assert!(!headers.contains_key("hapax-takeover") && !headers.contains_key("hapax-forged"));
            run.id.to_string()
        }),
    );
    let store = Store::new();
    let layer = IdempotencyLayer::builder("shop", store.ledger())
        .tenant(Tenant::function(|parts| {
            parts.headers.get("x-user").and_then(|user| user.to_str().ok()).map(str::to_owned)
        }))
        .route("/payments", Policy { key_required: true, ..Policy::default() })
        .build()
        .unwrap();
    let to = serve(app.layer(layer)).await;
    let mut request = common::post(to, "/payments", "k1", "{}");
    request.headers_mut().insert("x-user", "ada".parse().unwrap());
    request.headers_mut().insert("hapax-fence", "9".parse().unwrap());
    request.headers_mut().insert("hapax-takeover", "true".parse().unwrap());
    request.headers_mut().insert("hapax-forged", "1".parse().unwrap());
    let answer = Client::new().send(request).await;
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.text());
    assert!(answer.text().starts_with("http/shop/") && answer.text().ends_with("/POST /payments k1"));
    let nobody = Client::new().post(to, "/payments", "k1", "{}").await;
    assert_eq!((nobody.status, nobody.problem().as_str()), (StatusCode::BAD_REQUEST, "tenant-missing"));
}

#[tokio::test]
async fn a_handler_that_panics_is_in_doubt() {
    let app = Router::new().route("/payments", post(|| async { panic!("as the test wants it") as () }));
    let store = Store::new();
    let layer = IdempotencyLayer::builder("shop", store.ledger()).build().unwrap();
    let to = serve(app.layer(layer.clone())).await;
    let client = Client::new();
    let first = client.post(to, "/payments", "k1", "{}").await;
    assert_eq!((first.status, first.problem().as_str()), (StatusCode::BAD_GATEWAY, "run-interrupted"));
    let second = client.post(to, "/payments", "k1", "{}").await;
    assert_eq!((second.status, second.problem().as_str()), (StatusCode::CONFLICT, "in-doubt"));
    assert_eq!((layer.counters().ended_in_doubt, layer.counters().refused_in_doubt), (1, 1));
}
