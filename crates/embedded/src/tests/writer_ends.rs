//! However the writer ends, every caller gets an answer.

use std::sync::Arc;

use hapax_core::{NewMessage, QueueAdmin, QueueConfig, QueueName, QueueStore, Receive, StoreError};

use crate::{Embedded, Options};

fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

async fn started(folder: &std::path::Path) -> Arc<Embedded> {
    let store = Embedded::open(folder, Options::default()).unwrap();
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    Arc::new(store)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_panic_in_the_writer_answers_waiting_calls_and_refuses_new_ones() {
    let folder = tempfile::tempdir().unwrap();
    let store = started(folder.path()).await;
    store.create_queue(&"other".parse().unwrap(), QueueConfig::sqs()).await.unwrap();
    store.send(&"other".parse().unwrap(), vec![NewMessage::new("12345"); 3]).await.unwrap();
    let waiting = tokio::spawn({
        let store = store.clone();
        let wait = Receive { wait_ms: Some(20_000), ..Receive::default() };
        async move { store.receive(&queue(), wait).await }
    });
    let failed = store.state.job(|_, _| panic!("a defect, on purpose")).await;
    let failed: Result<(), _> = failed;
    assert!(matches!(failed, Err(StoreError::OutcomeUnknown(_))), "{failed:?}");
    // The receive was waiting, or came after the panic.
    let waited = waiting.await.unwrap().unwrap_err();
    assert!(matches!(waited, StoreError::OutcomeUnknown(_) | StoreError::Unavailable(_)), "{waited}");
    // Joins the thread: later operations must be rejected.
    store.close();
    let sent = store.send(&queue(), vec![NewMessage::new("x")]).await;
    assert!(matches!(sent, Err(StoreError::Unavailable(_))), "{sent:?}");
    let status = store.status().await.unwrap();
    assert!(status.stopped.unwrap().contains("defect"));
    assert_eq!((status.messages, status.bytes), (3, 15), "what it held is not nothing");
    let again = started(folder.path()).await;
    again.send(&queue(), vec![NewMessage::new("x")]).await.unwrap()[0].as_ref().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_answers_waiting_calls_and_a_second_close_waits() {
    for _ in 0..20 {
        let folder = tempfile::tempdir().unwrap();
        let store = started(folder.path()).await;
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..6 {
            let store = store.clone();
            tasks.spawn(async move {
                let wait = Receive { wait_ms: Some(20_000), ..Receive::default() };
                match task {
                    0 | 1 => {
                        let answer = store.receive(&queue(), wait).await;
                        assert!(matches!(answer, Ok(_) | Err(StoreError::Unavailable(_))), "{answer:?}");
                    }
                    2 | 3 => {
                        let answer = store.send(&queue(), vec![NewMessage::new("x")]).await;
                        assert!(matches!(answer, Ok(_) | Err(StoreError::Unavailable(_))), "{answer:?}");
                    }
                    _ => {
                        tokio::task::spawn_blocking(move || store.close()).await.unwrap();
                    }
                }
            });
        }
        store.close();
        // The folder is free as soon as any close returns.
        Embedded::open(folder.path(), Options::default()).unwrap();
        tasks.join_all().await;
    }
}
