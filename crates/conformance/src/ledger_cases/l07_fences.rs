//! Point 7: the fence given to the effect grows with every grant of its key.

use hapax_core::{ClaimEnding, EntryId, Fence, Grant, Resolution};

use crate::ledger_trial::{ask, brief, id, parking};
use crate::trial::{LEASE_MS, Trial};

fn beyond(grant: &Grant, last: &mut Fence) {
    assert!(grant.fence > *last, "{} after {last}", grant.fence);
    assert!(grant.fence <= Fence::MAX);
    *last = grant.fence;
}

/// Grants a key repeatedly, in every possible way.
async fn in_every_way(t: &Trial, order: &EntryId, last: &mut Fence) {
    let grant = t.grant(ask(order, "released")).await;
    beyond(&grant, last);
    t.end(order, &grant.token, ClaimEnding::Release).await.unwrap();
    let grant = t.grant(brief(order, "lapsed")).await;
    beyond(&grant, last);
    t.pass(LEASE_MS).await;
    let grant = t.grant(ask(order, "doubted")).await;
    beyond(&grant, last);
    t.end(order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    let grant = t.grant(ask(order, "took-over")).await;
    beyond(&grant, last);
    t.end(order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    t.resolve(order, Resolution::Absent).await.unwrap();
    let grant = t.grant(parking(order, "resolved")).await;
    beyond(&grant, last);
    t.end(order, &grant.token, ClaimEnding::Doubt).await.unwrap();
    t.forget(order).await.unwrap();
}

pub(crate) async fn fences_grow_with_every_grant_of_a_key(t: Trial) {
    let (order, mut last) = (id("order-7"), Fence(0));
    for _ in 0..3 {
        in_every_way(&t, &order, &mut last).await;
    }
}

pub(crate) async fn fences_grow_through_restarts_and_crashes(mut t: Trial) {
    let (order, mut last) = (id("order-7"), Fence(0));
    for round in 0..4 {
        in_every_way(&t, &order, &mut last).await;
        if round % 2 == 0 { t.crash().await } else { t.restart().await }
    }
    beyond(&t.grant(ask(&order, "last")).await, &mut last);
}

pub(crate) async fn fences_grow_when_the_wall_clock_was_set_back(mut t: Trial) {
    let (order, mut last) = (id("order-7"), Fence(0));
    let mut release = async |t: &Trial| {
        let grant = t.grant(ask(&order, "ann")).await;
        beyond(&grant, &mut last);
        t.end(&order, &grant.token, ClaimEnding::Release).await.unwrap();
    };
    release(&t).await;
    t.set_wall_back(3_600_000);
    release(&t).await;
    t.restart().await;
    release(&t).await;
    t.set_wall_back(3_600_000);
    t.crash().await;
    release(&t).await;
}

pub(crate) async fn a_repeated_claim_keeps_its_fence(t: Trial) {
    let order = id("order-7");
    let first = t.grant(ask(&order, "ann")).await;
    t.grant(ask(&id("another"), "bob")).await;
    assert_eq!(t.grant(ask(&order, "ann")).await.fence, first.fence);
    t.renew(&order, &first.token, LEASE_MS).await.unwrap();
    assert_eq!(t.entry(&order).await.expect("an entry").fence, first.fence);
}
