//! Producers and consumers of a queue and its dead letters.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::{
    AdminError, Browse, DeadLetterPolicy, DedupId, Delivery, Extend, GroupId, MessageId, NewMessage,
    QueueAdmin, QueueConfig, QueueName, Receipt, Receive, Settle, Settlement,
};
use tokio::task::JoinSet;

use super::history::{Accepted, Attempt, Given, History};
use super::{PATIENCE, Random, patiently, seed};

type Store = Arc<dyn QueueAdmin>;

const PRODUCERS: usize = 4;
const CONSUMERS: usize = 9;
const GROUPS: u64 = 6;
/// Short, so that leases end while their holders work.
pub(super) const LEASE_MS: u64 = 1_000;
const ATTEMPTS_MAX: u32 = 12;

/// Clients that send to a queue and consume it, until [`end`](Self::end).
pub struct QueueAttack {
    clients: Arc<Clients>,
    tasks: JoinSet<()>,
}

struct Clients {
    /// Each client uses one of them, or several.
    stores: Vec<Store>,
    name: QueueName,
    dead: QueueName,
    fifo: bool,
    over: AtomicBool,
    calls: AtomicU64,
    history: Mutex<History>,
}

impl QueueAttack {
    /// Creates a queue and its dead-letter queue, and starts the clients. Clients and their numbers are spread over the
    /// stores, which are processes on the same data.
    pub async fn begin(stores: Vec<Store>, name: &str, fifo: bool) -> Self {
        let clients = Arc::new(Clients::prepare(stores, name, fifo).await);
        let mut tasks = JoinSet::new();
        for n in 0..PRODUCERS {
            tasks.spawn(clients.clone().produce(n));
        }
        for n in 0..CONSUMERS {
            tasks.spawn(clients.clone().consume(n));
        }
        Self { clients, tasks }
    }

    /// How many messages were accepted so far.
    pub fn accepted(&self) -> usize {
        self.clients.history.lock().unwrap().accepted.len()
    }

    /// Call this after the last fault: consumes what is left and checks the history.
    ///
    /// # Panics
    /// If something happened that must not happen, or messages never come.
    pub async fn end(self) {
        self.clients.over.store(true, Ordering::SeqCst);
        self.tasks.join_all().await;
        self.clients.drain().await;
        let letters = self.clients.letters().await;
        let history = self.clients.history.lock().unwrap();
        eprintln!(
            "{}: {} accepted, {} deliveries, {} settles, {} dead",
            self.clients.name,
            history.accepted.len(),
            history.given.len(),
            history.attempts.len(),
            letters.len()
        );
        history.check(self.clients.fifo, &letters);
    }
}

/// Creates a queue; a repetition finds it there.
async fn create(store: &Store, name: &QueueName, config: &QueueConfig) {
    patiently(|| async {
        match store.create_queue(name, config.clone()).await {
            Ok(_) => Ok(()),
            Err(AdminError::Store(error)) => Err(error),
            Err(error) => panic!("{name}: {error}"),
        }
    })
    .await;
}

impl Clients {
    async fn prepare(stores: Vec<Store>, name: &str, fifo: bool) -> Self {
        let end = if fifo { ".fifo" } else { "" };
        let dead = QueueName::new(format!("{name}-dead{end}")).unwrap();
        let name = QueueName::new(format!("{name}{end}")).unwrap();
        let config = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        let config = QueueConfig { lease_ms: LEASE_MS, ..config };
        create(&stores[0], &dead, &config).await;
        let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
        let config = QueueConfig { retry: config.retry.attempts(ATTEMPTS_MAX), dead_letter, ..config };
        create(&stores[0], &name, &config).await;
        let (over, calls, history) = (AtomicBool::new(false), AtomicU64::new(0), Mutex::default());
        Self { stores, name, dead, fifo, over, calls, history }
    }

    fn store(&self, n: usize) -> Store {
        self.stores[n % self.stores.len()].clone()
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
                match tokio::time::timeout(random.patience(), sent).await {
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

    async fn receive(&self, store: &Store, random: &mut Random) -> Vec<Delivery> {
        let max = 1 + random.below(6) as usize;
        let ask = Receive { wait_ms: Some(random.below(200)), ..Receive::up_to(max) };
        let (call, begun) = (self.calls.fetch_add(1, Ordering::SeqCst), Instant::now());
        match tokio::time::timeout(random.patience(), store.receive(&self.name, ask)).await {
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
    async fn settle(&self, store: &Store, delivery: &Delivery, settlement: Settlement, random: &mut Random) {
        let ack = settlement == Settlement::Ack;
        for _ in 0..3 {
            let settle = Settle::new(delivery.receipt.clone(), settlement.clone());
            let attempt = self.begin(delivery, ack);
            let settled = store.settle(&self.name, vec![settle]);
            match tokio::time::timeout(random.patience(), settled).await {
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

    async fn extend(&self, store: &Store, delivery: &Delivery, random: &mut Random) {
        let extend = |receipt: Receipt| Extend { receipt, lease_ms: LEASE_MS, own_lease: false };
        let attempt = self.begin(delivery, false);
        let extended = store.extend(&self.name, vec![extend(delivery.receipt.clone())]);
        if let Ok(Ok(mut answers)) = tokio::time::timeout(random.patience(), extended).await {
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
        let (mut least, mut since) = (u64::MAX, Instant::now());
        loop {
            let stats = patiently(|| store.stats(&self.name)).await;
            let left = stats.ready + stats.delayed + stats.in_flight;
            if left == 0 {
                return;
            }
            // A slow machine may need long for all of them, and each has its own time.
            if left < least {
                (least, since) = (left, Instant::now());
            }
            assert!(since.elapsed() < PATIENCE, "messages that never come: {stats:?}");
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
}
