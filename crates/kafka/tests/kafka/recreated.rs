//! A topic that is deleted and created again under a processor, or while none runs: each record of the new topic is handled
//! once, whether the new topic has fewer records than the old one, as many or more.

use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::processor::{
    Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError, Totals,
};
use hapax_kafka::producer::{NewRecord, NextOffset, Producer, ProducerConfig};
use hapax_kafka::wire::{Cluster, Connect};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_topic_created_again_under_a_processor_is_read_from_its_start", |broker| {
            for_each_count(broker, "recreated-running", running);
        }),
        shared("a_topic_created_again_between_two_fetches_is_read_from_its_start", |broker| {
            for_each_count(broker, "recreated-unseen", unseen);
        }),
        shared("a_topic_created_again_while_no_processor_runs_is_read_from_its_start", |broker| {
            for_each_count(broker, "recreated-stopped", stopped);
        }),
        shared("an_offset_committed_after_its_topic_was_created_again_is_not_used", |broker| {
            for_each_count(broker, "recreated-late", late_commit);
        }),
        shared("an_unknown_commit_does_not_continue_at_an_offset_of_the_old_topic", unknown_commit),
        shared("a_batch_of_a_topic_that_was_created_again_is_aborted", batch_under_way),
    ]
}

/// Records of the old topic.
const OLD: usize = 4;

/// Runs a case with new topics of fewer records than the old one, as many and more, at the same time.
fn for_each_count(broker: &Broker, case: &str, run: fn(&Broker, &str, usize)) {
    std::thread::scope(|scope| {
        for (name, count) in [("none", 0), ("fewer", OLD - 2), ("equal", OLD), ("more", OLD + 3)] {
            let topic = format!("{case}-{name}");
            scope.spawn(move || run(broker, &topic, count));
        }
    });
}

/// Copies records. At the value `wait` it waits until it is told to go on.
#[derive(Clone)]
struct Copier {
    output: String,
    waits: std::sync::Arc<tokio::sync::Notify>,
    go: std::sync::Arc<tokio::sync::Notify>,
}

impl Copier {
    fn new(topic: &str) -> Self {
        Self {
            output: format!("{topic}-out"),
            waits: std::sync::Arc::default(),
            go: std::sync::Arc::default(),
        }
    }
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone();
        let waits = value.as_deref() == Some(b"wait");
        output.push(NewRecord { value, ..NewRecord::new(&self.output, "key", "") });
        if waits {
            self.waits.notify_one();
            self.go.notified().await;
        }
        Ok(())
    }
}

/// Runs a processor until `end` is dropped, or it ends with an error.
async fn process(
    address: String,
    copier: Copier,
    topic: String,
    end: impl Future<Output = ()> + Send,
) -> Result<Totals, ProcessorError> {
    let producer = ProducerConfig::new(Connect::plain([&address]), &topic);
    let mut consumer = ConsumerConfig::new(&address, &topic, &[&topic]);
    consumer.properties = vec![("client.id".to_owned(), topic.clone())];
    let config = ProcessorConfig { batch_time_max: Duration::from_millis(50), ..ProcessorConfig::default() };
    let client = KafkaClient::connect(&consumer, producer, &config).await?;
    Processor::new(config, client, copier).run(end).await
}

/// A processor that is started again after its topic was.
struct Supervised {
    /// The errors that it was started again after.
    task: JoinHandle<Vec<String>>,
    end: oneshot::Sender<()>,
}

impl Supervised {
    fn start(broker: &Broker, address: String, topic: &str) -> Self {
        let (end, ended) = oneshot::channel::<()>();
        let topic = topic.to_owned();
        let task = broker.spawn(async move {
            let mut errors = Vec::new();
            let mut ended = std::pin::pin!(async move { drop(ended.await) });
            loop {
                let copier = Copier::new(&topic);
                match process(address.clone(), copier, topic.clone(), ended.as_mut()).await {
                    Ok(_) => return errors,
                    Err(error @ ProcessorError::TopicRecreated { .. }) => errors.push(error.to_string()),
                    Err(error) => panic!("{topic}: {error}"),
                }
            }
        });
        Self { task, end }
    }

