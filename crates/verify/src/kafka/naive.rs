//! Controls: loops that produce and commit offsets, one after the other.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::bail;
use hapax_kafka::consumer::{Consumer, Event, Record, StartAt, TopicPartition};
use hapax_kafka::producer::{IdempotentProducer, NewRecord};

use super::processor::Member;
use crate::workload::Shape;

const BATCH_MAX: usize = 20;
/// Time from the last record to the end of a batch.
const IDLE: Duration = Duration::from_millis(100);
/// Time between the two steps: a disk or a network would take it, too.
const BETWEEN: Duration = Duration::from_millis(30);
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
    let Member { reporter, workload, .. } = member;
    reporter.gap(workload.name, true).await?;
    let result = if workload.shape == Shape::CommitProduce {
        commit(consumer, &records);
        tokio::time::sleep(BETWEEN).await;
        produce(member, producer, &records).await
    } else {
        let result = produce(member, producer, &records).await;
        tokio::time::sleep(BETWEEN).await;
        if result.is_ok() {
            commit(consumer, &records);
        }
        result
    };
    reporter.gap(workload.name, false).await?;
    result
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

fn commit(consumer: &Consumer, records: &[Record]) {
    let mut next: BTreeMap<&TopicPartition, i64> = BTreeMap::new();
    for record in records {
        next.insert(&record.at, record.offset + 1);
    }
    consumer.commit(next);
}
