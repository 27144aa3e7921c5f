//! The worker against a server over the native API: the same tiers, heartbeat and outcomes as locally.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use hapax_client::Client;
use hapax_core::{
    Browse, Clock, DeadLetterPolicy, EntryId, EntryState, IdempotencyKey, Ledger as _, ManualClock,
    NewMessage, OnDoubt, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, SystemClock, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use hapax_worker::testing::Trial;
use hapax_worker::{Counts, Cx, HandlerOutcome, Point, Worker, WorkerBuilder, WorkerReport};

/// A server on its own threads, like a real one: a blocked test must not block it.
struct Remote {
    client: Arc<Client>,
    store: Arc<Embedded>,
    queue: QueueName,
    runtime: Option<tokio::runtime::Runtime>,
    _folder: tempfile::TempDir,
}

impl Drop for Remote {
    fn drop(&mut self) {
        // A blocking shutdown is not allowed inside a runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Remote {
    async fn start(tier: Tier) -> Self {
        Self::on_clock(tier, Arc::new(SystemClock::default())).await
    }

    async fn on_clock(tier: Tier, clock: Arc<dyn Clock>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let store = Arc::new(Embedded::open(folder.path(), Options { clock, ..Options::default() }).unwrap());
        let shared = store.clone();
        let config = ServerConfig { listen: vec!["127.0.0.1:0".parse().unwrap()], ..ServerConfig::default() };
        let (told, address) = tokio::sync::oneshot::channel::<SocketAddr>();
        runtime.spawn(async move {
            let server = Server::new(config, shared.clone()).unwrap();
            let native = Native::new(shared, server.shutdown(), None);
            let server = server.with_router(native.router(), &[]);
            let listeners = server.bind().await.unwrap();
            told.send(listeners[0].local_addr().unwrap()).unwrap();
            server.run(listeners, std::future::pending()).await;
        });
        let endpoint = format!("http://{}", address.await.unwrap());
        let client = Arc::new(Client::connect(&endpoint, None).await.unwrap());
        let (queue, dead) = (QueueName::new("jobs").unwrap(), QueueName::new("dead").unwrap());
        client.create_queue(&dead, QueueConfig::sqs()).await.unwrap();
        let dead_letter = Some(DeadLetterPolicy { queue: dead });
        client.create_queue(&queue, QueueConfig { tier, dead_letter, ..QueueConfig::sqs() }).await.unwrap();
        Self { client, store, queue, runtime: Some(runtime), _folder: folder }
    }

    fn builder(&self) -> WorkerBuilder {
        Worker::builder(self.client.clone(), self.queue.clone())
    }

    async fn send(&self, body: &str, key: &str) {
        let message = NewMessage::new(body.to_owned()).idempotency_key(&IdempotencyKey::new(key).unwrap());
        self.client.send(&self.queue, vec![message]).await.unwrap()[0].as_ref().unwrap();
    }
}

async fn run_until(worker: Worker, enough: impl Fn(&Counts) -> bool) -> WorkerReport {
    let watch = worker.watch();
    let done = async move {
        while !enough(&watch.counts()) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(50), worker.run(done)).await.expect("the worker hangs").unwrap()
}

#[tokio::test]
async fn outcomes_are_recorded_and_replayed() {
    let remote = Remote::start(Tier::EffectivelyOnce).await;
    let handler = async |word: String, cx: Cx| match word.as_str() {
        "retry" if cx.attempt() == 1 => HandlerOutcome::retry("not yet"),
        "panic" if cx.attempt() == 1 => panic!("boom"),
        "panic" if !cx.is_takeover() => HandlerOutcome::reject("it is not told"),
        "reject" => HandlerOutcome::reject("never"),
        word => HandlerOutcome::Done(word.to_owned()),
    };
    for word in ["done", "retry", "panic", "reject"] {
        remote.send(&format!("{word:?}"), word).await;
    }
    let worker = remote.builder().handler(handler).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 3 && counts.rejected == 1).await;
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.takeovers, report.counts.retried, report.counts.stale_settles), (1, 2, 0));
    for word in ["done", "retry", "panic", "reject"] {
        remote.send(&format!("{word:?}"), word).await;
    }
    remote.send("\"else\"", "done").await;
    let never = async |_: String, _: Cx| -> HandlerOutcome<()> { panic!("no duplicate runs") };
    let worker = remote.builder().handler(never).build().await.unwrap();
    let report = run_until(worker, |counts| counts.replayed == 4 && counts.mismatches == 1).await;
    assert_eq!(report.counts.panics, 0);
    let stats = remote.client.stats(&remote.queue).await.unwrap();
    assert_eq!((stats.ready, stats.in_flight, stats.delayed), (0, 0, 0));
}

