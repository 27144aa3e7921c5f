//! Copying records of 1 KiB from one topic to another: with and without transactions, with our producer, librdkafka's and krafka's.
//! The last one is a program of its own, which is left out where it cannot be built.
//!
//! The contestants run in turn on the same broker, and each round gives one ratio: what other processes take hits both sides.
//!
//! `cargo xtask bench kafka -- [--rounds 5] [--records 20000] [--only throughput|latency|database] [--batch 100|1000]`

mod contestants;
#[path = "../../tests/common/krafka.rs"]
mod krafka;
mod latency;
#[path = "../../../embedded/benches/shared/measure.rs"]
mod measure;
mod timed;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use hapax_faults::KafkaServer;
use hapax_kafka::producer::NewRecord;
use hapax_kafka::publisher::Publisher;
use hapax_kafka::wire::Connect;
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;

use contestants::Offsets::{Unwaited, Waited};
use contestants::{Contestant, Flow};
use measure::{cpu_secs_of, median, table, thousands};

/// Time for anything that is waited for.
const PATIENCE: Duration = Duration::from_mins(5);
const PARTITIONS: i32 = 3;
const VALUE: [u8; 1_024] = [b'x'; 1_024];

/// Two contestants, the count of records in a commit, and what the first may take of the second at least.
const RATIOS: [(Contestant, Contestant, usize, f64); 12] = [
    (Contestant::Processor, Contestant::Plain(Waited), 1_000, 0.80),
    (Contestant::Processor, Contestant::Plain(Waited), 100, 0.70),
    (Contestant::Processor, Contestant::Plain(Unwaited), 1_000, 0.0),
    (Contestant::Processor, Contestant::Plain(Unwaited), 100, 0.0),
    (Contestant::Processor, Contestant::RdkafkaPlain(Waited), 1_000, 1.0),
    (Contestant::Processor, Contestant::RdkafkaPlain(Unwaited), 1_000, 0.0),
    (Contestant::Processor, Contestant::RdkafkaTransactions, 100, 1.2),
    (Contestant::Processor, Contestant::RdkafkaTransactions, 1_000, 0.0),
    (Contestant::Processor, Contestant::KrafkaTransactions, 1_000, 0.9),
    (Contestant::Processor, Contestant::KrafkaTransactions, 100, 0.9),
    (Contestant::Processor, Contestant::ProcessorInTurn, 1_000, 0.0),
    (Contestant::Processor, Contestant::ProcessorInTurn, 100, 0.0),
];

struct Arguments {
    rounds: usize,
    records: usize,
    only: Option<String>,
    /// Of the throughputs, only those with so many records in a commit.
    batch: Option<usize>,
}

fn main() {
    let arguments = arguments();
    if let Err(why) = KafkaServer::jars() {
        return println!("skipped: {why}");
    }
    // Before the broker, whose time it would take.
    let krafka = krafka::build().map_err(|why| println!("krafka is left out: {why}")).ok();
    let broker = KafkaServer::start(&[]).expect("the broker starts");
    let site = Site {
        address: broker.address().to_string(),
        process: broker.process_id().expect("it runs"),
        krafka,
    };
    let wants = |name: &str| arguments.only.as_deref().is_none_or(|only| only == name);
    if wants("throughput") {
        throughput(&site, &arguments);
    }
    if wants("latency") {
        latency::compare(&site, arguments.rounds);
    }
    if wants("database") {
        database(&site, &arguments);
    }
}

fn arguments() -> Arguments {
    let mut arguments = Arguments { rounds: 5, records: 20_000, only: None, batch: None };
    let mut given = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = given.next() {
        let value = given.next().unwrap_or_default();
        let number = || value.parse().unwrap_or_else(|_| panic!("{name} {value}: a number is needed"));
        match name.as_str() {
            "--rounds" => arguments.rounds = number(),
            "--records" => arguments.records = number(),
            "--only" => arguments.only = Some(value),
            "--batch" => arguments.batch = Some(number()),
            _ => panic!("{name} is not known: --rounds, --records, --only, --batch"),
        }
    }
    arguments
}

/// A contestant's turn: records a second, and milliseconds for each batch: by the clock, of the broker's processor time, and of the
/// client's.
#[derive(Clone, Copy)]
struct Turn {
    rate: f64,
    clock_ms: f64,
    broker_ms: f64,
    client_ms: f64,
}

fn turn(site: &Site, contestant: Contestant, flow: &Flow) -> Turn {
    let spent = || (cpu_secs_of(&site.process), cpu_secs_of("self"));
    let (broker, client) = spent();
    let secs = contestants::run(contestant, flow).as_secs_f64();
    let (broker, client) = (spent().0 - broker, spent().1 - client);
    let each = |secs: f64| secs * 1e3 / (flow.records as f64 / flow.batch as f64);
    Turn {
        rate: flow.records as f64 / secs,
        clock_ms: each(secs),
        broker_ms: each(broker),
        client_ms: each(client),
    }
}

