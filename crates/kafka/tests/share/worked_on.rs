//! A topic is worked on by one worker and by several.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use hapax_core::{KeySource, Receive, Settle, Settled, Source as _};
use hapax_kafka::share::ShareSource;
use hapax_worker::{Cx, Worker};
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, PATIENCE, is_empty, next, run_until};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("every_record_is_processed_once", every_record_is_processed_once),
        shared("two_workers_share_one_partition", two_workers_share_one_partition),
        shared("a_topic_that_is_created_again_is_worked_on_from_its_start", a_recreated_topic),
        shared("compressed_batches_are_read", compressed_batches_are_read),
        shared("a_record_keeps_its_key_headers_and_place", a_record_keeps_its_key_headers_and_place),
    ]
}

fn every_record_is_processed_once(broker: &Broker) {
    let options = broker.prepare("every-record", 3);
    // Three transactions: the markers between them are locked like records, and have to be acknowledged too.
    for part in 0..3 {
        broker.send("every-record", (part * 100..part * 100 + 100).map(|number| number.to_string()));
    }
    let source = broker.source(options.clone());
    let seen = Arc::new(Mutex::new(BTreeMap::new()));
    let counted = seen.clone();
    broker.block_on(async {
        let handler = move |number: u32, cx: Cx| {
            *counted.lock().unwrap().entry(number).or_insert(0) += cx.attempt();
            async {}
        };
        let worker =
            Worker::from_source(source.clone()).handler(handler).concurrency(7).build().await.unwrap();
        let report = run_until(worker, |counts| counts.done == 300).await;
        assert!(report.drained && report.counts.stale_settles == 0, "{report:?}");
        source.close().await;
        let again = ShareSource::connect(options).await.unwrap();
        is_empty(&again).await;
    });
    let expected: BTreeMap<u32, u32> = (0..300).map(|number| (number, 1)).collect();
    assert_eq!(*seen.lock().unwrap(), expected);
}

/// Under a worker, and then while none runs: in share groups the broker knows a topic by its id.
fn a_recreated_topic(broker: &Broker) {
    let topic = "share-recreated";
    let options = broker.prepare(topic, 1);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let numbers = |range: std::ops::Range<u32>| range.map(|number| number.to_string());
    let work = |source: Arc<ShareSource>, total: usize| {
        let (seen, counted) = (seen.clone(), seen.clone());
        broker.block_on(async {
            let handler = move |number: u32, _: Cx| {
                seen.lock().unwrap().push(number);
                async {}
            };
            let worker = Worker::from_source(source.clone()).handler(handler).build().await.unwrap();
            run_until(worker, |_| counted.lock().unwrap().len() >= total).await;
            source.close().await;
        });
    };
    broker.send(topic, numbers(0..4));
    let create_again = |range: std::ops::Range<u32>| {
        broker.delete_topic(topic);
        broker.create_topic(topic, 1);
        broker.send(topic, numbers(range));
    };
    let source = broker.source(options.clone());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while seen.lock().unwrap().len() < 4 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            // Fewer records than before.
            create_again(10..12);
        });
        work(source, 6);
    });
    create_again(20..27);
    work(broker.source(options), 13);
    let mut seen = seen.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [(0..4).collect::<Vec<u32>>(), (10..12).collect(), (20..27).collect()].concat());
}

