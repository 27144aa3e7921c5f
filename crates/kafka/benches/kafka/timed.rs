//! Notes when a processor has committed its last batch. What comes after it, leaving the group, is not timed of the other loops.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use hapax_kafka::consumer::{Event, Ownership, Revocation, TopicPartition};
use hapax_kafka::processor::{Client, CommitAnswer, KafkaClient, ProcessorError, TopicIds};
use hapax_kafka::producer::{NewRecord, NextOffset, ProducerError};

pub struct Timed {
    pub inner: KafkaClient,
    /// When the processor began to close its client.
    pub closed: Arc<OnceLock<Instant>>,
}

impl Client for Timed {
    async fn next(&mut self) -> Event {
        self.inner.next().await
    }

    fn try_next(&mut self) -> Option<Event> {
        self.inner.try_next()
    }

    fn seek(&mut self, at: &TopicPartition, offset: i64) {
        self.inner.seek(at, offset);
    }

    fn owner_of(&self, partitions: &[TopicPartition], revocation: Option<&Revocation>) -> Option<Ownership> {
        self.inner.owner_of(partitions, revocation)
    }

    fn begin(&mut self) -> Result<(), ProducerError> {
        self.inner.begin()
    }

    async fn send(&mut self, record: NewRecord) -> Result<(), ProducerError> {
        self.inner.send(record).await
    }

    async fn topic_ids(&self, topics: &BTreeSet<Arc<str>>) -> Result<TopicIds, ProducerError> {
        self.inner.topic_ids(topics).await
    }

    async fn prepare(
        &mut self,
        owner: Ownership,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> Result<(), ProcessorError> {
        self.inner.prepare(owner, next).await
    }

    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }

    fn commit(&mut self) -> CommitAnswer {
        self.inner.commit()
    }

    async fn abort(&mut self) -> Result<bool, ProducerError> {
        self.inner.abort().await
    }

    async fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> Result<BTreeMap<TopicPartition, NextOffset>, ProducerError> {
        self.inner.settle(group, partitions).await
    }

    async fn close(&mut self) {
        self.closed.get_or_init(Instant::now);
        self.inner.close().await;
    }
}
