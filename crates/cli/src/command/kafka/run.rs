//! `hapax kafka run`: a processor whose handler is a command.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use hapax::core::metrics::Metrics as _;
use hapax_kafka::admin::{self, Wanted};
use hapax_kafka::consumer::{ConsumerConfig, ConsumerError};
use hapax_kafka::processor::{
    KafkaClient, Processor, ProcessorCells, ProcessorConfig, ProcessorCounts, ProcessorError,
};
use hapax_kafka::producer::{ErrorKind, ProducerConfig, ProducerError};
use hapax_kafka::refusal::{self, Refusal};
use hapax_kafka::wire::{Cluster, Connect};
use hapax_server::process::{ProcessPage, Readiness};
use serde_json::json;
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;
use tracing_subscriber::filter::LevelFilter;

use super::file::{KafkaFile, properties};
use super::handler::CommandHandler;
use crate::command::work::process::{self, CommandRunner, HaltState};
use crate::command::work::{Watchdog, environment};
use crate::output::{Output, note};
use crate::serve::Signals;

/// Wait before a slot is started again: the first, and the longest.
const RESTART_MIN: Duration = Duration::from_secs(1);
const RESTART_MAX: Duration = Duration::from_secs(30);
/// A slot that ran for this long had recovered from what ended it before.
const RECOVERED: Duration = Duration::from_mins(1);

/// Properties of the producer that mean something here.
const PRODUCER_PROPERTIES: [&str; 9] = [
    "transactional.id",
    "transaction.timeout.ms",
    "delivery.timeout.ms",
    "request.timeout.ms",
    "acks",
    "enable.idempotence",
    "max.in.flight.requests.per.connection",
    "max.in.flight",
    "request.required.acks",
];

/// The settings of all slots.
struct Slots {
    file: KafkaFile,
    consumer: ConsumerConfig,
    connect: Connect,
    transactional_id: String,
    runner: CommandRunner,
    stale: Vec<OsString>,
    counts: Arc<ProcessorCells>,
}

/// Flags of `run`.
pub struct RunFlags {
    pub command: Vec<OsString>,
    pub quiet: bool,
    pub metrics: Option<SocketAddr>,
    pub out: Output,
}

pub async fn run(file: KafkaFile, brokers: &[String], flags: RunFlags) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LevelFilter::WARN);
    let _ = logs.with_ansi(std::io::stderr().is_terminal()).try_init();
    let out = flags.out;
    let slots = Arc::new(slots(file, brokers, &flags)?);
    check(&slots).await?;

    let begun = Instant::now();
    let group = slots.consumer.group.clone();
    let page = match flags.metrics {
        Some(address) => Some(show_metrics(&slots, address).await?),
        None => None,
    };
    let (halt, halted) = watch::channel(HaltState::Running);
    let (end, ended) = watch::channel(false);
    let mut running = JoinSet::new();
    for number in 0..slots.file.concurrency() {
        running.spawn(run_slot(slots.clone(), number, halted.clone(), ended.clone()));
    }
    let limits = slots.file.limits.clone();
    let watching = async {
        signals.next().await;
        note("stopping: running commands may finish; once more to kill them");
        end.send_replace(true);
        let ms = Duration::from_millis;
        for (wait, state) in
            [(ms(limits.drain_ms), HaltState::Terminate), (ms(limits.kill_after_ms), HaltState::Kill)]
        {
            tokio::select! {
                () = process::raise_after(&halt, wait, state) => {}
                () = signals.next() => drop(halt.send_replace(HaltState::Kill)),
            }
        }
        std::future::pending::<()>().await;
    };
    let all = async {
        let mut failure = None;
        while let Some(done) = running.join_next().await {
            if let Err(error) = done.unwrap_or_else(|error| Err(error.into())) {
                // The others commit what they have, and end.
                end.send_replace(true);
                failure.get_or_insert(error);
            }
        }
        failure
    };
    let failure = tokio::select! {
        failure = all => failure,
        () = watching => unreachable!("it watches until all slots have ended"),
    };
    drop(page);
    report(&slots.counts.read(), &group, begun.elapsed(), out)?;
    failure.map_or(Ok(()), Err)
}

