//! What a rebalance costs those whose partitions stay: a member joins, another one takes its time to let go of a partition, and the
//! records of the first one's other partitions keep flowing meanwhile. With the eager protocol they wait for the slow member.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_kafka::consumer::{Consumer, ConsumerConfig, Event, StartAt};
use rdkafka::ClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext, Rebalance};
use rdkafka::message::Message as _;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, PATIENCE, Protocol};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![shared("a_rebalance_interrupts_only_what_moves", interrupts_only_what_moves)]
}

const PARTITIONS: i32 = 6;
/// A topic, and a group, for each protocol.
const TOPICS: [&str; 3] = ["sticky", "by-broker", "eager"];
/// How long the slow member takes to let go of partitions.
const SLOW: Duration = Duration::from_secs(3);
/// Time before the last member joins, and after it has its first record.
const QUIET: Duration = Duration::from_secs(1);

/// What a member of a group has seen, and what it is told.
#[derive(Clone, Default)]
struct Member {
    /// When records arrived, by partition.
    arrivals: Arc<Mutex<BTreeMap<i32, Vec<Instant>>>>,
    /// Partitions that it had to let go of.
    revoked: Arc<AtomicUsize>,
    ended: Arc<AtomicBool>,
    is_slow: bool,
}

impl Member {
    fn add(&self, partition: i32) {
        self.arrivals.lock().unwrap().entry(partition).or_default().push(Instant::now());
    }

    fn lets_go(&self, partitions: usize) {
        self.revoked.fetch_add(partitions, Ordering::SeqCst);
        if self.is_slow {
            std::thread::sleep(SLOW);
        }
    }

    fn has_ended(&self) -> bool {
        self.ended.load(Ordering::SeqCst)
    }

    fn wait_for_records(&self, topic: &str) {
        let begun = Instant::now();
        while self.arrivals.lock().unwrap().is_empty() {
            assert!(begun.elapsed() < PATIENCE, "{topic}: a member reads nothing");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// The longest gaps since `from` in the partitions that still have records after `last`, until `end`.
    fn gaps_of_those_that_stay(&self, from: Instant, last: Instant, end: Instant) -> Vec<Duration> {
        let arrivals = self.arrivals.lock().unwrap();
        let stay = arrivals.values().filter(|times| times.last().is_some_and(|time| *time > last));
        stay.map(|times| longest_gap(times, from, end)).collect()
    }

    /// The longest time since `from` without any record, until `end`.
    fn longest_gap(&self, from: Instant, end: Instant) -> Duration {
        let mut times: Vec<Instant> = self.arrivals.lock().unwrap().values().flatten().copied().collect();
        times.sort_unstable();
        longest_gap(&times, from, end)
    }
}

fn longest_gap(times: &[Instant], from: Instant, end: Instant) -> Duration {
    let times: Vec<Instant> = times.iter().copied().chain([end]).collect();
    let gaps = times.windows(2).filter(|pair| pair[1] > from);
    gaps.map(|pair| pair[1].saturating_duration_since(pair[0])).max().unwrap_or_default()
}

/// What a group has seen while a third member joined.
struct Joined {
    /// The longest gap of each partition that stayed with the first member.
    of_those_that_stay: Vec<Duration>,
    /// The longest time in which the first member got no record at all.
    of_all: Duration,
    /// Partitions that the first member had to let go of, and the slow one.
    moved: (usize, usize),
}

/// Lets a third member join a group of two, of which one is slow.
fn join(topic: &str, start: impl Fn(&str, Member)) -> Joined {
    let ended = Arc::new(AtomicBool::new(false));
    let member = |is_slow| Member { ended: ended.clone(), is_slow, ..Member::default() };
    let [first, slow, third] = [false, true, false].map(member);
    for member in [&first, &slow] {
        start(topic, member.clone());
        member.wait_for_records(topic);
    }
    std::thread::sleep(QUIET);
    let revoked = || (first.revoked.load(Ordering::SeqCst), slow.revoked.load(Ordering::SeqCst));
    let (before, joins) = (revoked(), Instant::now());
    start(topic, third.clone());
    third.wait_for_records(topic);
    // In some protocols the new member gets its first partition before the slow one has let go.
    while slow.revoked.load(Ordering::SeqCst) == before.1 {
        assert!(joins.elapsed() < PATIENCE, "{topic}: the slow member lets go of nothing");
        std::thread::sleep(Duration::from_millis(10));
    }
    std::thread::sleep(SLOW);
    let last = Instant::now();
    std::thread::sleep(QUIET);
    let end = Instant::now();
    ended.store(true, Ordering::SeqCst);
    let after = revoked();
    Joined {
        of_those_that_stay: first.gaps_of_those_that_stay(joins, last, end),
        of_all: first.longest_gap(joins, end),
        moved: (after.0 - before.0, after.1 - before.1),
    }
}

/// A member of ours.
fn start_ours(address: &str, protocol: Protocol, topic: &str, member: Member) {
    let mut config = ConsumerConfig::new(address, topic, &[topic]);
    config.properties = vec![protocol.property()];
    // Members notice a rebalance within a tenth of it.
    config.session_timeout = Duration::from_secs(6);
    let mut consumer = Consumer::start(&config).unwrap();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            while !member.has_ended() {
                match tokio::time::timeout(Duration::from_millis(100), consumer.next()).await {
                    Ok(Event::Assigned(assignment)) => {
                        let starts = vec![StartAt::NewGroup; assignment.partitions.len()];
                        assignment.start(starts);
                    }
                    Ok(Event::Record(record)) => member.add(record.at.partition),
                    Ok(Event::Revoked(revoked)) => member.lets_go(revoked.partitions.len()),
                    Ok(Event::Ended(error)) => panic!("{error}"),
                    Ok(_) | Err(_) => {}
                }
            }
        });
    });
}

