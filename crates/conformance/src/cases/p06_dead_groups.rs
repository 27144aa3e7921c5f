//! Point 6: the effect of a dead letter on its FIFO group.

use hapax_core::{OnDead, QueueConfig, QueueName, Settled, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, dying, fifo_config, group, redrive_from, reject, seen};

/// A queue whose groups are halted after a dead letter: the head `a` of group `g` is dead, `b` and `c` wait behind it.
async fn halted(t: &Trial) -> (QueueName, QueueName) {
    let (jobs, dead) = t.with_dead(1, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    (jobs, dead)
}

/// Receives and acks until nothing is ready. If a message may die at its first attempt, each is delivered alone.
async fn one_by_one(t: &Trial, jobs: &QueueName) -> Vec<String> {
    let mut order = Vec::new();
    loop {
        let got = t.receive(jobs, 10).await;
        if got.is_empty() {
            return order;
        }
        for delivery in &got {
            t.ack(jobs, delivery).await;
        }
        order.extend(bodies(&got));
    }
}

async fn halted_groups(t: &Trial, jobs: &QueueName) -> Vec<String> {
    t.store().halted_groups(jobs).await.unwrap().iter().map(ToString::to_string).collect()
}

pub(crate) async fn by_default_a_group_goes_on_after_a_death(t: Trial) {
    let (jobs, dead) = t.with_dead(1, fifo_config()).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead);
    assert_eq!(t.one(&jobs).await.body, "b");
    assert!(halted_groups(&t, &jobs).await.is_empty());
    let letter = t.one(&dead).await;
    assert_eq!((letter.body.as_ref(), letter.group.clone()), (b"a".as_slice(), Some(group("g"))));
}

pub(crate) async fn a_halted_group_stands_still_and_others_do_not(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    assert_eq!(t.one(&jobs).await.body, "h1");
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.crash().await;
    t.send_group(&jobs, "g", &["d"]).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.pass(LEASE_MS).await;
    assert_eq!(seen(&t.holds(&dead, 2).await).len(), 2, "h1 died of its lease");
    t.none(&jobs).await;
}

pub(crate) async fn a_lowered_limit_that_ends_a_head_halts_its_group_too(t: Trial) {
    let halts = || QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() };
    let (jobs, dead) = t.with_dead(5, halts()).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert!(matches!(t.fail(&jobs, &got, "boom").await, Settled::Returned { .. }));
    t.set(&jobs, dying(&dead, 1, halts())).await;
    t.none(&jobs).await;
    assert_eq!(seen(&t.holds(&dead, 1).await), ["a"]);
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
}

pub(crate) async fn a_purge_takes_what_a_group_is_halted_for(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.settle(&jobs, &got, reject("bad")).await, Ok(Settled::Parked));
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.store().purge(&jobs).await.unwrap();
    assert!(halted_groups(&t, &jobs).await.is_empty());
    t.send_group(&jobs, "g", &["c"]).await;
    assert_eq!(t.one(&jobs).await.body, "c");
}

