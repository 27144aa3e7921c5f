//! The processor, as a process of its own that is killed while a read_committed reader runs.
//!
//! This binary is also that process: it copies a topic to another one when its environment says so.

use std::collections::{BTreeMap, HashSet};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_faults::{Action, Match};
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig, ProducerError};
use hapax_kafka::wire::Connect;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("processor_killed_gives_each_output_once_and_in_order", killed_gives_each_output_once),
        shared("processor_settles_a_commit_that_stays_unanswered", settles_an_unanswered_commit),
        shared("processor_ends_if_a_topic_refuses_its_outputs", ends_if_outputs_are_refused),
        shared("processor_gives_up_a_record_into_the_dead_letter_topic", dead_letters),
        shared("processor_gives_up_several_records_of_one_batch", several_dead_letters),
        shared("processor_without_dead_letters_ends_at_a_bad_record", ends_at_a_bad_record),
    ]
}

const PARTITIONS: i32 = 3;
const CHILD: &str = "HAPAX_TEST_COPIER";

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Copies until it is killed. Its environment has the broker's address and the topic.
pub fn run_child() {
    let settings = std::env::var(CHILD).unwrap();
    let (address, topic) = settings.split_once(' ').unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let ended = runtime.block_on(async {
        let client = client(address, topic, Duration::from_mins(1)).await;
        let config = ProcessorConfig {
            batch_records_max: 20,
            batch_time_max: Duration::from_millis(500),
            attempts_max: 1_000,
            ..ProcessorConfig::default()
        };
        let copier = Copier::new(topic, Fails::Once);
        Processor::new(config, client, copier).run(std::future::pending()).await
    });
    panic!("the processor ended: {ended:?}");
}

