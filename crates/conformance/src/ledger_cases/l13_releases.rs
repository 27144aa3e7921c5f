//! Point 13: what the release of a parked message does to the entry of its key. A recorded failure is cleared, as by a
//! redrive, or the message would be rejected again unrun; every other state stays.

use hapax_core::ledger::TTL_MS_MIN;
use hapax_core::{
    ClaimEnding, Delivery, EntryId, EntryState, MessageId, NewMessage, OnDead, QueueConfig, QueueName,
    Settled, Settlement, Tier,
};

use super::l06_settle::{ask_for, entry_of, keyed, settle_with};
use crate::ledger_trial::{LONG_LEASE_MS, ask, complete, done, failed, replayed};
use crate::trial::Trial;
use crate::values::{bodies, config, dedup, fifo_config, group, in_group, reject, text};

/// A queue of this tier whose deliveries do not expire while a case runs.
fn of_tier(tier: Tier, config: QueueConfig) -> QueueConfig {
    QueueConfig { tier, lease_ms: LONG_LEASE_MS, ..config }
}

fn once() -> QueueConfig {
    of_tier(Tier::EffectivelyOnce, config())
}

/// Parks a delivery whose handler rejects it; returns the entry with the recorded failure.
async fn rejected(t: &Trial, jobs: &QueueName, got: &Delivery) -> EntryId {
    let (id, grant) = (entry_of(jobs, got), t.grant(ask_for(jobs, got, "worker")).await);
    let ended = settle_with(t, jobs, got, reject("bad"), (&id, &grant, complete(&failed("bad")))).await;
    assert_eq!(ended, Ok(Settled::Parked));
    assert_eq!(t.state(&id).await, Some(EntryState::Failed));
    id
}

async fn released(t: &Trial, jobs: &QueueName, ids: &[MessageId]) -> u64 {
    t.within("release", t.store().release(jobs, ids.to_vec())).await.expect("release")
}

/// Checks that the message runs as if it had never run before, and completes it.
async fn runs(t: &Trial, jobs: &QueueName, got: &Delivery) {
    let (id, grant) = (entry_of(jobs, got), t.grant(ask_for(jobs, got, "again")).await);
    assert!(!grant.takeover, "{id}: nothing happened before");
    let paid = complete(&done("paid"));
    assert_eq!(settle_with(t, jobs, got, Settlement::Ack, (&id, &grant, paid)).await, Ok(Settled::Acked));
    assert_eq!(t.state(&id).await, Some(EntryState::Completed));
}

/// Every source of the key, on a queue that links messages to their entries when they are sent and on one that does not,
/// with and without a crash before and after the release.
pub(crate) async fn a_release_clears_a_final_failure(mut t: Trial) {
    let own_id = text(r#"{"order": "order-7"}"#);
    let messages: [(&str, NewMessage); 4] = [
        ("attribute", keyed("order-7")),
        ("pointer", own_id.clone()),
        ("dedup", text("x").dedup(dedup("order-7"))),
        ("id", own_id),
    ];
    for (source, message) in messages {
        for (tier, crash) in [(Tier::EffectivelyOnce, true), (Tier::AtLeastOnce, false)] {
            let pointer = (source == "pointer").then(|| "/order".to_owned());
            let own = QueueConfig { key_pointer: pointer, ..of_tier(tier, config()) };
            let jobs = t.create(&format!("by-{source}-{crash}"), own).await;
            t.send(&jobs, message.clone()).await;
            let got = t.one(&jobs).await;
            let id = rejected(&t, &jobs, &got).await;
            if crash {
                t.crash().await;
            }
            assert_eq!(released(&t, &jobs, &[got.id]).await, 1, "{source}");
            if crash {
                t.crash().await;
            }
            assert_eq!(t.entry(&id).await, None, "{source}: else it would replay its failure unrun");
            runs(&t, &jobs, &t.one(&jobs).await).await;
            t.none(&jobs).await;
        }
    }
}

/// Also beyond the failure's time to live, which the parked message outlasts.
pub(crate) async fn a_release_keeps_what_was_completed(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let (id, grant) = (entry_of(&jobs, &got), t.grant(ask_for(&jobs, &got, "worker")).await);
    let ending = ClaimEnding::Complete { outcome: done("paid"), ttl_ms: TTL_MS_MIN };
    let park = Settlement::Park { reason: "look at it".into() };
    assert_eq!(settle_with(&t, &jobs, &got, park, (&id, &grant, ending)).await, Ok(Settled::Parked));
    t.pass(2 * TTL_MS_MIN).await;
    assert_eq!(released(&t, &jobs, &[got.id]).await, 1);
    let again = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &again, "again")).await), Some(&done("paid")));
}

