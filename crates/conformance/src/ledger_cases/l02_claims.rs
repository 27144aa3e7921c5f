//! Point 2: a claim is one atomic step; duplicates wait and get the outcome, or are told that the key is in progress.

use hapax_core::{Claim, ClaimEnding, ClaimRequest, EntryState};
use tokio::task::JoinSet;

use crate::ledger_trial::{
    LONG_LEASE_MS, ask, brief, complete, done, failed, id, parking, replayed, waiting,
};
use crate::trial::{LEASE_MS, Trial};

/// Starts fifty claims of one key, each in its own task.
fn fifty(t: &Trial, request: impl Fn(&str) -> ClaimRequest) -> JoinSet<Claim> {
    let mut all = JoinSet::new();
    for n in 0..50 {
        let (ledger, request) = (t.ledger(), request(&format!("worker-{n}")));
        all.spawn(async move {
            let mut answers = ledger.claim(vec![request]).await.expect("claim");
            answers.remove(0).expect("the claim is acceptable")
        });
    }
    all
}

pub(crate) async fn of_fifty_concurrent_claims_one_is_granted(t: Trial) {
    let order = id("order-7");
    let claims = t.within("fifty claims", fifty(&t, |by| ask(&order, by)).join_all()).await;
    let granted = claims.iter().filter(|claim| matches!(claim, Claim::Granted(_))).count();
    assert_eq!(granted, 1, "{claims:?}");
    for claim in claims.iter().filter(|claim| !matches!(claim, Claim::Granted(_))) {
        t.busy(claim, LONG_LEASE_MS);
    }
}

pub(crate) async fn fifty_waiting_duplicates_get_one_grant_and_equal_outcomes(t: Trial) {
    let order = id("order-7");
    let mut all = fifty(&t, |by| waiting(&order, by));
    let first = t.within("the first answer", all.join_next()).await.expect("fifty").expect("no panic");
    let Claim::Granted(grant) = first else { panic!("one is granted, got {first:?}") };
    assert!(!grant.takeover);
    t.quiet().await;
    assert!(all.try_join_next().is_none(), "the others wait");
    t.end(&order, &grant.token, complete(&done("paid"))).await.unwrap();
    let answers = t.within("the others", all.join_all()).await;
    assert_eq!(answers.len(), 49);
    for answer in &answers {
        assert_eq!(replayed(answer), Some(&done("paid")), "{answer:?}");
        assert_eq!(answer, &answers[0], "all alike");
    }
}

pub(crate) async fn when_the_holder_gives_up_one_of_the_waiting_goes_on(t: Trial) {
    let order = id("order-7");
    let holder = t.grant(ask(&order, "holder")).await;
    let mut all = fifty(&t, |by| waiting(&order, by));
    for _ in 0..3 {
        tokio::task::yield_now().await;
    }
    t.quiet().await;
    t.end(&order, &holder.token, ClaimEnding::Release).await.unwrap();
    let next = t.within("the next holder", all.join_next()).await.expect("fifty").expect("no panic");
    let Claim::Granted(grant) = next else { panic!("one is granted, got {next:?}") };
    assert!(!grant.takeover && grant.fence > holder.fence, "{grant:?}");
    t.quiet().await;
    assert!(all.try_join_next().is_none(), "the others wait on");
    t.end(&order, &grant.token, complete(&failed("no"))).await.unwrap();
    for answer in t.within("the others", all.join_all()).await {
        assert_eq!(replayed(&answer), Some(&failed("no")));
    }
}

pub(crate) async fn the_same_owner_gets_the_same_claim_again(t: Trial) {
    let order = id("order-7");
    let first = t.grant(ask(&order, "ann")).await;
    for _ in 0..3 {
        let again = t.grant(ask(&order, "ann")).await;
        assert_eq!((&again.token, again.fence, again.takeover), (&first.token, first.fence, false));
    }
    let view = t.entry(&order).await.expect("an entry");
    assert_eq!((view.fence, view.takeovers), (first.fence, 0));
    t.busy(&t.claim(ask(&order, "bob")).await, LONG_LEASE_MS);
    t.end(&order, &first.token, complete(&done("paid"))).await.unwrap();
    assert_eq!(replayed(&t.claim(ask(&order, "ann")).await), Some(&done("paid")));
}

pub(crate) async fn a_repeated_claim_never_shortens_its_lease(t: Trial) {
    let order = id("order-7");
    let first = t.grant(ask(&order, "ann")).await;
    let again = t.grant(brief(&order, "ann")).await;
    assert_eq!(again.token, first.token);
    t.lasts(again.lease_ms, LONG_LEASE_MS);
    t.busy(&t.claim(ask(&order, "bob")).await, LONG_LEASE_MS);
}

