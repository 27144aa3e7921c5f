//! Flaws that an audit of krafka's source found, on a real broker: each case says what was seen when it was written, and fails when
//! that changes. What our clients do in the same place is shown beside it, or in the case that is named.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use libtest_mimic::Completion;
use rdkafka::producer::{FutureProducer, FutureRecord};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::krafka::{Krafka, PROGRAM};
use crate::producer::committed_offsets;
use crate::{Case, long};

pub fn cases() -> Vec<Case> {
    vec![
        long("krafka_two_members_own_a_partition", || audited(two_owners)),
        long("krafka_an_error_of_an_offset_resets_it", || audited(silent_reset)),
        long("an_error_of_an_offset_leaves_no_record_out", || {
            error_of_an_offset(&BROKER);
            Completion::Completed
        }),
        long("krafka_a_dropped_poll_loses_a_rebalance", || audited(dropped_poll)),
        long("krafka_an_empty_commit_is_fatal", || audited(empty_commit)),
        long("krafka_a_stopped_broker_behind_tls", || audited(stopped_behind_tls)),
        long("krafka_a_late_produce_below_transaction_version_2", || skipped().unwrap_or_else(late_produce)),
    ]
}

const REQUEST_TIMEOUT_MS: u32 = 3_000;
/// Heartbeats of a member in which a change of its assignment has arrived, and has been answered.
const HEARTBEATS: u64 = 8;

/// One broker for these cases, whose members send a heartbeat every second.
static BROKER: LazyLock<Broker> = LazyLock::new(|| {
    Broker::start_with(&[
        "group.consumer.min.heartbeat.interval.ms=1000",
        "group.consumer.heartbeat.interval.ms=1000",
    ])
});

fn skipped() -> Option<Completion> {
    PROGRAM.as_ref().err().map(Completion::ignored_with)
}

fn audited(case: fn(&Broker)) -> Completion {
    if let Some(skipped) = skipped() {
        return skipped;
    }
    case(&BROKER);
    Completion::Completed
}

fn krafka(broker: &Broker, client: &str) -> Krafka {
    Krafka::start(&broker.proxied().to_string(), client, REQUEST_TIMEOUT_MS, &[])
}

/// A topic of two partitions with a record in each, `a` and `b`.
fn filled(broker: &Broker, topic: &str) {
    broker.create_topic(topic, 2);
    write(broker, topic, 0, "a");
    write(broker, topic, 1, "b");
}

fn write(broker: &Broker, topic: &str, partition: i32, value: &str) {
    let producer: FutureProducer = broker.config().create().unwrap();
    let record = FutureRecord::<(), str>::to(topic).partition(partition).payload(value);
    broker.block_on(producer.send(record, PATIENCE)).unwrap();
}

/// W1. A member acknowledges the newest assignment that it was told, not the one that it has applied: while its listener runs, another
/// member joins; then both have the records of partition 1, and the broker takes the offsets of both.
///
/// Ours: `a_handler_that_outlasts_the_revocation_commits_nothing`.
fn two_owners(broker: &Broker) {
    let topic = "audit-owners";
    filled(broker, topic);
    broker.create_topic("audit-owners-out", 1);
    let heartbeats =
        broker.proxy().inject(Match::answer_to("Heartbeat audit-owners-1"), Action::Delay(Duration::ZERO));
    let (mut one, mut other) = (krafka(broker, "audit-owners-1"), krafka(broker, "audit-owners-2"));
    for member in [&mut one, &mut other] {
        member.ask(&format!("consumer {topic} {topic} kip848 earliest")).unwrap();
    }
    one.ask("hold assigned").unwrap();
    one.tell("poll 60000");
    one.event("assigned [0, 1]");
    // The other one is a member when its poll returns.
    other.ask("poll 200").unwrap();
    let told = heartbeats.count() + HEARTBEATS;
    broker.block_on(heartbeats.wait_for(told));
    one.tell("go");
    let records = one.answer().unwrap();
    assert!(records.contains("1/b"), "the first member has the record of partition 1: {records}");
    let records = other.poll_until(|records, _| !records.is_empty());
    assert!(records.contains("1/b"), "the second member has it too: {records}");
    for (number, member) in [&mut other, &mut one].into_iter().enumerate() {
        member.ask(&format!("producer audit-owners-{number} 100")).unwrap();
        member.ask("begin").unwrap();
        member.ask("send audit-owners-out 0 b").unwrap();
        member.ask(&format!("offset {topic} 1 1")).unwrap();
        member.ask("commit").unwrap();
    }
    let seen = broker.read("audit-owners-out", Isolation::Committed);
    assert_eq!(seen, ["b", "b"], "the output is there twice");
    heartbeats.remove();
}

