//! Point 6: a settle also ends its delivery's claim; both happen or neither.

use hapax_core::{
    ClaimEnding, ClaimRequest, Delivery, EntryId, EntryState, Grant, IdempotencyKey, MessageState,
    NewMessage, QueueConfig, QueueName, Resolution, Settle, SettleError, Settled, Settlement, Tier,
    TokenError,
};

use crate::ledger_trial::{
    LONG_LEASE_MS, TTL_MS, ask, complete, done, ends, failed, happened, parking, replayed,
};
use crate::trial::{LEASE_MS, Trial};
use crate::values::{config, receive_waiting, reject, retry, text};

/// Configuration of a queue whose handlers make claims.
pub(crate) fn once() -> QueueConfig {
    QueueConfig { tier: Tier::EffectivelyOnce, ..config() }
}

/// A message with an idempotency key.
pub(crate) fn keyed(key: &str) -> NewMessage {
    text(key).idempotency_key(&IdempotencyKey::new(key).expect("a key"))
}

/// The entry of a message.
pub(crate) fn entry_of(queue: &QueueName, delivery: &Delivery) -> EntryId {
    EntryId::of_queue(queue, delivery.key.clone())
}

/// A claim for a delivery.
pub(crate) fn ask_for(queue: &QueueName, delivery: &Delivery, by: &str) -> ClaimRequest {
    let delivery_of = Some((queue.clone(), delivery.receipt.clone()));
    ClaimRequest { delivery: delivery_of, ..ask(&entry_of(queue, delivery), by) }
}

/// A queue with one message in flight, and its claim.
async fn at_work(t: &Trial) -> (QueueName, Delivery, EntryId, Grant) {
    let jobs = t.create("jobs", once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let grant = t.grant(ask_for(&jobs, &got, "worker-1")).await;
    let id = entry_of(&jobs, &got);
    (jobs, got, id, grant)
}

async fn settle_all(t: &Trial, queue: &QueueName, batch: Vec<Settle>) -> Vec<Result<Settled, SettleError>> {
    let count = batch.len();
    let answers = t.within("settle", t.store().settle(queue, batch)).await.expect("settle");
    assert_eq!(answers.len(), count, "one answer per settle");
    answers
}

/// Settles a delivery and ends its claim.
pub(crate) async fn settle_with(
    t: &Trial,
    queue: &QueueName,
    delivery: &Delivery,
    settlement: Settlement,
    claim: (&EntryId, &Grant, ClaimEnding),
) -> Result<Settled, SettleError> {
    let (id, grant, ending) = claim;
    let claim = Some(ends(id, &grant.token, ending));
    let settle = Settle { claim, ..Settle::new(delivery.receipt.clone(), settlement) };
    settle_all(t, queue, vec![settle]).await.remove(0)
}

pub(crate) async fn an_ack_completes_its_claim(mut t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked));
    for crashed in [false, true] {
        if crashed {
            t.crash().await;
        }
        assert!(t.browse(&jobs).await.is_empty(), "crashed: {crashed}");
        assert_eq!(replayed(&t.claim(ask(&id, "other")).await), Some(&done("paid")), "crashed: {crashed}");
    }
}

pub(crate) async fn a_retry_releases_its_claim(mut t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    let ended = settle_with(&t, &jobs, &got, retry("try later"), (&id, &grant, ClaimEnding::Release)).await;
    assert_eq!(ended, Ok(Settled::Returned { after_ms: 0 }));
    t.crash().await;
    assert_eq!(t.entry(&id).await, None);
    let again = t.one(&jobs).await;
    assert_eq!(again.attempt, 2);
    let next = t.grant(ask_for(&jobs, &again, "worker-2")).await;
    assert!(!next.takeover && next.fence > grant.fence, "{next:?}: nothing happened before");
}

