//! Processors as processes, which are killed, stopped, woken, started and ended while a read_committed reader runs: each output
//! once, in order, and the offsets match.
//!
//! This binary is also such a process, when its environment says so.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match, Process};
use hapax_kafka::admin::OpenTransaction;
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig, ProducerError};
use hapax_kafka::wire::Connect;
use rdkafka::admin::{AdminClient, AdminOptions, NewPartitions};
use rdkafka::client::DefaultClientContext;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, alone, shared};

pub fn cases() -> Vec<Case> {
    vec![
        alone("members_join_leave_and_die_and_each_output_is_there_once", join_leave_and_die),
        alone("a_crash_of_the_broker_repeats_nothing", the_broker_crashes),
        shared("a_woken_zombie_is_fenced_and_names_both_identities", |broker| {
            a_woken_zombie_is_fenced(broker, "zombie", Transactions::InTurn);
        }),
        shared("a_woken_zombie_with_overlapping_transactions_is_fenced", |broker| {
            a_woken_zombie_is_fenced(broker, "zombie-overlap", Transactions::Overlap);
        }),
        shared("a_death_after_an_unanswered_commit_repeats_nothing", |broker| {
            death_after_an_unanswered_commit(broker, "unanswered-death", Transactions::InTurn);
        }),
        shared("a_death_with_overlapping_transactions_repeats_nothing", |broker| {
            death_after_an_unanswered_commit(broker, "overlap-death", Transactions::Overlap);
        }),
        shared("a_processor_finds_partitions_that_are_added", partitions_are_added),
    ]
}

const CHILD: &str = "HAPAX_TEST_MEMBER";
const SESSION: Duration = Duration::from_secs(5);
/// Longer than a batch may take.
const TRANSACTION: Duration = Duration::from_secs(12);
/// A process that was fenced ends with this code.
const FENCED: i32 = 3;

/// How the transactions of a process follow each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transactions {
    InTurn,
    Overlap,
}

pub fn is_child() -> bool {
    std::env::var_os(CHILD).is_some()
}

/// Processes until its standard input ends; then it leaves the group. Its environment has the broker's address, the topic, the
/// transactional id, how long it takes for a record, whether transactions overlap, and the time of a transaction.
pub fn run_child() {
    let settings = std::env::var(CHILD).unwrap();
    let settings: Vec<&str> = settings.split(' ').collect();
    let [address, topic, id, ms, overlap, seconds] = settings[..] else { panic!("{settings:?}") };
    let pause = Duration::from_millis(ms.parse().unwrap());
    let transaction = Duration::from_secs(seconds.parse().unwrap());
    let config = ProcessorConfig { overlap: overlap.parse().unwrap(), ..config() };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (end, ended) = tokio::sync::watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::read_to_string(std::io::stdin());
        end.send_replace(true);
    });
    let code = runtime.block_on(async {
        loop {
            let copier = Copier::new(topic, pause);
            let mut ended = ended.clone();
            let client = match client(address, topic, id, &config, transaction).await {
                Ok(client) => client,
                Err(error) => {
                    eprintln!("not started: {error}");
                    continue;
                }
            };
            let processor = Processor::new(config.clone(), client, copier);
            match processor.run(async move { drop(ended.wait_for(|ended| *ended).await) }).await {
                Ok(_) => return 0,
                Err(ProcessorError::Producer(error @ ProducerError::Fenced { .. })) => {
                    println!("\n{error}");
                    return FENCED;
                }
                Err(error) => eprintln!("ended: {error}"),
            }
        }
    });
    std::process::exit(code);
}

fn config() -> ProcessorConfig {
    ProcessorConfig {
        batch_records_max: 20,
        batch_time_max: Duration::from_millis(300),
        handler_timeout: Duration::from_secs(5),
        attempts_max: 1_000,
        ..ProcessorConfig::default()
    }
}

async fn client(
    address: &str,
    topic: &str,
    id: &str,
    config: &ProcessorConfig,
    transaction: Duration,
) -> Result<KafkaClient, ProcessorError> {
    let mut producer = ProducerConfig::new(Connect::plain(address.split(',')), id);
    (producer.delivery_timeout, producer.transaction_timeout) = (PATIENCE, transaction);
    producer.connect.request_timeout = Duration::from_secs(5);
    // Outputs are sent every few records, so that a batch that is aborted has left some of them in the log.
    producer.buffer_bytes_max = 100;
    let mut consumer = ConsumerConfig::new(address, &format!("{topic}-group"), &[topic]);
    consumer.session_timeout = SESSION;
    consumer.properties = vec![("topic.metadata.refresh.interval.ms".to_owned(), "500".to_owned())];
    KafkaClient::connect(&consumer, producer, config).await
}

