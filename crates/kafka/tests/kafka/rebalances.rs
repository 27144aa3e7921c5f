//! Rebalances of the processor: a transaction that holds records of a revoked partition commits in time or aborts, one that
//! holds none continues, and what is committed is committed once, whoever has the partitions by then.
//!
//! The first member reads the topics `stays` and `moves`, the second one only `moves`, which has one partition: so it is known
//! which partition a rebalance takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::consumer::{Consumer, ConsumerConfig, Record};
use hapax_kafka::processor::{
    Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError, Totals, other_ids,
};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use tokio::sync::{Notify, oneshot, watch};
use tokio::task::JoinHandle;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_revoked_batch_is_committed_in_time", committed_in_time),
        shared("a_revoked_batch_that_is_not_written_in_time_is_aborted", aborted_in_time),
        shared("a_batch_without_revoked_records_continues", continues),
        shared("a_commit_without_an_answer_is_settled_after_its_partition_moved", settled_after_the_move),
        shared("offsets_that_come_after_their_partition_moved_are_refused", refused_after_the_move),
        shared("offsets_whose_answer_comes_after_their_partition_moved_are_not_committed", |broker| {
            not_committed_after_the_move(broker, "rebalance-answer", false);
        }),
        shared("offsets_whose_answer_comes_after_the_move_are_not_committed_with_overlap", |broker| {
            not_committed_after_the_move(broker, "rebalance-answer-overlap", true);
        }),
        shared("a_handler_that_outlasts_the_revocation_commits_nothing", |broker| {
            outlasts(broker, "rebalance-outlasts", Duration::from_millis(50));
        }),
        // The revocation is then what ends the batch.
        shared("a_revocation_that_is_not_waited_for_commits_nothing", |broker| {
            outlasts(broker, "rebalance-late", Duration::from_mins(10));
        }),
    ]
}

/// By then a batch is written, also on a busy machine, and only its commit is under way.
const WRITTEN: Duration = Duration::from_secs(8);

/// The topics of a case, and the ids of its members.
#[derive(Clone)]
struct Names {
    case: &'static str,
    stays: String,
    moves: String,
    output: String,
}

impl Names {
    fn create(broker: &Broker, case: &'static str) -> Self {
        let topic = |part: &str| format!("{case}-{part}");
        let names = Self { case, stays: topic("stays"), moves: topic("moves"), output: topic("out") };
        for topic in [&names.stays, &names.moves, &names.output] {
            broker.create_topic(topic, 1);
        }
        names
    }
}

/// Copies records; at the value `wait` it waits until it is told to go on.
#[derive(Clone)]
struct Copier {
    output: String,
    waits: Arc<Notify>,
    go: Arc<Notify>,
    /// How often it was given the value `s1`.
    given_s1: Arc<watch::Sender<usize>>,
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone().unwrap_or_default();
        output.push(NewRecord { value: Some(value.clone()), ..NewRecord::new(&self.output, "key", "") });
        if value == "s1" {
            self.given_s1.send_modify(|count| *count += 1);
        }
        if value == "wait" {
            self.waits.notify_one();
            self.go.notified().await;
        }
        Ok(())
    }
}

struct Member {
    task: JoinHandle<Result<Totals, ProcessorError>>,
    end: oneshot::Sender<()>,
    copier: Copier,
}

/// How a member differs from the usual one.
struct Settings {
    address: String,
    batch_time_max: Duration,
    batch_records_max: usize,
    overlap: bool,
    revoke_timeout: Duration,
    revoke_wait: Duration,
    batch_bytes_min: usize,
}

/// Output is sent with the commit. What was sent ahead would hide the output of the other member behind it.
const NOT_AHEAD: usize = 256 << 10;

impl Settings {
    /// One whose batches end only with a rebalance or the run, and whose output is in the log by then.
    fn new(address: String) -> Self {
        Self {
            address,
            batch_time_max: Duration::from_mins(10),
            batch_records_max: 1_000,
            overlap: false,
            revoke_timeout: Duration::from_mins(1),
            revoke_wait: Duration::from_mins(1),
            batch_bytes_min: 1,
        }
    }
}

