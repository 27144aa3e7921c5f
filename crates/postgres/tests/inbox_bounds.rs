//! What bounds a user's transaction and the entries that it makes: how long a statement may take, how long a lock is waited
//! for, how long an outcome is kept.

mod common;

use std::time::{Duration, Instant};

use common::{Clock, Database, PATIENCE, Server, id};
use hapax_core::{
    AsyncInbox as _, EntryId, Extend, Fingerprint, InboxEntry, InboxError, InboxLookup, Json, Ledger as _,
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receipt, Receive, RecordedOutcome,
    Tier,
};
use hapax_postgres::{InboxOptions, Isolation, PostgresInbox, PostgresStore, PostgresTransaction};
use sqlx::{Executor as _, PgConnection};

const MINUTE_MS: u64 = 60_000;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_handler_may_wait_for_its_own_locks,
        a_key_is_waited_for_no_longer_than_was_said,
        a_key_is_waited_for_as_long_as_was_said,
        a_statement_that_takes_too_long_is_ended,
        what_transactions_recorded_is_removed_after_its_time,
        an_outcome_that_a_message_needs_is_kept_beyond_its_time,
        a_key_that_is_entered_again_needs_its_outcome_again,
        each_key_of_a_transaction_is_entered_by_itself,
        heartbeats_do_not_defeat_a_transaction_with_one_snapshot,
        an_outcome_is_not_replaced_by_a_completion,
        a_claim_that_lapsed_is_in_doubt,
    ])
}

fn with(store: &PostgresStore, options: InboxOptions) -> PostgresInbox {
    PostgresInbox::with_options(store, options).unwrap()
}

fn inbox_of(store: &PostgresStore, isolation: Isolation) -> PostgresInbox {
    let lock_wait = Duration::from_millis(200);
    with(store, InboxOptions { isolation, lock_wait, transactions_max: 1, ..InboxOptions::default() })
}

async fn site(server: &'static Server) -> (Database, PostgresStore) {
    let database = Database::migrated(server).await;
    database.connect().await.execute("CREATE TABLE effects (number int)").await.unwrap();
    let store = database.open().await;
    (database, store)
}

async fn site_with_clock(server: &'static Server) -> (Database, Clock, PostgresStore) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    (database, clock, store)
}

fn entry(key: &str) -> InboxEntry {
    InboxEntry { id: id(key), fingerprint: Fingerprint::new("f").unwrap() }
}

fn done(text: &str) -> RecordedOutcome {
    RecordedOutcome::done(Json::of(text).unwrap())
}

fn elsewhere() -> Receipt {
    Receipt::new("elsewhere").unwrap()
}

async fn entered(inbox: &PostgresInbox, entry: &InboxEntry) -> PostgresTransaction {
    let mut tx = inbox.begin(entry).await.unwrap();
    assert_eq!(inbox.enter(&mut tx, entry).await.unwrap(), InboxLookup::Fresh);
    tx
}

async fn lookup(inbox: &PostgresInbox, entry: &InboxEntry) -> InboxLookup {
    let mut tx = inbox.begin(entry).await.unwrap();
    let found = inbox.enter(&mut tx, entry).await.unwrap();
    inbox.rollback(tx).await;
    found
}

async fn number(db: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(db).await.unwrap()
}

/// The two forms in which a transaction records its outcome and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    /// All in one round trip.
    Complete,
    /// A statement for each.
    RecordAndCommit,
}

const FORMS: [Form; 2] = [Form::Complete, Form::RecordAndCommit];

/// Enters, records and commits.
async fn make(inbox: &PostgresInbox, entry: &InboxEntry, form: Form, outcome: RecordedOutcome) {
    let mut tx = entered(inbox, entry).await;
    match form {
        Form::Complete => {
            assert!(!inbox.complete(tx, entry, outcome, MINUTE_MS, &elsewhere()).await.unwrap());
        }
        Form::RecordAndCommit => {
            inbox.record(&mut tx, entry, outcome, MINUTE_MS).await.unwrap();
            inbox.commit(tx).await.unwrap();
        }
    }
}

