//! What is sent and what is delivered.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::name::{DedupId, Fence, GroupId, IdempotencyKey, MessageId, Receipt};
use crate::store::DeadLetter;

/// The attribute that carries a message's idempotency key.
pub const IDEMPOTENCY_KEY_ATTRIBUTE: &str = "hapax-idempotency-key";

/// Named values beside the body.
pub type Attributes = BTreeMap<String, Attribute>;

/// One attribute: a value and the type its sender gave it, for example `String`, `Number.int`, `Binary.png`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attribute {
    /// The type, as the sender wrote it.
    pub data_type: String,
    /// The value.
    pub value: AttributeValue,
}

impl Attribute {
    /// A text attribute of type `String`.
    pub fn text(value: impl Into<String>) -> Self {
        Self { data_type: "String".into(), value: AttributeValue::Text(value.into()) }
    }

    /// The text, if it is one.
    pub fn as_text(&self) -> Option<&str> {
        match &self.value {
            AttributeValue::Text(text) => Some(text),
            AttributeValue::Binary(_) => None,
        }
    }
}

/// An attribute's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum AttributeValue {
    /// Text: strings and numbers.
    Text(String),
    /// Bytes; base64 in JSON.
    Binary(#[serde(serialize_with = "to_base64", deserialize_with = "from_base64")] Bytes),
}

impl AttributeValue {
    /// Bytes that count towards the message's size.
    pub fn len(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Binary(bytes) => bytes.len(),
        }
    }

    /// Whether the value is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

fn to_base64<S: Serializer>(bytes: &Bytes, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&STANDARD.encode(bytes))
}

fn from_base64<'de, D: Deserializer<'de>>(from: D) -> Result<Bytes, D::Error> {
    let text = String::deserialize(from)?;
    STANDARD.decode(text).map(Bytes::from).map_err(serde::de::Error::custom)
}

/// How urgent a message is on a standard queue: 0 (default) to 9, higher first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Priority(pub u8);

impl Priority {
    /// The most urgent.
    pub const MAX: Self = Self(9);
}

/// A message to send.
///
/// ```
/// # use hapax_core::{NewMessage, DedupId};
/// let message = NewMessage::new("{\"order\":7}")
///     .dedup(DedupId::new("order-7").unwrap())
///     .delay_ms(2_000);
/// assert_eq!(message.bytes(), 11);
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewMessage {
    /// The payload.
    pub body: Bytes,
    /// Named values beside the body.
    pub attributes: Attributes,
    /// Invisible for so long; the queue's default when `None`.
    pub delay_ms: Option<u64>,
    /// The group; required on FIFO queues.
    pub group: Option<GroupId>,
    /// The sender's identity for this send.
    pub dedup: Option<DedupId>,
    /// Urgency on a standard queue.
    pub priority: Priority,
}

impl NewMessage {
    /// A message with a body and nothing else.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// Hides the message for so long after the send.
    #[must_use]
    pub fn delay_ms(mut self, delay_ms: u64) -> Self {
        self.delay_ms = Some(delay_ms);
        self
    }

    /// Puts the message into a group.
    #[must_use]
    pub fn group(mut self, group: GroupId) -> Self {
        self.group = Some(group);
        self
    }

    /// Names this send, so that repeating it inside the queue's window adds nothing.
    #[must_use]
    pub fn dedup(mut self, dedup: DedupId) -> Self {
        self.dedup = Some(dedup);
        self
    }

    /// Sets the urgency.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Names the intended effect, in the attribute that workers look at first.
    #[must_use]
    pub fn idempotency_key(self, key: &IdempotencyKey) -> Self {
        self.attribute(IDEMPOTENCY_KEY_ATTRIBUTE, Attribute::text(key.as_str()))
    }

    /// Adds an attribute.
    #[must_use]
    pub fn attribute(mut self, name: impl Into<String>, value: Attribute) -> Self {
        self.attributes.insert(name.into(), value);
        self
    }

    /// What counts towards the size limit: body, and the attributes' names, types and values.
    pub fn bytes(&self) -> u64 {
        let attributes =
            self.attributes.iter().map(|(name, a)| name.len() + a.data_type.len() + a.value.len());
        (self.body.len() + attributes.sum::<usize>()) as u64
    }
}

/// Where a delivery's idempotency key came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// The `hapax-idempotency-key` attribute.
    Attribute,
    /// The queue's JSON pointer into the body.
    Body,
    /// The deduplication id.
    DedupId,
    /// The message id: covers redelivery, but not a producer's retry.
    MessageId,
}

