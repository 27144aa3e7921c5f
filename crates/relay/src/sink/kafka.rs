//! Topics of Kafka as a sink, each message once for readers of committed records.
//!
//! A bucket has a transactional producer of its own. What it publishes, and the list of what was published ([`published`]), are one
//! transaction: the list is a record of the *positions topic*, a compacted one. A relay that takes a bucket over
//!
//! 1. initialises the bucket's transactional id: the transaction of the relay before it is ended, and that relay is fenced;
//! 2. reads the list, and waits for what is still open before its end;
//! 3. asks the outbox whether the bucket is still its own. A relay that was stopped for long, and wakes before step 1, ends here: it
//!    has fenced the present owner, which takes the bucket over again.
//!
//! Then it publishes what the list does not have. The list forgets a message when the outbox has recorded that it was published.

mod published;
mod url;

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex as StdMutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use hapax_core::mutant;
use hapax_core::outbox::{
    BucketLease, OutboxMessage, PublishAnswer, PublishSource, Publisher, SinkDedup, SinkDescription,
    SourceBucket,
};
use hapax_kafka::admin::{self, Wanted};
use hapax_kafka::compacted;
use hapax_kafka::partition::TopicPartition;
use hapax_kafka::producer::{
    Cause, ErrorKind, NewRecord, Producer, ProducerConfig, ProducerError, ResponseError, partition_of,
};
use hapax_kafka::wire::Cluster;
use tokio::sync::Mutex;

use self::published::Published;
use self::url::{Target, is_topic};
use super::SinkError;

/// An outbox has at most this many.
const BUCKETS_MAX: u16 = 64;
/// Messages of one transaction.
const BATCH_MAX: usize = 500;
/// Maximum size of a record; the broker's default for a batch is 1,048,588 with its head.
const RECORD_BYTES_MAX: usize = 1_048_000;
/// The coordinator aborts a transaction that takes longer: readers wait this long for a relay that died, unless another one
/// takes its buckets over before.
const TRANSACTION_TIMEOUT: Duration = Duration::from_secs(30);
const DELIVERY_TIMEOUT: Duration = Duration::from_secs(15);
/// How long open transactions before the end of the positions are waited for; longer than they can take.
const OPEN_WAIT_MAX: Duration = Duration::from_secs(40);
/// Held messages that are compared with the list when a bucket is taken over; with more, the list forgets none of them.
const HELD_MAX: usize = 200;
/// The header with the message's id. `hapax-kafka`'s way into a database takes it as the record's idempotency key.
const ID_HEADER: &str = "hapax-idempotency-key";
/// Headers that begin with this are the sink's own.
const OWN_HEADERS: &str = "hapax-";

/// Topics of a Kafka cluster. The topic of a record is that of the message, behind a prefix if there is one.
pub struct KafkaSink {
    cluster: Arc<Cluster>,
    prefix: String,
    positions: String,
    positions_partitions: i32,
    warnings: Vec<String>,
    buckets: Vec<Mutex<Option<Bucket>>>,
    /// Held messages that the outbox has released, by bucket, until the bucket's next transaction.
    released: Vec<StdMutex<Vec<String>>>,
}

/// A bucket that this relay has taken over.
struct Bucket {
    fence: u64,
    producer: Producer,
    published: Published,
    /// Where the outbox continues to read.
    recorded: u64,
}

/// Why a transaction is not committed.
enum Failure {
    /// One of its records will not be accepted.
    Record(String),
    /// One of its records is not accepted now.
    Refused(String),
    /// The brokers did not do it.
    Down(String),
}

