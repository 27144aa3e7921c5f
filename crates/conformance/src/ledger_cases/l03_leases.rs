//! Point 3: a lease is short and renewed; it does not determine how long an outcome is stored.

use hapax_core::ledger::DOUBT_RETENTION_MS;
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EntryFilter, EntryState, OnDoubt, Resolution, TokenError,
};

use crate::ledger_trial::{LONG_LEASE_MS, TTL_MS, ask, brief, complete, done, id, parking, replayed};
use crate::trial::{LEASE_MS, Trial};

pub(crate) async fn a_claim_lapses_exactly_at_the_end_of_its_lease(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(brief(&order, "ann")).await;
    t.lasts(grant.lease_ms, LEASE_MS);
    t.busy(&t.claim(parking(&order, "bob")).await, LEASE_MS);
    if t.exact() {
        t.advance(LEASE_MS - 1).await;
        t.busy(&t.claim(parking(&order, "bob")).await, 1);
        assert_eq!(t.state(&order).await, Some(EntryState::Processing));
        t.advance(1).await;
    } else {
        t.pass(LEASE_MS).await;
    }
    assert_eq!(t.state(&order).await, Some(EntryState::InDoubt));
    let view = t.entry(&order).await.expect("an entry");
    assert_eq!(view.lease_ms, 0);
    match t.claim(parking(&order, "bob")).await {
        Claim::InDoubt { since_ms } => assert_eq!(since_ms, view.claimed_ms + LEASE_MS),
        other => panic!("in doubt, got {other:?}"),
    }
}

pub(crate) async fn what_remains_of_a_lease_is_answered(t: Trial) {
    let order = id("order-7");
    t.grant(ask(&order, "ann")).await;
    t.advance(1_000).await;
    t.busy(&t.claim(ask(&order, "bob")).await, LONG_LEASE_MS - 1_000);
    let view = t.entry(&order).await.expect("an entry");
    t.lasts(view.lease_ms, LONG_LEASE_MS - 1_000);
}

pub(crate) async fn a_renewed_claim_holds(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(brief(&order, "ann")).await;
    for _ in 0..4 {
        t.advance(LEASE_MS / 2).await;
        let lease_ms = t.renew(&order, &grant.token, LEASE_MS).await.expect("it is held");
        t.lasts(lease_ms, LEASE_MS);
    }
    t.busy(&t.claim(ask(&order, "bob")).await, LEASE_MS);
    t.pass(LEASE_MS).await;
    assert_eq!(t.state(&order).await, Some(EntryState::InDoubt), "a renewal lasts as long as it says");
}

pub(crate) async fn a_renewal_chooses_its_own_lease(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.lasts(t.renew(&order, &grant.token, LEASE_MS).await.unwrap(), LEASE_MS);
    t.pass(LEASE_MS).await;
    assert_eq!(t.state(&order).await, Some(EntryState::InDoubt), "a shorter one counts too");
}

pub(crate) async fn a_lapsed_claim_that_nobody_took_is_held_again_by_a_renewal(t: Trial) {
    let order = id("order-7");
    let grant = t.lapsed(&order, "ann").await;
    t.lasts(t.renew(&order, &grant.token, LEASE_MS).await.unwrap(), LEASE_MS);
    t.busy(&t.claim(ask(&order, "bob")).await, LEASE_MS);
    t.pass(LEASE_MS).await;
    t.grant(ask(&order, "bob")).await;
    assert_eq!(t.renew(&order, &grant.token, LEASE_MS).await, Err(TokenError::Stale));
}

pub(crate) async fn an_outcome_outlives_the_lease(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(brief(&order, "ann")).await;
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
    t.pass(2 * LEASE_MS).await;
    assert_eq!(replayed(&t.claim(ask(&order, "bob")).await), Some(&done("paid")));
}

pub(crate) async fn a_lapsed_claim_is_remembered_for_days(t: Trial) {
    let (retried, parked) = (id("retried"), id("parked"));
    t.grant(brief(&retried, "ann")).await;
    t.grant(ClaimRequest { on_doubt: OnDoubt::Park, ..brief(&parked, "ann") }).await;
    t.pass(LEASE_MS + DOUBT_RETENTION_MS - 1).await;
    assert_eq!(t.state(&retried).await, Some(EntryState::InDoubt));
    t.pass(1).await;
    t.vanishes(&retried).await;
    t.pass(30 * DOUBT_RETENTION_MS).await;
    assert_eq!(t.state(&parked).await, Some(EntryState::InDoubt), "someone must decide");
    assert_eq!(t.entry(&parked).await.expect("an entry").prune_ms, None);
    assert!(matches!(t.claim(parking(&parked, "bob")).await, Claim::InDoubt { .. }));
    assert!(!t.grant(parking(&retried, "bob")).await.takeover);
}

