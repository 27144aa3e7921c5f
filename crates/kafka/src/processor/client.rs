//! What a processor needs of a Kafka client: the seam where another client can stand.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use hapax_core::mutant;
use kafka_protocol::error::ResponseError;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::{ProcessorConfig, ProcessorError};
use crate::admin::{self, AdminError};
use crate::consumer::{Consumer, ConsumerConfig, ConsumerError, Event, Ownership, Revocation};
use crate::machine::{Misuse, State};
use crate::partition::{TopicId, TopicPartition};
use crate::producer::{Cause, NewRecord, NextOffset, Producer, ProducerConfig, ProducerError};
use crate::refusal;
use crate::wire::{Backoff, Cluster};

/// The ids of topics by name, or why a broker does not tell one.
pub type TopicIds = BTreeMap<String, Result<TopicId, ResponseError>>;

/// Known-bad variants: one commits offsets when a record is read, and not in its transaction; one goes back to the batch's first records
/// instead of aborting its transaction, and continues in that; one does not look at the committed offsets after a commit of unknown outcome.
const OFFSETS_APART: &str = "kafka-offsets-apart";
const ABORT_LEFT_OUT: &str = "kafka-abort-left-out";
const SETTLED_UNREAD: &str = "kafka-settled-unread";

pub(super) const TOPIC_IDS: &str = "reading the ids of topics";

/// A member of a group with a transactional producer.
pub trait Client: Send {
    /// The next event of the group. Safe to cancel.
    fn next(&mut self) -> impl Future<Output = Event> + Send;
    /// The next event that is there already.
    fn try_next(&mut self) -> Option<Event>;
    /// Continues at another offset of an assigned partition.
    fn seek(&mut self, at: &TopicPartition, offset: i64);
    /// The member's identity, if it has all of these partitions since their records were read, or gives them up by this
    /// revocation. Offsets that are committed under it are refused by the broker after another member has got one of them.
    fn owner_of(&self, partitions: &[TopicPartition], revocation: Option<&Revocation>) -> Option<Ownership>;
    /// Begins a transaction. While a commit is under way it may be called if `overlaps`.
    fn begin(&mut self) -> Result<(), ProducerError>;
    /// Adds a record to the transaction.
    fn send(&mut self, record: NewRecord) -> impl Future<Output = Result<(), ProducerError>> + Send;
    /// The ids of topics at this moment.
    fn topic_ids(
        &self,
        topics: &BTreeSet<Arc<str>>,
    ) -> impl Future<Output = Result<TopicIds, ProducerError>> + Send;
    /// Writes the records of the transaction and, unless transactions overlap, the group's next offsets. Asks meanwhile whether the
    /// topics still are those that the offsets belong to. Where transactions overlap it may be called again, with a later identity of the
    /// member. Safe to cancel; then `abort` follows.
    fn prepare(
        &mut self,
        owner: Ownership,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> impl Future<Output = Result<(), ProcessorError>> + Send;
    /// Whether another transaction can begin while the commit of the present one is under way.
    fn overlaps(&self) -> bool;
    /// Commits the transaction that was prepared, with the offsets if they are not written yet; refuses it if a partition is another
    /// member's by the time that the offsets are written. From here on it must not be aborted, unless the commit is refused. At most one
    /// commit is under way.
    fn commit(&mut self) -> CommitAnswer;
    /// Aborts the transaction that is open, and the one whose commit was refused; returns whether there was such a one. Another commit
    /// that is under way is not touched. After a retriable error it may be called again, and so may `settle`. Both are safe to cancel.
    fn abort(&mut self) -> impl Future<Output = Result<bool, ProducerError>> + Send;
    /// After a commit of unknown outcome, and when no other transaction is open: settles it, and returns the committed offsets of the
    /// partitions that have one.
    fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> impl Future<Output = Result<BTreeMap<TopicPartition, NextOffset>, ProducerError>> + Send;
    /// Leaves the group, within a bounded time.
    fn close(&mut self) -> impl Future<Output = ()> + Send;
}

/// The answer to a commit. Safe to cancel.
#[derive(Debug)]
pub struct CommitAnswer(Option<oneshot::Receiver<Result<(), ProducerError>>>);

impl CommitAnswer {
    /// An answer, and where it is given.
    pub fn new() -> (oneshot::Sender<Result<(), ProducerError>>, Self) {
        let (answer, answered) = oneshot::channel();
        (answer, Self(Some(answered)))
    }