pub(crate) async fn a_repeated_claim_lengthens_its_lease(t: Trial) {
    let order = id("order-7");
    t.grant(brief(&order, "ann")).await;
    t.advance(LEASE_MS / 2).await;
    let again = t.grant(brief(&order, "ann")).await;
    t.lasts(again.lease_ms, LEASE_MS);
    t.advance(LEASE_MS / 2 + LEASE_MS / 4).await;
    assert!(matches!(t.claim(ask(&order, "bob")).await, Claim::InProgress { .. }));
}

pub(crate) async fn a_repeated_claim_keeps_what_the_first_one_said_about_doubt(t: Trial) {
    let (retries, parks) = (id("retries"), id("parks"));
    for (order, first, again) in [
        (&retries, ask(&retries, "ann"), parking(&retries, "ann")),
        (&parks, parking(&parks, "ann"), ask(&parks, "ann")),
    ] {
        let granted = t.grant(first).await;
        let is_pruned = t.entry(order).await.expect("an entry").prune_ms.is_some();
        assert_eq!(is_pruned, *order == retries, "an entry that parks is kept until someone decides");
        assert_eq!(t.grant(again).await.token, granted.token);
        let view = t.entry(order).await.expect("an entry");
        assert_eq!(view.prune_ms.is_some(), is_pruned, "{order}: the repeated claim changed it");
    }
}

pub(crate) async fn a_batch_may_name_a_key_twice(t: Trial) {
    let (a, b) = (id("a"), id("b"));
    let batch = vec![ask(&a, "ann"), ask(&b, "ann"), ask(&a, "bob"), ask(&a, "ann")];
    let mut answers = t.claim_batch(batch).await.into_iter().map(|answer| answer.expect("acceptable"));
    let (first, other) = (answers.next().expect("four"), answers.next().expect("four"));
    let (second, again) = (answers.next().expect("four"), answers.next().expect("four"));
    let (Claim::Granted(first), Claim::Granted(other)) = (first, other) else { panic!("both keys are free") };
    assert_ne!(first.token, other.token);
    t.busy(&second, LONG_LEASE_MS);
    let Claim::Granted(again) = again else { panic!("the same owner, got {again:?}") };
    assert_eq!((again.token, again.fence), (first.token, first.fence));
}

pub(crate) async fn one_refused_claim_fails_no_other_of_its_batch(t: Trial) {
    let too_long = ClaimRequest { lease_ms: 13 * 3600 * 1000, ..ask(&id("b"), "ann") };
    let answers = t.claim_batch(vec![ask(&id("a"), "ann"), too_long, ask(&id("c"), "ann")]).await;
    assert!(matches!(answers[0], Ok(Claim::Granted(_))), "{:?}", answers[0]);
    assert_eq!(answers[1].as_ref().unwrap_err().code(), "invalid");
    assert!(matches!(answers[2], Ok(Claim::Granted(_))), "{:?}", answers[2]);
    assert_eq!(t.entry(&id("b")).await, None);
}

pub(crate) async fn an_empty_batch_is_no_error(t: Trial) {
    assert_eq!(t.claim_batch(Vec::new()).await, []);
    assert_eq!(t.ledger().renew(Vec::new()).await, Ok(Vec::new()));
    assert_eq!(t.ledger().end(Vec::new()).await, Ok(Vec::new()));
}

pub(crate) async fn a_claim_does_not_wait_when_it_can_be_answered(t: Trial) {
    assert!(!t.grant(waiting(&id("free"), "ann")).await.takeover);
    t.completed(&id("done"), &done("paid")).await;
    assert_eq!(replayed(&t.claim(waiting(&id("done"), "ann")).await), Some(&done("paid")));
    t.lapsed(&id("lapsed"), "ann").await;
    let parks = ClaimRequest { wait_ms: 20_000, ..parking(&id("lapsed"), "bob") };
    assert!(matches!(t.claim(parks).await, Claim::InDoubt { .. }), "nobody is at work");
}

pub(crate) async fn a_waiting_claim_wakes_when_the_lease_lapses(t: Trial) {
    let (retried, parked) = (id("retried"), id("parked"));
    t.grant(brief(&retried, "holder")).await;
    t.grant(brief(&parked, "holder")).await;
    let takes = t.claim_waiting(waiting(&retried, "ann")).await;
    let parks = t.claim_waiting(ClaimRequest { wait_ms: 20_000, ..parking(&parked, "ann") }).await;
    assert!(!takes.is_over() && !parks.is_over());
    t.pass(LEASE_MS).await;
    let claim = t.answered(takes).await;
    assert!(matches!(&claim, Claim::Granted(grant) if grant.takeover), "{claim:?}");
    let claim = t.answered(parks).await;
    assert!(matches!(claim, Claim::InDoubt { .. }), "{claim:?}");
}