pub(crate) async fn an_open_claim_gets_a_full_lease_after_a_restart(mut t: Trial) {
    let (held, lapsed, renewed, long) = (id("held"), id("lapsed"), id("renewed"), id("long"));
    t.grant(ClaimRequest { lease_ms: LEASE_MS / 2, ..ask(&lapsed, "ann") }).await;
    t.grant(brief(&held, "ann")).await;
    let token = t.grant(ask(&renewed, "ann")).await.token;
    t.renew(&renewed, &token, LEASE_MS).await.unwrap();
    t.grant(ask(&long, "ann")).await;
    t.pass(LEASE_MS / 2).await;
    t.restart().await;
    assert_eq!(t.state(&lapsed).await, Some(EntryState::InDoubt), "it had lapsed before");
    t.busy(&t.claim(ask(&held, "bob")).await, LEASE_MS);
    t.busy(&t.claim(ask(&renewed, "bob")).await, LEASE_MS);
    t.busy(&t.claim(ask(&long, "bob")).await, LONG_LEASE_MS);
    t.pass(LEASE_MS).await;
    assert!(t.grant(ask(&held, "bob")).await.takeover, "one lease and no longer");
    assert!(t.grant(ask(&lapsed, "bob")).await.takeover);
}

pub(crate) async fn what_was_in_doubt_stays_so_after_a_crash(mut t: Trial) {
    let (doubted, parked) = (id("doubted"), id("parked"));
    for order in [&doubted, &parked] {
        let grant = t.grant(parking(order, "ann")).await;
        t.end(order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    }
    let since = t.entry(&doubted).await.expect("an entry").ended_ms;
    t.crash().await;
    let view = t.entry(&doubted).await.expect("an entry");
    assert_eq!((view.state, view.ended_ms), (EntryState::InDoubt, since));
    assert!(matches!(t.claim(parking(&parked, "bob")).await, Claim::InDoubt { .. }));
    assert!(t.grant(ask(&doubted, "bob")).await.takeover);
}

/// Someone was told that it is in doubt: a crash does not take that back, and it can be decided about at once.
pub(crate) async fn a_lapsed_claim_is_in_doubt_right_after_a_crash(mut t: Trial) {
    let (asked, looked, listed, revived) = (id("asked"), id("looked"), id("listed"), id("revived"));
    for order in [&asked, &looked, &listed] {
        t.grant(ClaimRequest { on_doubt: OnDoubt::Park, ..brief(order, "ann") }).await;
    }
    let back = t.grant(brief(&revived, "ann")).await;
    t.pass(LEASE_MS).await;
    let since = match t.claim(parking(&asked, "bob")).await {
        Claim::InDoubt { since_ms } => since_ms,
        other => panic!("in doubt, got {other:?}"),
    };
    assert_eq!(t.state(&looked).await, Some(EntryState::InDoubt));
    let in_doubt =
        t.entries(EntryFilter { state: Some(EntryState::InDoubt), limit: 10, ..EntryFilter::default() });
    assert!(in_doubt.await.iter().any(|view| view.id == listed));
    t.renew(&revived, &back.token, LEASE_MS).await.expect("its holder was only asleep");
    t.crash().await;
    for order in [&asked, &looked, &listed] {
        assert_eq!(t.state(order).await, Some(EntryState::InDoubt), "{order}");
    }
    assert_eq!(t.entry(&asked).await.expect("an entry").ended_ms, Some(since), "since the same time");
    t.busy(&t.claim(ask(&revived, "bob")).await, LEASE_MS);
    t.resolve(&asked, Resolution::Absent).await.expect("it can be decided about at once");
    t.grant(parking(&asked, "bob")).await;
    // Twice is as good as once.
    t.crash().await;
    assert_eq!(t.state(&looked).await, Some(EntryState::InDoubt));
    t.busy(&t.claim(ask(&asked, "eve")).await, LONG_LEASE_MS);
}

/// A claim that was held when the store stopped is held when it opens, however often it stops and however long it stands.
pub(crate) async fn a_claim_held_when_the_store_stops_is_held_when_it_opens(mut t: Trial) {
    let (order, other) = (id("order-7"), id("order-8"));
    let grant = t.grant(brief(&order, "ann")).await;
    for _ in 0..3 {
        // Less than a lease each time, more than one together: each opening gives it a full one.
        t.pass(LEASE_MS / 2).await;
        t.crash().await;
        t.busy(&t.claim(ask(&order, "bob")).await, LEASE_MS);
        t.completed(&other, &done("paid")).await;
        t.forget(&other).await.unwrap();
    }
    t.lasts(
        t.renew(&order, &grant.token, LONG_LEASE_MS).await.expect("its holder comes back in time"),
        LONG_LEASE_MS,
    );
    t.end(&order, &grant.token, ClaimEnding::Complete { outcome: done("paid"), ttl_ms: TTL_MS })
        .await
        .unwrap();
    assert_eq!(replayed(&t.claim(ask(&order, "bob")).await), Some(&done("paid")));
}
