//! The transactional producer: what readers see of its transactions, when requests are late, lost or repeated.

use std::time::Duration;

use hapax_faults::{Action, Match};
use hapax_kafka::machine::State;
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::producer::{ErrorKind, NewRecord, Producer, ProducerConfig, ProducerError};
use hapax_kafka::wire::Connect;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::delayed_commit::{HeldCommit, Second};
use crate::{Case, alone, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("producer_commits_are_seen_and_aborts_are_not", commits_are_seen_and_aborts_are_not),
        shared("producer_keeps_the_order_of_many_batches", keeps_the_order_of_many_batches),
        shared("producer_delayed_commit_then_abort", |broker| delayed_commit(broker, Second::Aborts)),
        shared("producer_delayed_commit_then_commit", |broker| delayed_commit(broker, Second::Commits)),
        shared("producer_late_copy_of_endtxn", |broker| late_copies(broker, "EndTxn")),
        shared("producer_late_copy_of_produce", |broker| late_copies(broker, "Produce")),
        shared("producer_late_copy_of_offsets", |broker| late_copies(broker, "TxnOffsetCommit")),
        shared("producer_lost_requests_and_answers_are_repeated", lost_requests_and_answers),
        shared("producer_unanswered_commit_is_unknown", unanswered_commit_is_unknown),
        shared("producer_fencing_ends_the_loser", fencing_ends_the_loser),
        shared("producer_fencing_ends_an_idle_loser", fencing_ends_an_idle_loser),
        shared("producer_fencing_ends_a_loser_whose_initialisation_was_not_answered", |broker| {
            initialisation_before_a_successor(broker, "producer-init-open", false);
            initialisation_before_a_successor(broker, "producer-init-committed", true);
        }),
        shared(
            "producer_takes_no_initialisation_of_its_own_for_a_successor",
            own_initialisation_with_an_error,
        ),
        shared(
            "producer_fencing_ends_a_loser_that_repeats_its_initialisation",
            successor_while_it_initialises,
        ),
        shared("producer_continues_after_a_timed_out_transaction", continues_after_a_timed_out_transaction),
        shared("producer_refuses_what_the_broker_does_not_allow", refuses_what_the_broker_does_not_allow),
        alone("producer_commits_over_a_killed_broker", commits_over_a_killed_broker),
    ]
}

fn config(broker: &Broker, id: &str) -> ProducerConfig {
    let connect = Connect::plain([broker.proxied().to_string()]);
    let mut config = ProducerConfig::new(connect, id);
    config.delivery_timeout = PATIENCE;
    config.transaction_timeout = Duration::from_mins(5);
    config
}

async fn connect(broker: &Broker, id: &str) -> Producer {
    Producer::connect(config(broker, id)).await.unwrap()
}

/// Sends a record to partition 0 of the topic, and returns when it is written.
async fn send(producer: &mut Producer, topic: &str, value: &str) -> Result<(), ProducerError> {
    let record = NewRecord { partition: Some(0), ..NewRecord::new(topic, "key", value.to_owned()) };
    producer.send(record).await?;
    producer.flush().await
}

/// The next offset of the group that has the topic's name, for the commit.
fn offset(producer: &mut Producer, topic: &str, next: i64) {
    let group = GroupMetadata::without_member(topic);
    producer.offsets(group, [(TopicPartition::new(topic, 0), next)]).unwrap();
}

/// The committed offset of the group that has the topic's name.
fn committed(broker: &Broker, topic: &str) -> Option<i64> {
    committed_offsets(broker, topic, topic, 1)[0]
}

/// The committed offsets of a group in the first partitions of a topic. Transactions that are being ended are waited for.
pub fn committed_offsets(broker: &Broker, group: &str, topic: &str, partitions: i32) -> Vec<Option<i64>> {
    let mut config = broker.config();
    let consumer: BaseConsumer =
        config.set("group.id", group).set("isolation.level", "read_committed").create().unwrap();
    let mut list = TopicPartitionList::new();
    for partition in 0..partitions {
        list.add_partition(topic, partition);
    }
    let start = std::time::Instant::now();
    loop {
        assert!(start.elapsed() < PATIENCE, "no committed offsets of {group}");
        let Ok(found) = consumer.committed_offsets(list.clone(), PATIENCE) else { continue };
        let found = found.elements();
        if found.iter().all(|part| part.error().is_ok()) {
            let offset = |offset| if let Offset::Offset(offset) = offset { Some(offset) } else { None };
            return found.iter().map(|part| offset(part.offset())).collect();
        }
    }
}

