//! A cluster: idle connections, where partitions are led, which broker coordinates.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::metadata_request::MetadataRequestTopic;
use kafka_protocol::messages::{FindCoordinatorRequest, MetadataRequest, MetadataResponse};

use super::{Call, Connect, Connection, Versions, WireError, text};
use crate::partition::TopicId;

/// Newest version of the Metadata request that is used.
const METADATA_VERSION_MAX: i16 = 12;
/// Newest version of the FindCoordinator request that is used: the first one with several keys per request is 4.
const FIND_COORDINATOR_VERSION_MAX: i16 = 6;

/// What a coordinator coordinates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CoordinatorKind {
    /// Consumer groups.
    Group,
    /// Transactions.
    Transaction,
}

/// The broker that leads a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Leader {
    /// The broker's id; `None` while there is no leader.
    pub node: Option<i32>,
}

/// Why a partition's leader or a coordinator is not known.
pub type Lookup<T> = Result<Result<T, ResponseError>, WireError>;

/// A cluster. It is shared by reference; calls run at the same time on connections of their own.
#[derive(Debug)]
pub struct Cluster {
    connect: Arc<Connect>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Addresses by broker id.
    brokers: HashMap<i32, String>,
    /// Idle connections by address.
    idle: HashMap<String, Vec<Connection>>,
    topics: HashMap<String, KnownTopic>,
    /// Addresses by kind and key.
    coordinators: HashMap<(CoordinatorKind, String), String>,
}

#[derive(Debug, Clone)]
struct KnownTopic {
    /// In the order of partitions.
    leaders: Vec<Leader>,
    asked: Instant,
}

impl Cluster {
    /// Opens no connection yet.
    pub fn new(connect: Connect) -> Self {
        Self { connect: Arc::new(connect), state: Mutex::default() }
    }

    /// How brokers are reached.
    pub fn connect(&self) -> &Connect {
        &self.connect
    }

    /// Calls the broker at `address`.
    pub async fn call_at<R: Call>(
        &self,
        address: &str,
        request: &R,
        version_max: i16,
    ) -> Result<(R::Answer, i16), WireError> {
        let mut connection = self.connection(address).await?;
        match connection.call(request, version_max).await {
            Ok(response) => {
                self.state().idle.entry(address.to_owned()).or_default().push(connection);
                Ok(response)
            }
            Err(error) => {
                // The other connections to this broker have most likely ended too.
                self.state().idle.remove(address);
                Err(error)
            }
        }
    }

