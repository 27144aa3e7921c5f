//! Controls: loops that produce and commit offsets, one after the other. Each tells when it is between the two: a process that is killed
//! there has done the first for certain, and has not begun the second.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::bail;
use hapax_kafka::admin;
use hapax_kafka::consumer::{Consumer, Event, Record, StartAt, TopicPartition};
use hapax_kafka::producer::{IdempotentProducer, NewRecord};
use hapax_kafka::wire::{Cluster, CoordinatorKind};

use super::processor::Member;
use crate::workload::Shape;

const BATCH_MAX: usize = 20;
/// Time from the last record to the end of a batch.
const IDLE: Duration = Duration::from_millis(100);
/// Time between the two steps: a disk or a network would take it, too.
const BETWEEN: Duration = Duration::from_millis(30);
/// The same when a kill is aimed at it: however slow the machine is, the kill comes first.
const AIMED_AT: Duration = Duration::from_secs(5);
/// How long the broker may take to have the committed offsets.
const COMMITTED: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);
const RESTART: Duration = Duration::from_millis(300);

/// Runs until its process is killed.
pub async fn run(member: Member) -> anyhow::Result<()> {
    loop {
        // What ends it is lost or repeated by the next start: it is naive.
        let _ = run_once(&member).await;
        tokio::time::sleep(RESTART).await;
    }
}

async fn run_once(member: &Member) -> anyhow::Result<()> {
    let Member { site, workload, .. } = member;
    let mut producer = IdempotentProducer::connect(site.through_proxy(workload.name)).await?;
    let mut consumer = Consumer::start(&site.consumer(workload))?;
    let mut batch = Vec::new();
    loop {
        match tokio::time::timeout(IDLE, consumer.next()).await {
            Ok(Event::Record(record)) => {
                batch.push(record);
                if batch.len() >= BATCH_MAX {
                    handle(member, &mut producer, &consumer, &mut batch).await?;
                }
            }
            Ok(Event::Assigned(assignment)) => {
                let starts = assignment.partitions.iter().map(|_| StartAt::Committed).collect();
                assignment.start(starts);
            }
            Ok(Event::Revoked(revocation)) => {
                handle(member, &mut producer, &consumer, &mut batch).await?;
                drop(revocation);
            }
            Ok(Event::Lost(_)) => batch.clear(),
            Ok(Event::Problem(_)) => {}
            Ok(Event::Ended(error)) => bail!("{error}"),
            Err(_) => handle(member, &mut producer, &consumer, &mut batch).await?,
        }
    }
}

async fn handle(
    member: &Member,
    producer: &mut IdempotentProducer,
    consumer: &Consumer,
    batch: &mut Vec<Record>,
) -> anyhow::Result<()> {
    let records = std::mem::take(batch);
    if records.is_empty() {
        return Ok(());
    }
    if member.workload.shape == Shape::CommitProduce {
        commit_and_wait(member, consumer, &records).await?;
        stay_between(member).await?;
        produce(member, producer, &records).await
    } else {
        produce(member, producer, &records).await?;
        stay_between(member).await?;
        consumer.commit(next_offsets(&records));
        Ok(())
    }
}

/// The gap between the two steps. The recorder knows of its end before the second step begins.
async fn stay_between(member: &Member) -> anyhow::Result<()> {
    let Member { reporter, workload, .. } = member;
    let is_aimed_at = reporter.gap(workload.name, true).await?;
    tokio::time::sleep(if is_aimed_at { AIMED_AT } else { BETWEEN }).await;
    reporter.gap(workload.name, false).await?;
    Ok(())
}

async fn produce(
    member: &Member,
    producer: &mut IdempotentProducer,
    records: &[Record],
) -> anyhow::Result<()> {
    let topic = member.site.output(&member.workload);
    for Record { at, key, value, .. } in records {
        let (topic, partition) = (topic.clone(), Some(at.partition));
        let (key, value) = (key.clone(), value.clone());
        producer.send(NewRecord { topic, partition, key, value, ..NewRecord::default() }).await?;
    }
    Ok(producer.flush().await?)
}

fn next_offsets(records: &[Record]) -> BTreeMap<&TopicPartition, i64> {
    records.iter().map(|record| (&record.at, record.offset + 1)).collect()
}

/// Commits the offsets, and asks the broker until it has them.
async fn commit_and_wait(member: &Member, consumer: &Consumer, records: &[Record]) -> anyhow::Result<()> {
    let (next, group) = (next_offsets(records), member.site.group(&member.workload));
    consumer.commit(next.clone());
    let (cluster, end) = (Cluster::new(member.site.direct()), Instant::now() + COMMITTED);
    while Instant::now() < end {
        match admin::lag(&cluster, &group).await {
            Ok(partitions) => {
                let is_committed = |(at, next): (&&TopicPartition, &i64)| {
                    partitions.iter().any(|lag| lag.partition == at.partition && lag.committed >= *next)
                };
                if next.iter().all(is_committed) {
                    return Ok(());
                }
            }
            Err(_) => cluster.forget_coordinator(CoordinatorKind::Group, &group),
        }
        tokio::time::sleep(POLL).await;
    }
    bail!("the offsets were not committed")
}