impl Member {
    async fn start(names: &Names, number: usize, topics: &[&str], settings: Settings) -> Self {
        let id = format!("{}-{number}", names.case);
        let mut producer = ProducerConfig::new(Connect::plain([&settings.address]), &id);
        (producer.delivery_timeout, producer.transaction_timeout) = (PATIENCE, Duration::from_mins(9));
        producer.connect.request_timeout = PATIENCE;
        producer.batch_bytes_min = settings.batch_bytes_min;
        let mut consumer = ConsumerConfig::new(&settings.address, names.case, topics);
        consumer.revoke_wait = settings.revoke_wait;
        let config = ProcessorConfig {
            batch_time_max: settings.batch_time_max,
            batch_records_max: settings.batch_records_max,
            revoke_timeout: settings.revoke_timeout,
            handler_timeout: PATIENCE,
            ..ProcessorConfig::default()
        };
        let first = Producer::connect(producer.clone()).await.unwrap();
        let mut others = Vec::new();
        for transactional_id in other_ids(&id).into_iter().filter(|_| settings.overlap) {
            let other = ProducerConfig { transactional_id, ..producer.clone() };
            others.push(Producer::connect(other).await.unwrap());
        }
        let client = KafkaClient::new(Consumer::start(&consumer).unwrap(), first, others);
        let copier = Copier {
            output: names.output.clone(),
            waits: Arc::default(),
            go: Arc::default(),
            given_s1: Arc::default(),
        };
        let (end, ended) = oneshot::channel::<()>();
        let processor = Processor::new(config, client, copier.clone());
        let task = tokio::spawn(processor.run(async move { drop(ended.await) }));
        Self { task, end, copier }
    }

    /// Until its handler waits.
    async fn waits(&self) {
        let reached = tokio::time::timeout(PATIENCE, self.copier.waits.notified()).await;
        reached.expect("the record `wait` is handled in time");
    }

    /// Until its handler has the record `s1` of an aborted batch again. Before that, its end would have nothing to commit.
    async fn has_s1_again(&self) {
        let mut given = self.copier.given_s1.subscribe();
        let again = tokio::time::timeout(PATIENCE, given.wait_for(|count| *count >= 2)).await;
        again.expect("the record `s1` is read again in time").unwrap();
    }

    async fn end(self) -> Totals {
        drop(self.end);
        let ended = tokio::time::timeout(PATIENCE, self.task).await.expect("it ends in time");
        ended.unwrap().unwrap()
    }
}

async fn send(broker: &Broker, topic: &str, values: &[&str]) {
    let config =
        ProducerConfig::new(Connect::plain([broker.address().to_string()]), &format!("fill-{topic}"));
    let mut producer = Producer::connect(config).await.unwrap();
    producer.begin().unwrap();
    for value in values {
        producer.send(NewRecord::new(topic, "key", (*value).to_owned())).await.unwrap();
    }
    producer.commit().await.unwrap();
}

/// Waits until the visible outputs are these, in any order.
async fn wait_for(broker: &Broker, names: &Names, values: &[&str]) {
    let start = Instant::now();
    loop {
        let mut seen = tokio::task::block_in_place(|| broker.read(&names.output, Isolation::Committed));
        seen.sort();
        if seen == values {
            return;
        }
        assert!(start.elapsed() < PATIENCE, "{seen:?} instead of {values:?}");
        assert!(seen.len() <= values.len(), "{seen:?} instead of {values:?}");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

fn committed(broker: &Broker, names: &Names, topic: &str) -> Option<i64> {
    committed_offsets(broker, names.case, topic, 1)[0]
}

/// The partition that moves is committed before it moves, and its new owner begins behind that.
fn committed_in_time(broker: &Broker) {
    let names = Names::create(broker, "rebalance-commits");
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], own()).await;
        send(broker, &names.stays, &["s1"]).await;
        send(broker, &names.moves, &["m1", "wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        wait_for(broker, &names, &["m1", "s1", "wait"]).await;
        send(broker, &names.moves, &["m2"]).await;
        wait_for(broker, &names, &["m1", "m2", "s1", "wait"]).await;
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.commits, first.aborts, first.records), (1, 0, 3), "{first:?}");
        assert_eq!((second.commits, second.aborts, second.records), (1, 0, 1), "{second:?}");
    });
    // Behind the two records are the marker of their transaction, the third record, and its marker.
    assert_eq!(committed(broker, &names, &names.moves), Some(4));
    assert_eq!(committed(broker, &names, &names.stays), Some(1));
}

