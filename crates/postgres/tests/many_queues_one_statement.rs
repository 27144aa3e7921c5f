//! The counters of many queues are asked for together: one statement, however many queues there are, and more only if counting
//! takes long or time has something to do.

mod common;

use common::{Database, Server};
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, PgConnection, Row as _};

const QUEUES: usize = 300;

fn main() -> std::process::ExitCode {
    common::main(tests![
        many_queues_are_one_statement,
        queues_that_take_long_are_counted_by_several_statements
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

/// A statement begins no queue after 200 ms, so that many large queues together do not exceed the time of an operation.
async fn queues_that_take_long_are_counted_by_several_statements(_: &'static Server) {
    let (database, mut connection) = counting_database().await;
    let store = database.open().await;
    let names = fill(&store, 4).await;
    // Each read of a parked message takes 150 ms: every queue has one, and its count takes long.
    connection
        .execute(
            "INSERT INTO hapax.q_parked (seq, id_hi, pos, sent_ms, retained_ms, fence, queue_id, attempts, deliveries, bytes, \
               prio, key_source, body)
             SELECT nextval('hapax.q_seq'), 1, 1, t, t, 1, q.id, 1, 1, 1, 0, 3, 'x' FROM hapax.q_queue q, hapax.now_ms() t;
             ALTER TABLE hapax.q_parked RENAME TO q_parked_rows;
             CREATE FUNCTION hapax.slowly(bigint) RETURNS bigint LANGUAGE sql VOLATILE AS
               'SELECT $1 FROM pg_sleep(0.15)';
             CREATE VIEW hapax.q_parked AS SELECT queue_id, bytes, hapax.slowly(sent_ms) AS sent_ms FROM hapax.q_parked_rows",
        )
        .await
        .unwrap();
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
