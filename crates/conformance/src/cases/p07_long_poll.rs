//! Point 7: a waiting receive wakes at once, and a dropped one leaves no trace.

use std::time::Duration;

use hapax_core::{QueueConfig, Receive, Settlement, StoreError};

use crate::trial::{LEASE_MS, Trial, poll_once};
use crate::values::{bodies, config, dying, fifo_config, now, receive_waiting, redrive_from, reject, text};

pub(crate) async fn a_waiting_receive_wakes_on_a_send(t: Trial) {
    let jobs = t.standard("jobs").await;
    let waiting = t.wait(&jobs, receive_waiting(10)).await;
    let sent = t.send_all(&jobs, &["a"]).await[0];
    let got = t.woken(waiting).await;
    assert_eq!(got.iter().map(|d| d.id).collect::<Vec<_>>(), [sent.id]);
    t.ack(&jobs, &got[0]).await;
}

pub(crate) async fn a_waiting_receive_is_told_that_its_queue_was_deleted(t: Trial) {
    for jobs in [t.standard("jobs").await, t.create("again", config()).await] {
        let waiting = t.wait(&jobs, receive_waiting(10)).await;
        t.store().delete_queue(&jobs).await.unwrap();
        assert_eq!(t.ended(waiting).await, Err(StoreError::NoSuchQueue(jobs)));
    }
}

pub(crate) async fn a_receive_does_not_wait_when_something_is_ready(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    assert_eq!(
        t.receive_with(&jobs, receive_waiting(10)).await.len(),
        1,
        "it does not wait until ten are there"
    );
}

pub(crate) async fn a_waiting_receive_wakes_on_expiry(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.one(&jobs).await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.pass(LEASE_MS).await;
    assert_eq!(t.woken(waiting).await[0].attempt, 2);
}

pub(crate) async fn a_waiting_receive_wakes_when_a_message_is_given_back(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.extend(&jobs, &got, 0).await.unwrap();
    let got = t.woken(waiting).await.remove(0);
    assert_eq!(got.attempt, 2);

    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.fail(&jobs, &got, "boom").await;
    let got = t.woken(waiting).await.remove(0);
    assert_eq!(got.attempt, 3);

    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    assert_eq!(t.woken(waiting).await[0].attempt, 3);
}

pub(crate) async fn a_waiting_receive_wakes_when_a_lease_was_shortened(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.extend(&jobs, &got, 1_000).await.unwrap();
    t.pass(1_000).await;
    assert_eq!(t.woken(waiting).await[0].attempt, 2);
}

pub(crate) async fn a_waiting_receive_wakes_when_a_delay_is_over(t: Trial) {
    let jobs = t.standard("jobs").await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.send(&jobs, text("a").delay_ms(1_000)).await;
    t.pass(1_000).await;
    let got = t.woken(waiting).await.remove(0);
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.settle(&jobs, &got, Settlement::Retry { after_ms: Some(1_000), error: None }).await.unwrap();
    t.pass(1_000).await;
    assert_eq!(t.woken(waiting).await[0].attempt, 2);
}

pub(crate) async fn a_waiting_receive_wakes_when_its_group_is_free(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.ack(&jobs, &got).await;
    assert_eq!(bodies(&t.woken(waiting).await), ["b"]);
}

pub(crate) async fn a_waiting_receive_wakes_on_release_and_redrive(t: Trial) {
    let parked = t.standard("parked").await;
    t.send_all(&parked, &["a"]).await;
    let got = t.one(&parked).await;
    t.settle(&parked, &got, reject("bad")).await.unwrap();
    let waiting = t.wait(&parked, receive_waiting(1)).await;
    t.store().release(&parked, vec![got.id]).await.unwrap();
    assert_eq!(bodies(&t.woken(waiting).await), ["a"]);

    let (jobs, dead) = t.with_dead(1, config()).await;
    t.send_all(&jobs, &["b"]).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.redrive(redrive_from(&dead)).await;
    assert_eq!(bodies(&t.woken(waiting).await), ["b"]);
}

/// The limit of attempts was lowered, so the message dies when someone asks for it.
pub(crate) async fn a_waiting_receive_wakes_on_a_death_at_another_receive(t: Trial) {
    let (jobs, dead) = t.with_dead(10, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    t.set(&jobs, dying(&dead, 1, config())).await;
    let waiting = t.wait(&dead, receive_waiting(1)).await;
    t.none(&jobs).await;
    assert_eq!(bodies(&t.woken(waiting).await), ["a"]);
}

pub(crate) async fn a_waiting_receive_gives_up_at_its_deadline(t: Trial) {
    let jobs = t.standard("jobs").await;
    let waiting = t.wait(&jobs, Receive { wait_ms: Some(1_000), ..now(1) }).await;
    if t.exact() {
        t.advance(999).await;
        t.stats(&jobs).await;
        assert!(!waiting.is_over(), "it waits to the end");
        t.advance(1).await;
    } else {
        t.pass(1_000).await;
    }
    assert!(t.woken(waiting).await.is_empty());
    t.send_all(&jobs, &["a"]).await;
    assert_eq!(t.one(&jobs).await.attempt, 1, "what has given up takes nothing");
}

pub(crate) async fn a_queue_says_how_long_to_wait(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { wait_ms: 1_000, ..config() }).await;
    let waiting = t.wait(&jobs, Receive::up_to(1)).await;
    t.stats(&jobs).await;
    assert!(!waiting.is_over());
    t.pass(1_000).await;
    assert!(t.woken(waiting).await.is_empty());
    t.none(&jobs).await;
}

