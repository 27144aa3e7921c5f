//! Replays of responses: binary, empty, errors, redirects, large and endless bodies.
#![cfg(feature = "proxy")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::response::Response;
use axum::routing::any;
use bytes::Bytes;
use common::proxied::{Proxied, with_policy};
use common::{Client, Store, post, soon, until};
use hapax_core::OnDoubt;
use hapax_http::Policy;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;

type Calls = Arc<AtomicUsize>;

fn service() -> (Router, Calls) {
    let calls = Calls::default();
    (Router::new().route("/{kind}", any(answer)).with_state(calls.clone()), calls)
}

async fn answer(State(calls): State<Calls>, Path(kind): Path<String>) -> Response {
    let call = calls.fetch_add(1, Ordering::SeqCst) + 1;
    let response = Response::builder().header("x-call", call).header("set-cookie", "session=secret");
    let built = match kind.as_str() {
        "binary" => response
            .header("content-type", "application/octet-stream")
            .body(Body::from((0..=255).collect::<Vec<u8>>())),
        "nothing" => response.status(204).body(Body::empty()),
        "unchanged" => response.status(304).header("etag", "\"v1\"").body(Body::empty()),
        "moved" => response.status(303).header("location", "/orders/7").body(Body::empty()),
        "refused" => response.status(402).body(Body::from(format!("no money at call {call}"))),
        "large" => response.body(Body::from("x".repeat(5000))),
        status => response.status(status.parse::<u16>().unwrap()).body(Body::from(format!("call {call}"))),
    };
    built.unwrap()
}

async fn proxied(policy: Policy) -> (Store, Proxied, Calls) {
    let store = Store::new();
    let (app, calls) = service();
    let proxy = Proxied::router(app, store.ledger(), with_policy(policy)).await;
    (store, proxy, calls)
}

#[tokio::test]
async fn whatever_is_an_outcome_comes_back_as_it_was() {
    let (_store, proxy, calls) = proxied(Policy::default()).await;
    let client = Client::new();
    for (at, kind) in
        ["binary", "nothing", "unchanged", "moved", "refused", "404", "422"].into_iter().enumerate()
    {
        let path = format!("/{kind}");
        let first = client.post(proxy.address, &path, "k", "{}").await;
        let again = client.post(proxy.address, &path, "k", "{}").await;
        assert!(!first.is_replay() && again.is_replay(), "{kind}: {again:?}");
        assert_eq!((first.status, &first.body), (again.status, &again.body), "{kind}");
        assert_eq!(first.headers["x-call"], again.headers["x-call"], "{kind}");
        assert!(
            first.headers.contains_key("set-cookie") && !again.headers.contains_key("set-cookie"),
            "{kind}"
        );
        for name in ["content-type", "location", "etag", "content-length"] {
            assert_eq!(first.headers.get(name), again.headers.get(name), "{kind}: {name}");
        }
        assert_eq!(calls.load(Ordering::SeqCst), at + 1, "{kind} ran again");
    }
    assert_eq!(client.post(proxy.address, "/binary", "k", "{}").await.body, (0..=255).collect::<Vec<u8>>());
}

#[tokio::test]
async fn a_status_that_says_nothing_happened_frees_the_key() {
    let (_store, proxy, calls) = proxied(Policy::default()).await;
    let client = Client::new();
    for status in [401, 408, 409, 425, 429] {
        let before = calls.load(Ordering::SeqCst);
        for call in 1..=2 {
            let answer = client.post(proxy.address, &format!("/{status}"), "k", "{}").await;
            assert_eq!((answer.status.as_u16(), answer.is_replay()), (status, false));
            assert_eq!(calls.load(Ordering::SeqCst), before + call);
        }
    }
}

#[tokio::test]
async fn a_server_error_is_in_doubt_and_the_policy_decides() {
    let (_store, parking, calls) = proxied(Policy::default()).await;
    let client = Client::new();
    assert_eq!(client.post(parking.address, "/500", "k", "{}").await.text(), "call 1");
    let parked = client.post(parking.address, "/500", "k", "{}").await;
    assert_eq!((parked.status, parked.problem().as_str()), (StatusCode::CONFLICT, "in-doubt"));
    assert_eq!(calls.load(Ordering::SeqCst), 1, "a parked request ran again");

    let retry = Policy { on_doubt: OnDoubt::Retry, ..Policy::default() };
    let (_store, retrying, calls) = proxied(retry).await;
    for call in 1..=2 {
        assert_eq!(client.post(retrying.address, "/503", "k", "{}").await.text(), format!("call {call}"));
    }
    assert_eq!((calls.load(Ordering::SeqCst), retrying.layer.counters().takeovers), (2, 1));

    let policy = Policy {
        released_statuses: "503".parse().unwrap(),
        doubtful_statuses: "504".parse().unwrap(),
        ..Policy::default()
    };
    let (_store, told, calls) = proxied(policy).await;
    for status in ["/503", "/503", "/500", "/500"] {
        client.post(told.address, status, "k", "{}").await;
    }
    assert_eq!(calls.load(Ordering::SeqCst), 3, "503 ran twice as released, 500 once as an outcome");
}

