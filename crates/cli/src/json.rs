//! Core types as JSON, where they have no form of their own.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hapax::Delivery;
use hapax::core::{MessageView, QueueInfo, QueueStats};
use serde_json::{Map, Value, json};

/// A body is `body` if it is text, else `body_base64`.
fn put_body(object: &mut Map<String, Value>, body: &[u8]) {
    match std::str::from_utf8(body) {
        Ok(text) => object.insert("body".into(), text.into()),
        Err(_) => object.insert("body_base64".into(), STANDARD.encode(body).into()),
    };
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        other => unreachable!("only called with objects, not {other}"),
    }
}

/// A delivery.
pub fn delivery(delivery: &Delivery) -> Value {
    let mut object = object(json!({
        "id": delivery.id,
        "attempt": delivery.attempt,
        "receipt": delivery.receipt,
        "fence": delivery.fence,
        "lease_ms": delivery.lease_ms,
        "sent_ms": delivery.sent_ms,
        "first_received_ms": delivery.first_received_ms,
        "sequence": delivery.sequence,
        "group": delivery.group,
        "dedup": delivery.dedup,
        "priority": delivery.priority,
        "attributes": delivery.attributes,
        "dead": delivery.dead,
    }));
    put_body(&mut object, &delivery.body);
    object.into()
}

/// A message that was looked at.
pub fn message(message: &MessageView) -> Value {
    let parked = message.parked.as_ref().map(|(cause, error)| json!({ "cause": cause, "error": error }));
    let mut object = object(json!({
        "id": message.id,
        "state": message.state,
        "attempts": message.attempts,
        "sent_ms": message.sent_ms,
        "due_ms": message.due_ms,
        "sequence": message.sequence,
        "group": message.group,
        "dedup": message.dedup,
        "priority": message.priority,
        "attributes": message.attributes,
        "dead": message.dead,
        "parked": parked,
        "history": message.history,
    }));
    if let Some(body) = &message.body {
        put_body(&mut object, body);
    }
    object.into()
}

/// A queue, its policy and its counters.
pub fn queue(info: &QueueInfo, stats: &QueueStats) -> Value {
    json!({
        "name": info.name,
        "created_ms": info.created_ms,
        "modified_ms": info.modified_ms,
        "config": info.config,
        "stats": stats,
    })
}