impl KafkaSink {
    /// A cluster by its URL, `kafka://HOST:PORT,HOST:PORT/PREFIX?positions=TOPIC`. The positions topic is created if it does not
    /// exist; it is `hapax-relay-positions` by default. A cluster whose transactions are not safe is refused.
    pub async fn open(url: &str) -> Result<Self, SinkError> {
        let Target { connect, prefix, positions } = Target::parse(url)?;
        let failed = |error: &dyn std::fmt::Display| SinkError(format!("Kafka: {error}"));
        let cluster = Arc::new(Cluster::new(connect));
        let wanted = Wanted {
            transaction_timeout_ms: Some(TRANSACTION_TIMEOUT.as_millis() as u64),
            ..Wanted::default()
        };
        let found = admin::check(&cluster, &wanted).await.map_err(|error| failed(&error))?;
        if let Some(refused) = found.refused.first() {
            return Err(failed(refused));
        }
        let created = compacted::create(&cluster, &positions, BUCKETS_MAX.into()).await;
        let positions_partitions =
            created.map_err(|error| failed(&error))?.map_err(|refused| failed(&refused))?;
        let wanted = Wanted { topics: vec![positions.clone()], ..Wanted::default() };
        let found = admin::check(&cluster, &wanted).await.map_err(|error| failed(&error))?;
        if let Some(refused) = found.refused.first() {
            return Err(failed(refused));
        }
        Ok(Self {
            cluster,
            prefix,
            positions,
            positions_partitions,
            warnings: found.warnings.iter().map(ToString::to_string).collect(),
            buckets: (0..BUCKETS_MAX).map(|_| Mutex::default()).collect(),
            released: (0..BUCKETS_MAX).map(|_| StdMutex::default()).collect(),
        })
    }

    /// The name of a bucket: its transactional id, and its key in the positions topic.
    fn name(&self, route: &str, bucket: u16) -> String {
        let apart = if mutant::is("kafka-sink-not-fenced") {
            format!("-{:08x}", fastrand::u32(..))
        } else {
            String::new()
        };
        format!("{}/{route}/{bucket}{apart}", self.positions)
    }

    /// Where a bucket's list is.
    fn place(&self, key: &str) -> TopicPartition {
        TopicPartition::new(&self.positions, partition_of(key.as_bytes(), self.positions_partitions))
    }

    /// Takes a bucket over.
    async fn take_over(&self, source: &PublishSource<'_>, of: SourceBucket) -> Result<Bucket, String> {
        let BucketLease { bucket, fence } = of.lease;
        let name = self.name(source.route, bucket);
        let config = ProducerConfig {
            transaction_timeout: TRANSACTION_TIMEOUT,
            delivery_timeout: DELIVERY_TIMEOUT.max(self.cluster.connect().request_timeout * 3 / 2),
            batch_bytes_max: RECORD_BYTES_MAX,
            ..ProducerConfig::new(self.cluster.connect().clone(), &name)
        };
        let connected = Producer::connect_on(self.cluster.clone(), config).await;
        let producer = connected.map_err(|error| error.to_string())?;
        let key = format!("{}/{}", source.route, bucket);
        let place = self.place(&key);
        let value = if mutant::is("kafka-sink-forgets") {
            None
        } else {
            let read = compacted::last_value(&self.cluster, &place, key.as_bytes(), OPEN_WAIT_MAX).await;
            read.map_err(|error| format!("the positions of {key} were not read: {error}"))?
        };
        let mut published = match value {
            Some(value) => {
                Published::parse(&value).map_err(|why| format!("the positions of {key} in {place}: {why}"))?
            }
            None => Published::default(),
        };
        let store = |error: hapax_core::StoreError| format!("the outbox: {error}");
        // Nothing is set aside; the answer is whether the bucket is held under this fence.
        let lost =
            source.store.hold(source.route, source.relay, &[of.lease], Vec::new()).await.map_err(store)?;
        if !lost.is_empty() && !mutant::is("kafka-sink-asks-not") {
            return Err(format!("bucket {bucket} was taken by another relay"));
        }
        // Read after the bucket is known to be ours: positions only grow.
        let positions = source.store.positions(source.route, &[bucket]).await.map_err(store)?;
        let recorded = positions.first().map_or(0, |(_, position)| *position);
        if published.has_held() {
            let held = source.store.held(Some(source.route), false, HELD_MAX).await.map_err(store)?;
            if held.len() < HELD_MAX {
                let ids: HashSet<&str> = held.iter().map(|(_, held)| held.message.id.as_str()).collect();
                published.released_except(|id| ids.contains(id));
            }
        }
        Ok(Bucket { fence, producer, published, recorded })
    }

