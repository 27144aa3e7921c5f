//! A server that stops, restarts or cuts connections: errors at once, nothing lost, and no help needed afterwards.

mod common;

use std::time::{Duration, Instant};

use common::{Database, PATIENCE, Server, ask, claim, completed, granted, id};
use hapax_conformance::attack::patiently;
use hapax_core::{Claim, ClaimError, EntryState, Ledger as _, StoreError};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_stopped_server_is_unavailable_at_once_and_comes_back_by_itself,
        a_restart_gives_every_held_claim_a_full_lease,
        terminated_connections_under_load_lose_and_repeat_nothing,
        a_row_that_another_session_holds_is_not_waited_for_long,
    ])
}

/// A server of its own, with a migrated database. It is durable: what is lost in a crash is seen.
async fn private() -> (Server, String) {
    let server = Server::start(&["fsync=on"]).unwrap();
    let url = server.url("postgres");
    hapax_postgres::migrate(&url, &Options::default(), false).await.unwrap();
    (server, url)
}

async fn a_stopped_server_is_unavailable_at_once_and_comes_back_by_itself(_: &'static Server) {
    let (server, url) = private().await;
    let store = PostgresStore::open(&url, Options::default()).await.unwrap();
    let paid = granted(&store, ask("paid", "ann")).await;
    store.end(vec![completed("paid", &paid, "7 EUR")]).await.unwrap().remove(0).unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    for signal in ["INT", "QUIT"] {
        server.stop(signal);
        for _ in 0..3 {
            // The connection limit is 5 s, and the operation limit 20 s: an answer that waited for one of them says so.
            match claim(&store, ask("new", "ann")).await {
                Err(ClaimError::Store(StoreError::Unavailable(why) | StoreError::OutcomeUnknown(why))) => {
                    assert!(!why.contains("within"), "it waited: {why}");
                }
                other => panic!("{other:?}"),
            }
        }
        let refused = store.entry(&id("paid")).await;
        assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
        server.run().unwrap();
        let again = granted_patiently(&store, "held").await;
        assert_eq!((again.token, again.fence), (held.token.clone(), held.fence), "nothing was lost");
        let paid_id = id("paid");
        let entry = patiently(|| store.entry(&paid_id)).await.unwrap();
        assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), "\"7 EUR\"");
        let next = granted_patiently(&store, signal).await;
        assert!(next.fence > held.fence, "fences grow through a crash");
    }
}

/// Claims again while the store has no connection.
async fn granted_patiently(store: &PostgresStore, key: &str) -> hapax_core::Grant {
    match claimed_patiently(store, key, "ann").await {
        Claim::Granted(grant) => grant,
        other => panic!("{key}: {other:?}"),
    }
}