/// The bound is for the key: a handler waits for rows of its own tables as long as its statements may take.
async fn a_handler_may_wait_for_its_own_locks(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead] {
        let (database, store) = site(server).await;
        let inbox = inbox_of(&store, isolation);
        let (mut holder, mut watcher) = (database.connect().await, database.connect().await);
        holder.execute("INSERT INTO effects VALUES (1)").await.unwrap();
        holder.execute("BEGIN; SELECT * FROM effects FOR UPDATE").await.unwrap();
        let mut tx = entered(&inbox, &entry("order-1")).await;
        let waiting = tokio::spawn(async move {
            let waited = PostgresInbox::connection(&mut tx).execute("SELECT * FROM effects FOR UPDATE").await;
            (tx, waited)
        });
        // Five times as long as a transaction waits for a key.
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                     AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > interval '1 s'";
        let deadline = Instant::now() + PATIENCE;
        while !waiting.is_finished() && number(&mut watcher, waits).await == 0 {
            assert!(Instant::now() < deadline, "{isolation:?}: the statement does not wait");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        holder.execute("ROLLBACK").await.unwrap();
        let (tx, waited) = waiting.await.unwrap();
        assert!(waited.is_ok(), "{isolation:?}: {waited:?}");
        inbox.complete(tx, &entry("order-1"), done("x"), MINUTE_MS, &elsewhere()).await.unwrap();
    }
}

/// In the process that has entered it, in another one, and in a transaction of the user's own.
async fn a_key_is_waited_for_no_longer_than_was_said(server: &'static Server) {
    let (database, store) = site(server).await;
    let inbox = inbox_of(&store, Isolation::ReadCommitted);
    let tx = entered(&inbox, &entry("order-1")).await;
    let met = tokio::time::timeout(PATIENCE, inbox.begin(&entry("order-1"))).await;
    let met = met.expect("a duplicate in the same process waits without a bound").map(drop);
    assert!(matches!(met, Err(InboxError::Locked { timeout_ms: 200 })), "{met:?}");
    let elsewhere = inbox_of(&database.open().await, Isolation::ReadCommitted);
    let in_progress = InboxLookup::InProgress { retry_after_ms: 200 };
    assert_eq!(lookup(&elsewhere, &entry("order-1")).await, in_progress);
    let mut own = database.connect().await;
    own.execute("BEGIN").await.unwrap();
    assert_eq!(elsewhere.enter_on(&mut own, &entry("order-1")).await.unwrap(), in_progress);
    inbox.rollback(tx).await;
}

async fn a_key_is_waited_for_as_long_as_was_said(server: &'static Server) {
    for own in [false, true] {
        let (database, store) = site(server).await;
        let first = inbox_of(&store, Isolation::ReadCommitted);
        let options = InboxOptions { lock_wait: Duration::from_mins(1), ..InboxOptions::default() };
        let (patient, mut db) = (with(&database.open().await, options), database.connect().await);
        let tx = entered(&first, &entry("order-1")).await;
        let waiting = tokio::spawn(async move {
            if own {
                db.execute("BEGIN").await.unwrap();
                return patient.enter_on(&mut db, &entry("order-1")).await.unwrap();
            }
            lookup(&patient, &entry("order-1")).await
        });
        // Longer than the default.
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
                     AND wait_event_type = 'Lock' AND clock_timestamp() - query_start > interval '1.5 s'";
        let (mut watcher, deadline) = (database.connect().await, Instant::now() + PATIENCE);
        while !waiting.is_finished() && number(&mut watcher, waits).await == 0 {
            assert!(Instant::now() < deadline, "own {own}: the transaction does not wait");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        first.complete(tx, &entry("order-1"), done("x"), MINUTE_MS, &elsewhere()).await.unwrap();
        assert_eq!(waiting.await.unwrap(), InboxLookup::Completed(done("x")), "own {own}");
    }
}

async fn a_statement_that_takes_too_long_is_ended(server: &'static Server) {
    let (database, store) = site(server).await;
    let options = InboxOptions { statement_max: Duration::from_millis(300), ..InboxOptions::default() };
    let inbox = with(&store, options);
    let mut tx = entered(&inbox, &entry("order-1")).await;
    PostgresInbox::connection(&mut tx).execute("INSERT INTO effects VALUES (1)").await.unwrap();
    let slow = PostgresInbox::connection(&mut tx).execute("SELECT pg_sleep(5)").await;
    let refused = slow.unwrap_err();
    assert!(refused.to_string().contains("statement timeout"), "{refused}");
    let ended = inbox.complete(tx, &entry("order-1"), done("x"), MINUTE_MS, &elsewhere()).await;
    assert!(matches!(ended, Err(InboxError::Database(_))), "{ended:?}");
    assert_eq!(number(&mut database.connect().await, "SELECT count(*) FROM effects").await, 0);
    assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Fresh);
}

