//! A transactional worker is stopped (SIGSTOP) past its lease while a successor works, and resumes (SIGCONT): each message
//! takes effect once, whether its queue is in the database of the handlers, in another one, or behind a server.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hapax_client::Client;
use hapax_core::{
    Clock, EntryId, EntryState, GroupId, Ledger as _, NewMessage, QueueAdmin, QueueConfig, QueueName, Store,
    Tier,
};
use hapax_embedded::Embedded;
use hapax_faults::{PostgresServer, Process};
use hapax_postgres::{InboxOptions, Options, PostgresInbox, PostgresStore};
use hapax_server::native::Native;
use hapax_server::{Server, ServerConfig};
use hapax_worker::{Cx, Point, Worker};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use sqlx::{Connection as _, Executor as _, PgConnection};
use tokio::sync::oneshot;

const QUEUE: &str = "HAPAX_TEST_CHILD_QUEUE";
const STORE: &str = "HAPAX_TEST_CHILD_STORE";
const INBOX: &str = "HAPAX_TEST_CHILD_INBOX";
/// The point at which the zombie waits to be stopped; the successor has none.
const POINT: &str = "HAPAX_TEST_CHILD_POINT";
/// No time passes before the zombie is stopped, so it keeps this lease however slow the machine is. Then it passes at once.
const LEASE_ZOMBIE: Duration = Duration::from_mins(1);
const LEASE_SUCCESSOR: Duration = Duration::from_hours(10);
/// The server ends the session of a stopped process after this time.
const IDLE_MAX: Duration = Duration::from_secs(1);
/// Time for a process to finish.
const PATIENCE: Duration = Duration::from_mins(1);
/// How far a clock that the test moves is ahead of real time at most.
const STEP: Duration = Duration::from_secs(1);
const KEYS: [&str; 2] = ["order-1", "order-2"];

/// Where the queue is, beside the database of the handlers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    SameDatabase,
    OtherDatabase,
    /// Behind a server over the same database.
    ServerOverSame,
    ServerOverEmbedded,
}

fn main() -> ExitCode {
    if std::env::var_os(STORE).is_some() {
        block_on(child());
        return ExitCode::SUCCESS;
    }
    let mut tests = Vec::new();
    for (name, place) in [
        ("queue_in_the_same_database", Place::SameDatabase),
        ("queue_in_another_database", Place::OtherDatabase),
        ("queue_behind_a_server_over_the_same_database", Place::ServerOverSame),
        ("queue_behind_a_server_over_the_embedded_store", Place::ServerOverEmbedded),
    ] {
        for (kind, fifo) in [("standard", false), ("fifo", true)] {
            tests.push(Trial::ignorable_test(format!("{name}_{kind}"), move || match shared() {
                Ok(server) => {
                    for point in [Point::InEffect, Point::BeforeCommit, Point::AfterCommit] {
                        block_on(play(server, place, fifo, point));
                    }
                    Ok::<_, Failed>(Completion::Completed)
                }
                Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
            }));
        }
    }
    libtest_mimic::run(&Arguments::from_args(), tests).exit_code()
}

fn shared() -> Result<&'static PostgresServer, &'static str> {
    static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match std::env::var("HAPAX_TEST_POSTGRES") {
        Ok(url) => Ok(PostgresServer::given(&url)),
        Err(_) => PostgresServer::start_in_memory(),
    });
    server.as_ref().map_err(String::as_str)
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// Time that the test moves, in the embedded store: each byte of a file is a second that has passed.
struct FileClock(PathBuf);

impl Clock for FileClock {
    fn wall_ms(&self) -> u64 {
        1_800_000_000_000 + self.monotonic_us() / 1_000
    }

    fn monotonic_us(&self) -> u64 {
        std::fs::metadata(&self.0).map_or(0, |file| file.len()) * 1_000_000
    }

    /// Another thread moves it, so it has to be read repeatedly.
    fn sleep_for(&self, _us: u64) -> Option<Duration> {
        Some(Duration::from_millis(5))
    }
}

/// The same in a database: every time of a store comes from these two functions.
const CLOCK: &str = "
CREATE SCHEMA hapax_test;
CREATE TABLE hapax_test.clock (now_us bigint NOT NULL);
INSERT INTO hapax_test.clock VALUES (1800000000000000);
CREATE OR REPLACE FUNCTION hapax.now_us() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT now_us FROM hapax_test.clock';
CREATE OR REPLACE FUNCTION hapax.started_ms() RETURNS bigint LANGUAGE sql VOLATILE AS 'SELECT 1700000000000::bigint'";

