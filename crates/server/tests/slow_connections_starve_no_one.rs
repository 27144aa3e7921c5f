//! Slow and half-open connections have timeouts, and are closed for new ones when the server is full.

mod support;

use std::time::Duration;

use hapax_server::ServerConfig;
use hapax_server::config::LimitsConfig;
use support::Running;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

#[tokio::test]
async fn half_open_connections_give_way_when_the_server_is_full() {
    let limits = LimitsConfig { connections_max: 4, ..LimitsConfig::default() };
    let server = Running::start(ServerConfig { limits, ..ServerConfig::default() }).await;
    let mut hogs = Vec::new();
    for n in 0..8 {
        let mut hog = server.connect().await;
        let part: &[u8] = match n % 3 {
            0 => b"",
            1 => b"POST / HTTP/1.1\r\nx-slow:",
            _ => b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\nab",
        };
        hog.write_all(part).await.unwrap();
        hogs.push(hog);
        assert_eq!(server.json("ListQueues", "{}").await.status, 200);
    }
}

#[tokio::test]
async fn a_head_that_does_not_arrive_is_given_up() {
    let limits = LimitsConfig { read_timeout_ms: 1_000, ..LimitsConfig::default() };
    let server = Running::start(ServerConfig { limits, ..ServerConfig::default() }).await;
    for part in ["P", "PR", "POST / HTTP/1.1\r\nhost: local"] {
        let mut slow = server.connect().await;
        slow.write_all(part.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        let closed = tokio::time::timeout(Duration::from_mins(1), slow.read_to_end(&mut rest)).await;
        assert!(closed.is_ok(), "{part}");
    }
}

#[tokio::test]
async fn a_body_that_does_not_arrive_is_answered_in_aws_s_shape() {
    let limits = LimitsConfig { read_timeout_ms: 1_000, body_bytes_max: 1000, ..LimitsConfig::default() };
    let server = Running::start(ServerConfig { limits, ..ServerConfig::default() }).await;
    let head =
        "POST / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx-amz-target: AmazonSQS.ListQueues\r\n";
    let late = server.send(&format!("{head}content-length: 10\r\n\r\nhalf")).await;
    assert_eq!(late.status, 408, "{late:?}");
    assert!(late.body.contains("RequestTimeout"));
    let large = server.send(&format!("{head}content-length: 1001\r\n\r\n")).await;
    assert_eq!(large.status, 413, "{large:?}");
    assert!(large.body.contains("__type"));
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_its_time_and_not_before() {
    let limits = LimitsConfig { idle_timeout_ms: 4_000, ..LimitsConfig::default() };
    let server = Running::start(ServerConfig { limits, ..ServerConfig::default() }).await;
    let mut idle = server.connect().await;
    let request = support::json("ListQueues", "{}").replace("connection: close\r\n", "");
    for _ in 0..3 {
        tokio::time::sleep(Duration::from_millis(1_500)).await;
        idle.write_all(request.as_bytes()).await.unwrap();
        let mut some = [0; 4096];
        assert!(idle.read(&mut some).await.unwrap() > 0, "kept alive");
    }
    let mut rest = Vec::new();
    tokio::time::timeout(Duration::from_mins(1), idle.read_to_end(&mut rest)).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_body_for_the_router_is_bounded_like_any_other() {
    let limits = LimitsConfig { read_timeout_ms: 1_000, arriving_bytes_max: 100, ..LimitsConfig::default() };
    let config = ServerConfig { limits, ..ServerConfig::default() };
    let router = axum::Router::new().route("/v1/echo", axum::routing::post(|body: String| async { body }));
    let server = Running::start_with(config, |server| server.with_router(router, &[])).await;
    let head = "POST /v1/echo HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
    let whole = server.send(&format!("{head}content-length: 4\r\n\r\nfour")).await;
    assert_eq!((whole.status, whole.body.as_str()), (200, "four"));
    let late = server.send(&format!("{head}content-length: 10\r\n\r\nhalf")).await;
    assert!(late.status == 408 && late.body.contains("request-timeout"), "{late:?}");
    let much = server.send(&format!("{head}content-length: 200\r\n\r\n{}", "x".repeat(200))).await;
    assert!(much.status == 503 && much.body.contains("overloaded"), "{much:?}");
    let large = server.send(&format!("{head}content-length: 9999999\r\n\r\n")).await;
    assert!(large.status == 413 && large.body.contains("request-too-large"), "{large:?}");
}
