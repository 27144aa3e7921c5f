//! Sinks that are down, slow, flapping, or refuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hapax_core::outbox::{NewOutboxMessage, OutboxMessage, OutboxStore as _, PublishAnswer};
use hapax_faults::PostgresServer;
use hapax_relay::RelayOptions;

use crate::fixture::{Database, Recorder, Running, eventually, quick};

pub async fn a_sink_that_is_down_gets_everything_in_order(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    // A key of the same bucket: its position cannot pass what is not published of the other.
    let sql = "SELECT 'b' || n FROM generate_series(1, 10000) n WHERE hapax.outbox_bucket('b' || n) = hapax.outbox_bucket('a') LIMIT 1";
    let other = &*database.server.sql(&database.name, sql).unwrap();
    let sink = Recorder::new(false);
    sink.answer(|_| Some(PublishAnswer::Unavailable("down".into())));
    // Before the relay starts, so that all are in the same round.
    database.enqueue(&[("a", "1"), (other, "1"), ("a", "2")]).await;
    let relay = Running::start(Arc::new(database.outbox().await), sink.clone(), quick("r"));
    eventually("the sink is tried", async || relay.watch.counts().unavailable > 3).await;
    database.enqueue(&[("a", "3"), (other, "2")]).await;
    // It takes only the second key for a while.
    sink.answer(|message| {
        (message.key.as_deref() == Some("a")).then(|| PublishAnswer::Unavailable("down".into()))
    });
    eventually("the other key is published", async || !sink.of_key(other).is_empty()).await;
    let before = relay.watch.counts().unavailable;
    eventually("the round is tried again", async || relay.watch.counts().unavailable > before + 3).await;
    assert_eq!(sink.of_key(other).len(), 1, "what was published is not repeated while the round is open");
    // It flaps: every second message fails.
    let turn = AtomicU32::new(0);
    sink.answer(move |_| {
        let down = turn.fetch_add(1, Ordering::Relaxed).is_multiple_of(2);
        down.then(|| PublishAnswer::Unavailable("down".into()))
    });
    sink.wait_for(5).await;
    relay.stop().await;
    assert_eq!(
        (sink.of_key("a"), sink.of_key(other)),
        (vec!["1".into(), "2".into(), "3".into()], vec!["1".into(), "2".into()])
    );
    assert_eq!(sink.count(), 5, "nothing was repeated");
}

pub async fn poison_blocks_only_its_key(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    sink.answer(|message| (message.body == "poison").then(|| PublishAnswer::Refused("no".into())));
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    database.enqueue(&[("a", "1"), ("a", "poison"), ("a", "3"), ("b", "1"), ("b", "2")]).await;
    sink.wait_for(3).await;
    database.enqueue(&[("a", "4"), ("b", "3")]).await;
    sink.wait_for(4).await;
    assert_eq!(sink.of_key("a"), ["1"], "what follows the poison waits");
    eventually("what follows is set aside", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.held == 3)
    })
    .await;
    let held = outbox.held(Some("r"), true, 10).await.unwrap();
    assert_eq!((held.len(), held[0].1.error.as_deref()), (1, Some("no")));
    // It survives a restart of the relay.
    relay.stop().await;
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    database.enqueue(&[("a", "5"), ("b", "4")]).await;
    sink.wait_for(5).await;
    assert_eq!(sink.of_key("a"), ["1"]);
    // The sink has learned to take it.
    sink.answer(|_| None);
    assert_eq!(outbox.retry("r", None, "test").await.unwrap(), 1);
    eventually("the key continues", async || sink.of_key("a").len() == 5).await;
    database.enqueue(&[("a", "6")]).await;
    eventually("new messages are published at once", async || sink.of_key("a").len() == 6).await;
    relay.stop().await;
    assert_eq!(sink.of_key("a"), ["1", "poison", "3", "4", "5", "6"]);
    assert_eq!(outbox.status().await.unwrap()[0].held, 0);
}