fn throughput(site: &Site, arguments: &Arguments) {
    let records = arguments.records;
    site.fill("input", records);
    println!("records of 1 KiB, {records} in each turn, {} rounds; medians", arguments.rounds);
    let is_there = |other: &Contestant| *other != Contestant::KrafkaTransactions || site.krafka.is_some();
    let is_asked = |batch: usize| arguments.batch.is_none_or(|asked| asked == batch);
    let compared: Vec<_> =
        RATIOS.into_iter().filter(|(_, other, batch, _)| is_there(other) && is_asked(*batch)).collect();
    let mut turns: BTreeMap<(usize, Contestant), Vec<Turn>> = BTreeMap::new();
    // The first round warms the broker up, and does not count.
    for round in 0..=arguments.rounds {
        // A contestant runs once in a round for all ratios that it is in.
        let mut done = BTreeSet::new();
        for (one, other, batch, _) in &compared {
            for contestant in [*one, *other] {
                if !done.insert((*batch, contestant)) {
                    continue;
                }
                let name = format!("{round}-{contestant:?}-{batch}").replace(['(', ')'], "-");
                let turn = turn(site, contestant, &Flow::new(site, &name, records, *batch));
                if round > 0 {
                    turns.entry((*batch, contestant)).or_default().push(turn);
                }
            }
        }
    }
    let of = |turns: &[Turn], value: fn(&Turn) -> f64| median(turns.iter().map(value));
    let row = |((batch, contestant), turns): (&(usize, Contestant), &Vec<Turn>)| {
        let ms = |value| format!("{:.2}", of(turns, value));
        let rate = thousands(of(turns, |turn| turn.rate));
        let name = contestant.name().to_owned();
        vec![
            name,
            batch.to_string(),
            rate,
            ms(|it| it.clock_ms),
            ms(|it| it.broker_ms),
            ms(|it| it.client_ms),
        ]
    };
    let columns = ["contestant", "batch", "a second", "ms each batch", "broker CPU ms", "client CPU ms"];
    table(false, "Throughput", &columns, &turns.iter().map(row).collect::<Vec<_>>());
    println!();
    for (one, other, batch, goal) in compared {
        let (ours, theirs) = (&turns[&(batch, one)], &turns[&(batch, other)]);
        let ratios: Vec<f64> = ours.iter().zip(theirs).map(|(one, other)| one.rate / other.rate).collect();
        let least = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let most = ratios.iter().copied().fold(0.0, f64::max);
        let goal = if goal > 0.0 { format!(", goal {goal:.2}") } else { String::new() };
        let ratio = median(ratios);
        println!(
            "{} / {}, batches of {batch}: {ratio:.2} ({least:.2} to {most:.2}){goal}",
            one.name(),
            other.name()
        );
    }
}

/// What a user pays for each: the broker's transaction, which covers records, and the database's with a ledger entry, which
/// covers rows.
fn database(site: &Site, arguments: &Arguments) {
    let records = arguments.records.min(5_000);
    site.fill("rows", records);
    let mut ratios = Vec::new();
    for round in 0..arguments.rounds {
        let flow = |name: &str| Flow {
            input: "rows".to_owned(),
            ..Flow::new(site, &format!("{round}-{name}"), records, 100)
        };
        let broker = contestants::run(Contestant::Processor, &flow("to-topic"));
        let folder = tempfile::tempdir().expect("a folder");
        let ledger =
            contestants::to_sqlite(&flow("to-sqlite"), contestants::database(&folder.path().join("rows.db")));
        let rate = |time: Duration| records as f64 / time.as_secs_f64();
        println!(
            "  {round}  broker's transaction {:>9.0}/s, SQLite with a ledger entry each {:>9.0}/s",
            rate(broker),
            rate(ledger)
        );
        ratios.push(rate(broker) / rate(ledger));
    }
    println!(
        "broker's transaction / SQLite with a ledger entry for each record, batches of 100: {:.2}",
        median(ratios)
    );
}

/// The broker.
struct Site {
    address: String,
    /// The id of its process.
    process: String,
    /// The program over krafka, if it could be built.
    krafka: Option<PathBuf>,
}

impl Site {
    fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config.set("bootstrap.servers", &self.address);
        config
    }

    fn create(&self, topic: &str) {
        let admin: AdminClient<DefaultClientContext> = self.config().create().expect("a client");
        let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
        let topic = NewTopic::new(topic, PARTITIONS, TopicReplication::Fixed(1));
        let made = block_on(admin.create_topics([&topic], &options)).expect("the broker answers");
        for topic in made {
            topic.expect("the topic is made");
        }
    }

    fn fill(&self, topic: &str, records: usize) {
        self.create(topic);
        block_on(async {
            let mut publisher =
                Publisher::idempotent(Connect::plain([&self.address])).await.expect("a producer");
            for part in (0..records).collect::<Vec<_>>().chunks(1_000) {
                let record = |number: &usize| {
                    let partition = Some((*number as i32) % PARTITIONS);
                    NewRecord { partition, ..NewRecord::new(topic, number.to_string(), VALUE.to_vec()) }
                };
                publisher.publish(part.iter().map(record).collect()).await.expect("they are written");
            }
        });
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}
