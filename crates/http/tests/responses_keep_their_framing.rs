//! Regardless of how an upstream frames its responses, a caller's connection stays in sync: the next response on it is
//! the right one.
#![cfg(feature = "proxy")]

mod common;

use bytes::Bytes;
use common::proxied::Proxied;
use common::raw::{Upstream, Wire};
use common::{Client, Store};
use hapax_http::proxy::ProxyConfig;
use http_body_util::Full;

/// Responses whose header fields contradict each other about their length.
fn ambiguous() -> Vec<(&'static str, String, &'static str)> {
    let chunked = "6\r\npaid 7\r\n0\r\n\r\n";
    let head = "HTTP/1.1 201 Created\r\ncontent-type: text/plain\r\n";
    vec![
        (
            "shorter",
            format!("{head}content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n{chunked}"),
            "paid 7",
        ),
        (
            "longer",
            format!("{head}content-length: 99\r\ntransfer-encoding: chunked\r\n\r\n{chunked}"),
            "paid 7",
        ),
        (
            "after",
            format!("{head}transfer-encoding: chunked\r\ncontent-length: 3\r\n\r\n{chunked}"),
            "paid 7",
        ),
        (
            "wire",
            format!("{head}transfer-encoding: Chunked\r\ncontent-length: 17\r\n\r\n{chunked}"),
            "paid 7",
        ),
        ("bad", format!("{head}transfer-encoding: chunked\r\ncontent-length: -1\r\n\r\n{chunked}"), "paid 7"),
        (
            "two",
            format!(
                "{head}content-length: 2\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n{chunked}"
            ),
            "paid 7",
        ),
        ("twice", format!("{head}content-length: 6\r\ncontent-length: 6\r\n\r\npaid 7"), "paid 7"),
        ("list", format!("{head}content-length: 6, 6\r\n\r\npaid 7"), "paid 7"),
    ]
}

fn request(path: &str, key: Option<&str>) -> String {
    let key = key.map(|key| format!("idempotency-key: {key}\r\n")).unwrap_or_default();
    format!("POST {path} HTTP/1.1\r\nhost: shop\r\n{key}content-length: 2\r\n\r\n{{}}")
}

async fn proxied() -> (Store, Proxied, Upstream) {
    let upstream = Upstream::start(|request| {
        let kind = request.first_line.split(['/', ' ']).nth(2).unwrap_or_default().to_owned();
        let found = ambiguous().into_iter().find(|(name, _, _)| *name == kind);
        found.map_or_else(
            || b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnext".to_vec(),
            |(_, answer, _)| answer.into_bytes(),
        )
    })
    .await;
    let store = Store::new();
    let proxy = Proxied::before(upstream.address, store.ledger(), ProxyConfig::default()).await;
    (store, proxy, upstream)
}

/// Each ambiguous response with a following request on the same connection: unkeyed, keyed, and replayed.
#[tokio::test]
async fn a_response_with_two_lengths_is_followed_by_the_next_response() {
    let (_store, proxy, _upstream) = proxied().await;
    for (kind, _, body) in ambiguous() {
        for (key, replay) in [(None, false), (Some("k"), false), (Some("k"), true)] {
            let mut wire = Wire::connect(proxy.address).await;
            let first = request(&format!("/{kind}"), key);
            // Both at once: a pipelined request must not be misread either.
            wire.send(format!("{first}{}", request("/next", None))).await;
            let answer = wire.answer("POST").await;
            assert_eq!((answer.status(), answer.text().as_str()), (201, body), "{kind} {key:?}: {answer:?}");
            assert_eq!(answer.is_replay(), replay, "{kind} {key:?}");
            let next = wire.answer("POST").await;
            assert_eq!((next.status(), next.text().as_str()), (200, "next"), "{kind} {key:?}: {next:?}");
        }
    }
}

#[tokio::test]
async fn over_http2_too() {
    let (_store, proxy, _upstream) = proxied().await;
    let client = Client::http2();
    for (kind, _, body) in ambiguous() {
        for (key, replay) in [(None, false), (Some("k"), false), (Some("k"), true)] {
            let mut request = http::Request::post(format!("http://{}/{kind}", proxy.address));
            if let Some(key) = key {
                request = request.header("idempotency-key", key);
            }
            let answer = client.send(request.body(Full::new(Bytes::from_static(b"{}"))).unwrap()).await;
            assert_eq!((answer.status.as_u16(), answer.text().as_str()), (201, body), "{kind} {key:?}");
            assert_eq!(answer.is_replay(), replay, "{kind} {key:?}");
        }
    }
}

/// A body where none is allowed is not read as the next response, whichever request comes next on the upstream's
/// connection.
#[tokio::test]
async fn bytes_after_a_response_without_a_body_are_no_response() {
    let forged = "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged";
    for (method, head) in [
        ("POST", "HTTP/1.1 204 No Content\r\n"),
        ("POST", "HTTP/1.1 304 Not Modified\r\netag: \"1\"\r\n"),
        ("HEAD", "HTTP/1.1 200 OK\r\n"),
    ] {
        let first = format!("{head}content-length: {}\r\n\r\n{forged}", forged.len());
        let upstream = Upstream::start(move |request| {
            let next = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nnext".to_vec();
            if request.first_line.contains("/first") { first.clone().into_bytes() } else { next }
        })
        .await;
        let store = Store::new();
        let proxy = Proxied::before(upstream.address, store.ledger(), ProxyConfig::default()).await;
        for key in [None, Some("k"), Some("k")] {
            let mut wire = Wire::connect(proxy.address).await;
            wire.send(request("/first", key).replacen("POST", method, 1)).await;
            assert!([200, 204, 304].contains(&wire.answer(method).await.status()), "{head}");
            wire.send(request("/next", None)).await;
            let next = wire.answer("POST").await;
            assert_eq!((next.status(), next.text().as_str()), (200, "next"), "{method} {head} {key:?}");
        }
    }
}
