//! Callers that disconnect, slow callers, and a shutdown during requests.
#![cfg(feature = "proxy")]

mod common;

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::any;
use bytes::Bytes;
use common::proxied::{Proxied, with_policy};
use common::{Client, Gate, Store, soon, until};
use hapax_http::Policy;
use hapax_http::proxy::{ProxyConfig, ProxyLimits};
use http::{Response, StatusCode};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const REQUEST: &str = "POST /orders HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nidempotency-key: k\r\n\
                       content-length: 2\r\n\r\n{}";

fn gated(gate: &std::sync::Arc<Gate>) -> Router {
    let gate = gate.clone();
    Router::new().fallback(any(move || async move { format!("call {}", gate.pass().await) }))
}

async fn connect(to: SocketAddr) -> TcpStream {
    soon(TcpStream::connect(to)).await.unwrap()
}

/// Reads until the other end closes.
async fn read_all(stream: &mut TcpStream) -> String {
    let mut bytes = Vec::new();
    let _ = soon(stream.read_to_end(&mut bytes)).await;
    String::from_utf8_lossy(&bytes).into_owned()
}

#[tokio::test]
async fn it_runs_to_its_end_and_is_recorded() {
    let (store, gate) = (Store::new(), Gate::closed());
    let proxy = Proxied::router(gated(&gate), store.ledger(), ProxyConfig::default()).await;
    let mut caller = connect(proxy.address).await;
    caller.write_all(REQUEST.as_bytes()).await.unwrap();
    gate.wait(1).await;
    drop(caller);
    // The proxy sees the end of the connection before the service answers.
    let mut other = connect(proxy.address).await;
    other.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nupgrade: x\r\nconnection: close\r\n\r\n").await.unwrap();
    assert!(read_all(&mut other).await.contains("501"));
    gate.open();
    soon(proxy.layer.idle()).await;
    let again = Client::new().post(proxy.address, "/orders", "k", "{}").await;
    assert!(again.is_replay(), "{again:?}");
    assert_eq!((again.text().as_str(), gate.arrived()), ("call 1", 1));
}

#[tokio::test]
async fn a_shutdown_waits_for_a_run_whose_caller_is_gone() {
    let (store, gate) = (Store::new(), Gate::closed());
    let mut proxy = Proxied::router(gated(&gate), store.ledger(), ProxyConfig::default()).await;
    let layer = proxy.layer.clone();
    let mut caller = connect(proxy.address).await;
    caller.write_all(REQUEST.as_bytes()).await.unwrap();
    gate.wait(1).await;
    drop(caller);
    proxy.begin_stop();
    let to = proxy.address;
    until("the listener is closed", || std::net::TcpStream::connect(to).is_err()).await;
    assert_eq!(layer.running(), 1);
    gate.open();
    proxy.stop().await;
    assert_eq!((layer.running(), layer.counters().ended_in_doubt), (0, 0));
    let other = Proxied::router(gated(&gate), store.ledger(), ProxyConfig::default()).await;
    assert!(Client::new().post(other.address, "/orders", "k", "{}").await.is_replay());
}

#[tokio::test]
async fn a_shutdown_is_bounded() {
    let (store, gate) = (Store::new(), Gate::closed());
    let limits = ProxyLimits { shutdown_timeout: Duration::from_millis(50), ..ProxyLimits::default() };
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::router(gated(&gate), store.ledger(), config).await;
    let mut caller = connect(proxy.address).await;
    caller.write_all(REQUEST.as_bytes()).await.unwrap();
    gate.wait(1).await;
    proxy.stop().await;
}

#[tokio::test]
async fn a_head_that_never_ends_closes_the_connection() {
    let (store, gate) = (Store::new(), Gate::opened());
    let limits = ProxyLimits { read_timeout: Duration::from_millis(100), ..ProxyLimits::default() };
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::router(gated(&gate), store.ledger(), config).await;
    let mut half = connect(proxy.address).await;
    half.write_all(b"POST /orders HTTP/1.1\r\nhost:").await.unwrap();
    read_all(&mut half).await;
    // Answered, then closed as idle. On a slow machine the time may be over before the request is sent.
    let answered = async {
        loop {
            let mut idle = connect(proxy.address).await;
            let _ = idle.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await;
            if read_all(&mut idle).await.contains("call 1") {
                return;
            }
        }
    };
    soon(answered).await;
}

