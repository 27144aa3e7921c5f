//! What a processor needs of a Kafka client: the seam where another client can stand.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use hapax_core::mutant;
use kafka_protocol::error::ResponseError;
use tokio::time::Instant;

use super::{ProcessorConfig, ProcessorError};
use crate::consumer::{Consumer, ConsumerConfig, Event, Revocation};
use crate::machine::State;
use crate::partition::{GroupMetadata, TopicId, TopicPartition};
use crate::producer::{Cause, NewRecord, NextOffset, Producer, ProducerConfig, ProducerError};
use crate::wire::{Backoff, Cluster};

/// The ids of topics by name, or why a broker does not tell one.
pub type TopicIds = BTreeMap<String, Result<TopicId, ResponseError>>;

/// The known-bad variant that commits offsets when a record is read, and not in its transaction.
const OFFSETS_APART: &str = "kafka-offsets-apart";

pub(super) const TOPIC_IDS: &str = "reading the ids of topics";

/// A member of a group with a transactional producer.
pub trait Client: Send {
    /// The next event of the group. Safe to cancel.
    fn next(&mut self) -> impl Future<Output = Event> + Send;
    /// Continues at another offset of an assigned partition.
    fn seek(&mut self, at: &TopicPartition, offset: i64);
    /// The member's identity, if it has all of these partitions since their records were read, or gives them up by this
    /// revocation. Offsets that are committed under it are refused by the broker after another member has got one of them.
    fn owner_of(
        &self,
        partitions: &[TopicPartition],
        revocation: Option<&Revocation>,
    ) -> Option<GroupMetadata>;
    /// Begins a transaction.
    fn begin(&mut self) -> Result<(), ProducerError>;
    /// Adds a record to the transaction.
    fn send(&mut self, record: NewRecord) -> impl Future<Output = Result<(), ProducerError>> + Send;
    /// The ids of topics at this moment.
    fn topic_ids(
        &self,
        topics: &BTreeSet<Arc<str>>,
    ) -> impl Future<Output = Result<TopicIds, ProducerError>> + Send;
    /// Writes the records of the transaction and the group's next offsets, and asks meanwhile whether the topics still are those
    /// that the offsets belong to. Safe to cancel; then `abort` follows.
    fn prepare(
        &mut self,
        group: GroupMetadata,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> impl Future<Output = Result<(), ProcessorError>> + Send;
    /// Whether the request to commit may have been sent: the transaction must not be aborted any more.
    fn is_commit_sent(&self) -> bool;
    /// Commits the transaction that was prepared. Safe to cancel; if the request may have been sent, it is called again.
    fn commit(&mut self) -> impl Future<Output = Result<(), ProducerError>> + Send;
    /// Aborts the transaction.
    fn abort(&mut self) -> impl Future<Output = Result<(), ProducerError>> + Send;
    /// After a commit of unknown outcome: settles it, and returns the committed offsets of the partitions that have one.
    fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> impl Future<Output = Result<BTreeMap<TopicPartition, i64>, ProducerError>> + Send;
    /// Leaves the group, within a bounded time.
    fn close(&mut self) -> impl Future<Output = ()> + Send;
}

/// librdkafka's consumer with this crate's producer.
#[derive(Debug)]
pub struct KafkaClient {
    /// The member of the group.
    pub consumer: Consumer,
    /// The producer.
    pub producer: Producer,
}

impl KafkaClient {
    /// Checks that a batch fits into a transaction, takes the transactional id over, and then joins the group: the
    /// transaction of a predecessor is ended before its offsets are read.
    pub async fn connect(
        consumer: &ConsumerConfig,
        producer: ProducerConfig,
        processor: &ProcessorConfig,
    ) -> Result<Self, ProcessorError> {
        let batch = processor.batch_time_max + processor.handler_timeout;
        if producer.transaction_timeout < batch {
            let remedy = format!(
                "the broker would abort a batch that takes its time: at least {} ms, the bound of a batch, is needed",
                batch.as_millis()
            );
            let value = producer.transaction_timeout.as_millis().to_string();
            let refused = ProducerError::Refused { key: "transaction.timeout.ms", value, remedy };
            return Err(refused.into());
        }
        // A rebalance waits until a handler that runs has ended, and while a commit of unknown outcome is settled.
        let (settling, delivery) = (producer.transaction_timeout, producer.delivery_timeout);
        let mut consumer = consumer.clone();
        consumer.revoke_wait = consumer.revoke_wait.max(processor.handler_timeout + processor.revoke_timeout);
        consumer.assign_wait = consumer.assign_wait.max(settling + delivery * 2);
        let producer = Producer::connect(producer).await?;
        Ok(Self { consumer: Consumer::start(&consumer)?, producer })
    }
}

impl Client for KafkaClient {
    async fn next(&mut self) -> Event {
        let event = self.consumer.next().await;
        if mutant::is(OFFSETS_APART)
            && let Event::Record(record) = &event
        {
            self.consumer.commit([(&record.at, record.offset + 1)]);
        }
        event
    }

