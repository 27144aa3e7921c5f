//! The reader of the statements, and what it finds.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::PARTITIONS;
use crate::stage::Transfer;

/// Reads committed statements while the stages run.
pub struct Statements {
    config: ClientConfig,
    topic: String,
    consumer: BaseConsumer,
    /// Lines by transfer and account.
    lines: BTreeMap<(u64, String), Vec<i64>>,
}

impl Statements {
    pub fn new(config: &ClientConfig, run: &str) -> Self {
        let topic = format!("{run}-statements");
        let consumer = reader(config, &topic, "read_committed");
        Self { config: config.clone(), topic, consumer, lines: BTreeMap::new() }
    }

    /// Transfers of which something was posted for both accounts.
    pub fn transfers(&self) -> usize {
        self.lines.len() / 2
    }

    pub fn read_for(&mut self, time: Duration) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            // Trouble with the connection is tried again by the client.
            if let Some(Ok(record)) = self.consumer.poll(Duration::from_millis(20)) {
                let value = String::from_utf8_lossy(record.payload().unwrap_or_default()).into_owned();
                let words: Vec<&str> = value.split(' ').collect();
                let [id, account, amount] = words[..] else { continue };
                let key = (id.parse().unwrap_or(u64::MAX), account.to_owned());
                self.lines.entry(key).or_default().push(amount.parse().unwrap_or(0));
            }
        }
    }

    /// Compares what was read with the transfers. `patience` bounds the search for aborted records.
    pub fn verdict(mut self, transfers: &[Transfer], patience: Duration) -> Verdict {
        // What stands behind the last transfer, for example its repetition.
        self.read_for(Duration::from_secs(2));
        let mut expected: BTreeMap<(u64, String), i64> = BTreeMap::new();
        for Transfer { id, from, to, amount } in transfers {
            expected.insert((*id, (*from).to_owned()), -amount);
            expected.insert((*id, (*to).to_owned()), *amount);
        }
        let mut verdict = Verdict { transfers: transfers.len(), ..Verdict::default() };
        let mut balances: BTreeMap<&str, i64> = BTreeMap::new();
        for (key, amount) in &expected {
            let lines = self.lines.get(key).map_or(&[][..], Vec::as_slice);
            verdict.missing += usize::from(lines.is_empty());
            verdict.repeated += lines.len().saturating_sub(1);
            *balances.entry(&key.1).or_default() += lines.iter().sum::<i64>() - amount;
        }
        verdict.wrong = balances
            .into_iter()
            .filter(|(_, difference)| *difference != 0)
            .map(|(account, difference)| (account.to_owned(), difference))
            .collect();
        let postings = self.topic.replace("statements", "postings");
        let count = |isolation| count(&reader(&self.config, &postings, isolation), patience);
        verdict.aborted = count("read_uncommitted").saturating_sub(count("read_committed"));
        verdict
    }
}

fn reader(config: &ClientConfig, topic: &str, isolation: &str) -> BaseConsumer {
    let consumer: BaseConsumer = config
        .clone()
        .set("group.id", "reader")
        .set("isolation.level", isolation)
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .create()
        .expect("a client");
    let mut assigned = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        assigned.add_partition_offset(topic, partition, Offset::Beginning).expect("an offset");
    }
    consumer.assign(&assigned).expect("partitions");
    consumer
}

/// Records up to the end of each partition.
fn count(reader: &BaseConsumer, patience: Duration) -> usize {
    let (start, mut count, mut ended) = (Instant::now(), 0, 0);
    while ended < PARTITIONS && start.elapsed() < patience {
        match reader.poll(Duration::from_millis(100)) {
            Some(Ok(_)) => count += 1,
            Some(Err(KafkaError::PartitionEOF(_))) => ended += 1,
            Some(Err(_)) | None => {}
        }
    }
    count
}

/// What a run has shown.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub transfers: usize,
    /// Lines that are not there.
    pub missing: usize,
    /// Lines that are there more than once.
    pub repeated: usize,
    /// Accounts with another balance than the transfers give, and the difference.
    pub wrong: Vec<(String, i64)>,
    /// Postings that only readers of everything see.
    pub aborted: usize,
}

impl Verdict {
    pub fn is_exact(&self) -> bool {
        self.missing == 0 && self.repeated == 0 && self.wrong.is_empty()
    }

    pub fn print(&self, title: &str) {
        let Self { transfers, missing, repeated, aborted, .. } = self;
        let verdict = if self.is_exact() { "exact" } else { "WRONG" };
        println!(
            "{title}: {verdict}: {transfers} transfers, {missing} lines missing, {repeated} repeated, {aborted} aborted postings in the log"
        );
        for (account, difference) in &self.wrong {
            println!("  {account}: {difference:+}");
        }
    }
}
