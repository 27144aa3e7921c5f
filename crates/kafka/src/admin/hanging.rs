//! Transactions as the partitions know them, also those that their coordinator has forgotten, and the end of the latter.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::describe_producers_request::TopicRequest;
use kafka_protocol::messages::describe_producers_response::ProducerState;
use kafka_protocol::messages::write_txn_markers_request::{WritableTxnMarker, WritableTxnMarkerTopic};
use kafka_protocol::messages::{
    DescribeProducersRequest, ListTransactionsRequest, ProducerId, WriteTxnMarkersRequest,
};

use super::{AdminError, Ends, brokers, config, describe, ends, listed, metadata, refused};
use crate::wire::{Cluster, text};

const DESCRIBE_PRODUCERS_MAX: i16 = 0;
const WRITE_TXN_MARKERS: i16 = 1;
/// The topic in which coordinators keep their transactions.
const TRANSACTIONS: &str = "__transaction_state";

/// A producer with an open transaction in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenProducer {
    /// The producer's id.
    pub id: i64,
    /// Its epoch.
    pub epoch: i32,
    /// The offset of the transaction's first record.
    pub start: i64,
    /// The time of its last record, in milliseconds since 1970, as the record has it: by the producer's clock, or what a program gave.
    pub last_ms: i64,
    coordinator_epoch: i32,
}

impl From<&ProducerState> for OpenProducer {
    fn from(state: &ProducerState) -> Self {
        Self {
            id: state.producer_id.0,
            epoch: state.producer_epoch,
            start: state.current_txn_start_offset,
            last_ms: state.last_timestamp,
            coordinator_epoch: state.coordinator_epoch,
        }
    }
}

/// A partition whose readers of committed records wait for the end of a transaction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockedPartition {
    /// The topic.
    pub topic: String,
    /// The partition's number.
    pub partition: i32,
    /// Where the readers wait: the start of the oldest open transaction.
    pub stable_end: i64,
    /// The end of the log.
    pub end: i64,
    /// The producers that have a transaction open there, oldest first. The coordinator may know nothing of it: [`hanging`].
    pub producers: Vec<OpenProducer>,
}

/// The partitions of topics whose readers of committed records wait, by the partitions' own leaders. One without a leader is an error: the
/// transactions that hang begin with those.
pub async fn blocked(cluster: &Cluster, topics: &[String]) -> Result<Vec<BlockedPartition>, AdminError> {
    let described = metadata(cluster, topics).await?;
    let addresses = brokers(&described);
    let mut blocked = Vec::new();
    for found in &described.topics {
        let topic = found.name.as_ref().map(|name| name.to_string()).unwrap_or_default();
        if let Some(error) = found.error_code.err() {
            return Err(refused(format!("topic {topic}"))(error));
        }
        let partitions: Vec<i32> = found.partitions.iter().map(|part| part.partition_index).collect();
        let all = ends(cluster, &topic, &partitions, 0).await?;
        let stable = ends(cluster, &topic, &partitions, 1).await?;
        for part in &found.partitions {
            let partition = part.partition_index;
            let offset = |ends: &Ends| {
                let found = ends.get(&partition).copied().unwrap_or(Err(ResponseError::LeaderNotAvailable));
                found.map_err(refused(format!("partition {topic}/{partition}")))
            };
            let (end, stable_end) = (offset(&all)?, offset(&stable)?);
            if stable_end >= end {
                continue;
            }
            let Some(leader) = addresses.get(&part.leader_id.0) else {
                let what = format!("the producers of {topic}/{partition}");
                return Err(refused(what)(ResponseError::LeaderNotAvailable));
            };
            let producers = producers(cluster, leader, &topic, partition).await?;
            blocked.push(BlockedPartition { topic: topic.clone(), partition, stable_end, end, producers });
        }
    }
    Ok(blocked)
}

