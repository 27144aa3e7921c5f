//! A worker process is stopped (SIGSTOP) past its lease while another takes over its work, and then resumes (SIGCONT):
//! nothing that it then reports about the work counts. Its *effects* do count, unless the sink checks the fence or the
//! handler awaits.

use std::fs::OpenOptions;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use hapax_client::Client;
use hapax_core::{
    Clock, EntryId, EntryState, Json, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueName,
    QueueStore as _, RecordedOutcome, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_faults::{Process, TIMEOUT, rerun_test};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use hapax_worker::{Cx, Worker};
use serde_json::Value;
use tokio::sync::oneshot;

/// The lease of both workers. Time passes only while the zombie is stopped, so that a slow machine loses no lease.
const LEASE: Duration = Duration::from_mins(1);
const ENDPOINT: &str = "HAPAX_TEST_CHILD_ENDPOINT";
const FOLDER: &str = "HAPAX_TEST_CHILD_FOLDER";
const NAME: &str = "HAPAX_TEST_CHILD_NAME";
const SINK: &str = "HAPAX_TEST_CHILD_SINK";
const GATE: &str = "HAPAX_TEST_CHILD_GATE";
const WAITS: &str = "HAPAX_TEST_CHILD_WAITS";

/// Time that this test moves for its child processes as well: each byte of a file is a second that has passed.
struct SharedClock(PathBuf);

impl SharedClock {
    fn in_folder(folder: &Path) -> Arc<Self> {
        Arc::new(Self(folder.join("clock")))
    }

    fn seconds(&self) -> u64 {
        std::fs::metadata(&self.0).map_or(0, |file| file.len())
    }

    fn advance(&self, time: Duration) {
        let mut file = OpenOptions::new().create(true).append(true).open(&self.0).unwrap();
        file.write_all(&vec![b'.'; time.as_secs() as usize]).unwrap();
    }
}

impl Clock for SharedClock {
    fn wall_ms(&self) -> u64 {
        1_800_000_000_000 + self.seconds() * 1_000
    }

    fn monotonic_us(&self) -> u64 {
        self.seconds() * 1_000_000
    }

    /// Another process moves it, so it has to be read again and again.
    fn sleep_for(&self, _us: u64) -> Option<Duration> {
        Some(Duration::from_millis(5))
    }
}

fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// Writes a whole line at once for the reader.
fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// The sink's log: `effect` or `refused`, a worker's name, a fence.
fn sink_lines(folder: &Path) -> Vec<(String, String, u64)> {
    let text = std::fs::read_to_string(folder.join("sink")).unwrap_or_default();
    let line = |line: &str| {
        let words: Vec<_> = line.split(' ').collect();
        (words[0].to_owned(), words[1].to_owned(), words[2].parse().unwrap())
    };
    text.lines().map(line).collect()
}

/// A sink in a file. With `fenced`, it refuses fences smaller than the largest one seen.
fn act(folder: &Path, fenced: bool, name: &str, fence: u64) {
    let largest = sink_lines(folder).iter().map(|(.., fence)| *fence).max().unwrap_or(0);
    let what = if fenced && fence < largest { "refused" } else { "effect" };
    let mut file = OpenOptions::new().create(true).append(true).open(folder.join("sink")).unwrap();
    file.write_all(format!("{what} {name} {fence}\n").as_bytes()).unwrap();
    file.sync_all().unwrap();
}

/// Blocks the thread until the parent sends a byte.
fn wait_blocking(holds: &str) {
    let mut gate = TcpStream::connect(std::env::var(GATE).unwrap()).unwrap();
    gate.set_read_timeout(Some(TIMEOUT)).unwrap();
    say(holds);
    gate.read_exact(&mut [0]).unwrap();
}

/// Awaits until the parent sends a byte. Reports once nothing but another poll can continue past the await.
async fn wait_awaiting(holds: &str) {
    let gate = tokio::net::TcpStream::connect(std::env::var(GATE).unwrap()).await.unwrap();
    let mut readable = std::pin::pin!(gate.readable());
    let mut said = false;
    let waiting = std::future::poll_fn(|cx| {
        let ready = readable.as_mut().poll(cx);
        if !said {
            said = true;
            say(holds);
        }
        ready
    });
    waiting.await.unwrap();
}

/// The zombie or its successor: a worker against the server, until it has run its handler once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child_process() {
    let Ok(endpoint) = std::env::var(ENDPOINT) else { return };
    let var = |name| std::env::var(name).unwrap();
    let (folder, name) = (PathBuf::from(var(FOLDER)), var(NAME));
    let (fenced, waits) = (var(SINK) == "fenced", var(WAITS));
    let clock = SharedClock::in_folder(&folder);
    // The test harness has already begun a line.
    say("");
    let ended_by = name.clone();
    let handler = move |_: Value, cx: Cx| {
        let (folder, name, waits) = (folder.clone(), name.clone(), waits.clone());
        async move {
            let holds = format!("holds {}", cx.fence().0);
            match waits.as_str() {
                "blocking" => wait_blocking(&holds),
                "awaiting" => wait_awaiting(&holds).await,
                _ => say(&holds),
            }
            act(&folder, fenced, &name, cx.fence().0);
            Ok::<_, std::io::Error>(name)
        }
    };
    let store = Arc::new(Client::connect(&endpoint, None).await.unwrap());
    let worker = Worker::builder(store, queue())
        .handler(handler)
        .consumer(ended_by)
        .clock(clock)
        .lease(LEASE)
        // A second receive that is open while the zombie is stopped would get the message in place of the successor.
        .concurrency(1)
        .build()
        .await
        .unwrap();
    let watch = worker.watch();
    let ended = async move {
        while watch.counts().done + watch.counts().retried == 0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(ended)).await.expect("it takes too long").unwrap();
    assert!(report.drained, "{report:?}");
    say(&format!("report {}", serde_json::to_string(&report.counts).unwrap()));
}

