//! `hapax kafka` against a real broker: a hanging transaction is found, holds readers up, and is aborted; a configuration is
//! checked.

mod common;

use std::pin::Pin;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::BytesMut;
use hapax_faults::KafkaServer;
use hapax_kafka::admin;
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{CreateTopicsRequest, ProduceRequest};
use kafka_protocol::protocol::StrBytes;
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, Record, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    let run = |test: fn() -> Pin<Box<dyn Future<Output = ()>>>| {
        tokio::runtime::Runtime::new().unwrap().block_on(test());
        Ok(())
    };
    let trials = [
        Trial::test("transactions_lag_abort_and_check", move || {
            run(|| Box::pin(transactions_lag_abort_and_check()))
        }),
        Trial::test("a_transaction_that_its_coordinator_does_not_know", move || run(|| Box::pin(hanging()))),
    ];
    let trials = trials.into_iter().map(|trial| trial.with_ignored_flag(installed.is_err())).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

fn topic(name: &'static str, partitions: i32) -> CreatableTopic {
    CreatableTopic::default()
        .with_name(StrBytes::from_static_str(name).into())
        .with_num_partitions(partitions)
        .with_replication_factor(1)
}

/// The broker accepts records without an entry of the coordinator's from clients of Kafka 3. It is what is left of a transaction whose
/// end the coordinator did not bring to the partition.
async fn hanging() {
    let broker = KafkaServer::start(&[
        "transaction.max.timeout.ms=600000",
        "transaction.partition.verification.enable=false",
    ])
    .unwrap();
    let address = broker.address().to_string();
    let folder = tempfile::tempdir().unwrap();
    let run =
        |args: &[&str]| common::run(&folder, &[&["kafka", "--brokers", address.as_str()], args].concat());
    let producer = async |id: &str| {
        let mut config = ProducerConfig::new(Connect::plain([address.clone()]), id);
        config.delivery_timeout = Duration::from_mins(2);
        Producer::connect(config).await.unwrap()
    };
    // One that is known, in the third partition; it is not listed.
    let mut known = producer("known").await;
    let create = CreateTopicsRequest::default().with_topics(vec![topic("orders", 3)]).with_timeout_ms(60_000);
    known.cluster().call_any(&create, 5).await.unwrap();
    known.begin().unwrap();
    let record =
        NewRecord { partition: Some(2), timestamp_ms: Some(0), ..NewRecord::new("orders", "k", "v") };
    known.send(record).await.unwrap();
    known.flush().await.unwrap();
    assert_eq!(run(&["hanging", "orders"]).ok(), "");
    let refused = run(&["abort", "--hanging", "orders/2", "--offset", "0", "--yes"]).failed(1);
    assert!(refused.contains("no transaction hangs at offset 0 of orders/2"), "{refused}");

    // The others are not: an old record in the first partition, a new one in the second.
    let forgotten = producer("forgotten").await;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as i64;
    for (partition, timestamp_ms) in [(0, 0), (1, now_ms)] {
        write_without_coordinator(&forgotten, "forgotten", partition, timestamp_ms).await;
    }
    let transactions = run(&["transactions", "--json"]).json();
    assert_eq!(transactions.as_array().unwrap().len(), 1, "{transactions}");
    let listed = run(&["hanging", "orders", "--json"]).json();
    let places: Vec<_> =
        listed.as_array().unwrap().iter().map(|it| (&it["partition"], &it["offset"])).collect();
    assert_eq!(places, [(&0.into(), &0.into()), (&1.into(), &0.into())], "{listed}");
    let shown = run(&["hanging", "orders"]);
    assert!(shown.stdout.starts_with("orders/0\t0\t"), "{shown:?}");

    let elsewhere = run(&["abort", "--hanging", "orders/0", "--offset", "1", "--yes"]).failed(1);
    assert!(elsewhere.contains("no transaction hangs at offset 1 of orders/0"), "{elsewhere}");
    let young = run(&["abort", "--hanging", "orders/1", "--offset", "0", "--yes"]).failed(1);
    assert!(young.contains("brokers let one run for 900 s: try again later"), "{young}");
    let aborted = run(&["abort", "--hanging", "orders/0", "--offset", "0", "--yes"]).ok();
    assert!(aborted.starts_with("aborted in orders/0: producer "), "{aborted}");
    // Readers of committed records get to the end of that partition, and not to that of the others.
    let blocked = admin::blocked(known.cluster(), &["orders".to_owned()]).await.unwrap();
    assert_eq!(blocked.iter().map(|it| it.partition).collect::<Vec<_>>(), [1, 2]);
    let listed = run(&["hanging", "orders", "--json"]).json();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["partition"]), (1, &1.into()), "{listed}");
    known.commit().await.unwrap();

    for (args, said) in [
        (&["abort", "--hanging", "orders", "--offset", "0"][..], "for example orders/0"),
        (&["abort", "--hanging", "orders/0"], "--offset"),
        (&["abort", "known", "--hanging", "orders/0", "--offset", "0"], "cannot be used with"),
        (&["abort", "--offset", "0", "--yes"], "--hanging"),
        (&["abort"], "TRANSACTIONAL_ID"),
        (&["hanging"], "TOPIC"),
    ] {
        let refused = run(args);
        assert!(refused.code == Some(2) && refused.stderr.contains(said), "{args:?}: {refused:?}");
    }
    assert!(run(&["hanging", "missing"]).failed(1).contains("topic missing"));
}

