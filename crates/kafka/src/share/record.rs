//! Records: from the bytes of a fetch to deliveries, and the headers of their copies.

use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use hapax_core::{
    Attribute, AttributeValue, Attributes, Delivery, Fence, GroupId, IdempotencyKey, KeySource, MessageId,
    Priority,
};
use kafka_protocol::records::Record as WireRecord;

use super::state::{Held, Place};

/// Headers of copies in the retry topic and in the dead-letter topic.
pub mod headers {
    /// Identity of the effect; the same in all copies.
    pub const KEY: &str = hapax_core::message::IDEMPOTENCY_KEY_ATTRIBUTE;
    /// Where the record was first: `topic id/partition/offset`.
    pub const ORIGIN: &str = "hapax-origin";
    /// The topic where the record was first.
    pub const TOPIC: &str = "hapax-topic";
    /// Attempts before this copy.
    pub const ATTEMPTS: &str = "hapax-attempts";
    /// Deliveries before this copy.
    pub const DELIVERIES: &str = "hapax-deliveries";
    /// A copy in the retry topic is not delivered before this time, in milliseconds since 1970.
    pub const NOT_BEFORE: &str = "hapax-not-before";
    /// The last error, or the reason of the rejection.
    pub const ERROR: &str = "hapax-error";
    /// Why it is dead: `retry`, `rejected`, `expired` or `in-doubt`.
    pub const CAUSE: &str = "hapax-dead-cause";
    /// When it died, in milliseconds since 1970.
    pub const DIED: &str = "hapax-died-ms";
}

/// The attributes that name a record's place and key.
const TOPIC_ATTRIBUTE: &str = "kafka-topic";
const PARTITION_ATTRIBUTE: &str = "kafka-partition";
const OFFSET_ATTRIBUTE: &str = "kafka-offset";
const KEY_ATTRIBUTE: &str = "kafka-key";

/// A record and what its copies carry on.
#[derive(Debug)]
pub(super) struct ShareRecord {
    pub key: Option<Bytes>,
    pub value: Option<Bytes>,
    pub headers: Vec<(String, Option<Bytes>)>,
    pub timestamp_ms: i64,
    /// The topic where it was first.
    pub topic: Arc<str>,
    /// Where it was first.
    pub origin: String,
    pub id: MessageId,
    pub effect: (IdempotencyKey, KeySource),
    /// Attempts and deliveries before it was copied here.
    pub before: (u32, u32),
    /// It is not delivered before this time.
    pub not_before_ms: Option<u64>,
    received_ms: u64,
    place: Place,
}

/// Clones share one record.
#[derive(Debug, Clone)]
pub(super) struct SharedRecord(Arc<ShareRecord>);

impl Deref for SharedRecord {
    type Target = ShareRecord;

    fn deref(&self) -> &ShareRecord {
        &self.0
    }
}

impl SharedRecord {
    /// A record at its place. Only those of the retry topic (`is_copy`) are believed what their headers say.
    pub fn new(record: WireRecord, place: Place, topic: &Arc<str>, is_copy: bool) -> Self {
        let mut headers: Vec<(String, Option<Bytes>)> =
            record.headers.into_iter().map(|(name, value)| (name.to_string(), value)).collect();
        let find = |name: &str| {
            let value = headers.iter().find(|(found, _)| is_copy && found == name)?.1.as_ref()?;
            std::str::from_utf8(value).ok().map(str::to_owned)
        };
        let number = |name: &str| find(name).and_then(|text| text.parse::<u64>().ok());
        let small = |name: &str| number(name).and_then(|count| u32::try_from(count).ok()).unwrap_or(0);
        let own = format!("{}/{}/{}", place.partition.0, place.partition.1, place.offset);
        let origin = find(headers::ORIGIN).filter(|origin| parse_origin(origin).is_some()).unwrap_or(own);
        let before = (small(headers::ATTEMPTS), small(headers::DELIVERIES));
        let not_before_ms = number(headers::NOT_BEFORE);
        let topic = find(headers::TOPIC).map_or_else(|| topic.clone(), Into::into);
        let key = headers.iter().find(|(name, _)| name == headers::KEY).and_then(|(_, value)| value.as_ref());
        let key = key.and_then(|value| std::str::from_utf8(value).ok());
        let effect = match key.and_then(|key| IdempotencyKey::new(key).ok()) {
            Some(key) if key.as_str() == origin => (key, KeySource::MessageId),
            Some(key) => (key, KeySource::Attribute),
            None => (own_key(&origin), KeySource::MessageId),
        };
        if is_copy {
            let ours = [headers::ORIGIN, headers::TOPIC, headers::ATTEMPTS, headers::DELIVERIES];
            headers.retain(|(name, _)| !ours.contains(&name.as_str()) && name != headers::NOT_BEFORE);
        }
        let id = message_id(&origin);
        Self(Arc::new(ShareRecord {
            key: record.key,
            value: record.value,
            headers,
            timestamp_ms: record.timestamp,
            topic,
            origin,
            id,
            effect,
            before,
            not_before_ms,
            received_ms: now_ms(),
            place,
        }))
    }

