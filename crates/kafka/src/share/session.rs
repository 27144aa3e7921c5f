//! The share session with one broker: one connection, one request at a time.
//!
//! The broker returns what the session has locked as soon as its connection ends. So an error of the connection, or of the
//! session's epoch, ends all deliveries of the session, and a new session begins. It is noticed by the next request: at the
//! latest when a lock is renewed, after a third of its time.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hapax_core::StoreError;
use kafka_protocol::error::{ParseResponseErrorCode as _, ResponseError};
use kafka_protocol::messages::share_acknowledge_request::{
    AcknowledgePartition, AcknowledgeTopic, AcknowledgementBatch,
};
use kafka_protocol::messages::share_fetch_request::{FetchPartition, FetchTopic, ForgottenTopic};
use kafka_protocol::messages::share_fetch_response::{AcquiredRecords, PartitionData};
use kafka_protocol::messages::{ShareAcknowledgeRequest, ShareFetchRequest};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, sleep_until};
use uuid::Uuid;

use super::engine::{Engine, READY_MAX};
use super::record::SharedRecord;
use super::state::{Held, Partition, Place, SessionId};
use super::undecoded::Undecoded;
use super::wire::{Acknowledge, Fetch, VERSION};
use crate::batches::{BatchError, DecodeBudget};
use crate::wire::{Backoff, Connection, WireError, text};

/// How long a fetch waits for records. Acknowledgements wait for it.
const FETCH_WAIT_MS: i32 = 250;
/// Bytes of a fetch; a larger batch is returned alone.
const FETCH_BYTES_MAX: usize = 4 << 20;
/// Acknowledgements of one request.
const ACKS_MAX: usize = 2_000;
/// Offsets that a broker says are locked, in all ranges of one response.
const ACQUIRED_MAX: i64 = 100_000;
/// Opens a session.
const OPEN: i32 = 0;
/// Closes a session.
const CLOSE: i32 = -1;
/// Time for the broker's answer to a close.
const CLOSE_MAX: Duration = Duration::from_secs(3);

/// Partitions of earlier responses that may wait for dead letters before theirs. Each keeps a part of a response in memory.
const LAST_MAX: usize = 16;

/// Time for dead letters that are on their way when the source is closed.
const BURY_MAX: Duration = Duration::from_secs(8);

/// What becomes of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// There is no record at this offset.
    Gap = 0,
    Accept = 1,
    Release = 2,
    Renew = 4,
}

/// Why an acknowledgement had no effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum AckError {
    /// The record is not locked for us any more.
    Stale,
    /// It may be repeated.
    Again(String),
}

/// An acknowledgement on its way.
pub(super) struct Ack {
    pub place: Place,
    pub generation: u64,
    pub kind: Kind,
    /// Receives when the request was sent; `None`: the result is not of interest.
    pub reply: Option<oneshot::Sender<Result<Instant, AckError>>>,
}

impl Ack {
    fn answer(self, answer: Result<Instant, AckError>) {
        if let Some(reply) = self.reply {
            // The task that waits for it may have ended.
            let _ = reply.send(answer);
        }
    }
}

/// The partitions that a session serves.
pub(super) type Wanted = BTreeSet<Partition>;

/// The end of a session that the engine keeps.
pub(super) struct SessionHandle {
    pub acks: mpsc::UnboundedSender<Ack>,
    pub wanted: watch::Sender<Wanted>,
    pub address: watch::Sender<String>,
}

/// The session with one broker.
pub(super) struct Session {
    engine: Arc<Engine>,
    node: i32,
    acks: mpsc::UnboundedReceiver<Ack>,
    wanted: watch::Receiver<Wanted>,
    address: watch::Receiver<String>,
    waiting: VecDeque<Ack>,
    /// What the last response has and is not decoded yet, and when it is released.
    undecoded: VecDeque<Undecoded>,
    release_at: Instant,
    /// Of responses before it, what was delivered for the last time and is not decoded yet, and when its locks are renewed.
    last: VecDeque<Undecoded>,
    renew_at: Instant,
    /// Records and batches that were decoded of the last response.
    decoded: usize,
    decoded_batches: usize,
    /// Records to ask for: not more than were decoded when something had to be released.
    fetch_max: usize,
    open: Option<Open>,
    /// Of the session that is open.
    id: Option<SessionId>,
    backoff: Backoff,
}

