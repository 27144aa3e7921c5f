//! The contestants: two bare loops and the worker, each on its own store.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use hapax_core::{
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{Cx, Worker};
use tokio::sync::Notify;
use tokio::task::JoinSet;

const BODY_BYTES: usize = 256;

/// How a contestant handles messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Contestant {
    /// One loop: receives the maximum number in flight, and settles all of them in one call.
    Bare,
    /// One loop per message in flight: each receives one message and settles it.
    BareSingle,
    /// The worker, `at-least-once`.
    AtLeastOnce,
    /// The worker, `effectively-once`.
    EffectivelyOnce,
}

impl Contestant {
    pub const ALL: [Self; 4] = [Self::Bare, Self::BareSingle, Self::AtLeastOnce, Self::EffectivelyOnce];

    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::BareSingle => "bare-single",
            Self::AtLeastOnce => "at-least-once",
            Self::EffectivelyOnce => "effectively-once",
        }
    }

    fn tier(self) -> Tier {
        if self == Self::EffectivelyOnce { Tier::EffectivelyOnce } else { Tier::AtLeastOnce }
    }
}

/// A store with a queue.
pub struct Rig {
    contestant: Contestant,
    store: Arc<Embedded>,
    queue: QueueName,
}

/// Counts handled messages; completes when the target is reached.
struct Target {
    left: AtomicUsize,
    reached: Notify,
}

impl Target {
    fn new(messages: usize) -> Arc<Self> {
        Arc::new(Self { left: AtomicUsize::new(messages), reached: Notify::new() })
    }

    fn hit(&self) {
        if self.left.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.reached.notify_one();
        }
    }
}

/// The handler of both loops and of the worker.
fn handle(body: &Bytes) {
    assert_eq!(body.len(), BODY_BYTES);
}

impl Rig {
    pub async fn open(contestant: Contestant, folder: &Path) -> Self {
        let store = Arc::new(Embedded::open(folder, Options::default()).expect("the store opens"));
        let queue = QueueName::new("jobs").expect("a name");
        let config = QueueConfig { tier: contestant.tier(), ..QueueConfig::sqs() };
        store.create_queue(&queue, config).await.expect("a queue is made");
        Self { contestant, store, queue }
    }

    pub async fn fill(&self, messages: usize) {
        let body = Bytes::from(vec![b'7'; BODY_BYTES]);
        for from in (0..messages).step_by(1000) {
            let batch = (from..messages.min(from + 1000)).map(|_| NewMessage::new(body.clone())).collect();
            let sent = self.store.send(&self.queue, batch).await.expect("a batch is sent");
            assert!(sent.iter().all(Result::is_ok));
        }
    }

    pub fn commit_stats(&self) -> hapax_core::StoreTotals {
        self.store.commit_stats()
    }

    pub async fn ready(&self) -> u64 {
        self.store.stats(&self.queue).await.expect("the queue is there").ready
    }

    /// Handles at least this many messages, which must be in the queue; returns the number handled.
    pub async fn run(&self, messages: usize, in_flight: usize) -> u64 {
        match self.contestant {
            Contestant::Bare => self.bare(messages, in_flight).await,
            Contestant::BareSingle => self.bare_single(messages, in_flight).await,
            Contestant::AtLeastOnce | Contestant::EffectivelyOnce => self.worker(messages, in_flight).await,
        }
    }

    async fn bare(&self, messages: usize, in_flight: usize) -> u64 {
        let mut done = 0;
        while done < messages {
            // Fill the batch, even if that takes several receives.
            let wanted = in_flight.min(Receive::MAX).min(messages - done);
            let mut batch = Vec::with_capacity(wanted);
            while batch.len() < wanted {
                let max = wanted - batch.len();
                let receive = Receive { max, wait_ms: Some(20_000), ..Receive::default() };
                let deliveries = self.store.receive(&self.queue, receive).await.expect("the store answers");
                assert!(!deliveries.is_empty(), "there are messages enough");
                batch.extend(deliveries);
            }
            for delivery in &batch {
                handle(&delivery.body);
            }
            done += batch.len();
            let acks = batch.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
            let settled = self.store.settle(&self.queue, acks).await.expect("the store answers");
            assert!(settled.iter().all(Result::is_ok));
        }
        done as u64
    }

    async fn bare_single(&self, messages: usize, in_flight: usize) -> u64 {
        let left = Arc::new(AtomicUsize::new(messages));
        let mut loops = JoinSet::new();
        for _ in 0..in_flight {
            let (store, queue, left) = (self.store.clone(), self.queue.clone(), left.clone());
            loops.spawn(async move {
                while left
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
                    .is_ok()
                {
                    let receive = Receive { max: 1, wait_ms: Some(20_000), ..Receive::default() };
                    let delivery = store.receive(&queue, receive).await.expect("the store answers").pop();
                    let delivery = delivery.expect("there are messages enough");
                    handle(&delivery.body);
                    let settled = store.settle(&queue, vec![Settle::ack(delivery.receipt)]).await;
                    assert!(settled.expect("the store answers")[0].is_ok());
                }
            });
        }
        loops.join_all().await;
        messages as u64
    }

    async fn worker(&self, messages: usize, in_flight: usize) -> u64 {
        let target = Target::new(messages);
        let reached = target.clone();
        let handler = move |body: Bytes, _: Cx| {
            handle(&body);
            target.hit();
            async {}
        };
        let worker = Worker::builder(self.store.clone(), self.queue.clone())
            .raw_handler(handler)
            .concurrency(in_flight)
            .drain(Duration::from_mins(1))
            .build()
            .await
            .expect("the worker can be built");
        let report = worker.run(async move { reached.reached.notified().await }).await;
        let report = report.expect("the worker ends well");
        assert!(report.drained, "{report:?}");
        assert_eq!(report.counts.done, report.counts.delivered, "every message was handled once: {report:?}");
        report.counts.done
    }
}
