//! Point 5: the audited return of dead letters.

use std::time::Instant;

use hapax_core::{
    AdminError, FailureCause, IdempotencyKey, KeySource, MessageId, QueueConfig, QueueName, RedriveFilter,
    RedriveRequest, RedriveState, RedriveTask, Settled,
};

use crate::trial::Trial;
use crate::values::{bodies, config, dedup, dying, group, queue, redrive_from, reject, seen, text};

/// Sends messages and fails each once, which makes it a dead letter; the error is the body.
async fn kill(t: &Trial, jobs: &QueueName, all: &[&str]) -> Vec<MessageId> {
    let sent = t.send_all(jobs, all).await;
    for got in t.receive(jobs, all.len()).await {
        let error = String::from_utf8_lossy(&got.body).into_owned();
        t.fail(jobs, &got, &error).await;
    }
    sent.iter().map(|sent| sent.id).collect()
}

/// Thirty dead letters.
async fn thirty(t: &Trial, jobs: &QueueName) -> Vec<String> {
    let all: Vec<String> = (0..30).map(|n| format!("{n:02}")).collect();
    kill(t, jobs, &all.iter().map(String::as_str).collect::<Vec<_>>()).await;
    all
}

fn slowly(from: &QueueName) -> RedriveRequest {
    RedriveRequest { per_second: Some(10), ..redrive_from(from) }
}

fn sorted(mut bodies: Vec<String>) -> Vec<String> {
    bodies.sort();
    bodies
}

pub(crate) async fn a_redriven_message_returns_to_its_source_as_a_new_one(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let key = IdempotencyKey::new("order-7").unwrap();
    let sent = t.send(&jobs, text("a").idempotency_key(&key).dedup(dedup("once")).group(group("g"))).await;
    let got = t.one(&jobs).await;
    t.fail(&jobs, &got, "boom").await;

    let task = t.redrive(redrive_from(&dead)).await;
    assert_eq!((task.total, task.moved, task.left), (1, 1, 0));
    assert_eq!((task.by.as_str(), &task.from, &task.to), ("conformance", &dead, &None));
    assert!(task.ended_ms >= Some(task.started_ms));
    assert!(t.browse(&dead).await.is_empty());
    // It returns although it is inside the deduplication window.
    let back = t.one(&jobs).await;
    assert_ne!(back.id, sent.id, "the message id is new");
    assert_eq!((back.attempt, back.dead.as_ref()), (1, None));
    assert_eq!(
        (back.body.clone(), back.attributes.clone(), back.group.clone()),
        (got.body, got.attributes, got.group)
    );
    assert_eq!((back.key.clone(), back.key_source), (key, KeySource::Attribute));
    t.ack(&jobs, &back).await;
}

/// Nothing of its former life counts: neither what happened to it among the dead letters, nor its age.
pub(crate) async fn a_redriven_message_begins_again_though_it_was_received_among_the_dead(t: Trial) {
    let dead = t.create("dead", config()).await;
    let jobs = t.create("jobs", QueueConfig { retention_ms: 60_000, ..dying(&dead, 2, config()) }).await;
    t.send_all(&jobs, &["a"]).await;
    t.advance(50_000).await;
    for queue in [&jobs, &jobs, &dead, &dead, &dead] {
        let got = t.one(queue).await;
        t.fail(queue, &got, "boom").await;
    }
    let letter = t.browse(&dead).await.remove(0);
    assert_eq!((letter.attempts, letter.deliveries), (3, 5));
    t.redrive(redrive_from(&dead)).await;
    let back = t.holds(&jobs, 1).await.remove(0);
    assert_eq!((back.attempts, back.deliveries, back.history.len()), (0, 0, 0), "{back:?}");
    assert!(back.sent_ms >= letter.sent_ms + 50_000, "{back:?}");
    t.advance(55_000).await;
    let got = t.one(&jobs).await;
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Returned { after_ms: 0 }, "one more is left");
    t.advance(10_000).await;
    t.holds(&jobs, 0).await;
}

pub(crate) async fn a_redrive_survives_a_crash_once_it_is_done(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    kill(&t, &jobs, &["a", "b"]).await;
    t.redrive(redrive_from(&dead)).await;
    t.crash().await;
    assert!(t.browse(&dead).await.is_empty());
    assert_eq!(seen(&t.browse(&jobs).await), ["a", "b"]);
}

