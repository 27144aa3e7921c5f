//! What is counted in queues: leases by the time, the limit of messages in flight, and groups without messages.

mod common;

use common::{Database, Server};
use hapax_core::policy::IN_FLIGHT_MAX;
use hapax_core::{
    DedupId, Delivery, GroupId, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, Settle, StoreError,
};
use hapax_postgres::PostgresStore;
use sqlx::{Executor as _, Row as _};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_lease_that_has_ended_is_not_counted,
        no_more_than_the_limit_are_in_flight,
        groups_without_messages_are_removed,
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
