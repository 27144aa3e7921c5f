//! Where features meet: pauses, delivery times, quotas, discards and late extensions with halted groups, dead letters and
//! redrives under way.

use hapax_core::policy::RetryPolicy;
use hapax_core::{
    OnDead, QueueConfig, QueueName, Quota, RedriveRequest, RedriveState, SendError, SettleError, Settled,
    Settlement,
};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, config, exactly, fifo_config, group, redrive_from, reject, seen, text};

/// A FIFO queue whose groups are halted by a death, and its dead letters.
async fn halting(t: &Trial) -> (QueueName, QueueName) {
    t.with_dead(3, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await
}

/// Makes a dead letter of the head of each of these groups.
async fn reject_heads(t: &Trial, jobs: &QueueName, count: usize) {
    let got = t.receive(jobs, 10).await;
    let mut rejected = std::collections::BTreeSet::new();
    for delivery in &got {
        if rejected.insert(delivery.group.clone()) {
            assert_eq!(t.settle(jobs, delivery, reject("bad")).await, Ok(Settled::Dead));
        }
    }
    assert_eq!(rejected.len(), count);
}

/// A redrive of ten messages a second.
fn slowly(from: &QueueName) -> RedriveRequest {
    RedriveRequest { per_second: Some(10), ..redrive_from(from) }
}

/// Sends messages to a standard queue and rejects each.
async fn thirty_dead(t: &Trial, jobs: &QueueName) -> Vec<hapax_core::MessageId> {
    let names: Vec<String> = (0..30).map(|number| format!("{number:02}")).collect();
    let sent = t.send_all(jobs, &names.iter().map(String::as_str).collect::<Vec<_>>()).await;
    for delivery in t.receive(jobs, 30).await {
        t.settle(jobs, &delivery, reject("bad")).await.unwrap();
    }
    sent.iter().map(|sent| sent.id).collect()
}

pub(crate) async fn a_group_that_is_halted_in_a_pause_stays_halted_after_it(mut t: Trial) {
    let (jobs, dead) = halting(&t).await;
    t.send_group(&jobs, "g", &["g1", "g2"]).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.store().pause_queue(&jobs, "ann", None).await.unwrap();
    t.settle(&jobs, &got, reject("bad")).await.unwrap();
    assert_eq!(t.store().halted_groups(&jobs).await.unwrap(), [group("g")]);
    t.crash().await;
    t.none(&jobs).await;
    t.store().resume_queue(&jobs, "ann").await.unwrap();
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["h1"], "the pause is over, the halt is not");

    // Released in a pause, the group waits for the end of the pause.
    t.store().pause_queue(&jobs, "ann", None).await.unwrap();
    t.redrive(redrive_from(&dead)).await;
    assert!(t.store().halted_groups(&jobs).await.unwrap().is_empty());
    t.none(&jobs).await;
    t.crash().await;
    t.none(&jobs).await;
    t.store().resume_queue(&jobs, "ann").await.unwrap();
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["g1", "g2"], "the dead letter took its old place");
}

pub(crate) async fn a_redrive_under_way_continues_through_a_pause(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    thirty_dead(&t, &jobs).await;
    let task = t.try_redrive(slowly(&dead)).await.unwrap();
    t.advance(1_000).await;
    // Neither the queue that the letters leave nor the one that they return to hands out anything.
    for queue in [&jobs, &dead] {
        t.store().pause_queue(queue, "ann", None).await.unwrap();
    }
    t.none(&jobs).await;
    t.crash().await;
    let task = t.redriven(&task).await;
    assert_eq!((task.state, task.moved), (RedriveState::Completed, 30));
    t.none(&jobs).await;
    t.none(&dead).await;
    t.store().resume_queue(&jobs, "ann").await.unwrap();
    let got = t.receive(&jobs, 100).await;
    assert_eq!(got.len(), 30);
    assert!(got.iter().all(|delivery| delivery.attempt == 1));
}

