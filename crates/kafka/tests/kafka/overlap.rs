//! Transactions of a processor that overlap: a batch is written while the one before it is committed. It stands only if that one
//! does.

use std::time::{Duration, Instant};

use hapax_faults::{Action, Match};
use hapax_kafka::admin;
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig, Totals};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::{Cluster, Connect};
use tokio::sync::oneshot;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::producer::committed_offsets;
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("overlapping_commits_are_sent_one_after_the_other", one_after_the_other),
        shared("a_refused_commit_takes_the_next_batch_back_too", a_refused_commit),
        shared("an_unknown_commit_takes_the_next_batch_back_too", an_unknown_commit),
        shared("a_failing_batch_leaves_the_commit_before_it_alone", a_failing_batch),
        shared("late_offsets_replace_none_of_the_next_batch", late_offsets),
        shared("a_processor_with_overlap_ends_with_everything_committed", ends_with_everything_committed),
    ]
}

const COUNT: usize = 6;
/// Three batches.
const BATCH: usize = 2;

/// A processor on one partition, behind the proxy. Its topic, group and first transactional id have one name.
struct Flow<'b> {
    broker: &'b Broker,
    name: &'static str,
    transaction_timeout: Duration,
    request_timeout: Duration,
    delivery_timeout: Duration,
    /// The handler fails once at this value.
    fails_at: Option<&'static str>,
}

impl<'b> Flow<'b> {
    fn new(broker: &'b Broker, name: &'static str) -> Self {
        Self::of(broker, name, COUNT)
    }

    /// With this many inputs.
    fn of(broker: &'b Broker, name: &'static str, count: usize) -> Self {
        broker.create_topic(name, 1);
        broker.create_topic(&format!("{name}-out"), 1);
        let flow = Self {
            broker,
            name,
            transaction_timeout: Duration::from_mins(5),
            request_timeout: PATIENCE,
            delivery_timeout: PATIENCE,
            fails_at: None,
        };
        flow.send(0..count);
        flow
    }

    fn send(&self, numbers: std::ops::Range<usize>) {
        self.broker.block_on(async {
            let connect = Connect::plain([self.broker.address().to_string()]);
            let id = format!("fill-{}", self.name);
            let mut producer = Producer::connect(ProducerConfig::new(connect, &id)).await.unwrap();
            producer.begin().unwrap();
            for number in numbers {
                producer.send(NewRecord::new(self.name, "key", number.to_string())).await.unwrap();
            }
            producer.commit().await.unwrap();
        });
    }

    /// Runs until this many outputs are visible, and does something meanwhile.
    fn run(&self, count: usize, meanwhile: impl FnOnce() + Send) -> Totals {
        let address = self.broker.proxied().to_string();
        let mut producer = ProducerConfig::new(Connect::plain([&address]), self.name);
        producer.transaction_timeout = self.transaction_timeout;
        producer.delivery_timeout = self.delivery_timeout;
        producer.connect.request_timeout = self.request_timeout;
        let config = ProcessorConfig {
            batch_records_max: BATCH,
            batch_time_max: Duration::from_millis(500),
            handler_timeout: Duration::from_secs(1),
            overlap: true,
            ..ProcessorConfig::default()
        };
        let consumer = ConsumerConfig::new(&address, self.name, &[self.name]);
        let copier = Copier { output: format!("{}-out", self.name), fails_at: self.fails_at };
        let (end, ended) = oneshot::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                meanwhile();
                self.wait(|| self.read(Isolation::Committed).len() >= count);
                drop(end);
            });
            self.broker.block_on(async {
                let client = KafkaClient::connect(&consumer, producer, &config).await.unwrap();
                let run = Processor::new(config, client, copier).run(async { drop(ended.await) });
                tokio::time::timeout(PATIENCE, run).await.expect("it ends in time").unwrap()
            })
        })
    }

    fn read(&self, isolation: Isolation) -> Vec<String> {
        self.broker.read(&format!("{}-out", self.name), isolation)
    }

    fn wait(&self, until: impl Fn() -> bool) {
        let start = Instant::now();
        while !until() {
            assert!(start.elapsed() < PATIENCE, "{:?}", self.read(Isolation::Uncommitted));
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Each output is there once, in order, and the offset is that behind the last input.
    fn check(&self, count: usize, offset: i64) {
        let expected: Vec<String> = (0..count).map(|number| number.to_string()).collect();
        assert_eq!(self.read(Isolation::Committed), expected);
        assert_eq!(committed_offsets(self.broker, self.name, self.name, 1), [Some(offset)]);
    }
}

struct Copier {
    output: String,
    fails_at: Option<&'static str>,
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone().unwrap_or_default();
        if self.fails_at.take_if(|bad| value == *bad).is_some() {
            return Err("once".into());
        }
        output.push(NewRecord::new(&self.output, "key", value));
        Ok(())
    }
}

