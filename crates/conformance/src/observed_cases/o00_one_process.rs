//! What one process tells about messages of its store.

use hapax_core::{
    Claim, ClaimEnding, EntryState, MessageState, OnDead, QueueConfig, SettleError, Settled, Settlement,
};
use hapax_observe::Event;

use super::process::{Processes, completed, says};
use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, fifo_config, group, reject, retry, text};

pub(crate) async fn a_lease_that_ran_out_is_told_by_id_and_by_key_also_after_a_restart(t: Trial) {
    let jobs = t.standard("jobs").await;
    let key = "order-7".parse().unwrap();
    let id = t.send(&jobs, text("a").idempotency_key(&key)).await.id;
    let mut processes = Processes::new(t);
    let process = processes.first();
    let slow = process.receive(&jobs, "anna").await;
    processes.pass(LEASE_MS + 500).await;
    let second = process.receive(&jobs, "bert").await;
    let now = ["Delivery 1 went to anna", "ran out before it was settled", "A consumer holds it now"];
    says(&process.story(&jobs, id).await, &now, &["another process"]);
    process.ack(&jobs, &second).await;
    let late = process.settle(&jobs, &slow, Settlement::Ack).await;
    assert!(matches!(late, Err(SettleError::Gone | SettleError::Stale)), "{late:?}");
    let told = process.story(&jobs, id).await;
    says(&told, &["It was delivered 2 times", "anna was still at work", "It is done: it was acked."], &[]);
    assert_eq!((told.state, told.key.as_ref()), (None, Some(&key)));
    let figures = process.store.observer().figures(&jobs);
    assert_eq!((figures.repeated, figures.repeated_after_expiry, figures.late), (1, 1, 1), "{figures:?}");

    drop(process);
    processes.t.restart().await;
    let process = processes.first();
    assert_eq!(process.story(&jobs, id).await, told, "with nothing in memory");
    assert_eq!(process.stories_of_key(&jobs, &key).await, [told]);
}

pub(crate) async fn a_fifo_group_tells_why_its_messages_wait(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let sent = t.send_group(&jobs, "g", &["a", "b"]).await;
    let processes = Processes::new(t);
    let process = processes.first();
    let first = process.receive(&jobs, "anna").await;
    assert_eq!(first.id, sent[0].id);
    says(&process.story(&jobs, sent[1].id).await, &["for its turn in its group"], &[]);
    processes.pass(LEASE_MS + 500).await;
    let again = process.receive(&jobs, "bert").await;
    assert_eq!(again.id, sent[0].id, "the group's order is kept");
    process.ack(&jobs, &again).await;
    says(
        &process.story(&jobs, sent[0].id).await,
        &["Delivery 1 went to anna", "ran out", "It is done: it was acked."],
        &["another process"],
    );
    let follower = process.receive(&jobs, "bert").await;
    process.ack(&jobs, &follower).await;
    assert_eq!(process.try_story(&jobs, sent[1].id).await, None, "an ordinary message leaves nothing");
}

pub(crate) async fn a_message_that_died_is_told_with_its_error_and_advised(t: Trial) {
    let (jobs, dead) = t.with_dead(2, config()).await;
    let mut sent = Vec::new();
    for number in 0..6 {
        sent.push(t.send(&jobs, text(format!("m{number}"))).await.id);
    }
    let processes = Processes::new(t);
    let process = processes.first();
    // One at a time: each fails twice, and the second failure is its last.
    for _ in 0..6 {
        let first = process.receive(&jobs, "anna").await;
        processes.pass(1).await;
        assert!(matches!(
            process.settle(&jobs, &first, retry("no such card")).await,
            Ok(Settled::Returned { .. })
        ));
    }
    for _ in 0..6 {
        let second = process.receive(&jobs, "anna").await;
        processes.pass(1).await;
        assert_eq!(process.settle(&jobs, &second, retry("no such card")).await, Ok(Settled::Dead));
    }
    let died = format!("It died and went to {dead}: no such card");
    for id in sent {
        says(
            &process.story(&jobs, id).await,
            &["It was delivered 2 times", "gave it back: no such card", &died],
            &["another process", "ran out"],
        );
    }
    let advice = process.advice(&jobs, "messages-die").await.expect("messages die");
    assert!(
        advice.contains("6 messages died") && advice.contains("6 of them with: no such card"),
        "{advice}"
    );
}

