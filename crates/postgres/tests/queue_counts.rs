//! What is counted in queues: leases by the time, the limit of messages in flight, and groups without messages.

mod common;

use std::time::{Duration, Instant};

use common::{Database, Server};
use hapax_core::policy::IN_FLIGHT_MAX;
use hapax_core::{
    DeadLetterPolicy, DedupId, Delivery, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, Quota, Receive, RedriveFilter, RedriveRequest, SendError, Settle, Settlement,
    StoreError,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::{Executor as _, Row as _};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_lease_that_has_ended_is_not_counted,
        a_count_during_which_the_process_stood_still_is_not_used_again,
        a_quota_refuses_nothing_because_a_process_stood_still,
        no_more_than_the_limit_are_in_flight,
        groups_without_messages_are_removed,
        a_quota_is_counted_only_when_the_queue_may_be_full,
        a_quota_holds_for_several_servers_and_after_changes,
        dead_letters_and_redrives_count_against_quotas,
    ])
}

async fn create(store: &PostgresStore, name: &str) -> QueueName {
    let name = QueueName::new(name).unwrap();
    let config = if name.is_fifo() { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
    store.create_queue(&name, config).await.unwrap();
    name
}

async fn send(store: &PostgresStore, name: &QueueName, body: &str, group: &str) {
    let mut message = NewMessage::new(body.to_owned());
    if name.is_fifo() {
        message = message.group(GroupId::new(group).unwrap()).dedup(DedupId::new(body).unwrap());
    }
    store.send(name, vec![message]).await.unwrap().remove(0).unwrap();
}

async fn receive(store: &PostgresStore, name: &QueueName) -> Result<Vec<Delivery>, StoreError> {
    store.receive(name, Receive { wait_ms: Some(0), ..Receive::up_to(10) }).await
}

async fn a_lease_that_has_ended_is_not_counted(server: &'static Server) {
    let database = Database::migrated(server).await;
    let clock = database.with_clock().await;
    let store = database.open().await;
    for name in ["orders", "orders.fifo"] {
        let name = create(&store, name).await;
        send(&store, &name, "one", "g").await;
        assert_eq!(receive(&store, &name).await.unwrap().len(), 1);
        let stats = store.stats(&name).await.unwrap();
        assert_eq!((stats.ready, stats.in_flight), (0, 1), "{name}");
        // Nothing tells the store that time has passed.
        clock.advance_ms(60_000).await;
        let stats = store.stats(&name).await.unwrap();
        assert_eq!((stats.ready, stats.in_flight), (1, 0), "{name}");
    }
}

/// A slow count is used for a time. One that was fast in the database, while the process was stopped or had no time, is not.
async fn a_count_during_which_the_process_stood_still_is_not_used_again(server: &'static Server) {
    const STOOD_STILL: Duration = Duration::from_secs(1);
    let database = Database::migrated(server).await;
    let url = database.url();
    // In a runtime of its own thread, nothing of the store runs while that thread is blocked.
    let alone = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let store = PostgresStore::open(&url, Options::default()).await.unwrap();
            let name = create(&store, "orders").await;
            let (queue, whole, ()) = tokio::join!(store.stats(&name), store.status(), async {
                std::thread::sleep(STOOD_STILL);
            });
            assert_eq!((queue.unwrap().ready, whole.unwrap().messages), (0, 0));
            send(&store, &name, "one", "").await;
            let start = Instant::now();
            while (store.stats(&name).await.unwrap().ready, store.status().await.unwrap().messages) != (1, 1)
            {
                // If the database itself was slow, for twenty times as long.
                assert!(start.elapsed() < 10 * STOOD_STILL, "the message is not counted");
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        });
    });
    alone.join().unwrap();
}

