//! `hapax kafka`: the configuration check, lag, and open transactions with the way out of them.

use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use hapax_kafka::admin::{self, Findings, OpenTransaction, Wanted};
use hapax_kafka::refusal::{self, Refusal};
use hapax_kafka::wire::{Cluster, Connect};
use serde::Deserialize;
use serde_json::json;

use crate::confirm::Confirm;
use crate::output::Output;

/// Looks after what Hapax does with Kafka.
#[derive(Debug, Args)]
pub struct KafkaArgs {
    #[command(subcommand)]
    command: KafkaCommand,
    /// Brokers, HOST:PORT, separated by commas.
    #[arg(
        long,
        global = true,
        value_name = "BROKERS",
        env = "HAPAX_KAFKA",
        default_value = "127.0.0.1:9092"
    )]
    brokers: String,
    /// Prints JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum KafkaCommand {
    /// Compares a configuration and a cluster with what `transactional` needs. Fails if the tier would not hold.
    #[command(after_help = "\
Examples:
  hapax kafka check --config kafka.toml
  hapax kafka check --topic orders --topic bills --group billing --transactional-id billing-1

The file has the properties of the producer and the consumer, under the names of Kafka's own clients:
  topics = [\"orders\", \"bills\"]
  group = \"billing\"
  batch_ms = 1000
  [producer]
  \"transactional.id\" = \"billing-1\"
  [consumer]
  \"fetch.min.bytes\" = \"1\"")]
    Check {
        /// A file with topics, group and properties.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
        /// A topic that is read or written.
        #[arg(long = "topic", value_name = "TOPIC")]
        topics: Vec<String>,
        /// The group that reads.
        #[arg(long)]
        group: Option<String>,
        /// The producer's transactional.id.
        #[arg(long, value_name = "ID")]
        transactional_id: Option<String>,
    },
    /// Shows how far a group is behind, and what waits for open transactions.
    #[command(after_help = "Examples:\n  hapax kafka lag billing\n  hapax kafka lag billing --json")]
    Lag {
        /// The group.
        group: String,
    },
    /// Lists open transactions, oldest first. Readers of committed records wait for them.
    #[command(after_help = "Examples:\n  hapax kafka transactions\n  hapax kafka transactions --json")]
    Transactions,
    /// Aborts the open transaction of a transactional.id. Its producer is fenced: if it still runs, it ends with an error.
    #[command(after_help = "Examples:\n  hapax kafka abort billing-1 --yes")]
    Abort {
        /// The transactional.id.
        transactional_id: String,
        #[command(flatten)]
        confirm: Confirm,
    },
}

/// The file of `check`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckedFile {
    #[serde(default)]
    topics: Vec<String>,
    group: Option<String>,
    /// The bound of a batch, from its first record to its commit.
    #[serde(default)]
    batch_ms: u64,
    #[serde(default)]
    producer: toml::Table,
    #[serde(default)]
    consumer: toml::Table,
}

/// Runs `hapax kafka`.
pub async fn run(args: KafkaArgs) -> anyhow::Result<()> {
    let brokers = args.brokers.split(',').map(str::trim);
    let cluster = Cluster::new(Connect::plain(brokers));
    let out = Output::new(args.json);
    match args.command {
        KafkaCommand::Check { config, topics, group, transactional_id } => {
            let mut file = match &config {
                None => CheckedFile::default(),
                Some(path) => read(path)?,
            };
            file.topics.extend(topics);
            file.group = group.or(file.group);
            if let Some(id) = transactional_id {
                file.producer.insert("transactional.id".into(), id.into());
            }
            check(&cluster, file, out).await
        }
        KafkaCommand::Lag { group } => lag(&cluster, &group, out).await,
        KafkaCommand::Transactions => transactions(&cluster, out).await,
        KafkaCommand::Abort { transactional_id: id, confirm } => {
            confirm.ask(&format!("Abort the open transaction of {id} and fence its producer?"))?;
            let Some(OpenTransaction { producer: (producer, epoch), .. }) =
                admin::abort(&cluster, &id).await?
            else {
                bail!("{id} has no open transaction; `hapax kafka transactions` lists them");
            };
            let sentence = format!("aborted; producer {producer} with epoch {epoch} is fenced");
            out.done(&sentence, &json!({ "aborted": id, "producer_id": producer, "producer_epoch": epoch }))
        }
    }
}