    /// Publishes messages of one bucket, in order.
    async fn publish_bucket(
        &self,
        source: &PublishSource<'_>,
        of: SourceBucket,
        batch: &[&OutboxMessage],
    ) -> Vec<PublishAnswer> {
        let mut slot = self.buckets[usize::from(of.lease.bucket)].lock().await;
        // Fences are not compared: those of an outbox that was restored begin again. A call under an old one is refused by the
        // outbox.
        if slot.as_ref().is_none_or(|bucket| bucket.fence != of.lease.fence) {
            *slot = None;
            match self.take_over(source, of).await {
                Ok(taken) => *slot = Some(taken),
                Err(why) => return down(batch.len(), &why),
            }
        }
        let Some(bucket) = slot.as_mut() else { return down(batch.len(), "the bucket is not taken over") };
        self.tidy(bucket, of);
        let mut publishing = Publishing::new(batch);
        for (index, message) in batch.iter().enumerate() {
            if bucket.published.contains(message) {
                publishing.answer(index, PublishAnswer::Duplicate);
            } else if let Some(answer) = self.refusal(message).await {
                publishing.answer(index, answer);
            }
        }
        // Parts of the batch, the next one last. A part that is refused is divided until the record is found.
        let mut parts = vec![publishing.open()];
        while let Some(part) = parts.pop() {
            let part: Vec<usize> = part.into_iter().filter(|&index| publishing.may(index)).collect();
            if part.is_empty() {
                continue;
            }
            let messages: Vec<&OutboxMessage> = part.iter().map(|&index| batch[index]).collect();
            let failure = match self.transact(bucket, source, of, &messages).await {
                Ok(()) => {
                    for &index in &part {
                        publishing.answer(index, PublishAnswer::Published);
                    }
                    continue;
                }
                Err(failure) => failure,
            };
            match failure {
                Failure::Record(_) | Failure::Refused(_) if part.len() > 1 => {
                    let (first, second) = part.split_at(part.len() / 2);
                    parts.extend([second.to_vec(), first.to_vec()]);
                }
                Failure::Record(why) => publishing.answer(part[0], PublishAnswer::Refused(why)),
                Failure::Refused(why) => publishing.answer(part[0], PublishAnswer::Failed(why)),
                Failure::Down(why) => {
                    // Whether it was committed is read from the positions next time.
                    *slot = None;
                    return publishing.answers(&why);
                }
            }
        }
        publishing.answers("it was not tried")
    }

    /// Forgets what the outbox does not give again.
    fn tidy(&self, bucket: &mut Bucket, of: SourceBucket) {
        let place = &self.released[usize::from(of.lease.bucket)];
        for id in place.lock().unwrap_or_else(PoisonError::into_inner).drain(..) {
            bucket.published.released(&id);
        }
        // It becomes smaller when the outbox is restored.
        bucket.recorded = of.recorded.unwrap_or(bucket.recorded);
        bucket.published.forget(bucket.recorded);
    }