pub(crate) async fn a_parked_message_and_its_halted_group_are_told_and_advised(t: Trial) {
    let halting = t.store().capabilities().halt_group;
    let on_dead = if halting { OnDead::HaltGroup } else { fifo_config().on_dead };
    let jobs = t.create("jobs.fifo", QueueConfig { on_dead, ..fifo_config() }).await;
    let sent = t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let processes = Processes::new(t);
    let process = processes.first();
    let first = process.receive(&jobs, "anna").await;
    let park = Settlement::Park { reason: "the bank did not answer".into() };
    assert_eq!(process.settle(&jobs, &first, park).await, Ok(Settled::Parked));
    let told = process.story(&jobs, sent[0].id).await;
    says(&told, &["It is parked (in-doubt): the bank did not answer"], &[]);
    assert_eq!(told.state, Some(MessageState::Parked));
    if halting {
        let advice = process.advice(&jobs, "groups-halted").await.expect("a group is halted");
        assert!(advice.starts_with("2 messages wait"), "{advice}");
        processes.t.store().release(&jobs, vec![first.id]).await.unwrap();
        processes.t.store().release_group(&jobs, &group("g")).await.ok();
        assert_eq!(process.advice(&jobs, "groups-halted").await, None, "it was decided about");
    }
}

pub(crate) async fn keys_that_were_replayed_in_progress_or_in_doubt_are_told(t: Trial) {
    let jobs = t.standard("jobs").await;
    let id = t.send(&jobs, text("a")).await.id;
    let processes = Processes::new(t);
    let process = processes.first();
    // Its first run records an outcome and loses its lease before the ack.
    let first = process.receive(&jobs, "anna").await;
    let grant = process.granted(&jobs, &first, "anna-1").await;
    process.end(&jobs, &first, grant, completed()).await;
    processes.pass(LEASE_MS + 500).await;
    let second = process.receive(&jobs, "bert").await;
    assert!(matches!(process.claim(&jobs, &second, "bert-1").await, Claim::Completed { .. }));
    process.ack(&jobs, &second).await;
    says(&process.story(&jobs, id).await, &["the handler was not run again", "happened once"], &[]);

    let key = "order-7".parse().unwrap();
    for body in ["b", "c"] {
        processes.t.send(&jobs, text(body).idempotency_key(&key)).await;
    }
    let holder = process.receive(&jobs, "anna").await;
    let other = process.receive(&jobs, "bert").await;
    let grant = process.granted(&jobs, &holder, "anna-2").await;
    assert!(matches!(process.claim(&jobs, &other, "bert-2").await, Claim::InProgress { .. }));
    says(&process.story(&jobs, other.id).await, &["with the same key was at work"], &[]);
    process.end(&jobs, &holder, grant, ClaimEnding::Doubt).await;
    let told = process.story(&jobs, other.id).await;
    says(&told, &["Its key waits for a decision"], &[]);
    assert_eq!((told.entry, told.key), (Some(EntryState::InDoubt), Some(key)));
    let figures = process.store.observer().figures(&jobs);
    assert_eq!((figures.granted, figures.replayed, figures.conflicts), (2, 1, 1), "{figures:?}");
}

pub(crate) async fn what_was_delivered_before_a_crash_is_told_after_it(t: Trial) {
    let jobs = t.standard("jobs").await;
    let sent = t.send_all(&jobs, &["a", "b"]).await;
    let mut processes = Processes::new(t);
    let process = processes.first();
    let given_back = process.receive(&jobs, "anna").await;
    let held = process.receive(&jobs, "bert").await;
    process.settle(&jobs, &given_back, busy()).await.unwrap();
    // Nothing of it was written, and the memory is gone.
    drop(process);
    processes.t.crash().await;
    processes.pass(LEASE_MS + 500).await;
    let process = processes.first();
    for _ in 0..2 {
        let again = process.receive(&jobs, "carl").await;
        let told = process.story(&jobs, again.id).await;
        let cause = if again.id == held.id { "its lease ran out before it was settled" } else { "busy" };
        says(&told, &["It was delivered 2 times", cause], &["another process"]);
        process.ack(&jobs, &again).await;
        says(&process.story(&jobs, again.id).await, &[cause, "It is done"], &["another process"]);
    }
    let figures = process.store.observer().figures(&jobs);
    assert_eq!(
        (figures.repeated_after_expiry, figures.repeated_after_return, figures.repeated_cause_unknown),
        (1, 1, 0),
        "{figures:?}"
    );
    assert_ne!(sent[0].id, sent[1].id);
    // A message that was rejected without a dead-letter queue is parked, and says so.
    let id = processes.t.send(&jobs, text("c")).await.id;
    let rejected = process.receive(&jobs, "carl").await;
    assert_eq!(process.settle(&jobs, &rejected, reject("bad")).await, Ok(Settled::Parked));
    let told = process.story(&jobs, id).await;
    assert!(told.moments.iter().any(|moment| matches!(moment.event, Event::Parked { .. })), "{told:?}");
}

fn busy() -> Settlement {
    Settlement::Retry { after_ms: Some(0), error: Some("busy".to_owned()) }
}
