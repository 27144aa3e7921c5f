//! `/readyz` reports the same problem as a send.

mod support;

use hapax_embedded::{Options, StoreQuota};
use hapax_server::ServerConfig;
use support::Running;

async fn over(options: Options) -> Running {
    let server = Running::start_over(options, ServerConfig::default(), |server| server).await;
    assert_eq!(server.json("CreateQueue", r#"{"QueueName":"q"}"#).await.status, 200);
    server
}

async fn send(server: &Running) -> u16 {
    let send = r#"{"QueueUrl":"http://localhost/000000000000/q","MessageBody":"m"}"#;
    server.json("SendMessage", send).await.status
}

async fn ready(server: &Running) -> (u16, String) {
    let request = "GET /readyz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    let answer = server.send(request).await;
    (answer.status, answer.body)
}

#[tokio::test]
async fn a_full_disk_is_not_ready() {
    // No disk has enough free space for this reserve.
    let server = over(Options { reserve_bytes: u64::MAX, ..Options::default() }).await;
    assert_ne!(send(&server).await, 200);
    let (status, body) = ready(&server).await;
    assert!(status == 503 && body.contains("bytes are left on the disk"), "{status} {body}");
}

#[tokio::test]
async fn a_store_at_its_quota_is_not_ready() {
    let quota = StoreQuota { messages_max: Some(1), ..StoreQuota::default() };
    let server = over(Options { quota, ..Options::default() }).await;
    assert_eq!(ready(&server).await, (200, "ready\n".into()));
    assert_eq!(send(&server).await, 200);
    assert_ne!(send(&server).await, 200);
    let (status, body) = ready(&server).await;
    assert!(status == 503 && body.contains("messages_max"), "{status} {body}");
    let purge = r#"{"QueueUrl":"http://localhost/000000000000/q"}"#;
    assert_eq!(server.json("PurgeQueue", purge).await.status, 200);
    assert_eq!(ready(&server).await.0, 200);
}

#[tokio::test]
async fn a_long_poll_on_a_queue_that_is_deleted_names_it() {
    let server = over(Options::default()).await;
    let poll = r#"{"QueueUrl":"http://localhost/000000000000/q","WaitTimeSeconds":20}"#;
    let stream = server.connect().await;
    let request = support::json("ReceiveMessage", poll);
    let waiting = tokio::spawn(async move { support::exchange(stream, &request).await });
    // The queue is gone whether the receive already waits or arrives later.
    let delete = r#"{"QueueUrl":"http://localhost/000000000000/q"}"#;
    assert_eq!(server.json("DeleteQueue", delete).await.status, 200);
    let answer = waiting.await.unwrap();
    assert!(answer.status == 400 && answer.body.contains("QueueDoesNotExist"), "{answer:?}");
}
