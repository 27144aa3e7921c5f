//! The worker's only input. A queue adapts to it; so does a broker.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::{SettleError, StoreError};
use crate::message::Delivery;
use crate::name::{QueueName, Receipt};
use crate::store::{Batch, Extend, QueueStore, Receive, Remaining, Settle, Settled};

/// Where deliveries come from.
#[async_trait]
pub trait Source: Send + Sync {
    /// The next deliveries, at most `max`, waiting at most `wait_ms` for the first. Dropped before it is ready:
    /// nothing leased, no attempt counted.
    async fn next(&self, max: usize, wait_ms: u64) -> Result<Vec<Delivery>, StoreError>;

    /// Ends deliveries.
    async fn finish(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError>;

    /// Keeps deliveries leased: the heartbeat.
    async fn keep(&self, batch: Vec<Receipt>) -> Batch<Remaining, SettleError>;
}

/// A queue of a store as a [`Source`].
pub struct QueueSource {
    store: Arc<dyn QueueStore>,
    queue: QueueName,
    consumer: String,
    lease_ms: u64,
}

impl QueueSource {
    /// Receives from `queue` as `consumer`, each delivery leased for `lease_ms`.
    pub fn new(
        store: Arc<dyn QueueStore>,
        queue: QueueName,
        consumer: impl Into<String>,
        lease_ms: u64,
    ) -> Self {
        Self { store, queue, consumer: consumer.into(), lease_ms }
    }
}

#[async_trait]
impl Source for QueueSource {
    async fn next(&self, max: usize, wait_ms: u64) -> Result<Vec<Delivery>, StoreError> {
        let receive = Receive {
            max,
            lease_ms: Some(self.lease_ms),
            wait_ms: Some(wait_ms),
            consumer: Some(self.consumer.clone()),
            ..Receive::default()
        };
        self.store.receive(&self.queue, receive).await
    }

    async fn finish(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.store.settle(&self.queue, batch).await
    }

    async fn keep(&self, batch: Vec<Receipt>) -> Batch<Remaining, SettleError> {
        let extend = |receipt| Extend { receipt, lease_ms: self.lease_ms };
        self.store.extend(&self.queue, batch.into_iter().map(extend).collect()).await
    }
}
