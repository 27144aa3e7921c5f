//! Requests of one transaction that arrive in the next one, for three clients: ours, librdkafka's and krafka's.
//!
//! A request is *delayed*, so that the client repeats it on another connection and continues, or *repeated* by the network. Either way
//! the broker gets it when the client's second transaction is open. Readers must see each transaction as its client was told.

use std::collections::BTreeMap;
use std::time::Duration;

use hapax_faults::{Action, FaultHandle, Match};
use hapax_kafka::partition::{GroupMetadata, TopicPartition};
use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
use hapax_kafka::wire::Connect;
use libtest_mimic::Completion;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::producer::{FutureProducer, FutureRecord, Producer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use crate::broker::{Broker, Isolation, PATIENCE};
use crate::krafka::{Krafka, PROGRAM};
use crate::producer::committed_offsets;
use crate::{Case, long};

pub fn cases() -> Vec<Case> {
    vec![long("late_requests_of_three_clients", three_clients)]
}

const REQUESTS: [&str; 5] = ["EndTxn", "Produce", "TxnOffsetCommit", "AddPartitionsToTxn", "AddOffsetsToTxn"];
/// A request without an answer is repeated after this time.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(3);

/// A transactional client. Errors are text: the cases compare what readers see.
trait Client {
    fn begin(&mut self) -> Result<(), String>;
    /// Returns when the record is written.
    fn send(&mut self, topic: &str, value: &str) -> Result<(), String>;
    /// The next offset of the group that has the topic's name.
    fn offset(&mut self, topic: &str, next: i64) -> Result<(), String>;
    fn end(&mut self, commit: bool) -> Result<(), String>;
}

type Start = fn(&Broker, &str) -> Box<dyn Client>;

fn three_clients() -> Completion {
    let broker = Broker::start();
    let mut clients: Vec<(&'static str, Start)> =
        vec![("hapax", Ours::start as Start), ("librdkafka", Librdkafka::start as Start)];
    match PROGRAM.as_ref() {
        Ok(_) => clients.push(("krafka", start_krafka as Start)),
        Err(why) => println!("krafka is left out: {why}"),
    }
    let beside = &broker;
    let found: Vec<BTreeMap<String, Vec<String>>> = std::thread::scope(|scope| {
        let run =
            |&(name, start): &(&'static str, Start)| scope.spawn(move || all_schedules(beside, name, start));
        let runs: Vec<_> = clients.iter().map(run).collect();
        runs.into_iter().map(|run| run.join().expect("no schedule panics")).collect()
    });
    for ((name, _), found) in clients.iter().zip(&found) {
        for (schedule, breaches) in found {
            let told = if breaches.is_empty() { "right".to_owned() } else { breaches.join("; ") };
            println!("{name:<11} {schedule:<40} {told}");
        }
    }
    let wrong = |client: usize| {
        found[client].iter().filter(|(_, breaches)| !breaches.is_empty()).map(|(name, _)| name.as_str())
    };
    assert_eq!(wrong(0).collect::<Vec<_>>(), Vec::<&str>::new(), "ours");
    assert!(wrong(1).any(|schedule| schedule.starts_with("delayed EndTxn")), "the schedules do not hit");
    if found.len() > 2 {
        assert_eq!(
            wrong(2).collect::<Vec<_>>(),
            Vec::<&str>::new(),
            "krafka's producer was right when this was written"
        );
    }
    Completion::Completed
}

/// What is wrong after each schedule, by its name.
fn all_schedules(broker: &Broker, name: &str, start: Start) -> BTreeMap<String, Vec<String>> {
    let mut found = BTreeMap::new();
    for request in REQUESTS {
        for delayed in [true, false] {
            for (first, second) in [(true, true), (true, false), (false, true), (false, false)] {
                let kind = if delayed { "delayed" } else { "repeated" };
                let topic = format!("late-{name}-{request}-{kind}-{first}-{second}");
                broker.create_topic(&topic, 1);
                let mut client = start(broker, &topic);
                let late = Late::new(broker, request, &topic, delayed);
                if let Some(breaches) = run(broker, client.as_mut(), &topic, &late, first, second) {
                    let end = |commits| if commits { "commit" } else { "abort" };
                    found.insert(format!("{kind} {request}, {}, {}", end(first), end(second)), breaches);
                }
            }
        }
    }
    found
}

/// Runs both transactions; `None` if the client does not send the request at all.
fn run(
    broker: &Broker,
    client: &mut dyn Client,
    topic: &str,
    late: &Late,
    first: bool,
    second: bool,
) -> Option<Vec<String>> {
    let mut told = Vec::new();
    let a = transaction(client, topic, &["A"], 1, first, &mut told, &mut || {});
    if late.fault.count() == 0 {
        late.fault.remove();
        return None;
    }
    let bc = transaction(client, topic, &["B", "C"], 2, second, &mut told, &mut || {
        broker.block_on(late.arrive());
    });
    let seen = broker.read(topic, Isolation::Committed);
    let mut breaches = judge(&seen, &[(&["A"][..], a), (&["B", "C"][..], bc)]);
    let offset = committed_offsets(broker, topic, topic, 1)[0];
    let expected = if seen.contains(&"B".to_owned()) {
        Some(2)
    } else if seen.contains(&"A".to_owned()) {
        Some(1)
    } else {
        None
    };
    if offset != expected {
        breaches.push(format!("the offset is {offset:?}, and readers see {seen:?}"));
    }
    if !breaches.is_empty() {
        breaches.extend(told.iter().map(|error| format!("told: {error}")));
    }
    Some(breaches)
}

/// What a client was told of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Committed,
    Aborted,
    /// The commit ended with an error.
    Unknown,
}

/// One transaction, as a careful program runs it: any error before the commit leads to an abort.
fn transaction(
    client: &mut dyn Client,
    topic: &str,
    values: &[&str],
    next: i64,
    commits: bool,
    told: &mut Vec<String>,
    after_first: &mut dyn FnMut(),
) -> Told {
    let mut written = || {
        client.begin()?;
        for (place, value) in values.iter().enumerate() {
            client.send(topic, value)?;
            if place == 0 {
                after_first();
            }
        }
        client.offset(topic, next)
    };
    let written = written().map_err(|error| told.push(error)).is_ok();
    let ended = client.end(commits && written).map_err(|error| told.push(error)).is_ok();
    match (commits && written, ended) {
        (true, true) => Told::Committed,
        (true, false) => Told::Unknown,
        (false, _) => Told::Aborted,
    }
}

/// What readers see against what the client was told.
fn judge(seen: &[String], transactions: &[(&[&str], Told)]) -> Vec<String> {
    let mut breaches = Vec::new();
    for (values, told) in transactions {
        let count = |value: &str| seen.iter().filter(|seen| *seen == value).count();
        let visible: Vec<&str> = values.iter().copied().filter(|value| count(value) > 0).collect();
        if values.iter().any(|value| count(value) > 1) {
            breaches.push(format!("{values:?} is there twice: {seen:?}"));
        }
        match told {
            Told::Committed if visible.is_empty() => breaches.push(format!("committed {values:?} is lost")),
            Told::Aborted if !visible.is_empty() => breaches.push(format!("aborted {visible:?} is seen")),
            _ if !visible.is_empty() && visible.len() < values.len() => {
                breaches.push(format!("{values:?} is torn: {visible:?} is seen"));
            }
            _ => {}
        }
    }
    breaches
}

/// A request of the first transaction that arrives in the second one.
struct Late {
    fault: FaultHandle,
    /// Counts the answers, if the request is delayed.
    answers: Option<FaultHandle>,
}

impl Late {
    fn new(broker: &Broker, request: &str, topic: &str, delayed: bool) -> Self {
        let label = format!("{request} {topic}");
        let action = if delayed { Action::Hold } else { Action::Repeat };
        let answers = Match::answer_to(label.as_str());
        Self {
            fault: broker.proxy().inject(Match::request(label), action).times(1),
            answers: delayed.then(|| broker.proxy().inject(answers, Action::Delay(Duration::ZERO))),
        }
    }

    async fn arrive(&self) {
        let answered = self.answers.as_ref().map_or(0, FaultHandle::count);
        self.fault.release();
        match &self.answers {
            Some(answers) => answers.wait_for(answered + 1).await,
            None => self.fault.wait_for_repeated().await,
        }
    }
}

struct Ours {
    producer: Producer,
    runtime: tokio::runtime::Runtime,
}

impl Ours {
    fn start(broker: &Broker, id: &str) -> Box<dyn Client> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let mut config = ProducerConfig::new(Connect::plain([broker.proxied().to_string()]), id);
        config.connect.request_timeout = REQUEST_TIMEOUT;
        config.delivery_timeout = Duration::from_secs(45);
        config.transaction_timeout = Duration::from_mins(1);
        let producer = runtime.block_on(Producer::connect(config)).unwrap();
        Box::new(Self { producer, runtime })
    }
}

impl Client for Ours {
    fn begin(&mut self) -> Result<(), String> {
        self.producer.begin().map_err(|error| error.to_string())
    }

    fn send(&mut self, topic: &str, value: &str) -> Result<(), String> {
        let record = NewRecord { partition: Some(0), ..NewRecord::new(topic, "key", value.to_owned()) };
        let sent = self.runtime.block_on(async {
            self.producer.send(record).await?;
            self.producer.flush().await
        });
        sent.map_err(|error| error.to_string())
    }

    fn offset(&mut self, topic: &str, next: i64) -> Result<(), String> {
        let group = GroupMetadata::without_member(topic);
        let set = self.producer.offsets(group, [(TopicPartition::new(topic, 0), next)]);
        set.map_err(|error| error.to_string())
    }

    fn end(&mut self, commit: bool) -> Result<(), String> {
        let producer = &mut self.producer;
        let ended = self
            .runtime
            .block_on(async { if commit { producer.commit().await } else { producer.abort().await } });
        ended.map_err(|error| error.to_string())
    }
}

struct Librdkafka {
    producer: FutureProducer,
    consumer: BaseConsumer,
    runtime: tokio::runtime::Runtime,
}

impl Librdkafka {
    fn start(broker: &Broker, id: &str) -> Box<dyn Client> {
        let mut config = broker.config();
        config.set("bootstrap.servers", broker.proxied().to_string()).set("group.id", id);
        let consumer = config.create().unwrap();
        let mut config = broker.config();
        config
            .set("bootstrap.servers", broker.proxied().to_string())
            .set("transactional.id", id)
            .set("socket.timeout.ms", REQUEST_TIMEOUT.as_millis().to_string())
            .set("transaction.timeout.ms", "60000")
            .set("message.timeout.ms", "45000");
        let producer: FutureProducer = config.create().unwrap();
        producer.init_transactions(PATIENCE).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        Box::new(Self { producer, consumer, runtime })
    }
}

impl Client for Librdkafka {
    fn begin(&mut self) -> Result<(), String> {
        self.producer.begin_transaction().map_err(|error| error.to_string())
    }

    fn send(&mut self, topic: &str, value: &str) -> Result<(), String> {
        let record = FutureRecord::<(), str>::to(topic).partition(0).payload(value);
        let sent = self.runtime.block_on(self.producer.send(record, PATIENCE));
        sent.map(drop).map_err(|(error, _)| error.to_string())
    }

    fn offset(&mut self, topic: &str, next: i64) -> Result<(), String> {
        let mut offsets = TopicPartitionList::new();
        offsets.add_partition_offset(topic, 0, Offset::Offset(next)).unwrap();
        let group = self.consumer.group_metadata().unwrap();
        let sent = self.producer.send_offsets_to_transaction(&offsets, &group, PATIENCE);
        sent.map_err(|error| error.to_string())
    }

    fn end(&mut self, commit: bool) -> Result<(), String> {
        let ended = if commit {
            self.producer.commit_transaction(PATIENCE)
        } else {
            self.producer.abort_transaction(PATIENCE)
        };
        ended.map_err(|error| error.to_string())
    }
}

/// A member of the group that has the topic's name, because krafka sends offsets of members only.
fn start_krafka(broker: &Broker, id: &str) -> Box<dyn Client> {
    let timeout_ms = REQUEST_TIMEOUT.as_millis() as u32;
    let mut krafka = Krafka::start(&broker.proxied().to_string(), id, timeout_ms, &[]);
    krafka.ask(&format!("consumer {id} {id} classic earliest")).unwrap();
    krafka.poll_until(|_, assignment| assignment == "[0]");
    krafka.ask(&format!("producer {id} 100")).unwrap();
    Box::new(krafka)
}

impl Client for Krafka {
    fn begin(&mut self) -> Result<(), String> {
        self.ask("begin").map(drop)
    }

    fn send(&mut self, topic: &str, value: &str) -> Result<(), String> {
        self.ask(&format!("send {topic} 0 {value}")).map(drop)
    }

    fn offset(&mut self, topic: &str, next: i64) -> Result<(), String> {
        self.ask(&format!("offset {topic} 0 {next}")).map(drop)
    }

    fn end(&mut self, commit: bool) -> Result<(), String> {
        self.ask(if commit { "commit" } else { "abort" }).map(drop)
    }
}
