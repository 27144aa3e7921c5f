//! A real store in its own folder, and a worker that runs until a condition holds.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod time;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_conformance::MemoryStore;
use hapax_core::{
    Batch, Browse, Claim, ClaimError, ClaimRequest, Clock, DeadLetterPolicy, Delivery, EndClaim, EntryFilter,
    EntryId, EntryView, Extend, Ledger, LedgerCapabilities, LedgerStats, MessageView, NewMessage, Page,
    QueueAdmin, QueueConfig, QueueName, QueueSource, QueueStats, QueueStore as _, Receive, RemainingLease,
    Renew, Resolution, ResolveError, Settle, SettleError, Settled, Source, StoreError, SystemClock, Tier,
    TokenError,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{Counts, Watch, Worker, WorkerBuilder, WorkerReport};

/// Timeout of every wait; only a test that hangs reaches it.
pub const TIMEOUT: Duration = Duration::from_mins(1);

pub struct Rig {
    pub store: Arc<Embedded>,
    pub elsewhere: Arc<TestLedger>,
    pub queue: QueueName,
    pub folder: tempfile::TempDir,
}

impl Rig {
    /// A store with the queue `jobs` and its dead-letter queue.
    pub async fn new(config: QueueConfig) -> Self {
        Self::on_clock(config, Arc::new(SystemClock::default())).await
    }

    /// The same, with the ledger elsewhere too, on a clock of the test's own.
    pub async fn on_clock(config: QueueConfig, clock: Arc<dyn Clock>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let options = Options { clock: clock.clone(), ..Options::default() };
        let store = Arc::new(Embedded::open(folder.path(), options).unwrap());
        let suffix = if config.is_fifo() { ".fifo" } else { "" };
        let dead = QueueName::new(format!("dead{suffix}")).unwrap();
        let queue = QueueName::new(format!("jobs{suffix}")).unwrap();
        store.create_queue(&dead, QueueConfig { kind: config.kind, ..QueueConfig::sqs() }).await.unwrap();
        let dead_letter = config.dead_letter.as_ref().map(|_| DeadLetterPolicy { queue: dead });
        store.create_queue(&queue, QueueConfig { dead_letter, ..config }).await.unwrap();
        Self { store, elsewhere: Arc::new(TestLedger::on_clock(clock)), queue, folder }
    }

    pub async fn tier(tier: Tier) -> Self {
        Self::new(QueueConfig { tier, ..QueueConfig::sqs() }).await
    }

    /// A worker whose ledger is the store's own.
    pub fn builder(&self) -> WorkerBuilder {
        Worker::builder(self.store.clone(), self.queue.clone())
    }

    /// A worker whose ledger is in another store.
    pub fn builder_elsewhere(&self) -> WorkerBuilder {
        Worker::over(self.store.clone(), self.queue.clone()).ledger(self.elsewhere.clone())
    }

    pub async fn send(&self, message: NewMessage) {
        self.store.send(&self.queue, vec![message]).await.unwrap()[0].as_ref().unwrap();
    }

    pub async fn stats(&self) -> QueueStats {
        self.store.stats(&self.queue).await.unwrap()
    }

    pub async fn messages(&self, queue: &str) -> Vec<MessageView> {
        let browse = Browse { limit: 1_000, ..Browse::default() };
        self.store.browse(&QueueName::new(queue).unwrap(), browse).await.unwrap().items
    }
}

/// A queue whose messages die after this many attempts.
pub fn dies_after(max_attempts: u32, config: QueueConfig) -> QueueConfig {
    let queue = QueueName::new("dead").unwrap();
    let retry = config.retry.attempts(max_attempts);
    QueueConfig { retry, dead_letter: Some(DeadLetterPolicy { queue }), ..config }
}

/// Waits until a condition holds; fails after the timeout.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !holds().await {
        assert!(Instant::now() < deadline, "it took too long until {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Runs a worker until its counters meet the condition.
pub async fn run_until(worker: Worker, enough: impl Fn(&Counts) -> bool) -> WorkerReport {
    let watch = worker.watch();
    let done = async move { wait_for(&watch, enough).await };
    tokio::time::timeout(TIMEOUT, worker.run(done)).await.expect("the worker hangs").unwrap()
}

pub async fn wait_for(watch: &Watch, enough: impl Fn(&Counts) -> bool) {
    let deadline = Instant::now() + TIMEOUT;
    while !enough(&watch.counts()) {
        assert!(Instant::now() < deadline, "it took too long: {:?}", watch.counts());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// A ledger that can be told to fail.
pub struct TestLedger {
    inner: Arc<MemoryStore>,
    /// Calls that fail as if the ledger could not be reached.
    pub down: AtomicBool,
    /// Number of further calls that take effect but lose their answer.
    pub unanswered: AtomicU32,
    pub calls: AtomicU32,
    /// Claims take effect at once and are answered while this is open.
    gate: Arc<tokio::sync::RwLock<()>>,
}

impl TestLedger {
    pub fn on_clock(clock: Arc<dyn Clock>) -> Self {
        let inner = MemoryStore::new(clock);
        Self {
            inner,
            down: AtomicBool::new(false),
            unanswered: 0.into(),
            calls: 0.into(),
            gate: Arc::default(),
        }
    }

    /// Claims take effect, but are not answered until this is dropped.
    pub fn hold_claims(&self) -> impl Sized {
        self.gate.clone().try_write_owned().expect("no claim is under way")
    }

    fn up(&self) -> Result<(), StoreError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.down.load(Ordering::SeqCst) { Err(StoreError::Unavailable("told so".into())) } else { Ok(()) }
    }

    fn answer<T>(&self, answer: T) -> Result<T, StoreError> {
        let lose = |left: u32| left.checked_sub(1);
        match self.unanswered.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose) {
            Ok(_) => Err(StoreError::OutcomeUnknown("told so".into())),
            Err(_) => Ok(answer),
        }
    }
}

#[async_trait::async_trait]
impl Ledger for TestLedger {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.inner.ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        self.up()?;
        let answers = self.inner.claim(batch).await?;
        drop(self.gate.read().await);
        self.answer(answers)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        self.up()?;
        self.inner.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        self.up()?;
        self.answer(self.inner.end(batch).await?)
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        self.inner.entry(id).await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        self.inner.entries(filter).await
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.inner.resolve(id, resolution, by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.inner.forget(id, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.inner.ledger_stats().await
    }
}

/// A queue that can be told to fail.
pub struct TestSource {
    inner: QueueSource,
    /// While true, settles and heartbeats fail as if the store were unreachable.
    pub down: AtomicBool,
    /// Number of further settles that take effect but lose their answer.
    pub unanswered: AtomicU32,
    /// While true, leases cannot be extended, as after 12 h.
    pub too_long: AtomicBool,
    pub settles: AtomicU32,
    pub settle_calls: AtomicU32,
    /// A heartbeat with this delivery in it is never answered.
    pub stuck: std::sync::Mutex<Option<hapax_core::Receipt>>,
}

impl TestSource {
    pub fn new(rig: &Rig) -> Arc<Self> {
        let inner = QueueSource::new(rig.store.clone(), rig.queue.clone());
        Arc::new(Self {
            inner,
            down: AtomicBool::new(false),
            unanswered: 0.into(),
            too_long: AtomicBool::new(false),
            settles: 0.into(),
            settle_calls: 0.into(),
            stuck: std::sync::Mutex::default(),
        })
    }

    fn up(&self) -> Result<(), StoreError> {
        if self.down.load(Ordering::SeqCst) { Err(StoreError::Unavailable("told so".into())) } else { Ok(()) }
    }
}

#[async_trait::async_trait]
impl Source for TestSource {
    async fn describe(&self) -> Result<hapax_core::SourceDescription, StoreError> {
        self.inner.describe().await
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.up()?;
        self.inner.next(receive).await
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.settle_calls.fetch_add(1, Ordering::SeqCst);
        self.up()?;
        self.settles.fetch_add(batch.len() as u32, Ordering::SeqCst);
        let answers = self.inner.settle(batch).await?;
        let lose = |left: u32| left.checked_sub(1);
        match self.unanswered.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose) {
            Ok(_) => Err(StoreError::OutcomeUnknown("told so".into())),
            Err(_) => Ok(answers),
        }
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.up()?;
        let stuck = self.stuck.lock().unwrap().clone();
        if stuck.is_some_and(|stuck| batch.iter().any(|extend| extend.receipt == stuck)) {
            std::future::pending::<()>().await;
        }
        if self.too_long.load(Ordering::SeqCst) {
            let too_long = |extend: Extend| SettleError::LeaseTooLong {
                lease_ms: extend.lease_ms,
                lease_ms_max: hapax_core::policy::LEASE_MS_MAX,
            };
            return Ok(batch.into_iter().map(|extend| Err(too_long(extend))).collect());
        }
        self.inner.extend(batch).await
    }
}
