//! Kafka to a database: each record takes effect once in the database.
//!
//! The position in a partition is a row of the database, and advances in the transaction that holds the business writes and
//! the ledger entries of the records up to it. It is keyed by the topic's id and advanced by compare-and-set: if another
//! member of the group has moved it, the transaction is rolled back. So nothing depends on what the group's members know of each
//! other. The offsets that are committed to the broker only follow, for tools that show lag.

mod batch;
mod runner;

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::Duration;

use hapax_core::positions::{AsyncPositions, BlockingPositions, LogPartition};
use hapax_core::{Fingerprint, IdempotencyKey, InboxEntry, InboxError, Scope};

use batch::{AsyncDatabase, BlockingDatabase, Database};
pub use batch::{HandlerError, HandlerFuture};

use kafka_protocol::error::ResponseError;

use crate::consumer::{ConsumerConfig, ConsumerError, Record};
use crate::wire::{Cluster, Connect};

/// The header with a record's idempotency key. Without it the key is the record's place: topic id, partition and offset.
pub const KEY_HEADER: &str = "hapax-idempotency-key";

/// A known-bad variant, to see that the tests find it: begins at the broker's offsets, and compares neither position nor key.
const TRUSTS_THE_BROKER: &str = "kafka-trusts-the-broker";

/// What happens to a record whose handler fails at each attempt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Poison {
    /// The run ends with an error that names the record. Nothing after it takes effect.
    #[default]
    Stop,
    /// The failure is recorded as its outcome in the ledger, and the records after it follow.
    Record,
}

/// Bounds of a run.
#[derive(Debug, Clone)]
pub struct ToDatabaseOptions {
    /// Maximum count of records in one transaction. Default 100.
    pub batch_records_max: usize,
    /// Time for one transaction; one that takes longer is rolled back and tried again. Default 1 minute.
    pub batch_timeout: Duration,
    /// Attempts for a record, at least 1. Default 5.
    pub attempts_max: u32,
    /// What happens after the last attempt.
    pub poison: Poison,
    /// How long the outcome of a record is kept in the ledger. Default 7 days.
    pub ledger_ttl: Duration,
}

impl Default for ToDatabaseOptions {
    fn default() -> Self {
        Self {
            batch_records_max: 100,
            batch_timeout: Duration::from_mins(1),
            attempts_max: 5,
            poison: Poison::default(),
            ledger_ttl: Duration::from_hours(24 * 7),
        }
    }
}

/// What a run did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ToDatabaseReport {
    /// Records that took effect.
    pub applied: u64,
    /// Records whose key had an outcome already.
    pub duplicates: u64,
    /// Records whose failure was recorded.
    pub failed: u64,
    /// Transactions that were committed.
    pub transactions: u64,
    /// Transactions that were rolled back because another member had moved the position.
    pub superseded: u64,
}

/// Why a run has ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ToDatabaseError {
    /// The consumer could not start, or has ended.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// The database cannot hold the guarantee, or a handler ended its transaction.
    #[error(transparent)]
    Database(InboxError),
    /// A record failed at each attempt.
    #[error("record {offset} of {partition} failed {attempts} times, the last time with: {error}")]
    Poison {
        /// Where it is.
        partition: LogPartition,
        /// Its offset.
        offset: i64,
        /// How often it was tried.
        attempts: u32,
        /// The last error.
        error: String,
    },
    /// A topic was deleted and created again while it was read. Its records have no position yet; the next run begins with
    /// the first one.
    #[error(
        "topic {topic} was created again: its id was {before} and is now {now}; start again to read the new one"
    )]
    TopicRecreated {
        /// The topic.
        topic: String,
        /// Its id before.
        before: String,
        /// Its id now.
        now: String,
    },
}

