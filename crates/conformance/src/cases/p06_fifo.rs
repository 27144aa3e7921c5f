//! Point 6: FIFO groups.

use hapax_core::{How, QueueConfig, Receive, SendError, SettleError, Settled};

use crate::trial::{LEASE, Trial};
use crate::values::{bodies, dedup, exactly, fifo_config, group, in_group, now, text};

pub(crate) async fn a_group_is_received_in_the_order_of_its_sends(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    for pair in [["a", "b"], ["c", "d"], ["e", "f"]] {
        let sent = t.send_group(&jobs, "g", &pair).await;
        assert!(sent[0].sequence < sent[1].sequence);
    }
    let mut got = Vec::new();
    for _ in 0..3 {
        let batch = t.receive(&jobs, 2).await;
        got.extend(bodies(&batch));
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
        t.restart().await;
    }
    assert_eq!(got, ["a", "b", "c", "d", "e", "f"]);
}

pub(crate) async fn one_receive_may_take_several_of_a_group_in_order(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&got), ["a", "b", "c"]);
    assert!(got.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
}

pub(crate) async fn a_group_is_blocked_while_any_of_its_batch_is_in_flight(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 2).await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[0]).await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[1]).await;
    assert_eq!(t.one(&jobs).await.body, "c");
}

pub(crate) async fn other_groups_are_not_blocked(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["g1", "g2"]).await;
    t.receive(&jobs, 1).await;
    t.send_group(&jobs, "h", &["h1", "h2"]).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["h1", "h2"]);
    t.none(&jobs).await;
}

pub(crate) async fn each_group_keeps_its_order_when_groups_are_mixed(t: Trial) {
    let jobs = t.fifo("jobs").await;
    for round in 0..5 {
        for name in ["g", "h", "i"] {
            t.send_group(&jobs, name, &[&format!("{name}{round}")]).await;
        }
    }
    let mut got = Vec::new();
    while got.len() < 15 {
        let batch = t.receive(&jobs, 4).await;
        assert!(!batch.is_empty(), "all were acked, so something is ready: {got:?}");
        got.extend(bodies(&batch));
        for delivery in &batch {
            t.ack(&jobs, delivery).await;
        }
    }
    for name in ["g", "h", "i"] {
        let own: Vec<_> = got.iter().filter(|body| body.starts_with(name)).cloned().collect();
        assert_eq!(own, (0..5).map(|round| format!("{name}{round}")).collect::<Vec<_>>());
    }
}

pub(crate) async fn a_failure_inside_a_batch_returns_the_rest_uncounted(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c", "d"]).await;
    let got = t.receive(&jobs, 3).await;
    t.ack(&jobs, &got[0]).await;
    assert_eq!(t.fail(&jobs, &got[1], "boom").await, Settled::Returned { after_ms: 0 });
    let late = t.settle(&jobs, &got[2], How::Ack).await;
    assert!(
        matches!(late, Err(SettleError::Stale | SettleError::NotInFlight | SettleError::Expired)),
        "{late:?}"
    );
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["b", "c", "d"]);
    assert_eq!(again.iter().map(|d| d.attempt).collect::<Vec<_>>(), [2, 1, 1]);
    assert_eq!(t.settle(&jobs, &got[2], How::Ack).await, Err(SettleError::Stale));
}

pub(crate) async fn a_failure_leaves_earlier_messages_of_its_batch_in_flight(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    t.fail(&jobs, &got[1], "boom").await;
    t.none(&jobs).await;
    t.ack(&jobs, &got[0]).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["b", "c"]);
}

pub(crate) async fn a_failure_of_one_group_leaves_the_others_of_its_receive(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["g1"]).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    let got = t.receive(&jobs, 10).await;
    let find = |body: &str| got.iter().find(|d| d.body == body.as_bytes()).expect("received");
    t.fail(&jobs, find("g1"), "boom").await;
    t.ack(&jobs, find("h1")).await;
    assert_eq!(t.one(&jobs).await.body, "g1");
}

pub(crate) async fn order_holds_when_a_batch_runs_out_of_its_lease(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c", "d"]).await;
    t.receive(&jobs, 3).await;
    t.hidden_for(&jobs, LEASE).await;
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b", "c", "d"]);
    assert_eq!((again[0].attempt, again[3].attempt), (2, 1));
}

pub(crate) async fn a_backing_off_head_blocks_its_group(mut t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { retry: exactly(1_000, 0), ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Returned { after_ms: 1_000 });
    t.restart().await;
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"]);
}

pub(crate) async fn a_deferred_head_blocks_its_group(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &got, How::Defer { after_ms: 1_000 }).await.unwrap();
    t.hidden_for(&jobs, 1_000).await;
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b"]);
    assert_eq!(again[0].attempt, 1);
}

pub(crate) async fn a_delayed_head_blocks_its_group(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { delay_ms: 1_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a"]).await;
    t.set(&jobs, fifo_config()).await;
    t.send_group(&jobs, "g", &["b"]).await;
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"]);
}

pub(crate) async fn a_message_given_back_comes_again_first(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.extend(&jobs, &got, 0).await.unwrap();
    let again = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&again), ["a", "b"]);
    assert_eq!(again[0].attempt, 2);
}

pub(crate) async fn a_blocked_group_stays_blocked_through_a_crash(mut t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 60_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.crash().await;
    t.none(&jobs).await;
    t.ack(&jobs, &got).await;
    assert_eq!(t.one(&jobs).await.body, "b");
}

pub(crate) async fn a_repeated_receive_attempt_gives_the_same_deliveries(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let receive = Receive { attempt_id: Some("try-1".into()), ..now(2) };
    let first = t.receive_with(&jobs, receive.clone()).await;
    t.advance(LEASE / 2).await;
    let again = t.receive_with(&jobs, receive).await;
    let told = |all: &[hapax_core::Delivery]| {
        all.iter().map(|d| (d.id, d.receipt.clone(), d.fence, d.attempt)).collect::<Vec<_>>()
    };
    assert_eq!(told(&again), told(&first));
    assert_eq!(bodies(&again), ["a", "b"]);
    t.none(&jobs).await;
    let other = Receive { attempt_id: Some("try-2".into()), ..now(2) };
    assert!(t.receive_with(&jobs, other).await.is_empty(), "another attempt finds the group blocked");
    // The lease began anew with the repetition.
    t.hidden_for(&jobs, LEASE).await;
    assert_eq!(t.receive(&jobs, 1).await[0].attempt, 2);
}

pub(crate) async fn a_repeated_receive_attempt_can_be_settled(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let receive = Receive { attempt_id: Some("try-1".into()), ..now(1) };
    let first = t.receive_with(&jobs, receive.clone()).await.remove(0);
    t.receive_with(&jobs, receive).await;
    t.ack(&jobs, &first).await;
    assert_eq!(t.one(&jobs).await.body, "b");
}

pub(crate) async fn a_fifo_message_needs_a_group_and_an_identity_and_takes_no_delay(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let batch = vec![
        text("no group").dedup(dedup("1")),
        text("no identity").group(group("g")),
        in_group("g", "delayed").delay_ms(1_000),
        in_group("g", "good"),
    ];
    let sent = t.send_batch(&jobs, batch).await;
    for refused in &sent[..3] {
        assert!(matches!(refused, Err(SendError::Invalid(_))), "{refused:?}");
    }
    assert!(sent[3].is_ok());
    assert_eq!(t.one(&jobs).await.body, "good");
}
