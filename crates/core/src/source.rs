//! The worker's only input. A queue adapts to it; so does a broker.

use std::sync::Arc;

use async_trait::async_trait;

use crate::error::{SettleError, StoreError};
use crate::message::Delivery;
use crate::name::QueueName;
use crate::store::{Batch, Extend, QueueStore, Receive, Remaining, Settle, Settled};

/// Where deliveries come from.
#[async_trait]
pub trait Source: Send + Sync {
    /// The next deliveries, waiting for the first as long as is asked for. Dropped before it is ready: nothing leased,
    /// no attempt counted.
    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError>;

    /// Ends deliveries. Safe to repeat after an unknown outcome.
    async fn finish(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError>;

    /// Keeps deliveries leased: the heartbeat.
    async fn keep(&self, batch: Vec<Extend>) -> Batch<Remaining, SettleError>;
}

/// A queue of a store as a [`Source`].
pub struct QueueSource {
    store: Arc<dyn QueueStore>,
    queue: QueueName,
}

impl QueueSource {
    /// Receives from `queue`.
    pub fn new(store: Arc<dyn QueueStore>, queue: QueueName) -> Self {
        Self { store, queue }
    }
}

#[async_trait]
impl Source for QueueSource {
    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.store.receive(&self.queue, receive).await
    }

    async fn finish(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.store.settle(&self.queue, batch).await
    }

    async fn keep(&self, batch: Vec<Extend>) -> Batch<Remaining, SettleError> {
        self.store.extend(&self.queue, batch).await
    }
}
