//! Output that is sent before its transaction is complete: it is in the log while the handler runs, and no reader of committed
//! records sees it unless the transaction is committed.

use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{ErrorKind, NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use tokio::sync::oneshot;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("output_sent_ahead_and_aborted_is_not_seen", aborted_is_not_seen),
        shared("output_sent_ahead_is_repeated_in_order_if_its_request_is_lost", lost_is_repeated),
        shared("output_sent_ahead_that_arrives_after_the_abort_is_not_seen", late_is_not_seen),
        shared("output_sent_ahead_that_is_refused_fails_the_next_send", refused_fails_the_next_send),
        shared("a_handler_that_fails_at_the_last_record_leaves_no_output", fails_at_the_last_record),
        shared("offsets_are_sent_after_the_first_batches_are_written", offsets_follow),
    ]
}

/// Each record is worth a request.
fn config(broker: &Broker, id: &str) -> ProducerConfig {
    let mut config = ProducerConfig::new(Connect::plain([broker.proxied().to_string()]), id);
    config.delivery_timeout = PATIENCE;
    config.transaction_timeout = Duration::from_mins(5);
    config.batch_bytes_min = 1;
    config
}

fn record(topic: &str, value: &str) -> NewRecord {
    NewRecord { partition: Some(0), ..NewRecord::new(topic, "key", value.to_owned()) }
}

/// Waits until these are the first records that a reader of everything sees. The producer's requests run on other threads.
fn wait_for(broker: &Broker, topic: &str, values: &[&str]) {
    let start = Instant::now();
    loop {
        let seen = broker.read(topic, Isolation::Uncommitted);
        if seen.iter().take(values.len()).eq(values) {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{seen:?} instead of {values:?}");
    }
}

fn aborted_is_not_seen(broker: &Broker) {
    let topic = "ahead-aborted";
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut producer = Producer::connect(config(broker, topic)).await.unwrap();
        for (value, commits, log) in
            [("A", false, &["A"][..]), ("B", true, &["A", "B"]), ("C", false, &["A", "B", "C"])]
        {
            producer.begin().unwrap();
            // A flush, so that the transaction before has ended and the next record can be sent ahead.
            producer.send(record(topic, value)).await.unwrap();
            producer.flush().await.unwrap();
            producer.send(record(topic, value)).await.unwrap();
            let twice: Vec<&str> = log.iter().flat_map(|value| [*value, *value]).collect();
            wait_for(broker, topic, &twice);
            if commits { producer.commit().await.unwrap() } else { producer.abort().await.unwrap() }
        }
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["B", "B"]);
}

/// The answer of one request is lost, and another request: both are repeated with the commit, behind what was sent before.
fn lost_is_repeated(broker: &Broker) {
    let topic = "ahead-lost";
    broker.create_topic(topic, 1);
    for lost in [Match::request(format!("Produce {topic}")), Match::answer_to(format!("Produce {topic}"))] {
        broker.block_on(async {
            let mut producer = Producer::connect(config(broker, topic)).await.unwrap();
            producer.begin().unwrap();
            let fault = broker.proxy().inject(lost, Action::Cut).times(1);
            producer.send(record(topic, "A")).await.unwrap();
            fault.wait_for(1).await;
            // They wait behind the one that was lost.
            for value in ["B", "C"] {
                producer.send(record(topic, value)).await.unwrap();
            }
            producer.commit().await.unwrap();
        });
    }
    assert_eq!(broker.read(topic, Isolation::Uncommitted), ["A", "B", "C", "A", "B", "C"]);
    assert_eq!(broker.read(topic, Isolation::Committed), ["A", "B", "C", "A", "B", "C"]);
}

/// The request is held until the next transaction is open.
fn late_is_not_seen(broker: &Broker) {
    let topic = "ahead-late";
    broker.create_topic(topic, 1);
    for (first, second) in [("A", "B"), ("C", "D")] {
        broker.block_on(async {
            let mut producer = Producer::connect(config(broker, topic)).await.unwrap();
            producer.begin().unwrap();
            // So that the coordinator has something to abort.
            producer.send(record(topic, first)).await.unwrap();
            producer.flush().await.unwrap();
            let held =
                broker.proxy().inject(Match::request(format!("Produce {topic}")), Action::Hold).times(1);
            producer.send(record(topic, "late")).await.unwrap();
            held.wait_for(1).await;
            producer.abort().await.unwrap();
            producer.begin().unwrap();
            producer.send(record(topic, second)).await.unwrap();
            producer.flush().await.unwrap();
            held.release();
            producer.commit().await.unwrap();
        });
    }
    assert_eq!(broker.read(topic, Isolation::Committed), ["B", "D"]);
}