    /// Until the outputs are these, and then to its end.
    fn end(self, broker: &Broker, topic: &str, values: &[String]) -> Vec<String> {
        wait_for(broker, topic, values);
        drop(self.end);
        broker.block_on(async { tokio::time::timeout(PATIENCE, self.task).await }).unwrap().unwrap()
    }
}

fn values(name: &str, count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{name} {number}")).collect()
}

fn create(broker: &Broker, topic: &str) {
    broker.create_topic(topic, 1);
    broker.create_topic(&format!("{topic}-out"), 1);
    send(broker, topic, &values("old", OLD));
}

/// Deletes the topic, and creates it again with other records.
fn create_again(broker: &Broker, topic: &str, count: usize) {
    broker.delete_topic(topic);
    broker.create_topic(topic, 1);
    send(broker, topic, &values("new", count));
}

/// Without transactions, so that an offset is the count of the records before it.
fn send(broker: &Broker, topic: &str, values: &[String]) {
    use rdkafka::producer::{FutureProducer, FutureRecord};
    let producer: FutureProducer = broker.config().create().unwrap();
    broker.block_on(async {
        for value in values {
            let record = FutureRecord::<(), _>::to(topic).partition(0).payload(value);
            producer.send(record, PATIENCE).await.unwrap();
        }
    });
}