/// Lets time pass, a sixth of a lease at a time; each time the heartbeat has to renew the delivery before half of its
/// lease is over.
async fn pass_four_leases(clock: &ManualClock, lease: Duration, store: &Embedded, queue: &QueueName) {
    let lease_ms = lease.as_millis() as u64;
    for _ in 0..24 {
        clock.advance_ms(lease_ms / 6);
        let deadline = std::time::Instant::now() + Duration::from_mins(1);
        while store.browse(queue, Browse { limit: 1, ..Browse::default() }).await.unwrap().items[0].due_ms
            <= clock.wall_ms() + lease_ms / 2
        {
            assert!(std::time::Instant::now() < deadline, "the lease is not renewed");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }
}

/// The handler blocks the only thread of the client's runtime: the heartbeat has its own connections.
#[tokio::test(flavor = "current_thread")]
async fn a_blocked_thread_keeps_its_lease() {
    const LEASE: Duration = Duration::from_mins(1);
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let remote = Remote::on_clock(Tier::EffectivelyOnce, clock.clone()).await;
    remote.send("1", "k").await;
    let runs = Arc::new(AtomicU32::new(0));
    let handler = {
        let (runs, clock, store, queue) =
            (runs.clone(), clock.clone(), remote.store.clone(), remote.queue.clone());
        move |_: u32, cx: Cx| {
            runs.fetch_add(1, Ordering::SeqCst);
            std::thread::scope(|scope| {
                let four_leases = pass_four_leases(&clock, LEASE, &store, &queue);
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                scope.spawn(move || runtime.block_on(four_leases));
            });
            assert!(!cx.is_cancelled());
            async {}
        }
    };
    let builder = remote.builder().handler(handler).clock(clock).lease(LEASE);
    let worker = builder.build().await.unwrap();
    let report = run_until(worker, |counts| counts.done + counts.panics == 1).await;
    assert_eq!((report.counts.done, report.counts.lost_leases), (1, 0), "{report:?}");
    let totals = remote.client.stats(&remote.queue).await.unwrap().totals;
    assert_eq!((totals.delivered, totals.expired, runs.load(Ordering::SeqCst)), (1, 0, 1));
}

#[tokio::test]
async fn a_crash_leaves_doubt_and_park_sets_it_aside() {
    let remote = Remote::start(Tier::EffectivelyOnce).await;
    let handler = async |_: u32, cx: Cx| Ok::<_, String>(cx.is_takeover());
    let trial = Trial::new(remote.builder().handler(handler).on_doubt(OnDoubt::Park));
    let message = NewMessage::new("1").idempotency_key(&"k".parse().unwrap());
    trial.send_and_crash(message, Point::AfterEffect).await.unwrap();
    let ran = trial.run().await.unwrap();
    assert!(matches!(ran.settlement, hapax_core::Settlement::Park { .. }), "{ran:?}");
    let id = EntryId::of_queue(&remote.queue, "k".parse().unwrap());
    assert_eq!(remote.client.entry(&id).await.unwrap().unwrap().state, EntryState::InDoubt);
    assert_eq!(remote.client.stats(&remote.queue).await.unwrap().parked, 1);
}