/// Its records are not written within the bound: the batch is aborted, and the new owner has them.
fn aborted_in_time(broker: &Broker) {
    let names = Names::create(broker, "rebalance-aborts");
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let hurried = Settings {
            revoke_timeout: Duration::from_millis(300),
            // The group itself would wait for longer than this case does.
            revoke_wait: PATIENCE * 2,
            batch_bytes_min: NOT_AHEAD,
            ..Settings::new(broker.proxied().to_string())
        };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], hurried).await;
        let held = broker.proxy().inject(Match::request("Produce rebalance-aborts-1"), Action::Drop).times(1);
        send(broker, &names.stays, &["s1"]).await;
        send(broker, &names.moves, &["m1", "wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        second.waits().await;
        second.copier.go.notify_one();
        wait_for(broker, &names, &["m1", "wait"]).await;
        assert_eq!(held.count(), 1, "the first member did not try to commit");
        held.remove();
        first.has_s1_again().await;
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.commits, first.aborts, first.records), (1, 1, 1), "{first:?}");
        assert_eq!((second.aborts, second.records), (0, 2), "{second:?}");
        wait_for(broker, &names, &["m1", "s1", "wait"]).await;
    });
    assert_eq!(committed(broker, &names, &names.stays), Some(1));
}

/// The batch holds none of the partition that moves: it is neither committed nor aborted, and is committed by a member of a
/// later generation than the one in which its records were read.
fn continues(broker: &Broker) {
    let names = Names::create(broker, "rebalance-continues");
    broker.block_on(async {
        let address = broker.address().to_string();
        let own = || Settings { batch_bytes_min: NOT_AHEAD, ..Settings::new(address.clone()) };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], own()).await;
        send(broker, &names.stays, &["s1", "wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        send(broker, &names.moves, &[]).await;
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        // When the second member has it, this is the second one's.
        tokio::time::timeout(PATIENCE, async {
            while members_of(broker, names.case).await < 2 {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        })
        .await
        .expect("both are members");
        send(broker, &names.moves, &["m1"]).await;
        wait_for(broker, &names, &["m1"]).await;
        send(broker, &names.stays, &["s2"]).await;
        let first = first.end().await;
        second.end().await;
        assert_eq!((first.commits, first.aborts), (1, 0), "{first:?}");
        assert!(first.records >= 2, "{first:?}");
    });
}

/// Members of a group that have partitions.
async fn members_of(broker: &Broker, group: &str) -> usize {
    use kafka_protocol::messages::DescribeGroupsRequest;
    use kafka_protocol::protocol::StrBytes;
    let cluster = hapax_kafka::wire::Cluster::new(Connect::plain([broker.address().to_string()]));
    let request =
        DescribeGroupsRequest::default().with_groups(vec![StrBytes::from_string(group.to_owned()).into()]);
    let (answer, _) = cluster.call_any(&request, 5).await.unwrap();
    let members = answer.groups.iter().flat_map(|group| &group.members);
    // Version, and the count of topics that are assigned.
    members.filter(|member| member.member_assignment.get(2..6).is_some_and(|count| count != [0; 4])).count()
}

/// The answer to the commit does not come within the bound. The partition moves on; its new owner waits until the commit is
/// settled, and begins behind it.
fn settled_after_the_move(broker: &Broker) {
    let names = Names::create(broker, "rebalance-unanswered");
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let hurried = Settings { revoke_timeout: WRITTEN, ..Settings::new(broker.proxied().to_string()) };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], hurried).await;
        let held = broker.proxy().inject(Match::request("EndTxn rebalance-unanswered-1"), Action::Hold);
        send(broker, &names.stays, &["s1"]).await;
        send(broker, &names.moves, &["m1", "wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        let start = Instant::now();
        while members_of(broker, names.case).await < 2 {
            assert!(start.elapsed() < PATIENCE, "the partition does not move");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        assert!(held.count() > 0, "the commit was not sent");
        let early = second.copier.waits.notified();
        let early = tokio::time::timeout(Duration::from_secs(2), early).await;
        assert!(early.is_err(), "the new owner has begun before the commit was settled");
        held.release();
        send(broker, &names.moves, &["m2"]).await;
        wait_for(broker, &names, &["m1", "m2", "s1", "wait"]).await;
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.commits + first.settled, first.aborts), (1, 0), "{first:?}");
        assert_eq!((second.aborts, second.records), (0, 1), "{second:?}");
    });
    assert_eq!(committed(broker, &names, &names.moves), Some(4));
}

