//! Responses whose claimed lengths exceed the response itself are refused before memory is reserved for them.
//!
//! The codec reserves room for as many elements as an array claims, before it reads the first one. So each response is
//! decoded twice. The first time from a [`Claims`], which knows how much of the response is left, and gives a number that
//! is larger than that as one more than that: no array can have so many elements, because each takes at least one byte, and
//! so the decoding fails at the response's end. It does not matter that other numbers are changed too, for the first result
//! is dropped. What passes claims nothing that is not there, and is then decoded as it is.

use std::ops::Range;

use bytes::{Buf, Bytes, TryGetError};
use kafka_protocol::protocol::Decodable;
use kafka_protocol::protocol::buf::ByteBuf;

/// Decodes a response.
pub(super) fn decode<T: Decodable>(mut body: Bytes, version: i16) -> Result<T, String> {
    let mut claims = Claims { rest: body.clone(), patch: [0; VARINT_BYTES_MAX], patched: 0..0 };
    T::decode(&mut claims, version).map_err(|error| format!("a length that is not there: {error}"))?;
    T::decode(&mut body, version).map_err(|error| error.to_string())
}

/// Of a 32-bit number, seven bits in each byte.
const VARINT_BYTES_MAX: usize = 5;

/// A response that does not tell larger numbers than it has bytes left.
struct Claims {
    rest: Bytes,
    /// Bytes of a number of variable length that are given instead of the next ones.
    patch: [u8; VARINT_BYTES_MAX],
    patched: Range<usize>,
}

impl Claims {
    /// If a number of variable length that is too large begins here: prepares as many bytes with a smaller one.
    fn patch(&mut self) {
        let (mut value, mut length) = (0_u32, 0);
        for byte in self.rest.iter().take(VARINT_BYTES_MAX) {
            value |= u32::from(byte & 0x7f) << (length * 7);
            length += 1;
            if *byte < 0x80 {
                break;
            }
        }
        // The codec takes one from the number of an array's elements.
        let limit = u32::try_from(self.rest.len() - length + 2).unwrap_or(u32::MAX);
        if length < 2 || value <= limit {
            return;
        }
        for place in 0..length {
            let more = if place + 1 < length { 0x80 } else { 0 };
            self.patch[place] = (limit >> (place * 7)) as u8 & 0x7f | more;
        }
        self.patched = 0..length;
    }
}

impl Buf for Claims {
    fn remaining(&self) -> usize {
        self.rest.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.rest
    }

    fn advance(&mut self, count: usize) {
        self.rest.advance(count);
    }

    /// Lengths before version 4 or so, and other numbers.
    fn try_get_i32(&mut self) -> Result<i32, TryGetError> {
        let value = self.rest.try_get_i32()?;
        let limit = i32::try_from(self.rest.len()).unwrap_or(i32::MAX).saturating_add(1);
        Ok(value.min(limit))
    }

    /// The codec reads numbers of variable length byte by byte.
    fn try_get_u8(&mut self) -> Result<u8, TryGetError> {
        if self.patched.is_empty() && !self.rest.is_empty() {
            self.patch();
        }
        let own = self.rest.try_get_u8()?;
        Ok(self.patched.next().map_or(own, |place| self.patch[place]))
    }
}

impl ByteBuf for Claims {
    fn peek_bytes(&mut self, range: Range<usize>) -> Bytes {
        self.rest.slice(range)
    }

    fn get_bytes(&mut self, size: usize) -> Bytes {
        self.rest.split_to(size)
    }
}

#[cfg(test)]
mod tests {
    use bytes::{BufMut as _, BytesMut};
    use kafka_protocol::messages::{ApiVersionsResponse, ListTransactionsResponse, MetadataResponse};
    use kafka_protocol::messages::{ProduceResponse, SaslHandshakeResponse};

    use super::*;

    /// A claim of more than four thousand million elements, and one of 2,000 million.
    const COMPACT: [u8; 5] = [0xff, 0xff, 0xff, 0xff, 0x0f];
    const PLAIN: [u8; 4] = [0x7f, 0xff, 0xff, 0xff];

    fn refuse<T: Decodable>(name: &str, version: i16, parts: &[&[u8]]) {
        let refused = decode::<T>(Bytes::from(parts.concat()), version);
        let error = refused.err().unwrap_or_else(|| panic!("{name} was taken"));
        assert!(error.starts_with("a length that is not there"), "{name}: {error}");
    }

    /// Without the first decoding each of these ends the process: no machine has the memory that is claimed.
    #[test]
    fn what_is_claimed_must_be_there() {
        let filler = vec![1; 40_000];
        for rest in [&[][..], &filler[..]] {
            refuse::<ApiVersionsResponse>("versions", 3, &[&[0, 0], &COMPACT, rest]);
            // One version, no throttling, and a tag with the features.
            let tag = [2, 0, 18, 0, 0, 0, 4, 0, 0, 0, 0, 0, 1, 2, 5];
            refuse::<ApiVersionsResponse>("features", 3, &[&[0, 0], &tag, &COMPACT, rest]);
            refuse::<MetadataResponse>("brokers", 12, &[&[0; 4], &COMPACT, rest]);
            refuse::<MetadataResponse>("old brokers", 8, &[&[0; 4], &PLAIN, rest]);
            refuse::<ProduceResponse>("topics", 12, &[&COMPACT, rest]);
            refuse::<ProduceResponse>("old topics", 8, &[&PLAIN, rest]);
            refuse::<SaslHandshakeResponse>("mechanisms", 1, &[&[0, 0], &PLAIN, rest]);
            // Elements of one byte, so that as many as there are bytes could be there.
            refuse::<ListTransactionsResponse>("filters", 1, &[&[0; 6], &COMPACT, rest]);
        }
        // Inside of an element that is there.
        let topic = [0, 0, 0, 1, 0, 1, b't'];
        refuse::<ProduceResponse>("partitions", 8, &[&topic, &PLAIN, &filler]);
    }

    /// As Kafka writes it: numbers above the response's size are no claims.
    fn metadata(brokers: u16) -> Vec<u8> {
        let mut body = BytesMut::new();
        body.put_i32(i32::MAX);
        let claimed = brokers + 1;
        body.put_slice(&[(claimed & 0x7f) as u8 | 0x80, (claimed >> 7) as u8]);
        for node in 0..brokers {
            body.put_i32(i32::MAX - i32::from(node));
            body.put_slice(b"\x05host");
            body.put_i32(9_092);
            // No rack, no tags.
            body.put_slice(&[0, 0]);
        }
        // A name of 200 bytes, the controller, no topics, no tags.
        body.put_slice(&[0xc9, 0x01]);
        body.put_slice(&[b'c'; 200]);
        body.put_i32(i32::MAX);
        body.put_slice(&[1, 0]);
        body.to_vec()
    }

    #[test]
    fn what_is_there_is_read_as_it_is() {
        let body = metadata(1_000);
        let read: MetadataResponse = decode(body.clone().into(), 12).unwrap();
        assert_eq!((read.throttle_time_ms, read.controller_id.0), (i32::MAX, i32::MAX));
        assert_eq!((read.brokers.len(), read.brokers[999].node_id.0), (1_000, i32::MAX - 999));
        assert_eq!(read.brokers[7].host.as_str(), "host");
        assert_eq!(read.cluster_id.unwrap().len(), 200);
        // A part of it is refused, whatever part it is.
        for length in (0..body.len()).step_by(97) {
            assert!(
                decode::<MetadataResponse>(body[..length].to_vec().into(), 12).is_err(),
                "{length} bytes"
            );
        }
    }
}