/// What librdkafka's own consumer calls before a rebalance.
struct Eager(Member);

impl ClientContext for Eager {}

impl ConsumerContext for Eager {
    fn pre_rebalance(&self, _: &BaseConsumer<Self>, rebalance: &Rebalance<'_>) {
        if let Rebalance::Revoke(partitions) = rebalance {
            self.0.lets_go(partitions.count());
        }
    }
}

fn start_eager(broker: &Broker, topic: &str, member: Member) {
    let mut config = broker.config();
    config.set("group.id", topic).set("partition.assignment.strategy", "range");
    config.set("auto.offset.reset", "earliest").set("heartbeat.interval.ms", "300");
    let consumer: BaseConsumer<Eager> = config.create_with_context(Eager(member.clone())).unwrap();
    consumer.subscribe(&[topic]).unwrap();
    std::thread::spawn(move || {
        while !member.has_ended() {
            if let Some(Ok(record)) = consumer.poll(Duration::from_millis(100)) {
                member.add(record.partition());
            }
        }
    });
}

fn interrupts_only_what_moves(broker: &Broker) {
    let address = broker.address().to_string();
    let filling = Arc::new(AtomicBool::new(true));
    for topic in TOPICS {
        broker.create_topic(topic, PARTITIONS);
    }
    let fill = {
        let (filling, producer) = (filling.clone(), broker.config().create::<FutureProducer>().unwrap());
        std::thread::spawn(move || {
            while filling.load(Ordering::SeqCst) {
                for (topic, partition) in
                    TOPICS.into_iter().flat_map(|topic| (0..PARTITIONS).map(move |p| (topic, p)))
                {
                    let record = FutureRecord::<(), _>::to(topic).partition(partition).payload("x");
                    drop(producer.send_result(record));
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        })
    };
    let ours = |protocol| {
        let address = address.clone();
        move |topic: &str, member| start_ours(&address, protocol, topic, member)
    };
    let sticky = join("sticky", ours(Protocol::Classic));
    let by_broker = join("by-broker", ours(Protocol::Consumer));
    let eager = join("eager", |topic, member| start_eager(broker, topic, member)).of_all;
    filling.store(false, Ordering::SeqCst);
    fill.join().unwrap();
    let gaps = [&sticky, &by_broker].map(|joined| {
        assert_eq!(joined.moved, (1, 1), "only what has to move");
        assert_eq!(joined.of_those_that_stay.len(), 2, "two partitions stay, and are read");
        joined.of_those_that_stay.iter().copied().max().unwrap_or_default()
    });
    println!(
        "longest gap of a partition that stays, while a member joins and another one takes {} ms to let go: {} ms sticky, {} ms \
         assigned by the broker, {} ms eager",
        SLOW.as_millis(),
        gaps[0].as_millis(),
        gaps[1].as_millis(),
        eager.as_millis()
    );
    assert!(eager >= SLOW / 2, "the slow member was not waited for: this shows nothing");
    assert!(gaps.iter().all(|gap| *gap < SLOW), "records of partitions that stay waited for the slow member");
}
