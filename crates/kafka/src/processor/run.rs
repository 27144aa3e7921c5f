//! The loop of a processor.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use kafka_protocol::error::ResponseError;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::batch::Batch;
use super::client::{CommitAnswer, TOPIC_IDS, require_same};
use super::{Client, Failure, Handler, ProcessorCells, ProcessorConfig, ProcessorError, Totals};
use crate::consumer::{Assignment, ConsumerError, Event, Ownership, Record, Revocation, StartAt};
use crate::partition::{TopicId, TopicPartition};
use crate::producer::{Cause, ErrorKind, NewRecord, NextOffset, ProducerError};
use crate::wire::Backoff;

/// A processor over a [`Client`].
#[derive(Debug)]
pub struct Processor<C, H> {
    config: ProcessorConfig,
    client: C,
    handler: H,
    /// The topics of the assigned partitions, since before the first record was read.
    topics: BTreeMap<TopicPartition, TopicId>,
    /// When the topics were last compared with those of the brokers.
    compared: Instant,
    batch: Batch,
    /// The batch before it, while its commit is under way.
    committing: Option<Committing>,
    /// When the batch has to be committed.
    due: Option<Instant>,
    /// Records that failed and are not committed yet, by partition and offset. A batch may have several of them.
    failing: HashMap<(TopicPartition, i64), Failed>,
    backoff: Backoff,
    totals: Totals,
    counts: Arc<ProcessorCells>,
    /// Whether the end was requested.
    ends: watch::Receiver<bool>,
}

/// Time for the end of what a failed run has left open, so that readers do not wait for its timeout; and for an abort or a settlement
/// that runs when the end is requested.
const LAST_END_MAX: Duration = Duration::from_secs(5);

/// Time to learn which topics new partitions belong to.
const ASSIGN_MAX: Duration = Duration::from_secs(30);
/// How long records that wait are taken in a row.
const READY_MAX: Duration = Duration::from_millis(1);
/// How often the topics are compared with those of the brokers while no record comes: in a topic that was created again, the
/// records may be in front of the offset that is waited at.
const COMPARE_EVERY: Duration = Duration::from_secs(5);

/// A wait for the commit before, after which the topics are compared again.
const COMPARE_AGAIN: Duration = Duration::from_secs(1);

/// A batch whose commit has begun.
#[derive(Debug)]
struct Committing {
    batch: Batch,
    /// The group that its offsets belong to.
    group: String,
    answer: CommitAnswer,
}

impl Committing {
    /// Waits for the answer; without a commit it does not end. Safe to cancel.
    async fn answer(committing: &mut Option<Self>) -> Result<(), ProducerError> {
        match committing {
            Some(committing) => committing.answer.wait().await,
            None => std::future::pending().await,
        }
    }
}

/// Returns when the end is requested.
async fn requested(ends: &mut watch::Receiver<bool>) {
    let _ = ends.wait_for(|requested| *requested).await.map(drop);
}

/// An attempt of something that is tried until it succeeds. It is safe to cancel: when the end is requested, only a short time is left.
async fn attempt<T>(
    mut ends: watch::Receiver<bool>,
    what: &'static str,
    attempt: impl Future<Output = Result<T, ProducerError>>,
) -> Result<T, ProducerError> {
    let given_up = async {
        requested(&mut ends).await;
        sleep(LAST_END_MAX).await;
    };
    tokio::select! {
        biased;
        done = attempt => done,
        () = given_up => {
            let cause = Cause::Other("the end was requested meanwhile".to_owned());
            Err(ProducerError::Unavailable { what, cause })
        }
    }
}

/// How often a record failed, and the last reason.
#[derive(Debug, Clone, Default)]
struct Failed {
    attempts: u32,
    /// There is no further attempt.
    is_last: bool,
    reason: String,
}

impl<C: Client, H: Handler> Processor<C, H> {
    /// A processor that has not begun.
    pub fn new(config: ProcessorConfig, client: C, handler: H) -> Self {
        Self {
            config,
            client,
            handler,
            topics: BTreeMap::new(),
            compared: Instant::now(),
            batch: Batch::default(),
            committing: None,
            due: None,
            failing: HashMap::new(),
            backoff: Backoff::new(),
            totals: Totals::default(),
            counts: Arc::default(),
            ends: watch::channel(false).1,
        }
    }