pub(crate) async fn a_lease_begins_with_the_delivery_not_with_the_wait(t: Trial) {
    let jobs = t.standard("jobs").await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    t.advance(LEASE_MS + LEASE_MS / 2).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.woken(waiting).await;
    assert!(got[0].lease_ms > LEASE_MS / 2);
    t.hidden_for(&jobs, LEASE_MS).await;
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn one_message_wakes_one_of_two(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    let (a, b) = (t.wait(&jobs, receive_waiting(1)).await, t.wait(&jobs, receive_waiting(1)).await);
    t.send_all(&jobs, &["first"]).await;
    t.within("the first wake-up", async {
        while !a.is_over() && !b.is_over() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    })
    .await;
    t.stats(&jobs).await;
    assert!(!(a.is_over() && b.is_over()), "there is nothing for the other one");
    t.send_all(&jobs, &["second"]).await;
    let mut got = [bodies(&t.woken(a).await), bodies(&t.woken(b).await)].concat();
    got.sort();
    assert_eq!(got, ["first", "second"]);
}

pub(crate) async fn every_waiting_receive_is_served(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    let mut waiting = Vec::new();
    for _ in 0..20 {
        waiting.push(t.wait(&jobs, receive_waiting(1)).await);
    }
    let batch: Vec<String> = (0..20).map(|n| n.to_string()).collect();
    t.send_all(&jobs, &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut ids = Vec::new();
    for one in waiting {
        ids.extend(t.woken(one).await.iter().map(|d| d.id));
    }
    ids.sort_unstable();
    ids.dedup();
    assert_eq!(ids.len(), 20);
}

pub(crate) async fn a_waiting_receive_on_one_queue_leaves_another_alone(t: Trial) {
    let (a, b) = (t.standard("a").await, t.standard("b").await);
    let waiting = t.wait(&a, receive_waiting(1)).await;
    t.send_all(&b, &["for b"]).await;
    assert_eq!(t.one(&b).await.body, "for b");
    assert!(!waiting.is_over());
    t.send_all(&a, &["for a"]).await;
    assert_eq!(bodies(&t.woken(waiting).await), ["for a"]);
}

pub(crate) async fn a_receive_dropped_while_it_waits_takes_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    for _ in 0..5 {
        t.wait(&jobs, receive_waiting(1)).await.cancel().await;
    }
    t.send_all(&jobs, &["a"]).await;
    let got = t.receive_with(&jobs, receive_waiting(1)).await;
    assert_eq!(got[0].attempt, 1);
    assert_eq!(t.stats(&jobs).await.in_flight, 1);
}

pub(crate) async fn a_receive_dropped_when_it_is_ready_takes_nothing(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    let store = t.store();
    let mut receive = store.receive(&jobs, receive_waiting(1));
    assert!(poll_once(receive.as_mut()).is_pending());
    t.send_all(&jobs, &["a"]).await;
    // The store has answered by now, but the receive was not polled.
    t.stats(&jobs).await;
    drop(receive);
    let got = t.receive_with(&jobs, receive_waiting(1)).await;
    assert_eq!(got[0].attempt, 1, "no attempt was counted");
    let view = t.browse(&jobs).await.remove(0);
    assert!(view.history.is_empty(), "nothing failed: {:?}", view.history);
    t.ack(&jobs, &got[0]).await;
}

pub(crate) async fn a_receive_dropped_before_its_answer_takes_nothing(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    for _ in 0..5 {
        let store = t.store();
        let mut receive = store.receive(&jobs, now(1));
        if poll_once(receive.as_mut()).is_ready() {
            // If a store answers at the first poll, there is nothing to drop.
            return;
        }
        drop(receive);
    }
    let got = t.receive_with(&jobs, receive_waiting(1)).await;
    assert_eq!(got[0].attempt, 1);
}

pub(crate) async fn a_dropped_fifo_receive_leaves_order_and_group_as_they_were(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 600_000, ..fifo_config() }).await;
    let store = t.store();
    let mut receive = store.receive(&jobs, receive_waiting(2));
    assert!(poll_once(receive.as_mut()).is_pending());
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    t.stats(&jobs).await;
    drop(receive);
    let got = t.receive_with(&jobs, receive_waiting(10)).await;
    assert_eq!(bodies(&got), ["a", "b", "c"]);
    assert!(got.iter().all(|d| d.attempt == 1));
}
