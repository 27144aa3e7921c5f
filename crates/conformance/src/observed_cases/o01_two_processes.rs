//! Two processes, each with its own handle to one store: what one did not see, it does not invent.

use hapax_core::{Claim, Settled, Settlement};
use hapax_observe::{Event, Story};

use super::process::{Processes, completed, says};
use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, retry, text};

fn deliveries(story: &Story) -> Vec<u32> {
    let number = |event: &Event| match event {
        Event::Delivered { delivery, .. } => Some(*delivery),
        _ => None,
    };
    story.moments.iter().filter_map(|moment| number(&moment.event)).collect()
}

pub(crate) async fn a_lease_that_ran_out_at_one_is_told_by_the_other(t: Trial) {
    let jobs = t.standard("jobs").await;
    let id = t.send(&jobs, text("a")).await.id;
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    let slow = one.receive(&jobs, "anna").await;
    processes.pass(LEASE_MS + 500).await;
    let again = two.receive(&jobs, "bert").await;
    let cause =
        ["It was delivered 2 times", "Delivery 1 went to anna; its lease", "ran out before it was settled"];
    says(&two.story(&jobs, id).await, &cause, &["another process"]);
    two.ack(&jobs, &again).await;
    // The message is gone, and the first process has still seen nothing of it.
    for process in [&two, &one] {
        says(&process.story(&jobs, id).await, &cause, &["another process"]);
    }
    one.settle(&jobs, &slow, Settlement::Ack).await.unwrap_err();
    one.store.write_history().await;
    for process in [&one, &two] {
        let told = process.story(&jobs, id).await;
        says(&told, &cause, &["another process"]);
        says(&told, &["anna was still at work: it settled after", "It is done: it was acked."], &[]);
        assert_eq!(deliveries(&told), [1, 2], "{told:#?}");
    }
    let seen = (one.store.observer().figures(&jobs), two.store.observer().figures(&jobs));
    assert_eq!(
        (seen.0.late, seen.1.repeated_after_expiry, seen.1.repeated_cause_unknown),
        (1, 1, 0),
        "{seen:?}"
    );
}

pub(crate) async fn a_message_given_back_through_the_other_did_not_expire(t: Trial) {
    let jobs = t.standard("jobs").await;
    let id = t.send(&jobs, text("a")).await.id;
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    let first = one.receive(&jobs, "anna").await;
    // As behind a load balancer.
    assert!(matches!(two.settle(&jobs, &first, retry("busy")).await, Ok(Settled::Returned { .. })));
    // The next delivery comes after the end of the first lease, which proves nothing.
    processes.pass(LEASE_MS + 500).await;
    let second = one.receive(&jobs, "anna").await;
    let told = one.story(&jobs, id).await;
    says(&told, &["gave it back: busy"], &["ran out", "another process"]);
    two.ack(&jobs, &second).await;
    let told = one.story(&jobs, id).await;
    says(&told, &["gave it back: busy"], &["ran out", "another process"]);
    assert_eq!(deliveries(&told), [1, 2]);
    let figures = one.store.observer().figures(&jobs);
    assert_eq!((figures.repeated_after_return, figures.repeated_after_expiry), (1, 0), "{figures:?}");
}

pub(crate) async fn a_fifo_message_that_moves_between_them_is_one_story(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let sent = t.send_group(&jobs, "g", &["a", "b"]).await;
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    let first = one.receive(&jobs, "anna").await;
    processes.pass(1).await;
    one.settle(&jobs, &first, retry("busy")).await.unwrap();
    one.store.write_history().await;
    processes.pass(1).await;
    two.receive(&jobs, "bert").await;
    processes.pass(LEASE_MS + 500).await;
    let third = one.receive(&jobs, "anna").await;
    one.store.write_history().await;
    assert_eq!((third.id, third.deliveries), (sent[0].id, 3), "the group's order is kept");
    one.ack(&jobs, &third).await;
    for process in [&one, &two] {
        let told = process.story(&jobs, sent[0].id).await;
        says(
            &told,
            &[
                "It was delivered 3 times",
                "gave it back: busy",
                "Delivery 2 went to bert; its lease",
                "It is done",
            ],
            &["another process"],
        );
        assert_eq!(deliveries(&told), [1, 2, 3], "{told:#?}");
    }
    let follower = two.receive(&jobs, "bert").await;
    one.ack(&jobs, &follower).await;
    assert_eq!(two.try_story(&jobs, sent[1].id).await.map(|told| deliveries(&told)), Some(vec![1]));
}

pub(crate) async fn a_letter_that_died_through_the_other_is_told_and_advised(t: Trial) {
    let (jobs, dead) = t.with_dead(1, config()).await;
    let mut sent = Vec::new();
    for number in 0..6 {
        sent.push(t.send(&jobs, text(format!("m{number}"))).await.id);
    }
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    for _ in 0..6 {
        let delivery = one.receive(&jobs, "anna").await;
        assert_eq!(two.settle(&jobs, &delivery, retry("no such card")).await, Ok(Settled::Dead));
    }
    assert_eq!(two.store.observer().figures(&jobs).died, 6, "counted where they were settled");
    // The dead-letter queue has its story: where it came from, and why.
    processes.t.holds(&dead, 6).await;
    let letter = two.receive(&dead, "operator").await;
    assert!(sent.contains(&letter.id));
    assert_eq!(letter.dead.as_ref().and_then(|dead| dead.error.as_deref()), Some("no such card"));
    let advice = two.advice(&jobs, "messages-die").await.expect("messages die");
    assert!(advice.contains("6 messages died") && advice.contains("no such card"), "{advice}");
}

pub(crate) async fn a_message_parked_through_the_other_is_told(t: Trial) {
    let jobs = t.standard("jobs").await;
    let id = t.send(&jobs, text("a")).await.id;
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    let delivery = one.receive(&jobs, "anna").await;
    let park = Settlement::Park { reason: "the bank did not answer".into() };
    assert_eq!(two.settle(&jobs, &delivery, park).await, Ok(Settled::Parked));
    for process in [&one, &two] {
        let told = process.story(&jobs, id).await;
        says(&told, &["It is parked (in-doubt): the bank did not answer"], &["A consumer holds it"]);
    }
    assert_eq!(two.store.observer().figures(&jobs).parked, 1);
}

pub(crate) async fn a_key_that_was_completed_at_one_is_replayed_at_the_other(t: Trial) {
    let jobs = t.standard("jobs").await;
    let id = t.send(&jobs, text("a")).await.id;
    let processes = Processes::new(t);
    let (one, two) = (processes.first(), processes.second());
    let first = one.receive(&jobs, "anna").await;
    let grant = one.granted(&jobs, &first, "anna-1").await;
    one.end(&jobs, &first, grant, completed()).await;
    processes.pass(LEASE_MS + 500).await;
    let second = two.receive(&jobs, "bert").await;
    assert!(matches!(two.claim(&jobs, &second, "bert-1").await, Claim::Completed { .. }));
    // What is settled before it was looked up stays unknown.
    two.store.write_history().await;
    two.ack(&jobs, &second).await;
    two.store.write_history().await;
    for process in [&two, &one] {
        says(
            &process.story(&jobs, id).await,
            &["Delivery 1 went to anna; its lease", "the handler was not run again", "happened once"],
            &["another process"],
        );
    }
}
