//! Point 4: a message that is out of attempts or rejected moves to its dead-letter queue, atomically and with its
//! history.

use hapax_core::policy::{ERROR_BYTES_MAX, HISTORY_MAX};
use hapax_core::{DedupId, FailureCause, Priority, QueueConfig, Receive, SettleError, Settled, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{attribute, bodies, config, dying, fifo_config, group, now, reject, seen, text};

pub(crate) async fn the_last_failure_moves_a_message_to_the_dead_letters(t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    let sent = t.send_all(&jobs, &["a"]).await[0];
    let first = t.one(&jobs).await;
    assert_eq!(t.fail(&jobs, &first, "first").await, Settled::Returned { after_ms: 0 });
    t.advance(500).await;
    let second = t.one(&jobs).await;
    assert_eq!(t.fail(&jobs, &second, "second").await, Settled::Dead);

    assert!(t.browse(&jobs).await.is_empty());
    let view = t.browse(&dead).await.remove(0);
    assert_eq!((view.id, view.body.as_deref()), (sent.id, Some(b"a".as_slice())));
    let story = view.dead.expect("a dead letter has a story");
    assert_eq!((story.source, story.cause, story.attempts), (jobs.clone(), FailureCause::Retry, 2));
    assert_eq!(story.error.as_deref(), Some("second"));
    assert_eq!(story.first_received_ms, first.first_received_ms);
    assert!(story.died_ms >= first.first_received_ms);
    if t.exact() {
        assert_eq!(story.died_ms, first.first_received_ms + 500);
    }
    let told: Vec<_> = view.history.iter().map(|f| (f.attempt, f.cause, f.error.as_deref())).collect();
    assert_eq!(told, [(1, FailureCause::Retry, Some("first")), (2, FailureCause::Retry, Some("second"))]);
    assert_eq!(t.stats(&jobs).await.totals.dead, 1);
    assert_eq!(t.stats(&dead).await.ready, 1);
    assert_eq!(t.settle(&jobs, &second, Settlement::Ack).await, Err(SettleError::Dead));
}

pub(crate) async fn the_last_lease_that_runs_out_moves_a_message_to_the_dead_letters(t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    t.send_all(&jobs, &["a"]).await;
    for _ in 0..2 {
        t.one(&jobs).await;
        t.pass(LEASE_MS).await;
    }
    // It moves by itself: no receive is needed.
    let view = t.holds(&dead, 1).await.remove(0);
    let story = view.dead.expect("a dead letter has a story");
    assert_eq!((story.cause, story.attempts), (FailureCause::Expired, 2));
    t.none(&jobs).await;
    assert!(t.browse(&jobs).await.is_empty());
    assert_eq!(t.stats(&jobs).await.totals.expired, 2);
}

/// A lease that runs out says nothing about the reason; the attempt before it did.
pub(crate) async fn a_dead_letter_tells_the_last_error_that_is_known(t: Trial) {
    let (jobs, dead) = t.with_dead(3, config()).await;
    t.send_all(&jobs, &["a"]).await;
    for error in ["first", "second"] {
        let got = t.one(&jobs).await;
        t.fail(&jobs, &got, error).await;
    }
    t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    let story = t.holds(&dead, 1).await.remove(0).dead.expect("a dead letter has a story");
    assert_eq!((story.cause, story.error.as_deref()), (FailureCause::Expired, Some("second")));
}

pub(crate) async fn the_last_receive_without_a_lease_delivers_before_it_moves(t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    let sent = t.send_all(&jobs, &["a"]).await[0];
    for attempt in 1..=2 {
        let got = t.receive_with(&jobs, Receive { lease_ms: Some(0), ..now(1) }).await;
        assert_eq!((bodies(&got), got[0].attempt), (vec!["a".to_owned()], attempt));
    }
    t.none(&jobs).await;
    assert_eq!(t.holds(&dead, 1).await[0].id, sent.id);
}

pub(crate) async fn giving_back_the_last_attempt_moves_a_message_to_the_dead_letters(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert!(t.extend(&jobs, &got, 0).await.is_ok());
    assert_eq!(t.holds(&dead, 1).await[0].id, got.id);
    t.none(&jobs).await;
}

pub(crate) async fn a_rejected_message_goes_to_the_dead_letters_at_once(t: Trial) {
    let (jobs, dead) = t.with_dead(10, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert_eq!(t.settle(&jobs, &got, reject("no such customer")).await, Ok(Settled::Dead));
    let story = t.browse(&dead).await.remove(0).dead.expect("a dead letter has a story");
    assert_eq!((story.cause, story.error.as_deref()), (FailureCause::Rejected, Some("no such customer")));
    assert_eq!(story.attempts, 1);
    t.none(&jobs).await;
    assert_eq!(t.settle(&jobs, &got, Settlement::Ack).await, Err(SettleError::Dead));
}

pub(crate) async fn a_delay_that_was_asked_for_does_not_save_the_last_attempt(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    let settlement = Settlement::Retry { after_ms: Some(60_000), error: None };
    assert_eq!(t.settle(&jobs, &got, settlement).await, Ok(Settled::Dead));
    assert_eq!(t.browse(&dead).await.len(), 1);
}

pub(crate) async fn a_dead_letter_is_delivered_with_its_story(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let message = text("a").attribute("kind", attribute("order")).group(group("g")).priority(Priority(3));
    t.send(&jobs, message).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    let seen = t.browse(&dead).await.remove(0).dead;
    t.crash().await;
    let letter = t.one(&dead).await;
    assert!(letter.dead.is_some());
    assert_eq!(letter.dead, seen);
    assert_eq!((letter.id, letter.attempt), (got.id, 1), "attempts start again at 1");
    assert_eq!((letter.body.clone(), letter.attributes.clone()), (got.body.clone(), got.attributes.clone()));
    assert_eq!((letter.group.clone(), letter.priority), (got.group.clone(), got.priority));
    assert!(letter.fence > got.fence);
    t.ack(&dead, &letter).await;
}

pub(crate) async fn a_death_is_atomic(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let batch: Vec<_> = (0..20).map(|n| n.to_string()).collect();
    let mut ids: Vec<_> = t
        .send_all(&jobs, &batch.iter().map(String::as_str).collect::<Vec<_>>())
        .await
        .iter()
        .map(|s| s.id)
        .collect();
    ids.sort_unstable();
    let receive = Receive { lease_ms: Some(3 * LEASE_MS), ..now(20) };
    for (n, got) in t.receive_with(&jobs, receive).await.iter().enumerate() {
        match n % 4 {
            0 => assert_eq!(t.fail(&jobs, got, "boom").await, Settled::Dead),
            1 => assert_eq!(t.settle(&jobs, got, reject("bad")).await, Ok(Settled::Dead)),
            _ => {}
        }
        if n % 5 == 4 {
            t.crash().await;
            let mut all: Vec<_> =
                t.browse(&jobs).await.iter().chain(&t.browse(&dead).await).map(|v| v.id).collect();
            all.sort_unstable();
            assert_eq!(all, ids, "each message is in one of both queues");
        }
    }
    t.pass(3 * LEASE_MS).await;
    t.crash().await;
    let mut all: Vec<_> = t.holds(&dead, 20).await.iter().map(|v| v.id).collect();
    all.sort_unstable();
    assert_eq!(all, ids);
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn crashes_count_as_attempts(mut t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    t.send_all(&jobs, &["poison"]).await;
    for attempt in 1..=2 {
        assert_eq!(t.one(&jobs).await.attempt, attempt);
        t.crash().await;
        t.pass(LEASE_MS).await;
    }
    assert_eq!(t.holds(&dead, 1).await[0].dead.as_ref().map(|story| story.attempts), Some(2));
    t.none(&jobs).await;
}

pub(crate) async fn a_lowered_limit_holds_at_the_next_receive(t: Trial) {
    let (jobs, dead) = t.with_dead(10, config()).await;
    t.send_all(&jobs, &["a"]).await;
    for _ in 0..2 {
        let got = t.one(&jobs).await;
        t.fail(&jobs, &got, "boom").await;
    }
    t.set(&jobs, dying(&dead, 2, config())).await;
    t.none(&jobs).await;
    let story = t.holds(&dead, 1).await.remove(0).dead.expect("a dead letter has a story");
    assert_eq!((story.cause, story.error.as_deref()), (FailureCause::Retry, Some("boom")));
    assert_eq!(story.attempts, 2);
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn what_dies_at_a_receive_makes_room_for_others(t: Trial) {
    let (jobs, dead) = t.with_dead(10, config()).await;
    t.send_all(&jobs, &["a", "b"]).await;
    for _ in 0..2 {
        for got in t.receive(&jobs, 2).await {
            t.fail(&jobs, &got, "boom").await;
        }
    }
    t.send_all(&jobs, &["c"]).await;
    t.set(&jobs, dying(&dead, 2, config())).await;
    assert_eq!(bodies(&t.receive(&jobs, 1).await), ["c"]);
    t.holds(&dead, 2).await;
}

pub(crate) async fn dead_letters_are_never_suppressed_as_duplicates(t: Trial) {
    let dead = t.standard("dead").await;
    for name in ["a", "b"] {
        let jobs = t.create(name, dying(&dead, 1, config())).await;
        t.send(&jobs, text(name).dedup(DedupId::new("same").unwrap())).await;
        let got = t.one(&jobs).await;
        assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    }
    let letters = t.browse(&dead).await;
    let sources: Vec<_> = letters.iter().map(|v| v.dead.as_ref().unwrap().source.as_str()).collect();
    assert_eq!(sources, ["a", "b"]);
}

pub(crate) async fn long_errors_are_cut_and_only_the_last_failures_kept(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let error = "\u{e4}".repeat(ERROR_BYTES_MAX);
    for _ in 0..HISTORY_MAX + 5 {
        let got = t.one(&jobs).await;
        t.fail(&jobs, &got, &error).await;
    }
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!(view.history.len(), HISTORY_MAX as usize);
    assert_eq!(view.history.last().unwrap().attempt, HISTORY_MAX + 5);
    let kept = view.history.last().unwrap().error.clone().unwrap();
    assert!(!kept.is_empty() && kept.len() <= ERROR_BYTES_MAX && error.starts_with(&kept));
}

pub(crate) async fn a_message_is_dropped_when_its_retention_ends(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retention_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["old", "held"]).await;
    t.advance(59_999).await;
    t.send_all(&jobs, &["young"]).await;
    assert_eq!(t.browse(&jobs).await.len(), 3);
    let got = t.receive_with(&jobs, Receive { lease_ms: Some(10_000), ..now(2) }).await;
    assert_eq!(bodies(&got), ["old", "held"]);
    t.extend(&jobs, &got[0], 0).await.unwrap();
    t.advance(2).await;

    let kept = t.holds(&jobs, 2).await;
    assert_eq!(seen(&kept), ["held", "young"], "what is in flight stays");
    assert_eq!(t.stats(&jobs).await.totals.retention_dropped, 1);
    t.ack(&jobs, &got[1]).await;
    assert_eq!(t.settle(&jobs, &got[0], Settlement::Ack).await, Err(SettleError::Gone));
    t.advance(60_000).await;
    t.holds(&jobs, 0).await;
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.totals.retention_dropped, stats.bytes, stats.oldest_sent_ms), (2, 0, None));
}

pub(crate) async fn a_message_held_past_its_retention_is_dropped_when_it_comes_back(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retention_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    t.receive_with(&jobs, Receive { lease_ms: Some(70_000), ..now(1) }).await;
    t.advance(65_000).await;
    assert_eq!(t.browse(&jobs).await.len(), 1);
    t.advance(5_000).await;
    t.none(&jobs).await;
    t.holds(&jobs, 0).await;
}

pub(crate) async fn a_dead_letter_keeps_the_age_of_its_message(mut t: Trial) {
    let dead = t.create("dead", QueueConfig { retention_ms: 60_000, ..config() }).await;
    let jobs = t.create("jobs", dying(&dead, 1, config())).await;
    t.send_all(&jobs, &["a"]).await;
    t.advance(50_000).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    let view = t.browse(&dead).await.remove(0);
    assert_eq!(view.sent_ms, got.sent_ms);
    t.restart().await;
    t.advance(9_999).await;
    assert_eq!(t.browse(&dead).await.len(), 1);
    t.advance(2).await;
    t.holds(&dead, 0).await;
    assert_eq!(t.stats(&dead).await.totals.retention_dropped, 1);
}

pub(crate) async fn a_fifo_dead_letter_has_its_age_since_its_death(t: Trial) {
    let dead = t.create("dead.fifo", QueueConfig { retention_ms: 60_000, ..fifo_config() }).await;
    let jobs = t.create("jobs.fifo", dying(&dead, 1, fifo_config())).await;
    t.send_group(&jobs, "g", &["a"]).await;
    t.advance(50_000).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    t.advance(59_999).await;
    assert_eq!(t.browse(&dead).await.len(), 1);
    t.advance(2).await;
    t.holds(&dead, 0).await;
}

pub(crate) async fn a_settle_that_comes_after_the_death_is_told_so(mut t: Trial) {
    for fifo in [false, true] {
        for letters in [true, false] {
            let name = format!("q{fifo}{letters}").to_lowercase();
            let end = if fifo { ".fifo" } else { "" };
            let own = if fifo { fifo_config() } else { config() };
            let dead = t.create(&format!("{name}-dead{end}"), own.clone()).await;
            let dies = if letters {
                dying(&dead, 1, own)
            } else {
                QueueConfig { retry: own.retry.attempts(1), ..own }
            };
            let jobs = t.create(&format!("{name}{end}"), dies).await;
            t.send_group(&jobs, "g", &[&name]).await;
            let got = t.one(&jobs).await;
            t.pass(LEASE_MS).await;
            t.none(&jobs).await;
            t.crash().await;
            for settlement in
                [Settlement::Ack, Settlement::Retry { after_ms: None, error: None }, reject("no")]
            {
                assert_eq!(
                    t.settle(&jobs, &got, settlement.clone()).await,
                    Err(SettleError::Dead),
                    "{name}, {settlement:?}"
                );
            }
            assert_eq!(t.extend(&jobs, &got, 1_000).await, Err(SettleError::Dead), "{name}");
            let left = t.browse(&jobs).await.len() + t.browse(&dead).await.len();
            assert_eq!(left, 1, "{name}: nothing was deleted");
        }
    }
}

pub(crate) async fn deliveries_grow_where_attempts_do_not(mut t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let numbers = |d: &hapax_core::Delivery| (d.attempt, d.deliveries);
    let got = t.one(&jobs).await;
    assert_eq!(numbers(&got), (1, 1));
    t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    let got = t.one(&jobs).await;
    assert_eq!(numbers(&got), (1, 2), "a deferred delivery is no attempt");
    t.settle(&jobs, &got, Settlement::Park { reason: "in doubt".into() }).await.unwrap();
    t.restart().await;
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!((view.attempts, view.deliveries), (0, 2));
    assert_eq!(view.history.iter().map(|f| f.deliveries).collect::<Vec<_>>(), [2]);
    t.store().release(&jobs, vec![view.id]).await.unwrap();
    let got = t.one(&jobs).await;
    assert_eq!(numbers(&got), (1, 3));
    t.fail(&jobs, &got, "boom").await;
    let got = t.one(&jobs).await;
    assert_eq!(numbers(&got), (2, 4));
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    let letter = t.one(&dead).await;
    assert_eq!(numbers(&letter), (1, 5), "the deliveries count on, the attempts begin again");
    let story = letter.dead.unwrap();
    assert_eq!((story.attempts, story.deliveries), (2, 4));
}

pub(crate) async fn out_of_attempts_without_a_dead_letter_queue_is_parked(mut t: Trial) {
    let retry = config().retry.attempts(2);
    let jobs = t.create("jobs", QueueConfig { retry, ..config() }).await;
    t.send_all(&jobs, &["a", "b"]).await;
    for _ in 0..2 {
        let got = t.receive(&jobs, 2).await;
        for delivery in got.iter().filter(|d| d.body == "a") {
            t.fail(&jobs, delivery, "boom").await;
        }
        for delivery in got.iter().filter(|d| d.body == "b") {
            t.ack(&jobs, delivery).await;
        }
    }
    t.none(&jobs).await;
    t.restart().await;
    let view = t.holds(&jobs, 1).await.remove(0);
    assert_eq!(view.parked, Some((FailureCause::Retry, Some("boom".to_owned()))));
    assert_eq!(t.stats(&jobs).await.parked, 1);
}