fn start(scene: &Scene, name: &str, sink: &str, waits: &str) -> Process {
    let mut command = rerun_test("child_process");
    command
        .env(ENDPOINT, &scene.endpoint)
        .env(FOLDER, scene.folder.path())
        .env(GATE, scene.gate.local_addr().unwrap().to_string())
        .envs([(NAME, name), (SINK, sink), (WAITS, waits)]);
    Process::start(&mut command).unwrap()
}

fn report_of(process: &Process) -> Value {
    serde_json::from_str(&process.wait_for_prefix("report")).unwrap()
}

/// A server in this process with one message in its queue.
struct Scene {
    store: Arc<Embedded>,
    clock: Arc<SharedClock>,
    endpoint: String,
    /// The listener at which the zombie waits.
    gate: TcpListener,
    folder: tempfile::TempDir,
    _stop: oneshot::Sender<()>,
}

impl Scene {
    async fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = SharedClock::in_folder(folder.path());
        let options = Options { clock: clock.clone(), ..Options::default() };
        let store = Arc::new(Embedded::open(folder.path().join("store"), options).unwrap());
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
        store.create_queue(&queue(), config).await.unwrap();
        let message = NewMessage::new("1999").idempotency_key(&"order-7".parse().unwrap());
        store.send(&queue(), vec![message]).await.unwrap()[0].as_ref().unwrap();

