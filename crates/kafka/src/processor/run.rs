//! The loop of a processor.

use tokio::time::{Instant, sleep_until, timeout};

use super::batch::Batch;
use super::{Client, Handler, ProcessorConfig, ProcessorError, Totals};
use crate::consumer::{Event, Record, StartAt};
use crate::partition::TopicPartition;
use crate::producer::{Cause, ErrorKind, NewRecord, ProducerError};
use crate::wire::Backoff;

/// A processor over a [`Client`].
#[derive(Debug)]
pub struct Processor<C, H> {
    config: ProcessorConfig,
    client: C,
    handler: H,
    batch: Batch,
    /// When the batch has to be committed.
    due: Option<Instant>,
    /// The last record that failed, and how often.
    failing: Option<(TopicPartition, i64, u32)>,
    backoff: Backoff,
    totals: Totals,
}

impl<C: Client, H: Handler> Processor<C, H> {
    /// A processor that has not begun.
    pub fn new(config: ProcessorConfig, client: C, handler: H) -> Self {
        Self {
            config,
            client,
            handler,
            batch: Batch::default(),
            due: None,
            failing: None,
            backoff: Backoff::new(),
            totals: Totals::default(),
        }
    }

    /// Processes until `end` is ready; the batch under way is committed then. After an error the client must be dropped: the
    /// next producer with the same transactional id ends what is open.
    pub async fn run(mut self, end: impl Future<Output = ()> + Send) -> Result<Totals, ProcessorError> {
        tokio::pin!(end);
        loop {
            let due = self.due;
            tokio::select! {
                biased;
                () = &mut end => {
                    self.commit().await?;
                    return Ok(self.totals);
                }
                () = sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() => self.commit().await?,
                event = self.client.next() => self.take(event).await?,
            }
        }
    }

    async fn take(&mut self, event: Event) -> Result<(), ProcessorError> {
        match event {
            Event::Record(record) => self.record(record).await?,
            Event::Assigned(assignment) => {
                let positions = vec![StartAt::Committed; assignment.partitions.len()];
                assignment.start(positions);
            }
            Event::Revoked(revocation) => {
                if self.batch.holds_any(&revocation.partitions) {
                    let committed = timeout(self.config.revoke_timeout, self.commit()).await;
                    match committed {
                        Ok(done) => done?,
                        Err(_) => self.give_up_commit(&revocation.partitions).await?,
                    }
                }
                drop(revocation);
            }
            Event::Lost(partitions) => {
                if self.batch.holds_any(&partitions) {
                    self.batch.forget(&partitions);
                    self.abort().await?;
                }
            }
            Event::Problem(problem) => tracing::warn!(problem, "the consumer retries"),
            Event::Ended(error) => return Err(error.into()),
        }
        Ok(())
    }

    async fn record(&mut self, record: Record) -> Result<(), ProcessorError> {
        if self.batch.is_empty() {
            self.client.begin()?;
            self.due = Some(Instant::now() + self.config.batch_time_max);
        }
        let mut output = Vec::new();
        let handled = timeout(self.config.handler_timeout, self.handler.handle(&record, &mut output)).await;
        let handled = handled.unwrap_or_else(|_| Err("the handler took too long".to_owned()));
        // The record belongs to the batch also if it failed: the batch goes back to it.
        self.batch.add(&record);
        if let Err(reason) = handled {
            match self.failed(&record, reason)? {
                None => return self.abort().await,
                Some(letter) => {
                    self.batch.dead += 1;
                    output = vec![letter];
                }
            }
        }
        for record in output {
            if let Err(error) = self.client.send(record).await {
                return self.unsent(error).await;
            }
        }
        let full = self.batch.records >= self.config.batch_records_max
            || self.batch.bytes >= self.config.batch_bytes_max;
        if full { self.commit().await } else { Ok(()) }
    }

