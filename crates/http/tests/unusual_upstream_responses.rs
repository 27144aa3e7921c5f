//! Unusual and invalid responses of an upstream: how they and their keys are handled.
#![cfg(feature = "proxy")]

mod common;

use axum::Router;
use axum::routing::any;
use common::proxied::Proxied;
use common::raw::{Message, Upstream, Wire};
use common::{Client, Store, serve};
use hapax_http::IdempotencyLayer;
use hapax_http::proxy::ProxyConfig;
use http::StatusCode;

async fn before(upstream: &Upstream) -> (Store, Proxied) {
    let store = Store::new();
    let proxy = Proxied::before(upstream.address, store.ledger(), ProxyConfig::default()).await;
    (store, proxy)
}

async fn post(proxy: &Proxied, path: &str, key: Option<&str>) -> Message {
    let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
    let mut wire = Wire::connect(proxy.address).await;
    wire.send(format!("POST {path} HTTP/1.1\r\nhost: shop\r\n{key}content-length: 2\r\n\r\n{{}}")).await;
    wire.answer("POST").await
}

/// 101 is not an outcome, whether the upstream or a handler in the same process sends it.
#[tokio::test]
async fn a_change_of_protocol_that_was_not_asked_for_is_never_recorded() {
    let upstream =
        Upstream::responding("HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n")
            .await;
    let (_store, proxy) = before(&upstream).await;
    let unkeyed = post(&proxy, "/", None).await;
    assert_eq!((unkeyed.status(), unkeyed.problem().as_str()), (502, "upstream-invalid"));
    let first = post(&proxy, "/", Some("k")).await;
    assert_eq!((first.status(), first.problem().as_str()), (502, "upstream-invalid"));
    let again = post(&proxy, "/", Some("k")).await;
    assert_eq!((again.status(), again.problem().as_str()), (409, "in-doubt"));

    let store = Store::new();
    let layer = IdempotencyLayer::builder("shop", store.ledger()).build().unwrap();
    let to =
        serve(Router::new().fallback(any(|| async { StatusCode::SWITCHING_PROTOCOLS })).layer(layer)).await;
    let first = Client::new().post(to, "/", "k", "{}").await;
    assert_eq!((first.status.as_u16(), first.problem().as_str()), (502, "run-interrupted"));
    let again = Client::new().post(to, "/", "k", "{}").await;
    assert_eq!((again.status.as_u16(), again.problem().as_str()), (409, "in-doubt"));
}

/// The payload would be encoded, but the header that names the coding is hop-by-hop.
#[tokio::test]
async fn a_transfer_coding_that_was_not_asked_for_is_refused() {
    for coding in ["gzip, chunked", "gzip", "chunked, chunked", "identity"] {
        let answer = format!("HTTP/1.1 200 OK\r\ntransfer-encoding: {coding}\r\n\r\n3\r\nxyz\r\n0\r\n\r\n");
        let upstream = Upstream::responding(answer).await;
        let (_store, proxy) = before(&upstream).await;
        for (key, status, code) in [
            (None, 502, "upstream-invalid"),
            (Some("k"), 502, "upstream-invalid"),
            (Some("k"), 409, "in-doubt"),
        ] {
            let answer = post(&proxy, "/", key).await;
            assert_eq!((answer.status(), answer.problem().as_str()), (status, code), "{coding}: {answer:?}");
        }
    }
}

#[tokio::test]
async fn many_headers_are_passed_on_and_replayed() {
    let upstream = Upstream::start(|request| {
        let count: usize = request.first_line.split(['/', ' ']).nth(2).unwrap().parse().unwrap();
        let headers: Vec<String> = (1..count).map(|at| format!("x-header-{at}: {at}\r\n")).collect();
        let headers = headers.concat();
        format!("HTTP/1.1 201 Created\r\n{headers}content-length: 2\r\n\r\nok").into_bytes()
    })
    .await;
    let (_store, proxy) = before(&upstream).await;
    for count in [100, 101, 150, 160] {
        for (key, replay) in [(None, false), (Some("k"), false), (Some("k"), true)] {
            let answer = post(&proxy, &format!("/{count}"), key).await;
            assert_eq!((answer.status(), answer.is_replay()), (201, replay), "{count}: {}", answer.text());
            let passed = answer.headers.iter().filter(|(name, _)| name.starts_with("x-header-")).count();
            assert_eq!(passed, count - 1);
        }
    }
    // Beyond the limit the upstream has acted, but its response cannot be read.
    let answer = post(&proxy, "/161", Some("k")).await;
    assert_eq!((answer.status(), answer.problem().as_str()), (502, "upstream-invalid"));
}

#[tokio::test]
async fn interim_responses_are_left_out() {
    let chain = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\nx-step: 1\r\n\r\n\
                 HTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok";
    let upstream = Upstream::responding(chain).await;
    let (_store, proxy) = before(&upstream).await;
    for (key, replay) in [(None, false), (Some("k"), false), (Some("k"), true)] {
        let answer = post(&proxy, "/", key).await;
        assert_eq!((answer.status(), answer.text().as_str(), answer.is_replay()), (201, "ok", replay));
        assert!(answer.all("x-step").is_empty() && answer.all("link").is_empty(), "{answer:?}");
    }
}

/// A response that ends only with its connection, and one over HTTP/1.0.
#[tokio::test]
async fn a_body_that_ends_with_its_connection_is_whole() {
    for version in ["1.0", "1.1"] {
        let upstream = Upstream::responding(format!("HTTP/{version} 201 Created\r\n\r\nuntil the end")).await;
        let (_store, proxy) = before(&upstream).await;
        for (key, replay) in [(None, false), (Some("k"), false), (Some("k"), true)] {
            let answer = post(&proxy, "/", key).await;
            assert_eq!((answer.text().as_str(), answer.is_replay()), ("until the end", replay), "{version}");
        }
    }
}

/// An event stream in capitals with a `Content-Length` is still a stream: media types are case-insensitive.
#[tokio::test]
async fn a_stream_of_events_is_known_in_any_case() {
    let answer = "HTTP/1.1 200 OK\r\ncontent-type: Text/Event-Stream\r\ncontent-length: 9\r\n\r\ndata: 1\n\n";
    let upstream = Upstream::responding(answer).await;
    let (_store, proxy) = before(&upstream).await;
    assert_eq!(post(&proxy, "/", Some("k")).await.text(), "data: 1\n\n");
    assert_eq!(post(&proxy, "/", Some("k")).await.problem(), "response-not-stored");
}