/// One handing-out of a message to one consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The message.
    pub id: MessageId,
    /// The payload.
    pub body: Bytes,
    /// Named values beside the body.
    pub attributes: Attributes,
    /// Names this delivery; needed to settle or extend it.
    pub receipt: Receipt,
    /// Grows with every delivery; pass it on to whatever the handler writes to.
    pub fence: Fence,
    /// The attempt's ordinal, from 1: counts against the queue's `retry.max_attempts`.
    pub attempt: u32,
    /// How often the message was handed out, this time included. Always grows: what was deferred or taken back counts
    /// here and is no attempt. SQS: ApproximateReceiveCount.
    pub deliveries: u32,
    /// What is left of the lease.
    pub lease_ms: u64,
    /// When the message was sent, in milliseconds since 1970.
    pub sent_ms: u64,
    /// When the message was first delivered.
    pub first_received_ms: u64,
    /// The message's place in its FIFO queue; grows within the queue.
    pub sequence: u64,
    /// The group.
    pub group: Option<GroupId>,
    /// The deduplication id, given or made from the content.
    pub dedup: Option<DedupId>,
    /// Urgency.
    pub priority: Priority,
    /// Where it came from and why, when this queue holds it as a dead letter.
    pub dead: Option<DeadLetter>,
}

impl Delivery {
    /// The idempotency key and where it comes from, first that is there: the attribute, the queue's pointer into a
    /// JSON body, the deduplication id, the message id.
    ///
    /// A value that is not a valid key (empty, too long, control characters) is passed over.
    pub fn idempotency_key(&self, body_pointer: Option<&str>) -> (IdempotencyKey, KeySource) {
        let dedup = self.dedup.as_ref().map(DedupId::as_str);
        idempotency_key(&self.attributes, &self.body, body_pointer, dedup, self.id)
    }
}

/// A message's idempotency key, as [`Delivery::idempotency_key`] finds it, from the message's parts: for a store that
/// must know it before there is a delivery.
pub fn idempotency_key(
    attributes: &Attributes,
    body: &[u8],
    body_pointer: Option<&str>,
    dedup: Option<&str>,
    id: MessageId,
) -> (IdempotencyKey, KeySource) {
    if let Some(stated) = stated_key(attributes, body, body_pointer) {
        return stated;
    }
    if let Some(key) = dedup.and_then(|dedup| IdempotencyKey::new(dedup).ok()) {
        return (key, KeySource::DedupId);
    }
    (IdempotencyKey::new(id.to_string()).expect("a UUID is a valid key"), KeySource::MessageId)
}

/// The part of [`idempotency_key`] that looks at what the sender wrote: the attribute, then the body.
pub fn stated_key(
    attributes: &Attributes,
    body: &[u8],
    body_pointer: Option<&str>,
) -> Option<(IdempotencyKey, KeySource)> {
    let attribute = attributes.get(IDEMPOTENCY_KEY_ATTRIBUTE).and_then(Attribute::as_text);
    if let Some(key) = attribute.and_then(|text| IdempotencyKey::new(text).ok()) {
        return Some((key, KeySource::Attribute));
    }
    let key = body_pointer.and_then(|pointer| key_in_body(body, pointer))?;
    Some((key, KeySource::Body))
}

fn key_in_body(body: &[u8], pointer: &str) -> Option<IdempotencyKey> {
    let json: serde_json::Value = serde_json::from_slice(body).ok()?;
    match json.pointer(pointer)? {
        serde_json::Value::String(text) => IdempotencyKey::new(text).ok(),
        serde_json::Value::Number(number) => IdempotencyKey::new(number.to_string()).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn delivery(message: NewMessage) -> Delivery {
        Delivery {
            id: MessageId(7),
            body: message.body,
            attributes: message.attributes,
            receipt: Receipt::new("r").unwrap(),
            fence: Fence(1),
            attempt: 1,
            deliveries: 1,
            lease_ms: 1,
            sent_ms: 0,
            first_received_ms: 0,
            sequence: 0,
            group: None,
            dedup: message.dedup,
            priority: Priority(0),
            dead: None,
        }
    }

    #[test]
    fn the_key_is_the_first_source_that_is_there() {
        let dedup = DedupId::new("d").unwrap();
        let key = IdempotencyKey::new("k").unwrap();
        let all = NewMessage::new("{\"order\":{\"id\":42}}").dedup(dedup.clone()).idempotency_key(&key);
        assert_eq!(delivery(all.clone()).idempotency_key(Some("/order/id")), (key, KeySource::Attribute));

        let no_attribute = NewMessage { attributes: Attributes::new(), ..all };
        let (found, source) = delivery(no_attribute.clone()).idempotency_key(Some("/order/id"));
        assert_eq!((found.as_str(), source), ("42", KeySource::Body));
        let (found, source) = delivery(no_attribute).idempotency_key(Some("/missing"));
        assert_eq!((found.as_str(), source), ("d", KeySource::DedupId));
        assert_eq!(delivery(NewMessage::new("x")).idempotency_key(None).1, KeySource::MessageId);
    }

    #[test]
    fn binary_attributes_survive_json() {
        let attribute =
            Attribute { data_type: "Binary".into(), value: AttributeValue::Binary(vec![0, 255, 7].into()) };
        let json = serde_json::to_string(&attribute).unwrap();
        assert_eq!(serde_json::from_str::<Attribute>(&json).unwrap(), attribute);
    }
}
