//! The loop: takes records, and applies one batch of one partition at a time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::positions::LogPartition;
use hapax_core::{InboxError, mutant};

use super::batch::{Batch, Stopped};
use super::{Poison, TRUSTS_THE_BROKER, ToDatabase, ToDatabaseError, ToDatabaseReport, entry, topic_id};
use crate::consumer::{
    Assignment, Consumer, ConsumerError, Event, NewGroup, Record, StartAt, TopicPartition,
};
use crate::refusal::Refusal;
use crate::wire::Cluster;

/// Wait before a batch is tried again: the first, and the longest.
const RETRY_MIN: Duration = Duration::from_millis(50);
const RETRY_MAX: Duration = Duration::from_secs(5);
/// How often offsets are committed to the broker.
const FOLLOW: Duration = Duration::from_secs(1);

/// How often the topics' ids are compared while no record comes: in a topic that was created again, the records may be in front of
/// the offset that is waited at.
const COMPARE: Duration = Duration::from_secs(5);

/// An assigned partition.
struct Partition {
    log: LogPartition,
    /// In the database.
    position: Option<i64>,
    pending: VecDeque<Record>,
    /// Failures since the last batch that was committed.
    failures: u32,
    /// Failures of the handler at the first record.
    attempts: u32,
    /// Maximum count of records of the next batch: those before one that failed.
    limit: usize,
    /// The first record is not tried again: its failure is recorded.
    given_up: Option<String>,
    not_before: Option<Instant>,
    /// What the broker's committed offset has to follow.
    follow: Option<i64>,
}

impl Partition {
    fn new(log: LogPartition, position: Option<i64>) -> Self {
        Self {
            log,
            position,
            pending: VecDeque::new(),
            failures: 0,
            attempts: 0,
            limit: usize::MAX,
            given_up: None,
            not_before: None,
            follow: None,
        }
    }

    fn is_ready(&self, now: Instant) -> bool {
        !self.pending.is_empty() && self.not_before.is_none_or(|time| time <= now)
    }

    fn retry_later(&mut self) {
        let wait = RETRY_MAX.min(RETRY_MIN * 2u32.saturating_pow(self.failures.min(8)));
        self.failures += 1;
        self.not_before = Some(Instant::now() + wait.mul_f64(0.5 + fastrand::f64() / 2.0));
    }

    /// Another position than expected was found: what is before it has taken effect. `true`: the records that follow it are
    /// not here.
    fn found(&mut self, position: Option<i64>) -> bool {
        let Some(next) = position else { return self.position.is_some() };
        let behind = self.position.is_some_and(|ours| next < ours);
        while self.pending.front().is_some_and(|record| record.offset < next) {
            self.pending.pop_front();
        }
        self.position = position;
        behind || self.pending.is_empty()
    }
}

struct Runner {
    cluster: Cluster,
    consumer: Consumer,
    of: ToDatabase,
    partitions: BTreeMap<TopicPartition, Partition>,
    /// The one after it is served next.
    served: Option<TopicPartition>,
    followed: Instant,
    compared: Instant,
    report: ToDatabaseReport,
}

pub(super) async fn run(
    of: ToDatabase,
    until: impl Future<Output = ()>,
) -> Result<ToDatabaseReport, ToDatabaseError> {
    if of.consumer.new_group == NewGroup::Latest {
        let remedy = "a position exists once a batch was applied: until then each start would pass over what was written before it; \
                      use earliest, or refuse and insert the positions";
        let refused = vec![Refusal::new("new_group", "latest", remedy)];
        return Err(ConsumerError::Refused(refused).into());
    }
    let mut runner = Runner {
        cluster: Cluster::new(of.connect.clone()),
        consumer: Consumer::start(&of.consumer)?,
        of,
        partitions: BTreeMap::new(),
        served: None,
        followed: Instant::now(),
        compared: Instant::now(),
        report: ToDatabaseReport::default(),
    };
    let mut until = std::pin::pin!(until);
    loop {
        tokio::select! {
            biased;
            () = &mut until => break,
            event = runner.next() => {
                // A transaction under way is not interrupted by the end of the run.
                match event {
                    Some(Event::Assigned(assignment)) => tokio::select! {
                        biased;
                        () = &mut until => break,
                        done = runner.assigned(assignment) => done?,
                    },
                    Some(Event::Ended(error)) => return Err(runner.ended(error).await),
                    Some(event) => runner.told(event),
                    None => runner.apply().await?,
                }
            }
        }
    }
    runner.follow(true);
    Ok(runner.report)
}

