//! Requests to the group's coordinator: offsets in a transaction, and the committed ones.

use std::collections::BTreeMap;
use std::sync::Arc;

use kafka_protocol::error::ParseResponseErrorCode as _;
use kafka_protocol::messages::offset_fetch_request::OffsetFetchRequestTopic;
use kafka_protocol::messages::txn_offset_commit_request::{
    TxnOffsetCommitRequestPartition, TxnOffsetCommitRequestTopic,
};
use kafka_protocol::messages::{OffsetFetchRequest, OffsetFetchResponse, TxnOffsetCommitRequest};
use tokio::time::Instant;

use super::error::{Meaning, meaning};
use super::transaction::{call_coordinator, may_retry};
use super::{Cause, NextOffset, Producer, ProducerError};
use crate::partition::{TopicId, TopicPartition};
use crate::wire::{Backoff, Cluster, CoordinatorKind, WireError, text};

/// The version that adds the group to the transaction implicitly.
const OFFSETS_VERSION: i16 = 5;
/// The first version that can wait for transactions; the next one asks for several groups.
const FETCH_VERSION: i16 = 7;
const FETCH: &str = "reading the committed offsets";

impl Producer {
    /// The committed offsets of a group, of the partitions that have one, with the topics that they were committed for, if that is
    /// known. Offsets of a transaction that is being ended are waited for.
    pub async fn committed(
        &self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> Result<BTreeMap<TopicPartition, NextOffset>, ProducerError> {
        let mut topics: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for at in partitions {
            topics.entry(&at.topic).or_default().push(at.partition);
        }
        let topic = |(name, indexes)| {
            OffsetFetchRequestTopic::default().with_name(text(name).into()).with_partition_indexes(indexes)
        };
        let request = OffsetFetchRequest::default()
            .with_group_id(text(group).into())
            .with_topics(Some(topics.into_iter().map(topic).collect()))
            .with_require_stable(true);
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            let kind = CoordinatorKind::Group;
            let called = call_coordinator(&self.cluster, kind, group, &request, FETCH_VERSION).await;
            let cause = match called.and_then(|response| read_offsets(&response)) {
                Ok(offsets) => return Ok(offsets),
                Err(cause) => cause,
            };
            if !may_retry(&cause) {
                return Err(ProducerError::Fatal { what: FETCH, cause });
            }
            if Instant::now() >= deadline {
                return Err(ProducerError::Unavailable { what: FETCH, cause });
            }
            self.cluster.forget_coordinator(kind, group);
            backoff.wait().await;
        }
    }

    /// The transaction's offsets as a request; the same bytes in each attempt.
    pub(super) fn offsets_request(&self) -> Option<TxnOffsetCommitRequest> {
        let (group, offsets) = self.offsets.as_ref()?;
        let identity = self.identity()?;
        let mut topics: BTreeMap<&str, Vec<TxnOffsetCommitRequestPartition>> = BTreeMap::new();
        for (partition, next) in offsets {
            topics.entry(&partition.topic).or_default().push(
                TxnOffsetCommitRequestPartition::default()
                    .with_partition_index(partition.partition)
                    .with_committed_offset(next.offset)
                    .with_committed_metadata(Some(text(
                        &next.topic_id.map(TopicId::note).unwrap_or_default(),
                    ))),
            );
        }
        let request = TxnOffsetCommitRequest::default()
            .with_transactional_id(text(&self.config.transactional_id).into())
            .with_group_id(text(&group.group).into())
            .with_producer_id(identity.producer_id.into())
            .with_producer_epoch(identity.epoch)
            .with_generation_id(group.generation)
            .with_member_id(text(&group.member))
            .with_group_instance_id(group.instance.as_deref().map(text))
            .with_topics(
                topics
                    .into_iter()
                    .map(|(topic, partitions)| {
                        TxnOffsetCommitRequestTopic::default()
                            .with_name(text(topic).into())
                            .with_partitions(partitions)
                    })
                    .collect(),
            );
        Some(request)
    }
}

/// The offsets, if there is no error in any partition.
fn read_offsets(response: &OffsetFetchResponse) -> Result<BTreeMap<TopicPartition, NextOffset>, Cause> {
    if let Some(error) = response.error_code.err() {
        return Err(Cause::Broker(error));
    }
    let mut offsets = BTreeMap::new();
    for topic in &response.topics {
        for partition in &topic.partitions {
            if let Some(error) = partition.error_code.err() {
                return Err(Cause::Broker(error));
            }
            if partition.committed_offset >= 0 {
                let at = TopicPartition::new(topic.name.as_str(), partition.partition_index);
                let topic_id = partition.metadata.as_deref().and_then(TopicId::noted);
                offsets.insert(at, NextOffset { offset: partition.committed_offset, topic_id });
            }
        }
    }
    Ok(offsets)
}

/// Sends a transaction's offsets to the group's coordinator until they are written. Returns whether an attempt stayed unanswered: then
/// a copy of them may arrive later.
pub(super) async fn send_offsets(
    cluster: Arc<Cluster>,
    request: TxnOffsetCommitRequest,
    deadline: Instant,
) -> Result<bool, Cause> {
    let group = request.group_id.to_string();
    let mut backoff = Backoff::new();
    let mut unanswered = false;
    loop {
        let called =
            call_coordinator(&cluster, CoordinatorKind::Group, &group, &request, OFFSETS_VERSION).await;
        let cause = match called {
            Ok(response) => {
                let mut errors = response.topics.iter().flat_map(|topic| &topic.partitions);
                match errors.find_map(|partition| partition.error_code.err()) {
                    None => return Ok(unanswered),
                    Some(error) => Cause::Broker(error),
                }
            }
            Err(cause) => cause,
        };
        if !may_retry(&cause) || Instant::now() >= deadline {
            return Err(cause);
        }
        unanswered |= matches!(&cause, Cause::Wire(error) if !matches!(error, WireError::Connect { .. }));
        if let Cause::Broker(error) = &cause
            && meaning(*error) == Meaning::Moved
        {
            cluster.forget_coordinator(CoordinatorKind::Group, &group);
        }
        backoff.wait().await;
    }
}
