//! Several processes and many clients on one database, under faults at random times. A checker that knows nothing of the
//! store reads the history: nothing that was accepted is lost or ends twice, no message has two holders, fences grow,
//! stale receipts change nothing, FIFO groups keep their order, a deduplication id is accepted once.
//!
//! `HAPAX_SEED=n` chooses other faults, `HAPAX_LONG=1` runs twenty times as long.

mod common;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::patiently;
use common::trouble::{Random, Site, seed, time};
use hapax_core::{
    Browse, DeadLetterPolicy, DedupId, Delivery, Extend, GroupId, MessageId, NewMessage, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, Receipt, Receive, Settle, SettleError, Settlement,
};
use hapax_postgres::PostgresStore;

fn main() -> std::process::ExitCode {
    common::main(&[
        common::Test { name: "a_standard_queue_survives", run: |_| attack(false) },
        common::Test { name: "a_fifo_queue_survives", run: |_| attack(true) },
    ])
}

const PROCESSES: usize = 3;
const PRODUCERS: usize = 4;
const CONSUMERS: usize = 9;
const GROUPS: u64 = 6;
/// Short, so that leases end while their holders work.
const LEASE_MS: u64 = 1_000;
const ATTEMPTS_MAX: u32 = 12;

/// An accepted message.
struct Accepted {
    id: MessageId,
    body: String,
}

/// A message that one receive was given.
struct Given {
    /// The number of the receive.
    call: u64,
    begun: Instant,
    answered: Instant,
    id: MessageId,
    body: String,
    fence: u64,
    sequence: u64,
    group: Option<GroupId>,
}

/// An attempt to end or to extend a delivery.
struct Attempt {
    begun: Instant,
    id: MessageId,
    fence: u64,
    ack: bool,
    /// `None`: unknown.
    done: Option<Result<(), SettleError>>,
}

#[derive(Default)]
struct History {
    accepted: Vec<Accepted>,
    given: Vec<Given>,
    attempts: Vec<Attempt>,
}

struct Attack {
    site: Arc<Site>,
    name: QueueName,
    dead: QueueName,
    fifo: bool,
    over: Arc<AtomicBool>,
    calls: AtomicU64,
    history: Mutex<History>,
}

fn attack(fifo: bool) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let site = Arc::new(Site::start(PROCESSES).await);
        let attack = Arc::new(Attack::prepare(site, fifo).await);
        let mut tasks = tokio::task::JoinSet::new();
        for n in 0..PRODUCERS {
            tasks.spawn(attack.clone().produce(n));
        }
        for n in 0..CONSUMERS {
            tasks.spawn(attack.clone().consume(n));
        }
        let enough = || attack.history.lock().unwrap().accepted.len() > 150;
        attack.site.trouble(time(12), &attack.over, enough).await;
        tasks.join_all().await;
        attack.drain().await;
        attack.check().await;
    });
}

/// One call in ten is dropped at a random time.
fn patience(random: &mut Random) -> Duration {
    if random.below(10) == 0 { random.ms(15) } else { Duration::from_mins(2) }
}

impl Attack {
    async fn prepare(site: Arc<Site>, fifo: bool) -> Self {
        let end = if fifo { ".fifo" } else { "" };
        let [name, dead] = ["orders", "dead"].map(|name| QueueName::new(format!("{name}{end}")).unwrap());
        let config = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        let config = QueueConfig { lease_ms: LEASE_MS, ..config };
        let store = &site.stores[0];
        store.create_queue(&dead, config.clone()).await.unwrap();
        let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
        let config = QueueConfig { retry: config.retry.attempts(ATTEMPTS_MAX), dead_letter, ..config };
        store.create_queue(&name, config).await.unwrap();
        let (over, calls, history) = (Arc::default(), AtomicU64::new(0), Mutex::default());
        Self { site, name, dead, fifo, over, calls, history }
    }

    fn store(&self, n: usize) -> PostgresStore {
        self.site.stores[n % PROCESSES].clone()
    }

    fn is_over(&self) -> bool {
        self.over.load(Ordering::SeqCst)
    }