/// The first message of a key is published after its retry, the second one is not: a third one waits behind it.
pub async fn a_new_message_does_not_overtake_a_held_one(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    let refuse = |message: &OutboxMessage, bodies: &[&str]| {
        let is_refused = bodies.iter().any(|body| message.body == *body);
        is_refused.then(|| PublishAnswer::Refused("no".into()))
    };
    sink.answer(move |message| refuse(message, &["1", "2"]));
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    let held = async |count| {
        eventually("it is held", async || {
            outbox.status().await.unwrap().first().is_some_and(|route| route.held == count)
        })
        .await;
    };
    database.enqueue(&[("a", "1"), ("a", "2")]).await;
    held(2).await;
    sink.answer(move |message| refuse(message, &["2"]));
    assert_eq!(outbox.retry("r", None, "test").await.unwrap(), 1);
    sink.wait_for(1).await;
    held(1).await;
    database.enqueue(&[("a", "3")]).await;
    held(2).await;
    sink.answer(|_| None);
    eventually("the second one is parked", async || outbox.retry("r", None, "test").await.unwrap() == 1)
        .await;
    sink.wait_for(3).await;
    relay.stop().await;
    assert_eq!(sink.bodies(), ["1", "2", "3"]);
}

pub async fn nothing_is_read_while_too_many_keys_are_held(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    sink.answer(|message| (message.body != "good").then(|| PublishAnswer::Refused("no".into())));
    let options = RelayOptions { held_keys_max: 1, stalled: Duration::from_millis(300), ..quick("r") };
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), options);
    database.enqueue(&[("a", "1"), ("b", "2")]).await;
    eventually("they are held", async || relay.watch.counts().held == 2).await;
    database.enqueue(&[("c", "good")]).await;
    eventually("it says so", async || {
        relay.watch.readiness().is_err_and(|why| why.contains("2 keys are set aside"))
    })
    .await;
    assert_eq!(sink.count(), 0);
    sink.answer(|_| None);
    assert_eq!(outbox.retry("r", None, "test").await.unwrap(), 2);
    sink.wait_for(3).await;
    relay.stop().await;
}

pub async fn a_message_that_keeps_failing_is_parked(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    sink.answer(|message| (message.key.as_deref() == Some("a")).then(|| PublishAnswer::Failed("500".into())));
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    database.enqueue(&[("a", "1"), ("b", "1")]).await;
    eventually("it is parked after its attempts", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.parked == 1)
    })
    .await;
    let (_, held) = outbox.held(Some("r"), true, 10).await.unwrap().remove(0);
    assert_eq!(held.attempts, 5);
    assert!(outbox.skip("r", &held.message.id, "test").await.unwrap());
    sink.answer(|_| None);
    database.enqueue(&[("a", "2")]).await;
    eventually("the key continues", async || sink.of_key("a") == ["2"]).await;
    relay.stop().await;
}

pub async fn a_message_that_hangs_delays_no_other_key(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let outbox = database.outbox().await;
    let sink = Recorder::new(false);
    sink.answer(|message| (message.body == "slow").then(|| PublishAnswer::Failed("no answer".into())));
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    database.enqueue(&[("a", "slow")]).await;
    eventually("it is set aside", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.held == 1)
    })
    .await;
    sink.slow("slow", Duration::from_secs(30));
    // Its next attempt hangs; meanwhile others are published.
    for number in 1..=5 {
        database.enqueue(&[("b", &number.to_string())]).await;
        sink.wait_for(number).await;
    }
    relay.kill().await;
}

pub async fn a_later_time_is_waited_for(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let (outbox, mut db) = (database.outbox().await, database.connect().await);
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
    let at = |body: &str, ms| NewOutboxMessage::new("t", body.to_owned()).key("a").deliver_at_ms(ms);
    let sink = Recorder::new(false);
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), quick("r"));
    outbox.enqueue(&mut db, &at("far", now_ms + 3_600_000)).await.unwrap();
    outbox.enqueue(&mut db, &at("soon", now_ms + 700)).await.unwrap();
    database.enqueue(&[("a", "now")]).await;
    sink.wait_for(2).await;
    relay.stop().await;
    assert_eq!(sink.bodies(), ["now", "soon"]);
    assert_eq!(outbox.status().await.unwrap()[0].held, 1);
}
