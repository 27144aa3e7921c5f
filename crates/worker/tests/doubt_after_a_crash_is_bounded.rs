//! Handlers that have ended wait for their outcomes to be recorded. After a crash their keys are in doubt, beside those of handlers that
//! run: a store that is slow to answer does not make them more than twice as many as may run.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use common::{Rig, TIMEOUT, until};
use hapax_core::{
    Batch, Delivery, EntryFilter, Extend, Ledger as _, NewMessage, QueueConfig, QueueSource, Receive,
    RemainingLease, Settle, SettleError, Settled, Source, SourceDescription, StoreError, Tier,
};
use hapax_worker::{Cx, HandlerOutcome, StopWhen};
use tokio::sync::watch;

const MESSAGES: usize = 100;

/// A source that settles nothing until it is let go on.
struct HeldSettles {
    source: QueueSource,
    go_on: watch::Receiver<bool>,
}

#[async_trait]
impl Source for HeldSettles {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        self.source.describe().await
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.source.next(receive).await
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.go_on.clone().wait_for(|go_on| *go_on).await.expect("the test is there");
        self.source.settle(batch).await
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.source.extend(batch).await
    }
}

/// Runs a worker with four places, of `each` messages, until nothing more begins; then lets it go on.
async fn works_on(each: usize) {
    let rig = Rig::new(QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() }).await;
    for number in 0..MESSAGES {
        rig.send(NewMessage::new(number.to_string())).await;
    }
    let (open, go_on) = watch::channel(false);
    let source = HeldSettles { source: QueueSource::new(rig.store.clone(), rig.queue.clone()), go_on };
    let runs = Arc::new(AtomicUsize::new(0));
    let counted = runs.clone();
    let builder = rig.builder().source(Arc::new(source)).concurrency(4).lease(Duration::from_mins(10));
    let builder = if each == 1 {
        builder.handler(move |_: u32, _: Cx| {
            counted.fetch_add(1, Ordering::SeqCst);
            async { Ok::<_, std::io::Error>(()) }
        })
    } else {
        builder.batch_handler(each, move |numbers: Vec<(u32, Cx)>| {
            counted.fetch_add(numbers.len(), Ordering::SeqCst);
            async move { numbers.iter().map(|_| HandlerOutcome::Done(())).collect::<Vec<_>>() }
        })
    };
    let worker = builder.stop_when(StopWhen::Empty).build().await.unwrap();
    let working = tokio::spawn(worker.run(std::future::pending()));
    let all = 4 * each;
    until("it goes on while a settle is under way", async || runs.load(Ordering::SeqCst) > all).await;
    // More would have begun by now.
    for _ in 0..300 {
        let (runs, open) = (runs.load(Ordering::SeqCst), open_claims(&rig).await);
        assert!(runs <= 2 * all && open <= 2 * all, "{runs} runs and {open} claims, with {each} at a time");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    open.send_replace(true);
    let report = tokio::time::timeout(TIMEOUT, working).await.expect("it ends").unwrap().unwrap();
    assert_eq!((runs.load(Ordering::SeqCst), report.counts.done), (MESSAGES, MESSAGES as u64), "{report:?}");
    assert_eq!(open_claims(&rig).await, 0, "all outcomes are recorded");
}

/// Claims whose outcome is not recorded.
async fn open_claims(rig: &Rig) -> usize {
    let state = Some(hapax_core::EntryState::Processing);
    let filter = EntryFilter { state, limit: 1_000, ..EntryFilter::default() };
    rig.store.entries(filter).await.unwrap().items.len()
}

#[tokio::test]
async fn one_message_at_a_time() {
    works_on(1).await;
}

#[tokio::test]
async fn batches() {
    works_on(5).await;
}
