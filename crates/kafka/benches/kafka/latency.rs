//! From a record's production to its copy at a reader of committed records, with a commit every 10 ms.

use std::time::{Duration, Instant};

use hapax_kafka::producer::{IdempotentProducer, NewRecord};
use hapax_kafka::wire::Connect;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::contestants::{Flow, processor, rdkafka_loop};
use crate::{PARTITIONS, PATIENCE, Site, block_on, median};

const RECORDS: usize = 600;
/// Between two records.
const PACE: Duration = Duration::from_millis(5);
/// Not counted: the members join their groups meanwhile.
const WARM_UP: usize = 200;

pub fn compare(site: &Site, rounds: usize) {
    println!("end to end, a commit every 10 ms, one record every {} ms", PACE.as_millis());
    let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..rounds {
        let p50 = |transactions: bool| {
            let name = format!("latency-{round}-{transactions}");
            site.create(&name);
            let flow = Flow {
                input: name.clone(),
                commit: Duration::from_millis(10),
                batch: 10_000,
                ..Flow::new(site, &name, RECORDS, 10_000)
            };
            measure(site, &flow, transactions)
        };
        let (one, other) = (p50(false), p50(true));
        println!("  {round}  processor {one:>7.1} ms, rdkafka's transactions {other:>7.1} ms");
        ours.push(one);
        theirs.push(other);
        ratios.push(one / other);
    }
    println!(
        "p50 end to end: processor {:.1} ms, rdkafka's transactions {:.1} ms, ratio {:.2} (goal at most 1.20)",
        median(ours),
        median(theirs),
        median(ratios)
    );
}

/// The median in milliseconds.
fn measure(site: &Site, flow: &Flow, rdkafka: bool) -> f64 {
    let (input, output) = (flow.input.clone(), flow.output.clone());
    let start = Instant::now();
    let reader: BaseConsumer = site
        .config()
        .set("group.id", "reader")
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("fetch.wait.max.ms", "5")
        .create()
        .expect("a reader");
    let mut assigned = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        assigned.add_partition_offset(&output, partition, Offset::Beginning).expect("an offset");
    }
    reader.assign(&assigned).expect("partitions");
    std::thread::scope(|scope| {
        scope.spawn(|| if rdkafka { rdkafka_loop(flow, true) } else { block_on(processor(flow)) });
        scope.spawn(|| block_on(produce(site, &input, start)));
        let (mut waits, mut seen) = (Vec::new(), 0);
        while seen < RECORDS {
            assert!(start.elapsed() < PATIENCE, "{seen} of {RECORDS} records were read");
            let Some(Ok(record)) = reader.poll(Duration::from_millis(5)) else { continue };
            let sent_us: f64 =
                String::from_utf8_lossy(record.payload().unwrap_or_default()).trim().parse().expect("a time");
            seen += 1;
            if seen > WARM_UP {
                waits.push((start.elapsed().as_micros() as f64 - sent_us) / 1_000.0);
            }
        }
        median(waits)
    })
}

/// Records whose value is their time, padded to 1 KiB.
async fn produce(site: &Site, topic: &str, start: Instant) {
    let mut producer =
        IdempotentProducer::connect(Connect::plain([&site.address])).await.expect("a producer");
    for number in 0..RECORDS {
        let value = format!("{:<1024}", start.elapsed().as_micros());
        let partition = Some((number as i32) % PARTITIONS);
        producer
            .send(NewRecord { partition, ..NewRecord::new(topic, "key", value) })
            .await
            .expect("it is sent");
        producer.flush().await.expect("it is written");
        tokio::time::sleep(PACE).await;
    }
}
