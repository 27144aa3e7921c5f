//! Requests of share groups.
//!
//! The codec has version 1 of ShareFetch and ShareAcknowledge. Version 2 (Kafka 4.2) adds a strict limit on the number of
//! records (KIP-1206) and the renewal of locks (KIP-1222). It differs by a few bytes at a known place, which are put into
//! what the codec writes, and taken out of what it reads.

use anyhow::{Context as _, Result};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use kafka_protocol::messages::{
    ApiKey, IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse, ShareAcknowledgeRequest,
    ShareAcknowledgeResponse, ShareFetchRequest, ShareFetchResponse, ShareGroupHeartbeatRequest,
    ShareGroupHeartbeatResponse,
};
use kafka_protocol::protocol::buf::{ByteBuf, ByteBufMut};
use kafka_protocol::protocol::{Decodable, Encodable, HeaderVersion, Message, VersionRange};

use crate::wire::Call;

/// The version that is written here.
pub(super) const VERSION: i16 = 2;
/// The version of the codec.
const CODEC: i16 = 1;
/// Both requests and responses have headers with tagged fields.
const REQUEST_HEADER: i16 = 2;
const RESPONSE_HEADER: i16 = 1;
/// A fetch returns at most as many records as were asked for, not whole batches of the producer.
const RECORD_LIMIT: u8 = 1;

impl Call for ShareGroupHeartbeatRequest {
    const KEY: i16 = ApiKey::ShareGroupHeartbeat as i16;
    type Answer = ShareGroupHeartbeatResponse;
}

impl Call for IncrementalAlterConfigsRequest {
    const KEY: i16 = ApiKey::IncrementalAlterConfigs as i16;
    type Answer = IncrementalAlterConfigsResponse;
}

/// ShareFetch in version 2, with a strict limit on the number of records.
pub(super) struct Fetch(pub ShareFetchRequest);

impl Call for Fetch {
    const KEY: i16 = ApiKey::ShareFetch as i16;
    type Answer = Fetched;
}

impl Message for Fetch {
    const VERSIONS: VersionRange = VersionRange { min: VERSION, max: VERSION };
    const DEPRECATED_VERSIONS: Option<VersionRange> = None;
}

impl HeaderVersion for Fetch {
    fn header_version(_: i16) -> i16 {
        REQUEST_HEADER
    }
}

impl Encodable for Fetch {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, _: i16) -> Result<()> {
        let Self(fetch) = self;
        let group = fetch.group_id.as_ref().map(|group| group.len());
        let member = fetch.member_id.as_ref().map(|member| member.len());
        // Before the topics: two names and six numbers. Renewals go with ShareAcknowledge.
        let place = text_bytes(group) + text_bytes(member) + 6 * 4;
        insert(buf, fetch, place, &[RECORD_LIMIT, 0])
    }

    fn compute_size(&self, _: i16) -> Result<usize> {
        Ok(self.0.compute_size(CODEC)? + 2)
    }
}

/// The response to [`Fetch`], whose fields are those of version 1.
pub(super) struct Fetched(pub ShareFetchResponse);

impl HeaderVersion for Fetched {
    fn header_version(_: i16) -> i16 {
        RESPONSE_HEADER
    }
}

impl Decodable for Fetched {
    fn decode<B: ByteBuf>(buf: &mut B, _: i16) -> Result<Self> {
        ShareFetchResponse::decode(buf, CODEC).map(Self)
    }
}

/// ShareAcknowledge in version 2.
pub(super) struct Acknowledge {
    pub request: ShareAcknowledgeRequest,
    /// It renews locks.
    pub renews: bool,
}

impl Call for Acknowledge {
    const KEY: i16 = ApiKey::ShareAcknowledge as i16;
    type Answer = Acknowledged;
}

impl Message for Acknowledge {
    const VERSIONS: VersionRange = VersionRange { min: VERSION, max: VERSION };
    const DEPRECATED_VERSIONS: Option<VersionRange> = None;
}

impl HeaderVersion for Acknowledge {
    fn header_version(_: i16) -> i16 {
        REQUEST_HEADER
    }
}

impl Encodable for Acknowledge {
    fn encode<B: ByteBufMut>(&self, buf: &mut B, _: i16) -> Result<()> {
        let group = self.request.group_id.as_ref().map(|group| group.len());
        let member = self.request.member_id.as_ref().map(|member| member.len());
        let place = text_bytes(group) + text_bytes(member) + 4;
        insert(buf, &self.request, place, &[u8::from(self.renews)])
    }

    fn compute_size(&self, _: i16) -> Result<usize> {
        Ok(self.request.compute_size(CODEC)? + 1)
    }
}

/// The response to [`Acknowledge`].
#[derive(Debug)]
pub(super) struct Acknowledged(pub ShareAcknowledgeResponse);

impl HeaderVersion for Acknowledged {
    fn header_version(_: i16) -> i16 {
        RESPONSE_HEADER
    }
}

impl Decodable for Acknowledged {
    fn decode<B: ByteBuf>(buf: &mut B, _: i16) -> Result<Self> {
        let mut rest = buf.copy_to_bytes(buf.remaining());
        // Before the lock's time: the throttling, the error and its message.
        let message = length(rest.get(6..).unwrap_or_default()).context("a message without an end")?;
        let place = 6 + message;
        let mut before = BytesMut::from(rest.get(..place).context("a response that is cut off")?);
        rest.advance(place);
        rest.try_get_i32().context("a response without the lock's time")?;
        before.put_slice(&rest);
        ShareAcknowledgeResponse::decode(&mut before.freeze(), CODEC).map(Self)
    }
}