pub(crate) async fn a_redriven_message_does_not_wait_for_its_delivery_time_again(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let now_ms = t.now_ms().await;
    t.send(&jobs, text("a").deliver_at_ms(now_ms + 10_000)).await;
    t.none(&jobs).await;
    t.pass(10_000).await;
    let got = t.one(&jobs).await;
    t.settle(&jobs, &got, reject("bad")).await.unwrap();
    t.crash().await;
    t.redrive(redrive_from(&dead)).await;
    let again = t.one(&jobs).await;
    assert_eq!((again.body.as_ref(), again.attempt), (b"a".as_slice(), 1));
}

pub(crate) async fn a_message_that_waits_for_its_time_can_be_discarded(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let now_ms = t.now_ms().await;
    let kept = t.send(&jobs, text("kept").deliver_at_ms(now_ms + 5_000)).await;
    let gone = t.send(&jobs, text("gone").deliver_at_ms(now_ms + 5_000)).await;
    assert_eq!(t.store().discard(&jobs, vec![gone.id], "suite").await.unwrap().count, 1);
    t.crash().await;
    t.pass(5_000).await;
    let got = t.receive(&jobs, 10).await;
    assert_eq!(got.iter().map(|d| d.id).collect::<Vec<_>>(), [kept.id]);
    assert!(t.browse(&dead).await.is_empty());
}

pub(crate) async fn a_message_that_waits_for_its_time_counts_against_the_quota(mut t: Trial) {
    let quota = Quota { messages_max: Some(1), bytes_max: None };
    let jobs = t.create("jobs", QueueConfig { quota, ..config() }).await;
    let now_ms = t.now_ms().await;
    let later = || text("later").deliver_at_ms(now_ms + 5_000);
    let first = t.send(&jobs, later()).await;
    for _ in 0..2 {
        let refused = t.try_send(&jobs, later()).await;
        assert!(matches!(refused, Err(SendError::QuotaExceeded { used: 1, max: 1, .. })), "{refused:?}");
        t.crash().await;
    }
    t.store().discard(&jobs, vec![first.id], "suite").await.unwrap();
    t.send(&jobs, later()).await;
    t.pass(5_000).await;
    let got = t.one(&jobs).await;
    assert!(t.try_send(&jobs, text("b")).await.is_err(), "it is in flight, and still there");
    t.ack(&jobs, &got).await;
    t.send(&jobs, text("b")).await;
}

pub(crate) async fn what_is_discarded_while_a_redrive_runs_does_not_return(mut t: Trial) {
    for crash in [false, true] {
        let (jobs, dead) = t.with_dead(1, config()).await;
        let ids = thirty_dead(&t, &jobs).await;
        let task = t.try_redrive(slowly(&dead)).await.unwrap();
        assert_eq!(t.store().discard(&dead, ids[20..].to_vec(), "suite").await.unwrap().count, 10);
        t.advance(500).await;
        if crash {
            t.crash().await;
        }
        let task = t.redriven(&task).await;
        assert_eq!((task.state, task.moved), (RedriveState::Completed, 20), "{crash}");
        assert!(t.browse(&dead).await.is_empty());
        let names: Vec<String> = (0..20).map(|number| format!("{number:02}")).collect();
        assert_eq!(seen(&t.browse(&jobs).await), names);
        for queue in [&jobs, &dead] {
            t.store().delete_queue(queue).await.unwrap();
        }
    }
}

pub(crate) async fn a_late_extend_does_not_reach_a_dead_letter(mut t: Trial) {
    for with_dead in [true, false] {
        let own = QueueConfig { retry: RetryPolicy { max_attempts: 1, ..exactly(0, 0) }, ..config() };
        let (jobs, dead) = if with_dead {
            let (jobs, dead) = t.with_dead(1, config()).await;
            (jobs, Some(dead))
        } else {
            (t.create("parks", own).await, None)
        };
        t.send_all(&jobs, &["a"]).await;
        let got = t.one(&jobs).await;
        t.pass(LEASE_MS).await;
        t.quiet().await;
        for lease_ms in [LEASE_MS, 0] {
            assert_eq!(t.extend(&jobs, &got, lease_ms).await, Err(SettleError::Dead), "{with_dead}");
        }
        t.crash().await;
        assert_eq!(t.extend(&jobs, &got, LEASE_MS).await, Err(SettleError::Dead), "{with_dead}");
        let Some(dead) = dead else { continue };
        // A delivery of the dead letter can be resumed, and then no redrive takes it.
        let letter = t.one(&dead).await;
        t.pass(LEASE_MS).await;
        t.extend(&dead, &letter, 600_000).await.unwrap();
        let task = t.try_redrive(redrive_from(&dead)).await.unwrap();
        assert_eq!((t.redriven(&task).await.moved, t.browse(&jobs).await.len()), (0, 0));
        t.ack(&dead, &letter).await;
    }
}

