//! The bounds of a processor: the size of a batch, the time of a handler, and brokers that do not answer for longer than requests are
//! tried.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hapax_faults::{Action, FaultHandle, Match};
use hapax_kafka::consumer::{ConsumerConfig, Record};
use hapax_kafka::processor::{
    Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError, Totals,
};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig, ProducerError};
use hapax_kafka::wire::Connect;
use tokio::sync::oneshot;

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_batch_ends_when_its_records_are_large_enough", ends_by_size),
        shared("a_handler_that_takes_too_long_is_tried_again", a_slow_handler),
        shared("a_processor_outlives_an_abort_that_is_not_answered", |broker| {
            outlives_an_abort(broker, "bounds-abort-alone", false);
        }),
        shared("a_processor_outlives_an_abort_that_is_not_answered_with_overlap", |broker| {
            outlives_an_abort(broker, "bounds-abort-overlap", true);
        }),
        shared("a_processor_outlives_a_commit_that_cannot_be_settled", |broker| {
            outlives_an_unsettled_commit(broker, "bounds-settle-alone", false);
        }),
        shared("a_processor_outlives_a_commit_that_cannot_be_settled_with_overlap", |broker| {
            outlives_an_unsettled_commit(broker, "bounds-settle-overlap", true);
        }),
        shared("a_processor_that_waits_for_brokers_ends_when_it_is_asked_to", ends_while_it_waits),
        shared("a_processor_ends_during_an_abort_that_is_not_answered", |broker| {
            ends_during_an_attempt(broker, "bounds-stop-abort-alone", false);
        }),
        shared("a_processor_ends_during_an_abort_that_is_not_answered_with_overlap", |broker| {
            ends_during_an_attempt(broker, "bounds-stop-abort-overlap", true);
        }),
        shared("a_processor_ends_while_a_commit_is_settled", |broker| {
            ends_while_it_settles(broker, "bounds-stop-settle-alone", false);
        }),
        shared("a_processor_ends_while_a_commit_is_settled_with_overlap", |broker| {
            ends_while_it_settles(broker, "bounds-stop-settle-overlap", true);
        }),
        shared("a_start_that_is_refused_leaves_the_running_instance_alone", a_refused_start),
    ]
}

/// A processor on one partition, behind the proxy. Its topic, group and transactional id have one name.
struct Flow<'b> {
    broker: &'b Broker,
    name: &'static str,
    producer: ProducerConfig,
    config: ProcessorConfig,
    handler: Copier,
}

/// Copies records. At one value it has trouble once.
struct Copier {
    output: String,
    at: &'static str,
    trouble: Trouble,
    had_it: AtomicBool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Trouble {
    None,
    Fails,
    TakesForEver,
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        let value = record.value.clone().unwrap_or_default();
        let is_here = self.trouble != Trouble::None && value.starts_with(self.at.as_bytes());
        if is_here && !self.had_it.swap(true, Ordering::SeqCst) {
            match self.trouble {
                Trouble::TakesForEver => std::future::pending().await,
                _ => return Err("once".into()),
            }
        }
        output.push(NewRecord::new(&self.output, "key", value));
        Ok(())
    }
}

impl<'b> Flow<'b> {
    fn new(broker: &'b Broker, name: &'static str) -> Self {
        let output = format!("{name}-out");
        broker.create_topic(name, 1);
        broker.create_topic(&output, 1);
        let mut producer = ProducerConfig::new(Connect::plain([broker.proxied().to_string()]), name);
        producer.delivery_timeout = PATIENCE;
        // Outputs are sent every few records, so that an abort is a request.
        producer.buffer_bytes_max = 100;
        let handler = Copier { output, at: "", trouble: Trouble::None, had_it: AtomicBool::new(false) };
        Self { broker, name, producer, config: ProcessorConfig::default(), handler }
    }

    /// Nothing but this count of records ends a batch.
    fn one_batch(&mut self, records: usize) {
        self.config.batch_records_max = records;
        self.config.batch_time_max = Duration::from_secs(40);
    }

