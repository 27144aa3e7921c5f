//! Operators' views, counters, and refused requests.

use hapax_core::ledger::{TTL_MS_MAX, TTL_MS_MIN};
use hapax_core::policy::{LEASE_MS_MAX, WAIT_MS_MAX};
use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EntryFilter, EntryId, EntryState, EntryView,
    IdempotencyKey, LedgerStats, Resolution, Scope, StoreError,
};

use crate::ledger_trial::{
    LONG_LEASE_MS, ask, brief, complete, done, failed, fingerprint, happened, id, parking, replayed, waiting,
};
use crate::trial::{LEASE_MS, Trial};

fn keys(views: &[EntryView]) -> Vec<&str> {
    views.iter().map(|view| view.id.key.as_str()).collect()
}

fn page(limit: usize) -> EntryFilter {
    EntryFilter { limit, ..EntryFilter::default() }
}

pub(crate) async fn entries_are_listed_page_by_page_in_order_of_their_claims(t: Trial) {
    assert_eq!(t.entries(page(10)).await, []);
    let names: Vec<String> = (0..25).map(|n| format!("k{}", 99 - n)).collect();
    t.grant(brief(&id("k99"), "ann")).await;
    t.pass(LEASE_MS).await;
    for name in &names[1..] {
        t.grant(ask(&id(name), "ann")).await;
    }
    for limit in [1, 7, 25, 1_000] {
        assert_eq!(keys(&t.entries(page(limit)).await), names, "pages of {limit}");
    }
    assert!(t.grant(ask(&id("k99"), "bob")).await.takeover);
    let mut moved = names[1..].to_vec();
    moved.push("k99".to_owned());
    let listed = t.entries(page(7)).await;
    assert_eq!(keys(&listed), moved, "by its last claim");
    for view in listed {
        t.lasts(view.lease_ms, LONG_LEASE_MS);
        let alone = t.entry(&view.id).await.expect("an entry");
        assert_eq!((alone.state, alone.fence, alone.owner), (view.state, view.fence, view.owner));
    }
}

pub(crate) async fn a_filter_chooses_by_scope_and_state(t: Trial) {
    let other = |key: &str| EntryId::new(Scope::new("other").unwrap(), IdempotencyKey::new(key).unwrap());
    let of = |scope: &str, state| EntryFilter {
        scope: (!scope.is_empty()).then(|| Scope::new(scope).unwrap()),
        state,
        ..page(2)
    };
    for entry in [id("lapsed"), other("lapsed")] {
        t.grant(brief(&entry, "ann")).await;
    }
    t.pass(LEASE_MS).await;
    for make in [id as fn(&str) -> EntryId, other] {
        t.grant(ask(&make("held"), "ann")).await;
        let doubted = t.grant(ask(&make("doubted"), "ann")).await;
        t.end(&make("doubted"), &doubted.token, ClaimEnding::Doubt).await.unwrap();
        t.completed(&make("completed"), &done("paid")).await;
        t.completed(&make("failed"), &failed("no")).await;
    }
    let in_order = ["lapsed", "held", "doubted", "completed", "failed"];
    assert_eq!(t.entries(of("", None)).await.len(), 10);
    for scope in ["suite", "other"] {
        assert_eq!(keys(&t.entries(of(scope, None)).await), in_order);
        for (state, expected) in [
            (EntryState::Processing, vec!["held"]),
            (EntryState::InDoubt, vec!["lapsed", "doubted"]),
            (EntryState::Completed, vec!["completed"]),
            (EntryState::Failed, vec!["failed"]),
        ] {
            let found = t.entries(of(scope, Some(state))).await;
            assert_eq!(keys(&found), expected, "{state:?}");
            assert!(found.iter().all(|view| view.id.scope.as_str() == scope && view.state == state));
            assert_eq!(t.entries(of("", Some(state))).await.len(), 2 * expected.len(), "{state:?}");
        }
    }
    assert_eq!(t.entries(of("nobody", None)).await, []);
}

pub(crate) async fn a_page_out_of_range_is_refused(t: Trial) {
    for limit in [0, 1_001] {
        let refused = t.ledger().entries(page(limit)).await;
        assert!(matches!(refused, Err(StoreError::Invalid(_))), "{limit}: {refused:?}");
    }
}

