//! Kafka to a database, in this process: each record once, over restarts, duplicates, failures and a recreated topic.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_core::inbox::TransactionEnd;
use hapax_core::positions::{AsyncPositions as _, BlockingPositions as _, LogPartition};
use hapax_core::{
    AsyncInbox as _, BlockingInbox as _, EntryId, Fingerprint, IdempotencyKey, InboxEntry, InboxError, Scope,
};
use hapax_faults::PostgresServer;
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::to_database::{Poison, ToDatabase, ToDatabaseError, ToDatabaseOptions, ToDatabaseReport};
use hapax_kafka::wire::Connect;
use hapax_postgres::{Options, PostgresInbox, PostgresStore};
use hapax_sqlite::SqliteInbox;
use rdkafka::message::{Header, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord};
use rusqlite::{Connection, Transaction};

use crate::broker::{Broker, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_position_is_moved_only_from_where_it_is", a_position_is_moved_only_from_where_it_is),
        shared("records_take_effect_once_over_runs", records_take_effect_once_over_runs),
        shared("a_failing_record_stops_or_is_recorded", a_failing_record_stops_or_is_recorded),
        shared("a_topic_that_was_created_again_is_read_from_its_start", a_recreated_topic),
        shared("a_topic_that_is_created_again_under_a_run_is_read_from_its_start", recreated_while_it_runs),
    ]
}

fn partition(number: i32) -> LogPartition {
    LogPartition { group: "g".into(), topic_id: "id".into(), topic: "t".into(), partition: number }
}

fn is_superseded(moved: &Result<(), InboxError>) -> bool {
    matches!(moved, Err(InboxError::Superseded(_)))
}

/// The table of expected answers, for both databases: the position before, the one that the caller expects, and whether it
/// moves to 10.
const MOVES: [(Option<i64>, Option<i64>, bool); 6] = [
    (None, None, true),
    (None, Some(3), false),
    (Some(3), Some(3), true),
    (Some(3), None, false),
    (Some(3), Some(2), false),
    (Some(3), Some(4), false),
];

fn a_position_is_moved_only_from_where_it_is(broker: &Broker) {
    let folder = tempfile::tempdir().unwrap();
    let sqlite = SqliteInbox::new(Connection::open(folder.path().join("shop.db")).unwrap()).unwrap();
    for (number, (before, expected, moves)) in (0..).zip(MOVES) {
        let at = partition(number);
        let moved = sqlite.in_transaction(|tx| {
            if let Some(before) = before {
                sqlite.advance(tx, &at, None, before).unwrap();
            }
            (sqlite.advance(tx, &at, expected, 10), TransactionEnd::Commit)
        });
        let moved = moved.unwrap();
        assert_eq!(is_superseded(&moved), !moves, "SQLite, {before:?} {expected:?}: {moved:?}");
        let found = sqlite.in_transaction(|tx| (sqlite.position(tx, &at), TransactionEnd::Rollback));
        assert_eq!(found.unwrap().unwrap(), if moves { Some(10) } else { before });
    }
    let server = PostgresServer::start_in_memory().unwrap();
    broker.block_on(async {
        let url = server.url("postgres");
        let store = PostgresStore::open(&url, Options { migrate: true, ..Options::default() }).await.unwrap();
        let postgres = PostgresInbox::new(&store);
        for (number, (before, expected, moves)) in (0..).zip(MOVES) {
            let at = partition(number);
            if let Some(before) = before {
                let mut tx = begin(&postgres, number).await;
                postgres.advance(&mut tx, &at, None, before).await.unwrap();
                end(&postgres, tx, number).await;
            }
            let mut tx = begin(&postgres, number + 100).await;
            let moved = postgres.advance(&mut tx, &at, expected, 10).await;
            assert_eq!(is_superseded(&moved), !moves, "PostgreSQL, {before:?} {expected:?}: {moved:?}");
            end(&postgres, tx, number + 100).await;
            assert_eq!(postgres.position(&at).await.unwrap(), if moves { Some(10) } else { before });
        }
        // Of two transactions at the same time, the second waits for the first, and finds the position moved.
        let at = partition(50);
        let (mut one, mut two) = (begin(&postgres, 201).await, begin(&postgres, 202).await);
        postgres.advance(&mut one, &at, None, 1).await.unwrap();
        let second = postgres.advance(&mut two, &at, None, 1);
        let mut second = std::pin::pin!(second);
        let early = tokio::time::timeout(Duration::from_millis(100), &mut second).await;
        assert!(early.is_err(), "it did not wait: {early:?}");
        end(&postgres, one, 201).await;
        assert!(is_superseded(&second.await));
    });
}

