//! Several processes on one ledger: each sees the claims of the other.

use hapax_core::{Claim, ClaimEnding, TokenError};
use tokio::task::JoinSet;

use crate::ledger_trial::{LONG_LEASE_MS, ask, brief, complete, done, id, replayed, waiting};
use crate::trial::{LEASE_MS, Trial};

pub(crate) async fn of_claims_on_two_handles_one_is_granted(t: Trial) {
    let (order, other) = (id("order-7"), t.other_handle());
    let mut all = JoinSet::new();
    for n in 0..20 {
        let ledger = if n % 2 == 0 { t.ledger() } else { other.ledger() };
        let request = ask(&order, &format!("worker-{n}"));
        all.spawn(
            async move { ledger.claim(vec![request]).await.expect("claim").remove(0).expect("acceptable") },
        );
    }
    let claims = t.within("twenty claims", all.join_all()).await;
    let granted = claims.iter().filter(|claim| matches!(claim, Claim::Granted(_))).count();
    assert_eq!(granted, 1, "{claims:?}");
}

pub(crate) async fn a_token_ends_its_claim_on_the_other_handle(t: Trial) {
    let (order, other) = (id("order-7"), t.other_handle());
    let grant = t.grant(ask(&order, "one")).await;
    t.busy(&other.claim(ask(&order, "two")).await, LONG_LEASE_MS);
    other.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
    assert_eq!(replayed(&t.claim(ask(&order, "two")).await), Some(&done("paid")));
}

pub(crate) async fn a_waiting_claim_wakes_when_the_other_handle_ends_it(t: Trial) {
    let (order, other) = (id("order-7"), t.other_handle());
    let grant = other.grant(ask(&order, "one")).await;
    let (ledger, request) = (t.ledger(), waiting(&order, "two"));
    let task = tokio::spawn(async move { ledger.claim(vec![request]).await });
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    t.quiet().await;
    assert!(!task.is_finished());
    other.end(&order, &grant.token, ClaimEnding::Release).await.unwrap();
    let answer = t.within("the waiting claim", task).await.expect("no panic").expect("claim").remove(0);
    assert!(matches!(answer, Ok(Claim::Granted(_))), "{answer:?}");
}

pub(crate) async fn a_takeover_on_one_handle_makes_the_token_of_the_other_stale(t: Trial) {
    let (order, other) = (id("order-7"), t.other_handle());
    let first = t.grant(brief(&order, "one")).await;
    t.pass(LEASE_MS).await;
    let second = other.grant(ask(&order, "two")).await;
    assert!(second.takeover && second.fence > first.fence, "{second:?}");
    let late = t.end(&order, &first.token, complete(&done("late"))).await;
    assert_eq!(late, Err(TokenError::Stale));
    other.end(&order, &second.token, complete(&done("paid"))).await.unwrap();
    assert_eq!(replayed(&t.claim(ask(&order, "three")).await), Some(&done("paid")));
}