impl Runner {
    /// The next event; `None`: a batch can be applied. Safe to cancel.
    async fn next(&mut self) -> Option<Event> {
        let waiting = self.partitions.values().map(|partition| partition.pending.len()).sum::<usize>();
        // Rebalances are served always, records only while few are waiting.
        let full = waiting >= 2 * self.of.options.batch_records_max.max(1);
        let there = if full { self.consumer.try_control() } else { self.consumer.try_next() };
        if there.is_some() {
            return there;
        }
        let now = Instant::now();
        if self.partitions.values().any(|partition| partition.is_ready(now)) {
            return None;
        }
        let retries = self.partitions.values().filter(|partition| !partition.pending.is_empty());
        let soonest = retries.filter_map(|partition| partition.not_before).min();
        let wait = soonest.map_or(FOLLOW, |time| time.saturating_duration_since(now));
        let event =
            async { if full { self.consumer.next_control().await } else { self.consumer.next().await } };
        tokio::time::timeout(wait, event).await.ok()
    }

    fn told(&mut self, event: Event) {
        match event {
            Event::Record(record) => {
                if let Some(partition) = self.partitions.get_mut(&record.at)
                    && (partition.position.is_none_or(|position| record.offset >= position)
                        || mutant::is(TRUSTS_THE_BROKER))
                {
                    partition.pending.push_back(record);
                }
            }
            Event::Revoked(revocation) => {
                self.follow(true);
                self.partitions.retain(|at, _| !revocation.partitions.contains(at));
            }
            Event::Lost(lost) => self.partitions.retain(|at, _| !lost.contains(at)),
            Event::Problem(problem) => tracing::warn!("Kafka: {problem}"),
            Event::Assigned(_) | Event::Ended(_) => unreachable!("handled by the loop"),
        }
    }

    /// Why the consumer has ended: a position that is not in the log may be one of an earlier topic with the same name.
    async fn ended(&mut self, error: ConsumerError) -> ToDatabaseError {
        if matches!(error, ConsumerError::OffsetGone(_))
            && let Err(recreated) = self.compare_topics().await
        {
            return recreated;
        }
        error.into()
    }

    /// An error if a topic was created again. What is not answered is asked again later.
    async fn compare_topics(&mut self) -> Result<(), ToDatabaseError> {
        self.compared = Instant::now();
        let topics: BTreeSet<&str> = self.partitions.keys().map(|at| &*at.topic).collect();
        if topics.is_empty() || mutant::is("position-by-topic-name") {
            return Ok(());
        }
        let Ok(ids) = self.cluster.topic_ids(topics).await else { return Ok(()) };
        for (at, Partition { log, .. }) in &self.partitions {
            if let Some(Ok(id)) = ids.get(&*at.topic)
                && id.0.to_string() != log.topic_id
            {
                let (topic, before, now) = (at.topic.to_string(), log.topic_id.clone(), id.0.to_string());
                return Err(ToDatabaseError::TopicRecreated { topic, before, now });
            }
        }
        Ok(())
    }

    /// Begins where the database says. Until it and the broker have answered, nothing is read.
    async fn assigned(&mut self, assignment: Assignment) -> Result<(), ToDatabaseError> {
        let mut starts = Vec::new();
        for at in &assignment.partitions {
            let partition = self.partition(at).await?;
            let start = partition.position.map_or(StartAt::NewGroup, StartAt::Offset);
            starts.push(if mutant::is(TRUSTS_THE_BROKER) { StartAt::Committed } else { start });
            self.partitions.insert(at.clone(), partition);
        }
        assignment.start(starts);
        Ok(())
    }

