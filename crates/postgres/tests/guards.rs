//! Guards of the SQL that no other test can reach, because they hold between two statements of a call: another session
//! changes an entry after a call has read it and before it writes.

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{Database, Server, ask, completed, granted, id};
use hapax_core::{
    EntryState, Extend, Json, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, Receive, RecordedOutcome, Resolution, ResolveError,
};
use sqlx::{Executor as _, PgConnection, Row as _};

fn main() -> ExitCode {
    common::main(tests![
        an_end_that_was_overtaken_by_a_new_claim_changes_nothing,
        an_end_that_was_overtaken_by_another_end_changes_nothing,
        fences_grow_although_the_sequence_was_set_back,
        a_stale_extension_does_not_prolong_the_newer_lease,
        a_decision_that_was_overtaken_is_refused,
        fences_of_an_entry_grow_although_the_sequence_was_set_back,
    ])
}

/// Waits until a session of a store waits for a row.
async fn until_one_waits(db: &mut PgConnection) {
    let sql = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let start = Instant::now();
    while sqlx::query(sql).fetch_one(&mut *db).await.unwrap().get::<i64, _>(0) == 0 {
        assert!(start.elapsed() < Duration::from_mins(1), "no session waits for the row");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An operator decides about an entry in doubt while another session takes the entry over, and commits first.
async fn a_decision_that_was_overtaken_is_refused(server: &'static Server) {
    for forgets in [false, true] {
        let database = Database::migrated(server).await;
        let clock = database.with_clock().await;
        let store = database.open().await;
        granted(&store, ask("k", "ann")).await;
        clock.advance_ms(60_001).await;
        let (mut other, mut db) = (database.connect().await, database.connect().await);
        other.execute("BEGIN").await.unwrap();
        let take_over =
            "UPDATE hapax.ledger_entry SET fence = nextval('hapax.fence'), owner = 'bob', stage = 0,
                         lease_ms = 60000, until_ms = hapax.now_ms() + 60000, prune_ms = NULL";
        other.execute(take_over).await.unwrap();
        let decision = {
            let store = store.clone();
            let decide = async move {
                if forgets {
                    store.forget(&id("k"), "eve").await
                } else {
                    store.resolve(&id("k"), Resolution::Absent, "eve").await
                }
            };
            tokio::spawn(decide)
        };
        until_one_waits(&mut db).await;
        other.execute("COMMIT").await.unwrap();
        let decided = decision.await.unwrap();
        assert!(matches!(decided, Err(ResolveError::InProgress { .. })), "{decided:?}");
        let entry = store.entry(&id("k")).await.unwrap().unwrap();
        assert_eq!(entry.owner.as_str(), "bob");
        let audited: i64 = db.fetch_one("SELECT count(*) FROM hapax.audit").await.unwrap().get(0);
        assert_eq!(audited, 0, "what was not done is not in the audit");
    }
}

/// As after a failover to a server that lags, on a connection that a pooler has kept.
async fn fences_of_an_entry_grow_although_the_sequence_was_set_back(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    let mut last = granted(&store, ask("k", "ann")).await.fence;
    for owner in ["bob", "carl"] {
        clock.advance_ms(60_001).await;
        database.connect().await.execute("SELECT setval('hapax.fence', 1)").await.unwrap();
        let next = granted(&store, ask("k", owner)).await.fence;
        assert!(next > last, "{next:?} after {last:?}");
        last = next;
    }
    clock.advance_ms(60_001).await;
    let outcome = RecordedOutcome::done(Json::of("by hand").unwrap());
    store.resolve(&id("k"), Resolution::Completed { outcome, ttl_ms: 60_000 }, "eve").await.unwrap();
    let resolved = store.entry(&id("k")).await.unwrap().unwrap().fence;
    assert!(resolved > last, "{resolved:?} after {last:?}");
}

/// Ends a claim while another session makes a change that commits first. Gives whether the end was accepted.
async fn overtaken(database: &Database, change: &str) -> bool {
    let store = database.open().await;
    let grant = granted(&store, ask("k", "ann")).await;
    let (mut other, mut db) = (database.connect().await, database.connect().await);
    other.execute("BEGIN").await.unwrap();
    other.execute(change).await.unwrap();
    let ends = {
        let (store, end) = (store.clone(), completed("k", &grant, "late"));
        tokio::spawn(async move { store.end(vec![end]).await.unwrap().remove(0).is_ok() })
    };
    until_one_waits(&mut db).await;
    other.execute("COMMIT").await.unwrap();
    ends.await.unwrap()
}

/// The fence of the entry is compared: here only that differs.
async fn an_end_that_was_overtaken_by_a_new_claim_changes_nothing(server: &'static Server) {
    let database = Database::migrated(server).await;
    let change = "UPDATE hapax.ledger_entry SET fence = nextval('hapax.fence'), owner = 'bob', takeovers = takeovers + 1";
    assert!(!overtaken(&database, change).await, "a stale token was accepted");
    let entry = database.open().await.entry(&id("k")).await.unwrap().unwrap();
    assert_eq!(entry.state, EntryState::Processing, "{entry:?}");
    assert_eq!(entry.owner.as_str(), "bob");
}

/// The version is compared: here only that and the outcome differ.
async fn an_end_that_was_overtaken_by_another_end_changes_nothing(server: &'static Server) {
    let database = Database::migrated(server).await;
    let change = "UPDATE hapax.ledger_entry SET version = version + 1, stage = 2, outcome = '\"first\"',
                  lease_ms = 3600000, prune_ms = hapax.now_ms() + 3600000, until_ms = hapax.now_ms()";
    overtaken(&database, change).await;
    let mut db = database.connect().await;
    let outcome: String = db.fetch_one("SELECT outcome FROM hapax.ledger_entry").await.unwrap().get(0);
    assert_eq!(outcome, "\"first\"", "what was recorded is never replaced");
}

/// As after a failover to a server that lags: fences that were handed out are not handed out again.
async fn fences_grow_although_the_sequence_was_set_back(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (before, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    before.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let claimed = granted(&before, ask("a", "ann")).await.fence;
    before.shut_down();
    database.connect().await.execute("SELECT setval('hapax.fence', 1)").await.unwrap();
    let after = database.open().await;
    let fence = granted(&after, ask("b", "ann")).await.fence;
    assert!(fence > claimed, "{fence:?} after {claimed:?}");
    after.send(&jobs, vec![NewMessage::new("x")]).await.unwrap().remove(0).unwrap();
    let got = after.receive(&jobs, Receive { wait_ms: Some(20_000), ..Receive::up_to(1) }).await.unwrap();
    assert!(got[0].fence > claimed, "{:?} after {claimed:?}", got[0].fence);
}

/// The extension itself compares the fence, not only the answer to it.
async fn a_stale_extension_does_not_prolong_the_newer_lease(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let (store, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    store.send(&jobs, vec![NewMessage::new("x")]).await.unwrap().remove(0).unwrap();
    let mut receipts = Vec::new();
    for at in 0..3 {
        let ask = Receive { lease_ms: Some(10_000), wait_ms: Some(0), ..Receive::up_to(1) };
        let got = store.receive(&jobs, ask).await.unwrap();
        assert_eq!(got.len(), 1, "delivery {at}: the lease before it has ended");
        receipts.push(got[0].receipt.clone());
        let stale = Extend { receipt: receipts[0].clone(), lease_ms: 600_000, own_lease: false };
        let extended = store.extend(&jobs, vec![stale]).await.unwrap().remove(0);
        assert_eq!(extended.is_ok(), at == 0, "delivery {at}: {extended:?}");
        clock.advance_ms(if at == 0 { 600_001 } else { 10_001 }).await;
        store.clock_moved().await.unwrap();
    }
}
