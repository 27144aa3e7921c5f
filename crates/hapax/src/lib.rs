//! Async jobs whose effects happen once.
//!
//! ```sh
//! cargo add hapax
//! cargo add serde --features derive
//! cargo add tokio --features macros,rt-multi-thread,signal
//! ```
//!
//! | feature | default | adds |
//! |---|---|---|
//! | `embedded` | yes | queues and ledger in a local folder, in this process: `embedded:PATH` |
//! | `worker` | yes | runs handlers: lease, heartbeat, claim, retry, settle, drain |
//! | `postgres` | no | queues and ledger in a PostgreSQL database that several processes share: `postgres://…` |
//! | `redis` | no | queues and ledger in Redis or Valkey that several processes share: `redis://…`, `redis+cluster://…` |
//! | `client` | no | a Hapax server as the store: `http://HOST:PORT`, `https://HOST:PORT` |
//! | `sqlite` | no | `transactional` handlers, whose effect is a write to your own SQLite file |
//! | `http` | no | the Idempotency-Key layer for axum and other tower services: `hapax::http` |
//! | `relay` | no | publishes the messages of an outbox in PostgreSQL or SQLite: `hapax::relay` |
//! | `kafka` | no | Kafka as a sink of a relay: `kafka://HOST:PORT/PREFIX`. Processors are in the crate `hapax-kafka` |
//!
//! Open a store by its URL, name a queue and its message type, send and receive:
//!
//! ```
//! use hapax::{Hapax, QueueConfig, Receive};
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Charge {
//!     order: u64,
//!     cents: u64,
//! }
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), hapax::Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let url = format!("embedded:{}", folder.path().display());
//! let hapax = Hapax::open(&url).await?;
//! let charges = hapax.queue::<Charge>("charges")?;
//! charges.ensure_with_dead_letters(QueueConfig::default()).await?;
//!
//! charges.send_keyed(&Charge { order: 7, cents: 1999 }, "order-7").await?;
//! for received in charges.receive(Receive::up_to(10)).await? {
//!     let charge = received.value()?;
//!     assert_eq!((charge.order, charge.cents), (7, 1999));
//!     received.ack().await?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Or use a worker: it renews leases by heartbeats, retries, and provides the tier that the queue declares. At
//! `effectively-once` each idempotency key has one effect, within the limits described at [`Tier`]:
//!
//! ```
//! # use hapax::{Cx, Hapax, QueueConfig, Tier};
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), hapax::Error> {
//! # let folder = tempfile::tempdir().unwrap();
//! # let url = format!("embedded:{}", folder.path().display());
//! async fn charge(cents: u64, cx: Cx) -> Result<String, std::io::Error> {
//!     Ok(format!("charged {cents} as {}", cx.derived_key("charge")))
//! }
//!
//! let hapax = Hapax::open(&url).await?;
//! let charges = hapax.queue::<u64>("charges")?;
//! charges.ensure_with_dead_letters(QueueConfig::default().tier(Tier::EffectivelyOnce)).await?;
//! charges.send_keyed(&1999, "order-7").await?;
//!
//! let worker = charges.worker(charge).concurrency(8).build().await?;
//! let watch = worker.watch();
//! # let shutdown = async move { while watch.counts().done < 1 { tokio::task::yield_now().await } };
//! let report = worker.run(shutdown).await?;
//! assert_eq!(report.counts.done, 1);
//! # Ok(())
//! # }
//! ```
//!
//! A delivery that is not settled returns when its lease ends, so a crash loses nothing; but a handler may therefore
//! run twice. The delivery's fence and idempotency key make the *effect* happen once.

pub mod copy;
mod error;
mod pair;
mod queue;
#[cfg(feature = "relay")]
pub mod relay;
pub mod transfer;
mod url;

use std::sync::Arc;

use hapax_core::store::SharedStore;

pub use error::Error;
#[cfg(feature = "client")]
pub use hapax_client as client;
pub use hapax_core as core;
pub use hapax_core::{
    AdminError, AsyncInbox, Attribute, Attributes, Batch, BlockingInbox, Browse, DeadLetterPolicy, DedupId,
    DedupPolicy, Delivery, EntryId, Extend, Fence, GroupId, IdempotencyKey, KeySource, Ledger, MessageId,
    NewMessage, OnDead, OnDoubt, Priority, QueueConfig, QueueKind, QueueName, Quota, Receipt, Receive,
    RedriveFilter, RedriveRequest, Resolution, Scope, SendError, Sent, Settle, SettleError, Settled,
    Settlement, StoreError, Tier, policy::RetryPolicy,
};
#[cfg(feature = "embedded")]
pub use hapax_embedded as embedded;
/// A tower layer over [`Hapax::ledger`]: requests with an `Idempotency-Key` take effect once.
#[cfg(feature = "http")]
pub use hapax_http as http;
pub use hapax_observe as observe;
/// The PostgreSQL store with its options, for [`Hapax::with_store`].
///
/// ```no_run
/// # async fn example() -> Result<(), hapax::Error> {
/// use hapax::postgres::{Options, PostgresStore};
///
/// let options = Options { connections_max: 20, migrate: true, ..Options::default() };
/// let store = PostgresStore::open("postgres://localhost/shop", options).await.map_err(hapax::OpenError::from)?;
/// let hapax = hapax::Hapax::with_store(std::sync::Arc::new(store));
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "postgres")]
pub use hapax_postgres as postgres;
/// The Redis store with its options. Its ledger can also serve the workers of a queue elsewhere:
///
/// ```no_run
/// # use hapax::Hapax;
/// # async fn charge(cents: u64, cx: hapax::Cx) -> Result<(), std::io::Error> { Ok(()) }
/// # async fn example() -> Result<(), hapax::Error> {
/// let ledger = Hapax::open("redis+cluster://10.0.0.1,10.0.0.2?hapax_durability=replicated").await?.ledger();
/// let charges = Hapax::open("embedded:./data").await?.queue::<u64>("charges")?;
/// let worker = charges.worker(charge).ledger(ledger).build().await?;
/// # Ok(())
/// # }
/// ```
#[cfg(feature = "redis")]
pub use hapax_redis as redis;
#[cfg(feature = "sqlite")]
pub use hapax_sqlite::{SqliteInbox, SqliteOutbox};
#[cfg(feature = "worker")]
pub use hapax_worker::{
    self as worker, Cx, HandlerOutcome, Idempotent, IdempotentError, IntoOutcome, OnError, Worker,
    WorkerBuilder, WorkerReport, idempotent, testing,
};
pub use pair::QueuePair;
pub use queue::{Queue, Received};
pub use url::{OpenError, StoreUrl, without_secrets};

