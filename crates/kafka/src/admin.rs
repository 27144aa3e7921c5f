//! Questions to a cluster: lag, open transactions and the way out of them, and the checks before the first record.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use kafka_protocol::error::{ParseResponseErrorCode, ResponseError};
use kafka_protocol::messages::describe_configs_request::DescribeConfigsResource;
use kafka_protocol::messages::list_offsets_request::{ListOffsetsPartition, ListOffsetsTopic};
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::metadata_response::MetadataResponseTopic;
use kafka_protocol::messages::offset_fetch_request::OffsetFetchRequestGroup;
use kafka_protocol::messages::{
    BrokerId, ConsumerGroupDescribeRequest, DescribeConfigsRequest, DescribeGroupsRequest,
    DescribeTransactionsRequest, InitProducerIdRequest, ListOffsetsRequest, ListTransactionsRequest,
    MetadataRequest, MetadataResponse, OffsetFetchRequest, OffsetFetchResponse, ProducerId, TransactionalId,
};

mod hanging;

pub use hanging::{BlockedPartition, HangingTransaction, OpenProducer, abort_hanging, blocked, hanging};

use crate::refusal::Refusal;
use crate::wire::{Cluster, CoordinatorKind, WireError, text};

/// Newest versions of the requests that are used.
const METADATA_MAX: i16 = 12;
const OFFSET_FETCH_MAX: i16 = 9;
const LIST_OFFSETS_MAX: i16 = 7;
const LIST_TRANSACTIONS_MAX: i16 = 1;
const DESCRIBE_TRANSACTIONS_MAX: i16 = 0;
const DESCRIBE_CONFIGS_MAX: i16 = 4;
const DESCRIBE_GROUPS_MAX: i16 = 5;
const DESCRIBE_CONSUMER_GROUPS: i16 = 0;
const INIT_PRODUCER_ID_MAX: i16 = 5;
/// How long the broker may take to end a transaction that is aborted here.
const ABORT_WAIT_MAX: Duration = Duration::from_mins(1);

/// Why a question has no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AdminError {
    /// No response.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The broker refused.
    #[error("{what}: {error}{}", right(*error))]
    Refused {
        /// What was asked for.
        what: String,
        /// The broker's code.
        error: ResponseError,
    },
    /// Whoever began the transaction may still end it.
    #[error(
        "the last record of the transaction in {partition} is {} s old, and brokers let one run for {} s: try again later",
        age_ms / 1_000,
        least_ms / 1_000
    )]
    TooYoung {
        /// Topic and partition.
        partition: String,
        /// The age of its last record, by the record's timestamp.
        age_ms: i64,
        /// The age from which it may be ended.
        least_ms: i64,
    },
}

/// What a user lacks.
fn right(error: ResponseError) -> &'static str {
    match error {
        ResponseError::TopicAuthorizationFailed
        | ResponseError::GroupAuthorizationFailed
        | ResponseError::TransactionalIdAuthorizationFailed => {
            "; the user needs the operation Describe (of a configuration, DescribeConfigs) on it: add an access control list (kafka-acls.sh)"
        }
        ResponseError::ClusterAuthorizationFailed => {
            "; the user needs it on the cluster: add an access control list (kafka-acls.sh)"
        }
        _ => "",
    }
}

pub(crate) fn refused(what: impl Into<String>) -> impl FnOnce(ResponseError) -> AdminError {
    move |error| AdminError::Refused { what: what.into(), error }
}

/// How far a group is behind in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartitionLag {
    /// The topic.
    pub topic: String,
    /// The partition's number.
    pub partition: i32,
    /// The next offset of the group.
    pub committed: i64,
    /// The end of what read_committed readers see: the start of the oldest open transaction, or the end of the log.
    pub stable_end: i64,
    /// The end of the log.
    pub end: i64,
}

impl PartitionLag {
    /// Offsets that the group can read and has not.
    pub fn lag(&self) -> i64 {
        (self.stable_end - self.committed).max(0)
    }

