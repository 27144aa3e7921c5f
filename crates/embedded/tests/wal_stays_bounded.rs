//! The log does not grow with the amount of work.

mod common;

use std::sync::Arc;

use common::queue;
use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueStore, Receive, Settle};
use hapax_embedded::{Embedded, Options};

const TASKS: usize = 4;
const TOTAL_BYTES: usize = 300 * 1024 * 1024;
const BODY_BYTES: usize = 60 * 1024;
const BATCH: usize = 10;
const WAL_BYTES_MAX: u64 = 64 * 1024 * 1024;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_sustained_load() {
    let folder = tempfile::tempdir().unwrap();
    let wal = folder.path().join("hapax.db-wal");
    let store = Arc::new(Embedded::open(folder.path(), Options::default()).unwrap());
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..TASKS {
        let (store, wal) = (store.clone(), wal.clone());
        tasks.spawn(async move {
            let mut largest = 0;
            for _ in 0..TOTAL_BYTES / BODY_BYTES / BATCH / TASKS {
                let batch = (0..BATCH).map(|_| NewMessage::new(vec![task as u8; BODY_BYTES])).collect();
                store.send(&queue(), batch).await.unwrap();
                let deliveries = store.receive(&queue(), Receive::up_to(BATCH)).await.unwrap();
                let acks = deliveries.into_iter().map(|d| Settle::ack(d.receipt)).collect();
                store.settle(&queue(), acks).await.unwrap();
                largest = std::fs::metadata(&wal).unwrap().len().max(largest);
            }
            largest
        });
    }
    let largest = tasks.join_all().await.into_iter().max().unwrap();
    println!("the log had at most {} MiB", largest >> 20);
    assert!(largest < WAL_BYTES_MAX, "{largest}");
    store.close();
    assert_eq!(
        std::fs::metadata(&wal).map_or(0, |file| file.len()),
        0,
        "closed in good order, nothing is left in it"
    );
}
