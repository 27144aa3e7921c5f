//! The transactional seam: entries that are made in a user's transaction, through the inbox and through SQL.

mod common;

use std::time::{Duration, Instant};

use common::{Database, PATIENCE, Server, ask, claim, completed, granted, id};
use hapax_conformance::inbox::{self, AsyncHarness, InboxHarness};
use hapax_core::{
    AsyncInbox as _, Claim, ClaimEnding, EndClaim, Fingerprint, GroupId, InboxEntry, InboxError, InboxLookup,
    Json, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receipt,
    Receive, RecordedOutcome, Tier, policy::RetryPolicy,
};
use hapax_postgres::{InboxOptions, Isolation, Options, PostgresInbox, PostgresStore};
use sqlx::{Connection as _, Executor as _, PgConnection};

macro_rules! suite {
    ($form:ident, $query:literal, $isolation:ident) => {
        mod $form {
            use super::*;

            async fn fresh(server: &'static Server) -> Box<dyn InboxHarness> {
                harness(Database::migrated_with(server, $query).await, Isolation::$isolation).await
            }

            pub async fn a_duplicate_gets_the_outcome(server: &'static Server) {
                inbox::a_duplicate_gets_the_outcome(fresh(server).await).await;
            }
            pub async fn a_rollback_leaves_nothing(server: &'static Server) {
                inbox::a_rollback_leaves_nothing(fresh(server).await).await;
            }
            pub async fn another_content_is_a_mismatch(server: &'static Server) {
                inbox::another_content_is_a_mismatch(fresh(server).await).await;
            }
            pub async fn scopes_do_not_share_keys(server: &'static Server) {
                inbox::scopes_do_not_share_keys(fresh(server).await).await;
            }
            pub async fn concurrent_duplicates_have_one_effect(server: &'static Server) {
                inbox::concurrent_duplicates_have_one_effect(fresh(server).await).await;
            }
            pub async fn entries_survive_a_restart(server: &'static Server) {
                inbox::entries_survive_a_restart(fresh(server).await).await;
            }
            pub async fn a_large_outcome_becomes_a_marker(server: &'static Server) {
                inbox::a_large_outcome_becomes_a_marker(fresh(server).await).await;
            }
            pub async fn a_key_in_progress_is_not_entered(server: &'static Server) {
                inbox::a_key_in_progress_is_not_entered(fresh(server).await).await;
            }
        }
    };
}

suite!(standard, "", ReadCommitted);
suite!(portable, "hapax_portable=true", ReadCommitted);
suite!(repeatable_read, "", RepeatableRead);
suite!(serializable, "", Serializable);
suite!(portable_serializable, "hapax_portable=true", Serializable);

/// The cases of the suite with the form in their names, and the tests of this file.
fn main() -> std::process::ExitCode {
    let own = tests![
        the_program_and_sql_compute_the_same_id,
        an_entry_of_the_ledger_is_met,
        an_entered_key_without_an_outcome_is_not_committed,
        each_entered_key_needs_its_outcome,
        a_handler_that_rolls_back_its_transaction_is_detected,
        nested_savepoints_work,
        any_key_and_outcome_can_be_entered_and_completed,
        what_a_handler_ended_is_not_completed,
        a_connection_is_used_again_after_each_end,
        duplicates_of_one_process_occupy_no_connection,
        an_entry_whose_time_is_over_is_entered_again,
        arguments_out_of_range_are_refused,
        a_transaction_whose_client_is_silent_is_ended,
        a_lapsed_delivery_whose_settle_was_rolled_back_is_found,
        an_outcome_is_recorded_once,
        a_transaction_may_be_silent_for_longer_than_an_operation_takes,
    ];
    macro_rules! of_form {
        ($form:ident, $($case:ident),+ $(,)?) => {
            [$(common::Test {
                name: concat!(stringify!($form), "::", stringify!($case)),
                run: |server| common::block_on($form::$case(server)),
            }),+]
        };
    }
    macro_rules! cases {
        ($form:ident) => {
            of_form!(
                $form,
                a_duplicate_gets_the_outcome,
                a_rollback_leaves_nothing,
                another_content_is_a_mismatch,
                scopes_do_not_share_keys,
                concurrent_duplicates_have_one_effect,
                entries_survive_a_restart,
                a_large_outcome_becomes_a_marker,
                a_key_in_progress_is_not_entered,
            )
        };
    }
    let all = cases!(standard)
        .into_iter()
        .chain(cases!(portable))
        .chain(cases!(repeatable_read))
        .chain(cases!(serializable))
        .chain(cases!(portable_serializable))
        .chain(own.iter().map(|test| common::Test { ..*test }));
    common::main(Vec::leak(all.collect()))
}