async fn end(producer: &mut Producer, commit: bool) {
    if commit { producer.commit().await.unwrap() } else { producer.abort().await.unwrap() }
}

fn commits_are_seen_and_aborts_are_not(broker: &Broker) {
    let topic = "producer-basic";
    broker.create_topic(topic, 2);
    broker.block_on(async {
        let mut producer = connect(broker, topic).await;
        let first = producer.identity().unwrap();
        for (value, commits) in [("A", true), ("B", false), ("C", true)] {
            producer.begin().unwrap();
            for partition in 0..2 {
                let record = NewRecord {
                    partition: Some(partition),
                    headers: vec![("name".to_owned(), Some("value".into()))],
                    ..NewRecord::new(topic, "key", format!("{value}{partition}"))
                };
                producer.send(record).await.unwrap();
            }
            producer.flush().await.unwrap();
            offset(&mut producer, topic, if commits { 1 } else { 99 });
            end(&mut producer, commits).await;
        }
        // Nothing in it: no request, and the producer is ready.
        producer.begin().unwrap();
        producer.commit().await.unwrap();
        producer.begin().unwrap();
        producer.abort().await.unwrap();
        let last = producer.identity().unwrap();
        assert_eq!(last.epoch, first.epoch + 3, "each end of a transaction raises the epoch");
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["A0", "C0", "A1", "C1"]);
    assert_eq!(broker.read(topic, Isolation::Uncommitted), ["A0", "B0", "C0", "A1", "B1", "C1"]);
    assert_eq!(committed(broker, topic), Some(1));
}

fn keeps_the_order_of_many_batches(broker: &Broker) {
    let topic = "producer-order";
    broker.create_topic(topic, 3);
    let count = 2_000;
    broker.block_on(async {
        let mut config = config(broker, topic);
        config.batch_bytes_max = 4_000;
        config.buffer_bytes_max = 30_000;
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        for number in 0..count {
            let record = NewRecord { key: None, ..NewRecord::new(topic, "", format!("{number:05}")) };
            producer.send(record).await.unwrap();
        }
        producer.commit().await.unwrap();
    });
    let seen = broker.read(topic, Isolation::Committed);
    // Partition after partition, each in the order of its records.
    let falls = seen.windows(2).filter(|pair| pair[0] >= pair[1]).count();
    assert_eq!(falls, 2, "three partitions, each in order");
    let mut sorted = seen;
    sorted.sort();
    assert_eq!(sorted, (0..count).map(|number| format!("{number:05}")).collect::<Vec<_>>());
}

/// The schedule that breaks librdkafka's transactions.
fn delayed_commit(broker: &Broker, second: Second) {
    let topic = if second == Second::Aborts { "producer-held-aborts" } else { "producer-held-commits" };
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut config = config(broker, topic);
        config.connect.request_timeout = Duration::from_secs(3);
        let mut producer = Producer::connect(config).await.unwrap();
        let commit = HeldCommit::new(broker, topic);
        producer.begin().unwrap();
        send(&mut producer, topic, "A").await.unwrap();
        producer.commit().await.unwrap();
        producer.begin().unwrap();
        send(&mut producer, topic, "B").await.unwrap();
        commit.release().await;
        if second == Second::Commits {
            send(&mut producer, topic, "C").await.unwrap();
        }
        end(&mut producer, second == Second::Commits).await;
    });
    let expected: &[&str] = if second == Second::Commits { &["A", "B", "C"] } else { &["A"] };
    assert_eq!(broker.read(topic, Isolation::Committed), expected);
}

