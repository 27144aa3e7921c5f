//! What queues do all the time finds rows by an index, whatever the statistics say: a table that was empty when it was
//! analyzed must not be read from end to end once it has grown, and one that was large must not be once it is empty.

mod common;

use std::collections::BTreeMap;
use std::process::ExitCode;

use common::{Database, Server};
use hapax_core::{
    Extend, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle,
    Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, PgConnection, Row as _};

/// Tables with a row for each message or group. That of the queues is read from end to end twice a second, for leases that end.
const TABLES: [&str; 7] = ["q_ready", "q_claim", "q_due", "q_fifo", "q_head", "q_parked", "q_need"];

fn main() -> ExitCode {
    common::main(tests![lifecycles_never_scan_a_table])
}

async fn send(store: &PostgresStore, name: &QueueName, body: String) {
    let mut message = NewMessage::new(body.clone());
    if name.is_fifo() {
        let group = GroupId::new(format!("g{}", body.len() % 7)).unwrap();
        message = message.group(group).dedup(body.parse().unwrap());
    }
    store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
}

/// Sends, receives, extends, returns with and without a delay, and acks, one call each. The ack of a standard queue is made with the send of
/// another message.
async fn lifecycle(store: &PostgresStore, name: &QueueName, body: String) {
    send(store, name, body).await;
    for round in 0..if name.is_fifo() { 3 } else { 4 } {
        let ask = Receive { wait_ms: Some(5_000), lease_ms: Some(60_000), ..Receive::up_to(1) };
        let got = store.receive(name, ask).await.unwrap();
        let receipt = got[0].receipt.clone();
        let extend = Extend { receipt: receipt.clone(), lease_ms: 90_000, own_lease: false };
        store.extend(name, vec![extend]).await.unwrap().remove(0).unwrap();
        let settlement = match round {
            0 => Settlement::Defer { after_ms: 0 },
            1 => Settlement::Retry { after_ms: Some(1), error: None },
            _ => Settlement::Ack,
        };
        let settle = async {
            store.settle(name, vec![Settle::new(receipt, settlement)]).await.unwrap().remove(0).unwrap();
        };
        if round == 2 && !name.is_fifo() {
            tokio::join!(settle, send(store, name, "with the ack".into()));
        } else {
            settle.await;
        }
    }
}

/// How often acks and sends went to the database as one statement, in sessions that have ended.
async fn both_kinds(db: &mut PgConnection) -> i64 {
    let sql = "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_user_functions WHERE schemaname = 'hapax' AND funcname = 'q_write'";
    db.fetch_one(sql).await.unwrap().get(0)
}

/// How often each table was read from end to end, by sessions that have ended.
async fn scans(db: &mut PgConnection) -> BTreeMap<String, i64> {
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'hapax'";
    let start = std::time::Instant::now();
    while db.fetch_one(others).await.unwrap().get::<i64, _>(0) > 0 {
        assert!(start.elapsed() < common::PATIENCE, "sessions stay");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    let sql = "SELECT relname::text, seq_scan FROM pg_stat_user_tables WHERE schemaname = 'hapax'";
    let rows = db.fetch_all(sql).await.unwrap();
    let of_queues = |row: &sqlx::postgres::PgRow| TABLES.contains(&row.get::<&str, _>(0));
    rows.iter().filter(|row| of_queues(row)).map(|row| (row.get(0), row.get(1))).collect()
}

/// Entries that were read from each index of messages in groups, by sessions that have ended.
async fn index_entries(db: &mut PgConnection) -> BTreeMap<String, i64> {
    let sql = "SELECT indexrelname::text, idx_tup_read FROM pg_stat_user_indexes WHERE schemaname = 'hapax' AND relname IN ('q_fifo', 'q_claim')";
    let rows = db.fetch_all(sql).await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get(1))).collect()
}