/// Writes a record of a transaction as clients of Kafka 3 do, which tell the coordinator of the partition before; this does not.
async fn write_without_coordinator(producer: &Producer, id: &'static str, partition: i32, timestamp_ms: i64) {
    let identity = producer.identity().unwrap();
    let record = Record {
        transactional: true,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: NO_PARTITION_LEADER_EPOCH,
        producer_id: identity.producer_id,
        producer_epoch: identity.epoch,
        timestamp_type: TimestampType::Creation,
        offset: 0,
        sequence: 0,
        timestamp: timestamp_ms,
        key: None,
        value: Some("v".into()),
        headers: std::iter::empty().collect(),
    };
    let mut records = BytesMut::new();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    RecordBatchEncoder::encode(&mut records, [&record], &options).unwrap();
    let data = PartitionProduceData::default().with_index(partition).with_records(Some(records.freeze()));
    let data = TopicProduceData::default()
        .with_name(StrBytes::from_static_str("orders").into())
        .with_partition_data(vec![data]);
    let request = ProduceRequest::default()
        .with_transactional_id(Some(StrBytes::from_static_str(id).into()))
        .with_acks(-1)
        .with_timeout_ms(60_000)
        .with_topic_data(vec![data]);
    // The last version of those clients.
    let (answer, _) = producer.cluster().call_any(&request, 11).await.unwrap();
    assert_eq!(answer.responses[0].partition_responses[0].error_code, 0, "{answer:?}");
}