    /// Offsets that wait for the end of an open transaction.
    pub fn blocked(&self) -> i64 {
        (self.end - self.stable_end).max(0)
    }
}

/// The lag of a group, in every partition with a committed offset.
pub async fn lag(cluster: &Cluster, group: &str) -> Result<Vec<PartitionLag>, AdminError> {
    let found = cluster.coordinator(CoordinatorKind::Group, group).await?;
    let coordinator = found.map_err(refused(format!("the coordinator of group {group}")))?;
    let asked = OffsetFetchRequestGroup::default().with_group_id(text(group).into()).with_topics(None);
    let request = OffsetFetchRequest::default().with_groups(vec![asked]);
    let (answer, _) = cluster.call_at(&coordinator, &request, OFFSET_FETCH_MAX).await?;
    // A coordinator that reads its offsets, for example, must not be taken for a group without any.
    if let Some(error) = first_error(&answer) {
        return Err(refused(format!("the offsets of group {group}"))(error));
    }
    let mut lags = Vec::new();
    for topic in answer.groups.iter().flat_map(|group| &group.topics) {
        let name = topic.name.to_string();
        let committed: BTreeMap<i32, i64> = topic
            .partitions
            .iter()
            .filter(|part| part.committed_offset >= 0)
            .map(|part| (part.partition_index, part.committed_offset))
            .collect();
        let partitions: Vec<i32> = committed.keys().copied().collect();
        let ends = ends(cluster, &name, &partitions, 0).await?;
        let stable = self::ends(cluster, &name, &partitions, 1).await?;
        for (partition, committed) in committed {
            let end = |ends: &Ends| {
                let end = ends.get(&partition).copied().unwrap_or(Err(ResponseError::LeaderNotAvailable));
                end.map_err(refused(format!("the end of {name}/{partition}")))
            };
            let (stable_end, end) = (end(&stable)?, end(&ends)?);
            lags.push(PartitionLag { topic: name.clone(), partition, committed, stable_end, end });
        }
    }
    Ok(lags)
}

fn first_error(answer: &OffsetFetchResponse) -> Option<ResponseError> {
    let of_groups = answer.groups.iter().map(|group| group.error_code);
    let topics = answer.groups.iter().flat_map(|group| &group.topics);
    let of_partitions = topics.flat_map(|topic| &topic.partitions).map(|part| part.error_code);
    of_groups.chain(of_partitions).find_map(ParseResponseErrorCode::err)
}

/// Offsets by partition, or why a broker does not tell one.
type Ends = HashMap<i32, Result<i64, ResponseError>>;

/// The ends of partitions, for readers of this isolation: 0 reads everything, 1 committed records.
async fn ends(cluster: &Cluster, topic: &str, partitions: &[i32], isolation: i8) -> Result<Ends, AdminError> {
    offsets_at(cluster, topic, partitions, isolation, END).await
}

/// Where a partition begins and ends, as times of a request for offsets.
const BEGIN: i64 = -2;
const END: i64 = -1;

async fn offsets_at(
    cluster: &Cluster,
    topic: &str,
    partitions: &[i32],
    isolation: i8,
    time: i64,
) -> Result<Ends, AdminError> {
    cluster.forget_topic(topic);
    let leaders = cluster.leaders(topic).await?.map_err(refused(format!("topic {topic}")))?;
    let mut by_node: BTreeMap<i32, Vec<ListOffsetsPartition>> = BTreeMap::new();
    for &partition in partitions {
        let leader = usize::try_from(partition).ok().and_then(|place| leaders.get(place));
        if let Some(node) = leader.and_then(|leader| leader.node) {
            let asked = ListOffsetsPartition::default().with_partition_index(partition).with_timestamp(time);
            by_node.entry(node).or_default().push(asked);
        }
    }
    let mut ends = HashMap::new();
    for (node, asked) in by_node {
        let Some(address) = cluster.broker(node) else { continue };
        let topic = ListOffsetsTopic::default().with_name(text(topic).into()).with_partitions(asked);
        let request = ListOffsetsRequest::default()
            .with_replica_id(BrokerId(-1))
            .with_isolation_level(isolation)
            .with_topics(vec![topic]);
        let (answer, _) = cluster.call_at(&address, &request, LIST_OFFSETS_MAX).await?;
        for part in answer.topics.iter().flat_map(|topic| &topic.partitions) {
            ends.insert(part.partition_index, part.error_code.err().map_or(Ok(part.offset), Err));
        }
    }
    Ok(ends)
}