/// A session that the broker knows.
struct Open {
    connection: Connection,
    /// Of the next request.
    epoch: i32,
    /// The partitions that the broker has in the session.
    partitions: Wanted,
}

impl Open {
    fn next_epoch(&mut self) {
        self.epoch = if self.epoch == i32::MAX { 1 } else { self.epoch + 1 };
    }
}

impl Session {
    /// A session that has not begun, and the handle to it.
    pub fn new(engine: Arc<Engine>, node: i32, address: String) -> (Self, SessionHandle) {
        let (acks, queued) = mpsc::unbounded_channel();
        let (wanted_sender, wanted) = watch::channel(Wanted::new());
        let (address_sender, address) = watch::channel(address);
        let session = Self {
            engine,
            node,
            acks: queued,
            wanted,
            address,
            waiting: VecDeque::new(),
            undecoded: VecDeque::new(),
            release_at: Instant::now(),
            last: VecDeque::new(),
            renew_at: Instant::now(),
            decoded: 0,
            decoded_batches: 0,
            fetch_max: usize::MAX,
            open: None,
            id: None,
            backoff: Backoff::new(),
        };
        (session, SessionHandle { acks, wanted: wanted_sender, address: address_sender })
    }

    /// Serves until it is told to stop, then closes the session.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut demand = self.engine.shared.demand.subscribe();
        let mut close_at = None;
        loop {
            demand.mark_unchanged();
            self.wanted.mark_unchanged();
            if self.waiting.is_empty() {
                // Lets the tasks that have just ended send theirs too.
                tokio::task::yield_now().await;
            }
            while let Ok(ack) = self.acks.try_recv() {
                self.waiting.push_back(ack);
            }
            if !self.waiting.is_empty() {
                self.acknowledge().await;
                continue;
            }
            if !self.last.is_empty() && self.renew_at <= Instant::now() {
                self.renew_last();
                continue;
            }
            let limit = self.engine.settings.limit;
            let (buries, wanted) = (self.engine.buries(), self.fetches() > 0);
            let waits = self.undecoded.iter().any(|part| part.has_last(limit));
            if (waits || !self.last.is_empty()) && !buries {
                if !wanted {
                    self.release_undecoded();
                }
                for part in std::mem::take(&mut self.last).into_iter().rev() {
                    self.undecoded.push_front(part);
                }
                self.decode();
                continue;
            }
            if *stop.borrow() {
                let close_at = *close_at.get_or_insert_with(|| Instant::now() + BURY_MAX);
                if !buries || Instant::now() >= close_at {
                    return self.close().await;
                }
            } else if wanted && self.undecoded.is_empty() && self.last.len() < LAST_MAX {
                self.fetch().await;
                continue;
            } else if wanted && !self.undecoded.is_empty() && !waits {
                self.decode();
                continue;
            }
            tokio::select! {
                ack = self.acks.recv() => match ack {
                    Some(ack) => self.waiting.push_back(ack),
                    None => return self.close().await,
                },
                _ = demand.changed() => {}
                _ = self.wanted.changed() => {}
                () = stopped(&mut stop), if close_at.is_none() => {}
                () = sleep_until(close_at.unwrap_or(self.release_at)), if close_at.is_some() => {}
                () = sleep_until(self.release_at), if !self.undecoded.is_empty() => self.release_undecoded(),
                () = sleep_until(self.renew_at), if !self.last.is_empty() => {}
            }
        }
    }

    /// The partitions to fetch from: the retry topic's are left out while enough of its records are held.
    fn served(&self) -> Wanted {
        let wanted = self.wanted.borrow();
        if self.engine.holds_enough() {
            let is_retry = |partition: &&Partition| !self.engine.is_retry(partition.0);
            wanted.iter().filter(is_retry).copied().collect()
        } else {
            wanted.clone()
        }
    }

    /// How many records to fetch now.
    fn fetches(&self) -> usize {
        if self.served().is_empty() || self.engine.buries_enough() {
            return 0;
        }
        self.engine.shared.share(self.engine.sessions.load(Ordering::SeqCst))
    }

    /// The session, opened if there is none.
    async fn opened(&mut self) -> Result<&mut Open, WireError> {
        if self.open.is_none() {
            let address = self.address.borrow().clone();
            let connection = Connection::open(&address, &self.engine.connect).await?;
            self.id = Some(SessionId { node: self.node, generation: self.engine.next_generation() });
            self.open = Some(Open { connection, epoch: OPEN, partitions: Wanted::new() });
        }
        Ok(self.open.as_mut().expect("it was just opened"))
    }

    async fn fetch(&mut self) {
        let (count, served) = (self.fetches().min(self.fetch_max), self.served());
        let (group, member) = (self.engine.options.group.clone(), self.engine.member.clone());
        let bytes_max = fetch_bytes(self.engine.connect.response_bytes_max);
        self.engine.shared.fetch_begins(self.node);
        let open = match self.opened().await {
            Ok(open) => open,
            Err(error) => return self.unreachable(&error).await,
        };
        let added: Wanted = served.difference(&open.partitions).copied().collect();
        let removed: Wanted = open.partitions.difference(&served).copied().collect();
        let max_records = i32::try_from(count).unwrap_or(i32::MAX);
        let request = ShareFetchRequest::default()
            .with_group_id(Some(text(&group).into()))
            .with_member_id(Some(text(&member)))
            .with_share_session_epoch(open.epoch)
            .with_max_wait_ms(FETCH_WAIT_MS)
            .with_min_bytes(1)
            .with_max_bytes(bytes_max)
            .with_max_records(max_records)
            .with_batch_size(max_records)
            .with_topics(by_topic(&added, |topic, partitions| {
                let partition = |number: i32| FetchPartition::default().with_partition_index(number);
                let partitions = partitions.into_iter().map(partition).collect();
                FetchTopic::default().with_topic_id(topic).with_partitions(partitions)
            }))
            .with_forgotten_topics_data(by_topic(&removed, |topic, partitions| {
                ForgottenTopic::default().with_topic_id(topic).with_partitions(partitions)
            }));
        let sent = Instant::now();
        let response = match open.connection.call(&Fetch(request), VERSION).await {
            Ok((response, _)) => response.0,
            Err(error) => return self.unreachable(&error).await,
        };
        if let Some(error) = response.error_code.err() {
            return self.refused(error, response.error_message.as_deref()).await;
        }
        open.partitions = served;
        open.next_epoch();
        self.engine.shared.set_lock(response.acquisition_lock_timeout_ms);
        let (mut has_failed, mut left) = (false, ACQUIRED_MAX);
        for topic in response.responses {
            for data in topic.partitions {
                has_failed |= data.error_code.err().is_some();
                let counts = acquired(&data.acquired_records, &mut left);
                self.fetched((topic.topic_id, data.partition_index), data, counts, sent);
            }
        }
        (self.decoded, self.decoded_batches) = (0, 0);
        self.decode();
        self.engine.shared.fetch_ended(self.node);
        if has_failed {
            self.backoff.wait().await;
        } else {
            self.backoff = Backoff::new();
        }
    }

    /// Takes in what a partition has given.
    fn fetched(
        &mut self,
        partition: Partition,
        data: PartitionData,
        locked: BTreeMap<i64, i16>,
        sent: Instant,
    ) {
        let (Some(open), Some(id)) = (&mut self.open, self.id) else { return };
        if let Some(error) = data.error_code.err() {
            // The next fetch asks for it again, or its new leader is asked.
            open.partitions.remove(&partition);
            let message = data.error_message.as_deref().unwrap_or_default();
            self.engine.partition_failed(id, partition, error, message);
        }
        let Some(topic) = self.engine.topic(partition.0) else { return };
        if !locked.is_empty() {
            let (bytes, until) = (data.records.unwrap_or_default(), sent + self.engine.shared.lock());
            self.undecoded.push_back(Undecoded { partition, topic, bytes, locked, until, seen_to: 0 });
        }
    }

    /// Decodes as much as one budget has room for, at least one batch. The rest waits until more records are wanted: released, each of them
    /// would have lost a delivery.
    fn decode(&mut self) {
        let Some(session) = self.id else { return self.undecoded.clear() };
        let mut budget = DecodeBudget::MAX;
        while let Some(mut part) = self.undecoded.pop_front() {
            let (now, lock) = (Instant::now(), self.engine.shared.lock());
            if part.until <= now {
                // The broker has ended the locks. Where it has dropped the record, a dead letter is all that can be left of it.
                part.without_last(self.engine.settings.limit);
                part.until = now + lock;
            } else if part.until < now + lock / 2 {
                // Too little is left for a handler.
                self.release(&mut part, session);
            }
            match part.next_batch(&mut budget) {
                Ok(Some(records)) => {
                    self.decoded += records.len();
                    self.decoded_batches += 1;
                    for (record, count) in records {
                        let place = Place { partition: part.partition, offset: record.offset };
                        let record = SharedRecord::new(record, place, &part.topic.0, part.topic.1);
                        let count = u32::try_from(count).unwrap_or(1).max(1);
                        let receipt = self.engine.receipt(place);
                        let held = Held::new(receipt, place, session, record, count, part.until);
                        self.engine.arrived(Arc::new(held));
                    }
                    self.undecoded.push_front(part);
                }
                Ok(None) => {
                    // What lies behind the batches that were complete was never seen.
                    let unseen = part.locked.split_off(&part.seen_to);
                    self.acknowledge_all(part.partition, unseen, session, Kind::Release);
                    self.acknowledge_all(part.partition, part.locked, session, Kind::Gap);
                }
                Err(BatchError::NoRoom) => {
                    self.undecoded.push_front(part);
                    self.release_at = Instant::now() + READY_MAX;
                    return;
                }
                Err(BatchError::Unreadable(problem)) => {
                    let (topic, number) = (part.topic.0, part.partition.1);
                    let problem = format!(
                        "records of {topic}/{number} cannot be read: {problem}; compare the batch with another replica. Each start takes one of its \
                         deliveries, and the broker drops its records after the last one: mend it before the next start"
                    );
                    self.engine.shared.fails(StoreError::Invalid(problem));
                }
            }
        }
        // One batch is the least that there can be, however large it is.
        if budget.is_half_left() || self.decoded_batches <= 1 {
            self.fetch_max = self.fetch_max.saturating_mul(2);
        }
    }

    /// No receive came for what is not decoded yet: another member may have it. The next fetch asks for no more than was decoded. What was
    /// delivered for the last time stays locked, until the dead letters before it are written.
    fn release_undecoded(&mut self) {
        self.fetch_max = self.decoded.max(1);
        let undecoded = std::mem::take(&mut self.undecoded);
        let Some(session) = self.id else { return };
        for mut part in undecoded {
            self.release(&mut part, session);
            if !part.locked.is_empty() {
                self.last.push_back(part);
            }
        }
        self.renew_last();
    }

    /// Keeps what was delivered for the last time locked.
    fn renew_last(&mut self) {
        let (last, lock) = (std::mem::take(&mut self.last), self.engine.shared.lock());
        let Some(session) = self.id else { return };
        for mut part in last {
            self.acknowledge_all(part.partition, part.locked.clone(), session, Kind::Renew);
            part.until = Instant::now() + lock;
            self.last.push_back(part);
        }
        self.renew_at = Instant::now() + lock / 3;
    }

    /// Gives back what is not decoded, except what the broker would drop then.
    fn release(&mut self, part: &mut Undecoded, session: SessionId) {
        let released = part.without_last(self.engine.settings.limit);
        self.acknowledge_all(part.partition, released, session, Kind::Release);
    }

    /// Acknowledges the offsets that are locked and not decoded.
    fn acknowledge_all(
        &mut self,
        partition: Partition,
        locked: BTreeMap<i64, i16>,
        session: SessionId,
        kind: Kind,
    ) {
        for offset in locked.into_keys() {
            let place = Place { partition, offset };
            self.waiting.push_back(Ack { place, generation: session.generation, kind, reply: None });
        }
    }

    /// Sends the acknowledgements that wait, as many as fit.
    async fn acknowledge(&mut self) {
        let generation = self.id.map(|id| id.generation);
        let mut batch: Vec<Ack> = Vec::new();
        let mut places = std::collections::HashSet::new();
        let mut later = VecDeque::new();
        while let Some(ack) = self.waiting.pop_front() {
            if Some(ack.generation) != generation {
                ack.answer(Err(AckError::Stale));
            } else if batch.len() < ACKS_MAX && places.insert(ack.place) {
                batch.push(ack);
            } else {
                later.push_back(ack);
            }
        }
        self.waiting = later;
        if batch.is_empty() {
            return;
        }
        let (sent, errors) = match self.send(&batch, None).await {
            Ok(answer) => answer,
            Err(error) => return lost(batch, &error),
        };
        let mut counts: HashMap<Partition, usize> = HashMap::new();
        for ack in &batch {
            *counts.entry(ack.place.partition).or_default() += 1;
        }
        for ack in batch {
            let partition = ack.place.partition;
            let mut answer =
                errors.get(&partition).copied().unwrap_or(Some(ResponseError::UnknownServerError));
            let mut at = sent;
            // One record that is not locked any more fails all of its partition.
            if answer == Some(ResponseError::InvalidRecordState) && counts[&partition] > 1 {
                match self.send(std::slice::from_ref(&ack), None).await {
                    Ok((sent, errors)) => {
                        (at, answer) = (sent, errors.get(&partition).copied().flatten());
                    }
                    Err(error) => {
                        lost(vec![ack], &error);
                        continue;
                    }
                }
            }
            let answer = self.meaning(partition, answer);
            ack.answer(answer.map(|()| at));
        }
    }

    fn meaning(&mut self, partition: Partition, answer: Option<ResponseError>) -> Result<(), AckError> {
        match answer {
            None => Ok(()),
            Some(ResponseError::InvalidRecordState | ResponseError::InvalidRequest) => Err(AckError::Stale),
            Some(error) if is_moved(error) => {
                if let (Some(open), Some(id)) = (&mut self.open, self.id) {
                    open.partitions.remove(&partition);
                    self.undecoded.retain(|part| part.partition != partition);
                    self.last.retain(|part| part.partition != partition);
                    self.engine.partition_failed(id, partition, error, "");
                }
                Err(AckError::Stale)
            }
            Some(error) => Err(AckError::Again(error.to_string())),
        }
    }

    /// One request. Returns when it was sent, and the error of each partition.
    async fn send(
        &mut self,
        acks: &[Ack],
        epoch: Option<i32>,
    ) -> Result<(Instant, HashMap<Partition, Option<ResponseError>>), String> {
        let Some(open) = &mut self.open else { return Err("no session".to_owned()) };
        let mut partitions: BTreeMap<Partition, Vec<(i64, Kind)>> = BTreeMap::new();
        for ack in acks {
            partitions.entry(ack.place.partition).or_default().push((ack.place.offset, ack.kind));
        }
        let mut topics: BTreeMap<Uuid, Vec<AcknowledgePartition>> = BTreeMap::new();
        for ((topic, number), acks) in partitions {
            let partition = AcknowledgePartition::default()
                .with_partition_index(number)
                .with_acknowledgement_batches(batches(acks));
            topics.entry(topic).or_default().push(partition);
        }
        let topics = topics.into_iter().map(|(topic, partitions)| {
            AcknowledgeTopic::default().with_topic_id(topic).with_partitions(partitions)
        });
        let request = ShareAcknowledgeRequest::default()
            .with_group_id(Some(text(&self.engine.options.group).into()))
            .with_member_id(Some(text(&self.engine.member)))
            .with_share_session_epoch(epoch.unwrap_or(open.epoch))
            .with_topics(topics.collect());
        let renews = acks.iter().any(|ack| ack.kind == Kind::Renew);
        let sent = Instant::now();
        let response = match open.connection.call(&Acknowledge { request, renews }, VERSION).await {
            Ok((response, _)) => response.0,
            Err(error) => {
                self.unreachable(&error).await;
                return Err(error.to_string());
            }
        };
        if let Some(error) = response.error_code.err() {
            self.refused(error, response.error_message.as_deref()).await;
            return Err(error.to_string());
        }
        open.next_epoch();
        let mut errors = HashMap::new();
        for topic in response.responses {
            for data in topic.partitions {
                errors.insert((topic.topic_id, data.partition_index), data.error_code.err());
            }
        }
        Ok((sent, errors))
    }

    /// The connection has failed.
    async fn unreachable(&mut self, error: &WireError) {
        let remedy = match error {
            // Each attempt counts as a delivery of records that are never seen, until the broker drops them.
            WireError::TooLarge { .. } => {
                "; raise response_bytes_max of the connection above it, and start again"
            }
            error if error.is_transient() => return self.lose(error.to_string()).await,
            _ => "",
        };
        self.engine.shared.fails(StoreError::Invalid(format!("{error}{remedy}")));
        self.end();
    }

    /// The broker refuses the session.
    async fn refused(&mut self, error: ResponseError, message: Option<&str>) {
        let problem =
            format!("the share session with broker {}: {error} {}", self.node, message.unwrap_or_default());
        match error {
            ResponseError::GroupAuthorizationFailed
            | ResponseError::TopicAuthorizationFailed
            | ResponseError::UnsupportedVersion => {
                self.engine.shared.fails(StoreError::Invalid(problem));
                self.end();
            }
            _ => self.lose(problem).await,
        }
    }

    /// Ends the session; the next request opens another one.
    async fn lose(&mut self, problem: String) {
        self.end();
        self.engine.shared.has_problem(problem);
        self.engine.look_up_leaders();
        self.backoff.wait().await;
    }

    fn end(&mut self) {
        self.undecoded.clear();
        self.last.clear();
        self.open = None;
        if let Some(id) = self.id.take() {
            self.engine.shared.lost(id, None);
        }
    }

    /// Tells the broker that the session is over: it returns what is locked. Its deliveries stay counted.
    async fn close(mut self) {
        if self.open.is_some() {
            let _ = tokio::time::timeout(CLOSE_MAX, self.send(&[], Some(CLOSE))).await;
        }
        self.end();
        while let Ok(ack) = self.acks.try_recv() {
            ack.answer(Err(AckError::Stale));
        }
    }
}

