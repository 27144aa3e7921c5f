//! `hapax kafka`: processors, the configuration check, lag, and open transactions with the way out of them.

mod file;
mod handler;
mod run;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::bail;
use clap::{Args, Subcommand};
use hapax_kafka::admin::{self, Findings, HangingTransaction, OpenTransaction, Wanted};
use hapax_kafka::refusal::{self, Refusal};
use hapax_kafka::wire::Cluster;
use serde_json::json;

use self::file::{KafkaFile, properties};
use crate::confirm::Confirm;
use crate::output::Output;

/// Processes records of Kafka, and looks after what Hapax does there.
#[derive(Debug, Args)]
pub struct KafkaArgs {
    #[command(subcommand)]
    command: KafkaCommand,
    /// Brokers, HOST:PORT, separated by commas [default: those of the file, else 127.0.0.1:9092].
    #[arg(long, global = true, value_name = "BROKERS", env = "HAPAX_KAFKA")]
    brokers: Option<String>,
    /// A file with brokers, encryption and authentication, and what `run` and `check` need.
    #[arg(long, global = true, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum KafkaCommand {
    /// Runs a command for each record; what it prints and the offsets are committed in one transaction. Until SIGTERM or
    /// SIGINT.
    #[command(after_help = "\
Examples:
  hapax kafka run --config billing.toml
  hapax kafka run --config billing.toml -- ./bill.sh

The file:
  brokers = \"localhost:9092\"
  input = [\"orders\"]              # topics to read
  output = \"bills\"                # the topic of what the command prints; without it that is not kept
  output_records = \"whole\"        # or \"lines\": a record for each line
  dead_letters = \"orders-dead\"    # for records that are rejected or fail too often; without it `run` ends at one
  group = \"billing\"
  transactional_id = \"billing-1\"  # the instance's own, the same after a restart; slots add -0, -1 and so on
  new_group = \"earliest\"          # where a group without offsets begins: earliest, latest, refuse
  concurrency = 1                  # slots, each a member of the group with its own producer
  overlap = false                  # true: a slot's next batch is handled and written while its last one is committed, by
                                   # further producers: billing-1-0.2 and .3 beside billing-1-0, with the same rights
  attempts_max = 5
  command = [\"./bill.sh\"]
  [batch]                          # a transaction ends at the first of these
  records_max = 100
  bytes_max = 1048576
  time_max_ms = 1000
  [limits]
  run_max_ms = 10000               # of one command; then SIGTERM
  kill_after_ms = 5000             # then SIGKILL
  drain_ms = 30000                 # at the end, for running commands
  [security]                       # the password is in HAPAX_KAFKA_PASSWORD or password_file
  ca_file = \"ca.pem\"             # also tls = true, cert_file, key_file
  sasl = \"SCRAM-SHA-512\"         # or PLAIN, SCRAM-SHA-256
  user = \"billing\"
  [producer]                       # properties under Kafka's names, for example
  \"transaction.timeout.ms\" = 60000
  [consumer]
  \"session.timeout.ms\" = 30000

The value is the command's standard input. What the command says by its exit code, as with `hapax work`:
  0      done; its standard output goes to the output topic, under the record's key
  65     reject: no attempt will succeed; to the dead letters
  75     retry, and so any other code, signal or timeout: the transaction is aborted, and its records are tried again

A record's command runs again if its transaction is aborted, or if this process is killed: only what goes into the
output topic happens once. For other effects use HAPAX_IDEMPOTENCY_KEY.

Its environment: HAPAX_QUEUE (the topic), HAPAX_PARTITION, HAPAX_OFFSET, HAPAX_MESSAGE_ID, HAPAX_ATTEMPT (in this
process), HAPAX_IDEMPOTENCY_KEY (the record's header hapax-idempotency-key, or else topic/partition/offset), HAPAX_GROUP
(the key, if it is text), HAPAX_TOMBSTONE (1: the record has no value), HAPAX_LEASE_DEADLINE, HAPAX_ATTR_NAME (headers)")]
    Run {
        /// The command and its arguments, instead of the file's.
        #[arg(last = true, value_name = "CMD")]
        command: Vec<OsString>,
        /// Does not print the commands' output.
        #[arg(long)]
        quiet: bool,
        /// Shows counters at http://ADDR/metrics, on a loopback address: port 0 takes a free one.
        #[arg(long, value_name = "ADDR")]
        metrics: Option<SocketAddr>,
    },
    /// Compares a configuration and a cluster with what `transactional` needs. Fails if the tier would not hold.
    #[command(after_help = "\
Examples:
  hapax kafka check --config billing.toml
  hapax kafka check --topic orders --topic bills --group billing --transactional-id billing-1-0

The file is that of `hapax kafka run`: each slot has an id, and with `overlap = true` two more.")]
    Check {
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
    /// Lists transactions that are open in partitions of these topics and that no coordinator knows. Nothing but an abort ends
    /// them.
    #[command(
        after_help = "Examples:\n  hapax kafka hanging orders bills\n  hapax kafka hanging orders --json"
    )]
    Hanging {
        /// The topics.
        #[arg(required = true, value_name = "TOPIC")]
        topics: Vec<String>,
    },
    /// Aborts the open transaction of a transactional.id, or a hanging one. With a transactional.id the producer is fenced: if it still
    /// runs, it ends with an error. With --hanging it is not: stop it before.
    #[command(after_help = "\
Examples:
  hapax kafka abort billing-1 --yes
  hapax kafka abort --hanging orders/0 --offset 1234

What the coordinator had decided about a hanging transaction is not known any more: if that was a commit, its records are lost by the
abort. One is aborted only when its last record is older than transaction.max.timeout.ms of the brokers and 5 minutes, by the record's
timestamp, which a program may have set.")]
    Abort {
        /// The transactional.id.
        #[arg(required_unless_present = "hanging", conflicts_with = "hanging")]
        transactional_id: Option<String>,
        /// The partition of a transaction that `hapax kafka hanging` lists.
        #[arg(long, value_name = "TOPIC/N", requires = "offset", value_parser = partition)]
        hanging: Option<(String, i32)>,
        /// The offset where it begins.
        #[arg(long, requires = "hanging")]
        offset: Option<i64>,
        #[command(flatten)]
        confirm: Confirm,
    },
}

/// Runs `hapax kafka`.
pub async fn run(args: KafkaArgs) -> anyhow::Result<()> {
    let file = KafkaFile::read(args.config.as_deref())?;
    let brokers = args.brokers.as_ref().or(file.brokers.as_ref());
    let brokers = brokers.map_or("127.0.0.1:9092", String::as_str);
    let brokers: Vec<String> = brokers.split(',').map(|broker| broker.trim().to_owned()).collect();
    let out = Output::new(args.json);
    if let KafkaCommand::Run { command, quiet, metrics } = args.command {
        if args.config.is_none() {
            return Err(crate::usage(
                "--config is needed: a file with input, group and transactional_id".to_owned(),
            ));
        }
        return run::run(file, &brokers, run::RunFlags { command, quiet, metrics, out }).await;
    }
    let cluster = Cluster::new(file.security()?.connect(brokers)?);
    match args.command {
        KafkaCommand::Run { .. } => unreachable!("it was run above"),
        KafkaCommand::Check { topics, group, transactional_id } => {
            let mut file = file;
            file.topics.extend(topics);
            file.group = group.or(file.group);
            let ids = match transactional_id {
                Some(id) => {
                    file.transactional_id = Some(id.clone());
                    file.with_others(id)
                }
                None => file.transactional_ids(),
            };
            check(&cluster, &file, ids, out).await
        }
        KafkaCommand::Lag { group } => lag(&cluster, &group, out).await,
        KafkaCommand::Transactions => transactions(&cluster, out).await,
        KafkaCommand::Hanging { topics } => hanging(&cluster, &topics, out).await,
        KafkaCommand::Abort { hanging: Some((topic, number)), offset, confirm, .. } => {
            let start = offset.unwrap_or_default();
            confirm.ask(&format!(
                "Abort the transaction that begins at offset {start} of {topic}/{number}? If it had been committed, its records are lost."
            ))?;
            let Some(aborted) = admin::abort_hanging(&cluster, &topic, number, start).await? else {
                bail!(
                    "no transaction hangs at offset {start} of {topic}/{number}; `hapax kafka hanging {topic}` lists them, and \
                     `hapax kafka transactions` those that their coordinator knows"
                );
            };
            let producer = aborted.producer;
            let sentence =
                format!("aborted in {topic}/{number}: producer {}, epoch {}", producer.id, producer.epoch);
            let value = json!({ "topic": topic, "partition": number, "offset": start, "producer_id": producer.id,
                                "producer_epoch": producer.epoch });
            out.done(&sentence, &value)
        }
        KafkaCommand::Abort { transactional_id, confirm, .. } => {
            let id = transactional_id.unwrap_or_default();
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

async fn check(cluster: &Cluster, file: &KafkaFile, ids: Vec<String>, out: Output) -> anyhow::Result<()> {
    let producer = file.producer_properties();
    let mut refused = refusal::producer(&producer, file.batch_bound().as_millis() as u64);
    refused.extend(refusal::processor(&properties(&file.consumer)));
    // A broker is asked only about a configuration that could hold.
    let mut found = Findings { refused, ..Findings::default() };
    if found.refused.is_empty() {
        found = admin::check(cluster, &file.wanted()).await?;
        for id in ids {
            // What is wrong with the cluster was found above.
            let wanted = Wanted { transactional_id: Some(id), ..Wanted::default() };
            let more = admin::check(cluster, &wanted).await?;
            found.refused.extend(more.refused.into_iter().filter(|it| it.key == "transactional.id"));
            found.warnings.extend(more.warnings);
        }
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
    out.rows(&heading, lags.iter().map(row).collect())?;
    if let Some(blocked) = lags.iter().find(|it| it.blocked() > 0) {
        let topic = &blocked.topic;
        crate::output::note(&format!(
            "`blocked` offsets wait for open transactions: hapax kafka transactions, or hapax kafka hanging {topic}"
        ));
    }
    Ok(())
}

/// `orders/0`.
fn partition(text: &str) -> Result<(String, i32), String> {
    let parts = text.rsplit_once('/').and_then(|(topic, number)| Some((topic, number.parse().ok()?)));
    match parts {
        Some((topic, number)) if !topic.is_empty() && number >= 0 => Ok((topic.to_owned(), number)),
        _ => Err("a topic and the number of a partition are needed, for example orders/0".to_owned()),
    }
}

async fn hanging(cluster: &Cluster, topics: &[String], out: Output) -> anyhow::Result<()> {
    let found = admin::hanging(cluster, topics).await?;
    let age_s = |it: &HangingTransaction| now_ms().saturating_sub(it.producer.last_ms).max(0) / 1_000;
    if out.is_json() {
        let one = |it: &HangingTransaction| {
            json!({ "topic": it.topic, "partition": it.partition, "offset": it.producer.start,
                    "producer_id": it.producer.id, "producer_epoch": it.producer.epoch, "age_s": age_s(it) })
        };
        return out.value(&found.iter().map(one).collect::<Vec<_>>());
    }
    let row = |it: &HangingTransaction| {
        let producer = [it.producer.start, it.producer.id, i64::from(it.producer.epoch)];
        let place = vec![format!("{}/{}", it.topic, it.partition)];
        [place, producer.map(|number| number.to_string()).to_vec(), vec![format!("{} s", age_s(it))]].concat()
    };
    let heading = ["partition", "offset", "producer", "epoch", "last record"];
    out.rows(&heading, found.iter().map(row).collect())?;
    if !found.is_empty() {
        crate::output::note("hapax kafka abort --hanging PARTITION --offset OFFSET ends one");
    }
    Ok(())
}

fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as i64)
}

async fn transactions(cluster: &Cluster, out: Output) -> anyhow::Result<()> {
    let open = admin::transactions(cluster).await?;
    let now_ms = now_ms();
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