/// How long is waited for something that must not happen.
const NEVER: Duration = Duration::from_millis(500);

/// While the first commit is held, the second batch is written; its offsets and its commit wait.
fn one_after_the_other(broker: &Broker) {
    let flow = Flow::new(broker, "overlap-order");
    let held = broker.proxy().inject(Match::request("EndTxn overlap-order"), Action::Hold).times(1);
    let later = broker.proxy().inject(Match::request("EndTxn overlap-order"), Action::Delay(Duration::ZERO));
    let offsets =
        broker.proxy().inject(Match::request("TxnOffsetCommit overlap-order"), Action::Delay(Duration::ZERO));
    let totals = flow.run(COUNT, || {
        flow.wait(|| held.count() == 1);
        flow.wait(|| flow.read(Isolation::Uncommitted).len() == 2 * BATCH);
        std::thread::sleep(NEVER);
        assert_eq!(flow.read(Isolation::Committed), Vec::<String>::new());
        assert_eq!(flow.read(Isolation::Uncommitted).len(), 2 * BATCH, "one batch is ahead");
        assert_eq!((offsets.count(), later.count()), (1, 0), "the second batch waits for the first commit");
        held.release();
    });
    assert_eq!((totals.records, totals.commits, totals.aborts), (6, 3, 0), "{totals:?}");
    assert_eq!(later.count(), 2);
    flow.check(COUNT, 6);
}

/// The request to commit the first batch arrives after the coordinator has timed its transaction out.
fn a_refused_commit(broker: &Broker) {
    let mut flow = Flow::new(broker, "overlap-refused");
    flow.transaction_timeout = Duration::from_secs(3);
    let held = broker.proxy().inject(Match::request("EndTxn overlap-refused"), Action::Hold).times(1);
    let totals = flow.run(COUNT, || {
        flow.wait(|| held.count() == 1 && flow.read(Isolation::Uncommitted).len() >= 2 * BATCH);
        let cluster = Cluster::new(Connect::plain([broker.address().to_string()]));
        flow.wait(|| {
            let open = broker.block_on(admin::transactions(&cluster)).unwrap();
            !open.iter().any(|it| it.transactional_id == "overlap-refused")
        });
        assert_eq!(flow.read(Isolation::Committed), Vec::<String>::new());
        held.release();
    });
    assert_eq!((totals.records, totals.commits), (6, 3), "{totals:?}");
    assert!(totals.aborts >= 2, "both batches were aborted: {totals:?}");
    flow.check(COUNT, 6);
    let log = flow.read(Isolation::Uncommitted);
    assert_eq!(log.iter().filter(|value| *value == "2").count(), 2, "{log:?}");
}

/// The broker commits the first batch, and the processor hears nothing of it until the transaction's time is over.
fn an_unknown_commit(broker: &Broker) {
    let mut flow = Flow::new(broker, "overlap-unknown");
    (flow.transaction_timeout, flow.request_timeout) = (Duration::from_secs(4), Duration::from_secs(2));
    let unanswered = broker.proxy().inject(Match::answer_to("EndTxn overlap-unknown"), Action::Cut).times(1);
    // The first rule that matches counts: the second producer is not disturbed.
    let second = Match::request("EndTxn overlap-unknown.2");
    let _second = broker.proxy().inject(second, Action::Delay(Duration::ZERO));
    // The repeated commits do not arrive.
    let lost = broker.proxy().inject(Match::request("EndTxn overlap-unknown"), Action::Cut).after(1);
    // The first three are those of the start.
    let settling = broker
        .proxy()
        .inject(Match::request("InitProducerId overlap-unknown"), Action::Delay(Duration::ZERO))
        .after(3);
    let totals = flow.run(COUNT, || {
        flow.wait(|| settling.count() > 0);
        lost.remove();
    });
    assert_eq!(unanswered.count(), 1);
    assert!(totals.settled >= 1, "{totals:?}");
    flow.check(COUNT, 6);
    let log = flow.read(Isolation::Uncommitted);
    let count = |value: &str| log.iter().filter(|found| *found == value).count();
    assert_eq!((count("0"), count("2")), (1, 2), "the second batch was taken back: {log:?}");
}

