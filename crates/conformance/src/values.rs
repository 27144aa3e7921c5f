//! Common values of the cases.

use hapax_core::policy::{Jitter, RetryPolicy};
use hapax_core::{
    Attribute, DeadLetterPolicy, DedupId, Delivery, GroupId, MessageView, NewMessage, QueueConfig, QueueName,
    Receive, RedriveFilter, RedriveRequest, Settlement,
};

use crate::trial::LEASE_MS;

/// A standard queue on which a failed message returns at once, without a limit on attempts.
pub(crate) fn config() -> QueueConfig {
    QueueConfig { lease_ms: LEASE_MS, ..QueueConfig::sqs() }
}

/// A FIFO queue on which a failed message returns at once, without a limit on attempts.
pub(crate) fn fifo_config() -> QueueConfig {
    QueueConfig { lease_ms: LEASE_MS, ..QueueConfig::sqs_fifo() }
}

/// Adds a limit on attempts and a dead-letter queue.
pub(crate) fn dying(dead: &QueueName, max_attempts: u32, config: QueueConfig) -> QueueConfig {
    let dead_letter = Some(DeadLetterPolicy { queue: dead.clone() });
    QueueConfig { retry: config.retry.attempts(max_attempts), dead_letter, ..config }
}

/// Backoff without jitter.
pub(crate) fn exactly(base_ms: u64, cap_ms: u64) -> RetryPolicy {
    RetryPolicy { base_ms, cap_ms, jitter: Jitter::None, max_attempts: 0 }
}

pub(crate) fn queue(name: &str) -> QueueName {
    QueueName::new(name).expect("a queue name")
}

pub(crate) fn group(name: &str) -> GroupId {
    GroupId::new(name).expect("a group id")
}

pub(crate) fn dedup(id: &str) -> DedupId {
    DedupId::new(id).expect("a deduplication id")
}

/// A message of a FIFO group with its body as the deduplication id.
pub(crate) fn in_group(name: &str, body: &str) -> NewMessage {
    NewMessage::new(body.to_owned()).group(group(name)).dedup(dedup(body))
}

pub(crate) fn text(body: impl Into<String>) -> NewMessage {
    NewMessage::new(body.into())
}

pub(crate) fn attribute(value: &str) -> Attribute {
    Attribute::text(value)
}

/// A receive that does not wait.
pub(crate) fn now(max: usize) -> Receive {
    Receive { max, wait_ms: Some(0), ..Receive::default() }
}

/// A receive that waits the maximum time.
pub(crate) fn receive_waiting(max: usize) -> Receive {
    Receive { max, wait_ms: Some(20_000), ..Receive::default() }
}

pub(crate) fn retry(error: &str) -> Settlement {
    Settlement::Retry { after_ms: None, error: Some(error.to_owned()) }
}

pub(crate) fn reject(reason: &str) -> Settlement {
    Settlement::Reject { reason: reason.to_owned() }
}

pub(crate) fn bodies(deliveries: &[Delivery]) -> Vec<String> {
    deliveries.iter().map(|d| String::from_utf8_lossy(&d.body).into_owned()).collect()
}

/// The bodies of a queue's messages, in order of sequence.
pub(crate) fn seen(views: &[MessageView]) -> Vec<String> {
    let text =
        |view: &MessageView| String::from_utf8_lossy(view.body.as_deref().unwrap_or(b"?")).into_owned();
    views.iter().map(text).collect()
}

/// A redrive of all messages to their source queues.
pub(crate) fn redrive_from(from: &QueueName) -> RedriveRequest {
    RedriveRequest {
        from: from.clone(),
        to: None,
        filter: RedriveFilter::default(),
        per_second: None,
        by: "conformance".to_owned(),
    }
}