    /// Waits for it. It is there once; then, and if the task that commits has ended, it is an error.
    pub async fn wait(&mut self) -> Result<(), ProducerError> {
        let answer = match &mut self.0 {
            Some(answer) => answer.await.ok(),
            None => None,
        };
        self.0 = None;
        answer.unwrap_or_else(|| {
            let cause = Cause::Other("the task that commits has ended".to_owned());
            Err(ProducerError::Fatal { what: "the commit", cause })
        })
    }
}

/// librdkafka's consumer with this crate's producers: the transactions of several of them overlap.
#[derive(Debug)]
pub struct KafkaClient {
    consumer: Consumer,
    cluster: Arc<Cluster>,
    /// The producer of the transaction that is open, or of the next one; `None` while its commit is under way.
    producer: Option<Producer>,
    /// The others, in whatever state their commits have left them; the one that was used last is the last.
    others: Arc<Mutex<Vec<Producer>>>,
    /// The commit under way. It ends with this client.
    commit: JoinSet<()>,
    overlaps: bool,
    /// The owner of the partitions of the batch that was prepared.
    owner: Option<Ownership>,
    /// One whose commit was refused was aborted, and the abort of the one that is open has to be called again.
    refused: bool,
}

/// The ids of the producers that take turns with that of `transactional_id` where transactions overlap. One writes a batch and one
/// commits the batch before; a third one has time to get its markers, which take about as long as both.
pub fn other_ids(transactional_id: &str) -> [String; 2] {
    [2, 3].map(|number| format!("{transactional_id}.{number}"))
}

impl KafkaClient {
    /// A member of a group, with a producer; with others, which take turns, transactions overlap.
    pub fn new(consumer: Consumer, mut producer: Producer, mut others: Vec<Producer>) -> Self {
        let (cluster, overlaps) = (producer.cluster().clone(), !others.is_empty());
        if overlaps {
            producer.rest();
            others.iter_mut().for_each(Producer::rest);
        }
        let others = Arc::new(Mutex::new(others));
        let (producer, commit) = (Some(producer), JoinSet::new());
        Self { consumer, cluster, producer, others, commit, overlaps, owner: None, refused: false }
    }

    /// Checks the properties, that a batch fits into a transaction, and the copies of the topics: a start that is refused for these leaves a
    /// running instance alone. Then takes the transactional id over, and joins the group: the transaction of a predecessor is ended before its offsets are read.
    pub async fn connect(
        consumer: &ConsumerConfig,
        producer: ProducerConfig,
        processor: &ProcessorConfig,
    ) -> Result<Self, ProcessorError> {
        let refused = refusal::processor(&consumer.properties);
        if !refused.is_empty() {
            return Err(ConsumerError::Refused(refused).into());
        }
        producer.check()?;
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
        // Where transactions overlap, a commit waits for the one before, and a batch for that.
        let tries = if processor.overlap { 4 } else { 2 };
        consumer.assign_wait = consumer.assign_wait.max(settling + delivery * tries);
        Consumer::check(&consumer)?;
        let cluster = Arc::new(Cluster::new(producer.connect.clone()));
        require_copies(&cluster, &consumer, processor, delivery).await?;
        // The one that every instance has comes last: if another is refused, an instance without overlap runs on.
        let mut others = Vec::new();
        if processor.overlap {
            for transactional_id in other_ids(&producer.transactional_id) {
                let other = ProducerConfig { transactional_id, ..producer.clone() };
                others.push(Producer::connect_on(cluster.clone(), other).await?);
            }
        }
        let first = Producer::connect_on(cluster.clone(), producer).await?;
        Ok(Self::new(Consumer::start(&consumer)?, first, others))
    }