pub(crate) async fn a_dead_letter_that_a_group_waits_for_outlives_its_retention(mut t: Trial) {
    for decide in ["ack", "redrive", "discard", "purge", "release"] {
        let (jobs, dead) = halting(&t).await;
        t.set(&dead, QueueConfig { retention_ms: 60_000, ..fifo_config() }).await;
        t.send_group(&jobs, "g", &["g1", "g2"]).await;
        reject_heads(&t, &jobs, 1).await;
        // A message that no group waits for is as old.
        t.send_group(&dead, "other", &["old"]).await;
        t.advance(61_000).await;
        t.quiet().await;
        assert_eq!(seen(&t.holds(&dead, 1).await), ["g1"], "{decide}: the other one was too old");
        t.crash().await;
        t.advance(61_000).await;
        let letter = t.holds(&dead, 1).await.remove(0);
        assert_eq!(t.store().halted_groups(&jobs).await.unwrap(), [group("g")]);
        match decide {
            "ack" => {
                let letter = t.one(&dead).await;
                t.ack(&dead, &letter).await;
            }
            "redrive" => assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1),
            "discard" => {
                assert_eq!(t.store().discard(&dead, vec![letter.id], "suite").await.unwrap().count, 1);
            }
            "purge" => assert_eq!(t.store().purge(&dead).await.unwrap(), 1),
            _ => t.store().release_group(&jobs, &group("g")).await.unwrap(),
        }
        t.quiet().await;
        // Nothing waits for it any more: after the release of the group its age counts again.
        t.holds(&dead, 0).await;
        let expected: &[&str] = if decide == "redrive" { &["g1", "g2"] } else { &["g2"] };
        assert_eq!(bodies(&t.receive(&jobs, 10).await), expected, "{decide}");
        for queue in [&jobs, &dead] {
            t.store().delete_queue(queue).await.unwrap();
        }
    }
}

pub(crate) async fn a_dead_letter_is_kept_while_a_second_group_waits_for_it(t: Trial) {
    let (jobs, dead) = halting(&t).await;
    t.set(&dead, QueueConfig { retention_ms: 60_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["g1", "g2"]).await;
    t.send_group(&jobs, "h", &["h1", "h2"]).await;
    reject_heads(&t, &jobs, 2).await;
    t.advance(61_000).await;
    t.quiet().await;
    assert_eq!(t.holds(&dead, 2).await.len(), 2);
    t.store().release_group(&jobs, &group("g")).await.unwrap();
    t.quiet().await;
    assert_eq!(
        seen(&t.holds(&dead, 1).await),
        ["h1"],
        "only the letter of the other group is still waited for"
    );
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["g2"]);
}

pub(crate) async fn a_held_dead_letter_comes_back_to_be_kept(t: Trial) {
    let (jobs, dead) = halting(&t).await;
    t.set(&dead, QueueConfig { retention_ms: 60_000, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["g1", "g2"]).await;
    reject_heads(&t, &jobs, 1).await;
    t.advance(61_000).await;
    t.quiet().await;
    let letter = t.one(&dead).await;
    t.settle(&dead, &letter, Settlement::Defer { after_ms: 0 }).await.unwrap();
    t.advance(1_000).await;
    t.quiet().await;
    assert_eq!(t.holds(&dead, 1).await.len(), 1);
}
