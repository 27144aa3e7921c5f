//! Publishing with and without transactions, and the last value of a key.

use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::compacted;
use hapax_kafka::partition::TopicPartition;
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig, partition_of};
use hapax_kafka::publisher::Publisher;
use hapax_kafka::wire::{Cluster, Connect};
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use rdkafka::client::DefaultClientContext;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("publisher_without_transactions_repeats_nothing", repeats_nothing),
        shared("publisher_with_transactions_publishes_all_or_nothing", all_or_nothing),
        shared("publisher_finds_partitions_that_are_added", finds_added_partitions),
        shared("last_value_of_a_key_is_the_last_committed_one", last_value),
    ]
}

fn numbers(topic: &str, numbers: std::ops::Range<usize>) -> Vec<NewRecord> {
    numbers.map(|number| NewRecord::new(topic, "key", number.to_string())).collect()
}

fn repeats_nothing(broker: &Broker) {
    let topic = "publisher-idempotent";
    broker.create_topic(topic, 1);
    let connect = Connect {
        client_id: topic.to_owned(),
        request_timeout: Duration::from_secs(3),
        ..Connect::plain([broker.proxied().to_string()])
    };
    broker.block_on(async {
        let mut publisher = Publisher::idempotent(connect).await.unwrap();
        let label = format!("Produce {topic}");
        for (round, action) in [Action::Cut, Action::Drop].into_iter().enumerate() {
            // The broker has written the batch, and its producer does not know.
            let lost = broker.proxy().inject(Match::answer_to(label.as_str()), action).times(1);
            publisher.publish(numbers(topic, round * 20..round * 20 + 10)).await.unwrap();
            assert_eq!(lost.count(), 1);
            // The batch arrives twice.
            let twice = broker.proxy().inject(Match::request(label.as_str()), Action::Duplicate).times(1);
            publisher.publish(numbers(topic, round * 20 + 10..round * 20 + 20)).await.unwrap();
            assert_eq!(twice.count(), 1);
        }
    });
    let expected: Vec<String> = (0..40).map(|number| number.to_string()).collect();
    assert_eq!(broker.read(topic, Isolation::Uncommitted), expected, "each record once, in order");
}

/// No request fails: the partitions are asked for again when what is known of them is old.
fn finds_added_partitions(broker: &Broker) {
    let topic = "publisher-added";
    broker.create_topic(topic, 1);
    let age_max = Duration::from_millis(50);
    let connect = Connect { metadata_age_max: age_max, ..Connect::plain([broker.address().to_string()]) };
    let places =
        || broker.topics().read(topic, Isolation::Committed).into_iter().map(|record| record.partition);
    let publish =
        |publisher: &mut Publisher| broker.block_on(publisher.publish(numbers(topic, 0..1))).unwrap();
    let mut publisher = broker.block_on(Publisher::idempotent(connect)).unwrap();
    publish(&mut publisher);
    assert_eq!(places().collect::<Vec<_>>(), [0]);
    // Another place for this key.
    let count = (2..20).find(|count| partition_of(b"key", *count) > 0).unwrap();
    let admin: AdminClient<DefaultClientContext> = broker.config().create().unwrap();
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
    let more = [NewPartitions::new(topic, count as usize)];
    broker.block_on(admin.create_partitions(&more, &options)).unwrap().remove(0).unwrap();
    let start = Instant::now();
    while places().all(|partition| partition == 0) {
        assert!(start.elapsed() < PATIENCE, "the partitions were not found");
        std::thread::sleep(age_max);
        publish(&mut publisher);
    }
    assert_eq!(places().max(), Some(partition_of(b"key", count)));
}

fn all_or_nothing(broker: &Broker) {
    let topic = "publisher-transactional";
    broker.create_topic(topic, 1);
    let config = ProducerConfig::new(Connect::plain([broker.address().to_string()]), topic);
    broker.block_on(async {
        let mut publisher = Publisher::transactional(config).await.unwrap();
        publisher.publish(numbers(topic, 0..3)).await.unwrap();
        let mut bad = numbers(topic, 3..6);
        bad.push(NewRecord::new(topic, "key", vec![b'x'; 2_000_000]));
        let error = publisher.publish(bad).await.unwrap_err();
        assert!(error.to_string().contains("the limit of a batch is"), "{error}");
        publisher.publish(numbers(topic, 6..8)).await.unwrap();
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["0", "1", "2", "6", "7"]);
}

fn last_value(broker: &Broker) {
    let topic = "last-value";
    let connect = Connect::plain([broker.address().to_string()]);
    let cluster = Cluster::new(connect.clone());
    let at = TopicPartition::new(topic, 0);
    broker.block_on(async {
        assert_eq!(compacted::create(&cluster, topic, 1).await.unwrap().unwrap(), 1);
        let find = async |key: &str, wait: Duration| {
            let found = compacted::last_value(&cluster, &at, key.as_bytes(), wait).await;
            found.map(|value| value.map(|value| String::from_utf8_lossy(&value).into_owned()))
        };
        assert_eq!(find("k", PATIENCE).await.unwrap(), None, "an empty topic");
        let mut producer = Producer::connect(ProducerConfig::new(connect, topic)).await.unwrap();
        producer.begin().unwrap();
        producer.send(NewRecord::new(topic, "k", "1")).await.unwrap();
        producer.commit().await.unwrap();
        // Farther from the end than the first steps back.
        for _ in 0..3 {
            producer.begin().unwrap();
            for record in numbers(topic, 0..200) {
                producer.send(record).await.unwrap();
            }
            producer.commit().await.unwrap();
        }
        assert_eq!(find("k", PATIENCE).await.unwrap().as_deref(), Some("1"));
        assert_eq!(find("key", PATIENCE).await.unwrap().as_deref(), Some("199"));
        assert_eq!(find("none", PATIENCE).await.unwrap(), None);
        producer.begin().unwrap();
        producer.send(NewRecord::new(topic, "k", "2")).await.unwrap();
        producer.flush().await.unwrap();
        let error = find("k", Duration::from_millis(200)).await.unwrap_err().to_string();
        assert!(error.contains("a transaction stays open"), "{error}");
        producer.abort().await.unwrap();
        assert_eq!(find("k", PATIENCE).await.unwrap().as_deref(), Some("1"), "2 was aborted");
        producer.begin().unwrap();
        producer.send(NewRecord::new(topic, "k", "3")).await.unwrap();
        producer.commit().await.unwrap();
        assert_eq!(find("k", PATIENCE).await.unwrap().as_deref(), Some("3"));
    });
}
