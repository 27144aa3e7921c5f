//! The loops that are compared. The time of each is that from its first record to the end of its last commit.

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, Record, StartAt};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{IdempotentProducer, NewRecord, ProducerConfig};
use hapax_kafka::to_database::{ToDatabase, ToDatabaseOptions};
use hapax_kafka::wire::Connect;
use hapax_sqlite::SqliteInbox;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::oneshot;

use crate::{PATIENCE, Site, block_on};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contestant {
    /// The transactional processor.
    Processor,
    /// Our consumer and our producer without transactions: a crash repeats records.
    Plain,
    RdkafkaPlain,
    RdkafkaTransactions,
}

impl Contestant {
    pub fn name(self) -> &'static str {
        match self {
            Self::Processor => "processor",
            Self::Plain => "plain idempotent loop",
            Self::RdkafkaPlain => "plain rdkafka loop",
            Self::RdkafkaTransactions => "rdkafka's transactions",
        }
    }
}

/// One run: its topics, its group, and how much is copied.
pub struct Flow {
    pub address: String,
    pub config: ClientConfig,
    pub input: String,
    pub output: String,
    pub records: usize,
    pub batch: usize,
    /// The longest time between two commits.
    pub commit: Duration,
}

impl Flow {
    pub fn new(site: &Site, name: &str, records: usize, batch: usize) -> Self {
        let output = format!("output-{name}");
        site.create(&output);
        Self {
            address: site.address.clone(),
            config: site.config(),
            input: "input".to_owned(),
            output,
            records,
            batch,
            commit: Duration::from_mins(1),
        }
    }

    pub fn consumer(&self) -> ConsumerConfig {
        ConsumerConfig::new(&self.address, &self.output, &[&self.input])
    }
}

pub fn run(contestant: Contestant, flow: &Flow) -> Duration {
    match contestant {
        Contestant::Processor => block_on(processor(flow)),
        Contestant::Plain => block_on(plain(flow)),
        Contestant::RdkafkaPlain => rdkafka_loop(flow, false),
        Contestant::RdkafkaTransactions => rdkafka_loop(flow, true),
    }
}

fn copy(record: &Record, output: &str) -> NewRecord {
    NewRecord {
        topic: output.to_owned(),
        partition: Some(record.at.partition),
        key: record.key.clone(),
        value: record.value.clone(),
        ..NewRecord::default()
    }
}

struct Copier {
    output: String,
    left: usize,
    begun: Arc<OnceLock<Instant>>,
    done: Option<oneshot::Sender<()>>,
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        self.begun.get_or_init(Instant::now);
        output.push(copy(record, &self.output));
        self.left -= 1;
        if self.left == 0 {
            self.done.take().map(|done| done.send(()));
        }
        Ok(())
    }
}

pub async fn processor(flow: &Flow) -> Duration {
    let config = ProcessorConfig {
        batch_records_max: flow.batch,
        batch_bytes_max: 64 << 20,
        batch_time_max: flow.commit,
        ..ProcessorConfig::default()
    };
    let mut producer = ProducerConfig::new(Connect::plain([&flow.address]), &flow.output);
    producer.transaction_timeout = Duration::from_mins(5);
    let client = KafkaClient::connect(&flow.consumer(), producer, &config).await.expect("it connects");
    let (done, ended) = oneshot::channel();
    let begun = Arc::new(OnceLock::new());
    let copier =
        Copier { output: flow.output.clone(), left: flow.records, begun: begun.clone(), done: Some(done) };
    let run = Processor::new(config, client, copier).run(async { drop(ended.await) });
    let totals = tokio::time::timeout(PATIENCE, run).await.expect("in time").expect("no error");
    assert_eq!((totals.records as usize, totals.aborts), (flow.records, 0), "{totals:?}");
    begun.get().expect("it has begun").elapsed()
}

async fn plain(flow: &Flow) -> Duration {
    let mut consumer = Consumer::start(&flow.consumer()).expect("it starts");
    let mut producer =
        IdempotentProducer::connect(Connect::plain([&flow.address])).await.expect("it connects");
    let (mut begun, mut copied) = (None, 0);
    let mut next = BTreeMap::new();
    while copied < flow.records {
        match tokio::time::timeout(PATIENCE, consumer.next()).await.expect("in time") {
            Event::Assigned(assignment) => {
                let positions = vec![StartAt::Committed; assignment.partitions.len()];
                assignment.start(positions);
            }
            Event::Record(record) => {
                begun.get_or_insert_with(Instant::now);
                next.insert(record.at.clone(), record.offset + 1);
                producer.send(copy(&record, &flow.output)).await.expect("it is sent");
                copied += 1;
                if copied % flow.batch == 0 || copied == flow.records {
                    producer.flush().await.expect("it is written");
                    consumer.commit(next.iter().map(|(at, next)| (at, *next)));
                }
            }
            Event::Ended(error) => panic!("{error}"),
            _ => {}
        }
    }
    begun.map_or(Duration::ZERO, |begun: Instant| begun.elapsed())
}

