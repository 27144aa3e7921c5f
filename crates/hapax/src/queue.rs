use std::marker::PhantomData;
use std::time::Duration;

use hapax_core::name::IdempotencyKey;
use hapax_core::store::SharedStore;
use hapax_core::{
    AdminError, Delivery, Extend, Fence, NewMessage, QueueConfig, QueueName, Receive, Sent, Settle, Settled,
    Settlement, StoreError,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::Error;
use crate::pair::{self, QueuePair};

/// Maximum number of messages in one call to the store.
const BATCH_MAX: usize = 1_000;
/// Maximum bytes of bodies and attributes in one call, unless a single message has more: limits the memory use.
const BATCH_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// A queue whose messages are values of `T` in JSON. Clones are cheap.
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

fn single_result<A, E>(answers: Vec<Result<A, E>>) -> Result<A, Error>
where
    Error: From<E>,
{
    let answer = answers.into_iter().next();
    Ok(answer.ok_or_else(|| StoreError::Unavailable("the store gave no result".into()))??)
}

impl<T> Queue<T> {
    pub(crate) fn new(store: SharedStore, name: QueueName) -> Self {
        Self { store, name, of: PhantomData }
    }

    /// Its name.
    pub fn name(&self) -> &QueueName {
        &self.name
    }

    /// Creates the queue if it does not exist. Never changes an existing queue: if its configuration differs, the error
    /// names the first field that does ([`Error::QueueDiffers`]). [`apply`](Self::apply) changes it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), hapax::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// use std::time::Duration;
    /// use hapax::QueueConfig;
    ///
    /// let charges = hapax.queue::<u64>("charges")?;
    /// charges.ensure(QueueConfig::default()).await?;
    /// let longer = QueueConfig::default().lease(Duration::from_secs(60));
    /// assert_eq!(charges.ensure(longer.clone()).await.unwrap_err().code(), "queue-exists");
    /// charges.apply(longer).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ensure(&self, config: QueueConfig) -> Result<(), Error> {
        pair::create(&self.store, &self.name, &config).await.map(drop)
    }

    /// Creates the queue together with a dead-letter queue of the same name with the suffix `-dead`; see [`QueuePair`].
    /// Existing queues are handled as by [`ensure`](Self::ensure). Returns the dead-letter queue.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), hapax::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// let charges = hapax.queue::<u64>("charges")?;
    /// let dead = charges.ensure_with_dead_letters(hapax::QueueConfig::default()).await?;
    /// assert_eq!(dead.name().as_str(), "charges-dead");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn ensure_with_dead_letters(&self, config: QueueConfig) -> Result<Self, Error> {
        let pair = QueuePair::new(self.name.clone(), config)?;
        pair.create(&self.store).await?;
        Ok(Self::new(self.store.clone(), pair.dead_name))
    }

    /// Creates the queue, or changes an existing one to this configuration.
    pub async fn apply(&self, config: QueueConfig) -> Result<(), Error> {
        match self.store.create_queue(&self.name, config.clone()).await {
            Err(AdminError::Exists(..)) => {
                Ok(self.store.set_queue(&self.name, config, None).await.map(drop)?)
            }
            created => Ok(created.map(drop)?),
        }
    }
}

impl<T: Serialize> Queue<T> {
    /// Sends a value. It is durable when this returns.
    pub async fn send(&self, value: &T) -> Result<Sent, Error> {
        self.send_with(value, |message| message).await
    }