    async fn partition(&self, at: &TopicPartition) -> Result<Partition, ToDatabaseError> {
        let topic_id = loop {
            match topic_id(&self.cluster, &at.topic).await {
                Ok(id) => break id,
                Err(problem) => tracing::warn!("the id of topic {}: {problem}", at.topic),
            }
            tokio::time::sleep(RETRY_MIN * 10).await;
        };
        let log = LogPartition {
            group: self.of.consumer.group.clone(),
            topic_id: if mutant::is("position-by-topic-name") { at.topic.to_string() } else { topic_id },
            topic: at.topic.to_string(),
            partition: at.partition,
        };
        loop {
            match self.of.database.position(&log).await {
                Ok(position) => return Ok(Partition::new(log, position)),
                Err(error @ InboxError::NotDurable(_)) => return Err(ToDatabaseError::Database(error)),
                Err(error) => tracing::warn!("the position in {log} could not be read: {error}"),
            }
            tokio::time::sleep(RETRY_MIN * 10).await;
        }
    }

    /// The partition whose turn it is.
    fn turn(&self) -> Option<TopicPartition> {
        let now = Instant::now();
        let mut ready = self.partitions.iter().filter(|(_, partition)| partition.is_ready(now));
        let first = ready.clone().next();
        let after = ready.find(|(at, _)| self.served.as_ref().is_none_or(|served| *at > served));
        after.or(first).map(|(at, _)| at.clone())
    }

    /// Applies one batch, if one is ready.
    async fn apply(&mut self) -> Result<(), ToDatabaseError> {
        self.follow(false);
        let Some(at) = self.turn() else {
            return if self.compared.elapsed() >= COMPARE { self.compare_topics().await } else { Ok(()) };
        };
        self.served = Some(at.clone());
        let batch = match self.batch(&at) {
            Ok(batch) => Arc::new(batch),
            Err(error) => return self.failed(&at, 0, error),
        };
        // The records were read before this answer. If the topic has the same id still, they are its records.
        let id = match topic_id(&self.cluster, &at.topic).await {
            Ok(id) => id,
            Err(problem) => {
                tracing::warn!("the id of topic {}: {problem}", at.topic);
                self.partitions.get_mut(&at).expect("its batch was made").retry_later();
                return Ok(());
            }
        };
        if id != batch.partition.topic_id && !mutant::is("position-by-topic-name") {
            let (topic, before) = (at.topic.to_string(), batch.partition.topic_id.clone());
            return Err(ToDatabaseError::TopicRecreated { topic, before, now: id });
        }
        let limit = self.of.options.batch_timeout;
        let applied = tokio::time::timeout(limit, self.of.database.apply(&batch)).await;
        let applied = applied.unwrap_or_else(|_| {
            Err(InboxError::Unknown(format!("no end within {} ms", limit.as_millis())).into())
        });
        match applied {
            Ok(fresh) => self.committed(&at, &batch, fresh),
            Err(Stopped::Handler { place, error }) => return self.failed(&at, place, error),
            Err(Stopped::InProgress { retry_after_ms }) => {
                let partition = self.partitions.get_mut(&at).expect("its batch was made");
                partition.not_before =
                    Some(Instant::now() + Duration::from_millis(retry_after_ms.min(1_000)));
            }
            Err(Stopped::InDoubt { place }) => {
                let id = &batch.records[place].1.id;
                tracing::warn!("{} waits: what became of {id} is in doubt; resolve it", batch.partition);
                let partition = self.partitions.get_mut(&at).expect("its batch was made");
                partition.not_before = Some(Instant::now() + RETRY_MAX);
            }
            Err(Stopped::Database(error)) => return self.refused(&at, error).await,
        }
        Ok(())
    }

    fn batch(&self, at: &TopicPartition) -> Result<Batch, String> {
        let Partition { log, position, pending, limit, given_up, .. } = &self.partitions[at];
        let limit = if given_up.is_some() { 1 } else { self.of.options.batch_records_max.max(1).min(*limit) };
        let mut records = Vec::new();
        for record in pending.iter().take(limit) {
            match entry(record, log) {
                Ok(entry) => records.push((record.clone(), entry)),
                Err(error) if records.is_empty() && given_up.is_none() => return Err(error),
                // A key that cannot be used is not looked up again.
                Err(_) if records.is_empty() => {
                    let plain = Record { headers: Vec::new(), ..record.clone() };
                    records.push((plain.clone(), entry(&plain, log)?));
                }
                Err(_) => break,
            }
        }
        let to = records.last().map_or(0, |(record, _)| record.offset) + 1;
        let ttl_ms = u64::try_from(self.of.options.ledger_ttl.as_millis()).unwrap_or(u64::MAX);
        Ok(Batch { partition: log.clone(), from: *position, to, records, failed: given_up.clone(), ttl_ms })
    }

