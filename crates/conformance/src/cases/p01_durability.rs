//! Point 1: a send is durable when it returns; a receive hides a message for its lease; an unsettled message returns.

use std::collections::BTreeMap;

use hapax_core::{MessageState, QueueConfig, Receive, Settled, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, now, reject, text};

pub(crate) async fn an_unsettled_message_returns_when_its_lease_ends(t: Trial) {
    let jobs = t.standard("jobs").await;
    let sent = t.send_all(&jobs, &["a"]).await[0];
    let first = t.one(&jobs).await;
    t.hidden_for(&jobs, LEASE_MS).await;
    let second = t.one(&jobs).await;
    assert_eq!((second.id, first.attempt, second.attempt), (sent.id, 1, 2));
    assert_ne!(first.receipt, second.receipt);
}

pub(crate) async fn a_receive_chooses_its_own_lease(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.receive_with(&jobs, Receive { lease_ms: Some(LEASE_MS), ..now(1) }).await;
    if t.exact() {
        assert_eq!(got[0].lease_ms, LEASE_MS);
    }
    t.hidden_for(&jobs, LEASE_MS).await;
    t.one(&jobs).await;
}

pub(crate) async fn a_lease_of_zero_hides_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    for attempt in 1..=3 {
        let got = t.receive_with(&jobs, Receive { lease_ms: Some(0), ..now(1) }).await;
        assert_eq!(got[0].attempt, attempt);
    }
}

pub(crate) async fn what_was_sent_survives_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let mut expected = BTreeMap::new();
    for round in 0..5 {
        let batch: Vec<_> = (0..40).map(|n| format!("{round}-{n}")).collect();
        let refs: Vec<&str> = batch.iter().map(String::as_str).collect();
        let sent = t.send_all(&jobs, &refs).await;
        expected.extend(sent.iter().map(|sent| sent.id).zip(batch));
        t.crash().await;
    }
    let got = t.receive(&jobs, 1000).await;
    let got: BTreeMap<_, _> =
        got.iter().map(|d| (d.id, String::from_utf8_lossy(&d.body).into_owned())).collect();
    assert_eq!(got, expected);
}

pub(crate) async fn what_was_acked_never_returns(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    t.ack(&jobs, &got[0]).await;
    t.crash().await;
    t.ack(&jobs, &got[2]).await;
    t.crash().await;
    t.pass(LEASE_MS).await;
    let back = t.one(&jobs).await;
    assert_eq!(back.id, got[1].id);
    t.ack(&jobs, &back).await;
    t.restart().await;
    t.pass(LEASE_MS).await;
    t.none(&jobs).await;
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn attempts_and_history_survive_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let receive = Receive { consumer: Some("worker-1".into()), ..now(1) };
    let first = t.receive_with(&jobs, receive).await.remove(0);
    t.fail(&jobs, &first, "boom").await;
    t.crash().await;
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!((view.attempts, view.history.len()), (1, 1));
    assert_eq!(view.history[0].error.as_deref(), Some("boom"));
    assert_eq!(view.history[0].consumer.as_deref(), Some("worker-1"));
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn delays_and_backoff_survive_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["retried"]).await;
    let got = t.one(&jobs).await;
    let settlement = Settlement::Retry { after_ms: Some(LEASE_MS), error: None };
    assert_eq!(t.settle(&jobs, &got, settlement).await, Ok(Settled::Returned { after_ms: LEASE_MS }));
    t.send(&jobs, text("delayed").delay_ms(LEASE_MS)).await;
    t.crash().await;
    t.hidden_for(&jobs, LEASE_MS).await;
    assert_eq!(t.receive(&jobs, 10).await.len(), 2);
}

pub(crate) async fn parked_messages_survive_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.settle(&jobs, &got, reject("bad")).await.unwrap();
    t.crash().await;
    t.pass(LEASE_MS).await;
    t.none(&jobs).await;
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!((view.id, view.state), (got.id, MessageState::Parked));
}

pub(crate) async fn two_receivers_never_hold_the_same_message(t: Trial) {
    let jobs = t.standard("jobs").await;
    let batch: Vec<_> = (0..200).map(|n| n.to_string()).collect();
    t.send_all(&jobs, &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut waiting = Vec::new();
    for _ in 0..40 {
        waiting.push(t.wait(&jobs, now(5)).await);
    }
    let mut ids = Vec::new();
    for one in waiting {
        ids.extend(t.woken(one).await.iter().map(|d| d.id));
    }
    let count = ids.len();
    ids.sort_unstable();
    ids.dedup();
    assert_eq!((count, ids.len()), (200, 200), "each message once");
}
