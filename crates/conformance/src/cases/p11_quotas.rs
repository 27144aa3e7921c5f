//! Point 11: quotas; a refusal is retryable.

use hapax_core::{QueueConfig, Quota, SendError};

use crate::trial::Trial;
use crate::values::{config, dedup, dying, reject, seen, text};

fn limited(messages_max: Option<u64>, bytes_max: Option<u64>) -> QueueConfig {
    QueueConfig { quota: Quota { messages_max, bytes_max }, lease_ms: 600_000, ..config() }
}

pub(crate) async fn a_full_queue_refuses_messages_until_some_are_acked(mut t: Trial) {
    let jobs = t.create("jobs", limited(Some(3), None)).await;
    let sent = t.send_batch(&jobs, ["a", "b", "c", "d"].map(text).to_vec()).await;
    assert!(sent[..3].iter().all(Result::is_ok), "{sent:?}");
    assert!(matches!(sent[3], Err(SendError::QuotaExceeded { used: 3, max: 3, .. })), "{:?}", sent[3]);
    let got = t.receive(&jobs, 2).await;
    assert!(t.try_send(&jobs, text("d")).await.is_err(), "what is in flight counts");
    t.restart().await;
    assert!(t.try_send(&jobs, text("d")).await.is_err(), "a restart frees nothing");
    t.settle(&jobs, &got[1], reject("bad")).await.unwrap();
    assert!(t.try_send(&jobs, text("d")).await.is_err(), "what is parked counts");
    t.ack(&jobs, &got[0]).await;
    assert!(t.try_send(&jobs, text("d")).await.is_ok());
    let full = t.try_send(&jobs, text("e")).await;
    assert!(matches!(full, Err(SendError::QuotaExceeded { .. })), "{full:?}");
}

pub(crate) async fn bytes_are_limited_too(mut t: Trial) {
    let jobs = t.create("jobs", limited(None, Some(100))).await;
    t.send(&jobs, text("x".repeat(60))).await;
    let full = t.try_send(&jobs, text("x".repeat(41))).await;
    assert!(matches!(full, Err(SendError::QuotaExceeded { max: 100, .. })), "{full:?}");
    t.send(&jobs, text("x".repeat(40))).await;
    t.crash().await;
    assert!(t.try_send(&jobs, text("x")).await.is_err());
    let got = t.receive(&jobs, 1).await.remove(0);
    t.ack(&jobs, &got).await;
    t.send(&jobs, text("x".repeat(60))).await;
}

pub(crate) async fn purging_and_discarding_make_room(t: Trial) {
    let jobs = t.create("jobs", limited(Some(1), None)).await;
    let first = t.send(&jobs, text("a")).await;
    t.store().discard(&jobs, vec![first.id], "suite").await.unwrap();
    t.send(&jobs, text("b")).await;
    t.store().purge(&jobs).await.unwrap();
    t.send(&jobs, text("c")).await;
}

pub(crate) async fn a_refused_message_leaves_no_trace(mut t: Trial) {
    let jobs = t.create("jobs", limited(Some(1), None)).await;
    t.send(&jobs, text("a")).await;
    assert!(t.try_send(&jobs, text("b").dedup(dedup("b"))).await.is_err());
    assert_eq!(t.stats(&jobs).await.totals.sent, 1);
    t.crash().await;
    assert_eq!(seen(&t.browse(&jobs).await), ["a"]);
    let got = t.one(&jobs).await;
    t.ack(&jobs, &got).await;
    assert!(!t.send(&jobs, text("b").dedup(dedup("b"))).await.duplicate, "its id was not remembered");
}

pub(crate) async fn a_repeated_send_is_a_duplicate_whatever_the_quota(t: Trial) {
    for messages_max in [1, 3] {
        let jobs = t.create(&format!("jobs-{messages_max}"), limited(Some(messages_max), None)).await;
        let message = || text("a").dedup(dedup("once"));
        let first = t.send(&jobs, message()).await;
        let again = t.try_send(&jobs, message()).await.expect("its first message is there");
        assert_eq!((again.id, again.duplicate), (first.id, true));
        assert_eq!(seen(&t.browse(&jobs).await), ["a"]);
    }
}

pub(crate) async fn a_full_dead_letter_queue_loses_nothing(t: Trial) {
    let dead = t.create("dead", limited(Some(1), None)).await;
    let jobs = t.create("jobs", dying(&dead, 1, config())).await;
    t.send_all(&jobs, &["a", "b"]).await;
    for got in t.receive(&jobs, 2).await {
        let _ = t.settle(&jobs, &got, reject("bad")).await;
    }
    let mut all = [seen(&t.browse(&jobs).await), seen(&t.browse(&dead).await)].concat();
    all.sort();
    assert_eq!(all, ["a", "b"]);
}