/// What was done, and what follows from it.
fn report(counts: &ProcessorCounts, group: &str, took: Duration, out: Output) -> anyhow::Result<()> {
    let ProcessorCounts { records, commits, aborts, settled, failures, dead, producer_fenced } = *counts;
    let sentence = format!(
        "{records} records in {commits} transactions, {aborts} aborted, {dead} dead letters, {:.1} s",
        took.as_secs_f64()
    );
    let value = json!({ "records": records, "commits": commits, "aborts": aborts, "settled": settled,
                        "failures": failures, "dead": dead, "producer_fenced": producer_fenced });
    out.done(&sentence, &value)?;
    if let Some(finding) = counts.fenced_finding(group) {
        note(&format!(
            "warning {}: {}; {} ({})",
            finding.code,
            finding.message,
            finding.remedy,
            finding.page()
        ));
    }
    Ok(())
}

/// Everything that can be refused without a broker.
fn slots(file: KafkaFile, brokers: &[String], flags: &RunFlags) -> anyhow::Result<Slots> {
    let missing =
        |key: &str, example: &str| crate::usage(format!("the file has no `{key}`; for example: {example}"));
    if file.input.is_empty() {
        return Err(missing("input", "input = [\"orders\"]"));
    }
    let Some(group) = file.group.clone() else { return Err(missing("group", "group = \"billing\"")) };
    let producer = file.producer_properties();
    let Some(transactional_id) = value(&producer, "transactional.id") else {
        return Err(missing("transactional_id", "transactional_id = \"billing-1\""));
    };
    let command: Vec<OsString> = if flags.command.is_empty() {
        file.command.iter().map(Into::into).collect()
    } else {
        flags.command.clone()
    };
    let Some((program, args)) = command.split_first() else {
        return Err(missing("command", "command = [\"./bill.sh\"], or give it after --"));
    };
    process::check(Path::new(program))?;
    let mut refused = refusal::producer(&producer, file.batch_bound().as_millis() as u64);
    refused.extend(unknown_properties(&producer));
    let own = properties(&file.consumer);
    refused.extend(refusal::processor(&own));
    if !refused.is_empty() {
        bail!("{}", refusal::lines(&refused));
    }
    let security = file.security()?;
    let mut consumer = ConsumerConfig::new(&brokers.join(","), &group, &[]);
    consumer.topics.clone_from(&file.input);
    consumer.new_group = file.new_group.into();
    consumer.properties = security.properties();
    for (name, value) in own {
        // It is a setting of the consumer here, because timeouts depend on each other.
        match (name.as_str(), value.trim().parse()) {
            ("session.timeout.ms", Ok(ms)) => consumer.session_timeout = Duration::from_millis(ms),
            _ => consumer.properties.push((name, value)),
        }
    }
    let connect = security.connect(brokers.iter().cloned())?;
    let watchdog = Watchdog::start().context("the watchdog of the commands cannot be started")?;
    let ms = Duration::from_millis;
    let runner = CommandRunner {
        program: program.clone(),
        args: args.to_vec(),
        run_max: Some(ms(file.limits.run_max_ms)),
        grace: ms(file.limits.kill_after_ms),
        watchdog: Arc::new(watchdog),
        shows_output: !flags.quiet,
    };
    let stale = environment::stale();
    Ok(Slots { file, consumer, connect, transactional_id, runner, stale, counts: Arc::default() })
}

fn value(properties: &[(String, String)], name: &str) -> Option<String> {
    properties.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone())
}

fn unknown_properties(properties: &[(String, String)]) -> Vec<Refusal> {
    let unknown = properties.iter().filter(|(key, _)| !PRODUCER_PROPERTIES.contains(&key.as_str()));
    unknown
        .map(|(key, value)| {
            let remedy = match crate::config_file::nearest(key, &PRODUCER_PROPERTIES) {
                Some(meant) => format!("this producer has no such property; did you mean {meant}?"),
                None => {
                    format!("this producer has no such property; it has {}", PRODUCER_PROPERTIES.join(", "))
                }
            };
            Refusal::new(key, value.as_str(), remedy)
        })
        .collect()
}

/// Compares the cluster with what is wanted, before the first record. An open transaction of the same id is no reason to
/// refuse: a predecessor that was killed has left it, and the start ends it.
async fn check(slots: &Slots) -> anyhow::Result<()> {
    // Members of a run before this one may still be in the group.
    let wanted = Wanted { group: None, ..slots.file.wanted() };
    let cluster = Cluster::new(slots.connect.clone());
    let mut wait = RESTART_MIN;
    let start = Instant::now();
    let found = loop {
        match admin::check(&cluster, &wanted).await {
            Ok(found) => break found,
            // A broker that starts at the same time.
            Err(admin::AdminError::Wire(error)) if error.is_transient() && start.elapsed() < RESTART_MAX => {
                note(&format!("waiting for the brokers: {error}"));
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(RESTART_MAX);
            }
            Err(error) => return Err(error.into()),
        }
    };
    for warning in &found.warnings {
        note(&format!("warning: {} = {:?}: {}", warning.key, warning.value, warning.remedy));
    }
    if !found.refused.is_empty() {
        bail!("{}", refusal::lines(&found.refused));
    }
    Ok(())
}

