//! The inputs of the transaction under way.

use std::collections::BTreeMap;

use crate::consumer::Record;
use crate::partition::TopicPartition;

/// A partition's part of a batch: its first record and the one after its last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    first: i64,
    next: i64,
}

/// The inputs of the transaction under way.
#[derive(Debug, Default)]
pub(super) struct Batch {
    spans: BTreeMap<TopicPartition, Span>,
    pub records: usize,
    pub bytes: usize,
    pub dead: u64,
}

impl Batch {
    pub fn is_empty(&self) -> bool {
        self.spans.is_empty()
    }

    pub fn add(&mut self, record: &Record) {
        let next = record.offset + 1;
        self.spans
            .entry(record.at.clone())
            .and_modify(|span| span.next = next)
            .or_insert(Span { first: record.offset, next });
        self.records += 1;
        self.bytes += record.bytes();
    }

    pub fn holds_any(&self, partitions: &[TopicPartition]) -> bool {
        partitions.iter().any(|at| self.spans.contains_key(at))
    }

    pub fn partitions(&self) -> Vec<TopicPartition> {
        self.spans.keys().cloned().collect()
    }

    /// Partitions that are no longer this member's do not belong to it.
    pub fn forget(&mut self, partitions: &[TopicPartition]) {
        for at in partitions {
            self.spans.remove(at);
        }
    }

    /// The offsets to commit.
    pub fn next(&self) -> impl Iterator<Item = (TopicPartition, i64)> + '_ {
        self.spans.iter().map(|(at, span)| (at.clone(), span.next))
    }

    /// Where the batch began.
    pub fn first(&self) -> impl Iterator<Item = (TopicPartition, i64)> + '_ {
        self.spans.iter().map(|(at, span)| (at.clone(), span.first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(partition: i32, offset: i64) -> Record {
        Record {
            at: TopicPartition::new("in", partition),
            offset,
            timestamp_ms: None,
            key: None,
            value: Some("four".into()),
            headers: Vec::new(),
        }
    }

    #[test]
    fn a_batch_knows_where_each_partition_begins_and_continues() {
        let mut batch = Batch::default();
        // Offsets have gaps where markers are.
        for (partition, offset) in [(0, 5), (1, 7), (0, 6), (0, 9)] {
            batch.add(&record(partition, offset));
        }
        let at = |partition| TopicPartition::new("in", partition);
        assert_eq!(batch.first().collect::<Vec<_>>(), [(at(0), 5), (at(1), 7)]);
        assert_eq!(batch.next().collect::<Vec<_>>(), [(at(0), 10), (at(1), 8)]);
        assert_eq!((batch.records, batch.bytes), (4, 16));
        assert!(batch.holds_any(&[at(1), at(2)]) && !batch.holds_any(&[at(2)]));
        batch.forget(&[at(0), at(1)]);
        assert!(batch.is_empty());
    }
}
