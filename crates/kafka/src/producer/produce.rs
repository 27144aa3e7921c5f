//! Batches on their way to the partitions' leaders.

use std::collections::BTreeMap;

use bytes::Bytes;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::messages::{ProduceRequest, ProduceResponse};
use tokio::task::{JoinError, JoinSet};
use tokio::time::Instant;

use super::error::{Meaning, meaning};
use super::record::{encode, partition_of};
use super::{Cause, NewRecord, Producer, ProducerError};
use crate::partition::TopicPartition;
use crate::wire::{Backoff, WireError, text};

/// The version that adds partitions to the transaction implicitly. The next one names topics by their ids.
const PRODUCE_VERSION: i16 = 12;
const WHAT: &str = "producing records";

/// Batches of one broker.
type Batches = BTreeMap<TopicPartition, Bytes>;
/// A request's batches, and how it ended.
pub(super) type Produced = (Batches, Result<ProduceResponse, WireError>);

/// A partition's records that are in no batch yet.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    records: Vec<NewRecord>,
    bytes: usize,
}

impl Waiting {
    pub(super) fn add(&mut self, record: NewRecord, bytes: usize) {
        self.records.push(record);
        self.bytes += bytes;
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// The first records, as many as fit, and their size.
    fn take(&mut self, bytes_max: usize) -> (Vec<NewRecord>, usize) {
        let (mut count, mut bytes) = (0, 0);
        for record in &self.records {
            if bytes + record.bytes() > bytes_max {
                break;
            }
            bytes += record.bytes();
            count += 1;
        }
        let rest = self.records.split_off(count);
        self.bytes -= bytes;
        (std::mem::replace(&mut self.records, rest), bytes)
    }
}

impl Producer {
    /// The record's partition.
    pub(super) async fn choose(&mut self, record: &NewRecord) -> Result<TopicPartition, ProducerError> {
        let partition = if let Some(partition) = record.partition {
            partition
        } else {
            let count = self.partition_count(&record.topic).await?;
            if let Some(key) = &record.key {
                partition_of(key, count)
            } else {
                self.next_partition = self.next_partition.wrapping_add(1);
                i32::try_from(self.next_partition % count.unsigned_abs() as usize).unwrap_or(0)
            }
        };
        // The topic's name is shared by its records.
        let known = self.waiting.keys().find(|known| *known.topic == *record.topic);
        Ok(match known {
            Some(known) => TopicPartition { topic: known.topic.clone(), partition },
            None => TopicPartition::new(&record.topic, partition),
        })
    }

    async fn partition_count(&mut self, topic: &str) -> Result<i32, ProducerError> {
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            let cause = match self.cluster.leaders(topic).await {
                Ok(Ok(leaders)) if !leaders.is_empty() => {
                    return Ok(i32::try_from(leaders.len()).unwrap_or(i32::MAX));
                }
                Ok(Ok(_)) => Cause::Broker(ResponseError::UnknownTopicOrPartition),
                Ok(Err(error)) => Cause::Broker(error),
                Err(error) if error.is_transient() => Cause::Wire(error),
                Err(error) => return Err(self.forbidden(WHAT, Cause::Wire(error))),
            };
            match &cause {
                Cause::Broker(error) if meaning(*error) == Meaning::Forbidden => {
                    let cause = self.named(cause, "Describe", topic);
                    return Err(self.forbidden(WHAT, cause));
                }
                _ if Instant::now() >= deadline => return Err(self.failed(WHAT, cause)),
                _ => backoff.wait().await,
            }
        }
    }

    /// Takes the answers that are there, and sends batches that are worth a request if there is one, without waiting for answers. A
    /// batch that has to be sent again waits for the next flush or the commit.
    pub(super) async fn send_ahead(&mut self, is_worth: bool) -> Result<(), ProducerError> {
        while let Some(done) = self.calls.try_join_next() {
            self.answered(done)?;
        }
        if is_worth && !self.is_ending() {
            self.form_batches(self.config.batch_bytes_min)?;
            self.start_calls().await?;
        }
        Ok(())
    }