/// A transaction that has not ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpenTransaction {
    /// The producer's `transactional.id`.
    pub transactional_id: String,
    /// The state as the broker names it.
    pub state: String,
    /// The producer's id and epoch.
    pub producer: (i64, i16),
    /// Its start, in milliseconds since 1970.
    pub started_ms: Option<i64>,
    /// The broker aborts it after this time.
    pub timeout_ms: i32,
    /// Where read_committed readers wait for it: topic and partition.
    pub partitions: Vec<(String, i32)>,
}

impl OpenTransaction {
    /// Whether the broker should have aborted it.
    pub fn hangs(&self, now_ms: i64) -> bool {
        self.started_ms.is_some_and(|start| now_ms - start > i64::from(self.timeout_ms))
    }
}

/// The transactions that have not ended, oldest first.
pub async fn transactions(cluster: &Cluster) -> Result<Vec<OpenTransaction>, AdminError> {
    let mut open = Vec::new();
    for address in brokers(&metadata(cluster, &[]).await?).into_values() {
        let states = ["Ongoing", "PrepareCommit", "PrepareAbort"].map(text);
        let request =
            ListTransactionsRequest::default().with_state_filters(states.into()).with_duration_filter(-1);
        let ids = listed(cluster, &address, &request).await?;
        open.extend(describe(cluster, &address, ids).await?);
    }
    open.retain(is_open);
    open.sort_by_key(|transaction| transaction.started_ms);
    Ok(open)
}

fn is_open(transaction: &OpenTransaction) -> bool {
    matches!(transaction.state.as_str(), "Ongoing" | "PrepareCommit" | "PrepareAbort")
}

/// The ids of a coordinator's transactions.
async fn listed(
    cluster: &Cluster,
    address: &str,
    request: &ListTransactionsRequest,
) -> Result<Vec<TransactionalId>, AdminError> {
    let (answer, _) = cluster.call_at(address, request, LIST_TRANSACTIONS_MAX).await?;
    match answer.error_code.err() {
        Some(error) => Err(refused("the list of transactions")(error)),
        None => Ok(answer.transaction_states.into_iter().map(|state| state.transactional_id).collect()),
    }
}

async fn describe(
    cluster: &Cluster,
    address: &str,
    ids: Vec<TransactionalId>,
) -> Result<Vec<OpenTransaction>, AdminError> {
    if ids.is_empty() {
        return Ok(Vec::new());
    }
    let request = DescribeTransactionsRequest::default().with_transactional_ids(ids);
    let (answer, _) = cluster.call_at(address, &request, DESCRIBE_TRANSACTIONS_MAX).await?;
    let mut described = Vec::new();
    for state in answer.transaction_states {
        match state.error_code.err() {
            Some(ResponseError::TransactionalIdNotFound) => continue,
            Some(error) => {
                let what = format!("the transaction of {}", state.transactional_id.as_str());
                return Err(refused(what)(error));
            }
            None => {}
        }
        let partitions = state.topics.iter();
        let partitions =
            partitions.flat_map(|topic| topic.partitions.iter().map(|part| (topic.topic.to_string(), *part)));
        described.push(OpenTransaction {
            transactional_id: state.transactional_id.to_string(),
            state: state.transaction_state.to_string(),
            producer: (state.producer_id.0, state.producer_epoch),
            started_ms: Some(state.transaction_start_time_ms).filter(|time| *time >= 0),
            timeout_ms: state.transaction_timeout_ms,
            partitions: partitions.collect(),
        });
    }
    Ok(described)
}