async fn transactions_lag_abort_and_check() {
    // It looks for transactions whose time is over once in an hour, so that one hangs.
    let rare = "transaction.abort.timed.out.transaction.cleanup.interval.ms=3600000";
    let broker = KafkaServer::start(&["transaction.max.timeout.ms=600000", rare]).unwrap();
    let address = broker.address().to_string();
    let folder = tempfile::tempdir().unwrap();
    let run =
        |args: &[&str]| common::run(&folder, &[&["kafka", "--brokers", address.as_str()], args].concat());
    let mut config = ProducerConfig::new(Connect::plain([address.clone()]), "billing-1");
    config.transaction_timeout = Duration::from_mins(9);
    config.delivery_timeout = Duration::from_mins(2);
    let mut producer = Producer::connect(config).await.unwrap();
    let topics = vec![topic("bills", 1), topic("hanging", 1), topic("uneven", 2)];
    let create = CreateTopicsRequest::default().with_topics(topics).with_timeout_ms(60_000);
    producer.cluster().call_any(&create, 5).await.unwrap();

    // One transaction that commits with an offset, one that stays open.
    let record = |value: &'static str| NewRecord::new("bills", "k", value);
    producer.begin().unwrap();
    producer.send(record("a")).await.unwrap();
    let group = GroupMetadata::without_member("readers");
    producer.offsets(group, [(TopicPartition::new("bills", 0), 0)]).unwrap();
    producer.commit().await.unwrap();
    producer.begin().unwrap();
    producer.send(record("b")).await.unwrap();
    producer.flush().await.unwrap();

    let open = run(&["transactions", "--json"]).json();
    assert_eq!(open.as_array().unwrap().len(), 1, "{open}");
    let expected = serde_json::json!({ "id": "billing-1", "state": "Ongoing", "partitions": [["bills", 0]], "hangs": false });
    let shown = serde_json::json!({ "id": open[0]["transactional_id"], "state": open[0]["state"],
                                    "partitions": open[0]["partitions"], "hangs": open[0]["hangs"] });
    assert_eq!(shown, expected);
    // The record and the marker of the first transaction can be read, the record of the second one waits.
    assert_eq!(run(&["lag", "readers"]).ok(), "bills\t0\t0\t3\t2\t1\n");

    let used = run(&["check", "--topic", "bills", "--transactional-id", "billing-1"]);
    assert!(used.stdout.contains("hapax kafka abort billing-1"), "{used:?}");
    assert!(used.failed(1).contains("does not hold"));
    assert!(run(&["abort", "billing-1", "--yes"]).ok().starts_with("aborted; producer "));
    assert!(run(&["abort", "billing-1", "--yes"]).failed(1).contains("no open transaction"));
    assert_eq!(
        run(&["lag", "readers"]).ok(),
        "bills\t0\t0\t4\t4\t0\n",
        "the marker of the abort is there, too"
    );
    assert!(producer.commit().await.is_err(), "its producer is fenced");

    // One whose time is over, and which the broker has not aborted.
    let mut config = ProducerConfig::new(Connect::plain([address.clone()]), "hanging-1");
    (config.transaction_timeout, config.delivery_timeout) = (Duration::from_secs(1), Duration::from_mins(2));
    let mut hanging = Producer::connect(config).await.unwrap();
    hanging.begin().unwrap();
    hanging.send(NewRecord::new("hanging", "k", "c")).await.unwrap();
    hanging.flush().await.unwrap();
    let start = Instant::now();
    while run(&["transactions", "--json"]).json()[0]["hangs"] != true {
        assert!(start.elapsed() < common::PATIENCE, "it does not hang: {:?}", run(&["transactions"]));
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let shown = run(&["transactions"]).ok();
    assert!(shown.starts_with("hanging-1\tOngoing\t") && shown.contains("\thangs\thanging/0"), "{shown}");
    assert!(run(&["abort", "hanging-1", "--yes"]).ok().starts_with("aborted; producer "));
    assert_eq!(run(&["transactions"]).ok(), "");

    // All records in one of two partitions.
    producer = {
        let config = ProducerConfig::new(Connect::plain([address.clone()]), "uneven-1");
        Producer::connect(config).await.unwrap()
    };
    producer.begin().unwrap();
    for _ in 0..1_000 {
        let record = NewRecord { partition: Some(1), ..NewRecord::new("uneven", "k", "v") };
        producer.send(record).await.unwrap();
    }
    producer.commit().await.unwrap();
    // The coordinator answers before the marker is written, which is the last offset.
    let skewed = "warning\tskew\t100%\tpartition 1 of topic uneven has 1001 of 1001 offsets";
    let start = Instant::now();
    while !run(&["check", "--topic", "uneven"]).ok().contains(skewed) {
        assert!(start.elapsed() < common::PATIENCE, "{}", run(&["check", "--topic", "uneven"]).ok());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }

    // With one broker, too few copies are a warning.
    let checked =
        run(&["check", "--topic", "bills", "--transactional-id", "billing-1", "--group", "readers"]).ok();
    assert!(checked.starts_with("warning\treplication factor\t1\t"), "{checked}");
    let file = folder.path().join("kafka.toml");
    let refused = |text: &str| {
        std::fs::write(&file, text).unwrap();
        run(&["check", "--config", file.to_str().unwrap()])
    };
    // The ids of all slots are looked at, and the further ids where transactions overlap.
    let turns = "topics = [\"bills\"]\ntransactional_id = \"turns\"\n";
    for (id, setting) in [
        ("turns-0.2", "overlap = true\n"),
        ("turns-0.3", "overlap = true\n"),
        ("turns-1", "concurrency = 2\n"),
        ("turns-1.2", "concurrency = 2\noverlap = true\n"),
    ] {
        let mut other = ProducerConfig::new(Connect::plain([address.clone()]), id);
        other.delivery_timeout = Duration::from_mins(2);
        let mut other = Producer::connect(other).await.unwrap();
        other.begin().unwrap();
        other.send(NewRecord::new("bills", "k", "d")).await.unwrap();
        other.flush().await.unwrap();
        let used = refused(&format!("{turns}{setting}"));
        assert!(used.stdout.contains(&format!("refused\ttransactional.id\t{id}\t")), "{used:?}");
        used.failed(1);
        refused(turns).ok();
        other.abort().await.unwrap();
    }
    refused(&format!("{turns}concurrency = 2\noverlap = true\n")).ok();
    // Partitions of outputs have no members.
    let idle =
        format!("input = [\"bills\"]\noutput = \"uneven\"\ngroup = \"idle\"\nconcurrency = 2\n{turns}");
    let idle = refused(&idle).ok();
    assert!(
        idle.contains("warning\tmembers\t0\t2 more would join, and there are 1 partitions: 1 of"),
        "{idle}"
    );
    let max = refused("topics = [\"bills\"]\n[producer]\n\"transaction.timeout.ms\" = 600001");
    assert!(max.stdout.contains("the maximum of broker 1 is 600000"), "{max:?}");
    let missing = refused("topics = [\"bils\"]");
    assert!(missing.stdout.starts_with("refused\ttopic\tbils\t"), "{missing:?}");
    let both = refused("[producer]\nacks = 1\n[consumer]\n\"isolation.level\" = \"read_uncommitted\"");
    assert_eq!(both.stdout.lines().count(), 2, "{both:?}");
    both.failed(1);
}
