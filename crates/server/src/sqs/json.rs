//! AWS JSON 1.0, and responses of the Query protocol to clients that accept JSON.

use serde::Deserialize;
use serde_json::{Value, json};

use super::error::{ErrorKind, Result, SqsError};
use super::model::Action;
use super::output::Output;

/// Decodes a request's body; an empty one counts as an empty object.
pub(crate) fn decode<'a, T: Deserialize<'a> + Default>(body: &'a [u8]) -> Result<T> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    serde_json::from_slice(body).map_err(|error| SqsError::new(ErrorKind::Serialization, error.to_string()))
}

pub(crate) fn encode(output: &Output) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(512);
    // Writing to memory cannot fail, and all types here can be serialized.
    let _ = serde_json::to_writer(&mut bytes, output);
    bytes
}

/// Encodes a response of the Query protocol for a client that accepts JSON.
pub(crate) fn encode_query(action: Action, output: &Output, request_id: &str) -> Vec<u8> {
    let name = action.name();
    let mut response = serde_json::Map::new();
    if !matches!(output, Output::Empty) {
        response.insert(format!("{name}Result"), query_result(output));
    }
    response.insert("ResponseMetadata".to_owned(), json!({ "RequestId": request_id }));
    json!({ format!("{name}Response"): response }).to_string().into_bytes()
}

/// The result as in the JSON protocol, except for a few names, lists that are present even when empty, and maps, which
/// become lists of pairs.
fn query_result(output: &Output) -> Value {
    let mut result = serde_json::to_value(output).unwrap_or_default();
    let list = |result: &mut Value, from: &str, to: &str| {
        let found = result.as_object_mut().and_then(|map| map.remove(from));
        result[to] = found.unwrap_or(Value::Null);
    };
    match output {
        Output::Queues(_) => list(&mut result, "QueueUrls", "queueUrls"),
        Output::Messages(_) => {
            list(&mut result, "Messages", "messages");
            for message in result["messages"].as_array_mut().into_iter().flatten() {
                pairs(message, "Attributes", "Name");
                pairs(message, "MessageAttributes", "Name");
            }
        }
        Output::Attributes(_) => pairs(&mut result, "Attributes", "Name"),
        Output::Tags(_) => pairs(&mut result, "Tags", "Key"),
        _ => {}
    }
    result
}

fn pairs(parent: &mut Value, field: &str, key: &str) {
    if let Some(Value::Object(map)) = parent.get_mut(field).map(Value::take) {
        parent[field] = map.into_iter().map(|(name, value)| json!({ key: name, "Value": value })).collect();
    }
}

/// Encodes an error of the Query protocol for a client that accepts JSON.
pub(crate) fn encode_query_error(error: &SqsError, request_id: &str) -> Vec<u8> {
    let wire = error.kind.wire();
    let error = json!({ "Type": wire.fault(), "Code": wire.code, "Message": error.message });
    json!({ "Error": error, "RequestId": request_id }).to_string().into_bytes()
}

pub(crate) fn encode_error(error: &SqsError) -> Vec<u8> {
    let body = serde_json::json!({ "__type": error.kind.wire().shape, "message": error.message });
    body.to_string().into_bytes()
}
