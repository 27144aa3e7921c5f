//! Files of other versions and other programs, and the migrations between versions.

use std::path::Path;

use hapax_core::{
    KeySource, Ledger, MessageState, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Revision,
};
use rusqlite::Connection;

use crate::checkpoint::Checkpoint;
use crate::storage::schema::{STEPS, Step};
use crate::storage::sqlite::{DbLocation, Sqlite};
use crate::{DATABASE, Embedded, OpenError, Options};

const BACKUP: &str = "before-migration-from-v4.db";

fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// Opens the store, sends one message and closes it.
async fn send_one(folder: &Path) {
    let store = Embedded::open(folder, Options::default()).unwrap();
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    store.send(&queue(), vec![NewMessage::new("x")]).await.unwrap()[0].as_ref().unwrap();
}

async fn messages(folder: &Path) -> u64 {
    Embedded::open(folder, Options::default()).unwrap().stats(&queue()).await.unwrap().ready
}

fn migrate(folder: &Path, step: &'static str) -> Result<(), OpenError> {
    let steps: Vec<_> = STEPS.iter().copied().chain([Step { sql: step, then: |_| Ok(()) }]).collect();
    let location = DbLocation { file: folder.join(DATABASE), vfs: None };
    Sqlite::open(location, &steps, Checkpoint::Inline).map(Sqlite::close)
}

fn refusal(folder: &Path) -> OpenError {
    let before = std::fs::read(folder.join(DATABASE)).unwrap();
    let error = Embedded::open(folder, Options::default()).err().expect("it is refused");
    assert_eq!(before, std::fs::read(folder.join(DATABASE)).unwrap(), "a refused file was changed");
    assert!(!folder.join(format!("{DATABASE}-wal")).exists(), "a refused file got a log");
    error
}

#[tokio::test]
async fn a_newer_version_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    let db = Connection::open(folder.path().join(DATABASE)).unwrap();
    db.pragma_update(None, "user_version", 99).unwrap();
    db.close().unwrap();
    let error = refusal(folder.path());
    assert!(matches!(error, OpenError::Newer { version: 99, .. }));
    let text = error.to_string();
    assert!(text.contains("version 99") && text.contains("use the newer program, or the backup"), "{text}");
}

#[tokio::test]
async fn another_programs_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let db = Connection::open(folder.path().join(DATABASE)).unwrap();
    db.execute_batch("CREATE TABLE message (mine)").unwrap();
    db.close().unwrap();
    assert!(matches!(refusal(folder.path()), OpenError::NotOurs { .. }));
}

#[tokio::test]
async fn a_file_that_is_no_database_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join(DATABASE), "Dear diary, today ".repeat(500)).unwrap();
    let text = refusal(folder.path()).to_string();
    assert!(text.contains("not a database"), "{text}");
}

#[tokio::test]
async fn a_migration_first_writes_a_backup_that_the_old_version_opens() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    migrate(folder.path(), "CREATE TABLE extra (x)").unwrap();
    assert!(
        matches!(refusal(folder.path()), OpenError::Newer { version, .. } if version == STEPS.len() as i64 + 1)
    );
    migrate(folder.path(), "CREATE TABLE extra (x)").expect("the new version opens it again");

    let old = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join(BACKUP), old.path().join(DATABASE)).unwrap();
    assert_eq!(messages(old.path()).await, 1);
}

#[tokio::test]
async fn a_migration_that_was_taken_back_gets_a_fresh_backup_the_next_time() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    migrate(folder.path(), "CREATE TABLE extra (x)").unwrap();
    std::fs::copy(folder.path().join(BACKUP), folder.path().join(DATABASE)).unwrap();
    send_one(folder.path()).await;
    migrate(folder.path(), "CREATE TABLE extra (x)").unwrap();

    let old = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join(BACKUP), old.path().join(DATABASE)).unwrap();
    assert_eq!(messages(old.path()).await, 2, "the backup is of the first migration");
}

#[tokio::test]
async fn a_migration_that_fails_leaves_the_old_version() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    let broken = "ALTER TABLE body ADD COLUMN more; CREATE TABLE extra (x); CREATE TABLE message (x)";
    migrate(folder.path(), broken).unwrap_err();
    assert_eq!(messages(folder.path()).await, 1);
    migrate(folder.path(), "CREATE TABLE extra (x)").expect("and can be tried again");
}

