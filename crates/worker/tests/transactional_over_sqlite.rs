//! Business write, ledger entry and outcome in one transaction of the user's own SQLite file: after a kill at any point
//! and a redelivery, the effect has happened once.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use common::time::{manual_clock, ticking};
use common::{Rig, dies_after, run_until};
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Tier};
use hapax_embedded::{Embedded, Options};
use hapax_sqlite::SqliteInbox;
use hapax_worker::testing::Trial;
use hapax_worker::{Cx, HandlerOutcome, Point, Worker};
use rusqlite::{Connection, Transaction};

const CHILD: &str = "HAPAX_TEST_CHILD";

fn database(folder: &Path) -> Connection {
    let connection = Connection::open(folder.join("shop.db")).unwrap();
    connection.pragma_update(None, "journal_mode", "wal").unwrap();
    connection.pragma_update(None, "synchronous", "full").unwrap();
    connection.execute_batch("CREATE TABLE IF NOT EXISTS payments (cents INTEGER)").unwrap();
    connection
}

fn count(folder: &Path, table: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM {table}");
    database(folder).query_row(&sql, [], |row| row.get(0)).unwrap()
}

fn pay(cents: i64, tx: &Transaction<'_>, cx: &Cx) -> Result<HandlerOutcome<String>, rusqlite::Error> {
    if cents < 0 {
        tx.execute("INSERT INTO payments VALUES (?1)", [cents])?;
        return Ok(HandlerOutcome::reject("negative"));
    }
    tx.execute("INSERT INTO payments VALUES (?1)", [cents])?;
    match cents {
        13 if cx.attempt() == 1 => panic!("boom"),
        17 if cx.attempt() == 1 => Err(rusqlite::Error::InvalidQuery),
        _ => Ok(HandlerOutcome::Done(format!("paid {cents}"))),
    }
}

#[tokio::test]
async fn failures_roll_back_and_duplicates_replay() {
    let rig = Rig::new(dies_after(5, QueueConfig::sqs())).await;
    let inbox = SqliteInbox::new(database(rig.folder.path())).unwrap();
    let builder = rig.builder().transactional_handler(&inbox, pay);
    for cents in [10, 13, 17, -1] {
        rig.send(NewMessage::new(cents.to_string()).idempotency_key(&cents.to_string().parse().unwrap()))
            .await;
    }
    let worker = builder.clone().build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 3 && counts.rejected == 1).await;
    assert_eq!((report.counts.panics, report.counts.retried, report.counts.in_doubt), (1, 2, 0));
    assert_eq!((count(rig.folder.path(), "payments"), count(rig.folder.path(), "hapax_inbox")), (3, 3));

    let trial = Trial::new(builder);
    let ten = NewMessage::new("10").idempotency_key(&"10".parse().unwrap());
    let again = trial.send_and_run(ten).await.unwrap();
    assert!(again.is_replay(), "{again:?}");
    let other =
        trial.send_and_run(NewMessage::new("11").idempotency_key(&"10".parse().unwrap())).await.unwrap();
    assert!(
        matches!(&other.settlement, hapax_core::Settlement::Reject { reason } if reason.contains("another body")),
        "{other:?}"
    );
    assert_eq!((count(rig.folder.path(), "payments"), count(rig.folder.path(), "hapax_inbox")), (3, 3));
}

#[tokio::test]
async fn a_lost_lease_commits_nothing() {
    const LEASE: Duration = Duration::from_hours(1);
    let clock = manual_clock();
    let config = QueueConfig { tier: Tier::Transactional, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    let source = common::TestSource::new(&rig);
    let inbox = SqliteInbox::new(database(rig.folder.path())).unwrap();
    rig.send(NewMessage::new("10")).await;
    let (down, runs, moved) = (source.clone(), std::sync::atomic::AtomicU32::new(0), clock.clone());
    let handler = move |cents: i64, tx: &Transaction<'_>, cx: &Cx| {
        let first = runs.fetch_add(1, std::sync::atomic::Ordering::SeqCst) == 0;
        down.down.store(first, std::sync::atomic::Ordering::SeqCst);
        // The handler cannot be stopped; the store is unreachable until its lease is over.
        moved.advance_ms(if first { LEASE.as_millis() as u64 } else { 0 });
        while first && !cx.is_cancelled() {
            std::thread::sleep(Duration::from_millis(2));
        }
        down.down.store(false, std::sync::atomic::Ordering::SeqCst);
        pay(cents, tx, cx)
    };
    let builder = rig.builder().source(source).transactional_handler(&inbox, handler);
    let worker = builder.clock(clock.clone()).lease(LEASE).build().await.unwrap();
    let running = run_until(worker, |counts| counts.done == 1);
    let report = ticking(&clock, Duration::from_millis(50), running).await;
    assert_eq!(report.counts.lost_leases, 1, "{report:?}");
    assert_eq!((count(rig.folder.path(), "payments"), count(rig.folder.path(), "hapax_inbox")), (1, 1));
}