async fn what_transactions_recorded_is_removed_after_its_time(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        removed_after_its_time(server, isolation).await;
    }
}

async fn removed_after_its_time(server: &'static Server, isolation: Isolation) {
    let (database, clock, store) = site_with_clock(server).await;
    let (inbox, mut admin) = (inbox_of(&store, isolation), database.connect().await);
    // The second time each row is used again, if it was not removed before.
    for (round, sweeps) in [(0, false), (1, true)] {
        for form in FORMS {
            for (key, outcome) in
                [("done", done("x")), ("failed", RecordedOutcome::failed(Json::of("no").unwrap()))]
            {
                let entry = entry(&format!("{key} {form:?}"));
                make(&inbox, &entry, form, outcome.clone()).await;
                assert_eq!(lookup(&inbox, &entry).await, InboxLookup::Completed(outcome), "round {round}");
            }
        }
        assert_eq!(store.ledger_stats().await.unwrap().entries, 4, "round {round}");
        clock.advance_ms(MINUTE_MS + 1).await;
        if sweeps {
            store.clock_moved().await.unwrap();
        }
    }
    // Whatever a sweep in the background was doing, this one begins after the time was over.
    store.clock_moved().await.unwrap();
    let left = "SELECT (SELECT count(*) FROM hapax.ledger_entry) + (SELECT count(*) FROM hapax.ledger_due)";
    assert_eq!(number(&mut admin, left).await, 0, "{isolation:?}: entries whose time is over are kept");
    assert_eq!(store.ledger_stats().await.unwrap().entries, 0);
}

/// A message that waits, for example a dead letter, may be a duplicate of one whose outcome is old: it is replayed.
async fn an_outcome_that_a_message_needs_is_kept_beyond_its_time(server: &'static Server) {
    for form in FORMS {
        let (_database, clock, store) = site_with_clock(server).await;
        let inbox = inbox_of(&store, Isolation::ReadCommitted);
        let queue = QueueName::new("jobs").unwrap();
        let config = QueueConfig { tier: Tier::Transactional, ..QueueConfig::default() };
        store.create_queue(&queue, config).await.unwrap();
        let message = NewMessage::new("x").idempotency_key(&"order-1".parse().unwrap()).delay_ms(600_000);
        let sent = store.send(&queue, vec![message]).await.unwrap().remove(0).unwrap();
        let entry = InboxEntry {
            id: EntryId::of_queue(&queue, "order-1".parse().unwrap()),
            fingerprint: Fingerprint::new("f").unwrap(),
        };
        make(&inbox, &entry, form, done("x")).await;
        clock.advance_ms(5 * MINUTE_MS).await;
        store.clock_moved().await.unwrap();
        assert_eq!(lookup(&inbox, &entry).await, InboxLookup::Completed(done("x")), "{form:?}");
        assert_eq!(store.discard(&queue, vec![sent.id], "test").await.unwrap().count, 1);
        assert_eq!(lookup(&inbox, &entry).await, InboxLookup::Fresh, "{form:?}: nothing needs it any more");
    }
}

/// A transaction that was told of an outcome, and its own second completion, do not change it.
async fn an_outcome_is_not_replaced_by_a_completion(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let (_database, store) = site(server).await;
        let inbox = inbox_of(&store, isolation);
        let entry = entry("order-1");
        make(&inbox, &entry, Form::Complete, done("first")).await;
        let tx = inbox.begin(&entry).await.unwrap();
        let late = inbox.complete(tx, &entry, done("second"), MINUTE_MS, &elsewhere()).await;
        assert!(matches!(late, Err(InboxError::EndedByHandler(_))), "{isolation:?}: {late:?}");
        assert_eq!(lookup(&inbox, &entry).await, InboxLookup::Completed(done("first")), "{isolation:?}");
    }
}

/// The holder of a claim may have acted when its lease ended: a transaction that meets it waits for a decision.
async fn a_claim_that_lapsed_is_in_doubt(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let (_database, clock, store) = site_with_clock(server).await;
        let inbox = inbox_of(&store, isolation);
        let mut request = common::ask("order-1", "one");
        request.fingerprint = Some(Fingerprint::new("f").unwrap());
        let grant = common::granted(&store, request).await;
        let held = lookup(&inbox, &entry("order-1")).await;
        assert!(matches!(held, InboxLookup::InProgress { .. }), "{isolation:?}: {held:?}");
        clock.advance_ms(grant.lease_ms + 1).await;
        let lapsed = lookup(&inbox, &entry("order-1")).await;
        assert!(matches!(lapsed, InboxLookup::InDoubt { .. }), "{isolation:?}: {lapsed:?}");
        let other = InboxEntry { fingerprint: Fingerprint::new("other").unwrap(), ..entry("order-1") };
        assert_eq!(lookup(&inbox, &other).await, InboxLookup::Mismatch, "{isolation:?}: in every state");
    }
}

