//! A Cluster with one node at fault, each change confirmed by the replicas: nothing is lost, no effect happens twice, and what
//! is not known is not called known. Each test starts Clusters of its own.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::slots::{Move, is_master};
use common::{
    PATIENCE, ask, claim, claim_patiently, completed, effect, end_patiently, entry_patiently,
    granted_patiently, id, options, patiently,
};
use hapax_core::{
    AdminError, Claim, ClaimError, ClaimRequest, DocumentError, DocumentName, Documents as _, EntryId,
    EntryState, ExpectedRevision, Grant, Json, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig,
    QueueName, QueueStore as _, Receive, Settle, StoreError,
};
use hapax_faults::{RedisCluster, RedisServer};
use hapax_redis::{Durability, Options, RedisStore};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        what_a_paused_replica_did_not_confirm_stays_unknown,
        the_same_for_queues_and_documents,
        failovers_on_request_lose_and_repeat_nothing,
        a_killed_master_loses_and_repeats_nothing,
        a_master_that_was_paused_through_a_failover_grants_nothing,
        a_master_that_was_alone_and_then_replaced_grants_nothing,
        a_master_whose_replica_returns_grants_nothing_alone,
        a_slot_that_moves_keeps_its_entries,
        a_failover_forgets_what_the_level_says_and_nothing_else,
        a_node_that_is_named_by_its_host_confirms_nothing_alone,
        each_failover_gives_a_full_lease,
        counters_of_many_queues_are_right_through_a_failover,
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

