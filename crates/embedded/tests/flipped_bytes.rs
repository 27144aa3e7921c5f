//! A flipped byte on the disk is reported and its message parked; it is never delivered, and everything else continues.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use hapax_core::{
    Attribute, Browse, FailureCause, GroupId, ManualClock, MessageState, NewMessage, QueueAdmin, QueueConfig,
    QueueName, QueueStore, Receive, Settle, StoreError,
};
use hapax_embedded::{Embedded, OpenError, Options};
use rusqlite::Connection;

fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// The clock does not move, so that a seed finds the same bytes in the same places.
fn options() -> Options {
    Options { clock: Arc::new(ManualClock::at_ms(1_800_000_000_000)), ..Options::default() }
}

fn open(folder: &Path) -> Embedded {
    Embedded::open(folder, options()).unwrap()
}

fn browse_all() -> Browse {
    Browse { limit: 1_000, ..Browse::default() }
}

/// A body that occurs only once in the file.
fn body(number: usize) -> Vec<u8> {
    format!("<{number:03}> {}", "lorem ipsum ".repeat(5 + number % 7)).into_bytes()
}

/// A closed store with `count` messages.
async fn closed_store(count: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let store = open(folder.path());
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    let message = |number| {
        let group = GroupId::new(format!("group-{number}")).unwrap();
        let attribute = Attribute::text(format!("value of {number:03}"));
        NewMessage::new(body(number)).attribute("name", attribute).group(group)
    };
    let sent = store.send(&queue(), (0..count).map(message).collect()).await.unwrap();
    assert!(sent.iter().all(Result::is_ok));
    store.close();
    folder
}

/// Inverts a byte of the database, `at` bytes into the only occurrence of `needle`.
fn flip(folder: &Path, needle: &[u8], at: usize) {
    let file = folder.join("hapax.db");
    let mut bytes = std::fs::read(&file).unwrap();
    let places: Vec<_> =
        (0..bytes.len() - needle.len()).filter(|&i| bytes[i..].starts_with(needle)).collect();
    assert_eq!(places.len(), 1, "the bytes to flip are in one place");
    bytes[places[0] + at] ^= 0x10;
    std::fs::write(file, bytes).unwrap();
}

/// Receives and acks everything; returns the delivered bodies by number.
async fn drain(store: &Embedded) -> BTreeMap<usize, Vec<u8>> {
    let mut found = BTreeMap::new();
    drain_into(store, &mut found).await.unwrap();
    found
}

async fn drain_into(store: &Embedded, found: &mut BTreeMap<usize, Vec<u8>>) -> Result<(), StoreError> {
    loop {
        let deliveries = store.receive(&queue(), Receive::up_to(100)).await?;
        if deliveries.is_empty() {
            return Ok(());
        }
        for delivery in &deliveries {
            let number = std::str::from_utf8(&delivery.body[1..4]).unwrap().parse().unwrap();
            found.insert(number, delivery.body.to_vec());
        }
        let acks = deliveries.into_iter().map(|d| Settle::ack(d.receipt)).collect();
        assert!(store.settle(&queue(), acks).await?.iter().all(Result::is_ok));
    }
}

/// Message 3 is damaged: it is parked and reported, and the others are delivered.
async fn message_3_is_parked(folder: &Path) -> Embedded {
    let store = open(folder);
    let found = drain(&store).await;
    assert_eq!(found.len(), 9);
    for (number, bytes) in &found {
        assert_eq!(*bytes, body(*number));
    }
    assert!(!found.contains_key(&3));
    let stats = store.stats(&queue()).await.unwrap();
    assert_eq!((stats.parked, stats.ready, stats.in_flight), (1, 0, 0));
    let warnings = store.status().await.unwrap().warnings;
    assert!(warnings.iter().any(|warning| warning.contains("parked")), "{warnings:?}");

    let only_parked = Browse { state: Some(MessageState::Parked), ..browse_all() };
    let page = store.browse(&queue(), only_parked).await.unwrap();
    assert_eq!(page.items.len(), 1);
    assert_eq!(page, store.browse(&queue(), browse_all()).await.unwrap());
    let parked = &page.items[0];
    assert_eq!(parked.state, MessageState::Parked);
    assert_eq!(parked.parked.as_ref().unwrap().0, FailureCause::Damaged);
    store
}