pub(crate) async fn a_lease_that_runs_out_halts_a_group_too(t: Trial) {
    let (jobs, dead) = t.with_dead(1, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    t.receive(&jobs, 1).await;
    t.pass(LEASE_MS).await;
    t.holds(&dead, 1).await;
    t.none(&jobs).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
}

pub(crate) async fn who_works_ahead_of_a_death_may_finish(t: Trial) {
    let (jobs, _) = t.with_dead(10, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 3).await;
    assert_eq!(t.settle(&jobs, &got[1], reject("bad")).await, Ok(Settled::Dead));
    assert!(t.settle(&jobs, &got[2], Settlement::Ack).await.is_err(), "what was behind it came back");
    assert_eq!(t.settle(&jobs, &got[0], Settlement::Ack).await, Ok(Settled::Acked));
    assert_eq!(seen(&t.browse(&jobs).await), ["c"]);
}

pub(crate) async fn a_rejection_halts_a_group_too(t: Trial) {
    let (jobs, _) = t.with_dead(10, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.settle(&jobs, &got, reject("bad")).await, Ok(Settled::Dead));
    t.none(&jobs).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
}

pub(crate) async fn a_released_group_goes_on_without_its_dead(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    t.store().release_group(&jobs, &group("g")).await.unwrap();
    assert!(halted_groups(&t, &jobs).await.is_empty());
    t.crash().await;
    assert!(halted_groups(&t, &jobs).await.is_empty());
    assert_eq!(one_by_one(&t, &jobs).await, ["b", "c"]);
    assert_eq!(seen(&t.browse(&dead).await), ["a"]);
}

pub(crate) async fn a_dead_letter_that_is_acked_on_receive_is_decided_about(t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let receive = hapax_core::Receive { ack_on_receive: true, ..crate::values::now(10) };
    assert_eq!(t.receive_with(&dead, receive).await.len(), 1);
    assert!(halted_groups(&t, &jobs).await.is_empty());
    assert_eq!(one_by_one(&t, &jobs).await, ["b", "c"]);
}

pub(crate) async fn a_redriven_message_takes_its_old_place_in_a_halted_group(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let task = t.redrive(redrive_from(&dead)).await;
    assert_eq!((task.moved, task.left), (1, 0));
    assert!(halted_groups(&t, &jobs).await.is_empty());
    t.restart().await;
    let views = t.browse(&jobs).await;
    assert_eq!(seen(&views), ["a", "b", "c"], "the sequence tells the order");
    assert_eq!(views[0].attempts, 0);
    assert_eq!(one_by_one(&t, &jobs).await, ["a", "b", "c"]);
}

pub(crate) async fn a_redrive_elsewhere_decides_about_the_message_too(t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let other = t.fifo("other").await;
    t.redrive(hapax_core::RedriveRequest { to: Some(other.clone()), ..redrive_from(&dead) }).await;
    assert_eq!(t.one(&other).await.body, "a");
    assert!(halted_groups(&t, &jobs).await.is_empty());
    assert_eq!(t.receive(&jobs, 1).await[0].body, "b");
}

/// All combinations of how a message leaves the group and how it is decided about, with and without a restart in
/// between.
pub(crate) async fn a_group_is_halted_until_each_of_its_messages_is_decided_about(mut t: Trial) {
    let ends =
        [("reject", true), ("reject", false), ("park", false), ("attempts", true), ("attempts", false)];
    let mut number = 0;
    for (end, letters) in ends {
        for restart in [false, true] {
            for decision in ["decide", "discard", "purge", "release-group"] {
                number += 1;
                let case = format!("{end}, dead letters {letters}, restart {restart}, {decision}");
                let names = (format!("n{number}.fifo"), format!("n{number}-dead.fifo"));
                decided(&mut t, &case, names, (end, letters, restart, decision)).await;
            }
        }
    }
}

async fn decided(
    t: &mut Trial,
    case: &str,
    names: (String, String),
    (end, letters, restart, decision): (&str, bool, bool, &str),
) {
    let own = QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() };
    let dead = t.create(&names.1, fifo_config()).await;
    let limit = u32::from(end == "attempts");
    let config = QueueConfig { retry: own.retry.attempts(limit), ..own };
    let config = if letters { dying(&dead, limit, config) } else { config };
    let jobs = t.create(&names.0, config).await;
    t.send_group(&jobs, "g", &["a", "b", "c", "d"]).await;
    t.send_group(&jobs, "h", &["h1"]).await;

    // Two messages of the group leave it, one after the other: the second while the first is undecided.
    let mut got = t.receive(&jobs, 2).await;
    if limit == 1 {
        assert_eq!(bodies(&got), ["a", "h1"], "{case}: one at a time");
        t.ack(&jobs, &got[1]).await;
        assert_ends(t, &jobs, &got[0], end).await;
    } else {
        got.truncate(2);
        assert_eq!(bodies(&got), ["a", "b"], "{case}");
        // Consumers of messages ahead may finish, and may fail as well.
        assert_ends(t, &jobs, &got[1], end).await;
        assert_ends(t, &jobs, &got[0], end).await;
        let other = t.receive(&jobs, 10).await;
        assert_eq!(bodies(&other), ["h1"], "{case}: other groups continue");
        t.ack(&jobs, &other[0]).await;
    }
    if restart {
        t.crash().await;
    }
    assert_eq!(halted_groups(t, &jobs).await, ["g"], "{case}");
    t.none(&jobs).await;
    let waiting = if limit == 1 { 3 } else { 2 };
    assert_eq!(t.stats(&jobs).await.halted, waiting, "{case}: what waits is counted");

    let place = if letters { &dead } else { &jobs };
    let set_aside: Vec<_> =
        t.browse(place).await.into_iter().filter(|view| letters || view.parked.is_some()).collect();
    let mut left = set_aside.len();
    for view in &set_aside {
        assert_eq!(halted_groups(t, &jobs).await, ["g"], "{case}: {left} undecided");
        left -= 1;
        match decision {
            "decide" if letters => {
                let filter =
                    hapax_core::RedriveFilter { ids: vec![view.id], ..hapax_core::RedriveFilter::default() };
                let task = t.redrive(hapax_core::RedriveRequest { filter, ..redrive_from(&dead) }).await;
                assert_eq!(task.moved, 1, "{case}");
            }
            "decide" => assert_eq!(t.store().release(&jobs, vec![view.id]).await, Ok(1), "{case}"),
            "discard" => {
                let discarded = t.store().discard(place, vec![view.id], "suite").await.unwrap();
                assert_eq!(discarded.count, 1, "{case}");
            }
            "purge" if letters => drop(t.store().purge(&dead).await.unwrap()),
            _ => t.store().release_group(&jobs, &group("g")).await.unwrap(),
        }
        if decision != "decide" && decision != "discard" {
            break;
        }
    }
    if restart {
        t.crash().await;
    }
    assert!(halted_groups(t, &jobs).await.is_empty(), "{case}");
    assert_eq!(t.stats(&jobs).await.halted, 0, "{case}");
    let expected: &[&str] = match (decision, limit) {
        ("decide", _) => &["a", "b", "c", "d"],
        (_, 1) => &["b", "c", "d"],
        _ => &["c", "d"],
    };
    assert_eq!(one_by_one(t, &jobs).await, expected, "{case}: in order");
}

