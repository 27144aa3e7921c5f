//! Unread responses take a bounded number of bytes, regardless of the clients that request them. Such clients are
//! disconnected eventually, and others are served meanwhile.

mod support;

use std::time::{Duration, Instant};

use hapax_server::ServerConfig;
use hapax_server::config::LimitsConfig;
use support::{Running, exchange, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

/// Maximum time of every wait: only a broken server reaches it.
const PATIENCE: Duration = Duration::from_mins(3);
const MESSAGE: usize = 1_000_000;
const BUDGET: usize = 32_000_000;
/// Size of the encoding around the bodies of ten messages.
const AROUND: usize = 20_000;

async fn server(unread_bytes_max: usize, write_timeout_ms: u64) -> Running {
    let limits = LimitsConfig { unread_bytes_max, write_timeout_ms, ..LimitsConfig::default() };
    let server = Running::start_native(ServerConfig { limits, ..ServerConfig::default() }).await;
    for queue in ["large", "other"] {
        assert_eq!(server.json("CreateQueue", &format!(r#"{{"QueueName":"{queue}"}}"#)).await.status, 200);
    }
    for _ in 0..10 {
        send(&server, "large").await;
    }
    server
}

async fn send(server: &Running, queue: &str) {
    let body = "x".repeat(MESSAGE);
    let request = format!(r#"{{"QueueUrl":"http://localhost/000000000000/{queue}","MessageBody":"{body}"}}"#);
    assert_eq!(server.json("SendMessage", &request).await.status, 200);
}

fn receive(queue: &str, wait_s: u64, lease_s: u64) -> String {
    let body = format!(
        r#"{{"QueueUrl":"http://localhost/000000000000/{queue}","MaxNumberOfMessages":10,"VisibilityTimeout":{lease_s},"WaitTimeSeconds":{wait_s}}}"#
    );
    json("ReceiveMessage", &body)
}

/// A client that requests ten large messages and does not read the response.
async fn slow_reader(server: &Running) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4096).unwrap();
    let mut stream = socket.connect(server.address).await.unwrap();
    stream.write_all(receive("large", 1, 0).as_bytes()).await.unwrap();
    stream
}

/// Starts `count` slow readers, one after the other: each gets all ten messages.
async fn slow_readers(server: &Running, count: usize) -> Vec<TcpStream> {
    let mut slow = Vec::new();
    for nth in 1..=count {
        slow.push(slow_reader(server).await);
        let mut asked = Instant::now();
        let begun = asked;
        while server.unread.used() < nth * 10 * MESSAGE {
            assert!(begun.elapsed() < PATIENCE, "an answer is unread");
            tokio::time::sleep(Duration::from_millis(5)).await;
            // It may have been disconnected already while this test had no turn: then another one takes its place.
            if asked.elapsed() > Duration::from_secs(3) {
                *slow.last_mut().unwrap() = slow_reader(server).await;
                asked = Instant::now();
            }
        }
        // A lease of zero expires with the next millisecond.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    slow
}

async fn until(what: &str, mut reached: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !reached() {
        assert!(begun.elapsed() < PATIENCE, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn slow_readers_take_a_bounded_number_of_bytes_and_others_are_served() {
    let server = server(BUDGET, 5_000).await;
    let room = server.unread.clone();
    let mut slow = Vec::new();
    for _ in 0..40 {
        slow.push(slow_reader(&server).await);
    }
    until("the answers are there", || room.peak() > BUDGET / 2).await;
    // Other clients may wait briefly or be told to retry; they are never starved.
    let begun = Instant::now();
    let mut answered = 0;
    while answered < 5 {
        let answer = server.json("ListQueues", "{}").await;
        assert!([200, 503].contains(&answer.status), "{answer:?}");
        if answer.status == 503 {
            assert!(answer.head.to_lowercase().contains("retry-after: "), "{}", answer.head);
        }
        answered += usize::from(answer.status == 200);
        assert!(begun.elapsed() < PATIENCE, "others are starved");
    }
    // Clients that never read are disconnected, which frees their bytes.
    until("slow readers are disconnected", || room.used() == 0).await;
    assert!(room.peak() <= BUDGET + AROUND, "{} bytes were unread at once", room.peak());
    for mut stream in slow {
        let mut answer = Vec::new();
        let _ = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer))
            .await
            .expect("the connection has ended");
        let text = String::from_utf8_lossy(&answer[..answer.len().min(12)]).into_owned();
        assert!(["", "HTTP/1.1 200", "HTTP/1.1 503"].contains(&text.as_str()), "{text}");
    }
}

/// The control: without the bound, the same clients hold everything that they requested.
#[tokio::test]
async fn without_a_bound_the_same_clients_hold_everything() {
    let server = server(10_000_000_000, 600_000).await;
    let _slow = slow_readers(&server, 6).await;
    assert!(server.unread.peak() >= 6 * 10 * MESSAGE);
}

#[tokio::test]
async fn messages_of_an_answer_without_room_are_given_back() {
    // One response fits, but not one more message: the waiting receive finds no space for its response.
    let server = server(10 * MESSAGE + AROUND + MESSAGE / 2, 600_000).await;
    let room = server.unread.clone();
    for _ in 0..10 {
        let stream = server.connect().await;
        let waiting = tokio::spawn(async move { exchange(stream, &receive("other", 20, 3600)).await });
        let slow = slow_readers(&server, 1).await;
        send(&server, "other").await;
        let refused = waiting.await.unwrap();
        drop(slow);
        until("the clients are gone", || room.used() == 0).await;
        if refused.status == 503 {
            assert!(refused.body.contains("retry with backoff"), "{}", refused.body);
            let again = exchange(server.connect().await, &receive("other", 20, 3600)).await;
            let given_back = again.body.len() > MESSAGE;
            assert!(
                again.status == 200 && given_back,
                "the message that no client saw is leased for an hour"
            );
            return;
        }
        // On a busy machine the slow reader may have been disconnected first: try again.
        assert_eq!(refused.status, 200);
        assert_eq!(
            server.json("PurgeQueue", r#"{"QueueUrl":"http://localhost/000000000000/other"}"#).await.status,
            200
        );
    }
    panic!("the answer always had room");
}

/// A receive under an attempt id gives nothing back: its repeat has a right to the same messages.
#[tokio::test]
async fn an_answer_without_room_under_an_attempt_id_waits_for_its_repeat() {
    let server = server(10 * MESSAGE + AROUND + MESSAGE / 2, 600_000).await;
    let room = server.unread.clone();
    for nth in 0..10 {
        let url = format!("http://localhost/000000000000/other{nth}.fifo");
        let create = format!(r#"{{"QueueName":"other{nth}.fifo","Attributes":{{"FifoQueue":"true"}}}}"#);
        assert_eq!(server.json("CreateQueue", &create).await.status, 200);
        let receive = |attempt: &str, wait_s: u64| {
            let asks = r#""VisibilityTimeout":3600,"AttributeNames":["ApproximateReceiveCount"]"#;
            let attempt = format!(r#""ReceiveRequestAttemptId":"{attempt}","WaitTimeSeconds":{wait_s}"#);
            json("ReceiveMessage", &format!(r#"{{"QueueUrl":"{url}",{asks},{attempt}}}"#))
        };
        let (stream, ask) = (server.connect().await, receive("try", 20));
        let waiting = tokio::spawn(async move { exchange(stream, &ask).await });
        let slow = slow_readers(&server, 1).await;
        let body = "x".repeat(MESSAGE);
        let group = r#""MessageGroupId":"g","MessageDeduplicationId":"d""#;
        let send = format!(r#"{{"QueueUrl":"{url}",{group},"MessageBody":"{body}"}}"#);
        assert_eq!(server.json("SendMessage", &send).await.status, 200);
        let refused = waiting.await.unwrap();
        drop(slow);
        until("the clients are gone", || room.used() == 0).await;
        if refused.status != 503 {
            // On a busy machine the slow reader may have been disconnected first: try again.
            assert_eq!(refused.status, 200);
            continue;
        }
        let other = exchange(server.connect().await, &receive("other", 0)).await;
        assert!(other.status == 200 && other.body.len() < MESSAGE, "another attempt has no right to it");
        let again = exchange(server.connect().await, &receive("try", 0)).await;
        assert!(again.status == 200 && again.body.len() > MESSAGE, "{} {}", again.status, again.head);
        assert!(again.body.contains(r#""ApproximateReceiveCount":"1""#), "it is the same delivery");
        return;
    }
    panic!("the answer always had room");
}

/// Sends a message over the native API.
async fn send_native(server: &Running, queue: &str, body: &str) {
    let body = serde_json::json!({ "messages": [{ "body": body }] }).to_string();
    let sent = server.send(&native(&format!("/v1/queues/{queue}/messages"), &body)).await;
    assert_eq!(sent.status, 200, "{}", sent.body);
}

fn native(path: &str, body: &str) -> String {
    let head = "content-type: application/json\r\nhost: localhost\r\nconnection: close";
    format!("POST {path} HTTP/1.1\r\n{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

/// A native receive of `other` that waits while a client that does not read takes all room; then a message is there for
/// it. Its answer, as soon as the room was really taken when it was sent.
async fn receive_without_room(
    server: &Running,
    receive: &serde_json::Value,
    message: &str,
) -> support::TestResponse {
    let room = server.unread.clone();
    for _ in 0..10 {
        let stream = server.connect().await;
        let request = native("/v1/queues/other/receive", &receive.to_string());
        let waiting = tokio::spawn(async move { exchange(stream, &request).await });
        let slow = slow_readers(server, 1).await;
        let full = room.used();
        send_native(server, "other", message).await;
        let answer = waiting.await.unwrap();
        let still_full = room.used() >= full;
        drop(slow);
        until("the clients are gone", || room.used() == 0).await;
        let waited_in_vain = answer.status == 200 && !answer.body.contains("receipt");
        if still_full && !waited_in_vain {
            return answer;
        }
        // The slow reader was disconnected first, or the wait was over, because this machine is busy: try again.
        let purged = server.json("PurgeQueue", r#"{"QueueUrl":"http://localhost/000000000000/other"}"#).await;
        assert_eq!(purged.status, 200);
    }
    panic!("there always was room");
}

/// A send is answered even while there is no room, since its answer is small and it began before. So the room is larger
/// than one answer of the slow reader by a little.
async fn almost_full() -> Running {
    server(10 * MESSAGE + AROUND + MESSAGE / 2, 600_000).await
}

#[tokio::test]
async fn a_receive_that_deletes_is_answered_without_room() {
    let server = almost_full().await;
    let receive = serde_json::json!({ "wait_ms": 20_000, "ack_on_receive": true });
    let large = "x".repeat(MESSAGE);
    let answer = receive_without_room(&server, &receive, &large).await;
    assert!(answer.status == 200 && answer.body.contains(&large), "{} {}", answer.status, answer.head);
    // The same without the deletion is refused and given back, so there was no room.
    let receive = serde_json::json!({ "wait_ms": 20_000, "lease_ms": 3_600_000 });
    let refused = receive_without_room(&server, &receive, &large).await;
    assert!(refused.status == 503 && refused.body.contains("overloaded"), "{}", refused.head);
    let again = server.send(&native("/v1/queues/other/receive", &receive.to_string())).await;
    assert!(again.body.contains(&large), "the message that no client saw is leased for an hour");
}

/// A native receive under an attempt id gives nothing back either.
#[tokio::test]
async fn a_native_answer_without_room_under_an_attempt_id_waits_for_its_repeat() {
    let server = almost_full().await;
    let receive = serde_json::json!({ "wait_ms": 20_000, "lease_ms": 3_600_000, "attempt_id": "try" });
    let large = "x".repeat(MESSAGE);
    let refused = receive_without_room(&server, &receive, &large).await;
    assert!(refused.status == 503 && refused.body.contains("overloaded"), "{}", refused.head);
    let other = serde_json::json!({ "wait_ms": 0, "attempt_id": "other" });
    let other = server.send(&native("/v1/queues/other/receive", &other.to_string())).await;
    assert!(other.status == 200 && !other.body.contains(&large), "another attempt has no right to it");
    let again = server.send(&native("/v1/queues/other/receive", &receive.to_string())).await;
    assert!(again.status == 200 && again.body.contains(&large), "{} {}", again.status, again.head);
}

/// Escaping makes this answer larger than what is always sent; its message is leased before that is known.
#[tokio::test]
async fn a_native_receive_that_was_admitted_is_not_refused_after_its_lease() {
    let server = almost_full().await;
    let receive = serde_json::json!({ "wait_ms": 20_000, "lease_ms": 3_600_000 });
    let escaped = "\u{1}".repeat(200_000);
    let answer = receive_without_room(&server, &receive, &escaped).await;
    assert!(answer.status == 200 && answer.body.len() > MESSAGE, "{} {}", answer.status, answer.head);
}

#[tokio::test]
async fn a_health_check_does_not_wait_for_room() {
    for _ in 0..10 {
        let server = server(5 * MESSAGE, 600_000).await;
        let slow = slow_readers(&server, 1).await;
        let used = server.unread.used();
        let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        let (healthy, ready) = (server.send(&get("/healthz")).await, server.send(&get("/readyz")).await);
        let still_full = server.unread.used() >= used;
        drop(slow);
        assert_eq!((healthy.status, ready.status), (200, 200), "{} {}", healthy.body, ready.body);
        // A request that waits begins when the slow reader has been disconnected.
        if still_full {
            return;
        }
    }
    panic!("they waited for room");
}
