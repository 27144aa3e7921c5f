//! The consumer: committed records only, a start that is never guessed, rebalances that move only what must move.

use std::collections::BTreeSet;
use std::time::Duration;

use hapax_kafka::consumer::{
    Consumer, ConsumerConfig, ConsumerError, Event, NewGroup, Record, StartAt, TopicPartition,
};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};

use crate::broker::{Broker, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_consumer_sees_committed_records_only", committed_records_only),
        shared("a_consumer_continues_where_its_group_is", continues_where_its_group_is),
        shared("a_new_group_begins_only_where_it_is_told_to", a_new_group_is_refused),
        shared("a_seek_drops_what_waits", a_seek_drops_what_waits),
        shared("a_new_member_moves_only_what_it_gets", a_new_member_moves_only_what_it_gets),
    ]
}

fn config(broker: &Broker, group: &str, topic: &str) -> ConsumerConfig {
    ConsumerConfig::new(&broker.address().to_string(), group, &[topic])
}

async fn next(consumer: &mut Consumer) -> Event {
    loop {
        match tokio::time::timeout(PATIENCE, consumer.next()).await.expect("an event in time") {
            Event::Problem(problem) => eprintln!("{problem}"),
            event => return event,
        }
    }
}

/// Begins at the group's committed offsets, until there are this many records.
async fn read(consumer: &mut Consumer, count: usize) -> Vec<Record> {
    let mut records = Vec::new();
    while records.len() < count {
        match next(consumer).await {
            Event::Assigned(assignment) => {
                let starts = vec![StartAt::Committed; assignment.partitions.len()];
                assignment.start(starts);
            }
            Event::Record(record) => records.push(record),
            other => panic!("{other:?}"),
        }
    }
    records
}

fn values(records: &[Record]) -> Vec<String> {
    let value = |record: &Record| String::from_utf8(record.value.clone().unwrap().to_vec()).unwrap();
    records.iter().map(value).collect()
}

async fn send(producer: &FutureProducer, topic: &str, partition: i32, value: &str) {
    let record = FutureRecord::<str, str>::to(topic).partition(partition).key("k").payload(value);
    producer.send(record, PATIENCE).await.unwrap();
}

fn committed_records_only(broker: &Broker) {
    let topic = "committed-only";
    broker.create_topic(topic, 1);
    let producer: FutureProducer = broker.config().set("transactional.id", topic).create().unwrap();
    producer.init_transactions(PATIENCE).unwrap();
    for (value, commits) in [("a", true), ("b", false), ("c", true)] {
        producer.begin_transaction().unwrap();
        broker.block_on(send(&producer, topic, 0, value));
        if commits {
            producer.commit_transaction(PATIENCE).unwrap();
        } else {
            producer.abort_transaction(PATIENCE).unwrap();
        }
    }
    broker.block_on(async {
        let mut consumer = Consumer::start(&config(broker, topic, topic)).unwrap();
        let records = read(&mut consumer, 2).await;
        assert_eq!(values(&records), ["a", "c"]);
        assert_eq!((records[0].offset, records[0].key.as_deref()), (0, Some(&b"k"[..])));
        let member = consumer.group_metadata().unwrap();
        assert_eq!((member.group.as_str(), member.instance.as_deref()), (topic, None));
        assert!(member.generation > 0 && !member.member.is_empty(), "{member:?}");
    });
}

fn continues_where_its_group_is(broker: &Broker) {
    let topic = "continues";
    broker.create_topic(topic, 1);
    let producer: FutureProducer = broker.config().create().unwrap();
    broker.block_on(async {
        for value in ["a", "b", "c"] {
            send(&producer, topic, 0, value).await;
        }
        let mut first = Consumer::start(&config(broker, topic, topic)).unwrap();
        assert_eq!(values(&read(&mut first, 2).await), ["a", "b"]);
        first.commit([(&TopicPartition::new(topic, 0), 2)]);
        // Leaving the group sends what is committed.
        drop(first);
        let refusing = ConsumerConfig { new_group: NewGroup::Refuse, ..config(broker, topic, topic) };
        let mut second = Consumer::start(&refusing).unwrap();
        assert_eq!(values(&read(&mut second, 1).await), ["c"]);
    });
}