    fn committed(&mut self, at: &TopicPartition, batch: &Batch, fresh: usize) {
        let (fresh, all) = (fresh as u64, batch.records.len() as u64);
        self.report.transactions += 1;
        self.report.duplicates += all - fresh;
        *if batch.failed.is_some() { &mut self.report.failed } else { &mut self.report.applied } += fresh;
        let partition = self.partitions.get_mut(at).expect("its batch was made");
        partition.pending.drain(..batch.records.len());
        (partition.position, partition.follow) = (Some(batch.to), Some(batch.to));
        (partition.failures, partition.attempts, partition.limit) = (0, 0, usize::MAX);
        (partition.given_up, partition.not_before) = (None, None);
    }

    /// The handler failed. The records before this one take effect first.
    fn failed(&mut self, at: &TopicPartition, place: usize, error: String) -> Result<(), ToDatabaseError> {
        let (attempts_max, poison) = (self.of.options.attempts_max.max(1), self.of.options.poison);
        let partition = self.partitions.get_mut(at).expect("its batch was made");
        if place > 0 {
            partition.limit = place;
            return Ok(());
        }
        partition.attempts += 1;
        // Alone from now on, so that the next failure is its own.
        partition.limit = 1;
        let offset = partition.pending.front().map_or(-1, |record| record.offset);
        tracing::warn!(
            "record {offset} of {} failed, attempt {}: {error}",
            partition.log,
            partition.attempts
        );
        if partition.attempts < attempts_max {
            partition.retry_later();
            return Ok(());
        }
        match poison {
            Poison::Record => partition.given_up = Some(error),
            Poison::Stop => {
                let (log, attempts) = (partition.log.clone(), partition.attempts);
                return Err(ToDatabaseError::Poison { partition: log, offset, attempts, error });
            }
        }
        Ok(())
    }

    /// The database refused, or did not answer.
    async fn refused(&mut self, at: &TopicPartition, error: InboxError) -> Result<(), ToDatabaseError> {
        match error {
            InboxError::Superseded(_) | InboxError::Unknown(_) => {
                tracing::info!("{at}: {error}");
                self.report.superseded += u64::from(matches!(error, InboxError::Superseded(_)));
                self.find_position(at).await;
                Ok(())
            }
            InboxError::NotDurable(_) | InboxError::EndedByHandler(_) => {
                Err(ToDatabaseError::Database(error))
            }
            // A statement of the handler may have failed without the handler saying so.
            InboxError::Database(_) => self.failed(at, 0, error.to_string()),
            error => {
                tracing::warn!("{at}: {error}");
                self.partitions.get_mut(at).expect("its batch was made").retry_later();
                Ok(())
            }
        }
    }

    /// Continues where the database says, which may be where it was.
    async fn find_position(&mut self, at: &TopicPartition) {
        let partition = self.partitions.get_mut(at).expect("its batch was made");
        match self.of.database.position(&partition.log).await {
            Ok(position) => {
                if partition.found(position) {
                    partition.pending.clear();
                    partition.position = position;
                    self.consumer.seek(at, position.unwrap_or(0));
                }
                partition.retry_later();
            }
            Err(error) => {
                tracing::warn!("the position in {} could not be read: {error}", partition.log);
                partition.retry_later();
            }
        }
    }

    /// Commits offsets to the broker, now or if it is time.
    fn follow(&mut self, now: bool) {
        if now || self.followed.elapsed() >= FOLLOW {
            self.followed = Instant::now();
            let moved = self.partitions.iter_mut();
            let moved: Vec<_> =
                moved.filter_map(|(at, partition)| Some((at.clone(), partition.follow.take()?))).collect();
            self.consumer.commit(moved.iter().map(|(at, offset)| (at, *offset)));
        }
    }
}
