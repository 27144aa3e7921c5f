//! The broker of the tests, with what most of them need of it.

use std::ops::Deref;
use std::time::{Duration, Instant};

pub use hapax_faults::Isolation;
use hapax_faults::{KafkaServer, KafkaTopics, RedisTls};
use hapax_kafka::admin::{self, OpenTransaction};
use hapax_kafka::wire::{Cluster, Connect};
use rdkafka::config::ClientConfig;

/// Time for anything that a test waits for.
pub const PATIENCE: Duration = Duration::from_mins(2);

/// Who assigns the partitions of a group: one of its members, or the broker (KIP-848).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    Classic,
    Consumer,
}

impl Protocol {
    /// The value of `group.protocol`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Classic => "classic",
            Self::Consumer => "consumer",
        }
    }

    /// The property of a consumer.
    pub fn property(self) -> (String, String) {
        ("group.protocol".to_owned(), self.name().to_owned())
    }
}

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
        Self::start_with(&[])
    }

    /// The same with settings of its own, `name=value`.
    pub fn start_with(settings: &[&str]) -> Self {
        let tls = RedisTls::new().unwrap();
        Self::new(KafkaServer::start_secured(&tls, settings).unwrap(), Vec::new(), tls)
    }

    /// One with this version of transactions, and without encrypted listeners.
    pub fn start_transaction_version(version: u8) -> Self {
        let feature = format!("transaction.version={version}");
        let server = KafkaServer::start_formatted(&[], &["--feature", &feature]).unwrap();
        Self::new(server, Vec::new(), RedisTls::new().unwrap())
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

    /// The open transactions, when none of them is being ended. Clients send no end meanwhile.
    pub fn settled(&self) -> Vec<OpenTransaction> {
        let (start, mut settled) = (Instant::now(), None);
        // Twice the same: an end that was on its way has arrived.
        loop {
            let cluster = Cluster::new(Connect::plain(self.addresses().split(',')));
            let open = self.block_on(admin::transactions(&cluster));
            // A coordinator that has just started may not have read its transactions yet.
            let ongoing = |transaction: &OpenTransaction| transaction.state == "Ongoing";
            let found = open.as_ref().ok().filter(|open| open.iter().all(ongoing)).cloned();
            if found.is_some() && found == settled {
                return found.unwrap_or_default();
            }
            assert!(start.elapsed() < PATIENCE, "transactions do not end: {open:?}");
            settled = found;
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Ends the only broker of a cluster with a signal, and starts it again. Returns the transactions that were open meanwhile.
    ///
    /// Clients send no end of a transaction until this returns, and no transaction is timed out: while the only broker goes and comes,
    /// Kafka 4.3.1 can leave out the markers of transactions that are being ended (docs/verify.md, a crash of the only broker).
    pub fn restart(&self, signal: &str) -> Vec<OpenTransaction> {
        assert!(self.others.is_empty(), "the others lead meanwhile");
        let open = self.settled();
        self.stop(signal);
        self.run().unwrap();
        self.topics().wait_for_copies(1);
        open
    }

    /// Why readers of committed records of a topic do not get on, by its partitions and by the broker's log.
    pub fn explain(&self, topic: &str) -> String {
        let cluster = Cluster::new(Connect::plain(self.addresses().split(',')));
        let blocked = self.block_on(admin::blocked(&cluster, &[topic.to_owned()]));
        let open = self.block_on(admin::transactions(&cluster));
        let log = self.nodes().map(KafkaServer::log).collect::<String>();
        let skipped: Vec<&str> = log.lines().filter(|line| line.contains("likely deleted")).collect();
        format!("blocked: {blocked:?}; open: {open:?}; markers left out by the broker: {skipped:#?}")
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

    pub fn topics(&self) -> KafkaTopics {
        KafkaTopics::new(self.addresses())
    }
}
