//! Point 13: an outcome is stored for its time to live, and as long as a message exists that may need it.

use hapax_core::ledger::TTL_MS_MIN;
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, Delivery, EntryId, EntryState, Grant, OnDoubt, QueueName,
    RedriveFilter, RedriveRequest, Resolution, Settle, Settled, Settlement,
};

use super::l06_settle::{ask_for, entry_of, keyed, once, settle_with};
use crate::ledger_trial::{ask, complete, done, failed, happened, id, replayed};
use crate::trial::Trial;
use crate::values::{config, redrive_from, reject, retry};

/// Completes with the shortest time to live.
fn briefly(outcome: &hapax_core::RecordedOutcome) -> ClaimEnding {
    ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: TTL_MS_MIN }
}

pub(crate) async fn an_outcome_is_kept_for_its_time_and_no_longer(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.end(&order, &grant.token, briefly(&done("paid"))).await.unwrap();
    if t.exact() {
        t.advance(TTL_MS_MIN - 1).await;
        assert_eq!(replayed(&t.claim(ask(&order, "bob")).await), Some(&done("paid")), "to the end");
        t.advance(1).await;
    } else {
        t.pass(TTL_MS_MIN).await;
    }
    t.vanishes(&order).await;
    let again = t.grant(ask(&order, "bob")).await;
    assert!(!again.takeover && again.fence > grant.fence, "{again:?}: it starts from the beginning");
    assert!(t.end(&order, &grant.token, briefly(&done("paid"))).await.is_err(), "the old token is stale");
}

pub(crate) async fn replaying_does_not_lengthen_the_time(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.end(&order, &grant.token, briefly(&done("paid"))).await.unwrap();
    let prune_ms = t.entry(&order).await.expect("an entry").prune_ms;
    t.advance(TTL_MS_MIN / 2).await;
    t.claim(ask(&order, "bob")).await;
    t.end(&order, &grant.token, briefly(&done("paid"))).await.unwrap();
    assert_eq!(t.entry(&order).await.expect("an entry").prune_ms, prune_ms);
    t.pass(TTL_MS_MIN / 2).await;
    t.vanishes(&order).await;
}

pub(crate) async fn what_is_pruned_is_counted_and_the_rest_stays(t: Trial) {
    for n in 0..30 {
        let order = id(&n.to_string());
        let grant = t.grant(ask(&order, "ann")).await;
        let ending = if n % 3 == 0 { complete(&done("long")) } else { briefly(&failed("short")) };
        t.end(&order, &grant.token, ending).await.unwrap();
    }
    t.grant(ask(&id("held"), "ann")).await;
    t.pass(TTL_MS_MIN).await;
    for n in 0..30 {
        if n % 3 != 0 {
            t.vanishes(&id(&n.to_string())).await;
        }
    }
    for n in (0..30).step_by(3) {
        assert_eq!(t.state(&id(&n.to_string())).await, Some(EntryState::Completed), "{n}");
    }
    let stats = t.ledger_stats().await;
    assert_eq!((stats.entries, stats.open, stats.pruned), (11, 1, 20), "{stats:?}");
}

pub(crate) async fn what_nobody_asks_for_is_pruned_too(t: Trial) {
    for n in 0..5 {
        let order = id(&n.to_string());
        let grant = t.grant(ask(&order, "ann")).await;
        t.end(&order, &grant.token, briefly(&done("paid"))).await.unwrap();
    }
    t.pass(TTL_MS_MIN).await;
    let start = std::time::Instant::now();
    while t.ledger_stats().await.entries > 0 {
        assert!(start.elapsed() < t.timeout(), "{}: {:?}", t.case, t.ledger_stats().await);
        t.advance(50).await;
    }
}

pub(crate) async fn a_time_that_was_over_while_the_store_was_down_is_over(mut t: Trial) {
    let (short, long) = (id("short"), id("long"));
    let grant = t.grant(ask(&short, "ann")).await;
    t.end(&short, &grant.token, briefly(&done("paid"))).await.unwrap();
    t.completed(&long, &done("paid")).await;
    t.crash().await;
    assert_eq!(t.state(&short).await, Some(EntryState::Completed), "no time has passed");
    t.pass(TTL_MS_MIN).await;
    t.crash().await;
    t.vanishes(&short).await;
    assert_eq!(t.state(&long).await, Some(EntryState::Completed));
    assert!(t.grant(ask(&short, "bob")).await.fence > grant.fence);
}

/// A message in flight, and its claim.
async fn at_work(t: &Trial, jobs: &QueueName) -> (Delivery, EntryId, Grant) {
    t.send(jobs, keyed("order-7")).await;
    let got = t.one(jobs).await;
    let grant = t.grant(ask_for(jobs, &got, "worker")).await;
    let id = entry_of(jobs, &got);
    (got, id, grant)
}

