//! The worker's only input: an adapter exists for queues, and others can be written for brokers.

use std::sync::Arc;

use async_trait::async_trait;

use crate::capabilities::Capabilities;
use crate::error::{SettleError, StoreError};
use crate::message::Delivery;
use crate::name::{MessageId, QueueName, Receipt, Scope};
use crate::queue::QueueConfig;
use crate::store::{Batch, Extend, QueueAdmin, Receive, RemainingLease, Settle, Settled};

/// A [`Source`]'s description of itself. A worker is configured from this alone.
#[derive(Debug, Clone)]
pub struct SourceDescription {
    /// The queue or topic, for messages and logs.
    pub name: String,
    /// The Hapax queue behind it, if there is one. A claim in the same store names it, so that the ledger entry is kept
    /// as long as the message.
    pub queue: Option<QueueName>,
    /// The scope of its idempotency keys in a ledger.
    pub scope: Scope,
    /// Its policy: tier, order, retry, retention, dead letters.
    pub config: QueueConfig,
    /// How long its dead-letter queue keeps messages; `None` without one, and if the one that the policy names is gone.
    pub dead_retention_ms: Option<u64>,
    /// How long a delivery is leased by default. `None`: deliveries have no lease and are held until they are settled
    /// or [`Source::revoked`] returns their receipt.
    pub lease_ms: Option<u64>,
    /// 99th percentile of the time from delivery to settle in the latest minutes, where that is known.
    pub held_p99_ms: Option<u64>,
    /// The features of the store behind it.
    pub capabilities: Capabilities,
}

/// Supplies a worker with deliveries.
#[async_trait]
pub trait Source: Send + Sync {
    /// The source's name, policy and capabilities.
    async fn describe(&self) -> Result<SourceDescription, StoreError>;

    /// The next deliveries. Waits for the first one as long as `receive` asks. If the future is dropped before it is
    /// ready, nothing was leased and no attempt was counted.
    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError>;

    /// Ends deliveries. Safe to repeat after an unknown outcome.
    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError>;

    /// Extends the leases of deliveries: the heartbeat. Not called for a source without leases.
    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError>;

    /// Lets parked messages continue: they were parked for a doubt in another store's ledger that was over by then. Needed
    /// only of a source that can park.
    async fn release(&self, messages: Vec<MessageId>) -> Result<(), StoreError> {
        Err(StoreError::Invalid(format!("this source cannot release its {} parked messages", messages.len())))
    }

    /// Completes when deliveries were taken from this consumer, as those of a revoked partition are, and names them.
    /// The worker stops their handlers, and asks again. Never completes for a source whose deliveries end by their
    /// lease alone.
    async fn revoked(&self) -> Vec<Receipt> {
        std::future::pending().await
    }
}

/// A queue of a store as a [`Source`].
pub struct QueueSource {
    store: Arc<dyn QueueAdmin>,
    queue: QueueName,
}

impl QueueSource {
    /// Receives from `queue`.
    pub fn new(store: Arc<dyn QueueAdmin>, queue: QueueName) -> Self {
        Self { store, queue }
    }
}

#[async_trait]
impl Source for QueueSource {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        let config = self.store.queue(&self.queue).await?.config;
        let dead_retention_ms = match &config.dead_letter {
            Some(dead) => match self.store.queue(&dead.queue).await {
                Ok(dead) => Some(dead.config.retention_ms),
                // The queue can be worked on all the same: what dies is parked in it.
                Err(StoreError::NoSuchQueue(_)) => None,
                Err(error) => return Err(error),
            },
            None => None,
        };
        // A warning less: a server that does not tell is no reason not to start.
        let seen = self.store.observed(&self.queue).await.unwrap_or_default();
        Ok(SourceDescription {
            name: self.queue.to_string(),
            queue: Some(self.queue.clone()),
            scope: Scope::of_queue(&self.queue),
            lease_ms: Some(config.lease_ms),
            config,
            dead_retention_ms,
            held_p99_ms: seen.and_then(|seen| seen.p99_ms()),
            capabilities: self.store.capabilities(),
        })
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.store.receive(&self.queue, receive).await
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.store.settle(&self.queue, batch).await
    }

    async fn extend(&self, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.store.extend(&self.queue, batch).await
    }

    async fn release(&self, messages: Vec<MessageId>) -> Result<(), StoreError> {
        self.store.release(&self.queue, messages).await.map(drop)
    }
}
