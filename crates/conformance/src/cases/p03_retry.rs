//! Point 3: when a failed delivery comes back.

use std::collections::BTreeSet;

use hapax_core::policy::RetryPolicy;
use hapax_core::{
    FailureCause, MessageState, NewMessage, Priority, QueueConfig, Receive, SettleError, Settled, Settlement,
};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, config, exactly, fifo_config, in_group, now, reject, text};

pub(crate) async fn by_default_a_retry_is_visible_at_once(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Returned { after_ms: 0 });
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn backoff_doubles_up_to_its_cap(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retry: exactly(500, 1_500), ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    for (attempt, after_ms) in [(1, 500), (2, 1_000), (3, 1_500), (4, 1_500)] {
        let got = t.one(&jobs).await;
        assert_eq!(got.attempt, attempt);
        assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Returned { after_ms });
        assert_eq!(t.browse(&jobs).await[0].state, MessageState::Delayed);
        t.hidden_for(&jobs, after_ms).await;
    }
    assert_eq!(t.one(&jobs).await.attempt, 5);
}

pub(crate) async fn full_jitter_spreads_within_its_ceiling(t: Trial) {
    let jobs =
        t.create("jobs", QueueConfig { retry: RetryPolicy::exponential(100_000, 0), ..config() }).await;
    let batch: Vec<_> = (0..50).map(|n| n.to_string()).collect();
    t.send_all(&jobs, &batch.iter().map(String::as_str).collect::<Vec<_>>()).await;
    let mut delays = BTreeSet::new();
    for got in t.receive(&jobs, 50).await {
        let Settled::Returned { after_ms } = t.fail(&jobs, &got, "boom").await else { panic!("it returns") };
        assert!(after_ms <= 100_000, "{after_ms}");
        delays.insert(after_ms);
    }
    // 50 draws of 100,001 values: fewer than 10 different ones do not happen by chance.
    assert!(delays.len() > 10, "{delays:?}");
    assert!(delays.first() < Some(&50_000) && delays.last() > Some(&50_000), "{delays:?}");
}

pub(crate) async fn a_lease_that_runs_out_backs_off_by_policy(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retry: exactly(1_000, 0), ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    t.one(&jobs).await;
    t.hidden_for(&jobs, LEASE_MS).await;
    t.hidden_for(&jobs, 1_000).await;
    let again = t.one(&jobs).await;
    assert_eq!(again.attempt, 2);
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!(
        view.history.iter().map(|failed| (failed.attempt, failed.cause)).collect::<Vec<_>>(),
        [(1, FailureCause::Expired)]
    );
}

pub(crate) async fn a_delay_that_was_asked_for_is_literal(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retry: exactly(600_000, 0), ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    let settlement = Settlement::Retry { after_ms: Some(700), error: None };
    assert_eq!(t.settle(&jobs, &got, settlement).await, Ok(Settled::Returned { after_ms: 700 }));
    t.hidden_for(&jobs, 700).await;
    let got = t.one(&jobs).await;
    let settlement = Settlement::Retry { after_ms: Some(0), error: None };
    assert_eq!(t.settle(&jobs, &got, settlement).await, Ok(Settled::Returned { after_ms: 0 }));
    assert_eq!(t.one(&jobs).await.attempt, 3);
}

