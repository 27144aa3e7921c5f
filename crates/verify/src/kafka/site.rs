//! What the processes of a run on Kafka have to know.

use std::net::SocketAddr;
use std::time::Duration;

use hapax_kafka::consumer::ConsumerConfig;
use hapax_kafka::wire::Connect;
use serde::{Deserialize, Serialize};

use crate::roles;
use crate::workload::Workload;

/// Partitions of each topic. An account is always in the same one.
pub const PARTITIONS: i32 = 4;

/// Timeout of a request: a dropped response must not stop a run for long.
pub const REQUEST: Duration = Duration::from_millis(1_500);
/// How long a transaction may be open. A pause has to be longer.
pub const TRANSACTION: Duration = Duration::from_secs(4);

/// The value of the last record of each output partition.
pub const END_MARK: &str = "end of the run";
/// What the reader prints when it has seen all end marks of a workload, whose name follows.
pub const READ_TO_END: &str = "read to the end: ";
/// The header with the transaction that a record belongs to.
pub const TRANSACTION_HEADER: &str = "hapax-verify-transaction";

/// A process of a run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum KafkaRole {
    /// Writes the intents.
    Producer(KafkaSite),
    /// A member of each group: the processor, and the controls. The number is part of its transactional id.
    Processor(KafkaSite, usize),
    /// Records what readers of committed records see. It ends when it has seen the end mark of every partition.
    Reader(KafkaSite),
}

/// What all processes know.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct KafkaSite {
    /// The brokers, `HOST:PORT,…`.
    pub brokers: String,
    /// The same through the fault proxy.
    pub proxied: String,
    /// The recorder.
    pub recorder: SocketAddr,
    /// The name of the run, which is part of the names of topics, groups and transactional ids.
    pub run: String,
    /// Names of the workloads.
    pub workloads: Vec<String>,
    /// A member that is silent for this long loses its partitions.
    pub session_ms: u64,
}

impl KafkaSite {
    pub(crate) fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        roles::named(&self.workloads)
    }

    fn name(&self, workload: &Workload, what: &str) -> String {
        format!("{}-{}-{what}", self.prefix(), workload.name)
    }

    /// How all names of the run begin.
    pub(crate) fn prefix(&self) -> String {
        format!("hapax-verify-{}", self.run)
    }

    pub(crate) fn input(&self, workload: &Workload) -> String {
        self.name(workload, "in")
    }

    pub(crate) fn output(&self, workload: &Workload) -> String {
        self.name(workload, "out")
    }

    pub(crate) fn group(&self, workload: &Workload) -> String {
        self.name(workload, "group")
    }

    pub(crate) fn transactional_id(&self, workload: &Workload, number: usize) -> String {
        self.name(workload, &number.to_string())
    }

    /// How a process without faults reaches the brokers.
    pub(crate) fn direct(&self) -> Connect {
        Connect::plain(self.brokers.split(','))
    }

    /// How a process behind the proxy does: it gives up soon.
    pub(crate) fn through_proxy(&self, client: &str) -> Connect {
        Connect {
            client_id: client.to_owned(),
            connect_timeout: REQUEST,
            request_timeout: REQUEST,
            ..Connect::plain(self.proxied.split(','))
        }
    }

    /// A member of a workload's group.
    pub(crate) fn consumer(&self, workload: &Workload) -> ConsumerConfig {
        let mut config = ConsumerConfig::new(&self.proxied, &self.group(workload), &[&self.input(workload)]);
        config.session_timeout = Duration::from_millis(self.session_ms);
        let heartbeat_ms = (self.session_ms / 6).to_string();
        config.properties = vec![("heartbeat.interval.ms".to_owned(), heartbeat_ms)];
        config
    }
}