    /// Calls any broker: the known ones, then the bootstrap addresses, until one responds.
    pub async fn call_any<R: Call>(
        &self,
        request: &R,
        version_max: i16,
    ) -> Result<(R::Answer, i16), WireError> {
        let mut failure = None;
        for address in self.addresses() {
            match self.call_at(&address, request, version_max).await {
                Ok(response) => return Ok(response),
                Err(error) if error.is_transient() => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(failure.unwrap_or_else(no_address))
    }

    /// What a broker supports, and the cluster's finalised features.
    pub async fn versions(&self) -> Result<Versions, WireError> {
        let mut failure = None;
        for address in self.addresses() {
            match self.connection(&address).await {
                Ok(connection) => {
                    let versions = connection.versions().clone();
                    self.state().idle.entry(address).or_default().push(connection);
                    return Ok(versions);
                }
                Err(error) if error.is_transient() => failure = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(failure.unwrap_or_else(no_address))
    }

    /// The address of a broker.
    pub fn broker(&self, node: i32) -> Option<String> {
        self.state().brokers.get(&node).cloned()
    }

    /// The leaders of a topic's partitions, from metadata that is not too old or from a broker. Topics are not created.
    pub async fn leaders(&self, topic: &str) -> Lookup<Vec<Leader>> {
        let mut old = None;
        if let Some(known) = self.state().topics.get_mut(topic) {
            if known.asked.elapsed() < self.connect.metadata_age_max {
                return Ok(Ok(known.leaders.clone()));
            }
            // Others do not ask at the same time.
            known.asked = Instant::now();
            old = Some(known.leaders.clone());
        }
        let request = MetadataRequest::default()
            .with_topics(Some(vec![MetadataRequestTopic::default().with_name(Some(text(topic).into()))]))
            .with_allow_auto_topic_creation(false);
        match (self.call_any(&request, METADATA_VERSION_MAX).await, old) {
            (Ok((response, _)), _) => Ok(self.state().learn(topic, &response)),
            (Err(_), Some(old)) => Ok(Ok(old)),
            (Err(error), None) => Err(error),
        }
    }

    /// The ids of topics at this moment. The answer is a broker's, never what an earlier one said.
    pub async fn topic_ids(
        &self,
        topics: impl IntoIterator<Item = &str>,
    ) -> Result<BTreeMap<String, Result<TopicId, ResponseError>>, WireError> {
        let unknown = Err(ResponseError::UnknownTopicOrPartition);
        let mut ids: BTreeMap<_, _> = topics.into_iter().map(|topic| (topic.to_owned(), unknown)).collect();
        let asked = ids.keys().map(|name| MetadataRequestTopic::default().with_name(Some(text(name).into())));
        let request = MetadataRequest::default()
            .with_topics(Some(asked.collect()))
            .with_allow_auto_topic_creation(false);
        let (response, _) = self.call_any(&request, METADATA_VERSION_MAX).await?;
        for topic in response.topics {
            let Some(id) = topic.name.and_then(|name| ids.get_mut(name.as_str())) else { continue };
            *id = match topic.error_code.err() {
                Some(error) => Err(error),
                // A broker before Kafka 2.8.
                None if topic.topic_id.is_nil() => Err(ResponseError::UnsupportedVersion),
                None => Ok(TopicId(topic.topic_id)),
            };
        }
        Ok(ids)
    }

    /// Forgets what is known about a topic's leaders.
    pub fn forget_topic(&self, topic: &str) {
        self.state().topics.remove(topic);
    }

    /// The address of the coordinator of a group or a transactional id.
    pub async fn coordinator(&self, kind: CoordinatorKind, key: &str) -> Lookup<String> {
        if let Some(address) = self.state().coordinators.get(&(kind, key.to_owned())) {
            return Ok(Ok(address.clone()));
        }
        let request = FindCoordinatorRequest::default()
            .with_key_type(i8::from(kind == CoordinatorKind::Transaction))
            .with_coordinator_keys(vec![text(key)]);
        let (response, _) = self.call_any(&request, FIND_COORDINATOR_VERSION_MAX).await?;
        let Some(found) = response.coordinators.first() else {
            return Ok(Err(ResponseError::CoordinatorNotAvailable));
        };
        if let Some(error) = found.error_code.err() {
            return Ok(Err(error));
        }
        let address = format!("{}:{}", found.host, found.port);
        self.state().coordinators.insert((kind, key.to_owned()), address.clone());
        Ok(Ok(address))
    }

    /// Forgets where a coordinator is.
    pub fn forget_coordinator(&self, kind: CoordinatorKind, key: &str) {
        self.state().coordinators.remove(&(kind, key.to_owned()));
    }

    /// An idle connection, or a new one.
    async fn connection(&self, address: &str) -> Result<Connection, WireError> {
        let idle = self.state().idle.get_mut(address).and_then(Vec::pop);
        match idle {
            Some(connection) => Ok(connection),
            None => Connection::open(address, &self.connect).await,
        }
    }

    fn addresses(&self) -> Vec<String> {
        let mut addresses: Vec<String> = self.state().brokers.values().cloned().collect();
        fastrand::shuffle(&mut addresses);
        addresses.extend(self.connect.bootstrap.iter().cloned());
        addresses
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn no_address() -> WireError {
    WireError::Connect { address: String::new(), reason: "no bootstrap address is configured".to_owned() }
}

impl State {
    fn learn(&mut self, topic: &str, response: &MetadataResponse) -> Result<Vec<Leader>, ResponseError> {
        self.brokers = response
            .brokers
            .iter()
            .map(|broker| (broker.node_id.0, format!("{}:{}", broker.host, broker.port)))
            .collect();
        self.topics.remove(topic);
        let found = response.topics.first().ok_or(ResponseError::UnknownTopicOrPartition)?;
        if let Some(error) = found.error_code.err() {
            return Err(error);
        }
        let mut leaders = vec![Leader { node: None }; found.partitions.len()];
        for partition in &found.partitions {
            let index = usize::try_from(partition.partition_index).unwrap_or(usize::MAX);
            let leader = leaders.get_mut(index).ok_or(ResponseError::UnknownTopicOrPartition)?;
            leader.node = (partition.leader_id.0 >= 0).then_some(partition.leader_id.0);
        }
        let known = KnownTopic { leaders: leaders.clone(), asked: Instant::now() };
        self.topics.insert(topic.to_owned(), known);
        Ok(leaders)
    }
}