/// W2. An error of one partition in the answer to OffsetFetch is taken for "never committed": the default is then the end of the
/// topic, and the records in between are not read.
fn silent_reset(broker: &Broker) {
    let topic = "audit-reset";
    broker.create_topic(topic, 1);
    for value in ["r0", "r1", "r2"] {
        write(broker, topic, 0, value);
    }
    let mut member = krafka(broker, "audit-reset-1");
    member.ask(&format!("consumer {topic} {topic} classic earliest")).unwrap();
    member.poll_until(|records, _| !records.is_empty());
    member.ask("producer audit-reset 100").unwrap();
    member.ask("begin").unwrap();
    member.ask(&format!("offset {topic} 0 1")).unwrap();
    member.ask("commit").unwrap();
    assert_eq!(committed_offsets(broker, topic, topic, 1), [Some(1)]);
    drop(member);
    let changed = broker
        .proxy()
        .change(Match::answer_to("OffsetFetch audit-reset-2"), |version, frame| with_error(version, frame))
        .times(1);
    let mut member = krafka(broker, "audit-reset-2");
    member.ask(&format!("consumer {topic} {topic} classic latest")).unwrap();
    member.poll_until(|_, assignment| assignment == "[0]");
    broker.block_on(changed.wait_for(1));
    member.ask("poll 1000").unwrap();
    write(broker, topic, 0, "r3");
    let records = member.poll_until(|records, _| !records.is_empty());
    assert_eq!(records, "0/r3", "r1 and r2 were not read");
}

struct Copier;

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        output
            .push(NewRecord { value: record.value.clone(), ..NewRecord::new("audit-error-out", "key", "") });
        Ok(())
    }
}

