//! The thread that polls librdkafka, and the callbacks that run on it.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rdkafka::client::ClientContext;
use rdkafka::config::{ClientConfig, RDKafkaLogLevel};
use rdkafka::consumer::{BaseConsumer, Consumer as _, ConsumerContext};
use rdkafka::error::{KafkaError, RDKafkaErrorCode};
use rdkafka::message::{BorrowedMessage, Headers as _, Message as _};
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};
use rdkafka::types::RDKafkaRespErr;
use tokio::sync::{mpsc, oneshot};

use super::{
    Assignment, ConsumerConfig, ConsumerError, Event, NewGroup, Record, Revocation, StartAt, TopicId,
    TopicPartition,
};
use crate::refusal;

/// librdkafka's consumer.
pub(super) type Native = BaseConsumer<Context>;

/// How long one poll waits for a record. Seeks and the end are noticed between two polls.
const POLL: Duration = Duration::from_millis(50);
/// How long an owner that is behind is waited for before partitions are paused. Rebalances are not served meanwhile.
const OWNER_WAIT_MAX: Duration = Duration::from_millis(200);
const OWNER_WAIT_STEP: Duration = Duration::from_millis(1);
/// Time for one question to the broker.
const QUESTION: Duration = Duration::from_secs(10);
/// Time for the question that wakes the thread that fetches. A broker answers it after the fetch that waits for records there, for
/// half a second by default; librdkafka closes a connection on which a question stays unanswered for too long.
const WAKE: Duration = Duration::from_secs(3);
/// How long the broker is given to remove the committed offset of a topic that was deleted: if that came later than the first commit
/// in the new topic, it would remove that one. An offset that stays for longer reached the broker after the topic was created again.
const REMOVAL: Duration = Duration::from_secs(10);

/// A record, and the assignment or seek since which it is read.
pub(super) struct Fetched {
    pub record: Record,
    pub epoch: u64,
}

/// A request to continue at another offset.
struct Seek {
    at: TopicPartition,
    offset: i64,
    /// The assignment or seek that the owner knew of: after another one it is void.
    before: u64,
    /// Records with this number follow it.
    epoch: u64,
}

/// An assigned partition.
#[derive(Clone, Copy)]
struct Assigned {
    /// The number of its assignment.
    since: u64,
    /// That of its assignment or its last seek.
    epoch: u64,
}

/// The partitions that the group knows as this member's.
#[derive(Default)]
struct Partitions {
    assigned: HashMap<TopicPartition, Assigned>,
    /// Those that are revoked, and still waited for, with the numbers of their assignments.
    leaving: HashMap<TopicPartition, u64>,
}

/// What the thread and the owner share.
pub(super) struct Shared {
    control: mpsc::UnboundedSender<Event>,
    partitions: Mutex<Partitions>,
    /// Grows with each assignment and seek.
    epoch: AtomicU64,
    seeks: Mutex<Vec<Seek>>,
    queued_records: AtomicUsize,
    queued_bytes: AtomicUsize,
    stopped: AtomicBool,
    /// A rebalance has ended, and the thread that fetches may be asleep.
    rebalanced: AtomicBool,
    config: ConsumerConfig,
}