    fn send(&self, values: impl IntoIterator<Item = String>) {
        self.broker.block_on(async {
            let connect = Connect::plain([self.broker.address().to_string()]);
            let id = format!("fill-{}", self.name);
            let mut producer = Producer::connect(ProducerConfig::new(connect, &id)).await.unwrap();
            producer.begin().unwrap();
            for value in values {
                producer.send(NewRecord::new(self.name, "key", value)).await.unwrap();
            }
            producer.commit().await.unwrap();
        });
    }

    fn visible(&self) -> Vec<String> {
        self.broker.read(&format!("{}-out", self.name), Isolation::Committed)
    }

    fn wait(&self, until: impl Fn() -> bool) {
        let start = Instant::now();
        while !until() {
            assert!(start.elapsed() < PATIENCE, "{}: {:?}", self.name, self.visible());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Runs until `meanwhile` has returned.
    fn run(self, meanwhile: impl FnOnce(&Self) + Send) -> Result<Totals, ProcessorError> {
        let Self { broker, name, producer, config, handler } = self;
        let address = broker.proxied().to_string();
        let consumer = ConsumerConfig::new(&address, name, &[name]);
        let rest = Self {
            broker,
            name,
            producer: producer.clone(),
            config: config.clone(),
            handler: Copier {
                output: String::new(),
                at: "",
                trouble: Trouble::None,
                had_it: AtomicBool::new(false),
            },
        };
        let (end, ended) = oneshot::channel::<()>();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                meanwhile(&rest);
                drop(end);
            });
            broker.block_on(async {
                let client = connect(&consumer, &producer, &config).await;
                let run = Processor::new(config, client, handler).run(async { drop(ended.await) });
                tokio::time::timeout(PATIENCE, run).await.expect("it ends in time")
            })
        })
    }
}

/// A case may have limits for its requests that a busy machine needs longer for than that at its start.
async fn connect(
    consumer: &ConsumerConfig,
    producer: &ProducerConfig,
    config: &ProcessorConfig,
) -> KafkaClient {
    let start = Instant::now();
    loop {
        match KafkaClient::connect(consumer, producer.clone(), config).await {
            Err(ProcessorError::Producer(ProducerError::Unavailable { .. }))
                if start.elapsed() < PATIENCE => {}
            connected => return connected.unwrap(),
        }
    }
}

fn numbers(range: std::ops::Range<usize>) -> Vec<String> {
    range.map(|number| number.to_string()).collect()
}

fn ends_by_size(broker: &Broker) {
    let mut flow = Flow::new(broker, "bounds-size");
    flow.one_batch(1_000);
    flow.config.batch_bytes_max = 4_000;
    let large: Vec<String> = (0..10).map(|number| format!("{number} {}", "x".repeat(1_000))).collect();
    flow.send(large.clone());
    let totals = flow.run(|flow| flow.wait(|| flow.visible() == large[..8])).unwrap();
    assert_eq!((totals.records, totals.commits, totals.aborts), (10, 3, 0), "{totals:?}");
}

fn a_slow_handler(broker: &Broker) {
    let mut flow = Flow::new(broker, "bounds-handler");
    flow.config.handler_timeout = Duration::from_millis(300);
    (flow.handler.at, flow.handler.trouble) = ("2", Trouble::TakesForEver);
    flow.send(numbers(0..5));
    let totals = flow.run(|flow| flow.wait(|| flow.visible() == numbers(0..5))).unwrap();
    assert_eq!((totals.records, totals.dead), (5, 0), "{totals:?}");
    assert!(totals.aborts >= 1, "{totals:?}");
}

/// Longer than anything is tried by itself.
const AWAY: Duration = Duration::from_secs(4);

/// Removes a fault when it has been there for a while.
fn is_away(flow: &Flow<'_>, fault: &FaultHandle) {
    flow.wait(|| fault.count() > 0);
    std::thread::sleep(AWAY);
    fault.remove();
}

