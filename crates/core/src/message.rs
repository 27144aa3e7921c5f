//! Messages as they are sent and as they are delivered.

use std::collections::BTreeMap;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::name::{DedupId, Fence, GroupId, IdempotencyKey, MessageId, Receipt};
use crate::store::DeadLetter;

/// The attribute that carries a message's idempotency key.
pub const IDEMPOTENCY_KEY_ATTRIBUTE: &str = "hapax-idempotency-key";

/// Named values sent with the body.
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
    /// The payload; any bytes.
    pub body: Bytes,
    /// Named values sent with the body.
    pub attributes: Attributes,
    /// How long the message stays invisible after the send, at most 15 min; the queue's default when `None`.
    pub delay_ms: Option<u64>,
    /// The message stays invisible until this time, in milliseconds since 1970 by the store's clock; at most 366 days
    /// ahead. Its retention counts from then. Not allowed on FIFO queues, nor together with `delay_ms`.
    pub deliver_at_ms: Option<u64>,
    /// The group; required on FIFO queues.
    pub group: Option<GroupId>,
    /// Deduplication id: identifies this send within the queue's deduplication window.
    pub dedup: Option<DedupId>,
    /// Urgency on a standard queue.
    pub priority: Priority,
}

impl NewMessage {
    /// A message with a body and nothing else.
    pub fn new(body: impl Into<Bytes>) -> Self {
        Self { body: body.into(), ..Self::default() }
    }

    /// Hides the message for this time after the send, at most 15 min.
    #[must_use]
    pub fn delay_ms(mut self, delay_ms: u64) -> Self {
        self.delay_ms = Some(delay_ms);
        self
    }

    /// Hides the message until this time, in milliseconds since 1970; at most 366 days ahead.
    #[must_use]
    pub fn deliver_at_ms(mut self, deliver_at_ms: u64) -> Self {
        self.deliver_at_ms = Some(deliver_at_ms);
        self
    }

    /// Puts the message into a group.
    #[must_use]
    pub fn group(mut self, group: GroupId) -> Self {
        self.group = Some(group);
        self
    }

    /// Sets the deduplication id: a repeated send inside the queue's window adds no second message.
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

    /// Sets the key of the intended effect, in the attribute that workers read first.
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

    /// Bytes that count towards the size limit: the body, and the names, types and values of the attributes. A trace
    /// header of up to [`TRACE_BYTES_MAX`] bytes does not count: load balancers add it and senders do not see it.
    pub fn bytes(&self) -> u64 {
        let counts = |name: &str, a: &Attribute| name != TRACE_ATTRIBUTE || a.value.len() > TRACE_BYTES_MAX;
        let attributes = self.attributes.iter().filter(|(name, a)| counts(name, a));
        let attributes = attributes.map(|(name, a)| name.len() + a.data_type.len() + a.value.len());
        (self.body.len() + attributes.sum::<usize>()) as u64
    }
}

/// The attribute that holds the trace header (`X-Amzn-Trace-Id`) with which a message was sent.
pub const TRACE_ATTRIBUTE: &str = "AWS.TraceHeader";
/// The longest trace header that is kept without counting towards the message's size, in bytes.
pub const TRACE_BYTES_MAX: usize = 1024;

/// Where a message's idempotency key came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum KeySource {
    /// The `hapax-idempotency-key` attribute.
    Attribute,
    /// The queue's JSON pointer into the body.
    Body,
    /// The deduplication id.
    DedupId,
    /// The message id: covers redelivery, but not a producer's retry. A redriven message keeps its key, which is then
    /// the message's former id.
    MessageId,
}

/// A message's idempotency key and where it came from. A store decides it once, when it accepts the message, and keeps
/// it: a key pointer that changes later affects new messages only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MessageKey {
    /// Identity of the intended effect.
    pub key: IdempotencyKey,
    /// Where it came from.
    pub source: KeySource,
}

impl MessageKey {
    /// The key of a message: `explicit` if given (see [`MessageKey::explicit`]), else the deduplication id, else the
    /// message id. This is the only place that decides it.
    ///
    /// ```
    /// # use hapax_core::message::{KeySource, MessageKey};
    /// # use hapax_core::{MessageId, NewMessage};
    /// let message = NewMessage::new(r#"{"order":{"id":42}}"#);
    /// let explicit = MessageKey::explicit(&message.attributes, &message.body, Some("/order/id"));
    /// let key = MessageKey::decide(explicit, None, MessageId(7));
    /// assert_eq!((key.key.as_str(), key.source), ("42", KeySource::Body));
    /// ```
    pub fn decide(explicit: Option<Self>, dedup: Option<&str>, id: MessageId) -> Self {
        if let Some(explicit) = explicit {
            return explicit;
        }
        if let Some(key) = dedup.and_then(|dedup| IdempotencyKey::new(dedup).ok()) {
            return Self { key, source: KeySource::DedupId };
        }
        Self { key: id.into(), source: KeySource::MessageId }
    }