/// What is known of a `transactional.id`; `None`: nothing, or no transaction of it is open.
pub async fn transaction(cluster: &Cluster, id: &str) -> Result<Option<OpenTransaction>, AdminError> {
    let found = cluster.coordinator(CoordinatorKind::Transaction, id).await?;
    let coordinator = found.map_err(refused(format!("the transactional id {id}")))?;
    let found = describe(cluster, &coordinator, vec![text(id).into()]).await?;
    Ok(found.into_iter().find(is_open))
}

/// Aborts the open transaction of a `transactional.id`, and fences its producer: if it still runs, it ends with an error.
/// `None`: no transaction is open, and nothing was done.
pub async fn abort(cluster: &Cluster, id: &str) -> Result<Option<OpenTransaction>, AdminError> {
    let Some(open) = transaction(cluster, id).await? else { return Ok(None) };
    let request = InitProducerIdRequest::default()
        .with_transactional_id(Some(text(id).into()))
        .with_transaction_timeout_ms(open.timeout_ms)
        .with_producer_id(ProducerId(-1))
        .with_producer_epoch(-1);
    let mut waited = Duration::ZERO;
    loop {
        let found = cluster.coordinator(CoordinatorKind::Transaction, id).await?;
        let coordinator = found.map_err(refused(format!("the coordinator of {id}")))?;
        let (answer, _) = cluster.call_at(&coordinator, &request, INIT_PRODUCER_ID_MAX).await?;
        match answer.error_code.err() {
            None => return Ok(Some(open)),
            // The transaction is being aborted, or the coordinator has moved.
            Some(error)
                if (matches!(error, ResponseError::ConcurrentTransactions) || error.is_retriable())
                    && waited < ABORT_WAIT_MAX =>
            {
                cluster.forget_coordinator(CoordinatorKind::Transaction, id);
                let wait = Duration::from_millis(200);
                tokio::time::sleep(wait).await;
                waited += wait;
            }
            Some(error) => return Err(refused(format!("the abort of {id}"))(error)),
        }
    }
}

async fn metadata(cluster: &Cluster, topics: &[String]) -> Result<MetadataResponse, AdminError> {
    let asked =
        topics.iter().map(|topic| MetadataRequestTopic::default().with_name(Some(text(topic).into())));
    let request =
        MetadataRequest::default().with_topics(Some(asked.collect())).with_allow_auto_topic_creation(false);
    Ok(cluster.call_any(&request, METADATA_MAX).await?.0)
}

/// Addresses of all brokers, by their ids.
pub(crate) async fn broker_addresses(cluster: &Cluster) -> Result<BTreeMap<i32, String>, AdminError> {
    Ok(brokers(&metadata(cluster, &[]).await?))
}

/// The address for changes of the cluster.
pub(crate) async fn controller(cluster: &Cluster) -> Result<String, AdminError> {
    let described = metadata(cluster, &[]).await?;
    let address = brokers(&described).remove(&described.controller_id.0);
    address.ok_or_else(|| refused("the controller")(ResponseError::NotController))
}

/// Addresses by the brokers' ids.
fn brokers(metadata: &MetadataResponse) -> BTreeMap<i32, String> {
    let address = |broker: &kafka_protocol::messages::metadata_response::MetadataResponseBroker| {
        (broker.node_id.0, format!("{}:{}", broker.host, broker.port))
    };
    metadata.brokers.iter().map(address).collect()
}

/// What a program wants of a cluster.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// The `transactional.id` that it will use.
    pub transactional_id: Option<String>,
    /// The `transaction.timeout.ms` that it will use.
    pub transaction_timeout_ms: Option<u64>,
    /// The topics that it reads and writes.
    pub topics: Vec<String>,
    /// Those that its group reads. Default: all topics.
    pub inputs: Option<Vec<String>>,
    /// The group that it will join.
    pub group: Option<String>,
    /// With how many members. 0, the default, counts as one.
    pub members: usize,
}