fn a_new_group_is_refused(broker: &Broker) {
    let topic = "new-group";
    broker.create_topic(topic, 1);
    let refusing = ConsumerConfig { new_group: NewGroup::Refuse, ..config(broker, topic, topic) };
    broker.block_on(async {
        let mut consumer = Consumer::start(&refusing).unwrap();
        let Event::Assigned(assignment) = next(&mut consumer).await else { panic!("not assigned") };
        assignment.start(vec![StartAt::Committed]);
        let Event::Ended(error) = next(&mut consumer).await else { panic!("not ended") };
        assert_eq!(error, ConsumerError::NoOffset(TopicPartition::new(topic, 0)));
        // A start that is not in the log is no reason to choose another one.
        let mut consumer = Consumer::start(&config(broker, topic, topic)).unwrap();
        let Event::Assigned(assignment) = next(&mut consumer).await else { panic!("not assigned") };
        assignment.start(vec![StartAt::Offset(1_000)]);
        let Event::Ended(error) = next(&mut consumer).await else { panic!("not ended") };
        assert!(matches!(error, ConsumerError::OffsetGone(_)), "{error}");
    });
    let properties = vec![("isolation.level".to_owned(), "read_uncommitted".to_owned())];
    let refused = Consumer::start(&ConsumerConfig { properties, ..config(broker, topic, topic) });
    assert!(refused.unwrap_err().to_string().contains("use read_committed"));
}

fn a_seek_drops_what_waits(broker: &Broker) {
    let topic = "seek";
    broker.create_topic(topic, 1);
    let producer: FutureProducer = broker.config().create().unwrap();
    broker.block_on(async {
        for value in 0..20 {
            send(&producer, topic, 0, &value.to_string()).await;
        }
        // More than may wait, so that fetching pauses and is resumed.
        let few = ConsumerConfig { queued_records_max: 4, ..config(broker, topic, topic) };
        let mut consumer = Consumer::start(&few).unwrap();
        assert_eq!(values(&read(&mut consumer, 2).await), ["0", "1"]);
        consumer.seek(&TopicPartition::new(topic, 0), 10);
        let expected: Vec<String> = (10..20).map(|value| value.to_string()).collect();
        assert_eq!(values(&read(&mut consumer, 10).await), expected);
        consumer.seek(&TopicPartition::new(topic, 0), 5);
        assert_eq!(values(&read(&mut consumer, 1).await), ["5"]);
    });
}

fn a_new_member_moves_only_what_it_gets(broker: &Broker) {
    let topic = "moves";
    broker.create_topic(topic, 4);
    broker.block_on(async {
        let start = || Consumer::start(&config(broker, topic, topic)).unwrap();
        let mut first = start();
        let Event::Assigned(assignment) = next(&mut first).await else { panic!("not assigned") };
        assert_eq!(assignment.partitions.len(), 4);
        assignment.start(vec![StartAt::NewGroup; 4]);
        let mut second = start();
        let mut got = BTreeSet::new();
        // The revocation waits for its owner: the second member gets nothing before that.
        let Event::Revoked(revocation) = next(&mut first).await else { panic!("not revoked") };
        let revoked: BTreeSet<TopicPartition> = revocation.partitions.iter().cloned().collect();
        assert_eq!(revoked.len(), 2, "{revoked:?}");
        let early = tokio::time::timeout(Duration::from_millis(300), second.next()).await;
        assert!(early.is_err(), "{early:?} before the owner let go");
        drop(revocation);
        while got.len() < 2 {
            let Event::Assigned(assignment) = next(&mut second).await else { panic!("not assigned") };
            got.extend(assignment.partitions.iter().cloned());
            let starts = vec![StartAt::NewGroup; assignment.partitions.len()];
            assignment.start(starts);
        }
        assert_eq!(got, revoked, "only these have moved");
        assert!(first.try_next().is_none(), "the others stay");
    });
}
