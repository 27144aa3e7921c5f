//! Questions to a cluster: lag, open transactions and their end, the checks before the first record.

use std::time::Duration;

use hapax_kafka::admin::{self, BlockedPartition, OpenProducer, Wanted};
use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, StartAt};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::{Cluster, Connect};

use crate::broker::{Broker, PATIENCE, Protocol};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("an_open_transaction_is_found_and_aborted", an_open_transaction_is_found_and_aborted),
        shared("as_many_members_as_partitions_are_told_for_both_protocols", |broker| {
            for protocol in [Protocol::Classic, Protocol::Consumer] {
                as_many_members_as_partitions(broker, protocol);
            }
        }),
    ]
}

fn as_many_members_as_partitions(broker: &Broker, protocol: Protocol) {
    let topic = &format!("admin-members-{}", protocol.name());
    let output = format!("{topic}-out");
    broker.create_topic(topic, 1);
    broker.create_topic(&output, 3);
    let address = broker.address().to_string();
    let mut config = ConsumerConfig::new(&address, topic, &[topic]);
    config.properties = vec![protocol.property()];
    let mut consumer = Consumer::start(&config).unwrap();
    broker.block_on(async {
        let cluster = Cluster::new(Connect::plain([address]));
        // The partitions of the output have no members.
        let (topics, inputs) = (vec![topic.clone(), output.clone()], Some(vec![topic.clone()]));
        let wanted = Wanted { topics, inputs, group: Some(topic.clone()), ..Wanted::default() };
        let warned = async |members: usize| {
            let found = admin::check(&cluster, &Wanted { members, ..wanted.clone() }).await.unwrap();
            found.warnings.into_iter().find(|warning| warning.key == "members")
        };
        let assigned = async {
            loop {
                match consumer.next_control().await {
                    Event::Assigned(assignment) => return assignment,
                    Event::Problem(problem) => println!("{problem}"),
                    other => panic!("{other:?}"),
                }
            }
        };
        let assignment = tokio::time::timeout(PATIENCE, assigned).await.unwrap();
        assignment.start(vec![StartAt::NewGroup]);
        let warning = warned(1).await.expect("one member has the only partition");
        assert_eq!(warning.value, "1", "{protocol:?}");
        consumer.close().await;
        assert_eq!(warned(1).await, None, "{protocol:?}: there is no member");
        let warning = warned(3).await.expect("two of three have none");
        assert!(warning.remedy.contains("2 of them would have none"), "{protocol:?}: {warning}");
    });
}

fn an_open_transaction_is_found_and_aborted(broker: &Broker) {
    let topic = "admin-open";
    broker.create_topic(topic, 1);
    let mut config = ProducerConfig::new(Connect::plain([broker.address().to_string()]), topic);
    (config.transaction_timeout, config.delivery_timeout) = (Duration::from_mins(9), PATIENCE);
    broker.block_on(async {
        let mut producer = Producer::connect(config).await.unwrap();
        let cluster = producer.cluster().clone();
        let record =
            |value: &'static str| NewRecord { partition: Some(0), ..NewRecord::new(topic, "k", value) };
        producer.begin().unwrap();
        producer.send(record("a")).await.unwrap();
        let group = GroupMetadata::without_member(topic);
        producer.offsets(group, [(TopicPartition::new(topic, 0), 0)]).unwrap();
        producer.commit().await.unwrap();
        producer.begin().unwrap();
        producer.send(record("b")).await.unwrap();
        producer.flush().await.unwrap();

        let open = admin::transactions(&cluster).await.unwrap();
        let ours = open.iter().find(|open| open.transactional_id == topic).expect("it is open");
        assert_eq!((ours.state.as_str(), &ours.partitions), ("Ongoing", &vec![(topic.to_owned(), 0)]));
        let start = ours.started_ms.unwrap();
        assert!(!ours.hangs(start + 540_000) && ours.hangs(start + 540_001), "{ours:?}");
        // The record and the marker of the first transaction can be read, the record of the second one waits.
        let lag = admin::lag(&cluster, topic).await.unwrap();
        assert_eq!((lag[0].lag(), lag[0].blocked()), (2, 1), "{lag:?}");
        let blocked = admin::blocked(&cluster, &[topic.to_owned()]).await.unwrap();
        let (producer_id, epoch) = ours.producer;
        let [BlockedPartition { partition: 0, stable_end: 2, end: 3, producers, .. }] = &blocked[..] else {
            panic!("{blocked:?}");
        };
        let [OpenProducer { id, epoch: epoch_there, start: 2, .. }] = producers[..] else {
            panic!("{producers:?}");
        };
        assert_eq!((id, epoch_there), (producer_id, i32::from(epoch)));
        // Its coordinator knows it.
        assert_eq!(admin::hanging(&cluster, &[topic.to_owned()]).await.unwrap(), []);
        assert_eq!(admin::abort_hanging(&cluster, topic, 0, 2).await.unwrap(), None);

        let wanted = Wanted {
            transactional_id: Some(topic.to_owned()),
            transaction_timeout_ms: Some(u64::from(u32::MAX)),
            topics: vec![topic.to_owned(), "admin-missing".to_owned()],
            group: Some(topic.to_owned()),
            ..Wanted::default()
        };
        let found = admin::check(&cluster, &wanted).await.unwrap();
        let keys: Vec<&str> = found.refused.iter().map(|refusal| refusal.key.as_str()).collect();
        assert_eq!(keys, ["transaction.timeout.ms", "transactional.id", "topic"], "{found:?}");
        assert_eq!(found.warnings[0].key, "replication factor", "with one broker");

        assert!(admin::abort(&cluster, topic).await.unwrap().is_some());
        assert!(admin::abort(&cluster, topic).await.unwrap().is_none(), "nothing is open");
        let lag = admin::lag(&cluster, topic).await.unwrap();
        assert_eq!((lag[0].lag(), lag[0].blocked()), (4, 0), "{lag:?}");
        assert_eq!(admin::blocked(&cluster, &[topic.to_owned()]).await.unwrap(), []);
        assert!(producer.commit().await.is_err(), "the producer is fenced");
    });
}
