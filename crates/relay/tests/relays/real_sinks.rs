//! Sinks that are real: a queue, and a receiver of webhooks.

use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use hapax_core::outbox::{NewOutboxMessage, OutboxStore as _, PublishAnswer, Publisher as _};
use hapax_core::store::SharedStore;
use hapax_core::{QueueAdmin as _, QueueName, QueueStore as _, Receive};
use hapax_faults::{PostgresServer, Process};
use hapax_relay::sink::{NatsSink, QueueSink, WebhookOptions, WebhookSink, webhook};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpListener;

use crate::fixture::{Database, Running, eventually, quick};

/// The queue is in the same database.
pub async fn a_queue_takes_each_message_once(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let store = database.store().await;
    let outbox = store.outbox().unwrap();
    let queue = QueueName::new("orders.fifo").unwrap();
    let open = async || {
        let shared: SharedStore = Arc::new(store.clone());
        Arc::new(QueueSink::open(shared, queue.clone(), "here").await.unwrap())
    };
    let sink = open().await;
    let config = store.queue(&queue).await.unwrap().config;
    assert!(config.is_fifo() && config.dedup.window_ms == config.retention_ms, "made to fit");
    let mut db = database.connect().await;
    for number in 1..=3 {
        let message =
            NewOutboxMessage::new("orders.placed", number.to_string()).key("ö 7").header("tenant", "north");
        outbox.enqueue(&mut db, &message).await.unwrap();
    }
    let too_many = (0..200)
        .fold(NewOutboxMessage::new("orders.placed", "x").key("bad"), |message, number| {
            message.header(format!("h{number}"), "x")
        });
    outbox.enqueue(&mut db, &too_many).await.unwrap();
    // What a relay that crashed had published.
    let all: Vec<(u16, u64)> = (0..64).map(|bucket| (bucket, 0)).collect();
    let ranges = outbox.poll("r", &all).await.unwrap().ranges;
    let messages = outbox.read(&ranges, 10, 1 << 20).await.unwrap();
    let first: Vec<_> =
        messages.iter().filter(|message| message.key.as_deref() == Some("ö 7")).take(2).cloned().collect();
    sink.publish(&first).await;
    let relay = Running::start(Arc::new(outbox.clone()), open().await, quick("r"));
    eventually("the queue has them", async || store.stats(&queue).await.unwrap().ready >= 3).await;
    eventually("the one with too many headers is parked", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.parked == 1)
    })
    .await;
    assert_eq!(relay.watch.counts().duplicates, 2);
    relay.stop().await;
    let got = store.receive(&queue, Receive::up_to(10)).await.unwrap();
    assert_eq!(got.iter().map(|delivery| delivery.body.clone()).collect::<Vec<_>>(), ["1", "2", "3"]);
    assert_eq!(got[0].key.as_str(), first[0].id, "the outbox's id is the idempotency key");
    assert_eq!(got[0].attributes["tenant"].as_text(), Some("north"));
}

type Requests = Arc<Mutex<Vec<(http::HeaderMap, Vec<u8>)>>>;

/// A receiver that answers with the status that the body says.
async fn receiver() -> (String, Requests) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/events", listener.local_addr().unwrap());
    let requests = Requests::default();
    let into = requests.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let into = into.clone();
            tokio::spawn(async move {
                let mut stream = BufReader::new(stream);
                loop {
                    let (mut headers, mut line) = (http::HeaderMap::new(), String::new());
                    if stream.read_line(&mut line).await.unwrap_or(0) == 0 {
                        return;
                    }
                    loop {
                        line.clear();
                        stream.read_line(&mut line).await.unwrap();
                        let Some((name, value)) = line.trim().split_once(": ") else { break };
                        let name: http::HeaderName = name.parse().unwrap();
                        headers.insert(name, value.parse().unwrap());
                    }
                    let length: usize = headers["content-length"].to_str().unwrap().parse().unwrap();
                    let mut body = vec![0; length];
                    stream.read_exact(&mut body).await.unwrap();
                    let status = match String::from_utf8_lossy(&body).parse::<u16>() {
                        // Once, then it is well.
                        Ok(status @ (500 | 503))
                            if into.lock().unwrap().iter().all(|(_, known)| *known != body) =>
                        {
                            status
                        }
                        Ok(422) => 422,
                        _ => 204,
                    };
                    into.lock().unwrap().push((headers, body));
                    let answer = format!("HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
                    stream.write_all(answer.as_bytes()).await.unwrap();
                }
            });
        }
    });
    (url, requests)
}