/// A new database with the schema, and a clock that stands still.
async fn database(server: &'static PostgresServer) -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let name = format!("zombie_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
    server.sql("postgres", &format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")).unwrap();
    let url = server.url(&name);
    drop(open(&url).await);
    let mut db = PgConnection::connect(&url).await.unwrap();
    db.execute(CLOCK).await.unwrap();
    url
}

async fn open(url: &str) -> PostgresStore {
    PostgresStore::open(url, Options { migrate: true, ..Options::default() }).await.unwrap()
}

fn queue_name(fifo: bool) -> QueueName {
    QueueName::new(if fifo { "jobs.fifo" } else { "jobs" }).unwrap()
}

/// A queue with two messages, of one group if it is FIFO, and the table of the effects.
struct Scene {
    /// The queue's store, in this process.
    store: Arc<dyn Store>,
    /// The queue's store, as the workers reach it.
    url: String,
    /// The database of the handlers.
    inbox: String,
    /// Moves the clock of the queue's store.
    advance: Advance,
    folder: tempfile::TempDir,
    _stop: oneshot::Sender<()>,
}

enum Advance {
    File(PathBuf),
    Database(PgConnection),
}

impl Advance {
    async fn by(&mut self, time: Duration) {
        match self {
            Self::File(path) => {
                let mut file = OpenOptions::new().create(true).append(true).open(path).unwrap();
                file.write_all(&vec![b'.'; time.as_secs() as usize]).unwrap();
            }
            Self::Database(db) => {
                let advance = sqlx::query("UPDATE hapax_test.clock SET now_us = now_us + $1");
                advance.bind(time.as_micros() as i64).execute(db).await.unwrap();
            }
        }
    }
}

fn embedded(folder: &Path) -> Arc<Embedded> {
    let clock = Arc::new(FileClock(folder.join("clock")));
    let options = hapax_embedded::Options { clock, ..hapax_embedded::Options::default() };
    Arc::new(Embedded::open(folder.join("store"), options).unwrap())
}

/// Serves a store in this process.
async fn serve(store: Arc<dyn Store>, stopped: oneshot::Receiver<()>) -> String {
    let listen = vec!["127.0.0.1:0".parse().unwrap()];
    let server = Server::new(ServerConfig { listen, ..ServerConfig::default() }, store.clone()).unwrap();
    let native = Native::new(store, server.shutdown(), None);
    let server = server.with_router(native.router(), &[]);
    let listeners = server.bind().await.unwrap();
    let endpoint = format!("http://{}", listeners[0].local_addr().unwrap());
    tokio::spawn(server.run(listeners, async { drop(stopped.await) }));
    endpoint
}

impl Scene {
    async fn new(server: &'static PostgresServer, place: Place, fifo: bool) -> Self {
        let (folder, inbox) = (tempfile::tempdir().unwrap(), database(server).await);
        let mut db = PgConnection::connect(&inbox).await.unwrap();
        let table = "CREATE TABLE effects (at bigint GENERATED ALWAYS AS IDENTITY, key text, by text)";
        db.execute(table).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let (store, mut url): (Arc<dyn Store>, String) = match place {
            Place::SameDatabase | Place::ServerOverSame => (Arc::new(open(&inbox).await), inbox.clone()),
            Place::OtherDatabase => {
                let other = database(server).await;
                (Arc::new(open(&other).await), other)
            }
            Place::ServerOverEmbedded => (embedded(folder.path()), String::new()),
        };
        let advance = if place == Place::ServerOverEmbedded {
            Advance::File(folder.path().join("clock"))
        } else {
            Advance::Database(PgConnection::connect(&url).await.unwrap())
        };
        if matches!(place, Place::ServerOverSame | Place::ServerOverEmbedded) {
            url = serve(store.clone(), stopped).await;
        }
        let base = if fifo { QueueConfig::fifo() } else { QueueConfig::sqs() };
        let config = QueueConfig { tier: Tier::Transactional, ..base };
        let queue = queue_name(fifo);
        store.create_queue(&queue, config).await.unwrap();
        for key in KEYS {
            let mut message = NewMessage::new("1999").idempotency_key(&key.parse().unwrap());
            if fifo {
                message = message.group(GroupId::new("a").unwrap()).dedup(key.parse().unwrap());
            }
            store.send(&queue, vec![message]).await.unwrap().remove(0).unwrap();
        }
        Self { store, url, inbox, advance, folder, _stop: stop }
    }

    fn start(&self, fifo: bool, point: Option<Point>) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(STORE, &self.url).env(INBOX, &self.inbox).env(QUEUE, queue_name(fifo).as_str());
        if let Some(point) = point {
            command.env(POINT, point.name());
        }
        Process::start(&mut command).unwrap()
    }
}

