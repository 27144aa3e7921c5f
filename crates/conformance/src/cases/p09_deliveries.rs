//! Point 9: a delivery is committed before it is returned.

use hapax_core::{Receive, SettleError, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, config, now, seen};

pub(crate) async fn a_lease_survives_a_restart_and_ends_when_it_would_have(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let first = t.one(&jobs).await;
    t.advance(LEASE_MS / 2).await;
    t.restart().await;
    if t.exact() {
        t.hidden_for(&jobs, LEASE_MS / 2).await;
    } else {
        t.pass(LEASE_MS / 2).await;
    }
    let second = t.one(&jobs).await;
    assert_eq!((second.id, second.attempt), (first.id, 2));
    assert_eq!(t.settle(&jobs, &first, Settlement::Ack).await, Err(SettleError::Stale));
}

pub(crate) async fn a_lease_survives_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let receive = Receive { lease_ms: Some(3 * LEASE_MS), ..now(2) };
    let got = t.receive_with(&jobs, receive).await;
    t.crash().await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[0]).await;
    t.pass(3 * LEASE_MS).await;
    let back = t.one(&jobs).await;
    assert_eq!((back.id, back.attempt), (got[1].id, 2), "the lost attempt was counted");
}

pub(crate) async fn an_extension_survives_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.extend(&jobs, &got, 3 * LEASE_MS).await.unwrap();
    t.crash().await;
    t.advance(LEASE_MS + LEASE_MS / 2).await;
    t.none(&jobs).await;
    t.ack(&jobs, &got).await;
}

pub(crate) async fn a_lease_that_ran_out_while_the_store_was_down_is_over(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.one(&jobs).await;
    t.crash().await;
    t.pass(LEASE_MS).await;
    t.crash().await;
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn what_is_acked_on_receive_never_returns(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let receive = Receive { ack_on_receive: true, ..now(1) };
    let got = t.receive_with(&jobs, receive.clone()).await;
    assert_eq!((bodies(&got), got[0].attempt), (vec!["a".to_owned()], 1));
    assert_eq!(t.stats(&jobs).await.in_flight, 0);
    t.crash().await;
    t.pass(LEASE_MS).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["b"]);
    assert_eq!(bodies(&t.receive_with(&jobs, receive).await), ["b"]);
    t.none(&jobs).await;
}

pub(crate) async fn what_a_fifo_group_acks_on_receive_does_not_block_it(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let receive = Receive { ack_on_receive: true, ..now(1) };
    assert_eq!(bodies(&t.receive_with(&jobs, receive).await), ["a"]);
    assert_eq!(t.one(&jobs).await.body, "b");
}

pub(crate) async fn each_answer_of_many_rounds_survives_a_crash(mut t: Trial) {
    let jobs = t.create("jobs", hapax_core::QueueConfig { lease_ms: 600_000, ..config() }).await;
    let mut live: Vec<String> = Vec::new();
    for round in 0..8 {
        let batch: Vec<String> = (0..5).map(|n| format!("{round}-{n}")).collect();
        t.send_all(&jobs, &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
        live.extend(batch);
        let got = t.receive(&jobs, 3).await;
        t.ack(&jobs, &got[0]).await;
        live.retain(|body| body.as_bytes() != got[0].body);
        t.fail(&jobs, &got[1], "boom").await;
        t.crash().await;
        let mut all = seen(&t.browse(&jobs).await);
        all.sort();
        let mut expected = live.clone();
        expected.sort();
        assert_eq!(all, expected, "round {round}");
        t.ack(&jobs, &got[2]).await;
        live.retain(|body| body.as_bytes() != got[2].body);
    }
}
