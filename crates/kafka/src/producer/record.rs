//! Records, the choice of their partition, and their batches.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{Bytes, BytesMut};
use indexmap::IndexMap;
use kafka_protocol::records::{
    Compression, NO_PARTITION_LEADER_EPOCH, Record as WireRecord, RecordBatchEncoder, RecordEncodeOptions,
    TimestampType,
};

use super::ProducerError;
use crate::machine::Batch;
use crate::wire::text;

/// A record to be produced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewRecord {
    /// The topic.
    pub topic: String,
    /// The partition. `None`: by the key, as Kafka's Java clients choose it (murmur2); without a key, in turn.
    pub partition: Option<i32>,
    /// The key.
    pub key: Option<Bytes>,
    /// The value; `None` is a deletion in a compacted topic.
    pub value: Option<Bytes>,
    /// Names and values; each name once.
    pub headers: Vec<(String, Option<Bytes>)>,
    /// Milliseconds since 1970. `None`: now.
    pub timestamp_ms: Option<i64>,
}

impl NewRecord {
    /// A record without headers, whose key chooses the partition.
    ///
    /// ```
    /// let record = hapax_kafka::producer::NewRecord::new("orders", "order 7", "paid");
    /// assert_eq!(record.partition, None);
    /// ```
    pub fn new(topic: &str, key: impl Into<Bytes>, value: impl Into<Bytes>) -> Self {
        Self { topic: topic.to_owned(), key: Some(key.into()), value: Some(value.into()), ..Self::default() }
    }

    /// The size in a batch, rounded up.
    pub(super) fn bytes(&self) -> usize {
        let length = |bytes: &Option<Bytes>| bytes.as_ref().map_or(0, Bytes::len);
        let headers: usize = self.headers.iter().map(|(name, value)| name.len() + length(value) + 10).sum();
        length(&self.key) + length(&self.value) + headers + 32
    }

    pub(super) fn check(&self, bytes_max: usize) -> Result<(), ProducerError> {
        if self.bytes() > bytes_max {
            let reason = format!("{} bytes; the limit of a batch is {bytes_max}", self.bytes());
            return Err(ProducerError::Record(reason));
        }
        for (place, (name, _)) in self.headers.iter().enumerate() {
            if self.headers[..place].iter().any(|(earlier, _)| earlier == name) {
                return Err(ProducerError::Record(format!("the header {name:?} is there twice")));
            }
        }
        Ok(())
    }
}

/// The partition of a key, as Kafka's Java clients choose it.
pub fn partition_of(key: &[u8], partitions: i32) -> i32 {
    (murmur2(key) & i32::MAX) % partitions
}

/// Murmur2 in the variant of Kafka's Java clients.
fn murmur2(data: &[u8]) -> i32 {
    const M: u32 = 0x5bd1_e995;
    let mut hash = 0x9747_b28c_u32 ^ u32::try_from(data.len()).unwrap_or(u32::MAX);
    let (words, tail) = data.as_chunks::<4>();
    for word in words {
        let mut k = u32::from_le_bytes(*word).wrapping_mul(M);
        k ^= k >> 24;
        hash = hash.wrapping_mul(M) ^ k.wrapping_mul(M);
    }
    for (place, byte) in tail.iter().enumerate() {
        hash ^= u32::from(*byte) << (8 * place);
    }
    if !tail.is_empty() {
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    hash ^= hash >> 15;
    hash.cast_signed()
}

/// The records as one batch of the partition's log.
pub(super) fn encode(
    batch: Batch,
    records: Vec<NewRecord>,
    transactional: bool,
) -> Result<Bytes, ProducerError> {
    let now_ms = now_ms();
    let bytes = records.iter().map(NewRecord::bytes).sum::<usize>();
    let mut records: Vec<WireRecord> =
        records.into_iter().map(|record| wire(batch, record, now_ms, transactional)).collect();
    for (record, offset) in records.iter_mut().zip(0_i32..) {
        record.offset = offset.into();
        record.sequence = batch.sequence.wrapping_add(offset);
    }
    let mut buffer = BytesMut::with_capacity(bytes + 128);
    let options = RecordEncodeOptions { version: 2, compression: Compression::None };
    RecordBatchEncoder::encode(&mut buffer, &records, &options)
        .map_err(|error| ProducerError::Record(error.to_string()))?;
    Ok(buffer.freeze())
}

fn wire(batch: Batch, record: NewRecord, now_ms: i64, transactional: bool) -> WireRecord {
    WireRecord {
        transactional,
        control: false,
        delete_horizon: false,
        partition_leader_epoch: NO_PARTITION_LEADER_EPOCH,
        producer_id: batch.identity.producer_id,
        producer_epoch: batch.identity.epoch,
        timestamp_type: TimestampType::Creation,
        offset: 0,
        sequence: batch.sequence,
        timestamp: record.timestamp_ms.unwrap_or(now_ms),
        key: record.key,
        value: record.value,
        headers: record
            .headers
            .into_iter()
            .map(|(name, value)| (text(&name), value))
            .collect::<IndexMap<_, _>>(),
    }
}

fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of Kafka's own test of its hash.
    #[test]
    fn keys_go_where_java_clients_put_them() {
        for (key, hash) in [
            ("21", -973_932_308),
            ("foobar", -790_332_482),
            ("a-little-bit-long-string", -985_981_536),
            ("a-little-bit-longer-string", -1_486_304_829),
            ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            ("abc", 479_470_107),
        ] {
            assert_eq!(murmur2(key.as_bytes()), hash, "{key}");
        }
    }

    #[test]
    fn a_record_that_is_too_large_or_ambiguous_is_refused() {
        let record = NewRecord::new("t", "k", vec![0; 1_000]);
        assert!(record.check(2_000).is_ok());
        assert!(record.check(1_000).is_err());
        let twice = vec![("a".to_owned(), None), ("a".to_owned(), None)];
        assert!(NewRecord { headers: twice, ..record }.check(2_000).is_err());
    }
}