/// A copy of a request of the first transaction arrives when the second one is open.
fn late_copies(broker: &Broker, request: &str) {
    for (first, second) in [(true, true), (true, false), (false, true), (false, false)] {
        if request == "TxnOffsetCommit" && !first {
            // Offsets are sent with the commit only.
            continue;
        }
        let topic = format!("producer-late-{request}-{first}-{second}");
        broker.create_topic(&topic, 1);
        broker.block_on(async {
            let mut producer = connect(broker, &topic).await;
            let late = broker.proxy().inject(Match::request(format!("{request} {topic}")), Action::Repeat);
            producer.begin().unwrap();
            send(&mut producer, &topic, "A").await.unwrap();
            offset(&mut producer, &topic, 1);
            end(&mut producer, first).await;
            producer.begin().unwrap();
            send(&mut producer, &topic, "B").await.unwrap();
            late.wait_for(1).await;
            late.release();
            late.wait_for_repeated().await;
            send(&mut producer, &topic, "C").await.unwrap();
            offset(&mut producer, &topic, 2);
            end(&mut producer, second).await;
        });
        let (mut visible, mut next) = (Vec::new(), None);
        if first {
            visible.push("A");
            next = Some(1);
        }
        if second {
            visible.extend(["B", "C"]);
            next = Some(2);
        }
        assert_eq!(broker.read(&topic, Isolation::Committed), visible, "{topic}");
        assert_eq!(broker.read(&topic, Isolation::Uncommitted), ["A", "B", "C"], "{topic}");
        assert_eq!(committed(broker, &topic), next, "{topic}");
    }
}

/// Each request is lost once, and its answer once.
fn lost_requests_and_answers(broker: &Broker) {
    let topic = "producer-lost";
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut faults = Vec::new();
        for request in ["InitProducerId", "Produce", "TxnOffsetCommit", "EndTxn"] {
            let label = format!("{request} {topic}");
            for on in [Match::request(label.as_str()), Match::answer_to(label.as_str())] {
                faults.push(broker.proxy().inject(on, Action::Cut).times(1));
            }
        }
        let mut producer = connect(broker, topic).await;
        for (value, next) in [("A", 1), ("B", 2)] {
            producer.begin().unwrap();
            send(&mut producer, topic, value).await.unwrap();
            offset(&mut producer, topic, next);
            producer.commit().await.unwrap();
        }
        assert!(faults.iter().all(|fault| fault.count() == 1), "{faults:?}");
    });
    assert_eq!(broker.read(topic, Isolation::Uncommitted), ["A", "B"]);
    assert_eq!(broker.read(topic, Isolation::Committed), ["A", "B"]);
    assert_eq!(committed(broker, topic), Some(2));
}

/// The commit arrives and its answers do not; or the commit does not arrive. The caller cannot tell, the offset can.
fn unanswered_commit_is_unknown(broker: &Broker) {
    let names = ["producer-unknown-answer", "producer-unknown-request"];
    for name in names {
        broker.create_topic(name, 1);
    }
    let run = async |topic: &str, on: Match| {
        let mut config = config(broker, topic);
        config.transaction_timeout = Duration::from_secs(10);
        config.connect.request_timeout = Duration::from_secs(2);
        let mut producer = Producer::connect(config).await.unwrap();
        let fault = broker.proxy().inject(on, Action::Cut);
        producer.begin().unwrap();
        send(&mut producer, topic, "A").await.unwrap();
        offset(&mut producer, topic, 1);
        let error = producer.commit().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unknown, "{error}");
        assert_eq!(producer.state(), State::Unknown);
        assert_eq!(producer.abort().await.unwrap_err().kind(), ErrorKind::Fatal, "it is never aborted");
        assert_eq!(producer.begin().unwrap_err().kind(), ErrorKind::Fatal);
        fault.remove();
        producer.recover().await.unwrap();
        producer
    };
    let (mut answered, mut refused) = broker.block_on(async {
        tokio::join!(
            run(names[0], Match::answer_to(format!("EndTxn {}", names[0]))),
            run(names[1], Match::request(format!("EndTxn {}", names[1]))),
        )
    });
    assert_eq!(committed(broker, names[0]), Some(1), "it was committed");
    assert_eq!(committed(broker, names[1]), None, "it was aborted: A is taken again");
    broker.block_on(async {
        for (producer, topic, value, next) in
            [(&mut answered, names[0], "B", 2), (&mut refused, names[1], "A", 1)]
        {
            producer.begin().unwrap();
            send(producer, topic, value).await.unwrap();
            offset(producer, topic, next);
            producer.commit().await.unwrap();
        }
    });
    assert_eq!(broker.read(names[0], Isolation::Committed), ["A", "B"]);
    assert_eq!(broker.read(names[1], Isolation::Committed), ["A"]);
    assert_eq!(broker.read(names[1], Isolation::Uncommitted), ["A", "A"], "the first one was aborted");
}