pub(crate) async fn a_reject_records_its_failure(mut t: Trial) {
    let (jobs, dead) = t.with_dead(3, once()).await;
    t.send(&jobs, keyed("order-7")).await;
    let got = t.one(&jobs).await;
    let (id, grant) = (entry_of(&jobs, &got), t.grant(ask_for(&jobs, &got, "worker")).await);
    let ended = settle_with(&t, &jobs, &got, reject("bad"), (&id, &grant, complete(&failed("bad")))).await;
    assert_eq!(ended, Ok(Settled::Dead));
    t.crash().await;
    assert_eq!((t.browse(&jobs).await.len(), t.browse(&dead).await.len()), (0, 1));
    assert_eq!(replayed(&t.claim(ask(&id, "other")).await), Some(&failed("bad")));
}

pub(crate) async fn a_stale_token_blocks_the_settle(mut t: Trial) {
    let (jobs, got, id, _) = at_work(&t).await;
    let zombie = t.grant(ask_for(&jobs, &got, "worker-1")).await;
    t.end(&id, &zombie.token, ClaimEnding::Doubt).await.unwrap();
    let holder = t.grant(ask(&id, "worker-2")).await;
    let dead = Settlement::Reject { reason: "bad".into() };
    for (settlement, ending) in [
        (Settlement::Ack, complete(&done("zombie"))),
        (retry("again"), ClaimEnding::Release),
        (dead, complete(&failed("bad"))),
        (Settlement::Defer { after_ms: 0 }, ClaimEnding::Release),
        (Settlement::Park { reason: "?".into() }, ClaimEnding::Doubt),
    ] {
        let ended = settle_with(&t, &jobs, &got, settlement.clone(), (&id, &zombie, ending)).await;
        assert_eq!(ended, Err(SettleError::Claim(TokenError::Stale)), "{settlement:?}");
        let view = t.browse(&jobs).await.remove(0);
        assert_eq!((view.state, view.attempts), (MessageState::InFlight, 1), "{settlement:?}");
        let view = t.entry(&id).await.expect("an entry");
        assert_eq!((view.state, view.fence), (EntryState::Processing, holder.fence), "{settlement:?}");
    }
    t.crash().await;
    assert_eq!(t.browse(&jobs).await[0].state, MessageState::InFlight);
    t.none(&jobs).await;
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &holder, complete(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked), "the delivery was left as it was");
}

pub(crate) async fn a_claim_that_is_gone_or_has_ended_blocks_the_settle(t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    t.end(&id, &grant.token, complete(&done("paid"))).await.unwrap();
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done("other")))).await;
    assert_eq!(ended, Err(SettleError::Claim(TokenError::Ended)));
    assert_eq!(t.browse(&jobs).await[0].state, MessageState::InFlight);
    let gone = EntryId::of_queue(&jobs, IdempotencyKey::new("gone").unwrap());
    let released = t.grant(ask(&gone, "worker-1")).await;
    t.end(&gone, &released.token, ClaimEnding::Release).await.unwrap();
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&gone, &released, ClaimEnding::Release)).await;
    assert_eq!(ended, Err(SettleError::Claim(TokenError::Gone)));
    assert_eq!(t.browse(&jobs).await[0].state, MessageState::InFlight);
    // A lost response: the completion was recorded, but the client did not get the result.
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done("paid")))).await;
    assert_eq!(ended, Ok(Settled::Acked), "the same completion again");
    assert!(t.browse(&jobs).await.is_empty());
}

pub(crate) async fn a_stale_receipt_does_not_block_the_completion(mut t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    t.pass(LEASE_MS).await;
    let newer = t.one(&jobs).await;
    assert_eq!(newer.attempt, 2, "the lease of the delivery ran out, the claim's did not");
    let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done("paid")))).await;
    assert_eq!(ended, Err(SettleError::Stale));
    assert_eq!(t.browse(&jobs).await[0].state, MessageState::InFlight, "the newer delivery has it");
    t.crash().await;
    assert_eq!(replayed(&t.claim(ask_for(&jobs, &newer, "worker-2")).await), Some(&done("paid")));
    t.ack(&jobs, &newer).await;
}

