//! A traced store accepts what the store behind it accepts, in the same order.

mod common;

use std::sync::Arc;

use common::Rig;
use hapax_core::{
    Attribute, DedupId, GroupId, NewMessage, QueueConfig, QueueStore as _, Receive, validate::ATTRIBUTES_MAX,
};
use hapax_observe::trace::{TRACEPARENT, Tracer};

fn in_group(body: String) -> NewMessage {
    let dedup = DedupId::new(&body[..4]).unwrap();
    NewMessage::new(body).group(GroupId::new("g").unwrap()).dedup(dedup)
}

/// Sends a batch to a queue that allows 2,000 bytes, every message traced; gives what a consumer gets, and whether it has a
/// context.
async fn traced(batch: Vec<NewMessage>) -> Vec<(String, bool)> {
    let rig = Rig::new(QueueConfig { message_bytes_max: 2_000, ..QueueConfig::fifo() }).await;
    let (tracer, mut spans) = Tracer::new(1.0);
    let store = rig.store.clone().traced(Arc::new(tracer));
    let count = batch.len();
    for sent in store.send(&rig.queue, batch).await.unwrap() {
        sent.unwrap();
    }
    for _ in 0..count {
        assert_eq!(spans.try_recv().unwrap().error, None, "each send has a span");
    }
    let receive = Receive { max: 10, wait_ms: Some(0), ..Receive::default() };
    let got = rig.store.receive(&rig.queue, receive).await.unwrap();
    let seen = got.into_iter().map(|got| {
        (
            String::from_utf8(got.body.to_vec()).unwrap()[..4].to_owned(),
            got.attributes.contains_key(TRACEPARENT),
        )
    });
    seen.collect()
}

#[tokio::test]
async fn a_message_without_room_for_a_context_keeps_its_turn() {
    let large = format!("two.{}", "x".repeat(1_996));
    let batch = ["one.".to_owned(), large, "tri.".to_owned()].map(in_group).to_vec();
    let seen = traced(batch).await;
    let seen: Vec<_> = seen.iter().map(|(body, has_context)| (body.as_str(), *has_context)).collect();
    assert_eq!(seen, [("one.", true), ("two.", false), ("tri.", true)]);
}

#[tokio::test]
async fn a_message_with_all_attributes_that_are_allowed_is_accepted() {
    let mut full = in_group("full".to_owned());
    for number in 0..ATTRIBUTES_MAX {
        full.attributes.insert(format!("a{number}"), Attribute::text("x"));
    }
    assert_eq!(
        traced(vec![full, in_group("next".to_owned())]).await,
        [("full".to_owned(), false), ("next".to_owned(), true)]
    );
}