/// What was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Findings {
    /// The guarantee does not hold.
    pub refused: Vec<Refusal>,
    /// It holds, but less than it could.
    pub warnings: Vec<Refusal>,
}

/// Copies of each record, and copies that have it before it is acknowledged: with fewer, the loss of one machine can lose
/// records that were acknowledged.
const REPLICATION_MIN: usize = 3;
const IN_SYNC_MIN: usize = 2;

/// Compares a cluster with what a program wants of it, before the first record.
pub async fn check(cluster: &Cluster, wanted: &Wanted) -> Result<Findings, AdminError> {
    let mut found = Findings::default();
    let level = cluster.versions().await?.feature("transaction.version");
    if level < 2 {
        let remedy = format!(
            "a delayed commit could end the next transaction; it needs Kafka 4.0 or later, and there: \
             kafka-features.sh --bootstrap-server {} upgrade --feature transaction.version=2",
            cluster.connect().bootstrap.join(",")
        );
        found.refused.push(Refusal::new("transaction.version", level.to_string(), remedy));
    }
    let described = metadata(cluster, &wanted.topics).await?;
    let brokers = brokers(&described);
    check_timeout(cluster, wanted, &brokers, &mut found).await?;
    if let Some(id) = &wanted.transactional_id
        && let Some(Some(open)) = examined(transaction(cluster, id).await, &mut found)?
    {
        let (producer, epoch) = open.producer;
        let remedy = format!(
            "producer {producer} with epoch {epoch} has a transaction open under it: another instance uses this id, or one has \
             died; give each instance its own id, wait {} ms, or run: hapax kafka abort {id}",
            open.timeout_ms
        );
        found.refused.push(Refusal::new("transactional.id", id.as_str(), remedy));
    }
    let mut partitions = 0;
    for topic in &described.topics {
        let name = topic.name.as_ref().map(|name| name.to_string()).unwrap_or_default();
        if let Some(error) = topic.error_code.err() {
            let remedy = match right(error) {
                "" => "; create it first",
                right => right,
            };
            found.refused.push(Refusal::new("topic", name, format!("{error}{remedy}")));
            continue;
        }
        if wanted.inputs.as_ref().is_none_or(|inputs| inputs.contains(&name)) {
            partitions += topic.partitions.len();
        }
        let numbers: Vec<i32> = topic.partitions.iter().map(|part| part.partition_index).collect();
        found.warnings.extend(skew(cluster, &name, &numbers).await?);
        examine_copies(cluster, &brokers, topic, &mut found).await?;
    }
    if let Some(group) = &wanted.group {
        let more = wanted.members.max(1);
        check_members(cluster, group, partitions, more, &mut found).await?;
    }
    Ok(found)
}

/// The part of [`check`] that each processor asks for: whether the records of topics survive the loss of a machine. Topics that do not
/// exist are passed over.
#[cfg(feature = "consumer")]
pub(crate) async fn check_copies(cluster: &Cluster, topics: &[String]) -> Result<Findings, AdminError> {
    let mut found = Findings::default();
    let described = metadata(cluster, topics).await?;
    let brokers = brokers(&described);
    for topic in described.topics.iter().filter(|topic| topic.error_code.err().is_none()) {
        examine_copies(cluster, &brokers, topic, &mut found).await?;
    }
    Ok(found)
}