pub(crate) async fn dead_letters_can_go_to_another_queue(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let other = t.standard("other").await;
    kill(&t, &jobs, &["a", "b"]).await;
    let task = t.redrive(RedriveRequest { to: Some(other.clone()), ..redrive_from(&dead) }).await;
    assert_eq!((task.moved, task.to.as_ref()), (2, Some(&other)));
    assert_eq!(bodies(&t.receive(&other, 10).await), ["a", "b"]);
    t.none(&jobs).await;
}

pub(crate) async fn a_missing_target_is_refused(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    kill(&t, &jobs, &["a"]).await;
    let refused = t.try_redrive(RedriveRequest { to: Some(queue("gone")), ..redrive_from(&dead) }).await;
    assert!(refused.is_err(), "{refused:?}");
    assert_eq!(t.browse(&dead).await.len(), 1);
}

pub(crate) async fn a_filter_chooses_what_is_redriven(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let ids = kill(&t, &jobs, &["timeout 1", "timeout 2", "refused"]).await;
    t.send_all(&jobs, &["rejected"]).await;
    let got = t.one(&jobs).await;
    t.settle(&jobs, &got, reject("bad")).await.unwrap();

    let only = |filter| RedriveRequest { filter, ..redrive_from(&dead) };
    let task = t
        .redrive(only(RedriveFilter { cause: Some(FailureCause::Rejected), ..RedriveFilter::default() }))
        .await;
    assert_eq!((task.moved, task.total - task.left), (1, 1));
    assert_eq!(t.one(&jobs).await.body, "rejected");

    let filter = RedriveFilter {
        error_contains: Some("timeout".into()),
        ids: vec![ids[1], ids[2]],
        ..RedriveFilter::default()
    };
    let task = t.redrive(only(filter.clone())).await;
    assert_eq!((task.moved, &task.filter), (1, &filter), "all conditions hold together");
    assert_eq!(t.one(&jobs).await.body, "timeout 2");

    let elsewhere = RedriveFilter { source: Some(queue("elsewhere")), ..RedriveFilter::default() };
    assert_eq!(t.redrive(only(elsewhere)).await.moved, 0);
    let here = RedriveFilter { source: Some(jobs.clone()), ids: vec![ids[2]], ..RedriveFilter::default() };
    assert_eq!(t.redrive(only(here)).await.moved, 1);
    assert_eq!(seen(&t.browse(&dead).await), ["timeout 1"]);
}

pub(crate) async fn a_filter_by_time_of_death_is_half_open(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    for body in ["a", "b", "c"] {
        kill(&t, &jobs, &[body]).await;
        t.advance(1_000).await;
    }
    let died: Vec<u64> = t.browse(&dead).await.iter().map(|v| v.dead.as_ref().unwrap().died_ms).collect();
    let filter = RedriveFilter {
        died_from_ms: Some(died[1]),
        died_until_ms: Some(died[2]),
        ..RedriveFilter::default()
    };
    assert_eq!(t.redrive(RedriveRequest { filter, ..redrive_from(&dead) }).await.moved, 1);
    assert_eq!(seen(&t.browse(&dead).await), ["a", "c"]);
}

pub(crate) async fn a_dead_letter_whose_source_is_gone_is_left(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    kill(&t, &jobs, &["a"]).await;
    t.store().delete_queue(&jobs).await.unwrap();
    let task = t.try_redrive(redrive_from(&dead)).await.expect("the redrive starts");
    let task = t.redriven(&task).await;
    assert_eq!((task.moved, task.left), (0, 1), "{task:?}");
    assert_eq!(seen(&t.browse(&dead).await), ["a"]);
}

pub(crate) async fn a_redrive_keeps_to_its_rate(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let all = thirty(&t, &jobs).await;
    let start = Instant::now();
    let task = t.try_redrive(slowly(&dead)).await.unwrap();
    assert_eq!((task.total, task.per_second), (30, 10));
    let mut passed_ms = 0;
    for _ in 0..1_000 {
        t.advance(100).await;
        passed_ms += 100;
        let task = t.redrive_now(&task).await;
        let passed_ms = if t.exact() { passed_ms } else { start.elapsed().as_millis() as u64 };
        // A burst of one second's worth is allowed.
        assert!(task.moved <= 10 + passed_ms / 100, "{} moved after {passed_ms} ms", task.moved);
        if task.state == RedriveState::Completed {
            break;
        }
    }
    assert_eq!(t.redrive_now(&task).await.moved, 30);
    assert_eq!(sorted(seen(&t.browse(&jobs).await)), all);
}