pub(crate) async fn a_settle_repeated_after_a_lost_answer_keeps_the_outcome(t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    for expected in [Ok(Settled::Acked), Err(SettleError::Gone)] {
        let ended =
            settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done("paid")))).await;
        assert_eq!(ended, expected);
        assert_eq!(t.entry(&id).await.expect("an entry").outcome, Some(done("paid")));
    }
}

pub(crate) async fn batches_end_each_claim_for_itself(mut t: Trial) {
    let jobs = t.create("jobs", once()).await;
    for key in ["a", "b", "c", "d"] {
        t.send(&jobs, keyed(key)).await;
    }
    let got = t.receive(&jobs, 4).await;
    let mut batch = Vec::new();
    for (n, d) in got.iter().enumerate() {
        let (id, grant) = (entry_of(&jobs, d), t.grant(ask_for(&jobs, d, "worker")).await);
        if n == 1 {
            t.end(&id, &grant.token, ClaimEnding::Doubt).await.unwrap();
            t.grant(ask(&id, "other")).await;
        }
        // The third is settled without its claim.
        let claim = (n != 2).then(|| ends(&id, &grant.token, complete(&done(&n.to_string()))));
        batch.push(Settle { claim, ..Settle::ack(d.receipt.clone()) });
    }
    let answers = settle_all(&t, &jobs, batch).await;
    let stale = Err(SettleError::Claim(TokenError::Stale));
    assert_eq!(answers, [Ok(Settled::Acked), stale, Ok(Settled::Acked), Ok(Settled::Acked)]);
    t.crash().await;
    let states: Vec<_> = {
        let mut states = Vec::new();
        for d in &got {
            states.push(t.state(&entry_of(&jobs, d)).await);
        }
        states
    };
    let (held, paid) = (Some(EntryState::Processing), Some(EntryState::Completed));
    assert_eq!(states, [paid, held, held, paid]);
    assert_eq!(t.browse(&jobs).await.len(), 1);
}

pub(crate) async fn a_fifo_group_goes_on_when_its_claim_is_completed(t: Trial) {
    let jobs =
        t.create("jobs.fifo", QueueConfig { tier: Tier::EffectivelyOnce, ..crate::values::fifo_config() });
    let jobs = jobs.await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    for body in ["a", "b"] {
        let got = t.receive(&jobs, 1).await.remove(0);
        assert_eq!(got.body, body);
        let (id, grant) = (entry_of(&jobs, &got), t.grant(ask_for(&jobs, &got, "worker")).await);
        let ended = settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, complete(&done(body)))).await;
        assert_eq!(ended, Ok(Settled::Acked));
    }
}

pub(crate) async fn a_message_parked_in_doubt_goes_on_when_it_is_resolved(mut t: Trial) {
    for (name, as_) in [("paid", happened(&done("seen"))), ("nothing", Resolution::Absent)] {
        let jobs = t.create(name, once()).await;
        t.send(&jobs, keyed("order-7")).await;
        let got = t.one(&jobs).await;
        let request = ask_for(&jobs, &got, "worker");
        let grant = t.grant(ClaimRequest { on_doubt: hapax_core::OnDoubt::Park, ..request }).await;
        let (id, park) = (entry_of(&jobs, &got), Settlement::Park { reason: "panicked".into() });
        let ended = settle_with(&t, &jobs, &got, park, (&id, &grant, ClaimEnding::Doubt)).await;
        assert_eq!(ended, Ok(Settled::Parked));
        t.crash().await;
        t.none(&jobs).await;
        t.resolve(&id, as_.clone()).await.unwrap();
        t.crash().await;
        let back = t.one(&jobs).await;
        assert_eq!((back.id, back.attempt), (got.id, 1), "{name}");
        let claim = t.claim(ask_for(&jobs, &back, "worker-2")).await;
        match as_ {
            Resolution::Absent => assert!(matches!(claim, hapax_core::Claim::Granted(_)), "{claim:?}"),
            Resolution::Completed { .. } => assert_eq!(replayed(&claim), Some(&done("seen"))),
        }
    }
}

