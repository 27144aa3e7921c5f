//! From a record's production to its copy at a reader of committed records, with a commit every 10 ms; and to its row in a database,
//! which is committed as records come.

use std::path::Path;
use std::time::{Duration, Instant};

use hapax_kafka::producer::{IdempotentProducer, NewRecord};
use hapax_kafka::wire::Connect;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::contestants::{self, Contestant, Flow};
use crate::measure::median;
use crate::{PARTITIONS, PATIENCE, Site, block_on};

const RECORDS: usize = 600;
/// Between two records.
const PACE: Duration = Duration::from_millis(5);
/// Not counted: the members join their groups meanwhile.
const WARM_UP: usize = 200;

pub fn compare(site: &Site, rounds: usize) {
    println!("end to end, a commit every 10 ms, one record every {} ms", PACE.as_millis());
    let mut contestants = vec![Contestant::Processor, Contestant::RdkafkaTransactions];
    contestants.extend(site.krafka.as_ref().map(|_| Contestant::KrafkaTransactions));
    let mut found: Vec<Vec<f64>> = vec![Vec::new(); contestants.len() + 1];
    for round in 0..rounds {
        for (place, contestant) in contestants.iter().enumerate() {
            let p50 = in_topic(site, &flow(site, &format!("latency-{round}-{contestant:?}")), *contestant);
            println!("  {round}  {:<28} {p50:>7.1} ms", contestant.name());
            found[place].push(p50);
        }
        let p50 = in_database(site, &flow(site, &format!("latency-{round}-sqlite")));
        println!("  {round}  {:<28} {p50:>7.1} ms", "SQLite with a ledger entry");
        found[contestants.len()].push(p50);
    }
    let ours = found[0].clone();
    let names = contestants.iter().map(|contestant| contestant.name()).chain(["SQLite with a ledger entry"]);
    for (name, theirs) in names.zip(found) {
        let ratio = median(ours.iter().zip(&theirs).map(|(one, other)| one / other));
        let goal = if name == Contestant::RdkafkaTransactions.name() { " (goal at most 1.20)" } else { "" };
        println!("p50 end to end: {name} {:.1} ms, processor / it {ratio:.2}{goal}", median(theirs));
    }
}

fn flow(site: &Site, name: &str) -> Flow {
    site.create(name);
    Flow {
        input: name.to_owned(),
        commit: Duration::from_millis(10),
        ..Flow::new(site, name, RECORDS, 10_000)
    }
}

/// The median in milliseconds.
fn in_topic(site: &Site, flow: &Flow, contestant: Contestant) -> f64 {
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
        assigned.add_partition_offset(&flow.output, partition, Offset::Beginning).expect("an offset");
    }
    reader.assign(&assigned).expect("partitions");
    std::thread::scope(|scope| {
        scope.spawn(|| contestants::run(contestant, flow));
        scope.spawn(|| block_on(produce(site, &flow.input, start)));
        let mut waits = Vec::new();
        while waits.len() < RECORDS {
            assert!(start.elapsed() < PATIENCE, "{} of {RECORDS} records were read", waits.len());
            let Some(Ok(record)) = reader.poll(Duration::from_millis(5)) else { continue };
            waits.push(wait(start, record.payload().unwrap_or_default()));
        }
        median(waits.split_off(WARM_UP))
    })
}

/// The same until another connection to the database sees the row.
fn in_database(site: &Site, flow: &Flow) -> f64 {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("rows.db");
    let db = contestants::database(&path);
    let start = Instant::now();
    std::thread::scope(|scope| {
        let run = scope.spawn(move || contestants::to_sqlite(flow, db));
        scope.spawn(|| block_on(produce(site, &flow.input, start)));
        let mut waits = read_rows(start, &path);
        run.join().expect("it does not panic");
        median(waits.split_off(WARM_UP))
    })
}

fn read_rows(start: Instant, path: &Path) -> Vec<f64> {
    let db = rusqlite::Connection::open(path).expect("a database");
    let mut rows =
        db.prepare("SELECT rowid, body FROM row WHERE rowid > ?1 ORDER BY rowid").expect("a query");
    let (mut waits, mut last) = (Vec::new(), 0);
    while waits.len() < RECORDS {
        assert!(start.elapsed() < PATIENCE, "{} of {RECORDS} rows were read", waits.len());
        let found = rows.query_map([last], |row| Ok((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?)));
        for row in found.expect("rows") {
            let (row, body) = row.expect("a row");
            last = row;
            waits.push(wait(start, &body));
        }
        std::thread::sleep(Duration::from_micros(500));
    }
    waits
}

/// Milliseconds since a record was produced, which its value tells.
fn wait(start: Instant, value: &[u8]) -> f64 {
    let sent_us: f64 = String::from_utf8_lossy(value).trim().parse().expect("a time");
    (start.elapsed().as_micros() as f64 - sent_us) / 1_000.0
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
