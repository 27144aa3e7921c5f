//! The loops that are compared. The time of each is that from its first record to the end of its last commit.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, Record, StartAt, TopicPartition};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{IdempotentProducer, NewRecord, ProducerConfig};
use hapax_kafka::to_database::{ToDatabase, ToDatabaseOptions};
use hapax_kafka::wire::{Cluster, Connect, CoordinatorKind};
use hapax_sqlite::SqliteInbox;
use kafka_protocol::messages::OffsetCommitRequest;
use kafka_protocol::messages::offset_commit_request::{
    OffsetCommitRequestPartition, OffsetCommitRequestTopic,
};
use kafka_protocol::protocol::StrBytes;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, CommitMode, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{DeliveryFuture, FutureProducer, FutureRecord, Producer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::oneshot;

use crate::timed::Timed;
use crate::{PATIENCE, Site, block_on};

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Contestant {
    /// The transactional processor, whose transactions overlap.
    Processor,
    /// The same, one transaction after the other.
    ProcessorInTurn,
    /// Our consumer and our producer without transactions: a crash repeats records.
    Plain(Offsets),
    RdkafkaPlain(Offsets),
    RdkafkaTransactions,
    /// In a process of its own.
    KrafkaTransactions,
}

/// How a loop without transactions commits its offsets after each batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Offsets {
    /// It waits for the answer, so that a crash repeats at most one batch.
    Waited,
    /// It does not wait: a crash repeats whatever was not committed yet.
    Unwaited,
}

impl Contestant {
    pub fn name(self) -> &'static str {
        match self {
            Self::Processor => "processor",
            Self::ProcessorInTurn => "processor without overlap",
            Self::Plain(Offsets::Waited) => "plain idempotent loop",
            Self::Plain(Offsets::Unwaited) => "plain, offsets not waited for",
            Self::RdkafkaPlain(Offsets::Waited) => "plain rdkafka loop",
            Self::RdkafkaPlain(Offsets::Unwaited) => "rdkafka, offsets not waited for",
            Self::RdkafkaTransactions => "rdkafka's transactions",
            Self::KrafkaTransactions => "krafka's transactions",
        }
    }
}

/// One run: its topics, its group, and how much is copied.
pub struct Flow {
    pub address: String,
    pub config: ClientConfig,
    /// The program over krafka, if it could be built.
    pub krafka: Option<PathBuf>,
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
            krafka: site.krafka.clone(),
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
        Contestant::Processor => block_on(processor(flow, true)),
        Contestant::ProcessorInTurn => block_on(processor(flow, false)),
        Contestant::Plain(offsets) => block_on(plain(flow, offsets)),
        Contestant::RdkafkaPlain(offsets) => rdkafka_loop(flow, Commit::Offsets(offsets)),
        Contestant::RdkafkaTransactions => rdkafka_loop(flow, Commit::Transaction),
        Contestant::KrafkaTransactions => krafka_loop(flow),
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

pub async fn processor(flow: &Flow, overlap: bool) -> Duration {
    let config = ProcessorConfig {
        batch_records_max: flow.batch,
        batch_bytes_max: 64 << 20,
        batch_time_max: flow.commit,
        overlap,
        ..ProcessorConfig::default()
    };
    let mut producer = ProducerConfig::new(Connect::plain([&flow.address]), &flow.output);
    producer.transaction_timeout = Duration::from_mins(5);
    let client = KafkaClient::connect(&flow.consumer(), producer, &config).await.expect("it connects");
    let (done, ended) = oneshot::channel();
    let begun = Arc::new(OnceLock::new());
    let copier =
        Copier { output: flow.output.clone(), left: flow.records, begun: begun.clone(), done: Some(done) };
    let closed = Arc::new(OnceLock::new());
    let client = Timed { inner: client, closed: closed.clone() };
    let run = Processor::new(config, client, copier).run(async { drop(ended.await) });
    let totals = tokio::time::timeout(PATIENCE, run).await.expect("in time").expect("no error");
    assert_eq!((totals.records as usize, totals.aborts), (flow.records, 0), "{totals:?}");
    *closed.get().expect("it was closed") - *begun.get().expect("it has begun")
}

async fn plain(flow: &Flow, offsets: Offsets) -> Duration {
    let mut consumer = Consumer::start(&flow.consumer()).expect("it starts");
    let mut producer =
        IdempotentProducer::connect(Connect::plain([&flow.address])).await.expect("it connects");
    let cluster = Cluster::new(Connect::plain([&flow.address]));
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
                    match offsets {
                        Offsets::Unwaited => consumer.commit(next.iter().map(|(at, next)| (at, *next))),
                        Offsets::Waited => commit_offsets(&cluster, &consumer, &next).await,
                    }
                }
            }
            Event::Ended(error) => panic!("{error}"),
            _ => {}
        }
    }
    begun.map_or(Duration::ZERO, |begun: Instant| begun.elapsed())
}

