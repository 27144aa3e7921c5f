//! A compacted topic as a small store: the last committed value of a key, and the topic's creation.
//!
//! A value is read from the end of its partition backwards, because the last one is most likely near it: the time to read does
//! not depend on when the broker compacts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::create_topics_request::{CreatableTopic, CreatableTopicConfig};
use kafka_protocol::messages::fetch_request::{FetchPartition, FetchTopic};
use kafka_protocol::messages::fetch_response::{AbortedTransaction, PartitionData};
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::{BrokerId, CreateTopicsRequest, FetchRequest, ListOffsetsRequest};
use kafka_protocol::records::Record;
use tokio::time::Instant;

use crate::admin::{self, AdminError, refused};
use crate::batches::{BatchError, DecodeBudget, take_first};
use crate::partition::TopicPartition;
use crate::refusal::Refusal;
use crate::wire::{Backoff, Cluster, WireError, text};

/// The last version that names topics.
const FETCH_VERSION_MAX: i16 = 12;
const LIST_OFFSETS_VERSION_MAX: i16 = 7;
const CREATE_TOPICS_VERSION_MAX: i16 = 7;
/// Special times of ListOffsets.
const LATEST: i64 = -1;
const EARLIEST: i64 = -2;
/// Offsets that are read first, from the end; each further step is this many times as large.
const WINDOW: i64 = 16;
const WINDOW_GROWTH: i64 = 8;
/// Bytes of one response.
const FETCH_BYTES: i32 = 1 << 20;
/// How long the creation of a topic may take.
const CREATE_MS_MAX: i32 = 30_000;

/// Which records are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Isolation {
    Everything = 0,
    Committed = 1,
}

/// The last committed value of a key in a partition, or `None`.
///
/// Everything that was written before this call is seen: a transaction that is still open before the end of the partition is
/// waited for, at most until `wait_max` has passed.
pub async fn last_value(
    cluster: &Cluster,
    at: &TopicPartition,
    key: &[u8],
    wait_max: Duration,
) -> Result<Option<Bytes>, AdminError> {
    let deadline = Instant::now() + wait_max;
    let end = offset(cluster, at, LATEST, Isolation::Everything).await?;
    let mut backoff = Backoff::new();
    while offset(cluster, at, LATEST, Isolation::Committed).await? < end {
        if Instant::now() >= deadline {
            let what = format!("{at}: a transaction stays open; see `hapax kafka transactions`");
            return Err(AdminError::Refused { what, error: ResponseError::RequestTimedOut });
        }
        backoff.wait().await;
    }
    let start = offset(cluster, at, EARLIEST, Isolation::Everything).await?;
    let (mut through, mut window) = (end, WINDOW);
    while through > start {
        let from = (through - window).max(start);
        if let Some(value) = last_between(cluster, at, key, from, through).await? {
            return Ok(value);
        }
        (through, window) = (from, window.saturating_mul(WINDOW_GROWTH));
    }
    Ok(None)
}

/// The last value of a key at offsets `from` to before `through`.
async fn last_between(
    cluster: &Cluster,
    at: &TopicPartition,
    key: &[u8],
    from: i64,
    through: i64,
) -> Result<Option<Option<Bytes>>, AdminError> {
    let (mut next, mut last) = (from, None);
    while next < through {
        let data = fetch(cluster, at, next).await?;
        let bytes = data.records.clone().unwrap_or_default();
        let invalid = |reason: String| WireError::Invalid { address: at.to_string(), reason };
        let read =
            committed(bytes, data.aborted_transactions.as_deref().unwrap_or_default()).map_err(invalid)?;
        for record in read.records.into_iter().filter(|record| (next..through).contains(&record.offset)) {
            if record.key.as_deref() == Some(key) {
                last = Some(record.value);
            }
        }
        if read.next <= next {
            // Nothing is there up to the end: what was there is compacted away.
            break;
        }
        next = read.next;
    }
    Ok(last)
}

/// What a response has.
struct Read {
    records: Vec<Record>,
    /// The offset behind its last complete batch.
    next: i64,
}

/// The committed records of a response, without those of aborted transactions and without markers. If it becomes too large in memory, only
/// its first batches are read.
fn committed(mut bytes: Bytes, aborted: &[AbortedTransaction]) -> Result<Read, String> {
    let mut read = Read { records: Vec::new(), next: 0 };
    let mut budget = DecodeBudget::MAX;
    // Each transaction of the list is taken when its first batch is reached, and ended by its marker.
    let mut aborted: Vec<&AbortedTransaction> = aborted.iter().collect();
    aborted.sort_by_key(|started| std::cmp::Reverse(started.first_offset));
    let mut open: BTreeSet<i64> = BTreeSet::new();
    while let Some(batch) = take_first(&mut bytes)? {
        let (info, last) = (&batch.info, batch.last_offset);
        while let Some(started) = aborted.pop_if(|started| started.first_offset <= last) {
            open.insert(started.producer_id.0);
        }
        if info.control {
            open.remove(&info.producer_id);
        } else if !info.transactional || !open.contains(&info.producer_id) {
            match batch.records(&mut budget) {
                Ok(records) => read.records.extend(records),
                // The next fetch begins with it.
                Err(BatchError::NoRoom) => break,
                Err(BatchError::Unreadable(problem)) => return Err(problem),
            }
        }
        read.next = read.next.max(last.saturating_add(1));
    }
    Ok(read)
}

