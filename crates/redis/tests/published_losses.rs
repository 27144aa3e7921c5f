//! What each level loses under each fault, counted: accepted sends, granted claims and recorded completions that are gone
//! afterwards. `docs/redis.md` has the figures. At `replicated` nothing may be lost with one node at fault, and at `local`
//! nothing by a restart. After a new master was chosen, all queues serve again within five seconds.
//!
//! Five kills for each level; a hundred with `HAPAX_LONG=1`.

mod common;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::slots::is_master;
use common::{PATIENCE, completed, options, patiently};
use hapax_core::{
    Browse, Claim, ClaimRequest, EndClaim, EntryId, EntryState, Grant, Ledger as _, MessageId, NewMessage,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _,
};
use hapax_faults::{RedisCluster, RedisServer};
use hapax_redis::{Durability, Options, RedisStore};
use tokio::task::JoinSet;

fn main() -> std::process::ExitCode {
    common::main(tests![
        killed_and_restarted_at_process,
        killed_and_restarted_at_local,
        killed_and_replaced_at_process,
        killed_and_replaced_at_local,
        killed_and_replaced_at_replicated,
        replaced_on_request_at_process,
        replaced_on_request_at_local,
        replaced_on_request_at_replicated,
        paused_and_replaced_at_process,
        paused_and_replaced_at_local,
        paused_and_replaced_at_replicated,
    ])
}

const DURABLE: &[&str] = &["appendonly yes", "appendfsync always"];
/// Queues, and scopes of claims, so that all nodes have some.
const SPREAD: usize = 12;
const CLIENTS: usize = 3;
/// Time for all queues to serve again, from when a replica has become a master.
const RECOVERY_MAX: Duration = Duration::from_secs(5);

fn kills() -> usize {
    if std::env::var_os("HAPAX_LONG").is_some() { 100 } else { 5 }
}

/// What was confirmed.
#[derive(Default)]
struct Confirmed {
    sends: BTreeSet<(usize, MessageId)>,
    claims: Vec<(EntryId, Grant)>,
    completions: Vec<EntryId>,
}

struct Load {
    store: RedisStore,
    confirmed: Mutex<Confirmed>,
    over: AtomicBool,
}

fn queue(n: usize) -> QueueName {
    format!("jobs-{}", n % SPREAD).parse().unwrap()
}

impl Load {
    async fn open(url: &str, durability: Durability) -> Arc<Self> {
        let options = Options {
            durability,
            operation_timeout: Duration::from_secs(2),
            replication_timeout: Duration::from_millis(500),
            ..options()
        };
        let store = RedisStore::open(url, options).await.unwrap();
        for n in 0..SPREAD {
            patiently(|| async {
                match store.create_queue(&queue(n), QueueConfig::sqs()).await {
                    Ok(_) => Ok(()),
                    Err(hapax_core::AdminError::Store(error)) => Err(error),
                    Err(error) => panic!("{error}"),
                }
            })
            .await;
        }
        Arc::new(Self { store, confirmed: Mutex::default(), over: AtomicBool::new(false) })
    }

    /// Sends, claims and completes until the end. An error that may be repeated is not a confirmation.
    async fn run(self: Arc<Self>, client: usize) {
        let mut number = 0;
        while !self.over.load(Ordering::SeqCst) {
            number += 1;
            let n = number * CLIENTS + client;
            match self.store.send(&queue(n), vec![NewMessage::new(n.to_string())]).await {
                Ok(mut sent) => {
                    let sent = sent.remove(0).unwrap();
                    self.confirmed.lock().unwrap().sends.insert((n % SPREAD, sent.id));
                }
                Err(error) => assert!(error.is_retryable(), "send: {error}"),
            }
            let id =
                EntryId::new(format!("http/{}", n % SPREAD).parse().unwrap(), n.to_string().parse().unwrap());
            let request = ClaimRequest::new(id.clone(), "ann".parse().unwrap(), 3_600_000);
            let grant = match common::claim(&self.store, request).await {
                Ok(Claim::Granted(grant)) => grant,
                Ok(other) => panic!("a new key: {other:?}"),
                Err(error) => {
                    assert!(error.is_retryable(), "claim: {error}");
                    continue;
                }
            };
            // Every other claim is held until the end.
            if n.is_multiple_of(2) {
                self.confirmed.lock().unwrap().claims.push((id, grant));
                continue;
            }
            let end = EndClaim { id: id.clone(), ..completed("key", &grant, "done") };
            match self.store.end(vec![end]).await {
                Ok(mut ended) => {
                    // A claim that a failover forgot cannot be completed; it counts as neither.
                    if ended.remove(0).is_ok() {
                        self.confirmed.lock().unwrap().completions.push(id);
                    }
                }
                Err(error) => assert!(error.is_retryable(), "end: {error}"),
            }
        }
    }