    /// The producer of the transaction that is open, or of the next one: that whose last transaction ended first.
    fn producer(&mut self) -> Result<&mut Producer, ProducerError> {
        if self.producer.is_none() {
            let mut others = lock(&self.others);
            let place = others.iter().position(|other| other.state() == State::Ready);
            self.producer = place.map(|place| others.remove(place));
        }
        let state = State::Committing;
        self.producer.as_mut().ok_or_else(|| Misuse::State { call: "begin", state }.into())
    }

    /// Takes a producer that is not the present one.
    fn take(&self, which: impl Fn(&Producer) -> bool) -> Option<Taken> {
        let mut others = lock(&self.others);
        let place = others.iter().position(which)?;
        Some(Taken { producer: Some(others.remove(place)), others: self.others.clone() })
    }
}

/// A producer that is taken from the others, and is one of them again afterwards, also if its use was cancelled.
struct Taken {
    producer: Option<Producer>,
    others: Arc<Mutex<Vec<Producer>>>,
}

impl Deref for Taken {
    type Target = Producer;

    fn deref(&self) -> &Producer {
        self.producer.as_ref().expect("only the drop takes it")
    }
}

impl DerefMut for Taken {
    fn deref_mut(&mut self) -> &mut Producer {
        self.producer.as_mut().expect("only the drop takes it")
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        lock(&self.others).extend(self.producer.take());
    }
}

/// Commits unless a partition is another member's when the offsets are written. A broker refuses offsets that come after that by the
/// member's generation, but not in a group with a member of the protocol `consumer` (KIP-848), which anyone can start. What is this
/// member's now was its own when the broker took the offsets: the next owner's start waits for them.
async fn commit_owned(producer: &mut Producer, owner: Option<Ownership>) -> Result<(), ProducerError> {
    producer.prepare().await?;
    if !owner.is_some_and(|owner| owner.is_kept()) {
        return Err(producer.refuse("a partition of the batch is another member's by now"));
    }
    producer.commit().await
}

/// Whether the transaction of a producer can only be aborted.
fn is_refused(producer: &Producer) -> bool {
    matches!(producer.state(), State::Failed | State::Aborting)
}

fn lock(producers: &Mutex<Vec<Producer>>) -> MutexGuard<'_, Vec<Producer>> {
    producers.lock().unwrap_or_else(PoisonError::into_inner)
}

impl KafkaClient {
    /// Does nothing but in the variant that commits what is read.
    fn read(&self, event: &Event) {
        if let Event::Record(record) = event
            && mutant::is(OFFSETS_APART)
        {
            self.consumer.commit([(&record.at, record.offset + 1)]);
        }
    }
}

impl Client for KafkaClient {
    async fn next(&mut self) -> Event {
        let event = self.consumer.next().await;
        self.read(&event);
        event
    }

    fn try_next(&mut self) -> Option<Event> {
        self.consumer.try_next().inspect(|event| self.read(event))
    }

    fn seek(&mut self, at: &TopicPartition, offset: i64) {
        self.consumer.seek(at, offset);
    }

    fn owner_of(&self, partitions: &[TopicPartition], revocation: Option<&Revocation>) -> Option<Ownership> {
        self.consumer.owner_of(partitions, revocation)
    }

    fn begin(&mut self) -> Result<(), ProducerError> {
        let producer = self.producer()?;
        if mutant::is(ABORT_LEFT_OUT) && producer.state() == State::Open {
            return Ok(());
        }
        producer.begin()
    }

    async fn send(&mut self, record: NewRecord) -> Result<(), ProducerError> {
        self.producer()?.send(record).await
    }

    async fn topic_ids(&self, topics: &BTreeSet<Arc<str>>) -> Result<TopicIds, ProducerError> {
        let asked = self.cluster.topic_ids(topics.iter().map(|topic| &**topic));
        asked.await.map_err(|error| ProducerError::Unavailable { what: TOPIC_IDS, cause: error.into() })
    }