/// Returns when this holds, and fails with what each node says about the others if it never does.
fn wait_for(cluster: &RedisCluster, what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > PATIENCE {
            let views = cluster.nodes.iter().map(|node| node.cli(&["CLUSTER", "NODES"]));
            let views: Vec<String> = views.map(|view| view.unwrap_or_else(|error| error)).collect();
            panic!("{what}: not in time. The nodes say:\n{}", views.join("\n\n"));
        }
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn wait_for_master(cluster: &RedisCluster, at: usize) {
    wait_for(cluster, "a replica takes over", || is_master(&cluster.nodes[at]));
}

/// Makes a replica a master. A node gives up after five seconds if it has no answers by then, so it is asked again.
fn fail_over(cluster: &RedisCluster, at: usize) {
    let mut asked: Option<Instant> = None;
    wait_for(cluster, "a failover on request", || {
        if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(8)) {
            // An error is no reason to stop: the node may be a master already, or not know its own yet.
            asked = cluster.nodes[at].cli(&["CLUSTER", "FAILOVER"]).is_ok().then(Instant::now);
        }
        // The other one of the pair knows it, too.
        is_master(&cluster.nodes[at]) && !is_master(&cluster.nodes[(at + 3) % 6])
    });
    cluster.wait_until_whole().unwrap();
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
    let (options, url) = (replicated(), cluster.url());
    let store = RedisStore::open(&url, options.clone()).await.unwrap();
    let held = granted_patiently(&store, ask("held", "ann")).await;
    cluster.nodes[3..].iter().for_each(RedisServer::pause);
    let is_unknown = |answer: &Result<Claim, ClaimError>| {
        matches!(answer, Err(ClaimError::Store(StoreError::OutcomeUnknown(_))))
    };
    let new = claim(&store, ask("new", "ann")).await;
    assert!(is_unknown(&new), "{new:?}");
    let end = store.end(vec![completed("held", &held, "done")]).await;
    assert!(matches!(end, Err(StoreError::OutcomeUnknown(_))), "{end:?}");
    // Asked again on connections that have written nothing: WAIT alone would confirm at once. Each question opens its own.
    let fresh = || RedisStore::open(&url, options.clone());
    let other = fresh().await.unwrap();
    let again = claim(&other, ask("new", "ann")).await;
    assert!(is_unknown(&again), "the same owner is not told that it holds the key: {again:?}");
    let end = fresh().await.unwrap().end(vec![completed("held", &held, "done")]).await;
    assert!(
        matches!(end, Err(StoreError::OutcomeUnknown(_))),
        "a repeated completion is not confirmed: {end:?}"
    );
    let replay = claim(&fresh().await.unwrap(), ask("held", "bob")).await;
    assert!(is_unknown(&replay), "an outcome that may be lost is not replayed: {replay:?}");
    let entry = fresh().await.unwrap().entry(&id("held")).await;
    assert!(
        matches!(entry, Err(StoreError::Unavailable(_))),
        "a question is not answered with what may be lost: {entry:?}"
    );
    cluster.nodes[3..].iter().for_each(RedisServer::resume);
    let Claim::Granted(_) = claim_patiently(&other, ask("new", "ann")).await else { panic!("not granted") };
    let ended = end_patiently(&other, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
}

/// Each answer is asked for again by a process that has written nothing: it rests on a change that may be lost.
async fn the_same_for_queues_and_documents() {
    let cluster = RedisCluster::start(&["cluster-node-timeout 120000"]).unwrap();
    let (options, url) = (replicated(), cluster.url());
    let store = RedisStore::open(&url, options.clone()).await.unwrap();
    let [jobs, new]: [QueueName; 2] = ["jobs", "new"].map(|name| name.parse().unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    patiently(|| store.send(&jobs, vec![NewMessage::new("held")])).await;
    let held = patiently(|| store.receive(&jobs, Receive::up_to(1))).await.remove(0);
    let document: DocumentName = "plan".parse().unwrap();
    let value = Json::of("x").unwrap();
    cluster.nodes[3..].iter().for_each(RedisServer::pause);
    // Each question opens connections of its own.
    let fresh = async || RedisStore::open(&url, options.clone()).await.unwrap();
    for round in ["first", "again"] {
        let message = NewMessage::new("job").dedup("once".parse().unwrap());
        let sent = fresh().await.send(&jobs, vec![message]).await;
        assert!(matches!(sent, Err(StoreError::OutcomeUnknown(_))), "{round}: {sent:?}");
        let settled = fresh().await.settle(&jobs, vec![Settle::ack(held.receipt.clone())]).await;
        assert!(matches!(settled, Err(StoreError::OutcomeUnknown(_))), "{round}: {settled:?}");
        let stats = fresh().await.stats(&jobs).await;
        assert!(matches!(stats, Err(StoreError::Unavailable(_))), "{round}: {stats:?}");
        let made = fresh().await.create_queue(&new, QueueConfig::sqs()).await;
        let is_unknown = matches!(made, Err(AdminError::Store(StoreError::OutcomeUnknown(_))));
        assert!(is_unknown, "{round}: {made:?}");
        let put = fresh().await.put_document(&document, value.clone(), ExpectedRevision::Absent).await;
        let is_unknown = matches!(put, Err(DocumentError::Store(StoreError::OutcomeUnknown(_))));
        assert!(is_unknown, "{round}: {put:?}");
    }
    for round in ["deleted", "gone"] {
        let deleted = fresh().await.delete_document(&document, ExpectedRevision::Any).await;
        let is_unknown = matches!(deleted, Err(DocumentError::Store(StoreError::OutcomeUnknown(_))));
        assert!(is_unknown, "{round}: {deleted:?}");
    }
    cluster.nodes[3..].iter().for_each(RedisServer::resume);
}

async fn failovers_on_request_lose_and_repeat_nothing() {
    let cluster = Arc::new(RedisCluster::start(&["cluster-node-timeout 15000"]).unwrap());
    let fail_over_all = |cluster: &RedisCluster| (3..6).for_each(|at| fail_over(cluster, at));
    under_load(&cluster, fail_over_all).await;
}

async fn a_killed_master_loses_and_repeats_nothing() {
    let cluster = Arc::new(RedisCluster::start(&[NODE_TIMEOUT]).unwrap());
    let kill = |cluster: &RedisCluster| {
        cluster.nodes[0].kill();
        wait_for_master(cluster, 3);
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
    wait_for_master(&cluster, 3);
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

/// A master whose replica has failed, and a store that knows it: the master alone confirms claims. What the store knows is not
/// looked up again unless a call finds that it is wrong.
async fn alone(cluster: &RedisCluster, options: &Options) -> (RedisStore, usize) {
    let options = Options { operation_timeout: Duration::from_mins(2), ..options.clone() };
    let store = RedisStore::open(&cluster.url(), options).await.unwrap();
    granted_patiently(&store, ask("before", "ann")).await;
    let has_entries = |node: &RedisServer| !node.cli(&["--scan", "--pattern", "*:meta"]).unwrap().is_empty();
    let at = cluster.nodes[..3].iter().position(has_entries).expect("a node has the entry");
    let failed = cluster.nodes[at + 3].cli(&["CLUSTER", "MYID"]).unwrap();
    cluster.nodes[at + 3].kill();
    let has_heard = |node: &RedisServer| {
        let nodes = node.cli(&["CLUSTER", "NODES"]).unwrap();
        nodes.lines().any(|line| line.starts_with(&failed) && line.contains(" slave,fail "))
    };
    wait_for(cluster, "a replica has failed", || cluster.nodes[..3].iter().all(has_heard));
    store.stop_watching();
    store.look_at_servers().await.unwrap();
    let confirmed = claim(&store, ask("alone", "ann")).await;
    assert!(matches!(confirmed, Ok(Claim::Granted(_))), "{confirmed:?}");
    (store, at)
}

/// Its replica has returned, has taken its place while it was paused, and it hears of that later than of a claim.
async fn a_master_that_was_alone_and_then_replaced_grants_nothing() {
    let cluster = RedisCluster::start(&[NODE_TIMEOUT]).unwrap();
    let options = replicated();
    let (store, at) = alone(&cluster, &options).await;
    cluster.nodes[at + 3].run().unwrap();
    cluster.wait_until_whole().unwrap();
    let other = RedisStore::open(&cluster.url(), options).await.unwrap();
    cluster.nodes[at].pause();
    // It is on its way before the paused node hears anything from the others, and so it is the first that the node does.
    let late = tokio::spawn(async move { claim(&store, ask("key", "bob")).await });
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    wait_for_master(&cluster, at + 3);
    granted_patiently(&other, ask("key", "ann")).await;
    assert!(!late.is_finished());
    cluster.nodes[at].resume();
    let late = late.await.unwrap();
    assert!(
        matches!(late, Err(ClaimError::Store(StoreError::OutcomeUnknown(_))) | Ok(Claim::InProgress { .. })),
        "two hold it: {late:?}"
    );
}

/// The replica has connected, and has not loaded the data yet.
async fn a_master_whose_replica_returns_grants_nothing_alone() {
    // Without a file of its own the replica has to load everything.
    let cluster = RedisCluster::start(&[NODE_TIMEOUT, "repl-diskless-load swapdb"]).unwrap();
    let (store, at) = alone(&cluster, &replicated()).await;
    let (master, replica) = (&cluster.nodes[at], &cluster.nodes[at + 3]);
    master.cli(&["CONFIG", "SET", "repl-diskless-sync-delay", "600"]).unwrap();
    replica.run().unwrap();
    wait_for(&cluster, "a replica connects", || {
        master.cli(&["INFO", "replication"]).is_ok_and(|info| info.contains("state=wait_bgsave"))
    });
    let claimed = claim(&store, ask("key", "ann")).await;
    assert!(
        matches!(claimed, Err(ClaimError::Store(StoreError::OutcomeUnknown(_)))),
        "the replica does not have it: {claimed:?}"
    );
}

async fn a_slot_that_moves_keeps_its_entries() {
    let cluster = RedisCluster::start(&["cluster-node-timeout 15000"]).unwrap();
    let options = Options { operation_timeout: Duration::from_mins(1), ..replicated() };
    let soon = Duration::from_secs(1);
    let store = RedisStore::open(&cluster.url(), options.clone()).await.unwrap();
    let impatient = Options { operation_timeout: soon, connect_timeout: soon, ..options };
    let impatient = RedisStore::open(&cluster.url(), impatient).await.unwrap();
    let held = granted_patiently(&store, ask("held", "ann")).await;
    effect(&store, "done").await;
    let slot = Move::begin(&cluster, "*:meta");
    // While keys are on both nodes, and also when all are at the new one, which is not the owner yet, Redis refuses scripts
    // with keys that do not exist: nothing is lost by that, and nothing is granted twice.
    let keys = slot.keys();
    let mut patient = Vec::new();
    for some in [&keys[..2], &keys[2..]] {
        slot.migrate(some);
        let (store, key) = (store.clone(), format!("new-{}", patient.len()));
        patient.push(tokio::spawn(async move { claim(&store, ask(&key, "ann")).await }));
        for _ in 0..2 {
            let between = claim(&impatient, ask("held", "ann")).await;
            assert!(matches!(&between, Err(ClaimError::Store(StoreError::Unavailable(_)))), "{between:?}");
        }
    }
    slot.end();
    // A claim that has time waits for the end of the move.
    for claimed in patient {
        let claimed = claimed.await.unwrap();
        assert!(matches!(claimed, Ok(Claim::Granted(_))), "{claimed:?}");
    }
    let Claim::Granted(again) = claim_patiently(&store, ask("held", "ann")).await else { panic!("lost") };
    assert_eq!((&again.token, again.fence), (&held.token, held.fence));
    let ended = end_patiently(&store, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
    let Claim::Completed { .. } = claim_patiently(&store, ask("done", "bob")).await else { panic!("lost") };
}

/// MOVED may name a node as the map does not. Its replicas have to confirm all the same.
async fn a_node_that_is_named_by_its_host_confirms_nothing_alone() {
    let settings = [
        "cluster-node-timeout 120000",
        "cluster-announce-hostname localhost",
        "cluster-preferred-endpoint-type hostname",
    ];
    let cluster = RedisCluster::start(&settings).unwrap();
    let store = RedisStore::open(&cluster.url(), replicated()).await.unwrap();
    let held = granted_patiently(&store, ask("held", "ann")).await;
    effect(&store, "done").await;
    let slot = Move::begin(&cluster, "*:meta");
    slot.migrate(&slot.keys());
    cluster.nodes[3..].iter().for_each(RedisServer::pause);
    // The nodes were looked at just now, so they are not looked at again before the answer is believed.
    store.look_at_servers().await.unwrap();
    slot.end();
    for key in ["held", "new"] {
        let answer = claim(&store, ask(key, "ann")).await;
        assert!(answer.as_ref().is_err_and(ClaimError::is_retryable), "no replica has it: {answer:?}");
    }
    cluster.nodes[3..].iter().for_each(RedisServer::resume);
    let ended = end_patiently(&store, completed("held", &held, "done")).await;
    assert_eq!(ended, Ok(()));
}

/// From the first node to its replica and back, without a restart.
async fn each_failover_gives_a_full_lease() {
    let cluster = RedisCluster::start(&["cluster-node-timeout 15000"]).unwrap();
    let store = RedisStore::open(&cluster.url(), replicated()).await.unwrap();
    let held = granted_patiently(&store, ask("held", "ann")).await;
    let meta = |node: &RedisServer| node.cli(&["--scan", "--pattern", "*:meta"]).unwrap();
    let at = cluster.nodes[..3].iter().position(|node| !meta(node).is_empty()).expect("a node has the entry");
    let key = meta(&cluster.nodes[at]);
    let mut last = 0;
    for owner in [at + 3, at] {
        fail_over(&cluster, owner);
        let Claim::Granted(again) = claim_patiently(&store, ask("held", "ann")).await else { panic!("lost") };
        assert_eq!((&again.token, again.fence), (&held.token, held.fence));
        let boot = cluster.nodes[owner].cli(&["HGET", &key, "boot"]).unwrap();
        let boot: u64 = boot.parse().unwrap_or_else(|_| panic!("{owner}: {boot:?}"));
        assert!(boot > last, "the failover to {owner} was noticed");
        last = boot;
    }
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
    let has_entries = |node: &RedisServer| !node.cli(&["--scan", "--pattern", "*:meta"]).unwrap().is_empty();
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
    wait_for(&cluster, "a takeover", || {
        is_master(replica) || {
            let _ = replica.cli(&["CLUSTER", "FAILOVER", "TAKEOVER"]);
            false
        }
    });
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

/// The counters of all queues are asked for at once, from several nodes: without one of them there is an error that may be
/// repeated, and never a figure that is wrong or a queue that is taken for deleted.
async fn counters_of_many_queues_are_right_through_a_failover() {
    const QUEUES: usize = 120;
    let (cluster, options) = (RedisCluster::start(&[NODE_TIMEOUT]).unwrap(), replicated());
    let store = RedisStore::open(&cluster.url(), options.clone()).await.unwrap();
    let (mut names, mut expected): (Vec<QueueName>, Vec<Option<u64>>) = (Vec::new(), Vec::new());
    for number in 0..QUEUES {
        let name: QueueName = format!("queue-{number}").parse().unwrap();
        store.create_queue(&name, QueueConfig::sqs()).await.unwrap();
        let messages = (0..number % 3).map(|_| NewMessage::new("job")).collect();
        store.send(&name, messages).await.unwrap();
        names.push(name);
        expected.push(Some((number % 3) as u64));
    }
    names.push("never-there".parse().unwrap());
    expected.push(None);
    // Another process, which knows no settings yet when the master dies.
    let other = RedisStore::open(&cluster.url(), options).await.unwrap();
    let ready = async |store: &RedisStore| match store.stats_of(&names).await {
        Ok(all) => Some(all.iter().map(|stats| stats.map(|stats| stats.ready)).collect::<Vec<_>>()),
        Err(error) => {
            assert!(error.is_retryable(), "{error}");
            None
        }
    };
    assert_eq!(ready(&store).await.as_ref(), Some(&expected));
    cluster.nodes[0].kill();
    let (start, mut is_replaced) = (Instant::now(), false);
    for store in [&store, &other] {
        loop {
            let found = ready(store).await;
            assert!(found.as_ref().is_none_or(|found| *found == expected), "{found:?}");
            if found.is_some() && is_replaced {
                break;
            }
            is_replaced = is_master(&cluster.nodes[3]);
            assert!(start.elapsed() < PATIENCE, "the counters did not come back");
        }
    }
}
