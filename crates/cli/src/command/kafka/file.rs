//! The configuration file of `hapax kafka`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context as _;
use hapax_kafka::admin::Wanted;
use hapax_kafka::consumer::NewGroup;
use hapax_kafka::processor::other_ids;
use hapax_kafka::refusal;
use hapax_kafka::security::{Security, TlsFiles};
use hapax_kafka::wire::{Sasl, SaslMechanism};
use serde::Deserialize;

use crate::config_file::{self, ConfigFile, Problem};

/// The environment variable with the password, unless a file has it.
const PASSWORD_VARIABLE: &str = "HAPAX_KAFKA_PASSWORD";
/// A slot is a member of the group and a producer; more are more processes' work.
const CONCURRENCY_MAX: u16 = 100;
const BATCH_RECORDS_MAX: usize = 100_000;
const BATCH_BYTES_MAX: usize = 64 << 20;
/// Time for producing and committing beside what a batch takes, if `transaction.timeout.ms` is not given.
const TRANSACTION_MARGIN: Duration = Duration::from_secs(10);
const TRANSACTION_TIMEOUT_MIN: Duration = Duration::from_mins(1);

/// What the file may have. `check` uses topics, group and properties; `run` all of it; the other commands the connection.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct KafkaFile {
    /// Brokers, HOST:PORT, separated by commas. --brokers comes first.
    pub brokers: Option<String>,
    /// More topics for `check`.
    pub topics: Vec<String>,
    /// Topics to read.
    pub input: Vec<String>,
    /// The topic of what the command prints. None: what it prints is not kept.
    pub output: Option<String>,
    /// What the command prints is one record, or one for each line. Default whole.
    pub output_records: OutputRecords,
    /// The topic of records that are rejected, or failed too often. None: `run` ends at such a record.
    pub dead_letters: Option<String>,
    pub group: Option<String>,
    /// The producers' transactional.id, to which the number of the slot is added.
    pub transactional_id: Option<String>,
    /// Where a group without committed offsets begins. Default earliest.
    pub new_group: NewGroupWord,
    /// Members of the group in this process, each with its own producer. Default 1, maximum 100.
    pub concurrency: Option<u16>,
    /// The next batch of a slot is handled and written while its last one is committed, by further producers whose
    /// transactional.id has `.2` and `.3` behind it. Default false.
    pub overlap: bool,
    /// How often a record is tried. Default 5.
    pub attempts_max: Option<u32>,
    /// The command and its arguments, unless it is given after `--`.
    pub command: Vec<String>,
    pub batch: Batch,
    pub limits: Limits,
    pub security: SecurityTable,
    /// Properties of the producer, under the names of Kafka's own clients.
    pub producer: toml::Table,
    /// Properties of the consumer, which are librdkafka's.
    pub consumer: toml::Table,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OutputRecords {
    #[default]
    Whole,
    Lines,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NewGroupWord {
    #[default]
    Earliest,
    Latest,
    Refuse,
}

impl From<NewGroupWord> for NewGroup {
    fn from(word: NewGroupWord) -> Self {
        match word {
            NewGroupWord::Earliest => Self::Earliest,
            NewGroupWord::Latest => Self::Latest,
            NewGroupWord::Refuse => Self::Refuse,
        }
    }
}

/// When a batch is committed: at the first of these bounds.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Batch {
    /// Input records. Default 100.
    pub records_max: usize,
    /// Size of the input records. Default 1 MiB.
    pub bytes_max: usize,
    /// Time from the first record. Default 1000.
    pub time_max_ms: u64,
}

impl Default for Batch {
    fn default() -> Self {
        Self { records_max: 100, bytes_max: 1 << 20, time_max_ms: 1_000 }
    }
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Time of one command; after it the command gets SIGTERM. Default 10000.
    pub run_max_ms: u64,
    /// Time between SIGTERM and SIGKILL for a command. Default 5000.
    pub kill_after_ms: u64,
    /// How long the end waits for running commands; after it they get SIGTERM. Default 30000.
    pub drain_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { run_max_ms: 10_000, kill_after_ms: 5_000, drain_ms: 30_000 }
    }
}

