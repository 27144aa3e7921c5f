//! draft-ietf-httpapi-idempotency-key-header-07, case by case, over a socket.
#![cfg(feature = "proxy")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use bytes::Bytes;
use common::proxied::{Proxied, with_policy};
use common::{Client, Gate, Store, TestResponse, post};
use hapax_http::proxy::ProxyConfig;
use hapax_http::{Policy, Tenant};
use http::{Request, StatusCode};
use http_body_util::Full;

/// A service that returns how often it was called.
fn counting() -> (Router, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = calls.clone();
    let app = move || async move { format!("call {}", counted.fetch_add(1, Ordering::SeqCst) + 1) };
    (Router::new().fallback(any(app)), calls)
}

async fn proxied(config: ProxyConfig) -> (Store, Proxied, Arc<AtomicUsize>) {
    let store = Store::new();
    let (app, calls) = counting();
    let proxy = Proxied::router(app, store.ledger(), config).await;
    (store, proxy, calls)
}

fn required() -> ProxyConfig {
    with_policy(Policy { key_required: true, wait: Duration::ZERO, ..Policy::default() })
}

#[track_caller]
fn assert_problem(answer: &TestResponse, status: u16, code: &str) {
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (status, code), "{}", answer.text());
}

#[tokio::test]
async fn a_retry_gets_the_first_response_and_is_marked() {
    let (_store, proxy, calls) = proxied(required()).await;
    let client = Client::new();
    let first = client.post(proxy.address, "/orders", "\"8e03978e-40d5-43e8-bc93-6894a57f9324\"", "{}").await;
    assert_eq!((first.status, first.text().as_str()), (StatusCode::OK, "call 1"));
    assert!(!first.is_replay());
    // The bare form and the alias header name the same key.
    let again = client.post(proxy.address, "/orders", "8e03978e-40d5-43e8-bc93-6894a57f9324", "{}").await;
    assert_eq!((again.status, again.text().as_str()), (StatusCode::OK, "call 1"));
    assert!(again.is_replay());
    let mut alias = post(proxy.address, "/orders", "x", "{}");
    let key = "8e03978e-40d5-43e8-bc93-6894a57f9324".parse().unwrap();
    alias.headers_mut().remove("idempotency-key");
    alias.headers_mut().insert("x-idempotency-key", key);
    assert!(client.send(alias).await.is_replay());
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_key_that_is_missing_or_of_bad_form_is_400() {
    let (_store, proxy, calls) = proxied(required()).await;
    let client = Client::new();
    let mut missing = post(proxy.address, "/orders", "x", "{}");
    missing.headers_mut().remove("idempotency-key");
    assert_problem(&client.send(missing).await, 400, "key-missing");
    let long = "k".repeat(256);
    for bad in ["\"\"", "\"open", "a b", "a,b", "\"a\", \"b\"", "a\"b", &long] {
        let answer = client.post(proxy.address, "/orders", bad, "{}").await;
        assert_problem(&answer, 400, "key-invalid");
        assert!(answer.text().contains("1 to 255"), "{bad}: {}", answer.text());
    }
    let mut twice = post(proxy.address, "/orders", "a", "{}");
    twice.headers_mut().append("idempotency-key", "a".parse().unwrap());
    assert_problem(&client.send(twice).await, 400, "key-invalid");
    let mut both = post(proxy.address, "/orders", "a", "{}");
    both.headers_mut().insert("x-idempotency-key", "b".parse().unwrap());
    assert_problem(&client.send(both).await, 400, "key-invalid");
    assert_eq!(calls.load(Ordering::SeqCst), 0, "a refused request reached the service");
    assert_eq!(proxy.layer.counters().refused_invalid, 10);
}

#[tokio::test]
async fn another_request_with_the_same_key_is_422_in_every_state() {
    let store = Store::new();
    let gate = Gate::closed();
    let held = gate.clone();
    let app = Router::new().fallback(any(move || async move { held.pass().await.to_string() }));
    let proxy = Proxied::router(app, store.ledger(), required()).await;
    let (to, client) = (proxy.address, Client::new());
    let running = tokio::spawn({
        let client = client.clone();
        async move { client.post(to, "/orders", "k", r#"{"a":1,"b":2}"#).await }
    });
    gate.wait(1).await;
    assert_problem(&client.post(to, "/orders", "k", r#"{"a":2}"#).await, 422, "fingerprint-mismatch");
    // The same value with other formatting is the same request: it is in progress.
    let busy = client.post(to, "/orders", "k", r#"{ "b" : 2, "a" : 1 }"#).await;
    assert_problem(&busy, 409, "in-progress");
    assert!(busy.headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    gate.open();
    running.await.unwrap();
    assert_problem(&client.post(to, "/orders", "k", r#"{"a":2}"#).await, 422, "fingerprint-mismatch");
    assert_problem(
        &client.post(to, "/orders?x=1", "k", r#"{"a":1,"b":2}"#).await,
        422,
        "fingerprint-mismatch",
    );
    let again = client.post(to, "/orders", "k", r#"{"b":2,"a":1}"#).await;
    assert!(again.is_replay(), "{again:?}");
    assert_eq!(gate.arrived(), 1);
    let counters = proxy.layer.counters();
    assert_eq!((counters.refused_mismatch, counters.refused_in_progress, counters.replayed), (3, 1, 1));
}

#[tokio::test]
async fn two_callers_with_the_same_key_never_meet() {
    let (_store, proxy, calls) = proxied(ProxyConfig::default()).await;
    let client = Client::new();
    let as_caller = |authorization: Option<&str>, cookie: Option<&str>| {
        let mut request = post(proxy.address, "/orders", "k", "{}");
        if let Some(value) = authorization {
            request.headers_mut().insert("authorization", value.parse().unwrap());
        }
        if let Some(value) = cookie {
            request.headers_mut().insert("cookie", value.parse().unwrap());
        }
        request
    };
    let callers = [(None, None), (Some("Bearer a"), None), (Some("Bearer b"), None), (None, Some("s=1"))];
    for round in 0..2 {
        for (at, (authorization, cookie)) in callers.into_iter().enumerate() {
            let answer = client.send(as_caller(authorization, cookie)).await;
            assert_eq!(answer.text(), format!("call {}", at + 1));
            assert_eq!(answer.is_replay(), round == 1);
        }
    }
    assert_eq!(calls.load(Ordering::SeqCst), callers.len());
}

#[tokio::test]
async fn a_tenant_by_header_survives_new_credentials_and_must_be_there() {
    let config =
        ProxyConfig { tenant: "header:x-account".parse::<Tenant>().unwrap(), ..ProxyConfig::default() };
    let (_store, proxy, calls) = proxied(config).await;
    let client = Client::new();
    for (token, replayed) in [("old", false), ("refreshed", true)] {
        let mut request = post(proxy.address, "/orders", "k", "{}");
        request.headers_mut().insert("x-account", "7".parse().unwrap());
        request.headers_mut().insert("authorization", token.parse().unwrap());
        assert_eq!(client.send(request).await.is_replay(), replayed);
    }
    assert_problem(&client.post(proxy.address, "/orders", "k", "{}").await, 400, "tenant-missing");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_key_in_the_body_and_fields_that_do_not_count() {
    let policy = Policy {
        key_required: true,
        key_pointer: Some("/order/id".into()),
        fingerprint_excluded_fields: vec!["/sent_at".into()],
        ..Policy::default()
    };
    let (_store, proxy, calls) = proxied(with_policy(policy)).await;
    let client = Client::new();
    let send = |body: &'static str| {
        let mut request = post(proxy.address, "/orders", "x", body);
        request.headers_mut().remove("idempotency-key");
        client.send(request)
    };
    assert!(!send(r#"{"order":{"id":"o-7"},"sent_at":1}"#).await.is_replay());
    assert!(send(r#"{"order":{"id":"o-7"},"sent_at":2}"#).await.is_replay());
    assert_problem(&send(r#"{"order":{"id":"o-7"},"cents":2}"#).await, 422, "fingerprint-mismatch");
    assert_problem(&send(r#"{"order":{}}"#).await, 400, "key-missing");
    assert_problem(&send(r#"{"order":{"id":[]}}"#).await, 400, "key-invalid");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn policies_go_by_route_and_method() {
    let json = r#"{"upstream":"http://x","route":[
        {"path":"/payments/{id}","key_required":true,"methods":["POST","PUT"]},
        {"path":"/free/{*rest}","methods":[]}]}"#;
    let (_store, proxy, calls) = proxied(serde_json::from_str(json).unwrap()).await;
    let client = Client::new();
    let send = |method: &str, path: &str, key: Option<&str>| {
        let mut request = Request::builder().method(method).uri(format!("http://{}{path}", proxy.address));
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        client.send(request.body(Full::new(Bytes::new())).unwrap())
    };
    assert_problem(&send("PUT", "/payments/1", None).await, 400, "key-missing");
    assert_eq!(send("PATCH", "/payments/1", None).await.status, StatusCode::OK);
    assert_eq!(send("POST", "/payments/1", Some("k")).await.text(), "call 2");
    // On one route a key is used once: another path of it is another request.
    assert_problem(&send("POST", "/payments/2", Some("k")).await, 422, "fingerprint-mismatch");
    // Another method is another scope; so is another path without a route.
    assert_eq!(send("PUT", "/payments/1", Some("k")).await.text(), "call 3");
    assert_eq!(send("POST", "/other", Some("k")).await.text(), "call 4");
    // There is no policy for keys there, nor for GET: each request passes.
    for expected in 5..7 {
        assert_eq!(send("POST", "/free/a/b", Some("k")).await.text(), format!("call {expected}"));
    }
    for expected in 7..9 {
        assert_eq!(send("GET", "/other", Some("k")).await.text(), format!("call {expected}"));
    }
    assert_eq!(calls.load(Ordering::SeqCst), 8);
}
