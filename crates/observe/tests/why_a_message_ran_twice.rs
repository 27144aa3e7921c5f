//! The chain of causes is told for each way in which a message can be delivered again, held back or refused; also after
//! the message is gone and the process was restarted.

mod common;

use common::Rig;
use hapax_core::{
    Claim, ClaimEnding, DeadLetterPolicy, DedupId, EndClaim, EntryId, Fingerprint, Json, NewMessage, Owner,
    QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, RecordedOutcome, Settle, SettleError, Settled,
    Settlement,
};
use hapax_core::{ClaimRequest, Ledger as _};
use hapax_observe::{Event, Story, story};

fn config() -> QueueConfig {
    let mut config = QueueConfig { lease_ms: 1_000, ..QueueConfig::default() };
    config.retry = hapax_core::policy::RetryPolicy::exponential(0, 0);
    config
}

#[track_caller]
fn says(story: &Story, words: &[&str]) {
    let text = story.because.join("\n");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in:\n{text}");
    }
}

#[tokio::test]
async fn a_lease_that_is_shorter_than_the_work() {
    let mut rig = Rig::new(config()).await;
    let id = rig.send(NewMessage::new("a").idempotency_key(&"order-7".parse().unwrap())).await;
    let slow = rig.receive("anna").await.unwrap();
    rig.clock.advance_ms(1_500);
    let second = rig.receive("bert").await.expect("the lease has run out");
    says(
        &rig.story(id).await,
        &["Delivery 1 went to anna", "Nothing more was heard of anna", "A consumer holds it now"],
    );
    rig.clock.advance_ms(300);
    assert_eq!(rig.ack(&second).await, Ok(Settled::Acked));
    assert_eq!(rig.ack(&slow).await, Err(SettleError::Gone));

    let told = rig.story(id).await;
    says(
        &told,
        &[
            "It was delivered 2 times",
            "its lease of 1.0 s ran out before it was settled",
            "anna was still at work: it settled after 1.8 s, too late",
            "It is done: it was acked.",
        ],
    );
    assert_eq!((told.state, told.key.as_ref().unwrap().as_str()), (None, "order-7"));
    let events: Vec<_> = told.moments.iter().map(|moment| &moment.event).collect();
    assert!(
        matches!(
            events[..],
            [
                Event::Delivered { delivery: 1, .. },
                Event::Expired { delivery: 1, held_ms: 1_000 },
                Event::Delivered { delivery: 2, .. },
                Event::Acked { delivery: Some(2), held_ms: Some(300) },
                Event::Refused { delivery: 1, held_ms: 1_800, .. },
            ]
        ),
        "{events:?}"
    );
    // Nothing is in memory any more, and the message is gone.
    rig.restart().await;
    assert_eq!(rig.story(id).await, told);
    let by_key = story::of_key(&rig.store, None, &rig.queue, &"order-7".parse().unwrap()).await.unwrap();
    assert_eq!(by_key, [told]);
}

#[tokio::test]
async fn what_was_given_back_died_or_is_parked() {
    let dead = QueueName::new("dead").unwrap();
    let mut policy = QueueConfig { dead_letter: Some(DeadLetterPolicy { queue: dead.clone() }), ..config() };
    policy.retry.max_attempts = 2;
    let rig = Rig::new(config()).await;
    rig.store.create_queue(&dead, QueueConfig::default()).await.unwrap();
    rig.store.set_queue(&rig.queue, policy, None).await.unwrap();

    let id = rig.send(NewMessage::new("a")).await;
    for left in [1, 0] {
        let delivery = rig.receive("anna").await.unwrap();
        let retry = Settlement::Retry { after_ms: None, error: Some("no such card".into()) };
        let settled = rig.settle(&delivery, retry).await.unwrap();
        assert_eq!(settled == Settled::Dead, left == 0);
    }
    says(&rig.story(id).await, &["gave it back: no such card", "It died and went to dead: no such card"]);
    rig.store.purge(&dead).await.unwrap();
    let told = rig.story(id).await.because.join("\n");
    assert!(
        told.contains("went to dead") && !told.contains("is in dead"),
        "it is not there any more: {told}"
    );

    let id = rig.send(NewMessage::new("b")).await;
    let delivery = rig.receive("anna").await.unwrap();
    rig.settle(&delivery, Settlement::Park { reason: "the bank did not answer".into() }).await.unwrap();
    says(&rig.story(id).await, &["It is parked (in-doubt): the bank did not answer"]);
}