    /// Forms a batch of each partition that has as many bytes and no unanswered batch.
    fn form_batches(&mut self, bytes_min: usize) -> Result<(), ProducerError> {
        let may = |(at, waiting): (&TopicPartition, &Waiting)| {
            let formed = waiting.bytes >= bytes_min && !self.unanswered.contains_key(at);
            formed.then(|| at.clone())
        };
        let partitions: Vec<TopicPartition> = self.waiting.iter().filter_map(may).collect();
        for partition in partitions {
            let Some(mut waiting) = self.waiting.shift_remove(&partition) else { continue };
            let (records, bytes) = waiting.take(self.config.batch_bytes_max);
            let count = i32::try_from(records.len()).unwrap_or(i32::MAX);
            let batch = self.machine.batch(partition.clone(), count)?;
            let transactional = self.transactional_id().is_some();
            let encoded = encode(batch, records, transactional);
            let encoded = encoded.map_err(|error| self.failed(WHAT, Cause::Other(error.to_string())))?;
            self.waiting_bytes = self.waiting_bytes.saturating_sub(bytes);
            self.unanswered.insert(partition.clone(), encoded);
            if !waiting.records.is_empty() {
                self.waiting.insert(partition, waiting);
            }
        }
        Ok(())
    }

    /// Sends all records that wait and all unanswered batches, until all are written.
    pub(super) async fn deliver(&mut self) -> Result<(), ProducerError> {
        self.deliver_until(|producer| producer.unanswered.is_empty()).await
    }

    /// Sends records until no more of them wait. The last batches are formed, and not sent yet.
    pub(super) async fn form_last_batches(&mut self) -> Result<(), ProducerError> {
        self.deliver_until(|producer| producer.waiting.is_empty()).await
    }

    async fn deliver_until(&mut self, is_done: fn(&Self) -> bool) -> Result<(), ProducerError> {
        let deadline = Instant::now() + self.config.delivery_timeout;
        let mut backoff = Backoff::new();
        loop {
            self.form_batches(0)?;
            if is_done(self) {
                return Ok(());
            }
            self.ended_before().await;
            let mut failure = self.start_calls().await?;
            while let Some(done) = self.calls.join_next().await {
                match self.answered(done)? {
                    Some(cause) => failure = Some(cause),
                    // Its partition may have more.
                    None if failure.is_none() && !self.waiting.is_empty() => break,
                    None => {}
                }
            }
            let Some(cause) = failure else { continue };
            if Instant::now() >= deadline {
                return Err(self.failed(WHAT, cause));
            }
            backoff.wait().await;
        }
    }

    /// Sends the unanswered batches that are in no request to their leaders. Returns the last failure that another attempt may mend.
    async fn start_calls(&mut self) -> Result<Option<Cause>, ProducerError> {
        let mut failure = None;
        let mut by_leader: BTreeMap<String, Batches> = BTreeMap::new();
        let mut denied = None;
        for (partition, batch) in self.unanswered.iter().filter(|(at, _)| !self.called.contains(at)) {
            match self.leader(partition).await {
                Ok(address) => {
                    by_leader.entry(address).or_default().insert(partition.clone(), batch.clone());
                }
                Err(Cause::Broker(error)) if meaning(error) == Meaning::Forbidden => {
                    denied = Some(self.named(Cause::Broker(error), "Write", &partition.topic));
                }
                Err(cause) => failure = Some(cause),
            }
        }
        if let Some(cause) = denied {
            return Err(self.forbidden(WHAT, cause));
        }
        for (address, batches) in by_leader {
            let (cluster, request) = (self.cluster.clone(), self.request(&batches));
            self.called.extend(batches.keys().cloned());
            self.calls.spawn(async move {
                let response = cluster.call_at(&address, &request, PRODUCE_VERSION).await;
                (batches, response.map(|(response, _)| response))
            });
        }
        Ok(failure)
    }

    /// Takes over how a request ended. Returns a failure that another attempt may mend.
    fn answered(&mut self, done: Result<Produced, JoinError>) -> Result<Option<Cause>, ProducerError> {
        let (batches, response) = match done {
            Ok(done) => done,
            Err(error) => {
                self.drop_calls();
                return Ok(Some(Cause::Other(error.to_string())));
            }
        };
        self.called.retain(|at| !batches.contains_key(at));
        let answered = match response {
            Ok(response) => self.produced(&batches, &response),
            Err(error) => self.unreached(&batches, error).map(Some),
        };
        self.known |= !answered.as_ref().is_err_and(ProducerError::is_stale);
        let failure = answered.inspect_err(|_| self.drop_calls())?;
        let is_open = batches.keys().any(|at| self.unanswered.contains_key(at));
        let missing = || is_open.then(|| Cause::Other("the answer leaves a partition out".to_owned()));
        Ok(failure.or_else(missing))
    }

    /// Forgets the requests under way, which may have reached their brokers.
    pub(super) fn drop_calls(&mut self) {
        self.calls = JoinSet::new();
        self.called.clear();
    }