pub(crate) async fn a_waiting_claim_wakes_when_its_holder_is_in_doubt(t: Trial) {
    let order = id("order-7");
    let holder = t.grant(ask(&order, "holder")).await;
    let waits = t.claim_waiting(ClaimRequest { wait_ms: 20_000, ..parking(&order, "ann") }).await;
    t.end(&order, &holder.token, ClaimEnding::Doubt).await.unwrap();
    let claim = t.answered(waits).await;
    assert!(matches!(claim, Claim::InDoubt { .. }), "{claim:?}");
}

pub(crate) async fn a_waiting_claim_waits_on_while_the_lease_is_renewed(t: Trial) {
    let order = id("order-7");
    let holder = t.grant(brief(&order, "holder")).await;
    let waits = t.claim_waiting(waiting(&order, "ann")).await;
    for _ in 0..3 {
        t.advance(LEASE_MS / 2).await;
        t.renew(&order, &holder.token, LEASE_MS).await.expect("the holder renews");
    }
    t.quiet().await;
    assert!(!waits.is_over(), "the claim is held");
    t.end(&order, &holder.token, complete(&done("paid"))).await.unwrap();
    assert_eq!(replayed(&t.answered(waits).await), Some(&done("paid")));
}

pub(crate) async fn a_waiting_claim_gives_up_at_its_deadline(t: Trial) {
    let order = id("order-7");
    t.grant(ask(&order, "holder")).await;
    let waits = t.claim_waiting(ClaimRequest { wait_ms: 1_000, ..ask(&order, "ann") }).await;
    if t.exact() {
        t.advance(999).await;
        t.quiet().await;
        assert!(!waits.is_over(), "it waits to the end");
        t.advance(1).await;
        t.busy(&t.answered(waits).await, LONG_LEASE_MS - 1_000);
    } else {
        t.pass(1_000).await;
        let claim = t.answered(waits).await;
        assert!(matches!(claim, Claim::InProgress { .. }), "{claim:?}");
    }
    assert_eq!(t.entry(&order).await.expect("an entry").owner.as_str(), "holder");
}

pub(crate) async fn a_waiting_claim_on_one_key_leaves_another_alone(t: Trial) {
    let (a, b) = (id("a"), id("b"));
    let (held, other) = (t.grant(ask(&a, "holder")).await, t.grant(ask(&b, "holder")).await);
    let waits = t.claim_waiting(waiting(&a, "ann")).await;
    t.end(&b, &other.token, complete(&done("b"))).await.unwrap();
    assert_eq!(replayed(&t.claim(waiting(&b, "ann")).await), Some(&done("b")));
    assert!(!waits.is_over());
    t.end(&a, &held.token, complete(&done("a"))).await.unwrap();
    assert_eq!(replayed(&t.answered(waits).await), Some(&done("a")));
}

pub(crate) async fn a_claim_survives_a_crash(mut t: Trial) {
    let (held, ended) = (id("held"), id("ended"));
    let grant = t.grant(ask(&held, "ann")).await;
    t.completed(&ended, &done("paid")).await;
    t.crash().await;
    t.busy(&t.claim(ask(&held, "bob")).await, LONG_LEASE_MS);
    assert_eq!(replayed(&t.claim(ask(&ended, "bob")).await), Some(&done("paid")));
    let again = t.grant(ask(&held, "ann")).await;
    assert_eq!((&again.token, again.fence), (&grant.token, grant.fence), "the same owner, the same claim");
    t.end(&held, &grant.token, complete(&done("late"))).await.expect("the token survives");
    assert_eq!(t.state(&held).await, Some(EntryState::Completed));
}

pub(crate) async fn each_answer_of_many_rounds_survives_a_crash(mut t: Trial) {
    let mut tokens = Vec::new();
    for round in 0..5 {
        for n in 0..4 {
            let order = id(&format!("{round}-{n}"));
            let grant = t.grant(parking(&order, "ann")).await;
            let ending =
                [complete(&done("yes")), complete(&failed("no")), ClaimEnding::Release, ClaimEnding::Doubt];
            t.end(&order, &grant.token, ending[n].clone()).await.unwrap();
            tokens.push((order, n));
        }
        if round % 2 == 0 {
            t.crash().await;
        } else {
            t.restart().await;
        }
        for (order, n) in &tokens {
            let expected =
                [Some(EntryState::Completed), Some(EntryState::Failed), None, Some(EntryState::InDoubt)];
            assert_eq!(t.state(order).await, expected[*n], "{order} after round {round}");
        }
    }
}
