//! A master with replicas, with Sentinel or without: the store finds the master, and another one after a failover, what replicas
//! have confirmed is there, and what one of them has not confirmed is not said to be.

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, claim_patiently, effect, entry_patiently, id, options, patiently};
use hapax_core::{
    Claim, ClaimError, EntryState, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, Receive, StoreError,
};
use hapax_faults::{RedisSentinels, RedisServer};
use hapax_redis::{Durability, Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_new_master_has_what_was_confirmed,
        a_name_that_no_sentinel_knows_is_refused,
        each_of_the_replicas_has_to_confirm,
        a_replica_that_has_left_is_still_waited_for,
    ])
}

async fn a_new_master_has_what_was_confirmed() {
    let all = RedisSentinels::start(&[], Duration::from_secs(1)).unwrap();
    let options = Options { durability: Durability::Replicated, ..options() };
    let store = RedisStore::open(&all.url(), options).await.unwrap();
    assert!(store.ledger_capabilities().fence);
    let jobs: QueueName = "jobs".parse().unwrap();
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let sent = patiently(|| store.send(&jobs, vec![NewMessage::new("job")])).await.remove(0).unwrap();
    let before = effect(&store, "before").await;
    let first = all.master().expect("there is a master");
    all.nodes[first].kill();
    let start = Instant::now();
    while all.master().is_none_or(|now| now == first) {
        assert!(start.elapsed() < PATIENCE, "the Sentinels have chosen no other master");
        std::thread::sleep(Duration::from_millis(50));
    }
    let entry = entry_patiently(&store, id("before")).await.expect("what was confirmed is there");
    assert_eq!((entry.state, entry.fence), (EntryState::Completed, before.fence));
    let got = patiently(|| store.receive(&jobs, Receive::up_to(10))).await;
    assert_eq!(got.iter().map(|delivery| delivery.id).collect::<Vec<_>>(), [sent.id]);
    // The new master has one replica that must confirm.
    let after = effect(&store, "after").await;
    assert!(after.fence > before.fence);
    let Claim::Completed { .. } = claim_patiently(&store, common::ask("before", "bob")).await else {
        panic!("it would run again")
    };
}

async fn a_name_that_no_sentinel_knows_is_refused() {
    let all = RedisSentinels::start(&[], Duration::from_mins(1)).unwrap();
    let wrong = all.url().replace("/shop", "/other");
    let error = RedisStore::open(&wrong, options()).await.err().expect("it is refused");
    assert!(error.to_string().contains("other"), "{error}");
}

/// A master, and servers that follow it.
fn with_replicas(count: usize) -> (RedisServer, Vec<RedisServer>) {
    let master = RedisServer::start(&["repl-diskless-sync-delay 0"]).unwrap();
    let (host, port) = master.address().rsplit_once(':').map(|(h, p)| (h.to_owned(), p.to_owned())).unwrap();
    let replicas: Vec<_> = (0..count).map(|_| RedisServer::start(&[]).unwrap()).collect();
    for replica in &replicas {
        replica.cli(&["REPLICAOF", &host, &port]).unwrap();
        wait_until("a replica follows", || {
            replica.cli(&["INFO", "replication"]).unwrap().contains("master_link_status:up")
        });
    }
    wait_until("the master knows them", || {
        let online = |text: String| text.matches("state=online").count() == count;
        online(master.cli(&["INFO", "replication"]).unwrap())
    });
    (master, replicas)
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// A store at `replicated`, which does not wait for long.
async fn replicated(master: &RedisServer) -> RedisStore {
    let replication_timeout = Duration::from_millis(300);
    let options = Options { durability: Durability::Replicated, replication_timeout, ..options() };
    RedisStore::open(&common::url(master), options).await.unwrap()
}

/// What is done is not confirmed: whether it will last is not known.
#[track_caller]
fn is_unconfirmed(claimed: Result<Claim, ClaimError>) {
    match claimed {
        Err(ClaimError::Store(StoreError::OutcomeUnknown(_))) => {}
        other => panic!("{other:?}"),
    }
}

async fn each_of_the_replicas_has_to_confirm() {
    let (master, replicas) = with_replicas(2);
    let store = replicated(&master).await;
    effect(&store, "before").await;
    for paused in &replicas {
        paused.pause();
        is_unconfirmed(common::claim(&store, common::ask("meanwhile", "ann")).await);
        paused.resume();
        // The same owner asks again, and now all have it.
        let again = claim_patiently(&store, common::ask("meanwhile", "ann")).await;
        assert!(matches!(again, Claim::Granted(_)), "{again:?}");
    }
}

/// It may come back and be promoted.
async fn a_replica_that_has_left_is_still_waited_for() {
    let (master, replicas) = with_replicas(1);
    let store = replicated(&master).await;
    effect(&store, "before").await;
    replicas[0].cli(&["REPLICAOF", "NO", "ONE"]).unwrap();
    wait_until("it has left", || {
        master.cli(&["INFO", "replication"]).unwrap().contains("connected_slaves:0")
    });
    // What the store knows about its servers is looked up again, whatever the answer is then.
    store.status().await.ok();
    is_unconfirmed(common::claim(&store, common::ask("alone", "ann")).await);
}
