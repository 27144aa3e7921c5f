//! The reader of committed records: it reads all output topics while everything runs, and records what it sees. It is never a
//! target, and it keeps its positions itself, so it sees each record of the log once.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, Record, StartAt, TopicPartition};

use super::site::{END_MARK, KafkaSite, PARTITIONS, READ_TO_END, TRANSACTION_HEADER};
use crate::history::Act;
use crate::recorder::{Payment, Reporter};
use crate::roles;

/// Records that are reported at once.
const REPORT_MAX: usize = 100;
/// What was read is reported when nothing follows for this long.
const IDLE: Duration = Duration::from_millis(20);

/// Reads until it has seen the end mark of every partition.
pub async fn run(site: &KafkaSite) -> anyhow::Result<()> {
    let reporter = Reporter::new(site.recorder, "reader");
    let workloads: HashMap<String, &'static str> =
        site.workloads()?.iter().map(|workload| (site.output(workload), workload.name)).collect();
    let topics: Vec<&str> = workloads.keys().map(String::as_str).collect();
    let group = format!("{}-reader", site.prefix());
    let config = ConsumerConfig::new(&site.brokers, &group, &topics);
    let mut consumer = Consumer::start(&config)?;
    roles::ready();
    let mut reader = Reader { workloads, ..Reader::default() };
    while reader.is_reading() {
        match tokio::time::timeout(IDLE, consumer.next()).await {
            Ok(Event::Record(record)) => reader.read(record)?,
            Ok(Event::Assigned(assignment)) => {
                let start =
                    |at: &TopicPartition| StartAt::Offset(reader.next.get(at).copied().unwrap_or_default());
                let starts = assignment.partitions.iter().map(start).collect();
                assignment.start(starts);
            }
            // A revocation is answered by dropping it. Positions stay.
            Ok(Event::Revoked(_) | Event::Lost(_)) => {
                eprintln!("the reader lost its partitions for a moment");
            }
            Ok(Event::Problem(problem)) => eprintln!("{problem}"),
            Ok(Event::Ended(error)) => bail!("the reader ended: {error}"),
            Err(_) => reader.report(&reporter).await?,
        }
        if reader.count >= REPORT_MAX || reader.is_at_end {
            reader.report(&reporter).await?;
        }
    }
    reader.report(&reporter).await
}

#[derive(Default)]
struct Reader {
    /// Workloads by output topic.
    workloads: HashMap<String, &'static str>,
    /// The next offset of each partition.
    next: HashMap<TopicPartition, i64>,
    /// Partitions whose end mark was seen.
    ended: BTreeSet<TopicPartition>,
    /// What is not reported yet, by workload.
    seen: BTreeMap<&'static str, Vec<Act>>,
    count: usize,
    /// The last record was the end of a workload's output, which is told after everything is reported.
    is_at_end: bool,
}

impl Reader {
    fn is_reading(&self) -> bool {
        !self.workloads.keys().all(|topic| self.has_ended(topic))
    }

    fn has_ended(&self, topic: &str) -> bool {
        (0..PARTITIONS).all(|partition| self.ended.contains(&TopicPartition::new(topic, partition)))
    }

    fn read(&mut self, record: Record) -> anyhow::Result<()> {
        let value = record.value.as_deref().unwrap_or_default();
        if value == END_MARK.as_bytes() {
            let topic = record.at.topic.clone();
            let is_new = self.ended.insert(record.at);
            self.is_at_end = is_new && self.has_ended(&topic);
            return Ok(());
        }
        let Payment { id, account, number } =
            serde_json::from_slice(value).with_context(|| format!("{} at {}", record.at, record.offset))?;
        let transaction = record.header(TRANSACTION_HEADER).unwrap_or_default();
        let transaction = String::from_utf8_lossy(transaction).into_owned();
        let (partition, offset) = (record.at.partition, record.offset);
        let workload = self.workloads.get(&*record.at.topic).context("a topic of the run")?;
        let act = Act::Shown { id, account, number, transaction, partition, offset };
        self.seen.entry(workload).or_default().push(act);
        self.count += 1;
        self.next.insert(record.at, offset + 1);
        Ok(())
    }

    async fn report(&mut self, reporter: &Reporter) -> anyhow::Result<()> {
        self.count = 0;
        for (workload, acts) in std::mem::take(&mut self.seen) {
            reporter.report(workload, acts).await?;
        }
        if std::mem::take(&mut self.is_at_end) {
            let ended = self.workloads.iter().filter(|(topic, _)| self.has_ended(topic));
            // One that was told before is told again.
            ended.for_each(|(_, workload)| roles::say(&format!("{READ_TO_END}{workload}")));
        }
        Ok(())
    }
}
