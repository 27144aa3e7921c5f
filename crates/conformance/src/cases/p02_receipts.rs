//! Point 2: a receipt settles only the delivery that it names.

use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::{FailureCause, QueueConfig, Receipt, Settle, SettleError, Settled, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, config, exactly, reject, retry, seen};

pub(crate) async fn an_ack_takes_its_message_and_no_other(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    t.ack(&jobs, &got[1]).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["a", "c"]);
    t.pass(LEASE_MS).await;
    let mut back = bodies(&t.receive(&jobs, 10).await);
    back.sort();
    assert_eq!(back, ["a", "c"]);
}

pub(crate) async fn a_stale_receipt_settles_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let old = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    let new = t.one(&jobs).await;
    let hows = [Settlement::Ack, retry("boom"), Settlement::Defer { after_ms: 0 }, reject("bad")];
    for settlement in hows {
        assert_eq!(
            t.settle(&jobs, &old, settlement.clone()).await,
            Err(SettleError::Stale),
            "{settlement:?}"
        );
    }
    assert_eq!(t.extend(&jobs, &old, 0).await, Err(SettleError::Stale));
    t.none(&jobs).await;
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.totals.stale, stats.totals.acked, stats.in_flight), (5, 0, 1));
    t.ack(&jobs, &new).await;
}

pub(crate) async fn a_stale_fifo_receipt_settles_nothing(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let old = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    let new = t.one(&jobs).await;
    assert_eq!(t.settle(&jobs, &old, Settlement::Ack).await, Err(SettleError::Stale));
    assert_eq!(t.extend(&jobs, &old, 0).await, Err(SettleError::Stale));
    t.none(&jobs).await;
    t.ack(&jobs, &new).await;
}

pub(crate) async fn a_receipt_is_stale_after_a_retry_was_redelivered(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let old = t.one(&jobs).await;
    t.fail(&jobs, &old, "boom").await;
    let new = t.one(&jobs).await;
    assert_eq!(t.settle(&jobs, &old, Settlement::Ack).await, Err(SettleError::Stale));
    t.ack(&jobs, &new).await;
}