pub(crate) async fn counters_are_exact(t: Trial) {
    assert_eq!(t.ledger_stats().await, LedgerStats::default());
    let (paid, held, lapsed, parked) = (id("paid"), id("held"), id("lapsed"), id("parked"));
    let zombie = t.grant(brief(&lapsed, "ann")).await; // granted 1
    t.pass(LEASE_MS).await;
    let grant = t.grant(ask(&paid, "ann")).await; // granted 2
    t.claim(ask(&paid, "bob")).await; // conflicts 1
    t.end(&paid, &grant.token, complete(&done("paid"))).await.unwrap(); // completed 1
    t.end(&paid, &grant.token, complete(&done("paid"))).await.unwrap(); // unchanged
    for by in ["bob", "eve", "ann"] {
        t.claim(ask(&paid, by)).await; // replayed 3
    }
    let other = ClaimRequest { fingerprint: fingerprint("f"), ..ask(&paid, "eve") };
    t.try_claim(other).await.unwrap_err(); // mismatches 1
    t.grant(ask(&held, "ann")).await; // granted 3
    assert!(t.grant(ask(&lapsed, "bob")).await.takeover); // granted 4, takeovers 1
    t.renew(&lapsed, &zombie.token, LONG_LEASE_MS).await.unwrap_err(); // stale 1
    t.end(&lapsed, &zombie.token, ClaimEnding::Release).await.unwrap_err(); // stale 2
    let grant = t.grant(parking(&parked, "ann")).await; // granted 5
    t.end(&parked, &grant.token, ClaimEnding::Doubt).await.unwrap();
    t.claim(parking(&parked, "bob")).await; // in_doubt 1
    let gone = t.grant(ask(&id("gone"), "ann")).await; // granted 6
    t.end(&id("gone"), &gone.token, ClaimEnding::Release).await.unwrap();
    t.end(&id("gone"), &gone.token, ClaimEnding::Release).await.unwrap_err(); // gone, not stale
    t.completed(&id("failed"), &failed("no")).await; // granted 7, completed 2
    let expected = LedgerStats {
        entries: 5,
        open: 3,
        granted: 7,
        replayed: 3,
        conflicts: 1,
        in_doubt: 1,
        takeovers: 1,
        mismatches: 1,
        completed: 2,
        stale: 2,
        pruned: 0,
    };
    assert_eq!(t.ledger_stats().await, expected);
    t.resolve(&parked, Resolution::Absent).await.unwrap();
    t.forget(&paid).await.unwrap();
    let after = t.ledger_stats().await;
    assert_eq!((after.entries, after.open, after.pruned), (3, 2, 0));
}

pub(crate) async fn a_claim_that_is_repeated_or_waits_is_counted_once(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(brief(&order, "ann")).await; // granted 1
    assert_eq!(t.grant(brief(&order, "ann")).await.fence, grant.fence, "the same claim, asked for again");
    let waits = t.claim_waiting(waiting(&order, "bob")).await; // conflicts 1
    t.advance(LEASE_MS / 2).await;
    t.renew(&order, &grant.token, LONG_LEASE_MS).await.unwrap();
    // It was to end now, so the one that waits looks again.
    t.advance(LEASE_MS / 2).await;
    t.quiet().await;
    assert!(!waits.is_over());
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap(); // completed 1
    assert_eq!(replayed(&t.answered(waits).await), Some(&done("paid"))); // replayed 1
    let stats = t.ledger_stats().await;
    let counts = (stats.granted, stats.conflicts, stats.completed, stats.replayed);
    assert_eq!(counts, (1, 1, 1, 1), "{stats:?}");
}

pub(crate) async fn looking_changes_and_counts_nothing(t: Trial) {
    let order = id("order-7");
    t.grant(ask(&order, "ann")).await;
    let before = (t.entry(&order).await.map(|view| view.fence), t.ledger_stats().await);
    for _ in 0..3 {
        t.entry(&order).await;
        t.entry(&id("absent")).await;
        t.entries(page(10)).await;
    }
    assert_eq!((t.entry(&order).await.map(|view| view.fence), t.ledger_stats().await), before);
}