    /// Why a message cannot be sent, if it cannot.
    async fn refusal(&self, message: &OutboxMessage) -> Option<PublishAnswer> {
        let topic = self.topic(message);
        if !is_topic(&topic) {
            return Some(PublishAnswer::Refused(format!("{topic:?} is not the name of a topic of Kafka")));
        }
        let bytes = message.body.len()
            + message.headers.iter().map(|(name, value)| name.len() + value.len() + 10).sum::<usize>();
        if bytes + 1_000 > RECORD_BYTES_MAX {
            return Some(PublishAnswer::Refused(format!(
                "body and headers have {bytes} bytes; a record has at most {}",
                RECORD_BYTES_MAX - 1_000
            )));
        }
        match self.cluster.leaders(&topic).await {
            Ok(Ok(_)) => None,
            Ok(Err(ResponseError::UnknownTopicOrPartition)) => Some(PublishAnswer::Refused(format!(
                "the topic {topic} does not exist; create it, then run: hapax outbox retry {}",
                message.id
            ))),
            Ok(Err(error)) => Some(PublishAnswer::Failed(format!("the topic {topic}: {error}"))),
            Err(error) => Some(PublishAnswer::Unavailable(error.to_string())),
        }
    }

    fn topic(&self, message: &OutboxMessage) -> String {
        let dot = if self.prefix.is_empty() { "" } else { "." };
        format!("{}{dot}{}", self.prefix, message.topic)
    }

    fn record(&self, message: &OutboxMessage) -> NewRecord {
        let mut headers: BTreeMap<String, Option<Bytes>> = BTreeMap::new();
        for (name, value) in message.headers.iter().filter(|(name, _)| !name.starts_with(OWN_HEADERS)) {
            headers.insert(name.clone(), Some(Bytes::copy_from_slice(value.as_bytes())));
        }
        headers.insert(ID_HEADER.to_owned(), Some(Bytes::copy_from_slice(message.id.as_bytes())));
        NewRecord {
            topic: self.topic(message),
            partition: None,
            key: message.key.as_ref().map(|key| Bytes::copy_from_slice(key.as_bytes())),
            value: Some(message.body.clone()),
            headers: headers.into_iter().collect(),
            timestamp_ms: i64::try_from(message.enqueued_ms).ok(),
        }
    }

    /// Publishes messages and the list that has them, in one transaction.
    async fn transact(
        &self,
        bucket: &mut Bucket,
        source: &PublishSource<'_>,
        of: SourceBucket,
        messages: &[&OutboxMessage],
    ) -> Result<(), Failure> {
        let mut published = bucket.published.clone();
        published.add(messages.iter().copied(), source.held);
        // Not the fault of a message: its record is not refused, and waits until the outbox has recorded others.
        let Some(value) = published.value() else {
            return Err(Failure::Down("too many messages are published and not recorded".to_owned()));
        };
        let key = format!("{}/{}", source.route, of.lease.bucket);
        let place = self.place(&key);
        let list =
            NewRecord { partition: Some(place.partition), ..NewRecord::new(&self.positions, key, value) };
        let producer = &mut bucket.producer;
        let sent = async {
            producer.begin()?;
            for message in messages {
                producer.send(self.record(message)).await?;
            }
            if mutant::is("kafka-sink-position-apart") {
                producer.commit().await?;
                producer.begin()?;
            }
            producer.send(list).await?;
            producer.commit().await
        };
        match sent.await {
            Ok(()) => {
                bucket.published = published;
                Ok(())
            }
            Err(error) => Err(failure(producer, error).await),
        }
    }
}

/// What a failed transaction means; it is aborted if that is possible.
async fn failure(producer: &mut Producer, error: ProducerError) -> Failure {
    use ResponseError as E;
    let text = error.to_string();
    let cause = match &error {
        ProducerError::Abort { cause: Cause::Broker(cause), .. }
        | ProducerError::Fatal { cause: Cause::Broker(cause), .. } => Some(*cause),
        _ => None,
    };
    let of_record = matches!(error, ProducerError::Record(_))
        || matches!(
            cause,
            Some(
                E::MessageTooLarge
                    | E::RecordListTooLarge
                    | E::InvalidRecord
                    | E::InvalidTimestamp
                    | E::CorruptMessage
            )
        );
    let refused = matches!(cause, Some(E::TopicAuthorizationFailed | E::PolicyViolation));
    let may_abort = error.kind() == ErrorKind::Abortable || refused;
    if may_abort && let Err(error) = producer.abort().await {
        return Failure::Down(format!("{text}; and the abort: {error}"));
    }
    if of_record {
        Failure::Record(text)
    } else if refused {
        Failure::Refused(text)
    } else {
        Failure::Down(text)
    }
}

