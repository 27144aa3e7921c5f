//! Consume, handle, produce: offsets and output in one transaction.
//!
//! A [`Processor`] is one task with one producer, or three whose transactions overlap. It takes records into a batch, gives each to the [`Handler`], and
//! commits the outputs together with the inputs' offsets when the batch is full or old enough. Outputs are sent while the
//! batch grows, and count only with its commit. Records of a batch that was aborted are handled again; readers at
//! `read_committed` see each output once.
//!
//! ```no_run
//! # async fn example(shutdown: impl Future<Output = ()> + Send) -> Result<(), hapax_kafka::processor::ProcessorError> {
//! use hapax_kafka::consumer::{ConsumerConfig, Record};
//! use hapax_kafka::processor::{Failure, Handler, KafkaClient, Processor, ProcessorConfig};
//! use hapax_kafka::producer::{NewRecord, ProducerConfig};
//! use hapax_kafka::wire::Connect;
//!
//! struct Bills;
//!
//! impl Handler for Bills {
//!     async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
//!         let order = record.value.clone().ok_or(Failure::Reject("an order without a value".into()))?;
//!         output.push(NewRecord::new("bills", record.key.clone().unwrap_or_default(), order));
//!         Ok(())
//!     }
//! }
//!
//! let consumer = ConsumerConfig::new("localhost:9092", "billing", &["orders"]);
//! let producer = ProducerConfig::new(Connect::plain(["localhost:9092"]), "billing-1");
//! let config = ProcessorConfig { dead_letters: Some("orders-dead".into()), ..ProcessorConfig::default() };
//! let client = KafkaClient::connect(&consumer, producer, &config).await?;
//! let totals = Processor::new(config, client, Bills).run(shutdown).await?;
//! println!("{} records in {} transactions", totals.records, totals.commits);
//! # Ok(())
//! # }
//! ```
//!
//! | trouble | what it does |
//! |---|---|
//! | the handler fails, a record is not written, offsets are refused | aborts, goes back to the batch's first records |
//! | the handler rejects a record, or fails as often as it may | the record goes to the dead-letter topic, or the processor ends |
//! | partitions are revoked, and the batch holds records of them | commits within `revoke_timeout`, or aborts |
//! | the same, and the commit has begun and is not answered in time | lets go of them, and settles the commit: the next owner waits for it, unless offsets that come too late are refused |
//! | partitions were taken before the commit began, or the broker's answer to its offsets came | aborts |
//! | partitions are lost | aborts if the batch holds records of them |
//! | an abort, or the settling of a commit, is not answered | tries it again until the end is requested |
//! | a commit stays unanswered | asks the coordinator to settle it, and continues at the committed offsets |
//! | a commit fails, and the next batch is being written (`overlap`) | aborts that one, too, before anything is handled again |
//! | an input topic was deleted and created again | aborts, and ends with both ids; the next start reads the new topic from its start |
//! | another instance took the transactional id | ends with both identities |
//! | the end is requested | commits the batch, and ends |

mod batch;
mod client;
mod counts;
mod run;

use std::time::Duration;

pub use client::{Client, CommitAnswer, KafkaClient, TopicIds, other_ids};
pub use counts::{ProcessorCells, ProcessorCounts};
pub use run::Processor;

use crate::consumer::{ConsumerError, Record};
use crate::partition::{TopicId, TopicPartition};
use crate::producer::{NewRecord, ProducerError};

/// What is done with a record.
pub trait Handler: Send {
    /// Handles a record, and adds the outputs to `output`. It is called again for the same record if the batch is aborted,
    /// so effects other than the output may happen more than once.
    fn handle(
        &mut self,
        record: &Record,
        output: &mut Vec<NewRecord>,
    ) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// Why a record was not handled. Its outputs are dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Another attempt may succeed.
    Retry(String),
    /// No attempt will succeed: the record goes to the dead-letter topic at once.
    Reject(String),
    /// No record can be handled, whatever it is: the processor ends, and the record is the next one's.
    Stop(String),
}

impl From<String> for Failure {
    fn from(reason: String) -> Self {
        Self::Retry(reason)
    }
}

impl From<&str> for Failure {
    fn from(reason: &str) -> Self {
        Self::Retry(reason.to_owned())
    }
}

/// When a batch is committed, and what happens to records that cannot be handled.
#[derive(Debug, Clone)]
pub struct ProcessorConfig {
    /// Maximum count of input records in a batch. Default 1,000.
    pub batch_records_max: usize,
    /// Maximum size of the input records in a batch. Default 1 MiB.
    pub batch_bytes_max: usize,
    /// Maximum time from a batch's first record to its commit. Default 100 ms.
    pub batch_time_max: Duration,
    /// Maximum time of one call of the handler. Default 10 s.
    pub handler_timeout: Duration,
    /// Maximum time for the commit when partitions are revoked; less than the consumer's `revoke_wait`. Default 5 s.
    pub revoke_timeout: Duration,
    /// The next batch is handled and written while the last one is committed; it is committed only after that. It needs two more
    /// transactional ids, the producer's with `.2` and `.3` behind it. Default `false`.
    pub overlap: bool,
    /// How often a record is tried. Default 5.
    pub attempts_max: u32,
    /// The topic for records that failed as often, or were rejected. `None`: the processor ends.
    pub dead_letters: Option<String>,
}

impl Default for ProcessorConfig {
    fn default() -> Self {
        Self {
            batch_records_max: 1_000,
            batch_bytes_max: 1 << 20,
            batch_time_max: Duration::from_millis(100),
            handler_timeout: Duration::from_secs(10),
            revoke_timeout: Duration::from_secs(5),
            overlap: false,
            attempts_max: 5,
            dead_letters: None,
        }
    }
}

/// What a processor has done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Totals {
    /// Input records whose batch was committed.
    pub records: u64,
    /// Committed batches.
    pub commits: u64,
    /// Aborted batches.
    pub aborts: u64,
    /// Commits of unknown outcome that were settled.
    pub settled: u64,
    /// Records that went to the dead-letter topic in a committed batch.
    pub dead: u64,
}

/// Why a processor ended.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProcessorError {
    /// The producer cannot continue; see [`ProducerError::kind`].
    #[error(transparent)]
    Producer(#[from] ProducerError),
    /// The consumer has ended.
    #[error(transparent)]
    Consumer(#[from] ConsumerError),
    /// A record failed as often as it may, or was rejected, and there is no dead-letter topic.
    #[error("{at} at offset {offset} failed {attempts} times: {reason}")]
    Handler {
        /// The record's partition.
        at: TopicPartition,
        /// Its offset.
        offset: i64,
        /// How often it was tried.
        attempts: u32,
        /// The last failure.
        reason: String,
    },
    /// A topic was deleted and created again while it was read. Nothing of the batch under way is committed; a new start reads
    /// the new topic from its first record.
    #[error(
        "topic {topic} was created again: its id was {before} and is now {now}; start again to read the new one from its start"
    )]
    TopicRecreated {
        /// The topic.
        topic: String,
        /// Its id before.
        before: TopicId,
        /// Its id now.
        now: TopicId,
    },
    /// The handler cannot handle any record.
    #[error("the handler cannot continue: {0}")]
    Stopped(String),
}