    async fn leader(&self, partition: &TopicPartition) -> Result<String, Cause> {
        let leaders = self.cluster.leaders(&partition.topic).await?.map_err(Cause::Broker)?;
        let leader = usize::try_from(partition.partition).ok().and_then(|index| leaders.get(index));
        let address = leader.and_then(|leader| leader.node).and_then(|node| self.cluster.broker(node));
        address.ok_or_else(|| {
            self.cluster.forget_topic(&partition.topic);
            Cause::Broker(ResponseError::LeaderNotAvailable)
        })
    }

    fn request(&self, batches: &Batches) -> ProduceRequest {
        let mut topics: BTreeMap<&str, Vec<PartitionProduceData>> = BTreeMap::new();
        for (partition, batch) in batches {
            topics.entry(&partition.topic).or_default().push(
                PartitionProduceData::default()
                    .with_index(partition.partition)
                    .with_records(Some(batch.clone())),
            );
        }
        let timeout_ms = self.config.connect.request_timeout.as_millis();
        ProduceRequest::default()
            .with_transactional_id(self.transactional_id())
            .with_acks(-1)
            .with_timeout_ms(i32::try_from(timeout_ms).unwrap_or(i32::MAX))
            .with_topic_data(
                topics
                    .into_iter()
                    .map(|(topic, data)| {
                        TopicProduceData::default().with_name(text(topic).into()).with_partition_data(data)
                    })
                    .collect(),
            )
    }

    /// Takes over what a leader answered.
    fn produced(
        &mut self,
        batches: &Batches,
        response: &ProduceResponse,
    ) -> Result<Option<Cause>, ProducerError> {
        let mut failure = None;
        for topic in &response.responses {
            for answer in &topic.partition_responses {
                let partition = TopicPartition::new(topic.name.as_str(), answer.index);
                if !batches.contains_key(&partition) {
                    continue;
                }
                let Some(error) = answer.error_code.err() else {
                    self.written(&partition);
                    continue;
                };
                let cause = Cause::Broker(error);
                match meaning(error) {
                    // The batch is in the log from an earlier attempt.
                    _ if error == ResponseError::DuplicateSequenceNumber => self.written(&partition),
                    Meaning::Retry => failure = Some(cause),
                    Meaning::Moved => {
                        self.cluster.forget_topic(&partition.topic);
                        failure = Some(cause);
                    }
                    Meaning::Forbidden => {
                        let cause = self.named(cause, "Write", &partition.topic);
                        return Err(self.forbidden(WHAT, cause));
                    }
                    // A stale identity: the abort will tell whether the transaction timed out or was taken over.
                    Meaning::Stale | Meaning::Abort => return Err(self.failed(WHAT, cause)),
                }
            }
        }
        Ok(failure)
    }

    fn unreached(&mut self, batches: &Batches, error: WireError) -> Result<Cause, ProducerError> {
        if !error.is_transient() {
            return Err(self.forbidden(WHAT, Cause::Wire(error)));
        }
        for partition in batches.keys() {
            self.cluster.forget_topic(&partition.topic);
        }
        Ok(Cause::Wire(error))
    }

    fn written(&mut self, partition: &TopicPartition) {
        self.machine.batch_written(partition);
        self.unanswered.remove(partition);
        self.added.insert(partition.clone());
    }

    /// The transaction can only be aborted now.
    pub(super) fn failed(&mut self, what: &'static str, cause: Cause) -> ProducerError {
        self.machine.fail();
        ProducerError::Abort { what, cause }
    }

    /// Says which right is missing, if it is one: `operation` on the topics, or what the other resources need.
    pub(super) fn named(&self, cause: Cause, operation: &'static str, topics: &str) -> Cause {
        let Cause::Broker(error) = cause else { return cause };
        let (operation, resource) = match error {
            ResponseError::TopicAuthorizationFailed => (operation, format!("topic {topics}")),
            ResponseError::TransactionalIdAuthorizationFailed => {
                ("Write", format!("transactional id {}", self.config.transactional_id))
            }
            ResponseError::GroupAuthorizationFailed => {
                let group = self.offsets.as_ref().map(|(group, _)| group.group.clone()).unwrap_or_default();
                ("Read", format!("group {group}"))
            }
            ResponseError::ClusterAuthorizationFailed => ("IdempotentWrite", "the cluster".to_owned()),
            error => return Cause::Broker(error),
        };
        Cause::Denied { operation, resource, error }
    }

    /// The same, and aborting it will not help.
    pub(super) fn forbidden(&mut self, what: &'static str, cause: Cause) -> ProducerError {
        self.machine.fail();
        ProducerError::Fatal { what, cause }
    }
}
