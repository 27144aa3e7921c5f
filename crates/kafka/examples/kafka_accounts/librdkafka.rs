//! The same stage with librdkafka's transactions, as its documentation recommends: output and offsets in a transaction; after an
//! error the transaction is aborted and the inputs are read again.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::PATIENCE;
use crate::stage::{BATCH, Settings, Work};

/// Runs until it is killed or an error is fatal.
pub fn run(settings: &Settings) {
    let ended = process(settings);
    eprintln!("the stage ended: {ended:?}");
}

struct Client {
    consumer: BaseConsumer,
    producer: FutureProducer,
    /// The first offset of each partition in the transaction, and the next one.
    spans: BTreeMap<i32, (i64, i64)>,
    records: usize,
    since: Instant,
}

fn process(settings: &Settings) -> Result<(), KafkaError> {
    let mut base = ClientConfig::new();
    base.set("bootstrap.servers", &settings.address);
    let consumer: BaseConsumer = base
        .clone()
        .set("group.id", settings.group())
        .set("group.instance.id", "0")
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .create()?;
    let producer: FutureProducer = base
        .set("transactional.id", settings.transactional_id())
        // Requests without an answer are repeated on another connection after this time.
        .set("socket.timeout.ms", "3000")
        .set("transaction.timeout.ms", "60000")
        .set("partitioner", "murmur2_random")
        .create()?;
    producer.init_transactions(PATIENCE)?;
    consumer.subscribe(&[&settings.input()])?;
    let mut client = Client { consumer, producer, spans: BTreeMap::new(), records: 0, since: Instant::now() };
    let mut work = Work::new(settings.stage);
    loop {
        let handled = client.step(settings, &mut work);
        match handled {
            Ok(()) => {}
            // Some errors can be met by an abort, the others end the process.
            Err(KafkaError::Transaction(error)) if error.txn_requires_abort() => client.abort(settings)?,
            Err(error) => return Err(error),
        }
    }
}

impl Client {
    fn step(&mut self, settings: &Settings, work: &mut Work) -> Result<(), KafkaError> {
        let is_due =
            self.records >= BATCH || (self.records > 0 && self.since.elapsed() > settings.batch_time_max());
        if is_due {
            return self.commit(settings);
        }
        let (partition, offset, value) = match self.consumer.poll(Duration::from_millis(50)) {
            None => return Ok(()),
            Some(Err(error)) => {
                return if error.rdkafka_error_code().is_some() { Ok(()) } else { Err(error) };
            }
            Some(Ok(record)) => {
                let value = String::from_utf8_lossy(record.payload().unwrap_or_default()).into_owned();
                (record.partition(), record.offset(), value)
            }
        };
        if self.records == 0 {
            self.producer.begin_transaction()?;
            self.since = Instant::now();
        }
        self.spans.entry(partition).and_modify(|span| span.1 = offset + 1).or_insert((offset, offset + 1));
        self.records += 1;
        let (outputs, handled) = work.handle(&value);
        for (key, value) in outputs {
            let topic = settings.output();
            let record = FutureRecord::to(&topic).key(&key).payload(&value);
            let sent = crate::block_on(self.producer.send(record, PATIENCE));
            sent.map_err(|(error, _)| error)?;
        }
        if handled.is_err() {
            self.abort(settings)?;
        }
        Ok(())
    }

    fn commit(&mut self, settings: &Settings) -> Result<(), KafkaError> {
        let mut offsets = TopicPartitionList::new();
        for (partition, (_, next)) in &self.spans {
            offsets.add_partition_offset(&settings.input(), *partition, Offset::Offset(*next))?;
        }
        let group = self.consumer.group_metadata().ok_or(KafkaError::Canceled)?;
        self.producer.send_offsets_to_transaction(&offsets, &group, PATIENCE)?;
        self.producer.commit_transaction(PATIENCE)?;
        self.clear();
        Ok(())
    }

    fn abort(&mut self, settings: &Settings) -> Result<(), KafkaError> {
        self.producer.abort_transaction(PATIENCE)?;
        for (partition, (first, _)) in &self.spans {
            self.consumer.seek(&settings.input(), *partition, Offset::Offset(*first), PATIENCE)?;
        }
        self.clear();
        Ok(())
    }

    fn clear(&mut self) {
        self.spans.clear();
        self.records = 0;
    }
}
