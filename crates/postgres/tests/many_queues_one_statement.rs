//! The counters of many queues are asked for together: one statement, however many queues there are, and more only if counting
//! takes long or time has something to do.

mod common;

use common::{Database, PATIENCE, Server};
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, StoreError};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, PgConnection, Row as _};

const QUEUES: usize = 300;

fn main() -> std::process::ExitCode {
    common::main(tests![
        many_queues_are_one_statement,
        queues_that_take_long_are_counted_by_several_statements,
        a_look_that_takes_longer_than_a_count_may_ends_all_the_same,
        a_connection_that_breaks_between_two_statements_hides_no_queue
    ])
}

/// A server that counts its statements.
async fn counting_database() -> (Database, PgConnection) {
    let server = Server::start(&["fsync=off", "shared_preload_libraries=pg_stat_statements"]).unwrap();
    let database = Database::migrated(Box::leak(Box::new(server))).await;
    let mut connection = database.connect().await;
    connection.execute("CREATE EXTENSION pg_stat_statements").await.unwrap();
    (database, connection)
}

/// How often statements that count were run since the last call, and those that look whether time has something to do. What the
/// background work runs looks like neither.
async fn calls(connection: &mut PgConnection) -> (i64, i64) {
    let sql = "SELECT coalesce(sum(calls) FILTER (WHERE query LIKE '%count(*)%hapax.q_parked%'), 0)::bigint,
                 coalesce(sum(calls) FILTER (WHERE query LIKE '%hapax.q_probe(%' AND query NOT LIKE '%q_waiting%'), 0)::bigint
               FROM pg_stat_statements WHERE query NOT LIKE '%pg_stat_statements%'";
    let row = sqlx::query(sql).fetch_one(&mut *connection).await.unwrap();
    connection.execute("SELECT pg_stat_statements_reset()").await.unwrap();
    (row.get(0), row.get(1))
}

async fn fill(store: &PostgresStore, count: usize) -> Vec<QueueName> {
    let mut names = Vec::new();
    for number in 0..count {
        let name = QueueName::new(format!("queue-{number}")).unwrap();
        store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
        let messages = (0..number % 3).map(|_| NewMessage::new("a")).collect();
        store.send(&name, messages).await.unwrap();
        names.push(name);
    }
    names
}

async fn many_queues_are_one_statement(_: &'static Server) {
    let (database, mut connection) = counting_database().await;
    let names = fill(&database.open().await, QUEUES).await;
    let store = database.open().await;
    // The queues are new to this process, then known to it.
    for known in [false, true] {
        calls(&mut connection).await;
        let all = store.stats_of(&names).await.unwrap();
        assert_eq!(calls(&mut connection).await, (1, 0), "known: {known}");
        for (number, stats) in all.iter().enumerate() {
            assert_eq!(stats.unwrap().ready, number as u64 % 3, "{number}");
        }
    }
}

/// Every queue has a parked message, each read of which takes 150 ms and yields `read` of its time `$1`: a count takes long.
async fn park_one_each(connection: &mut PgConnection, read: &str) {
    let statements = format!(
        "INSERT INTO hapax.q_parked (seq, id_hi, pos, sent_ms, retained_ms, fence, queue_id, attempts, deliveries, bytes, \
           prio, key_source, body)
         SELECT nextval('hapax.q_seq'), 1, 1, t, t, 1, q.id, 1, 1, 1, 0, 3, 'x' FROM hapax.q_queue q, hapax.now_ms() t;
         ALTER TABLE hapax.q_parked RENAME TO q_parked_rows;
         CREATE SEQUENCE hapax.reads;
         CREATE FUNCTION hapax.slowly(bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
           'SELECT {read} FROM pg_sleep(0.15)';
         CREATE VIEW hapax.q_parked AS SELECT queue_id, bytes, hapax.slowly(sent_ms) AS sent_ms FROM hapax.q_parked_rows"
    );
    connection.execute(sqlx::raw_sql(&statements)).await.unwrap();
}

/// A statement begins no queue after 200 ms, so that many large queues together do not exceed the time of an operation.
async fn queues_that_take_long_are_counted_by_several_statements(_: &'static Server) {
    let (database, mut connection) = counting_database().await;
    let store = database.open().await;
    let names = fill(&store, 4).await;
    park_one_each(&mut connection, "$1").await;
    calls(&mut connection).await;
    let all = store.stats_of(&names).await.unwrap();
    let (counts, looks) = calls(&mut connection).await;
    assert!((2..=4).contains(&counts) && looks == 0, "{counts}: one or two queues each");
    for (number, stats) in all.iter().enumerate() {
        let stats = stats.unwrap();
        assert_eq!((stats.ready, stats.parked), (number as u64 % 3, 1), "{number}");
    }
    // What took long is used again.
    assert_eq!(store.stats_of(&names).await.unwrap(), all);
    assert_eq!(calls(&mut connection).await, (0, 0));
}

/// The look whether time has something to do in a queue takes more than the 200 ms after which no queue is begun. So a statement
/// counts none; the next one counts them regardless of the time.
async fn a_look_that_takes_longer_than_a_count_may_ends_all_the_same(_: &'static Server) {
    let (database, mut connection) = counting_database().await;
    let store = database.open().await;
    let names = fill(&store, 3).await;
    for name in &names {
        let delayed = NewMessage::new("later").delay_ms(600_000);
        store.send(name, vec![delayed]).await.unwrap().remove(0).unwrap();
    }
    connection
        .execute(
            "ALTER TABLE hapax.q_due RENAME TO q_due_rows;
             CREATE FUNCTION hapax.slowly(bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
               'SELECT $1 FROM pg_sleep(0.25)';
             CREATE VIEW hapax.q_due AS
               SELECT queue_id, bytes, sent_ms, hapax.slowly(until_ms) AS until_ms FROM hapax.q_due_rows",
        )
        .await
        .unwrap();
    calls(&mut connection).await;
    let all = tokio::time::timeout(PATIENCE, store.stats_of(&names)).await.expect("it ends").unwrap();
    assert_eq!(calls(&mut connection).await.0, 2, "one statement counts nothing, one all");
    for (number, stats) in all.iter().enumerate() {
        let stats = stats.unwrap();
        assert_eq!((stats.ready, stats.delayed), (number as u64 % 3, 1), "{number}");
    }
}

/// Of four queues a statement counts two. The connection of the second statement breaks: the call fails, and no queue is said not
/// to exist.
async fn a_connection_that_breaks_between_two_statements_hides_no_queue(_: &'static Server) {
    let (database, mut connection) = counting_database().await;
    let store = database.open().await;
    let names = fill(&store, 4).await;
    let third_breaks = "CASE WHEN nextval(''hapax.reads'') = 3 AND pg_terminate_backend(pg_backend_pid()) THEN 0 ELSE $1 END";
    park_one_each(&mut connection, third_breaks).await;
    let broken = store.stats_of(&names).await;
    assert!(matches!(broken, Err(StoreError::Unavailable(_))), "{broken:?}");
    let all = store.stats_of(&names).await.unwrap();
    for (number, stats) in all.iter().enumerate() {
        let stats = stats.unwrap_or_else(|| panic!("queue {number} is there"));
        assert_eq!((stats.ready, stats.parked), (number as u64 % 3, 1), "{number}");
    }
}
