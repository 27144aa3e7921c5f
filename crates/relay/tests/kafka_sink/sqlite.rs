//! The outbox in a SQLite file, which has one bucket.

use std::sync::Arc;

use hapax_core::outbox::NewOutboxMessage;
use hapax_relay::sink::KafkaSink;
use hapax_sqlite::SqliteOutbox;

use crate::fixture::{Isolation, Setting, Shop};
use crate::outbox::{Running, block_on, eventually, quick};

/// Relays in this process; the first ones end as if they were killed after their commit, before the file knows of it.
pub fn an_outbox_in_a_file_is_published_once(setting: &Setting) {
    let shop = Shop::new(setting);
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("shop.db");
    let mut db = rusqlite::Connection::open(&path).unwrap();
    db.pragma_update(None, "journal_mode", "wal").unwrap();
    SqliteOutbox::create_tables(&db).unwrap();
    let mut number = 0;
    for round in 0..4 {
        let tx = db.transaction().unwrap();
        for _ in 0..5 {
            number += 1;
            let message = NewOutboxMessage::new("orders", number.to_string()).key("a");
            SqliteOutbox::enqueue(&tx, &message).unwrap();
        }
        tx.commit().unwrap();
        block_on(async {
            let sink = Arc::new(KafkaSink::open(&shop.url(setting.broker.address())).await.unwrap());
            let options =
                hapax_relay::RelayOptions { lease: std::time::Duration::from_secs(1), ..quick("orders") };
            let relay = Running::start(Arc::new(SqliteOutbox::open(&path).unwrap()), sink, options);
            let published = || relay.watch.counts().published;
            eventually("the messages of this round are published", async || published() >= 5).await;
            if round < 3 { relay.kill().await } else { relay.stop().await }
        });
    }
    let seen = shop.read(&shop.topic(), Isolation::Committed);
    let values: Vec<u32> = seen.iter().map(|seen| seen.value.parse().unwrap()).collect();
    assert_eq!(values, (1..=20).collect::<Vec<u32>>());
}
