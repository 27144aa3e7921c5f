//! Several processes and many clients claim the same keys of one database, under faults at random times. The checker is
//! `hapax_conformance::attack`.
//!
//! `HAPAX_SEED=n` chooses other faults, `HAPAX_LONG=1` runs twenty times as long.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::trouble::Site;
use common::{Database, PATIENCE, Server};
use hapax_conformance::attack::{LedgerAttack, time};
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Grant, Json, Ledger, Owner, RecordedOutcome,
    StoreError,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::Executor as _;

fn main() -> std::process::ExitCode {
    common::main(tests![
        the_ledger_survives,
        a_claim_that_waits_is_woken_by_another_process,
        a_batch_that_was_done_in_part_does_not_say_that_nothing_was_done,
    ])
}

const PROCESSES: usize = 3;

fn entry_id(key: &str) -> EntryId {
    EntryId::new("orders".parse().unwrap(), key.parse().unwrap())
}

fn request(key: &str, owner: &str, lease_ms: u64) -> ClaimRequest {
    ClaimRequest::new(entry_id(key), Owner::new(owner).unwrap(), lease_ms)
}

fn ending(key: &str, grant: &Grant, outcome: &str) -> EndClaim {
    let outcome = RecordedOutcome::done(Json::of(outcome).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    EndClaim { id: entry_id(key), token: grant.token.clone(), ending }
}

async fn the_ledger_survives(_: &'static Server) {
    let run = || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let site = Arc::new(Site::start(PROCESSES).await);
            let stores = site.stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Ledger>);
            let attack = LedgerAttack::begin(stores.collect());
            site.trouble(time(10), || attack.keys() > 50).await;
            attack.end().await;
        });
    };
    std::thread::spawn(run).join().unwrap();
}

async fn granted(store: &PostgresStore, ask: ClaimRequest) -> Grant {
    match store.claim(vec![ask]).await.unwrap().remove(0) {
        Ok(Claim::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// By a hint, and by looking itself when the connection that listens is cut.
async fn a_claim_that_waits_is_woken_by_another_process(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let mut admin = database.connect().await;
    for cut in [false, true, false] {
        let key = format!("{cut}-{:?}", Instant::now());
        let grant = granted(&store, request(&key, "ann", 120_000)).await;
        let waiting = {
            let (second, key) = (second.clone(), key.clone());
            let ask = ClaimRequest { wait_ms: 20_000, ..request(&key, "bob", 120_000) };
            tokio::spawn(async move { second.claim(vec![ask]).await.unwrap().remove(0) })
        };
        tokio::task::yield_now().await;
        second.quiet().await;
        if cut {
            let kill = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
                        WHERE datname = current_database() AND query LIKE 'LISTEN%'";
            let start = Instant::now();
            while admin.fetch_all(kill).await.unwrap().is_empty() {
                assert!(start.elapsed() < PATIENCE, "no connection listens");
            }
        }
        store.end(vec![ending(&key, &grant, "paid")]).await.unwrap().remove(0).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(15), waiting).await;
        let answer = answer.expect("it is woken long before its wait is over").unwrap();
        assert!(matches!(answer, Ok(Claim::Completed { .. })), "{answer:?}");
    }
}

/// The statements of a batch are transactions of their own: if a later one fails, the first claims are granted.
async fn a_batch_that_was_done_in_part_does_not_say_that_nothing_was_done(server: &'static Server) {
    let database = Database::migrated(server).await;
    let options = Options { operation_timeout: Duration::from_secs(2), ..Options::default() };
    let impatient = PostgresStore::open(&database.url(), options).await.unwrap();
    let store = database.open().await;
    granted(&store, request("old", "ann", 1)).await;
    let mut other = database.connect().await;
    for n in 0..20 {
        let key = format!("new {n}");
        other.execute("BEGIN; SELECT 1 FROM hapax.ledger_entry FOR UPDATE").await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let batch = vec![request(&key, "bob", 60_000), request("old", "bob", 60_000)];
        let answer = impatient.claim(batch).await;
        other.execute("ROLLBACK").await.unwrap();
        if store.entry(&entry_id(&key)).await.unwrap().is_none() {
            // The machine was too slow for the first claim: its time limit has ended both.
            assert!(answer.is_err(), "{answer:?}");
            continue;
        }
        assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
        // The caller repeats, and gets what it holds.
        granted(&store, request(&key, "bob", 60_000)).await;
        return;
    }
    panic!("no first claim was granted");
}