async fn assert_ends(t: &Trial, jobs: &QueueName, delivery: &hapax_core::Delivery, end: &str) {
    let settled = match end {
        "reject" => t.settle(jobs, delivery, reject("bad")).await.unwrap(),
        "park" => t.settle(jobs, delivery, Settlement::Park { reason: "in doubt".into() }).await.unwrap(),
        _ => t.fail(jobs, delivery, "boom").await,
    };
    assert!(matches!(settled, Settled::Dead | Settled::Parked), "{settled:?}");
}

pub(crate) async fn discarding_in_its_source_does_not_reach_a_dead_letter(t: Trial) {
    let (jobs, dead) = halted(&t).await;
    let letter = t.browse(&dead).await.remove(0);
    let discarded = t.store().discard(&jobs, vec![letter.id], "suite").await.unwrap();
    assert_eq!((discarded.count, discarded.in_flight), (0, Vec::new()));
    assert_eq!(seen(&t.browse(&dead).await), ["a"]);
    assert_eq!(halted_groups(&t, &jobs).await, ["g"], "the letter is still undecided");
    t.none(&jobs).await;
}

pub(crate) async fn what_waits_in_a_halted_group_is_not_dropped_by_age(mut t: Trial) {
    let own = QueueConfig { on_dead: OnDead::HaltGroup, retention_ms: 60_000, ..fifo_config() };
    let jobs = t.create("jobs.fifo", own).await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    t.send_group(&jobs, "h", &["h1"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &got, Settlement::Park { reason: "in doubt".into() }).await.unwrap();
    t.advance(61_000).await;
    t.none(&jobs).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["a", "b"], "h1 was too old");
    t.restart().await;
    assert_eq!(t.stats(&jobs).await.halted, 1);
    t.set(&jobs, QueueConfig { retention_ms: 600_000, ..t.config_of(&jobs).await }).await;
    assert_eq!(t.store().release(&jobs, vec![got.id]).await, Ok(1));
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["a", "b"]);
}