    /// Counts into these cells, which several processors may share.
    #[must_use]
    pub fn counted_by(mut self, counts: Arc<ProcessorCells>) -> Self {
        self.counts = counts;
        self
    }

    /// Processes until `end` is ready; the batch under way is committed then, and the group is left. After an error the next
    /// producer with the same transactional id ends what is open.
    pub async fn run(mut self, end: impl Future<Output = ()> + Send) -> Result<Totals, ProcessorError> {
        let (request, ends) = watch::channel(false);
        self.ends = ends;
        let requested = async {
            end.await;
            request.send_replace(true);
            std::future::pending().await
        };
        let ended = tokio::select! {
            ended = self.process() => ended,
            ended = requested => ended,
        };
        if let Err(ProcessorError::Producer(ProducerError::Fenced { .. })) = &ended {
            self.counts.producer_fenced.add();
        }
        // What is not ended here is ended by the next start, or when it times out. One of several producers may be fenced.
        if ended.is_err() {
            if self.committing.is_some()
                && let Ok(Ok(())) = timeout(LAST_END_MAX, Committing::answer(&mut self.committing)).await
            {
                self.committed();
            }
            let _ = timeout(LAST_END_MAX, self.client.abort()).await;
        }
        self.client.close().await;
        ended.map(|()| self.totals)
    }

    async fn process(&mut self) -> Result<(), ProcessorError> {
        let mut ends = self.ends.clone();
        loop {
            let due = self.due;
            tokio::select! {
                biased;
                () = requested(&mut ends) => {
                    self.commit(None).await?;
                    return self.finish().await;
                }
                answer = Committing::answer(&mut self.committing) => self.answered(answer).await?,
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.commit(None).await?,
                () = sleep_until(self.compared + COMPARE_EVERY), if due.is_none() => self.compare_topics().await?,
                event = self.client.next() => {
                    self.take(event).await?;
                    self.take_ready().await?;
                }
            }
        }
    }

    /// Takes what is there already, for a short time: the end and the time of the batch are not looked at for each record.
    async fn take_ready(&mut self) -> Result<(), ProcessorError> {
        let until = Instant::now() + READY_MAX;
        while Instant::now() < self.due.map_or(until, |due| until.min(due)) {
            match self.client.try_next() {
                Some(event) => self.take(event).await?,
                None => break,
            }
        }
        Ok(())
    }

    async fn take(&mut self, event: Event) -> Result<(), ProcessorError> {
        match event {
            Event::Record(record) => self.record(record).await?,
            Event::Assigned(assignment) => self.assigned(assignment).await?,
            Event::Revoked(revocation) => {
                let partitions = revocation.partitions.clone();
                let is_committing = |it: &Committing| it.batch.holds_any(&partitions);
                if self.batch.holds_any(&partitions) {
                    self.commit(Some(revocation)).await?;
                } else if self.committing.as_ref().is_some_and(is_committing) {
                    // If the answer does not come in time, the next owner's start waits for it, or the offsets are refused.
                    let limit = self.config.revoke_timeout;
                    let answer = timeout(limit, Committing::answer(&mut self.committing)).await;
                    self.forget(&partitions);
                    if let Ok(answer) = answer {
                        self.answered(answer).await?;
                    }
                }
                self.forget(&partitions);
            }
            Event::Lost(partitions) => {
                if self.batch.holds_any(&partitions) {
                    self.abort(&partitions).await?;
                }
                self.forget(&partitions);
            }
            Event::Problem(problem) => tracing::warn!(problem, "the consumer retries"),
            Event::Ended(error) => {
                if matches!(error, ConsumerError::OffsetGone(_)) {
                    self.compare_topics().await?;
                }
                return Err(error.into());
            }
        }
        Ok(())
    }