/// The next count of a queue that may be full waits for longer the longer the last one took. The row that says so is read by all
/// processes: one that stood still would close the queue for all of them.
async fn a_quota_refuses_nothing_because_a_process_stood_still(server: &'static Server) {
    const STOOD_STILL: Duration = Duration::from_secs(1);
    let database = Database::migrated(server).await;
    let (store, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, quota(2)).await.unwrap();
    let (url, name) = (database.url(), jobs.clone());
    let alone = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async move {
            let limit = Duration::from_mins(1);
            let options = Options { connect_timeout: limit, operation_timeout: limit, ..Options::default() };
            let store = PostgresStore::open(&url, options).await.unwrap();
            let standing_still = async {
                loop {
                    std::thread::sleep(STOOD_STILL);
                    tokio::task::yield_now().await;
                }
            };
            tokio::select! {
                filled = fill(&store, &name, 2) => assert_eq!(filled, (2, None)),
                () = standing_still => {}
            }
        });
    });
    tokio::task::spawn_blocking(|| alone.join().unwrap()).await.unwrap();
    let held = receive(&store, &jobs).await.unwrap();
    let acks = held.iter().map(|one| Settle::ack(one.receipt.clone())).collect();
    assert_eq!(store.settle(&jobs, acks).await.unwrap().len(), 2);
    let start = Instant::now();
    while fill(&store, &jobs, 1).await != (1, None) {
        // If the database itself was slow, for twenty times as long.
        assert!(start.elapsed() < 10 * STOOD_STILL, "the queue is empty, and a send is refused");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Leases but for one of the limit are made by hand; each process then counts what all have leased.
async fn no_more_than_the_limit_are_in_flight(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, other) = (database.open().await, database.open().await);
    let mut connection = database.connect().await;
    for name in ["orders", "orders.fifo"] {
        let name = create(&store, name).await;
        let leases = format!(
            "INSERT INTO hapax.q_claim (seq, id_hi, pos, sent_ms, retained_ms, fence, until_ms, received_ms, queue_id, \
               attempts, deliveries, bytes, lease_ms, prio, key_source, grp, body)
             SELECT nextval('hapax.q_seq'), 1, 1, t, t, 1, t + 3600000, t, q.id, 1, 1, 1, 3600000, 0, 3, 'full', 'x'
             FROM hapax.q_queue q, hapax.now_ms() t, generate_series(1, {}) WHERE q.name = '{name}'",
            IN_FLIGHT_MAX - 1
        );
        connection.execute(leases.as_str()).await.unwrap();
        for (body, group) in [("one", "a"), ("two", "b"), ("three", "c")] {
            send(&store, &name, body, group).await;
        }
        let last = receive(&store, &name).await.unwrap();
        assert_eq!(last.len(), 1, "{name}: there is room for one");
        for store in [&store, &other] {
            let full = receive(store, &name).await;
            if name.is_fifo() {
                assert_eq!(full, Ok(Vec::new()));
            } else {
                assert_eq!(
                    full,
                    Err(StoreError::TooManyInFlight { queue: name.clone(), in_flight: IN_FLIGHT_MAX })
                );
            }
        }
        let ack = last.into_iter().map(|one| Settle::ack(one.receipt)).collect();
        store.settle(&name, ack).await.unwrap().remove(0).unwrap();
        assert_eq!(receive(&other, &name).await.unwrap().len(), 1, "{name}: one has ended");
    }
}

async fn groups_without_messages_are_removed(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = create(&store, "orders.fifo").await;
    for number in 0..20 {
        send(&store, &name, &format!("{number}"), &format!("g{number}")).await;
    }
    let mut held = Vec::new();
    for delivery in [receive(&store, &name).await.unwrap(), receive(&store, &name).await.unwrap()].concat() {
        let group = delivery.group.as_ref().unwrap().as_str().to_owned();
        if group == "g3" {
            held.push(delivery);
        } else {
            let settled = store.settle(&name, vec![Settle::ack(delivery.receipt)]).await.unwrap().remove(0);
            settled.unwrap();
        }
    }
    send(&store, &name, "waits", "g5").await;
    // A whole round of the sweeper.
    store.quiet().await;
    let mut connection = database.connect().await;
    let left: Vec<String> = connection
        .fetch_all("SELECT grp FROM hapax.q_group ORDER BY grp")
        .await
        .unwrap()
        .iter()
        .map(|row| row.get(0))
        .collect();
    assert_eq!(left, ["g3", "g5"], "one has a message in flight, one has a message that waits");
    // A group that is gone is made again.
    send(&store, &name, "again", "g7").await;
    let received = receive(&store, &name).await.unwrap();
    assert_eq!(received.len(), 2);
    let acks = received.into_iter().chain(held).map(|one| Settle::ack(one.receipt)).collect();
    for settled in store.settle(&name, acks).await.unwrap() {
        settled.unwrap();
    }
    store.quiet().await;
    let left: i64 = connection.fetch_one("SELECT count(*) FROM hapax.q_group").await.unwrap().get(0);
    assert_eq!(left, 0);
}

fn quota(messages_max: u64) -> QueueConfig {
    QueueConfig { quota: Quota { messages_max: Some(messages_max), bytes_max: None }, ..QueueConfig::sqs() }
}