/// What a session remembers of its last transaction does not stand for an outcome of the next one.
async fn a_key_that_is_entered_again_needs_its_outcome_again(server: &'static Server) {
    let (_database, clock, store) = site_with_clock(server).await;
    let inbox = inbox_of(&store, Isolation::ReadCommitted);
    for form in FORMS {
        let entry = entry(&format!("{form:?}"));
        make(&inbox, &entry, form, done("x")).await;
        clock.advance_ms(MINUTE_MS + 1).await;
        let tx = entered(&inbox, &entry).await;
        let refused = inbox.commit(tx).await;
        assert!(matches!(refused, Err(InboxError::EndedByHandler(_))), "{form:?}: {refused:?}");
    }
}

/// A transaction begins with one key and may enter others: what was found for one is not told for another.
async fn each_key_of_a_transaction_is_entered_by_itself(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let (_database, store) = site(server).await;
        let inbox = inbox_of(&store, isolation);
        make(&inbox, &entry("before"), Form::Complete, done("x")).await;
        let mut tx = inbox.begin(&entry("first")).await.unwrap();
        let other = inbox.enter(&mut tx, &entry("before")).await.unwrap();
        assert_eq!(other, InboxLookup::Completed(done("x")), "{isolation:?}");
        for key in ["second", "first"] {
            let found = inbox.enter(&mut tx, &entry(key)).await;
            assert!(matches!(found, Ok(InboxLookup::Fresh)), "{isolation:?}, {key}: {found:?}");
            inbox.record(&mut tx, &entry(key), done(key), MINUTE_MS).await.unwrap();
        }
        inbox.commit(tx).await.unwrap();
        for key in ["first", "second"] {
            assert_eq!(lookup(&inbox, &entry(key)).await, InboxLookup::Completed(done(key)), "{isolation:?}");
        }
    }
}

/// Above READ COMMITTED a transaction cannot delete a row that has changed since it began: heartbeats leave its delivery alone.
async fn heartbeats_do_not_defeat_a_transaction_with_one_snapshot(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        for suffix in ["", ".fifo"] {
            let what = format!("{isolation:?}, {suffix:?}");
            let (_database, store) = site(server).await;
            let (inbox, queue) =
                (inbox_of(&store, isolation), QueueName::new(format!("jobs{suffix}")).unwrap());
            let base = if suffix.is_empty() { QueueConfig::default() } else { QueueConfig::fifo() };
            store.create_queue(&queue, QueueConfig { tier: Tier::Transactional, ..base }).await.unwrap();
            let message = NewMessage::new("x").idempotency_key(&"order-1".parse().unwrap());
            let message = match suffix {
                "" => message,
                _ => message.group("g".parse().unwrap()).dedup("d".parse().unwrap()),
            };
            store.send(&queue, vec![message]).await.unwrap().remove(0).unwrap();
            let delivery = store.receive(&queue, Receive::up_to(1)).await.unwrap().remove(0);
            let mut tx = inbox.begin(&entry("order-1")).await.unwrap();
            inbox.hold(&mut tx, &delivery.receipt).await.unwrap();
            let found = inbox.enter(&mut tx, &entry("order-1")).await.unwrap();
            assert_eq!(found, InboxLookup::Fresh, "{what}");
            let receipt = delivery.receipt.clone();
            let extend = Extend { receipt, lease_ms: 10 * MINUTE_MS, own_lease: false };
            let renewed = store.extend(&queue, vec![extend]).await.unwrap().remove(0);
            assert!(renewed.is_ok(), "{what}: {renewed:?}");
            let entry = entry("order-1");
            let settled = inbox.complete(tx, &entry, done("x"), MINUTE_MS, &delivery.receipt).await;
            assert!(matches!(settled, Ok(true)), "{what}: {settled:?}");
            let late = store.settle(&queue, vec![hapax_core::Settle::ack(delivery.receipt)]).await.unwrap();
            assert!(late[0].is_err(), "{what}: it was settled before: {late:?}");
        }
    }
}