    /// Sends a value with an idempotency key: the caller's own name for the effect of the message. At
    /// `effectively-once` the effect happens once for each key, no matter how often the value is sent.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), hapax::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// # let charges = hapax.queue::<u64>("charges")?;
    /// # charges.ensure(hapax::QueueConfig::default()).await?;
    /// charges.send_keyed(&1999, "order-1").await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn send_keyed(&self, value: &T, key: &str) -> Result<Sent, Error> {
        let key = IdempotencyKey::new(key)?;
        self.send_with(value, |message| message.idempotency_key(&key)).await
    }

    /// Sends values in as few calls as possible. Returns one result per value, in the same order; the accepted ones are
    /// durable when this returns.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), hapax::Error> {
    /// # let folder = tempfile::tempdir().unwrap();
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// # let charges = hapax.queue::<u64>("charges")?;
    /// # charges.ensure(hapax::QueueConfig::default()).await?;
    /// for answer in charges.send_batch(&[1999, 2499]).await {
    ///     println!("sent as {}", answer?.id);
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn send_batch<'a>(&self, values: impl IntoIterator<Item = &'a T>) -> Vec<Result<Sent, Error>>
    where
        T: 'a,
    {
        self.send_batch_with(values, |_, message| message).await
    }

    /// Sends values in as few calls as possible, each with additional fields: a key, a group, a delay.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// # let charges = hapax.queue::<u64>("charges")?;
    /// # charges.ensure(hapax::QueueConfig::default()).await?;
    /// let keys = ["order-1".parse()?, "order-2".parse()?];
    /// let mut next = keys.iter();
    /// let answers =
    ///     charges.send_batch_with(&[1999, 2499], |_, message| message.idempotency_key(next.next().unwrap())).await;
    /// assert!(answers.iter().all(Result::is_ok));
    /// # Ok(())
    /// # }
    /// ```
    pub async fn send_batch_with<'a>(
        &self,
        values: impl IntoIterator<Item = &'a T>,
        mut with: impl FnMut(&T, NewMessage) -> NewMessage,
    ) -> Vec<Result<Sent, Error>>
    where
        T: 'a,
    {
        let mut answers = Vec::new();
        let (mut waiting, mut bytes): (Vec<(usize, NewMessage)>, u64) = (Vec::new(), 0);
        for (at, value) in values.into_iter().enumerate() {
            match serde_json::to_vec(value) {
                Ok(body) => {
                    let message = with(value, NewMessage::new(body));
                    let size = message.bytes();
                    if waiting.len() == BATCH_MAX || bytes + size > BATCH_BYTES_MAX && !waiting.is_empty() {
                        self.send_part(std::mem::take(&mut waiting), &mut answers).await;
                        bytes = 0;
                    }
                    bytes += size;
                    waiting.push((at, message));
                }
                Err(error) => answers.push((at, Err(Error::Encode(error)))),
            }
        }
        if !waiting.is_empty() {
            self.send_part(waiting, &mut answers).await;
        }
        answers.sort_by_key(|(at, _)| *at);
        answers.into_iter().map(|(_, answer)| answer).collect()
    }

    /// Sends one part of a batch. If the store refuses the whole part, each of its messages gets that error.
    async fn send_part(
        &self,
        part: Vec<(usize, NewMessage)>,
        answers: &mut Vec<(usize, Result<Sent, Error>)>,
    ) {
        let (at, messages): (Vec<usize>, Vec<NewMessage>) = part.into_iter().unzip();
        match self.store.send(&self.name, messages).await {
            Ok(sent) => answers.extend(at.into_iter().zip(sent.into_iter().map(|sent| Ok(sent?)))),
            Err(error) => answers.extend(at.into_iter().map(|at| (at, Err(error.clone().into())))),
        }
    }

    /// Sends a value with additional fields: a delay, a group, a deduplication id, attributes.
    pub async fn send_with(
        &self,
        value: &T,
        with: impl FnOnce(NewMessage) -> NewMessage,
    ) -> Result<Sent, Error> {
        let body = serde_json::to_vec(value).map_err(Error::Encode)?;
        single_result(self.store.send(&self.name, vec![with(NewMessage::new(body))]).await?)
    }
}

impl<T: DeserializeOwned> Queue<T> {
    /// Receives deliveries. Each returns to the queue unless it is settled before its lease runs out.
    ///
    /// ```no_run
    /// # async fn example(charges: hapax::Queue<u64>) -> Result<(), hapax::Error> {
    /// use std::time::Duration;
    /// use hapax::Receive;
    ///
    /// for charge in charges.receive(Receive::up_to(10).wait(Duration::from_secs(20))).await? {
    ///     println!("{} cents", charge.value()?);
    ///     charge.ack().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub async fn receive(&self, receive: Receive) -> Result<Vec<Received<T>>, Error> {
        let deliveries = self.store.receive(&self.name, receive).await?;
        Ok(deliveries.into_iter().map(|delivery| Received { queue: self.clone(), delivery }).collect())
    }
}

