//! The outbox in a SQLite file.

use std::sync::Arc;

use hapax_core::outbox::{NewOutboxMessage, OutboxStore as _, PublishAnswer};
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
