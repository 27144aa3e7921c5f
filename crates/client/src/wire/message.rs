//! Messages as they are sent, delivered and shown to operators.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hapax_core::{
    Attributes, DeadLetter, DedupId, Delivery, FailureCause, Fence, GroupId, IdempotencyKey, KeySource,
    MessageId, MessageState, MessageView, NewMessage, Priority, Receipt, SendError, store::FailedAttempt,
};
use serde::{Deserialize, Serialize};

use super::{AttributeItem, AttributeItems};

/// A body: text if it is UTF-8, base64 otherwise.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Body {
    text: Option<String>,
    base64: Option<String>,
}

impl Body {
    fn new(bytes: Bytes) -> Self {
        match String::from_utf8(bytes.into()) {
            Ok(text) => Self { text: Some(text), base64: None },
            Err(error) => Self { text: None, base64: Some(STANDARD.encode(error.as_bytes())) },
        }
    }

    /// The smaller form: in JSON text a control character takes six bytes.
    fn compact(bytes: Bytes) -> Self {
        let escaped = bytes.iter().filter(|byte| **byte < b' ' && !b"\n\r\t".contains(byte)).count();
        if escaped * 5 > bytes.len() / 3 {
            return Self { text: None, base64: Some(STANDARD.encode(&bytes)) };
        }
        Self::new(bytes)
    }
}

fn body_of(text: Option<String>, base64: Option<String>) -> Result<Option<Bytes>, String> {
    match (text, base64) {
        (Some(_), Some(_)) => Err("a message has either body or body_base64".to_owned()),
        (Some(text), None) => Ok(Some(text.into())),
        (None, Some(base64)) => match STANDARD.decode(base64) {
            Ok(bytes) => Ok(Some(bytes.into())),
            Err(error) => Err(format!("body_base64: {error}")),
        },
        (None, None) => Ok(None),
    }
}

fn to_items(attributes: Attributes) -> AttributeItems {
    attributes.into_iter().map(|(name, attribute)| (name, AttributeItem(attribute))).collect()
}

fn from_items(items: AttributeItems) -> Attributes {
    items.into_iter().map(|(name, item)| (name, item.0)).collect()
}

/// A message to send. The server validates each message on its own, so that an invalid one does not fail the others.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SendItem {
    /// The payload, if it is text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The payload in base64.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// Named values sent with the body.
    #[serde(skip_serializing_if = "AttributeItems::is_empty")]
    pub attributes: AttributeItems,
    /// How long the message stays invisible after the send; the queue's default when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay_ms: Option<u64>,
    /// The message stays invisible until this time, in milliseconds since 1970; at most 366 days ahead.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deliver_at_ms: Option<u64>,
    /// The group; required on FIFO queues.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// The deduplication id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dedup: Option<String>,
    /// Urgency on a standard queue: 0 (default) to 9.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    /// The idempotency key; becomes the attribute `hapax-idempotency-key`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
}

impl From<NewMessage> for SendItem {
    fn from(message: NewMessage) -> Self {
        let body = Body::compact(message.body);
        Self {
            body: body.text,
            body_base64: body.base64,
            attributes: to_items(message.attributes),
            delay_ms: message.delay_ms,
            deliver_at_ms: message.deliver_at_ms,
            group: message.group.map(Into::into),
            dedup: message.dedup.map(Into::into),
            priority: (message.priority != Priority::default()).then_some(message.priority.0),
            idempotency_key: None,
        }
    }
}

impl TryFrom<SendItem> for NewMessage {
    type Error = SendError;

    fn try_from(item: SendItem) -> Result<Self, SendError> {
        let invalid = |error: hapax_core::name::NameError| SendError::Invalid(error.to_string());
        let body = body_of(item.body, item.body_base64).map_err(SendError::Invalid)?;
        let body = body
            .ok_or_else(|| SendError::Invalid("the message has no body; give body or body_base64".into()))?;
        let message = Self {
            body,
            attributes: from_items(item.attributes),
            delay_ms: item.delay_ms,
            deliver_at_ms: item.deliver_at_ms,
            group: item.group.map(GroupId::new).transpose().map_err(invalid)?,
            dedup: item.dedup.map(DedupId::new).transpose().map_err(invalid)?,
            priority: Priority(item.priority.unwrap_or_default()),
        };
        match item.idempotency_key {
            Some(key) => Ok(message.idempotency_key(&IdempotencyKey::new(key).map_err(invalid)?)),
            None => Ok(message),
        }
    }
}

/// One delivery.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct DeliveryItem {
    /// The message.
    pub id: MessageId,
    /// The payload, if it is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The payload in base64, if it is not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// Named values sent with the body.
    #[serde(default, skip_serializing_if = "AttributeItems::is_empty")]
    pub attributes: AttributeItems,
    /// Identifies this delivery; needed to settle or extend it.
    pub receipt: Receipt,
    /// Grows with every delivery.
    pub fence: Fence,
    /// The attempt's number, from 1: counts against the queue's limit.
    pub attempt: u32,
    /// How often the message was delivered, this delivery included.
    pub deliveries: u32,
    /// Time left of the lease.
    pub lease_ms: u64,
    /// When the message was sent.
    pub sent_ms: u64,
    /// When it was first delivered.
    pub first_received_ms: u64,
    /// Its position in the queue.
    pub sequence: u64,
    /// The group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupId>,
    /// The deduplication id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupId>,
    /// Urgency.
    #[serde(default)]
    pub priority: Priority,
    /// The idempotency key of the intended effect.
    pub key: IdempotencyKey,
    /// Where the key comes from.
    pub key_source: KeySource,
    /// Its origin and cause of death, if it is a dead letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<DeadLetter>,
}

