//! A processor process: a member of each group. The processor under the guarantee is the library's own; the client below it also
//! records how each transaction ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use hapax_kafka::consumer::{Event, Ownership, Record, Revocation, TopicPartition};
use hapax_kafka::processor::{
    Client, CommitAnswer, Failure, Handler, KafkaClient, Processor, ProcessorConfig, ProcessorError, TopicIds,
};
use hapax_kafka::producer::{NewRecord, NextOffset, ProducerConfig, ProducerError};

use super::site::{KafkaSite, TRANSACTION, TRANSACTION_HEADER};
use super::{librdkafka, naive};
use crate::history::{Act, TransactionEnd};
use crate::recorder::Reporter;
use crate::roles;
use crate::workload::{Shape, Workload};

/// One record in this many fails, and its transaction is aborted.
const FAILS_ONE_IN: u64 = 61;
/// Time that a record takes.
const WORK: Duration = Duration::from_millis(1);
/// Pause before a processor that ended with an error is started again.
const RESTART: Duration = Duration::from_millis(300);

/// Processes until its process is killed.
pub async fn run(site: &KafkaSite, number: usize) -> anyhow::Result<()> {
    let reporter = Arc::new(Reporter::new(site.recorder, "processor"));
    let mut tasks = tokio::task::JoinSet::new();
    for workload in site.workloads()? {
        let member = Member { site: site.clone(), reporter: reporter.clone(), workload, number };
        match workload.shape {
            Shape::ProduceCommit | Shape::CommitProduce => drop(tasks.spawn(naive::run(member))),
            // One member: what is shown of it is no fault of a rebalance.
            Shape::Librdkafka if number > 0 => {}
            Shape::Librdkafka => drop(tasks.spawn(librdkafka::run(member))),
            _ => drop(tasks.spawn(process(member))),
        }
    }
    roles::ready();
    // A task ends only with an error.
    while let Some(ended) = tasks.join_next().await {
        ended??;
    }
    Ok(())
}

/// A member of the group of a workload.
#[derive(Clone)]
pub struct Member {
    pub site: KafkaSite,
    pub reporter: Arc<Reporter>,
    pub workload: Workload,
    pub number: usize,
}

/// Runs the processor, and starts it again when it ends, as a supervisor does.
async fn process(member: Member) -> anyhow::Result<()> {
    let shared = Arc::new(Shared::default());
    loop {
        let Err(error) = process_once(&member, &shared).await else { return Ok(()) };
        let act = Act::Restarted { why: error.to_string() };
        member.reporter.report(member.workload.name, vec![act]).await?;
        tokio::time::sleep(RESTART).await;
    }
}

async fn process_once(member: &Member, shared: &Arc<Shared>) -> Result<(), ProcessorError> {
    let Member { site, reporter, workload, number } = member;
    let config = ProcessorConfig {
        batch_records_max: 25,
        batch_time_max: Duration::from_millis(200),
        handler_timeout: Duration::from_secs(2),
        attempts_max: 1_000,
        // Members of both kinds share a group.
        overlap: !number.is_multiple_of(2),
        ..ProcessorConfig::default()
    };
    let id = site.transactional_id(workload, *number);
    let mut producer = ProducerConfig::new(site.through_proxy(&id), &id);
    (producer.transaction_timeout, producer.delivery_timeout) = (TRANSACTION, Duration::from_secs(10));
    // Outputs are sent every few records, so that a transaction that is aborted has left some of them in the log.
    producer.buffer_bytes_max = 500;
    let inner = KafkaClient::connect(&site.consumer(workload), producer, &config).await?;
    let client = RecordingClient {
        inner,
        recorder: Recorder { reporter: reporter.clone(), workload: workload.name },
        shared: shared.clone(),
        open: None,
        committing: Arc::default(),
    };
    let handler = Copier { output: site.output(workload), shared: shared.clone() };
    Processor::new(config, client, handler).run(std::future::pending()).await.map(drop)
}

/// What handler and client of a process share.
#[derive(Default)]
struct Shared {
    /// Records that were handled.
    handled: AtomicU64,
    /// Transactions that were begun.
    begun: AtomicU64,
    /// The handler has failed on purpose in the present transaction.
    failed: AtomicBool,
}

/// Copies payments to the same partition of the output. Now and then it fails.
struct Copier {
    output: String,
    shared: Arc<Shared>,
}

impl Handler for Copier {
    async fn handle(&mut self, record: &Record, output: &mut Vec<NewRecord>) -> Result<(), Failure> {
        tokio::time::sleep(WORK).await;
        if self.shared.handled.fetch_add(1, Ordering::Relaxed) % FAILS_ONE_IN == FAILS_ONE_IN - 1 {
            self.shared.failed.store(true, Ordering::Relaxed);
            return Err("now and then".into());
        }
        let (partition, key, value) = (Some(record.at.partition), record.key.clone(), record.value.clone());
        output.push(NewRecord { topic: self.output.clone(), partition, key, value, ..NewRecord::default() });
        Ok(())
    }
}

