//! A process that waits hears at once what another one does, and finds it by itself while it hears nothing.

mod common;

use std::time::{Duration, Instant};

use common::{DURABLE, PATIENCE, ask, completed, granted, options, url};
use hapax_core::{
    Claim, ClaimRequest, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive, Settle,
};
use hapax_faults::RedisServer;
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_send_of_another_process_is_heard,
        the_end_of_another_process_s_claim_is_heard,
        a_broken_subscription_is_made_again_and_nothing_is_missed_meanwhile,
        on_a_cluster_all_nodes_are_heard,
    ])
}

fn jobs() -> QueueName {
    "jobs".parse().unwrap()
}

async fn two(url: &str, options: Options) -> (RedisStore, RedisStore) {
    let one = RedisStore::open(url, options.clone()).await.unwrap();
    (one, RedisStore::open(url, options).await.unwrap())
}

/// Waits until the first store hears what the second one sends to this queue.
async fn hears(one: &RedisStore, two: &RedisStore, queue: &QueueName) {
    let (before, start) = (one.hints_heard(), Instant::now());
    while one.hints_heard() == before {
        assert!(start.elapsed() < PATIENCE, "nothing is heard");
        two.send(queue, vec![NewMessage::new("job")]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn drained(store: &RedisStore, queue: &QueueName) -> usize {
    let mut count = 0;
    loop {
        let got = store.receive(queue, Receive::up_to(1000)).await.unwrap();
        if got.is_empty() {
            return count;
        }
        count += got.len();
        let acks = got.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
        store.settle(queue, acks).await.unwrap();
    }
}

async fn a_send_of_another_process_is_heard() {
    let (one, two) = two(&url(common::shared()), options()).await;
    one.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    hears(&one, &two, &jobs()).await;
    assert!(drained(&one, &jobs()).await > 0);
    // What a process does itself is heard too, and by the other one.
    hears(&two, &one, &jobs()).await;
}

async fn the_end_of_another_process_s_claim_is_heard() {
    let (one, two) = two(&url(common::shared()), options()).await;
    one.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    hears(&one, &two, &jobs()).await;
    let grant = granted(&two, ask("key", "ann")).await;
    let waits = {
        let one = one.clone();
        tokio::spawn(async move {
            let request = ClaimRequest { wait_ms: 20_000, ..ask("key", "bob") };
            common::claim(&one, request).await
        })
    };
    let before = one.hints_heard();
    two.end(vec![completed("key", &grant, "done")]).await.unwrap().remove(0).unwrap();
    let Claim::Completed { .. } = waits.await.unwrap().unwrap() else { panic!("not completed") };
    let start = Instant::now();
    while one.hints_heard() == before {
        assert!(start.elapsed() < PATIENCE, "the end of the claim is not heard");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn a_broken_subscription_is_made_again_and_nothing_is_missed_meanwhile() {
    let server = RedisServer::start(DURABLE).unwrap();
    let (one, two) = two(&url(&server), options()).await;
    one.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    hears(&one, &two, &jobs()).await;
    drained(&one, &jobs()).await;
    for _ in 0..3 {
        let waits = {
            let one = one.clone();
            let receive = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
            tokio::spawn(async move { one.receive(&jobs(), receive).await })
        };
        server.cli(&["CLIENT", "KILL", "TYPE", "pubsub"]).unwrap();
        two.send(&jobs(), vec![NewMessage::new("job")]).await.unwrap();
        let got = waits.await.unwrap().unwrap();
        assert_eq!(got.len(), 1, "it is found without a hint");
        one.settle(&jobs(), vec![Settle::ack(got[0].receipt.clone())]).await.unwrap();
        hears(&one, &two, &jobs()).await;
        drained(&one, &jobs()).await;
    }
}

async fn on_a_cluster_all_nodes_are_heard() {
    let options = Options { durability: hapax_redis::Durability::Replicated, ..options() };
    let (one, two) = two(&common::shared_cluster().url(), options).await;
    for n in 0..12 {
        let queue: QueueName = format!("jobs-{n}").parse().unwrap();
        one.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
        hears(&one, &two, &queue).await;
    }
}
