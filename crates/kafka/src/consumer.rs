//! The consumer: librdkafka's, behind a narrow seam.
//!
//! It is polled on a thread of its own that is never cancelled, so that rebalances are served and heartbeats sent whatever its
//! owner does. The owner takes [`Event`]s. A rebalance waits for the owner's answer, but only for a bounded time.
//!
//! What librdkafka would decide by itself is decided here: it reads committed records only, commits no offset by itself, never
//! chooses where to start, and keeps the partitions that it can keep in a rebalance (cooperative-sticky).

mod group;
mod poller;

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bytes::Bytes;
use rdkafka::consumer::{CommitMode, Consumer as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use tokio::sync::{mpsc, oneshot};

use poller::{Context, Fetched, Native, Shared};

pub use crate::partition::{GroupMetadata, TopicId, TopicPartition};
use crate::refusal::{self, Refusal};

/// A record of a topic.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Where it is.
    pub at: TopicPartition,
    /// Its offset in the partition.
    pub offset: i64,
    /// Milliseconds since 1970, by the topic's clock.
    pub timestamp_ms: Option<i64>,
    /// The key, by which the producer chose the partition.
    pub key: Option<Bytes>,
    /// The value; `None` is a deletion in a compacted topic.
    pub value: Option<Bytes>,
    /// Names and values.
    pub headers: Vec<(String, Option<Bytes>)>,
}

impl Record {
    /// The value of the first header of this name.
    pub fn header(&self, name: &str) -> Option<&[u8]> {
        self.headers.iter().find(|(found, _)| found == name).and_then(|(_, value)| value.as_deref())
    }

    /// The size of key, value and headers.
    pub fn bytes(&self) -> usize {
        let length = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        let headers = self.headers.iter().map(|(name, value)| name.len() + length(value)).sum::<usize>();
        length(&self.key) + length(&self.value) + headers
    }
}

/// Where to begin in a partition without a committed offset.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NewGroup {
    /// With the oldest record.
    #[default]
    Earliest,
    /// With records that are produced from now on.
    Latest,
    /// Not at all: the consumer ends with an error.
    Refuse,
}

/// Where to begin in a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StartAt {
    /// At this offset.
    Offset(i64),
    /// At the group's committed offset; without one, as [`ConsumerConfig::new_group`] says.
    Committed,
    /// The same for the topic with this id: an offset that was committed for an earlier topic with the same name is not used, and
    /// the partition is read from its start.
    CommittedOf(TopicId),
    /// As [`ConsumerConfig::new_group`] says.
    NewGroup,
}

/// How a consumer reads.
#[derive(Debug, Clone)]
pub struct ConsumerConfig {
    /// Addresses of some brokers, `host:port`.
    pub bootstrap: Vec<String>,
    /// The group.
    pub group: String,
    /// The topics.
    pub topics: Vec<String>,
    /// Where to begin without a committed offset.
    pub new_group: NewGroup,
    /// The broker gives the partitions of a member that is silent for this long to others. Default 30 s.
    pub session_timeout: Duration,
    /// How long a rebalance waits for the owner to let go of partitions. Default 10 s.
    pub revoke_wait: Duration,
    /// How long a rebalance waits for the owner to say where to begin; then the consumer ends with an error. Default 60 s.
    pub assign_wait: Duration,
    /// Maximum count of records that wait for the owner. Default 10,000.
    pub queued_records_max: usize,
    /// Maximum size of records that wait for the owner. Default 32 MiB.
    pub queued_bytes_max: usize,
    /// More properties of librdkafka, for example for TLS and SASL. Those that would weaken a guarantee are refused.
    pub properties: Vec<(String, String)>,
}

impl ConsumerConfig {
    /// The defaults.
    pub fn new(bootstrap: &str, group: &str, topics: &[&str]) -> Self {
        Self {
            bootstrap: bootstrap.split(',').map(|address| address.trim().to_owned()).collect(),
            group: group.to_owned(),
            topics: topics.iter().map(|&topic| topic.to_owned()).collect(),
            new_group: NewGroup::default(),
            session_timeout: Duration::from_secs(30),
            revoke_wait: Duration::from_secs(10),
            assign_wait: Duration::from_mins(1),
            queued_records_max: 10_000,
            queued_bytes_max: 32 << 20,
            properties: Vec::new(),
        }
    }
}