/// Every way to decide about a message whose group has waited for longer than the retention: nothing of the group is lost
/// with the decision, although a restart follows at once.
pub(crate) async fn a_group_that_waited_beyond_its_retention_is_delivered_once_decided(mut t: Trial) {
    let parked = ["release", "discard", "release-group"];
    let letters = ["ack", "redrive", "discard", "purge", "delete", "release-group"];
    let all = parked.map(|decision| (false, decision)).into_iter();
    for (letters, decision) in all.chain(letters.map(|decision| (true, decision))) {
        for seen_aged in [true, false] {
            let case = format!("dead letters {letters}, {decision}, seen as too old before: {seen_aged}");
            kept_and_decided(&mut t, &case, letters, decision, seen_aged).await;
        }
    }
}

async fn kept_and_decided(t: &mut Trial, case: &str, letters: bool, decision: &str, seen_aged: bool) {
    let own = QueueConfig { on_dead: OnDead::HaltGroup, retention_ms: 60_000, ..fifo_config() };
    let (jobs, dead) = t.with_dead(3, own.clone()).await;
    if !letters {
        t.set(&jobs, own).await;
    }
    t.send_group(&jobs, "g", &["a", "b", "c"]).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &got, reject("bad")).await.unwrap();
    t.advance(61_000).await;
    if seen_aged {
        t.quiet().await;
        t.none(&jobs).await;
    }
    let place = if letters { &dead } else { &jobs };
    match decision {
        "release" => assert_eq!(t.store().release(&jobs, vec![got.id]).await, Ok(1), "{case}"),
        "discard" => {
            let discarded = t.store().discard(place, vec![got.id], "suite").await.unwrap();
            assert_eq!(discarded.count, 1, "{case}");
        }
        "ack" => {
            let letter = t.one(&dead).await;
            t.ack(&dead, &letter).await;
        }
        "redrive" => assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1, "{case}"),
        "purge" => assert_eq!(t.store().purge(&dead).await, Ok(1), "{case}"),
        "delete" => t.store().delete_queue(&dead).await.unwrap(),
        _ => t.store().release_group(&jobs, &group("g")).await.unwrap(),
    }
    t.crash().await;
    t.quiet().await;
    let all = ["a", "b", "c"];
    let expected = if ["release", "redrive"].contains(&decision) { &all[..] } else { &all[1..] };
    let mut waiting = t.browse(&jobs).await;
    waiting.retain(|view| view.parked.is_none());
    assert_eq!(seen(&waiting), expected, "{case}");
    t.advance(59_000).await;
    t.quiet().await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), expected, "{case}: the retention began again");
    t.advance(2_000 + LEASE_MS).await;
    // A group can be released without its parked message, which then waits on.
    t.holds(&jobs, usize::from(!letters && decision == "release-group")).await;
    t.store().delete_queue(&jobs).await.unwrap();
    if decision != "delete" {
        t.store().delete_queue(&dead).await.unwrap();
    }
}

/// Receives the dead letter `a` and parks it where it is; then an operator lets it go on there.
async fn park_and_release(t: &Trial, dead: &QueueName) {
    let letter = t.one(dead).await;
    let parked = t.settle(dead, &letter, Settlement::Park { reason: "in doubt".into() }).await;
    assert_eq!(parked, Ok(Settled::Parked));
    assert_eq!(t.store().release(dead, vec![letter.id]).await, Ok(1));
}

pub(crate) async fn a_dead_letter_that_is_released_among_the_dead_is_not_decided_about(t: Trial) {
    let (jobs, dead) = halted(&t).await;
    park_and_release(&t, &dead).await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.none(&jobs).await;
    let letter = t.one(&dead).await;
    t.ack(&dead, &letter).await;
    assert_eq!(one_by_one(&t, &jobs).await, ["b", "c"]);
}