fn outlives_an_abort(broker: &Broker, name: &'static str, overlap: bool) {
    let mut flow = Flow::new(broker, name);
    flow.config.overlap = overlap;
    flow.one_batch(30);
    (flow.handler.at, flow.handler.trouble) = ("18", Trouble::Fails);
    flow.producer.delivery_timeout = Duration::from_secs(1);
    flow.send(numbers(0..30));
    let fault = broker.proxy().inject(Match::request(format!("EndTxn {name}")), Action::Cut);
    let totals = flow.run(|flow| {
        is_away(flow, &fault);
        flow.wait(|| flow.visible() == numbers(0..30));
    });
    let totals = totals.unwrap();
    assert_eq!(totals.records, 30, "{totals:?}");
    assert!(totals.aborts >= 1, "{totals:?}");
}

fn outlives_an_unsettled_commit(broker: &Broker, name: &'static str, overlap: bool) {
    let mut flow = Flow::new(broker, name);
    flow.config.overlap = overlap;
    flow.config.batch_records_max = 3;
    flow.config.handler_timeout = Duration::from_secs(1);
    flow.producer.transaction_timeout = Duration::from_secs(3);
    flow.producer.delivery_timeout = Duration::from_secs(1);
    flow.producer.connect.request_timeout = Duration::from_millis(500);
    flow.send(numbers(0..9));
    // The coordinator commits, and is not heard until the time of the transaction is over; it takes initialisations, and is not heard.
    let commit = format!("EndTxn {name} commit");
    let unanswered = broker.proxy().inject(Match::answer_to(&commit), Action::Cut).times(1);
    let lost = broker.proxy().inject(Match::request(&commit), Action::Cut).after(1);
    let totals = flow.run(|flow| {
        flow.wait(|| unanswered.count() > 0);
        // Not those of its start.
        let unsettled =
            broker.proxy().inject(Match::answer_to(format!("InitProducerId {name}")), Action::Cut);
        is_away(flow, &unsettled);
        lost.remove();
        flow.wait(|| flow.visible() == numbers(0..9));
    });
    let totals = totals.unwrap();
    assert!(totals.settled >= 1, "{totals:?}");
    assert_eq!(broker.read(&format!("{name}-out"), Isolation::Committed), numbers(0..9));
}

fn ends_while_it_waits(broker: &Broker) {
    let name = "bounds-end";
    let mut flow = Flow::new(broker, name);
    flow.one_batch(30);
    (flow.handler.at, flow.handler.trouble) = ("18", Trouble::Fails);
    flow.producer.delivery_timeout = Duration::from_secs(1);
    flow.send(numbers(0..30));
    let fault = broker.proxy().inject(Match::request(format!("EndTxn {name}")), Action::Cut);
    let ended = flow.run(|flow| {
        flow.wait(|| fault.count() > 0);
        std::thread::sleep(AWAY);
    });
    fault.remove();
    assert!(matches!(ended, Err(ProcessorError::Producer(ProducerError::Unavailable { .. }))), "{ended:?}");
}

/// The end of a processor whose one attempt would last for longer than a test waits.
const END_MAX: Duration = Duration::from_secs(30);

/// Runs it until `reached`, and then to its end, which is not that of the attempt under way.
fn ends_early(flow: Flow<'_>, reached: impl Fn() -> bool + Send) {
    let asked = std::sync::Mutex::new(None);
    let ended = flow.run(|flow| {
        flow.wait(reached);
        *asked.lock().unwrap() = Some(Instant::now());
    });
    let took = asked.lock().unwrap().unwrap().elapsed();
    assert!(matches!(ended, Err(ProcessorError::Producer(ProducerError::Unavailable { .. }))), "{ended:?}");
    assert!(took < END_MAX, "{took:?}");
}

