//! Producers, consumers and claimants of several processes on a Cluster whose masters are killed, paused and replaced one after
//! the other, each change confirmed by the replicas. The checker is `hapax_conformance::attack`: nothing that was accepted is
//! lost, no message is acked twice, order holds in FIFO groups, one holder at a time has a key.
//!
//! `HAPAX_SEED=n` makes other choices, `HAPAX_LONG=1` injects twenty times as many faults.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::slots::{Move, is_master};
use common::{PATIENCE, options};
use hapax_conformance::attack::{LedgerAttack, QueueAttack, Random, seed};
use hapax_core::{Ledger, QueueAdmin};
use hapax_faults::RedisCluster;
use hapax_redis::{Durability, Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_standard_queue_survives,
        a_fifo_queue_survives,
        a_ledger_survives,
        queues_survive_when_their_slots_move,
    ])
}

const PROCESSES: usize = 3;

fn faults() -> usize {
    if std::env::var_os("HAPAX_LONG").is_some() { 60 } else { 3 }
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// One fault of one master; another one takes its place.
fn trouble(cluster: &RedisCluster, random: &mut Random) {
    cluster.wait_until_whole().unwrap();
    let at = random.below(3) as usize;
    let (one, other) = (&cluster.nodes[at], &cluster.nodes[at + 3]);
    let (master, replica) = if is_master(one) { (one, other) } else { (other, one) };
    match random.below(3) {
        0 => {
            master.kill();
            wait_for("a replica takes over", || is_master(replica));
            master.run().unwrap();
        }
        1 => {
            master.pause();
            wait_for("a replica takes over", || is_master(replica));
            master.resume();
        }
        _ => {
            let mut asked: Option<Instant> = None;
            wait_for("a failover on request", || {
                if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(8)) {
                    asked = replica.cli(&["CLUSTER", "FAILOVER"]).is_ok().then(Instant::now);
                }
                is_master(replica)
            });
        }
    }
}

struct Site {
    cluster: RedisCluster,
    stores: Vec<RedisStore>,
}

impl Site {
    async fn start() -> Arc<Self> {
        let cluster = RedisCluster::start(&["cluster-node-timeout 1500"]).unwrap();
        let options = Options {
            durability: Durability::Replicated,
            operation_timeout: Duration::from_secs(2),
            replication_timeout: Duration::from_millis(500),
            ..options()
        };
        let mut stores = Vec::new();
        for _ in 0..PROCESSES {
            stores.push(RedisStore::open(&cluster.url(), options.clone()).await.unwrap());
        }
        Arc::new(Self { cluster, stores })
    }

    /// Injects faults, each after more work was done.
    async fn trouble(self: Arc<Self>, done: impl Fn() -> usize, trouble: fn(&RedisCluster, &mut Random)) {
        let mut random = Random::new(seed());
        for _ in 0..faults() {
            let (before, start) = (done(), Instant::now());
            while done() < before + 20 {
                assert!(start.elapsed() < PATIENCE, "nothing is done");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            let site = self.clone();
            random = tokio::task::spawn_blocking(move || {
                trouble(&site.cluster, &mut random);
                random
            })
            .await
            .unwrap();
        }
        self.cluster.wait_until_whole().unwrap();
    }
}

/// Moves the slot of the queue to another master.
fn move_slot(cluster: &RedisCluster, _: &mut Random) {
    cluster.wait_until_whole().unwrap();
    let slot = Move::begin(cluster, "*:q:orders*:info");
    assert!(slot.migrate_all() > 0);
    slot.end();
}

async fn queue(fifo: bool, trouble: fn(&RedisCluster, &mut Random)) {
    let site = Site::start().await;
    let stores = site.stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn QueueAdmin>);
    let attack = QueueAttack::begin(stores.collect(), "orders", fifo).await;
    site.clone().trouble(|| attack.accepted(), trouble).await;
    attack.end().await;
}

async fn a_standard_queue_survives() {
    queue(false, trouble).await;
}

async fn a_fifo_queue_survives() {
    queue(true, trouble).await;
}

async fn queues_survive_when_their_slots_move() {
    for fifo in [false, true] {
        queue(fifo, move_slot).await;
    }
}

async fn a_ledger_survives() {
    let site = Site::start().await;
    let stores = site.stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Ledger>);
    let attack = LedgerAttack::begin(stores.collect());
    site.clone().trouble(|| attack.keys(), trouble).await;
    attack.end().await;
}