/// Why a consumer could not start, or has ended.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConsumerError {
    /// The configuration would weaken a guarantee.
    #[error("{}", refusal::lines(.0))]
    Refused(Vec<Refusal>),
    /// A property or its value is unknown to librdkafka.
    #[error("the consumer cannot be configured: {0}")]
    Config(String),
    /// There is no committed offset, and [`NewGroup::Refuse`] was chosen.
    #[error(
        "{0} has no committed offset, and the consumer may not choose one; commit one, or choose where a new group begins"
    )]
    NoOffset(TopicPartition),
    /// The offset to begin at is not in the log.
    #[error(
        "the position is not in the log: records were deleted before they were read, or the topic was created again ({0})"
    )]
    OffsetGone(String),
    /// Records that are there cannot be read. They are not passed over.
    #[error("records of {topics} cannot be read: {reason}")]
    Unreadable {
        /// The topics that are read.
        topics: String,
        /// Why, and what to do.
        reason: String,
    },
    /// The owner did not say in time where to begin.
    #[error("no position was given within {0} ms after partitions were assigned")]
    AssignTimedOut(u128),
    /// The broker refuses this client; another start would not help.
    #[error("the broker refuses the consumer: {0}")]
    Refuses(String),
    /// librdkafka cannot continue.
    #[error("the consumer has ended: {0}")]
    Fatal(String),
}

/// What the owner is told.
#[derive(Debug)]
pub enum Event {
    /// A record.
    Record(Record),
    /// New partitions. Nothing of them is read before [`Assignment::start`].
    Assigned(Assignment),
    /// Partitions that another member gets. None of their records follow.
    Revoked(Revocation),
    /// Partitions that another member may already have: the broker has not heard of this one for too long.
    Lost(Vec<TopicPartition>),
    /// Trouble that the consumer retries by itself.
    Problem(String),
    /// The last event.
    Ended(ConsumerError),
}

/// New partitions, which wait for their positions.
#[derive(Debug)]
pub struct Assignment {
    /// The partitions.
    pub partitions: Vec<TopicPartition>,
    epoch: u64,
    reply: std::sync::mpsc::SyncSender<Vec<StartAt>>,
}

impl Assignment {
    /// Begins, in the order of the partitions.
    pub fn start(self, positions: Vec<StartAt>) {
        assert_eq!(positions.len(), self.partitions.len(), "a position for each partition");
        // The consumer may have given up waiting.
        let _ = self.reply.send(positions);
    }
}

/// Partitions that have to be let go of. Dropping it says that this was done.
#[derive(Debug)]
pub struct Revocation {
    /// The partitions.
    pub partitions: Vec<TopicPartition>,
    _done: std::sync::mpsc::SyncSender<()>,
    waited_for: Arc<AtomicBool>,
}

impl Revocation {
    /// Whether the group still waits. Afterwards another member may have the partitions.
    pub fn is_waited_for(&self) -> bool {
        self.waited_for.load(Ordering::SeqCst)
    }
}

/// A member's identity, and the partitions that it had under it.
#[derive(Clone)]
pub struct Ownership {
    /// The identity.
    pub member: GroupMetadata,
    /// The partitions, with the numbers of their assignments.
    partitions: Vec<(TopicPartition, u64)>,
    shared: Arc<Shared>,
}

impl Ownership {
    /// Whether the group has given none of the partitions to another member since: they are this one's, or they are revoked and still
    /// waited for.
    pub fn is_kept(&self) -> bool {
        self.partitions.iter().all(|(at, since)| self.shared.is_kept(at, *since))
    }
}

impl fmt::Debug for Ownership {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { member, partitions, .. } = self;
        f.debug_struct("Ownership")
            .field("member", member)
            .field("partitions", partitions)
            .finish_non_exhaustive()
    }
}

/// A member of a consumer group. Dropping it leaves the group.
pub struct Consumer {
    /// Gone when the thread has ended, so that a consumer that ended leaves its group.
    native: Weak<Native>,
    shared: Arc<Shared>,
    control: mpsc::UnboundedReceiver<Event>,
    records: mpsc::UnboundedReceiver<Fetched>,
    /// Records with another number are from before a rebalance or a seek.
    epochs: HashMap<TopicPartition, u64>,
    /// Ends when the group was left.
    left: oneshot::Receiver<()>,
}

/// Time to leave a group.
const CLOSE_WAIT_MAX: Duration = Duration::from_secs(10);

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("epochs", &self.epochs).finish_non_exhaustive()
    }
}

impl Consumer {
    /// Refuses properties that the tier does not hold with, and those that librdkafka does not know or whose values it does not take.
    pub(crate) fn check(config: &ConsumerConfig) -> Result<(), ConsumerError> {
        let refused = refusal::consumer(&config.properties);
        if !refused.is_empty() {
            return Err(ConsumerError::Refused(refused));
        }
        poller::check(config)
    }