fn ends_during_an_attempt(broker: &Broker, name: &'static str, overlap: bool) {
    let mut flow = Flow::new(broker, name);
    flow.config.overlap = overlap;
    flow.one_batch(30);
    (flow.handler.at, flow.handler.trouble) = ("18", Trouble::Fails);
    flow.producer.delivery_timeout = PATIENCE * 2;
    flow.send(numbers(0..30));
    let fault = broker.proxy().inject(Match::request(format!("EndTxn {name}")), Action::Drop);
    ends_early(flow, || fault.count() > 0);
    fault.remove();
}

fn ends_while_it_settles(broker: &Broker, name: &'static str, overlap: bool) {
    let mut flow = Flow::new(broker, name);
    flow.config.overlap = overlap;
    flow.config.batch_records_max = 3;
    flow.config.handler_timeout = Duration::from_secs(1);
    flow.producer.transaction_timeout = Duration::from_secs(3);
    flow.producer.delivery_timeout = PATIENCE * 2;
    flow.producer.connect.request_timeout = Duration::from_millis(500);
    flow.send(numbers(0..9));
    let commit = format!("EndTxn {name} commit");
    let unanswered = broker.proxy().inject(Match::answer_to(&commit), Action::Cut).times(1);
    let lost = broker.proxy().inject(Match::request(&commit), Action::Cut).after(1);
    // The first ones are those of its start.
    let settling = broker.proxy().inject(Match::request(format!("DescribeTransactions {name}")), Action::Cut);
    ends_early(flow, || unanswered.count() > 0 && lost.count() > 0 && settling.count() > 3);
    lost.remove();
    settling.remove();
}

/// It has a property that does not exist, may not take one of its other ids, or cannot look at the topics: so it does not take over the
/// transactional id of the one that runs.
fn a_refused_start(broker: &Broker) {
    let name = "bounds-refused";
    let flow = Flow::new(broker, name);
    // The broker does not know the version of a request that asks for configurations.
    let (known, unknown) = ([0, 32, 0, 1, 0, 4, 0], [0, 32, 0, 90, 0, 99, 0]);
    let changed = broker.proxy().change(Match::answer_to(format!("ApiVersions {name}")), move |_, frame| {
        let found = frame.windows(known.len()).position(|bytes| bytes == known);
        if let Some(place) = found {
            frame[place..place + known.len()].copy_from_slice(&unknown);
        }
    });
    broker.block_on(async {
        let mut running = Producer::connect(flow.producer.clone()).await.unwrap();
        running.begin().unwrap();
        running.send(NewRecord::new(&flow.handler.output, "key", "1")).await.unwrap();
        running.flush().await.unwrap();
        let mut other = flow.producer.clone();
        other.connect.client_id = name.to_owned();
        let consumer = ConsumerConfig::new(&broker.proxied().to_string(), name, &[name]);
        let with_typo = ConsumerConfig {
            properties: [("fetch.wait.max.mss".to_owned(), "10".to_owned())].into(),
            ..consumer.clone()
        };
        let refused = KafkaClient::connect(&with_typo, flow.producer.clone(), &flow.config).await;
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("fetch.wait.max.mss"), "{refused}");
        let with_overlap = ProcessorConfig { overlap: true, ..flow.config.clone() };
        let second = Match::request(format!("InitProducerId {name}.2"));
        // TRANSACTIONAL_ID_AUTHORIZATION_FAILED would need a broker with rights of its own.
        let cut = broker.proxy().inject(second, Action::Cut);
        let impatient = ProducerConfig { delivery_timeout: Duration::from_secs(1), ..flow.producer.clone() };
        let refused = KafkaClient::connect(&consumer, impatient, &with_overlap).await.unwrap_err();
        assert!(cut.count() > 0, "{refused:?}");
        cut.remove();
        let refused = KafkaClient::connect(&consumer, other, &flow.config).await.unwrap_err();
        assert!(changed.count() > 0);
        running.commit().await.unwrap();
        assert!(
            matches!(refused, ProcessorError::Producer(ProducerError::Fatal { .. })),
            "another start would not help: {refused:?}"
        );
    });
    changed.remove();
    assert_eq!(flow.visible(), ["1"]);
}