pub(crate) async fn a_release_leaves_a_doubt_to_be_resolved(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let (id, grant) = (entry_of(&jobs, &got), t.grant(ask_for(&jobs, &got, "worker")).await);
    let park = Settlement::Park { reason: "in doubt".into() };
    let ended = settle_with(&t, &jobs, &got, park, (&id, &grant, ClaimEnding::Doubt)).await;
    assert_eq!(ended, Ok(Settled::Parked));
    assert_eq!(released(&t, &jobs, &[got.id]).await, 1);
    assert_eq!(t.state(&id).await, Some(EntryState::InDoubt));
    let again = t.one(&jobs).await;
    assert!(t.grant(ask_for(&jobs, &again, "again")).await.takeover, "it is told that it may have happened");
}

/// A duplicate that runs after the failure was forgotten keeps its claim.
pub(crate) async fn a_release_leaves_a_running_duplicate_alone(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let first = t.one(&jobs).await;
    let id = rejected(&t, &jobs, &first).await;
    t.forget(&id).await.unwrap();
    t.send(&jobs, keyed("order-7")).await;
    let second = t.one(&jobs).await;
    let running = t.grant(ask_for(&jobs, &second, "running")).await;
    assert_eq!(released(&t, &jobs, &[first.id]).await, 1);
    assert_eq!(t.state(&id).await, Some(EntryState::Processing));
    let paid = (&id, &running, complete(&done("paid")));
    assert_eq!(settle_with(&t, &jobs, &second, Settlement::Ack, paid).await, Ok(Settled::Acked));
    let again = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &again, "again")).await), Some(&done("paid")));
}

/// Of two parked messages with one key, the first that is released runs; the other one gets its outcome.
pub(crate) async fn of_released_duplicates_one_runs(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let first = t.one(&jobs).await;
    rejected(&t, &jobs, &first).await;
    t.send(&jobs, keyed("order-7")).await;
    let second = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &second, "next")).await), Some(&failed("bad")));
    assert_eq!(t.settle(&jobs, &second, reject("bad")).await, Ok(Settled::Parked));
    assert_eq!(released(&t, &jobs, &[second.id, first.id]).await, 2);
    let got = t.receive(&jobs, 2).await;
    assert_eq!(got.len(), 2);
    runs(&t, &jobs, &got[0]).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &got[1], "again")).await), Some(&done("paid")));
}

/// Only what was parked, and only in its own queue.
pub(crate) async fn a_release_reaches_no_other_entry(t: Trial) {
    let (jobs, other) = (t.create("jobs", once()).await, t.create("other", once()).await);
    let mut parked = Vec::new();
    for queue in [&jobs, &other] {
        for key in ["order-7", "order-8"] {
            t.send(queue, keyed(key)).await;
            let got = t.one(queue).await;
            parked.push((got.id, rejected(&t, queue, &got).await));
        }
    }
    // A message of the same key that waits is not parked.
    t.send(&jobs, keyed("order-8")).await;
    let waiting = t.browse(&jobs).await.into_iter().find(|view| view.parked.is_none()).expect("it waits");
    assert_eq!(released(&t, &jobs, &[waiting.id, parked[2].0, MessageId(7)]).await, 0);
    assert_eq!(released(&t, &jobs, &[parked[0].0]).await, 1);
    for (at, (_, id)) in parked.iter().enumerate() {
        let expected = (at > 0).then_some(EntryState::Failed);
        assert_eq!(t.state(id).await, expected, "{id}");
    }
}

