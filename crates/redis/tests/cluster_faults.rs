//! A Cluster with one node at fault, each change confirmed by the replicas: nothing is lost, no effect happens twice, and what
//! is not known is not called known. Each test starts Clusters of its own; they run with `HAPAX_LONG=1`.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{
    ask, claim, claim_patiently, completed, effect, end_patiently, entry_patiently, granted, id, options,
};
use hapax_core::{Claim, ClaimError, ClaimRequest, EntryId, EntryState, Grant, Ledger as _, StoreError};
use hapax_faults::RedisCluster;
use hapax_redis::{Durability, Options, RedisStore};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::long(tests![
        what_a_paused_replica_did_not_confirm_stays_unknown,
        failovers_on_request_lose_and_repeat_nothing,
        a_killed_master_loses_and_repeats_nothing,
        a_master_that_was_paused_through_a_failover_grants_nothing,
        a_slot_that_moves_keeps_its_entries,
        a_failover_forgets_what_the_level_says_and_nothing_else,
    ])
}

/// A replica takes over after about this time, in milliseconds.
const NODE_TIMEOUT: &str = "cluster-node-timeout 1500";

fn replicated() -> Options {
    Options {
        durability: Durability::Replicated,
        operation_timeout: Duration::from_secs(2),
        replication_timeout: Duration::from_millis(500),
        ..options()
    }
}

/// A claim in a scope of its own, so that the keys of a test are spread over all nodes.
fn spread(n: usize, owner: &str) -> ClaimRequest {
    let id = EntryId::new(format!("http/{n}").parse().unwrap(), "key".parse().unwrap());
    ClaimRequest { id, ..ask("key", owner) }
}

async fn complete(store: &RedisStore, n: usize, grant: &Grant) {
    let end = hapax_core::EndClaim { id: spread(n, "x").id, ..completed("key", grant, &n.to_string()) };
    let ended = end_patiently(store, end).await;
    assert_eq!(ended, Ok(()), "{n}");
}

/// Claims and completes keys of all shards until `over`; returns how many.
async fn load(
    store: RedisStore,
    worker: usize,
    over: Arc<std::sync::atomic::AtomicBool>,
) -> Vec<(usize, Grant)> {
    let mut done = Vec::new();
    while !over.load(std::sync::atomic::Ordering::SeqCst) {
        let n = done.len() * 10 + worker;
        match claim_patiently(&store, spread(n, "ann")).await {
            Claim::Granted(grant) => {
                complete(&store, n, &grant).await;
                done.push((n, grant));
            }
            other => panic!("{n}: {other:?}"),
        }
    }
    done
}

/// Runs a fault under load, then checks that each key that was completed is there, once.
async fn under_load(cluster: &Arc<RedisCluster>, fault: impl FnOnce(&RedisCluster) + Send + 'static) {
    let store = RedisStore::open(&cluster.url(), replicated()).await.unwrap();
    let over = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let mut all = JoinSet::new();
    for worker in 0..4 {
        all.spawn(load(store.clone(), worker, over.clone()));
    }
    let broken = cluster.clone();
    tokio::task::spawn_blocking(move || fault(&broken)).await.unwrap();
    // Each shard has to be served again before the load ends.
    for n in 100_000..100_020 {
        let Claim::Granted(grant) = claim_patiently(&store, spread(n, "ann")).await else { panic!("{n}") };
        complete(&store, n, &grant).await;
    }
    over.store(true, std::sync::atomic::Ordering::SeqCst);
    let done: Vec<(usize, Grant)> = all.join_all().await.into_iter().flatten().collect();
    assert!(done.len() > 4, "something was done: {}", done.len());
    for (n, grant) in &done {
        let entry = entry_patiently(&store, spread(*n, "x").id).await;
        let entry = entry.unwrap_or_else(|| panic!("{n} was lost"));
        assert_eq!((entry.state, entry.takeovers), (EntryState::Completed, 0), "{n}");
        assert_eq!(entry.fence, grant.fence, "{n} was granted once");
        match claim_patiently(&store, spread(*n, "bob")).await {
            Claim::Completed { .. } => {}
            other => panic!("{n} would run again: {other:?}"),
        }
    }
}