fn ledger_entry(number: i32) -> InboxEntry {
    let id = EntryId::new(Scope::new("s").unwrap(), IdempotencyKey::new(format!("k-{number}")).unwrap());
    InboxEntry { id, fingerprint: Fingerprint::new("f").unwrap() }
}

async fn begin(inbox: &PostgresInbox, number: i32) -> hapax_postgres::PostgresTransaction {
    inbox.begin(&ledger_entry(number)).await.unwrap()
}

async fn end(inbox: &PostgresInbox, mut tx: hapax_postgres::PostgresTransaction, number: i32) {
    let outcome = hapax_core::RecordedOutcome { failed: false, value: None, omitted_bytes: None };
    let entry = ledger_entry(number);
    inbox.enter(&mut tx, &entry).await.unwrap();
    inbox.record(&mut tx, &entry, outcome, 60_000).await.unwrap();
    inbox.commit(tx).await.unwrap();
}

/// A SQLite database with the effects of records.
struct Shop {
    folder: tempfile::TempDir,
    inbox: SqliteInbox,
}

impl Shop {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let connection = Connection::open(folder.path().join("shop.db")).unwrap();
        connection.pragma_update(None, "journal_mode", "wal").unwrap();
        connection.execute_batch("CREATE TABLE effects (value TEXT)").unwrap();
        Self { folder, inbox: SqliteInbox::new(connection).unwrap() }
    }

    fn effects(&self) -> Vec<String> {
        let connection = Connection::open(self.folder.path().join("shop.db")).unwrap();
        let mut select = connection.prepare("SELECT value FROM effects ORDER BY rowid").unwrap();
        select.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect()
    }

    /// Runs until there are this many effects.
    async fn run(
        &self,
        broker: &Broker,
        topic: &str,
        effects: usize,
        options: ToDatabaseOptions,
        handler: impl Fn(&Record, &Transaction<'_>) -> Result<(), hapax_kafka::to_database::HandlerError>
        + Send
        + Sync
        + 'static,
    ) -> Result<ToDatabaseReport, ToDatabaseError> {
        let address = broker.address().to_string();
        let consumer = ConsumerConfig::new(&address, topic, &[topic]);
        let run = ToDatabase::new_blocking(Connect::plain([address]), consumer, &self.inbox, handler);
        let start = Instant::now();
        let until = async {
            while self.effects().len() < effects {
                assert!(start.elapsed() < PATIENCE, "{topic}: {:?}", self.effects());
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        run.options(options).run(until).await
    }
}

fn insert(record: &Record, tx: &Transaction<'_>) -> Result<(), hapax_kafka::to_database::HandlerError> {
    let value = std::str::from_utf8(record.value.as_deref().unwrap_or_default())?;
    tx.execute("INSERT INTO effects VALUES (?1)", [value])?;
    Ok(())
}

fn produce(broker: &Broker, topic: &str, values: impl IntoIterator<Item = String>, key: Option<&str>) {
    let producer: FutureProducer = broker.config().create().unwrap();
    broker.block_on(async {
        for value in values {
            let mut record = FutureRecord::<(), _>::to(topic).partition(0).payload(&value);
            if let Some(key) = key {
                let header = Header { key: "hapax-idempotency-key", value: Some(key) };
                record = record.headers(OwnedHeaders::new().insert(header));
            }
            producer.send(record, PATIENCE).await.unwrap();
        }
    });
}

fn numbers(range: std::ops::Range<u32>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

fn small() -> ToDatabaseOptions {
    ToDatabaseOptions { batch_records_max: 7, ..ToDatabaseOptions::default() }
}

fn records_take_effect_once_over_runs(broker: &Broker) {
    let topic = "to-database";
    broker.create_topic(topic, 1);
    let shop = Shop::new();
    produce(broker, topic, numbers(0..40), None);
    broker.block_on(shop.run(broker, topic, 15, small(), insert)).unwrap();
    // A second run begins where the first one ended, whatever that was.
    let report = broker.block_on(shop.run(broker, topic, 40, small(), insert)).unwrap();
    assert_eq!(shop.effects(), numbers(0..40));
    assert_eq!((report.duplicates, report.superseded), (0, 0), "the position is enough");
    // Other records with a key that was used: the same value is a duplicate, another value is refused.
    produce(broker, topic, ["paid".to_owned(), "paid".to_owned()], Some("order-7"));
    produce(broker, topic, ["end".to_owned()], None);
    let report = broker.block_on(shop.run(broker, topic, 42, small(), insert)).unwrap();
    assert_eq!(shop.effects()[40..], ["paid", "end"]);
    assert_eq!((report.applied, report.duplicates), (2, 1));
    produce(broker, topic, ["other".to_owned()], Some("order-7"));
    let options = ToDatabaseOptions { attempts_max: 1, ..small() };
    let error = broker.block_on(shop.run(broker, topic, 43, options, insert)).unwrap_err();
    assert!(error.to_string().contains("was used for a record with another value"), "{error}");
}

fn a_failing_record_stops_or_is_recorded(broker: &Broker) {
    let topic = "poison";
    broker.create_topic(topic, 1);
    produce(broker, topic, numbers(0..5), None);
    let shop = Shop::new();
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let picky = move |record: &Record, tx: &Transaction<'_>| {
        insert(record, tx)?;
        if record.value.as_deref() == Some(b"3") {
            counted.fetch_add(1, Ordering::SeqCst);
            return Err("not this one".into());
        }
        Ok(())
    };
    let options = ToDatabaseOptions { attempts_max: 2, ..small() };
    let stopped = broker.block_on(shop.run(broker, topic, 5, options.clone(), picky.clone()));
    let Err(ToDatabaseError::Poison { offset: 3, attempts: 2, error, .. }) = stopped else {
        panic!("{stopped:?}")
    };
    assert_eq!(error, "not this one");
    assert_eq!(shop.effects(), numbers(0..3), "what comes before it takes effect, what comes after it waits");
    let options = ToDatabaseOptions { poison: Poison::Record, ..options };
    let report = broker.block_on(shop.run(broker, topic, 4, options, picky)).unwrap();
    assert_eq!((report.applied, report.failed), (1, 1));
    assert_eq!(shop.effects(), ["0", "1", "2", "4"]);
    assert!(runs.load(Ordering::SeqCst) >= 4, "two attempts in each run");
}

fn a_recreated_topic(broker: &Broker) {
    let topic = "recreated";
    broker.create_topic(topic, 1);
    let shop = Shop::new();
    produce(broker, topic, numbers(0..3), None);
    broker.block_on(shop.run(broker, topic, 3, small(), insert)).unwrap();
    broker.delete_topic(topic);
    broker.create_topic(topic, 1);
    // More than there were: an offset of the old topic would exist in the new one.
    produce(broker, topic, numbers(10..15), None);
    broker.block_on(shop.run(broker, topic, 8, small(), insert)).unwrap();
    assert_eq!(shop.effects(), [numbers(0..3), numbers(10..15)].concat());
}

/// With fewer records than before the position is not in the log, with as many the run waits behind them: both are noticed.
fn recreated_while_it_runs(broker: &Broker) {
    for (topic, count) in [("recreated-to-fewer", 2), ("recreated-to-equal", 4), ("recreated-to-more", 7)] {
        broker.create_topic(topic, 1);
        let shop = Shop::new();
        produce(broker, topic, numbers(0..4), None);
        std::thread::scope(|scope| {
            let shop = &shop;
            let run = scope.spawn(move || {
                let mut starts_again = 0;
                loop {
                    let all = 4 + usize::try_from(count).unwrap();
                    match broker.block_on(shop.run(broker, topic, all, small(), insert)) {
                        Ok(_) => return starts_again,
                        Err(ToDatabaseError::TopicRecreated { .. }) => starts_again += 1,
                        Err(error) => panic!("{topic}: {error}"),
                    }
                }
            });
            let start = Instant::now();
            while shop.effects().len() < 4 {
                assert!(start.elapsed() < PATIENCE, "{topic}: {:?}", shop.effects());
                std::thread::sleep(Duration::from_millis(20));
            }
            broker.delete_topic(topic);
            broker.create_topic(topic, 1);
            produce(broker, topic, numbers(10..10 + count), None);
            run.join().unwrap();
        });
        assert_eq!(shop.effects(), [numbers(0..4), numbers(10..10 + count)].concat(), "{topic}");
    }
}