/// An operator accepts the damaged message as it is; it is delivered, also after a restart.
async fn release_accepts_it(store: Embedded, folder: &Path) -> Vec<u8> {
    let id = store.browse(&queue(), browse_all()).await.unwrap().items[0].id;
    assert_eq!(store.release(&queue(), vec![id]).await.unwrap(), 1);
    store.close();
    let store = open(folder);
    assert_eq!(
        store.status().await.unwrap().warnings,
        Vec::<String>::new(),
        "accepted means accepted for good"
    );
    let deliveries = store.receive(&queue(), Receive::up_to(10)).await.unwrap();
    assert_eq!(deliveries.len(), 1);
    assert_eq!(deliveries[0].id, id);
    store.settle(&queue(), vec![Settle::ack(deliveries[0].receipt.clone())]).await.unwrap()[0]
        .as_ref()
        .unwrap();
    deliveries[0].body.to_vec()
}

#[tokio::test]
async fn in_a_body() {
    let folder = closed_store(10).await;
    flip(folder.path(), b"<003> lorem", 6);
    let store = message_3_is_parked(folder.path()).await;
    assert_eq!(store.stats(&queue()).await.unwrap().totals.damaged, 1);
    assert_eq!(store.browse(&queue(), browse_all()).await.unwrap().items[0].body, None);
    let accepted = release_accepts_it(store, folder.path()).await;
    let mut expected = body(3);
    expected[6] ^= 0x10;
    assert_eq!(accepted, expected, "as it is");
}

#[tokio::test]
async fn in_attributes() {
    let folder = closed_store(10).await;
    flip(folder.path(), b"value of 003", 2);
    let store = message_3_is_parked(folder.path()).await;
    assert_eq!(release_accepts_it(store, folder.path()).await, body(3));
}

#[tokio::test]
async fn in_a_metadata_row() {
    let folder = closed_store(10).await;
    flip(folder.path(), b"group-3", 6);
    let store = message_3_is_parked(folder.path()).await;
    assert_eq!(release_accepts_it(store, folder.path()).await, body(3));
}

#[tokio::test]
async fn in_a_metadata_row_whose_text_is_no_text_any_more() {
    let folder = closed_store(10).await;
    let file = folder.path().join("hapax.db");
    let mut bytes = std::fs::read(&file).unwrap();
    let at = bytes.windows(7).position(|window| window == b"group-3").unwrap();
    bytes[at] = 0xff;
    std::fs::write(file, bytes).unwrap();
    let store = message_3_is_parked(folder.path()).await;
    assert_eq!(release_accepts_it(store, folder.path()).await, body(3));
}

fn refused(folder: &Path, expected: &str) {
    match Embedded::open(folder, options()) {
        Err(OpenError::Damaged(problem)) => {
            assert!(problem.contains(expected) && problem.contains("restore a backup"), "{problem}");
        }
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("a damaged {expected} was opened"),
    }
}

#[tokio::test]
async fn in_a_queue_row() {
    let folder = closed_store(1).await;
    flip(folder.path(), b"retention_ms", 0);
    refused(folder.path(), "queue \"jobs\"");
}

#[tokio::test]
async fn in_the_stores_own_row() {
    let folder = closed_store(1).await;
    let db = Connection::open(folder.path().join("hapax.db")).unwrap();
    let secret: Vec<u8> = db.query_row("SELECT secret FROM store", [], |row| row.get(0)).unwrap();
    drop(db);
    flip(folder.path(), &secret, 7);
    refused(folder.path(), "the store's own row");
}

#[tokio::test]
async fn a_store_whose_own_row_is_gone_is_not_taken_for_a_new_one() {
    let folder = closed_store(1).await;
    let db = Connection::open(folder.path().join("hapax.db")).unwrap();
    db.execute("DELETE FROM store", []).unwrap();
    drop(db);
    refused(folder.path(), "the store's own row");
}