/// A store, opened by its URL. Clones are cheap.
#[derive(Clone)]
pub struct Hapax {
    store: SharedStore,
    observer: Option<Arc<observe::Observer>>,
}

impl Hapax {
    /// Opens a store by its URL.
    ///
    /// | URL | store |
    /// |---|---|
    /// | `embedded:PATH` | a local folder, in this process; created if it does not exist |
    /// | `postgres://USER@HOST/DATABASE` | a PostgreSQL database, made ready by `hapax migrate` (feature `postgres`) |
    /// | `redis://HOST`, `redis+cluster://HOST,HOST`, `redis+sentinel://HOST,HOST/NAME` | Redis or Valkey (feature `redis`) |
    /// | `http://HOST:PORT`, `https://ID:SECRET@HOST` | a Hapax server, with one of its keys if it has any (feature `client`) |
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let error = hapax::Hapax::open("mongodb://x").await.err().unwrap();
    /// assert!(error.to_string().contains("embedded:PATH"), "the error says what there is");
    /// # }
    /// ```
    pub async fn open(url: &str) -> Result<Self, Error> {
        let store = url::open(url).await?;
        if matches!(url.parse(), Ok(StoreUrl::Server(_))) {
            // The server observes its own store.
            return Ok(Self::with_store(store));
        }
        let mut store = observe::ObservedStore::new(store);
        if matches!(url.parse(), Ok(StoreUrl::Embedded(_))) {
            store = store.only_process();
        }
        let observer = Some(store.observer().clone());
        Ok(Self { store: Arc::new(store), observer })
    }

    /// Uses a store that is already open.
    pub fn with_store(store: SharedStore) -> Self {
        Self { store, observer: None }
    }

    /// What this process has seen of the store: counters, and the lives of messages to which something happened. `None` for
    /// a server, which observes its own store, and for a store that was opened elsewhere.
    pub fn observer(&self) -> Option<&Arc<observe::Observer>> {
        self.observer.as_ref()
    }

    /// A queue whose messages are values of `T` in JSON. Nothing is created; see [`Queue::ensure`].
    pub fn queue<T>(&self, name: &str) -> Result<Queue<T>, Error> {
        Ok(Queue::new(self.store.clone(), QueueName::new(name)?))
    }

    /// The store's ledger: which keys were claimed, their outcomes, and which are in doubt. A worker uses it
    /// automatically; this is for inspection, for resolving doubts, and for claims of your own.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let folder = tempfile::tempdir()?;
    /// # let hapax = hapax::Hapax::open(&format!("embedded:{}", folder.path().display())).await?;
    /// use hapax::core::{EntryFilter, EntryState};
    ///
    /// let doubts = EntryFilter { state: Some(EntryState::InDoubt), limit: 100, ..EntryFilter::default() };
    /// assert!(hapax.ledger().entries(doubts).await?.items.is_empty());
    /// # Ok(())
    /// # }
    /// ```
    pub fn ledger(&self) -> Arc<dyn Ledger> {
        self.store.clone()
    }

    /// The store itself, for all other operations: administration, dead letters, redrive, batches.
    pub fn store(&self) -> &SharedStore {
        &self.store
    }
}

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
