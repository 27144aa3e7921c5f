//! The rows of entries and messages of the same store, beyond what the conformance suite can see: what is pruned, and
//! which message is linked to which entry.

#[path = "common/ledger.rs"]
mod ledger;

use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, Delivery, EntryId, Ledger, NewMessage, QueueAdmin, QueueConfig,
    QueueName, QueueStore, Settle, Settled, Settlement,
};
use ledger::*;

const HOUR_MS: u64 = 3_600_000;

fn entry_of(queue: &QueueName, delivery: &Delivery) -> EntryId {
    EntryId::of_queue(queue, delivery.key.clone())
}

/// A claim for a delivery, as a worker makes it.
fn for_delivery(queue: &QueueName, delivery: &Delivery, owner: &str) -> ClaimRequest {
    let request = ClaimRequest::new(entry_of(queue, delivery), owner.parse().unwrap(), LEASE_MS);
    ClaimRequest { delivery: Some((queue.clone(), delivery.receipt.clone())), ..request }
}

async fn completed(rig: &Rig, id: &EntryId) -> bool {
    let request = ClaimRequest::new(id.clone(), "someone".parse().unwrap(), LEASE_MS);
    match rig.claim(request).await {
        Claim::Completed { .. } => true,
        Claim::Granted(grant) => {
            rig.end(ending(id, &grant, ClaimEnding::Release)).await.unwrap();
            false
        }
        other => panic!("{other:?}"),
    }
}

/// Advances the clock and lets the store process its timers.
async fn pass(rig: &Rig, ms: u64) {
    rig.clock.advance_ms(ms);
    // Two waves: the first may find that there is more to do.
    rig.store.status().await.unwrap();
    rig.store.status().await.unwrap();
}

#[tokio::test]
async fn an_entry_whose_time_is_over_is_gone_for_everyone_and_pruned_soon() {
    let rig = Rig::new();
    let names: Vec<_> = (0..1_200).map(|number| format!("k{number}")).collect();
    for names in names.chunks(600) {
        let claims = rig.store.claim(names.iter().map(|name| by("a", name)).collect()).await.unwrap();
        let end = |(name, claim): (&String, Result<Claim, _>)| match claim {
            Ok(Claim::Granted(grant)) => ending(&id(name), &grant, complete("done")),
            other => panic!("{other:?}"),
        };
        let ended = rig.store.end(names.iter().zip(claims).map(end).collect()).await.unwrap();
        assert!(ended.iter().all(Result::is_ok));
    }
    rig.clock.advance_ms(TTL_MS - 1);
    assert!(completed(&rig, &id("k0")).await);
    rig.clock.advance_ms(1);
    // Whether it was pruned already does not matter.
    for number in [0, 500, 1_199] {
        assert_eq!(rig.store.entry(&id(&format!("k{number}"))).await.unwrap(), None);
    }
    let filter = hapax_core::EntryFilter { limit: 1_000, ..Default::default() };
    assert_eq!(rig.store.entries(filter).await.unwrap().items, []);
    for _ in 0..100 {
        pass(&rig, 1_000).await;
        if rig.store.ledger_stats().await.unwrap().entries == 0 {
            break;
        }
    }
    let stats = rig.store.ledger_stats().await.unwrap();
    assert_eq!((stats.entries, stats.pruned), (0, 1_200));
    assert_eq!(rig.rows("SELECT count(*) FROM ledger"), 0);
}

#[tokio::test]
async fn a_lapsed_claim_that_may_be_taken_over_is_pruned_and_a_parked_one_is_not() {
    let mut rig = Rig::new();
    rig.granted(by("a", "retry")).await;
    rig.granted(parking(by("a", "park"))).await;
    pass(&rig, LEASE_MS + hapax_core::ledger::DOUBT_RETENTION_MS - 1).await;
    assert!(rig.store.entry(&id("retry")).await.unwrap().is_some());
    pass(&rig, 2_000).await;
    assert_eq!(rig.store.entry(&id("retry")).await.unwrap(), None);
    assert_eq!(rig.rows("SELECT count(*) FROM ledger"), 1);
    rig.reopen();
    pass(&rig, 366 * 24 * HOUR_MS).await;
    assert!(rig.store.entry(&id("park")).await.unwrap().is_some());
}