    /// Begins at the committed offsets of the topics that are there now. Until the broker has said which ones these are, nothing is
    /// read.
    async fn assigned(&mut self, assignment: Assignment) -> Result<(), ProcessorError> {
        let topics: BTreeSet<_> = assignment.partitions.iter().map(|at| at.topic.clone()).collect();
        let (start, mut backoff) = (Instant::now(), Backoff::new());
        let ids = loop {
            let error = match self.client.topic_ids(&topics).await {
                Ok(ids) => match ids.values().find_map(|id| id.err()) {
                    None => break ids,
                    Some(error) => {
                        ProducerError::Unavailable { what: TOPIC_IDS, cause: Cause::Broker(error) }
                    }
                },
                Err(error) => error,
            };
            if start.elapsed() >= ASSIGN_MAX {
                return Err(error.into());
            }
            backoff.wait().await;
        };
        let mut starts = Vec::new();
        for at in &assignment.partitions {
            let Some(Ok(id)) = ids.get(&*at.topic) else { unreachable!("each topic has an id, or an error") };
            self.topics.insert(at.clone(), *id);
            starts.push(StartAt::CommittedOf(*id));
        }
        assignment.start(starts);
        Ok(())
    }

    /// Partitions that are another member's.
    fn forget(&mut self, partitions: &[TopicPartition]) {
        self.failing.retain(|(at, _), _| !partitions.contains(at));
        self.topics.retain(|at, _| !partitions.contains(at));
        if let Some(committing) = &mut self.committing {
            committing.batch.forget(partitions);
        }
    }

    /// Ends with an error if a topic was created again. What is not answered is asked again later.
    async fn compare_topics(&mut self) -> Result<(), ProcessorError> {
        self.compared = Instant::now();
        let topics: BTreeSet<_> = self.topics.keys().map(|at| at.topic.clone()).collect();
        if topics.is_empty() {
            return Ok(());
        }
        match self.client.topic_ids(&topics).await {
            Ok(ids) => require_same(self.topics.iter().map(|(at, id)| (at, *id)), &ids),
            Err(error) => {
                tracing::debug!(%error, "the topics were not compared");
                Ok(())
            }
        }
    }

    async fn record(&mut self, record: Record) -> Result<(), ProcessorError> {
        if self.batch.is_empty() {
            self.client.begin()?;
            self.due = Some(Instant::now() + self.config.batch_time_max);
        }
        // The record belongs to the batch also if it fails: the batch goes back to it.
        self.batch.add(&record);
        let output = match self.handle(&record).await {
            Ok(output) => output,
            Err(failure) => match self.failed(&record, failure)? {
                None => return self.abort(&[]).await,
                Some(letter) => vec![letter],
            },
        };
        let letter = self.is_last(&record);
        for output in output {
            match self.client.send(output).await {
                Ok(()) => {}
                // Too large, for example. Others of this record may be sent already, so its letter has to wait.
                Err(ProducerError::Record(reason)) if !letter => {
                    let reason = format!("an output cannot be sent: {reason}");
                    self.failed(&record, Failure::Reject(reason))?;
                    self.batch.dead = 0;
                    return self.abort(&[]).await;
                }
                Err(ProducerError::Record(reason)) => {
                    let reason = format!("its dead letter cannot be sent: {reason}");
                    return Err(self.given_up(&record, &reason));
                }
                Err(error) => return self.unsent(error).await,
            }
        }
        let full = self.batch.records >= self.config.batch_records_max
            || self.batch.bytes >= self.config.batch_bytes_max;
        if full { self.commit(None).await } else { Ok(()) }
    }

    /// Runs the handler, unless there is no further attempt for this record.
    async fn handle(&mut self, record: &Record) -> Result<Vec<NewRecord>, Failure> {
        if self.is_last(record) {
            let failed = self.failing.get(&place(record)).cloned().unwrap_or_default();
            return Err(Failure::Reject(failed.reason));
        }
        let mut output = Vec::new();
        let limit = self.config.handler_timeout;
        match timeout(limit, self.handler.handle(record, &mut output)).await {
            Ok(handled) => handled.map(|()| output),
            Err(_) => Err(Failure::Retry(format!("the handler took longer than {} ms", limit.as_millis()))),
        }
    }

    fn is_last(&self, record: &Record) -> bool {
        !self.failing.is_empty() && self.failing.get(&place(record)).is_some_and(|failed| failed.is_last)
    }

