//! Many writers at once, out of order.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::outbox::{NewOutboxMessage, OutboxMessage, OutboxStore as _};
use hapax_faults::PostgresServer;
use hapax_postgres::PostgresOutbox;
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};

use crate::fixture::{Database, Recorder, Running, Verdict, eventually, is_long, judge, quick};
use crate::naive;

const WRITERS: u64 = 16;
const KEYS: u64 = 60;

/// One business transaction: locks a row, counts, and writes its message into all three outboxes.
async fn transaction(db: &mut PgConnection, outbox: &PostgresOutbox, random: &mut fastrand::Rng) {
    let key = format!("key-{}", random.u64(0..KEYS));
    let mut tx = db.begin().await.unwrap();
    let sql = "UPDATE accounts SET count = count + 1 WHERE key = $1 RETURNING count";
    let number: i64 = sqlx::query(sql).bind(&key).fetch_one(&mut *tx).await.unwrap().get(0);
    let message = NewOutboxMessage::new("orders", number.to_string()).key(&key);
    if random.u8(0..5) == 0 {
        let mut savepoint = tx.begin().await.unwrap();
        outbox
            .enqueue(&mut savepoint, &NewOutboxMessage { body: "rolled back".into(), ..message.clone() })
            .await
            .unwrap();
        savepoint.rollback().await.unwrap();
    }
    outbox.enqueue(&mut tx, &message).await.unwrap();
    for table in ["naive_last", "naive_mark"] {
        let sql = format!("INSERT INTO {table} (key, number) VALUES ($1, $2)");
        sqlx::query(&sql).bind(&key).bind(number).execute(&mut *tx).await.unwrap();
    }
    // The numbers are drawn, and the commit comes later.
    tokio::time::sleep(Duration::from_micros(random.u64(0..4_000))).await;
    if random.u8(0..5) == 0 { tx.rollback().await.unwrap() } else { tx.commit().await.unwrap() }
}

async fn committed(db: &mut PgConnection) -> BTreeMap<String, u64> {
    let rows = db.fetch_all("SELECT key, count FROM accounts").await.unwrap();
    rows.iter().map(|row| (row.get(0), row.get::<i64, _>(1) as u64)).collect()
}

fn as_pairs(got: &[OutboxMessage]) -> Vec<(String, u64)> {
    let number = |message: &OutboxMessage| {
        String::from_utf8_lossy(&message.body).parse().expect("not a rolled back one")
    };
    got.iter().map(|message| (message.key.clone().unwrap(), number(message))).collect()
}

pub async fn out_of_order_commits_lose_nothing(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let mut db = database.connect().await;
    db.execute(naive::TABLES).await.unwrap();
    db.execute("CREATE TABLE accounts (key text PRIMARY KEY, count bigint NOT NULL)").await.unwrap();
    let keys = format!("INSERT INTO accounts SELECT 'key-' || n, 0 FROM generate_series(0, {}) n", KEYS - 1);
    db.execute(keys.as_str()).await.unwrap();
    db.execute("INSERT INTO accounts VALUES ('open', 0)").await.unwrap();
    let outbox = database.outbox().await;

    // Transactions that have nothing to do with the outbox: one that writes, and one that holds a snapshot.
    let (mut unrelated, mut reads) = (database.connect().await, database.connect().await);
    unrelated.execute("CREATE TABLE other (n int); BEGIN; INSERT INTO other VALUES (1)").await.unwrap();
    reads.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM accounts").await.unwrap();
    // One writer of the outbox that stays open.
    let mut slow = database.connect().await;
    let mut open = slow.begin().await.unwrap();
    open.execute("UPDATE accounts SET count = 1 WHERE key = 'open'").await.unwrap();
    outbox.enqueue(&mut open, &NewOutboxMessage::new("orders", "1").key("open")).await.unwrap();

    let sink = Recorder::new(false);
    let relays: Vec<Running> =
        (0..2).map(|_| Running::start(Arc::new(outbox.clone()), sink.clone(), quick("storm"))).collect();
    let (by_last, last_task) = naive::id_larger_than_last(&database.url);
    let by_mark = naive::Got::default();
    let mark_tasks: Vec<_> =
        (0..2).map(|worker| naive::skip_locked(&database.url, &by_mark, worker)).collect();

    let until = Instant::now() + Duration::from_secs(if is_long() { 60 } else { 5 });
    let writers: Vec<_> = (0..WRITERS)
        .map(|writer| {
            let (outbox, url) = (outbox.clone(), database.url.clone());
            tokio::spawn(async move {
                let mut random = fastrand::Rng::with_seed(writer);
                let mut db = PgConnection::connect(&url).await.unwrap();
                while Instant::now() < until {
                    transaction(&mut db, &outbox, &mut random).await;
                }
            })
        })
        .collect();
    for writer in writers {
        writer.await.unwrap();
    }
    // Everything outside of the open writer's bucket is published while it is open, and the others are open, too.
    let bucket = async |db: &mut PgConnection, key: &str| -> i32 {
        sqlx::query("SELECT hapax.outbox_bucket($1)").bind(key).fetch_one(db).await.unwrap().get(0)
    };
    let stalled = bucket(&mut db, "open").await;
    let all = committed(&mut db).await;
    let mut free = BTreeMap::new();
    for (key, count) in &all {
        if bucket(&mut db, key).await != stalled {
            free.insert(key.clone(), *count);
        }
    }
    eventually("what is not behind the open writer is published", async || {
        judge(&all, &as_pairs(&sink.got.lock().unwrap())).lost
            <= all.iter().filter(|(key, _)| !free.contains_key(*key)).map(|(_, count)| *count as usize).sum()
    })
    .await;
    let early = as_pairs(&sink.got.lock().unwrap());
    let early: Vec<_> = early.into_iter().filter(|(key, _)| free.contains_key(key)).collect();
    assert_eq!(judge(&free, &early), Verdict::default());
    open.commit().await.unwrap();
    let all = committed(&mut db).await;
    let total: u64 = all.values().sum();
    sink.wait_for(total as usize).await;
    for relay in relays {
        relay.stop().await;
    }
    assert_eq!(judge(&all, &as_pairs(&sink.got.lock().unwrap())), Verdict::default());

    // The controls, on the same transactions. They have no message of the open writer.
    let naive_keys = all.clone().into_iter().filter(|(key, _)| key != "open").collect::<BTreeMap<_, _>>();
    // The second one publishes more slowly than the writers write, the slower the more dead rows it reads: it is not waited for
    // until it has published everything.
    eventually("the second control has repeated and inverted messages", async || {
        let mark = judge(&naive_keys, &by_mark.lock().unwrap());
        mark.repeated > 0 && mark.inverted > 0
    })
    .await;
    last_task.abort();
    mark_tasks.iter().for_each(tokio::task::JoinHandle::abort);
    let last = judge(&naive_keys, &by_last.lock().unwrap());
    let mark = judge(&naive_keys, &by_mark.lock().unwrap());
    let (repeated, inverted) = (mark.repeated, mark.inverted);
    println!(
        "{total} messages; `id > last`: {last:?}; SKIP LOCKED, publish, mark: {repeated} repeated, {inverted} inverted until \
         then; relay: 0, 0, 0"
    );
    assert!(last.lost > 0, "the control `id > last` lost nothing: the storm proves nothing");
}

