//! An outbox, a broker, relays as processes, and readers of topics.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_core::outbox::OutboxStore as _;
use hapax_faults::{KafkaServer, PostgresServer, Process};
use hapax_kafka::wire::{Cluster, Connect};
use hapax_relay::sink::KafkaSink;
use hapax_relay::{Relay, RelayOptions};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

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

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// A broker of a busy machine may not respond in time.
async fn opened_patiently(url: &str) -> KafkaSink {
    let mut attempts = 0;
    loop {
        attempts += 1;
        match KafkaSink::open(url).await {
            Ok(sink) => return sink,
            Err(error) => assert!(attempts < 6, "{error}"),
        }
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

/// What a reader sees.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    Committed,
    Uncommitted,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub partition: i32,
    pub key: Option<String>,
    pub value: String,
    pub headers: BTreeMap<String, String>,
    pub timestamp_ms: Option<i64>,
}

/// An outbox with a topic of its own.
pub struct Shop {
    pub database: Database,
    pub broker: &'static KafkaServer,
    /// The prefix of its topics.
    pub name: String,
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
        format!(
            "kafka://{address}/{}?positions={}&request_timeout_ms={}",
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
        let settings = format!("{} {} 1000", self.database.url, self.url(address));
        let relay =
            Process::start(Command::new(std::env::current_exe().unwrap()).env(CHILD, settings)).unwrap();
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
        create_topic(self.broker, name, partitions, configs);
    }

    /// Deletes a topic, and returns how many partitions it had, when the broker does not know it any more: until then it takes
    /// records for the old topic, although the controller has created another one with the same name.
    pub fn delete_topic(&self, name: &str) -> i32 {
        let admin: AdminClient<DefaultClientContext> = config(self.broker).create().unwrap();
        let metadata = admin.inner().fetch_metadata(Some(name), PATIENCE).unwrap();
        let partitions = metadata.topics()[0].partitions().len();
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        block_on(admin.delete_topics(&[name], &options)).unwrap().remove(0).unwrap();
        let (cluster, start) =
            (Cluster::new(Connect::plain([self.broker.address().to_string()])), Instant::now());
        while !matches!(block_on(cluster.topic_ids([name])), Ok(ids) if ids[name].is_err()) {
            assert!(start.elapsed() < PATIENCE, "topic {name} is not deleted");
            std::thread::sleep(Duration::from_millis(20));
        }
        i32::try_from(partitions).unwrap()
    }

    /// The records of a topic, partition by partition.
    pub fn read(&self, topic: &str, isolation: Isolation) -> Vec<Seen> {
        let isolation = if isolation == Isolation::Committed { "read_committed" } else { "read_uncommitted" };
        let consumer: BaseConsumer = config(self.broker)
            .set("group.id", "reader")
            .set("isolation.level", isolation)
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .create()
            .unwrap();
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).unwrap();
        let count = metadata.topics()[0].partitions().len();
        let mut assigned = TopicPartitionList::new();
        for partition in 0..i32::try_from(count).unwrap() {
            assigned.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&assigned).unwrap();
        let (start, mut ended, mut found) = (Instant::now(), 0, Vec::new());
        while ended < count {
            assert!(start.elapsed() < PATIENCE, "{topic}: {ended} of {count} partitions were read");
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(record)) => {
                    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                    let headers = record.headers().into_iter().flat_map(|headers| headers.iter());
                    found.push(Seen {
                        partition: record.partition(),
                        key: record.key().map(text),
                        value: text(record.payload().unwrap_or_default()),
                        headers: headers
                            .map(|header| (header.key.to_owned(), text(header.value.unwrap_or_default())))
                            .collect(),
                        timestamp_ms: record.timestamp().to_millis(),
                    });
                }
                Some(Err(KafkaError::PartitionEOF(_))) => ended += 1,
                // Connections that are lost are tried again.
                Some(Err(_)) | None => {}
            }
        }
        found.sort_by_key(|seen| seen.partition);
        found
    }
}

fn config(broker: &KafkaServer) -> ClientConfig {
    let mut config = ClientConfig::new();
    config.set("bootstrap.servers", broker.address().to_string());
    config
}

pub fn create_topic(broker: &KafkaServer, name: &str, partitions: i32, configs: &[(&str, &str)]) {
    let admin: AdminClient<DefaultClientContext> = config(broker).create().unwrap();
    let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
    for (key, value) in configs {
        topic = topic.set(key, value);
    }
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
    let start = Instant::now();
    // A topic of this name that was deleted may still be there for a moment.
    loop {
        match block_on(admin.create_topics([&topic], &options)).unwrap().remove(0) {
            Err((_, RDKafkaErrorCode::TopicAlreadyExists)) if start.elapsed() < PATIENCE => {
                std::thread::sleep(Duration::from_millis(50));
            }
            made => return drop(made.unwrap()),
        }
    }
}
