//! The in-memory store on a clock that runs by itself: who waits is woken by what others do, not at the end of the wait.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use hapax_conformance::MemoryStore;
use hapax_core::{
    DeadLetterPolicy, Delivery, NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive,
    RedriveFilter, RedriveRequest, Settle, Settled, StoreError, SystemClock,
};

fn run(test: impl Future<Output = ()>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    runtime.block_on(test);
}

/// A queue whose messages die of their first failure, and its dead-letter queue.
async fn pair() -> (Arc<MemoryStore>, QueueName, QueueName) {
    let store = MemoryStore::new(Arc::new(SystemClock::default()));
    let [jobs, dead] = ["jobs", "dead"].map(|name| QueueName::new(name).unwrap());
    store.create_queue(&dead, QueueConfig::sqs()).await.unwrap();
    let own = QueueConfig::sqs();
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    let config = QueueConfig { retry: own.retry.attempts(1), dead_letter, ..own };
    store.create_queue(&jobs, config).await.unwrap();
    (store, jobs, dead)
}

fn receive(wait_ms: u64, lease_ms: u64) -> Receive {
    Receive { wait_ms: Some(wait_ms), lease_ms: Some(lease_ms), ..Receive::up_to(1) }
}

/// Starts a receive that waits for 20 seconds, and lets it reach the store.
async fn waiting(
    store: &Arc<MemoryStore>,
    queue: &QueueName,
) -> tokio::task::JoinHandle<Result<Vec<Delivery>, StoreError>> {
    let (store, queue) = (Arc::clone(store), queue.clone());
    let task = tokio::spawn(async move { store.receive(&queue, receive(20_000, 30_000)).await });
    // The runtime has one thread: after a yield the task has been polled.
    tokio::task::yield_now().await;
    task
}

async fn woken(task: tokio::task::JoinHandle<Result<Vec<Delivery>, StoreError>>) {
    let got = tokio::time::timeout(Duration::from_secs(10), task).await.expect("it is woken before its end");
    assert_eq!(got.unwrap().unwrap()[0].body, "a");
}

#[test]
fn a_dead_letter_of_a_lease_that_runs_out_wakes_who_waits_for_it() {
    run(async {
        let (store, jobs, dead) = pair().await;
        store.send(&jobs, vec![NewMessage::new("a")]).await.unwrap();
        let task = waiting(&store, &dead).await;
        assert_eq!(store.receive(&jobs, receive(0, 50)).await.unwrap().len(), 1);
        woken(task).await;
    });
}

#[test]
fn a_redrive_wakes_who_waits_for_its_messages() {
    run(async {
        let (store, jobs, dead) = pair().await;
        store.send(&jobs, vec![NewMessage::new("a")]).await.unwrap();
        let got = store.receive(&jobs, receive(0, 30_000)).await.unwrap().remove(0);
        let failed = Settle::retry(got.receipt, "boom");
        assert_eq!(store.settle(&jobs, vec![failed]).await.unwrap(), [Ok(Settled::Dead)]);
        let task = waiting(&store, &jobs).await;
        let (filter, by) = (RedriveFilter::default(), "test".to_owned());
        store
            .start_redrive(RedriveRequest { from: dead, to: None, filter, per_second: None, by })
            .await
            .unwrap();
        woken(task).await;
    });
}