/// The decision may come after the retention has ended: the message is delivered all the same.
pub(crate) async fn a_message_parked_in_doubt_beyond_its_retention_continues_when_resolved(mut t: Trial) {
    for (name, as_) in [("paid", happened(&done("seen"))), ("nothing", Resolution::Absent)] {
        let jobs = t.create(name, QueueConfig { retention_ms: 60_000, ..once() }).await;
        t.send(&jobs, keyed("order-7")).await;
        let got = t.one(&jobs).await;
        let request = ask_for(&jobs, &got, "worker");
        let grant = t.grant(ClaimRequest { on_doubt: hapax_core::OnDoubt::Park, ..request }).await;
        let (id, park) = (entry_of(&jobs, &got), Settlement::Park { reason: "panicked".into() });
        let ended = settle_with(&t, &jobs, &got, park, (&id, &grant, ClaimEnding::Doubt)).await;
        assert_eq!(ended, Ok(Settled::Parked));
        t.advance(200_000).await;
        t.quiet().await;
        t.none(&jobs).await;
        t.resolve(&id, as_).await.unwrap();
        t.crash().await;
        t.advance(59_000).await;
        t.quiet().await;
        assert_eq!(t.one(&jobs).await.id, got.id, "{name}");
    }
}

pub(crate) async fn every_message_parked_for_an_entry_goes_on_and_no_other(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    for key in ["order-7", "order-7", "order-8"] {
        t.send(&jobs, keyed(key)).await;
    }
    let got = t.receive(&jobs, 3).await;
    let parks = |d: &Delivery, by: &str| ClaimRequest {
        on_doubt: hapax_core::OnDoubt::Park,
        ..ask_for(&jobs, d, by)
    };
    let first = t.grant(parks(&got[0], "worker-1")).await;
    let other = t.grant(parks(&got[2], "worker-3")).await;
    let (id, other_id) = (entry_of(&jobs, &got[0]), entry_of(&jobs, &got[2]));
    t.end(&id, &first.token, ClaimEnding::Doubt).await.unwrap();
    t.end(&other_id, &other.token, ClaimEnding::Doubt).await.unwrap();
    let met = t.claim(parks(&got[1], "worker-2")).await;
    assert!(matches!(met, hapax_core::Claim::InDoubt { .. }), "{met:?}");
    for d in &got {
        let parked = t.settle(&jobs, d, Settlement::Park { reason: "in doubt".into() }).await;
        assert_eq!(parked, Ok(Settled::Parked));
    }
    t.resolve(&id, happened(&done("seen"))).await.unwrap();
    let back = t.receive(&jobs, 10).await;
    let mut ids: Vec<_> = back.iter().map(|d| d.id).collect();
    ids.sort_unstable();
    let mut expected = vec![got[0].id, got[1].id];
    expected.sort_unstable();
    assert_eq!(ids, expected, "both duplicates, and not the other order");
    assert_eq!(t.stats(&jobs).await.parked, 1);
}