#[tokio::test]
async fn a_body_that_never_ends_runs_nothing() {
    let (store, gate) = (Store::new(), Gate::opened());
    let policy = Policy { read_max: Duration::from_secs(1), ..Policy::default() };
    let proxy = Proxied::router(gated(&gate), store.ledger(), with_policy(policy)).await;
    let mut slow = connect(proxy.address).await;
    slow.write_all(REQUEST.strip_suffix("}").unwrap().as_bytes()).await.unwrap();
    let answer = read_all(&mut slow).await;
    assert!(answer.contains("408") && answer.contains("body-too-slow"), "{answer}");
    assert_eq!(gate.arrived(), 0);
    // The key was never claimed.
    let answer = Client::new().post(proxy.address, "/orders", "k", "{}").await;
    assert_eq!((answer.status, answer.is_replay()), (StatusCode::OK, false));
}

/// A response that never ends. Tells when the service is rid of it.
struct Endless(Arc<AtomicBool>);

impl http_body::Body for Endless {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, Self::Error>>> {
        Poll::Ready(Some(Ok(http_body::Frame::data(Bytes::from_static(&[b'x'; 16 * 1024])))))
    }
}

impl Drop for Endless {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_caller_that_does_not_read_is_cut_off() {
    let (store, dropped) = (Store::new(), Arc::<AtomicBool>::default());
    let told = dropped.clone();
    let endless = Router::new().fallback(any(move || async move { Response::new(Body::new(Endless(told))) }));
    let limits = ProxyLimits { idle_timeout: Duration::from_millis(200), ..ProxyLimits::default() };
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::router(endless, store.ledger(), config).await;
    let mut deaf = connect(proxy.address).await;
    deaf.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.unwrap();
    until("its response is dropped although nothing was read", || dropped.load(Ordering::SeqCst)).await;
    assert!(proxy.unread.peak() > 0, "its response waited");
    until("nothing of it is kept", || proxy.unread.used() == 0).await;
    read_all(&mut deaf).await;
}

#[tokio::test]
async fn a_caller_that_asks_first_is_told_to_go_on_or_not() {
    let (store, gate) = (Store::new(), Gate::opened());
    let policy = Policy { request_bytes_max: 10, ..Policy::default() };
    let proxy = Proxied::router(gated(&gate), store.ledger(), with_policy(policy)).await;
    let ask = |key: &str, length: usize| {
        format!(
            "POST /orders HTTP/1.1\r\nhost: x\r\nidempotency-key: {key}\r\ncontent-length: {length}\r\n\
             expect: 100-continue\r\nconnection: close\r\n\r\n"
        )
    };
    let mut fits = connect(proxy.address).await;
    fits.write_all(ask("a", 2).as_bytes()).await.unwrap();
    let mut told = [0; 21];
    soon(fits.read_exact(&mut told)).await.unwrap();
    assert!(told.starts_with(b"HTTP/1.1 100 Continue"), "{}", String::from_utf8_lossy(&told));
    fits.write_all(b"{}").await.unwrap();
    assert!(read_all(&mut fits).await.contains("call 1"));
    for (key, length, status) in [("b", 11, "413"), ("\"open", 2, "400")] {
        let mut refused = connect(proxy.address).await;
        refused.write_all(ask(key, length).as_bytes()).await.unwrap();
        let answer = read_all(&mut refused).await;
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{answer}");
    }
    assert_eq!(gate.arrived(), 1);
}

#[tokio::test]
async fn a_caller_that_says_nothing_is_cut_off() {
    let (store, gate) = (Store::new(), Gate::opened());
    let limits = ProxyLimits { read_timeout: Duration::from_millis(100), ..ProxyLimits::default() };
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::router(gated(&gate), store.ledger(), config).await;
    for begins_with in ["", "PRI * HTTP/2"] {
        let mut silent = connect(proxy.address).await;
        silent.write_all(begins_with.as_bytes()).await.unwrap();
        assert_eq!(read_all(&mut silent).await, "", "{begins_with}");
    }
}