pub(crate) async fn a_dead_letter_that_halts_two_groups_is_decided_about_once(mut t: Trial) {
    let (jobs, dead) = halted(&t).await;
    t.set(&dead, QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    park_and_release(&t, &dead).await;
    assert!(halted_groups(&t, &dead).await.is_empty());
    t.crash().await;
    assert_eq!(halted_groups(&t, &jobs).await, ["g"]);
    t.redrive(redrive_from(&dead)).await;
    assert!(halted_groups(&t, &jobs).await.is_empty());
    assert_eq!(one_by_one(&t, &jobs).await, ["a", "b", "c"], "it takes its old place");
}

/// A dead letter that dies among the dead as well: both groups that it left wait for one and the same decision.
pub(crate) async fn a_message_that_died_twice_halts_both_groups_until_one_decision(mut t: Trial) {
    for (number, decision) in ["ack", "discard", "purge", "redrive", "delete"].into_iter().enumerate() {
        for crash in [false, true] {
            let case = format!("{decision}, crash {crash}");
            let create =
                async |name: &str, config| t.create(&format!("{name}{number}{crash}.fifo"), config).await;
            let own = QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() };
            let last = create("last", fifo_config()).await;
            let dead = create("dead", dying(&last, 1, own.clone())).await;
            let jobs = create("jobs", dying(&dead, 1, own)).await;
            t.send_group(&jobs, "g", &["a", "b"]).await;
            let got = t.receive(&jobs, 1).await.remove(0);
            assert_eq!(t.fail(&jobs, &got, "boom").await, Settled::Dead, "{case}");
            t.send_group(&dead, "g", &["behind"]).await;
            let letter = t.receive(&dead, 1).await.remove(0);
            assert_eq!(letter.body, "a", "{case}");
            assert_eq!(t.fail(&dead, &letter, "again").await, Settled::Dead, "{case}");
            if crash {
                t.crash().await;
            }
            for halted in [&jobs, &dead] {
                assert_eq!(halted_groups(&t, halted).await, ["g"], "{case}: {halted}");
                t.none(halted).await;
            }
            match decision {
                "ack" => {
                    let letter = t.one(&last).await;
                    t.ack(&last, &letter).await;
                }
                "discard" => {
                    let letter = t.browse(&last).await.remove(0);
                    assert_eq!(t.store().discard(&last, vec![letter.id], "suite").await.unwrap().count, 1);
                }
                "purge" => drop(t.store().purge(&last).await.unwrap()),
                "redrive" => assert_eq!(t.redrive(redrive_from(&last)).await.moved, 1, "{case}"),
                _ => t.store().delete_queue(&last).await.unwrap(),
            }
            t.quiet().await;
            if crash {
                t.crash().await;
            }
            for halted in [&jobs, &dead] {
                assert!(halted_groups(&t, halted).await.is_empty(), "{case}: {halted}");
            }
            assert_eq!(one_by_one(&t, &jobs).await, ["b"], "{case}");
            let back: &[&str] = if decision == "redrive" { &["a", "behind"] } else { &["behind"] };
            assert_eq!(one_by_one(&t, &dead).await, back, "{case}");
        }
    }
}

pub(crate) async fn what_is_in_flight_is_not_counted_as_halted(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { on_dead: OnDead::HaltGroup, ..fifo_config() }).await;
    t.send_group(&jobs, "g", &["m0", "m1", "m2", "m3"]).await;
    let got = t.receive(&jobs, 3).await;
    assert_eq!(bodies(&got), ["m0", "m1", "m2"]);
    assert_eq!(t.settle(&jobs, &got[1], reject("never")).await, Ok(Settled::Parked));
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.in_flight, stats.parked, stats.ready), (1, 1, 2), "{stats:?}");
    assert_eq!(stats.halted, 2, "m2 and m3 wait, m0 is at work: {stats:?}");
}
