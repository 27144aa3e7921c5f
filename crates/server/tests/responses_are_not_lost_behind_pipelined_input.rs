//! A client that pipelines requests without waiting gets every response, regardless of the input that follows a
//! request.

mod support;

use std::time::Duration;

use hapax_server::ServerConfig;
use support::{Running, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

fn kept_alive(action: &str, body: &str) -> String {
    json(action, body).replace("connection: close\r\n", "")
}

/// All bytes that the server sends on one connection until it closes it, or until `count` responses.
async fn answers(server: &Running, sent: &str, count: usize) -> String {
    let mut stream = server.connect().await;
    stream.write_all(sent.as_bytes()).await.unwrap();
    let mut text = String::new();
    let mut some = [0; 4096];
    let reading = async {
        while text.matches("HTTP/1.1 ").count() < count {
            match stream.read(&mut some).await {
                Ok(0) | Err(_) => break,
                Ok(length) => text.push_str(std::str::from_utf8(&some[..length]).unwrap()),
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(10), reading).await;
    text
}

#[tokio::test]
async fn every_pipelined_request_is_answered() {
    let server = Running::start(ServerConfig::default()).await;
    let one = kept_alive("ListQueues", "{}");
    let text = answers(&server, &one.repeat(20), 20).await;
    assert_eq!(text.matches("HTTP/1.1 200").count(), 20, "{text}");
}

#[tokio::test]
async fn a_response_survives_whatever_follows_its_request() {
    let server = Running::start(ServerConfig::default()).await;
    let last = json("ListQueues", "{}");
    let kept = kept_alive("ListQueues", "{}");
    let twice = "POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 4\r\ncontent-length: 5\r\n\r\nabcde";
    for (what, sent, statuses) in [
        ("a last request with another behind it", format!("{last}{kept}"), vec!["200"]),
        ("a last request with rubbish behind it", format!("{last}\0\x01rubbish\r\n\r\n"), vec!["200"]),
        ("a request with a bad one behind it", format!("{kept}{twice}"), vec!["200", "400"]),
        ("a request with rubbish behind it", format!("{kept}rubbish\r\n\r\n"), vec!["200", "400"]),
        ("a request with half of another behind it", format!("{kept}POST / HT"), vec!["200"]),
        ("a bad request alone", twice.to_owned(), vec!["400"]),
    ] {
        let text = answers(&server, &sent, statuses.len()).await;
        let got: Vec<&str> =
            text.match_indices("HTTP/1.1 ").map(|(at, start)| &text[at + start.len()..][..3]).collect();
        assert_eq!(got, statuses, "{what}: {text:?}");
    }
}