impl Shared {
    pub fn new(config: &ConsumerConfig, control: mpsc::UnboundedSender<Event>) -> Self {
        Self {
            control,
            partitions: Mutex::default(),
            epoch: AtomicU64::new(0),
            seeks: Mutex::default(),
            queued_records: AtomicUsize::new(0),
            queued_bytes: AtomicUsize::new(0),
            stopped: AtomicBool::new(false),
            rebalanced: AtomicBool::new(false),
            config: config.clone(),
        }
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Whether the broker assigns the partitions.
    pub fn is_by_broker(&self) -> bool {
        refusal::uses_consumer_protocol(&self.config.properties)
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// The owner has taken a record from the queue.
    pub fn took(&self, record: &Record) {
        self.queued_records.fetch_sub(1, Ordering::SeqCst);
        self.queued_bytes.fetch_sub(record.bytes(), Ordering::SeqCst);
    }

    /// Asks the thread for a seek; records with the returned number follow it.
    pub fn seek(&self, at: &TopicPartition, offset: i64, before: u64) -> u64 {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        let seek = Seek { at: at.clone(), offset, before, epoch };
        self.seeks.lock().unwrap_or_else(PoisonError::into_inner).push(seek);
        epoch
    }

    /// The number of a partition's assignment, if it is assigned, and the owner knows its last seek.
    pub fn assigned_since(&self, at: &TopicPartition, epoch: u64) -> Option<u64> {
        let assigned = self.partitions().assigned.get(at).copied();
        assigned.filter(|assigned| assigned.epoch == epoch).map(|assigned| assigned.since)
    }

    /// The number of a partition's assignment, if it is revoked and still waited for.
    pub fn leaving_since(&self, at: &TopicPartition) -> Option<u64> {
        self.partitions().leaving.get(at).copied()
    }

    /// Whether a partition is this member's by that assignment, or is revoked and still waited for.
    pub fn is_kept(&self, at: &TopicPartition, since: u64) -> bool {
        let partitions = self.partitions();
        let assigned = partitions.assigned.get(at).is_some_and(|assigned| assigned.since == since);
        assigned || partitions.leaving.get(at) == Some(&since)
    }

    fn partitions(&self) -> MutexGuard<'_, Partitions> {
        self.partitions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tell(&self, event: Event) {
        // An owner that is gone needs nothing.
        let _ = self.control.send(event);
    }

    fn end(&self, error: ConsumerError) {
        self.tell(Event::Ended(error));
        self.stop();
    }

    /// Whether the queue is above this part of its bounds.
    fn is_above(&self, part: usize) -> bool {
        self.queued_records.load(Ordering::SeqCst) > self.config.queued_records_max / part
            || self.queued_bytes.load(Ordering::SeqCst) > self.config.queued_bytes_max / part
    }
}

/// What librdkafka calls back.
pub(super) struct Context(pub Arc<Shared>);

impl ClientContext for Context {
    fn log(&self, level: RDKafkaLogLevel, facility: &str, message: &str) {
        match level {
            RDKafkaLogLevel::Emerg
            | RDKafkaLogLevel::Alert
            | RDKafkaLogLevel::Critical
            | RDKafkaLogLevel::Error => tracing::warn!(facility, "librdkafka: {message}"),
            _ => tracing::debug!(facility, "librdkafka: {message}"),
        }
    }

    /// Errors are returned by `poll`, too.
    fn error(&self, _error: KafkaError, _reason: &str) {}
}

impl ConsumerContext for Context {
    fn rebalance(&self, consumer: &Native, code: RDKafkaRespErr, list: &mut TopicPartitionList) {
        let partitions: Vec<TopicPartition> =
            list.elements().iter().map(|part| TopicPartition::new(part.topic(), part.partition())).collect();
        let done = if code == RDKafkaRespErr::RD_KAFKA_RESP_ERR__ASSIGN_PARTITIONS {
            let list = self.starts(consumer, partitions).unwrap_or_else(|error| {
                self.0.end(error);
                TopicPartitionList::new()
            });
            consumer.incremental_assign(&list)
        } else {
            self.revoked(consumer.assignment_lost(), partitions);
            consumer.incremental_unassign(list)
        };
        if let Err(error) = done {
            self.0.end(ConsumerError::Fatal(format!("a rebalance failed: {error}")));
        }
        self.0.rebalanced.store(true, Ordering::SeqCst);
    }
}

impl Context {
    /// Where the owner wants to begin.
    fn starts(
        &self,
        consumer: &Native,
        partitions: Vec<TopicPartition>,
    ) -> Result<TopicPartitionList, ConsumerError> {
        let Self(shared) = self;
        let mut list = TopicPartitionList::new();
        if partitions.is_empty() {
            return Ok(list);
        }
        let epoch = shared.epoch.fetch_add(1, Ordering::SeqCst) + 1;
        let (reply, answer) = sync_channel(1);
        shared.tell(Event::Assigned(Assignment { partitions: partitions.clone(), epoch, reply }));
        let starts = match answer.recv_timeout(shared.config.assign_wait) {
            Ok(starts) => starts,
            // The owner is gone, and so is this consumer soon.
            Err(RecvTimeoutError::Disconnected) => return Ok(list),
            Err(RecvTimeoutError::Timeout) => {
                return Err(ConsumerError::AssignTimedOut(shared.config.assign_wait.as_millis()));
            }
        };
        let committed = self.committed(consumer, &partitions, &starts)?;
        for (at, start) in partitions.iter().zip(starts) {
            let offset = match (start, committed.get(at)) {
                (StartAt::Offset(offset), _) => Offset::Offset(offset),
                (StartAt::CommittedOf(id), Some(found)) if found.is_of_another(id) => {
                    tracing::warn!("{at} is read from its start: the topic was created again as {id}");
                    Offset::Beginning
                }
                (StartAt::Committed | StartAt::CommittedOf(_), Some(found)) => Offset::Offset(found.offset),
                (StartAt::NewGroup | StartAt::Committed | StartAt::CommittedOf(_), _) => {
                    match shared.config.new_group {
                        NewGroup::Earliest => Offset::Beginning,
                        NewGroup::Latest => Offset::End,
                        NewGroup::Refuse => return Err(ConsumerError::NoOffset(at.clone())),
                    }
                }
            };
            let added = list.add_partition_offset(&at.topic, at.partition, offset);
            added.map_err(|error| ConsumerError::Fatal(format!("{at}: {error}")))?;
        }
        let assigned = Assigned { since: epoch, epoch };
        shared.partitions().assigned.extend(partitions.into_iter().map(|at| (at, assigned)));
        Ok(list)
    }

    /// The group's committed offsets. An error is not taken for a missing offset.
    fn committed(
        &self,
        consumer: &Native,
        partitions: &[TopicPartition],
        starts: &[StartAt],
    ) -> Result<HashMap<TopicPartition, CommittedOffset>, ConsumerError> {
        let mut asked = TopicPartitionList::new();
        let mut ids = Vec::new();
        for (at, start) in partitions.iter().zip(starts) {
            match start {
                StartAt::Committed => {}
                StartAt::CommittedOf(id) => ids.push((at, *id)),
                StartAt::Offset(_) | StartAt::NewGroup => continue,
            }
            asked.add_partition(&at.topic, at.partition);
        }
        if asked.count() == 0 {
            return Ok(HashMap::new());
        }
        let start = Instant::now();
        loop {
            let waited = start.elapsed();
            let answer =
                consumer.committed_offsets(asked.clone(), QUESTION).and_then(|answer| offsets(&answer));
            let is_of_another = |offsets: &HashMap<TopicPartition, CommittedOffset>| {
                ids.iter().any(|(at, id)| offsets.get(at).is_some_and(|found| found.is_of_another(*id)))
            };
            match answer {
                Ok(offsets) if is_of_another(&offsets) && waited < REMOVAL && !self.0.is_stopped() => {
                    std::thread::sleep(POLL);
                }
                Ok(offsets) => return Ok(offsets),
                Err(error) if waited >= self.0.config.assign_wait || self.0.is_stopped() => {
                    let problem = format!("the committed offsets could not be read: {error}");
                    return Err(ConsumerError::Fatal(problem));
                }
                Err(_) => std::thread::sleep(POLL),
            }
        }
    }

    /// Tells the owner, and waits for a bounded time until it has let go.
    fn revoked(&self, lost: bool, partitions: Vec<TopicPartition>) {
        let Self(shared) = self;
        if partitions.is_empty() {
            return;
        }
        {
            let Partitions { assigned, leaving } = &mut *shared.partitions();
            for at in &partitions {
                let assigned = assigned.remove(at).filter(|_| !lost);
                leaving.extend(assigned.map(|assigned| (at.clone(), assigned.since)));
            }
        }
        if lost {
            shared.tell(Event::Lost(partitions));
            return;
        }
        let (done, wait) = sync_channel(1);
        let waited_for = Arc::new(AtomicBool::new(true));
        let revocation = Revocation { partitions, _done: done, waited_for: waited_for.clone() };
        shared.tell(Event::Revoked(revocation));
        // Ends when the owner drops the event; nothing is ever sent.
        let _: Result<(), _> = wait.recv_timeout(shared.config.revoke_wait);
        waited_for.store(false, Ordering::SeqCst);
        shared.partitions().leaving.clear();
    }
}

/// A committed offset.
struct CommittedOffset {
    offset: i64,
    /// The topic that it was committed for, if that is known.
    topic_id: Option<TopicId>,
}

impl CommittedOffset {
    fn is_of_another(&self, topic_id: TopicId) -> bool {
        self.topic_id.is_some_and(|id| id != topic_id)
    }
}

/// The offsets that were committed, if there was no error in any partition.
fn offsets(answer: &TopicPartitionList) -> Result<HashMap<TopicPartition, CommittedOffset>, KafkaError> {
    let mut offsets = HashMap::new();
    for part in answer.elements() {
        part.error()?;
        if let Offset::Offset(offset) = part.offset() {
            let found = CommittedOffset { offset, topic_id: TopicId::noted(part.metadata()) };
            offsets.insert(TopicPartition::new(part.topic(), part.partition()), found);
        }
    }
    Ok(offsets)
}

/// Whether librdkafka takes the properties.
pub(super) fn check(config: &ConsumerConfig) -> Result<(), ConsumerError> {
    let created = native_config(config).create_native_config();
    created.map(drop).map_err(|error| ConsumerError::Config(error.to_string()))
}

/// Starts the thread.
pub(super) fn start(
    config: &ConsumerConfig,
    context: Context,
    records: mpsc::UnboundedSender<Fetched>,
) -> Result<(Weak<Native>, oneshot::Receiver<()>), ConsumerError> {
    let failed = |error: KafkaError| ConsumerError::Config(error.to_string());
    let shared = context.0.clone();
    let native: Arc<Native> = Arc::new(native_config(config).create_with_context(context).map_err(failed)?);
    let topics: Vec<&str> = config.topics.iter().map(String::as_str).collect();
    native.subscribe(&topics).map_err(failed)?;
    let used = Arc::downgrade(&native);
    let (leaves, left) = oneshot::channel();
    let thread = std::thread::Builder::new().name("hapax-kafka-consumer".into());
    let started = thread.spawn(move || {
        Poller {
            native: &native,
            shared: &shared,
            records,
            topics: HashSet::new(),
            paused: false,
            pause_again: false,
        }
        .run();
        // Closes the consumer on this thread, which may take its time.
        drop(native);
        let _ = leaves.send(());
    });
    started.map_err(|error| ConsumerError::Fatal(error.to_string()))?;
    Ok((used, left))
}

fn native_config(config: &ConsumerConfig) -> ClientConfig {
    let mut native = ClientConfig::new();
    for (name, value) in &config.properties {
        native.set(name, value);
    }
    let session_ms = config.session_timeout.as_millis().max(1);
    // The thread polls all the time, except while the owner answers to a rebalance.
    let poll_ms = session_ms.max((config.assign_wait + config.revoke_wait).as_millis()).max(60_000) * 2;
    native
        .set("bootstrap.servers", config.bootstrap.join(","))
        .set("group.id", &config.group)
        .set("isolation.level", "read_committed")
        .set("enable.auto.commit", "false")
        .set("enable.auto.offset.store", "false")
        .set("auto.offset.reset", "error")
        .set("allow.auto.create.topics", "false")
        // Off in librdkafka, on in Kafka's Java clients: a flipped bit would be handled as a record.
        .set("check.crcs", "true")
        // A longer pause means that the process was stopped.
        .set("max.poll.interval.ms", poll_ms.to_string())
        .set("queued.max.messages.kbytes", "16384")
        // After this time it looks whether there is room again. With the default, a second, a backlog is read in spurts.
        .set("fetch.queue.backoff.ms", "10");
    if !refusal::uses_consumer_protocol(&config.properties) {
        native
            .set("group.protocol", "classic")
            .set("partition.assignment.strategy", "cooperative-sticky")
            .set("session.timeout.ms", session_ms.to_string())
            .set("heartbeat.interval.ms", (session_ms / 10).max(1).to_string());
    }
    native
}

struct Poller<'a> {
    native: &'a Native,
    shared: &'a Shared,
    records: mpsc::UnboundedSender<Fetched>,
    /// Names that records share.
    topics: HashSet<Arc<str>>,
    paused: bool,
    /// A record came after the pause: a partition may have been assigned since.
    pause_again: bool,
}

impl Poller<'_> {
    fn run(&mut self) {
        while !self.shared.is_stopped() {
            self.seek();
            self.hold_back();
            match self.native.poll(POLL) {
                Some(Ok(message)) => self.forward(&message),
                Some(Err(error)) => self.failed(&error),
                None => {}
            }
            if self.shared.rebalanced.swap(false, Ordering::SeqCst) {
                self.wake();
            }
        }
    }