/// Checks that the entry still exists long after its time to live.
async fn kept(t: &Trial, id: &EntryId, outcome: &hapax_core::RecordedOutcome) {
    t.pass(3 * TTL_MS_MIN).await;
    // By now pruning has had a chance to run.
    t.completed(&self::id(&format!("bystander-{}", t.ledger_stats().await.granted)), &done("x")).await;
    assert_eq!(replayed(&t.claim(ask(id, "duplicate")).await), Some(outcome), "its message lives");
}

pub(crate) async fn the_entry_of_a_live_message_is_kept(mut t: Trial) {
    let jobs = t.create("jobs", once()).await;
    let (_, id, grant) = at_work(&t, &jobs).await;
    // A worker that dies between completion and ack.
    t.end(&id, &grant.token, briefly(&done("paid"))).await.unwrap();
    kept(&t, &id, &done("paid")).await;
    t.crash().await;
    kept(&t, &id, &done("paid")).await;
    let again = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &again, "next")).await), Some(&done("paid")));
    t.ack(&jobs, &again).await;
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
}

/// It was sent while the outcome was known, and has not been delivered yet.
pub(crate) async fn the_outcome_of_a_duplicate_that_waits_is_kept(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    let (got, id, grant) = at_work(&t, &jobs).await;
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, briefly(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked));
    t.send(&jobs, keyed("order-7")).await;
    kept(&t, &id, &done("paid")).await;
    let again = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &again, "next")).await), Some(&done("paid")));
    t.ack(&jobs, &again).await;
    t.vanishes(&id).await;
}

pub(crate) async fn a_new_message_does_not_bring_back_what_was_over(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    let (_, id, grant) = at_work(&t, &jobs).await;
    t.end(&id, &grant.token, briefly(&done("paid"))).await.unwrap();
    t.pass(3 * TTL_MS_MIN).await;
    // Its message kept it; when that goes, it is over at once.
    let again = t.one(&jobs).await;
    t.ack(&jobs, &again).await;
    t.send(&jobs, keyed("order-7")).await;
    let next = t.one(&jobs).await;
    assert!(!t.grant(ask_for(&jobs, &next, "next")).await.takeover);
}

/// Also on a queue whose messages are not linked to their keys when they are sent.
pub(crate) async fn the_entry_of_a_claim_that_names_a_delivery_is_kept(mut t: Trial) {
    let jobs = t.create("jobs", config()).await;
    let (got, id, grant) = at_work(&t, &jobs).await;
    t.end(&id, &grant.token, briefly(&done("paid"))).await.unwrap();
    kept(&t, &id, &done("paid")).await;
    t.crash().await;
    kept(&t, &id, &done("paid")).await;
    t.ack(&jobs, &got).await;
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
}

pub(crate) async fn the_entry_of_a_message_that_was_dropped_is_over(t: Trial) {
    let jobs = t.create("jobs", hapax_core::QueueConfig { retention_ms: 60_000, ..once() }).await;
    let (_, id, grant) = at_work(&t, &jobs).await;
    t.end(&id, &grant.token, briefly(&done("paid"))).await.unwrap();
    kept(&t, &id, &done("paid")).await;
    t.pass(70_000).await;
    t.holds(&jobs, 0).await;
    t.vanishes(&id).await;
}

/// Both where messages are linked to their keys when they are sent, and where a claim has named its delivery.
pub(crate) async fn the_entry_of_a_message_that_was_purged_or_deleted_is_over(t: Trial) {
    for (name, config) in [("linked", once()), ("named", config())] {
        for how in ["purge", "delete"] {
            let jobs = t.create(&format!("{name}-{how}"), config.clone()).await;
            let (_, id, grant) = at_work(&t, &jobs).await;
            t.end(&id, &grant.token, briefly(&done("paid"))).await.unwrap();
            kept(&t, &id, &done("paid")).await;
            if how == "purge" {
                assert_eq!(t.store().purge(&jobs).await, Ok(1));
            } else {
                t.store().delete_queue(&jobs).await.unwrap();
            }
            t.pass(TTL_MS_MIN).await;
            t.vanishes(&id).await;
        }
    }
}

pub(crate) async fn the_entry_of_an_acked_message_is_kept_for_its_time(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    let (got, id, grant) = at_work(&t, &jobs).await;
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, briefly(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked));
    assert_eq!(replayed(&t.claim(ask(&id, "duplicate")).await), Some(&done("paid")));
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
}

pub(crate) async fn the_entry_of_a_dead_letter_is_kept(mut t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    let (got, id, grant) = at_work(&t, &jobs).await;
    let ending = briefly(&failed("bad"));
    assert_eq!(settle_with(&t, &jobs, &got, reject("bad"), (&id, &grant, ending)).await, Ok(Settled::Dead));
    kept(&t, &id, &failed("bad")).await;
    t.crash().await;
    kept(&t, &id, &failed("bad")).await;
    let letter = t.browse(&dead).await.remove(0);
    assert_eq!(t.store().discard(&dead, vec![letter.id], "suite").await.unwrap().count, 1);
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
}