/// Reads topics into a database.
///
/// ```no_run
/// # async fn example(inbox: hapax_postgres::PostgresInbox) -> Result<(), Box<dyn std::error::Error>> {
/// use hapax_kafka::consumer::ConsumerConfig;
/// use hapax_kafka::to_database::ToDatabase;
/// use hapax_kafka::wire::Connect;
///
/// let consumer = ConsumerConfig::new("localhost:9092", "billing", &["orders"]);
/// let run = ToDatabase::new(Connect::plain(["localhost:9092"]), consumer, &inbox, |record, db| {
///     Box::pin(async move {
///         let insert = sqlx::query("INSERT INTO bills (body) VALUES ($1)").bind(record.value.as_deref());
///         insert.execute(db).await?;
///         Ok(())
///     })
/// });
/// let report = run.run(std::future::pending()).await?;
/// println!("{} records", report.applied);
/// # Ok(())
/// # }
/// ```
pub struct ToDatabase {
    connect: Connect,
    consumer: ConsumerConfig,
    database: Box<dyn Database>,
    options: ToDatabaseOptions,
}

impl ToDatabase {
    /// Into a database whose transactions may live across an `await`, such as PostgreSQL. A handler may run several times;
    /// what its earlier runs have written is rolled back.
    pub fn new<I, F>(connect: Connect, consumer: ConsumerConfig, inbox: &I, handler: F) -> Self
    where
        I: AsyncPositions + Clone,
        F: for<'t> Fn(&'t Record, &'t mut I::Connection) -> HandlerFuture<'t> + Send + Sync + 'static,
    {
        let database = Box::new(AsyncDatabase { inbox: inbox.clone(), handler });
        Self { connect, consumer, database, options: ToDatabaseOptions::default() }
    }

    /// Into a database whose transactions block their thread, such as SQLite.
    pub fn new_blocking<I, F>(connect: Connect, consumer: ConsumerConfig, inbox: &I, handler: F) -> Self
    where
        I: BlockingPositions + Clone,
        F: for<'t> Fn(&Record, &I::Tx<'t>) -> Result<(), HandlerError> + Send + Sync + 'static,
    {
        let database = Box::new(BlockingDatabase { inbox: inbox.clone(), handler: Arc::new(handler) });
        Self { connect, consumer, database, options: ToDatabaseOptions::default() }
    }

    /// Other bounds than the defaults.
    #[must_use]
    pub fn options(mut self, options: ToDatabaseOptions) -> Self {
        self.options = options;
        self
    }

    /// Runs until `until` resolves: the transaction under way ends, and the group is left. After an error the run can be
    /// started again.
    pub async fn run(self, until: impl Future<Output = ()>) -> Result<ToDatabaseReport, ToDatabaseError> {
        runner::run(self, until).await
    }
}

/// The ledger entry of a record.
fn entry(record: &Record, partition: &LogPartition) -> Result<InboxEntry, String> {
    let key = match record.header(KEY_HEADER) {
        None => format!("{}/{}/{}", partition.topic_id, partition.partition, record.offset),
        Some(key) => {
            std::str::from_utf8(key).map_err(|_| format!("its header {KEY_HEADER} is not text"))?.to_owned()
        }
    };
    let key = if hapax_core::mutant::is(TRUSTS_THE_BROKER) { fastrand::u128(..).to_string() } else { key };
    let key = IdempotencyKey::new(&key).map_err(|error| format!("its header {KEY_HEADER}: {error}"))?;
    let scope = Scope::new(format!("kafka/{}", partition.group)).map_err(|error| error.to_string())?;
    let hash = ring::digest::digest(&ring::digest::SHA256, record.value.as_deref().unwrap_or_default());
    let mut hex = String::with_capacity(64);
    for byte in hash.as_ref() {
        let _ = write!(hex, "{byte:02x}");
    }
    let fingerprint = Fingerprint::new(hex).map_err(|error| error.to_string())?;
    Ok(InboxEntry { id: hapax_core::EntryId::new(scope, key), fingerprint })
}

/// The id that a broker knows a topic by.
async fn topic_id(cluster: &Cluster, topic: &str) -> Result<String, String> {
    let ids = cluster.topic_ids([topic]).await.map_err(|error| error.to_string())?;
    match ids.get(topic) {
        Some(Ok(id)) => Ok(id.0.to_string()),
        Some(Err(ResponseError::UnsupportedVersion)) => {
            Err("the broker gives topics no id: Kafka 2.8 or later is needed".into())
        }
        Some(Err(error)) => Err(error.to_string()),
        None => Err("the broker does not know it".into()),
    }
}