pub(crate) async fn entries_are_counted_after_a_crash(mut t: Trial) {
    t.completed(&id("paid"), &done("paid")).await;
    t.grant(ask(&id("held"), "ann")).await;
    let grant = t.grant(ask(&id("gone"), "ann")).await;
    t.end(&id("gone"), &grant.token, ClaimEnding::Release).await.unwrap();
    t.crash().await;
    let expected = LedgerStats { entries: 2, open: 1, ..LedgerStats::default() };
    assert_eq!(t.ledger_stats().await, expected, "counters start at 0, entries do not");
}

pub(crate) async fn a_forgotten_effect_may_happen_again(mut t: Trial) {
    let order = id("order-7");
    let first = t.completed(&order, &done("first")).await;
    t.forget(&order).await.unwrap();
    assert_eq!(t.entry(&order).await, None);
    if t.ledger().ledger_capabilities().durable {
        t.crash().await;
    }
    let second = t.completed(&order, &done("second")).await;
    assert!(second.fence > first.fence);
    assert_eq!(replayed(&t.claim(ask(&order, "other")).await), Some(&done("second")));
}

pub(crate) async fn a_claim_out_of_range_is_refused_and_changes_nothing(t: Trial) {
    let order = id("order-7");
    let lease = |lease_ms| ClaimRequest { lease_ms, ..ask(&order, "ann") };
    let wait = |wait_ms| ClaimRequest { wait_ms, ..ask(&order, "ann") };
    for bad in [lease(0), lease(LEASE_MS_MAX + 1), lease(u64::MAX), wait(WAIT_MS_MAX + 1), wait(u64::MAX)] {
        let (lease_ms, wait_ms) = (bad.lease_ms, bad.wait_ms);
        let refused = t.try_claim(bad).await;
        let Err(ClaimError::Invalid(why)) = refused else {
            panic!("lease {lease_ms}, wait {wait_ms}: {refused:?}")
        };
        assert!(why.contains("lease_ms") || why.contains("wait_ms"), "it names the value: {why}");
    }
    assert_eq!(t.entry(&order).await, None);
    let grant = t.grant(ClaimRequest { wait_ms: WAIT_MS_MAX, ..lease(LEASE_MS_MAX) }).await;
    t.lasts(grant.lease_ms, LEASE_MS_MAX);
    assert_eq!(t.grant(ClaimRequest { lease_ms: 1, ..ask(&id("short"), "ann") }).await.lease_ms, 1);
}

pub(crate) async fn a_renewal_out_of_range_is_brought_into_range(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    t.lasts(t.renew(&order, &grant.token, u64::MAX).await.unwrap(), LEASE_MS_MAX);
    assert_eq!(t.renew(&order, &grant.token, 0).await, Ok(1));
}

pub(crate) async fn a_ttl_out_of_range_is_brought_into_range(t: Trial) {
    for (key, ttl_ms, kept_ms) in [
        ("none", 0, TTL_MS_MIN),
        ("least", TTL_MS_MIN, TTL_MS_MIN),
        ("most", TTL_MS_MAX, TTL_MS_MAX),
        ("ever", u64::MAX, TTL_MS_MAX),
    ] {
        let order = id(key);
        let grant = t.grant(ask(&order, "ann")).await;
        t.end(&order, &grant.token, ClaimEnding::Complete { outcome: done("paid"), ttl_ms }).await.unwrap();
        let view = t.entry(&order).await.expect("an entry");
        let ended_ms = view.ended_ms.expect("it has ended");
        assert_eq!(view.prune_ms, Some(ended_ms + kept_ms), "{key}");
    }
}

pub(crate) async fn a_resolution_of_what_is_held_says_when_to_come_back(t: Trial) {
    let order = id("order-7");
    t.grant(ask(&order, "ann")).await;
    t.advance(1_000).await;
    for refused in [t.resolve(&order, happened(&done("x"))).await, t.forget(&order).await] {
        match refused {
            Err(hapax_core::ResolveError::InProgress { retry_after_ms }) => {
                t.lasts(retry_after_ms, LONG_LEASE_MS - 1_000);
            }
            other => panic!("in progress, got {other:?}"),
        }
    }
    assert!(matches!(t.claim(ask(&order, "bob")).await, Claim::InProgress { .. }));
}
