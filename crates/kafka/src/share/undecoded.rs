//! The records of a response until they are decoded: a compressed batch may become much larger, so not all of them are at a time.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use kafka_protocol::records::{Compression, Record};
use tokio::time::Instant;

use super::state::Partition;
use crate::batches::{BatchError, DecodeBudget, take_first};

/// What a response has of a partition.
#[derive(Debug, Clone)]
pub(super) struct Undecoded {
    pub partition: Partition,
    /// The topic's name, and whether it is the retry topic.
    pub topic: (Arc<str>, bool),
    /// Whole batches. A broker may cut the last one off.
    pub bytes: Bytes,
    /// Offsets that are locked and not decoded, with the counts of their deliveries.
    pub locked: BTreeMap<i64, i16>,
    /// When the locks end.
    pub until: Instant,
    /// The offset behind the batches that were seen whole.
    pub seen_to: i64,
}

impl Undecoded {
    /// Whether there is a record that the broker drops unless this delivery, the last one of `limit`, settles it. Released, or given back by
    /// the end of the session, it would be gone: it has to be decoded for the dead letters, whether or not records are wanted.
    pub fn has_last(&self, limit: u32) -> bool {
        self.locked.values().any(|count| is_last(*count, limit))
    }

    /// Takes the others out.
    pub fn without_last(&mut self, limit: u32) -> BTreeMap<i64, i16> {
        let all = std::mem::take(&mut self.locked);
        let (last, others) = all.into_iter().partition(|(_, count)| is_last(*count, limit));
        self.locked = last;
        others
    }

    /// Decodes the next batch that has locked records, and returns those. `None`: there is none, and what is left of the locked offsets are
    /// markers of transactions, or was compacted away. After an error it is as before.
    pub fn next_batch(
        &mut self,
        budget: &mut DecodeBudget,
    ) -> Result<Option<Vec<(Record, i16)>>, BatchError> {
        loop {
            let mut rest = self.bytes.clone();
            let Some(batch) = take_first(&mut rest).map_err(BatchError::Unreadable)? else { return Ok(None) };
            let (first, last) = (batch.info.min_offset, batch.last_offset);
            self.seen_to = self.seen_to.max(last.saturating_add(1));
            let has_locked = first <= last && self.locked.range(first..=last).next().is_some();
            if batch.info.control || !has_locked {
                self.bytes = rest;
                continue;
            }
            let is_compressed = batch.info.compression != Compression::None;
            let records = batch.records(budget)?;
            self.bytes = rest;
            let locked = records.into_iter().filter_map(|record| {
                let count = self.locked.remove(&record.offset)?;
                Some((if is_compressed { copied(record) } else { record }, count))
            });
            return Ok(Some(locked.collect()));
        }
    }
}

fn is_last(count: i16, limit: u32) -> bool {
    u32::try_from(count).is_ok_and(|count| count >= limit)
}

/// The record with memory of its own: as a part of a decompressed batch it would keep all of that.
fn copied(mut record: Record) -> Record {
    let copy = |bytes: &mut Option<Bytes>| *bytes = bytes.take().map(|bytes| Bytes::copy_from_slice(&bytes));
    copy(&mut record.key);
    copy(&mut record.value);
    record.headers.values_mut().for_each(copy);
    record
}

#[cfg(test)]
pub(super) mod tests {
    use uuid::Uuid;

    use super::*;
    use crate::batches::tests::{encoded, zeros};

    pub fn part(batches: &[Bytes], locked: impl IntoIterator<Item = i64>) -> Undecoded {
        Undecoded {
            partition: (Uuid::from_u128(7), 0),
            topic: ("t".into(), false),
            bytes: batches.concat().into(),
            locked: locked.into_iter().map(|offset| (offset, 1)).collect(),
            until: Instant::now() + std::time::Duration::from_mins(1),
            seen_to: 0,
        }
    }

    fn offsets(records: Option<Vec<(Record, i16)>>) -> Option<Vec<i64>> {
        records.map(|records| records.iter().map(|(record, _)| record.offset).collect())
    }

    #[test]
    fn only_batches_with_locked_records_are_decoded() {
        let small = |first, compression| encoded(first, &["a".into(), "b".into()], compression);
        // The second one would not fit into any budget.
        let batches = [
            small(0, Compression::Gzip),
            encoded(2, &[zeros(65)], Compression::Gzip),
            small(3, Compression::None),
        ];
        let mut part = part(&batches, [1, 3, 9]);
        let mut budget = DecodeBudget::MAX;
        assert_eq!(offsets(part.next_batch(&mut budget).unwrap()), Some(vec![1]));
        assert_eq!(offsets(part.next_batch(&mut budget).unwrap()), Some(vec![3]));
        assert_eq!(offsets(part.next_batch(&mut budget).unwrap()), None);
        assert_eq!(part.locked.into_keys().collect::<Vec<_>>(), [9], "there is no record");
    }

    #[test]
    fn what_does_not_fit_is_decoded_with_the_next_budget() {
        let mut part = part(
            &[encoded(0, &[zeros(40)], Compression::Gzip), encoded(1, &[zeros(40)], Compression::Gzip)],
            [0, 1],
        );
        let mut budget = DecodeBudget::MAX;
        assert_eq!(offsets(part.next_batch(&mut budget).unwrap()), Some(vec![0]));
        assert!(matches!(part.next_batch(&mut budget), Err(BatchError::NoRoom)));
        assert_eq!(part.locked.len(), 1, "it is still locked");
        assert_eq!(offsets(part.next_batch(&mut DecodeBudget::MAX.clone()).unwrap()), Some(vec![1]));
    }

    /// One small record of a batch does not keep the others in memory.
    #[test]
    fn a_record_of_a_compressed_batch_has_memory_of_its_own() {
        for (compression, is_shared) in [(Compression::Gzip, false), (Compression::None, true)] {
            let batch = encoded(0, &["small".into(), zeros(1)], compression);
            let mut part = part(&[batch], [0]);
            let records = part.next_batch(&mut DecodeBudget::MAX.clone()).unwrap().unwrap();
            let value = records[0].0.value.clone().unwrap();
            drop(records);
            drop(part);
            // If it is the only handle to its memory, that can be made a buffer again: of the value alone, or of what it is a part of.
            let capacity = value.try_into_mut().map_or(usize::MAX, |buffer| buffer.capacity());
            assert_eq!(capacity > 1_000, is_shared, "{compression:?}: {capacity} bytes");
        }
    }
}