async fn examine_copies(
    cluster: &Cluster,
    brokers: &BTreeMap<i32, String>,
    topic: &MetadataResponseTopic,
    found: &mut Findings,
) -> Result<(), AdminError> {
    let name = topic.name.as_ref().map(|name| name.to_string()).unwrap_or_default();
    let replication = topic.partitions.iter().map(|part| part.replica_nodes.len()).min().unwrap_or(0);
    let in_sync = config(cluster, brokers, 2, &name, "min.insync.replicas").await;
    let Some(in_sync) = examined(in_sync, found)? else { return Ok(()) };
    let in_sync = in_sync.and_then(|value| value.parse().ok()).unwrap_or(1);
    if let Some((key, value, least)) = too_few_copies(replication, in_sync) {
        let remedy = format!(
            "with one machine, acknowledged records of topic {name} can be lost; at least {least} is needed"
        );
        // With one broker there is nothing better.
        let list = if brokers.len() == 1 { &mut found.warnings } else { &mut found.refused };
        list.push(Refusal::new(key, value.to_string(), remedy));
    }
    Ok(())
}

/// The setting that is too low, its value, and the least that is needed.
fn too_few_copies(replication: usize, in_sync: usize) -> Option<(&'static str, usize, usize)> {
    if replication < REPLICATION_MIN {
        Some(("replication factor", replication, REPLICATION_MIN))
    } else if in_sync < IN_SYNC_MIN {
        Some(("min.insync.replicas", in_sync, IN_SYNC_MIN))
    } else {
        None
    }
}