/// The producers with an open transaction in a partition, oldest first.
async fn producers(
    cluster: &Cluster,
    leader: &str,
    topic: &str,
    partition: i32,
) -> Result<Vec<OpenProducer>, AdminError> {
    let asked = TopicRequest::default().with_name(text(topic).into()).with_partition_indexes(vec![partition]);
    let request = DescribeProducersRequest::default().with_topics(vec![asked]);
    let (answer, _) = cluster.call_at(leader, &request, DESCRIBE_PRODUCERS_MAX).await?;
    let mut producers = Vec::new();
    for part in answer.topics.iter().flat_map(|topic| &topic.partitions) {
        if let Some(error) = part.error_code.err() {
            return Err(refused(format!("the producers of {topic}/{partition}"))(error));
        }
        let open = part.active_producers.iter().filter(|state| state.current_txn_start_offset >= 0);
        producers.extend(open.map(OpenProducer::from));
    }
    producers.sort_by_key(|producer| producer.start);
    Ok(producers)
}

/// A transaction that is open in a partition, although no coordinator has it: it stays open until an operator ends it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HangingTransaction {
    /// The topic.
    pub topic: String,
    /// The partition's number.
    pub partition: i32,
    /// The producer and where its transaction begins.
    pub producer: OpenProducer,
}

/// The transactions in partitions of these topics that no coordinator knows.
///
/// A partition has an open transaction only after its coordinator has stored that the partition belongs to it, and the coordinator forgets that
/// only when the partition has the marker. So what is open before and after the coordinators were asked, and unknown to all of them, hangs.
pub async fn hanging(cluster: &Cluster, topics: &[String]) -> Result<Vec<HangingTransaction>, AdminError> {
    let mut candidates = Vec::new();
    for BlockedPartition { topic, partition, producers, .. } in blocked(cluster, topics).await? {
        for producer in producers {
            if !is_known(cluster, producer.id, &topic, partition).await? {
                candidates.push(HangingTransaction { topic: topic.clone(), partition, producer });
            }
        }
    }
    if candidates.is_empty() {
        return Ok(candidates);
    }
    let still = blocked(cluster, topics).await?;
    candidates.retain(|candidate| {
        let HangingTransaction { topic, partition, producer } = candidate;
        let here = still.iter().filter(|it| (&it.topic, it.partition) == (topic, *partition));
        here.flat_map(|it| &it.producers).any(|it| it == producer)
    });
    Ok(candidates)
}