#[tokio::test]
async fn a_migration_that_is_killed_leaves_the_old_version() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    let mut db = Connection::open(folder.path().join(DATABASE)).unwrap();
    db.pragma_update(None, "cache_size", 5).unwrap();
    let transaction = db.transaction_with_behavior(rusqlite::TransactionBehavior::Exclusive).unwrap();
    // More than the cache holds, so that half of it is already in the log.
    let half =
        "CREATE TABLE extra AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 200)
                SELECT randomblob(1000) AS x FROM n; UPDATE message SET flags = 99; PRAGMA user_version = 5";
    transaction.execute_batch(half).unwrap();

    // A killed process leaves the current content of its files.
    let killed = tempfile::tempdir().unwrap();
    for file in [DATABASE.to_owned(), format!("{DATABASE}-wal")] {
        std::fs::copy(folder.path().join(&file), killed.path().join(&file)).unwrap();
    }
    assert!(std::fs::metadata(killed.path().join("hapax.db-wal")).unwrap().len() > 100_000);
    assert_eq!(messages(killed.path()).await, 1);
    migrate(killed.path(), "CREATE TABLE extra (x)").unwrap();
}

/// Writes a file as an older version did.
fn written_by(folder: &Path, version: i64, sql: &str) {
    let db = Connection::open(folder.join(DATABASE)).unwrap();
    db.execute_batch(sql).unwrap();
    db.pragma_update(None, "application_id", 0x4841_5058).unwrap();
    db.pragma_update(None, "user_version", version).unwrap();
    db.close().unwrap();
}

/// A file of version 1: messages that are ready, dead, parked in doubt and in a FIFO group, of a queue whose tier now
/// uses the ledger.
fn version_1(folder: &Path) {
    written_by(folder, 1, include_str!("v1.sql"));
}

/// A file of version 2: messages of a queue with a key pointer, one of them dead, and one of a queue without.
fn version_2(folder: &Path) {
    written_by(folder, 2, include_str!("v2.sql"));
}

/// What a process leaves that was killed while it wrote the backup before a migration.
#[tokio::test]
async fn a_migration_that_was_killed_during_its_backup_can_be_repeated() {
    let folder = tempfile::tempdir().unwrap();
    send_one(folder.path()).await;
    let whole = std::fs::read(folder.path().join(DATABASE)).unwrap();
    let part = folder.path().join(format!("{BACKUP}.part"));
    for left in [Vec::new(), vec![0; 8192], whole[..whole.len() / 2].to_vec()] {
        let killed = tempfile::tempdir().unwrap();
        let part = killed.path().join(part.file_name().unwrap());
        std::fs::copy(folder.path().join(DATABASE), killed.path().join(DATABASE)).unwrap();
        std::fs::write(&part, &left).unwrap();
        std::fs::write(killed.path().join(format!("{BACKUP}.part-journal")), "half a journal").unwrap();
        migrate(killed.path(), "CREATE TABLE extra (x)").unwrap();

        let old = tempfile::tempdir().unwrap();
        std::fs::rename(killed.path().join(BACKUP), old.path().join(DATABASE)).unwrap();
        assert_eq!(messages(old.path()).await, 1, "{} bytes were left", left.len());
        let left_over = |name: &str| name.contains("part");
        let names = std::fs::read_dir(killed.path()).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        assert!(!names.iter().any(|name| left_over(name)), "{names:?}");
    }
}

/// A store that an older version wrote, opened soon after: retentions must not end with the years.
fn opened(folder: &Path, at_ms: u64) -> Embedded {
    let clock = std::sync::Arc::new(hapax_core::ManualClock::at_ms(at_ms));
    Embedded::open(folder, Options { clock, ..Options::default() }).unwrap()
}

/// The keys of a queue's messages with their bodies.
async fn keys(store: &Embedded, queue: &QueueName) -> Vec<(String, String, KeySource)> {
    let deliveries = store.receive(queue, hapax_core::Receive::up_to(10)).await.unwrap();
    let key = |delivery: hapax_core::Delivery| {
        let body = String::from_utf8_lossy(&delivery.body).into_owned();
        let key = if delivery.key_source == KeySource::MessageId
            && delivery.key.as_str() == delivery.id.to_string()
        {
            "its id".to_owned()
        } else {
            delivery.key.to_string()
        };
        (body, key, delivery.key_source)
    };
    deliveries.into_iter().map(key).collect()
}

