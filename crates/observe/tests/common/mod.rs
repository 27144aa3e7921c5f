//! An observed embedded store whose time the test moves.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::sync::Arc;

use hapax_core::{
    Claim, ClaimRequest, Delivery, EntryId, Grant, ManualClock, NewMessage, Owner, QueueConfig, QueueName,
    Receive, Settle, SettleError, Settled, Settlement,
};
use hapax_core::{Ledger as _, MessageId, QueueAdmin as _, QueueStore as _};
use hapax_embedded::{Embedded, Options};
use hapax_observe::{ObservedStore, Observer, Story, story};
use tempfile::TempDir;

pub struct Rig {
    pub clock: Arc<ManualClock>,
    pub store: ObservedStore,
    pub queue: QueueName,
    folder: TempDir,
}

fn open(folder: &TempDir, clock: &Arc<ManualClock>) -> ObservedStore {
    let options = Options { clock: clock.clone(), ..Options::default() };
    let store = Arc::new(Embedded::open(folder.path().join("store"), options).unwrap());
    ObservedStore::with_observer(store, Arc::new(Observer::with_clock(clock.clone())))
}

impl Rig {
    pub async fn new(config: QueueConfig) -> Self {
        let rig = Self::shared(config).await;
        Self { store: rig.store.only_process(), ..rig }
    }

    /// Observes as if other processes used the store, too.
    pub async fn shared(config: QueueConfig) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let store = open(&folder, &clock);
        let name = if config.is_fifo() { "jobs.fifo" } else { "jobs" };
        let queue = QueueName::new(name).unwrap();
        store.create_queue(&queue, config).await.unwrap();
        Self { clock, store, queue, folder }
    }

    /// Closes the store and opens it again, with nothing in memory.
    pub async fn restart(&mut self) {
        self.store.close().await.unwrap();
        self.store = open(&self.folder, &self.clock).only_process();
    }

    pub async fn send(&self, message: NewMessage) -> MessageId {
        self.store.send(&self.queue, vec![message]).await.unwrap().remove(0).unwrap().id
    }

    pub async fn receive(&self, consumer: &str) -> Option<Delivery> {
        let receive = Receive { consumer: Some(consumer.to_owned()), wait_ms: Some(0), ..Receive::default() };
        self.store.receive(&self.queue, receive).await.unwrap().pop()
    }

    pub async fn settle(&self, delivery: &Delivery, settlement: Settlement) -> Result<Settled, SettleError> {
        let settle = Settle::new(delivery.receipt.clone(), settlement);
        self.store.settle(&self.queue, vec![settle]).await.unwrap().remove(0)
    }

    pub async fn ack(&self, delivery: &Delivery) -> Result<Settled, SettleError> {
        self.settle(delivery, Settlement::Ack).await
    }

    /// Claims the key of a delivery, as its worker does.
    pub async fn claim(&self, delivery: &Delivery, owner: &str) -> Result<Claim, hapax_core::ClaimError> {
        let id = EntryId::of_queue(&self.queue, delivery.key.clone());
        let request = ClaimRequest {
            delivery: Some((self.queue.clone(), delivery.receipt.clone())),
            ..ClaimRequest::new(id, Owner::new(owner).unwrap(), 60_000)
        };
        self.store.claim(vec![request]).await.unwrap().remove(0)
    }

    pub async fn granted(&self, delivery: &Delivery, owner: &str) -> Grant {
        match self.claim(delivery, owner).await {
            Ok(Claim::Granted(grant)) => grant,
            other => panic!("not granted: {other:?}"),
        }
    }

    pub async fn story(&self, id: MessageId) -> Story {
        let observer = Some(&**self.store.observer());
        story::of_message(&self.store, observer, &self.queue, id).await.unwrap().expect("a story")
    }

    /// Codes of the advisor's findings about the queue and the store that do not depend on its configuration.
    pub async fn advice(&self) -> Vec<(String, String, String)> {
        let known =
            hapax_observe::advice::Known { observer: Some(self.store.observer()), ..Default::default() };
        let advice = hapax_observe::advice::of_store(&self.store, &known, true).await.unwrap();
        assert_eq!(advice.not_seen, []);
        let found = advice.findings.into_iter().map(|located| located.finding);
        found.map(|finding| (finding.code.into_owned(), finding.message, finding.remedy)).collect()
    }
}