fn inbox_of(store: &PostgresStore, lock_wait_ms: u64) -> PostgresInbox {
    isolated(store, lock_wait_ms, Isolation::ReadCommitted)
}

fn isolated(store: &PostgresStore, lock_wait_ms: u64, isolation: Isolation) -> PostgresInbox {
    let lock_wait = Duration::from_millis(lock_wait_ms);
    PostgresInbox::with_options(store, InboxOptions { lock_wait, isolation, ..InboxOptions::default() })
        .unwrap()
}

async fn harness(database: Database, isolation: Isolation) -> Box<dyn InboxHarness> {
    database.connect().await.execute("CREATE TABLE effects (number int)").await.unwrap();
    let (first, second) = (database.open().await, database.open().await);
    Box::new(AsyncHarness {
        inbox: isolated(&first, 200, isolation),
        open: Box::new(move || {
            // Keeps the database as long as the harness.
            let _ = &database;
            isolated(&second, 200, isolation)
        }),
        write: |db| {
            Box::pin(async {
                db.execute("INSERT INTO effects VALUES (1)").await.unwrap();
            })
        },
        count: |db| Box::pin(count(db)),
    })
}

async fn count(db: &mut PgConnection) -> u64 {
    sqlx::query_scalar::<_, i64>("SELECT count(*) FROM effects").fetch_one(db).await.unwrap() as u64
}

fn entry(key: &str) -> InboxEntry {
    InboxEntry { id: id(key), fingerprint: Fingerprint::new("f").unwrap() }
}

fn done(text: &str) -> RecordedOutcome {
    RecordedOutcome::done(Json::of(text).unwrap())
}

/// A database with a table of effects, its store, and its inbox.
async fn site(server: &'static Server) -> (Database, PostgresStore, PostgresInbox) {
    let database = Database::migrated(server).await;
    database.connect().await.execute("CREATE TABLE effects (number int)").await.unwrap();
    let store = database.open().await;
    let inbox = inbox_of(&store, 200);
    (database, store, inbox)
}

/// Enters, writes and records in one transaction, without the end.
async fn entered(inbox: &PostgresInbox, key: &str) -> hapax_postgres::PostgresTransaction {
    let mut tx = inbox.begin(&entry(key)).await.unwrap();
    assert_eq!(inbox.enter(&mut tx, &entry(key)).await.unwrap(), InboxLookup::Fresh);
    PostgresInbox::connection(&mut tx).execute("INSERT INTO effects VALUES (1)").await.unwrap();
    tx
}

async fn lookup(inbox: &PostgresInbox, entry: &InboxEntry) -> InboxLookup {
    let mut tx = inbox.begin(entry).await.unwrap();
    let found = inbox.enter(&mut tx, entry).await.unwrap();
    inbox.rollback(tx).await;
    found
}

async fn the_program_and_sql_compute_the_same_id(server: &'static Server) {
    let (_database, store, inbox) = site(server).await;
    for key in ["order-1", "Größe 7 — 1,5 kg", "x".repeat(255).as_str()] {
        // Made by the program, found by SQL.
        let grant = granted(&store, ask(key, "one")).await;
        store.end(vec![completed(key, &grant, "paid")]).await.unwrap();
        let same = InboxEntry { id: id(key), fingerprint: Fingerprint::new("other").unwrap() };
        assert_eq!(lookup(&inbox, &same).await, InboxLookup::Mismatch, "{key}");
        // Made by SQL, found by the program.
        let key = format!("2{}", &key[..key.len() - 1]);
        let mut tx = entered(&inbox, &key).await;
        inbox.record(&mut tx, &entry(&key), done("booked"), 60_000).await.unwrap();
        inbox.commit(tx).await.unwrap();
        let mut request = ask(&key, "two");
        request.fingerprint = Some(Fingerprint::new("f").unwrap());
        let found = claim(&store, request).await.unwrap();
        assert!(matches!(found, Claim::Completed { outcome, .. } if outcome == done("booked")), "{key}");
    }
}