/// The pages of the tables that hold messages.
fn message_pages(folder: &Path) -> Vec<u64> {
    let db = Connection::open(folder.join("hapax.db")).unwrap();
    let root = |table| {
        let sql = "SELECT rootpage FROM sqlite_schema WHERE name = ?1";
        db.query_row(sql, [table], |row| row.get::<_, i64>(0)).unwrap() as u64
    };
    let roots = [root("message"), root("body")];
    let pages: i64 = db.query_row("PRAGMA page_count", [], |row| row.get(0)).unwrap();
    // Children of a table's root were allocated after all tables.
    let schema_end: i64 =
        db.query_row("SELECT max(rootpage) FROM sqlite_schema", [], |row| row.get(0)).unwrap();
    roots.into_iter().chain(schema_end as u64 + 1..=pages as u64).collect()
}

#[tokio::test]
async fn anywhere_in_the_pages_of_messages_no_wrong_body_is_delivered() {
    let seed = std::env::var("HAPAX_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(1);
    let rounds = if std::env::var_os("HAPAX_LONG").is_some() { 2_000 } else { 120 };
    println!("HAPAX_SEED={seed} replays this");
    let mut rng = fastrand::Rng::with_seed(seed);
    let original = closed_store(60).await;
    let pages = message_pages(original.path());
    let bytes = std::fs::read(original.path().join("hapax.db")).unwrap();
    let (mut parked, mut broken) = (0, 0);
    for round in 0..rounds {
        let folder = tempfile::tempdir().unwrap();
        let mut damaged = bytes.clone();
        let page = pages[rng.usize(..pages.len())];
        // Cells grow from the end of a page, their index from its start: a quarter of the flips go to the first 160
        // bytes.
        let within = if rng.u8(..4) == 0 { rng.u64(..160) } else { rng.u64(..4096) };
        let at = (page - 1) * 4096 + within;
        let bit = 1 << rng.u8(..8);
        damaged[at as usize] ^= bit;
        let context = format!("round {round}: page {page}, byte {within}, bit {bit:#x}");
        std::fs::write(folder.path().join("hapax.db"), damaged).unwrap();
        let malformed = |error: &str| {
            // For a key that is out of order SQLite reports either.
            let tree = error.contains("malformed") || error.contains("UNIQUE constraint failed");
            assert!(tree, "{context}: one message damages the store: {error}");
        };
        let store = match Embedded::open(folder.path(), options()) {
            Ok(store) => store,
            // Not a row but the tree is damaged: SQLite cannot walk it.
            Err(error) => {
                malformed(&error.to_string());
                broken += 1;
                continue;
            }
        };
        let mut found = BTreeMap::new();
        let drained = drain_into(&store, &mut found).await;
        for (number, bytes) in &found {
            assert_eq!(*bytes, body(*number), "{context}: a wrong body was delivered");
        }
        if let Err(error) = drained {
            malformed(&error.to_string());
            broken += 1;
            continue;
        }
        let status = store.status().await.unwrap();
        if found.len() < 60 {
            parked += 1;
            let missing = 60 - found.len();
            assert!(!status.warnings.is_empty(), "{context}: {missing} messages went silently");
        }
        // An operator accepts parked messages as they are: that works permanently, or is refused.
        let Ok(page) = store.browse(&queue(), browse_all()).await else { continue };
        let ids: Vec<_> = page.items.iter().map(|item| item.id).collect();
        match store.release(&queue(), ids).await {
            // A row whose key now belongs to another message is listed and left alone.
            Ok(released) => assert!(released <= page.items.len() as u64, "{context}"),
            Err(error) => malformed(&error.to_string()),
        }
    }
    println!("{parked} of {rounds} flips parked something, {broken} broke a tree");
    assert!(parked > rounds / 4, "the flips hit nothing: {parked}");
}

/// The number of rows in a page is not covered by a checksum: a page with too low a number hides the rest.
#[tokio::test]
async fn rows_that_a_page_hides_are_missed() {
    let folder = closed_store(60).await;
    let page = message_pages(folder.path())[0];
    let file = folder.path().join("hapax.db");
    let mut bytes = std::fs::read(&file).unwrap();
    // A leaf page of a table: its kind, then, after two bytes, the number of its rows.
    let leaf = |page: u64| bytes[(page as usize - 1) * 4096] == 13;
    let page = message_pages(folder.path()).into_iter().find(|page| leaf(*page)).unwrap_or(page);
    let at = (page as usize - 1) * 4096 + 3;
    let count = u16::from_be_bytes([bytes[at], bytes[at + 1]]);
    assert!(count > 1);
    bytes[at..at + 2].copy_from_slice(&(count - 1).to_be_bytes());
    std::fs::write(&file, bytes).unwrap();
    for _ in 0..2 {
        let store = open(folder.path());
        let warnings = store.status().await.unwrap().warnings;
        assert!(
            warnings.iter().any(|warning| warning.contains("1 of 60 messages cannot be found")),
            "{warnings:?}"
        );
    }
}

/// The receive cannot be repeated then, which is reported; nothing that was committed is given out a second time.
#[tokio::test]
async fn in_a_remembered_receive() {
    let folder = closed_store(2).await;
    let repeatable = || Receive { attempt_id: Some("try-1".into()), ..Receive::up_to(1) };
    let store = open(folder.path());
    let first = store.receive(&queue(), repeatable()).await.unwrap().remove(0);
    store.close();
    for sql in [
        "at_ms = at_ms + 1",
        "at_ms = 'text'",
        "deliveries = X'01'",
        "deliveries = 'text'",
        "key = X'02'",
        "crc = -1",
        "crc = 'text'",
        "queue = -1",
        "queue = 'text'",
    ] {
        let copy = tempfile::tempdir().unwrap();
        std::fs::copy(folder.path().join("hapax.db"), copy.path().join("hapax.db")).unwrap();
        let db = rusqlite::Connection::open(copy.path().join("hapax.db")).unwrap();
        assert_eq!(db.execute(&format!("UPDATE receive_attempt SET {sql}"), []).unwrap(), 1);
        db.close().unwrap();
        let store = open(copy.path());
        let warnings = store.status().await.unwrap().warnings;
        assert!(
            warnings.iter().any(|text| text.contains("a remembered receive is damaged")),
            "{sql}: {warnings:?}"
        );
        let other = store.receive(&queue(), repeatable()).await.unwrap().remove(0);
        assert_ne!(other.id, first.id, "{sql}: the first is still leased");
        store.close();
    }
}

/// The row of a parked message has lost its group: deciding about it frees the group that is halted for it all the same.
#[tokio::test]
async fn in_the_row_of_a_message_that_its_group_waits_for() {
    for decision in ["release", "discard"] {
        let folder = tempfile::tempdir().unwrap();
        let store = open(folder.path());
        let jobs: QueueName = "jobs.fifo".parse().unwrap();
        let config = QueueConfig { on_dead: hapax_core::OnDead::HaltGroup, ..QueueConfig::sqs_fifo() };
        store.create_queue(&jobs, config).await.unwrap();
        let message = |body: &'static str| {
            NewMessage::new(body).group("g".parse().unwrap()).dedup(body.parse().unwrap())
        };
        store.send(&jobs, vec![message("a"), message("b")]).await.unwrap();
        let head = store.receive(&jobs, Receive::up_to(1)).await.unwrap().remove(0);
        let park = hapax_core::Settlement::Park { reason: "in doubt".into() };
        store.settle(&jobs, vec![Settle::new(head.receipt, park)]).await.unwrap()[0].as_ref().unwrap();
        store.close();
        let db = rusqlite::Connection::open(folder.path().join("hapax.db")).unwrap();
        assert_eq!(db.execute("UPDATE message SET due_ms = due_ms + 1 WHERE state = 3", []).unwrap(), 1);
        db.close().unwrap();

        let store = open(folder.path());
        assert_eq!(store.halted_groups(&jobs).await.unwrap(), ["g".parse().unwrap()]);
        let decided = match decision {
            "release" => store.release(&jobs, vec![head.id]).await.unwrap(),
            _ => store.discard(&jobs, vec![head.id], "test").await.unwrap().count,
        };
        assert_eq!(decided, 1, "{decision}");
        assert!(store.halted_groups(&jobs).await.unwrap().is_empty(), "{decision}");
        store.close();
    }
}
