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
async fn an_upload_may_take_longer_than_a_response() {
    let upstream = Upstream::responding("HTTP/1.1 201 Created\r\ncontent-length: 2\r\n\r\nok").await;
    // The upstream has this long to answer, however busy the machine is.
    let (_store, proxy) = before(upstream.address, Duration::from_secs(4), LONG).await;
    let upload = async |framing: &[&str; 3]| {
        let mut wire = half(&proxy, framing).await;
        tokio::time::sleep(Duration::from_secs(5)).await;
        wire.send(framing[2]).await;
        let answer = wire.answer("POST").await;
        assert_eq!((answer.status(), answer.text().as_str()), (201, "ok"), "{framing:?}");
    };
    tokio::join!(upload(&FRAMINGS[0]), upload(&FRAMINGS[1]));
    assert!(upstream.seen().iter().all(|request| request.text() == "0123456789"));
}

/// The bound holds after a slow upload too, in full.
#[tokio::test]
async fn an_upstream_that_has_it_all_and_is_silent_is_blamed() {
    const BOUND: Duration = Duration::from_millis(500);
    let upstream = silent(true).await;
    let (_store, proxy) = before(upstream, BOUND, LONG).await;
    for framing in &FRAMINGS {
        for pause in [Duration::ZERO, BOUND * 3 / 2] {
            let mut wire = half(&proxy, framing).await;
            tokio::time::sleep(pause).await;
            let ended = Instant::now();
            wire.send(framing[2]).await;
            let answer = wire.answer("POST").await;
            assert_eq!((answer.status(), answer.problem().as_str()), (504, "upstream-timeout"));
            assert!(ended.elapsed() >= BOUND, "after {:?}", ended.elapsed());
        }
    }
}

/// The caller sends as fast as it can: that the body stands still is the upstream's doing.
#[tokio::test]
async fn an_upstream_that_does_not_read_is_blamed() {
    let upstream = silent(false).await;
    let (_store, proxy) = before(upstream, Duration::from_millis(300), LONG).await;
    let (mut read, mut write) = soon(TcpStream::connect(proxy.address)).await.unwrap().into_split();
    let sending = tokio::spawn(async move {
        let head = "POST / HTTP/1.1\r\nhost: shop\r\ncontent-length: 1000000000\r\n\r\n";
        let mut sent = write.write_all(head.as_bytes()).await;
        while sent.is_ok() {
            sent = write.write_all(&[b'x'; 8 * 1024]).await;
        }
    });
    let mut answer = Vec::new();
    while !String::from_utf8_lossy(&answer).contains("\r\n\r\n") {
        assert!(soon(read.read_buf(&mut answer)).await.unwrap() > 0, "it ended without an answer");
    }
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(answer.starts_with("HTTP/1.1 504 "), "{answer}");
    sending.abort();
}
