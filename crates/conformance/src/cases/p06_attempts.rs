//! Point 6, continued: a receive that names its attempt can be repeated, and gives no second message meanwhile.

use hapax_core::{Delivery, QueueConfig, QueueName, Receive, SettleError};

use crate::trial::{LEASE_MS, Trial, poll_once};
use crate::values::{bodies, config, fifo_config, now, receive_waiting, retry};

fn attempt(id: &str, max: usize) -> Receive {
    Receive { attempt_id: Some(id.into()), ..now(max) }
}

/// What tells one delivery from another.
fn told(all: &[Delivery]) -> Vec<(String, hapax_core::Fence, u32)> {
    all.iter().map(|d| (d.receipt.as_str().to_owned(), d.fence, d.attempt)).collect()
}

/// A FIFO queue with one message in each of the groups a, b and c.
async fn three_groups(t: &Trial) -> QueueName {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 60_000, ..fifo_config() }).await;
    for name in ["a", "b", "c"] {
        t.send_group(&jobs, name, &[name]).await;
    }
    jobs
}

pub(crate) async fn a_repeated_receive_survives_a_crash(mut t: Trial) {
    let jobs = three_groups(&t).await;
    let first = t.receive_with(&jobs, attempt("try-1", 2)).await;
    t.crash().await;
    let again = t.receive_with(&jobs, attempt("try-1", 2)).await;
    assert_eq!(told(&again), told(&first), "the same deliveries, and no second message");
    t.restart().await;
    // One of the first deliveries settles what the second process handed out again.
    let third = t.receive_with(&jobs, attempt("try-1", 1)).await;
    assert_eq!(told(&third), told(&first[..1]), "no more than is asked for now");
    assert_eq!(bodies(&t.receive_with(&jobs, attempt("try-2", 10)).await), ["c"]);
    for delivery in &first {
        t.ack(&jobs, delivery).await;
    }
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.ready, stats.in_flight), (0, 1));
}

pub(crate) async fn a_standard_queue_repeats_a_receive_too(mut t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["a", "b", "c"]).await;
    let first = t.receive_with(&jobs, attempt("try-1", 2)).await;
    assert_eq!(told(&t.receive_with(&jobs, attempt("try-1", 2)).await), told(&first));
    t.crash().await;
    assert_eq!(told(&t.receive_with(&jobs, attempt("try-1", 2)).await), told(&first));
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["c"]);
}

pub(crate) async fn a_repeat_gives_what_is_still_held_and_nothing_else(mut t: Trial) {
    let jobs = three_groups(&t).await;
    for crash in [false, true] {
        let id = format!("try {crash}");
        let first = t.receive_with(&jobs, attempt(&id, 2)).await;
        assert_eq!(first.len(), 2);
        t.fail(&jobs, &first[0], "boom").await;
        if crash {
            t.crash().await;
        }
        let again = t.receive_with(&jobs, attempt(&id, 2)).await;
        assert_eq!(
            told(&again),
            told(&first[1..]),
            "the other message is not given in place of a settled one"
        );
        t.extend(&jobs, &first[1], 0).await.unwrap();
        // Nothing of the first answer is held any more: it is a new receive, which can be repeated in its turn.
        let new = t.receive_with(&jobs, attempt(&id, 1)).await;
        assert_eq!(new.len(), 1);
        assert!(new[0].fence > first[1].fence);
        assert_eq!(told(&t.receive_with(&jobs, attempt(&id, 1)).await), told(&new));
        t.settle(&jobs, &new[0], retry("boom")).await.unwrap();
    }
}

pub(crate) async fn a_repeat_after_the_lease_ran_out_is_a_new_receive(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    for crash in [false, true] {
        let body = if crash { "b" } else { "a" };
        t.send_group(&jobs, "g", &[body]).await;
        let old = t.receive_with(&jobs, attempt("try-1", 1)).await.remove(0);
        if crash {
            t.crash().await;
        }
        t.pass(LEASE_MS).await;
        let new = t.receive_with(&jobs, attempt("try-1", 1)).await.remove(0);
        assert_eq!((new.body.as_ref(), new.attempt), (body.as_bytes(), 2));
        assert_eq!(t.settle(&jobs, &old, hapax_core::Settlement::Ack).await, Err(SettleError::Stale));
        t.ack(&jobs, &new).await;
    }
}

pub(crate) async fn a_repeat_does_not_get_what_another_receive_holds(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    t.receive_with(&jobs, attempt("try-1", 1)).await;
    t.pass(LEASE_MS).await;
    let other = t.one(&jobs).await;
    assert!(t.receive_with(&jobs, attempt("try-1", 1)).await.is_empty());
    t.ack(&jobs, &other).await;
}

pub(crate) async fn a_repeat_does_not_shorten_a_lease(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let first = t.receive_with(&jobs, attempt("try-1", 1)).await;
    t.extend(&jobs, &first[0], 20 * LEASE_MS).await.unwrap();
    for crash in [false, true] {
        if crash {
            t.crash().await;
        }
        let again = t.receive_with(&jobs, attempt("try-1", 1)).await;
        assert_eq!(told(&again), told(&first));
        assert!(again[0].lease_ms > 15 * LEASE_MS, "{} ms are left", again[0].lease_ms);
    }
    t.pass(2 * LEASE_MS).await;
    t.none(&jobs).await;
    t.ack(&jobs, &first[0]).await;
}

pub(crate) async fn a_repeat_has_a_whole_lease_again(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let ask = || Receive { lease_ms: Some(10 * LEASE_MS), ..attempt("try-1", 1) };
    let first = t.receive_with(&jobs, ask()).await;
    t.pass(LEASE_MS).await;
    let again = t.receive_with(&jobs, ask()).await;
    assert_eq!(told(&again), told(&first));
    assert!(again[0].lease_ms > 19 * LEASE_MS / 2, "{} ms are left", again[0].lease_ms);
}