/// Six periods of load, by a clock that the test moves; a transaction of the outbox and one elsewhere stay open.
pub async fn tables_stay_small_under_load(server: &'static PostgresServer) {
    let database = Database::new(server).await;
    let mut db = database.connect().await;
    db.execute(
        "CREATE TABLE clock (now_us bigint); INSERT INTO clock VALUES (1800000000000000);
         CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT now_us FROM public.clock'",
    )
    .await
    .unwrap();
    let outbox = database.outbox().await;
    let mut reads = database.connect().await;
    reads.execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM clock").await.unwrap();
    let mut slow = database.connect().await;
    let mut open = slow.begin().await.unwrap();
    outbox.enqueue(&mut open, &NewOutboxMessage::new("orders", "open").key("open")).await.unwrap();
    let sink = Recorder::new(false);
    let options = hapax_relay::RelayOptions {
        rotate: Duration::from_millis(50),
        lease: Duration::from_mins(9),
        ..quick("r")
    };
    let relay = Running::start(Arc::new(outbox.clone()), sink.clone(), options);
    let sizes = async |db: &mut PgConnection| -> (i64, i64) {
        let sql = "SELECT sum(pg_total_relation_size(oid)) FILTER (WHERE relname ~ '^outbox_[0-9]{2}_')::bigint,
                     sum(pg_total_relation_size(oid)) FILTER (WHERE relname ~ '^outbox_(position|relay|lease)')::bigint
                   FROM pg_class WHERE relkind = 'r'";
        let row = sqlx::query(sql).fetch_one(db).await.unwrap();
        (row.get(0), row.get(1))
    };
    let mut after_period = Vec::new();
    for period in 0..6u32 {
        for number in 0..500u32 {
            let key = format!("key-{}", (number * 7) % 200);
            let message = NewOutboxMessage::new("orders", vec![b'x'; 500]).key(key);
            outbox.enqueue(&mut db, &message).await.unwrap();
        }
        // The open writer's bucket waits for it; everything else is published.
        let sql = "SELECT count(*) FROM generate_series(0, 199) n WHERE hapax.outbox_bucket('key-' || n) = hapax.outbox_bucket('open')";
        let waiting: i64 = sqlx::query(sql).fetch_one(&mut db).await.unwrap().get(0);
        let published = 500 * (period as usize + 1);
        eventually("the period's messages are published", async || {
            sink.count() + waiting as usize * 3 * (period as usize + 1) >= published
        })
        .await;
        after_period.push(sizes(&mut db).await);
        db.execute("UPDATE clock SET now_us = now_us + 600000000").await.unwrap();
        let before = relay.watch.counts().rotated;
        eventually("the old tables are emptied", async || relay.watch.counts().rotated > before).await;
    }
    let (first, last) = (after_period[1], after_period[5]);
    println!("bytes of messages and positions after each period: {after_period:?}");
    assert!(last.0 < first.0 * 2 && last.1 < first.1 * 2, "tables grow: {after_period:?}");
    open.commit().await.unwrap();
    sink.wait_for(3_001).await;
    relay.stop().await;
    assert!(outbox.unpublished("r", 10).await.unwrap().is_empty());
}