#[tokio::test]
async fn a_duplicate_that_was_suppressed_replayed_or_refused() {
    let rig = Rig::new(config()).await;
    let message = || NewMessage::new("a").dedup(DedupId::new("order-7").unwrap());
    let id = rig.send(message()).await;
    assert_eq!(rig.send(message()).await, id, "a duplicate of the first");
    says(&rig.story(id).await, &["A producer sent it again", "It is ready"]);

    // Its first run records an outcome and loses its lease before the ack.
    let first = rig.receive("anna").await.unwrap();
    let grant = rig.granted(&first, "anna-1").await;
    let entry = EntryId::of_queue(&rig.queue, first.key.clone());
    let outcome = RecordedOutcome::done(Json::of("paid").unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    rig.store.end(vec![EndClaim { id: entry, token: grant.token, ending }]).await.unwrap().remove(0).unwrap();
    rig.clock.advance_ms(1_500);
    let second = rig.receive("bert").await.unwrap();
    assert!(matches!(rig.claim(&second, "bert-1").await, Ok(Claim::Completed { .. })));
    rig.ack(&second).await.unwrap();
    says(
        &rig.story(id).await,
        &["Its key had a recorded outcome: the handler was not run again", "happened once"],
    );
    let figures = rig.store.observer().figures(&rig.queue);
    assert_eq!((figures.granted, figures.replayed, figures.repeated_after_expiry), (1, 1, 1), "{figures:?}");
}

#[tokio::test]
async fn a_key_in_progress_in_doubt_or_used_for_another_content() {
    let rig = Rig::new(QueueConfig { lease_ms: 60_000, ..QueueConfig::default() }).await;
    let key = "order-7".parse().unwrap();
    let ids = [
        rig.send(NewMessage::new("a").idempotency_key(&key)).await,
        rig.send(NewMessage::new("b").idempotency_key(&key)).await,
    ];
    let (first, second) = (rig.receive("anna").await.unwrap(), rig.receive("bert").await.unwrap());
    rig.granted(&first, "anna-1").await;
    assert!(matches!(rig.claim(&second, "bert-1").await, Ok(Claim::InProgress { .. })));
    let other = ids.into_iter().find(|id| *id == second.id).unwrap();
    says(&rig.story(other).await, &["Another delivery or request with the same key was at work"]);

    let entry = EntryId::of_queue(&rig.queue, second.key.clone());
    let request = ClaimRequest {
        fingerprint: Some(Fingerprint::new("other").unwrap()),
        delivery: Some((rig.queue.clone(), second.receipt.clone())),
        ..ClaimRequest::new(entry, Owner::new("bert-2").unwrap(), 1_000)
    };
    let answer = rig.store.claim(vec![request]).await.unwrap().remove(0);
    if answer.is_err() {
        says(&rig.story(other).await, &["used before for another content"]);
    }
    assert_eq!(rig.store.observer().figures(&rig.queue).conflicts, 1);
}

#[tokio::test]
async fn an_ordinary_message_leaves_nothing_and_a_waiting_one_says_what_it_waits_for() {
    let rig = Rig::new(config()).await;
    let done = rig.send(NewMessage::new("a")).await;
    let delivery = rig.receive("anna").await.unwrap();
    rig.ack(&delivery).await.unwrap();
    assert_eq!(
        story::of_message(&rig.store, Some(rig.store.observer()), &rig.queue, done).await.unwrap(),
        None
    );
    let waiting = rig.send(NewMessage::new("b")).await;
    says(&rig.story(waiting).await, &["It is ready and waits for a consumer"]);
    rig.store.pause_queue(&rig.queue, "me", None).await.unwrap();
    says(&rig.story(waiting).await, &["The queue is paused"]);
    rig.store.write_history().await;
    let documents =
        hapax_core::Documents::documents(&rig.store, hapax_core::DocumentFilter::default()).await.unwrap();
    assert_eq!(documents.items, [], "nothing unusual happened, so nothing was written");
}

/// Two processes over one store see one life.
#[tokio::test]
async fn what_two_processes_saw_is_one_story() {
    let rig = Rig::new(config()).await;
    let other = hapax_observe::ObservedStore::with_observer(
        std::sync::Arc::new(rig.store.clone()),
        std::sync::Arc::new(hapax_observe::Observer::with_clock(rig.clock.clone())),
    );
    let id = rig.send(NewMessage::new("a")).await;
    let delivery = rig.receive("anna").await.unwrap();
    rig.settle(&delivery, Settlement::Retry { after_ms: Some(0), error: Some("busy".into()) }).await.unwrap();
    rig.store.write_history().await;
    rig.clock.advance_ms(1);
    let receive =
        hapax_core::Receive { consumer: Some("bert".into()), wait_ms: Some(0), ..Default::default() };
    let delivery = other.receive(&rig.queue, receive).await.unwrap().remove(0);
    other.settle(&rig.queue, vec![Settle::ack(delivery.receipt)]).await.unwrap().remove(0).unwrap();
    other.write_history().await;
    let told = story::of_message(&rig.store, None, &rig.queue, id).await.unwrap().unwrap();
    says(&told, &["gave it back: busy", "It is done"]);
    assert_eq!(
        told.moments.iter().filter(|moment| matches!(moment.event, Event::Delivered { .. })).count(),
        2
    );
}
