//! The broker of the tests, with what most of them need of it.

use std::ops::Deref;
use std::time::{Duration, Instant};

use hapax_faults::{KafkaServer, RedisTls};
use hapax_kafka::wire::{Cluster, Connect};
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use rdkafka::config::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

/// Time for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// What a reader sees of a transaction that is open or was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isolation {
    Committed,
    Uncommitted,
}

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
        Self { server: KafkaServer::start_secured(&tls, &[]).unwrap(), tls, runtime: runtime.unwrap() }
    }

    /// The certificates of its encrypted listeners.
    pub fn tls(&self) -> &RedisTls {
        &self.tls
    }

    /// Runs a case's future to its end.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Runs a future beside the case.
    pub fn spawn<T: Send + 'static>(
        &self,
        future: impl Future<Output = T> + Send + 'static,
    ) -> tokio::task::JoinHandle<T> {
        self.runtime.spawn(future)
    }

    /// A configuration of librdkafka with the broker's own address.
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", self.address().to_string());
        config
    }

    /// Creates a topic, and returns when it has its leaders.
    pub fn create_topic(&self, name: &str, partitions: i32) {
        self.create_topic_with(name, partitions, &[]);
    }

    /// The same with settings of the topic.
    pub fn create_topic_with(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        let admin: AdminClient<DefaultClientContext> = self.config().create().unwrap();
        let mut topic = NewTopic::new(name, partitions, TopicReplication::Fixed(1));
        for (key, value) in settings {
            topic = topic.set(key, value);
        }
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        let start = Instant::now();
        // A topic of this name that was deleted may still be there for a moment.
        loop {
            let made = self.block_on(admin.create_topics([&topic], &options)).unwrap();
            match made.into_iter().next() {
                Some(Err((_, RDKafkaErrorCode::TopicAlreadyExists))) if start.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(50));
                }
                made => return drop(made.unwrap().unwrap()),
            }
        }
    }

    /// Deletes a topic, and returns when the broker does not know it any more: until then it takes records for the old topic, although
    /// the controller has created another one with the same name.
    pub fn delete_topic(&self, name: &str) {
        let admin: AdminClient<DefaultClientContext> = self.config().create().unwrap();
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        for deleted in self.block_on(admin.delete_topics(&[name], &options)).unwrap() {
            deleted.unwrap();
        }
        self.block_on(async {
            let (cluster, start) =
                (Cluster::new(Connect::plain([self.address().to_string()])), Instant::now());
            while !matches!(cluster.topic_ids([name]).await, Ok(ids) if ids[name].is_err()) {
                assert!(start.elapsed() < PATIENCE, "topic {name} is not deleted");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
    }

    /// The values of a topic's records, partition by partition, up to the current end: of the records that this reader may
    /// see, which for [`Isolation::Committed`] end at the first open transaction.
    pub fn read(&self, topic: &str, isolation: Isolation) -> Vec<String> {
        let isolation = match isolation {
            Isolation::Committed => "read_committed",
            Isolation::Uncommitted => "read_uncommitted",
        };
        let consumer: BaseConsumer = self
            .config()
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
        let mut found = vec![Vec::new(); count];
        let (start, mut ended) = (Instant::now(), 0);
        while ended < count {
            assert!(start.elapsed() < PATIENCE, "{topic}: {ended} of {count} partitions were read");
            match consumer.poll(Duration::from_millis(100)) {
                Some(Ok(record)) => {
                    let value = String::from_utf8_lossy(record.payload().unwrap_or_default()).into_owned();
                    found[usize::try_from(record.partition()).unwrap()].push(value);
                }
                Some(Err(KafkaError::PartitionEOF(_))) => ended += 1,
                // Connections that are lost are tried again.
                Some(Err(_)) | None => {}
            }
        }
        found.concat()
    }
}
