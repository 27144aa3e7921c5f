//! The counters of many queues are asked for together: few round trips, however many queues there are.

mod common;

use std::collections::BTreeMap;

use common::{DURABLE, options, url};
use hapax_core::{
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStats, QueueStore as _, StoreError,
};
use hapax_faults::{Action, FaultProxy, Match, Protocol, RedisServer};
use hapax_redis::{Durability, Options, RedisStore};

/// Asked for one by one, each would be a read of the server, or two. Together they are some ten for each hundred; the background
/// work adds as many each second.
const QUEUES: u64 = 400;

fn main() -> std::process::ExitCode {
    common::main(tests![
        one_server_reads_few_requests,
        the_nodes_of_a_cluster_read_few_requests,
        an_outage_in_the_middle_of_many_queues_hides_none
    ])
}

/// How often these servers have read from a connection. What is sent together is read in pieces of 16 KiB.
fn reads(servers: &[&RedisServer]) -> u64 {
    let of = |server: &&RedisServer| {
        let info = server.cli(&["INFO", "stats"]).unwrap();
        let line = info.lines().find_map(|line| line.trim().strip_prefix("total_reads_processed:"));
        line.unwrap_or_else(|| panic!("{info}")).parse::<u64>().unwrap()
    };
    servers.iter().map(of).sum()
}

/// Makes queues with zero to two messages that wait in each.
async fn fill(store: &RedisStore) -> BTreeMap<QueueName, u64> {
    let mut expected: BTreeMap<QueueName, u64> = BTreeMap::new();
    for number in 0..QUEUES {
        let name = QueueName::new(format!("queue-{number}")).unwrap();
        store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
        let ready = number % 3;
        let messages = (0..ready).map(|_| NewMessage::new("a")).collect();
        store.send(&name, messages).await.unwrap();
        expected.insert(name, ready);
    }
    expected
}

async fn few_requests(url: &str, options: Options, servers: &[&RedisServer]) {
    let first = RedisStore::open(url, options.clone()).await.unwrap();
    let expected = fill(&first).await;
    first.close().await.unwrap();

    let store = RedisStore::open(url, options).await.unwrap();
    let names: Vec<QueueName> = expected.keys().cloned().collect();
    // The settings are new to this process, then known to it.
    for known in [false, true] {
        let before = reads(servers);
        let all: Vec<Option<QueueStats>> = store.stats_of(&names).await.unwrap();
        let requests = reads(servers) - before;
        assert!(requests < QUEUES, "known: {known}; {requests} reads");
        let ready: Vec<u64> = all.iter().map(|stats| stats.unwrap().ready).collect();
        assert_eq!(ready, expected.values().copied().collect::<Vec<_>>());
    }
    store.close().await.unwrap();
}

async fn one_server_reads_few_requests() {
    let server = RedisServer::start(DURABLE).unwrap();
    few_requests(&url(&server), options(), &[&server]).await;
}

async fn the_nodes_of_a_cluster_read_few_requests() {
    let cluster = common::shared_cluster();
    let options = Options { durability: Durability::Replicated, ..options() };
    let masters: Vec<&RedisServer> = cluster.nodes[..3].iter().collect();
    few_requests(&cluster.url(), options, &masters).await;
}

/// The connection breaks after this many of the 400 queues were counted, a hundred in each step, and no other can be made for a
/// while.
async fn an_outage_in_the_middle_of_many_queues_hides_none() {
    let server = RedisServer::start(DURABLE).unwrap();
    let proxy = FaultProxy::start(server.address().parse().unwrap(), Protocol::Redis).unwrap();
    let store = RedisStore::open(&format!("redis://{}", proxy.address()), options()).await.unwrap();
    let expected = fill(&store).await;
    let names: Vec<QueueName> = expected.keys().cloned().collect();
    for counted in [0, 50, 100, 150, 399] {
        let cut = proxy.inject(Match::answer_to("EVALSHA"), Action::Cut).after(counted);
        let broken = store.stats_of(&names).await;
        cut.remove();
        match broken {
            Err(StoreError::Unavailable(_)) => {}
            // The background work may have met the fault instead.
            Ok(all) => assert!(all.iter().all(Option::is_some), "after {counted}"),
            Err(error) => panic!("after {counted}: {error}"),
        }
        let all = common::patiently(|| store.stats_of(&names)).await;
        let ready: Vec<u64> = all.iter().map(|stats| stats.unwrap().ready).collect();
        assert_eq!(ready, expected.values().copied().collect::<Vec<_>>(), "after {counted}");
    }
    store.close().await.unwrap();
}