    async fn produce(self: Arc<Self>, n: usize) {
        let (store, mut random) = (self.store(n), Random::new(seed() * 100 + n as u64));
        let mut number = 0;
        while !self.is_over() {
            number += 1;
            let body = format!("{n}-{number}");
            let named = self.fifo || random.below(2) == 0;
            let mut message = NewMessage::new(body.clone());
            message.dedup = named.then(|| DedupId::new(body.clone()).unwrap());
            message.group = self.fifo.then(|| GroupId::new(format!("g{}", random.below(GROUPS))).unwrap());
            // A message with a deduplication id is sent until it is accepted, by one process and then by another.
            for attempt in 0.. {
                let store = if named { self.store(n + attempt) } else { store.clone() };
                let sent = store.send(&self.name, vec![message.clone()]);
                match tokio::time::timeout(patience(&mut random), sent).await {
                    Ok(Ok(mut answers)) => {
                        let id = answers.remove(0).unwrap().id;
                        self.history.lock().unwrap().accepted.push(Accepted { id, body: body.clone() });
                        break;
                    }
                    Ok(Err(error)) => assert!(error.is_retryable(), "{error}"),
                    Err(_) => {}
                }
                if !named {
                    break;
                }
                tokio::time::sleep(random.ms(50)).await;
            }
            tokio::time::sleep(Duration::from_millis(5) + random.ms(20)).await;
        }
    }

    async fn consume(self: Arc<Self>, n: usize) {
        let (store, mut random) = (self.store(n), Random::new(seed() * 1_000 + n as u64));
        let mut zombies: Vec<Delivery> = Vec::new();
        while !self.is_over() {
            let deliveries = self.receive(&store, &mut random).await;
            if random.below(8) == 0 {
                // Its holder hangs until its lease is over, and then does as if it were not.
                tokio::time::sleep(Duration::from_millis(LEASE_MS + random.below(500))).await;
            }
            for (at, delivery) in deliveries.iter().enumerate() {
                let settlement = match random.below(20) {
                    0 => {
                        Settlement::Retry { after_ms: Some(random.below(100)), error: Some("failed".into()) }
                    }
                    1 => Settlement::Defer { after_ms: random.below(100) },
                    2 if random.below(3) == 0 => Settlement::Reject { reason: "bad".into() },
                    3 => {
                        self.extend(&store, delivery, &mut random).await;
                        Settlement::Ack
                    }
                    _ => Settlement::Ack,
                };
                let taken_back = self.fifo && settlement != Settlement::Ack;
                if taken_back {
                    // What was received behind it in its group may be taken back with it, at once.
                    self.release(&deliveries[at + 1..]);
                }
                self.settle(&self.store(n + random.below(2) as usize), delivery, settlement, &mut random)
                    .await;
                if random.below(8) == 0 {
                    zombies.push(delivery.clone());
                }
                if taken_back {
                    break;
                }
            }
            if let Some(old) = zombies.first().filter(|_| random.below(3) == 0).cloned() {
                self.settle(&store, &old, Settlement::Ack, &mut random).await;
                self.extend(&store, &old, &mut random).await;
                zombies.remove(0);
            }
        }
    }

    /// These deliveries are not worked on any more, by the history.
    fn release(&self, deliveries: &[Delivery]) {
        let mut history = self.history.lock().unwrap();
        for delivery in deliveries {
            let (id, fence) = (delivery.id, delivery.fence.0);
            history.attempts.push(Attempt { begun: Instant::now(), id, fence, ack: false, done: None });
        }
    }

    async fn receive(&self, store: &PostgresStore, random: &mut Random) -> Vec<Delivery> {
        let max = 1 + random.below(6) as usize;
        let ask = Receive { wait_ms: Some(random.below(200)), ..Receive::up_to(max) };
        let (call, begun) = (self.calls.fetch_add(1, Ordering::SeqCst), Instant::now());
        match tokio::time::timeout(patience(random), store.receive(&self.name, ask)).await {
            Ok(Ok(deliveries)) => {
                let answered = Instant::now();
                let given = |delivery: &Delivery| Given {
                    call,
                    begun,
                    answered,
                    id: delivery.id,
                    body: String::from_utf8(delivery.body.to_vec()).unwrap(),
                    fence: delivery.fence.0,
                    sequence: delivery.sequence,
                    group: delivery.group.clone(),
                };
                self.history.lock().unwrap().given.extend(deliveries.iter().map(given));
                deliveries
            }
            Ok(Err(error)) => {
                assert!(error.is_retryable(), "{error}");
                tokio::time::sleep(random.ms(50)).await;
                Vec::new()
            }
            Err(_) => Vec::new(),
        }
    }