/// More than a store releases in one step.
pub(crate) async fn many_messages_parked_for_an_entry_all_go_on(t: Trial) {
    const MESSAGES: usize = 250;
    const BATCH: usize = 50;
    let jobs = t.create("jobs", QueueConfig { lease_ms: LONG_LEASE_MS, ..once() }).await;
    let mut got = Vec::new();
    for _ in 0..MESSAGES / BATCH {
        t.send_batch(&jobs, vec![keyed("order-7"); BATCH]).await;
        got.extend(t.receive(&jobs, BATCH).await);
    }
    assert_eq!(got.len(), MESSAGES);
    let id = entry_of(&jobs, &got[0]);
    let grant = t.grant(parking(&id, "worker-1")).await;
    t.end(&id, &grant.token, ClaimEnding::Doubt).await.unwrap();
    for batch in got.chunks(BATCH) {
        let park = |d: &Delivery| Settle {
            parked_for: Some(id.clone()),
            ..Settle::new(d.receipt.clone(), Settlement::Park { reason: "in doubt".into() })
        };
        let parked =
            t.within("settle", t.store().settle(&jobs, batch.iter().map(park).collect())).await.unwrap();
        assert!(parked.iter().all(|parked| *parked == Ok(Settled::Parked)), "{parked:?}");
    }
    t.resolve(&id, Resolution::Absent).await.unwrap();
    let mut back = 0;
    while back < MESSAGES {
        let released = t.receive_with(&jobs, receive_waiting(BATCH)).await.len();
        assert!(released > 0, "only {back} of {MESSAGES} came back");
        back += released;
    }
    assert_eq!(t.stats(&jobs).await.parked, 0);
}

/// Not only a decision: the holder may only have been asleep, and another may take over.
pub(crate) async fn whatever_ends_a_doubt_lets_parked_messages_continue(t: Trial) {
    for ends in ["completed-late", "released-late", "renewed", "claimed-again", "taken-over", "forgotten"] {
        let jobs = t.create(ends, once()).await;
        t.send(&jobs, keyed("order-7")).await;
        let got = t.one(&jobs).await;
        let id = entry_of(&jobs, &got);
        let parks = |d: &Delivery, by: &str| ClaimRequest {
            on_doubt: hapax_core::OnDoubt::Park,
            lease_ms: LEASE_MS,
            ..ask_for(&jobs, d, by)
        };
        let sleeper = t.grant(parks(&got, "sleeper")).await;
        t.pass(LEASE_MS).await;
        let again = t.one(&jobs).await;
        let met = t.claim(parks(&again, "next")).await;
        assert!(matches!(met, hapax_core::Claim::InDoubt { .. }), "{ends}: {met:?}");
        let parked = t.settle(&jobs, &again, Settlement::Park { reason: "in doubt".into() }).await;
        assert_eq!(parked, Ok(Settled::Parked), "{ends}");
        t.none(&jobs).await;
        match ends {
            "completed-late" => t.end(&id, &sleeper.token, complete(&done("paid"))).await.unwrap(),
            "released-late" => t.end(&id, &sleeper.token, ClaimEnding::Release).await.unwrap(),
            "renewed" => drop(t.renew(&id, &sleeper.token, LONG_LEASE_MS).await.unwrap()),
            "claimed-again" => drop(t.grant(ask(&id, "sleeper")).await),
            "taken-over" => drop(t.grant(ask(&id, "heir")).await),
            _ => t.forget(&id).await.unwrap(),
        }
        assert_eq!(t.one(&jobs).await.id, got.id, "{ends}");
    }
}

/// The entry was decided about between the claim's answer and the park: nothing would wake the message any more.
pub(crate) async fn a_message_is_parked_only_while_its_entry_is_in_doubt(t: Trial) {
    let decisions = [Some(happened(&done("seen"))), Some(Resolution::Absent), None];
    for (name, decision) in ["paid", "nothing", "undecided"].into_iter().zip(decisions) {
        let jobs = t.create(name, once()).await;
        for _ in 0..2 {
            t.send(&jobs, keyed("order-7")).await;
        }
        let got = t.receive(&jobs, 2).await;
        let id = entry_of(&jobs, &got[0]);
        let grant = t.grant(parking(&id, "worker-1")).await;
        t.end(&id, &grant.token, ClaimEnding::Doubt).await.unwrap();
        for d in &got {
            let request = ask_for(&jobs, d, "worker-2");
            let met = t.claim(ClaimRequest { on_doubt: hapax_core::OnDoubt::Park, ..request }).await;
            assert!(matches!(met, hapax_core::Claim::InDoubt { .. }), "{met:?}");
        }
        if let Some(decision) = &decision {
            t.resolve(&id, decision.clone()).await.unwrap();
        }
        let park = |d: &Delivery| Settle {
            parked_for: Some(id.clone()),
            ..Settle::new(d.receipt.clone(), Settlement::Park { reason: "in doubt".into() })
        };
        let settled = settle_all(&t, &jobs, got.iter().map(park).collect()).await;
        if decision.is_none() {
            assert_eq!(settled, [Ok(Settled::Parked), Ok(Settled::Parked)]);
            continue;
        }
        let returned = Settled::Returned { after_ms: 0 };
        assert_eq!(settled, [Ok(returned), Ok(returned)], "{name}");
        let back = t.receive(&jobs, 2).await;
        assert_eq!(back.len(), 2, "{name}: both go on");
        assert!(back.iter().all(|d| d.attempt == 1), "{name}: no attempt was counted");
    }
}