/// Copies numbers to the same partition of the output. Now and then it fails, and its batch is aborted.
struct Copier {
    output: String,
    pause: Duration,
    handled: usize,
}

impl Copier {
    fn new(topic: &str, pause: Duration) -> Self {
        Self { output: format!("{topic}-out"), pause, handled: 0 }
    }
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        tokio::time::sleep(self.pause).await;
        let (partition, value) = (Some(record.at.partition), record.value.clone());
        output.push(NewRecord { partition, value, ..NewRecord::new(&self.output, "key", "") });
        self.handled += 1;
        if self.handled.is_multiple_of(53) { Err("now and then".into()) } else { Ok(()) }
    }
}

pub fn start(address: &str, topic: &str, id: &str, ms: u64, transactions: Transactions) -> Process {
    start_with(address, topic, id, ms, transactions, TRANSACTION)
}

/// The same with another time for a transaction.
fn start_with(
    address: &str,
    topic: &str,
    id: &str,
    ms: u64,
    transactions: Transactions,
    transaction: Duration,
) -> Process {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let (overlap, seconds) = (transactions == Transactions::Overlap, transaction.as_secs());
    Process::start(command.env(CHILD, format!("{address} {topic} {id} {ms} {overlap} {seconds}"))).unwrap()
}

/// Every other member of a group has overlapping transactions.
pub fn kind_of(member: usize) -> Transactions {
    if member.is_multiple_of(2) { Transactions::InTurn } else { Transactions::Overlap }
}

/// Creates the topics, and fills the input with numbers from 0; each partition has its numbers in order.
pub fn fill(broker: &Broker, topic: &str, partitions: usize, count: usize) {
    let number = i32::try_from(partitions).unwrap();
    broker.create_topic(topic, number);
    broker.create_topic(&format!("{topic}-out"), number);
    send(broker, topic, partitions, 0..count);
}

fn send(broker: &Broker, topic: &str, partitions: usize, numbers: std::ops::Range<usize>) {
    broker.block_on(async {
        let connect = Connect::plain(broker.addresses().split(','));
        let mut producer =
            Producer::connect(ProducerConfig::new(connect, &format!("{topic}-fill"))).await.unwrap();
        producer.begin().unwrap();
        for number in numbers {
            let partition = Some(i32::try_from(number % partitions).unwrap());
            let record = NewRecord { partition, ..NewRecord::new(topic, "key", number.to_string()) };
            producer.send(record).await.unwrap();
        }
        producer.commit().await.unwrap();
    });
}

/// Reads the output at read_committed all the time.
pub struct Reader<'b> {
    broker: &'b Broker,
    output: String,
    consumer: BaseConsumer,
    partitions: usize,
    /// Numbers by partition, in the order of the log.
    seen: BTreeMap<i32, Vec<usize>>,
}

impl<'b> Reader<'b> {
    pub fn new(broker: &'b Broker, topic: &str, partitions: usize) -> Self {
        let mut config = broker.config();
        config.set("group.id", "reader").set("isolation.level", "read_committed");
        let consumer: BaseConsumer = config.set("enable.auto.commit", "false").create().unwrap();
        let (output, mut list) = (format!("{topic}-out"), TopicPartitionList::new());
        for partition in 0..i32::try_from(partitions).unwrap() {
            list.add_partition_offset(&output, partition, Offset::Beginning).unwrap();
        }
        consumer.assign(&list).unwrap();
        Self { broker, output, consumer, partitions, seen: BTreeMap::new() }
    }

    fn count(&self) -> usize {
        self.seen.values().map(Vec::len).sum()
    }