    /// Ends a delivery, and repeats that while its outcome is unknown.
    async fn settle(
        &self,
        store: &PostgresStore,
        delivery: &Delivery,
        settlement: Settlement,
        random: &mut Random,
    ) {
        let ack = settlement == Settlement::Ack;
        for _ in 0..3 {
            let settle = Settle::new(delivery.receipt.clone(), settlement.clone());
            let attempt = self.begin(delivery, ack);
            let settled = store.settle(&self.name, vec![settle]);
            match tokio::time::timeout(patience(random), settled).await {
                Ok(Ok(mut answers)) => {
                    let answer = answers.remove(0).map(|_| ());
                    self.history.lock().unwrap().attempts[attempt].done = Some(answer);
                    return;
                }
                Ok(Err(error)) => assert!(error.is_retryable(), "{error}"),
                Err(_) => {}
            }
            tokio::time::sleep(random.ms(30)).await;
        }
    }

    async fn extend(&self, store: &PostgresStore, delivery: &Delivery, random: &mut Random) {
        let extend = |receipt: Receipt| Extend { receipt, lease_ms: LEASE_MS, own_lease: false };
        let attempt = self.begin(delivery, false);
        let extended = store.extend(&self.name, vec![extend(delivery.receipt.clone())]);
        if let Ok(Ok(mut answers)) = tokio::time::timeout(patience(random), extended).await {
            let answer = answers.remove(0).map(|_| ());
            self.history.lock().unwrap().attempts[attempt].done = Some(answer);
        }
    }

    fn begin(&self, delivery: &Delivery, ack: bool) -> usize {
        let mut history = self.history.lock().unwrap();
        let (id, fence) = (delivery.id, delivery.fence.0);
        history.attempts.push(Attempt { begun: Instant::now(), id, fence, ack, done: None });
        history.attempts.len() - 1
    }

    /// Works on what is left, without faults.
    async fn drain(&self) {
        let (store, mut random) = (self.store(0), Random::new(1));
        let start = Instant::now();
        loop {
            let stats = patiently(|| store.stats(&self.name)).await;
            if stats.ready + stats.delayed + stats.in_flight == 0 {
                return;
            }
            assert!(start.elapsed() < Duration::from_mins(3), "messages that never come: {stats:?}");
            for delivery in self.receive(&store, &mut random).await {
                self.settle(&store, &delivery, Settlement::Ack, &mut random).await;
            }
        }
    }

    async fn letters(&self) -> BTreeMap<MessageId, String> {
        let store = self.store(0);
        let mut all = BTreeMap::new();
        let mut after = None;
        loop {
            let browse = Browse { limit: 500, after, ..Browse::default() };
            let page = patiently(|| store.browse(&self.dead, browse.clone())).await;
            for letter in page.items {
                let body = String::from_utf8(letter.body.unwrap().to_vec()).unwrap();
                assert_eq!(all.insert(letter.id, body), None, "{}: dead twice", letter.id);
            }
            after = page.next;
            if after.is_none() {
                return all;
            }
        }
    }

    async fn check(&self) {
        let letters = self.letters().await;
        let history = self.history.lock().unwrap();
        eprintln!(
            "{} accepted, {} deliveries, {} settles, {} dead",
            history.accepted.len(),
            history.given.len(),
            history.attempts.len(),
            letters.len()
        );
        check_ends(&history, &letters);
        check_fences(&history);
        check_holders(&history);
        check_stale(&history);
        if self.fifo {
            check_order(&history, &letters);
        }
    }
}

