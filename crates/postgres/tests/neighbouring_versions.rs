//! The schema is migrated by a newer version while programs of this one work on it. The next version's migration is made here: it adds
//! columns to the tables that every message passes through, and replaces functions. The checker is
//! `hapax_conformance::attack`: nothing is lost or doubled, and clients see no other errors than those that they may repeat.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Database, PATIENCE, Server};
use hapax_conformance::attack::{LedgerAttack, QueueAttack};
use hapax_core::{Ledger, QueueAdmin};
use hapax_postgres::{PostgresStore, SCHEMA_VERSION};
use sqlx::{Executor as _, PgConnection};

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

/// Columns for the tables with a row for each message and for the entries of the ledger, and functions that are replaced. It
/// waits for locks as `hapax migrate` does, and locks the tables in the order that `MIGRATIONS` asks for.
fn next_version() -> String {
    format!(
        "BEGIN; SET LOCAL lock_timeout = '500ms';
         LOCK TABLE hapax.q_queue, hapax.ledger_entry, hapax.q_parked, hapax.q_ready, hapax.q_claim, hapax.q_due, hapax.q_fifo,
           hapax.q_head;
         DO $$ DECLARE t text; f oid; BEGIN
           FOREACH t IN ARRAY ARRAY['q_parked', 'q_ready', 'q_claim', 'q_due', 'q_fifo', 'q_head', 'q_queue', 'ledger_entry'] LOOP
             EXECUTE format('ALTER TABLE hapax.%I ADD COLUMN next_version text DEFAULT ''new'', ADD COLUMN next_number bigint', t);
           END LOOP;
           FOR f IN SELECT p.oid FROM pg_proc p WHERE p.pronamespace = 'hapax'::regnamespace AND p.prokind = 'f'
               AND p.proname IN ('q_send', 'q_ack', 'q_write', 'q_take', 'q_recv_fifo', 'q_heads', 'q_promote', 'ledger_claim') LOOP
             EXECUTE replace(pg_get_functiondef(f), 'BEGIN', '/* the next version */ BEGIN');
           END LOOP;
         END $$;
         INSERT INTO hapax.migration (version, name, readers_from) VALUES ({}, 'next', 1);
         COMMIT",
        SCHEMA_VERSION + 1
    )
}

/// Applies it, again if it did not get its locks in time: the traffic takes them in other orders.
async fn migrate(db: &mut PgConnection) {
    let (start, mut attempts) = (Instant::now(), 1);
    while let Err(error) = db.execute(next_version().as_str()).await {
        let code = error
            .as_database_error()
            .and_then(sqlx::error::DatabaseError::code)
            .unwrap_or_default()
            .into_owned();
        assert!(["40P01", "55P03"].contains(&code.as_str()) && start.elapsed() < PATIENCE, "{error}");
        db.execute("ROLLBACK").await.unwrap();
        tokio::time::sleep(Duration::from_millis(fastrand::u64(100..500))).await;
        attempts += 1;
    }
    println!("the migration took {attempts} attempts");
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
    migrate(&mut database.connect().await).await;
    // A server of the next version works beside them, on queues that all three share.
    stores.push(database.open().await);
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
