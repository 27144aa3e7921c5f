//! Record batches as a broker stores them. The codec decodes them; this bounds what a batch may claim, and decompresses.

use std::cell::Cell;
use std::io::Read;

use anyhow::{Context as _, bail};
use bytes::{Buf as _, Bytes};
use kafka_protocol::records::{BatchDecodeInfo, Compression, Record, RecordBatchDecoder};

/// Offset, length, and what the length does not count.
const HEAD: usize = 12;
/// Where the distance from the first offset to the last one stands.
const LAST_DELTA: std::ops::Range<usize> = 23..27;
/// The bytes that a record has at least.
const RECORD_BYTES_MIN: usize = 7;
/// The bytes that a header has at least: the lengths of its name and of its value.
const HEADER_BYTES_MIN: usize = 2;
/// Bytes of a number of variable length with 32 or 64 bits.
const VARINT_BYTES_MAX: usize = 5;
const VARLONG_BYTES_MAX: usize = 10;
/// The memory that the codec reserves for a header: its name, its value, its hash, and its place in a table.
const HEADER_MEMORY: usize = 96;

/// What the batches of one response may become in memory. A batch that does not fit into what is left is tried again with a new budget;
/// one that does not fit into that is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DecodeBudget {
    /// Bytes of decompressed batches.
    content: usize,
    /// Bytes of decoded records, without their content.
    records: usize,
}

impl DecodeBudget {
    /// Kafka's default for a batch, as it is sent, is 1 MiB. A million records take a quarter of a gigabyte.
    pub const MAX: Self = Self { content: 64 << 20, records: 256 << 20 };

    fn take(&mut self, content: usize, records: usize) -> Result<(), TooLarge> {
        let content = self.content.checked_sub(content).ok_or(TooLarge::Content)?;
        let records = self.records.checked_sub(records).ok_or(TooLarge::Records)?;
        *self = Self { content, records };
        Ok(())
    }

    /// Whether at most half of it was used.
    pub fn is_half_left(&self) -> bool {
        self.content >= Self::MAX.content / 2 && self.records >= Self::MAX.records / 2
    }
}

/// A batch is larger than what is left of a budget.
#[derive(Debug, thiserror::Error)]
enum TooLarge {
    #[error("a compressed batch becomes more than {} bytes", DecodeBudget::MAX.content)]
    Content,
    #[error("the records and headers of a batch take more than {} bytes", DecodeBudget::MAX.records)]
    Records,
}

/// Why a batch was not decoded.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum BatchError {
    /// It does not fit into what is left of the budget.
    NoRoom,
    /// It is damaged, or larger than a whole budget.
    Unreadable(String),
}

/// A whole batch of a response.
#[derive(Debug, Clone)]
pub(crate) struct StoredBatch {
    bytes: Bytes,
    pub info: BatchDecodeInfo,
    /// The offset of its last record, also if that was compacted away.
    pub last_offset: i64,
}

/// Takes the first batch. `None`: there is none, or the response ends inside of it.
pub(crate) fn take_first(bytes: &mut Bytes) -> Result<Option<StoredBatch>, String> {
    let Some(length) = bytes.get(8..HEAD).and_then(|length| <[u8; 4]>::try_from(length).ok()) else {
        return Ok(None);
    };
    let length = i32::from_be_bytes(length);
    let Some(whole) = usize::try_from(length).ok().and_then(|length| length.checked_add(HEAD)) else {
        return Err(format!("a batch of {length} bytes"));
    };
    if whole > bytes.len() {
        return Ok(None);
    }
    let batch = bytes.split_to(whole);
    let last_delta = batch.get(LAST_DELTA).and_then(|delta| <[u8; 4]>::try_from(delta).ok());
    let last_delta = last_delta.map(i32::from_be_bytes).ok_or("a batch without a head")?;
    let last_offset = batch.clone().get_i64().saturating_add(i64::from(last_delta));
    let infos = RecordBatchDecoder::decode_batch_info(&mut batch.clone());
    let info = infos.map_err(|error| format!("{error:#}"))?.into_iter().next();
    let info = info.ok_or("a batch of a version before 2")?;
    Ok(Some(StoredBatch { bytes: batch, info, last_offset }))
}

