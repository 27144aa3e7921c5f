//! The same key with a request that a service could distinguish is refused; with an equivalent request it is replayed.
#![cfg(feature = "proxy")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};

use common::proxied::{Proxied, with_policy};
use common::raw::{Message, Upstream, Wire};
use common::{Client, Store};
use hapax_core::{EntryFilter, Json, RecordedOutcome, Resolution};
use hapax_http::Policy;
use hapax_http::proxy::ProxyConfig;

async fn proxied(config: ProxyConfig) -> (Store, Proxied, Upstream) {
    let count = AtomicUsize::new(0);
    let upstream = Upstream::start(move |_| {
        let call = format!("call {}", count.fetch_add(1, Ordering::SeqCst) + 1);
        format!("HTTP/1.1 201 Created\r\ncontent-length: {}\r\n\r\n{call}", call.len()).into_bytes()
    })
    .await;
    let store = Store::new();
    let proxy = Proxied::before(upstream.address, store.ledger(), config).await;
    (store, proxy, upstream)
}

async fn send(proxy: &Proxied, path: &str, key: &str, headers: &str, body: &[u8]) -> Message {
    let mut wire = Wire::connect(proxy.address).await;
    let key = if key.is_empty() { String::new() } else { format!("idempotency-key: {key}\r\n") };
    let length = body.len();
    let head =
        format!("POST {path} HTTP/1.1\r\nhost: shop\r\n{key}{headers}content-length: {length}\r\n\r\n");
    wire.send([head.as_bytes(), body].concat()).await;
    wire.answer("POST").await
}

const JSON: &str = "content-type: application/json\r\n";