/// A zombie wakes after its successor began, and tries everything.
/// The loser has no transaction open while its successor commits one, so the coordinator's state looks as if the loser's own
/// transaction had ended.
fn fencing_ends_an_idle_loser(broker: &Broker) {
    for (topic, flushes) in [("producer-idle-flush", true), ("producer-idle-commit", false)] {
        broker.create_topic(topic, 1);
        broker.block_on(async {
            let mut zombie = connect(broker, topic).await;
            let lost = zombie.identity().unwrap();
            let mut successor = connect(broker, topic).await;
            successor.begin().unwrap();
            send(&mut successor, topic, "B").await.unwrap();
            successor.commit().await.unwrap();
            let won = successor.identity().unwrap();
            zombie.begin().unwrap();
            offset(&mut zombie, topic, 1);
            let refused = if flushes {
                send(&mut zombie, topic, "A").await.unwrap_err()
            } else {
                let record = NewRecord { partition: Some(0), ..NewRecord::new(topic, "key", "A") };
                zombie.send(record).await.unwrap();
                zombie.commit().await.unwrap_err()
            };
            assert_eq!(refused.kind(), ErrorKind::Abortable, "{refused}");
            assert_fenced(&zombie.abort().await.unwrap_err(), topic, lost, won);
            successor.begin().unwrap();
            send(&mut successor, topic, "C").await.unwrap();
            successor.commit().await.unwrap();
        });
        assert_eq!(broker.read(topic, Isolation::Committed), ["B", "C"]);
    }
}

fn fencing_ends_the_loser(broker: &Broker) {
    let topic = "producer-fenced";
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut zombie = connect(broker, topic).await;
        zombie.begin().unwrap();
        send(&mut zombie, topic, "A").await.unwrap();
        offset(&mut zombie, topic, 1);
        let lost = zombie.identity().unwrap();
        let mut successor = connect(broker, topic).await;
        successor.begin().unwrap();
        send(&mut successor, topic, "B").await.unwrap();
        let won = successor.identity().unwrap();
        let error = zombie.commit().await.unwrap_err();
        if error.kind() == ErrorKind::Abortable {
            // Its offsets were refused; the abort tells why.
            let error = zombie.abort().await.unwrap_err();
            assert_fenced(&error, topic, lost, won);
        } else {
            assert_fenced(&error, topic, lost, won);
        }
        assert_eq!(zombie.state(), State::Fenced);
        assert_eq!(zombie.begin().unwrap_err().kind(), ErrorKind::Fatal);
        assert_eq!(zombie.recover().await.unwrap_err().kind(), ErrorKind::Fatal);
        send(&mut successor, topic, "C").await.unwrap();
        successor.commit().await.unwrap();
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["B", "C"]);
    assert_eq!(broker.read(topic, Isolation::Uncommitted), ["A", "B", "C"]);
    assert_eq!(committed(broker, topic), None);
}

fn assert_fenced(
    error: &ProducerError,
    id: &str,
    ours: hapax_kafka::machine::Identity,
    theirs: hapax_kafka::machine::Identity,
) {
    let ProducerError::Fenced { .. } = error else { panic!("not fenced: {error}") };
    let text = error.to_string();
    for part in [id.to_owned(), ours.to_string(), theirs.to_string()] {
        assert!(text.contains(&part), "{part} is not in: {text}");
    }
}