fn two_workers_share_one_partition(broker: &Broker) {
    let options = broker.prepare("two-workers", 1);
    let sources = [broker.source(options.clone()), broker.source(options)];
    let seen = Arc::new(Mutex::new(Vec::new()));
    broker.block_on(async {
        // Both have a record at the same time, of the only partition.
        let both = Arc::new(tokio::sync::Barrier::new(2));
        let mut workers = Vec::new();
        for (name, source) in sources.into_iter().enumerate() {
            let (seen, both) = (seen.clone(), both.clone());
            let handler = move |number: u32, _: Cx| {
                let is_first = {
                    let mut seen = seen.lock().unwrap();
                    let is_first = seen.iter().all(|(_, by)| *by != name);
                    seen.push((number, name));
                    is_first
                };
                let both = both.clone();
                async move {
                    if is_first {
                        both.wait().await;
                    }
                }
            };
            let builder = Worker::from_source(source).handler(handler).concurrency(1);
            workers.push(builder.build().await.unwrap());
        }
        let (one, two) = (workers.pop().unwrap(), workers.pop().unwrap());
        let (first, second) = (one.watch(), two.watch());
        let all = || {
            let (first, second) = (first.clone(), second.clone());
            async move {
                let start = std::time::Instant::now();
                loop {
                    let sum = first.counts().done + second.counts().done;
                    if sum == 20 {
                        return;
                    }
                    assert!(start.elapsed() < PATIENCE, "{sum} of 20");
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            }
        };
        let (ran, also, ()) = tokio::join!(one.run(all()), two.run(all()), send(broker));
        assert!(ran.unwrap().drained && also.unwrap().drained);
    });
    let mut numbers: Vec<u32> = seen.lock().unwrap().iter().map(|(number, _)| *number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, (0..20).collect::<Vec<_>>(), "each once");
}

async fn send(broker: &Broker) {
    let producer: FutureProducer = broker.config().create().unwrap();
    for number in 0..20 {
        let value = number.to_string();
        let record = FutureRecord::<(), String>::to("two-workers").payload(&value);
        producer.send(record, PATIENCE).await.unwrap();
    }
}

/// Compressed by the producer, in each way that Kafka has.
fn compressed_batches_are_read(broker: &Broker) {
    let options = broker.prepare("compressed", 1);
    let source = broker.source(options);
    broker.block_on(async {
        for codec in ["gzip", "snappy", "lz4", "zstd"] {
            let producer: FutureProducer = broker.config().set("compression.type", codec).create().unwrap();
            let value = codec.repeat(10_000);
            let record = FutureRecord::<(), _>::to("compressed").payload(&value);
            producer.send(record, PATIENCE).await.unwrap();
            let receive = Receive { wait_ms: Some(20_000), ..Receive::up_to(1) };
            let delivery = source.next(receive).await.unwrap().pop().expect(codec);
            assert_eq!(delivery.body, value.as_bytes(), "{codec}");
            let settled = source.settle(vec![Settle::ack(delivery.receipt)]).await.unwrap();
            assert_eq!(settled, [Ok(Settled::Acked)], "{codec}");
        }
    });
}

fn a_record_keeps_its_key_headers_and_place(broker: &Broker) {
    let options = broker.prepare("its-place", 1);
    let source = broker.source(options);
    broker.block_on(async {
        let producer: FutureProducer = broker.config().create().unwrap();
        let headers = rdkafka::message::OwnedHeaders::new()
            .insert(rdkafka::message::Header { key: "hapax-idempotency-key", value: Some("order-7") })
            .insert(rdkafka::message::Header { key: "raw", value: Some(&[0xff_u8, 0][..]) });
        let keyed = FutureRecord::to("its-place").payload("1").key("k").headers(headers);
        producer.send(keyed, PATIENCE).await.unwrap();
        let plain = FutureRecord::<(), _>::to("its-place").payload("2");
        producer.send(plain, PATIENCE).await.unwrap();
        let mut found = next(&source, 1).await;
        found.extend(next(&source, 1).await);
        assert_eq!(found.len(), 2, "a receive gives no more than it was asked for");
        let (keyed, plain) = (&found[0], &found[1]);
        assert_eq!((keyed.key.as_str(), keyed.key_source), ("order-7", KeySource::Attribute));
        assert_eq!(keyed.group.as_ref().unwrap().as_str(), "k");
        let text = |name: &str| keyed.attributes[name].as_text().unwrap().to_owned();
        assert_eq!(
            [text("kafka-topic"), text("kafka-partition"), text("kafka-offset")],
            ["its-place", "0", "0"]
        );
        assert_eq!(keyed.attributes["raw"].data_type, "Binary");
        assert!(plain.key.as_str().ends_with("/0/1"), "topic id, partition and offset: {}", plain.key);
        assert_eq!(plain.key_source, KeySource::MessageId);
        assert_ne!(plain.id, keyed.id);
        assert_eq!((plain.attempt, plain.deliveries), (1, 1));
    });
}
