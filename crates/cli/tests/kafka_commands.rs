//! `hapax kafka` against a real broker: a hanging transaction is found, holds readers up, and is aborted; a configuration is
//! checked.

mod common;

use std::time::{Duration, Instant};

use hapax_faults::KafkaServer;
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use kafka_protocol::messages::CreateTopicsRequest;
use kafka_protocol::messages::create_topics_request::CreatableTopic;
use kafka_protocol::protocol::StrBytes;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    let trial = Trial::test("transactions_lag_abort_and_check", || {
        tokio::runtime::Runtime::new().unwrap().block_on(transactions_lag_abort_and_check());
        Ok(())
    });
    let trial = trial.with_ignored_flag(installed.is_err());
    libtest_mimic::run(&Arguments::from_args(), vec![trial]).exit();
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
    let topic = |name: &'static str, partitions: i32| {
        CreatableTopic::default()
            .with_name(StrBytes::from_static_str(name).into())
            .with_num_partitions(partitions)
            .with_replication_factor(1)
    };
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
