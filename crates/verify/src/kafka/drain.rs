//! The end of a run on Kafka: everything is processed, and the reader has read everything that the topics will ever show.

use std::collections::HashSet;
use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use hapax_kafka::admin::{self, AdminError, BlockedPartition, OpenProducer, OpenTransaction};
use hapax_kafka::producer::NewRecord;
use hapax_kafka::publisher::Publisher;
use hapax_kafka::wire::Cluster;

use super::inputs;
use super::processes::Processes;
use super::site::{END_MARK, KafkaSite, PARTITIONS};
use crate::history::{self, Act, Answer, Event, Place};
use crate::recorder::Reporter;
use crate::roles;
use crate::workload::Workload;

/// The rest is waited for as long as it becomes less; this is how long it may stay the same.
const STALLED: Duration = Duration::from_mins(2);
/// The same for controls, in their groups and in what the reader reads of them.
const CONTROLS: Duration = Duration::from_mins(1);
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
    let unread = wait_for_reader(all, workloads).await?;
    let ours = |workload: &&Workload| !workload.is_control();
    let why = if unread.iter().any(|workload| ours(&workload)) {
        Some(why_unread(all, &cluster, &unread).await)
    } else {
        waiting.iter().find(|(workload, _)| ours(workload)).map(|(_, why)| why.clone())
    };
    reporter.report("", vec![Act::Drained { empty: why.is_none(), why }]).await?;
    for workload in workloads {
        let is_it = |other: &Workload| other.name == workload.name;
        let is_read = !unread.iter().any(is_it);
        if is_read && !waiting.iter().any(|(other, _)| is_it(other)) {
            continue;
        }
        // If its output was not read to the end, or the broker does not tell, all that was not seen may still come.
        let rest = if is_read { inputs::uncommitted(&all.site, &cluster, workload).await.ok() } else { None };
        report_waiting(reporter, workload, history, rest.as_ref()).await?;
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

/// Waits until everything is read. Returns the workloads that are not: a control is not waited for as long as the others.
async fn wait_for_reader(all: &mut Processes, workloads: &[Workload]) -> anyhow::Result<Vec<Workload>> {
    let start = Instant::now();
    loop {
        let read = all.read_to_end()?;
        let mut unread: Vec<Workload> = workloads.to_vec();
        unread.retain(|workload| !read.contains(workload.name));
        let limit = if unread.iter().all(Workload::is_control) { CONTROLS } else { READ };
        if unread.is_empty() || start.elapsed() > limit {
            return Ok(unread);
        }
        tokio::time::sleep(POLL).await;
    }
}

/// Why the reader did not get to the end of the topics, as the broker sees it.
async fn why_unread(all: &Processes, cluster: &Cluster, unread: &[Workload]) -> String {
    let names: Vec<&str> = unread.iter().map(|workload| workload.name).collect();
    let topics: Vec<String> = unread.iter().map(|workload| all.site.output(workload)).collect();
    let why = match why_blocked(cluster, &topics).await {
        Ok(Some(why)) => why,
        Ok(None) => format!("no transaction is open, so it is the reader that stopped: {}", all.reader_log()),
        Err(error) => format!("the broker did not tell why: {error}"),
    };
    format!("the reader did not get to the end of {}: {why}", names.join(", "))
}

/// The transactions for which readers of committed records wait.
async fn why_blocked(cluster: &Cluster, topics: &[String]) -> Result<Option<String>, AdminError> {
    let blocked = admin::blocked(cluster, topics).await?;
    if blocked.is_empty() {
        return Ok(None);
    }
    let known = admin::transactions(cluster).await?;
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as i64;
    let mut lines = Vec::new();
    for BlockedPartition { topic, partition, stable_end, end, producers } in &blocked {
        let mut line = format!("{topic}/{partition} is shown up to {stable_end} of {end}");
        for OpenProducer { id, epoch, start, .. } in producers {
            let of = |transaction: &&OpenTransaction| transaction.producer.0 == *id;
            let known = match known.iter().find(of) {
                None => " and unknown to the coordinator".to_owned(),
                Some(OpenTransaction {
                    transactional_id, state, started_ms, timeout_ms, producer, ..
                }) => {
                    let age_ms = started_ms.map(|started| now_ms - started).unwrap_or_default();
                    let (_, epoch) = producer;
                    format!(" ({transactional_id}, {state} for {age_ms} of {timeout_ms} ms, epoch {epoch})")
                }
            };
            write!(line, ", a transaction of producer {id} epoch {epoch} is open since {start}{known}")
                .expect("a string grows");
        }
        lines.push(line);
    }
    Ok(Some(lines.join("; ")))
}

/// Reports what was accepted and not shown, and may still come: of what the group has committed, nothing more comes.
async fn report_waiting(
    reporter: &Reporter,
    workload: &Workload,
    history: &Path,
    uncommitted: Option<&HashSet<String>>,
) -> anyhow::Result<()> {
    let events = history::read(history)?;
    let waiting = waiting(&events, workload.name, uncommitted);
    for part in waiting.chunks(PAGE) {
        reporter.report(workload.name, part.to_vec()).await?;
    }
    Ok(())
}

/// Accepted records of a workload that were not shown, and that the group has not committed.
fn waiting(events: &[Event], workload: &str, uncommitted: Option<&HashSet<String>>) -> Vec<Act> {
    let own = || events.iter().filter(|event| event.event.workload == workload);
    let shown: HashSet<&str> =
        own().filter_map(|event| event.event.act.effect()).map(|(id, ..)| id).collect();
    let accepted = own().filter_map(|event| match &event.event.act {
        Act::Send { id, answer: Answer::Ok } => Some(id),
        _ => None,
    });
    accepted
        .filter(|id| !shown.contains(id.as_str()) && uncommitted.is_none_or(|ids| ids.contains(*id)))
        .map(|id| Act::Left { id: id.clone(), place: Place::Waiting })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::NewEvent;

    /// A record in front of the committed offset that was not shown is lost: it does not wait.
    #[test]
    fn what_the_group_has_committed_does_not_wait() {
        let sent = |(id, answer): (&str, Answer)| NewEvent {
            who: "producer".to_owned(),
            workload: "processor".to_owned(),
            act: Act::Send { id: id.to_owned(), answer },
        };
        let sends = [("lost", Answer::Ok), ("waits", Answer::Ok), ("unknown", Answer::Unknown)];
        let event = |event| Event { n: 0, ms: 0, event };
        let events: Vec<Event> = sends.map(sent).map(event).into();
        let left = |id: &str| Act::Left { id: id.to_owned(), place: Place::Waiting };
        let uncommitted = HashSet::from(["waits".to_owned(), "unknown".to_owned()]);
        assert_eq!(waiting(&events, "processor", Some(&uncommitted)), [left("waits")]);
        assert_eq!(waiting(&events, "processor", None), [left("lost"), left("waits")], "nothing is known");
        assert_eq!(waiting(&events, "other", None), []);
    }
}
