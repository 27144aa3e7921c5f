//! Answers that callers of a proxy do not read take a bounded number of bytes, over HTTP/1 and HTTP/2, with and without a
//! key, even if all of them come at once. Such callers are cut off in the end, and others are served meanwhile.
#![cfg(feature = "proxy")]

mod common;

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::routing::any;
use bytes::Bytes;
use common::proxied::Proxied;
use common::{Client, SOON, Store, post, until};
use hapax_http::Policy;
use hapax_http::proxy::{ProxyConfig, ProxyLimits};
use hapax_net::unread::SMALL_BYTES_MAX;
use http::{Request, Response};
use http_body::Frame;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

const ANSWER: usize = 400_000;
const BUDGET: usize = 4_000_000;
const CONNECTIONS: usize = 30;
/// Requests of one connection: the kernel takes in some megabytes of answers before one is unread.
const REQUESTS: usize = 15;
/// What refused requests may take beside: each is answered in a few hundred bytes.
const REFUSALS: usize = 32 * 1024;

async fn proxy(store: &Store) -> Proxied {
    let large = Router::new()
        .route("/small", any(|| async { "small" }))
        .fallback(any(|| async { vec![b'x'; ANSWER] }));
    let limits = ProxyLimits {
        unread_bytes_max: BUDGET,
        idle_timeout: Duration::from_secs(3),
        ..ProxyLimits::default()
    };
    // A response that the machine is too slow for would be streamed after this time, and not fitted in as a whole.
    let policy = Policy { response_max: Duration::from_hours(1), ..Policy::default() };
    Proxied::router(large, store.ledger(), ProxyConfig { limits, policy, ..ProxyConfig::default() }).await
}

/// Callers over HTTP/1 that ask and do not read.
async fn deaf_over_http1(proxy: &Proxied, keyed: bool) -> Vec<TcpStream> {
    let mut deaf = Vec::new();
    for caller in 0..CONNECTIONS {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_recv_buffer_size(4096).unwrap();
        let mut stream = socket.connect(proxy.address).await.unwrap();
        for nth in 0..REQUESTS {
            let key = if keyed { format!("idempotency-key: {caller}-{nth}\r\n") } else { String::new() };
            let ask = format!("POST /large HTTP/1.1\r\nhost: x\r\n{key}content-length: 2\r\n\r\n{{}}");
            stream.write_all(ask.as_bytes()).await.unwrap();
        }
        deaf.push(stream);
    }
    deaf
}

/// Connections of HTTP/2 with several requests each, whose answers are not read; and those answers.
fn deaf_over_http2(proxy: &Proxied, keyed: bool) -> JoinSet<Option<Response<Incoming>>> {
    let mut asked = JoinSet::new();
    for caller in 0..3 * CONNECTIONS {
        let mut pool = Pool::builder(TokioExecutor::new());
        let client: Pool<HttpConnector, Full<Bytes>> =
            pool.http2_only(true).http2_initial_stream_window_size(1024).build_http();
        for nth in 0..2 {
            let mut request = Request::post(format!("http://{}/large", proxy.address));
            if keyed {
                request = request.header("idempotency-key", format!("{caller}-{nth}"));
            }
            let answer = client.request(request.body(Full::from("{}")).unwrap());
            asked.spawn(async move { answer.await.ok() });
        }
    }
    asked
}

/// Others are told to come back at worst, and are served in the end.
async fn others_are_served(proxy: &Proxied) {
    let deadline = std::time::Instant::now() + SOON;
    let mut served = 0;
    while served < 5 {
        let answer =
            Client::new().send(post(proxy.address, "/small", &format!("other-{served}"), "{}")).await;
        match answer.status.as_u16() {
            200 => served += 1,
            503 => assert!(answer.headers.contains_key("retry-after"), "{answer:?}"),
            _ => panic!("{answer:?}"),
        }
        assert!(std::time::Instant::now() < deadline, "others are starved");
    }
}

async fn bounded(http2: bool, keyed: bool) {
    let store = Store::new();
    let proxy = proxy(&store).await;
    let (mut first, mut second) = (Vec::new(), JoinSet::new());
    if http2 {
        second = deaf_over_http2(&proxy, keyed);
    } else {
        first = deaf_over_http1(&proxy, keyed).await;
    }
    until("answers are unread", || proxy.unread.peak() > 0).await;
    others_are_served(&proxy).await;
    until("those who do not read are cut off", || proxy.unread.used() == 0).await;
    let peak = proxy.unread.peak();
    println!("http2 {http2}, keyed {keyed}: {peak} bytes were unread at once");
    let most = BUDGET + SMALL_BYTES_MAX + REFUSALS;
    assert!(peak > ANSWER && peak <= most, "{peak} bytes were unread at once");
    drop((first, second));
}

#[tokio::test]
async fn over_http1_without_a_key() {
    bounded(false, false).await;
}

#[tokio::test]
async fn over_http1_with_keys() {
    bounded(false, true).await;
}

#[tokio::test]
async fn over_http2_without_a_key() {
    bounded(true, false).await;
}

#[tokio::test]
async fn over_http2_with_keys() {
    bounded(true, true).await;
}

/// A response that begins with a chunk and then stalls.
struct Stalled(Option<Bytes>);

impl http_body::Body for Stalled {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.take().map_or(Poll::Pending, |bytes| Poll::Ready(Some(Ok(Frame::data(bytes)))))
    }
}

/// Small responses are sent although the budget is used up. All their requests are under way before the first response
/// exists, so no request is refused.
async fn bounded_at_once(stalled: bool) {
    let store = Store::new();
    let (go, gate) = watch::channel(false);
    let arrived = Arc::new(AtomicUsize::new(0));
    let small = any({
        let arrived = arrived.clone();
        move || async move {
            arrived.fetch_add(1, SeqCst);
            gate.clone().wait_for(|open| *open).await.unwrap();
            let bytes = Bytes::from(vec![b'x'; SMALL_BYTES_MAX]);
            Response::new(if stalled {
                axum::body::Body::new(Stalled(Some(bytes)))
            } else {
                axum::body::Body::from(bytes)
            })
        }
    });
    let limits = ProxyLimits {
        unread_bytes_max: BUDGET,
        idle_timeout: Duration::from_secs(3),
        ..ProxyLimits::default()
    };
    let response_max = if stalled { Duration::from_millis(100) } else { Duration::from_hours(1) };
    let policy = Policy { response_max, ..Policy::default() };
    let config = ProxyConfig { limits, policy, ..ProxyConfig::default() };
    let proxy = Proxied::router(Router::new().fallback(small), store.ledger(), config).await;
    let asked = deaf_over_http2(&proxy, true);
    until("all requests are under way", || arrived.load(SeqCst) == asked.len()).await;
    go.send(true).unwrap();
    until("small responses exceed the budget", || proxy.unread.peak() > BUDGET).await;
    until("those who do not read are cut off", || proxy.unread.used() == 0).await;
    let peak = proxy.unread.peak();
    println!("at once, stalled {stalled}: {peak} bytes were unread");
    assert!(peak <= 2 * BUDGET, "{peak} bytes were unread at once");
}

#[tokio::test]
async fn small_responses_that_come_at_once() {
    bounded_at_once(false).await;
}

#[tokio::test]
async fn responses_that_become_streams_at_once() {
    bounded_at_once(true).await;
}
