//! Copying records of 1 KiB from one topic to another: with and without transactions, with our producer, librdkafka's and krafka's.
//! The last one is a program of its own, which is left out where it cannot be built.
//!
//! The contestants run in turn on the same broker, and each round gives one ratio: what other processes take hits both sides.
//!
//! `cargo xtask bench kafka -- [--rounds 5] [--records 20000] [--only throughput|latency|database]`

mod contestants;
#[path = "../../tests/common/krafka.rs"]
mod krafka;
mod latency;

use std::collections::BTreeMap;
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
}

fn main() {
    let arguments = arguments();
    if let Err(why) = KafkaServer::jars() {
        return println!("skipped: {why}");
    }
    // Before the broker, whose time it would take.
    let krafka = krafka::build().map_err(|why| println!("krafka is left out: {why}")).ok();
    let broker = KafkaServer::start(&[]).expect("the broker starts");
    let site = Site { address: broker.address().to_string(), krafka };
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
    let mut arguments = Arguments { rounds: 5, records: 20_000, only: None };
    let mut given = std::env::args().skip(1).filter(|argument| argument != "--bench");
    while let Some(name) = given.next() {
        let value = given.next().unwrap_or_default();
        let number = || value.parse().unwrap_or_else(|_| panic!("{name} {value}: a number is needed"));
        match name.as_str() {
            "--rounds" => arguments.rounds = number(),
            "--records" => arguments.records = number(),
            "--only" => arguments.only = Some(value),
            _ => panic!("{name} is not known: --rounds, --records, --only"),
        }
    }
    arguments
}

fn throughput(site: &Site, arguments: &Arguments) {
    let records = arguments.records;
    site.fill("input", records);
    println!(
        "records of 1 KiB a second, {records} in each run, {} rounds; ratios are medians",
        arguments.rounds
    );
    let is_there = |other: &Contestant| *other != Contestant::KrafkaTransactions || site.krafka.is_some();
    let compared: Vec<_> = RATIOS.into_iter().filter(|(_, other, ..)| is_there(other)).collect();
    let mut ratios: Vec<Vec<f64>> = vec![Vec::new(); compared.len()];
    // The first round warms the broker up, and does not count.
    for round in 0..=arguments.rounds {
        // A contestant runs once in a round for all ratios that it is in.
        let mut rates: BTreeMap<(Contestant, usize), f64> = BTreeMap::new();
        for (place, (one, other, batch, _)) in compared.iter().copied().enumerate() {
            for contestant in [one, other] {
                rates.entry((contestant, batch)).or_insert_with(|| {
                    let name = format!("{round}-{contestant:?}-{batch}").replace(['(', ')'], "-");
                    let flow = Flow::new(site, &name, records, batch);
                    let rate = records as f64 / contestants::run(contestant, &flow).as_secs_f64();
                    println!("  {round}  {:<28} batches of {batch:<5} {rate:>9.0}/s", contestant.name());
                    rate
                });
            }
            if round > 0 {
                ratios[place].push(rates[&(one, batch)] / rates[&(other, batch)]);
            }
        }
    }
    for ((one, other, batch, goal), ratios) in compared.into_iter().zip(ratios) {
        let (ratio, goal) =
            (median(ratios), if goal > 0.0 { format!("(goal {goal:.2})") } else { String::new() });
        println!("{} / {}, batches of {batch}: {ratio:.2} {goal}", one.name(), other.name());
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

/// The middle value, or the mean of the two middle ones; of none, not a number.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let half = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        count if count.is_multiple_of(2) => f64::midpoint(values[half - 1], values[half]),
        _ => values[half],
    }
}

/// The broker.
struct Site {
    address: String,
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
