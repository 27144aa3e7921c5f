//! Receives that do not wait for the disk: a crash of the server may forget them, but never hands out a fence again.

mod common;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use common::{PATIENCE, Server};
use hapax_conformance::attack::patiently;
use hapax_core::{
    Delivery, Fence, MessageId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, Settle,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Executor as _, PgConnection};

const MESSAGES: usize = 40;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_forgotten_receive_is_stale_and_its_fence_is_not_drawn_again,
        a_receive_that_waits_for_the_disk_survives_a_crash,
        a_new_session_raises_the_fences_above_the_floor_once,
    ])
}

/// A server of its own that writes what is not waited for as late as it may, with a clock that stands still: fences are
/// not raised because time has passed.
async fn private() -> (Server, String) {
    let server = Server::start(&["fsync=on", "wal_writer_delay=10s", "autovacuum=off"]).unwrap();
    let url = server.url("postgres");
    hapax_postgres::migrate(&url, &Options::default(), false).await.unwrap();
    let stand_still = "DO $$ BEGIN EXECUTE format('CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS %L',
                         'SELECT ' || (SELECT last_value FROM hapax.fence)); END $$";
    server.connect("postgres").await.execute(stand_still).await.unwrap();
    (server, url)
}

async fn number(db: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(sql).fetch_one(db).await.unwrap()
}

async fn filled(url: &str, options: Options) -> (PostgresStore, QueueName) {
    let (store, jobs) = (PostgresStore::open(url, options).await.unwrap(), QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    for sent in store.send(&jobs, vec![NewMessage::new("x"); MESSAGES]).await.unwrap() {
        sent.unwrap();
    }
    (store, jobs)
}

async fn receive(store: &PostgresStore, jobs: &QueueName, max: usize) -> Vec<Delivery> {
    let ask = Receive { lease_ms: Some(3_600_000), wait_ms: Some(0), ..Receive::up_to(max) };
    patiently(|| store.receive(jobs, ask.clone())).await
}

/// Receives until a floor is durable; gives what was received. They wait for the disk until then.
async fn until_there_is_a_floor(server: &Server, store: &PostgresStore, jobs: &QueueName) -> Vec<Delivery> {
    let (mut db, start, mut got) = (server.connect("postgres").await, Instant::now(), Vec::new());
    while number(&mut db, "SELECT count(*) FROM hapax.fence_floor").await == 0 {
        assert!(start.elapsed() < PATIENCE, "no floor is made");
        if got.len() < MESSAGES / 2 {
            got.extend(receive(store, jobs, 1).await);
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    got
}

async fn a_forgotten_receive_is_stale_and_its_fence_is_not_drawn_again(_: &'static Server) {
    let (server, url) = private().await;
    let (store, jobs) = filled(&url, Options { sync_receives: false, ..Options::default() }).await;
    assert!(!store.capabilities().durable_lease);
    let mut before = until_there_is_a_floor(&server, &store, &jobs).await;
    before.extend(receive(&store, &jobs, MESSAGES).await);
    assert_eq!(before.len(), MESSAGES);
    server.stop("QUIT");
    server.run().unwrap();
    let forgotten = number(&mut server.connect("postgres").await, "SELECT count(*) FROM hapax.q_ready").await;
    println!("{forgotten} of {MESSAGES} deliveries were forgotten");
    let (mut after, start) = (Vec::new(), Instant::now());
    while (after.len() as i64) < forgotten {
        assert!(start.elapsed() < PATIENCE, "{} of {forgotten} came back", after.len());
        after.extend(receive(&store, &jobs, MESSAGES).await);
    }
    let fences: HashMap<MessageId, Fence> = before.iter().map(|one| (one.id, one.fence)).collect();
    let highest = fences.values().max().unwrap();
    for one in &after {
        assert!(one.fence > *highest, "{:?} of a new delivery, {highest:?} was drawn before", one.fence);
    }
    let again: Vec<MessageId> = after.iter().map(|one| one.id).collect();
    for old in &before {
        let settle = || store.settle(&jobs, vec![Settle::ack(old.receipt.clone())]);
        let settled = patiently(settle).await.remove(0);
        assert_eq!(
            settled.is_ok(),
            !again.contains(&old.id),
            "a receipt of a forgotten delivery: {settled:?}"
        );
    }
    store.shut_down();
}

async fn a_receive_that_waits_for_the_disk_survives_a_crash(_: &'static Server) {
    let (server, url) = private().await;
    let (store, jobs) = filled(&url, Options::default()).await;
    assert!(store.capabilities().durable_lease);
    let before = receive(&store, &jobs, MESSAGES).await;
    assert_eq!(before.len(), MESSAGES);
    server.stop("QUIT");
    server.run().unwrap();
    assert!(receive(&store, &jobs, MESSAGES).await.is_empty(), "no delivery is forgotten");
    store.shut_down();
}

async fn a_new_session_raises_the_fences_above_the_floor_once(_: &'static Server) {
    let (server, _) = private().await;
    let (mut first, mut second) = (server.connect("postgres").await, server.connect("postgres").await);
    let last = "SELECT last_value FROM hapax.fence";
    let start = number(&mut first, last).await;
    first.execute("SELECT hapax.raise_fence()").await.unwrap();
    assert_eq!(number(&mut first, last).await, start, "there is no floor yet");
    let floor = number(&mut first, "SELECT hapax.raise_floor(10000000)").await;
    // A session that has seen no crash has nothing to raise.
    first.execute("SELECT hapax.raise_fence()").await.unwrap();
    assert_eq!(number(&mut first, last).await, start);
    second.execute("SELECT hapax.raise_fence()").await.unwrap();
    let raised = number(&mut second, last).await;
    assert!(raised >= floor, "{raised}, the floor is {floor}");
    assert!(number(&mut second, "SELECT hapax.next_fence()").await > floor);
    let mut third = server.connect("postgres").await;
    third.execute("SELECT hapax.raise_fence()").await.unwrap();
    assert_eq!(number(&mut third, last).await, raised + 1, "it is above the floor already");
}