/// The same error for our processor: it reads what follows the committed offset, or ends.
fn error_of_an_offset(broker: &Broker) {
    let (topic, address) = ("audit-error", broker.proxied().to_string());
    broker.create_topic(topic, 1);
    broker.create_topic("audit-error-out", 1);
    for value in ["r0", "r1", "r2"] {
        write(broker, topic, 0, value);
    }
    let producer = || ProducerConfig::new(Connect::plain([&address]), topic);
    broker.block_on(async {
        let mut producer = Producer::connect(producer()).await.unwrap();
        producer.begin().unwrap();
        let group = GroupMetadata::without_member(topic);
        producer.offsets(group, [(TopicPartition::new(topic, 0), 1)]).unwrap();
        producer.commit().await.unwrap();
    });
    let before = ERRORS.load(Ordering::SeqCst);
    let _changed = broker
        .proxy()
        .change(Match::answer_to("OffsetFetch"), |version, frame| with_error(version, frame))
        .times(1);
    let ended = broker.block_on(async {
        let config =
            ProcessorConfig { batch_time_max: Duration::from_millis(50), ..ProcessorConfig::default() };
        let reader = ConsumerConfig::new(&address, topic, &[topic]);
        let client = KafkaClient::connect(&reader, producer(), &config).await.unwrap();
        let (end, ended) = tokio::sync::oneshot::channel::<()>();
        let run = tokio::spawn(Processor::new(config, client, Copier).run(async { drop(ended.await) }));
        let (start, read) = (Instant::now(), || broker.read("audit-error-out", Isolation::Committed));
        while !run.is_finished() && tokio::task::block_in_place(read).len() < 2 {
            assert!(start.elapsed() < PATIENCE, "it neither reads nor ends");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        drop(end);
        run.await.unwrap()
    });
    let seen = broker.read("audit-error-out", Isolation::Committed);
    println!("ours, with an error of its offset: {ended:?}, readers see {seen:?}");
    assert_eq!(ERRORS.load(Ordering::SeqCst), before + 1, "the error was not sent");
    assert!(seen == ["r1", "r2"] || (ended.is_err() && seen.is_empty()), "{seen:?}");
}

/// Answers that were changed.
static ERRORS: AtomicUsize = AtomicUsize::new(0);

/// UNKNOWN_TOPIC_ID instead of the offset 1 of partition 0, in an answer to OffsetFetch.
fn with_error(version: i16, frame: &mut [u8]) {
    const UNKNOWN_TOPIC_ID: i16 = 100;
    // Before version 6 of the request lengths have two bytes.
    assert!(version >= 6, "version {version} of the answer");
    let partition = [&0_i32.to_be_bytes()[..], &1_i64.to_be_bytes()].concat();
    let place = frame.windows(partition.len()).position(|bytes| bytes == partition);
    let offset = place.expect("the answer has the offset") + 4;
    // Between the offset and the error are the leader's epoch, and a text that begins with its length and one.
    let text = offset + 8 + 4;
    let error = text + usize::from(frame[text].max(1));
    frame[offset..offset + 8].copy_from_slice(&(-1_i64).to_be_bytes());
    frame[error..error + 2].copy_from_slice(&UNKNOWN_TOPIC_ID.to_be_bytes());
    ERRORS.fetch_add(1, Ordering::SeqCst);
}

/// W5. `poll` is documented as cancel safe. Dropped while its listener is told of a revocation, the revocation is forgotten: the
/// partition does not get to its new owner, although the member polls again.
fn dropped_poll(broker: &Broker) {
    assert!(moves(broker, false), "without a dropped poll the partition moves");
    assert!(!moves(broker, true), "the partition moved: not reproduced");
}

/// Whether a partition moves to a member that joins.
fn moves(broker: &Broker, drops: bool) -> bool {
    let topic = format!("audit-drop-{drops}");
    filled(broker, &topic);
    let (mut one, mut other) = (krafka(broker, &format!("{topic}-1")), krafka(broker, &format!("{topic}-2")));
    for member in [&mut one, &mut other] {
        member.ask(&format!("consumer {topic} {topic} kip848 earliest")).unwrap();
    }
    one.poll_until(|_, assignment| assignment == "[0, 1]");
    one.ask("hold revoked").unwrap();
    // It joins in its first poll.
    other.ask("poll 200").unwrap();
    if drops {
        let start = Instant::now();
        while !one.events.iter().any(|event| event.starts_with("event revoked")) {
            assert!(start.elapsed() < PATIENCE, "nothing is revoked");
            one.ask("poll-dropped-after 100").unwrap();
            other.ask("poll 50").unwrap();
        }
        one.ask("hold nothing").unwrap();
    } else {
        one.poll_until_event("revoked");
        one.tell("go");
        one.answer().unwrap();
        one.ask("hold nothing").unwrap();
    }
    let heartbeats = broker
        .proxy()
        .inject(Match::answer_to(format!("Heartbeat {topic}-1")), Action::Delay(Duration::ZERO));
    let mut has_moved = false;
    while !has_moved && heartbeats.count() < HEARTBEATS {
        one.ask("poll 100").unwrap();
        other.ask("poll 100").unwrap();
        has_moved = other.ask("assignment").unwrap() != "[]";
    }
    println!(
        "{topic}: after {} heartbeats the first member has {}, the second one {}",
        heartbeats.count(),
        one.ask("assignment").unwrap(),
        other.ask("assignment").unwrap()
    );
    heartbeats.remove();
    has_moved
}

/// W6. A transaction that is begun and committed without a record makes the producer unusable.
///
/// Ours: `producer_commits_are_seen_and_aborts_are_not` has an empty one.
fn empty_commit(broker: &Broker) {
    let mut member = krafka(broker, "audit-empty");
    member.ask("producer audit-empty 100").unwrap();
    member.ask("begin").unwrap();
    let error = member.ask("commit").unwrap_err();
    println!("krafka, an empty commit: {error}");
    assert_eq!(member.ask("state").unwrap(), "Fatal", "{error}");
}

/// W3. A connection with TLS is closed by a message to the broker, which waits without a bound while the broker takes nothing.
///
/// Not reproduced: with 21 MB under way to a stopped broker, a send ends with an error when its time is over.
fn stopped_behind_tls(broker: &Broker) {
    let (topic, partitions) = ("audit-tls", 24);
    broker.create_topic(topic, partitions);
    let authority = broker.tls().authority().display().to_string();
    let address = broker.secured("TLS").to_string();
    let mut member = Krafka::start(&address, topic, REQUEST_TIMEOUT_MS, &[&authority]);
    member.ask("producer audit-tls 100").unwrap();
    member.ask("begin").unwrap();
    member.ask("send audit-tls 0 before").unwrap();
    broker.pause();
    // More than the buffers of the connection take.
    member.ask(&format!("enqueue-many {topic} {partitions} 900000")).unwrap();
    let sent = member.ask("send-within 55 audit-tls late");
    broker.resume();
    println!("krafka, a send behind a stopped broker, with 45 s to deliver it: {sent:?}");
    assert!(sent.is_err_and(|error| error.contains("timed out")), "not reproduced when this was written");
}

/// W4. Below transaction version 2, a Produce that is delayed past the abort of its transaction may be written into the next one.
///
/// Not reproduced: the next transaction has to be aborted because of a sequence that is missing, and readers see neither record.
/// Ours: refused before the first record, `transaction_version_0_is_refused_until_it_is_upgraded`.
fn late_produce() -> Completion {
    let broker = Broker::start_transaction_version(1);
    let topic = "audit-late";
    broker.create_topic(topic, 1);
    let hold = || broker.proxy().inject(Match::request("Produce audit-late"), Action::Hold).times(1);
    let answers =
        broker.proxy().inject(Match::answer_to("Produce audit-late"), Action::Delay(Duration::ZERO));
    let mut member = krafka(&broker, topic);
    let version = member.ask(&format!("producer {topic} 30000")).unwrap();
    println!("krafka has {version}");
    member.ask("begin").unwrap();
    let late = hold();
    member.ask(&format!("enqueue {topic} 0 A")).unwrap();
    broker.block_on(late.wait_for(1));
    // The request has no answer in time, and is to be repeated much later.
    std::thread::sleep(Duration::from_millis(u64::from(REQUEST_TIMEOUT_MS)) + Duration::from_secs(2));
    member.ask("abort").unwrap();
    member.ask("begin").unwrap();
    let next = hold();
    member.tell(&format!("send {topic} 0 B"));
    broker.block_on(next.wait_for(1));
    late.release();
    broker.block_on(answers.wait_for(1));
    next.release();
    let sent = member.answer();
    let ended = member.ask("commit");
    let seen = broker.read(topic, Isolation::Committed);
    println!("krafka sent B: {sent:?}, committed: {ended:?}, readers see {seen:?}");
    assert!(!seen.contains(&"A".to_owned()), "not reproduced when this was written");
    assert!(sent.is_err() && ended.is_err(), "B is not written");
    Completion::Completed
}
