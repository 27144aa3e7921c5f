//! What users of other queues on PostgreSQL complain about. Verdicts are counts of messages, transactions and locks, never times.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::pin;
use std::process::ExitCode;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use common::{Database, Server};
use hapax_core::{
    Delivery, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle,
};
use hapax_postgres::PostgresStore;
use sqlx::postgres::PgListener;
use sqlx::{PgConnection, Row as _};
use tokio::task::JoinSet;

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(5);

fn main() -> ExitCode {
    common::main(tests![
        a_thousand_groups_keep_their_order_and_feed_two_receivers,
        a_dropped_call_leaves_no_transaction_no_lock_and_no_message,
        writers_notify_seldom,
    ])
}

fn is_long() -> bool {
    std::env::var_os("HAPAX_LONG").is_some()
}

fn queue(name: &str) -> QueueName {
    QueueName::new(name).unwrap()
}

async fn number(db: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query(sql).fetch_one(db).await.unwrap().get(0)
}

async fn send(store: &PostgresStore, name: &QueueName, messages: Vec<NewMessage>) {
    for sent in store.send(name, messages).await.unwrap() {
        sent.unwrap();
    }
}

async fn receive(store: &PostgresStore, name: &QueueName, max: usize, lease_ms: u64) -> Vec<Delivery> {
    let ask = Receive { wait_ms: Some(1_000), lease_ms: Some(lease_ms), ..Receive::up_to(max) };
    store.receive(name, ask).await.unwrap()
}

async fn ack(store: &PostgresStore, name: &QueueName, got: &[Delivery]) {
    let acks = got.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
    for settled in store.settle(name, acks).await.unwrap() {
        settled.unwrap();
    }
}

/// Messages of many groups: two receivers at the same time both get some, and each group is received in its order.
async fn a_thousand_groups_keep_their_order_and_feed_two_receivers(server: &'static Server) {
    const GROUPS: usize = 1_000;
    let each = if is_long() { 200 } else { 10 };
    let database = Database::migrated(server).await;
    let (stores, name) = ([database.open().await, database.open().await], queue("orders.fifo"));
    stores[0].create_queue(&name, QueueConfig::sqs_fifo()).await.unwrap();
    for at in 0..each {
        let message = |group: usize| {
            let text = format!("{group} {at}");
            let dedup = format!("{group}-{at}").parse().unwrap();
            NewMessage::new(text).group(GroupId::new(format!("g{group}")).unwrap()).dedup(dedup)
        };
        send(&stores[0], &name, (0..GROUPS).map(message).collect()).await;
    }
    // The first look of each, before any is acked: both get work.
    let firsts = [receive(&stores[0], &name, 10, 60_000).await, receive(&stores[1], &name, 10, 60_000).await];
    assert_eq!(firsts.each_ref().map(Vec::len), [10, 10]);
    let mut receivers = JoinSet::new();
    for (store, first) in stores.iter().cloned().zip(firsts) {
        let name = name.clone();
        receivers.spawn(async move { drain(&store, &name, first).await });
    }
    let got: Vec<Vec<(usize, usize)>> = receivers.join_all().await;
    let mut by_group: BTreeMap<usize, BTreeSet<usize>> = BTreeMap::new();
    for (group, at) in got.iter().flatten() {
        assert!(by_group.entry(*group).or_default().insert(*at), "{group} {at} came twice");
    }
    assert!(by_group.len() == GROUPS && by_group.values().all(|all| all.len() == each), "all of them came");
    // What one receiver gets of a group is in order; no message comes before one that was not acked.
    for received in &got {
        let mut last: BTreeMap<usize, usize> = BTreeMap::new();
        for (group, at) in received {
            assert!(last.insert(*group, *at).is_none_or(|before| before < *at), "group {group}");
        }
    }
}

/// Receives and acks until the queue is empty. Gives group and number of each message, in the order of arrival.
async fn drain(store: &PostgresStore, name: &QueueName, first: Vec<Delivery>) -> Vec<(usize, usize)> {
    let (mut got, mut all, start) = (first, Vec::new(), Instant::now());
    while !got.is_empty() {
        assert!(start.elapsed() < PATIENCE, "{} were received", all.len());
        for one in &got {
            let text = String::from_utf8(one.body.to_vec()).unwrap();
            let (group, at) = text.split_once(' ').unwrap();
            all.push((group.parse().unwrap(), at.parse().unwrap()));
        }
        ack(store, name, &got).await;
        got = receive(store, name, 500, 60_000).await;
    }
    all
}