/// What was not permitted to be examined is a warning.
fn examined<T>(asked: Result<T, AdminError>, found: &mut Findings) -> Result<Option<T>, AdminError> {
    match asked {
        Ok(answer) => Ok(Some(answer)),
        Err(AdminError::Refused { what, error }) => {
            let remedy = format!(
                "{error}: it could not be examined; allow it (kafka-acls.sh), or look at it yourself"
            );
            found.warnings.push(Refusal::new("access control list", what, remedy));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

async fn check_timeout(
    cluster: &Cluster,
    wanted: &Wanted,
    brokers: &BTreeMap<i32, String>,
    found: &mut Findings,
) -> Result<(), AdminError> {
    let Some(timeout_ms) = wanted.transaction_timeout_ms else { return Ok(()) };
    for node in brokers.keys() {
        let max = config(cluster, brokers, 4, &node.to_string(), "transaction.max.timeout.ms").await;
        let Some(max) = examined(max, found)? else { break };
        if let Some(max) = max.and_then(|value| value.parse::<u64>().ok())
            && timeout_ms > max
        {
            let remedy = format!(
                "the maximum of broker {node} is {max}; use at most that, or raise transaction.max.timeout.ms there"
            );
            found.refused.push(Refusal::new("transaction.timeout.ms", timeout_ms.to_string(), remedy));
            break;
        }
    }
    Ok(())
}

/// With fewer records one cannot tell.
const SKEW_RECORDS_MIN: i64 = 1_000;

/// Whether the largest partition has four fifths of all records, or three times an even share.
fn is_skewed(most: i64, total: i64, partitions: i64) -> bool {
    let enough = total >= SKEW_RECORDS_MIN && partitions > 1;
    enough && (most * 5 >= total * 4 || (partitions > 3 && most * partitions >= total * 3))
}

/// A warning if one partition has most of a topic's records.
async fn skew(cluster: &Cluster, topic: &str, partitions: &[i32]) -> Result<Option<Refusal>, AdminError> {
    let count = partitions.len() as i64;
    let begins = offsets_at(cluster, topic, partitions, 0, BEGIN).await?;
    let ends = ends(cluster, topic, partitions, 0).await?;
    let size = |partition: &i32| match (ends.get(partition), begins.get(partition)) {
        (Some(Ok(end)), Some(Ok(begin))) => end - begin,
        _ => 0,
    };
    let total: i64 = partitions.iter().map(size).sum();
    let Some((most, partition)) = partitions.iter().map(|partition| (size(partition), partition)).max()
    else {
        return Ok(None);
    };
    if !is_skewed(most, total, count) {
        return Ok(None);
    }
    let remedy = format!(
        "partition {partition} of topic {topic} has {most} of {total} offsets: the member that has it does most of the work, and more \
         members will not help; use keys with more values"
    );
    Ok(Some(Refusal::new("skew", format!("{}%", most * 100 / total), remedy)))
}

async fn check_members(
    cluster: &Cluster,
    group: &str,
    partitions: usize,
    more: usize,
    found: &mut Findings,
) -> Result<(), AdminError> {
    let coordinator = cluster.coordinator(CoordinatorKind::Group, group).await?;
    let coordinator = coordinator.map_err(refused(format!("the operation Describe on group {group}")));
    let Some(coordinator) = examined(coordinator, found)? else { return Ok(()) };
    let request = DescribeGroupsRequest::default().with_groups(vec![text(group).into()]);
    let (answer, _) = cluster.call_at(&coordinator, &request, DESCRIBE_GROUPS_MAX).await?;
    let mut members = answer.groups.iter().map(|group| group.members.len()).sum::<usize>();
    if members == 0 {
        // A group of the other protocol (KIP-848), which a broker before 4.0 does not know.
        let request = ConsumerGroupDescribeRequest::default().with_group_ids(vec![text(group).into()]);
        if let Ok((answer, _)) = cluster.call_at(&coordinator, &request, DESCRIBE_CONSUMER_GROUPS).await {
            members = answer.groups.iter().map(|group| group.members.len()).sum();
        }
    }
    let idle = (members + more).saturating_sub(partitions).min(more);
    if idle > 0 && partitions > 0 {
        let remedy = format!(
            "{more} more would join, and there are {partitions} partitions: {idle} of them would have none; add partitions, or \
             start fewer"
        );
        found.warnings.push(Refusal::new("members", members.to_string(), remedy));
    }
    Ok(())
}

/// A value of the configuration of a topic (2) or a broker (4).
pub(crate) async fn config(
    cluster: &Cluster,
    brokers: &BTreeMap<i32, String>,
    kind: i8,
    name: &str,
    key: &str,
) -> Result<Option<String>, AdminError> {
    let resource = DescribeConfigsResource::default()
        .with_resource_type(kind)
        .with_resource_name(text(name))
        .with_configuration_keys(Some(vec![text(key)]));
    let request = DescribeConfigsRequest::default().with_resources(vec![resource]);
    // Only a broker itself knows its configuration.
    let own = name.parse().ok().and_then(|node: i32| brokers.get(&node)).filter(|_| kind == 4);
    let (answer, _) = match own {
        Some(address) => cluster.call_at(address, &request, DESCRIBE_CONFIGS_MAX).await?,
        None => cluster.call_any(&request, DESCRIBE_CONFIGS_MAX).await?,
    };
    if let Some(error) = answer.results.iter().find_map(|result| result.error_code.err()) {
        let kind = if kind == 4 { "the cluster, for broker" } else { "topic" };
        return Err(refused(format!("the operation DescribeConfigs on {kind} {name}"))(error));
    }
    let mut configs = answer.results.iter().flat_map(|result| &result.configs);
    let found = configs.find(|config| config.name.as_str() == key);
    Ok(found.and_then(|config| config.value.as_ref()).map(ToString::to_string))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_copies_of_which_two_are_written_are_enough() {
        assert_eq!(too_few_copies(3, 2), None);
        assert_eq!(too_few_copies(5, 3), None);
        assert_eq!(too_few_copies(2, 2), Some(("replication factor", 2, 3)));
        assert_eq!(too_few_copies(3, 1), Some(("min.insync.replicas", 1, 2)));
    }

    #[test]
    fn skew_is_told_from_an_even_share() {
        for (most, total, partitions, skewed) in [
            (999, 999, 2, false),
            (1_000, 1_000, 1, false),
            (800, 1_000, 2, true),
            (799, 1_000, 3, false),
            (750, 1_000, 4, true),
            (299, 1_000, 10, false),
            (300, 1_000, 10, true),
        ] {
            assert_eq!(is_skewed(most, total, partitions), skewed, "{most} of {total} in {partitions}");
        }
    }
}
