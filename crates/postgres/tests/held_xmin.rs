//! A transaction that is open for long keeps deleted rows in tables and indexes. Queues must not read them again and again.
//! Verdicts are counts of pages, never times.

mod common;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{Database, Server};
use hapax_core::{
    Delivery, Extend, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive,
    Settle, Settlement,
};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, PgConnection, Row as _};
use tokio::task::JoinSet;

/// Timeout of every wait; only failures reach it.
const PATIENCE: Duration = Duration::from_mins(5);
/// Calls of each kind whose pages are counted.
const COUNTED: u64 = 300;

fn main() -> ExitCode {
    common::main(tests![
        a_standard_queue_does_not_read_what_is_gone,
        a_standard_queue_with_groups_does_not_read_what_is_gone,
        a_fifo_queue_does_not_read_what_is_gone,
    ])
}

/// How messages are grouped.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Groups {
    None,
    Tenants,
    Fifo,
}

/// Groups of a queue that has some.
const GROUPS: u64 = 20;

async fn send(store: &PostgresStore, name: &QueueName, groups: Groups) {
    let number = fastrand::u64(..);
    let mut message = NewMessage::new("x".repeat(256));
    if groups != Groups::None {
        message = message.group(GroupId::new(format!("g{}", number % GROUPS)).unwrap());
    }
    if groups == Groups::Fifo {
        message = message.dedup(number.to_string().parse().unwrap());
    }
    store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
}

async fn number(db: &mut PgConnection, sql: &str) -> u64 {
    sqlx::query(sql).fetch_one(db).await.unwrap().get::<i64, _>(0) as u64
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

async fn extend(store: &PostgresStore, name: &QueueName, got: &[Delivery]) {
    let extend = |one: &Delivery| Extend { receipt: one.receipt.clone(), lease_ms: 60_000, own_lease: false };
    for extended in store.extend(name, got.iter().map(extend).collect()).await.unwrap() {
        extended.unwrap();
    }
}

/// A message is sent, received, kept alive, put back, received again and acked, one call each.
async fn lifecycle(store: &PostgresStore, name: &QueueName, groups: Groups) {
    send(store, name, groups).await;
    let got = receive_one(store, name).await;
    extend(store, name, &got).await;
    let back = Settle::new(got[0].receipt.clone(), Settlement::Defer { after_ms: 0 });
    store.settle(name, vec![back]).await.unwrap().remove(0).unwrap();
    let got = receive_one(store, name).await;
    ack(store, name, &got).await;
}

async fn receive_one(store: &PostgresStore, name: &QueueName) -> Vec<Delivery> {
    let start = Instant::now();
    loop {
        let got = receive(store, name, 1, 60_000).await;
        if !got.is_empty() {
            return got;
        }
        assert!(start.elapsed() < PATIENCE, "nothing was received");
    }
}

/// Pages of tables and indexes that were touched until now, by sessions that have ended.
async fn pages(db: &mut PgConnection) -> u64 {
    let others = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'hapax'";
    let start = Instant::now();
    while number(db, others).await > 0 {
        assert!(start.elapsed() < PATIENCE, "sessions stay");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let sql =
        "SELECT sum(coalesce(heap_blks_read, 0) + coalesce(heap_blks_hit, 0) + coalesce(idx_blks_read, 0)
           + coalesce(idx_blks_hit, 0))::bigint FROM pg_statio_user_tables WHERE schemaname = 'hapax'";
    number(db, sql).await
}

/// The pages that lifecycles of one client on a store of its own touch, and the seconds that they took.
async fn pages_of_lifecycles(
    database: &Database,
    name: &QueueName,
    groups: Groups,
    db: &mut PgConnection,
) -> (u64, u64) {
    let (before, start) = (pages(db).await, Instant::now());
    let store = database.open().await;
    for _ in 0..COUNTED {
        lifecycle(&store, name, groups).await;
    }
    let secs = start.elapsed().as_secs();
    store.shut_down();
    drop(store);
    (pages(db).await - before, secs)
}

/// Clients send, receive and ack; some leases end unused, and their messages are received again.
async fn traffic(database: &Database, name: &QueueName, groups: Groups, lifecycles: u64) {
    const CLIENTS: usize = 20;
    let store = database.open().await;
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (store, name) = (store.clone(), name.clone());
        clients.spawn(async move {
            let mut acked = 0;
            for at in 0..lifecycles / CLIENTS as u64 {
                send(&store, &name, groups).await;
                let lapses = at % 20 == 0;
                let got = receive(&store, &name, 1, if lapses { 20 } else { 60_000 }).await;
                if !lapses && !got.is_empty() {
                    if at % 4 == 1 {
                        extend(&store, &name, &got).await;
                    }
                    ack(&store, &name, &got).await;
                    acked += got.len() as u64;
                }
            }
            acked
        });
    }
    let mut acked: u64 = clients.join_all().await.into_iter().sum();
    let start = Instant::now();
    while acked < lifecycles {
        let got = receive(&store, name, 100, 60_000).await;
        ack(&store, name, &got).await;
        acked += got.len() as u64;
        assert!(start.elapsed() < PATIENCE, "{acked} of {lifecycles} were acked");
    }
    store.shut_down();
}

/// Once a second, and more rarely from further back, a store looks for what may have been committed late, and reads what is
/// gone; the time that the lifecycles take allows for as many walks over everything. If calls or sweeps read what is gone
/// each time, there are hundreds.
async fn does_not_read_what_is_gone(server: &'static Server, groups: Groups) {
    let lifecycles = if std::env::var_os("HAPAX_LONG").is_some() { 100_000 } else { 10_000 };
    let (name, config) = match groups {
        Groups::Fifo => ("jobs.fifo", QueueConfig::sqs_fifo()),
        _ => ("jobs", QueueConfig::sqs()),
    };
    let (database, name) = (Database::migrated(server).await, QueueName::new(name).unwrap());
    database.raise_places(false).await;
    let store = database.open().await;
    store.create_queue(&name, config).await.unwrap();
    store.shut_down();
    drop(store);
    let (mut db, mut holder) = (database.connect().await, database.connect().await);
    holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.unwrap();
    holder.execute("SELECT count(*) FROM hapax.q_ready").await.unwrap();
    let (early, _) = pages_of_lifecycles(&database, &name, groups, &mut db).await;
    traffic(&database, &name, groups, lifecycles).await;
    let (late, secs) = pages_of_lifecycles(&database, &name, groups, &mut db).await;
    // Deleted rows of a lifecycle: of a FIFO queue in the tables of what waits, of deliveries, of heads and of deduplication ids.
    let (walks, rows) = (secs + 5, if groups == Groups::Fifo { 4 } else { 2 });
    let allowed = 2 * early + walks * rows * lifecycles;
    println!("{early} pages at first, {late} after {lifecycles} lifecycles, {allowed} allowed ({secs} s)");
    assert!(late <= allowed, "{COUNTED} lifecycles touch {late} pages; before the dead rows it was {early}");
    holder.execute("ROLLBACK").await.unwrap();
}

async fn a_standard_queue_does_not_read_what_is_gone(server: &'static Server) {
    does_not_read_what_is_gone(server, Groups::None).await;
}

async fn a_standard_queue_with_groups_does_not_read_what_is_gone(server: &'static Server) {
    does_not_read_what_is_gone(server, Groups::Tenants).await;
}

async fn a_fifo_queue_does_not_read_what_is_gone(server: &'static Server) {
    does_not_read_what_is_gone(server, Groups::Fifo).await;
}
