//! Where messages are published to.
//!
//! | sink | recognises a repeated message |
//! |---|---|
//! | [`QueueSink`]: a Hapax queue, on any store | for the queue's retention |
//! | [`WebhookSink`]: an HTTP endpoint | if the receiver honours `Idempotency-Key` |
//! | [`SqsSink`]: any endpoint with the API of SQS | FIFO queues, for 5 minutes |
//! | [`NatsSink`]: streams of NATS JetStream | for the stream's duplicate window |
//! | `KafkaSink`: topics of Kafka, feature `kafka` | always: messages and ids are one transaction |

mod http_client;
#[cfg(feature = "kafka")]
mod kafka;
mod nats;
mod queue;
mod sqs;
pub mod webhook;

#[cfg(feature = "kafka")]
pub use kafka::KafkaSink;
pub use nats::NatsSink;
pub use queue::QueueSink;
pub use sqs::{SqsKey, SqsSink};
pub use webhook::{WebhookOptions, WebhookSink};

use std::collections::HashSet;

use hapax_core::outbox::OutboxMessage;

/// Splits a batch into parts in which no key occurs twice, each with at most `max` messages, in order: indices.
fn waves(batch: &[OutboxMessage], max: usize) -> Vec<Vec<usize>> {
    let mut waves: Vec<Vec<usize>> = Vec::new();
    let mut keys: HashSet<&str> = HashSet::new();
    for (index, message) in batch.iter().enumerate() {
        let is_repeated = message.ordered_key().is_some_and(|key| keys.contains(key));
        match waves.last_mut() {
            Some(wave) if !is_repeated && wave.len() < max => wave.push(index),
            _ => {
                keys.clear();
                waves.push(vec![index]);
            }
        }
        keys.extend(message.ordered_key());
    }
    waves
}

fn hex(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(u32::from(value), 16).expect("four bits are a digit");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

fn sha256_hex(bytes: &[u8]) -> String {
    hex(ring::digest::digest(&ring::digest::SHA256, bytes).as_ref())
}

/// A sink whose URL or options are not acceptable, or that could not be reached when it was opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct SinkError(pub String);

#[cfg(test)]
pub(crate) fn sample(number: u64, key: Option<&str>) -> OutboxMessage {
    OutboxMessage {
        bucket: 0,
        number,
        id: format!("00000000-0000-4000-8000-{number:012}"),
        topic: "orders".into(),
        key: key.map(str::to_owned),
        body: format!("body {number}").into(),
        headers: std::collections::BTreeMap::new(),
        deliver_at_ms: None,
        enqueued_ms: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wave_has_each_key_once() {
        let keys = [Some("a"), Some("b"), None, None, Some("a"), Some("c"), Some("c")];
        let batch: Vec<_> = keys.iter().zip(1..).map(|(key, number)| sample(number, *key)).collect();
        assert_eq!(waves(&batch, 100), [vec![0, 1, 2, 3], vec![4, 5], vec![6]]);
        assert_eq!(waves(&batch, 3), [vec![0, 1, 2], vec![3, 4, 5], vec![6]]);
        assert_eq!(waves(&[], 3), [[0; 0]; 0]);
    }
}