#[tokio::test]
async fn messages_of_version_2_keep_the_keys_that_they_would_have_had() {
    let folder = tempfile::tempdir().unwrap();
    version_2(folder.path());
    let store = opened(folder.path(), 1_794_808_900_500);
    assert_eq!(store.status().await.unwrap().warnings, Vec::<String>::new());
    let (pay, dead) = (QueueName::new("pay").unwrap(), QueueName::new("pay-dead").unwrap());
    // This change comes too late to affect these messages.
    let moved = QueueConfig { key_pointer: Some("/at".into()), ..store.queue(&pay).await.unwrap().config };
    store.set_queue(&pay, moved, None).await.unwrap();
    let found = |body: &str, key: &str, source| (body.to_owned(), key.to_owned(), source);
    assert_eq!(
        keys(&store, &pay).await,
        [
            found(r#"{"order":2,"at":"ready"}"#, "2", KeySource::Body),
            found(r#"{"order":3,"at":"attribute"}"#, "stated-3", KeySource::Attribute),
            found("not json", "its id", KeySource::MessageId),
            found(r#"{"order":4,"at":"dedup"}"#, "4", KeySource::Body),
        ]
    );
    let plain = keys(&store, &QueueName::new("plain").unwrap()).await;
    assert_eq!(plain, [found(r#"{"order":9}"#, "its id", KeySource::MessageId)]);
    assert_eq!(keys(&store, &dead).await, [found(r#"{"order":1,"at":"dies"}"#, "1", KeySource::Body)]);
}

/// A receive that gives what it finds at once.
async fn receive(store: &Embedded, queue: &QueueName, attempt_id: Option<&str>) -> Vec<hapax_core::Delivery> {
    let attempt_id = attempt_id.map(str::to_owned);
    let receive = hapax_core::Receive { attempt_id, wait_ms: Some(0), ..hapax_core::Receive::up_to(10) };
    store.receive(queue, receive).await.unwrap()
}

/// What version 2 wrote: a group that is halted with its two dead letters, one whose dead letter is gone, and one that is
/// not halted.
#[tokio::test]
async fn groups_that_version_2_had_halted_wait_for_their_dead_letters() {
    let folder = tempfile::tempdir().unwrap();
    written_by(folder.path(), 2, include_str!("v2_halted.sql"));
    let mut store = opened(folder.path(), 1_794_808_900_500);
    let (ord, dead) = (QueueName::new("ord.fifo").unwrap(), QueueName::new("ord-dead.fifo").unwrap());
    for reopened in [false, true] {
        assert_eq!(store.status().await.unwrap().warnings, Vec::<String>::new(), "{reopened}");
        assert_eq!(store.stats(&ord).await.unwrap().halted, 2);
        if !reopened {
            store.close();
            store = opened(folder.path(), 1_794_808_900_600);
        }
    }
    let free = receive(&store, &ord, None).await;
    assert_eq!(free.iter().map(|d| &d.body[..]).collect::<Vec<_>>(), [b"c is free"]);

    // Each dead letter of the group is decided about before it continues.
    let letters = receive(&store, &dead, None).await;
    assert_eq!(letters.len(), 2);
    for letter in letters {
        assert_eq!(store.stats(&ord).await.unwrap().halted, 2);
        let ack = hapax_core::Settle::new(letter.receipt, hapax_core::Settlement::Ack);
        store.settle(&dead, vec![ack]).await.unwrap().remove(0).unwrap();
    }
    let waited = receive(&store, &ord, None).await;
    assert_eq!(waited.iter().map(|d| &d.body[..]).collect::<Vec<_>>(), [b"a waits"]);
    // Where no dead letter is left, only a release can decide.
    store.release_group(&ord, &"b".parse().unwrap()).await.unwrap();
    let released = receive(&store, &ord, None).await;
    assert_eq!(released.iter().map(|d| &d.body[..]).collect::<Vec<_>>(), [b"b waits"]);
}

/// What version 3 wrote: a group that is halted for a dead letter, and a delivery under an attempt id, which version 3
/// forgot when it ended.
#[tokio::test]
async fn version_3_keeps_leases_and_halted_groups_and_can_repeat_new_receives() {
    let folder = tempfile::tempdir().unwrap();
    written_by(folder.path(), 3, include_str!("v3.sql"));
    let at_ms = 1_794_820_409_500;
    let store = opened(folder.path(), at_ms);
    assert_eq!(store.status().await.unwrap().warnings, Vec::<String>::new());
    let ord = QueueName::new("ord.fifo").unwrap();
    let stats = store.stats(&ord).await.unwrap();
    assert_eq!((stats.halted, stats.ready, stats.in_flight), (1, 1, 1));
    let message = NewMessage::new("new").group("c".parse().unwrap()).dedup("9".parse().unwrap());
    store.send(&ord, vec![message]).await.unwrap().remove(0).unwrap();
    let first = receive(&store, &ord, Some("try-1")).await;
    assert_eq!(first.len(), 1);
    store.close();
    let store = opened(folder.path(), at_ms + 100);
    assert_eq!(receive(&store, &ord, Some("try-1")).await[0].receipt, first[0].receipt);
    let backup = Connection::open(folder.path().join("before-migration-from-v3.db")).unwrap();
    let version: i64 = backup.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 3);
}

#[tokio::test]
async fn version_1_becomes_a_store_with_a_ledger_and_loses_no_message() {
    let folder = tempfile::tempdir().unwrap();
    version_1(folder.path());
    let store = opened(folder.path(), 1_794_788_692_000);
    assert_eq!(store.status().await.unwrap().warnings, Vec::<String>::new());
    let stats = store.stats(&queue()).await.unwrap();
    assert_eq!((stats.ready, stats.parked), (1, 1));
    for name in ["jobs-dead", "ord.fifo"] {
        assert_eq!(store.stats(&QueueName::new(name).unwrap()).await.unwrap().ready, 1, "{name}");
    }

    // The limit on attempts has moved; a queue without one still has none, regardless of the default for new queues.
    for (name, limit) in [("jobs", Some(3)), ("jobs-dead", None), ("ord.fifo", None)] {
        let config = store.queue(&QueueName::new(name).unwrap()).await.unwrap().config;
        let sqs = if config.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        assert_eq!((config.retry.limit(), config.retry.base_ms, config.on_dead), (limit, 0, sqs.on_dead));
        assert_eq!(config.dead_letter.is_some(), name == "jobs");
    }
    // Configurations of older versions have revision 0, which a change can expect.
    let info = store.queue(&queue()).await.unwrap();
    assert_eq!((info.revision, info.paused), (Revision(0), None));
    let tagged = QueueConfig { tags: [("a".into(), "b".into())].into(), ..info.config };
    let revision = store.set_queue(&queue(), tagged, Some(Revision(0))).await.unwrap();
    assert!(revision > Revision(0));
    let parked = hapax_core::Browse { limit: 10, state: Some(MessageState::Parked), ..Default::default() };
    let parked = store.browse(&queue(), parked).await.unwrap().items.remove(0);
    assert_eq!(parked.deliveries, parked.attempts, "all deliveries counted as far as anyone knew");

    // A message sent before the ledger existed is linked to its entry when it is claimed.
    let delivery = store.receive(&queue(), hapax_core::Receive::up_to(1)).await.unwrap().remove(0);
    let id = hapax_core::EntryId::of_queue(&queue(), delivery.key);
    let mut request = hapax_core::ClaimRequest::new(id, "a".parse().unwrap(), 1_000);
    request.delivery = Some((queue(), delivery.receipt));
    let claim = store.claim(vec![request]).await.unwrap().remove(0).unwrap();
    assert!(matches!(claim, hapax_core::Claim::Granted(_)));
    store.close();

    let store = Embedded::open(folder.path(), Options::default()).unwrap();
    assert_eq!(store.queue(&queue()).await.unwrap().revision, revision);
    store.close();

    let db = Connection::open(folder.path().join(DATABASE)).unwrap();
    let count = |sql: &str| db.query_row(sql, [], |row| row.get::<_, i64>(0)).unwrap();
    assert_eq!(count("SELECT count(*) FROM keyed JOIN ledger ON ledger.id = keyed.entry"), 1);
    assert_eq!(count("SELECT rows FROM ledger_rows"), 1);
    let backup = Connection::open(folder.path().join("before-migration-from-v1.db")).unwrap();
    let version: i64 = backup.pragma_query_value(None, "user_version", |row| row.get(0)).unwrap();
    assert_eq!(version, 1);
}
