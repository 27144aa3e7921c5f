//! A real store in a folder of its own, and a worker that runs until a condition holds.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_conformance::MemoryLedger;
use hapax_core::{
    Browse, DeadLetterPolicy, MessageView, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStats,
    QueueStore as _, SystemClock, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{Counts, Report, Watch, Worker, WorkerBuilder};

/// Nothing here takes so long; a test that does has hung.
pub const PATIENCE: Duration = Duration::from_mins(1);

pub struct Rig {
    pub store: Arc<Embedded>,
    pub ledger: Arc<MemoryLedger>,
    pub queue: QueueName,
    pub folder: tempfile::TempDir,
}

impl Rig {
    /// A store with the queue `jobs` and its dead letters.
    pub async fn new(config: QueueConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
        let suffix = if config.is_fifo() { ".fifo" } else { "" };
        let dead = QueueName::new(format!("dead{suffix}")).unwrap();
        let queue = QueueName::new(format!("jobs{suffix}")).unwrap();
        store.create_queue(&dead, QueueConfig { kind: config.kind, ..QueueConfig::default() }).await.unwrap();
        let dead_letter = config.dead_letter.clone().map(|policy| DeadLetterPolicy { queue: dead, ..policy });
        store.create_queue(&queue, QueueConfig { dead_letter, ..config }).await.unwrap();
        let ledger = Arc::new(MemoryLedger::new(Arc::new(SystemClock::default())));
        Self { store, ledger, queue, folder }
    }

    pub async fn tier(tier: Tier) -> Self {
        Self::new(QueueConfig { tier, ..QueueConfig::default() }).await
    }

    pub fn builder(&self) -> WorkerBuilder {
        Worker::over(self.store.clone(), self.queue.clone()).ledger(self.ledger.clone())
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

/// A queue whose messages die after so many attempts.
pub fn dies_after(max_attempts: u32, config: QueueConfig) -> QueueConfig {
    let queue = QueueName::new("dead").unwrap();
    QueueConfig { dead_letter: Some(DeadLetterPolicy { queue, max_attempts }), ..config }
}

/// Waits until something holds; fails when it takes too long.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "it took too long until {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

/// Runs a worker until its counters say so.
pub async fn run_until(worker: Worker, enough: impl Fn(&Counts) -> bool) -> Report {
    let watch = worker.watch();
    let done = async move { wait_for(&watch, enough).await };
    tokio::time::timeout(PATIENCE, worker.run(done)).await.expect("the worker hangs").unwrap()
}

pub async fn wait_for(watch: &Watch, enough: impl Fn(&Counts) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !enough(&watch.counts()) {
        assert!(Instant::now() < deadline, "it took too long: {:?}", watch.counts());
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