#[tokio::test]
async fn other_handlers_and_other_databases_are_refused() {
    let rig = Rig::tier(Tier::Transactional).await;
    let refused = rig.builder().handler(async |_: u32, _: Cx| {}).build().await.err().unwrap();
    assert_eq!(refused.code(), "database-missing", "{refused}");

    let inbox = SqliteInbox::new(database(rig.folder.path())).unwrap();
    let builder = rig.builder().transactional_handler(&inbox, pay).tier(Tier::AtLeastOnce);
    assert_eq!(builder.build().await.err().unwrap().code(), "invalid");
}

/// The process that dies: one worker, one message, and an exit without cleanup at the given point.
#[tokio::test]
async fn child() {
    let Ok(told) = std::env::var(CHILD) else { return };
    let (point, folder) = told.split_once(' ').unwrap();
    let (point, folder) = (point.parse::<Point>().unwrap(), PathBuf::from(folder));
    let store = Arc::new(Embedded::open(folder.join("store"), Options::default()).unwrap());
    let inbox = SqliteInbox::new(database(&folder)).unwrap();
    let builder = Worker::over(store, QueueName::new("jobs").unwrap()).transactional_handler(&inbox, pay);
    let die = move |at| {
        if at == point {
            let me = std::process::id().to_string();
            Command::new("kill").args(["-9", &me]).status().unwrap();
            std::thread::sleep(Duration::from_mins(1));
        }
    };
    let worker = builder.hook(die).lease(Duration::from_millis(500)).build().await.unwrap();
    run_until(worker, |counts| counts.done == 1).await;
}

/// The number of effects before the redelivery, for each point.
const KILLED_AT: [(Point, i64); 7] = [
    (Point::AfterReceive, 0),
    (Point::BeforeEffect, 0),
    (Point::BeforeCommit, 0),
    (Point::AfterCommit, 1),
    (Point::AfterEffect, 1),
    (Point::BeforeSettle, 1),
    (Point::AfterSettle, 1),
];

#[tokio::test]
async fn killed_at_every_point_the_effect_happens_once() {
    if std::env::var_os(CHILD).is_some() {
        return;
    }
    for (point, before) in KILLED_AT {
        let folder = tempfile::tempdir().unwrap();
        let queue = QueueName::new("jobs").unwrap();
        let open = || Arc::new(Embedded::open(folder.path().join("store"), Options::default()).unwrap());
        {
            let store = open();
            store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
            store.send(&queue, vec![NewMessage::new("10")]).await.unwrap()[0].as_ref().unwrap();
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(CHILD, format!("{point} {}", folder.path().display()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let ended = child.wait().unwrap();
        assert_eq!(
            std::os::unix::process::ExitStatusExt::signal(&ended),
            Some(9),
            "{point}: it was not killed"
        );
        let rows = || (count(folder.path(), "payments"), count(folder.path(), "hapax_inbox"));
        let inbox = SqliteInbox::new(database(folder.path())).unwrap();
        assert_eq!(rows(), (before, before), "{point}: effect and entry are there together or not at all");

        let store = open();
        let builder = Worker::over(store.clone(), queue.clone()).transactional_handler(&inbox, pay);
        if point != Point::AfterSettle {
            let ran = Trial::new(builder).run().await.unwrap();
            assert_eq!(ran.settlement, hapax_core::Settlement::Ack, "{point}");
        }
        assert_eq!(rows(), (1, 1), "{point}: once");
        let stats = store.stats(&queue).await.unwrap();
        assert_eq!((stats.ready, stats.in_flight, stats.delayed), (0, 0, 0), "{point}");
    }
}