fn read(path: &PathBuf) -> anyhow::Result<CheckedFile> {
    let text = std::fs::read_to_string(path).with_context(|| path.display().to_string())?;
    toml::from_str(&text).map_err(|error| crate::usage(format!("{}: {error}", path.display())))
}

/// Properties as text; numbers and truth values may be written without quotes.
fn properties(table: &toml::Table) -> Vec<(String, String)> {
    let text = |value: &toml::Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    table.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}

async fn check(cluster: &Cluster, file: CheckedFile, out: Output) -> anyhow::Result<()> {
    let producer = properties(&file.producer);
    let mut refused = refusal::producer(&producer, file.batch_ms);
    refused.extend(refusal::consumer(&properties(&file.consumer)));
    let value = |name: &str| producer.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
    let wanted = Wanted {
        transactional_id: value("transactional.id"),
        transaction_timeout_ms: value("transaction.timeout.ms").and_then(|value| value.parse().ok()),
        topics: file.topics,
        group: file.group,
    };
    // A broker is asked only about a configuration that could hold.
    let mut found = Findings { refused, ..Findings::default() };
    if found.refused.is_empty() {
        found = admin::check(cluster, &wanted).await?;
    }
    let listed = |list: &[Refusal]| {
        let one = |it: &Refusal| json!({ "key": it.key, "value": it.value, "remedy": it.remedy });
        list.iter().map(one).collect::<Vec<_>>()
    };
    if out.is_json() {
        out.value(&json!({ "refused": listed(&found.refused), "warnings": listed(&found.warnings) }))?;
    } else {
        let refused = found.refused.iter().map(|it| ("refused", it));
        let all = refused.chain(found.warnings.iter().map(|it| ("warning", it)));
        let row = |(kind, it): (&str, &Refusal)| {
            vec![kind.to_owned(), it.key.clone(), it.value.clone(), it.remedy.clone()]
        };
        out.rows(&["", "key", "value", "remedy"], all.map(row).collect())?;
    }
    match found.refused.len() {
        0 => Ok(()),
        count => bail!("{count} settings with which `transactional` does not hold"),
    }
}

async fn lag(cluster: &Cluster, group: &str, out: Output) -> anyhow::Result<()> {
    let lags = admin::lag(cluster, group).await?;
    if out.is_json() {
        let one = |it: &admin::PartitionLag| {
            json!({ "topic": it.topic, "partition": it.partition, "committed": it.committed,
                    "end": it.end, "lag": it.lag(), "blocked": it.blocked() })
        };
        return out.value(&lags.iter().map(one).collect::<Vec<_>>());
    }
    let row = |it: &admin::PartitionLag| {
        let numbers = [it.committed, it.end, it.lag(), it.blocked()].map(|number| number.to_string());
        [vec![it.topic.clone(), it.partition.to_string()], numbers.to_vec()].concat()
    };
    let heading = ["topic", "partition", "committed", "end", "lag", "blocked"];
    out.rows(&heading, lags.iter().map(row).collect())
}

async fn transactions(cluster: &Cluster, out: Output) -> anyhow::Result<()> {
    let open = admin::transactions(cluster).await?;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64);
    let age_s = |it: &OpenTransaction| it.started_ms.map_or(0, |start| (now_ms - start).max(0) / 1_000);
    if out.is_json() {
        let one = |it: &OpenTransaction| {
            json!({ "transactional_id": it.transactional_id, "state": it.state, "producer_id": it.producer.0,
                    "producer_epoch": it.producer.1, "age_s": age_s(it), "timeout_ms": it.timeout_ms,
                    "hangs": it.hangs(now_ms), "partitions": it.partitions })
        };
        return out.value(&open.iter().map(one).collect::<Vec<_>>());
    }
    let row = |it: &OpenTransaction| {
        let partitions = it.partitions.iter().map(|(topic, number)| format!("{topic}/{number}"));
        vec![
            it.transactional_id.clone(),
            it.state.clone(),
            format!("{} s", age_s(it)),
            format!("{} s", it.timeout_ms / 1_000),
            if it.hangs(now_ms) { "hangs".to_owned() } else { String::new() },
            partitions.collect::<Vec<_>>().join(" "),
        ]
    };
    let heading = ["transactional.id", "state", "age", "timeout", "", "readers wait in"];
    out.rows(&heading, open.iter().map(row).collect())?;
    if !open.is_empty() {
        crate::output::note("hapax kafka abort ID ends one, and fences its producer");
    }
    Ok(())
}