async fn leader(cluster: &Cluster, at: &TopicPartition) -> Result<String, AdminError> {
    let leaders = cluster.leaders(&at.topic).await?.map_err(refused(format!("topic {}", at.topic)))?;
    let leader = usize::try_from(at.partition).ok().and_then(|place| leaders.get(place));
    let address = leader.and_then(|leader| leader.node).and_then(|node| cluster.broker(node));
    address.ok_or_else(|| {
        cluster.forget_topic(&at.topic);
        AdminError::Refused { what: at.to_string(), error: ResponseError::LeaderNotAvailable }
    })
}

/// The error of a partition; another leader is looked up next time.
fn failed(cluster: &Cluster, at: &TopicPartition, error: ResponseError) -> AdminError {
    cluster.forget_topic(&at.topic);
    AdminError::Refused { what: at.to_string(), error }
}

async fn offset(
    cluster: &Cluster,
    at: &TopicPartition,
    time: i64,
    isolation: Isolation,
) -> Result<i64, AdminError> {
    let address = leader(cluster, at).await?;
    let asked = ListOffsetsPartition::default().with_partition_index(at.partition).with_timestamp(time);
    let topic = ListOffsetsTopic::default().with_name(text(&at.topic).into()).with_partitions(vec![asked]);
    let request = ListOffsetsRequest::default()
        .with_replica_id(BrokerId(-1))
        .with_isolation_level(isolation as i8)
        .with_topics(vec![topic]);
    let called = cluster.call_at(&address, &request, LIST_OFFSETS_VERSION_MAX).await;
    let (answer, _) = called.inspect_err(|_| cluster.forget_topic(&at.topic))?;
    let found = answer.topics.iter().flat_map(|topic| &topic.partitions).next();
    let found = found.ok_or_else(|| failed(cluster, at, ResponseError::UnknownTopicOrPartition))?;
    match found.error_code.err() {
        None => Ok(found.offset),
        Some(error) => Err(failed(cluster, at, error)),
    }
}

async fn fetch(cluster: &Cluster, at: &TopicPartition, from: i64) -> Result<PartitionData, AdminError> {
    let address = leader(cluster, at).await?;
    let partition = FetchPartition::default()
        .with_partition(at.partition)
        .with_fetch_offset(from)
        .with_partition_max_bytes(FETCH_BYTES);
    let topic = FetchTopic::default().with_topic(text(&at.topic).into()).with_partitions(vec![partition]);
    let request = FetchRequest::default()
        .with_max_bytes(FETCH_BYTES)
        .with_isolation_level(Isolation::Committed as i8)
        .with_topics(vec![topic]);
    let called = cluster.call_at(&address, &request, FETCH_VERSION_MAX).await;
    let (answer, _) = called.inspect_err(|_| cluster.forget_topic(&at.topic))?;
    if let Some(error) = answer.error_code.err() {
        return Err(failed(cluster, at, error));
    }
    let found = answer.responses.into_iter().flat_map(|topic| topic.partitions).next();
    let found = found.ok_or_else(|| failed(cluster, at, ResponseError::UnknownTopicOrPartition))?;
    match found.error_code.err() {
        None => Ok(found),
        Some(error) => Err(failed(cluster, at, error)),
    }
}

/// What a compacted topic must be like, with the values that are accepted; the first one is that of a topic that is created.
const CONFIGS: [(&str, &[&str], &str); 2] = [
    (
        "cleanup.policy",
        &["compact"],
        "records would be deleted by their age, and what was published would be forgotten",
    ),
    ("compression.type", &["producer", "uncompressed"], "the broker's compression is not read here"),
];

