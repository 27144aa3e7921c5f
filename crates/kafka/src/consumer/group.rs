//! The identity of a member in its group. librdkafka gives it away only in a form that its own producer reads.
#![allow(unsafe_code)]

use std::ptr;

use rdkafka::consumer::Consumer as _;

use super::poller::Native;
use crate::partition::GroupMetadata;

/// The identity at this moment; `None` if librdkafka has none.
pub(super) fn metadata(consumer: &Native) -> Option<GroupMetadata> {
    read(&serialized(consumer)?)
}

fn serialized(consumer: &Native) -> Option<Vec<u8>> {
    let client = consumer.client().native_ptr();
    // SAFETY: the client lives as long as the consumer that is borrowed. What librdkafka returns is owned here, checked for
    // null, copied, and freed once with the function that its documentation names.
    unsafe {
        let metadata = rdkafka_sys::rd_kafka_consumer_group_metadata(client);
        if metadata.is_null() {
            return None;
        }
        let (mut buffer, mut size) = (ptr::null_mut(), 0);
        let error =
            rdkafka_sys::rd_kafka_consumer_group_metadata_write(metadata, &raw mut buffer, &raw mut size);
        rdkafka_sys::rd_kafka_consumer_group_metadata_destroy(metadata);
        if !error.is_null() {
            rdkafka_sys::rd_kafka_error_destroy(error);
            return None;
        }
        let bytes = std::slice::from_raw_parts(buffer.cast::<u8>(), size).to_vec();
        rdkafka_sys::rd_kafka_mem_free(client, buffer);
        Some(bytes)
    }
}

/// `CGMDv2:`, the generation in the machine's byte order, the group and the member, each ended by a zero, a byte that is 1 if
/// there is no instance, and the instance ended by a zero.
fn read(bytes: &[u8]) -> Option<GroupMetadata> {
    let rest = bytes.strip_prefix(b"CGMDv2:")?;
    let (generation, rest) = rest.split_first_chunk::<4>()?;
    let (group, rest) = text(rest)?;
    let (member, rest) = text(rest)?;
    let (no_instance, rest) = rest.split_first()?;
    let instance = if *no_instance == 0 { Some(text(rest)?.0) } else { None };
    Some(GroupMetadata { group, member, generation: i32::from_ne_bytes(*generation), instance })
}

fn text(bytes: &[u8]) -> Option<(String, &[u8])> {
    let end = bytes.iter().position(|byte| *byte == 0)?;
    Some((String::from_utf8(bytes[..end].to_vec()).ok()?, &bytes[end + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_that_librdkafka_writes_is_read() {
        let mut bytes = b"CGMDv2:".to_vec();
        bytes.extend(7i32.to_ne_bytes());
        bytes.extend(b"orders\0member-1\0\x01");
        let expected = GroupMetadata {
            group: "orders".into(),
            member: "member-1".into(),
            generation: 7,
            instance: None,
        };
        assert_eq!(read(&bytes), Some(expected.clone()));
        for cut in 0..bytes.len() {
            assert_eq!(read(&bytes[..cut]), None, "{cut} bytes");
        }
        *bytes.last_mut().unwrap() = 0;
        bytes.extend(b"instance-1\0");
        assert_eq!(read(&bytes), Some(GroupMetadata { instance: Some("instance-1".into()), ..expected }));
    }
}