/// Entries of `effectively-once`: held, in doubt, completed, failed, with and without a fingerprint.
async fn an_entry_of_the_ledger_is_met(server: &'static Server) {
    let (_database, store, inbox) = site(server).await;
    let of = |key: &str| {
        let mut request = ask(key, "one");
        request.fingerprint = Some(Fingerprint::new("f").unwrap());
        request
    };
    granted(&store, of("held")).await;
    let InboxLookup::InProgress { retry_after_ms } = lookup(&inbox, &entry("held")).await else { panic!() };
    assert!((1..=60_000).contains(&retry_after_ms), "{retry_after_ms}");
    let doubted = granted(&store, of("doubted")).await;
    let ending = ClaimEnding::Doubt;
    store
        .end(vec![EndClaim { id: id("doubted"), token: doubted.token, ending }])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    assert!(matches!(lookup(&inbox, &entry("doubted")).await, InboxLookup::InDoubt { .. }));
    let failed = granted(&store, of("failed")).await;
    let outcome = RecordedOutcome::failed(Json::of("no account").unwrap());
    let ending = ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: 60_000 };
    store
        .end(vec![EndClaim { id: id("failed"), token: failed.token, ending }])
        .await
        .unwrap()
        .remove(0)
        .unwrap();
    assert_eq!(lookup(&inbox, &entry("failed")).await, InboxLookup::Completed(outcome));
    granted(&store, ask("bare", "one")).await;
    assert_eq!(lookup(&inbox, &entry("bare")).await, InboxLookup::Mismatch, "the claim had no fingerprint");
}

async fn an_entered_key_without_an_outcome_is_not_committed(server: &'static Server) {
    let (database, _store, inbox) = site(server).await;
    let tx = entered(&inbox, "order-1").await;
    let refused = inbox.commit(tx).await.unwrap_err();
    assert!(matches!(&refused, InboxError::EndedByHandler(why) if why.contains("order-1")), "{refused}");
    assert_eq!(count(&mut database.connect().await).await, 0);
    assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Fresh);
}

/// The check at the commit remembers the key that was recorded last, and looks the others up.
async fn each_entered_key_needs_its_outcome(server: &'static Server) {
    let (database, _store, _) = site(server).await;
    let mut db = database.connect().await;
    for (number, (steps, missing)) in [
        ("enter a, enter b, record b", Some('a')),
        ("enter a, enter b, record b, record a", None),
        ("enter a, enter b, record a, record b", None),
        ("enter a, SAVEPOINT s, record a, ROLLBACK TO s", Some('a')),
        ("enter a, SAVEPOINT s, record a, ROLLBACK TO s, record a", None),
        ("enter a, record a, SAVEPOINT s, enter b, ROLLBACK TO s", None),
        ("enter a, record a, SAVEPOINT s, enter b, RELEASE s", Some('b')),
        ("enter a, record a, RESET ALL", None),
        ("enter a, RESET ALL", Some('a')),
    ]
    .into_iter()
    .enumerate()
    {
        db.execute("BEGIN").await.unwrap();
        for step in steps.split(", ") {
            let sql = match step.split_once(' ') {
                Some(("enter", key)) => format!("SELECT hapax.enter('s', '{key}{number}')"),
                Some(("record", key)) => format!("SELECT hapax.record('s', '{key}{number}', '1')"),
                _ => step.to_owned(),
            };
            db.execute(sql.as_str()).await.unwrap();
        }
        match (db.execute("COMMIT").await, missing) {
            (Ok(_), None) => {}
            (Err(refused), Some(key)) => {
                assert!(refused.to_string().contains(&format!("'{key}{number}'")), "{steps}: {refused}");
            }
            (ended, _) => panic!("{steps}: {ended:?}"),
        }
    }
    let open = "SELECT count(*) FROM hapax.ledger_entry WHERE stage = 4";
    assert_eq!(sqlx::query_scalar::<_, i64>(open).fetch_one(&mut db).await.unwrap(), 0);
}