impl StoredBatch {
    /// Its records, which are taken off the budget. The codec compares its checksum.
    pub fn records(mut self, budget: &mut DecodeBudget) -> Result<Vec<Record>, BatchError> {
        let info = self.info.clone();
        let left = Cell::new(*budget);
        let decompress = |bytes: &mut Bytes, compression: Compression| {
            let mut after = left.get();
            let bytes = decompressed(bytes, compression, after.content)?;
            // What is not compressed is a part of the response.
            let content = if compression == Compression::None { 0 } else { bytes.len() };
            after.take(content, record_memory(&bytes, &info)?)?;
            left.set(after);
            Ok(bytes)
        };
        let decoded = RecordBatchDecoder::decode_with_custom_compression(&mut self.bytes, Some(decompress));
        match decoded {
            Ok(set) => {
                *budget = left.get();
                Ok(set.records)
            }
            Err(error) if error.is::<TooLarge>() && *budget != DecodeBudget::MAX => Err(BatchError::NoRoom),
            Err(error) => Err(BatchError::Unreadable(format!("{error:#}"))),
        }
    }
}

/// The memory that the codec reserves for the records of a batch, without their content. It reserves it by what the batch and its records
/// claim, before it reads what is there: so this looks whether a claim is possible, and reserves nothing.
fn record_memory(mut bytes: &[u8], info: &BatchDecodeInfo) -> anyhow::Result<usize> {
    let (claimed, length) = (info.record_count, bytes.len());
    let count = usize::try_from(claimed).ok().filter(|count| *count <= length / RECORD_BYTES_MIN);
    let Some(count) = count else { bail!("a batch of {length} bytes claims {claimed} records") };
    let mut memory = count * size_of::<Record>();
    for _ in 0..count {
        let length = take_number(&mut bytes)?;
        let record = take(&mut bytes, length).context("a record that is cut off")?;
        let headers = header_count(record, info).context("a record that cannot be read")?;
        memory = memory.saturating_add(headers.saturating_mul(HEADER_MEMORY));
    }
    Ok(memory)
}

/// The count of headers that a record claims.
fn header_count(mut record: &[u8], info: &BatchDecodeInfo) -> anyhow::Result<usize> {
    take(&mut record, 1).context("no attributes")?;
    let time_delta = unzigzag(take_varint(&mut record, VARLONG_BYTES_MAX)?);
    let offset_delta = take_number(&mut record)?;
    // The codec adds them without a look.
    let is_possible = info.min_timestamp.checked_add(time_delta).is_some()
        && info.min_offset.checked_add(offset_delta.into()).is_some();
    if !is_possible {
        bail!("an offset or a time that no number has room for");
    }
    for _key_and_value in 0..2 {
        let length = take_number(&mut record)?;
        if length >= 0 {
            take(&mut record, length).context("a key or a value that is cut off")?;
        }
    }
    let (claimed, length) = (take_number(&mut record)?, record.len());
    let count = usize::try_from(claimed).ok().filter(|count| *count <= length / HEADER_BYTES_MIN);
    count.with_context(|| format!("{length} bytes claim {claimed} headers"))
}

/// The first bytes, as many as `length`.
fn take<'b>(bytes: &mut &'b [u8], length: i32) -> Option<&'b [u8]> {
    let (taken, rest) = bytes.split_at_checked(usize::try_from(length).ok()?)?;
    *bytes = rest;
    Some(taken)
}

/// A number with a sign and 32 bits.
fn take_number(bytes: &mut &[u8]) -> anyhow::Result<i32> {
    let number = take_varint(bytes, VARINT_BYTES_MAX)?;
    // The codec drops the bits above these, too.
    Ok(unzigzag(number & u64::from(u32::MAX)) as i32)
}

/// A number of variable length, which the codec ends after this many bytes in any case.
fn take_varint(bytes: &mut &[u8], bytes_max: usize) -> anyhow::Result<u64> {
    let mut value = 0;
    for place in 0..bytes_max {
        let (byte, rest) = bytes.split_first().context("a number that is cut off")?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << (place * 7);
        if *byte < 0x80 {
            break;
        }
    }
    Ok(value)
}

/// Numbers with a sign are written with the sign in the last bit.
fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -((number & 1).cast_signed())
}