pub(crate) async fn an_attempt_can_be_repeated_for_five_minutes(mut t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 3_600_000, ..fifo_config() }).await;
    t.send_group(&jobs, "a", &["a"]).await;
    t.send_group(&jobs, "b", &["b"]).await;
    let first = t.receive_with(&jobs, attempt("try-1", 1)).await;
    t.advance(150_000).await;
    t.crash().await;
    t.advance(149_999).await;
    assert_eq!(told(&t.receive_with(&jobs, attempt("try-1", 1)).await), told(&first));
    t.advance(1).await;
    assert_eq!(bodies(&t.receive_with(&jobs, attempt("try-1", 1)).await), ["b"]);
}

pub(crate) async fn a_purge_and_a_new_queue_end_what_can_be_repeated(mut t: Trial) {
    for crash in [false, true] {
        let jobs = three_groups(&t).await;
        t.receive_with(&jobs, attempt("try-1", 1)).await;
        t.store().purge(&jobs).await.unwrap();
        t.send_group(&jobs, "a", &["purged"]).await;
        if crash {
            t.crash().await;
        }
        let got = t.receive_with(&jobs, attempt("try-1", 1)).await;
        assert_eq!(bodies(&got), ["purged"]);
        t.store().delete_queue(&jobs).await.unwrap();
        t.create("jobs.fifo", fifo_config()).await;
        if crash {
            t.crash().await;
        }
        assert!(t.receive_with(&jobs, attempt("try-1", 1)).await.is_empty());
        t.send_group(&jobs, "a", &["new"]).await;
        assert_eq!(bodies(&t.receive_with(&jobs, attempt("try-1", 1)).await), ["new"]);
        t.store().delete_queue(&jobs).await.unwrap();
    }
}

pub(crate) async fn what_is_acked_on_receive_cannot_be_repeated(t: Trial) {
    let jobs = three_groups(&t).await;
    let receive = Receive { ack_on_receive: true, ..attempt("try-1", 1) };
    let refused = t.store().receive(&jobs, receive).await;
    assert!(matches!(refused, Err(hapax_core::StoreError::Invalid(_))), "{refused:?}");
    assert_eq!(t.stats(&jobs).await.ready, 3);
}

pub(crate) async fn attempts_of_two_queues_are_told_apart(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let other = t.fifo("other").await;
    for queue in [&jobs, &other] {
        t.send_group(queue, "g", &[queue.as_str()]).await;
    }
    assert_eq!(bodies(&t.receive_with(&jobs, attempt("try-1", 1)).await), [jobs.as_str()]);
    assert_eq!(bodies(&t.receive_with(&other, attempt("try-1", 1)).await), [other.as_str()]);
}

pub(crate) async fn a_repeat_does_not_wait_behind_those_who_wait(t: Trial) {
    let jobs = three_groups(&t).await;
    let first = t.receive_with(&jobs, attempt("try-1", 3)).await;
    let waiting = t.wait(&jobs, receive_waiting(1)).await;
    let again = t.receive_with(&jobs, Receive { wait_ms: None, ..attempt("try-1", 3) }).await;
    assert_eq!(told(&again), told(&first));
    let again = t.receive_with(&jobs, Receive { attempt_id: Some("try-1".into()), ..receive_waiting(3) });
    assert_eq!(told(&again.await), told(&first));
    assert!(!waiting.is_over());
    waiting.cancel().await;
}

pub(crate) async fn two_waiting_receives_of_one_attempt_get_the_same(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let repeatable = Receive { attempt_id: Some("try-1".into()), ..receive_waiting(1) };
    let one = t.wait(&jobs, repeatable.clone()).await;
    let two = t.wait(&jobs, repeatable).await;
    t.send_group(&jobs, "a", &["a"]).await;
    let (one, two) = (t.woken(one).await, t.woken(two).await);
    assert_eq!(bodies(&one), ["a"]);
    assert_eq!(told(&two), told(&one));
}

pub(crate) async fn a_dropped_receive_takes_nothing_from_its_repeat(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 600_000, ..fifo_config() }).await;
    for body in ["a", "b"] {
        let repeatable = Receive { attempt_id: Some(format!("try {body}")), ..receive_waiting(1) };
        let store = t.store();
        let mut dropped = store.receive(&jobs, repeatable.clone());
        assert!(poll_once(dropped.as_mut()).is_pending());
        t.quiet().await;
        t.send_group(&jobs, body, &[body]).await;
        // The first has its answer, which its caller never looks at.
        let repeat = t.receive_with(&jobs, repeatable).await;
        assert_eq!(bodies(&repeat), [body]);
        drop(dropped);
        t.quiet().await;
        t.none(&jobs).await;
        t.ack(&jobs, &repeat[0]).await;
    }
}

pub(crate) async fn a_dropped_receive_can_be_repeated(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { lease_ms: 600_000, ..fifo_config() }).await;
    let repeatable = Receive { attempt_id: Some("try-1".into()), ..receive_waiting(2) };
    let store = t.store();
    let mut dropped = store.receive(&jobs, repeatable.clone());
    assert!(poll_once(dropped.as_mut()).is_pending());
    t.send_group(&jobs, "g", &["a", "b"]).await;
    t.stats(&jobs).await;
    drop(dropped);
    let got = t.receive_with(&jobs, repeatable).await;
    assert_eq!(bodies(&got), ["a", "b"]);
    assert!(got.iter().all(|d| d.attempt == 1));
}