async fn a_handler_that_rolls_back_its_transaction_is_detected(server: &'static Server) {
    let (database, _store, inbox) = site(server).await;
    for ends in ["ROLLBACK", "ROLLBACK; BEGIN", "ROLLBACK AND CHAIN"] {
        let mut tx = entered(&inbox, "order-1").await;
        PostgresInbox::connection(&mut tx).execute(ends).await.unwrap();
        let refused = inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap_err();
        assert!(matches!(refused, InboxError::EndedByHandler(_)), "{ends}: {refused}");
        inbox.rollback(tx).await;
    }
    // To commit is refused already: the key is entered, and has no outcome.
    for ends in ["COMMIT", "COMMIT AND CHAIN", "SET CONSTRAINTS ALL IMMEDIATE"] {
        let mut tx = entered(&inbox, "order-1").await;
        let refused = PostgresInbox::connection(&mut tx).execute(ends).await.unwrap_err();
        assert!(refused.to_string().contains("order-1"), "{ends}: {refused}");
        inbox.rollback(tx).await;
    }
    // A nested transaction that is forgotten.
    let mut tx = entered(&inbox, "order-1").await;
    std::mem::forget(PostgresInbox::connection(&mut tx).begin().await.unwrap());
    inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap();
    assert!(matches!(inbox.commit(tx).await, Err(InboxError::EndedByHandler(_))));
    assert_eq!(count(&mut database.connect().await).await, 0, "nothing of all that took effect");
    assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Fresh);
}

async fn nested_savepoints_work(server: &'static Server) {
    let (database, _store, inbox) = site(server).await;
    let mut tx = entered(&inbox, "order-1").await;
    for keep in [true, false, true] {
        let mut nested = PostgresInbox::connection(&mut tx).begin().await.unwrap();
        nested.execute("INSERT INTO effects VALUES (2)").await.unwrap();
        if keep {
            nested.commit().await.unwrap();
        } else {
            // An error inside of it is undone with it.
            nested.execute("SELECT 1 / 0").await.unwrap_err();
            drop(nested);
        }
    }
    inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap();
    inbox.commit(tx).await.unwrap();
    assert_eq!(count(&mut database.connect().await).await, 3);
}

/// A receipt of another store: there is nothing to settle in this one.
fn elsewhere() -> Receipt {
    Receipt::new("elsewhere").unwrap()
}

/// Keys and values are a part of the statements that begin and end a transaction: none is taken for SQL, whatever the
/// database says about backslashes.
async fn any_key_and_outcome_can_be_entered_and_completed(server: &'static Server) {
    let (database, store, _) = site(server).await;
    for conforming in ["on", "off"] {
        let set = format!(
            "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET standard_conforming_strings = {conforming}', current_database()); END $$"
        );
        database.connect().await.execute(set.as_str()).await.unwrap();
        let inbox = inbox_of(&store, 200);
        let hostile = [
            "O'Neil",
            r"a\",
            r"\'",
            r"\\'; COMMIT; --",
            "'); DELETE FROM effects; --",
            "$1 $$ %s {} \u{1F600}",
            r"\u0041",
        ];
        for text in hostile.into_iter().map(str::to_owned).chain([format!("'{}", "\\\u{e9}".repeat(3_000))]) {
            let entry = entry(&format!("{conforming} {}", text.chars().take(60).collect::<String>()));
            let mut tx = inbox.begin(&entry).await.unwrap();
            assert_eq!(inbox.enter(&mut tx, &entry).await.unwrap(), InboxLookup::Fresh, "{text:.40}");
            PostgresInbox::connection(&mut tx).execute("INSERT INTO effects VALUES (1)").await.unwrap();
            let settled = inbox.complete(tx, &entry, done(&text), 60_000, &elsewhere()).await.unwrap();
            assert!(!settled);
            assert_eq!(lookup(&inbox, &entry).await, InboxLookup::Completed(done(&text)), "{text:.40}");
            let stored = "SELECT count(*) FROM hapax.ledger_entry WHERE key = $1 AND outcome = $2";
            let stored = sqlx::query_scalar::<_, i64>(stored).bind(entry.id.key.as_str());
            let stored = stored.bind(Json::of(text.as_str()).unwrap().as_str().to_owned());
            assert_eq!(stored.fetch_one(&mut database.connect().await).await.unwrap(), 1, "{text:.40}");
        }
    }
    assert_eq!(count(&mut database.connect().await).await, 16);
    // Failures and empty outcomes, too.
    for (key, outcome) in [
        ("failed", RecordedOutcome::failed(Json::of("no account").unwrap())),
        ("empty", RecordedOutcome { failed: false, value: None, omitted_bytes: None }),
    ] {
        let inbox = inbox_of(&store, 200);
        let tx = entered(&inbox, key).await;
        inbox.complete(tx, &entry(key), outcome.clone(), 60_000, &elsewhere()).await.unwrap();
        assert_eq!(lookup(&inbox, &entry(key)).await, InboxLookup::Completed(outcome));
    }
}