/// The handler fails in the second batch while the first commit is held.
fn a_failing_batch(broker: &Broker) {
    let mut flow = Flow::new(broker, "overlap-fails");
    flow.fails_at = Some("3");
    let held = broker.proxy().inject(Match::request("EndTxn overlap-fails"), Action::Hold).times(1);
    let aborted = broker
        .proxy()
        .inject(Match::request("EndTxn overlap-fails.2"), Action::Delay(Duration::ZERO))
        .times(1);
    let totals = flow.run(COUNT, || {
        flow.wait(|| held.count() == 1);
        // It is not sent if nothing of the batch was; then there is nothing to wait for.
        let start = Instant::now();
        while aborted.count() == 0 && start.elapsed() < Duration::from_secs(1) {
            std::thread::sleep(Duration::from_millis(20));
        }
        held.release();
    });
    assert_eq!((totals.records, totals.commits, totals.aborts), (6, 3, 1), "{totals:?}");
    flow.check(COUNT, 6);
}

/// A copy of the first batch's offsets may arrive late, because its first attempt was not answered. Behind the offsets of another
/// producer it would be the last one in the log, and theirs would not count. So these wait until the coordinator says that the first
/// transaction is complete, also when the batch was aborted because that took too long, and is another producer's then.
fn late_offsets(broker: &Broker) {
    let mut flow = Flow::of(broker, "overlap-late", 2 * BATCH);
    (flow.request_timeout, flow.delivery_timeout) = (Duration::from_secs(2), Duration::from_secs(15));
    let proxy = broker.proxy();
    let late = proxy.inject(Match::request("TxnOffsetCommit overlap-late"), Action::Hold).times(1);
    let offsets = proxy.inject(Match::request("TxnOffsetCommit overlap-late"), Action::Delay(Duration::ZERO));
    let aborted = proxy.inject(Match::request("EndTxn overlap-late.2 abort"), Action::Delay(Duration::ZERO));
    // Two states that are written with the same number of letters.
    let incomplete = proxy.change(Match::answer_to("DescribeTransactions overlap-late"), |_, frame| {
        let (complete, not_yet) = (b"CompleteCommit", b"PrepareCommit.");
        if let Some(at) = frame.windows(complete.len()).position(|found| found == complete) {
            frame[at..at + complete.len()].copy_from_slice(not_yet);
        }
    });
    let totals = flow.run(2 * BATCH, || {
        flow.wait(|| late.count() == 1 && offsets.count() >= 1);
        flow.wait(|| flow.read(Isolation::Committed).len() == BATCH);
        // On a busy machine more than one attempt of the first batch's may have come late.
        let of_first = offsets.count();
        flow.wait(|| aborted.count() > 0 && flow.read(Isolation::Uncommitted).len() >= 3 * BATCH);
        std::thread::sleep(NEVER);
        assert_eq!(offsets.count(), of_first, "the second batch's offsets wait");
        assert!(incomplete.count() > 0, "the coordinator was not asked");
        late.release();
        incomplete.remove();
    });
    assert_eq!((totals.records, totals.commits), (4, 2), "{totals:?}");
    flow.check(2 * BATCH, 4);
}

/// Its end is requested while the last commit may be under way.
fn ends_with_everything_committed(broker: &Broker) {
    let flow = Flow::new(broker, "overlap-ends");
    let totals = flow.run(BATCH, || {});
    assert_eq!(totals.aborts, 0, "{totals:?}");
    let visible = flow.read(Isolation::Committed).len();
    assert_eq!(totals.records, visible as u64, "what is counted is committed");
    let again = flow.run(COUNT, || {});
    assert_eq!(totals.records + again.records, 6, "{totals:?} {again:?}");
    flow.check(COUNT, 6);
}