/// Commits offsets as a member of the consumer's group, and waits for the answer.
async fn commit_offsets(cluster: &Cluster, consumer: &Consumer, next: &BTreeMap<TopicPartition, i64>) {
    let group = consumer.group_metadata().expect("a member");
    let mut topics: BTreeMap<&str, Vec<OffsetCommitRequestPartition>> = BTreeMap::new();
    for (at, next) in next {
        let partition = OffsetCommitRequestPartition::default().with_partition_index(at.partition);
        topics.entry(&at.topic).or_default().push(partition.with_committed_offset(*next));
    }
    let text = |text: &str| StrBytes::from_string(text.to_owned());
    let topic = |(name, partitions)| {
        OffsetCommitRequestTopic::default().with_name(text(name).into()).with_partitions(partitions)
    };
    let request = OffsetCommitRequest::default()
        .with_group_id(text(&group.group).into())
        .with_generation_id_or_member_epoch(group.generation)
        .with_member_id(text(&group.member))
        .with_topics(topics.into_iter().map(topic).collect());
    let coordinator = cluster.coordinator(CoordinatorKind::Group, &group.group).await;
    let coordinator = coordinator.expect("a broker").expect("a coordinator");
    let (answer, _) = cluster.call_at(&coordinator, &request, 9).await.expect("an answer");
    let errors = answer.topics.iter().flat_map(|topic| &topic.partitions).filter(|it| it.error_code != 0);
    assert_eq!(errors.count(), 0, "{answer:?}");
}

/// How librdkafka's loop commits a batch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Commit {
    Transaction,
    Offsets(Offsets),
}

/// librdkafka's consumer and producer, with or without its transactions.
fn rdkafka_loop(flow: &Flow, commit: Commit) -> Duration {
    let transactional = commit == Commit::Transaction;
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
                let is_waited = commit == Commit::Offsets(Offsets::Waited);
                let mode = if is_waited { CommitMode::Sync } else { CommitMode::Async };
                consumer.commit(&offsets, mode).expect("offsets");
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

/// krafka's consumer and its transactions.
fn krafka_loop(flow: &Flow) -> Duration {
    let mut command = Command::new(flow.krafka.as_ref().expect("it was built"));
    command.args(["copy", &flow.address, &flow.input, &flow.output]);
    command.args([flow.records.to_string(), flow.batch.to_string(), flow.commit.as_millis().to_string()]);
    let done = command.stderr(Stdio::inherit()).output().expect("it runs");
    let printed = String::from_utf8_lossy(&done.stdout);
    let seconds = printed.trim().strip_prefix("seconds ").and_then(|seconds| seconds.parse().ok());
    Duration::from_secs_f64(seconds.unwrap_or_else(|| panic!("krafka: {printed}")))
}

/// A database for rows.
pub fn database(path: &Path) -> rusqlite::Connection {
    let db = rusqlite::Connection::open(path).expect("a database");
    db.execute_batch("PRAGMA journal_mode = WAL; CREATE TABLE row (body BLOB)").expect("a table");
    db
}

/// The same records into rows of SQLite, each with a ledger entry, and the position in the same transaction.
pub fn to_sqlite(flow: &Flow, db: rusqlite::Connection) -> Duration {
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
