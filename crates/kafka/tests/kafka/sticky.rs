//! What a rebalance costs those whose partitions stay: the longest gap between two records of such a partition while a member
//! joins, beside that of the eager protocol. The figures are printed; what is asserted is which partitions move.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, StartAt};
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![shared("a_rebalance_interrupts_only_what_moves", interrupts_only_what_moves)]
}

const PARTITIONS: i32 = 4;
/// Time before the second member joins, and after it has its first record.
const QUIET: Duration = Duration::from_secs(2);

/// When records arrived at a member, by partition.
#[derive(Clone, Default)]
struct Arrivals(Arc<Mutex<BTreeMap<i32, Vec<Instant>>>>);

impl Arrivals {
    fn add(&self, partition: i32) {
        self.0.lock().unwrap().entry(partition).or_default().push(Instant::now());
    }

    fn is_empty(&self) -> bool {
        self.0.lock().unwrap().is_empty()
    }

    /// The longest gap since `from` in a partition that still has records after `last`, in milliseconds.
    fn longest_gap(&self, from: Instant, last: Instant) -> u128 {
        let arrivals = self.0.lock().unwrap();
        let stay = arrivals.values().filter(|times| times.last().is_some_and(|time| *time > last));
        let gaps = stay.flat_map(|times| times.windows(2).filter(|pair| pair[1] > from));
        gaps.map(|pair| (pair[1] - pair[0]).as_millis()).max().expect("a partition stays")
    }
}

/// Lets a second member join, and returns the longest gap of the first one's partitions that stay.
fn measure(topic: &str, start: impl Fn(&str, Arrivals, Arc<AtomicBool>)) -> u128 {
    let (first, second) = (Arrivals::default(), Arrivals::default());
    let ended = Arc::new(AtomicBool::new(false));
    start(topic, first.clone(), ended.clone());
    let begun = Instant::now();
    while first.is_empty() {
        assert!(begun.elapsed() < PATIENCE, "{topic}: the first member reads nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(QUIET);
    let joins = Instant::now();
    start(topic, second.clone(), ended.clone());
    while second.is_empty() {
        assert!(joins.elapsed() < PATIENCE, "{topic}: the second member reads nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    let joined = Instant::now();
    std::thread::sleep(QUIET);
    ended.store(true, Ordering::SeqCst);
    first.longest_gap(joins, joined)
}

fn interrupts_only_what_moves(broker: &Broker) {
    let address = broker.address().to_string();
    let filling = Arc::new(AtomicBool::new(true));
    for topic in ["sticky", "eager"] {
        broker.create_topic(topic, PARTITIONS);
    }
    let fill = {
        let (filling, producer) = (filling.clone(), broker.config().create::<FutureProducer>().unwrap());
        std::thread::spawn(move || {
            while filling.load(Ordering::SeqCst) {
                for (topic, partition) in
                    ["sticky", "eager"].into_iter().flat_map(|t| (0..PARTITIONS).map(move |p| (t, p)))
                {
                    let record = FutureRecord::<(), _>::to(topic).partition(partition).payload("x");
                    drop(producer.send_result(record));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        })
    };
    let sticky = measure("sticky", |topic, arrivals, ended| {
        let mut consumer = Consumer::start(&ConsumerConfig::new(&address, topic, &[topic])).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                while !ended.load(Ordering::SeqCst) {
                    match tokio::time::timeout(Duration::from_millis(100), consumer.next()).await {
                        Ok(Event::Assigned(assignment)) => {
                            let starts = vec![StartAt::NewGroup; assignment.partitions.len()];
                            assignment.start(starts);
                        }
                        Ok(Event::Record(record)) => arrivals.add(record.at.partition),
                        Ok(Event::Revoked(revoked)) => {
                            assert_eq!(revoked.partitions.len(), 2, "only those that have to move");
                        }
                        Ok(Event::Ended(error)) => panic!("{error}"),
                        Ok(_) | Err(_) => {}
                    }
                }
            });
        });
    });
    let eager = measure("eager", |topic, arrivals, ended| {
        let mut config = broker.config();
        config.set("group.id", topic).set("partition.assignment.strategy", "range");
        let consumer: BaseConsumer = config.set("auto.offset.reset", "earliest").create().unwrap();
        consumer.subscribe(&[topic]).unwrap();
        std::thread::spawn(move || {
            while !ended.load(Ordering::SeqCst) {
                if let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) {
                    arrivals.add(record.partition());
                }
            }
        });
    });
    filling.store(false, Ordering::SeqCst);
    fill.join().unwrap();
    println!(
        "longest gap of a partition that stays while a member joins: {sticky} ms sticky, {eager} ms eager"
    );
}