/// librdkafka's consumer and producer, with or without its transactions.
pub fn rdkafka_loop(flow: &Flow, transactional: bool) -> Duration {
    let consumer: BaseConsumer = flow
        .config
        .clone()
        .set("group.id", &flow.output)
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("auto.offset.reset", "earliest")
        .create()
        .expect("a consumer");
    let mut config = flow.config.clone();
    config.set("enable.idempotence", "true");
    if transactional {
        config.set("transactional.id", &flow.output);
    }
    let producer: FutureProducer = config.create().expect("a producer");
    if transactional {
        producer.init_transactions(PATIENCE).expect("it begins");
    }
    consumer.subscribe(&[&flow.input]).expect("it subscribes");
    let (mut begun, mut copied, mut since) = (None, 0, Instant::now());
    let mut open: Vec<DeliveryFuture> = Vec::new();
    let mut next: BTreeMap<i32, i64> = BTreeMap::new();
    while copied < flow.records || !open.is_empty() {
        let is_due = open.len() >= flow.batch || copied >= flow.records || since.elapsed() >= flow.commit;
        if !open.is_empty() && is_due {
            let mut offsets = TopicPartitionList::new();
            for (partition, next) in &next {
                offsets
                    .add_partition_offset(&flow.input, *partition, Offset::Offset(*next))
                    .expect("an offset");
            }
            block_on(async {
                for delivery in open.drain(..) {
                    delivery.await.expect("not cancelled").expect("it is written");
                }
            });
            if transactional {
                let group = consumer.group_metadata().expect("a member");
                producer.send_offsets_to_transaction(&offsets, &group, PATIENCE).expect("offsets");
                producer.commit_transaction(PATIENCE).expect("it is committed");
            } else {
                consumer.commit(&offsets, CommitMode::Async).expect("offsets");
            }
        }
        if copied >= flow.records {
            continue;
        }
        let Some(Ok(record)) = consumer.poll(Duration::from_millis(1)) else { continue };
        begun.get_or_insert_with(Instant::now);
        if open.is_empty() {
            since = Instant::now();
            if transactional {
                producer.begin_transaction().expect("it begins");
            }
        }
        let payload = record.payload().unwrap_or_default();
        let copy = FutureRecord::to(&flow.output)
            .partition(record.partition())
            .key(record.key().unwrap_or_default())
            .payload(payload);
        open.push(producer.send_result(copy).map_err(|(error, _)| error).expect("there is room"));
        next.insert(record.partition(), record.offset() + 1);
        copied += 1;
    }
    begun.map_or(Duration::ZERO, |begun: Instant| begun.elapsed())
}

/// The same records into rows of SQLite, each with a ledger entry, and the position in the same transaction.
pub fn to_sqlite(flow: &Flow) -> Duration {
    let folder = tempfile::tempdir().expect("a folder");
    let db = rusqlite::Connection::open(folder.path().join("rows.db")).expect("a database");
    db.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE row (body BLOB)").expect("a table");
    let inbox = SqliteInbox::new(db).expect("an inbox");
    let begun = Arc::new(OnceLock::new());
    let (done, ended) = oneshot::channel();
    let (mut left, mut done, first) = (flow.records, Some(done), begun.clone());
    let state = std::sync::Mutex::new(move || {
        first.get_or_init(Instant::now);
        left -= 1;
        if left == 0 {
            done.take().map(|done| done.send(()));
        }
    });
    let connect = Connect::plain([&flow.address]);
    let run = ToDatabase::new_blocking(
        connect,
        flow.consumer(),
        &inbox,
        move |record: &Record, tx: &rusqlite::Transaction<'_>| {
            tx.execute("INSERT INTO row VALUES (?1)", [record.value.as_deref()])?;
            (state.lock().expect("not poisoned"))();
            Ok(())
        },
    );
    let run =
        run.options(ToDatabaseOptions { batch_records_max: flow.batch, ..ToDatabaseOptions::default() });
    block_on(async {
        let run = run.run(async { drop(ended.await) });
        tokio::time::timeout(PATIENCE, run).await.expect("in time").expect("no error")
    });
    begun.get().expect("it has begun").elapsed()
}