pub(crate) async fn a_cancelled_redrive_stops_and_keeps_what_it_moved(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let all = thirty(&t, &jobs).await;
    let task = t.try_redrive(slowly(&dead)).await.unwrap();
    t.advance(500).await;
    let cancelled = t.store().cancel_redrive(task.id).await.unwrap();
    assert_eq!(cancelled.state, RedriveState::Cancelled);
    t.advance(5_000).await;
    t.restart().await;
    t.advance(5_000).await;
    let ended = t.redrive_now(&task).await;
    assert_eq!((ended.state, ended.moved), (RedriveState::Cancelled, cancelled.moved));
    assert!(ended.moved < 30 && ended.ended_ms.is_some(), "{ended:?}");
    let (back, left) = (seen(&t.browse(&jobs).await), seen(&t.browse(&dead).await));
    assert_eq!(back.len() as u64, ended.moved);
    assert_eq!(sorted([back, left].concat()), all);
}

pub(crate) async fn cancelling_what_does_not_exist_is_not_found(t: Trial) {
    let cancelled = t.store().cancel_redrive(4711).await;
    assert!(matches!(cancelled, Err(AdminError::NotFound(_))), "{cancelled:?}");
}

pub(crate) async fn one_redrive_runs_per_dead_letter_queue(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    thirty(&t, &jobs).await;
    let task = t.try_redrive(slowly(&dead)).await.unwrap();
    assert_eq!(t.try_redrive(redrive_from(&dead)).await, Err(AdminError::RedriveRunning(dead.clone())));
    t.store().cancel_redrive(task.id).await.unwrap();
    let rest = t.redrive(redrive_from(&dead)).await;
    assert_eq!(t.redrive_now(&task).await.moved + rest.moved, 30);
}

pub(crate) async fn redrives_are_kept_as_an_audit_newest_first(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let mut done: Vec<RedriveTask> = Vec::new();
    for body in ["a", "b"] {
        kill(&t, &jobs, &[body]).await;
        done.insert(0, t.redrive(RedriveRequest { by: body.to_owned(), ..redrive_from(&dead) }).await);
        let got = t.one(&jobs).await;
        t.ack(&jobs, &got).await;
        t.advance(10).await;
    }
    assert_eq!(t.store().redrives(&dead).await.unwrap(), done);
    t.restart().await;
    assert_eq!(t.store().redrives(&dead).await.unwrap(), done);
    assert!(done[0].id != done[1].id && done[0].by == "b");
}

pub(crate) async fn a_redrive_goes_on_after_a_crash_without_losing_or_doubling(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let all = thirty(&t, &jobs).await;
    let task = t.try_redrive(slowly(&dead)).await.unwrap();
    for round in 0..4 {
        t.advance(300).await;
        if round % 2 == 0 {
            t.crash().await;
        } else {
            t.restart().await;
        }
        let everywhere = [seen(&t.browse(&jobs).await), seen(&t.browse(&dead).await)].concat();
        // The two listings are not atomic: a message may move in between, and then appears twice or not at all.
        assert!(!t.exact() || everywhere.len().abs_diff(30) <= 10, "{everywhere:?}");
    }
    let ended = t.redriven(&task).await;
    assert_eq!((ended.state, ended.moved, ended.left), (RedriveState::Completed, 30, 0));
    assert_eq!(sorted(seen(&t.browse(&jobs).await)), all);
    assert!(t.browse(&dead).await.is_empty());
}

pub(crate) async fn what_dies_during_a_redrive_is_left_to_the_next_one(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let other = t.standard("other").await;
    let all = thirty(&t, &jobs).await;
    let to_other = || RedriveRequest { to: Some(other.clone()), ..slowly(&dead) };
    let task = t.try_redrive(to_other()).await.unwrap();
    t.advance(500).await;
    kill(&t, &jobs, &["late"]).await;
    let ended = t.redriven(&task).await;
    assert_eq!((ended.total, ended.moved, ended.left), (30, 30, 0));
    assert_eq!(sorted(seen(&t.browse(&other).await)), all);
    assert_eq!(seen(&t.browse(&dead).await), ["late"]);
    assert_eq!(t.redrive(to_other()).await.moved, 1);
}
