//! Several relays, several routes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hapax_core::outbox::{Advance, OutboxStore as _, PublishAnswer, Publisher as _};
use hapax_faults::PostgresServer;
use hapax_relay::RelayOptions;

use crate::fixture::{Database, PATIENCE, Recorder, Running, eventually, quick};

async fn enqueue_many(database: &Database, from: u32, to: u32) {
    let messages: Vec<(String, String)> =
        (from..to).map(|number| (format!("k{}", number % 20), number.to_string())).collect();
    let messages: Vec<(&str, &str)> =
        messages.iter().map(|(key, body)| (key.as_str(), body.as_str())).collect();
    database.enqueue(&messages).await;
}

fn in_order(sink: &Recorder, count: usize) {
    assert_eq!(sink.count(), count);
    for key in 0..20 {
        let numbers: Vec<u32> =
            sink.of_key(&format!("k{key}")).iter().map(|body| body.parse().unwrap()).collect();
        assert!(numbers.is_sorted(), "{numbers:?}");
    }
}

pub async fn two_relays_share_the_work_in_order(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    let start = || Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    let first = start();
    enqueue_many(&database, 0, 200).await;
    sink.wait_for(200).await;
    let second = start();
    eventually("the second gets its share", async || {
        let sql = "SELECT count(DISTINCT relay) FROM hapax.outbox_lease WHERE relay IS NOT NULL";
        database.server.sql(&database.name, sql).unwrap() == "2"
    })
    .await;
    enqueue_many(&database, 200, 400).await;
    sink.wait_for(400).await;
    first.stop().await;
    enqueue_many(&database, 400, 600).await;
    sink.wait_for(600).await;
    second.stop().await;
    in_order(&sink, 600);
}

/// The first relay hangs in its sink for longer than its lease; the second one takes over. When the first continues, it
/// records nothing.
pub async fn a_stopped_relay_is_replaced_and_fenced(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(true);
    database.enqueue(&[("a", "1"), ("a", "2"), ("a", "3")]).await;
    outbox.register("r", &["*".to_owned()], &sink.describe()).await.unwrap();
    let leases = outbox.tend("r", "zombie", 500).await.unwrap().held;
    let all: Vec<(u16, u64)> = (0..64).map(|bucket| (bucket, 0)).collect();
    let read = outbox.poll("r", &all).await.unwrap().ranges;
    let messages = outbox.read(&read, 10, 1 << 20).await.unwrap();
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    sink.wait_for(3).await;
    let late = sink.publish(&messages).await;
    assert!(late.iter().all(|answer| *answer == PublishAnswer::Duplicate), "{late:?}");
    let lease = *leases.iter().find(|lease| lease.bucket == messages[0].bucket).unwrap();
    let lost = outbox.advance("r", "zombie", &[Advance { lease, after: 0, position: 1 }]).await.unwrap();
    assert_eq!(lost, [lease.bucket]);
    relay.stop().await;
    assert_eq!(sink.of_key("a"), ["1", "2", "3"]);
}

/// Another relay has published a message of an open round and lost the bucket again: it is not published twice.
pub async fn a_bucket_that_came_back_is_read_again(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let sink = Recorder::new(false);
    let is_second_tried = Arc::new(AtomicBool::new(false));
    let tried = is_second_tried.clone();
    sink.answer(move |message| {
        tried.fetch_or(message.body == "2", Ordering::Relaxed);
        Some(PublishAnswer::Unavailable("down".into()))
    });
    database.enqueue(&[("a", "1"), ("a", "2")]).await;
    let relay = Running::start(Arc::new(database.outbox().await), sink.clone(), quick("r"));
    eventually("a round is open", async || sink.calls.load(Ordering::Relaxed) > 0).await;
    assert!(!is_second_tried.load(Ordering::Relaxed), "the first one is tried first");
    let away = "UPDATE hapax.outbox_lease SET fence = fence + 1 WHERE bucket = hapax.outbox_bucket('a');
        INSERT INTO hapax.outbox_position_0 VALUES ('r', hapax.outbox_bucket('a'), 1)";
    database.server.sql(&database.name, away).unwrap();
    eventually("the second one is next", async || is_second_tried.load(Ordering::Relaxed)).await;
    sink.answer(|_| None);
    sink.wait_for(1).await;
    relay.stop().await;
    assert_eq!(sink.bodies(), ["2"]);
}

