//! Point 4: every write compares the token. Stale means superseded, not late.

use hapax_core::{ClaimEnding, EndClaim, EntryState, Renew, Token, TokenError};

use crate::ledger_trial::{
    LONG_LEASE_MS, TTL_MS, ask, at_rest, complete, done, ends, failed, id, parking, replayed,
};
use crate::trial::Trial;

pub(crate) async fn a_stale_token_changes_nothing(t: Trial) {
    let order = id("order-7");
    let zombie = t.lapsed(&order, "zombie").await;
    let holder = t.grant(ask(&order, "holder")).await;
    let before = at_rest(t.entry(&order).await);
    for ending in [complete(&done("zombie")), ClaimEnding::Release, ClaimEnding::Doubt] {
        assert_eq!(t.end(&order, &zombie.token, ending.clone()).await, Err(TokenError::Stale), "{ending:?}");
        assert_eq!(at_rest(t.entry(&order).await), before, "{ending:?}");
    }
    assert_eq!(t.renew(&order, &zombie.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
    assert_eq!(at_rest(t.entry(&order).await), before);
    t.end(&order, &holder.token, complete(&done("holder"))).await.expect("the holder is not disturbed");
    let before = at_rest(t.entry(&order).await);
    for ending in
        [complete(&done("zombie")), complete(&done("holder")), ClaimEnding::Release, ClaimEnding::Doubt]
    {
        assert_eq!(t.end(&order, &zombie.token, ending.clone()).await, Err(TokenError::Stale), "{ending:?}");
    }
    assert_eq!(t.renew(&order, &zombie.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
    assert_eq!(at_rest(t.entry(&order).await), before);
    assert_eq!(replayed(&t.claim(ask(&order, "other")).await), Some(&done("holder")));
}

pub(crate) async fn a_stale_token_stays_stale_after_a_crash(mut t: Trial) {
    let order = id("order-7");
    let zombie = t.lapsed(&order, "zombie").await;
    let holder = t.grant(ask(&order, "holder")).await;
    t.crash().await;
    assert_eq!(t.end(&order, &zombie.token, complete(&done("no"))).await, Err(TokenError::Stale));
    assert_eq!(t.renew(&order, &zombie.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
    t.end(&order, &holder.token, complete(&done("yes"))).await.unwrap();
    t.restart().await;
    assert_eq!(t.end(&order, &zombie.token, complete(&done("yes"))).await, Err(TokenError::Stale));
    assert_eq!(replayed(&t.claim(ask(&order, "other")).await), Some(&done("yes")));
}

pub(crate) async fn a_late_completion_counts_while_nobody_took_over(t: Trial) {
    let order = id("order-7");
    let late = t.lapsed(&order, "late").await;
    assert_eq!(t.state(&order).await, Some(EntryState::InDoubt));
    t.end(&order, &late.token, complete(&done("paid"))).await.expect("nobody took over");
    let view = t.entry(&order).await.expect("an entry");
    assert_eq!((view.state, view.takeovers), (EntryState::Completed, 0));
    assert_eq!(replayed(&t.claim(parking(&order, "other")).await), Some(&done("paid")), "no doubt is left");
}

pub(crate) async fn a_late_release_counts_while_nobody_took_over(t: Trial) {
    let order = id("order-7");
    let late = t.lapsed(&order, "late").await;
    t.end(&order, &late.token, ClaimEnding::Release).await.expect("nobody took over");
    let grant = t.grant(parking(&order, "other")).await;
    assert!(!grant.takeover && grant.fence > late.fence);
}

pub(crate) async fn the_same_completion_again_is_no_error(mut t: Trial) {
    let (order, refused) = (id("order-7"), id("order-8"));
    let grant = t.completed(&order, &done("paid")).await;
    let other = t.completed(&refused, &failed("no")).await;
    let before = t.entry(&order).await;
    for _ in 0..2 {
        t.pass(10).await;
        t.end(&order, &grant.token, complete(&done("paid"))).await.expect("the same again");
        t.end(&refused, &other.token, complete(&failed("no"))).await.expect("the same again");
    }
    assert_eq!(t.entry(&order).await, before, "neither its time nor its outcome changed");
    if t.ledger().ledger_capabilities().durable {
        t.crash().await;
        t.end(&order, &grant.token, complete(&done("paid"))).await.expect("the answer was lost in a crash");
    }
}

pub(crate) async fn a_completion_cannot_be_changed(t: Trial) {
    let order = id("order-7");
    let grant = t.completed(&order, &done("paid")).await;
    let before = t.entry(&order).await;
    for ending in
        [complete(&done("more")), complete(&failed("paid")), ClaimEnding::Release, ClaimEnding::Doubt]
    {
        assert_eq!(t.end(&order, &grant.token, ending.clone()).await, Err(TokenError::Ended), "{ending:?}");
    }
    assert_eq!(t.renew(&order, &grant.token, LONG_LEASE_MS).await, Err(TokenError::Ended));
    assert_eq!(t.entry(&order).await, before);
}

pub(crate) async fn a_token_of_another_key_is_stale(t: Trial) {
    let (a, b) = (id("a"), id("b"));
    let (own, other) = (t.grant(ask(&a, "ann")).await, t.grant(ask(&b, "ann")).await);
    let before = at_rest(t.entry(&b).await);
    for ending in [complete(&done("a")), ClaimEnding::Release, ClaimEnding::Doubt] {
        assert_eq!(t.end(&b, &own.token, ending).await, Err(TokenError::Stale));
    }
    assert_eq!(t.renew(&b, &own.token, LONG_LEASE_MS).await, Err(TokenError::Stale));
    let made_up = Token::new("made-up").unwrap();
    assert_eq!(t.end(&b, &made_up, ClaimEnding::Release).await, Err(TokenError::Stale));
    assert_eq!(t.renew(&b, &made_up, LONG_LEASE_MS).await, Err(TokenError::Stale));
    assert_eq!(at_rest(t.entry(&b).await), before);
    t.end(&a, &own.token, complete(&done("a"))).await.expect("its own key");
    t.end(&b, &other.token, complete(&done("b"))).await.expect("its own key");
}

pub(crate) async fn a_token_is_stale_once_its_key_was_released_and_claimed_anew(t: Trial) {
    let order = id("order-7");
    let first = t.grant(ask(&order, "ann")).await;
    t.end(&order, &first.token, ClaimEnding::Release).await.unwrap();
    assert_eq!(t.end(&order, &first.token, complete(&done("late"))).await, Err(TokenError::Gone));
    // The same owner, but a new claim.
    let second = t.grant(ask(&order, "ann")).await;
    assert_ne!(second.token, first.token);
    for ending in [complete(&done("late")), ClaimEnding::Release, ClaimEnding::Doubt] {
        assert_eq!(t.end(&order, &first.token, ending).await, Err(TokenError::Stale));
    }
    t.end(&order, &second.token, complete(&done("paid"))).await.unwrap();
}

pub(crate) async fn batches_answer_in_order_and_one_failure_fails_no_other(t: Trial) {
    let (a, b, c) = (id("a"), id("b"), id("c"));
    let (held_a, held_c) = (t.grant(ask(&a, "ann")).await, t.grant(ask(&c, "ann")).await);
    let gone = t.grant(ask(&b, "ann")).await;
    t.end(&b, &gone.token, ClaimEnding::Release).await.unwrap();
    let renew = |id, token: &Token| Renew { id, token: token.clone(), lease_ms: LONG_LEASE_MS };
    let batch = vec![
        renew(a.clone(), &held_a.token),
        renew(b.clone(), &gone.token),
        renew(c.clone(), &held_a.token),
        renew(c.clone(), &held_c.token),
    ];
    let answers = t.ledger().renew(batch).await.expect("renew");
    let answers: Vec<_> = answers.into_iter().map(|answer| answer.map(|_| ())).collect();
    assert_eq!(answers, [Ok(()), Err(TokenError::Gone), Err(TokenError::Stale), Ok(())]);

    let end = |id, token, ending| -> EndClaim { ends(id, token, ending) };
    let batch = vec![
        end(&a, &held_a.token, complete(&done("a"))),
        end(&b, &gone.token, ClaimEnding::Release),
        end(&a, &held_a.token, ClaimEnding::Complete { outcome: done("b"), ttl_ms: TTL_MS }),
        end(&c, &held_c.token, ClaimEnding::Release),
        end(&c, &held_c.token, complete(&done("c"))),
    ];
    let answers = t.ledger().end(batch).await.expect("end");
    let expected = [Ok(()), Err(TokenError::Gone), Err(TokenError::Ended), Ok(()), Err(TokenError::Gone)];
    assert_eq!(answers, expected);
    assert_eq!((t.state(&a).await, t.state(&c).await), (Some(EntryState::Completed), None));
}