/// Creates a compacted topic if it does not exist, with three copies if there are as many brokers. Returns the count of its
/// partitions, or why one that exists cannot be used.
pub async fn create(
    cluster: &Cluster,
    name: &str,
    partitions: i32,
) -> Result<Result<i32, Refusal>, AdminError> {
    let brokers = admin::broker_addresses(cluster).await?;
    if cluster.leaders(name).await?.is_err() {
        let copies = i16::try_from(brokers.len()).unwrap_or(i16::MAX).clamp(1, 3);
        let mut configs: BTreeMap<&str, &str> =
            CONFIGS.iter().map(|(key, values, _)| (*key, values[0])).collect();
        configs.insert("min.insync.replicas", if copies == 3 { "2" } else { "1" });
        // Compaction passes the newest segment over, so segments are small.
        configs.extend([("segment.bytes", "16777216"), ("min.cleanable.dirty.ratio", "0.2")]);
        let config =
            |(key, value)| CreatableTopicConfig::default().with_name(text(key)).with_value(Some(text(value)));
        let topic = CreatableTopic::default()
            .with_name(text(name).into())
            .with_num_partitions(partitions)
            .with_replication_factor(copies)
            .with_configs(configs.into_iter().map(config).collect());
        let request = CreateTopicsRequest::default().with_topics(vec![topic]).with_timeout_ms(CREATE_MS_MAX);
        let controller = admin::controller(cluster).await?;
        let (answer, _) = cluster.call_at(&controller, &request, CREATE_TOPICS_VERSION_MAX).await?;
        match answer.topics.first().and_then(|topic| topic.error_code.err()) {
            None | Some(ResponseError::TopicAlreadyExists) => {}
            Some(error) => {
                let remedy = format!(
                    "the topic could not be created ({error}); create it: kafka-topics.sh --create --topic {name} \
                     --partitions {partitions} --config cleanup.policy=compact"
                );
                return Ok(Err(Refusal::new("topic", name, remedy)));
            }
        }
    }
    let count = partition_count(cluster, name).await?;
    for (key, accepted, why) in CONFIGS {
        let value = admin::config(cluster, &brokers, 2, name, key).await?.unwrap_or_default();
        if !accepted.contains(&value.as_str()) {
            let remedy = format!(
                "{why}; run: kafka-configs.sh --alter --topic {name} --add-config {key}={}",
                accepted[0]
            );
            return Ok(Err(Refusal::new(key, value, remedy)));
        }
    }
    Ok(Ok(count))
}

/// The count of partitions, once all have a leader.
async fn partition_count(cluster: &Cluster, name: &str) -> Result<i32, AdminError> {
    let deadline = Instant::now() + Duration::from_millis(CREATE_MS_MAX.unsigned_abs().into());
    let mut backoff = Backoff::new();
    loop {
        cluster.forget_topic(name);
        let error = match cluster.leaders(name).await? {
            Ok(leaders) if !leaders.is_empty() && leaders.iter().all(|leader| leader.node.is_some()) => {
                return Ok(i32::try_from(leaders.len()).unwrap_or(i32::MAX));
            }
            Ok(_) => ResponseError::LeaderNotAvailable,
            Err(error) => error,
        };
        if Instant::now() >= deadline {
            return Err(AdminError::Refused { what: format!("topic {name}"), error });
        }
        backoff.wait().await;
    }
}

#[cfg(test)]
mod tests {
    use bytes::BytesMut;
    use kafka_protocol::messages::ProducerId;
    use kafka_protocol::records::{Compression, RecordBatchEncoder, RecordEncodeOptions, TimestampType};

    use super::*;

    fn batch(offset: i64, producer: i64, control: bool, value: &str) -> Bytes {
        let record = Record {
            transactional: true,
            control,
            delete_horizon: false,
            partition_leader_epoch: 0,
            producer_id: producer,
            producer_epoch: 0,
            timestamp_type: TimestampType::Creation,
            offset,
            sequence: 0,
            timestamp: 0,
            key: Some("key".into()),
            value: Some(Bytes::copy_from_slice(value.as_bytes())),
            headers: indexmap::IndexMap::new(),
        };
        let mut bytes = BytesMut::new();
        let options = RecordEncodeOptions { version: 2, compression: Compression::None };
        RecordBatchEncoder::encode(&mut bytes, &[record], &options).unwrap();
        bytes.freeze()
    }

    fn values(read: &Read) -> Vec<&str> {
        read.records
            .iter()
            .map(|record| std::str::from_utf8(record.value.as_ref().unwrap()).unwrap())
            .collect()
    }

    #[test]
    fn aborted_transactions_are_left_out_and_later_ones_of_their_producer_are_not() {
        let log = [
            batch(4, 7, false, "aborted"),
            batch(5, 8, false, "other"),
            batch(6, 7, true, "marker"),
            batch(7, 7, false, "kept"),
            batch(8, 7, true, "marker"),
            batch(9, 7, false, "aborted too"),
        ]
        .concat();
        let aborted =
            |first| AbortedTransaction::default().with_producer_id(ProducerId(7)).with_first_offset(first);
        // The list has no order, and names a transaction that began before what was read.
        let read = committed(Bytes::from(log.clone()), &[aborted(9), aborted(2)]).unwrap();
        assert_eq!((values(&read), read.next), (vec!["other", "kept"], 10));
        let read = committed(Bytes::from(log), &[]).unwrap();
        assert_eq!(values(&read), ["aborted", "other", "kept", "aborted too"]);
    }

    #[test]
    fn a_batch_that_is_cut_off_is_read_with_the_next_response() {
        let whole = [batch(1, 7, false, "one"), batch(2, 7, false, "two")].concat();
        let first = batch(1, 7, false, "one").len();
        for cut in first..whole.len() {
            let read = committed(Bytes::copy_from_slice(&whole[..cut]), &[]).unwrap();
            assert_eq!((values(&read), read.next), (vec!["one"], 2), "{cut}");
        }
    }
}