    /// While all partitions are paused, librdkafka's thread that fetches sleeps for up to a second, and sleeps on when they continue.
    /// A question to the leaders wakes it. During a rebalance librdkafka itself pauses all of them, also those that stay.
    fn wake(&self) {
        // The poll waits for the response, so it is not asked behind longer fetches.
        let is_usual = |(name, _): &(String, String)| name != "fetch.wait.max.ms";
        if !self.shared.config.properties.iter().all(is_usual) {
            return;
        }
        let Ok(mut assigned) = self.native.assignment() else { return };
        if assigned.count() > 0 && assigned.set_all_offsets(Offset::End).is_ok() {
            // The response does not matter.
            let _ = self.native.offsets_for_times(assigned, WAKE);
        }
    }

    fn seek(&self) {
        let seeks = std::mem::take(&mut *self.shared.seeks.lock().unwrap_or_else(PoisonError::into_inner));
        for Seek { at, offset, before, epoch } in seeks {
            // One that was revoked meanwhile begins elsewhere when it comes back.
            if self.shared.assigned_since(&at, before).is_none() {
                continue;
            }
            match self.native.seek(&at.topic, at.partition, Offset::Offset(offset), QUESTION) {
                Ok(()) => {
                    if let Some(assigned) = self.shared.partitions().assigned.get_mut(&at) {
                        assigned.epoch = epoch;
                    }
                }
                Err(error) => self.shared.end(ConsumerError::Fatal(format!("seek in {at}: {error}"))),
            }
        }
    }