pub(crate) async fn a_waiting_receive_wakes_when_a_doubt_is_resolved(t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    let park = Settlement::Park { reason: "?".into() };
    settle_with(&t, &jobs, &got, park, (&id, &grant, ClaimEnding::Doubt)).await.unwrap();
    let waits = t.wait(&jobs, crate::values::receive_waiting(1)).await;
    t.resolve(&id, Resolution::Absent).await.unwrap();
    assert_eq!(t.woken(waits).await[0].id, got.id);
}

pub(crate) async fn a_waiting_claim_wakes_when_a_settle_completes_it(t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    let waits = t.claim_waiting(ClaimRequest { wait_ms: 20_000, ..parking(&id, "other") }).await;
    assert!(!waits.is_over());
    let ending = ClaimEnding::Complete { outcome: done("paid"), ttl_ms: TTL_MS };
    settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, ending)).await.unwrap();
    assert_eq!(replayed(&t.answered(waits).await), Some(&done("paid")));
}

pub(crate) async fn a_claim_for_a_delivery_that_is_not_there_is_a_claim(t: Trial) {
    let (jobs, got, id, grant) = at_work(&t).await;
    settle_with(&t, &jobs, &got, Settlement::Ack, (&id, &grant, ClaimEnding::Release)).await.unwrap();
    // The receipt belongs to a deleted message; the key can still be claimed.
    let grant = t.grant(ask_for(&jobs, &got, "late")).await;
    t.lasts(grant.lease_ms, LONG_LEASE_MS);
    t.end(&id, &grant.token, complete(&done("paid"))).await.unwrap();
}

/// The claim of a settle need not be that of its own queue: a handler may claim in a scope of its own.
pub(crate) async fn a_stale_claim_of_any_scope_blocks_the_settle(t: Trial) {
    let jobs = t.create("jobs", once()).await;
    for n in 0..6 {
        t.send(&jobs, keyed(&format!("order-{n}"))).await;
        let got = t.one(&jobs).await;
        let id = EntryId::new(format!("shop-{n}").parse().unwrap(), got.key.clone());
        let first = t.grant(ask(&id, "worker-1")).await;
        let ledger = t.harness.ledger().expect("the case needs a ledger");
        assert_eq!(ledger.end(vec![ends(&id, &first.token, ClaimEnding::Release)]).await.unwrap(), [Ok(())]);
        let second = t.grant(ask(&id, "worker-2")).await;
        let settle = async |grant: &Grant| {
            settle_with(&t, &jobs, &got, Settlement::Ack, (&id, grant, complete(&done("paid")))).await
        };
        assert_eq!(settle(&first).await, Err(SettleError::Claim(TokenError::Stale)), "shop-{n}");
        assert_eq!(t.stats(&jobs).await.in_flight, 1, "shop-{n}: it is not acked");
        assert_eq!(settle(&second).await, Ok(Settled::Acked), "shop-{n}");
    }
}
