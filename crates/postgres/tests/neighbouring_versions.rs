//! The schema is migrated by a newer version while programs of this one work on it. The next version's migration is made here: it adds
//! columns to the tables that every message passes through, and replaces functions. The checker is
//! `hapax_conformance::attack`: nothing is lost or doubled, and clients see no other errors than those that they may repeat.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Database, PATIENCE, Server};
use hapax_conformance::attack::{LedgerAttack, QueueAttack};
use hapax_core::{Ledger, QueueAdmin};
use hapax_postgres::{Options, PostgresStore, SCHEMA_VERSION};
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(&[common::Test {
        name: "a_migration_under_traffic_loses_and_doubles_nothing",
        run: migrated,
    }])
}

/// Sends that are accepted before the migration, and again after it.
const SOME: usize = 150;

fn migrated(server: &'static Server) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(a_migration_under_traffic_loses_and_doubles_nothing(server));
}

/// The next version's migration, as a last step of `hapax migrate`: it waits for locks and is begun again by the same rule. It makes
/// columns for the tables with a row for each message and for the entries of the ledger, and replaces functions. It locks the tables in the
/// order that `MIGRATIONS` asks for. What sequences count is not rolled back.
fn next_version() -> String {
    format!(
        "CREATE SEQUENCE public.attempts;
         CREATE SEQUENCE public.locked;
         CREATE FUNCTION public.next_version() RETURNS trigger LANGUAGE plpgsql AS $step$ DECLARE t text; f oid; BEGIN
           PERFORM nextval('public.attempts');
           LOCK TABLE hapax.q_queue, hapax.ledger_entry, hapax.q_parked, hapax.q_ready, hapax.q_claim, hapax.q_due, hapax.q_fifo,
             hapax.q_head;
           PERFORM nextval('public.locked');
           FOREACH t IN ARRAY ARRAY['q_parked', 'q_ready', 'q_claim', 'q_due', 'q_fifo', 'q_head', 'q_queue', 'ledger_entry'] LOOP
             EXECUTE format('ALTER TABLE hapax.%I ADD COLUMN next_version text DEFAULT ''new'', ADD COLUMN next_number bigint', t);
           END LOOP;
           FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'hapax'::regnamespace AND p.prokind = 'f'
               AND p.proname IN ('q_send', 'q_ack', 'q_write', 'q_take', 'q_recv_fifo', 'q_heads', 'q_promote', 'ledger_claim') LOOP
             EXECUTE replace(pg_get_functiondef(f), 'BEGIN', '/* the next version */ BEGIN');
           END LOOP;
           INSERT INTO hapax.migration (version, name, readers_from) VALUES ({}, 'next', 1);
           PERFORM pg_sleep(1);
           RETURN NEW; END $step$;
         CREATE TRIGGER next_version BEFORE INSERT ON hapax.store EXECUTE FUNCTION public.next_version()",
        SCHEMA_VERSION + 1
    )
}

/// Migrates, and opens a store while the migration has its locks and has not committed.
async fn migrate(database: &Database) -> PostgresStore {
    let mut db = database.connect().await;
    db.execute(next_version().as_str()).await.unwrap();
    let migrating = async {
        hapax_postgres::migrate(&database.url(), &Options::default(), false).await.unwrap();
        Instant::now()
    };
    let opening = async {
        let start = Instant::now();
        while !db.fetch_one("SELECT is_called FROM public.locked").await.unwrap().get::<bool, _>(0) {
            assert!(start.elapsed() < PATIENCE, "the migration gets its locks");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        (Instant::now(), database.open().await)
    };
    let (migrated, (began, store)) = tokio::join!(migrating, opening);
    assert!(began < migrated, "it was opened during the migration");
    let (attempts, version): (i64, i32) =
        sqlx::query_as("SELECT last_value, (SELECT max(version) FROM hapax.migration) FROM public.attempts")
            .fetch_one(&mut db)
            .await
            .unwrap();
    assert_eq!(version, SCHEMA_VERSION + 1);
    println!("the migration took {attempts} attempts");
    store
}

async fn accepted(attacks: &[&QueueAttack]) {
    let before: Vec<usize> = attacks.iter().map(|attack| attack.accepted()).collect();
    let start = Instant::now();
    while attacks.iter().zip(&before).any(|(attack, before)| attack.accepted() < before + SOME) {
        assert!(start.elapsed() < PATIENCE, "too few sends are accepted");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

fn queues(stores: &[PostgresStore]) -> Vec<Arc<dyn QueueAdmin>> {
    stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn QueueAdmin>).collect()
}

async fn a_migration_under_traffic_loses_and_doubles_nothing(server: &'static Server) {
    let database = Database::migrated(server).await;
    let mut stores = vec![database.open().await, database.open().await];
    let standard = QueueAttack::begin(queues(&stores), "orders", false).await;
    let fifo = QueueAttack::begin(queues(&stores), "steps", true).await;
    let ledgers = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Ledger>).collect();
    let keys = LedgerAttack::begin(ledgers);
    accepted(&[&standard, &fifo]).await;
    // A third server starts meanwhile, and works on queues that all three share.
    stores.push(migrate(&database).await);
    let shared = QueueAttack::begin(queues(&stores), "later", false).await;
    let shared_fifo = QueueAttack::begin(queues(&stores), "later-steps", true).await;
    let before = keys.keys();
    accepted(&[&standard, &fifo, &shared, &shared_fifo]).await;
    assert!(keys.keys() > before, "keys are claimed after the migration");
    keys.end().await;
    for attack in [standard, fifo, shared, shared_fifo] {
        attack.end().await;
    }
}
