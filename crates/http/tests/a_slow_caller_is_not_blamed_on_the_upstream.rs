//! Bodies that come slowly: the time in which the caller is waited for is not the upstream's.
#![cfg(feature = "proxy")]

mod common;

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use common::proxied::Proxied;
use common::raw::{Upstream, Wire};
use common::{Store, soon};
use hapax_http::proxy::{ProxyConfig, ProxyLimits};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

const LONG: Duration = Duration::from_mins(1);

/// How a body of ten bytes says where it ends: the headers, its first half, its second half.
const FRAMINGS: [[&str; 3]; 2] = [
    ["content-length: 10\r\n", "01234", "56789"],
    ["transfer-encoding: chunked\r\n", "5\r\n01234\r\n", "5\r\n56789\r\n0\r\n\r\n"],
];

async fn before(
    upstream: SocketAddr,
    response_timeout: Duration,
    idle_timeout: Duration,
) -> (Store, Proxied) {
    let store = Store::new();
    let limits = ProxyLimits { response_timeout, idle_timeout, ..ProxyLimits::default() };
    let config = ProxyConfig { limits, ..ProxyConfig::default() };
    let proxy = Proxied::before(upstream, store.ledger(), config).await;
    (store, proxy)
}

/// Sends a request without a key, and half of its body.
async fn half(proxy: &Proxied, framing: &[&str; 3]) -> Wire {
    let mut wire = Wire::connect(proxy.address).await;
    wire.send(format!("POST / HTTP/1.1\r\nhost: shop\r\n{}\r\n{}", framing[0], framing[1])).await;
    wire
}

/// A service that accepts connections and holds them; it reads what comes if it `reads`, and never answers.
async fn silent(reads: bool) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let mut held = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            if reads {
                tokio::spawn(async move { while stream.read(&mut [0; 1024]).await.unwrap_or(0) > 0 {} });
            } else {
                held.push(stream);
            }
        }
    });
    address
}

#[tokio::test]
async fn a_caller_that_stops_sending_is_told_so_even_if_both_bounds_are_equal() {
    let upstream = Upstream::responding("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok").await;
    let (_store, proxy) =
        before(upstream.address, Duration::from_millis(300), Duration::from_millis(300)).await;
    for framing in &FRAMINGS {
        let answer = half(&proxy, framing).await.answer("POST").await;
        assert_eq!((answer.status(), answer.problem().as_str()), (408, "body-too-slow"), "{framing:?}");
    }
    assert!(upstream.seen().is_empty(), "no request arrived whole");
}

#[tokio::test]
async fn an_upload_may_take_longer_than_an_answer() {
    let upstream = Upstream::responding("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok").await;
