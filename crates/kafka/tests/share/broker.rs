//! The broker of the tests, with short locks, and what most cases need of it.

use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::policy::RetryPolicy;
use hapax_core::{Delivery, Receive, Source as _};
use hapax_faults::{Isolation, KafkaServer, KafkaTopics, ReadRecord, RedisTls};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::share::{ShareOptions, ShareSource};
use hapax_kafka::wire::Connect;
use hapax_worker::{Counts, Worker, WorkerReport};
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};

/// Time for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_mins(2);
/// How long a record is locked.
pub const LOCK: Duration = Duration::from_secs(3);

/// The least that the broker accepts for locks, heartbeats and sessions is lowered, so that a test can wait for their ends.
const SETTINGS: [&str; 7] = [
    "group.share.min.record.lock.duration.ms=1000",
    "group.share.record.lock.duration.ms=3000",
    "group.share.min.heartbeat.interval.ms=200",
    "group.share.heartbeat.interval.ms=300",
    "group.share.min.session.timeout.ms=1000",
    "group.share.session.timeout.ms=6000",
    "log.message.timestamp.type=CreateTime",
];

pub struct Broker {
    server: KafkaServer,
    tls: RedisTls,
    runtime: tokio::runtime::Runtime,
}

impl Deref for Broker {
    type Target = KafkaServer;

    fn deref(&self) -> &KafkaServer {
        &self.server
    }
}

impl Broker {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let tls = RedisTls::new().unwrap();
        let server = KafkaServer::start_secured(&tls, &SETTINGS).unwrap();
        Self { server, tls, runtime: runtime.unwrap() }
    }

    /// The certificates of its encrypted listeners.
    pub fn tls(&self) -> &RedisTls {
        &self.tls
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn connect(&self) -> Connect {
        Connect::plain([self.address().to_string()])
    }

    pub fn config(&self) -> ClientConfig {
        self.topics().config()
    }

    pub fn create_topic(&self, name: &str, partitions: i32) {
        self.topics().create(name, partitions, &[]);
    }

    /// Deletes a topic, and returns when the broker does not know it any more.
    pub fn delete_topic(&self, name: &str) {
        self.topics().delete(name);
    }

    fn topics(&self) -> KafkaTopics {
        KafkaTopics::new(self.address().to_string())
    }

    /// Creates a topic with its dead letters and retries, and a group that begins at its start.
    pub fn prepare(&self, name: &str, partitions: i32) -> ShareOptions {
        let (dead, retry) = (format!("{name}-dead"), format!("{name}-retry"));
        for (topic, partitions) in [(name, partitions), (&dead, 1), (&retry, 1)] {
            self.create_topic(topic, partitions);
        }
        let options = options(self.connect(), name);
        self.block_on(options.configure_group()).unwrap();
        options
    }

    /// Sends values in one transaction, so that the log has a marker behind them.
    pub fn send(&self, topic: &str, values: impl IntoIterator<Item = String>) {
        self.block_on(async {
            let config = ProducerConfig::new(self.connect(), &format!("{topic}-sender"));
            let mut producer = Producer::connect(config).await.unwrap();
            producer.begin().unwrap();
            for value in values {
                producer.send(NewRecord::new(topic, value.clone(), value)).await.unwrap();
            }
            producer.commit().await.unwrap();
        });
    }

    pub fn source(&self, options: ShareOptions) -> Arc<ShareSource> {
        Arc::new(self.block_on(ShareSource::connect(options)).unwrap())
    }

    /// The records of a topic, as soon as there are this many.
    pub fn read(&self, topic: &str, count: usize) -> Vec<ReadRecord> {
        let start = Instant::now();
        loop {
            let found = self.topics().read(topic, Isolation::Committed);
            if found.len() >= count {
                return found;
            }
            assert!(start.elapsed() < PATIENCE, "{topic}: {} of {count} records", found.len());
        }
    }

    /// The number of records in partition 0 of a topic, markers included.
    pub fn end(&self, topic: &str) -> i64 {
        let consumer: BaseConsumer = self.config().create().unwrap();
        consumer.fetch_watermarks(topic, 0, PATIENCE).unwrap().1
    }
}

/// Delays that fit into a lock.
pub fn options(connect: Connect, name: &str) -> ShareOptions {
    let retry = RetryPolicy { base_ms: 100, cap_ms: 1_000, ..RetryPolicy::default() }.attempts(4);
    ShareOptions { retry, ..ShareOptions::new(connect, name, name, &format!("{name}-dead")) }
}

/// The next deliveries, of at least one record.
pub async fn next(source: &ShareSource, max: usize) -> Vec<Delivery> {
    let start = Instant::now();
    loop {
        let receive = Receive { wait_ms: Some(1_000), ..Receive::up_to(max) };
        match source.next(receive).await {
            Ok(found) if !found.is_empty() => return found,
            found => assert!(start.elapsed() < PATIENCE, "nothing was delivered: {found:?}"),
        }
    }
}

/// Asserts that nothing is there to be delivered.
pub async fn is_empty(source: &ShareSource) {
    for _ in 0..3 {
        let found = source.next(Receive { wait_ms: Some(0), ..Receive::up_to(10) }).await.unwrap();
        assert_eq!(found, [], "everything was settled");
    }
}

/// Runs a worker until its counters are as expected.
pub async fn run_until(worker: Worker, until: impl Fn(&Counts) -> bool) -> WorkerReport {
    let watch = worker.watch();
    let end = async {
        let start = Instant::now();
        while !until(&watch.counts()) {
            assert!(start.elapsed() < PATIENCE, "{:?}", watch.counts());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    worker.run(end).await.unwrap()
}