    /// The key that the sender wrote: the `hapax-idempotency-key` attribute, else the value at the queue's pointer into
    /// a JSON body. A value that is not a valid key (empty, too long, control characters) is ignored.
    pub fn explicit(attributes: &Attributes, body: &[u8], key_pointer: Option<&str>) -> Option<Self> {
        let attribute = attributes.get(IDEMPOTENCY_KEY_ATTRIBUTE).and_then(Attribute::as_text);
        if let Some(key) = attribute.and_then(|text| IdempotencyKey::new(text).ok()) {
            return Some(Self { key, source: KeySource::Attribute });
        }
        let key = key_pointer.and_then(|pointer| key_in_body(body, pointer))?;
        Some(Self { key, source: KeySource::Body })
    }
}

/// One delivery of a message to one consumer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    /// The message.
    pub id: MessageId,
    /// The payload.
    pub body: Bytes,
    /// Named values sent with the body.
    pub attributes: Attributes,
    /// Identifies this delivery; needed to settle or extend it.
    pub receipt: Receipt,
    /// Grows with every delivery; pass it to every system that the handler writes to.
    pub fence: Fence,
    /// The attempt's ordinal, from 1: counts against the queue's `retry.max_attempts`.
    pub attempt: u32,
    /// How often the message was delivered, this delivery included. Unlike `attempt` it always grows: a delivery that
    /// was deferred or taken back counts here, but not as an attempt. SQS: ApproximateReceiveCount.
    pub deliveries: u32,
    /// Time left of the lease.
    pub lease_ms: u64,
    /// When the message was sent, in milliseconds since 1970.
    pub sent_ms: u64,
    /// When the message was first delivered.
    pub first_received_ms: u64,
    /// The message's position in its FIFO queue; grows within the queue.
    pub sequence: u64,
    /// The group.
    pub group: Option<GroupId>,
    /// The deduplication id, given by the sender or computed from the content.
    pub dedup: Option<DedupId>,
    /// Urgency.
    pub priority: Priority,
    /// Identity of the intended effect, decided when the message was sent. It stays the same in every delivery, in the
    /// dead letters and after a redrive.
    pub key: IdempotencyKey,
    /// Where the key came from.
    pub key_source: KeySource,
    /// The message's origin and the cause of its death, when this queue holds it as a dead letter.
    pub dead: Option<DeadLetter>,
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

    #[test]
    fn the_key_is_the_first_source_that_is_there() {
        let key = IdempotencyKey::new("k").unwrap();
        let all = NewMessage::new("{\"order\":{\"id\":42}}").idempotency_key(&key);
        let plain = NewMessage { attributes: Attributes::new(), ..all.clone() };
        let decide = |message: &NewMessage, pointer: Option<&str>, dedup: Option<&str>| {
            let explicit = MessageKey::explicit(&message.attributes, &message.body, pointer);
            let decided = MessageKey::decide(explicit, dedup, MessageId(7));
            (decided.key.as_str().to_owned(), decided.source)
        };
        let found = |key: &str, source| (key.to_owned(), source);
        assert_eq!(decide(&all, Some("/order/id"), Some("d")), found("k", KeySource::Attribute));
        assert_eq!(decide(&plain, Some("/order/id"), Some("d")), found("42", KeySource::Body));
        assert_eq!(decide(&plain, Some("/missing"), Some("d")), found("d", KeySource::DedupId));
        let id = MessageId(7).to_string();
        assert_eq!(decide(&plain, None, None), found(&id, KeySource::MessageId));
        // An invalid key is ignored, in the attribute and in the body.
        let bad = all.attribute(IDEMPOTENCY_KEY_ATTRIBUTE, Attribute::text("line\nbreak"));
        assert_eq!(decide(&bad, Some("/order"), None), found(&id, KeySource::MessageId));
    }

    #[test]
    fn binary_attributes_survive_json() {
        let attribute =
            Attribute { data_type: "Binary".into(), value: AttributeValue::Binary(vec![0, 255, 7].into()) };
        let json = serde_json::to_string(&attribute).unwrap();
        assert_eq!(serde_json::from_str::<Attribute>(&json).unwrap(), attribute);
    }
}
