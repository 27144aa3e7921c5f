//! A shutdown answers waiting long polls, finishes running requests, accepts no new ones, and ends within its timeout.

mod support;

use std::sync::Arc;

use hapax_core::ManualClock;
use hapax_embedded::Options;
use hapax_server::ServerConfig;
use hapax_server::config::LimitsConfig;
use support::{Running, exchange, json};
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpStream;

#[tokio::test]
async fn parked_polls_are_answered_empty_and_the_server_ends() {
    // On a clock that stands still no poll ends by itself.
    let options = Options { clock: Arc::new(ManualClock::at_ms(1_800_000_000_000)), ..Options::default() };
    let mut server = Running::start_over(options, ServerConfig::default(), |server| server).await;
    server.json("CreateQueue", r#"{"QueueName":"q"}"#).await;
    let polls: Vec<_> = (0..20)
        .map(|_| {
            let address = server.address;
            let poll = json("ReceiveMessage", r#"{"QueueUrl":"q","WaitTimeSeconds":20}"#);
            tokio::spawn(async move { exchange(TcpStream::connect(address).await.unwrap(), &poll).await })
        })
        .collect();
    // Idle and half-open connections must not delay the shutdown either.
    let _idle = server.connect().await;
    let mut half = server.connect().await;
    half.write_all(b"POST / HTTP/1.1\r\nhost:").await.unwrap();
    // Every poll waits once a later request has been answered on each worker; a message wakes none of them.
    for _ in 0..20 {
        server.json("ListQueues", "{}").await;
    }
    server.stop();
    for poll in polls {
        let answer = poll.await.unwrap();
        assert_eq!((answer.status, answer.body.as_str()), (200, "{}"));
    }
    let address = server.address;
    server.stopped().await;
    assert!(TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_request_that_never_arrives_does_not_hold_the_shutdown_beyond_its_bound() {
    let limits =
        LimitsConfig { shutdown_timeout_ms: 300, read_timeout_ms: 3_600_000, ..LimitsConfig::default() };
    let mut server = Running::start(ServerConfig { limits, ..ServerConfig::default() }).await;
    let mut stuck = server.connect().await;
    stuck.write_all(b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\nhalf").await.unwrap();
    server.json("ListQueues", "{}").await;
    server.stop();
    server.stopped().await;
}
