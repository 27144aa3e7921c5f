//! The outbox in a SQLite file.

use std::sync::Arc;

use hapax_core::outbox::{NewOutboxMessage, OutboxStore as _, PublishAnswer, Publisher as _};
use hapax_faults::PostgresServer;
use hapax_relay::RelayOptions;
use hapax_sqlite::SqliteOutbox;
use std::time::Duration;

use crate::fixture::{Recorder, Running, eventually, quick};

pub async fn a_file_has_an_outbox_too(_server: &'static PostgresServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let mut db = rusqlite::Connection::open(&path).unwrap();
    db.pragma_update(None, "journal_mode", "wal").unwrap();
    SqliteOutbox::create_tables(&db).unwrap();
    let mut enqueue = |key: &str, body: &str, commit: bool| {
        let tx = db.transaction().unwrap();
        SqliteOutbox::enqueue(
            &tx,
            &NewOutboxMessage::new("orders", body.to_owned()).key(key).header("h", "v"),
        )
        .unwrap();
        if commit { tx.commit().unwrap() } else { tx.rollback().unwrap() }
    };
    let outbox = SqliteOutbox::open(&path).unwrap();
    let sink = Recorder::new(true);
    sink.answer(|message| (message.body == "poison").then(|| PublishAnswer::Refused("no".into())));
    let options =
        || RelayOptions { rotate: Duration::from_millis(20), lease: Duration::from_secs(1), ..quick("r") };
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), options());
    for (key, body, commit) in [
        ("a", "1", true),
        ("a", "rolled back", false),
        ("b", "poison", true),
        ("b", "2", true),
        ("a", "2", true),
    ] {
        enqueue(key, body, commit);
    }
    sink.wait_for(2).await;
    eventually("the poison is parked", async || {
        outbox.status().await.unwrap().first().is_some_and(|route| route.parked == 1)
    })
    .await;
    // A second relay waits for the lease of the first, which dies.
    let second = Running::start(Arc::new(SqliteOutbox::open(&path).unwrap()), sink.clone(), options());
    relay.kill().await;
    enqueue("a", "3", true);
    sink.wait_for(3).await;
    sink.answer(|_| None);
    assert_eq!(outbox.retry("r", None, "test").await.unwrap(), 1);
    sink.wait_for(5).await;
    eventually("what is published is deleted", async || {
        let left = outbox.unpublished("none", 10).await.unwrap();
        left.is_empty() && outbox.status().await.unwrap().first().is_some_and(|route| route.held == 0)
    })
    .await;
    second.stop().await;
    assert_eq!(
        (sink.of_key("a"), sink.of_key("b")),
        (vec!["1".into(), "2".into(), "3".into()], vec!["poison".into(), "2".into()])
    );
    assert_eq!(sink.got.lock().unwrap()[0].headers["h"], "v");
}

/// A business transaction may take its time; what the relay reads is not affected, and it makes no writer wait by looking.
pub async fn looks_of_a_relay_do_not_wait_for_writers(_server: &'static PostgresServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let mut db = rusqlite::Connection::open(&path).unwrap();
    db.pragma_update(None, "journal_mode", "wal").unwrap();
    SqliteOutbox::create_tables(&db).unwrap();
    let enqueue = |tx: &rusqlite::Transaction<'_>| {
        SqliteOutbox::enqueue(tx, &NewOutboxMessage::new("orders", "1").key("a")).unwrap();
    };
    let tx = db.transaction().unwrap();
    enqueue(&tx);
    tx.commit().unwrap();
    let outbox = SqliteOutbox::open(&path).unwrap();
    outbox.register("r", &["*".to_owned()], &Recorder::new(true).describe()).await.unwrap();
    let tx = db.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate).unwrap();
    enqueue(&tx);
    let ranges = outbox.poll("r", &outbox.positions("r", &[0]).await.unwrap()).await.unwrap().ranges;
    assert_eq!(outbox.read(&ranges, 10, 1 << 20).await.unwrap().len(), 1);
    assert_eq!(outbox.due("r", &[0], 10).await.unwrap(), []);
    assert_eq!(outbox.held_keys("r", &[0]).await.unwrap(), []);
    assert_eq!(outbox.status().await.unwrap()[0].lag, 1);
    let error = outbox.tend("r", "relay", 1_000).await.unwrap_err();
    assert_eq!(error.code(), "overloaded", "what writes waits for its turn: {error}");
    tx.commit().unwrap();
    assert_eq!(outbox.tend("r", "relay", 60_000).await.unwrap().held.len(), 1);
    let error = outbox.forget("r", "test").await.unwrap_err().to_string();
    assert!(error.contains("stop it first"), "{error}");
    outbox.give_back("r", "relay", &[]).await.unwrap();
    assert!(outbox.forget("r", "test").await.unwrap());
    assert!(outbox.tend("r", "relay", 60_000).await.is_err(), "the route is not known any more");
}

pub async fn messages_that_no_route_takes_are_not_in_the_way(_server: &'static PostgresServer) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let mut db = rusqlite::Connection::open(&path).unwrap();
    SqliteOutbox::create_tables(&db).unwrap();
    let tx = db.transaction().unwrap();
    for number in 0..2_010 {
        let topic = if number < 2_000 { "other" } else { "orders" };
        SqliteOutbox::enqueue(&tx, &NewOutboxMessage::new(topic, "x")).unwrap();
    }
    tx.commit().unwrap();
    let sink = Recorder::new(true);
    let options = RelayOptions { rotate: Duration::from_millis(20), ..quick("r") }.topics(["orders"]);
    let relay = Running::start(Arc::new(SqliteOutbox::open(&path).unwrap()), sink.clone(), options);
    sink.wait_for(10).await;
    let count = || db.query_row("SELECT count(*) FROM hapax_outbox", [], |row| row.get::<_, i64>(0)).unwrap();
    eventually("what was published is deleted", async || count() == 2_000).await;
    relay.stop().await;
    assert_eq!(count(), 2_000, "the others are kept");
}
