//! The idempotency key is decided once, when a message is sent, and stays with it.

use hapax_core::{DedupPolicy, Delivery, IdempotencyKey, KeySource, NewMessage, QueueConfig, RedriveRequest};

use crate::trial::Trial;
use crate::values::{config, dedup, fifo_config, group, queue, redrive_from, reject, text};

fn pointing(pointer: &str) -> QueueConfig {
    QueueConfig { key_pointer: Some(pointer.to_owned()), ..config() }
}

fn keyed(body: &str, key: &str) -> NewMessage {
    text(body).idempotency_key(&IdempotencyKey::new(key).expect("a key"))
}

fn key_of(delivery: &Delivery) -> (String, KeySource) {
    (delivery.key.to_string(), delivery.key_source)
}

fn key(text: impl Into<String>, source: KeySource) -> (String, KeySource) {
    (text.into(), source)
}

/// A body with a value for each of two pointers.
const BODY: &str = r#"{"a":"one","b":2}"#;

/// One message for each source, and the key that it gets on a queue that points to `/a`.
fn of_each_source() -> Vec<(NewMessage, Option<(String, KeySource)>)> {
    vec![
        (keyed(BODY, "stated").dedup(dedup("d0")), Some(key("stated", KeySource::Attribute))),
        (text(BODY).dedup(dedup("d1")), Some(key("one", KeySource::Body))),
        (text(r#"{"a":["no key"]}"#).dedup(dedup("d2")), Some(key("d2", KeySource::DedupId))),
        (text("no JSON"), None),
    ]
}

pub(crate) async fn a_key_is_the_first_source_that_is_there(t: Trial) {
    let jobs = t.create("jobs", pointing("/a")).await;
    for (message, expected) in of_each_source() {
        let sent = t.send(&jobs, message).await;
        let got = t.one(&jobs).await;
        let by_id = || key(sent.id.to_string(), KeySource::MessageId);
        assert_eq!(key_of(&got), expected.unwrap_or_else(by_id));
        t.ack(&jobs, &got).await;
    }
}

pub(crate) async fn a_fifo_message_without_a_key_has_its_deduplication_id(t: Trial) {
    let by_content = DedupPolicy { content_based: true, ..DedupPolicy::default() };
    let jobs = t.create("jobs.fifo", QueueConfig { dedup: by_content, ..fifo_config() }).await;
    t.send(&jobs, text("a").group(group("g")).dedup(dedup("given"))).await;
    let got = t.one(&jobs).await;
    assert_eq!(key_of(&got), key("given", KeySource::DedupId));
    t.ack(&jobs, &got).await;
    t.send(&jobs, text("b").group(group("g"))).await;
    let got = t.one(&jobs).await;
    let made = got.dedup.as_ref().expect("an id made from the content").as_str();
    assert_eq!(key_of(&got), key(made, KeySource::DedupId));
}

pub(crate) async fn a_changed_pointer_affects_new_messages_only(mut t: Trial) {
    let jobs = t.create("jobs", pointing("/a")).await;
    t.send(&jobs, text(BODY)).await;
    let first = t.one(&jobs).await;
    assert_eq!(key_of(&first), key("one", KeySource::Body));
    t.set(&jobs, pointing("/b")).await;
    t.fail(&jobs, &first, "boom").await;
    t.crash().await;
    let again = t.one(&jobs).await;
    assert_eq!((again.id, key_of(&again)), (first.id, key("one", KeySource::Body)));

    t.send(&jobs, text(BODY)).await;
    assert_eq!(key_of(&t.one(&jobs).await), key("2", KeySource::Body));
    t.set(&jobs, config()).await;
    let sent = t.send(&jobs, text(BODY)).await;
    assert_eq!(key_of(&t.one(&jobs).await), key(sent.id.to_string(), KeySource::MessageId));
    // Sent when there was no pointer: a later pointer does not affect it.
    let waiting = t.send(&jobs, text(BODY)).await;
    t.set(&jobs, pointing("/a")).await;
    assert_eq!(key_of(&t.one(&jobs).await), key(waiting.id.to_string(), KeySource::MessageId));
}

pub(crate) async fn a_queue_that_is_made_again_has_its_own_pointer(t: Trial) {
    for (pointer, found) in [("/a", "one"), ("/b", "2"), ("/a", "one")] {
        let jobs = t.create("jobs", pointing(pointer)).await;
        t.send(&jobs, text(BODY)).await;
        assert_eq!(key_of(&t.one(&jobs).await), key(found, KeySource::Body), "{pointer}");
        t.store().delete_queue(&jobs).await.unwrap();
    }
}

pub(crate) async fn a_key_stays_in_the_dead_letters_and_after_a_redrive(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, pointing("/a")).await;
    t.create("other", pointing("/b")).await;
    let mut expected = Vec::new();
    for (message, known) in of_each_source() {
        let sent = t.send(&jobs, message).await;
        expected.push(known.unwrap_or_else(|| key(sent.id.to_string(), KeySource::MessageId)));
        let got = t.one(&jobs).await;
        t.settle(&jobs, &got, reject("no")).await.unwrap();
    }
    let bytes = t.stats(&dead).await.bytes;
    // Neither the pointer of the queue that they are in counts, nor the one of the queue that they go to.
    t.set(&dead, pointing("/b")).await;
    for to in [None, Some(queue("other"))] {
        let there = to.clone().unwrap_or_else(|| jobs.clone());
        t.redrive(RedriveRequest { to, ..redrive_from(&dead) }).await;
        t.crash().await;
        let mut back = t.receive(&there, 10).await;
        back.sort_by_key(|delivery| delivery.sequence);
        assert_eq!(back.iter().map(key_of).collect::<Vec<_>>(), expected);
        assert_eq!(t.stats(&there).await.bytes, bytes, "a key that travels is no part of the message's size");
        if there != jobs {
            return;
        }
        for delivery in back {
            assert_ne!(delivery.id.to_string(), delivery.key.as_str(), "the message id is new");
            t.settle(&jobs, &delivery, reject("again")).await.unwrap();
        }
        let mut letters = t.receive(&dead, 10).await;
        letters.sort_by_key(|delivery| delivery.sequence);
        assert_eq!(letters.iter().map(key_of).collect::<Vec<_>>(), expected, "as dead letters");
        for letter in letters {
            t.extend(&dead, &letter, 0).await.unwrap();
        }
    }
}