async fn what_a_paused_replica_did_not_confirm_stays_unknown() {
    // Long enough that the paused replicas are not declared failed.
    let cluster = RedisCluster::start(&["cluster-node-timeout 120000"]).unwrap();
    let options = replicated();
    let store = RedisStore::open(&cluster.url(), options.clone()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    cluster.nodes[3..].iter().for_each(hapax_faults::RedisServer::pause);
    let is_unknown = |answer: &Result<Claim, ClaimError>| {
        matches!(answer, Err(ClaimError::Store(StoreError::OutcomeUnknown(_))))
    };
    let new = claim(&store, ask("new", "ann")).await;
    assert!(is_unknown(&new), "{new:?}");
    let end = store.end(vec![completed("held", &held, "done")]).await;
    assert!(matches!(end, Err(StoreError::OutcomeUnknown(_))), "{end:?}");
    // Asked again on connections that have written nothing: WAIT alone would confirm at once.
    let other = RedisStore::open(&cluster.url(), options).await.unwrap();
    let again = claim(&other, ask("new", "ann")).await;
    assert!(is_unknown(&again), "the same owner is not told that it holds the key: {again:?}");
    let end = other.end(vec![completed("held", &held, "done")]).await;
    assert!(
        matches!(end, Err(StoreError::OutcomeUnknown(_))),
        "a repeated completion is not confirmed: {end:?}"
    );
    let replay = claim(&other, ask("held", "bob")).await;
    assert!(is_unknown(&replay), "an outcome that may be lost is not replayed: {replay:?}");
    let entry = other.entry(&id("held")).await;
    assert!(matches!(entry, Err(StoreError::OutcomeUnknown(_))), "{entry:?}");
    cluster.nodes[3..].iter().for_each(hapax_faults::RedisServer::resume);
    let Claim::Granted(_) = claim_patiently(&other, ask("new", "ann")).await else { panic!("not granted") };
    let ended = end_patiently(&other, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
}

async fn failovers_on_request_lose_and_repeat_nothing() {
    let cluster = Arc::new(RedisCluster::start(&["cluster-node-timeout 15000"]).unwrap());
    let fail_over = |cluster: &RedisCluster| {
        for replica in &cluster.nodes[3..] {
            replica.cli(&["CLUSTER", "FAILOVER"]).unwrap();
            while !replica.cli(&["ROLE"]).unwrap_or_default().starts_with("master") {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        cluster.wait_until_whole().unwrap();
    };
    under_load(&cluster, fail_over).await;
}

async fn a_killed_master_loses_and_repeats_nothing() {
    let cluster = Arc::new(RedisCluster::start(&[NODE_TIMEOUT]).unwrap());
    let kill = |cluster: &RedisCluster| {
        cluster.nodes[0].kill();
        while !cluster.nodes[3].cli(&["ROLE"]).unwrap_or_default().starts_with("master") {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    under_load(&cluster, kill).await;
}

async fn a_master_that_was_paused_through_a_failover_grants_nothing() {
    let cluster = RedisCluster::start(&[NODE_TIMEOUT]).unwrap();
    let options = replicated();
    let (store, other) = (
        RedisStore::open(&cluster.url(), options.clone()).await.unwrap(),
        RedisStore::open(&cluster.url(), options).await.unwrap(),
    );
    let mut before = Vec::new();
    for n in 0..12 {
        let Claim::Granted(grant) = claim_patiently(&store, spread(n, "ann")).await else { panic!("{n}") };
        before.push(grant);
    }
    cluster.nodes[0].pause();
    while !cluster.nodes[3].cli(&["ROLE"]).unwrap_or_default().starts_with("master") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The new master takes completions while the old one still believes that the claims are held.
    for (n, grant) in before.iter().enumerate() {
        complete(&other, n, grant).await;
    }
    // Claims that reach the old master before it learns what happened are not confirmed by anyone.
    let mut late = JoinSet::new();
    for n in 0..12 {
        let store = store.clone();
        late.spawn(async move { (n, claim_patiently(&store, spread(n, "bob")).await) });
    }
    cluster.nodes[0].resume();
    for (n, claim) in late.join_all().await {
        let Claim::Completed { .. } = claim else { panic!("{n}: {claim:?}") };
    }
}

async fn a_slot_that_moves_keeps_its_entries() {
    let cluster = RedisCluster::start(&["cluster-node-timeout 15000"]).unwrap();
    let store = RedisStore::open(&cluster.url(), replicated()).await.unwrap();
    let held = granted(&store, ask("held", "ann")).await;
    effect(&store, "done").await;
    let (from, keys) = cluster.nodes[..3]
        .iter()
        .find_map(|node| {
            let keys = node.cli(&["--scan", "--pattern", "*:meta"]).unwrap();
            (!keys.is_empty()).then_some((node, keys))
        })
        .expect("a node has the entries");
    let slot = from.cli(&["CLUSTER", "KEYSLOT", keys.lines().next().unwrap()]).unwrap();
    let to = cluster.nodes[..3].iter().find(|node| node.address() != from.address()).unwrap();
    let (from_id, to_id) = (from.cli(&["CLUSTER", "MYID"]).unwrap(), to.cli(&["CLUSTER", "MYID"]).unwrap());
    to.cli(&["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id]).unwrap();
    from.cli(&["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id]).unwrap();
    // While keys are on both nodes, a script that needs several of them is told to try again: that is not an outcome.
    let all = from.cli(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]).unwrap();
    let mut moved: Vec<&str> = all.lines().collect();
    assert!(moved.len() > 3, "{all}");
    let port = to.address().split_once(':').unwrap().1.to_owned();
    let migrate = |keys: &[&str]| {
        let command = [&["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"], keys].concat();
        from.cli(&command).unwrap();
    };
    let rest = moved.split_off(2);
    migrate(&moved);
    let between = claim(&store, ask("held", "ann")).await;
    assert!(matches!(&between, Err(ClaimError::Store(StoreError::Unavailable(_)))), "{between:?}");
    migrate(&rest);
    // All keys are at the new node, which is not the owner yet: it has to be asked out of turn.
    let Claim::Granted(again) = claim_patiently(&store, ask("held", "ann")).await else { panic!("lost") };
    assert_eq!((&again.token, again.fence), (&held.token, held.fence));
    for node in [to, from] {
        node.cli(&["CLUSTER", "SETSLOT", &slot, "NODE", &to_id]).unwrap();
    }
    let ended = end_patiently(&store, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
    let Claim::Completed { .. } = claim_patiently(&store, ask("done", "bob")).await else { panic!("lost") };
}

/// The replica is away while claims are made, and then takes over from a master that is lost: two nodes at fault.
async fn a_failover_forgets_what_the_level_says_and_nothing_else() {
    const COUNT: usize = 20;
    let cluster =
        RedisCluster::start(&["appendonly yes", "appendfsync always", "cluster-node-timeout 120000"])
            .unwrap();
    let options = replicated();
    let safe = RedisStore::open(&cluster.url(), options.clone()).await.unwrap();
    let local = Options { durability: Durability::Local, ..options };
    let fast = RedisStore::open(&cluster.url(), local).await.unwrap();
    assert!(!fast.ledger_capabilities().fence, "the level says that a failover may repeat fences");
    assert!(safe.ledger_capabilities().fence);
    let before = effect(&safe, "before").await;
    let has_entries =
        |node: &hapax_faults::RedisServer| !node.cli(&["--scan", "--pattern", "*:meta"]).unwrap().is_empty();
    let at = cluster.nodes[..3].iter().position(has_entries).expect("a node has the entries");
    let (master, replica) = (&cluster.nodes[at], &cluster.nodes[at + 3]);
    replica.kill();
    let mut last = before.fence;
    for n in 0..COUNT {
        last = effect(&fast, &format!("local-{n}")).await.fence;
    }
    for n in 0..2 {
        let unknown = claim(&safe, ask(&format!("safe-{n}"), "ann")).await;
        assert!(
            matches!(unknown, Err(ClaimError::Store(StoreError::OutcomeUnknown(_)))),
            "nothing is confirmed without the replica: {unknown:?}"
        );
    }
    master.kill();
    replica.run().unwrap();
    // The others may take a moment to see it again.
    while replica.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]).is_err() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let entry = entry_patiently(&fast, id("before")).await.expect("what was confirmed is there");
    assert_eq!((entry.state, entry.fence), (EntryState::Completed, before.fence));
    let mut forgotten = 0;
    for n in 0..COUNT {
        forgotten += usize::from(entry_patiently(&fast, id(&format!("local-{n}"))).await.is_none());
    }
    assert_eq!(forgotten, COUNT, "`local` does not wait for replicas");
    let Claim::Granted(next) = claim_patiently(&fast, ask("next", "ann")).await else {
        panic!("not granted")
    };
    assert!(next.fence > last, "the clock keeps fences growing, as long as the clocks of the nodes agree");
}
