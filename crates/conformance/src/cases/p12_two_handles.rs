//! Several processes on one store: each sees the effects of the other.

use hapax_core::{QueueConfig, RedriveRequest, RedriveState, Settled, Settlement};

use crate::trial::Trial;
use crate::values::{bodies, config, dedup, fifo_config, group, receive_waiting, redrive_from, reject, text};

pub(crate) async fn a_send_on_one_handle_wakes_a_receive_on_the_other(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    assert!(!waiting.is_over());
    other.send(&jobs, text("a")).await;
    assert_eq!(bodies(&t.woken(waiting).await), ["a"]);
}

pub(crate) async fn a_message_is_held_once_across_handles(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    t.send_all(&jobs, &["a", "b"]).await;
    let (first, second) = (t.receive(&jobs, 1).await, other.receive(&jobs, 10).await);
    assert_eq!((first.len(), second.len()), (1, 1));
    assert_ne!(first[0].id, second[0].id);
    t.none(&jobs).await;
    other.none(&jobs).await;
}

pub(crate) async fn a_receipt_settles_on_the_other_handle(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert!(other.extend(&jobs, &got, 60_000).await.is_ok());
    assert_eq!(other.settle(&jobs, &got, Settlement::Ack).await, Ok(Settled::Acked));
    assert!(t.settle(&jobs, &got, Settlement::Ack).await.is_err());
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn fences_grow_across_handles(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    t.send_all(&jobs, &["a"]).await;
    let mut last = 0;
    for turn in 0..10 {
        let handle = if turn % 2 == 0 { &t } else { &other };
        let got = handle.one(&jobs).await;
        assert!(got.fence.0 > last, "fence {} after {last} in turn {turn}", got.fence.0);
        last = got.fence.0;
        handle.fail(&jobs, &got, "again").await;
    }
}

pub(crate) async fn a_repeated_send_on_the_other_handle_adds_nothing(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    let first = t.send(&jobs, text("a").dedup(dedup("once"))).await;
    let again = other.send(&jobs, text("a").dedup(dedup("once"))).await;
    assert!(again.duplicate);
    assert_eq!((again.id, again.sequence), (first.id, first.sequence));
    assert_eq!(t.browse(&jobs).await.len(), 1);
}

pub(crate) async fn a_group_held_on_one_handle_is_blocked_on_the_other(t: Trial) {
    let (jobs, other) = (t.fifo("jobs").await, t.other_handle());
    t.send_group(&jobs, "g", &["a"]).await;
    other.send_group(&jobs, "g", &["b"]).await;
    let first = t.receive(&jobs, 1).await;
    assert_eq!(bodies(&first), ["a"]);
    other.none(&jobs).await;
    other.ack(&jobs, &first[0]).await;
    assert_eq!(bodies(&other.receive(&jobs, 10).await), ["b"]);
}

pub(crate) async fn changed_settings_hold_on_the_other_handle(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    let changed = QueueConfig { message_bytes_max: 1024, ..config() };
    t.set(&jobs, changed.clone()).await;
    assert_eq!(other.config_of(&jobs).await, changed);
    assert!(other.try_send(&jobs, text("x".repeat(2000))).await.is_err(), "the new limit holds");
}

pub(crate) async fn changed_settings_hold_on_a_handle_that_used_the_old_ones(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.other_handle());
    for handle in [&t, &other] {
        handle.send_all(&jobs, &["a"]).await;
        let got = handle.one(&jobs).await;
        handle.ack(&jobs, &got).await;
    }
    t.set(&jobs, QueueConfig { message_bytes_max: 1024, lease_ms: 7_000, ..config() }).await;
    assert!(other.try_send(&jobs, text("x".repeat(2000))).await.is_err(), "the new limit holds");
    other.send_all(&jobs, &["b"]).await;
    let lease_ms = other.one(&jobs).await.lease_ms;
    assert!(lease_ms <= 7_000, "the new lease holds: {lease_ms}");
}

pub(crate) async fn a_queue_that_is_made_again_on_one_handle_is_new_on_the_other(t: Trial) {
    let other = t.other_handle();
    for fifo in [false, true] {
        let (name, own) = if fifo { ("jobs.fifo", fifo_config()) } else { ("jobs", config()) };
        for (pointer, found) in [("/a", "one"), ("/b", "2"), ("/a", "one")] {
            let pointing = QueueConfig { key_pointer: Some(pointer.to_owned()), ..own.clone() };
            let jobs = t.create(name, pointing).await;
            let message = text(r#"{"a":"one","b":2}"#).group(group("g")).dedup(dedup("d"));
            other.send(&jobs, message).await;
            assert_eq!(t.browse(&jobs).await.len(), 1, "{name} {pointer}");
            let got = other.one(&jobs).await;
            assert_eq!(got.key.as_str(), found, "{name} {pointer}");
            t.within("delete", t.store().delete_queue(&jobs)).await.expect("it is deleted");
        }
    }
}

pub(crate) async fn a_redrive_is_seen_and_cancelled_on_the_other_handle(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let other = t.other_handle();
    let all: Vec<String> = (0..30).map(|n| format!("{n:02}")).collect();
    t.send_all(&jobs, &all.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for got in t.receive(&jobs, 30).await {
        t.settle(&jobs, &got, reject("no")).await.expect("it is rejected");
    }
    let task = t
        .try_redrive(RedriveRequest { per_second: Some(1), ..redrive_from(&dead) })
        .await
        .expect("it starts");
    assert_eq!(other.redrive_now(&task).await.state, RedriveState::Running);
    other.within("cancel", other.store().cancel_redrive(task.id)).await.expect("it is cancelled");
    assert_eq!(t.redriven(&task).await.state, RedriveState::Cancelled);
}