    async fn prepare(
        &mut self,
        owner: Ownership,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> Result<(), ProcessorError> {
        let (cluster, overlaps, group) = (self.cluster.clone(), self.overlaps, owner.member.clone());
        self.owner = Some(owner);
        let producer = self.producer()?;
        let deadline = Instant::now() + producer.delivery_timeout();
        if !mutant::is(OFFSETS_APART) {
            producer.offsets(group, next.iter().cloned())?;
        }
        // The offsets go with the commit where the next batch need not wait for them.
        let prepared = async {
            let prepared = if overlaps { producer.flush().await } else { producer.prepare().await };
            Ok(prepared?)
        };
        tokio::try_join!(prepared, same_topics(&cluster, &next, deadline))?;
        Ok(())
    }

    fn overlaps(&self) -> bool {
        self.overlaps
    }

    fn commit(&mut self) -> CommitAnswer {
        let (answer, answered) = CommitAnswer::new();
        while self.commit.try_join_next().is_some() {}
        let Some(mut producer) = self.producer.take() else { return answered };
        // Not only the last one: its transaction may have been aborted because it waited for that of another one.
        if let Some(before) = lock(&self.others).iter().rfind(|other| other.offsets_may_return()) {
            producer.follow(before);
        }
        let (others, owner) = (self.others.clone(), self.owner.take());
        self.commit.spawn(async move {
            let committed = commit_owned(&mut producer, owner).await;
            // Before the answer: whoever has it finds the producer.
            lock(&others).push(producer);
            let _ = answer.send(committed);
        });
        answered
    }

    async fn abort(&mut self) -> Result<bool, ProducerError> {
        let open = match &mut self.producer {
            Some(producer) if producer.state() == State::Open && mutant::is(ABORT_LEFT_OUT) => Ok(()),
            Some(producer) if producer.state() != State::Ready => producer.abort().await,
            _ => Ok(()),
        };
        if let Some(mut refused) = self.take(is_refused) {
            refused.abort().await?;
            self.refused = true;
        }
        open.map(|()| std::mem::take(&mut self.refused))
    }

    async fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> Result<BTreeMap<TopicPartition, NextOffset>, ProducerError> {
        if let Some(mut unknown) = self.take(|producer| producer.state() == State::Unknown) {
            unknown.recover().await?;
        }
        if mutant::is(SETTLED_UNREAD) {
            return Ok(BTreeMap::new());
        }
        self.producer()?.committed(group, partitions).await
    }

    async fn close(&mut self) {
        self.consumer.close().await;
    }
}

/// Refuses a cluster of several brokers where the loss of one can lose records of the inputs, or dead letters, that were acknowledged. The
/// output topics are the handler's; `admin::check` examines all.
async fn require_copies(
    cluster: &Cluster,
    consumer: &ConsumerConfig,
    processor: &ProcessorConfig,
    wait_max: Duration,
) -> Result<(), ProcessorError> {
    let topics: Vec<String> = consumer.topics.iter().chain(&processor.dead_letters).cloned().collect();
    let (what, start, mut backoff) = ("examining the topics", Instant::now(), Backoff::new());
    let found = loop {
        match admin::check_copies(cluster, &topics).await {
            Ok(found) => break found,
            Err(AdminError::Wire(error)) if error.is_transient() && start.elapsed() < wait_max => {
                backoff.wait().await;
            }
            Err(AdminError::Wire(error)) if error.is_transient() => {
                return Err(ProducerError::Unavailable { what, cause: error.into() }.into());
            }
            Err(AdminError::Wire(error)) => {
                return Err(ProducerError::Fatal { what, cause: error.into() }.into());
            }
            Err(error) => {
                return Err(ProducerError::Fatal { what, cause: Cause::Other(error.to_string()) }.into());
            }
        }
    };
    for warning in found.warnings {
        tracing::warn!("{} = {:?}: {}", warning.key, warning.value, warning.remedy);
    }
    if found.refused.is_empty() { Ok(()) } else { Err(ConsumerError::Refused(found.refused).into()) }
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