pub(crate) async fn a_late_ack_holds_on_a_standard_queue_while_nobody_else_has_the_message(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    t.ack(&jobs, &got).await;
    t.none(&jobs).await;
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn a_late_ack_is_expired_on_a_fifo_queue(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    assert_eq!(t.settle(&jobs, &got, Settlement::Ack).await, Err(SettleError::Expired));
    assert_eq!(t.one(&jobs).await.id, got.id);
}

pub(crate) async fn a_late_settle_on_a_fifo_queue_is_refused(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    let park = Settlement::Park { reason: "in doubt".into() };
    for settlement in [retry("boom"), Settlement::Defer { after_ms: 0 }, reject("bad"), park] {
        let late = t.settle(&jobs, &got, settlement.clone()).await;
        assert_eq!(late, Err(SettleError::NotInFlight), "{settlement:?}");
    }
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn an_acked_message_is_gone(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let got = t.receive(&jobs, 2).await;
    t.ack(&jobs, &got[0]).await;
    assert_eq!(t.settle(&jobs, &got[0], Settlement::Ack).await, Err(SettleError::Gone));
    assert_eq!(t.extend(&jobs, &got[0], LEASE_MS).await, Err(SettleError::Gone));
    let twice = vec![Settle::ack(got[1].receipt.clone()), Settle::ack(got[1].receipt.clone())];
    assert_eq!(t.store().settle(&jobs, twice).await.unwrap(), [Ok(Settled::Acked), Err(SettleError::Gone)]);
}

pub(crate) async fn a_foreign_receipt_is_malformed(t: Trial) {
    let (jobs, other) = (t.standard("jobs").await, t.standard("other").await);
    t.send_all(&jobs, &["a"]).await;
    t.send_all(&other, &["b"]).await;
    let got = t.one(&jobs).await;
    assert_eq!(t.settle(&other, &got, Settlement::Ack).await, Err(SettleError::Malformed));
    assert_eq!(t.extend(&other, &got, LEASE_MS).await, Err(SettleError::Malformed));
    for garbage in ["garbage", "AAAA", "\u{1f980}", "-", &"x".repeat(1024)] {
        let receipt = Receipt::new(garbage).unwrap();
        let settled = t.store().settle(&jobs, vec![Settle::ack(receipt.clone())]).await.unwrap();
        assert_eq!(settled, [Err(SettleError::Malformed)], "{garbage}");
        let extend = hapax_core::Extend { receipt, lease_ms: 1, own_lease: false };
        assert_eq!(
            t.store().extend(&jobs, vec![extend]).await.unwrap(),
            [Err(SettleError::Malformed)],
            "{garbage}"
        );
    }
    assert_eq!(t.one(&other).await.body, "b");
    t.ack(&jobs, &got).await;
}

pub(crate) async fn extending_a_lease_hides_the_message_for_longer(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.advance(LEASE_MS / 2).await;
    let left = t.extend(&jobs, &got, 3 * LEASE_MS).await.unwrap();
    if t.exact() {
        assert_eq!(left.lease_ms, 3 * LEASE_MS);
    }
    t.hidden_for(&jobs, 3 * LEASE_MS).await;
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn a_lease_can_be_shortened(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 600_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.extend(&jobs, &got, LEASE_MS).await.unwrap();
    t.hidden_for(&jobs, LEASE_MS).await;
    t.one(&jobs).await;
}

pub(crate) async fn an_extended_delivery_can_be_acked_after_its_first_deadline(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let got = t.one(&jobs).await;
    t.extend(&jobs, &got, 3 * LEASE_MS).await.unwrap();
    t.pass(LEASE_MS).await;
    t.ack(&jobs, &got).await;
}

pub(crate) async fn a_late_extend_takes_a_message_that_no_other_delivery_holds(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    assert_eq!(t.extend(&jobs, &got, 0).await.map(|left| left.lease_ms), Ok(0), "it is visible as it is");
    t.extend(&jobs, &got, LEASE_MS).await.unwrap();
    t.hidden_for(&jobs, LEASE_MS).await;
    // The lease expired a second time; the message was delivered once.
    let again = t.one(&jobs).await;
    assert_eq!((again.attempt, again.deliveries), (2, 2));
    assert_eq!(t.extend(&jobs, &got, LEASE_MS).await, Err(SettleError::Stale), "another delivery holds it");
    t.ack(&jobs, &again).await;
}

pub(crate) async fn a_late_extend_holds_the_message_until_its_ack(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    t.extend(&jobs, &got, 3 * LEASE_MS).await.unwrap();
    t.none(&jobs).await;
    t.ack(&jobs, &got).await;
    t.pass(3 * LEASE_MS).await;
    t.none(&jobs).await;
}

pub(crate) async fn a_late_extend_on_a_fifo_queue_is_refused(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    for lease_ms in [LEASE_MS, 0] {
        let late = t.extend(&jobs, &got, lease_ms).await;
        assert!(matches!(late, Err(SettleError::NotInFlight | SettleError::Expired)), "{late:?}");
    }
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn a_delivery_that_was_given_back_cannot_be_extended(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["deferred"]).await;
    let got = t.one(&jobs).await;
    t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap();
    assert_eq!(t.extend(&jobs, &got, LEASE_MS).await, Err(SettleError::NotInFlight), "it did not count");
    let got = t.one(&jobs).await;
    assert_eq!(got.attempt, 1);
    t.settle(&jobs, &got, Settlement::Park { reason: "unknown".into() }).await.unwrap();
    let parked = t.extend(&jobs, &got, LEASE_MS).await;
    assert!(parked.is_err(), "{parked:?}");
    t.store().release(&jobs, vec![got.id]).await.unwrap();
    assert_eq!(
        t.extend(&jobs, &got, LEASE_MS).await,
        Err(SettleError::NotInFlight),
        "released with a clean slate"
    );
    assert_eq!(t.one(&jobs).await.attempt, 1);
}

pub(crate) async fn a_lease_lasts_at_most_twelve_hours_since_the_receive(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.advance(LEASE_MS / 2).await;
    let long = t.extend(&jobs, &got, LEASE_MS_MAX).await;
    assert!(matches!(long, Err(SettleError::LeaseTooLong { lease_ms_max: LEASE_MS_MAX, .. })), "{long:?}");
    let long = t.extend(&jobs, &got, u64::MAX).await;
    assert!(matches!(long, Err(SettleError::LeaseTooLong { .. })), "{long:?}");
    let slack = if t.exact() { LEASE_MS / 2 } else { 60_000 };
    assert!(t.extend(&jobs, &got, LEASE_MS_MAX - slack).await.is_ok());
    assert!(t.extend(&jobs, &got, LEASE_MS).await.is_ok());
    t.ack(&jobs, &got).await;
}

pub(crate) async fn a_refused_extension_changes_nothing(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert!(t.extend(&jobs, &got, LEASE_MS_MAX + 1).await.is_err());
    t.hidden_for(&jobs, LEASE_MS).await;
    t.one(&jobs).await;
}

pub(crate) async fn a_refused_late_extension_keeps_the_failure(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    let long = t.extend(&jobs, &got, LEASE_MS_MAX).await;
    assert!(matches!(long, Err(SettleError::LeaseTooLong { .. })), "{long:?}");
    let view = t.browse(&jobs).await.remove(0);
    assert_eq!(view.history.iter().map(|failed| failed.cause).collect::<Vec<_>>(), [FailureCause::Expired]);
    assert_eq!(t.one(&jobs).await.attempt, 2, "it stays visible");
}

pub(crate) async fn an_extension_to_zero_gives_the_message_back_at_once(t: Trial) {
    // Zero is taken literally: the policy's backoff does not apply.
    let jobs = t.create("jobs", QueueConfig { retry: exactly(60_000, 0), ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    assert_eq!(t.extend(&jobs, &got, 0).await.map(|left| left.lease_ms), Ok(0));
    let again = t.one(&jobs).await;
    assert_eq!((again.id, again.attempt), (got.id, 2));
    assert!(again.fence > got.fence);
    assert_eq!(t.settle(&jobs, &got, Settlement::Ack).await, Err(SettleError::Stale));
}

pub(crate) async fn a_receipt_survives_a_crash(mut t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["a", "b"]).await;
    let got = t.receive(&jobs, 2).await;
    t.crash().await;
    t.ack(&jobs, &got[0]).await;
    t.restart().await;
    assert!(t.extend(&jobs, &got[1], 60_000).await.is_ok());
    t.ack(&jobs, &got[1]).await;
    assert_eq!(t.settle(&jobs, &got[0], Settlement::Ack).await, Err(SettleError::Gone));
}

pub(crate) async fn a_stale_receipt_stays_stale_after_a_crash(mut t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    t.send_all(&jobs, &["a"]).await;
    let old = t.one(&jobs).await;
    t.extend(&jobs, &old, 0).await.unwrap();
    let new = t.one(&jobs).await;
    t.crash().await;
    assert_eq!(t.settle(&jobs, &old, Settlement::Ack).await, Err(SettleError::Stale));
    t.none(&jobs).await;
    t.ack(&jobs, &new).await;
}

pub(crate) async fn a_delivery_that_was_nacked_cannot_be_extended(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    for after_ms in [Some(0), Some(60_000), None] {
        t.send_all(&jobs, &["a"]).await;
        let got = t.one(&jobs).await;
        t.settle(&jobs, &got, Settlement::Retry { after_ms, error: None }).await.unwrap();
        for crash in [false, true] {
            if crash {
                t.crash().await;
            }
            for lease_ms in [LEASE_MS, 0] {
                let extended = t.extend(&jobs, &got, lease_ms).await;
                assert_eq!(extended, Err(SettleError::NotInFlight), "after {after_ms:?}, {crash}");
            }
        }
        let expected = u64::from(after_ms != Some(60_000));
        assert_eq!(t.stats(&jobs).await.ready, expected, "the consumer gave it up");
        t.store().purge(&jobs).await.unwrap();
    }
}

/// As in SQS, where a visibility of 0 is a timeout that ends now.
pub(crate) async fn a_visibility_of_zero_can_be_followed_by_another(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let got = t.one(&jobs).await;
    t.extend(&jobs, &got, 0).await.unwrap();
    t.extend(&jobs, &got, 3 * LEASE_MS).await.unwrap();
    t.none(&jobs).await;
    t.ack(&jobs, &got).await;
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn late_extends_leave_one_failure_of_their_delivery(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let failed = t.one(&jobs).await;
    t.fail(&jobs, &failed, "boom").await;
    let got = t.one(&jobs).await;
    for round in 0..30 {
        t.pass(LEASE_MS).await;
        if round == 15 {
            t.crash().await;
        }
        t.extend(&jobs, &got, LEASE_MS).await.unwrap();
    }
    t.pass(LEASE_MS).await;
    t.quiet().await;
    let history = t.browse(&jobs).await.remove(0).history;
    let causes: Vec<_> = history.iter().map(|failed| (failed.deliveries, failed.cause)).collect();
    assert_eq!(causes, [(1, FailureCause::Retry), (2, FailureCause::Expired)]);
}
