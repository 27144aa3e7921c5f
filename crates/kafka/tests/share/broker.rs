//! The broker of the tests, with short locks, and what most cases need of it.

use std::collections::HashMap;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::policy::RetryPolicy;
use hapax_core::{Delivery, Receive, Source as _};
use hapax_faults::KafkaServer;
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::share::{ShareOptions, ShareSource};
use hapax_kafka::wire::{Cluster, Connect};
use hapax_worker::{Counts, Worker, WorkerReport};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::RDKafkaErrorCode;
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

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
    runtime: tokio::runtime::Runtime,
}

impl Deref for Broker {
    type Target = KafkaServer;

    fn deref(&self) -> &KafkaServer {
        &self.server
    }
}

/// A record as a reader sees it.
#[derive(Debug, Clone)]
pub struct Read {
    pub value: String,
    pub headers: HashMap<String, String>,
}

impl Broker {
    pub fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { server: KafkaServer::start(&SETTINGS).unwrap(), runtime: runtime.unwrap() }
    }

    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    pub fn connect(&self) -> Connect {
        Connect::plain([self.address().to_string()])
    }

    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.address().to_string());
        config
    }

    pub fn create_topic(&self, name: &str, partitions: i32) {
        let admin: AdminClient<DefaultClientContext> = self.config().create().unwrap();
        let topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        let begun = Instant::now();
        // A topic of this name that was deleted may still be there for a moment.
        loop {
            match self.block_on(admin.create_topics([&topic], &options)).unwrap().remove(0) {
                Err((_, RDKafkaErrorCode::TopicAlreadyExists)) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                made => break drop(made.unwrap()),
            }
        }
        // The broker itself knows it a little later than the controller.
        self.block_on(async {
            let (cluster, start) = (Cluster::new(self.connect()), Instant::now());
            while !matches!(cluster.leaders(name).await, Ok(Ok(leaders)) if leaders.iter().all(|one| one.node.is_some()))
            {
                assert!(start.elapsed() < PATIENCE, "topic {name} has no leaders");
                cluster.forget_topic(name);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }

    /// Deletes a topic, and returns when the broker does not know it any more: until then it takes records for the old topic, although
    /// the controller has created another one with the same name.
    pub fn delete_topic(&self, name: &str) {
        let admin: AdminClient<DefaultClientContext> = self.config().create().unwrap();
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        self.block_on(admin.delete_topics(&[name], &options)).unwrap().remove(0).unwrap();
        self.block_on(async {
            let (cluster, start) = (Cluster::new(self.connect()), Instant::now());
            while !matches!(cluster.topic_ids([name]).await, Ok(ids) if ids[name].is_err()) {
                assert!(start.elapsed() < PATIENCE, "topic {name} is not deleted");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
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
    pub fn read(&self, topic: &str, count: usize) -> Vec<Read> {
        let consumer: BaseConsumer = self
            .config()
            .set("group.id", "reader")
            .set("isolation.level", "read_committed")
            .set("enable.auto.commit", "false")
            .create()
            .unwrap();
        let mut assigned = TopicPartitionList::new();
        assigned.add_partition_offset(topic, 0, Offset::Beginning).unwrap();
        consumer.assign(&assigned).unwrap();
        let (start, mut found) = (Instant::now(), Vec::new());
        while found.len() < count {
            assert!(start.elapsed() < PATIENCE, "{topic}: {} of {count} records", found.len());
            let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) else { continue };
            let mut headers = HashMap::new();
            for header in record.headers().into_iter().flat_map(|headers| headers.iter()) {
                let value = String::from_utf8_lossy(header.value.unwrap_or_default()).into_owned();
                headers.insert(header.key.to_owned(), value);
            }
            let value = String::from_utf8_lossy(record.payload().unwrap_or_default()).into_owned();
            found.push(Read { value, headers });
        }
        found
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
