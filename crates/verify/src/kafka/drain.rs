//! The end of a run on Kafka: everything is processed, and the reader has read everything that the topics will ever show.

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use hapax_kafka::admin;
use hapax_kafka::producer::NewRecord;
use hapax_kafka::publisher::Publisher;
use hapax_kafka::wire::Cluster;

use super::processes::Processes;
use super::site::{END_MARK, KafkaSite, PARTITIONS};
use crate::history::{self, Act, Answer, Place};
use crate::recorder::Reporter;
use crate::roles;
use crate::workload::Workload;

/// The rest is waited for as long as it becomes less; this is how long it may stay the same.
const STALLED: Duration = Duration::from_mins(2);
/// The same for controls.
const CONTROLS: Duration = Duration::from_secs(20);
/// How long the reader may take to the end of the topics: readers of committed records wait for transactions that a killed process
/// has left open.
const READ: Duration = Duration::from_mins(2);
const POLL: Duration = Duration::from_millis(200);
const PAGE: usize = 500;

/// Stops the producer, waits for the processors, and then for the reader. Records why, if something is left.
pub async fn drain(
    all: &mut Processes,
    reporter: &Reporter,
    workloads: &[Workload],
    history: &Path,
) -> anyhow::Result<()> {
    all.stop_producer();
    let cluster = all.broker.cluster();
    let mut waiting = Vec::new();
    for workload in workloads {
        let limit = if workload.is_control() { CONTROLS } else { STALLED };
        if let Some(why) = wait_for_group(all, &cluster, workload, limit).await? {
            waiting.push((workload, why));
        }
    }
    all.stop_processors();
    write_end_marks(&all.site, workloads).await?;
    let is_read = wait_for_reader(all).await?;
    let ours = waiting.iter().find(|(workload, _)| !workload.is_control()).map(|(_, why)| why.clone());
    let why = if is_read {
        ours
    } else {
        Some("the reader did not get to the end of the topics: a transaction is still open".to_owned())
    };
    reporter.report("", vec![Act::Drained { empty: why.is_none(), why }]).await?;
    for workload in workloads {
        if !is_read || waiting.iter().any(|(of, _)| of.name == workload.name) {
            report_waiting(reporter, workload, history).await?;
        }
    }
    Ok(())
}

/// Waits until the group has committed the end of each input partition; else returns why it was not waited for any longer.
async fn wait_for_group(
    all: &mut Processes,
    cluster: &Cluster,
    workload: &Workload,
    limit: Duration,
) -> anyhow::Result<Option<String>> {
    let group = all.site.group(workload);
    let (mut least, mut since) = (i64::MAX, Instant::now());
    loop {
        all.check_alive()?;
        let asked = lag(cluster, &group).await;
        match &asked {
            Ok(0) => return Ok(None),
            Ok(behind) if *behind < least => (least, since) = (*behind, Instant::now()),
            _ => {}
        }
        if since.elapsed() > limit {
            let seconds = limit.as_secs();
            let why = match asked {
                Ok(behind) => format!("for {seconds} s {behind} records stayed unprocessed"),
                Err(error) => {
                    format!("the broker did not tell for {seconds} s what is unprocessed: {error:#}")
                }
            };
            return Ok(Some(why));
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Records that a group has not committed. Every input partition has records, so one without an offset was never committed.
async fn lag(cluster: &Cluster, group: &str) -> anyhow::Result<i64> {
    let partitions = match admin::lag(cluster, group).await {
        Ok(partitions) => partitions,
        Err(error) => {
            // The coordinator may have moved, or its broker may have been killed.
            cluster.forget_coordinator(hapax_kafka::wire::CoordinatorKind::Group, group);
            return Err(error.into());
        }
    };
    let missing = i64::from(PARTITIONS) - i64::try_from(partitions.len())?;
    let behind: i64 = partitions.iter().map(|at| (at.end - at.committed).max(0)).sum();
    Ok(behind + missing)
}

/// Writes the last record of every output partition.
async fn write_end_marks(site: &KafkaSite, workloads: &[Workload]) -> anyhow::Result<()> {
    roles::repeat(|| async {
        let mut records = Vec::new();
        for workload in workloads {
            for partition in 0..PARTITIONS {
                let record = NewRecord::new(&site.output(workload), "end", END_MARK);
                records.push(NewRecord { partition: Some(partition), ..record });
            }
        }
        Publisher::idempotent(site.direct()).await?.publish(records).await
    })
    .await
}

async fn wait_for_reader(all: &mut Processes) -> anyhow::Result<bool> {
    let end = Instant::now() + READ;
    while !all.reader_is_done()? {
        if Instant::now() > end {
            return Ok(false);
        }
        tokio::time::sleep(POLL).await;
    }
    Ok(true)
}

/// Reports what was accepted and is not shown as waiting: nothing is known of it.
async fn report_waiting(reporter: &Reporter, workload: &Workload, history: &Path) -> anyhow::Result<()> {
    let events = history::read(history)?;
    let own = || events.iter().filter(|event| event.event.workload == workload.name);
    let shown: HashSet<&str> =
        own().filter_map(|event| event.event.act.effect()).map(|(id, ..)| id).collect();
    let accepted = own().filter_map(|event| match &event.event.act {
        Act::Send { id, answer: Answer::Ok } => Some(id),
        _ => None,
    });
    let waiting: Vec<Act> = accepted
        .filter(|id| !shown.contains(id.as_str()))
        .map(|id| Act::Left { id: id.clone(), place: Place::Waiting })
        .collect();
    for part in waiting.chunks(PAGE) {
        reporter.report(workload.name, part.to_vec()).await?;
    }
    Ok(())
}
