//! The schema is made by migrations: once, in order, and by several processes at the same time.

mod common;

use common::{Database, Server};
use hapax_core::StoreError;
use hapax_postgres::{OpenError, Options, PostgresStore, SCHEMA_VERSION, migrate};
use sqlx::{Executor as _, Row as _};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_database_is_migrated_once,
        a_dry_run_changes_nothing,
        of_many_concurrent_migrations_one_does_the_work,
        a_migration_waits_for_traffic_and_holds_it_up_for_a_moment_only,
        a_database_without_the_schema_is_refused,
        a_schema_that_needs_a_newer_program_is_refused,
        the_form_of_a_schema_is_chosen_once,
        the_portable_form_has_no_sequences,
        the_secret_stays_when_a_store_is_opened_again,
        a_server_that_is_not_there_is_unavailable_at_once,
        the_server_of_the_tests_is_private,
    ])
}

async fn a_database_is_migrated_once(server: &'static Server) {
    let database = Database::empty(server).await;
    let first = migrate(&database.url(), &Options::default(), false).await.unwrap();
    assert_eq!((first.from, first.applied.len() as i32), (0, SCHEMA_VERSION));
    let second = migrate(&database.url(), &Options::default(), false).await.unwrap();
    assert_eq!((second.from, second.applied.len()), (SCHEMA_VERSION, 0));
    PostgresStore::open(&database.url(), Options::default()).await.unwrap();
}

async fn a_dry_run_changes_nothing(server: &'static Server) {
    let database = Database::empty(server).await;
    let report = migrate(&database.url(), &Options::default(), true).await.unwrap();
    assert_eq!((report.dry_run, report.applied.len() as i32), (true, SCHEMA_VERSION));
    let mut connection = database.connect().await;
    let schemas = sqlx::query("SELECT count(*) FROM pg_namespace WHERE nspname = 'hapax'");
    assert_eq!(schemas.fetch_one(&mut connection).await.unwrap().get::<i64, _>(0), 0);
}

async fn of_many_concurrent_migrations_one_does_the_work(server: &'static Server) {
    let database = Database::empty(server).await;
    let mut all = JoinSet::new();
    for _ in 0..8 {
        let url = database.url();
        all.spawn(async move { migrate(&url, &Options::default(), false).await.unwrap().applied.len() });
    }
    let mut applied = all.join_all().await;
    applied.sort_unstable();
    assert_eq!(applied, [&[0; 7][..], &[SCHEMA_VERSION as usize]].concat());
}