/// The broker may or may not have got them; their locks have ended with the connection.
fn lost(batch: Vec<Ack>, error: &str) {
    tracing::debug!(count = batch.len(), error, "acknowledgements were not answered");
    for ack in batch {
        ack.answer(Err(AckError::Stale));
    }
}

/// Bytes of records to ask for, so that there is room in a response for what is around them.
fn fetch_bytes(response_bytes_max: usize) -> i32 {
    i32::try_from(FETCH_BYTES_MAX.min(response_bytes_max / 2).max(1)).unwrap_or(i32::MAX)
}

/// Completes when the source is closed.
pub(super) async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error: the source is gone.
    let _ = stop.wait_for(|stop| *stop).await;
}

/// Whether another broker leads the partition, or none does.
pub(super) fn is_moved(error: ResponseError) -> bool {
    matches!(
        error,
        ResponseError::NotLeaderOrFollower
            | ResponseError::FencedLeaderEpoch
            | ResponseError::UnknownLeaderEpoch
            | ResponseError::LeaderNotAvailable
            | ResponseError::UnknownTopicOrPartition
            | ResponseError::UnknownTopicId
            | ResponseError::InconsistentTopicId
            | ResponseError::FencedStateEpoch
    )
}

/// Acknowledgements of a partition: one batch for each run of offsets with the same end.
fn batches(mut acks: Vec<(i64, Kind)>) -> Vec<AcknowledgementBatch> {
    acks.sort_unstable_by_key(|(offset, _)| *offset);
    let mut runs: Vec<(i64, i64, Kind)> = Vec::new();
    for (offset, kind) in acks {
        match runs.last_mut() {
            Some((_, last, of)) if *of == kind && *last + 1 == offset => *last = offset,
            _ => runs.push((offset, offset, kind)),
        }
    }
    let batch = |(first, last, kind): (i64, i64, Kind)| {
        AcknowledgementBatch::default()
            .with_first_offset(first)
            .with_last_offset(last)
            .with_acknowledge_types(vec![kind as i8])
    };
    runs.into_iter().map(batch).collect()
}

/// The locked offsets with the counts of their deliveries, at most `left`, which becomes less. The rest is locked again when its
/// time is over.
fn acquired(ranges: &[AcquiredRecords], left: &mut i64) -> BTreeMap<i64, i16> {
    let mut counts = BTreeMap::new();
    for range in ranges {
        let first = range.first_offset;
        for offset in (first..=range.last_offset).take(usize::try_from(*left).unwrap_or(0)) {
            counts.insert(offset, range.delivery_count);
            *left -= 1;
        }
    }
    counts
}

fn by_topic<T>(partitions: &Wanted, topic: impl Fn(Uuid, Vec<i32>) -> T) -> Vec<T> {
    let mut topics: BTreeMap<Uuid, Vec<i32>> = BTreeMap::new();
    for (id, number) in partitions {
        topics.entry(*id).or_default().push(*number);
    }
    topics.into_iter().map(|(id, numbers)| topic(id, numbers)).collect()
}

#[cfg(test)]
mod tests;