    /// A send to each queue, however long it takes.
    async fn all_serve(&self) {
        for n in 0..SPREAD {
            let name = queue(n);
            let sent = patiently(|| self.store.send(&name, vec![NewMessage::new("serves")])).await.remove(0);
            self.confirmed.lock().unwrap().sends.insert((n, sent.unwrap().id));
        }
    }

    /// Counts what is gone: sends, claims and completions, each with the number that was confirmed.
    async fn losses(&self) -> [(usize, usize); 3] {
        let confirmed = std::mem::take(&mut *self.confirmed.lock().unwrap());
        let mut found = BTreeSet::new();
        for n in 0..SPREAD {
            let (name, mut after) = (queue(n), None);
            loop {
                let browse = Browse { after, limit: 1_000, ..Browse::default() };
                let page = patiently(|| self.store.browse(&name, browse.clone())).await;
                found.extend(page.items.iter().map(|message| (n, message.id)));
                after = page.next;
                if after.is_none() {
                    break;
                }
            }
        }
        let sends = confirmed.sends.difference(&found).count();
        let (mut claims, mut completions) = (0, 0);
        for (id, grant) in &confirmed.claims {
            let entry = patiently(|| self.store.entry(id)).await;
            claims += usize::from(entry.is_none_or(|entry| entry.fence != grant.fence));
        }
        for id in &confirmed.completions {
            let entry = patiently(|| self.store.entry(id)).await;
            completions += usize::from(entry.is_none_or(|entry| entry.state != EntryState::Completed));
        }
        [
            (sends, confirmed.sends.len()),
            (claims, confirmed.claims.len()),
            (completions, confirmed.completions.len()),
        ]
    }
}

/// A fault, and what is done about it when all queues serve again.
struct Fault {
    what: &'static str,
    /// From the end of `begin`; `None`: it is not known when the servers are ready.
    recovery_max: Option<Duration>,
    begin: Box<dyn Fn(usize) + Send + Sync>,
    end: Box<dyn Fn(usize) + Send + Sync>,
}