/// The bucket is taken while the sink works on the first part of a round: the second part is not published.
pub async fn a_bucket_that_was_taken_is_not_published_further(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let sink = Recorder::new(false);
    let part = sink.describe().batch_max;
    let last = part.to_string();
    let (go_on, gate) = std::sync::mpsc::channel::<()>();
    let gate = Mutex::new(gate);
    sink.answer(move |message| {
        if message.body == last {
            tokio::task::block_in_place(|| gate.lock().unwrap().recv_timeout(PATIENCE)).unwrap();
        }
        None
    });
    let bodies: Vec<String> = (1..=part + 50).map(|number| number.to_string()).collect();
    let messages: Vec<(&str, &str)> = bodies.iter().map(|body| ("a", body.as_str())).collect();
    database.enqueue(&messages).await;
    let options = RelayOptions { lease: Duration::from_secs(2), ..quick("r") };
    let relay = Running::start(Arc::new(database.outbox().await), sink.clone(), options);
    sink.wait_for(part - 1).await;
    let taken = "INSERT INTO hapax.outbox_relay VALUES ('r', 'other', hapax.now_us() + 3600000000);
        UPDATE hapax.outbox_lease SET fence = fence + 1, relay = 'other' WHERE bucket = hapax.outbox_bucket('a')";
    database.server.sql(&database.name, taken).unwrap();
    eventually("it is noticed", async || relay.watch.counts().lost_buckets > 0).await;
    go_on.send(()).unwrap();
    sink.wait_for(part).await;
    relay.stop().await;
    assert_eq!(sink.count(), part);
}

pub async fn routes_do_not_wait_for_each_other(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let (down, up) = (Recorder::new(false), Recorder::new(false));
    down.answer(|_| Some(PublishAnswer::Unavailable("down".into())));
    let stuck = Running::start(Arc::new(outbox.clone()), down.clone(), quick("down"));
    let moving = Running::start(Arc::new(outbox.clone()), up.clone(), quick("up").topics(["ord*"]));
    enqueue_many(&database, 0, 100).await;
    up.wait_for(100).await;
    eventually("its position is recorded", async || {
        let status = outbox.status().await.unwrap();
        status.iter().map(|status| status.lag).collect::<Vec<_>>() == [100, 0]
    })
    .await;
    let status = outbox.status().await.unwrap();
    assert_eq!((status[0].route.as_str(), status[1].topics.clone()), ("down", vec!["ord*".to_owned()]));
    down.answer(|_| None);
    down.wait_for(100).await;
    stuck.stop().await;
    moving.stop().await;
    in_order(&down, 100);
}

pub async fn a_stalled_relay_is_not_ready(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let sink = Recorder::new(false);
    let options = RelayOptions { stalled: Duration::from_millis(300), ..quick("r") };
    let relay = Running::start(Arc::new(database.outbox().await), sink.clone(), options);
    sink.answer(|_| Some(PublishAnswer::Unavailable("connection refused".into())));
    database.enqueue(&[("a", "1")]).await;
    eventually("it is not ready", async || {
        relay.watch.readiness().is_err_and(|why| why.contains("connection refused"))
    })
    .await;
    sink.answer(|_| None);
    eventually("it is ready again", async || relay.watch.readiness().is_ok()).await;
    // Each message is set aside, so that nothing waits to be read; but nothing is accepted either.
    sink.answer(|_| Some(PublishAnswer::Failed("500".into())));
    database.enqueue(&[("a", "2")]).await;
    eventually("it is not ready", async || relay.watch.readiness().is_err_and(|why| why.contains("500")))
        .await;
    sink.answer(|_| None);
    eventually("it is ready again", async || relay.watch.readiness().is_ok()).await;
    // A message that is parked waits for an operator, not for the relay.
    sink.answer(|_| Some(PublishAnswer::Refused("400".into())));
    database.enqueue(&[("a", "3")]).await;
    eventually("it is parked", async || relay.watch.counts().refused == 1).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    assert_eq!(relay.watch.readiness(), Ok(()));
    relay.stop().await;
}
