//! Failover to a standby, under Patroni. With synchronous replication nothing that was accepted is lost; what asynchronous
//! replication loses is counted. Runs when `HAPAX_LONG` is set.

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_conformance::attack::{LedgerAttack, PATIENCE, QueueAttack, patiently};
use hapax_core::{
    Fence, Ledger, MessageId, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore as _, Receive,
    Settle,
};
use hapax_faults::{FaultProxy, PatroniCluster, Protocol, Replication};
use hapax_postgres::{Options, PostgresStore, migrate};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection};

const FAILOVERS: usize = 3;

/// A test by its name.
type Test = (&'static str, fn());

fn main() -> ExitCode {
    let tests: [Test; 2] = [
        ("a_synchronous_failover_loses_nothing", || block_on(a_synchronous_failover_loses_nothing())),
        ("an_asynchronous_failover_loses_only_the_last_commits", || {
            block_on(an_asynchronous_failover_loses_only_the_last_commits());
        }),
    ];
    let trial = |(name, test): Test| {
        Trial::ignorable_test(name, move || {
            if std::env::var_os("HAPAX_LONG").is_none() {
                return Ok(Completion::ignored_with("declared: set HAPAX_LONG to run it"));
            }
            if let Err(why) = PatroniCluster::programs() {
                return Ok(Completion::ignored_with(why));
            }
            test();
            Ok::<_, Failed>(Completion::Completed)
        })
    };
    // One after the other: each has two servers that are killed.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).collect()).exit_code()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// A cluster, and an address that leads to its leader.
struct Site {
    cluster: Arc<PatroniCluster>,
    leader: FaultProxy,
}

impl Site {
    async fn start(replication: Replication) -> Self {
        let start = move || PatroniCluster::start(replication);
        let cluster = Arc::new(tokio::task::spawn_blocking(start).await.unwrap().unwrap());
        let leader = FaultProxy::start(cluster.leader().unwrap(), Protocol::Bytes).unwrap();
        let site = Self { cluster, leader };
        migrate(&site.url(), &Options::default(), false).await.unwrap();
        site
    }

    fn url(&self) -> String {
        format!("postgres://postgres@{}/postgres", self.leader.address())
    }

    async fn open(&self) -> PostgresStore {
        let options = Options {
            operation_timeout: Duration::from_secs(4),
            connect_timeout: Duration::from_secs(2),
            ..Options::default()
        };
        PostgresStore::open(&self.url(), options).await.unwrap()
    }

    /// Kills the leader; returns when another node leads. Gives the number of the killed one.
    async fn fail_over(&self) -> usize {
        let cluster = self.cluster.clone();
        let failed = move || {
            let killed = cluster.kill_leader();
            (killed, cluster.wait_for_leader())
        };
        let (killed, leader) = tokio::task::spawn_blocking(failed).await.unwrap();
        self.leader.retarget(leader.unwrap());
        killed
    }

    /// Starts a killed node; returns when the cluster accepts writes.
    async fn rejoin(&self, killed: usize) {
        self.cluster.run(killed).unwrap();
        let (start, url) =
            (Instant::now(), format!("postgres://postgres@{}/postgres", self.cluster.leader().unwrap()));
        // With synchronous replication a commit waits for the standby.
        loop {
            let write = async {
                let mut db = PgConnection::connect(&url).await?;
                db.execute("CREATE TABLE IF NOT EXISTS written (at timestamptz)").await?;
                db.execute("INSERT INTO written VALUES (now())").await
            };
            if matches!(tokio::time::timeout(Duration::from_secs(2), write).await, Ok(Ok(_))) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "the cluster accepts no writes");
        }
    }
}

/// Waits until this many more sends were accepted.
async fn accepted(attack: &QueueAttack, more: usize) -> Duration {
    let (start, before) = (Instant::now(), attack.accepted());
    while attack.accepted() < before + more {
        assert!(start.elapsed() < PATIENCE, "{} were accepted", attack.accepted() - before);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    start.elapsed()
}

async fn a_synchronous_failover_loses_nothing() {
    const SOME: usize = 100;
    let site = Site::start(Replication::Synchronous).await;
    let stores = [site.open().await, site.open().await];
    let queues = || stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn QueueAdmin>).collect();
    let ledgers = stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn Ledger>).collect();
    let standard = QueueAttack::begin(queues(), "orders", false).await;
    let fifo = QueueAttack::begin(queues(), "steps", true).await;
    let keys = LedgerAttack::begin(ledgers);
    for round in 0..FAILOVERS {
        let usual = accepted(&standard, SOME).await;
        let killed = site.fail_over().await;
        site.rejoin(killed).await;
        let back = accepted(&standard, SOME).await;
        println!(
            "failover {round}: {SOME} sends took {usual:?} before, {back:?} from the first write after it"
        );
    }
    accepted(&fifo, SOME).await;
    println!("{} keys, {} and {} messages", keys.keys(), standard.accepted(), fifo.accepted());
    // They check that nothing is lost, that fences grow and that nothing stale is accepted.
    keys.end().await;
    standard.end().await;
    fifo.end().await;
}

async fn an_asynchronous_failover_loses_only_the_last_commits() {
    const MESSAGES: usize = 5_000;
    let site = Site::start(Replication::Asynchronous).await;
    let (store, jobs) = (site.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let (mut sent, mut highest): (Vec<MessageId>, Fence) = (Vec::new(), Fence(0));
    while sent.len() < MESSAGES {
        let batch = store.send(&jobs, vec![NewMessage::new("x"); 50]).await.unwrap();
        sent.extend(batch.into_iter().map(|one| one.unwrap().id));
        // A delivery is given up, so that it comes back after the failover with a higher fence.
        let ask = Receive { lease_ms: Some(1_000), ..Receive::up_to(1) };
        for delivery in store.receive(&jobs, ask).await.unwrap() {
            highest = highest.max(delivery.fence);
        }
    }
    site.fail_over().await;
    let (start, mut got, mut lost_since) = (Instant::now(), HashSet::new(), Instant::now());
    while lost_since.elapsed() < Duration::from_secs(10) {
        assert!(start.elapsed() < PATIENCE, "{} were received", got.len());
        let ask = Receive { wait_ms: Some(1_000), lease_ms: Some(600_000), ..Receive::up_to(500) };
        for delivery in patiently(|| store.receive(&jobs, ask.clone())).await {
            assert!(delivery.fence > highest, "{:?} after {highest:?}", delivery.fence);
            patiently(|| store.settle(&jobs, vec![Settle::ack(delivery.receipt.clone())]))
                .await
                .remove(0)
                .unwrap();
            got.insert(delivery.id);
            lost_since = Instant::now();
        }
    }
    // A message that was lost was one of the last.
    let lost: Vec<usize> = (0..sent.len()).filter(|at| !got.contains(&sent[*at])).collect();
    println!("{} of {} accepted messages were lost", lost.len(), sent.len());
    let first = lost.first().copied().unwrap_or(sent.len());
    assert_eq!(lost.len(), sent.len() - first, "only the last ones are lost: {lost:?}");
}