/// Polls a call a number of times, then drops it.
async fn poll_and_drop<T>(call: impl Future<Output = T>, polls: usize) {
    let mut call = pin!(call);
    for _ in 0..polls {
        if call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready() {
            return;
        }
        tokio::task::yield_now().await;
    }
}

async fn a_dropped_call_leaves_no_transaction_no_lock_and_no_message(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, mut db) = (database.open().await, database.connect().await);
    for (name, config) in [("jobs", QueueConfig::sqs()), ("orders.fifo", QueueConfig::sqs_fifo())] {
        let name = queue(name);
        store.create_queue(&name, config).await.unwrap();
        let message = |n: usize| {
            let id = format!("m{n}");
            let message = NewMessage::new(id.clone());
            if name.is_fifo() {
                message.group(GroupId::new(format!("g{}", n % 5)).unwrap()).dedup(id.parse().unwrap())
            } else {
                message
            }
        };
        let mut held: Vec<Delivery> = Vec::new();
        for n in 0..60 {
            poll_and_drop(store.send(&name, vec![message(n)]), n % 20).await;
            poll_and_drop(store.receive(&name, Receive::up_to(3)), n % 20).await;
            held.extend(receive(&store, &name, 1, 600_000).await);
            let acks = held.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
            poll_and_drop(store.settle(&name, acks), n % 20).await;
        }
        // A dropped ack has happened or not; asked again, it is done or stale.
        let acks: Vec<_> = held.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
        store.settle(&name, acks).await.unwrap();
        store.quiet().await;
        until_nothing_is_open(&mut db).await;
        // What a dropped receive had taken is given back, or its lease ends; nothing is out of reach.
        let start = Instant::now();
        loop {
            let got = receive(&store, &name, 100, 600_000).await;
            ack(&store, &name, &got).await;
            let left = "SELECT (SELECT count(*) FROM hapax.q_ready) + (SELECT count(*) FROM hapax.q_fifo)
                        + (SELECT count(*) FROM hapax.q_claim)";
            if got.is_empty() && number(&mut db, left).await == 0 {
                break;
            }
            assert!(start.elapsed() < PATIENCE, "{name}: messages are left");
        }
    }
}

/// A dropped call runs to its end; then no transaction and no lock of it is left.
async fn until_nothing_is_open(db: &mut PgConnection) {
    let open =
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
                AND state LIKE 'idle in transaction%'";
    let locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())";
    let start = Instant::now();
    while number(db, open).await + number(db, locks).await > 0 {
        assert!(start.elapsed() < PATIENCE, "a transaction or a lock stays");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// A transaction that notifies takes one lock of the whole server when it commits. So a process notifies at most every 50 ms,
/// however much it sends.
async fn writers_notify_seldom(server: &'static Server) {
    const WRITERS: usize = 16;
    let database = Database::migrated(server).await;
    let (store, name) = (database.open().await, queue("jobs"));
    store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
    let mut listener = PgListener::connect(&database.direct_url()).await.unwrap();
    listener.listen("hapax").await.unwrap();
    if server.has_pooler() && !database.url().contains("hapax_listen_url") {
        // No process listens there, so none notifies.
        return;
    }
    let (start, mut writers) = (Instant::now(), JoinSet::new());
    for _ in 0..WRITERS {
        let (store, name) = (store.clone(), name.clone());
        writers.spawn(async move {
            for _ in 0..100 {
                send(&store, &name, vec![NewMessage::new("x")]).await;
            }
        });
    }
    writers.join_all().await;
    // The last hint may be on its way.
    let (mut heard, mut last) = (0, start.elapsed());
    while let Ok(hint) = tokio::time::timeout(Duration::from_millis(500), listener.recv()).await {
        hint.unwrap();
        (heard, last) = (heard + 1, start.elapsed());
    }
    let most = last.as_millis() as u64 / 50 + 2;
    println!("{heard} notifications for {} sends in {} ms", WRITERS * 100, last.as_millis());
    assert!(heard >= 1, "waiting processes are told");
    assert!(heard <= most, "{heard} notifications, at most {most} expected");
}
