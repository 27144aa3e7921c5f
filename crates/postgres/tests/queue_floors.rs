//! A transaction that is open for long keeps every deleted row in its table. A receive that begins behind what is gone
//! reads as little as in an empty table.

mod common;

use std::process::ExitCode;

use common::{Database, Server};
use hapax_core::{NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

/// Messages that pass through the queue while the transaction is open.
const PASSED: usize = 3_000;

/// Pages that a receive reads, from a place on.
async fn pages_of_a_receive(db: &mut PgConnection, version: i64, floor: i64) -> i64 {
    let sql = format!(
        "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) SELECT slot FROM hapax.q_take(1, {version}, '{{0}}', '{{{floor}}}', \
         '{{30000}}', '{{NULL}}', 1000000000, NULL, hapax.now_ms() - 1000)"
    );
    let mut rolled_back = db.begin().await.unwrap();
    // The first call plans; the second one is measured.
    rolled_back.execute(sql.as_str()).await.unwrap();
    let row = rolled_back.fetch_one(sql.as_str()).await.unwrap();
    let plan: serde_json::Value = row.get(0);
    let of = |name: &str| plan[0]["Plan"][name].as_i64().expect("a number");
    of("Shared Hit Blocks") + of("Shared Read Blocks")
}

async fn a_receive_behind_its_floor_reads_nothing_of_what_is_gone(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let mut holder = database.connect().await;
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    holder.execute("SELECT count(*) FROM hapax.q_ready").await.unwrap();

    let mut passed = 0;
    while passed < PASSED {
        store.send(&jobs, vec![NewMessage::new("x".repeat(500)); 500]).await.unwrap();
        let got = store.receive(&jobs, Receive::up_to(500)).await.unwrap();
        assert_eq!(got.len(), 500, "a receive behind the floor misses nothing");
        passed += got.len();
        let acks = got.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
        assert!(store.settle(&jobs, acks).await.unwrap().iter().all(Result::is_ok));
    }
    let mut db = database.connect().await;
    let version: i64 = sqlx::query_scalar("SELECT version FROM hapax.q_queue WHERE id = 1")
        .fetch_one(&mut db)
        .await
        .unwrap();
    let last: i64 =
        sqlx::query_scalar("SELECT last_value FROM hapax.q_seq").fetch_one(&mut db).await.unwrap();
    let from_zero = pages_of_a_receive(&mut db, version, 0).await;
    let behind = pages_of_a_receive(&mut db, version, last).await;
    assert!(from_zero > PASSED as i64 / 20, "the rows that are gone are still there: {from_zero} pages");
    assert!(behind < from_zero / 4, "{behind} pages behind the floor, {from_zero} from the first");
    holder.execute("ROLLBACK").await.unwrap();
    store.shut_down();
}

fn main() -> ExitCode {
    common::main(tests![a_receive_behind_its_floor_reads_nothing_of_what_is_gone])
}
