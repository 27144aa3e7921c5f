//! An outbox, a broker, relays as processes, and readers of topics.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_core::outbox::OutboxStore as _;
pub use hapax_faults::Isolation;
use hapax_faults::{KafkaServer, KafkaTopics, PostgresServer, Process, ReadRecord};
use hapax_relay::sink::KafkaSink;
use hapax_relay::{Relay, RelayOptions};

use crate::outbox::{Database, block_on, quick};

/// Timeout of every wait: a broker that starts again beside other work takes minutes. Only failures reach it.
pub const PATIENCE: Duration = Duration::from_mins(4);

pub struct Setting {
    pub server: &'static PostgresServer,
    pub broker: &'static KafkaServer,
}

pub fn broker() -> &'static KafkaServer {
    static BROKER: OnceLock<KafkaServer> = OnceLock::new();
    BROKER.get_or_init(|| KafkaServer::start(&[]).unwrap())
}

const CHILD: &str = "HAPAX_TEST_RELAY";
/// Less than a test waits for the first line of a process.
const STARTED_WITHIN: Duration = Duration::from_secs(50);

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A broker of a busy machine may not respond in time; one that was killed is known to the others for some seconds.
async fn opened_patiently(url: &str) -> KafkaSink {
    let start = Instant::now();
    loop {
        match KafkaSink::open(url).await {
            Ok(sink) => return sink,
            Err(error) => assert!(start.elapsed() < STARTED_WITHIN, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}

/// A relay until it is killed. Its environment has the outbox, the sink, and the lease in milliseconds.
pub fn run_child() -> ! {
    let settings = std::env::var(CHILD).unwrap();
    let [from, to, lease_ms] = settings.split(' ').collect::<Vec<_>>()[..] else { panic!("{settings}") };
    block_on(async {
        let store =
            hapax_postgres::PostgresStore::open(from, hapax_postgres::Options::default()).await.unwrap();
        let sink = opened_patiently(to).await;
        let lease = Duration::from_millis(lease_ms.parse().unwrap());
        let options = RelayOptions { lease, ..quick("orders") };
        println!("ready");
        let relay =
            Relay::new(std::sync::Arc::new(store.outbox().unwrap()), std::sync::Arc::new(sink), options);
        relay.run(std::future::pending()).await.unwrap();
    });
    std::process::exit(1);
}

/// An outbox with a topic of its own.
pub struct Shop {
    pub database: Database,
    pub broker: &'static KafkaServer,
    /// The prefix of its topics.
    pub name: String,
    /// The brokers that are asked for its topics, `HOST:PORT,…`.
    pub brokers: String,
    /// Of its relays.
    pub request_timeout: Duration,
    sent: std::sync::Mutex<BTreeMap<String, u64>>,
}

impl Shop {
    pub fn new(setting: &Setting) -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("shop{}", NUMBER.fetch_add(1, Ordering::Relaxed));
        let database = block_on(Database::new(setting.server));
        let shop = Self {
            database,
            broker: setting.broker,
            name,
            brokers: setting.broker.address().to_string(),
            request_timeout: Duration::from_secs(10),
            sent: std::sync::Mutex::default(),
        };
        shop.create_topic(&shop.topic(), 3, &[]);
        shop
    }

    pub fn topic(&self) -> String {
        format!("{}.orders", self.name)
    }

    pub fn positions(&self) -> String {
        format!("{}-positions", self.name)
    }

    pub fn url(&self, address: std::net::SocketAddr) -> String {
        self.url_of(&address.to_string())
    }

    /// The sink with these brokers, `HOST:PORT,…`.
    pub fn url_of(&self, brokers: &str) -> String {
        format!(
            "kafka://{brokers}/{}?positions={}&request_timeout_ms={}",
            self.name,
            self.positions(),
            self.request_timeout.as_millis()
        )
    }

    /// A relay that speaks with the broker itself.
    pub fn relay(&self) -> Process {
        self.relay_at(self.broker.address())
    }

    /// A relay behind the proxy.
    pub fn proxied_relay(&self) -> Process {
        self.relay_at(self.broker.proxied())
    }

    fn relay_at(&self, address: std::net::SocketAddr) -> Process {
        self.relay_of(&self.url(address), &[])
    }

    /// A relay with this sink and more of an environment.
    pub fn relay_of(&self, sink: &str, environment: &[(&str, &Path)]) -> Process {
        let settings = format!("{} {sink} 1000", self.database.url);
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(CHILD, settings).envs(environment.iter().copied());
        let relay = Process::start(&mut command).unwrap();
        relay.wait_for_line("ready");
        relay
    }

    /// Commits the next `count` messages of each key, one after the other.
    pub fn enqueue(&self, keys: &[&str], count: u64) {
        for _ in 0..count {
            let mut sent = self.sent.lock().unwrap();
            let mut messages = Vec::new();
            for key in keys {
                let number = sent.entry((*key).to_owned()).or_default();
                *number += 1;
                messages.push((*key, number.to_string()));
            }
            let messages: Vec<(&str, &str)> =
                messages.iter().map(|(key, body)| (*key, body.as_str())).collect();
            block_on(self.database.enqueue(&messages));
        }
    }

    /// Waits until the outbox has recorded everything as published.
    pub fn until_published(&self) {
        self.until("everything is published", |status| status.lag == 0 && status.held == 0);
    }

    pub fn until(&self, what: &str, holds: impl Fn(&hapax_core::outbox::RouteStatus) -> bool) {
        let start = Instant::now();
        loop {
            let status = block_on(async { self.database.outbox().await.status().await });
            if status.as_ref().is_ok_and(|routes| routes.first().is_some_and(&holds)) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "not in time: {what}: {status:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Everything that was sent is in the topic once, in order per key.
    pub fn require_exact(&self, context: &str) {
        let mut seen: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for record in self.read(&self.topic(), Isolation::Committed) {
            seen.entry(record.key.unwrap()).or_default().push(record.value.parse().unwrap());
        }
        let sent = self.sent.lock().unwrap();
        for (key, count) in &*sent {
            let expected: Vec<u64> = (1..=*count).collect();
            assert_eq!(seen.get(key), Some(&expected), "{context}: key {key}: each once, in order");
        }
        assert_eq!(seen.len(), sent.len(), "{context}: no other keys");
    }

    /// Records that only a reader of everything sees.
    pub fn aborted(&self) -> usize {
        let topic = self.topic();
        self.read(&topic, Isolation::Uncommitted).len() - self.read(&topic, Isolation::Committed).len()
    }

    pub fn create_topic(&self, name: &str, partitions: i32, configs: &[(&str, &str)]) {
        self.topics().create(name, partitions, configs);
    }

    /// Deletes a topic, and returns how many partitions it had, when the broker does not know it any more.
    pub fn delete_topic(&self, name: &str) -> i32 {
        self.topics().delete(name)
    }

    /// The records of a topic, partition by partition.
    pub fn read(&self, topic: &str, isolation: Isolation) -> Vec<ReadRecord> {
        self.topics().read(topic, isolation)
    }

    pub fn topics(&self) -> KafkaTopics {
        KafkaTopics::new(&self.brokers)
    }
}

pub fn create_topic(broker: &KafkaServer, name: &str, partitions: i32, configs: &[(&str, &str)]) {
    KafkaTopics::new(broker.address().to_string()).create(name, partitions, configs);
}