    /// The delivery of a record that is locked.
    pub fn delivery(&self, held: &Held) -> Delivery {
        let body = self.value.clone().unwrap_or_default();
        let (key, key_source) = self.effect.clone();
        let group = self.key.as_ref().and_then(|key| std::str::from_utf8(key).ok());
        Delivery {
            id: self.id,
            attributes: self.attributes(),
            receipt: held.receipt.clone(),
            fence: next_fence(),
            attempt: held.attempt,
            deliveries: held.deliveries,
            lease_ms: held.left_ms(),
            sent_ms: u64::try_from(self.timestamp_ms).unwrap_or(0),
            first_received_ms: self.received_ms,
            sequence: u64::try_from(self.place.offset).unwrap_or(0),
            group: group.and_then(|group| GroupId::new(group).ok()),
            dedup: None,
            priority: Priority::default(),
            key,
            key_source,
            dead: None,
            body,
        }
    }

    fn attributes(&self) -> Attributes {
        let attribute = |value: &Option<Bytes>| {
            let bytes = value.clone().unwrap_or_default();
            match std::str::from_utf8(&bytes) {
                Ok(text) => Attribute::text(text),
                Err(_) => Attribute { data_type: "Binary".into(), value: AttributeValue::Binary(bytes) },
            }
        };
        let mut attributes: Attributes =
            self.headers.iter().map(|(name, value)| (name.clone(), attribute(value))).collect();
        attributes.insert(TOPIC_ATTRIBUTE.into(), Attribute::text(&*self.topic));
        let (_, partition) = self.place.partition;
        attributes.insert(PARTITION_ATTRIBUTE.into(), Attribute::text(partition.to_string()));
        attributes.insert(OFFSET_ATTRIBUTE.into(), Attribute::text(self.place.offset.to_string()));
        if self.key.is_some() {
            attributes.insert(KEY_ATTRIBUTE.into(), attribute(&self.key));
        }
        attributes
    }
}

/// The key of a record whose sender gave it none.
fn own_key(origin: &str) -> IdempotencyKey {
    IdempotencyKey::new(origin).expect("digits, dashes and slashes")
}

fn parse_origin(origin: &str) -> Option<(u128, i32, i64)> {
    let mut parts = origin.split('/');
    let topic: MessageId = parts.next()?.parse().ok()?;
    let (partition, offset) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    parts.next().is_none().then_some((topic.0, partition, offset))
}

/// A record's id: the topic's id, which is random, with partition and offset.
fn message_id(origin: &str) -> MessageId {
    let (topic, partition, offset) = parse_origin(origin).unwrap_or_default();
    MessageId(topic ^ (u128::from(partition.cast_unsigned()) << 64) ^ u128::from(offset.cast_unsigned()))
}

/// Grows with every delivery of this process.
fn next_fence() -> Fence {
    static LAST: AtomicU64 = AtomicU64::new(0);
    let now_us = now_ms().saturating_mul(1_000);
    let next = |last: u64| Some(Fence(last).next(now_us).0);
    let last = LAST.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).unwrap_or(now_us);
    Fence(last).next(now_us)
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