    /// Counts a failure of the handler. `None`: the record is tried again.
    fn failed(&mut self, record: &Record, failure: Failure) -> Result<Option<NewRecord>, ProcessorError> {
        let (reason, rejected) = match failure {
            Failure::Retry(reason) => (reason, false),
            Failure::Reject(reason) => (reason, true),
            Failure::Stop(reason) => return Err(ProcessorError::Stopped(reason)),
        };
        let failed = self.failing.entry(place(record)).or_default();
        if !failed.is_last {
            failed.attempts += 1;
            failed.is_last = rejected || failed.attempts >= self.config.attempts_max;
            let attempts = failed.attempts;
            tracing::warn!(at = %record.at, offset = record.offset, attempts, reason, "a record failed");
            failed.reason.clone_from(&reason);
            self.counts.failures.add();
        }
        if !failed.is_last {
            return Ok(None);
        }
        match &self.config.dead_letters {
            Some(topic) => {
                self.batch.dead += 1;
                Ok(Some(dead_letter(topic, record, &reason)))
            }
            None => Err(self.given_up(record, &reason)),
        }
    }

    fn given_up(&self, record: &Record, reason: &str) -> ProcessorError {
        let attempts = self.failing.get(&place(record)).map_or(1, |failed| failed.attempts);
        let (at, offset) = (record.at.clone(), record.offset);
        ProcessorError::Handler { at, offset, attempts, reason: reason.to_owned() }
    }

    /// Begins the commit of the batch under way; afterwards there is none. Unless transactions overlap, or if it is because partitions
    /// are revoked, it is answered then; partitions are let go of within the bound.
    async fn commit(&mut self, revocation: Option<Revocation>) -> Result<(), ProcessorError> {
        self.due = None;
        if self.batch.is_empty() {
            return Ok(());
        }
        let revoked = revocation.as_ref().map(|it| it.partitions.clone()).unwrap_or_default();
        let Some(owner) = self.client.owner_of(&self.batch.partitions(), revocation.as_ref()) else {
            return self.abort(&revoked).await;
        };
        let sent = if revocation.is_none() {
            self.send_commit(owner, None).await
        } else {
            let limit = self.config.revoke_timeout;
            let answered = async {
                self.send_commit(owner, revocation.as_ref()).await?;
                Ok(Committing::answer(&mut self.committing).await?)
            };
            match timeout(limit, answered).await {
                Ok(answered) => answered.map(|()| {
                    self.committed();
                    false
                }),
                // A commit that has begun is not aborted. The next owner's start waits until it is settled; offsets that come after the
                // rebalance are refused.
                Err(_) if self.batch.is_empty() => {
                    self.forget(&revoked);
                    drop(revocation);
                    return if self.client.overlaps() { Ok(()) } else { self.finish().await };
                }
                Err(_) => return self.abort(&revoked).await,
            }
        };
        match sent {
            Ok(true) => Ok(()),
            Ok(false) => self.finish().await,
            Err(error) => {
                self.forget(&revoked);
                self.uncommitted(error, &revoked).await
            }
        }
    }

    /// Writes the batch, and begins its commit when the batch before it is committed. When it was cancelled, the batch is still there
    /// if its commit has not begun. Returns whether the next batch may begin before the answer.
    async fn send_commit(
        &mut self,
        owner: Ownership,
        revocation: Option<&Revocation>,
    ) -> Result<bool, ProcessorError> {
        let member = owner.member.clone();
        self.client.prepare(owner, self.next_offsets()).await?;
        if self.committing.is_some() {
            let asked = Instant::now();
            Committing::answer(&mut self.committing).await?;
            self.committed();
            // The group may have changed during the wait: offsets under the former identity would be refused. So may a topic.
            match self.client.owner_of(&self.batch.partitions(), revocation) {
                Some(present) if present.member == member && asked.elapsed() < COMPARE_AGAIN => {}
                Some(present) => self.client.prepare(present, self.next_offsets()).await?,
                None => {
                    let cause = Cause::Other("partitions of the batch are another member's".to_owned());
                    return Err(ProducerError::Abort { what: "the commit", cause }.into());
                }
            }
        }
        let overlaps = self.client.overlaps();
        let batch = std::mem::take(&mut self.batch);
        self.committing = Some(Committing { batch, group: member.group, answer: self.client.commit() });
        Ok(overlaps)
    }

    /// Waits for the answer to the commit under way, if there is one.
    async fn finish(&mut self) -> Result<(), ProcessorError> {
        if self.committing.is_none() {
            return Ok(());
        }
        let answer = Committing::answer(&mut self.committing).await;
        self.answered(answer).await
    }