/// One member of the group with its producer, started again after trouble that may pass.
async fn run_slot(
    slots: Arc<Slots>,
    number: u16,
    halt: watch::Receiver<HaltState>,
    ended: watch::Receiver<bool>,
) -> anyhow::Result<()> {
    let end = || {
        let mut ended = ended.clone();
        async move { drop(ended.wait_for(|ended| *ended).await) }
    };
    let mut wait = RESTART_MIN;
    loop {
        let begun = Instant::now();
        let run = run_once(&slots, number, halt.clone(), end());
        let Err(error) = run.await else { return Ok(()) };
        if !is_transient(&error) || *ended.borrow() {
            return Err(error).with_context(|| format!("slot {number}"));
        }
        if begun.elapsed() > RECOVERED {
            wait = RESTART_MIN;
        }
        note(&format!("slot {number} starts again in {} s: {error}", wait.as_secs()));
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = end() => return Ok(()),
        }
        wait = (wait * 2).min(RESTART_MAX);
    }
}

async fn run_once(
    slots: &Slots,
    number: u16,
    halt: watch::Receiver<HaltState>,
    end: impl Future<Output = ()> + Send,
) -> Result<(), ProcessorError> {
    let file = &slots.file;
    let id = KafkaFile::slot_id(&slots.transactional_id, number);
    let mut producer = ProducerConfig::new(slots.connect.clone(), &id);
    producer.transaction_timeout = file.transaction_timeout();
    let given = |name: &str| {
        let value = value(&properties(&file.producer), name)?;
        value.trim().parse().ok().map(Duration::from_millis)
    };
    if let Some(timeout) = given("delivery.timeout.ms") {
        producer.delivery_timeout = timeout;
    }
    if let Some(timeout) = given("request.timeout.ms") {
        producer.connect.request_timeout = timeout;
    }
    let config = ProcessorConfig {
        batch_records_max: file.batch.records_max,
        batch_bytes_max: file.batch.bytes_max,
        batch_time_max: Duration::from_millis(file.batch.time_max_ms),
        handler_timeout: file.limits.handler(),
        overlap: file.overlap,
        attempts_max: file.attempts_max(),
        dead_letters: file.dead_letters.clone(),
        ..ProcessorConfig::default()
    };
    let handler = CommandHandler {
        runner: slots.runner.clone(),
        stale: slots.stale.clone(),
        halt,
        output: file.output.clone(),
        output_records: file.output_records,
        failures: HashMap::new(),
    };
    tokio::pin!(end);
    let client = tokio::select! {
        client = KafkaClient::connect(&slots.consumer, producer, &config) => client?,
        () = &mut end => return Ok(()),
    };
    let processor = Processor::new(config, client, handler).counted_by(slots.counts.clone());
    processor.run(end).await.map(drop)
}

/// Whether a new producer and consumer may succeed where these have failed.
fn is_transient(error: &ProcessorError) -> bool {
    match error {
        ProcessorError::Producer(ProducerError::Fenced { .. }) => false,
        ProcessorError::Producer(error) => error.kind() != ErrorKind::Fatal,
        ProcessorError::Consumer(ConsumerError::Fatal(_) | ConsumerError::AssignTimedOut(_))
        | ProcessorError::TopicRecreated { .. } => true,
        _ => false,
    }
}

/// Serves the counters until the returned sender is dropped.
async fn show_metrics(slots: &Arc<Slots>, address: SocketAddr) -> anyhow::Result<oneshot::Sender<()>> {
    let listener = ProcessPage::bind(address, false).await.context("--metrics")?;
    note(&format!("metrics at http://{}/metrics", listener.local_addr()?));
    let cluster = Arc::new(Cluster::new(slots.connect.clone()));
    let ready = move || -> Readiness {
        let cluster = cluster.clone();
        Box::pin(async move { cluster.versions().await.map(drop).map_err(|error| error.to_string()) })
    };
    let (slots, (end, ended)) = (slots.clone(), oneshot::channel::<()>());
    let page = ProcessPage::new(move || slots.counts.read().samples(&[&slots.consumer.group]), ready);
    tokio::spawn(page.run(listener, false, async { drop(ended.await) }));
    Ok(end)
}