/// Makes a message a dead letter with this ending of its claim; returns its entry.
async fn dead_with(t: &Trial, jobs: &QueueName, ending: ClaimEnding, settlement: Settlement) -> EntryId {
    let (got, id, grant) = at_work(t, jobs).await;
    assert_eq!(settle_with(t, jobs, &got, settlement, (&id, &grant, ending)).await, Ok(Settled::Dead));
    id
}

pub(crate) async fn a_redrive_clears_a_final_failure(mut t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    let id = dead_with(&t, &jobs, complete(&failed("bad")), reject("bad")).await;
    assert_eq!(t.state(&id).await, Some(EntryState::Failed));
    assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1);
    t.crash().await;
    assert_eq!(t.entry(&id).await, None, "else it would replay its failure unrun");
    let back = t.one(&jobs).await;
    let grant = t.grant(ask_for(&jobs, &back, "again")).await;
    assert!(!grant.takeover);
    let ended = settle_with(&t, &jobs, &back, Settlement::Ack, (&id, &grant, complete(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked));
}

pub(crate) async fn the_entry_of_a_letter_that_went_elsewhere_is_kept_for_its_time(t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    let other = t.standard("other").await;
    let id = dead_with(&t, &jobs, briefly(&done("paid")), reject("bad")).await;
    let request = RedriveRequest { to: Some(other.clone()), ..redrive_from(&dead) };
    assert_eq!(t.redrive(request).await.moved, 1);
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
    assert_eq!(t.browse(&other).await.len(), 1, "it does not need the entry of another queue");
}

pub(crate) async fn a_redrive_keeps_what_was_completed(t: Trial) {
    let (jobs, dead) = t.with_dead(1, once()).await;
    let id = dead_with(&t, &jobs, briefly(&done("paid")), retry("crashed after the effect")).await;
    assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1);
    kept(&t, &id, &done("paid")).await;
    let back = t.one(&jobs).await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &back, "again")).await), Some(&done("paid")));
    t.ack(&jobs, &back).await;
    t.pass(TTL_MS_MIN).await;
    t.vanishes(&id).await;
}

pub(crate) async fn a_redrive_leaves_a_doubt_to_be_resolved(t: Trial) {
    let (jobs, dead) = t.with_dead(1, once()).await;
    let id = dead_with(&t, &jobs, ClaimEnding::Doubt, retry("panicked")).await;
    assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1);
    assert_eq!(t.state(&id).await, Some(EntryState::InDoubt));
    let back = t.one(&jobs).await;
    let claim = t.claim(ask_for(&jobs, &back, "again")).await;
    assert!(matches!(&claim, Claim::Granted(grant) if grant.takeover), "{claim:?}");
}

/// With `park`, the redriven message runs nothing: it is set aside again, and continues when someone decides.
pub(crate) async fn a_redriven_message_in_doubt_stays_parked_until_it_is_resolved(mut t: Trial) {
    let (jobs, dead) = t.with_dead(1, once()).await;
    for has_happened in [true, false] {
        let id = dead_with(&t, &jobs, ClaimEnding::Doubt, retry("panicked")).await;
        assert_eq!(t.redrive(redrive_from(&dead)).await.moved, 1);
        let back = t.one(&jobs).await;
        let parks = ClaimRequest { on_doubt: OnDoubt::Park, ..ask_for(&jobs, &back, "again") };
        let claim = t.claim(parks).await;
        assert!(matches!(claim, Claim::InDoubt { .. }), "{claim:?}");
        let settlement = Settlement::Park { reason: "in doubt".into() };
        let settle = Settle { parked_for: Some(id.clone()), ..Settle::new(back.receipt.clone(), settlement) };
        assert_eq!(t.store().settle(&jobs, vec![settle]).await.unwrap(), [Ok(Settled::Parked)]);
        t.crash().await;
        t.none(&jobs).await;
        assert_eq!(t.state(&id).await, Some(EntryState::InDoubt));
        let resolution = if has_happened { happened(&done("paid")) } else { Resolution::Absent };
        t.resolve(&id, resolution).await.unwrap();
        let again = t.one(&jobs).await;
        let claim = t.claim(ask_for(&jobs, &again, "after")).await;
        if has_happened {
            assert_eq!(replayed(&claim), Some(&done("paid")), "it does not run again");
            t.ack(&jobs, &again).await;
            t.forget(&id).await.unwrap();
        } else {
            assert!(matches!(&claim, Claim::Granted(grant) if !grant.takeover), "{claim:?}");
        }
    }
}

pub(crate) async fn a_redrive_that_leaves_a_letter_leaves_its_entry(t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    let id = dead_with(&t, &jobs, complete(&failed("bad")), reject("bad")).await;
    let filter = RedriveFilter { error_contains: Some("something else".into()), ..RedriveFilter::default() };
    assert_eq!(t.redrive(RedriveRequest { filter, ..redrive_from(&dead) }).await.moved, 0);
    assert_eq!(t.state(&id).await, Some(EntryState::Failed), "its letter was left");
}