pub(crate) async fn a_deferred_delivery_counts_no_attempt(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { retry: exactly(600_000, 0), ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let mut last = t.one(&jobs).await;
    for _ in 0..3 {
        let settled = t.settle(&jobs, &last, Settlement::Defer { after_ms: 700 }).await;
        assert_eq!(settled, Ok(Settled::Returned { after_ms: 700 }));
        t.hidden_for(&jobs, 700).await;
        let next = t.one(&jobs).await;
        assert_eq!(next.attempt, 1);
        assert!(next.fence > last.fence && next.receipt != last.receipt);
        last = next;
    }
    let view = t.browse(&jobs).await.remove(0);
    assert!(view.history.is_empty(), "nothing failed: {:?}", view.history);
    t.fail(&jobs, &last, "boom").await;
    assert_eq!(t.browse(&jobs).await[0].attempts, 1);
}

pub(crate) async fn a_deferred_message_never_dies_of_it(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    t.send_all(&jobs, &["a"]).await;
    for _ in 0..3 {
        let got = t.one(&jobs).await;
        t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    }
    assert!(t.browse(&dead).await.is_empty());
    assert_eq!(t.one(&jobs).await.attempt, 1);
}

pub(crate) async fn a_rejected_message_is_parked_where_there_is_no_dead_letter_queue(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let got = t.receive(&jobs, 2).await;
    assert_eq!(t.settle(&jobs, &got[0], reject("malformed order")).await, Ok(Settled::Parked));
    t.ack(&jobs, &got[1]).await;
    t.pass(LEASE_MS).await;
    t.none(&jobs).await;
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!(view.state, MessageState::Parked);
    assert_eq!(view.parked, Some((FailureCause::Rejected, Some("malformed order".to_owned()))));
    assert_eq!(t.stats(&jobs).await.parked, 1);
}

pub(crate) async fn a_delivery_in_doubt_is_parked_and_counts_no_attempt(mut t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;
    let got = t.one(&jobs).await;
    assert_eq!(got.attempt, 2, "its last one");
    let park = Settlement::Park { reason: "the bank did not answer".to_owned() };
    assert_eq!(t.settle(&jobs, &got, park).await, Ok(Settled::Parked));
    t.pass(LEASE_MS).await;
    t.crash().await;
    t.none(&jobs).await;
    assert!(t.browse(&dead).await.is_empty(), "doubt is no failure");
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!((view.id, view.state), (got.id, MessageState::Parked));
    assert_eq!(view.attempts, 1, "the attempt is not counted");
    assert_eq!(view.parked, Some((FailureCause::InDoubt, Some("the bank did not answer".to_owned()))));
    assert_eq!(t.stats(&jobs).await.parked, 1);
    assert!(t.settle(&jobs, &got, Settlement::Ack).await.is_err(), "the delivery has ended");

    assert_eq!(t.store().release(&jobs, vec![got.id]).await, Ok(1));
    let again = t.one(&jobs).await;
    assert_eq!((again.id, again.body.clone(), again.attempt), (got.id, got.body.clone(), 1));
    assert!(again.fence > got.fence);
    assert_eq!(t.settle(&jobs, &got, Settlement::Ack).await, Err(SettleError::Stale));
    t.ack(&jobs, &again).await;
}

/// What is set aside waits for a person, however long that takes; then it has its whole retention again.
pub(crate) async fn a_parked_message_outlives_its_retention_and_its_release(mut t: Trial) {
    for fifo in [false, true] {
        for restart in [false, true] {
            let own = if fifo { fifo_config() } else { config() };
            let name = format!("q{restart}{}", if fifo { ".fifo" } else { "" });
            let jobs = t.create(&name, QueueConfig { retention_ms: 60_000, ..own }).await;
            let sent = t.send(&jobs, if fifo { in_group("g", "a") } else { NewMessage::new("a") }).await;
            let got = t.one(&jobs).await;
            let park = Settlement::Park { reason: "in doubt".to_owned() };
            assert_eq!(t.settle(&jobs, &got, park).await, Ok(Settled::Parked));
            t.advance(200_000).await;
            if restart {
                t.restart().await;
            }
            t.quiet().await;
            assert_eq!(t.stats(&jobs).await.parked, 1, "{name}");
            assert_eq!(t.store().release(&jobs, vec![sent.id]).await, Ok(1));
            if restart {
                t.crash().await;
            }
            t.advance(59_000).await;
            t.quiet().await;
            assert_eq!(t.one(&jobs).await.id, sent.id, "{name}");
            t.advance(2_000 + LEASE_MS).await;
            t.holds(&jobs, 0).await;
        }
    }
}

pub(crate) async fn a_released_message_starts_anew(t: Trial) {
    let jobs = t.standard("jobs").await;
    let sent = t.send_all(&jobs, &["parked", "ready"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.fail(&jobs, &got, "boom").await;
    let got = t.receive(&jobs, 2).await.into_iter().find(|d| d.id == sent[0].id).expect("it came back");
    assert_eq!(got.attempt, 2);
    t.settle(&jobs, &got, reject("bad")).await.unwrap();
    assert_eq!(t.store().release(&jobs, vec![sent[0].id, sent[1].id]).await, Ok(1), "only one is parked");
    let again = t.one(&jobs).await;
    assert_eq!((again.id, again.attempt), (sent[0].id, 1));
    assert!(again.fence > got.fence);
    assert_eq!(t.stats(&jobs).await.parked, 0);
    let view = t.browse(&jobs).await.into_iter().find(|view| view.id == sent[0].id).unwrap();
    assert!(view.history.is_empty(), "failures before the release are forgotten: {:?}", view.history);
}

pub(crate) async fn failed_attempts_are_remembered_with_who_and_why(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let by = |name: &str| Receive { consumer: Some(name.to_owned()), ..now(1) };
    let got = t.receive_with(&jobs, by("ann")).await.remove(0);
    t.fail(&jobs, &got, "boom").await;
    t.receive_with(&jobs, by("bob")).await;
    t.pass(LEASE_MS).await;
    t.one(&jobs).await;
    let view = t.browse(&jobs).await.remove(0);
    let told: Vec<_> = view
        .history
        .iter()
        .map(|f| (f.attempt, f.cause, f.error.as_deref(), f.consumer.as_deref()))
        .collect();
    let expected =
        [(1, FailureCause::Retry, Some("boom"), Some("ann")), (2, FailureCause::Expired, None, Some("bob"))];
    assert_eq!(told, expected);
    assert!(view.history[0].at_ms >= view.sent_ms && view.history[1].at_ms >= view.history[0].at_ms);
}

pub(crate) async fn a_message_that_keeps_failing_starves_no_other(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["poison", "a", "b"]).await;
    t.send(&jobs, text("urgent").priority(Priority(9))).await;
    let mut seen = Vec::new();
    for _ in 0..6 {
        let got = t.receive(&jobs, 1).await.remove(0);
        seen.extend(bodies(std::slice::from_ref(&got)));
        match &got.body[..] {
            b"poison" => drop(t.fail(&jobs, &got, "boom").await),
            b"urgent" if got.attempt < 3 => drop(t.extend(&jobs, &got, 0).await.unwrap()),
            _ => t.ack(&jobs, &got).await,
        }
    }
    assert_eq!(seen, ["urgent", "urgent", "urgent", "poison", "a", "b"], "behind those of its own priority");
    assert_eq!(t.one(&jobs).await.body, "poison");
}

pub(crate) async fn the_defaults_back_off_and_end(t: Trial) {
    let jobs = t.create("jobs", QueueConfig::default()).await;
    let fifo = t.create("jobs.fifo", QueueConfig::fifo()).await;
    t.send_all(&jobs, &["a"]).await;
    t.send_group(&fifo, "g", &["a"]).await;
    for (name, cap_ms) in [(&jobs, 300_000), (&fifo, 10_000)] {
        for attempt in 1..=20 {
            let got = t.one(name).await;
            let settled = t.fail(name, &got, "boom").await;
            let Settled::Returned { after_ms } = settled else {
                assert_eq!((attempt, settled), (20, Settled::Parked), "{name}");
                break;
            };
            assert!(after_ms <= cap_ms.min(1_000 << (attempt - 1)), "{name}: {after_ms} after {attempt}");
            t.advance(after_ms).await;
        }
        assert_eq!(t.stats(name).await.parked, 1, "{name}");
    }
}
