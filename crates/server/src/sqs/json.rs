//! AWS JSON 1.0.

use serde::Deserialize;

use super::error::{Kind, Result, SqsError};
use super::output::Output;

/// Decodes a request's body; an empty one counts as an empty object.
pub(crate) fn decode<'a, T: Deserialize<'a> + Default>(body: &'a [u8]) -> Result<T> {
    if body.iter().all(u8::is_ascii_whitespace) {
        return Ok(T::default());
    }
    serde_json::from_slice(body).map_err(|error| SqsError::new(Kind::Serialization, error.to_string()))
}

/// Encodes an answer.
pub(crate) fn encode(output: &Output) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(512);
    // Writing to memory cannot fail, and no type here refuses to be written.
    let _ = serde_json::to_writer(&mut bytes, output);
    bytes
}

/// Encodes an error.
pub(crate) fn encode_error(error: &SqsError) -> Vec<u8> {
    let body = serde_json::json!({ "__type": error.kind.spec().shape, "message": error.message });
    body.to_string().into_bytes()
}