/// A migration that does not get a lock lets those through that wait behind it, and tries again.
async fn a_migration_waits_for_traffic_and_holds_it_up_for_a_moment_only(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (mut holder, mut other) = (database.connect().await, database.connect().await);
    holder.execute("BEGIN; LOCK TABLE hapax.migration IN ACCESS SHARE MODE").await.unwrap();
    // The last migration is missing, and its entry needs a lock that the holder's is in the way of.
    let sql = "CREATE FUNCTION hapax.locks() RETURNS trigger LANGUAGE plpgsql AS
                 'BEGIN LOCK TABLE hapax.migration IN ACCESS EXCLUSIVE MODE; RETURN NEW; END';
               CREATE TRIGGER locks BEFORE INSERT ON hapax.migration EXECUTE FUNCTION hapax.locks();
               DELETE FROM hapax.migration WHERE version = (SELECT max(version) FROM hapax.migration);
               DROP FUNCTION hapax.q_write";
    other.execute(sql).await.unwrap();
    let url = database.url();
    let migrating = tokio::spawn(async move { migrate(&url, &Options::default(), false).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE relation = 'hapax.migration'::regclass AND NOT granted";
    for _ in 0..2 {
        let start = std::time::Instant::now();
        while other.fetch_one(waits).await.unwrap().get::<i64, _>(0) == 0 {
            assert!(!migrating.is_finished() && start.elapsed() < common::PATIENCE, "it waits");
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        // Queues behind it until it gives up.
        other.execute("SELECT count(*) FROM hapax.migration").await.unwrap();
    }
    holder.execute("ROLLBACK").await.unwrap();
    assert_eq!(migrating.await.unwrap().unwrap().applied.len(), 1);
}

async fn a_database_without_the_schema_is_refused(server: &'static Server) {
    let database = Database::empty(server).await;
    let refused = PostgresStore::open(&database.url(), Options::default()).await.err();
    assert_eq!(refused, Some(OpenError::OldSchema { found: 0, needed: SCHEMA_VERSION }));
    assert!(refused.unwrap().to_string().contains("hapax migrate"));
    let options = Options { migrate: true, ..Options::default() };
    PostgresStore::open(&database.url(), options).await.unwrap();
}

async fn a_schema_that_needs_a_newer_program_is_refused(server: &'static Server) {
    let database = Database::migrated(server).await;
    let mut connection = database.connect().await;
    let next = SCHEMA_VERSION + 1;
    let newer = format!("INSERT INTO hapax.migration VALUES ({next}, 'harmless', 1)");
    connection.execute(newer.as_str()).await.unwrap();
    PostgresStore::open(&database.url(), Options::default())
        .await
        .expect("a neighbouring version works beside");
    connection.execute("UPDATE hapax.migration SET readers_from = version").await.unwrap();
    let refused = PostgresStore::open(&database.url(), Options::default()).await.err();
    assert_eq!(refused, Some(OpenError::NewSchema { needed: next, known: SCHEMA_VERSION }));
    let refused = migrate(&database.url(), &Options::default(), false).await;
    assert!(refused.is_ok_and(|report| report.applied.is_empty()), "an older program changes nothing");
}

async fn the_form_of_a_schema_is_chosen_once(server: &'static Server) {
    let portable = Options { portable: true, ..Options::default() };
    let database = Database::migrated(server).await;
    let refused = PostgresStore::open(&database.url(), portable.clone()).await.err();
    assert_eq!(refused, Some(OpenError::Form { found: false }));
    let database = Database::empty(server).await;
    migrate(&database.url(), &portable, false).await.unwrap();
    let refused = PostgresStore::open(&database.url(), Options::default()).await.err();
    assert_eq!(refused, Some(OpenError::Form { found: true }));
    PostgresStore::open(&database.url(), portable).await.unwrap();
}

async fn the_portable_form_has_no_sequences(server: &'static Server) {
    let sequences =
        "SELECT count(*) FROM pg_class WHERE relkind = 'S' AND relnamespace = 'hapax'::regnamespace";
    for (portable, some) in [(false, true), (true, false)] {
        let database = Database::empty(server).await;
        migrate(&database.url(), &Options { portable, ..Options::default() }, false).await.unwrap();
        let mut connection = database.connect().await;
        let row = sqlx::query(sequences).fetch_one(&mut connection).await.unwrap();
        assert_eq!(row.get::<i64, _>(0) > 0, some, "portable: {portable}");
    }
}

async fn the_secret_stays_when_a_store_is_opened_again(server: &'static Server) {
    let database = Database::migrated(server).await;
    let mut connection = database.connect().await;
    let mut secrets = Vec::new();
    for _ in 0..2 {
        migrate(&database.url(), &Options::default(), false).await.unwrap();
        let row = sqlx::query("SELECT secret FROM hapax.store").fetch_one(&mut connection).await.unwrap();
        secrets.push(row.get::<Vec<u8>, _>(0));
    }
    assert_eq!(secrets[0], secrets[1]);
    assert!(secrets[0].len() == 32 && secrets[0] != [0; 32]);
}

async fn a_server_that_is_not_there_is_unavailable_at_once(_: &'static Server) {
    let [port] = hapax_faults::free_ports();
    let refused =
        PostgresStore::open(&format!("postgres://127.0.0.1:{port}/x"), Options::default()).await.err();
    let Some(OpenError::Store(StoreError::Unavailable(why))) = refused else { panic!("{refused:?}") };
    assert!(why.contains("no connection to PostgreSQL: "), "{why}: refused, not timed out");
}

async fn the_server_of_the_tests_is_private(server: &'static Server) {
    let mut connection = server.connect("postgres").await;
    let row = sqlx::query("SELECT version()").fetch_one(&mut connection).await.unwrap();
    assert!(row.get::<String, _>(0).starts_with("PostgreSQL "));
}