        let listen = vec!["127.0.0.1:0".parse().unwrap()];
        let server = Server::new(ServerConfig { listen, ..ServerConfig::default() }, store.clone()).unwrap();
        let native = Native::new(store.clone(), server.shutdown(), None);
        let server = server.with_router(native.router(), &[]);
        let listeners = server.bind().await.unwrap();
        let endpoint = format!("http://{}", listeners[0].local_addr().unwrap());
        let (stop, stopped) = oneshot::channel::<()>();
        tokio::spawn(server.run(listeners, async { drop(stopped.await) }));
        let gate = TcpListener::bind("127.0.0.1:0").unwrap();
        Self { store, clock, endpoint, gate, folder, _stop: stop }
    }

    /// Runs the scene up to the zombie's resumption and its report. Returns the zombie's fence, the successor's fence,
    /// and the report.
    async fn play(&self, sink: &str, waits: &str) -> (u64, u64, Value) {
        let id = EntryId::of_queue(&queue(), "order-7".parse().unwrap());
        let zombie = start(self, "zombie", sink, waits);
        let zombie_fence: u64 = zombie.wait_for_prefix("holds").parse().unwrap();
        zombie.pause();
        let entry = self.store.entry(&id).await.unwrap().unwrap();
        assert_eq!((entry.state, entry.fence.0), (EntryState::Processing, zombie_fence));
        assert!(entry.owner.as_str().starts_with("zombie"), "{entry:?}");
        self.clock.advance(LEASE + Duration::from_secs(1));

        let successor = start(self, "successor", sink, "not");
        let fence: u64 = successor.wait_for_prefix("holds").parse().unwrap();
        let report = report_of(&successor);
        assert_eq!(
            (&report["done"], &report["takeovers"], &report["stale_settles"]),
            (&1.into(), &1.into(), &0.into())
        );
        let before = self.store.entry(&id).await.unwrap().unwrap();
        assert_eq!(before.outcome, Some(RecordedOutcome::done(Json::of("successor").unwrap())));
        assert_eq!((before.state, before.fence.0), (EntryState::Completed, fence));
        assert!(before.owner.as_str().starts_with("successor"), "{before:?}");
        let ledger = self.store.ledger_stats().await.unwrap();
        assert_eq!((ledger.granted, ledger.takeovers, ledger.completed, ledger.stale), (2, 1, 1, 0));

        // The zombie finds this byte when it resumes, so it can continue at once.
        self.gate.accept().unwrap().0.write_all(b"!").unwrap();
        zombie.resume();
        let report = report_of(&zombie);

        // Nothing that it reported has changed anything.
        assert_eq!(self.store.entry(&id).await.unwrap().unwrap(), before);
        let ledger = self.store.ledger_stats().await.unwrap();
        assert_eq!((ledger.granted, ledger.takeovers, ledger.completed), (2, 1, 1), "{ledger:?}");
        assert!(ledger.stale >= 1, "the zombie's completion was not refused: {ledger:?}");
        let stats = self.store.stats(&queue()).await.unwrap();
        assert_eq!((stats.totals.acked, stats.totals.retried, stats.totals.dead), (1, 0, 0), "{stats:?}");
        assert_eq!((stats.ready, stats.delayed, stats.in_flight, stats.parked), (0, 0, 0, 0), "{stats:?}");
        assert!(report["stale_settles"].as_u64().unwrap() >= 1, "{report}");
        assert!(fence > zombie_fence);
        (zombie_fence, fence, report)
    }

    fn sink(&self) -> Vec<(String, String, u64)> {
        sink_lines(self.folder.path())
    }
}

fn line(what: &str, name: &str, fence: u64) -> (String, String, u64) {
    (what.into(), name.into(), fence)
}

/// No ledger can stop a process that resumes and continues. A sink that checks nothing gets a second effect.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn its_word_is_refused_but_a_sink_that_checks_nothing_has_two_effects() {
    if std::env::var_os(ENDPOINT).is_some() {
        return;
    }
    let scene = Scene::new().await;
    let (zombie, successor, report) = scene.play("blind", "blocking").await;
    assert_eq!(scene.sink(), [line("effect", "successor", successor), line("effect", "zombie", zombie)]);
    assert_eq!(report["done"], 1, "it has run to its end: {report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sink_that_remembers_the_largest_fence_turns_it_away() {
    if std::env::var_os(ENDPOINT).is_some() {
        return;
    }
    let scene = Scene::new().await;
    let (zombie, successor, report) = scene.play("fenced", "blocking").await;
    assert_eq!(scene.sink(), [line("effect", "successor", successor), line("refused", "zombie", zombie)]);
    assert_eq!(report["done"], 1, "it has run to its end: {report}");
}

/// A handler that awaits is dropped at the await: the lease is checked before it continues, so it does nothing more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_awaits_does_not_go_on() {
    if std::env::var_os(ENDPOINT).is_some() {
        return;
    }
    let scene = Scene::new().await;
    let (_, successor, report) = scene.play("blind", "awaiting").await;
    assert_eq!(scene.sink(), [line("effect", "successor", successor)]);
    assert_eq!((&report["done"], &report["lost_leases"]), (&0.into(), &1.into()), "{report}");
}
