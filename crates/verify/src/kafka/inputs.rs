//! What a group has left of its input.

use std::collections::{BTreeMap, HashSet};
use std::time::{Duration, Instant};

use anyhow::ensure;
use hapax_kafka::admin;
use hapax_kafka::wire::Cluster;
use rdkafka::ClientConfig;
use rdkafka::consumer::{BaseConsumer, Consumer as _};
use rdkafka::error::KafkaError;
use rdkafka::message::Message as _;
use rdkafka::topic_partition_list::{Offset, TopicPartitionList};

use super::site::{KafkaSite, PARTITIONS};
use crate::recorder::Payment;
use crate::workload::Workload;

/// Time to read them.
const READ: Duration = Duration::from_mins(1);
const POLL: Duration = Duration::from_millis(100);

/// The ids of the records at or after the offsets that the workload's group has committed.
pub async fn uncommitted(
    site: &KafkaSite,
    cluster: &Cluster,
    workload: &Workload,
) -> anyhow::Result<HashSet<String>> {
    let (brokers, topic) = (site.brokers.clone(), site.input(workload));
    let partitions = admin::lag(cluster, &site.group(workload)).await?;
    let of_topic = partitions.into_iter().filter(|at| at.topic == topic);
    let committed: BTreeMap<i32, i64> = of_topic.map(|at| (at.partition, at.committed)).collect();
    // librdkafka's calls block.
    tokio::task::spawn_blocking(move || read_from(&brokers, &topic, &committed)).await?
}

/// The ids of a topic's records from these offsets on; of a partition without one, all.
fn read_from(brokers: &str, topic: &str, from: &BTreeMap<i32, i64>) -> anyhow::Result<HashSet<String>> {
    let reader: BaseConsumer = ClientConfig::new()
        .set("bootstrap.servers", brokers)
        .set("group.id", "reader")
        .set("enable.auto.commit", "false")
        .set("enable.partition.eof", "true")
        .create()?;
    let mut assigned = TopicPartitionList::new();
    for partition in 0..PARTITIONS {
        let offset = from.get(&partition).map_or(Offset::Beginning, |offset| Offset::Offset(*offset));
        assigned.add_partition_offset(topic, partition, offset)?;
    }
    reader.assign(&assigned)?;
    let (start, mut ended, mut ids) = (Instant::now(), HashSet::new(), HashSet::new());
    while ended.len() < PARTITIONS as usize {
        ensure!(start.elapsed() < READ, "{} of {PARTITIONS} partitions of {topic} were read", ended.len());
        match reader.poll(POLL) {
            Some(Ok(record)) => {
                let payment: Payment = serde_json::from_slice(record.payload().unwrap_or_default())?;
                ids.insert(payment.id);
            }
            Some(Err(KafkaError::PartitionEOF(partition))) => drop(ended.insert(partition)),
            // Connections that are lost are tried again.
            Some(Err(_)) | None => {}
        }
    }
    Ok(ids)
}