/// A dead letter that was parked among the dead and released stays there: the failure in its source is not forgotten.
pub(crate) async fn a_release_among_the_dead_keeps_the_failure_of_the_source(t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let (id, grant) = (entry_of(&jobs, &got), t.grant(ask_for(&jobs, &got, "worker")).await);
    let ended = settle_with(&t, &jobs, &got, reject("bad"), (&id, &grant, complete(&failed("bad")))).await;
    assert_eq!(ended, Ok(Settled::Dead));
    let letter = t.one(&dead).await;
    let own = rejected(&t, &dead, &letter).await;
    assert_eq!(released(&t, &dead, &[letter.id]).await, 1);
    assert_eq!(t.entry(&own).await, None);
    assert_eq!(t.state(&id).await, Some(EntryState::Failed));
}

/// Messages of a FIFO group that is halted, by every order of decisions: released alone, after the group was released, and
/// together.
pub(crate) async fn a_released_message_of_a_halted_group_runs(mut t: Trial) {
    let own = of_tier(Tier::EffectivelyOnce, fifo_config());
    let own = QueueConfig { on_dead: OnDead::HaltGroup, ..own };
    for (number, decision) in ["release", "release-group", "both"].into_iter().enumerate() {
        let jobs = t.create(&format!("jobs{number}.fifo"), own.clone()).await;
        for body in ["a", "b", "c"] {
            t.send(&jobs, in_group("g", body)).await;
        }
        let got = t.receive(&jobs, 2).await;
        assert_eq!(bodies(&got), ["a", "b"]);
        // The later one first: what is behind a parked message is taken back.
        let second = rejected(&t, &jobs, &got[1]).await;
        let first = rejected(&t, &jobs, &got[0]).await;
        t.crash().await;
        t.none(&jobs).await;
        match decision {
            "release" => {
                assert_eq!(released(&t, &jobs, &[got[0].id]).await, 1);
                assert_eq!(t.state(&first).await, None);
                assert_eq!(t.state(&second).await, Some(EntryState::Failed), "it is not released yet");
                t.none(&jobs).await;
                assert_eq!(released(&t, &jobs, &[got[1].id]).await, 1);
            }
            "release-group" => {
                t.store().release_group(&jobs, &group("g")).await.unwrap();
                // The group continues without its parked messages, whose failures stand.
                assert_eq!(t.state(&first).await, Some(EntryState::Failed));
                assert_eq!(released(&t, &jobs, &[got[0].id, got[1].id]).await, 2);
            }
            _ => assert_eq!(released(&t, &jobs, &[got[1].id, got[0].id]).await, 2),
        }
        t.crash().await;
        for id in [&first, &second] {
            assert_eq!(t.entry(id).await, None, "{decision}");
        }
        for body in ["a", "b", "c"] {
            let got = t.receive(&jobs, 1).await.remove(0);
            assert_eq!(got.body, body, "{decision}: in order");
            runs(&t, &jobs, &got).await;
        }
    }
}

/// The release through one process clears what the ledger of another one answers with.
pub(crate) async fn a_release_on_one_handle_clears_for_the_other(t: Trial) {
    let other = t.other_handle();
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let id = rejected(&t, &jobs, &got).await;
    assert_eq!(replayed(&other.claim(ask(&id, "duplicate")).await), Some(&failed("bad")));
    assert_eq!(released(&t, &jobs, &[got.id]).await, 1);
    let again = other.one(&jobs).await;
    runs(&other, &jobs, &again).await;
}