/// The statements that complete a transaction find out whether it is still the one that has entered the key.
async fn what_a_handler_ended_is_not_completed(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::Serializable] {
        let (database, store, _) = site(server).await;
        let inbox = isolated(&store, 200, isolation);
        for ends in ["ROLLBACK", "ROLLBACK; BEGIN", "ROLLBACK AND CHAIN"] {
            let mut tx = entered(&inbox, "order-1").await;
            PostgresInbox::connection(&mut tx).execute(ends).await.unwrap();
            let refused = inbox.complete(tx, &entry("order-1"), done("x"), 60_000, &elsewhere()).await;
            assert!(matches!(refused, Err(InboxError::EndedByHandler(_))), "{ends}: {refused:?}");
        }
        let mut tx = entered(&inbox, "order-1").await;
        std::mem::forget(PostgresInbox::connection(&mut tx).begin().await.unwrap());
        let refused = inbox.complete(tx, &entry("order-1"), done("x"), 60_000, &elsewhere()).await;
        assert!(matches!(refused, Err(InboxError::EndedByHandler(_))), "{refused:?}");
        let mut tx = entered(&inbox, "order-1").await;
        PostgresInbox::connection(&mut tx).execute("SELECT 1 / 0").await.unwrap_err();
        let refused = inbox.complete(tx, &entry("order-1"), done("x"), 60_000, &elsewhere()).await;
        assert!(matches!(refused, Err(InboxError::Database(_))), "{refused:?}");
        assert_eq!(count(&mut database.connect().await).await, 0, "nothing of all that took effect");
        assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Fresh);
    }
}

/// One connection serves transactions that end in different ways, and in each of them a nested one is a savepoint.
async fn a_connection_is_used_again_after_each_end(server: &'static Server) {
    for isolation in [Isolation::ReadCommitted, Isolation::RepeatableRead, Isolation::Serializable] {
        let (database, store, _) = site(server).await;
        let options = InboxOptions { transactions_max: 1, isolation, ..InboxOptions::default() };
        let inbox = PostgresInbox::with_options(&store, options).unwrap();
        let mut sessions = std::collections::BTreeSet::new();
        for round in 0..3 {
            for ends in ["complete", "record and commit", "rollback", "completed before"] {
                let key = format!("{ends} {round}");
                let mut tx = entered(&inbox, &key).await;
                let db = PostgresInbox::connection(&mut tx);
                sessions.insert(
                    sqlx::query_scalar::<_, i32>("SELECT pg_backend_pid()")
                        .fetch_one(&mut *db)
                        .await
                        .unwrap(),
                );
                let mut nested = db.begin().await.unwrap();
                nested.execute("INSERT INTO effects VALUES (2)").await.unwrap();
                nested.rollback().await.unwrap();
                let mut nested = db.begin().await.unwrap();
                nested.execute("INSERT INTO effects VALUES (3)").await.unwrap();
                nested.commit().await.unwrap();
                match ends {
                    "rollback" => inbox.rollback(tx).await,
                    "record and commit" => {
                        inbox.record(&mut tx, &entry(&key), done("x"), 60_000).await.unwrap();
                        inbox.commit(tx).await.unwrap();
                    }
                    _ => {
                        let settled = inbox.complete(tx, &entry(&key), done("x"), 60_000, &elsewhere()).await;
                        assert!(!settled.unwrap());
                    }
                }
                if ends == "completed before" {
                    assert_eq!(lookup(&inbox, &entry(&key)).await, InboxLookup::Completed(done("x")));
                }
            }
        }
        assert!(server.has_pooler() || sessions.len() == 1, "{isolation:?}: {sessions:?}");
        assert_eq!(
            count(&mut database.connect().await).await,
            18,
            "{isolation:?}: two in each that was committed"
        );
    }
}

