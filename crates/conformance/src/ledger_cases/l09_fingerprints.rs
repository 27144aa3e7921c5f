//! Point 9: a key belongs to one request; a different request with it is an error in every state, never a replay.

use hapax_core::{ClaimEnding, ClaimError, ClaimRequest, Fingerprint};

use crate::ledger_trial::{ask, at_rest, brief, complete, done, failed, fingerprint, id, replayed};
use crate::trial::{LEASE_MS, Trial};

fn with(request: ClaimRequest, fingerprint: Option<Fingerprint>) -> ClaimRequest {
    ClaimRequest { fingerprint, ..request }
}

pub(crate) async fn another_fingerprint_is_refused_in_every_state(t: Trial) {
    let (held, lapsed, doubted) = (id("held"), id("lapsed"), id("doubted"));
    let (done_id, failed_id) = (id("completed"), id("failed"));
    t.grant(with(brief(&lapsed, "ann"), fingerprint("f1"))).await;
    t.pass(LEASE_MS).await;
    for order in [&held, &doubted, &done_id, &failed_id] {
        let grant = t.grant(with(ask(order, "ann"), fingerprint("f1"))).await;
        let ending = match order.key.as_str() {
            "doubted" => ClaimEnding::Doubt,
            "completed" => complete(&done("paid")),
            "failed" => complete(&failed("no")),
            _ => continue,
        };
        t.end(order, &grant.token, ending).await.unwrap();
    }
    for order in [&held, &lapsed, &doubted, &done_id, &failed_id] {
        let before = at_rest(t.entry(order).await);
        for by in ["ann", "bob"] {
            for other in [fingerprint("f2"), fingerprint("F1"), None] {
                let claim = t.try_claim(with(ask(order, by), other.clone())).await;
                assert_eq!(claim, Err(ClaimError::Mismatch), "{order} by {by} with {other:?}");
            }
        }
        assert_eq!(at_rest(t.entry(order).await), before, "{order}");
    }
    assert_eq!(
        replayed(&t.claim(with(ask(&done_id, "bob"), fingerprint("f1"))).await),
        Some(&done("paid")),
        "the same request is replayed"
    );
    assert!(t.grant(with(ask(&lapsed, "bob"), fingerprint("f1"))).await.takeover);
}

pub(crate) async fn none_and_some_fingerprint_are_different(t: Trial) {
    let order = id("order-7");
    let grant = t.grant(ask(&order, "ann")).await;
    let other = with(ask(&order, "bob"), fingerprint("f1"));
    assert_eq!(t.try_claim(other.clone()).await, Err(ClaimError::Mismatch));
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
    assert_eq!(t.try_claim(other.clone()).await, Err(ClaimError::Mismatch));
    t.forget(&order).await.unwrap();
    assert!(!t.grant(other).await.takeover, "a forgotten key may stand for another request");
}

pub(crate) async fn a_mismatch_does_not_wait(t: Trial) {
    let order = id("order-7");
    t.grant(with(ask(&order, "ann"), fingerprint("f1"))).await;
    let other = with(crate::ledger_trial::waiting(&order, "bob"), fingerprint("f2"));
    assert_eq!(t.try_claim(other).await, Err(ClaimError::Mismatch));
}

pub(crate) async fn a_fingerprint_survives_takeover_and_crash(mut t: Trial) {
    let order = id("order-7");
    t.grant(with(brief(&order, "ann"), fingerprint("f1"))).await;
    t.pass(LEASE_MS).await;
    let grant = t.grant(with(ask(&order, "bob"), fingerprint("f1"))).await;
    t.crash().await;
    assert_eq!(t.try_claim(with(ask(&order, "eve"), fingerprint("f2"))).await, Err(ClaimError::Mismatch));
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
    t.crash().await;
    assert_eq!(t.try_claim(ask(&order, "eve")).await, Err(ClaimError::Mismatch));
    assert_eq!(t.entry(&order).await.expect("an entry").fingerprint, fingerprint("f1"));
}
