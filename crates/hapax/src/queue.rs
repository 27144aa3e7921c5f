use std::marker::PhantomData;

use hapax_core::store::SharedStore;
use hapax_core::{
    AdminError, Delivery, Extend, Fence, How, NewMessage, QueueConfig, QueueName, Receive, Remaining,
    SendError, Sent, Settle, SettleError, Settled, StoreError,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

/// Why a typed operation did not succeed.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The message was not accepted.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The delivery was not settled or extended.
    #[error(transparent)]
    Settle(#[from] SettleError),
    /// The value cannot be written as JSON.
    #[error("the value cannot be written as JSON: {0}")]
    Encode(serde_json::Error),
    /// The body is not the JSON that its queue's type expects.
    #[error("the body is not what this queue holds: {0}; reject the delivery or fix its sender")]
    Decode(serde_json::Error),
}

/// A queue whose messages are values of `T` in JSON. Cheap to clone.
pub struct Queue<T> {
    store: SharedStore,
    name: QueueName,
    of: PhantomData<fn() -> T>,
}

impl<T> Clone for Queue<T> {
    fn clone(&self) -> Self {
        Self::new(self.store.clone(), self.name.clone())
    }
}

fn only<A, E>(answers: Vec<Result<A, E>>) -> Result<A, Error>
where
    Error: From<E>,
{
    let answer = answers.into_iter().next();
    Ok(answer.ok_or_else(|| StoreError::Unavailable("the store gave no answer".into()))??)
}

impl<T> Queue<T> {
    pub(crate) fn new(store: SharedStore, name: QueueName) -> Self {
        Self { store, name, of: PhantomData }
    }

    /// Its name.
    pub fn name(&self) -> &QueueName {
        &self.name
    }

    /// Creates the queue, or changes its configuration to the one given.
    pub async fn ensure(&self, config: QueueConfig) -> Result<(), AdminError> {
        match self.store.create_queue(&self.name, config.clone()).await {
            Err(AdminError::Exists(..)) => self.store.set_queue(&self.name, config).await,
            created => created.map(drop),
        }
    }
}

impl<T: Serialize> Queue<T> {
    /// Sends a value. It is durable when this returns.
    pub async fn send(&self, value: &T) -> Result<Sent, Error> {
        self.send_with(value, |message| message).await
    }

    /// Sends a value with more than a body: a delay, a group, a deduplication id, attributes.
    pub async fn send_with(
        &self,
        value: &T,
        with: impl FnOnce(NewMessage) -> NewMessage,
    ) -> Result<Sent, Error> {
        let body = serde_json::to_vec(value).map_err(Error::Encode)?;
        only(self.store.send(&self.name, vec![with(NewMessage::new(body))]).await?)
    }
}

impl<T: DeserializeOwned> Queue<T> {
    /// Receives deliveries. Each returns to the queue unless it is settled before its lease runs out.
    pub async fn receive(&self, receive: Receive) -> Result<Vec<Received<T>>, StoreError> {
        let deliveries = self.store.receive(&self.name, receive).await?;
        Ok(deliveries.into_iter().map(|delivery| Received { queue: self.clone(), delivery }).collect())
    }
}

#[cfg(feature = "worker")]
impl<T: DeserializeOwned + Send + 'static> Queue<T> {
    /// A worker that runs an async function for each message, at the queue's tier: it receives, claims, keeps the lease,
    /// records what came of it, and settles. For bytes or batches use [`Worker::builder`](crate::Worker::builder).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// use hapax::{Cx, QueueConfig, Tier};
    ///
    /// #[derive(serde::Serialize, serde::Deserialize)]
    /// struct Charge {
    ///     cents: u64,
    /// }
    ///
    /// async fn charge(charge: Charge, cx: Cx) -> Result<String, std::io::Error> {
    ///     let key = cx.derived_key("charge");
    ///     Ok(format!("charged {} as {key}", charge.cents))
    /// }
    ///
    /// let charges = hapax.queue::<Charge>("charges")?;
    /// charges.ensure(QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() }).await?;
    /// charges.send(&Charge { cents: 1999 }).await?;
    ///
    /// let worker = charges.worker(charge).concurrency(8).build().await?;
    /// let watch = worker.watch();
    /// let report = worker
    ///     .run(async move {
    ///         while watch.counts().done < 1 {
    ///             tokio::task::yield_now().await;
    ///         }
    ///     })
    ///     .await?;
    /// assert!(report.drained);
    /// # Ok(())
    /// # }
    /// ```
    pub fn worker<F, Fut>(&self, handler: F) -> hapax_worker::WorkerBuilder
    where
        F: Fn(T, hapax_worker::Cx) -> Fut + Send + Sync + 'static,
        Fut: Future + Send + 'static,
        Fut::Output: hapax_worker::IntoOutcome,
    {
        hapax_worker::Worker::builder(self.store.clone(), self.name.clone()).handler(handler)
    }
}

/// One delivery of a typed queue.
pub struct Received<T> {
    queue: Queue<T>,
    delivery: Delivery,
}

impl<T: DeserializeOwned> Received<T> {
    /// The value. An error leaves the delivery as it is: reject it, or let it go to the dead letters by its attempts.
    pub fn value(&self) -> Result<T, Error> {
        serde_json::from_slice(&self.delivery.body).map_err(Error::Decode)
    }
}

impl<T> Received<T> {
    /// Everything else about the delivery.
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    /// This delivery's ordinal, from 1.
    pub fn attempt(&self) -> u32 {
        self.delivery.attempt
    }

    /// Grows with every delivery: pass it to whatever the handler writes to.
    pub fn fence(&self) -> Fence {
        self.delivery.fence
    }

    /// Done: the message goes away.
    pub async fn ack(self) -> Result<(), Error> {
        self.settle(How::Ack).await.map(drop)
    }

    /// Failed: the message returns by the queue's policy, or dies if it is out of attempts.
    pub async fn retry(self, error: impl Into<String>) -> Result<Settled, Error> {
        self.settle(How::Retry { after_ms: None, error: Some(error.into()) }).await
    }

    /// Put back without counting the attempt.
    pub async fn defer(self, after_ms: u64) -> Result<Settled, Error> {
        self.settle(How::Defer { after_ms }).await
    }

    /// Never going to work: to the dead letters at once.
    pub async fn reject(self, reason: impl Into<String>) -> Result<Settled, Error> {
        self.settle(How::Reject { reason: reason.into() }).await
    }

    /// Keeps the lease for so long from now.
    pub async fn extend(&self, lease_ms: u64) -> Result<Remaining, Error> {
        let extend = Extend { receipt: self.delivery.receipt.clone(), lease_ms };
        only(self.queue.store.extend(&self.queue.name, vec![extend]).await?)
    }

    async fn settle(self, how: How) -> Result<Settled, Error> {
        let settle = Settle::new(self.delivery.receipt, how);
        only(self.queue.store.settle(&self.queue.name, vec![settle]).await?)
    }
}