fn decompressed(bytes: &Bytes, compression: Compression, bytes_max: usize) -> anyhow::Result<Bytes> {
    let read = |decoder: &mut dyn Read| read(decoder, bytes_max);
    match compression {
        Compression::None => Ok(bytes.clone()),
        Compression::Gzip => read(&mut flate2::read::MultiGzDecoder::new(&bytes[..])).context("gzip"),
        Compression::Snappy => unsnapped(bytes, bytes_max).context("snappy"),
        Compression::Lz4 => read(&mut lz4_flex::frame::FrameDecoder::new(&bytes[..])).context("lz4"),
        Compression::Zstd => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(&bytes[..]);
            read(&mut decoder.map_err(|error| anyhow::anyhow!("{error}")).context("zstd")?).context("zstd")
        }
    }
}

fn read(decoder: &mut dyn Read, bytes_max: usize) -> anyhow::Result<Bytes> {
    let mut out = Vec::new();
    decoder.take(bytes_max as u64 + 1).read_to_end(&mut out)?;
    require_room(out.len(), bytes_max)?;
    Ok(out.into())
}

fn require_room(bytes: usize, bytes_max: usize) -> Result<(), TooLarge> {
    if bytes > bytes_max { Err(TooLarge::Content) } else { Ok(()) }
}

/// How snappy-java begins a stream: this, two versions of four bytes, and then blocks with their lengths before them.
const XERIAL: &[u8] = b"\x82SNAPPY\0";
const XERIAL_HEAD: usize = 16;

/// One block, or the blocks of snappy-java.
fn unsnapped(bytes: &Bytes, bytes_max: usize) -> anyhow::Result<Bytes> {
    let mut out = Vec::new();
    if !bytes.starts_with(XERIAL) {
        unsnap(bytes, &mut out, bytes_max)?;
        return Ok(out.into());
    }
    let mut rest = bytes.clone();
    rest.advance(XERIAL_HEAD.min(rest.len()));
    while rest.has_remaining() {
        let length = rest.try_get_u32()? as usize;
        if length > rest.len() {
            bail!("a block of {length} bytes, of which {} are there", rest.len());
        }
        unsnap(&rest.split_to(length), &mut out, bytes_max)?;
    }
    Ok(out.into())
}

/// Adds the content of one block.
fn unsnap(block: &[u8], out: &mut Vec<u8>, bytes_max: usize) -> anyhow::Result<()> {
    let (start, length) = (out.len(), snap::raw::decompress_len(block)?);
    require_room(start.saturating_add(length), bytes_max)?;
    out.resize(start + length, 0);
    snap::raw::Decoder::new().decompress(block, &mut out[start..])?;
    Ok(())
}

#[cfg(test)]
pub(crate) mod tests {
    use std::io::Write as _;

    use bytes::BytesMut;
    use kafka_protocol::indexmap::IndexMap;
    use kafka_protocol::records::{RecordBatchEncoder, RecordEncodeOptions, TimestampType};

    use super::*;

    const MAX: usize = DecodeBudget::MAX.content;

    fn gzip(bytes: &[u8]) -> Bytes {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap().into()
    }

    fn lz4(bytes: &[u8]) -> Bytes {
        let mut encoder = lz4_flex::frame::FrameEncoder::new(Vec::new());
        encoder.write_all(bytes).unwrap();
        encoder.finish().unwrap().into()
    }

    fn zstd(bytes: &[u8]) -> Bytes {
        ruzstd::encoding::compress_to_vec(bytes, ruzstd::encoding::CompressionLevel::Fastest).into()
    }

    fn raw_snappy(bytes: &[u8]) -> Bytes {
        snap::raw::Encoder::new().compress_vec(bytes).unwrap().into()
    }

    fn xerial(bytes: &[u8]) -> Bytes {
        let mut out = [XERIAL, &[0, 0, 0, 1, 0, 0, 0, 1]].concat();
        for block in bytes.chunks(1 << 20) {
            let block = raw_snappy(block);
            out.extend(u32::try_from(block.len()).unwrap().to_be_bytes());
            out.extend(block);
        }
        out.into()
    }

    type Compress = fn(&[u8]) -> Bytes;

