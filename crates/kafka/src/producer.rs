//! The transactional producer.
//!
//! ```no_run
//! use hapax_kafka::producer::{NewRecord, Producer, ProducerConfig};
//! use hapax_kafka::wire::Connect;
//!
//! # async fn example() -> Result<(), hapax_kafka::producer::ProducerError> {
//! let config = ProducerConfig::new(Connect::plain(["localhost:9092"]), "orders-1");
//! let mut producer = Producer::connect(config).await?;
//! producer.begin()?;
//! producer.send(NewRecord::new("paid", "order 7", "12.50")).await?;
//! producer.commit().await?;
//! # Ok(()) }
//! ```
//! Records are sent while more of them are added: a partition's batch leaves as soon as it is worth a request and the one
//! before it was written. Every call has a time limit, and every call may be cancelled: what was not answered is kept, and the
//! next call of [`Producer::flush`], [`Producer::commit`] or [`Producer::abort`] continues with the same bytes.

mod error;
mod idempotent;
mod offsets;
mod produce;
mod record;
mod transaction;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use indexmap::IndexMap;
use kafka_protocol::messages::TransactionalId;
use tokio::task::JoinSet;

pub use error::{Cause, ErrorKind, ProducerError};
pub use idempotent::IdempotentProducer;
pub use kafka_protocol::error::ResponseError;
pub use record::{NewRecord, partition_of};

use produce::{Produced, Waiting};

use crate::machine::{Identity, Machine, State};
use crate::partition::{GroupMetadata, TopicId, TopicPartition};
use crate::refusal::{self, Refusal};
use crate::wire::{Cluster, Connect, text};

/// How a producer works.
#[derive(Debug, Clone)]
pub struct ProducerConfig {
    /// How brokers are reached.
    pub connect: Connect,
    /// The producer's name: the same after a restart, and used by no other instance.
    pub transactional_id: String,
    /// The coordinator aborts a transaction that takes longer. Default 60 s.
    pub transaction_timeout: Duration,
    /// How long a record, offsets, an abort or an initialisation is tried. Default 30 s.
    pub delivery_timeout: Duration,
    /// Maximum size of a batch of a partition. Default 1,048,000; the broker's limit (`max.message.bytes`) is 1,048,588 by default.
    pub batch_bytes_max: usize,
    /// A partition's records are sent when this much of them waits and its last batch was written; a commit or a flush sends
    /// the rest. Default 256 KiB.
    pub batch_bytes_min: usize,
    /// [`Producer::send`] waits while this much is not sent. Default 2 MiB.
    pub buffer_bytes_max: usize,
}

impl ProducerConfig {
    /// The defaults.
    pub fn new(connect: Connect, transactional_id: &str) -> Self {
        Self {
            connect,
            transactional_id: transactional_id.to_owned(),
            transaction_timeout: Duration::from_mins(1),
            delivery_timeout: Duration::from_secs(30),
            batch_bytes_max: 1_048_000,
            batch_bytes_min: 256 << 10,
            buffer_bytes_max: 2 << 20,
        }
    }

    /// What is refused before a connection is made.
    pub(crate) fn check(&self) -> Result<(), ProducerError> {
        match refusal::unstable(&self.transactional_id, std::process::id()) {
            Some(Refusal { value, remedy, .. }) => {
                Err(ProducerError::Refused { key: "transactional.id", value, remedy })
            }
            None => Ok(()),
        }
    }
}

/// Where a group continues in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NextOffset {
    /// The offset of the next record.
    pub offset: i64,
    /// The topic that it belongs to; it is committed with the offset, and tells it from one of another topic with the same name.
    pub topic_id: Option<TopicId>,
}

impl From<i64> for NextOffset {
    fn from(offset: i64) -> Self {
        Self { offset, topic_id: None }
    }
}

/// A transaction up to its end.
#[derive(Debug, Clone, Copy)]
struct Prepared {
    /// A copy of the offsets may arrive once more while the transaction has no markers.
    offsets_may_return: bool,
}

/// A transactional producer of one task; it runs one transaction at a time.
#[derive(Debug)]
pub struct Producer {
    config: ProducerConfig,
    cluster: Arc<Cluster>,
    machine: Machine<TopicPartition>,
    /// Records that are in no batch yet, by partition.
    waiting: IndexMap<TopicPartition, Waiting>,
    waiting_bytes: usize,
    /// Batches that are not answered yet: the bytes do not change from attempt to attempt.
    unanswered: BTreeMap<TopicPartition, Bytes>,
    /// Requests with some of them.
    calls: JoinSet<Produced>,
    /// The partitions in `calls`.
    called: BTreeSet<TopicPartition>,
    /// Partitions that have a written batch: the coordinator knows that they belong to the transaction.
    added: BTreeSet<TopicPartition>,
    /// The group's next offsets, sent with the commit.
    offsets: Option<(GroupMetadata, BTreeMap<TopicPartition, NextOffset>)>,
    /// All batches and the offsets of this transaction are written.
    prepared: Option<Prepared>,
    /// The transaction of this id has to be complete before the offsets are sent: the one at whose end its producer got this identity.
    follows: Option<(String, Option<Identity>)>,
    /// An EndTxn(commit) of this transaction may have reached the coordinator without an answer.
    uncertain: bool,
    /// The coordinator may know this transaction: a request of it was not refused because of the identity.
    known: bool,
    /// An initialisation may have been done without an answer that says so: the identity that the coordinator knows may be this
    /// producer's.
    initialising: bool,
    /// Ends when the coordinator has completed the transaction before this one.
    ending: JoinSet<()>,
    /// Other producers have their turns between two transactions.
    rests: bool,
    next_partition: usize,
}

