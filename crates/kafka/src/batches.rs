//! Record batches as a broker stores them. The codec decodes them; this bounds what a batch may claim, and decompresses.

use std::io::Read;

use anyhow::{Context as _, bail};
use bytes::{Buf as _, Bytes};
use kafka_protocol::records::{BatchDecodeInfo, Compression, Record, RecordBatchDecoder};

/// Offset, length, and what the length does not count.
const HEAD: usize = 12;
/// Where the distance from the first offset to the last one stands.
const LAST_DELTA: std::ops::Range<usize> = 23..27;
/// The bytes that a record has at least; the codec reserves memory for as many as the batch claims.
const RECORD_BYTES_MIN: usize = 7;
/// What a compressed batch may become. Kafka's default for a batch is 1 MiB.
const DECOMPRESSED_BYTES_MAX: usize = 64 << 20;

/// A whole batch of a response.
#[derive(Debug)]
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
    /// Its records. The codec compares its checksum.
    pub fn records(mut self) -> Result<Vec<Record>, String> {
        let claimed = self.info.record_count;
        let decompress = |bytes: &mut Bytes, compression: Compression| {
            let bytes = decompressed(bytes, compression)?;
            if usize::try_from(claimed).map_or(true, |count| count > bytes.len() / RECORD_BYTES_MIN) {
                bail!("a batch of {} bytes claims {claimed} records", bytes.len());
            }
            Ok(bytes)
        };
        let decoded = RecordBatchDecoder::decode_with_custom_compression(&mut self.bytes, Some(decompress));
        decoded.map(|set| set.records).map_err(|error| format!("{error:#}"))
    }
}

fn decompressed(bytes: &Bytes, compression: Compression) -> anyhow::Result<Bytes> {
    match compression {
        Compression::None => Ok(bytes.clone()),
        Compression::Gzip => read(flate2::read::MultiGzDecoder::new(&bytes[..])).context("gzip"),
        Compression::Snappy => unsnapped(bytes).context("snappy"),
        Compression::Lz4 => read(lz4_flex::frame::FrameDecoder::new(&bytes[..])).context("lz4"),
        Compression::Zstd => {
            let decoder = ruzstd::decoding::StreamingDecoder::new(&bytes[..]);
            read(decoder.map_err(|error| anyhow::anyhow!("{error}")).context("zstd")?).context("zstd")
        }
    }
}

fn read(decoder: impl Read) -> anyhow::Result<Bytes> {
    let mut out = Vec::new();
    decoder.take(DECOMPRESSED_BYTES_MAX as u64 + 1).read_to_end(&mut out)?;
    require_room(out.len())?;
    Ok(out.into())
}

fn require_room(bytes: usize) -> anyhow::Result<()> {
    if bytes > DECOMPRESSED_BYTES_MAX {
        bail!("a compressed batch becomes more than {DECOMPRESSED_BYTES_MAX} bytes");
    }
    Ok(())
}

/// How snappy-java begins a stream: this, two versions of four bytes, and then blocks with their lengths before them.
const XERIAL: &[u8] = b"\x82SNAPPY\0";
const XERIAL_HEAD: usize = 16;

/// One block, or the blocks of snappy-java.
fn unsnapped(bytes: &Bytes) -> anyhow::Result<Bytes> {
    let mut out = Vec::new();
    if !bytes.starts_with(XERIAL) {
        unsnap(bytes, &mut out)?;
        return Ok(out.into());
    }
    let mut rest = bytes.clone();
    rest.advance(XERIAL_HEAD.min(rest.len()));
    while rest.has_remaining() {
        let length = rest.try_get_u32()? as usize;
        if length > rest.len() {
            bail!("a block of {length} bytes, of which {} are there", rest.len());
        }
        unsnap(&rest.split_to(length), &mut out)?;
    }
    Ok(out.into())
}

/// Adds the content of one block.
fn unsnap(block: &[u8], out: &mut Vec<u8>) -> anyhow::Result<()> {
    let (start, length) = (out.len(), snap::raw::decompress_len(block)?);
    require_room(start.saturating_add(length))?;
    out.resize(start + length, 0);
    snap::raw::Decoder::new().decompress(block, &mut out[start..])?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

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

    const CODECS: [(Compression, fn(&[u8]) -> Bytes); 5] = [
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
            assert_eq!(decompressed(&compressed, compression).unwrap(), text, "{compression:?}");
        }
    }

    #[test]
    fn a_batch_that_becomes_too_large_is_refused() {
        let zeros = vec![0; DECOMPRESSED_BYTES_MAX + 1];
        for (compression, compress) in CODECS {
            let error = decompressed(&compress(&zeros), compression).unwrap_err();
            assert!(
                format!("{error:#}").contains("becomes more than 67108864 bytes"),
                "{compression:?}: {error:#}"
            );
            let most = &zeros[1..];
            assert_eq!(
                decompressed(&compress(most), compression).unwrap().len(),
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
                let cut = decompressed(&whole.slice(..length), compression);
                let is_begin = |cut: Bytes| text.as_bytes().starts_with(&cut);
                assert!(cut.map_or(true, is_begin), "{compression:?}: {length} bytes");
            }
            for place in 0..whole.len() {
                let mut damaged = whole.to_vec();
                damaged[place] ^= 0xff;
                // The batch's checksum finds what is only another text.
                let _ = decompressed(&damaged.into(), compression);
            }
        }
    }
}