    const CODECS: [(Compression, Compress); 5] = [
        (Compression::Gzip, gzip),
        (Compression::Lz4, lz4),
        (Compression::Zstd, zstd),
        (Compression::Snappy, raw_snappy),
        (Compression::Snappy, xerial),
    ];

    #[test]
    fn what_was_compressed_is_read() {
        let text = "a long text ".repeat(200_000);
        for (compression, compress) in CODECS {
            let compressed = compress(text.as_bytes());
            assert!(compressed.len() < text.len());
            assert_eq!(decompressed(&compressed, compression, MAX).unwrap(), text, "{compression:?}");
        }
    }

    #[test]
    fn a_batch_that_becomes_too_large_is_refused() {
        let zeros = vec![0; MAX + 1];
        for (compression, compress) in CODECS {
            let error = decompressed(&compress(&zeros), compression, MAX).unwrap_err();
            assert!(
                format!("{error:#}").contains("becomes more than 67108864 bytes"),
                "{compression:?}: {error:#}"
            );
            let most = &zeros[1..];
            assert_eq!(
                decompressed(&compress(most), compression, MAX).unwrap().len(),
                most.len(),
                "{compression:?}"
            );
        }
    }

    #[test]
    fn what_is_cut_off_or_damaged_is_an_error_and_no_panic() {
        let text = "a long text ".repeat(100);
        for (compression, compress) in CODECS {
            let whole = compress(text.as_bytes());
            for length in 0..whole.len() {
                let cut = decompressed(&whole.slice(..length), compression, MAX);
                let is_begin = |cut: Bytes| text.as_bytes().starts_with(&cut);
                assert!(cut.map_or(true, is_begin), "{compression:?}: {length} bytes");
            }
            for place in 0..whole.len() {
                let mut damaged = whole.to_vec();
                damaged[place] ^= 0xff;
                // The batch's checksum finds what is only another text.
                let _ = decompressed(&damaged.into(), compression, MAX);
            }
        }
    }

    /// A batch with one record for each value, compressed with gzip or not at all.
    pub(crate) fn encoded(first_offset: i64, values: &[Bytes], compression: Compression) -> Bytes {
        let record = |(place, value): (i32, &Bytes)| Record {
            transactional: false,
            control: false,
            delete_horizon: false,
            partition_leader_epoch: 0,
            producer_id: -1,
            producer_epoch: -1,
            timestamp_type: TimestampType::Creation,
            offset: first_offset + i64::from(place),
            sequence: place,
            timestamp: 1,
            key: None,
            value: Some(value.clone()),
            headers: IndexMap::new(),
        };
        let records: Vec<Record> = (0..).zip(values).map(record).collect();
        let compress = |from: &mut BytesMut, to: &mut BytesMut, compression: Compression| {
            let from = from.split();
            to.extend_from_slice(&if compression == Compression::None { from.freeze() } else { gzip(&from) });
            Ok(())
        };
        let options = RecordEncodeOptions { version: 2, compression };
        let mut bytes = BytesMut::new();
        RecordBatchEncoder::encode_with_custom_compression(&mut bytes, &records, &options, Some(compress))
            .unwrap();
        bytes.freeze()
    }

    fn batch(values: &[Bytes], compression: Compression) -> StoredBatch {
        take_first(&mut encoded(0, values, compression)).unwrap().unwrap()
    }

    pub(crate) fn zeros(megabytes: usize) -> Bytes {
        vec![0; megabytes << 20].into()
    }

    /// Without a budget of their response, batches of a few kilobytes each take any amount of memory.
    #[test]
    fn the_batches_of_a_response_have_one_budget() {
        let mut budget = DecodeBudget::MAX;
        let large = batch(&[zeros(40)], Compression::Gzip);
        assert!(large.bytes.len() < 1 << 20, "{}", large.bytes.len());
        assert_eq!(large.clone().records(&mut budget).unwrap().len(), 1);
        assert!(!budget.is_half_left());
        let left = budget;
        assert_eq!(large.clone().records(&mut budget), Err(BatchError::NoRoom));
        assert_eq!(budget, left, "what was not decoded is not taken off");
        // A smaller one fits, and what is not compressed is in memory already.
        assert!(batch(&[zeros(20)], Compression::Gzip).records(&mut budget).is_ok());
        assert!(batch(&[zeros(40)], Compression::None).records(&mut budget).is_ok());
        assert!(large.records(&mut DecodeBudget::MAX.clone()).is_ok(), "the next budget");
    }

