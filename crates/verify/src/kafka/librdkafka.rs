//! Control of our own tests: librdkafka's transactions, used as its documentation recommends. Every other transaction is aborted on
//! purpose, so that a delayed commit finds one that it must not commit (KAFKA-17754).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use hapax_kafka::wire::Connect;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::{Header, Message as _, OwnedHeaders};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::runtime::Handle;

use super::processor::Member;
use super::site::{REQUEST, TRANSACTION_HEADER};
use crate::history::{Act, TransactionEnd};

const BATCH_MAX: usize = 20;
const BATCH_TIME: Duration = Duration::from_millis(300);
/// Time of a call of librdkafka.
const CALL: Duration = Duration::from_secs(15);
/// The coordinator aborts what a killed process has left open after this time.
const TRANSACTION_MS: &str = "8000";
const RESTART: Duration = Duration::from_millis(300);

/// Runs until its process is killed.
pub async fn run(member: Member) -> anyhow::Result<()> {
    loop {
        let (once, runtime) = (member.clone(), Handle::current());
        // Its calls block.
        let _ = tokio::task::spawn_blocking(move || process(&once, &runtime)).await?;
        tokio::time::sleep(RESTART).await;
    }
}

struct Client<'m> {
    member: &'m Member,
    runtime: &'m Handle,
    input: String,
    output: String,
    consumer: BaseConsumer,
    producer: FutureProducer,
    /// The first offset of each partition in the transaction, and the next one.
    spans: BTreeMap<i32, (i64, i64)>,
    records: usize,
    since: Instant,
    /// Of the transaction: its number in this process.
    number: u64,
}

fn process(member: &Member, runtime: &Handle) -> Result<(), KafkaError> {
    let Member { site, workload, number, .. } = member;
    let Connect { bootstrap, .. } = site.through_proxy(workload.name);
    let mut base = ClientConfig::new();
    base.set("bootstrap.servers", bootstrap.join(","));
    let consumer: BaseConsumer = base
        .clone()
        .set("group.id", site.group(workload))
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .set("session.timeout.ms", site.session_ms.to_string())
        .set("heartbeat.interval.ms", (site.session_ms / 6).to_string())
        .create()?;
    let producer: FutureProducer = base
        .set("transactional.id", site.transactional_id(workload, *number))
        // Requests without an answer are repeated on another connection after this time.
        .set("socket.timeout.ms", REQUEST.as_millis().to_string())
        .set("transaction.timeout.ms", TRANSACTION_MS)
        .create()?;
    producer.init_transactions(CALL)?;
    let (input, output) = (site.input(workload), site.output(workload));
    consumer.subscribe(&[&input])?;
    let (spans, since, number) = (BTreeMap::new(), Instant::now(), fastrand::u64(..1 << 40));
    let mut client =
        Client { member, runtime, input, output, consumer, producer, spans, records: 0, since, number };
    loop {
        match client.step() {
            Ok(()) => {}
            // Some errors can be met by an abort, the others need a new start.
            Err(KafkaError::Transaction(error)) if error.txn_requires_abort() => client.abort()?,
            Err(error) => return Err(error),
        }
    }
}

impl Client<'_> {
    fn step(&mut self) -> Result<(), KafkaError> {
        if self.records >= BATCH_MAX || self.records > 0 && self.since.elapsed() > BATCH_TIME {
            return if self.number.is_multiple_of(2) { self.commit() } else { self.abort() };
        }
        let (partition, offset, key, value) = match self.consumer.poll(Duration::from_millis(50)) {
            None => return Ok(()),
            Some(Err(error)) => {
                return if error.rdkafka_error_code().is_some() { Ok(()) } else { Err(error) };
            }
            Some(Ok(record)) => {
                let bytes = |part: Option<&[u8]>| part.unwrap_or_default().to_vec();
                (record.partition(), record.offset(), bytes(record.key()), bytes(record.payload()))
            }
        };
        if self.records == 0 {
            self.producer.begin_transaction()?;
            self.since = Instant::now();
        }
        self.spans.entry(partition).and_modify(|span| span.1 = offset + 1).or_insert((offset, offset + 1));
        self.records += 1;
        let name = self.name();
        let headers = OwnedHeaders::new().insert(Header { key: TRANSACTION_HEADER, value: Some(&name) });
        let record =
            FutureRecord::to(&self.output).partition(partition).key(&key).payload(&value).headers(headers);
        let sent = self.runtime.block_on(self.producer.send(record, CALL));
        sent.map(drop).map_err(|(error, _)| error)
    }

    fn name(&self) -> String {
        format!("{}/librdkafka-{}", self.member.reporter.who(), self.number)
    }

    fn commit(&mut self) -> Result<(), KafkaError> {
        let mut offsets = TopicPartitionList::new();
        for (partition, (_, next)) in &self.spans {
            offsets.add_partition_offset(&self.input, *partition, Offset::Offset(*next))?;
        }
        let group = self.consumer.group_metadata().ok_or(KafkaError::Canceled)?;
        self.producer.send_offsets_to_transaction(&offsets, &group, CALL)?;
        self.producer.commit_transaction(CALL)?;
        self.ended(TransactionEnd::Committed);
        Ok(())
    }

    fn abort(&mut self) -> Result<(), KafkaError> {
        self.producer.abort_transaction(CALL)?;
        for (partition, (first, _)) in &self.spans {
            self.consumer.seek(&self.input, *partition, Offset::Offset(*first), CALL)?;
        }
        self.ended(TransactionEnd::Aborted);
        Ok(())
    }

    fn ended(&mut self, end: TransactionEnd) {
        let (transaction, records, intended) = (self.name(), self.records as u64, true);
        let act = Act::Transaction { transaction, records, end, intended };
        // Without the recorder there is no run.
        let _ = self.runtime.block_on(self.member.reporter.report(self.member.workload.name, vec![act]));
        self.spans.clear();
        self.records = 0;
        self.number += 1;
    }
}
