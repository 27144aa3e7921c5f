//! The broker of the tests, with what most of them need of it.

use std::ops::Deref;
use std::time::Duration;

pub use hapax_faults::Isolation;
use hapax_faults::{KafkaServer, KafkaTopics, RedisTls};
use rdkafka::config::ClientConfig;

/// Time for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_mins(2);

pub struct Broker {
    server: KafkaServer,
    /// The other nodes of its cluster.
    pub others: Vec<KafkaServer>,
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
        let tls = RedisTls::new().unwrap();
        Self::new(KafkaServer::start_secured(&tls, &[]).unwrap(), Vec::new(), tls)
    }

    /// Three nodes.
    pub fn start_three() -> Self {
        let [server, others @ ..] = KafkaServer::start_three().unwrap();
        Self::new(server, others.into(), RedisTls::new().unwrap())
    }

    fn new(server: KafkaServer, others: Vec<KafkaServer>, tls: RedisTls) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        Self { server, others, tls, runtime: runtime.unwrap() }
    }

    /// All nodes of its cluster.
    pub fn nodes(&self) -> impl Iterator<Item = &KafkaServer> {
        [&self.server].into_iter().chain(&self.others)
    }

    /// The addresses of all nodes.
    pub fn addresses(&self) -> String {
        let addresses: Vec<String> = self.nodes().map(|node| node.address().to_string()).collect();
        addresses.join(",")
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

    /// A configuration of librdkafka with the broker's own address, and those of the other nodes.
    pub fn config(&self) -> ClientConfig {
        self.topics().config()
    }

    /// Creates a topic, and returns when it has its leaders.
    pub fn create_topic(&self, name: &str, partitions: i32) {
        self.create_topic_with(name, partitions, &[]);
    }

    /// The same with settings of the topic.
    pub fn create_topic_with(&self, name: &str, partitions: i32, settings: &[(&str, &str)]) {
        self.topics().create(name, partitions, settings);
    }

    /// Deletes a topic, and returns when the broker does not know it any more.
    pub fn delete_topic(&self, name: &str) {
        self.topics().delete(name);
    }

    /// The values of a topic's records, partition by partition, up to the current end.
    pub fn read(&self, topic: &str, isolation: Isolation) -> Vec<String> {
        self.topics().read(topic, isolation).into_iter().map(|record| record.value).collect()
    }

    fn topics(&self) -> KafkaTopics {
        KafkaTopics::new(self.addresses())
    }
}