#[tokio::test]
async fn requests_that_differ_are_refused_and_those_that_do_not_are_replayed() {
    let (_store, proxy, upstream) = proxied(ProxyConfig::default()).await;
    let form = "--abc\r\n\r\nx\r\n--abc--\r\n";
    let other_form = "--xyz\r\n\r\nx\r\n--xyz--\r\n";
    let charset = |charset: &str| format!("content-type: text/plain; charset={charset}\r\n");
    let coded = |coding: &str| format!("{JSON}content-encoding: {coding}\r\n");
    let instead = |method: &str| format!("{JSON}x-http-method-override: {method}\r\n");
    let json = JSON.to_owned();
    let pairs = [
        (json.clone(), r#"{"a":"\ud800"}"#, json.clone(), r#"{"a":"\"\\ud800\""}"#, false),
        (json.clone(), r#"{"a":"\ud800"}"#, json.clone(), r#"{"a":"\uD800"}"#, true),
        (charset("latin1"), "x", charset("utf-8"), "x", false),
        (charset("utf-8"), "x", charset("\"UTF-8\""), "x", true),
        (coded("gzip"), "{}", json.clone(), "{}", false),
        (coded("gzip"), "{}", coded("br"), "{}", false),
        (coded("gzip"), "{}", coded("GZIP"), "{}", true),
        (instead("DELETE"), "{}", json.clone(), "{}", false),
        (instead("DELETE"), "{}", instead("PATCH"), "{}", false),
        (instead("DELETE"), "{}", instead("delete"), "{}", true),
        (format!("{JSON}if-match: \"1\"\r\n"), "{}", format!("{JSON}if-match: \"2\"\r\n"), "{}", false),
        (format!("{JSON}{JSON}"), "{}", json.clone(), "{}", false),
        (
            "content-type: Multipart/Form-Data; boundary=abc\r\n".into(),
            form,
            "content-type: Multipart/Form-Data; boundary=xyz\r\n".into(),
            other_form,
            true,
        ),
        (json.clone(), r#"{"a":1,"b":2}"#, format!("accept: x/y\r\n{JSON}"), r#"{"b":2, "a":1}"#, true),
    ];
    for (at, (first_headers, first_body, headers, body, same)) in pairs.into_iter().enumerate() {
        let key = format!("pair-{at}");
        let first = send(&proxy, "/orders", &key, &first_headers, first_body.as_bytes()).await;
        assert_eq!((first.status(), first.is_replay()), (201, false), "{first_headers:?} {first_body}");
        let second = send(&proxy, "/orders", &key, &headers, body.as_bytes()).await;
        let told = format!("{first_headers:?} {first_body}, then {headers:?} {body}: {}", second.text());
        if same {
            assert!(second.is_replay() && second.text() == first.text(), "{told}");
        } else {
            assert_eq!(second.problem(), "fingerprint-mismatch", "{told}");
        }
        assert_eq!(upstream.seen().len(), at + 1, "{told}");
    }
}

/// Every spelling of a path gets the policy of its route, and one key with two spellings does not run twice.
#[tokio::test]
async fn another_writing_of_a_path_is_the_same_route() {
    let json = r#"{"upstream":"http://x","route":[{"path":"/payments","key_required":true},{"path":"/orders/{id}/"}]}"#;
    let (_store, proxy, upstream) = proxied(serde_json::from_str(json).unwrap()).await;
    let writings = [
        "/payments",
        "/payments/",
        "//payments",
        "/./payments",
        "/x/../payments",
        "/%70ayments",
        "/payments?a=1",
    ];
    for path in writings {
        let answer = send(&proxy, path, "", JSON, b"{}").await;
        assert_eq!((answer.status(), answer.problem().as_str()), (400, "key-missing"), "{path}");
    }
    assert_eq!(upstream.seen().len(), 0);
    assert_eq!(send(&proxy, "//payments", "k", JSON, b"{}").await.status(), 201);
    // The service gets the path as sent.
    assert_eq!(upstream.seen()[0].first_line, "POST //payments HTTP/1.1");
    assert!(send(&proxy, "//payments", "k", JSON, b"{}").await.is_replay());
    for path in ["/payments", "/payments/", "/%70ayments"] {
        let answer = send(&proxy, path, "k", JSON, b"{}").await;
        assert_eq!(answer.problem(), "fingerprint-mismatch", "{path}");
    }
    // The same without a route of its own, and with a route written with a trailing slash.
    for (first, second) in [("/refunds", "/refunds/"), ("/orders/7", "/orders/7/")] {
        assert_eq!(send(&proxy, first, "k", JSON, b"{}").await.status(), 201);
        assert_eq!(
            send(&proxy, second, "k", JSON, b"{}").await.problem(),
            "fingerprint-mismatch",
            "{second}"
        );
    }
    assert_eq!(upstream.seen().len(), 3);
}

/// Duplicates get what an operator decided about a parked key; a status in it is only a field.
#[tokio::test]
async fn an_outcome_recorded_by_hand_is_the_response() {
    let upstream = Upstream::responding("HTTP/1.1 500 Broken\r\ncontent-length: 0\r\n\r\n").await;
    let store = Store::new();
    let proxy = Proxied::before(upstream.address, store.ledger(), with_policy(Policy::default())).await;
    let client = Client::new();
    for (at, (json, status, body)) in [
        (r#"{"http_response":{"status":202,"body":{"json":{"charge":7}}}}"#, 202, r#"{"charge":7}"#),
        (r#"{"status":404,"charged":true}"#, 200, r#"{"status":404,"charged":true}"#),
        (r#"{"status":404}"#, 200, r#"{"status":404}"#),
        ("null", 409, "response-not-stored"),
        (r#"{"http_response":{"status":202,"omitted":"it is in the bank's log"}}"#, 409, "the bank's log"),
    ]
    .into_iter()
    .enumerate()
    {
        let key = format!("k{at}");
        assert_eq!(client.post(proxy.address, "/orders", &key, "{}").await.status, 500);
        let filter = EntryFilter { limit: 10, ..EntryFilter::default() };
        let entries = store.ledger().entries(filter).await.unwrap().items;
        let id = entries.into_iter().map(|entry| entry.id).find(|id| id.key.as_str() == key).unwrap();
        let outcome = RecordedOutcome::done(Json::parse(json).unwrap());
        let resolution = Resolution::Completed { outcome, ttl_ms: 60_000 };
        store.ledger().resolve(&id, resolution, "test").await.unwrap();
        let answer = client.post(proxy.address, "/orders", &key, "{}").await;
        assert_eq!(answer.status.as_u16(), status, "{json}: {}", answer.text());
        assert!(answer.text().contains(body), "{json}: {}", answer.text());
    }
}
