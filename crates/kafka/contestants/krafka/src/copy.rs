//! Copies records from one topic to another: one transaction for each batch, with the offsets in it.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use krafka::consumer::{AutoOffsetReset, GroupProtocol, IsolationLevel};
use krafka::producer::TopicPartitionOffset;
use krafka::{Kafka, Record};

use crate::Result;

pub struct Flow {
    pub kafka: Kafka,
    pub input: String,
    /// Also the name of the group, and the `transactional.id`.
    pub output: String,
    pub records: usize,
    /// Records in a commit.
    pub batch: usize,
    /// The longest time between two commits.
    pub commit: Duration,
}

/// Prints the seconds from the first record to the end of the last commit.
pub async fn run(flow: &Flow) -> Result<()> {
    let consumer = flow
        .kafka
        .consumer(&flow.output)
        .group_protocol(GroupProtocol::Consumer)
        .auto_offset_reset(AutoOffsetReset::Earliest)
        .isolation_level(IsolationLevel::ReadCommitted)
        .enable_auto_commit(false)
        .max_poll_records(i32::try_from(flow.batch)?)
        .build()
        .await?;
    let producer = flow.kafka.producer().batch_size(1_000_000).build_transactional(&flow.output).await?;
    consumer.subscribe([flow.input.as_str()]).await?;
    let (mut begun, mut copied, mut since) = (None, 0, Instant::now());
    let mut open = Vec::new();
    let mut next: BTreeMap<i32, i64> = BTreeMap::new();
    while copied < flow.records || !open.is_empty() {
        let left = flow.commit.saturating_sub(since.elapsed());
        let is_due = open.len() >= flow.batch || copied >= flow.records || left.is_zero();
        if !open.is_empty() && is_due {
            // Its own way past the time that it waits for more records.
            producer.flush().await?;
            for delivery in open.drain(..) {
                let _ = delivery.await?;
            }
            let offsets: Vec<_> = next
                .iter()
                .map(|(partition, next)| TopicPartitionOffset::new(&flow.input, *partition, *next))
                .collect();
            let group = consumer.group_metadata().await.ok_or("no member of the group")?;
            producer.send_offsets(&offsets, &group).await?;
            producer.commit().await?;
        }
        if copied >= flow.records {
            continue;
        }
        let wait = if open.is_empty() { Duration::from_millis(100) } else { left };
        for record in consumer.poll(wait).await? {
            begun.get_or_insert_with(Instant::now);
            if open.is_empty() {
                since = Instant::now();
                producer.begin()?;
            }
            next.insert(record.partition, record.offset + 1);
            let mut copy =
                Record::new(&flow.output, record.value.unwrap_or_default()).partition(record.partition);
            copy.key = record.key;
            open.push(producer.enqueue(copy).await?);
            copied += 1;
        }
    }
    println!("seconds {}", begun.map_or(0.0, |begun: Instant| begun.elapsed().as_secs_f64()));
    Ok(())
}
