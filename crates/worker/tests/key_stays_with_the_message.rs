//! The idempotency key is decided when a message is sent, even if the queue's key pointer changes while workers run.

mod common;

use std::sync::Arc;

use common::{Rig, run_until};
use hapax_core::{
    EntryId, EntryState, KeySource, Ledger as _, NewMessage, QueueAdmin as _, QueueConfig, QueueStore as _,
    Tier,
};
use hapax_worker::{Cx, HandlerOutcome};

/// Each message keeps the key that it got when it was sent: an earlier message in its second attempt, and also a later
/// one although the worker was built before the change.
#[tokio::test]
async fn a_key_pointer_that_changes_under_a_worker_affects_new_messages_only() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let pointing = async |pointer: &str| {
        let config = rig.store.queue(&rig.queue).await.unwrap().config;
        let config = QueueConfig { key_pointer: Some(pointer.to_owned()), ..config };
        rig.store.set_queue(&rig.queue, config, None).await.unwrap();
    };
    let send = async || {
        let message = NewMessage::new(r#"{"a":"one","b":"two"}"#);
        rig.store.send(&rig.queue, vec![message]).await.unwrap()[0].as_ref().unwrap();
    };
    pointing("/a").await;
    send().await;
    let (ran, mut runs) = tokio::sync::mpsc::unbounded_channel();
    let changed = Arc::new(tokio::sync::Semaphore::new(0));
    let gate = changed.clone();
    let handler = move |_: serde_json::Value, cx: Cx| {
        let (ran, gate) = (ran.clone(), gate.clone());
        async move {
            ran.send((cx.idempotency_key().to_string(), cx.key_source())).unwrap();
            drop(gate.acquire().await.unwrap());
            if cx.attempt() == 1 { HandlerOutcome::retry("once more") } else { HandlerOutcome::Done(()) }
        }
    };
    let worker = rig.builder().handler(handler).build().await.unwrap();
    let change = async {
        assert_eq!(runs.recv().await.unwrap(), ("one".to_owned(), KeySource::Body));
        pointing("/b").await;
        changed.add_permits(1);
        assert_eq!(runs.recv().await.unwrap(), ("one".to_owned(), KeySource::Body), "its second attempt");
        send().await;
        assert_eq!(runs.recv().await.unwrap(), ("two".to_owned(), KeySource::Body));
    };
    let (report, ()) = tokio::join!(run_until(worker, |counts| counts.done == 2), change);
    assert_eq!(report.counts.replayed, 0, "{report:?}");
    for key in ["one", "two"] {
        let id = EntryId::of_queue(&rig.queue, key.parse().unwrap());
        assert_eq!(rig.store.entry(&id).await.unwrap().unwrap().state, EntryState::Completed, "{key}");
    }
}