    /// Reads until there are this many; each one is the next of its partition.
    pub fn read_until(&mut self, count: usize, members: &[&Process]) {
        let start = Instant::now();
        while self.count() < count {
            let logs = || members.iter().map(|member| member.log()).collect::<Vec<_>>().join("\n--\n");
            assert!(
                start.elapsed() < PATIENCE * 2,
                "{} of {count} outputs were read; {}; {}",
                self.count(),
                self.broker.explain(&self.output),
                logs()
            );
            let Some(Ok(record)) = self.consumer.poll(Duration::from_millis(100)) else { continue };
            let number: usize = String::from_utf8_lossy(record.payload().unwrap()).parse().unwrap();
            let seen = self.seen.entry(record.partition()).or_default();
            let expected = usize::try_from(record.partition()).unwrap() + seen.len() * self.partitions;
            let (partition, explain) = (record.partition(), || self.broker.explain(&self.output));
            assert_eq!(number, expected, "{partition}: once and in order; {}; {}", explain(), logs());
            seen.push(number);
        }
    }

    /// Nothing follows, aborts did happen, and the group's offsets are the input's ends.
    pub fn check_end(&self, topic: &str, count: usize, aborts: bool) {
        let (broker, output) = (self.broker, self.output.as_str());
        assert_eq!(broker.read(output, Isolation::Committed).len(), count, "nothing behind the last one");
        let all = broker.read(output, Isolation::Uncommitted).len();
        assert!(!aborts || all > count, "no batch was aborted: the run proves nothing");
        let group = format!("{topic}-group");
        let committed = committed_offsets(broker, &group, topic, i32::try_from(self.partitions).unwrap());
        let consumer: BaseConsumer = broker.config().create().unwrap();
        for (partition, committed) in (0..).zip(committed) {
            // Behind the records is the marker of their transaction.
            let end = consumer.fetch_watermarks(topic, partition, PATIENCE).unwrap().1 - 1;
            assert_eq!(committed, Some(end), "partition {partition}");
        }
        println!("{topic}: {count} outputs, {} of them written in vain", all - count);
    }
}

fn join_leave_and_die(broker: &Broker) {
    let (topic, partitions, count) = ("members", 6, 2_400);
    fill(broker, topic, partitions, count);
    let mut reader = Reader::new(broker, topic, partitions);
    let address = broker.address().to_string();
    let member = |number: usize| start(&address, topic, &format!("{topic}-{number}"), 10, kind_of(number));
    // Alone, then two, then three.
    let mut zero = member(0);
    reader.read_until(100, &[&zero]);
    let mut one = member(1);
    reader.read_until(300, &[&zero, &one]);
    let mut two = member(2);
    reader.read_until(600, &[&zero, &one, &two]);
    // One dies, and comes again; another one leaves, and comes again.
    one.kill();
    reader.read_until(800, &[&zero, &two]);
    one = member(1);
    drop(two.take_stdin());
    assert!(two.wait().success(), "{}", two.log());
    reader.read_until(1_000, &[&zero, &one]);
    two = member(2);
    reader.read_until(1_150, &[&zero, &one, &two]);
    // One is stopped past its session and its transaction, and woken: others have its partitions.
    zero.pause();
    std::thread::sleep(SESSION.max(TRANSACTION) + Duration::from_secs(1));
    reader.read_until(1_400, &[&one, &two]);
    zero.resume();
    reader.read_until(1_600, &[&zero, &one, &two]);
    two.kill();
    reader.read_until(count, &[&zero, &one]);
    for member in [&mut zero, &mut one] {
        drop(member.take_stdin());
        assert!(member.wait().success(), "{}", member.log());
    }
    reader.check_end(topic, count, true);
}

/// The coordinators go and come, by a crash and in order, while transactions are open. The members are stopped meanwhile, so they send no
/// end of a transaction; nothing is timed out.
fn the_broker_crashes(broker: &Broker) {
    let (topic, partitions, count) = ("crashed", 6, 2_000);
    fill(broker, topic, partitions, count);
    let mut reader = Reader::new(broker, topic, partitions);
    let address = broker.address().to_string();
    let mut members = [0, 1, 2].map(|number| {
        let id = format!("{topic}-{number}");
        start_with(&address, topic, &id, 10, kind_of(number), PATIENCE * 2)
    });
    for (step, signal) in ["KILL", "TERM", "KILL"].into_iter().enumerate() {
        reader.read_until(300 + 400 * step, &members.each_ref());
        let is_ours = |open: &OpenTransaction| open.transactional_id.starts_with(topic);
        members.iter().for_each(Process::pause);
        while !broker.settled().iter().any(is_ours) {
            members.iter().for_each(Process::resume);
            reader.read_until(reader.count() + 10, &members.each_ref());
            members.iter().for_each(Process::pause);
        }
        let open = broker.restart(signal).into_iter().filter(is_ours).count();
        println!("{signal} of the broker with {open} open transactions");
        members.iter().for_each(Process::resume);
    }
    reader.read_until(count, &members.each_ref());
    for member in &mut members {
        drop(member.take_stdin());
        assert!(member.wait().success(), "{}", member.log());
    }
    reader.check_end(topic, count, true);
}