/// Fifty duplicates of a key whose first transaction is open: they use none of the inbox's connections, and another key
/// finds one.
async fn duplicates_of_one_process_occupy_no_connection(server: &'static Server) {
    let (database, store, _) = site(server).await;
    let options =
        InboxOptions { transactions_max: 2, lock_wait: Duration::from_mins(1), ..InboxOptions::default() };
    let inbox = PostgresInbox::with_options(&store, options).unwrap();
    let mut tx = entered(&inbox, "order-1").await;
    let mut waiting = tokio::task::JoinSet::new();
    for _ in 0..50 {
        let inbox = inbox.clone();
        waiting.spawn(async move { lookup(&inbox, &entry("order-1")).await });
    }
    let mut admin = database.connect().await;
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'hapax-inbox' AND datname = current_database()";
    for number in 0..5 {
        let other = format!("other-{number}");
        assert_eq!(lookup(&inbox, &entry(&other)).await, InboxLookup::Fresh);
        let open: i64 = sqlx::query_scalar(open).fetch_one(&mut admin).await.unwrap();
        assert_eq!(open, 2, "one of the first transaction, one of the other key");
    }
    inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap();
    inbox.commit(tx).await.unwrap();
    for met in waiting.join_all().await {
        assert_eq!(met, InboxLookup::Completed(done("x")));
    }
}

async fn an_entry_whose_time_is_over_is_entered_again(server: &'static Server) {
    let database = Database::migrated(server).await;
    database.connect().await.execute("CREATE TABLE effects (number int)").await.unwrap();
    let clock = database.with_clock().await;
    let store = database.open().await;
    let inbox = inbox_of(&store, 200);
    for number in 0..3 {
        let mut tx = entered(&inbox, "order-1").await;
        inbox.record(&mut tx, &entry("order-1"), done(&number.to_string()), 60_000).await.unwrap();
        inbox.commit(tx).await.unwrap();
        let found = lookup(&inbox, &entry("order-1")).await;
        assert_eq!(found, InboxLookup::Completed(done(&number.to_string())));
        clock.advance_ms(60_001).await;
    }
    let mut admin = database.connect().await;
    let counted = "SELECT sum(entries)::bigint FROM hapax.ledger_count";
    let counted: i64 = sqlx::query_scalar(counted).fetch_one(&mut admin).await.unwrap();
    let there: i64 =
        sqlx::query_scalar("SELECT count(*) FROM hapax.ledger_entry").fetch_one(&mut admin).await.unwrap();
    assert_eq!((counted, there), (1, 1), "the row is used again and counted once");
    drop(store);
}

async fn arguments_out_of_range_are_refused(server: &'static Server) {
    let (database, _store, _inbox) = site(server).await;
    let mut db = database.connect().await;
    let long = "x".repeat(256);
    for (call, named) in [
        ("hapax.enter(NULL, 'k')".to_owned(), "scope"),
        ("hapax.enter('s', '')".to_owned(), "key"),
        (format!("hapax.enter('s', '{long}')"), "255"),
        ("hapax.enter('s', E'a\\nb')".to_owned(), "control"),
        ("hapax.enter('s', 'k', 'two words')".to_owned(), "fingerprint"),
        ("hapax.enter('s', 'k', 'f', 0)".to_owned(), "p_wait_ms"),
        ("hapax.record('s', 'k', 'no json')".to_owned(), "json"),
        ("hapax.record('s', 'k', '1')".to_owned(), "has not entered"),
    ] {
        let refused = db.execute(format!("SELECT * FROM {call}").as_str()).await.unwrap_err().to_string();
        assert!(refused.contains(named), "{call}: {refused}");
    }
}

/// A stopped process holds its key no longer than the idle limit.
async fn a_transaction_whose_client_is_silent_is_ended(server: &'static Server) {
    let (_database, store, inbox) = site(server).await;
    let options = InboxOptions { idle_max: Duration::from_secs(3), ..InboxOptions::default() };
    let impatient = PostgresInbox::with_options(&store, options).unwrap();
    let mut silent = entered(&impatient, "order-1").await;
    // Waits for the end of the other transaction as often as needed.
    let deadline = Instant::now() + PATIENCE;
    loop {
        assert!(Instant::now() < deadline, "the silent transaction is not ended");
        match lookup(&inbox, &entry("order-1")).await {
            InboxLookup::InProgress { .. } => {}
            found => break assert_eq!(found, InboxLookup::Fresh),
        }
    }
    let late = impatient.record(&mut silent, &entry("order-1"), done("x"), 60_000).await.unwrap_err();
    assert!(matches!(late, InboxError::Unavailable(_)), "{late}");
}