/// Waits until the visible outputs are these, in this order.
fn wait_for(broker: &Broker, topic: &str, values: &[String]) {
    let start = Instant::now();
    loop {
        let seen = broker.read(&format!("{topic}-out"), Isolation::Committed);
        if seen == values {
            return;
        }
        assert!(seen.len() <= values.len(), "{topic}: {seen:?} instead of {values:?}");
        assert!(start.elapsed() < PATIENCE, "{topic}: {seen:?} instead of {values:?}");
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// One more record behind those of the new topic: if one of them were handled twice or not at all, it would be seen in front of it.
fn last(broker: &Broker, topic: &str, count: usize) -> Vec<String> {
    wait_for(broker, topic, &[values("old", OLD), values("new", count)].concat());
    send(broker, topic, &["last".to_owned()]);
    [values("old", OLD), values("new", count), vec!["last".to_owned()]].concat()
}

fn running(broker: &Broker, topic: &str, count: usize) {
    create(broker, topic);
    let processor = Supervised::start(broker, broker.address().to_string(), topic);
    wait_for(broker, topic, &values("old", OLD));
    create_again(broker, topic, count);
    let expected = last(broker, topic, count);
    processor.end(broker, topic, &expected);
    assert_eq!(committed_offsets(broker, topic, topic, 1), [Some(i64::try_from(count).unwrap() + 1)]);
}

/// The consumer asks for nothing while the old topic is deleted, so it does not learn of it, and continues in the new one.
fn unseen(broker: &Broker, topic: &str, count: usize) {
    create(broker, topic);
    let processor = Supervised::start(broker, broker.proxied().to_string(), topic);
    wait_for(broker, topic, &values("old", OLD));
    let fetches = broker.proxy().inject(Match::request(format!("Fetch {topic}")), Action::Hold);
    let metadata = broker.proxy().inject(Match::request(format!("Metadata {topic}")), Action::Hold);
    broker.block_on(fetches.wait_for(1));
    create_again(broker, topic, count);
    metadata.release();
    fetches.release();
    let expected = last(broker, topic, count);
    let errors = processor.end(broker, topic, &expected);
    assert!(!errors.is_empty(), "{topic}: the consumer has noticed the change by itself");
}

fn stopped(broker: &Broker, topic: &str, count: usize) {
    create(broker, topic);
    let address = broker.address().to_string();
    Supervised::start(broker, address.clone(), topic).end(broker, topic, &values("old", OLD));
    create_again(broker, topic, count);
    let processor = Supervised::start(broker, address, topic);
    let expected = last(broker, topic, count);
    processor.end(broker, topic, &expected);
}

/// The offsets of a transaction reach the broker after the topic was created again: it has an offset of the old topic then, and
/// keeps it.
fn late_commit(broker: &Broker, topic: &str, count: usize) {
    with_offset_of_old_topic(broker, topic, count);
    let processor = Supervised::start(broker, broker.address().to_string(), topic);
    let expected = last(broker, topic, count);
    processor.end(broker, topic, &expected);
}

/// A new topic, whose group has an offset of the old one.
fn with_offset_of_old_topic(broker: &Broker, topic: &str, count: usize) {
    create(broker, topic);
    let address = broker.address().to_string();
    Supervised::start(broker, address.clone(), topic).end(broker, topic, &values("old", OLD));
    let cluster = Cluster::new(Connect::plain([&address]));
    let before = broker.block_on(cluster.topic_ids([topic])).unwrap()[topic].unwrap();
    create_again(broker, topic, count);
    let old = i64::try_from(OLD).unwrap();
    broker.block_on(async {
        let config = ProducerConfig::new(Connect::plain([&address]), &format!("{topic}-late"));
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        let next = NextOffset { offset: old, topic_id: Some(before) };
        let group = GroupMetadata::without_member(topic);
        producer.offsets(group, [(TopicPartition::new(topic, 0), next)]).unwrap();
        producer.commit().await.unwrap();
    });
    assert_eq!(committed_offsets(broker, topic, topic, 1), [Some(old)], "{topic}: the case proves nothing");
}

/// The first commit in the new topic stays unanswered, and was not carried out: the group still has the offset of the old topic.
fn unknown_commit(broker: &Broker) {
    let (topic, count) = ("recreated-unknown", OLD + 3);
    with_offset_of_old_topic(broker, topic, count);
    let lost = broker.proxy().inject(Match::request(format!("EndTxn {topic}")), Action::Cut);
    // The first one is that of the start, the next one is sent when the commit was given up.
    let settling = broker
        .proxy()
        .inject(Match::request(format!("InitProducerId {topic}")), Action::Delay(Duration::ZERO))
        .after(1);
    let address = broker.proxied().to_string();
    let mut producer = ProducerConfig::new(Connect::plain([&address]), topic);
    (producer.transaction_timeout, producer.delivery_timeout) = (Duration::from_secs(4), PATIENCE);
    producer.connect.request_timeout = Duration::from_secs(2);
    let consumer = ConsumerConfig::new(&address, topic, &[topic]);
    let (batch_time_max, handler_timeout) = (Duration::from_millis(50), Duration::from_secs(1));
    let config = ProcessorConfig { batch_time_max, handler_timeout, ..ProcessorConfig::default() };
    let (end, ended) = oneshot::channel::<()>();
    let task = broker.spawn(async move {
        let client = KafkaClient::connect(&consumer, producer, &config).await?;
        let processor = Processor::new(config, client, Copier::new(topic));
        processor.run(async move { drop(ended.await) }).await
    });
    broker.block_on(settling.wait_for(1));
    lost.remove();
    wait_for(broker, topic, &last(broker, topic, count));
    drop(end);
    let totals = broker.block_on(async { tokio::time::timeout(PATIENCE, task).await }).unwrap().unwrap();
    assert!(totals.unwrap().settled >= 1, "the commit was answered: this shows nothing");
}

/// Its records were read, but not committed, when the topic was created again.
fn batch_under_way(broker: &Broker) {
    let topic = "recreated-batch";
    broker.create_topic(topic, 1);
    broker.create_topic(&format!("{topic}-out"), 1);
    send(broker, topic, &["wait".to_owned()]);
    let copier = Copier::new(topic);
    let never = std::future::pending();
    let task = broker.spawn(process(broker.address().to_string(), copier.clone(), topic.to_owned(), never));
    broker.block_on(async { tokio::time::timeout(PATIENCE, copier.waits.notified()).await }).unwrap();
    create_again(broker, topic, 3);
    copier.go.notify_one();
    let ended = broker.block_on(async { tokio::time::timeout(PATIENCE, task).await }).unwrap().unwrap();
    let error = ended.unwrap_err();
    let ProcessorError::TopicRecreated { topic: named, before, now } = &error else { panic!("{error}") };
    assert_eq!(named, topic);
    assert_ne!(before, now);
    assert_eq!(
        error.to_string(),
        format!(
            "topic {topic} was created again: its id was {before} and is now {now}; \
             start again to read the new one from its start"
        )
    );
    assert_eq!(broker.read(&format!("{topic}-out"), Isolation::Committed), Vec::<String>::new());
    let processor = Supervised::start(broker, broker.address().to_string(), topic);
    processor.end(broker, topic, &values("new", 3));
}