/// Messages that stay: a lifecycle works in front of them.
async fn grow(db: &mut PgConnection, rows: u64) {
    for (table, more) in [("q_ready", ""), ("q_claim", ""), ("q_due", ""), ("q_fifo", ", grp = 'rest'")] {
        let columns = "seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, queue_id, attempts, deliveries, bytes, lease_ms, prio, \
                       key_source, body";
        let grp = if more.is_empty() { "NULL" } else { "'rest'" };
        // In a queue of its own, which has no configuration: nothing is delivered from it.
        let sql = format!(
            "INSERT INTO hapax.{table} ({columns}, grp) SELECT nextval('hapax.q_seq'), 1, currval('hapax.q_seq'), hapax.now_ms(), \
             hapax.now_ms(), 0, hapax.now_ms() + 86400000, 1000000, 0, 0, 1, 1000, 0, 0, 'x', {grp} FROM generate_series(1, {rows})"
        );
        db.execute(sql.as_str()).await.unwrap();
    }
    let sql = format!(
        "INSERT INTO hapax.q_need (entry, queue_id, seq) SELECT decode(md5(at::text), 'hex'), 1000000, at FROM generate_series(1, {rows}) at"
    );
    db.execute(sql.as_str()).await.unwrap();
}

async fn lifecycles_never_scan_a_table(server: &'static Server) {
    let rows = if std::env::var_os("HAPAX_LONG").is_some() { 1_000_000 } else { 20_000 };
    let database = Database::migrated(server).await;
    // Most messages of other queues are behind the place of a group.
    database.raise_places(false).await;
    let names = ["jobs", "jobs.fifo"].map(|name| QueueName::new(name).unwrap());
    let store = database.open().await;
    for name in &names {
        let config = if name.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        store.create_queue(name, config).await.unwrap();
    }
    store.shut_down();
    drop(store);
    let mut db = database.connect().await;
    let track = format!("ALTER DATABASE {} SET track_functions = 'pl'", database.name);
    db.execute(track.as_str()).await.unwrap();
    let states: [(&str, bool, u64, bool); 7] = [
        ("new", false, 0, false),
        ("analyzed while empty", true, 0, false),
        ("grown since", false, rows, false),
        ("analyzed while large", true, 0, false),
        ("emptied since", false, 0, true),
        ("analyzed while empty again", true, 0, true),
        ("grown again", false, rows, false),
    ];
    for (state, analyze, more, empty) in states {
        if empty {
            for table in TABLES {
                db.execute(format!("DELETE FROM hapax.{table}").as_str()).await.unwrap();
            }
        }
        grow(&mut db, more).await;
        if analyze {
            for table in TABLES {
                db.execute(format!("VACUUM (ANALYZE) hapax.{table}").as_str()).await.unwrap();
            }
        }
        let (before, both_before) = (scans(&mut db).await, both_kinds(&mut db).await);
        let entries_before = index_entries(&mut db).await;
        let store = database.open().await;
        // Beyond five calls a session keeps one plan for all arguments.
        for at in 0..20 {
            for name in &names {
                lifecycle(&store, name, format!("{}-{at}", state.replace(' ', "-"))).await;
            }
        }
        store.shut_down();
        drop(store);
        let after = scans(&mut db).await;
        let both = both_kinds(&mut db).await - both_before;
        println!("{state}: {before:?} before, {after:?} after; {both} statements with an ack and a send");
        assert!(both > 10, "{state}: {both} statements with an ack and a send");
        // The messages of a group are looked for among those of their group only. The sweeper may read everything now and then.
        for (index, entries) in index_entries(&mut db).await {
            let read = entries - entries_before[&index];
            println!("{state}: {read} entries of {index}");
            assert!(read < 5 * rows as i64, "{state}: {read} entries of {index} were read");
        }
        for (table, scanned) in after {
            // The sweeper's search for what is too old reads each table once for each queue.
            assert!(scanned - before[&table] <= 2, "{state}: {table} was read from end to end: {scanned}");
        }
    }
}