#[tokio::test]
async fn an_entry_of_a_live_message_is_never_pruned_and_is_gone_with_it() {
    let mut rig = Rig::new();
    let queue = rig.once_queue("pay", QueueConfig::sqs()).await;
    rig.send(&queue, NewMessage::new("x").idempotency_key(&key("order-7"))).await;
    let delivery = rig.receive(&queue).await.unwrap();
    let entry = entry_of(&queue, &delivery);
    let grant = rig.granted(for_delivery(&queue, &delivery, "a")).await;
    rig.end(ending(&entry, &grant, complete("paid"))).await.unwrap();

    // Its worker dies before the ack. The entry's time to live passes many times over.
    pass(&rig, TTL_MS + 5 * HOUR_MS).await;
    assert!(completed(&rig, &entry).await);
    rig.reopen();
    pass(&rig, 5 * HOUR_MS).await;
    assert!(completed(&rig, &entry).await);
    let again = rig.receive(&queue).await.unwrap();
    rig.store.settle(&queue, vec![Settle::ack(again.receipt)]).await.unwrap();
    // From here on the time to live counts; it has passed, although the row stays for a while.
    assert_eq!(rig.rows("SELECT count(*) FROM ledger"), 1);
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 0);
    assert_eq!(rig.store.entry(&entry).await.unwrap(), None);
    // A new message with the same key does not revive it.
    rig.send(&queue, NewMessage::new("y").idempotency_key(&key("order-7"))).await;
    assert!(!completed(&rig, &entry).await);
}

#[tokio::test]
async fn only_messages_that_need_an_entry_are_linked_and_no_link_outlives_its_message() {
    let rig = Rig::new();
    let plain = QueueName::new("plain").unwrap();
    rig.store.create_queue(&plain, QueueConfig::sqs()).await.unwrap();
    for _ in 0..3 {
        rig.send(&plain, NewMessage::new("x")).await;
    }
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 0);
    let delivery = rig.receive(&plain).await.unwrap();
    let grant = rig.granted(for_delivery(&plain, &delivery, "a")).await;
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 1);
    let claim = Some(ending(&entry_of(&plain, &delivery), &grant, complete("done")));
    let settle = Settle { receipt: delivery.receipt, settlement: Settlement::Ack, claim, parked_for: None };
    assert_eq!(rig.store.settle(&plain, vec![settle]).await.unwrap(), [Ok(Settled::Acked)]);
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 0);

    let once = rig.once_queue("once", QueueConfig::sqs()).await;
    for _ in 0..3 {
        rig.send(&once, NewMessage::new("x")).await;
    }
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 3);
    rig.store.purge(&once).await.unwrap();
    for _ in 0..100 {
        rig.store.status().await.unwrap();
        if rig.rows("SELECT count(*) FROM message") == 2 {
            break;
        }
    }
    assert_eq!(rig.rows("SELECT count(*) FROM keyed"), 0);
}

#[tokio::test]
async fn a_message_is_linked_to_the_key_that_its_worker_will_find() {
    let rig = Rig::new();
    let pointer = QueueConfig { key_pointer: Some("/order".into()), ..QueueConfig::sqs() };
    let queue = rig.once_queue("pay", pointer).await;
    let by_body = NewMessage::new(r#"{"order": 42}"#);
    let by_dedup = NewMessage::new("x").dedup("d-1".parse().unwrap());
    let by_id = NewMessage::new("y");
    for message in [by_body.clone().idempotency_key(&key("attribute")), by_body, by_dedup, by_id] {
        rig.send(&queue, message).await;
        let delivery = rig.receive(&queue).await.unwrap();
        let entry = EntryId::of_queue(&queue, delivery.key.clone());
        let hash = entry.hash().to_le_bytes();
        let linked: i64 = rig
            .db()
            .query_row("SELECT count(*) FROM keyed WHERE entry = ?1", [&hash[..]], |row| row.get(0))
            .unwrap();
        assert_eq!(linked, 1, "{entry}");
    }
}