/// A transaction has settled a delivery and does not end before the lease does: what looks at the queue meanwhile must not
/// take the delivery for swept. When the transaction is rolled back, the message is delivered again.
async fn a_lapsed_delivery_whose_settle_was_rolled_back_is_found(server: &'static Server) {
    for fifo in [false, true] {
        let database = Database::migrated(server).await;
        database.connect().await.execute("CREATE TABLE effects (number int)").await.unwrap();
        let clock = database.with_clock().await;
        let (store, inbox) = (database.open().await, inbox_of(&database.open().await, 200));
        let queue = QueueName::new(if fifo { "jobs.fifo" } else { "jobs" }).unwrap();
        let base = if fifo { QueueConfig::fifo() } else { QueueConfig::sqs() };
        store
            .create_queue(
                &queue,
                QueueConfig { tier: Tier::Transactional, retry: RetryPolicy::at_once(), ..base },
            )
            .await
            .unwrap();
        let message = NewMessage::new("x");
        let message = if fifo {
            message.group(GroupId::new("a").unwrap()).dedup("1".parse().unwrap())
        } else {
            message
        };
        store.send(&queue, vec![message]).await.unwrap().remove(0).unwrap();
        let ask = Receive { wait_ms: Some(0), ..Receive::up_to(1).lease(Duration::from_mins(1)) };
        let first = store.receive(&queue, ask.clone()).await.unwrap().remove(0);
        let mut tx = entered(&inbox, "order-1").await;
        inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap();
        assert!(inbox.settle(&mut tx, &first.receipt).await.unwrap());
        // The floors of the looks that follow lie an hour behind the end of the lease.
        for minutes in [2, 60, 60] {
            clock.advance_ms(minutes * 60_000).await;
            store.clock_moved().await.unwrap();
            assert!(
                store.receive(&queue, ask.clone()).await.unwrap().is_empty(),
                "fifo {fifo}: it is locked"
            );
        }
        inbox.rollback(tx).await;
        store.clock_moved().await.unwrap();
        let again = store.receive(&queue, ask).await.unwrap();
        assert_eq!(again.len(), 1, "fifo {fifo}: it is not found again");
        assert_eq!((again[0].id, again[0].attempt), (first.id, 2));
    }
}

/// An outcome that is there is not replaced: not by its own transaction, not by a later one that was told of it.
async fn an_outcome_is_recorded_once(server: &'static Server) {
    let (_database, _store, inbox) = site(server).await;
    let mut tx = entered(&inbox, "order-1").await;
    inbox.record(&mut tx, &entry("order-1"), done("first"), 60_000).await.unwrap();
    let again = inbox.record(&mut tx, &entry("order-1"), done("second"), 60_000).await.unwrap_err();
    assert!(matches!(again, InboxError::EndedByHandler(_)), "{again}");
    inbox.rollback(tx).await;
    let mut tx = entered(&inbox, "order-1").await;
    inbox.record(&mut tx, &entry("order-1"), done("first"), 60_000).await.unwrap();
    inbox.commit(tx).await.unwrap();
    let mut tx = inbox.begin(&entry("order-1")).await.unwrap();
    let late = inbox.record(&mut tx, &entry("order-1"), done("second"), 60_000).await.unwrap_err();
    assert!(matches!(late, InboxError::EndedByHandler(_)), "{late}");
    inbox.rollback(tx).await;
    assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Completed(done("first")));
}

/// A handler may wait for something else while its transaction is open: the bound is the inbox's, not the store's.
async fn a_transaction_may_be_silent_for_longer_than_an_operation_takes(server: &'static Server) {
    let (database, _, _) = site(server).await;
    let short = Options { operation_timeout: Duration::from_secs(1), ..Options::default() };
    let store = PostgresStore::open(&database.url(), short).await.unwrap();
    let inbox = inbox_of(&store, 200);
    let mut tx = entered(&inbox, "order-1").await;
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    inbox.record(&mut tx, &entry("order-1"), done("x"), 60_000).await.unwrap();
    inbox.commit(tx).await.unwrap();
    assert_eq!(lookup(&inbox, &entry("order-1")).await, InboxLookup::Completed(done("x")));
}