/// Where transactions overlap, the offsets of a batch are sent with its commit. They come late, when the partition is another
/// member's: the broker refuses them, for they name the generation before, and the batch is aborted. Its new owner has not waited for it.
fn refused_after_the_move(broker: &Broker) {
    let names = Names::create(broker, "rebalance-offsets");
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let overlapping = Settings {
            overlap: true,
            batch_records_max: 2,
            revoke_timeout: Duration::from_millis(500),
            ..Settings::new(broker.proxied().to_string())
        };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], overlapping).await;
        let label = Match::request("TxnOffsetCommit rebalance-offsets-1");
        let held = broker.proxy().inject(label, Action::Hold).times(1);
        send(broker, &names.stays, &["s1"]).await;
        send(broker, &names.moves, &["wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let start = Instant::now();
        while held.count() == 0 {
            assert!(start.elapsed() < PATIENCE, "the commit does not begin");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        second.waits().await;
        second.copier.go.notify_one();
        held.release();
        wait_for(broker, &names, &["wait"]).await;
        first.has_s1_again().await;
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.commits, first.aborts, first.records), (1, 1, 1), "{first:?}");
        assert_eq!((second.commits, second.aborts, second.records), (1, 0, 1), "{second:?}");
        wait_for(broker, &names, &["s1", "wait"]).await;
    });
    assert_eq!(committed(broker, &names, &names.stays), Some(1));
    assert_eq!(committed(broker, &names, &names.moves), Some(1));
}

/// The broker has taken the offsets, and its answer comes when the partition is another member's: then nothing says whether they came
/// before the move, so the batch is aborted. The new owner, whose start has waited for the transaction, has its records.
fn not_committed_after_the_move(broker: &Broker, case: &'static str, overlap: bool) {
    let names = Names::create(broker, case);
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let hurried = Settings {
            overlap,
            batch_records_max: 2,
            revoke_timeout: Duration::from_millis(500),
            revoke_wait: Duration::from_secs(1),
            ..Settings::new(broker.proxied().to_string())
        };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], hurried).await;
        let label = Match::answer_to(format!("TxnOffsetCommit {case}-1"));
        let held = broker.proxy().inject(label, Action::Hold).times(1);
        send(broker, &names.stays, &["s1"]).await;
        send(broker, &names.moves, &["wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let start = Instant::now();
        while held.count() == 0 {
            assert!(start.elapsed() < PATIENCE, "the commit does not begin");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        while members_of(broker, names.case).await < 2 {
            assert!(start.elapsed() < PATIENCE, "the partition does not move");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        held.release();
        second.waits().await;
        second.copier.go.notify_one();
        wait_for(broker, &names, &["wait"]).await;
        first.has_s1_again().await;
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.commits, first.aborts, first.records), (1, 1, 1), "{first:?}");
        assert_eq!((second.aborts, second.records), (0, 1), "{second:?}");
        wait_for(broker, &names, &["s1", "wait"]).await;
    });
    assert_eq!(committed(broker, &names, &names.stays), Some(1));
    assert_eq!(committed(broker, &names, &names.moves), Some(1));
}

/// The group does not wait longer for a handler than it has said. When the handler is done, the partition is another member's,
/// and this member is one of the new generation: its offsets would be taken by the broker.
fn outlasts(broker: &Broker, case: &'static str, batch_time_max: Duration) {
    let names = Names::create(broker, case);
    broker.block_on(async {
        let own = || Settings::new(broker.address().to_string());
        let revoke_wait = Duration::from_millis(300);
        let slow = Settings { batch_time_max, revoke_wait, batch_bytes_min: NOT_AHEAD, ..own() };
        let first = Member::start(&names, 1, &[&names.stays, &names.moves], slow).await;
        send(broker, &names.moves, &["m1", "wait"]).await;
        first.waits().await;
        let brief = Settings { batch_time_max: Duration::from_millis(50), ..own() };
        let second = Member::start(&names, 2, &[&names.moves], brief).await;
        second.waits().await;
        second.copier.go.notify_one();
        wait_for(broker, &names, &["m1", "wait"]).await;
        first.copier.go.notify_one();
        // What the first member does with its batch is done before this is.
        send(broker, &names.stays, &["wait"]).await;
        first.waits().await;
        first.copier.go.notify_one();
        let (first, second) = (first.end().await, second.end().await);
        assert_eq!((first.aborts, first.records), (1, 1), "{first:?}");
        assert_eq!((second.aborts, second.records), (0, 2), "{second:?}");
    });
    assert_eq!(broker.read(&names.output, Isolation::Committed), ["m1", "wait", "wait"], "each output once");
}