impl Limits {
    /// The bound of one call of the handler: its own limit, and the time to end what did not keep it.
    pub fn handler(&self) -> Duration {
        Duration::from_millis(self.run_max_ms.saturating_add(self.kill_after_ms).saturating_add(2_000))
    }
}

/// Encryption and authentication. The password is in HAPAX_KAFKA_PASSWORD, or in a file.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SecurityTable {
    /// Encryption by TLS. Default: if one of the files is given.
    pub tls: Option<bool>,
    /// PEM file with the certificates that are trusted. Default: those of the system.
    pub ca_file: Option<PathBuf>,
    /// PEM files of this client's certificate chain and its key.
    pub cert_file: Option<PathBuf>,
    pub key_file: Option<PathBuf>,
    /// PLAIN, SCRAM-SHA-256 or SCRAM-SHA-512.
    pub sasl: Option<Mechanism>,
    pub user: Option<String>,
    pub password_file: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub enum Mechanism {
    #[serde(rename = "PLAIN")]
    Plain,
    #[serde(rename = "SCRAM-SHA-256")]
    ScramSha256,
    #[serde(rename = "SCRAM-SHA-512")]
    ScramSha512,
}

impl KafkaFile {
    /// Reads a file; without one, nothing is configured. All problems are reported at once.
    pub fn read(path: Option<&Path>) -> anyhow::Result<Self> {
        let read = config_file::read(path)?;
        let (config, file): (Self, _) = ConfigFile::parse_or_default(read.as_ref())?;
        let problems = config.problems();
        file.check(problems, |_| false)?;
        Ok(config)
    }

    fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut range = |path: &str, value: u64, max: u64| {
            if !(1..=max).contains(&value) {
                problems.push(Problem::at(path, format!("{path} is {value}; 1 to {max} is accepted")));
            }
        };
        range("concurrency", self.concurrency().into(), CONCURRENCY_MAX.into());
        range("attempts_max", self.attempts_max().into(), 1_000_000);
        range("batch.records_max", self.batch.records_max as u64, BATCH_RECORDS_MAX as u64);
        range("batch.bytes_max", self.batch.bytes_max as u64, BATCH_BYTES_MAX as u64);
        range("batch.time_max_ms", self.batch.time_max_ms, 600_000);
        range("limits.run_max_ms", self.limits.run_max_ms, 600_000);
        range("limits.kill_after_ms", self.limits.kill_after_ms, 600_000);
        range("limits.drain_ms", self.limits.drain_ms, 3_600_000);
        for (path, topic) in [("output", &self.output), ("dead_letters", &self.dead_letters)] {
            if let Some(topic) = topic.as_ref().filter(|topic| self.input.contains(topic)) {
                let why = format!(
                    "{path} = {topic:?} is an input too: what is written would be read again, without end"
                );
                problems.push(Problem::conflict(path, "input", why));
            }
        }
        if let Some(id) = &self.transactional_id
            && let Some(refused) = refusal::unstable(id, std::process::id())
        {
            problems.push(Problem::at(
                "transactional_id",
                format!("transactional_id = {id:?}: {}", refused.remedy),
            ));
        }
        let security = &self.security;
        if security.cert_file.is_some() != security.key_file.is_some() {
            problems
                .push(Problem::at("security", "cert_file and key_file belong together: give both, or none"));
        }
        if security.tls == Some(false) && (security.ca_file.is_some() || security.cert_file.is_some()) {
            problems.push(Problem::at(
                "security.tls",
                "tls = false, but files for TLS are given; leave one of them out",
            ));
        }
        if security.sasl.is_some() != security.user.is_some() {
            problems.push(Problem::at("security", "sasl and user belong together: give both, or none"));
        }
        problems
    }

    pub fn concurrency(&self) -> u16 {
        self.concurrency.unwrap_or(1)
    }

    pub fn attempts_max(&self) -> u32 {
        self.attempts_max.unwrap_or(5)
    }

    /// The bound of a batch, from its first record to its commit.
    pub fn batch_bound(&self) -> Duration {
        Duration::from_millis(self.batch.time_max_ms) + self.limits.handler()
    }

    /// Properties of the producer, with the transactional.id whichever way it was given.
    pub fn producer_properties(&self) -> Vec<(String, String)> {
        let mut properties = properties(&self.producer);
        let id = self.transactional_id.iter().map(|id| ("transactional.id".to_owned(), id.clone()));
        properties.extend(id);
        properties
    }

    /// The `transaction.timeout.ms` of the properties, or one that is long enough for a batch.
    pub fn transaction_timeout(&self) -> Duration {
        let given = properties(&self.producer).into_iter().find(|(key, _)| key == "transaction.timeout.ms");
        let given = given.and_then(|(_, value)| value.trim().parse().ok()).map(Duration::from_millis);
        given.unwrap_or_else(|| (self.batch_bound() + TRANSACTION_MARGIN).max(TRANSACTION_TIMEOUT_MIN))
    }

    /// What the cluster is compared with.
    pub fn wanted(&self) -> Wanted {
        Wanted {
            transactional_id: None,
            transaction_timeout_ms: Some(self.transaction_timeout().as_millis() as u64),
            topics: self.all_topics(),
            inputs: (!self.input.is_empty()).then(|| self.input.clone()),
            group: self.group.clone(),
            members: self.concurrency().into(),
        }
    }

    /// The id of a slot's first producer.
    pub fn slot_id(transactional_id: &str, slot: u16) -> String {
        format!("{transactional_id}-{slot}")
    }

    /// The ids of all producers.
    pub fn transactional_ids(&self) -> Vec<String> {
        let producer = self.producer_properties();
        let id = producer.iter().find(|(key, _)| key == "transactional.id").map(|(_, id)| id);
        let ids = id.into_iter().flat_map(|id| (0..self.concurrency()).map(|slot| Self::slot_id(id, slot)));
        ids.flat_map(|id| self.with_others(id)).collect()
    }

    /// The id of a slot's first producer, and those of the others that it has.
    pub fn with_others(&self, id: String) -> Vec<String> {
        let others = if self.overlap { other_ids(&id).to_vec() } else { Vec::new() };
        [vec![id], others].concat()
    }

    /// All topics that are named.
    pub fn all_topics(&self) -> Vec<String> {
        let mut topics = self.topics.clone();
        topics.extend(self.input.iter().chain(&self.output).chain(&self.dead_letters).cloned());
        topics.sort();
        topics.dedup();
        topics
    }

    /// The connection's encryption and authentication, with the password read.
    pub fn security(&self) -> anyhow::Result<Security> {
        let table = &self.security;
        let files = TlsFiles {
            authority: table.ca_file.clone(),
            identity: table.cert_file.clone().zip(table.key_file.clone()),
        };
        let tls = table.tls.unwrap_or(files.authority.is_some() || files.identity.is_some());
        let sasl = match (table.sasl, &table.user) {
            (Some(mechanism), Some(user)) => {
                let mechanism = match mechanism {
                    Mechanism::Plain => SaslMechanism::Plain,
                    Mechanism::ScramSha256 => SaslMechanism::ScramSha256,
                    Mechanism::ScramSha512 => SaslMechanism::ScramSha512,
                };
                Some(Sasl { mechanism, user: user.clone(), password: self.password()? })
            }
            _ => None,
        };
        Ok(Security { tls: tls.then_some(files), sasl })
    }

    fn password(&self) -> anyhow::Result<String> {
        match &self.security.password_file {
            Some(file) => {
                let text = std::fs::read_to_string(file)
                    .with_context(|| format!("security.password_file {}", file.display()))?;
                Ok(text.trim_end_matches(['\n', '\r']).to_owned())
            }
            None => std::env::var(PASSWORD_VARIABLE).with_context(|| {
                format!("security.sasl needs a password: set {PASSWORD_VARIABLE}, or security.password_file")
            }),
        }
    }
}

/// Properties as text; numbers and truth values may be written without quotes.
pub fn properties(table: &toml::Table) -> Vec<(String, String)> {
    let text = |value: &toml::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    table.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}