pub async fn a_webhook_is_signed_and_judged_by_its_status(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let (url, requests) = receiver().await;
    let options = WebhookOptions { secret: Some("whsec_c2VjcmV0".to_owned()), ..WebhookOptions::default() };
    let sink = Arc::new(WebhookSink::new(&url, &options).unwrap());
    database
        .enqueue(&[("a", "1"), ("a", "500"), ("a", "2"), ("b", "422"), ("b", "3"), ("c", "503"), ("c", "4")])
        .await;
    let relay = Running::start(Arc::new(outbox.clone()), sink, quick("r"));
    let bodies = || {
        requests
            .lock()
            .unwrap()
            .iter()
            .map(|(_, body)| String::from_utf8_lossy(body).into_owned())
            .collect::<Vec<_>>()
    };
    eventually("2 and 4 came", async || {
        bodies().contains(&"2".to_owned()) && bodies().contains(&"4".to_owned())
    })
    .await;
    eventually("422 is parked", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.parked == 1)
    })
    .await;
    let got = bodies();
    let at = |body: &str| got.iter().rposition(|known| known == body).unwrap();
    assert!(at("1") < at("500") && at("500") < at("2") && at("503") < at("4"), "{got:?}");
    assert_eq!(got.iter().filter(|body| *body == "500").count(), 2, "a 500 is tried again");
    assert!(got.iter().filter(|body| *body == "503").count() >= 2, "so is a 503");
    assert_eq!(got.iter().filter(|body| *body == "422").count(), 1, "a 422 is not");
    assert!(!got.contains(&"3".to_owned()), "what follows it waits");
    let (held, again) = (outbox.held(None, true, 10).await.unwrap(), "422");
    assert_eq!(held[0].1.message.body, again);
    outbox.skip("r", &held[0].1.message.id, "test").await.unwrap();
    eventually("the key continues", async || bodies().contains(&"3".to_owned())).await;
    relay.stop().await;
    let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    for (headers, body) in requests.lock().unwrap().iter() {
        let id = webhook::verify("whsec_c2VjcmV0", headers, body, now_s).unwrap();
        assert_eq!(headers["idempotency-key"], format!("\"{id}\""));
        assert_eq!(headers["hapax-topic"], "orders");
    }
}

/// A private NATS server with JetStream.
async fn nats() -> (String, Process, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let mut command = std::process::Command::new("nats-server");
    command.args(["-js", "-a", "127.0.0.1", "-p", "-1", "-sd", path, "--ports_file_dir", path]);
    let process = Process::start(&mut command).unwrap();
    let file = folder.path().join(format!("nats-server_{}.ports", process.id()));
    eventually("the server listens", async || {
        std::fs::read_to_string(&file).is_ok_and(|ports| ports.contains("nats://"))
    })
    .await;
    let ports = std::fs::read_to_string(&file).unwrap();
    let at = ports.find("nats://").unwrap();
    let url = ports[at..].split('"').next().unwrap().to_owned();
    (url, process, folder)
}

/// Whether the server that the test of NATS needs is not installed.
pub fn nats_is_missing() -> bool {
    std::process::Command::new("nats-server").arg("--version").output().is_err()
}