async fn client(address: &str, topic: &str, transaction_timeout: Duration) -> KafkaClient {
    let mut producer = ProducerConfig::new(Connect::plain([address]), topic);
    producer.delivery_timeout = PATIENCE;
    producer.transaction_timeout = transaction_timeout;
    // Outputs are sent every few records, so that a batch that is aborted has left some of them in the log.
    producer.buffer_bytes_max = 100;
    if transaction_timeout < Duration::from_mins(1) {
        producer.connect.request_timeout = Duration::from_secs(2);
    }
    let mut consumer = ConsumerConfig::new(address, &format!("{topic}-group"), &[topic]);
    // The member keeps its partitions while it restarts.
    consumer.properties = vec![("group.instance.id".to_owned(), format!("{topic}-0"))];
    let limits = ProcessorConfig { handler_timeout: Duration::from_secs(5), ..ProcessorConfig::default() };
    KafkaClient::connect(&consumer, producer, &limits).await.unwrap()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Fails {
    Never,
    /// One record in forty, once in a process: its batch is aborted.
    Once,
    /// The record with this value.
    At(&'static str),
    /// 1 fails, 4 is rejected, the output of 7 is too large.
    Variously,
}

struct Copier {
    output: String,
    fails: Fails,
    failed: HashSet<Bytes>,
}

impl Copier {
    fn new(topic: &str, fails: Fails) -> Self {
        Self { output: format!("{topic}-out"), fails, failed: HashSet::new() }
    }
}

fn number(value: &[u8]) -> usize {
    String::from_utf8_lossy(value).parse().unwrap()
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone().unwrap_or_default();
        output.push(NewRecord {
            topic: self.output.clone(),
            partition: Some(record.at.partition),
            key: record.key.clone(),
            value: Some(value.clone()),
            ..NewRecord::default()
        });
        match self.fails {
            Fails::Once if number(&value) % 40 == 39 && self.failed.insert(value.clone()) => {
                Err("once".into())
            }
            Fails::At(bad) if value == bad => Err("a bad record".into()),
            Fails::Variously if value == "1" => Err("a bad record".into()),
            Fails::Variously if value == "4" => Err(Failure::Reject("a rejected record".into())),
            Fails::Variously if value == "7" => {
                let large = NewRecord::new(&self.output, "key", vec![0; 1 << 20]);
                output.push(large);
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Creates the topics, and fills the input with numbers; each partition has its numbers in order.
fn fill(broker: &Broker, topic: &str, count: usize) {
    broker.create_topic(topic, PARTITIONS);
    broker.create_topic(&format!("{topic}-out"), PARTITIONS);
    send_numbers(broker, topic, 0..count);
}

fn send_numbers(broker: &Broker, topic: &str, numbers: std::ops::Range<usize>) {
    broker.block_on(async {
        let config =
            ProducerConfig::new(Connect::plain([broker.address().to_string()]), &format!("{topic}-fill"));
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        for number in numbers {
            let partition = Some(i32::try_from(number).unwrap() % PARTITIONS);
            let record = NewRecord { partition, ..NewRecord::new(topic, "key", number.to_string()) };
            producer.send(record).await.unwrap();
        }
        producer.commit().await.unwrap();
    });
}

fn spawn(broker: &Broker, topic: &str) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .env(CHILD, format!("{} {topic}", broker.address()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap()
}

/// Reads the output at read_committed while the processor is killed.
struct Reader {
    consumer: BaseConsumer,
    /// Values by partition, in the order of the log.
    seen: BTreeMap<i32, Vec<usize>>,
}

impl Reader {
    fn new(broker: &Broker, topic: &str) -> Self {
        let mut config = broker.config();
        let consumer: BaseConsumer = config
            .set("group.id", "reader")
            .set("isolation.level", "read_committed")
            .set("enable.auto.commit", "false")
            .create()
            .unwrap();
        let mut list = TopicPartitionList::new();
        for partition in 0..PARTITIONS {
            list.add_partition_offset(topic, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&list).unwrap();
        Self { consumer, seen: BTreeMap::new() }
    }

    fn count(&self) -> usize {
        self.seen.values().map(Vec::len).sum()
    }

    fn read_until(&mut self, count: usize, child: &mut Child) {
        let start = Instant::now();
        while self.count() < count {
            assert!(start.elapsed() < PATIENCE, "{} of {count} outputs were read", self.count());
            assert!(child.try_wait().unwrap().is_none(), "the processor ended by itself");
            if let Some(Ok(record)) = self.consumer.poll(Duration::from_millis(100)) {
                let value = number(record.payload().unwrap());
                self.seen.entry(record.partition()).or_default().push(value);
            }
        }
    }
}

fn killed_gives_each_output_once(broker: &Broker) {
    let (topic, count, kills) = ("processor-killed", 1_500, 3);
    fill(broker, topic, count);
    let output = format!("{topic}-out");
    let mut reader = Reader::new(broker, &output);
    for kill in 1..=kills {
        let mut child = spawn(broker, topic);
        reader.read_until(count * kill / (kills + 1), &mut child);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let mut child = spawn(broker, topic);
    reader.read_until(count, &mut child);
    child.kill().unwrap();
    child.wait().unwrap();
    let partitions = usize::try_from(PARTITIONS).unwrap();
    for (partition, seen) in &reader.seen {
        let first = usize::try_from(*partition).unwrap();
        let expected: Vec<usize> = (first..count).step_by(partitions).collect();
        assert_eq!(*seen, expected, "partition {partition}: each output once, in order");
    }
    assert_eq!(broker.read(&output, Isolation::Committed).len(), count, "and nothing behind it");
    let all = broker.read(&output, Isolation::Uncommitted).len();
    assert!(all > count, "no batch was aborted: the run proves nothing");
    // The last process was killed after its last commit, whose offsets are those of the input's end.
    assert_eq!(committed(broker, topic), end_offsets(broker, topic));
}

/// The end of the records in each partition: the marker of their only transaction is behind it.
fn end_offsets(broker: &Broker, topic: &str) -> Vec<i64> {
    let consumer: BaseConsumer = broker.config().create().unwrap();
    let end = |partition| consumer.fetch_watermarks(topic, partition, PATIENCE).unwrap().1 - 1;
    (0..PARTITIONS).map(end).collect()
}

fn committed(broker: &Broker, topic: &str) -> Vec<i64> {
    let group = format!("{topic}-group");
    committed_offsets(broker, &group, topic, PARTITIONS)
        .into_iter()
        .map(|offset| offset.unwrap_or(-1))
        .collect()
}

/// Runs a processor in this process until the output has `count` visible records, and returns how it ended.
fn process(
    broker: &Broker,
    client: KafkaClient,
    config: ProcessorConfig,
    copier: Copier,
    count: usize,
) -> Result<hapax_kafka::processor::Totals, ProcessorError> {
    let output = copier.output.clone();
    broker.block_on(async {
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let processor = Processor::new(config, client, copier);
        let run = tokio::time::timeout(PATIENCE, processor.run(async move { drop(ended.await) }));
        let watch = async move {
            while tokio::task::block_in_place(|| broker.read(&output, Isolation::Committed)).len() < count {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            drop(end);
            std::future::pending::<()>().await;
        };
        tokio::select! {
            done = run => done.expect("the processor ends in time"),
            () = watch => unreachable!(),
        }
    })
}

/// The broker commits, and the processor hears nothing of it until the transaction's time is over.
fn settles_an_unanswered_commit(broker: &Broker) {
    let topic = "processor-unanswered";
    fill(broker, topic, 6);
    let output = format!("{topic}-out");
    let proxied = broker.proxied().to_string();
    let client = broker.block_on(client(&proxied, topic, Duration::from_secs(10)));
    let unanswered = broker.proxy().inject(Match::answer_to(format!("EndTxn {topic}")), Action::Cut).times(1);
    // The repeated commits do not arrive.
    let lost = broker.proxy().inject(Match::request(format!("EndTxn {topic}")), Action::Cut).after(1);
    // Until it is given up, and the coordinator is asked to settle it.
    let settling = broker
        .proxy()
        .inject(Match::request(format!("InitProducerId {topic}")), Action::Delay(Duration::ZERO));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let start = Instant::now();
            while settling.count() == 0 {
                assert!(start.elapsed() < PATIENCE, "the commit was not given up");
                std::thread::sleep(Duration::from_millis(50));
            }
            lost.remove();
            // If the batch were processed again, its second outputs would stand before these.
            send_numbers(broker, topic, 6..9);
        });
        let copier = Copier::new(topic, Fails::Never);
        let totals = process(broker, client, ProcessorConfig::default(), copier, 9).unwrap();
        assert!(totals.settled >= 1, "{totals:?}");
    });
    assert_eq!(unanswered.count(), 1);
    assert_eq!(broker.read(&output, Isolation::Committed), ["0", "3", "6", "1", "4", "7", "2", "5", "8"]);
    // Behind the first two records of each partition is the marker of their transaction.
    assert_eq!(committed(broker, topic), [4, 4, 4]);
}

/// Writes records without a key.
struct Keyless(String);

impl Handler for Keyless {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let (topic, value) = (self.0.clone(), record.value.clone());
        output.push(NewRecord { topic, partition: Some(0), value, ..NewRecord::default() });
        Ok(())
    }
}

/// A further attempt would be refused, too.
fn ends_if_outputs_are_refused(broker: &Broker) {
    let topic = "processor-refused";
    let output = format!("{topic}-out");
    broker.create_topic(topic, PARTITIONS);
    // Not by a small `max.message.bytes`: the markers of its transactions would be refused, too, and they would not end.
    broker.create_topic_with(&output, 1, &[("cleanup.policy", "compact")]);
    send_numbers(broker, topic, 0..6);
    let error = broker.block_on(async {
        let client = client(&broker.address().to_string(), topic, Duration::from_mins(1)).await;
        let processor = Processor::new(ProcessorConfig::default(), client, Keyless(output));
        let ended = tokio::time::timeout(PATIENCE, processor.run(std::future::pending())).await;
        ended.expect("the processor ends in time").unwrap_err()
    });
    assert!(matches!(error, ProcessorError::Producer(ProducerError::Fatal { .. })), "{error:?}");
    assert!(error.to_string().contains("give records of a compacted topic a key"), "{error}");
}

fn dead_letters(broker: &Broker) {
    let (topic, letters) = ("processor-dead", "processor-dead-letters");
    fill(broker, topic, 9);
    broker.create_topic(letters, 1);
    let output = format!("{topic}-out");
    let client = broker.block_on(client(&broker.address().to_string(), topic, Duration::from_mins(1)));
    let config = ProcessorConfig {
        attempts_max: 3,
        dead_letters: Some(letters.to_owned()),
        ..ProcessorConfig::default()
    };
    let copier = Copier::new(topic, Fails::At("4"));
    let totals = process(broker, client, config, copier, 8).unwrap();
    assert_eq!((totals.dead, totals.records), (1, 9), "{totals:?}");
    assert!(totals.aborts >= 2, "{totals:?}");
    assert_eq!(broker.read(&output, Isolation::Committed), ["0", "3", "6", "1", "7", "2", "5", "8"]);
    assert_eq!(broker.read(letters, Isolation::Committed), ["4"]);
    assert_eq!(committed(broker, topic), [3, 3, 3]);
}

/// They are in the same batch: one that is given up must not be forgotten when the next one fails.
fn several_dead_letters(broker: &Broker) {
    let (topic, letters) = ("processor-several", "processor-several-letters");
    fill(broker, topic, 12);
    broker.create_topic(letters, 1);
    let output = format!("{topic}-out");
    let client = broker.block_on(client(&broker.address().to_string(), topic, Duration::from_mins(1)));
    let config = ProcessorConfig {
        attempts_max: 3,
        batch_time_max: Duration::from_secs(2),
        dead_letters: Some(letters.to_owned()),
        ..ProcessorConfig::default()
    };
    let copier = Copier::new(topic, Fails::Variously);
    let totals = process(broker, client, config, copier, 9).unwrap();
    assert_eq!((totals.dead, totals.records), (3, 12), "{totals:?}");
    assert_eq!(broker.read(&output, Isolation::Committed), ["0", "3", "6", "9", "10", "2", "5", "8", "11"]);
    assert_eq!(broker.read(letters, Isolation::Committed), ["1", "4", "7"]);
    assert_eq!(committed(broker, topic), [4, 4, 4]);
}

fn ends_at_a_bad_record(broker: &Broker) {
    let topic = "processor-bad";
    fill(broker, topic, 3);
    let client = broker.block_on(client(&broker.address().to_string(), topic, Duration::from_mins(1)));
    let config = ProcessorConfig { attempts_max: 2, ..ProcessorConfig::default() };
    let copier = Copier::new(topic, Fails::At("1"));
    let error = process(broker, client, config, copier, usize::MAX).unwrap_err();
    assert_eq!(error.to_string(), format!("{topic}/1 at offset 0 failed 2 times: a bad record"));
}
