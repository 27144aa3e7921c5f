//! Copies of records in the retry topic and in the dead-letter topic.
//!
//! A copy is written before its record is accepted, so nothing is lost between the two. A crash there leaves both: the copy
//! has the same idempotency key.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use hapax_core::{FailureCause, StoreError, policy};
use indexmap::IndexMap;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::ProduceRequest;
use kafka_protocol::messages::produce_request::{PartitionProduceData, TopicProduceData};
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, NO_PRODUCER_EPOCH, NO_PRODUCER_ID, NO_SEQUENCE,
    Record as WireRecord, RecordBatchEncoder, RecordEncodeOptions, TimestampType,
};
use tokio::time::Instant;

use super::record::{headers, now_ms};
use super::state::Held;
use crate::wire::{Backoff, Cluster, text};

/// The newest version that names topics.
const PRODUCE_VERSION: i16 = 12;
/// How long a copy is tried.
const TRY_MAX: Duration = Duration::from_secs(10);

/// Writes copies.
pub(super) struct Copies {
    pub cluster: Arc<Cluster>,
    pub dead_letter_topic: String,
    pub retry_topic: Option<String>,
}

impl Copies {
    /// A dead letter.
    pub async fn dead(&self, held: &Held, cause: FailureCause, error: &str) -> Result<(), StoreError> {
        let more = [
            (headers::ATTEMPTS, held.attempt.to_string()),
            (headers::DELIVERIES, held.deliveries.to_string()),
            (headers::CAUSE, cause.as_str().to_owned()),
            (headers::ERROR, policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()),
            (headers::DIED, now_ms().to_string()),
        ];
        self.write(&self.dead_letter_topic, held, more.into()).await
    }

    /// A copy for an attempt that is further away than a lock.
    pub async fn later(
        &self,
        topic: &str,
        held: &Held,
        attempts: u32,
        after_ms: u64,
        error: Option<&str>,
    ) -> Result<(), StoreError> {
        let mut more = vec![
            (headers::ATTEMPTS, attempts.to_string()),
            (headers::DELIVERIES, held.deliveries.to_string()),
            (headers::NOT_BEFORE, now_ms().saturating_add(after_ms).to_string()),
        ];
        if let Some(error) = error {
            more.push((headers::ERROR, policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()));
        }
        self.write(topic, held, more).await
    }

    async fn write(
        &self,
        topic: &str,
        held: &Held,
        more: Vec<(&'static str, String)>,
    ) -> Result<(), StoreError> {
        let batch = encode(held, more).map_err(StoreError::Invalid)?;
        let deadline = Instant::now() + TRY_MAX;
        let mut backoff = Backoff::new();
        loop {
            let problem = match self.write_once(topic, &batch).await {
                Ok(()) => return Ok(()),
                Err(Failure::Final(problem)) => {
                    return Err(StoreError::Invalid(format!("a copy in topic {topic}: {problem}")));
                }
                Err(Failure::Again(problem)) => problem,
            };
            self.cluster.forget_topic(topic);
            if Instant::now() >= deadline {
                return Err(StoreError::Unavailable(format!("a copy in topic {topic}: {problem}")));
            }
            backoff.wait().await;
        }
    }

    async fn write_once(&self, topic: &str, batch: &Bytes) -> Result<(), Failure> {
        let leaders = self.cluster.leaders(topic).await.map_err(|error| wire(&error))?.map_err(broker)?;
        let led: Vec<(i32, i32)> =
            (0..).zip(&leaders).filter_map(|(number, leader)| Some((number, leader.node?))).collect();
        let Some(&(partition, node)) = fastrand::choice(&led) else {
            return Err(Failure::Again("no partition has a leader".to_owned()));
        };
        let Some(address) = self.cluster.broker(node) else {
            return Err(Failure::Again(format!("broker {node} is not known")));
        };
        let data = PartitionProduceData::default().with_index(partition).with_records(Some(batch.clone()));
        let topic_data =
            TopicProduceData::default().with_name(text(topic).into()).with_partition_data(vec![data]);
        let timeout_ms = self.cluster.connect().request_timeout.as_millis();
        let request = ProduceRequest::default()
            .with_acks(-1)
            .with_timeout_ms(i32::try_from(timeout_ms).unwrap_or(i32::MAX))
            .with_topic_data(vec![topic_data]);
        let (response, _) =
            self.cluster.call_at(&address, &request, PRODUCE_VERSION).await.map_err(|error| wire(&error))?;
        let answers = response.responses.iter().flat_map(|topic| &topic.partition_responses);
        match answers.map(|answer| answer.error_code.err()).next() {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(broker(error)),
            None => Err(Failure::Again("no answer for the partition".to_owned())),
        }
    }
}

enum Failure {
    /// Another attempt may succeed.
    Again(String),
    Final(String),
}

fn wire(error: &crate::wire::WireError) -> Failure {
    if error.is_transient() { Failure::Again(error.to_string()) } else { Failure::Final(error.to_string()) }
}

fn broker(error: ResponseError) -> Failure {
    let is_missing = matches!(error, ResponseError::UnknownTopicOrPartition);
    if error.is_retriable() || is_missing {
        Failure::Again(error.to_string())
    } else {
        Failure::Final(error.to_string())
    }
}

/// The record with its identity and more headers, as a batch of its own.
fn encode(held: &Held, more: Vec<(&'static str, String)>) -> Result<Bytes, String> {
    let record = &held.record;
    let mut all: IndexMap<_, _> =
        record.headers.iter().map(|(name, value)| (text(name), value.clone())).collect();
    let (key, _) = &record.effect;
    let identity = [
        (headers::KEY, key.as_str().to_owned()),
        (headers::ORIGIN, record.origin.clone()),
        (headers::TOPIC, record.topic.to_string()),
    ];
    for (name, value) in identity.into_iter().chain(more) {
        all.insert(text(name), Some(Bytes::from(value)));
    }
    let copy = WireRecord {
        transactional: false,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: NO_PARTITION_LEADER_EPOCH,
        producer_id: NO_PRODUCER_ID,
        producer_epoch: NO_PRODUCER_EPOCH,
        timestamp_type: TimestampType::Creation,
        offset: 0,
        sequence: NO_SEQUENCE,
        // The time of the copy, so that the topic's retention begins with it.
        timestamp: i64::try_from(now_ms()).unwrap_or(i64::MAX),
        key: record.key.clone(),
        value: record.value.clone(),
        headers: all,
    };
    let mut buffer = BytesMut::new();
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    RecordBatchEncoder::encode(&mut buffer, [&copy], &options).map_err(|error| error.to_string())?;
    Ok(buffer.freeze())
}