    /// Stops fetching while too much waits for the owner, and polls on, so that rebalances are served.
    fn hold_back(&mut self) {
        self.wait_for_owner();
        let (above, below) = (self.shared.is_above(1), !self.shared.is_above(2));
        let change = (above && (!self.paused || self.pause_again)) || (below && self.paused);
        let Some(assigned) = change.then(|| self.native.assignment().ok()).flatten() else { return };
        let done = if above { self.native.pause(&assigned) } else { self.native.resume(&assigned) };
        match done {
            Ok(()) => {
                (self.paused, self.pause_again) = (above, false);
                if below {
                    self.wake();
                }
            }
            Err(error) => self.shared.tell(Event::Problem(error.to_string())),
        }
    }

    /// Gives an owner that takes records the time for some. A pause is for one that does not: librdkafka drops what it has fetched.
    fn wait_for_owner(&self) {
        let start = Instant::now();
        let waits = || !self.paused && self.shared.is_above(1) && !self.shared.is_stopped();
        while waits() && start.elapsed() < OWNER_WAIT_MAX {
            std::thread::sleep(OWNER_WAIT_STEP);
        }
    }

    fn forward(&mut self, message: &BorrowedMessage<'_>) {
        let known = self.topics.get(message.topic()).cloned();
        let topic = known.unwrap_or_else(|| {
            let topic: Arc<str> = message.topic().into();
            self.topics.insert(topic.clone());
            topic
        });
        let at = TopicPartition { topic, partition: message.partition() };
        let assigned = self.shared.partitions().assigned.get(&at).copied();
        let Some(Assigned { epoch, .. }) = assigned else { return };
        let headers = message.headers().map(|headers| {
            let header = |header: rdkafka::message::Header<'_, &[u8]>| {
                (header.key.to_owned(), header.value.map(Bytes::copy_from_slice))
            };
            headers.iter().map(header).collect()
        });
        let record = Record {
            at,
            offset: message.offset(),
            timestamp_ms: message.timestamp().to_millis(),
            key: message.key().map(Bytes::copy_from_slice),
            value: message.payload().map(Bytes::copy_from_slice),
            headers: headers.unwrap_or_default(),
        };
        self.shared.queued_records.fetch_add(1, Ordering::SeqCst);
        self.shared.queued_bytes.fetch_add(record.bytes(), Ordering::SeqCst);
        self.pause_again = self.paused;
        let _ = self.records.send(Fetched { record, epoch });
    }

    fn failed(&self, error: &KafkaError) {
        match error {
            KafkaError::MessageConsumptionFatal(_) => {
                self.shared.end(ConsumerError::Fatal(error.to_string()));
            }
            KafkaError::MessageConsumption(RDKafkaErrorCode::AutoOffsetReset) => {
                self.shared.end(ConsumerError::OffsetGone(error.to_string()));
            }
            // librdkafka would ask for the same batch without end, or pass it over if a checksum is wrong.
            KafkaError::MessageConsumption(
                code @ (RDKafkaErrorCode::NotImplemented
                | RDKafkaErrorCode::BadCompression
                | RDKafkaErrorCode::BadMessage),
            ) => self.shared.end(self.unreadable(*code)),
            KafkaError::MessageConsumption(
                code @ (RDKafkaErrorCode::Authentication
                | RDKafkaErrorCode::SaslAuthenticationFailed
                | RDKafkaErrorCode::TopicAuthorizationFailed
                | RDKafkaErrorCode::GroupAuthorizationFailed),
            ) => self.shared.end(ConsumerError::Refuses(self.missing(*code))),
            _ => self.shared.tell(Event::Problem(error.to_string())),
        }
    }

    fn unreadable(&self, code: RDKafkaErrorCode) -> ConsumerError {
        let topics = self.shared.config.topics.join(", ");
        let reason = match code {
            RDKafkaErrorCode::NotImplemented => {
                "a batch has a format that this build does not read (gzip, snappy, lz4 and zstd are read); write it with another \
                 compression.type"
                    .to_owned()
            }
            code => format!("a batch is damaged ({code}); compare it with another replica"),
        };
        ConsumerError::Unreadable { topics, reason }
    }

    /// What the user lacks.
    fn missing(&self, code: RDKafkaErrorCode) -> String {
        let config = &self.shared.config;
        let resource = match code {
            RDKafkaErrorCode::TopicAuthorizationFailed => format!("topic {}", config.topics.join(", ")),
            RDKafkaErrorCode::GroupAuthorizationFailed => format!("group {}", config.group),
            _ => return format!("{code}; look at user, password and mechanism"),
        };
        format!(
            "{code}: the user needs the operation Read on {resource}; add an access control list (kafka-acls.sh)"
        )
    }
}
