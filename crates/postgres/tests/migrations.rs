//! The schema is made by migrations: once, in order, and by several processes at the same time.

mod common;

use std::time::{Duration, Instant};

use common::{Database, Server};
use hapax_core::StoreError;
use hapax_postgres::{OpenError, Options, PostgresStore, SCHEMA_VERSION, migrate};
use sqlx::{Executor as _, PgConnection, Row as _};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_database_is_migrated_once,
        a_dry_run_changes_nothing,
        of_many_concurrent_migrations_one_does_the_work,
        a_migration_waits_for_traffic_and_holds_it_up_for_a_moment_only,
        a_migration_interrupts_an_autovacuum,
        acks_and_sends_in_one_statement_lock_the_table_of_queues_first,
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

/// Has each migration do this as its last step, and count its attempts.
async fn with_a_last_step(db: &mut PgConnection, step: &str) {
    let sql = format!(
        "CREATE SEQUENCE public.attempts;
         CREATE FUNCTION public.last_step() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN PERFORM nextval('public.attempts'); {step}; RETURN NEW; END $$;
         CREATE TRIGGER last_step BEFORE INSERT ON hapax.store EXECUTE FUNCTION public.last_step()"
    );
    db.execute(sql.as_str()).await.unwrap();
}

/// A migration that does not get a lock lets those through that wait behind it, and tries again.
async fn a_migration_waits_for_traffic_and_holds_it_up_for_a_moment_only(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (mut holder, mut other) = (database.connect().await, database.connect().await);
    holder.execute("BEGIN; LOCK TABLE hapax.q_queue IN ACCESS SHARE MODE").await.unwrap();
    with_a_last_step(&mut other, "LOCK TABLE hapax.q_queue IN ACCESS EXCLUSIVE MODE").await;
    let url = database.url();
    let migrating = tokio::spawn(async move { migrate(&url, &Options::default(), false).await });
    let waits = "SELECT count(*) FROM pg_locks WHERE relation = 'hapax.q_queue'::regclass AND NOT granted";
    for _ in 0..2 {
        let start = Instant::now();
        while other.fetch_one(waits).await.unwrap().get::<i64, _>(0) == 0 {
            assert!(!migrating.is_finished() && start.elapsed() < common::PATIENCE, "it waits");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        // Queues behind it until it gives up.
        other.execute("SELECT count(*) FROM hapax.q_queue").await.unwrap();
    }
    holder.execute("ROLLBACK").await.unwrap();
    migrating.await.unwrap().unwrap();
    let attempts = "SELECT last_value FROM public.attempts";
    assert!(other.fetch_one(attempts).await.unwrap().get::<i64, _>(0) > 2, "it was begun again");
}

/// An autovacuum yields to a lock only when the one who waits looks for deadlocks, after a second.
async fn a_migration_interrupts_an_autovacuum(_: &'static Server) {
    let settings = ["autovacuum=on", "autovacuum_naptime=1s", "log_autovacuum_min_duration=0"];
    let server = Server::start(&settings).unwrap();
    let url = server.url("postgres");
    migrate(&url, &Options::default(), false).await.unwrap();
    let mut db = server.connect("postgres").await;
    // As slow as it can be: it pauses for 100 ms after each page.
    let sql = "CREATE TABLE public.large WITH (autovacuum_vacuum_cost_delay = 100, autovacuum_vacuum_cost_limit = 1)
                 AS SELECT at, repeat('x', 1000) FROM generate_series(1, 10000) at;
               DELETE FROM public.large";
    db.execute(sql).await.unwrap();
    let vacuums = "SELECT count(*) FROM pg_stat_progress_vacuum WHERE relid = 'public.large'::regclass";
    let start = Instant::now();
    while db.fetch_one(vacuums).await.unwrap().get::<i64, _>(0) == 0 {
        assert!(start.elapsed() < common::PATIENCE, "it is vacuumed");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    with_a_last_step(&mut db, "LOCK TABLE public.large IN ACCESS EXCLUSIVE MODE").await;
    let start = Instant::now();
    migrate(&url, &Options::default(), false).await.unwrap();
    let attempts: i64 = db.fetch_one("SELECT last_value FROM public.attempts").await.unwrap().get(0);
    println!("{attempts} attempts in {:?}", start.elapsed());
    let vacuumed = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relid = 'public.large'::regclass";
    assert_eq!(db.fetch_one(vacuumed).await.unwrap().get::<i64, _>(0), 0, "it was interrupted");
}

/// A migration locks the table of queues before those of messages. An operation that locks them in another order would deadlock with it.
async fn acks_and_sends_in_one_statement_lock_the_table_of_queues_first(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (mut holder, mut other) = (database.connect().await, database.connect().await);
    let pid: i32 = other.fetch_one("SELECT pg_backend_pid()").await.unwrap().get(0);
    let write = "SELECT hapax.q_write(1, '{1}', '{1}', 1, 1, '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}')";
    // The first call of a session analyzes the statements; the later ones lock what the kept plan names.
    for calls_before in [0, 10] {
        for _ in 0..calls_before {
            other.execute(write).await.unwrap();
        }
        holder.execute("BEGIN; LOCK TABLE hapax.q_queue IN ACCESS EXCLUSIVE MODE").await.unwrap();
        let waiting = async {
            let sql = "SELECT coalesce(array_agg(relation::regclass::text) FILTER (WHERE granted), '{}'), \
                       coalesce(bool_or(NOT granted), false) \
                       FROM pg_locks WHERE pid = $1 AND locktype = 'relation' AND relation::regclass::text ~ '^hapax[.]'";
            let start = Instant::now();
            let locked: Vec<String> = loop {
                let row = sqlx::query(sql).bind(pid).fetch_one(&mut holder).await.unwrap();
                if row.get(1) {
                    break row.get(0);
                }
                assert!(start.elapsed() < common::PATIENCE, "it waits");
                tokio::time::sleep(Duration::from_millis(5)).await;
            };
            holder.execute("ROLLBACK").await.unwrap();
            locked
        };
        let (locked, written) = tokio::join!(waiting, other.execute(write));
        written.unwrap();
        assert_eq!(locked, [""; 0], "after {calls_before} calls: locked while it waits for q_queue");
    }
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