    /// Counts a failure of the handler. `None`: the record is tried again.
    fn failed(&mut self, record: &Record, reason: String) -> Result<Option<NewRecord>, ProcessorError> {
        let earlier = match &self.failing {
            Some((at, offset, attempts)) if *at == record.at && *offset == record.offset => *attempts,
            _ => 0,
        };
        let attempts = earlier + 1;
        self.failing = Some((record.at.clone(), record.offset, attempts));
        tracing::warn!(at = %record.at, offset = record.offset, attempts, reason, "a record failed");
        if attempts < self.config.attempts_max {
            return Ok(None);
        }
        match &self.config.dead_letters {
            Some(topic) => Ok(Some(dead_letter(topic, record, &reason))),
            None => Err(ProcessorError::Handler {
                at: record.at.clone(),
                offset: record.offset,
                attempts,
                reason,
            }),
        }
    }

    /// Commits the batch under way; afterwards there is none.
    async fn commit(&mut self) -> Result<(), ProcessorError> {
        if self.batch.is_empty() {
            self.due = None;
            return Ok(());
        }
        let Some(group) = self.client.group_metadata() else { return self.abort().await };
        let name = group.group.clone();
        let next = self.batch.next().collect();
        match self.client.commit(group, next).await {
            Ok(()) => {
                self.totals.commits += 1;
                self.totals.records += self.batch.records as u64;
                self.totals.dead += self.batch.dead;
                self.backoff = Backoff::new();
                self.clear();
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::Unknown => self.settle(&name, error).await,
            Err(error) => self.unsent(error).await,
        }
    }

    async fn unsent(&mut self, error: ProducerError) -> Result<(), ProcessorError> {
        if error.kind() != ErrorKind::Abortable {
            return Err(error.into());
        }
        tracing::warn!(%error, "the batch is tried again");
        self.abort().await
    }

    /// Aborts the batch under way, and goes back to its first records.
    async fn abort(&mut self) -> Result<(), ProcessorError> {
        self.client.abort().await?;
        self.totals.aborts += 1;
        let first: Vec<_> = self.batch.first().collect();
        for (at, offset) in first {
            self.client.seek(&at, offset);
        }
        self.clear();
        self.backoff.wait().await;
        Ok(())
    }

    /// The commit took longer than the revocation allows.
    async fn give_up_commit(&mut self, revoked: &[TopicPartition]) -> Result<(), ProcessorError> {
        match self.client.abort().await {
            Ok(()) => {
                self.totals.aborts += 1;
                self.batch.forget(revoked);
                let first: Vec<_> = self.batch.first().collect();
                for (at, offset) in first {
                    self.client.seek(&at, offset);
                }
                self.clear();
                Ok(())
            }
            // The commit was sent: it is never aborted. The next start settles it.
            Err(ProducerError::Misuse(_)) => {
                let cause = Cause::Other("partitions were revoked before the commit was answered".to_owned());
                Err(ProducerError::Unknown { cause }.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Continues where the committed offsets are.
    async fn settle(&mut self, group: &str, error: ProducerError) -> Result<(), ProcessorError> {
        tracing::warn!(%error, "the commit is settled with the coordinator");
        let first: Vec<_> = self.batch.first().collect();
        let partitions: Vec<_> = first.iter().map(|(at, _)| at.clone()).collect();
        let committed = self.client.settle(group, &partitions).await?;
        for (at, first) in first {
            let offset = committed.get(&at).copied().unwrap_or(first);
            self.client.seek(&at, offset);
        }
        self.totals.settled += 1;
        self.clear();
        Ok(())
    }

    fn clear(&mut self) {
        self.batch = Batch::default();
        self.due = None;
    }
}

/// A record for the dead-letter topic: the record itself, with where it came from and why.
fn dead_letter(topic: &str, record: &Record, reason: &str) -> NewRecord {
    let mut headers: Vec<_> =
        record.headers.iter().filter(|(name, _)| !name.starts_with("hapax-")).cloned().collect();
    headers.dedup_by(|later, earlier| later.0 == earlier.0);
    for (name, value) in [
        ("hapax-topic", record.at.topic.to_string()),
        ("hapax-partition", record.at.partition.to_string()),
        ("hapax-offset", record.offset.to_string()),
        ("hapax-error", reason.to_owned()),
    ] {
        headers.push((name.to_owned(), Some(value.into())));
    }
    NewRecord {
        topic: topic.to_owned(),
        partition: None,
        key: record.key.clone(),
        value: record.value.clone(),
        headers,
        timestamp_ms: record.timestamp_ms,
    }
}
