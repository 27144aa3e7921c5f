//! The typed facade: values in, values out, and clear errors for other content.

use hapax::{Error, Hapax, NewMessage, QueueConfig, Receive, SettleError};
use std::time::Duration;

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
async fn ensure_never_changes_a_queue_that_is_there_and_apply_does() {
    let (_folder, hapax, jobs) = jobs().await;
    let lease = || async { hapax.store().queue(jobs.name()).await.unwrap().config.lease_ms };
    jobs.ensure(QueueConfig::default()).await.unwrap();
    let other = QueueConfig::default().lease(Duration::from_secs(5));
    let error = jobs.ensure(other.clone()).await.unwrap_err();
    assert!(matches!(&error, Error::QueueDiffers { field, .. } if field == "lease_ms"), "{error}");
    assert!(error.code() == "queue-exists" && error.to_string().contains("`apply`"), "{error}");
    assert_eq!(lease().await, 30_000, "nothing was changed");
    jobs.apply(other).await.unwrap();
    assert_eq!(lease().await, 5_000);
}

#[tokio::test]
async fn one_call_makes_a_queue_and_the_one_for_its_dead_letters() {
    let (_folder, hapax, _) = jobs().await;
    for (name, dead, config) in [
        ("mails", "mails-dead", QueueConfig::default()),
        ("orders.fifo", "orders-dead.fifo", QueueConfig::fifo()),
    ] {
        let queue = hapax.queue::<Job>(name).unwrap();
        for _ in 0..2 {
            let letters = queue.ensure_with_dead_letters(config.clone()).await.unwrap();
            assert_eq!(letters.name().as_str(), dead);
        }
        let made = hapax.store().queue(queue.name()).await.unwrap().config;
        assert_eq!(made.dead_letter.unwrap().queue.as_str(), dead);
        queue.send_with(&Job { n: 1 }, |message| grouped(name, message)).await.unwrap();
        queue.receive(Receive::up_to(1)).await.unwrap().remove(0).reject("no").await.unwrap();
        let letters = hapax.queue::<Job>(dead).unwrap();
        let dead = letters.receive(Receive::up_to(1)).await.unwrap().remove(0);
        assert_eq!(dead.delivery().dead.as_ref().unwrap().error.as_deref(), Some("no"));
    }
}

fn grouped(queue: &str, message: NewMessage) -> NewMessage {
    let fifo = queue.strip_suffix(".fifo");
    fifo.map_or(message.clone(), |_| message.group("g".parse().unwrap()).dedup("d".parse().unwrap()))
}

#[tokio::test]
async fn a_key_given_at_the_send_is_the_messages_own() {
    let (_folder, _hapax, jobs) = jobs().await;
    jobs.send_keyed(&Job { n: 1 }, "order-1").await.unwrap();
    let received = jobs.receive(Receive::up_to(1)).await.unwrap().remove(0);
    let key = received.delivery().attributes[hapax::core::message::IDEMPOTENCY_KEY_ATTRIBUTE].clone();
    assert_eq!(key.as_text(), Some("order-1"));
    let error = jobs.send_keyed(&Job { n: 1 }, "").await.unwrap_err();
    assert_eq!(error.code(), "invalid", "{error}");
}

#[tokio::test]
async fn a_batch_has_one_result_per_value_in_order() {
    let folder = tempfile::tempdir().unwrap();
    let hapax = Hapax::open(&format!("embedded:{}", folder.path().display())).await.unwrap();
    let texts = hapax.queue::<String>("texts").unwrap();
    texts.ensure(QueueConfig::default()).await.unwrap();
    assert!(texts.send_batch(&[]).await.is_empty());
    // More than one call accepts, in count and in bytes; and one value that is too large for every
    // queue.
    let mut values: Vec<String> = (0..2_500).map(|n| n.to_string()).collect();
    values.extend((0..9).map(|_| "x".repeat(900_000)));
    values[1_234] = "x".repeat(2_000_000);
    let answers = texts.send_batch(&values).await;
    assert_eq!(answers.len(), values.len());
    for (at, answer) in answers.iter().enumerate() {
        match answer {
            Ok(_) => assert_ne!(at, 1_234),
            Err(error) => assert_eq!((at, error.code()), (1_234, "too-large")),
        }
    }
    let ready = hapax.store().stats(texts.name()).await.unwrap().ready;
    assert_eq!(ready, values.len() as u64 - 1);

    let nowhere = hapax.queue::<u64>("nowhere").unwrap();
    let answers = nowhere.send_batch(&[1, 2]).await;
    let codes: Vec<_> = answers.into_iter().map(|answer| answer.unwrap_err().code()).collect();
    assert_eq!(codes, ["no-such-queue"; 2]);
}

#[tokio::test]
async fn times_are_durations() {
    let (_folder, hapax, jobs) = jobs().await;
    jobs.send_with(&Job { n: 1 }, |message| message.delay(Duration::from_mins(5))).await.unwrap();
    assert_eq!(hapax.store().stats(jobs.name()).await.unwrap().delayed, 1);
    jobs.send(&Job { n: 2 }).await.unwrap();
    let receive = Receive::up_to(1).lease(Duration::from_secs(7)).wait(Duration::ZERO);
    let received = jobs.receive(receive).await.unwrap().remove(0);
    let left = received.extend(Duration::from_mins(1)).await.unwrap();
    assert!(left > Duration::from_secs(50) && left <= Duration::from_mins(1), "{left:?}");
    received.defer(Duration::from_mins(1)).await.unwrap();
    assert_eq!(hapax.store().stats(jobs.name()).await.unwrap().delayed, 2);
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
async fn opening_the_same_folder_twice_in_one_process_says_so() {
    let (folder, _hapax, _jobs) = jobs().await;
    let error = Hapax::open(&format!("embedded:{}", folder.path().display())).await.err().unwrap();
    let text = error.to_string();
    assert!(text.contains("already open in this process") && text.contains("clone"), "{text}");
    assert_eq!(error.code(), "store-in-use");
}