/// A process is stopped while its transaction is open, and woken after another one with its id has worked on.
fn a_woken_zombie_is_fenced(broker: &Broker, topic: &str, transactions: Transactions) {
    let (partitions, count) = (2, 1_200);
    fill(broker, topic, partitions, count);
    let mut reader = Reader::new(broker, topic, partitions);
    let address = broker.address().to_string();
    let mut zombie = start(&address, topic, topic, 10, transactions);
    reader.read_until(60, &[&zombie]);
    zombie.pause();
    let mut successor = start(&address, topic, topic, 10, transactions);
    reader.read_until(200, &[&successor]);
    zombie.resume();
    let status = zombie.wait();
    assert_eq!(status.code(), Some(FENCED), "{}", zombie.log());
    let words = zombie.wait_for_line("was taken over");
    let identities = words.matches("producer ").count();
    let is_named = |suffix: &str| words.contains(&format!("'{topic}{suffix}'"));
    let is_other = transactions == Transactions::Overlap && (is_named(".2") || is_named(".3"));
    assert!((is_named("") || is_other) && identities == 2, "{words}");
    reader.read_until(count, &[&successor]);
    drop(successor.take_stdin());
    assert!(successor.wait().success(), "{}", successor.log());
    reader.check_end(topic, count, true);
}

/// The broker has committed, the process does not know it, and is killed.
fn death_after_an_unanswered_commit(broker: &Broker, topic: &str, transactions: Transactions) {
    let (partitions, count) = (2, 120);
    fill(broker, topic, partitions, count);
    let mut reader = Reader::new(broker, topic, partitions);
    let label = format!("EndTxn {topic}");
    // Transactions of the filling producer have another id that begins alike, and have ended.
    let unanswered = broker.proxy().inject(Match::answer_to(label.as_str()), Action::Drop).after(2).times(1);
    let mut first = start(&broker.proxied().to_string(), topic, topic, 5, transactions);
    let begun = Instant::now();
    while unanswered.count() == 0 {
        assert!(begun.elapsed() < PATIENCE, "no commit: {}", first.log());
        std::thread::sleep(Duration::from_millis(20));
    }
    first.kill();
    unanswered.remove();
    let mut second = start(&broker.address().to_string(), topic, topic, 1, transactions);
    reader.read_until(count, &[&second]);
    drop(second.take_stdin());
    assert!(second.wait().success(), "{}", second.log());
    reader.check_end(topic, count, false);
}

fn partitions_are_added(broker: &Broker) {
    let topic = "grows";
    fill(broker, topic, 1, 30);
    let mut reader = Reader::new(broker, topic, 1);
    let mut member = start(&broker.address().to_string(), topic, topic, 1, Transactions::InTurn);
    reader.read_until(30, &[&member]);
    let admin: AdminClient<DefaultClientContext> = broker.config().create().unwrap();
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE)).request_timeout(Some(PATIENCE));
    let output = format!("{topic}-out");
    let more = [NewPartitions::new(topic, 3), NewPartitions::new(&output, 3)];
    for made in broker.block_on(admin.create_partitions(&more, &options)).unwrap() {
        made.unwrap();
    }
    // The numbers of the first partition continue behind its 30; the others have only new ones.
    send(broker, topic, 3, 0..90);
    let start = Instant::now();
    let seen = loop {
        let seen = broker.read(&output, Isolation::Committed);
        if seen.len() >= 120 {
            break seen;
        }
        assert!(start.elapsed() < PATIENCE, "{} of 120: {}", seen.len(), member.log());
        std::thread::sleep(Duration::from_millis(200));
    };
    drop(member.take_stdin());
    assert!(member.wait().success(), "{}", member.log());
    let expected = (0..30).chain((0..3).flat_map(|first| (first..90).step_by(3)));
    assert_eq!(seen, expected.map(|number| number.to_string()).collect::<Vec<_>>());
}