/// An initialisation of the loser was not answered, and then a successor has begun: the coordinator's identity is not that of the
/// initialisation.
fn initialisation_before_a_successor(broker: &Broker, topic: &str, commits: bool) {
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut loser = connect(broker, topic).await;
        let lost = loser.identity().unwrap();
        loser.begin().unwrap();
        send(&mut loser, topic, "A").await.unwrap();
        let label = format!("InitProducerId {topic}");
        let unanswered = broker.proxy().inject(Match::answer_to(label), Action::Cut);
        tokio::select! {
            done = loser.recover() => panic!("{done:?}"),
            () = unanswered.wait_for(1) => {}
        }
        unanswered.remove();
        let mut successor = connect(broker, topic).await;
        successor.begin().unwrap();
        send(&mut successor, topic, "B").await.unwrap();
        if commits {
            successor.commit().await.unwrap();
        }
        let won = successor.identity().unwrap();
        assert_fenced(&loser.recover().await.unwrap_err(), topic, lost, won);
        assert_eq!(loser.state(), State::Fenced);
        if commits {
            successor.begin().unwrap();
        }
        send(&mut successor, topic, "C").await.unwrap();
        successor.commit().await.unwrap();
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["B", "C"]);
}

/// The loser repeats an initialisation that was not answered, and meanwhile a successor begins.
fn successor_while_it_initialises(broker: &Broker) {
    let topic = "producer-init-repeated";
    broker.create_topic(topic, 1);
    broker.block_on(async {
        let mut loser = connect(broker, topic).await;
        let lost = loser.identity().unwrap();
        loser.begin().unwrap();
        send(&mut loser, topic, "A").await.unwrap();
        let label = format!("InitProducerId {topic}");
        let unanswered = broker.proxy().inject(Match::answer_to(label.as_str()), Action::Cut).times(1);
        let repeated = broker.proxy().inject(Match::request(label), Action::Cut).after(1);
        let begun = async {
            repeated.wait_for(1).await;
            let connect = Connect::plain([broker.address().to_string()]);
            let mut successor =
                Producer::connect(ProducerConfig { connect, ..config(broker, topic) }).await.unwrap();
            successor.begin().unwrap();
            send(&mut successor, topic, "B").await.unwrap();
            repeated.remove();
            successor
        };
        let (recovered, mut successor) = tokio::join!(loser.recover(), begun);
        assert_eq!(unanswered.count(), 1);
        assert_fenced(&recovered.unwrap_err(), topic, lost, successor.identity().unwrap());
        successor.commit().await.unwrap();
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["B"]);
}

/// The coordinator has written the new identity, and answers an error that does not say so.
fn own_initialisation_with_an_error(broker: &Broker) {
    // COORDINATOR_NOT_AVAILABLE, REQUEST_TIMED_OUT, UNKNOWN_SERVER_ERROR
    for (topic, error) in
        [("producer-init-away", 15_i16), ("producer-init-late", 7), ("producer-init-error", -1)]
    {
        broker.create_topic(topic, 1);
        broker.block_on(async {
            let start = std::time::Instant::now();
            let mut producer = loop {
                // Each call is one attempt.
                let config = ProducerConfig { delivery_timeout: Duration::ZERO, ..config(broker, topic) };
                match Producer::connect(config).await {
                    Err(_) if start.elapsed() < PATIENCE => {}
                    connected => break connected.unwrap(),
                }
            };
            let before = producer.identity().unwrap();
            let label = Match::answer_to(format!("InitProducerId {topic}"));
            let changed = broker.proxy().change(label, move |_, frame| {
                // Behind the length, the number, the tags, and the time of a throttling.
                frame[13..15].copy_from_slice(&error.to_be_bytes());
            });
            let changed = changed.times(1);
            while changed.count() == 0 {
                let failed = producer.recover().await;
                assert!(failed.is_err() && start.elapsed() < PATIENCE, "{failed:?}");
            }
            loop {
                match producer.recover().await {
                    Err(ProducerError::Unavailable { .. }) if start.elapsed() < PATIENCE => {}
                    recovered => break recovered.unwrap(),
                }
            }
            let after = producer.identity().unwrap();
            assert_eq!(after.epoch, before.epoch + 2, "the first initialisation was done");
        });
    }
}

fn continues_after_a_timed_out_transaction(broker: &Broker) {
    let topic = "producer-timed-out";
    broker.create_topic(topic, 1);
    let committed_at = broker.block_on(async {
        let mut config = config(broker, topic);
        config.transaction_timeout = Duration::from_secs(5);
        let mut producer = Producer::connect(config).await.unwrap();
        producer.begin().unwrap();
        send(&mut producer, topic, "late").await.unwrap();
        // The abort of the coordinator ends with a marker, behind which a committed reader sees this record.
        let mut marker = connect(broker, "producer-timed-out-marker").await;
        marker.begin().unwrap();
        send(&mut marker, topic, "marker").await.unwrap();
        marker.commit().await.unwrap();
        let started = std::time::Instant::now();
        while broker_sees(broker, topic).is_empty() {
            assert!(started.elapsed() < PATIENCE, "the coordinator did not abort");
        }
        let error = producer.commit().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Abortable, "{error}");
        producer.abort().await.unwrap();
        // On a slow machine the next one may time out too.
        for attempt in 1.. {
            assert!(attempt < 20, "no transaction is committed");
            producer.begin().unwrap();
            send(&mut producer, topic, "B").await.ok();
            match producer.commit().await {
                Ok(()) => return attempt,
                Err(_) => producer.abort().await.unwrap(),
            }
        }
        unreachable!()
    });
    assert_eq!(broker.read(topic, Isolation::Committed), ["marker", "B"], "attempt {committed_at}");
}

