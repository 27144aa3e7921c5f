//! A process that uses the store under test and observes it.

use std::sync::Arc;

use hapax_core::store::SharedStore;
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, Delivery, EndClaim, EntryId, Grant, IdempotencyKey, Json, Ledger as _,
    ManualClock, MessageId, Owner, QueueName, QueueStore as _, Receive, RecordedOutcome, Settle, SettleError,
    Settled, Settlement,
};
use hapax_observe::advice::{Known, of_store};
use hapax_observe::{ObservedStore, Observer, Story, story};

use crate::trial::Trial;

/// The processes of a case have one clock, which is moved together with that of the store.
pub(super) struct Processes {
    pub(super) t: Trial,
    clock: Arc<ManualClock>,
}

impl Processes {
    pub(super) fn new(t: Trial) -> Self {
        Self { t, clock: Arc::new(ManualClock::at_ms(1_800_000_000_000)) }
    }

    fn observing(&self, store: SharedStore) -> Process {
        let observer = Arc::new(Observer::with_clock(self.clock.clone()));
        Process { store: ObservedStore::with_observer(store, observer) }
    }

    /// A process, with nothing in its memory.
    pub(super) fn first(&self) -> Process {
        self.observing(self.t.harness.whole().expect("a store as a whole"))
    }

    /// One with its own handle to the same store.
    pub(super) fn second(&self) -> Process {
        self.observing(self.t.harness.second_whole().expect("a second handle"))
    }

    pub(super) async fn pass(&self, ms: u64) {
        self.clock.advance_ms(ms);
        self.t.pass(ms).await;
    }
}

pub(super) struct Process {
    pub(super) store: ObservedStore,
}

impl Process {
    /// Receives the only available message as this consumer.
    pub(super) async fn receive(&self, queue: &QueueName, consumer: &str) -> Delivery {
        let receive = Receive { consumer: Some(consumer.to_owned()), wait_ms: Some(0), ..Receive::default() };
        let mut got = self.store.receive(queue, receive).await.expect("receive");
        assert_eq!(got.len(), 1, "one message for {consumer}");
        got.remove(0)
    }

    pub(super) async fn settle(
        &self,
        queue: &QueueName,
        delivery: &Delivery,
        settlement: Settlement,
    ) -> Result<Settled, SettleError> {
        let settle = Settle::new(delivery.receipt.clone(), settlement);
        self.store.settle(queue, vec![settle]).await.expect("settle").remove(0)
    }

    pub(super) async fn ack(&self, queue: &QueueName, delivery: &Delivery) {
        assert_eq!(self.settle(queue, delivery, Settlement::Ack).await, Ok(Settled::Acked));
    }

    pub(super) async fn claim(&self, queue: &QueueName, delivery: &Delivery, owner: &str) -> Claim {
        let id = EntryId::of_queue(queue, delivery.key.clone());
        let request = ClaimRequest {
            delivery: Some((queue.clone(), delivery.receipt.clone())),
            ..ClaimRequest::new(id, Owner::new(owner).expect("an owner"), 60_000)
        };
        self.store.claim(vec![request]).await.expect("claim").remove(0).expect("an answer")
    }

    pub(super) async fn granted(&self, queue: &QueueName, delivery: &Delivery, owner: &str) -> Grant {
        match self.claim(queue, delivery, owner).await {
            Claim::Granted(grant) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub(super) async fn end(
        &self,
        queue: &QueueName,
        delivery: &Delivery,
        grant: Grant,
        ending: ClaimEnding,
    ) {
        let id = EntryId::of_queue(queue, delivery.key.clone());
        let end = EndClaim { id, token: grant.token, ending };
        self.store.end(vec![end]).await.expect("end").remove(0).expect("the claim is held");
    }

    /// Tells a message's life, once everything is looked up and written.
    pub(super) async fn story(&self, queue: &QueueName, id: MessageId) -> Story {
        self.try_story(queue, id).await.expect("a story")
    }

    pub(super) async fn try_story(&self, queue: &QueueName, id: MessageId) -> Option<Story> {
        self.store.write_history().await;
        let observer = Some(&**self.store.observer());
        story::of_message(&self.store, observer, queue, id).await.expect("the store can be asked")
    }

    pub(super) async fn stories_of_key(&self, queue: &QueueName, key: &IdempotencyKey) -> Vec<Story> {
        let observer = Some(&**self.store.observer());
        story::of_key(&self.store, observer, queue, key).await.expect("the store can be asked")
    }

    /// What this process advises about a queue: the message of the finding with this code.
    pub(super) async fn advice(&self, queue: &QueueName, code: &str) -> Option<String> {
        self.store.write_history().await;
        let known = Known { observer: Some(self.store.observer()), ..Known::default() };
        let advice = of_store(&self.store, &known, true).await.expect("the store can be asked");
        let (findings, not_seen) = advice.of_queue(queue);
        assert_eq!(not_seen, [""; 0], "everything could be looked at");
        findings.into_iter().find(|finding| finding.code == code).map(|finding| finding.message)
    }
}

pub(super) fn completed() -> ClaimEnding {
    let outcome = RecordedOutcome::done(Json::of("paid").expect("JSON"));
    ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 }
}

/// Checks that a story has these words, and not those.
#[track_caller]
pub(super) fn says(story: &Story, words: &[&str], not: &[&str]) {
    let text = story.because.join("\n");
    for word in words {
        assert!(text.contains(word), "{word:?} is not in:\n{text}\n{:#?}", story.moments);
    }
    for word in not {
        assert!(!text.contains(word), "{word:?} is in:\n{text}\n{:#?}", story.moments);
    }
}
