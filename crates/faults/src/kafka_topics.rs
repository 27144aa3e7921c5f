//! Topics as tests make, delete and read them, by librdkafka.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{Headers as _, Message as _};
use rdkafka::metadata::{MetadataPartition, MetadataTopic};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// Time of every wait: a broker that starts again beside other work takes minutes. Only failures reach it.
const PATIENCE: Duration = Duration::from_mins(4);
const POLL: Duration = Duration::from_millis(20);
/// As many copies as the brokers make by default.
const BROKERS_DEFAULT: i32 = -1;

/// What a reader sees of a transaction that is open or was aborted: nothing, or its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    /// Nothing.
    Committed,
    /// Its records.
    Uncommitted,
}

/// A record as a reader sees it. Bytes that are not UTF-8 are replaced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReadRecord {
    /// Its partition.
    pub partition: i32,
    /// Its key.
    pub key: Option<String>,
    /// Its value; empty if it has none.
    pub value: String,
    /// Its headers; of several with one name, the last.
    pub headers: BTreeMap<String, String>,
    /// Its time.
    pub timestamp_ms: Option<i64>,
}

/// The topics of a cluster. Its calls block, and panic when something does not succeed in time: they are for tests.
#[derive(Debug, Clone)]
pub struct KafkaTopics {
    bootstrap: String,
}

impl KafkaTopics {
    /// Those of the brokers with these addresses, `HOST:PORT,…`.
    pub fn new(bootstrap: impl Into<String>) -> Self {
        Self { bootstrap: bootstrap.into() }
    }

    /// A configuration of librdkafka with the addresses.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.bootstrap);
        config
    }

    fn admin(&self) -> AdminClient<DefaultClientContext> {
        self.config().create().expect("a client")
    }

    /// Creates a topic with settings of its own, and returns when the broker knows its leaders.
    pub fn create(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        let (admin, start) = (self.admin(), Instant::now());
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(BROKERS_DEFAULT));
        for (key, value) in settings {
            topic = topic.set(key, value);
        }
        // A topic of this name that was deleted may still be there for a moment.
        loop {
            match block_on(admin.create_topics([&topic], &options())).expect("the broker answers").remove(0) {
                Err((_, RDKafkaErrorCode::TopicAlreadyExists)) if start.elapsed() < PATIENCE => {
                    std::thread::sleep(POLL);
                }
                made => break drop(made.expect("the topic is made")),
            }
        }
        // The broker itself knows it a little later than the controller.
        while !leaders(&admin, name).is_some_and(|leaders| leaders.iter().all(|leader| *leader >= 0)) {
            assert!(start.elapsed() < PATIENCE, "topic {name} has no leaders");
            std::thread::sleep(POLL);
        }
    }

    /// Deletes a topic, and returns how many partitions it had, when the broker does not know it any more: until then it takes
    /// records for the old topic, although the controller has created another one with the same name.
    pub fn delete(&self, name: &str) -> i32 {
        let (admin, start) = (self.admin(), Instant::now());
        let partitions = leaders(&admin, name).map_or(0, |leaders| leaders.len());
        let deleted =
            block_on(admin.delete_topics(&[name], &options())).expect("the broker answers").remove(0);
        deleted.expect("the topic is deleted");
        while leaders(&admin, name).is_some() {
            assert!(start.elapsed() < PATIENCE, "topic {name} is not deleted");
            std::thread::sleep(POLL);
        }
        i32::try_from(partitions).expect("few partitions")
    }

    /// Waits until there are this many brokers, and every partition has a copy in sync on each.
    pub fn wait_for_copies(&self, brokers: usize) {
        let (admin, start) = (self.admin(), Instant::now());
        loop {
            let is_whole = admin.inner().fetch_metadata(None, PATIENCE).is_ok_and(|found| {
                let mut partitions = found.topics().iter().flat_map(MetadataTopic::partitions);
                found.brokers().len() == brokers
                    && partitions.all(|partition| partition.isr().len() == brokers)
            });
            if is_whole {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "copies are missing");
            std::thread::sleep(POLL);
        }
    }

    /// The records of a topic, partition by partition, up to the current end: of the records that this reader may see, which for
    /// [`Isolation::Committed`] end at the first open transaction.
    pub fn read(&self, topic: &str, isolation: Isolation) -> Vec<ReadRecord> {
        let isolation = if isolation == Isolation::Committed { "read_committed" } else { "read_uncommitted" };
        let consumer: BaseConsumer = self
            .config()
            .set("group.id", "reader")
            .set("isolation.level", isolation)
            .set("enable.auto.commit", "false")
            .set("enable.partition.eof", "true")
            .create()
            .expect("a client");
        let metadata = consumer.fetch_metadata(Some(topic), PATIENCE).expect("the broker answers");
        let count = metadata.topics()[0].partitions().len();
        let mut assigned = TopicPartitionList::new();
        for partition in 0..i32::try_from(count).expect("few partitions") {
            assigned.add_partition_offset(topic, partition, Offset::Beginning).expect("an offset");
        }
        consumer.assign(&assigned).expect("partitions");
        let (start, mut ended, mut found) = (Instant::now(), 0, Vec::new());
        while ended < count {
            assert!(start.elapsed() < PATIENCE, "{topic}: {ended} of {count} partitions were read");
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(record)) => {
                    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
                    let headers = record.headers().into_iter().flat_map(|headers| headers.iter());
                    found.push(ReadRecord {
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
        found.sort_by_key(|record| record.partition);
        found
    }
}

/// The leaders of a topic's partitions; `None` if the broker does not know it.
fn leaders(admin: &AdminClient<DefaultClientContext>, name: &str) -> Option<Vec<i32>> {
    let found = admin.inner().fetch_metadata(Some(name), PATIENCE).expect("the broker answers");
    let topic = found.topics().first().filter(|topic| topic.error().is_none())?;
    Some(topic.partitions().iter().map(MetadataPartition::leader).collect())
}

fn options() -> AdminOptions {
    AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE))
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}
