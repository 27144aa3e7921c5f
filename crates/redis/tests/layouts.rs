//! What another version of Hapax has written in another form is refused, and not read as damaged or empty.

mod common;

use common::slots::Move;
use common::{ask, granted, options, url};
use hapax_core::{Fence, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _};
use hapax_faults::{RedisCluster, RedisServer};
use hapax_redis::{Durability, Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        another_layout_is_refused,
        queues_without_a_layout_are_refused,
        a_ledger_without_a_layout_is_not,
        every_first_write_says_its_layout,
        each_node_of_a_cluster_is_asked,
        a_shard_that_is_on_its_way_is_not_refused,
    ])
}

fn jobs() -> QueueName {
    "jobs".parse().unwrap()
}

/// The keys of a store with the few numbers of its shards.
fn metas(server: &RedisServer, options: &Options) -> Vec<String> {
    let found = server.cli(&["--scan", "--pattern", &format!("{}:*:meta", options.prefix)]).unwrap();
    found.lines().filter(|key| !key.is_empty()).map(str::to_owned).collect()
}

/// The code of the refusal, and what it says; `None`: the store was opened.
async fn refused(url: &str, options: &Options) -> Option<(&'static str, String)> {
    let error = RedisStore::open(url, options.clone()).await.err()?;
    Some((error.code(), error.to_string()))
}

async fn with_a_queue(url: &str, options: &Options) {
    let store = RedisStore::open(url, options.clone()).await.unwrap();
    store.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    store.send(&jobs(), vec![NewMessage::new("job")]).await.unwrap();
    store.close().await.unwrap();
}

async fn another_layout_is_refused() {
    let (server, options) = (common::shared(), options());
    let url = url(server);
    with_a_queue(&url, &options).await;
    let meta = metas(server, &options).remove(0);
    assert_eq!(server.cli(&["HGET", &meta, "layout"]).unwrap(), "1");
    server.cli(&["HSET", &meta, "layout", "2"]).unwrap();
    let before = server.cli(&["HGETALL", &meta]).unwrap();
    let (code, said) = refused(&url, &options).await.expect("it is refused");
    assert_eq!(code, "redis-layout");
    assert!(said.contains("has layout 2") && said.ends_with("reads layout 1"), "{said}");
    let examined = RedisStore::examine_servers(&url, options.clone()).await.unwrap();
    let codes: Vec<_> = examined.findings.iter().map(|finding| finding.code.to_string()).collect();
    assert_eq!(codes, ["redis-layout"]);
    assert_eq!(server.cli(&["HGETALL", &meta]).unwrap(), before, "nothing was written");
    server.cli(&["HSET", &meta, "layout", "1"]).unwrap();
    assert_eq!(refused(&url, &options).await, None);
    assert!(RedisStore::examine_servers(&url, options).await.unwrap().findings.is_empty());
}

async fn queues_without_a_layout_are_refused() {
    let (server, options) = (common::shared(), options());
    with_a_queue(&url(server), &options).await;
    let meta = metas(server, &options).remove(0);
    server.cli(&["HDEL", &meta, "layout"]).unwrap();
    let (code, said) = refused(&url(server), &options).await.expect("it is refused");
    assert_eq!(code, "redis-layout");
    assert!(said.contains("without a number"), "{said}");
}

async fn a_ledger_without_a_layout_is_not() {
    let (server, options) = (common::shared(), options());
    let store = RedisStore::open(&url(server), options.clone()).await.unwrap();
    granted(&store, ask("key", "ann")).await;
    let meta = metas(server, &options).remove(0);
    server.cli(&["HDEL", &meta, "layout"]).unwrap();
    assert_eq!(refused(&url(server), &options).await, None);
}

async fn every_first_write_says_its_layout() {
    let (server, options) = (common::shared(), options());
    let store = RedisStore::open(&url(server), options.clone()).await.unwrap();
    granted(&store, ask("key", "ann")).await;
    store.create_queue(&jobs(), QueueConfig::sqs()).await.unwrap();
    let marked =
        || metas(server, &options).iter().all(|meta| server.cli(&["HGET", meta, "layout"]).unwrap() == "1");
    assert!(metas(server, &options).len() == 2 && marked(), "a shard of each");
    store.transfer().unwrap().raise_fence(Fence(7)).await.unwrap();
    assert!(metas(server, &options).len() > 2 && marked(), "all shards");
}

async fn each_node_of_a_cluster_is_asked() {
    let cluster = common::shared_cluster();
    let options = Options { durability: Durability::Replicated, ..options() };
    let store = RedisStore::open(&cluster.url(), options.clone()).await.unwrap();
    store.transfer().unwrap().raise_fence(Fence(7)).await.unwrap();
    assert_eq!(refused(&cluster.url(), &options).await, None);
    for node in &cluster.nodes[..3] {
        let meta = metas(node, &options).remove(0);
        node.cli(&["HSET", &meta, "layout", "2"]).unwrap();
        let (code, said) = refused(&cluster.url(), &options).await.expect("it is refused");
        assert_eq!(code, "redis-layout");
        assert!(said.contains(&node.address()), "{said}");
        node.cli(&["HSET", &meta, "layout", "1"]).unwrap();
    }
}

/// The number of the layout has moved, the list of queues has not.
async fn a_shard_that_is_on_its_way_is_not_refused() {
    let cluster = RedisCluster::start(&["min-replicas-to-write 1"]).unwrap();
    let options = Options { durability: Durability::Replicated, ..options() };
    with_a_queue(&cluster.url(), &options).await;
    // Shards of the ledger have such a key, too; the queue's has a list of queues.
    let moved = Move::begin(&cluster, &format!("{}:*:queues", options.prefix));
    let (metas, others): (Vec<String>, Vec<String>) =
        moved.keys().into_iter().partition(|key| key.ends_with(":meta"));
    assert!(metas.len() == 1 && !others.is_empty(), "{metas:?}, {others:?}");
    moved.migrate(&metas);
    assert_eq!(refused(&cluster.url(), &options).await, None, "on its way");
    moved.migrate_all();
    moved.end();
    assert_eq!(refused(&cluster.url(), &options).await, None, "it has moved");
}