impl From<Delivery> for DeliveryItem {
    fn from(delivery: Delivery) -> Self {
        let body = Body::new(delivery.body);
        Self {
            id: delivery.id,
            body: body.text,
            body_base64: body.base64,
            attributes: to_items(delivery.attributes),
            receipt: delivery.receipt,
            fence: delivery.fence,
            attempt: delivery.attempt,
            deliveries: delivery.deliveries,
            lease_ms: delivery.lease_ms,
            sent_ms: delivery.sent_ms,
            first_received_ms: delivery.first_received_ms,
            sequence: delivery.sequence,
            group: delivery.group,
            dedup: delivery.dedup,
            priority: delivery.priority,
            key: delivery.key,
            key_source: delivery.key_source,
            dead: delivery.dead,
        }
    }
}

impl TryFrom<DeliveryItem> for Delivery {
    type Error = String;

    fn try_from(item: DeliveryItem) -> Result<Self, String> {
        Ok(Self {
            id: item.id,
            body: body_of(item.body, item.body_base64)?.ok_or("a delivery has no body")?,
            attributes: from_items(item.attributes),
            receipt: item.receipt,
            fence: item.fence,
            attempt: item.attempt,
            deliveries: item.deliveries,
            lease_ms: item.lease_ms,
            sent_ms: item.sent_ms,
            first_received_ms: item.first_received_ms,
            sequence: item.sequence,
            group: item.group,
            dedup: item.dedup,
            priority: item.priority,
            key: item.key,
            key_source: item.key_source,
            dead: item.dead,
        })
    }
}

/// Why a message is parked.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ParkedItem {
    /// The cause.
    pub cause: FailureCause,
    /// The last error or the reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A message as an operator sees it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct MessageItem {
    /// Its id.
    pub id: MessageId,
    /// Its state.
    pub state: MessageState,
    /// The payload, if it is UTF-8. If neither body nor body_base64 is set, the payload is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body: Option<String>,
    /// The payload in base64, if it is not UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub body_base64: Option<String>,
    /// Named values sent with the body.
    #[serde(default, skip_serializing_if = "AttributeItems::is_empty")]
    pub attributes: AttributeItems,
    /// Attempts so far: deliveries that count against the queue's limit.
    pub attempts: u32,
    /// Deliveries so far, counted or not.
    pub deliveries: u32,
    /// When it was sent.
    pub sent_ms: u64,
    /// When it becomes visible, or its lease runs out.
    pub due_ms: u64,
    /// Its position in the queue.
    pub sequence: u64,
    /// The group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<GroupId>,
    /// The deduplication id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dedup: Option<DedupId>,
    /// Urgency.
    #[serde(default)]
    pub priority: Priority,
    /// Its origin and cause of death, if it is a dead letter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dead: Option<DeadLetter>,
    /// Why it is parked, if it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parked: Option<ParkedItem>,
    /// Its failed attempts, oldest first.
    #[serde(default)]
    pub history: Vec<FailedAttempt>,
}

impl From<MessageView> for MessageItem {
    fn from(view: MessageView) -> Self {
        let body = view.body.map(Body::new).unwrap_or_default();
        Self {
            id: view.id,
            state: view.state,
            body: body.text,
            body_base64: body.base64,
            attributes: to_items(view.attributes),
            attempts: view.attempts,
            deliveries: view.deliveries,
            sent_ms: view.sent_ms,
            due_ms: view.due_ms,
            sequence: view.sequence,
            group: view.group,
            dedup: view.dedup,
            priority: view.priority,
            dead: view.dead,
            parked: view.parked.map(|(cause, error)| ParkedItem { cause, error }),
            history: view.history,
        }
    }
}

impl TryFrom<MessageItem> for MessageView {
    type Error = String;

    fn try_from(item: MessageItem) -> Result<Self, String> {
        Ok(Self {
            id: item.id,
            state: item.state,
            body: body_of(item.body, item.body_base64)?,
            attributes: from_items(item.attributes),
            attempts: item.attempts,
            deliveries: item.deliveries,
            sent_ms: item.sent_ms,
            due_ms: item.due_ms,
            sequence: item.sequence,
            group: item.group,
            dedup: item.dedup,
            priority: item.priority,
            dead: item.dead,
            parked: item.parked.map(|parked| (parked.cause, parked.error)),
            history: item.history,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bodies_survive_and_stay_small() {
        for body in [&b"text"[..], b"", b"\xff\x00", &[7; 300]] {
            let message = NewMessage::new(body.to_vec());
            let json = serde_json::to_string(&SendItem::from(message.clone())).unwrap();
            assert!(json.len() < body.len() * 3 / 2 + 40, "{json}");
            let back: SendItem = serde_json::from_str(&json).unwrap();
            assert_eq!(NewMessage::try_from(back).unwrap(), message);
        }
    }

    #[test]
    fn a_message_has_exactly_one_body() {
        for bad in ["{}", r#"{"body":"a","body_base64":"YQ=="}"#, r#"{"body_base64":"?"}"#] {
            let item: SendItem = serde_json::from_str(bad).unwrap();
            assert!(matches!(NewMessage::try_from(item), Err(SendError::Invalid(_))), "{bad}");
        }
    }
}