/// Everything accepted has ended once; one body is one message.
fn check_ends(history: &History, letters: &BTreeMap<MessageId, String>) {
    let mut acked: HashMap<MessageId, u64> = HashMap::new();
    let mut maybe: BTreeSet<MessageId> = BTreeSet::new();
    for attempt in history.attempts.iter().filter(|attempt| attempt.ack) {
        match &attempt.done {
            Some(Ok(())) => *acked.entry(attempt.id).or_default() += 1,
            None => drop(maybe.insert(attempt.id)),
            Some(Err(_)) => {}
        }
    }
    let mut ids: HashMap<&str, MessageId> = HashMap::new();
    let given = history.given.iter().map(|given| (&given.body, given.id));
    let accepted = history.accepted.iter().map(|accepted| (&accepted.body, accepted.id));
    for (body, id) in given.chain(accepted) {
        assert_eq!(*ids.entry(body).or_insert(id), id, "{body} was accepted as two messages");
    }
    for (body, id) in ids {
        let acks = acked.get(&id).copied().unwrap_or(0);
        let dead = letters.contains_key(&id);
        assert!(acks <= 1, "{body} was acked {acks} times");
        assert!(acks == 0 || !dead, "{body} was acked and is dead");
        assert!(acks == 1 || dead || maybe.contains(&id), "{body} is lost");
    }
}

fn by_message(history: &History) -> HashMap<MessageId, Vec<&Given>> {
    let mut all: HashMap<MessageId, Vec<&Given>> = HashMap::new();
    for given in &history.given {
        all.entry(given.id).or_default().push(given);
    }
    all
}

fn check_fences(history: &History) {
    for (id, given) in by_message(history) {
        let fences: BTreeSet<u64> = given.iter().map(|given| given.fence).collect();
        assert_eq!(fences.len(), given.len(), "{id}: two deliveries have one fence");
        for one in &given {
            for two in given.iter().filter(|two| one.answered < two.begun) {
                assert!(one.fence < two.fence, "{id}: fence {} after {}", two.fence, one.fence);
            }
        }
    }
}

/// The time until which a delivery was certainly held: to the end of its lease, or until its holder did something.
fn held_until(history: &History, given: &Given) -> Instant {
    let lease_ends = given.begun + Duration::from_millis(LEASE_MS);
    let its = |attempt: &&Attempt| attempt.id == given.id && attempt.fence == given.fence;
    history.attempts.iter().filter(its).map(|attempt| attempt.begun).fold(lease_ends, Instant::min)
}

fn check_holders(history: &History) {
    for (id, given) in by_message(history) {
        for one in &given {
            let until = held_until(history, one);
            for two in given.iter().filter(|two| two.fence > one.fence) {
                assert!(two.answered >= until, "{id}: delivered again while it was held");
            }
        }
    }
}

/// What has a newer delivery is not changed by an older receipt.
fn check_stale(history: &History) {
    let given = by_message(history);
    for attempt in history.attempts.iter().filter(|attempt| attempt.done == Some(Ok(()))) {
        for newer in given[&attempt.id].iter().filter(|given| given.fence > attempt.fence) {
            assert!(newer.answered >= attempt.begun, "{}: a stale receipt was accepted", attempt.id);
        }
    }
}

/// A message is delivered only after all before it in its group have ended, or together with them.
fn check_order(history: &History, letters: &BTreeMap<MessageId, String>) {
    let mut groups: HashMap<&GroupId, BTreeMap<u64, MessageId>> = HashMap::new();
    for given in &history.given {
        groups.entry(given.group.as_ref().unwrap()).or_default().insert(given.sequence, given.id);
    }
    let mut ended: HashMap<MessageId, Instant> = HashMap::new();
    for attempt in history.attempts.iter().filter(|attempt| attempt.ack) {
        if matches!(attempt.done, None | Some(Ok(()))) {
            let first = ended.entry(attempt.id).or_insert(attempt.begun);
            *first = (*first).min(attempt.begun);
        }
    }
    let mut calls: HashMap<u64, BTreeSet<MessageId>> = HashMap::new();
    for given in &history.given {
        calls.entry(given.call).or_default().insert(given.id);
    }
    for given in &history.given {
        let group = given.group.as_ref().unwrap();
        for (before, id) in groups[group].range(..given.sequence) {
            let over =
                ended.get(id).is_some_and(|begun| *begun <= given.answered) || letters.contains_key(id);
            assert!(
                over || calls[&given.call].contains(id),
                "group {group}: {} was delivered while {before} before it had not ended",
                given.sequence
            );
        }
    }
}