    fn seek(&mut self, at: &TopicPartition, offset: i64) {
        self.consumer.seek(at, offset);
    }

    fn owner_of(
        &self,
        partitions: &[TopicPartition],
        revocation: Option<&Revocation>,
    ) -> Option<GroupMetadata> {
        self.consumer.owner_of(partitions, revocation)
    }

    fn begin(&mut self) -> Result<(), ProducerError> {
        self.producer.begin()
    }

    async fn send(&mut self, record: NewRecord) -> Result<(), ProducerError> {
        self.producer.send(record).await
    }

    async fn topic_ids(&self, topics: &BTreeSet<Arc<str>>) -> Result<TopicIds, ProducerError> {
        let asked = self.producer.cluster().topic_ids(topics.iter().map(|topic| &**topic));
        asked.await.map_err(|error| ProducerError::Unavailable { what: TOPIC_IDS, cause: error.into() })
    }

    async fn prepare(
        &mut self,
        group: GroupMetadata,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> Result<(), ProcessorError> {
        let cluster = self.producer.cluster().clone();
        let deadline = Instant::now() + self.producer.delivery_timeout();
        if !mutant::is(OFFSETS_APART) {
            self.producer.offsets(group, next.iter().cloned())?;
        }
        let prepared = async { Ok(self.producer.prepare().await?) };
        tokio::try_join!(prepared, same_topics(&cluster, &next, deadline))?;
        Ok(())
    }

    fn is_commit_sent(&self) -> bool {
        matches!(self.producer.state(), State::Committing | State::Unknown)
    }

    async fn commit(&mut self) -> Result<(), ProducerError> {
        self.producer.commit().await
    }

    async fn abort(&mut self) -> Result<(), ProducerError> {
        self.producer.abort().await
    }

    async fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> Result<BTreeMap<TopicPartition, i64>, ProducerError> {
        self.producer.recover().await?;
        self.producer.committed(group, partitions).await
    }

    async fn close(&mut self) {
        self.consumer.close().await;
    }
}

/// Whether the topics are those that the offsets belong to. Their records were read before this is asked, and ids are never used
/// again: if the answer is the same id, the records are of that topic.
async fn same_topics(
    cluster: &Cluster,
    next: &[(TopicPartition, NextOffset)],
    deadline: Instant,
) -> Result<(), ProcessorError> {
    let topics: BTreeSet<&str> = next.iter().map(|(at, _)| &*at.topic).collect();
    let mut backoff = Backoff::new();
    loop {
        let cause = match cluster.topic_ids(topics.iter().copied()).await {
            Ok(ids) => {
                require_same(next.iter().filter_map(|(at, next)| Some((at, next.topic_id?))), &ids)?;
                match ids.into_values().find_map(Result::err) {
                    None => return Ok(()),
                    Some(error) => Cause::Broker(error),
                }
            }
            Err(error) => Cause::Wire(error),
        };
        if Instant::now() >= deadline {
            return Err(ProducerError::Abort { what: TOPIC_IDS, cause }.into());
        }
        backoff.wait().await;
    }
}

/// An error if a topic has another id by now. One that is not known at this moment has none.
pub(super) fn require_same<'p>(
    partitions: impl IntoIterator<Item = (&'p TopicPartition, TopicId)>,
    ids: &TopicIds,
) -> Result<(), ProcessorError> {
    for (at, before) in partitions {
        if let Some(Ok(now)) = ids.get(&*at.topic)
            && *now != before
        {
            let topic = at.topic.to_string();
            return Err(ProcessorError::TopicRecreated { topic, before, now: *now });
        }
    }
    Ok(())
}
