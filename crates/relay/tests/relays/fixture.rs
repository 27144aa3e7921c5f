//! A database with an outbox, and a sink that remembers what it got.

use std::collections::{BTreeMap, HashSet};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax_core::outbox::{
    NewOutboxMessage, OutboxMessage, OutboxStore, PublishAnswer, Publisher, SinkDedup, SinkDescription,
};
use hapax_core::policy::RetryPolicy;
use hapax_faults::PostgresServer;
use hapax_postgres::{Options, PostgresOutbox, PostgresStore};
use hapax_relay::{Relay, RelayOptions, RelayWatch};
use sqlx::{Connection as _, PgConnection};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Timeout of every wait; only failures reach it.
pub const PATIENCE: Duration = Duration::from_mins(1);

pub fn shared() -> Result<&'static PostgresServer, &'static str> {
    static SERVER: OnceLock<Result<PostgresServer, String>> = OnceLock::new();
    let server = SERVER.get_or_init(|| match std::env::var("HAPAX_TEST_POSTGRES") {
        Ok(url) => Ok(PostgresServer::given(&url)),
        Err(_) => PostgresServer::start(&["fsync=off"]),
    });
    server.as_ref().map_err(String::as_str)
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

pub fn is_long() -> bool {
    std::env::var_os("HAPAX_LONG").is_some()
}

pub async fn eventually<F: Future<Output = bool>>(what: &str, mut holds: impl FnMut() -> F) {
    let start = Instant::now();
    while !holds().await {
        assert!(start.elapsed() < PATIENCE, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub struct Database {
    pub server: &'static PostgresServer,
    pub name: String,
    pub url: String,
}

impl Database {
    pub async fn new(server: &'static PostgresServer) -> Self {
        let it = Self::copy_of(server, "template0");
        hapax_postgres::migrate(&it.url, &Options::default(), false).await.unwrap();
        it
    }

    pub fn copy_of(server: &'static PostgresServer, template: &str) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("relay_{}_{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        server
            .sql("postgres", &format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE {template}"))
            .unwrap();
        Self { server, url: server.url(&name), name }
    }

    pub async fn store(&self) -> PostgresStore {
        PostgresStore::open(&self.url, Options::default()).await.unwrap()
    }

    pub async fn outbox(&self) -> PostgresOutbox {
        self.store().await.outbox().unwrap()
    }

    pub async fn connect(&self) -> PgConnection {
        PgConnection::connect(&self.url).await.unwrap()
    }

    /// Ends all connections, and lets none in.
    pub fn refuse_connections(&self) {
        let name = &self.name;
        let sql = |sql: &str| self.server.sql("postgres", sql).unwrap();
        sql(&format!("ALTER DATABASE {name} ALLOW_CONNECTIONS false"));
        sql(&format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'"));
        let left = format!("SELECT count(*) FROM pg_stat_activity WHERE datname = '{name}'");
        let start = Instant::now();
        while sql(&left) != "0" {
            assert!(start.elapsed() < PATIENCE, "connections of {name} do not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn accept_connections(&self) {
        let sql = format!("ALTER DATABASE {} ALLOW_CONNECTIONS true", self.name);
        self.server.sql("postgres", &sql).unwrap();
    }

    /// Commits a message for each key and body.
    pub async fn enqueue(&self, messages: &[(&str, &str)]) {
        let (outbox, mut db) = (self.outbox().await, self.connect().await);
        for (key, body) in messages {
            let message = NewOutboxMessage::new("orders", (*body).to_owned()).key(*key);
            outbox.enqueue(&mut db, &message).await.unwrap();
        }
    }
}

type Script = Box<dyn Fn(&OutboxMessage) -> Option<PublishAnswer> + Send + Sync>;

/// A sink that remembers. What its script does not answer is published.
pub struct Recorder {
    pub got: Mutex<Vec<OutboxMessage>>,
    pub calls: AtomicUsize,
    script: Mutex<Script>,
    ids: Mutex<HashSet<String>>,
    dedup: bool,
    /// A message with this body takes this long.
    slow: Mutex<Option<(String, Duration)>>,
}

impl Recorder {
    pub fn new(dedup: bool) -> Arc<Self> {
        Arc::new(Self {
            got: Mutex::default(),
            calls: AtomicUsize::new(0),
            script: Mutex::new(Box::new(|_| None)),
            ids: Mutex::default(),
            dedup,
            slow: Mutex::default(),
        })
    }

    pub fn answer(&self, script: impl Fn(&OutboxMessage) -> Option<PublishAnswer> + Send + Sync + 'static) {
        *self.script.lock().unwrap() = Box::new(script);
    }

    pub fn slow(&self, body: &str, time: Duration) {
        *self.slow.lock().unwrap() = Some((body.to_owned(), time));
    }

    pub fn count(&self) -> usize {
        self.got.lock().unwrap().len()
    }

    pub fn bodies(&self) -> Vec<String> {
        self.got
            .lock()
            .unwrap()
            .iter()
            .map(|message| String::from_utf8_lossy(&message.body).into_owned())
            .collect()
    }

    /// The bodies of a key, in the order in which they came.
    pub fn of_key(&self, key: &str) -> Vec<String> {
        let got = self.got.lock().unwrap();
        let of = got.iter().filter(|message| message.key.as_deref() == Some(key));
        of.map(|message| String::from_utf8_lossy(&message.body).into_owned()).collect()
    }

    /// Waits until this many messages have come.
    pub async fn wait_for(&self, count: usize) {
        eventually(&format!("{count} messages, there are {:?}", self.bodies().len()), async || {
            self.count() >= count
        })
        .await;
    }
}

#[async_trait]
impl Publisher for Recorder {
    fn describe(&self) -> SinkDescription {
        let dedup = if self.dedup { SinkDedup::Window { window_ms: 86_400_000 } } else { SinkDedup::None };
        SinkDescription {
            name: "recorder".into(),
            dedup,
            delays: false,
            batch_max: 100,
            calls_max: 3,
            warnings: vec![],
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        let mut failed: HashSet<&str> = HashSet::new();
        let mut answers = Vec::new();
        for message in batch {
            let slow = self.slow.lock().unwrap().clone();
            if let Some((body, time)) = slow
                && message.body == body.into_bytes()
            {
                tokio::time::sleep(time).await;
            }
            let key = message.ordered_key();
            let answer = if key.is_some_and(|key| failed.contains(key)) {
                PublishAnswer::NotTried
            } else if let Some(answer) = (self.script.lock().unwrap())(message) {
                answer
            } else if self.dedup && !self.ids.lock().unwrap().insert(message.id.clone()) {
                PublishAnswer::Duplicate
            } else {
                self.got.lock().unwrap().push(message.clone());
                PublishAnswer::Published
            };
            if !matches!(answer, PublishAnswer::Published | PublishAnswer::Duplicate) {
                failed.extend(key);
            }
            answers.push(answer);
        }
        answers
    }
}

/// Options with short times.
pub fn quick(route: &str) -> RelayOptions {
    RelayOptions {
        retry: RetryPolicy::exponential(5, 20).attempts(5),
        outage: RetryPolicy::exponential(5, 50),
        lease: Duration::from_secs(5),
        ..RelayOptions::route(route)
    }
}

/// A relay that runs in a task.
pub struct Running {
    pub watch: RelayWatch,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<()>,
}

impl Running {
    pub fn start(store: Arc<dyn OutboxStore>, sink: Arc<dyn Publisher>, options: RelayOptions) -> Self {
        let relay = Relay::new(store, sink, options);
        let (stop, stopped) = oneshot::channel();
        let watch = relay.watch();
        let task = tokio::spawn(async move {
            relay.run(async { drop(stopped.await) }).await.unwrap();
        });
        Self { watch, stop: Some(stop), task }
    }

    /// Ends it in order.
    pub async fn stop(mut self) {
        let _ = self.stop.take().unwrap().send(());
        tokio::time::timeout(PATIENCE, &mut self.task).await.expect("it stops in time").unwrap();
    }

    /// As `kill -9` would: nothing more is done.
    pub async fn kill(self) {
        self.task.abort();
        let _ = self.task.await;
    }
}

/// What the sink got, against what was committed: keys with the count of their messages, whose bodies are 1, 2, 3, …
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub lost: usize,
    pub repeated: usize,
    pub inverted: usize,
}

pub fn judge(committed: &BTreeMap<String, u64>, got: &[(String, u64)]) -> Verdict {
    let mut verdict = Verdict::default();
    let mut seen: BTreeMap<&str, (HashSet<u64>, u64)> = BTreeMap::new();
    for (key, number) in got {
        let (numbers, last) = seen.entry(key).or_default();
        if !numbers.insert(*number) {
            verdict.repeated += 1;
            continue;
        }
        if number < last {
            verdict.inverted += 1;
        }
        *last = (*last).max(*number);
    }
    for (key, count) in committed {
        let numbers = seen.get(key.as_str()).map_or(0, |(numbers, _)| numbers.len() as u64);
        assert!(
            numbers <= *count,
            "key {key}: {numbers} messages of {count}: something was published that was rolled back"
        );
        verdict.lost += (count - numbers) as usize;
    }
    verdict
}