/// What a committed reader sees, read beside this runtime.
fn broker_sees(broker: &Broker, topic: &str) -> Vec<String> {
    tokio::task::block_in_place(|| broker.read(topic, Isolation::Committed))
}

fn refuses_what_the_broker_does_not_allow(broker: &Broker) {
    let refused = |change: fn(&mut ProducerConfig)| {
        let mut config = config(broker, "producer-refused");
        change(&mut config);
        let error = broker.block_on(Producer::connect(config)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Fatal, "{error}");
        error.to_string()
    };
    let text = refused(|config| config.transaction_timeout = Duration::from_hours(10));
    assert!(text.starts_with("transaction.timeout.ms = \"36000000\" is refused: "), "{text}");
    let text = refused(|config| config.transactional_id.clear());
    assert!(text.starts_with("transactional.id = \"\" is refused: "), "{text}");
}

/// The broker dies with an open transaction of one producer, and with a commit of another that was written and not answered.
fn commits_over_a_killed_broker(broker: &Broker) {
    let (open_topic, sent_topic) = ("producer-killed-open", "producer-killed-sent");
    broker.create_topic(open_topic, 1);
    broker.create_topic(sent_topic, 1);
    let (mut open, mut sent) = broker.block_on(async {
        let mut open = connect(broker, open_topic).await;
        open.begin().unwrap();
        send(&mut open, open_topic, "A").await.unwrap();
        let mut sent = connect(broker, sent_topic).await;
        sent.begin().unwrap();
        send(&mut sent, sent_topic, "A").await.unwrap();
        offset(&mut sent, sent_topic, 1);
        (open, sent)
    });
    let unanswered = broker.proxy().inject(Match::answer_to(format!("EndTxn {sent_topic}")), Action::Cut);
    broker.block_on(async {
        // A cancelled call: the commit is not answered.
        tokio::select! {
            done = sent.commit() => panic!("{done:?}"),
            () = unanswered.wait_for(1) => {}
        }
    });
    assert_eq!(sent.state(), State::Committing);
    let open_then = broker.restart("KILL");
    let is_open = |id: &str| open_then.iter().any(|open| open.transactional_id == id);
    assert!(is_open(open_topic) && !is_open(sent_topic), "{open_then:?}");
    unanswered.remove();
    broker.block_on(async {
        send(&mut open, open_topic, "B").await.unwrap();
        offset(&mut open, open_topic, 1);
        open.commit().await.unwrap();
        sent.commit().await.unwrap();
        sent.begin().unwrap();
        send(&mut sent, sent_topic, "B").await.unwrap();
        offset(&mut sent, sent_topic, 2);
        sent.commit().await.unwrap();
    });
    for (topic, next) in [(open_topic, 1), (sent_topic, 2)] {
        assert_eq!(broker.read(topic, Isolation::Committed), ["A", "B"], "{topic}");
        assert_eq!(broker.read(topic, Isolation::Uncommitted), ["A", "B"], "{topic}");
        assert_eq!(committed(broker, topic), Some(next), "{topic}");
    }
}