#[tokio::test]
async fn a_response_too_large_to_store_passes_and_its_duplicate_gets_409() {
    let (_store, proxy, calls) = proxied(Policy { response_bytes_max: 4999, ..Policy::default() }).await;
    let client = Client::new();
    let first = client.post(proxy.address, "/large", "k", "{}").await;
    assert_eq!((first.status, first.body.len()), (StatusCode::OK, 5000));
    let again = client.post(proxy.address, "/large", "k", "{}").await;
    assert_eq!((again.status, again.problem().as_str()), (StatusCode::CONFLICT, "response-not-stored"));
    assert!(again.text().contains(r#""original_status":200"#), "{}", again.text());
    assert_eq!((calls.load(Ordering::SeqCst), proxy.layer.counters().refused_not_stored), (1, 1));

    let (_store, roomy, _) = proxied(Policy { response_bytes_max: 5000, ..Policy::default() }).await;
    client.post(roomy.address, "/large", "k", "{}").await;
    assert!(client.post(roomy.address, "/large", "k", "{}").await.is_replay());
}

/// A service whose response body is fed by the test.
fn streaming(content_type: &'static str) -> (Router, Calls, mpsc::Sender<Bytes>) {
    let (feed, eaten) = mpsc::channel::<Bytes>(1);
    let eaten = Arc::new(tokio::sync::Mutex::new(eaten));
    let calls = Calls::default();
    let counted = calls.clone();
    let stream = move || async move {
        counted.fetch_add(1, Ordering::SeqCst);
        let body = Fed(eaten.clone().lock_owned().await);
        Response::builder().header("content-type", content_type).body(Body::new(body)).unwrap()
    };
    (Router::new().fallback(any(stream)), calls, feed)
}

struct Fed(tokio::sync::OwnedMutexGuard<mpsc::Receiver<Bytes>>);

impl http_body::Body for Fed {
    type Data = Bytes;
    type Error = std::convert::Infallible;
    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(http_body::Frame::data(bytes))))
    }
}

async fn an_endless_response_is_streamed(content_type: &'static str, policy: Policy) {
    let store = Store::new();
    let (app, calls, feed) = streaming(content_type);
    let proxy = Proxied::router(app, store.ledger(), with_policy(policy)).await;
    let pool = Pool::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
    feed.send(Bytes::from_static(b"one ")).await.unwrap();
    let mut response = soon(pool.request(post(proxy.address, "/", "k", "{}"))).await.unwrap();
    let frame = soon(response.frame()).await.unwrap().unwrap();
    assert_eq!(frame.into_data().unwrap(), "one ");
    // The response is still being produced, but its outcome is already recorded.
    let again = Client::new().post(proxy.address, "/", "k", "{}").await;
    assert_eq!((again.status, again.problem().as_str()), (StatusCode::CONFLICT, "response-not-stored"));
    feed.send(Bytes::from_static(b"two")).await.unwrap();
    drop(feed);
    assert_eq!(soon(response.into_body().collect()).await.unwrap().to_bytes(), "two");
    assert_eq!(calls.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_stream_of_events_passes_through() {
    an_endless_response_is_streamed("text/event-stream", Policy::default()).await;
}

#[tokio::test]
async fn a_slow_response_passes_through() {
    let policy = Policy { response_max: Duration::from_millis(50), ..Policy::default() };
    an_endless_response_is_streamed("text/plain", policy).await;
}

#[tokio::test]
async fn without_a_key_both_ways_are_streamed() {
    let store = Store::new();
    let (feed, eaten) = mpsc::channel::<Bytes>(1);
    let eaten = Arc::new(tokio::sync::Mutex::new(eaten));
    // Echoes the request's body as it arrives.
    let echo = |request: axum::extract::Request| async { Response::new(request.into_body()) };
    let proxy =
        Proxied::router(Router::new().fallback(any(echo)), store.ledger(), with_policy(Policy::default()))
            .await;
    let pool = Pool::builder(TokioExecutor::new()).build_http::<Fed>();
    let body = Fed(eaten.clone().lock_owned().await);
    let request = Request::post(format!("http://{}/", proxy.address)).body(body).unwrap();
    feed.send(Bytes::from_static(b"one")).await.unwrap();
    let mut response = soon(pool.request(request)).await.unwrap();
    assert_eq!(soon(response.frame()).await.unwrap().unwrap().into_data().unwrap(), "one");
    feed.send(Bytes::from_static(b"two")).await.unwrap();
    assert_eq!(soon(response.frame()).await.unwrap().unwrap().into_data().unwrap(), "two");
    drop(feed);
    assert_eq!(proxy.layer.counters().passed, 1);
}

#[tokio::test]
async fn a_request_too_large_is_413_and_runs_nothing() {
    let (_store, proxy, calls) = proxied(Policy { request_bytes_max: 100, ..Policy::default() }).await;
    let client = Client::new();
    let body = format!("\"{}\"", "x".repeat(99));
    let answer = client.post(proxy.address, "/binary", "k", &body).await;
    assert_eq!((answer.status.as_u16(), answer.problem().as_str()), (413, "body-too-large"));
    assert_eq!(calls.load(Ordering::SeqCst), 0);
    let body = format!("\"{}\"", "x".repeat(98));
    assert_eq!(client.post(proxy.address, "/binary", "k", &body).await.status, StatusCode::OK);
}

#[tokio::test]
async fn an_outcome_is_forgotten_after_its_time() {
    let (_store, proxy, calls) = proxied(Policy { ttl: Duration::from_secs(1), ..Policy::default() }).await;
    let client = Client::new();
    client.post(proxy.address, "/binary", "k", "{}").await;
    let started = std::time::Instant::now();
    until("the outcome's time is over", || started.elapsed() > Duration::from_millis(1100)).await;
    assert!(!client.post(proxy.address, "/binary", "k", "{}").await.is_replay());
    assert_eq!(calls.load(Ordering::SeqCst), 2);
}
