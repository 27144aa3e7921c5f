//! Hapax in process: one task per lifecycle in flight; each sends, receives and acks one message at a time.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive, Settle};
use hapax_embedded::{Embedded, Options};
use hapax_observe::ObservedStore;
use hapax_observe::trace::Tracer;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::{Contestant, Turn};

pub struct Ours<'a> {
    runtime: &'a Runtime,
    pub store: Arc<Embedded>,
    queue: QueueName,
    body: Bytes,
}

impl<'a> Ours<'a> {
    pub fn open(runtime: &'a Runtime, folder: &Path, bytes: usize) -> Self {
        let store = Arc::new(Embedded::open(folder, Options::default()).expect("the store opens"));
        let queue = QueueName::new("jobs").expect("a name");
        runtime.block_on(store.create_queue(&queue, QueueConfig::sqs())).expect("a queue is made");
        Self { runtime, store, queue, body: vec![7; bytes].into() }
    }

    /// Sends this many messages, in batches.
    pub fn fill(&self, messages: u64) {
        const BATCH: u64 = 1000;
        let mut left = messages;
        while left > 0 {
            let count = left.min(BATCH);
            let batch = (0..count).map(|_| NewMessage::new(self.body.clone())).collect();
            let sent = self.runtime.block_on(self.store.send(&self.queue, batch)).expect("a batch is sent");
            assert!(sent.iter().all(Result::is_ok));
            left -= count;
        }
    }

    /// Runs this many lifecycles, one after the other.
    pub fn run(&self, count: usize) {
        let more = |done| done < count as u64;
        self.runtime.block_on(lifecycles(&*self.store, &self.queue, &self.body, more));
    }

    /// The same behind an observed store; one message in a hundred is traced, and its spans are dropped.
    pub fn run_observed(&self, count: usize) {
        let (tracer, mut spans) = Tracer::new(0.01);
        let store = ObservedStore::new(self.store.clone()).only_process().traced(Arc::new(tracer));
        let more = |done| done < count as u64;
        self.runtime.block_on(async {
            let dropping = tokio::spawn(async move { while spans.recv().await.is_some() {} });
            lifecycles(&store, &self.queue, &self.body, more).await;
            drop(store);
            dropping.await.expect("it ends with the tracer");
        });
    }

    pub fn ready(&self) -> u64 {
        self.runtime.block_on(self.store.stats(&self.queue)).expect("the queue is there").ready
    }
}

async fn lifecycles(
    store: &impl QueueStore,
    queue: &QueueName,
    body: &Bytes,
    more: impl Fn(u64) -> bool,
) -> u64 {
    let mut done = 0;
    while more(done) {
        let sent = store.send(queue, vec![NewMessage::new(body.clone())]).await.expect("the store answers");
        assert!(sent[0].is_ok());
        let receive = Receive { max: 1, wait_ms: Some(20_000), ..Receive::default() };
        let mut deliveries = store.receive(queue, receive).await.expect("the store answers");
        let delivery = deliveries.pop().expect("there is a message for everyone");
        assert_eq!(delivery.body.len(), body.len());
        let settled = store.settle(queue, vec![Settle::ack(delivery.receipt)]).await;
        assert!(settled.expect("the store answers")[0].is_ok());
        done += 1;
    }
    done
}

impl Contestant for Ours<'_> {
    fn turn(&mut self, in_flight: usize, time: Duration) -> Turn {
        let before = self.store.commit_stats();
        let start = Instant::now();
        let done = self.runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for _ in 0..in_flight {
                let (store, queue, body) = (self.store.clone(), self.queue.clone(), self.body.clone());
                tasks.spawn(async move {
                    lifecycles(&*store, &queue, &body, |_| Instant::now() < start + time).await
                });
            }
            tasks.join_all().await
        });
        let secs = start.elapsed().as_secs_f64();
        let after = self.store.commit_stats();
        Turn {
            lifecycles: done.iter().sum(),
            secs,
            commits: after.commits - before.commits,
            synced: after.synced - before.synced,
            operations: after.operations - before.operations,
            cpu_secs: 0.0,
        }
    }
}