    #[test]
    fn a_batch_that_no_budget_has_room_for_is_unreadable() {
        let large = batch(&[zeros(65)], Compression::Gzip);
        let mut budget = DecodeBudget::MAX;
        budget.take(1, 0).unwrap();
        assert_eq!(large.clone().records(&mut budget), Err(BatchError::NoRoom));
        let error = large.records(&mut DecodeBudget::MAX.clone()).unwrap_err();
        assert_eq!(
            error,
            BatchError::Unreadable("gzip: a compressed batch becomes more than 67108864 bytes".into())
        );
    }

    /// Records of seven bytes, which the codec makes more than 200 bytes each.
    #[test]
    fn many_small_records_are_counted_by_the_memory_that_they_take() {
        let count = DecodeBudget::MAX.records / size_of::<Record>() + 1;
        assert!(count < MAX / 10, "their content would fit");
        let bytes = [6 << 1, 0, 0, 0, 1, 1, 0].repeat(count);
        let info = |count: usize| BatchDecodeInfo {
            record_count: i32::try_from(count).unwrap(),
            ..batch(&[Bytes::new()], Compression::None).info
        };
        let most = record_memory(&bytes, &info(count - 1)).unwrap();
        assert!(DecodeBudget::MAX.clone().take(0, most).is_ok());
        let more = record_memory(&bytes, &info(count)).unwrap();
        assert!(matches!(DecodeBudget::MAX.clone().take(0, more), Err(TooLarge::Records)));
    }

    /// The codec reserves memory for as many headers as a record claims.
    #[test]
    fn more_headers_than_a_record_has_room_for_are_refused() {
        let info = batch(&[Bytes::new()], Compression::None).info;
        // Length, attributes, time, offset, no key, no value, and the count of headers.
        let record = |count: &[u8], rest: &[u8]| {
            let body = [&[0, 0, 0, 1, 1], count, rest].concat();
            [&[u8::try_from(body.len() << 1).unwrap()], &body[..], &[0; 100]].concat()
        };
        let one_header = [2, b'a', 1];
        let found = record_memory(&record(&[2], &one_header), &info).unwrap();
        assert_eq!(found, size_of::<Record>() + HEADER_MEMORY);
        // 2,147,483,647 of them, as many as bytes, and a negative count.
        for count in [&[0xfe, 0xff, 0xff, 0xff, 0x0f][..], &[6], &[1]] {
            let error = record_memory(&record(count, &one_header), &info).unwrap_err();
            assert!(format!("{error:#}").contains("headers"), "{error:#}");
        }
    }

    #[test]
    fn what_is_cut_off_inside_of_a_record_is_an_error_and_no_panic() {
        let info = batch(&[Bytes::new()], Compression::None).info;
        let record = [22, 0, 0, 0, 2, b'k', 2, b'v', 2, 2, b'a', 1];
        assert!(record_memory(&record, &info).is_ok());
        for length in 0..record.len() {
            assert!(record_memory(&record[..length], &info).is_err(), "{length} bytes");
        }
        for place in 0..record.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut damaged = record;
                damaged[place] = value;
                let _ = record_memory(&damaged, &info);
            }
        }
        // The largest time and the largest offset, and one more.
        let last = BatchDecodeInfo { min_offset: i64::MAX, min_timestamp: i64::MAX, ..info };
        assert!(record_memory(&record, &last).is_ok());
        for place in [2, 3] {
            let mut later = record;
            later[place] = 2;
            assert!(record_memory(&later, &last).is_err());
        }
    }

    #[test]
    fn numbers_of_variable_length_are_those_of_the_codec() {
        for (bytes, number) in [
            (&[0][..], 0),
            (&[1], -1),
            (&[2], 1),
            (&[0x80, 0x01], 64),
            (&[0xfe, 0xff, 0xff, 0xff, 0x0f], i32::MAX),
            (&[0xff, 0xff, 0xff, 0xff, 0x0f], i32::MIN),
            (&[0xff, 0xff, 0xff, 0xff, 0xff], i32::MIN),
        ] {
            assert_eq!(take_number(&mut &*bytes).unwrap(), number, "{bytes:?}");
        }
    }
}