/// Sends messages; gives how many were accepted, and what the queue held when the first one was refused.
async fn fill(store: &PostgresStore, name: &QueueName, count: usize) -> (usize, Option<u64>) {
    let messages = (0..count).map(|_| NewMessage::new("x")).collect();
    let sent = store.send(name, messages).await.unwrap();
    let held = sent.iter().find_map(|sent| match sent {
        Err(SendError::QuotaExceeded { used, .. }) => Some(*used),
        _ => None,
    });
    (sent.iter().filter(|sent| sent.is_ok()).count(), held)
}

async fn a_quota_is_counted_only_when_the_queue_may_be_full(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, jobs) = (database.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, quota(6)).await.unwrap();
    assert_eq!(fill(&store, &jobs, 1).await, (1, None));
    // Who counts reads this table, too, and would wait.
    let mut other = database.connect().await;
    other.execute("BEGIN; LOCK TABLE hapax.q_parked IN ACCESS EXCLUSIVE MODE").await.unwrap();
    for _ in 0..2 {
        assert_eq!(fill(&store, &jobs, 2).await, (2, None));
    }
    other.execute("ROLLBACK").await.unwrap();
    assert_eq!(fill(&store, &jobs, 2).await, (1, Some(6)));
    // What is acked leaves room at once.
    let held = receive(&store, &jobs).await.unwrap();
    let acks = held.iter().take(2).map(|one| Settle::ack(one.receipt.clone())).collect();
    store.settle(&jobs, acks).await.unwrap();
    assert_eq!(fill(&store, &jobs, 3).await, (2, Some(6)));
    store.purge(&jobs).await.unwrap();
    assert_eq!(fill(&store, &jobs, 7).await, (6, Some(6)));
}

async fn a_quota_holds_for_several_servers_and_after_changes(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (a, b, jobs) = (database.open().await, database.open().await, QueueName::new("jobs").unwrap());
    a.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    // Sent before there was a quota.
    assert_eq!(fill(&a, &jobs, 2).await, (2, None));
    let mut revision = a.queue(&jobs).await.unwrap().revision;
    for max in [10, 20] {
        revision = a.set_queue(&jobs, quota(max), Some(revision)).await.unwrap();
        let mut all = JoinSet::new();
        for store in [&a, &b, &a, &b] {
            let (store, jobs) = (store.clone(), jobs.clone());
            all.spawn(async move {
                let mut accepted = 0;
                for _ in 0..5 {
                    accepted += fill(&store, &jobs, 1).await.0;
                }
                accepted
            });
        }
        let accepted: usize = all.join_all().await.into_iter().sum();
        assert_eq!(accepted, if max == 10 { 8 } else { 10 });
    }
    // A pause of the quota: what was sent meanwhile counts.
    revision = a.set_queue(&jobs, QueueConfig::sqs(), Some(revision)).await.unwrap();
    assert_eq!(fill(&b, &jobs, 3).await, (3, None));
    a.set_queue(&jobs, quota(24), Some(revision)).await.unwrap();
    assert_eq!(fill(&b, &jobs, 3).await, (1, Some(24)));
}

/// They come without a send, so what the sends have added up is not enough.
async fn dead_letters_and_redrives_count_against_quotas(server: &'static Server) {
    let database = Database::migrated(server).await;
    let store = database.open().await;
    let name = |name: &str| QueueName::new(name).unwrap();
    let (source, dead, target) = (name("source"), name("dead"), name("target"));
    store.create_queue(&dead, quota(4)).await.unwrap();
    store.create_queue(&target, quota(4)).await.unwrap();
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    store.create_queue(&source, QueueConfig { dead_letter, ..QueueConfig::sqs() }).await.unwrap();
    assert_eq!(fill(&store, &source, 3).await, (3, None));
    assert_eq!((fill(&store, &dead, 1).await, fill(&store, &target, 1).await), ((1, None), (1, None)));
    let reject = |held: Delivery| Settle::new(held.receipt, Settlement::Reject { reason: "no".into() });
    let held = receive(&store, &source).await.unwrap();
    assert_eq!(held.len(), 3);
    for settled in store.settle(&source, held.into_iter().map(reject).collect()).await.unwrap() {
        settled.unwrap();
    }
    assert_eq!(fill(&store, &dead, 1).await, (0, Some(4)));
    let redrive = RedriveRequest {
        from: dead,
        to: Some(target.clone()),
        filter: RedriveFilter::default(),
        per_second: None,
        by: "test".into(),
    };
    store.start_redrive(redrive).await.unwrap();
    let start = Instant::now();
    while store.stats(&target).await.unwrap().ready < 4 {
        assert!(start.elapsed() < Duration::from_mins(1), "the letters are moved");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(fill(&store, &target, 1).await, (0, Some(4)));
}