    /// Starts a member of the group. Trouble with the connection is an event.
    pub fn start(config: &ConsumerConfig) -> Result<Self, ConsumerError> {
        Self::check(config)?;
        let (to_control, control) = mpsc::unbounded_channel();
        let (to_records, records) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared::new(config, to_control));
        let context = Context(shared.clone());
        let (native, left) = poller::start(config, context, to_records)?;
        Ok(Self { native, shared, control, records, epochs: HashMap::new(), left })
    }

    /// The next event. Rebalances come before the records that wait. Safe to cancel.
    pub async fn next(&mut self) -> Event {
        loop {
            tokio::select! {
                biased;
                event = self.control.recv() => return self.told(event),
                Some(fetched) = self.records.recv() => {
                    if let Some(record) = self.take(fetched) {
                        return Event::Record(record);
                    }
                }
            }
        }
    }

    /// The next event that is there already.
    pub fn try_next(&mut self) -> Option<Event> {
        if let Some(event) = self.try_control() {
            return Some(event);
        }
        loop {
            let fetched = self.records.try_recv().ok()?;
            if let Some(record) = self.take(fetched) {
                return Some(Event::Record(record));
            }
        }
    }

    /// The next event that is not a record. Safe to cancel.
    pub async fn next_control(&mut self) -> Event {
        let event = self.control.recv().await;
        self.told(event)
    }

    /// The next event that is there already and is not a record.
    pub fn try_control(&mut self) -> Option<Event> {
        let event = self.control.try_recv().ok()?;
        Some(self.told(Some(event)))
    }

    fn told(&mut self, event: Option<Event>) -> Event {
        let event =
            event.unwrap_or_else(|| Event::Ended(ConsumerError::Fatal("its thread has ended".into())));
        match &event {
            Event::Assigned(Assignment { partitions, epoch, .. }) => {
                self.epochs.extend(partitions.iter().map(|at| (at.clone(), *epoch)));
            }
            Event::Revoked(Revocation { partitions, .. }) | Event::Lost(partitions) => {
                for at in partitions {
                    self.epochs.remove(at);
                }
            }
            _ => {}
        }
        event
    }

    /// A record, unless it is from before a rebalance or a seek.
    fn take(&self, fetched: Fetched) -> Option<Record> {
        self.shared.took(&fetched.record);
        (self.epochs.get(&fetched.record.at) == Some(&fetched.epoch)).then_some(fetched.record)
    }

    /// Continues at another offset of an assigned partition. Records that wait are dropped.
    pub fn seek(&mut self, at: &TopicPartition, offset: i64) {
        if let Some(current) = self.epochs.get_mut(at) {
            *current = self.shared.seek(at, offset, *current);
        }
    }

    /// The member's identity in the group at this moment.
    pub fn group_metadata(&self) -> Option<GroupMetadata> {
        group::metadata(self.native.upgrade()?.as_ref())
    }

    /// The member's identity for a transaction that commits offsets of these partitions; `None` if it is in no generation of
    /// the group, or one of them was revoked, even if the owner was not told yet. Those of a revocation that is still waited
    /// for may be committed. With `group.protocol = consumer` there is never one: see [`refusal::processor`].
    ///
    /// The identity is read first. A partition is taken off the list of the assigned ones, and a revocation ends, before the
    /// group goes on to the generation in which another member gets it. So whatever passes belongs to the identity's
    /// generation, and the broker refuses the offsets once that is over.
    pub fn owner_of(
        &self,
        partitions: &[TopicPartition],
        revocation: Option<&Revocation>,
    ) -> Option<Ownership> {
        let member = self.group_metadata()?;
        // A broker takes offsets without a member from anyone.
        if member.generation <= 0 || member.member.is_empty() || self.shared.is_by_broker() {
            return None;
        }
        let since = |at: &TopicPartition| match revocation {
            Some(revocation) if revocation.partitions.contains(at) => self.shared.leaving_since(at),
            _ => self.shared.assigned_since(at, *self.epochs.get(at)?),
        };
        let owned = partitions.iter().map(|at| Some((at.clone(), since(at)?)));
        Some(Ownership { member, partitions: owned.collect::<Option<_>>()?, shared: self.shared.clone() })
    }

    /// Commits offsets of the next records to the broker, without waiting.
    pub fn commit<'p>(&self, offsets: impl IntoIterator<Item = (&'p TopicPartition, i64)>) {
        let mut list = TopicPartitionList::new();
        for (at, offset) in offsets {
            // Only a position that is not an offset is refused.
            let _ = list.add_partition_offset(&at.topic, at.partition, Offset::Offset(offset));
        }
        if list.count() > 0
            && let Some(native) = self.native.upgrade()
            && let Err(error) = native.commit(&list, CommitMode::Async)
        {
            tracing::debug!(%error, "offsets were not committed to the broker");
        }
    }
}

impl Consumer {
    /// Leaves the group, and waits for that, but not for longer than 10 s. Partitions that it has are let go of at once.
    pub async fn close(&mut self) {
        self.shared.stop();
        let events = async {
            // Dropping a revocation answers it.
            while self.control.recv().await.is_some() {}
            std::future::pending::<()>().await;
        };
        tokio::select! {
            _ = &mut self.left => {}
            () = events => {}
            () = tokio::time::sleep(CLOSE_WAIT_MAX) => tracing::warn!("the group was not left in time"),
        }
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.shared.stop();
    }
}