pub async fn a_stream_of_nats_takes_each_message_once(server: &'static PostgresServer) {
    let (url, mut process, _folder) = nats().await;
    let error = NatsSink::open(&url).await.err().unwrap().to_string();
    assert!(error.contains("no stream"), "{error}");
    let mut raw =
        BufReader::new(tokio::net::TcpStream::connect(url.strip_prefix("nats://").unwrap()).await.unwrap());
    let config = r#"{"name":"SHOP","subjects":["shop.>"],"storage":"file","duplicate_window":120000000000}"#;
    let make = format!(
        "CONNECT {{\"verbose\":false}}\r\nPUB $JS.API.STREAM.CREATE.SHOP {}\r\n{config}\r\nPING\r\n",
        config.len()
    );
    raw.get_mut().write_all(make.as_bytes()).await.unwrap();
    let mut line = String::new();
    while line.trim() != "PONG" {
        line.clear();
        raw.read_line(&mut line).await.unwrap();
    }
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    eventually("the stream is there", async || NatsSink::open(&url).await.is_ok()).await;
    let sink = Arc::new(NatsSink::open(&format!("{url}/shop")).await.unwrap());
    assert_eq!(sink.describe().dedup, hapax_core::outbox::SinkDedup::Window { window_ms: 120_000 });
    database.enqueue(&[("a", "1"), ("b", "1"), ("a", "2")]).await;
    let mut db = database.connect().await;
    outbox.enqueue(&mut db, &NewOutboxMessage::new("not a subject", "x").key("c")).await.unwrap();
    // What a relay that crashed had published.
    let all: Vec<(u16, u64)> = (0..64).map(|bucket| (bucket, 0)).collect();
    let messages = outbox.read(&outbox.poll("r", &all).await.unwrap().ranges, 10, 1 << 20).await.unwrap();
    let first: Vec<_> =
        messages.iter().filter(|message| message.key.as_deref() == Some("a")).take(1).cloned().collect();
    sink.publish(&first).await;
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    eventually("they are published", async || relay.watch.counts().published == 2).await;
    eventually("the topic that is no subject is parked", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.parked == 1)
    })
    .await;
    assert_eq!(relay.watch.counts().duplicates, 1);
    // What can never be published is parked, and stops no other: no stream takes the first subject, the second is larger
    // than the server accepts, the third would be read as another header.
    let elsewhere = Arc::new(NatsSink::open(&format!("{url}/elsewhere")).await.unwrap());
    let never = |id: u64, message: NewOutboxMessage| hapax_core::outbox::OutboxMessage {
        bucket: 0,
        number: id,
        id: format!("never-{id}"),
        topic: message.topic,
        key: message.key,
        body: message.body,
        headers: message.headers,
        deliver_at_ms: None,
        enqueued_ms: 0,
    };
    let of = |topic: &str| NewOutboxMessage::new(topic, "x");
    let answers = elsewhere.publish(&[never(1, of("orders"))]).await;
    assert!(
        matches!(&answers[..], [PublishAnswer::Refused(why)] if why.contains("no stream")),
        "{answers:?}"
    );
    let batch = [
        never(2, NewOutboxMessage::new("orders", vec![b'x'; 1 << 20])),
        never(3, of("orders").header("a\r\nNats-Rollup", "all")),
        never(4, of("orders").header("Nats-Rollup", "all")),
    ];
    let answers = sink.publish(&batch).await;
    assert!(
        matches!(
            &answers[..],
            [PublishAnswer::Refused(_), PublishAnswer::Refused(_), PublishAnswer::Published]
        ),
        "{answers:?}"
    );
    let info = sink.request("$JS.API.STREAM.INFO.SHOP", b"").await.unwrap();
    let info: serde_json::Value = serde_json::from_slice(&info).unwrap();
    assert_eq!(info["state"]["messages"], 4);
    // The server is gone, and the relay says so.
    process.kill();
    database.enqueue(&[("a", "3")]).await;
    eventually("it is waited for", async || relay.watch.counts().unavailable > 1).await;
    relay.stop().await;
}