    /// Takes over the answer to the commit under way.
    async fn answered(&mut self, answer: Result<(), ProducerError>) -> Result<(), ProcessorError> {
        match answer {
            Ok(()) => {
                self.committed();
                Ok(())
            }
            Err(error) => self.uncommitted(error.into(), &[]).await,
        }
    }

    /// The commit under way has succeeded.
    fn committed(&mut self) {
        let Some(Committing { batch, .. }) = self.committing.take() else { return };
        self.compared = Instant::now();
        self.totals.commits += 1;
        self.totals.records += batch.records as u64;
        self.totals.dead += batch.dead;
        self.counts.commits.add();
        self.counts.records.add_many(batch.records);
        self.counts.dead.add_many(batch.dead as usize);
        self.backoff = Backoff::new();
        for (at, next) in batch.next() {
            self.failing.retain(|(failed, offset), _| *failed != at || *offset >= next);
        }
    }

    /// The batch under way was not written, or the commit of the one before it has failed: then none of the two stands.
    async fn uncommitted(
        &mut self,
        error: ProcessorError,
        gone: &[TopicPartition],
    ) -> Result<(), ProcessorError> {
        let error = match error {
            ProcessorError::Producer(error) => ProcessorError::Producer(final_if_refused(error)),
            error => error,
        };
        match error {
            ProcessorError::Producer(error) if error.kind() == ErrorKind::Unknown => self.settle(error).await,
            ProcessorError::Producer(error) if error.kind() == ErrorKind::Abortable => {
                tracing::warn!(%error, "the batch is tried again");
                self.abort(gone).await
            }
            error => Err(error),
        }
    }

    /// The offsets to commit, with the topics that they belong to.
    fn next_offsets(&self) -> Vec<(TopicPartition, NextOffset)> {
        let next = self.batch.next();
        next.map(|(at, offset)| {
            let topic_id = self.topics.get(&at).copied();
            (at, NextOffset { offset, topic_id })
        })
        .collect()
    }

    async fn unsent(&mut self, error: ProducerError) -> Result<(), ProcessorError> {
        let error = final_if_refused(error);
        if error.kind() != ErrorKind::Abortable {
            return Err(error.into());
        }
        tracing::warn!(%error, "the batch is tried again");
        self.abort(&[]).await
    }

    /// Aborts the batch under way, and the one before it if its commit was refused. Goes back to their first records, except in
    /// partitions that are gone.
    async fn abort(&mut self, gone: &[TopicPartition]) -> Result<(), ProcessorError> {
        let refused = self.abort_transactions().await?;
        self.count_aborts(usize::from(!self.batch.is_empty()) + usize::from(refused));
        let first = self.take_back(refused);
        for (at, offset) in first.into_iter().filter(|(at, _)| !gone.contains(at)) {
            self.client.seek(&at, offset);
        }
        if gone.is_empty() {
            self.backoff.wait().await;
        }
        Ok(())
    }

    /// Brokers that are away are waited for until the end is requested: nothing is lost meanwhile, and another start could do no more.
    async fn abort_transactions(&mut self) -> Result<bool, ProducerError> {
        loop {
            match attempt(self.ends.clone(), "the abort", self.client.abort()).await {
                Err(error) if self.is_tried_again(&error) => {}
                ended => return ended,
            }
        }
    }

    fn is_tried_again(&self, error: &ProducerError) -> bool {
        let again = error.kind() == ErrorKind::Retriable && !*self.ends.borrow();
        if again {
            tracing::warn!(%error, "it is tried again");
        }
        again
    }

    /// Continues where the committed offsets are.
    async fn settle(&mut self, error: ProducerError) -> Result<(), ProcessorError> {
        tracing::warn!(%error, "the commit is settled with the coordinator");
        if !self.batch.is_empty() {
            self.abort_transactions().await?;
            self.count_aborts(1);
        }
        let unknown = self.committing.as_ref();
        let group = unknown.map(|it| it.group.clone()).unwrap_or_default();
        let partitions = unknown.map(|it| it.batch.partitions()).unwrap_or_default();
        let committed = loop {
            let settled = self.client.settle(&group, &partitions);
            match attempt(self.ends.clone(), "settling the commit", settled).await {
                Err(error) if self.is_tried_again(&error) => {}
                settled => break settled?,
            }
        };
        for (at, first) in self.take_back(true) {
            let own = self.topics.get(&at);
            // The offset of an earlier topic with the same name says nothing about this one.
            let is_own = |next: &&NextOffset| next.topic_id.is_none_or(|id| own.is_none_or(|own| *own == id));
            let next = committed.get(&at).filter(is_own);
            self.client.seek(&at, next.map_or(first, |next| next.offset));
        }
        self.totals.settled += 1;
        self.counts.settled.add();
        Ok(())
    }