#[cfg(feature = "worker")]
impl<T: DeserializeOwned + Send + 'static> Queue<T> {
    /// A worker that runs an async function for each message, at the queue's tier: it receives, claims, renews the
    /// lease, records the outcome, and settles. For bytes or batches use [`Worker::builder`](crate::Worker::builder).
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

    /// A worker whose handler writes to your own database, in the same transaction as the record that its effect has
    /// happened: inside that database the effect happens once, even if the process crashes. For databases whose
    /// transactions belong to one thread, such as SQLite; for others see
    /// [`async_transactional_worker`](Self::async_transactional_worker).
    ///
    /// ```
    /// # #[cfg(feature = "sqlite")]
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// # let connection = rusqlite::Connection::open(folder.path().join("shop.db"))?;
    /// # connection.execute_batch("CREATE TABLE bookings (cents INTEGER)")?;
    /// use hapax::{Cx, QueueConfig, SqliteInbox};
    /// use rusqlite::Transaction;
    ///
    /// fn book(cents: u64, tx: &Transaction<'_>, _cx: &Cx) -> Result<(), rusqlite::Error> {
    ///     tx.execute("INSERT INTO bookings VALUES (?1)", [cents as i64]).map(drop)
    /// }
    ///
    /// let charges = hapax.queue::<u64>("charges")?;
    /// charges.ensure_with_dead_letters(QueueConfig::default()).await?;
    /// charges.send_keyed(&1999, "order-1").await?;
    ///
    /// let inbox = SqliteInbox::new(connection)?;
    /// let worker = charges.transactional_worker(&inbox, book).build().await?;
    /// # let watch = worker.watch();
    /// # worker.run(async move { while watch.counts().done < 1 { tokio::task::yield_now().await } }).await?;
    /// # Ok(())
    /// # }
    /// # #[cfg(not(feature = "sqlite"))]
    /// # fn main() {}
    /// ```
    pub fn transactional_worker<I, F, O>(&self, inbox: &I, handler: F) -> hapax_worker::WorkerBuilder
    where
        I: hapax_core::BlockingInbox + Clone,
        F: for<'t> Fn(T, &I::Tx<'t>, &hapax_worker::Cx) -> O + Send + Sync + 'static,
        O: hapax_worker::IntoOutcome,
    {
        hapax_worker::Worker::over(self.store.clone(), self.name.clone())
            .transactional_handler(inbox, handler)
    }

    /// As [`transactional_worker`](Self::transactional_worker), for a database whose transactions may live across an
    /// `await`: PostgreSQL, with `hapax::postgres::PostgresInbox`, whose handlers get a `&mut sqlx::PgConnection`. If the
    /// queue is in the same database, the delivery is acked in the same transaction.
    pub fn async_transactional_worker<I, F, O>(&self, inbox: &I, handler: F) -> hapax_worker::WorkerBuilder
    where
        I: hapax_core::AsyncInbox + Clone,
        F: for<'t> Fn(T, &'t mut I::Connection, hapax_worker::Cx) -> hapax_worker::TxFuture<'t, O>
            + Send
            + Sync
            + 'static,
        O: hapax_worker::IntoOutcome,
    {
        hapax_worker::Worker::over(self.store.clone(), self.name.clone())
            .async_transactional_handler(inbox, handler)
    }
}

/// Milliseconds. A value that does not fit is longer than any limit allows anyway.
fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// One delivery of a typed queue.
pub struct Received<T> {
    queue: Queue<T>,
    delivery: Delivery,
}

impl<T: DeserializeOwned> Received<T> {
    /// The value. After an error the delivery is still open: reject it, or let it run out of attempts.
    pub fn value(&self) -> Result<T, Error> {
        serde_json::from_slice(&self.delivery.body).map_err(Error::Decode)
    }
}

impl<T> Received<T> {
    /// The delivery with all its fields.
    pub fn delivery(&self) -> &Delivery {
        &self.delivery
    }

    /// The number of this attempt, from 1.
    pub fn attempt(&self) -> u32 {
        self.delivery.attempt
    }

    /// Grows with every delivery: pass it to every system that the handler writes to.
    pub fn fence(&self) -> Fence {
        self.delivery.fence
    }

    /// Done: the message is deleted.
    pub async fn ack(self) -> Result<(), Error> {
        self.settle(Settlement::Ack).await.map(drop)
    }

    /// Failed: the message returns after the delay of the queue's policy, or goes to the dead letters when it is out of
    /// attempts.
    pub async fn retry(self, error: impl Into<String>) -> Result<Settled, Error> {
        self.settle(Settlement::Retry { after_ms: None, error: Some(error.into()) }).await
    }

    /// Failed: the message returns after this time instead of the policy's delay, or goes to the dead letters when it
    /// is out of attempts.
    pub async fn retry_after(self, after: Duration, error: impl Into<String>) -> Result<Settled, Error> {
        self.settle(Settlement::Retry { after_ms: Some(ms(after)), error: Some(error.into()) }).await
    }

    /// Puts the message back for this time, without counting the attempt.
    pub async fn defer(self, after: Duration) -> Result<Settled, Error> {
        self.settle(Settlement::Defer { after_ms: ms(after) }).await
    }

    /// No attempt can succeed: the message goes to the dead letters at once.
    pub async fn reject(self, reason: impl Into<String>) -> Result<Settled, Error> {
        self.settle(Settlement::Reject { reason: reason.into() }).await
    }

    /// Extends the lease to this time from now. Returns the remaining lease according to the store.
    pub async fn extend(&self, lease: Duration) -> Result<Duration, Error> {
        let extend = Extend { receipt: self.delivery.receipt.clone(), lease_ms: ms(lease), own_lease: false };
        let left = single_result(self.queue.store.extend(&self.queue.name, vec![extend]).await?)?;
        Ok(Duration::from_millis(left.lease_ms))
    }

    async fn settle(self, settlement: Settlement) -> Result<Settled, Error> {
        let settle = Settle::new(self.delivery.receipt, settlement);
        single_result(self.queue.store.settle(&self.queue.name, vec![settle]).await?)
    }
}
