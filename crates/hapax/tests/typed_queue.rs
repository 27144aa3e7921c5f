//! The typed facade: values in, values out, and clear words when something else comes.

use hapax::{Error, Hapax, NewMessage, QueueConfig, Receive, SettleError};
use serde::{Deserialize, Serialize};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Job {
    n: u32,
}

async fn jobs() -> (tempfile::TempDir, Hapax, hapax::Queue<Job>) {
    let folder = tempfile::tempdir().unwrap();
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await.unwrap();
    let jobs = hapax.queue("jobs").unwrap();
    jobs.ensure(QueueConfig::default()).await.unwrap();
    (folder, hapax, jobs)
}

#[tokio::test]
async fn a_value_arrives_as_it_was_sent() {
    let (_folder, _hapax, jobs) = jobs().await;
    jobs.send(&Job { n: 3 }).await.unwrap();
    let received = jobs.receive(Receive::up_to(1)).await.unwrap().remove(0);
    assert_eq!(received.value().unwrap(), Job { n: 3 });
    received.ack().await.unwrap();
    assert!(jobs.receive(Receive::up_to(1)).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_body_of_another_type_is_an_error_and_still_can_be_settled() {
    let (_folder, hapax, jobs) = jobs().await;
    hapax.store().send(jobs.name(), vec![NewMessage::new("not json")]).await.unwrap();
    let received = jobs.receive(Receive::up_to(1)).await.unwrap().remove(0);
    assert!(matches!(received.value(), Err(Error::Decode(_))));
    received.reject("not json").await.unwrap();
    assert_eq!(hapax.store().stats(jobs.name()).await.unwrap().parked, 1);
}

#[tokio::test]
async fn ensure_changes_a_queue_that_is_there() {
    let (_folder, hapax, jobs) = jobs().await;
    jobs.ensure(QueueConfig { lease_ms: 5_000, ..QueueConfig::default() }).await.unwrap();
    assert_eq!(hapax.store().queue(jobs.name()).await.unwrap().config.lease_ms, 5_000);
}

#[tokio::test]
async fn a_second_ack_of_the_same_delivery_says_that_it_is_gone() {
    let (_folder, hapax, jobs) = jobs().await;
    jobs.send(&Job { n: 1 }).await.unwrap();
    let received = jobs.receive(Receive::up_to(1)).await.unwrap().remove(0);
    let again = hapax::Settle::ack(received.delivery().receipt.clone());
    received.ack().await.unwrap();
    assert_eq!(hapax.store().settle(jobs.name(), vec![again]).await.unwrap(), [Err(SettleError::Gone)]);
}

#[tokio::test]
async fn a_store_in_use_is_refused_and_the_holder_named() {
    let (folder, _hapax, _jobs) = jobs().await;
    let error =
        Hapax::open(&format!("embedded:{}", folder.path().display())).await.err().unwrap().to_string();
    assert!(error.contains("in use by process"), "{error}");
}