/// A leader refuses a batch: a later call says so, and the transaction can only be aborted.
fn refused_fails_the_next_send(broker: &Broker) {
    let topic = "ahead-refused";
    broker.create_topic_with(topic, 1, &[("max.message.bytes", "1000")]);
    broker.block_on(async {
        let mut producer = Producer::connect(config(broker, topic)).await.unwrap();
        producer.begin().unwrap();
        producer.send(record(topic, "A")).await.unwrap();
        producer.flush().await.unwrap();
        producer.send(record(topic, &"x".repeat(2_000))).await.unwrap();
        let start = Instant::now();
        let refused = loop {
            assert!(start.elapsed() < PATIENCE, "it is not told");
            match producer.send(record(topic, "B")).await {
                Ok(()) => tokio::time::sleep(Duration::from_millis(5)).await,
                Err(error) => break error,
            }
        };
        assert_eq!(refused.kind(), ErrorKind::Abortable, "{refused}");
        assert!(producer.commit().await.is_err(), "it can only be aborted");
        producer.abort().await.unwrap();
        producer.begin().unwrap();
        producer.send(record(topic, "C")).await.unwrap();
        producer.commit().await.unwrap();
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["C"]);
}

/// Copies records, and fails at the last one, once, after it has seen that the first is in the log.
struct FailsAtLast<'b> {
    broker: &'b Broker,
    topic: String,
    has_failed: bool,
    done: Option<oneshot::Sender<()>>,
}

impl Handler for FailsAtLast<'_> {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone().unwrap_or_default();
        if value == "last" && !self.has_failed {
            self.has_failed = true;
            wait_for(self.broker, &self.topic, &["1"]);
            return Err("at the last record".into());
        }
        let copy = NewRecord::new(&self.topic, "key", value.clone());
        output.push(NewRecord { partition: Some(0), ..copy });
        if value == "last" {
            self.done.take().map(|done| done.send(()));
        }
        Ok(())
    }
}

fn fails_at_the_last_record(broker: &Broker) {
    let (input, output) = ("ahead-fails-in", "ahead-fails-out");
    broker.create_topic(input, 1);
    broker.create_topic(output, 1);
    broker.block_on(async {
        let mut producer = Producer::connect(config(broker, input)).await.unwrap();
        producer.begin().unwrap();
        for value in ["1", "2", "last"] {
            producer.send(record(input, value)).await.unwrap();
        }
        producer.commit().await.unwrap();
        let limits = ProcessorConfig {
            batch_time_max: Duration::from_mins(2),
            handler_timeout: PATIENCE,
            ..ProcessorConfig::default()
        };
        let consumer = ConsumerConfig::new(&broker.address().to_string(), input, &[input]);
        let client = KafkaClient::connect(&consumer, config(broker, output), &limits).await.unwrap();
        let (done, ended) = oneshot::channel();
        let handler = FailsAtLast { broker, topic: output.to_owned(), has_failed: false, done: Some(done) };
        let run = Processor::new(limits, client, handler).run(async { drop(ended.await) });
        let totals = tokio::time::timeout(PATIENCE, run).await.unwrap().unwrap();
        assert_eq!((totals.records, totals.aborts), (3, 1));
    });
    let log = broker.read(output, Isolation::Uncommitted);
    assert_eq!(log.iter().filter(|value| *value == "1").count(), 2, "one of them was aborted: {log:?}");
    assert_eq!(broker.read(output, Isolation::Committed), ["1", "2", "last"]);
    assert_eq!(committed_offsets(broker, input, input, 1), [Some(3)]);
}

/// The coordinator refuses to add a group while it adds partitions, and the broker of a batch that comes too early waits 20 ms. So
/// the offsets are not sent before the first batch of each partition is written.
fn offsets_follow(broker: &Broker) {
    let topic = "ahead-offsets";
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut producer = Producer::connect(config(broker, topic)).await.unwrap();
        let held = broker.proxy().inject(Match::request(format!("Produce {topic}")), Action::Hold).times(1);
        let offsets = broker
            .proxy()
            .inject(Match::request(format!("TxnOffsetCommit {topic}")), Action::Delay(Duration::ZERO));
        producer.begin().unwrap();
        producer.send(record(topic, "A")).await.unwrap();
        let group = GroupMetadata::without_member(topic);
        producer.offsets(group, [(TopicPartition::new(topic, 0), 1)]).unwrap();
        let mut commit = std::pin::pin!(producer.commit());
        tokio::select! {
            ended = &mut commit => panic!("its batch is held: {ended:?}"),
            () = held.wait_for(1) => {}
        }
        let waited = tokio::time::timeout(Duration::from_millis(300), &mut commit).await;
        assert!(waited.is_err(), "its batch is held");
        assert_eq!(offsets.count(), 0, "the offsets wait for the batch");
        held.release();
        commit.await.unwrap();
        assert_eq!(offsets.count(), 1);
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["A"]);
    assert_eq!(committed_offsets(broker, topic, topic, 1), [Some(1)]);
}
