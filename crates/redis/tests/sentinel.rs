//! A master with replicas behind Sentinel: the store finds the master, and another one after a failover, and what replicas have
//! confirmed is there.

mod common;

use std::time::{Duration, Instant};

use common::{PATIENCE, claim_patiently, effect, entry_patiently, id, options, patiently};
use hapax_core::{
    Claim, EntryState, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
    Receive,
};
use hapax_faults::RedisSentinels;
use hapax_redis::{Durability, Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![a_new_master_has_what_was_confirmed, a_name_that_no_sentinel_knows_is_refused])
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