fn down(count: usize, why: &str) -> Vec<PublishAnswer> {
    vec![PublishAnswer::Unavailable(why.to_owned()); count]
}

/// The answers to a batch, while it is published.
struct Publishing<'m> {
    batch: &'m [&'m OutboxMessage],
    answers: Vec<Option<PublishAnswer>>,
    /// Keys with a message that was not published.
    blocked: BTreeSet<&'m str>,
}

impl<'m> Publishing<'m> {
    fn new(batch: &'m [&'m OutboxMessage]) -> Self {
        Self { batch, answers: vec![None; batch.len()], blocked: BTreeSet::new() }
    }

    fn answer(&mut self, index: usize, answer: PublishAnswer) {
        if !matches!(answer, PublishAnswer::Published | PublishAnswer::Duplicate) {
            self.blocked.extend(self.batch[index].ordered_key());
        }
        self.answers[index] = Some(answer);
    }

    /// Those without an answer that may be published.
    fn open(&self) -> Vec<usize> {
        (0..self.batch.len()).filter(|&index| self.answers[index].is_none() && self.may(index)).collect()
    }

    /// Whether no earlier message of its key is unpublished.
    fn may(&self, index: usize) -> bool {
        self.batch[index].ordered_key().is_none_or(|key| !self.blocked.contains(key))
    }

    fn answers(self, down: &str) -> Vec<PublishAnswer> {
        let Self { batch, answers, blocked } = self;
        let rest = |message: &OutboxMessage| match message.ordered_key() {
            Some(key) if blocked.contains(key) => PublishAnswer::NotTried,
            _ => PublishAnswer::Unavailable(down.to_owned()),
        };
        answers
            .into_iter()
            .zip(batch)
            .map(|(answer, message)| answer.unwrap_or_else(|| rest(message)))
            .collect()
    }
}

#[async_trait]
impl Publisher for KafkaSink {
    fn describe(&self) -> SinkDescription {
        let at = self.cluster.connect().bootstrap.join(",");
        let prefix =
            if self.prefix.is_empty() { String::new() } else { format!(", topics {}.*", self.prefix) };
        SinkDescription {
            name: format!("Kafka at {at}{prefix}, positions in {}", self.positions),
            dedup: SinkDedup::Transaction,
            delays: false,
            batch_max: BATCH_MAX,
            // Each bucket has transactions of its own.
            calls_max: usize::from(BUCKETS_MAX),
            warnings: self.warnings.clone(),
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        down(batch.len(), "this sink publishes for a relay; use hapax_kafka::publisher without one")
    }

    async fn publish_from(&self, source: &PublishSource<'_>, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let mut answers = vec![PublishAnswer::NotTried; batch.len()];
        let buckets: BTreeSet<u16> = batch.iter().map(|message| message.bucket).collect();
        for bucket in buckets {
            let (indices, messages): (Vec<usize>, Vec<&OutboxMessage>) =
                batch.iter().enumerate().filter(|(_, message)| message.bucket == bucket).unzip();
            let of = source.buckets.iter().find(|of| of.lease.bucket == bucket && bucket < BUCKETS_MAX);
            let given = match of {
                Some(of) => self.publish_bucket(source, *of, &messages).await,
                None => down(messages.len(), &format!("bucket {bucket} is not held")),
            };
            for (index, answer) in indices.into_iter().zip(given) {
                answers[index] = answer;
            }
        }
        answers
    }

    fn released(&self, message: &OutboxMessage) {
        if let Some(released) = self.released.get(usize::from(message.bucket)) {
            released.lock().unwrap_or_else(PoisonError::into_inner).push(message.id.clone());
        }
    }
}