async fn claimed_patiently(store: &PostgresStore, key: &str, owner: &str) -> Claim {
    let start = Instant::now();
    loop {
        match claim(store, ask(key, owner)).await {
            Ok(claim) => return claim,
            Err(error) => assert!(error.is_retryable() && start.elapsed() < PATIENCE, "{key}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn a_restart_gives_every_held_claim_a_full_lease(_: &'static Server) {
    let (server, url) = private().await;
    let store = PostgresStore::open(&url, Options::default()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    let doubted = granted(&store, ask("doubted", "ann")).await;
    let doubt =
        hapax_core::EndClaim { ending: hapax_core::ClaimEnding::Doubt, ..completed("doubted", &doubted, "") };
    store.end(vec![doubt]).await.unwrap().remove(0).unwrap();
    server.stop("QUIT");
    server.run().unwrap();
    granted_patiently(&store, "other").await;
    let mut connection = PgConnection::connect(&url).await.unwrap();
    let mut times = async || -> (u64, u64) {
        let row = sqlx::query("SELECT hapax.now_ms(), hapax.started_ms()")
            .fetch_one(&mut connection)
            .await
            .unwrap();
        (row.get::<i64, _>(0) as u64, row.get::<i64, _>(1) as u64)
    };
    let (before_ms, started_ms) = times().await;
    let answer = claimed_patiently(&store, "held", "bob").await;
    let Claim::InProgress { retry_after_ms } = answer else { panic!("{answer:?}") };
    let (after_ms, _) = times().await;
    let end_ms = started_ms + held.lease_ms;
    assert!(
        (before_ms..=after_ms).any(|now_ms| now_ms + retry_after_ms == end_ms),
        "one lease from the server's start"
    );
    let doubted_id = id("doubted");
    let entry = patiently(|| store.entry(&doubted_id)).await.unwrap();
    assert_eq!(entry.state, EntryState::InDoubt, "a doubt stays");
}

async fn terminated_connections_under_load_lose_and_repeat_nothing(server: &'static Server) {
    const WORKERS: usize = 6;
    const KEYS: usize = 15;
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let (done, mut over) = tokio::sync::watch::channel(false);
    let mut operator = database.connect().await;
    let killing = tokio::spawn(async move {
        let kill = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity
                    WHERE datname = current_database() AND application_name = 'hapax' ORDER BY random() LIMIT 1";
        let mut killed = 0;
        while (!*over.borrow() && killed < 40) || killed == 0 {
            killed += sqlx::query(kill).fetch_all(&mut operator).await.unwrap().len();
            let _ = tokio::time::timeout(Duration::from_millis(30), over.changed()).await;
        }
        killed
    });
    let mut all = JoinSet::new();
    for worker in 0..WORKERS {
        let store = store.clone();
        all.spawn(async move {
            for n in 0..KEYS {
                effect(&store, &format!("{worker}-{n}")).await;
            }
        });
    }
    all.join_all().await;
    // The other task may have ended by itself.
    let _ = done.send(true);
    assert!(killing.await.unwrap() > 0, "no connection was cut");
    // The last connection that was cut may be noticed only now.
    let stats = patiently(|| store.ledger_stats()).await;
    assert_eq!((stats.entries, stats.open), ((WORKERS * KEYS) as u64, 0));
    for worker in 0..WORKERS {
        for n in 0..KEYS {
            let key = format!("{worker}-{n}");
            let id = id(&key);
            let entry = patiently(|| store.entry(&id)).await.unwrap();
            assert_eq!((entry.state, entry.takeovers), (EntryState::Completed, 0), "{key}");
            assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), format!("{key:?}"));
        }
    }
}

/// Claims and completes a key, repeating after errors that may be repeated: with the same owner and the same outcome.
async fn effect(store: &PostgresStore, key: &str) {
    let grant = granted_patiently(store, key).await;
    loop {
        match store.end(vec![completed(key, &grant, key)]).await {
            Ok(answers) => return assert_eq!(answers, [Ok(())], "{key}"),
            Err(error) => assert!(error.is_retryable(), "{key}: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn a_row_that_another_session_holds_is_not_waited_for_long(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let options = Options { operation_timeout: Duration::from_secs(1), ..Options::default() };
    let impatient = PostgresStore::open(&database.url(), options).await.unwrap();
    let grant = granted(&store, ask("held", "ann")).await;
    // A session that holds the row: the end waits for it until the server's own time limits end it.
    let mut other = database.connect().await;
    other.execute("BEGIN; SELECT 1 FROM hapax.ledger_entry FOR UPDATE").await.unwrap();
    let end = impatient.end(vec![completed("held", &grant, "paid")]).await;
    let Err(StoreError::Overloaded(why)) = &end else { panic!("{end:?}") };
    assert!(
        why.contains("55P03") || why.contains("57014"),
        "the server has ended it, so its outcome is known: {why}"
    );
    other.execute("ROLLBACK").await.unwrap();
    assert_eq!(store.end(vec![completed("held", &grant, "paid")]).await, Ok(vec![Ok(())]));
}