/// Writes what the codec writes, with more bytes at a place.
fn insert<B: ByteBufMut>(buf: &mut B, message: &impl Encodable, place: usize, bytes: &[u8]) -> Result<()> {
    let mut encoded = BytesMut::new();
    message.encode(&mut encoded, CODEC)?;
    let encoded: Bytes = encoded.freeze();
    buf.put_slice(&encoded[..place]);
    buf.put_slice(bytes);
    buf.put_slice(&encoded[place..]);
    Ok(())
}

/// The bytes of a text that begins with its length, which is written with seven bits in a byte and counts from 1.
fn text_bytes(length: Option<usize>) -> usize {
    let mut number = length.map_or(0, |length| length + 1);
    let mut bytes = length.unwrap_or(0) + 1;
    while number >= 0x80 {
        number >>= 7;
        bytes += 1;
    }
    bytes
}

/// The bytes of the text that these begin with; `None`: it has no end.
fn length(bytes: &[u8]) -> Option<usize> {
    let mut number = 0usize;
    for (place, byte) in bytes.iter().enumerate().take(5) {
        number |= usize::from(byte & 0x7f) << (7 * place);
        if *byte < 0x80 {
            return Some(place + 1 + number.saturating_sub(1)).filter(|length| *length <= bytes.len());
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use kafka_protocol::messages::share_acknowledge_request::{
        AcknowledgePartition, AcknowledgeTopic, AcknowledgementBatch,
    };

    use super::*;
    use crate::wire::text;

    fn encoded(message: &impl Encodable) -> BytesMut {
        let mut buffer = BytesMut::new();
        message.encode(&mut buffer, VERSION).unwrap();
        assert_eq!(message.compute_size(VERSION).unwrap(), buffer.len());
        buffer
    }

    #[test]
    fn version_2_of_a_fetch_has_mode_and_flag_before_the_topics() {
        let request = ShareFetchRequest::default()
            .with_group_id(Some(text("g").into()))
            .with_member_id(Some(text("m")))
            .with_share_session_epoch(7)
            .with_max_wait_ms(1)
            .with_min_bytes(2)
            .with_max_bytes(3)
            .with_max_records(4)
            .with_batch_size(5);
        let bytes = encoded(&Fetch(request));
        let numbers = [7, 1, 2, 3, 4, 5].map(i32::to_be_bytes).concat();
        let expected = [&[2, b'g', 2, b'm'][..], &numbers, &[1, 0, 1, 1, 0]].concat();
        assert_eq!(bytes, expected);
    }

    #[test]
    fn version_2_of_an_acknowledgement_has_the_flag_before_the_topics() {
        let batch = AcknowledgementBatch::default()
            .with_first_offset(8)
            .with_last_offset(9)
            .with_acknowledge_types(vec![4]);
        let partition =
            AcknowledgePartition::default().with_partition_index(3).with_acknowledgement_batches(vec![batch]);
        let topic = AcknowledgeTopic::default()
            .with_topic_id(uuid::Uuid::from_u128(1))
            .with_partitions(vec![partition]);
        let request = ShareAcknowledgeRequest::default()
            .with_group_id(Some(text("g").into()))
            .with_member_id(Some(text("m")))
            .with_share_session_epoch(7)
            .with_topics(vec![topic]);
        let bytes = encoded(&Acknowledge { request, renews: true });
        let mut expected = BytesMut::new();
        expected.put_slice(&[2, b'g', 2, b'm']);
        expected.put_i32(7);
        expected.put_slice(&[1, 2]);
        expected.put_u128(1);
        expected.put_u8(2);
        expected.put_i32(3);
        expected.put_u8(2);
        expected.put_i64(8);
        expected.put_i64(9);
        expected.put_slice(&[2, 4, 0, 0, 0, 0]);
        assert_eq!(bytes, expected);
    }

    #[test]
    fn version_2_of_a_response_has_the_lock_before_the_topics() {
        let mut bytes = BytesMut::new();
        bytes.put_i32(0);
        bytes.put_i16(121);
        bytes.put_slice(&[3, b'n', b'o']);
        bytes.put_i32(30_000);
        bytes.put_slice(&[1, 1, 0]);
        let response = Acknowledged::decode(&mut bytes.freeze(), VERSION).unwrap();
        let Acknowledged(response) = response;
        assert_eq!((response.error_code, response.error_message), (121, Some(text("no"))));
        assert!(response.responses.is_empty());
        for cut in [&[][..], &[0; 5], &[0, 0, 0, 0, 0, 0, 200], &[0, 0, 0, 0, 0, 0, 0, 1]] {
            assert!(Acknowledged::decode(&mut Bytes::copy_from_slice(cut), VERSION).is_err(), "{cut:?}");
        }
    }

    #[test]
    fn a_long_name_has_a_longer_length() {
        for length in [0, 1, 126, 127, 200, 20_000] {
            let request =
                ShareAcknowledgeRequest::default().with_group_id(Some(text(&"g".repeat(length)).into()));
            // The flag is where the version before has the number of topics.
            let bytes = encoded(&Acknowledge { request, renews: true });
            assert_eq!(bytes[bytes.len() - 3..], [1, 1, 0], "{length}");
        }
    }
}
