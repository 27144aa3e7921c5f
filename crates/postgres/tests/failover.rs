//! Failover to a standby, under Patroni. With synchronous replication nothing that was accepted is lost; what asynchronous
//! replication loses is counted. Runs when `HAPAX_LONG` is set.

use std::collections::HashSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_conformance::attack::{LedgerAttack, PATIENCE, QueueAttack, patiently, returns_to_half};
use hapax_core::{
    AsyncInbox as _, Delivery, EntryId, Fence, IdempotencyKey, InboxEntry, InboxError, InboxLookup, Ledger,
    MessageId, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore as _, Receive, RecordedOutcome,
    Settle, Tier,
};
use hapax_faults::{FaultProxy, PatroniCluster, Protocol, Replication};
use hapax_postgres::{Options, PostgresInbox, PostgresStore, migrate};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection, Row as _};
use tokio::task::{JoinHandle, JoinSet};

const FAILOVERS: usize = 3;
/// Messages that are sent while the standby receives nothing. Patroni takes no standby that lags by more than 1 MB.
const UNRECEIVED: usize = 300;

/// A test by its name.
type Test = (&'static str, fn());

fn main() -> ExitCode {
    let tests: [Test; 3] = [
        ("a_synchronous_failover_loses_nothing", || block_on(a_synchronous_failover_loses_nothing())),
        ("an_asynchronous_failover_loses_only_the_last_commits", || {
            block_on(an_asynchronous_failover(0));
        }),
        ("a_standby_that_lags_loses_what_it_has_not_received", || {
            block_on(an_asynchronous_failover(UNRECEIVED));
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

    /// Waits until the other node would take over.
    async fn wait_for_standby(&self) {
        let cluster = self.cluster.clone();
        tokio::task::spawn_blocking(move || cluster.wait_for_standby().unwrap()).await.unwrap();
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
    let payments = Payments::begin(&site.url(), &stores).await;
    for round in 0..FAILOVERS {
        site.wait_for_standby().await;
        let usual = accepted(&standard, SOME).await;
        let killed = site.fail_over().await;
        site.rejoin(killed).await;
        // Half of the rate before, within 5 s of the first write that the cluster accepts again.
        let back = returns_to_half(|| standard.accepted(), SOME, usual).await;
        println!(
            "failover {round}: {SOME} sends took {usual:?} before; the rate was back {back:?} after the first write"
        );
    }
    accepted(&fifo, SOME).await;
    println!("{} keys, {} and {} messages", keys.keys(), standard.accepted(), fifo.accepted());
    // They check that nothing is lost, that fences grow and that nothing stale is accepted.
    keys.end().await;
    standard.end().await;
    fifo.end().await;
    payments.end().await;
}

/// Messages whose handlers write to a table of the same database, in one transaction with the ack.
struct Payments {
    store: PostgresStore,
    stop: Arc<AtomicBool>,
    producer: JoinHandle<usize>,
    consumers: JoinSet<()>,
}

fn payments() -> QueueName {
    QueueName::new("payments").unwrap()
}

impl Payments {
    async fn begin(url: &str, stores: &[PostgresStore]) -> Self {
        let (store, stop) = (stores[0].clone(), Arc::new(AtomicBool::new(false)));
        let config = QueueConfig { tier: Tier::Transactional, ..QueueConfig::default() };
        store.create_queue(&payments(), config).await.unwrap();
        let mut db = PgConnection::connect(url).await.unwrap();
        db.execute("CREATE TABLE paid (key text)").await.unwrap();
        let mut consumers = JoinSet::new();
        for store in stores {
            let (store, stop) = (store.clone(), stop.clone());
            consumers.spawn(async move { consume(&store, &stop).await });
        }
        let producer = tokio::spawn(produce(store.clone(), stop.clone()));
        Self { store, stop, producer, consumers }
    }

    async fn end(self) {
        self.stop.store(true, Ordering::SeqCst);
        let sent = self.producer.await.unwrap();
        self.consumers.join_all().await;
        let inbox = PostgresInbox::new(&self.store);
        let mut tx = inbox.begin(&entry(&"table".parse().unwrap())).await.unwrap();
        let sql = "SELECT count(*), count(DISTINCT key) FROM paid";
        let row = PostgresInbox::connection(&mut tx).fetch_one(sql).await.unwrap();
        let (paid, keys): (i64, i64) = (row.get(0), row.get(1));
        println!("{sent} payments were sent, {paid} made");
        assert_eq!((paid, keys), (sent as i64, sent as i64), "every payment once");
        assert!(sent > 0);
    }
}

fn entry(key: &IdempotencyKey) -> InboxEntry {
    InboxEntry { id: EntryId::of_queue(&payments(), key.clone()), fingerprint: "paid".parse().unwrap() }
}

/// Sends until it is stopped; gives the count. A send whose outcome is unknown is repeated with the same key.
async fn produce(store: PostgresStore, stop: Arc<AtomicBool>) -> usize {
    let (mut sent, queue) = (0, payments());
    while !stop.load(Ordering::SeqCst) {
        let key: IdempotencyKey = format!("payment-{sent}").parse().unwrap();
        let message = NewMessage::new("1999").idempotency_key(&key);
        patiently(|| store.send(&queue, vec![message.clone()])).await.remove(0).unwrap();
        sent += 1;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    sent
}

/// Pays until it is stopped and the queue is empty.
async fn consume(store: &PostgresStore, stop: &AtomicBool) {
    let (inbox, queue) = (PostgresInbox::new(store), payments());
    loop {
        let stopped = stop.load(Ordering::SeqCst);
        let ask = Receive { wait_ms: Some(1_000), lease_ms: Some(30_000), ..Receive::up_to(5) };
        for delivery in patiently(|| store.receive(&queue, ask.clone())).await {
            let start = Instant::now();
            // What is put back comes again; an unknown commit is found by the key.
            while let Err(error) = pay(store, &inbox, &delivery).await {
                assert!(start.elapsed() < PATIENCE, "{error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
        if stopped {
            let stats = patiently(|| store.stats(&queue)).await;
            if stats.ready + stats.in_flight + stats.delayed == 0 {
                return;
            }
        }
    }
}

/// One transaction; an error means that it has to be tried again.
async fn pay(store: &PostgresStore, inbox: &PostgresInbox, delivery: &Delivery) -> Result<(), InboxError> {
    let entry = entry(&delivery.key);
    let mut tx = inbox.begin(&entry).await?;
    match inbox.enter(&mut tx, &entry).await? {
        InboxLookup::Fresh => {}
        InboxLookup::InProgress { .. } => return Err(InboxError::Locked { timeout_ms: 0 }),
        InboxLookup::Completed(_) => {
            inbox.rollback(tx).await;
            let queue = payments();
            let ack = || store.settle(&queue, vec![Settle::ack(delivery.receipt.clone())]);
            // The transaction that has completed it may also have settled the delivery.
            drop(patiently(ack).await);
            return Ok(());
        }
        other => panic!("{other:?}"),
    }
    let insert = sqlx::query("INSERT INTO paid VALUES ($1)").bind(delivery.key.as_str());
    let insert = insert.execute(PostgresInbox::connection(&mut tx)).await;
    insert.map_err(|error| InboxError::Unavailable(error.to_string()))?;
    let outcome = RecordedOutcome { failed: false, value: None, omitted_bytes: None };
    match inbox.complete(tx, &entry, outcome, 3_600_000, &delivery.receipt).await {
        // Its lease has ended meanwhile; it comes again.
        Err(InboxError::Superseded(_)) | Ok(_) => Ok(()),
        Err(error) => Err(error),
    }
}

/// What asynchronous replication loses, in which the standby has not received the last `unreceived` messages.
async fn an_asynchronous_failover(unreceived: usize) {
    const MESSAGES: usize = 5_000;
    let site = Site::start(Replication::Asynchronous).await;
    let (store, jobs) = (site.open().await, QueueName::new("jobs").unwrap());
    store.create_queue(&jobs, QueueConfig::sqs()).await.unwrap();
    let (mut sent, mut highest): (Vec<MessageId>, Fence) = (Vec::new(), Fence(0));
    let mut receiver = None;
    while sent.len() < MESSAGES {
        if unreceived > 0 && receiver.is_none() && sent.len() >= MESSAGES - unreceived {
            site.wait_for_standby().await;
            // It may be between two connections.
            let start = Instant::now();
            while receiver.is_none() {
                match site.cluster.stop_receiver() {
                    Ok(stopped) => receiver = Some(stopped),
                    Err(problem) => assert!(start.elapsed() < PATIENCE, "{problem}"),
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
        let batch = store.send(&jobs, vec![NewMessage::new("x"); 50]).await.unwrap();
        sent.extend(batch.into_iter().map(|one| one.unwrap().id));
        // A delivery is given up, so that it comes back after the failover with a higher fence.
        let ask = Receive { lease_ms: Some(1_000), ..Receive::up_to(1) };
        for delivery in store.receive(&jobs, ask).await.unwrap() {
            highest = highest.max(delivery.fence);
        }
    }
    let ending = receiver.map(|receiver| {
        let cluster = site.cluster.clone();
        tokio::task::spawn_blocking(move || cluster.end_receiver(receiver).unwrap())
    });
    site.fail_over().await;
    if let Some(ending) = ending {
        ending.await.unwrap();
    }
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
    // None of those that the standby had; and a standby that lags does lose.
    assert_eq!(lost.is_empty(), unreceived == 0);
    assert!(lost.len() <= unreceived);
}