/// Whether a coordinator has an open transaction of this producer in the partition.
async fn is_known(cluster: &Cluster, producer: i64, topic: &str, partition: i32) -> Result<bool, AdminError> {
    let described = metadata(cluster, &[TRANSACTIONS.to_owned()]).await?;
    let addresses = brokers(&described);
    // The transactions of a partition without a leader are told by none. A topic that may not be described has no partitions here.
    let error = described.topics.iter().find_map(|topic| topic.error_code.err());
    let is_empty = described.topics.iter().all(|topic| topic.partitions.is_empty());
    if let Some(error) = error.or(is_empty.then_some(ResponseError::UnknownTopicOrPartition)) {
        return Err(refused(format!("topic {TRANSACTIONS}"))(error));
    }
    let parts = described.topics.iter().flat_map(|topic| &topic.partitions);
    let mut without_leader = parts.filter(|part| !addresses.contains_key(&part.leader_id.0));
    if let Some(part) = without_leader.next() {
        let what = format!("the coordinator of {TRANSACTIONS}/{}", part.partition_index);
        return Err(refused(what)(ResponseError::LeaderNotAvailable));
    }
    let request = ListTransactionsRequest::default()
        .with_producer_id_filters(vec![ProducerId(producer)])
        .with_duration_filter(-1);
    for address in addresses.into_values() {
        let ids = listed(cluster, &address, &request).await?;
        let count = ids.len();
        let described = describe(cluster, &address, ids).await?;
        if described.len() < count {
            return Err(refused(format!("the transactions of producer {producer}"))(
                ResponseError::NotCoordinator,
            ));
        }
        let mut partitions = described.into_iter().flat_map(|it| it.partitions);
        if partitions.any(|(name, number)| name == topic && number == partition) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Beyond the longest time that a broker permits a transaction, a younger one is left to its coordinator.
const MARGIN_MS: i64 = 5 * 60_000;

/// Time between the two looks before an abort.
const LOOK_AGAIN: Duration = Duration::from_secs(3);

/// Whether the longest time that any broker permits a transaction is over for this one.
async fn require_age(
    cluster: &Cluster,
    brokers: &BTreeMap<i32, String>,
    hanging: &HangingTransaction,
) -> Result<(), AdminError> {
    let mut least_ms = 0;
    for node in brokers.keys() {
        let key = "transaction.max.timeout.ms";
        let max = config(cluster, brokers, 4, &node.to_string(), key).await?;
        let Some(max_ms) = max.and_then(|value| value.parse::<i64>().ok()) else {
            return Err(refused(format!("{key} of broker {node}"))(ResponseError::InvalidConfig));
        };
        least_ms = least_ms.max(max_ms.saturating_add(MARGIN_MS));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let age_ms = (now.as_millis() as i64).saturating_sub(hanging.producer.last_ms);
    if age_ms < least_ms {
        let partition = format!("{}/{}", hanging.topic, hanging.partition);
        return Err(AdminError::TooYoung { partition, age_ms, least_ms });
    }
    Ok(())
}

/// Writes an abort marker for a transaction that hangs in this partition and begins at this offset. `None`: none does, and nothing was done.
///
/// Its records become invisible. What its coordinator had decided cannot be found out any more: if that was a commit, they are lost here. One
/// that is younger than the brokers permit is refused: the user may lack the right to see the coordinator's entry. The age is that of the last
/// record by its own timestamp; where programs give the timestamps, it protects from nothing. The producer is not fenced.
pub async fn abort_hanging(
    cluster: &Cluster,
    topic: &str,
    partition: i32,
    start: i64,
) -> Result<Option<HangingTransaction>, AdminError> {
    let find = async || {
        let found = hanging(cluster, &[topic.to_owned()]).await?;
        let begins = |it: &HangingTransaction| it.partition == partition && it.producer.start == start;
        Ok::<_, AdminError>(found.into_iter().find(begins))
    };
    let Some(found) = find().await? else { return Ok(None) };
    let what =
        || format!("the abort marker of {topic}/{partition} (it needs the operation Alter on the cluster)");
    let described = metadata(cluster, &[topic.to_owned()]).await?;
    let parts = described.topics.iter().flat_map(|topic| &topic.partitions);
    let leader = parts.filter(|part| part.partition_index == partition).map(|part| part.leader_id.0).next();
    let addresses = brokers(&described);
    require_age(cluster, &addresses, &found).await?;
    // A producer that is alive, or a coordinator that moves, would be seen by then.
    tokio::time::sleep(LOOK_AGAIN).await;
    if find().await?.as_ref() != Some(&found) {
        return Ok(None);
    }
    let Some(address) = leader.and_then(|leader| addresses.get(&leader)) else {
        return Err(refused(what())(ResponseError::LeaderNotAvailable));
    };
    let in_topic = WritableTxnMarkerTopic::default()
        .with_name(text(topic).into())
        .with_partition_indexes(vec![partition]);
    let marker = WritableTxnMarker::default()
        .with_producer_id(ProducerId(found.producer.id))
        .with_producer_epoch(found.producer.epoch as i16)
        // Unknown in a partition that never had a marker of it.
        .with_coordinator_epoch(found.producer.coordinator_epoch.max(0))
        .with_transaction_result(false)
        .with_topics(vec![in_topic]);
    let request = WriteTxnMarkersRequest::default().with_markers(vec![marker]);
    let (answer, _) = cluster.call_at(address, &request, WRITE_TXN_MARKERS).await?;
    let topics = answer.markers.iter().flat_map(|marker| &marker.topics);
    let mut parts = topics.flat_map(|topic| &topic.partitions);
    let written = parts.find(|part| part.partition_index == partition).map(|part| part.error_code.err());
    match written.unwrap_or(Some(ResponseError::UnknownServerError)) {
        Some(error) => Err(refused(what())(error)),
        None => Ok(Some(found)),
    }
}