impl Producer {
    /// Connects, checks the cluster's transaction version, and takes the transactional id over: the transaction of a
    /// predecessor is ended, and the predecessor is fenced.
    pub async fn connect(config: ProducerConfig) -> Result<Self, ProducerError> {
        let cluster = Arc::new(Cluster::new(config.connect.clone()));
        Self::connect_on(cluster, config).await
    }

    /// The same over the connections of a cluster that others use too. `config.connect` is not used.
    pub async fn connect_on(cluster: Arc<Cluster>, config: ProducerConfig) -> Result<Self, ProducerError> {
        config.check()?;
        let mut producer = Self::unconnected(cluster, config);
        producer.require_version_2().await?;
        producer.initialise().await?;
        Ok(producer)
    }

    fn unconnected(cluster: Arc<Cluster>, config: ProducerConfig) -> Self {
        Self {
            config,
            cluster,
            machine: Machine::default(),
            waiting: IndexMap::new(),
            waiting_bytes: 0,
            unanswered: BTreeMap::new(),
            calls: JoinSet::new(),
            called: BTreeSet::new(),
            added: BTreeSet::new(),
            offsets: None,
            prepared: None,
            follows: None,
            uncertain: false,
            known: false,
            initialising: false,
            ending: JoinSet::new(),
            rests: false,
            next_partition: 0,
        }
    }

    /// The present identity.
    pub fn identity(&self) -> Option<Identity> {
        self.machine.identity()
    }

    /// The present state.
    pub fn state(&self) -> State {
        self.machine.state()
    }

    /// How long a record, offsets, an abort or an initialisation is tried.
    pub fn delivery_timeout(&self) -> Duration {
        self.config.delivery_timeout
    }

    /// The cluster, for requests beside the transaction.
    pub fn cluster(&self) -> &Arc<Cluster> {
        &self.cluster
    }

    /// Begins a transaction. The coordinator learns of it with the first record.
    pub fn begin(&mut self) -> Result<(), ProducerError> {
        self.machine.begin()?;
        self.forget();
        Ok(())
    }

    /// Adds a record to the transaction. It is sent when enough wait, with [`Producer::flush`], or with the commit. An error may
    /// be that of an earlier record. After it was cancelled the record may have been added: only `abort` is right then.
    pub async fn send(&mut self, record: NewRecord) -> Result<(), ProducerError> {
        self.require_open("send")?;
        record.check(self.config.batch_bytes_max)?;
        let bytes = record.bytes();
        if self.waiting_bytes + bytes > self.config.buffer_bytes_max {
            self.flush().await?;
        }
        let partition = self.choose(&record).await?;
        let is_sent = self.unanswered.contains_key(&partition);
        self.waiting_bytes += bytes;
        let waiting = self.waiting.entry(partition).or_default();
        waiting.add(record, bytes);
        let is_worth = !is_sent && waiting.bytes() >= self.config.batch_bytes_min;
        self.send_ahead(is_worth).await
    }

    /// The group's next offsets, for the commit. Of several calls in a transaction the last one of a partition counts.
    pub fn offsets(
        &mut self,
        group: GroupMetadata,
        next: impl IntoIterator<Item = (TopicPartition, impl Into<NextOffset>)>,
    ) -> Result<(), ProducerError> {
        self.require_open("offsets")?;
        let mut offsets = self.offsets.take().map(|(_, offsets)| offsets).unwrap_or_default();
        offsets.extend(next.into_iter().map(|(at, next)| (at, next.into())));
        self.offsets = Some((group, offsets)).filter(|(_, offsets)| !offsets.is_empty());
        Ok(())
    }

    /// The offsets of this transaction follow those of the last one of another producer, of which a copy may still arrive: behind
    /// this transaction's it would be the last one in the log, and replace them. So these are not sent before the coordinator has
    /// completed the other transaction; the broker refuses a copy that comes later.
    pub(crate) fn follow(&mut self, other: &Self) {
        self.follows = Some((other.config.transactional_id.clone(), other.identity()));
    }

    /// Whether a copy of the last transaction's offsets may still arrive, because an attempt to send them was not answered.
    pub(crate) fn offsets_may_return(&self) -> bool {
        self.prepared.is_some_and(|prepared| prepared.offsets_may_return)
    }

    /// The transaction, whose commit has not begun, can only be aborted.
    pub(crate) fn refuse(&mut self, reason: &str) -> ProducerError {
        self.failed("the commit", Cause::Other(reason.to_owned()))
    }

    /// Other producers have their turns between two transactions of this one: the coordinator has time to complete them.
    pub(crate) fn rest(&mut self) {
        self.rests = true;
    }

    /// Sends all records that wait, and waits until they are written.
    pub async fn flush(&mut self) -> Result<(), ProducerError> {
        self.require_open("flush")?;
        self.deliver().await
    }

    /// The id for requests; `None`: the producer has no transactions.
    fn transactional_id(&self) -> Option<TransactionalId> {
        let id = &self.config.transactional_id;
        (!id.is_empty()).then(|| text(id).into())
    }

    /// What belongs to the last transaction only.
    fn forget(&mut self) {
        self.waiting.clear();
        self.waiting_bytes = 0;
        self.unanswered.clear();
        self.drop_calls();
        self.added.clear();
        self.offsets = None;
        self.prepared = None;
        self.follows = None;
        self.uncertain = false;
        self.known = false;
    }

    fn require_open(&self, call: &'static str) -> Result<(), ProducerError> {
        match self.machine.state() {
            State::Open => Ok(()),
            state => Err(crate::machine::Misuse::State { call, state }.into()),
        }
    }
}
