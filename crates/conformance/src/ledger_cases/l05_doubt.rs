//! Point 5: claims whose holder may have acted.

use hapax_core::{Claim, ClaimEnding, EntryState, Resolution, TokenError};

use crate::ledger_trial::{
    LONG_LEASE_MS, ask, brief, complete, done, failed, happened, id, parking, replayed,
};
use crate::trial::{LEASE_MS, Trial};

pub(crate) async fn who_takes_over_is_told_so(t: Trial) {
    let order = id("order-7");
    let mut last = t.lapsed(&order, "worker-0").await;
    for n in 1..4 {
        let by = format!("worker-{n}");
        let grant = t.grant(brief(&order, &by)).await;
        assert!(grant.takeover && grant.fence > last.fence, "{grant:?}");
        let again = t.grant(brief(&order, &by)).await;
        assert_eq!((&again.token, again.takeover), (&grant.token, true), "told so again");
        assert_eq!(t.entry(&order).await.expect("an entry").takeovers, n);
        assert_eq!(t.renew(&order, &last.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
        last = grant;
        t.pass(LEASE_MS).await;
    }
}

pub(crate) async fn a_release_after_a_takeover_leaves_the_older_doubt(t: Trial) {
    let order = id("order-7");
    t.lapsed(&order, "ann").await;
    let bob = t.grant(ask(&order, "bob")).await;
    t.end(&order, &bob.token, ClaimEnding::Release).await.unwrap();
    assert_eq!(t.state(&order).await, Some(EntryState::InDoubt), "bob did nothing; ann may have");
    let claim = t.claim(parking(&order, "eve")).await;
    assert!(matches!(claim, Claim::InDoubt { .. }), "{claim:?}");
    let eve = t.grant(ask(&order, "eve")).await;
    assert!(eve.takeover && eve.fence > bob.fence, "{eve:?}: told so");
    assert_eq!(t.end(&order, &bob.token, complete(&done("late"))).await, Err(TokenError::Stale));
}

pub(crate) async fn a_parked_doubt_is_granted_to_nobody(t: Trial) {
    let order = id("order-7");
    t.lapsed(&order, "ann").await;
    for _ in 0..3 {
        assert!(matches!(t.claim(parking(&order, "bob")).await, Claim::InDoubt { .. }));
        t.pass(LEASE_MS).await;
    }
    assert_eq!(t.entry(&order).await.expect("an entry").takeovers, 0);
}

pub(crate) async fn a_holder_can_doubt_at_once(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.pass(1_000).await;
    t.end(&order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    t.end(&order, &grant.token, ClaimEnding::Doubt).await.expect("the same again");
    let view = t.entry(&order).await.expect("an entry");
    let since = view.ended_ms.expect("in doubt since");
    assert!(
        since >= view.claimed_ms + 1_000 && since < view.claimed_ms + LONG_LEASE_MS,
        "not when its lease ends"
    );
    match t.claim(parking(&order, "bob")).await {
        Claim::InDoubt { since_ms } => assert_eq!(since_ms, since),
        other => panic!("in doubt, got {other:?}"),
    }
    // It gave up the claim: it is now treated like any other owner.
    assert!(matches!(t.claim(parking(&order, "ann")).await, Claim::InDoubt { .. }));
    assert!(t.grant(ask(&order, "bob")).await.takeover);
}

pub(crate) async fn a_doubt_that_is_declared_late_began_when_the_lease_ended(t: Trial) {
    let order = id("order-7");
    let late = t.lapsed(&order, "ann").await;
    let lapsed = t.entry(&order).await.expect("an entry").ended_ms.expect("in doubt since");
    t.pass(1_000).await;
    t.end(&order, &late.token, ClaimEnding::Doubt).await.expect("nobody took over");
    assert_eq!(t.entry(&order).await.expect("an entry").ended_ms, Some(lapsed));
    let claim = t.claim(parking(&order, "bob")).await;
    assert!(matches!(claim, Claim::InDoubt { since_ms } if since_ms == lapsed), "{claim:?}");
}

pub(crate) async fn who_doubted_may_still_learn_that_it_happened(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.end(&order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    t.end(&order, &grant.token, complete(&done("paid after all"))).await.expect("nobody took over");
    assert_eq!(replayed(&t.claim(parking(&order, "bob")).await), Some(&done("paid after all")));
}

pub(crate) async fn a_doubt_resolved_as_completed_is_replayed(t: Trial) {
    for (key, outcome) in [("paid", done("paid")), ("refused", failed("refused"))] {
        let order = id(key);
        let late = t.lapsed(&order, "late").await;
        t.resolve(&order, happened(&outcome)).await.unwrap();
        let view = t.entry(&order).await.expect("an entry");
        assert_eq!(view.outcome, Some(outcome.clone()));
        assert_eq!(view.state, if outcome.failed { EntryState::Failed } else { EntryState::Completed });
        for claim in [t.claim(ask(&order, "bob")).await, t.claim(parking(&order, "late")).await] {
            assert_eq!(replayed(&claim), Some(&outcome));
        }
        for ending in [complete(&done("late")), complete(&outcome), ClaimEnding::Release, ClaimEnding::Doubt]
        {
            assert_eq!(t.end(&order, &late.token, ending).await, Err(TokenError::Stale), "shut out");
        }
        assert_eq!(t.renew(&order, &late.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
        assert_eq!(t.entry(&order).await, Some(view));
    }
}

pub(crate) async fn a_doubt_resolved_as_absent_frees_the_key(t: Trial) {
    let order = id("order-7");
    let late = t.lapsed(&order, "late").await;
    t.resolve(&order, Resolution::Absent).await.unwrap();
    assert_eq!(t.entry(&order).await, None);
    assert_eq!(t.end(&order, &late.token, complete(&done("late"))).await, Err(TokenError::Gone), "shut out");
    let grant = t.grant(parking(&order, "bob")).await;
    assert!(!grant.takeover && grant.fence > late.fence, "{grant:?}: there is no doubt any more");
    assert_eq!(t.end(&order, &late.token, complete(&done("late"))).await, Err(TokenError::Stale));
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
}

pub(crate) async fn a_resolution_survives_a_crash(mut t: Trial) {
    let (paid, gone) = (id("paid"), id("gone"));
    let (late, lost) = (t.grant(parking(&paid, "late")).await, t.grant(parking(&gone, "late")).await);
    for (order, grant) in [(&paid, &late), (&gone, &lost)] {
        t.end(order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    }
    t.resolve(&paid, happened(&done("seen"))).await.unwrap();
    t.resolve(&gone, Resolution::Absent).await.unwrap();
    t.crash().await;
    assert_eq!(replayed(&t.claim(ask(&paid, "bob")).await), Some(&done("seen")));
    assert_eq!(t.end(&paid, &late.token, complete(&done("late"))).await, Err(TokenError::Stale));
    assert_eq!(t.end(&gone, &lost.token, complete(&done("late"))).await, Err(TokenError::Gone));
    assert!(t.grant(parking(&gone, "bob")).await.fence > lost.fence);
}

pub(crate) async fn a_takeover_survives_a_crash(mut t: Trial) {
    let order = id("order-7");
    let zombie = t.lapsed(&order, "zombie").await;
    let holder = t.grant(ask(&order, "holder")).await;
    t.crash().await;
    let view = t.entry(&order).await.expect("an entry");
    assert_eq!((view.fence, view.takeovers, view.owner.as_str()), (holder.fence, 1, "holder"));
    let again = t.grant(ask(&order, "holder")).await;
    assert_eq!((&again.token, again.takeover), (&holder.token, true));
    assert_eq!(t.end(&order, &zombie.token, ClaimEnding::Release).await, Err(TokenError::Stale));
}