/// Runs a fault several times under load. Prints what was lost, and how long it took until all queues served again: after the
/// fault, and after its end. Returns the number of losses.
async fn count(url: String, durability: Durability, times: usize, fault: Fault) -> usize {
    let what = fault.what;
    let load = Load::open(&url, durability).await;
    let mut clients = JoinSet::new();
    for client in 0..CLIENTS {
        clients.spawn(load.clone().run(client));
    }
    let (fault, mut slowest) = (Arc::new(fault), [Duration::ZERO; 2]);
    for time in 0..times {
        // Something is confirmed between two faults.
        let before = load.confirmed.lock().unwrap().sends.len();
        let start = Instant::now();
        while load.confirmed.lock().unwrap().sends.len() < before + 20 {
            assert!(start.elapsed() < PATIENCE, "{what}: nothing is accepted");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        for (at, slowest) in slowest.iter_mut().enumerate() {
            let fault = fault.clone();
            let step = move || if at == 0 { (fault.begin)(time) } else { (fault.end)(time) };
            tokio::task::spawn_blocking(step).await.unwrap();
            let start = Instant::now();
            load.all_serve().await;
            *slowest = start.elapsed().max(*slowest);
        }
    }
    load.over.store(true, Ordering::SeqCst);
    clients.join_all().await;
    let [sends, claims, completions] = load.losses().await;
    println!(
        "losses | {what} x {times} | {} | sends {} of {} | claims {} of {} | completions {} of {} | all served again after {} ms, and {} ms after the end of the fault",
        durability.as_str(),
        sends.0,
        sends.1,
        claims.0,
        claims.1,
        completions.0,
        completions.1,
        slowest[0].as_millis(),
        slowest[1].as_millis(),
    );
    if let Some(max) = fault.recovery_max {
        assert!(
            slowest[0] < max,
            "{what} at {}: all queues served again after {:?}",
            durability.as_str(),
            slowest[0]
        );
    }
    sends.0 + claims.0 + completions.0
}

fn settings(durability: Durability) -> Vec<&'static str> {
    // A replica that returns has all data soon: until then nothing is confirmed at `replicated`.
    let timeout = ["cluster-node-timeout 1500", "repl-diskless-sync-delay 0"];
    let durable: &[&str] = if durability == Durability::Local { DURABLE } else { &[] };
    timeout.into_iter().chain(durable.iter().copied()).collect()
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < PATIENCE, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The place of the master of a pair, and that of its replica.
fn places(cluster: &RedisCluster, time: usize) -> (usize, usize) {
    let (one, other) = (time % 3, time % 3 + 3);
    if is_master(&cluster.nodes[one]) { (one, other) } else { (other, one) }
}

/// The master of a pair, and its replica.
fn pair(cluster: &RedisCluster, time: usize) -> (&RedisServer, &RedisServer) {
    let (master, replica) = places(cluster, time);
    (&cluster.nodes[master], &cluster.nodes[replica])
}

async fn restarted(durability: Durability) -> usize {
    let server =
        RedisServer::start(if durability == Durability::Local { DURABLE } else { &["appendonly yes"] });
    let server = Arc::new(server.unwrap());
    let url = common::url(&server);
    let begin = move |_| {
        server.kill();
        server.run().unwrap();
    };
    let fault = Fault {
        what: "killed and restarted",
        recovery_max: None,
        begin: Box::new(begin),
        end: Box::new(|_| ()),
    };
    count(url, durability, kills(), fault).await
}

async fn killed(durability: Durability) -> usize {
    let cluster = Arc::new(RedisCluster::start(&settings(durability)).unwrap());
    let url = cluster.url();
    let killed = Arc::new(Mutex::new(0));
    let (same, of) = (cluster.clone(), killed.clone());
    let begin = move |time| {
        // The one that was killed before is a replica by now, or the pair would have none.
        cluster.wait_until_whole().unwrap();
        let (master, replica) = places(&cluster, time);
        cluster.nodes[master].kill();
        wait_for("a replica takes over", || is_master(&cluster.nodes[replica]));
        *killed.lock().unwrap() = master;
    };
    // Without the killed node the new master has no replica; when it returns, it must have all data before it confirms.
    let end = move |_| same.nodes[*of.lock().unwrap()].run().unwrap();
    let fault = Fault {
        what: "master killed",
        recovery_max: Some(RECOVERY_MAX),
        begin: Box::new(begin),
        end: Box::new(end),
    };
    count(url, durability, kills(), fault).await
}

async fn requested(durability: Durability) -> usize {
    let cluster = Arc::new(RedisCluster::start(&settings(durability)).unwrap());
    let url = cluster.url();
    let begin = move |time| {
        cluster.wait_until_whole().unwrap();
        let (_, replica) = pair(&cluster, time);
        let mut asked: Option<Instant> = None;
        wait_for("a failover on request", || {
            if asked.is_none_or(|asked| asked.elapsed() > Duration::from_secs(8)) {
                asked = replica.cli(&["CLUSTER", "FAILOVER"]).is_ok().then(Instant::now);
            }
            is_master(replica)
        });
    };
    let fault = Fault {
        what: "CLUSTER FAILOVER",
        recovery_max: Some(RECOVERY_MAX),
        begin: Box::new(begin),
        end: Box::new(|_| ()),
    };
    count(url, durability, kills().min(20), fault).await
}

async fn paused(durability: Durability) -> usize {
    let cluster = Arc::new(RedisCluster::start(&settings(durability)).unwrap());
    let url = cluster.url();
    let begin = move |time| {
        cluster.wait_until_whole().unwrap();
        let (master, replica) = pair(&cluster, time);
        master.pause();
        wait_for("a replica takes over", || is_master(replica));
        master.resume();
    };
    // At `replicated` the old master has to follow the new one first.
    let recovery_max = (durability != Durability::Replicated).then_some(RECOVERY_MAX);
    let fault = Fault { what: "master paused", recovery_max, begin: Box::new(begin), end: Box::new(|_| ()) };
    count(url, durability, kills().min(20), fault).await
}

async fn killed_and_restarted_at_process() {
    restarted(Durability::Process).await;
}

async fn killed_and_restarted_at_local() {
    assert_eq!(restarted(Durability::Local).await, 0);
}

async fn killed_and_replaced_at_process() {
    killed(Durability::Process).await;
}

async fn killed_and_replaced_at_local() {
    killed(Durability::Local).await;
}

async fn killed_and_replaced_at_replicated() {
    assert_eq!(killed(Durability::Replicated).await, 0);
}

async fn replaced_on_request_at_process() {
    requested(Durability::Process).await;
}

async fn replaced_on_request_at_local() {
    requested(Durability::Local).await;
}

async fn replaced_on_request_at_replicated() {
    assert_eq!(requested(Durability::Replicated).await, 0);
}

async fn paused_and_replaced_at_process() {
    paused(Durability::Process).await;
}

async fn paused_and_replaced_at_local() {
    paused(Durability::Local).await;
}

async fn paused_and_replaced_at_replicated() {
    assert_eq!(paused(Durability::Replicated).await, 0);
}