    fn count_aborts(&mut self, count: usize) {
        self.totals.aborts += count as u64;
        self.counts.aborts.add_many(count);
    }

    /// Drops the batch under way, and with `both` the one before it. Returns where they began.
    fn take_back(&mut self, both: bool) -> BTreeMap<TopicPartition, i64> {
        self.due = None;
        let mut first: BTreeMap<_, _> = std::mem::take(&mut self.batch).first().collect();
        if both && let Some(before) = self.committing.take() {
            first.extend(before.batch.first());
        }
        first
    }
}

/// An output that its topic refuses is refused in each further attempt, too: without an end here, the batch would be repeated without
/// one.
fn final_if_refused(error: ProducerError) -> ProducerError {
    use ResponseError as E;
    match error {
        ProducerError::Abort {
            what,
            cause:
                Cause::Broker(
                    refused @ (E::MessageTooLarge
                    | E::RecordListTooLarge
                    | E::InvalidRecord
                    | E::InvalidTimestamp),
                ),
        } => {
            let remedy = "an output topic refuses these records, and would again; compare its max.message.bytes with the size of \
                          a batch, and give records of a compacted topic a key";
            ProducerError::Fatal { what, cause: Cause::Other(format!("{refused}: {remedy}")) }
        }
        error => error,
    }
}

fn place(record: &Record) -> (TopicPartition, i64) {
    (record.at.clone(), record.offset)
}

/// The headers that a dead letter gets: where the record was, and why it is dead.
const LETTER_HEADERS: [&str; 4] = ["hapax-topic", "hapax-partition", "hapax-offset", "hapax-error"];

/// A record for the dead-letter topic: the record itself, with where it came from and why. Of several headers with the same name it has
/// the last one.
fn dead_letter(topic: &str, record: &Record, reason: &str) -> NewRecord {
    let mut headers: Vec<(String, Option<Bytes>)> = Vec::new();
    for (name, value) in &record.headers {
        headers.retain(|(earlier, _)| earlier != name);
        headers.push((name.clone(), value.clone()));
    }
    // Those of an earlier death. Others of ours stay: the idempotency key has to survive a redrive.
    headers.retain(|(name, _)| !LETTER_HEADERS.contains(&name.as_str()));
    let (partition, offset) = (record.at.partition.to_string(), record.offset.to_string());
    let values = [record.at.topic.to_string(), partition, offset, reason.to_owned()];
    headers.extend(
        LETTER_HEADERS.into_iter().zip(values).map(|(name, value)| (name.to_owned(), Some(value.into()))),
    );
    NewRecord {
        topic: topic.to_owned(),
        partition: None,
        key: record.key.clone(),
        value: record.value.clone(),
        headers,
        timestamp_ms: record.timestamp_ms,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_letter_keeps_the_key_and_the_last_header_of_each_name() {
        let header = |name: &str, value: &'static str| (name.to_owned(), Some(Bytes::from(value)));
        let record = Record {
            at: TopicPartition::new("orders", 1),
            offset: 7,
            timestamp_ms: None,
            key: None,
            value: None,
            headers: vec![
                header("a", "1"),
                header("hapax-idempotency-key", "order-7"),
                header("hapax-error", "an earlier death"),
                header("a", "2"),
            ],
        };
        let letter = dead_letter("dead", &record, "no such order");
        let expected = [
            ("hapax-idempotency-key", "order-7"),
            ("a", "2"),
            ("hapax-topic", "orders"),
            ("hapax-partition", "1"),
            ("hapax-offset", "7"),
            ("hapax-error", "no such order"),
        ];
        assert_eq!(letter.headers, expected.map(|(name, value)| header(name, value)));
    }
}
