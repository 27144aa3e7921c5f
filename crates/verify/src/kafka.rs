//! Runs on Kafka: intents are records of an input topic, effects are what a reader of committed records sees in the output topic
//! while everything runs.
//!
//! | module | content |
//! |---|---|
//! | `run` | a run from its start to its report |
//! | `processes` | the processes of a run |
//! | `broker` | the broker, started for the run or given, and the topics |
//! | `fault`, `inject` | the faults, and what is done for each |
//! | `drain` | the end: everything is processed, and the reader has read everything |
//! | `producer`, `processor`, `reader` | the processes under a guarantee, and the reader that records what is shown |
//! | `naive`, `librdkafka` | the controls |

mod broker;
mod drain;
pub mod fault;
mod inject;
mod inputs;
mod librdkafka;
mod naive;
mod processes;
mod processor;
mod producer;
mod reader;
mod run;
mod site;

use std::path::PathBuf;
use std::time::Duration;

pub use fault::{ASKED_FOR, KafkaFault, ROUND};
pub use run::run;
pub use site::{KafkaRole, KafkaSite};

use crate::workload::Workload;

/// What to run.
#[derive(Debug, Clone)]
pub struct KafkaOptions {
    /// The program whose child processes are started: this one.
    pub program: PathBuf,
    /// `kafka://HOST:PORT,…`, or `private:kafka`, which starts a broker.
    pub broker: String,
    /// The workloads with their controls.
    pub workloads: Vec<Workload>,
    /// The faults of a round; not empty.
    pub faults: Vec<KafkaFault>,
    /// How long faults are injected.
    pub time: Duration,
    /// The seed of the schedule.
    pub seed: u64,
    /// Keeps the history in this file.
    pub history: Option<PathBuf>,
    /// The command that repeats the run, for the report.
    pub command: String,
}

/// Runs a process of a run.
pub async fn run_role(role: KafkaRole) -> anyhow::Result<()> {
    match role {
        KafkaRole::Producer(site) => producer::run(&site).await,
        KafkaRole::Processor(site, number) => processor::run(&site, number).await,
        KafkaRole::Reader(site) => reader::run(&site).await,
    }
}