async fn play(server: &'static PostgresServer, place: Place, fifo: bool, point: Point) {
    let what = format!("{place:?}, fifo {fifo}, stopped at {point}");
    let mut scene = Scene::new(server, place, fifo).await;
    let mut zombie = scene.start(fifo, Some(point));
    zombie.wait_for_line("at the point");
    zombie.pause();

    scene.advance.by(LEASE_ZOMBIE).await;
    let mut successor = scene.start(fifo, None);
    let (start, mut passed) = (Instant::now(), Duration::ZERO);
    let status = loop {
        if let Some(status) = successor.ended() {
            break status;
        }
        assert!(start.elapsed() < PATIENCE, "{what}: the successor hangs: {}", successor.log());
        // As fast as real time: a store looks for delays only as far back as a commit may take on its clock.
        if passed < start.elapsed() {
            scene.advance.by(STEP).await;
            passed += STEP;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(status.success(), "{what}: {}", successor.log());

    // It continues as soon as it is resumed.
    zombie.write_line("continue");
    zombie.resume();
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = zombie.ended() {
            break status;
        }
        assert!(Instant::now() < deadline, "{what}: the zombie hangs: {}", zombie.log());
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    assert!(status.success(), "{what}: {}", zombie.log());
    scene.check(&what, fifo, point).await;
}

impl Scene {
    /// Each message took effect once, and was acked.
    async fn check(&self, what: &str, fifo: bool, point: Point) {
        let mut db = PgConnection::connect(&self.inbox).await.unwrap();
        let select = sqlx::query_as("SELECT key, by FROM effects ORDER BY at");
        let mut effects: Vec<(String, String)> = select.fetch_all(&mut db).await.unwrap();
        if !fifo {
            effects.sort();
        }
        let keys: Vec<&str> = effects.iter().map(|(key, _)| key.as_str()).collect();
        assert_eq!(keys, KEYS, "{what}: {effects:?}");
        let zombies = effects.iter().filter(|(_, by)| by == "zombie").count();
        let wanted = usize::from(point == Point::AfterCommit);
        assert_eq!(zombies, wanted, "{what}: what the zombie had not committed is rolled back: {effects:?}");
        let (queue, ledger) = (queue_name(fifo), open(&self.inbox).await);
        for key in KEYS {
            let entry = ledger.entry(&EntryId::of_queue(&queue, key.parse().unwrap())).await.unwrap();
            assert_eq!(entry.map(|entry| entry.state), Some(EntryState::Completed), "{what}: {key}");
        }
        let stats = self.store.stats(&queue).await.unwrap();
        assert_eq!((stats.ready, stats.delayed, stats.in_flight, stats.parked), (0, 0, 0, 0), "{what}");
        assert_eq!(stats.totals.dead, 0, "{what}: {stats:?}");
        assert!(self.folder.path().exists());
    }
}

fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

async fn store(url: &str) -> Arc<dyn QueueAdmin> {
    if url.starts_with("http") {
        Arc::new(Client::connect(url, None).await.unwrap())
    } else {
        Arc::new(open(url).await)
    }
}

/// The zombie or its successor: a worker until the queue is at rest.
async fn child() {
    let var = |name| std::env::var(name).unwrap();
    let (queue, store) = (QueueName::new(var(QUEUE)).unwrap(), store(&var(STORE)).await);
    let ledger = open(&var(INBOX)).await;
    let point: Option<Point> = std::env::var(POINT).ok().map(|point| point.parse().unwrap());
    let by = if point.is_some() { "zombie" } else { "successor" };
    let (idle_max, lease) = match point {
        Some(_) => (IDLE_MAX, LEASE_ZOMBIE),
        None => (Duration::from_mins(1), LEASE_SUCCESSOR),
    };
    let options = InboxOptions { idle_max, ..InboxOptions::default() };
    let inbox = PostgresInbox::with_options(&ledger, options).unwrap();
    let waited = AtomicBool::new(false);
    let hook = move |passed: Point| {
        if Some(passed) == point && !waited.swap(true, Ordering::SeqCst) {
            say("at the point");
            std::io::stdin().read_line(&mut String::new()).unwrap();
        }
    };
    let builder = Worker::over(store.clone(), queue.clone()).concurrency(1).lease(lease).hook(hook);
    let worker = builder.async_transactional_handler(&inbox, move |_: u32, db: &mut PgConnection, cx: Cx| {
        Box::pin(async move {
            let insert = sqlx::query("INSERT INTO effects (key, by) VALUES ($1, $2)");
            insert.bind(cx.idempotency_key().as_str()).bind(by).execute(db).await?;
            cx.effect_point().await;
            Ok::<_, sqlx::Error>(by)
        })
    });
    let rest = async move {
        loop {
            let stats = store.stats(&queue).await.unwrap();
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let worker = worker.build().await.unwrap();
    // No time limit of its own: it would count the time for which the process is stopped.
    worker.run(rest).await.unwrap();
}