/// A transaction that has begun.
struct Open {
    name: String,
    records: u64,
}

/// The library's client. Each record carries its transaction's name, and the end of each transaction is recorded. Reports are made
/// beside the work: a call that is cancelled must not be made again because of them.
struct RecordingClient {
    inner: KafkaClient,
    recorder: Recorder,
    shared: Arc<Shared>,
    open: Option<Open>,
    /// The transaction whose commit is not answered.
    committing: Arc<Mutex<Option<Open>>>,
}

impl RecordingClient {
    fn committing(&self) -> Option<Open> {
        take(&self.committing)
    }
}

fn take(committing: &Mutex<Option<Open>>) -> Option<Open> {
    committing.lock().unwrap_or_else(PoisonError::into_inner).take()
}

/// Records the ends of transactions.
#[derive(Clone)]
struct Recorder {
    reporter: Arc<Reporter>,
    workload: &'static str,
}

impl Recorder {
    fn ended(&self, open: Option<Open>, end: TransactionEnd, intended: bool) {
        let Some(Open { name: transaction, records }) = open.filter(|open| open.records > 0) else { return };
        let Self { reporter, workload } = self.clone();
        let act = Act::Transaction { transaction, records, end, intended };
        tokio::spawn(async move {
            let _ = reporter.report(workload, vec![act]).await;
            let _ = reporter.gap(workload, false).await;
        });
    }
}

impl Drop for RecordingClient {
    /// A transaction that is left open is ended by the next start, and counts as nothing.
    fn drop(&mut self) {
        for _ in self.open.take().into_iter().chain(self.committing()).filter(|open| open.records > 0) {
            let Recorder { reporter, workload } = self.recorder.clone();
            tokio::spawn(async move { reporter.gap(workload, false).await });
        }
    }
}

impl Client for RecordingClient {
    async fn next(&mut self) -> Event {
        self.inner.next().await
    }

    fn try_next(&mut self) -> Option<Event> {
        self.inner.try_next()
    }

    fn seek(&mut self, at: &TopicPartition, offset: i64) {
        self.inner.seek(at, offset);
    }

    fn owner_of(&self, partitions: &[TopicPartition], revocation: Option<&Revocation>) -> Option<Ownership> {
        self.inner.owner_of(partitions, revocation)
    }

    fn begin(&mut self) -> Result<(), ProducerError> {
        self.inner.begin()?;
        let number = self.shared.begun.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}/{number}", self.recorder.reporter.who());
        self.open = Some(Open { name, records: 0 });
        Ok(())
    }

    async fn send(&mut self, mut record: NewRecord) -> Result<(), ProducerError> {
        if let Some(open) = &mut self.open {
            if open.records == 0 {
                // Without the recorder there is no run.
                let _ = self.recorder.reporter.gap(self.recorder.workload, true).await;
            }
            open.records += 1;
            record.headers.push((TRANSACTION_HEADER.to_owned(), Some(open.name.clone().into())));
        }
        self.inner.send(record).await
    }

    async fn topic_ids(&self, topics: &BTreeSet<Arc<str>>) -> Result<TopicIds, ProducerError> {
        self.inner.topic_ids(topics).await
    }

    async fn prepare(
        &mut self,
        owner: Ownership,
        next: Vec<(TopicPartition, NextOffset)>,
    ) -> Result<(), ProcessorError> {
        self.inner.prepare(owner, next).await
    }

    fn overlaps(&self) -> bool {
        self.inner.overlaps()
    }

    fn commit(&mut self) -> CommitAnswer {
        let (answer, answered) = CommitAnswer::new();
        *self.committing.lock().unwrap_or_else(PoisonError::into_inner) = self.open.take();
        let (mut inner, recorder, committing) =
            (self.inner.commit(), self.recorder.clone(), self.committing.clone());
        tokio::spawn(async move {
            let committed = inner.wait().await;
            if committed.is_ok() {
                recorder.ended(take(&committing), TransactionEnd::Committed, false);
            }
            let _ = answer.send(committed);
        });
        answered
    }

    async fn abort(&mut self) -> Result<bool, ProducerError> {
        let refused = self.inner.abort().await?;
        if refused {
            self.recorder.ended(self.committing(), TransactionEnd::Aborted, false);
        }
        let intended = self.shared.failed.swap(false, Ordering::Relaxed);
        self.recorder.ended(self.open.take(), TransactionEnd::Aborted, intended);
        Ok(refused)
    }

    async fn settle(
        &mut self,
        group: &str,
        partitions: &[TopicPartition],
    ) -> Result<BTreeMap<TopicPartition, NextOffset>, ProducerError> {
        let committed = self.inner.settle(group, partitions).await?;
        self.recorder.ended(self.committing(), TransactionEnd::Unknown, false);
        Ok(committed)
    }

    async fn close(&mut self) {
        self.inner.close().await;
    }
}
