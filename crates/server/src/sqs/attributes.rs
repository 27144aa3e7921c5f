//! Queue attributes: conversion between SQS's names and texts and a queue's configuration.

use hapax_core::policy::RetryPolicy;
use hapax_core::{DeadLetterPolicy, DedupScope, QueueConfig, QueueInfo, QueueName, QueueStats, RedriveAllow};
use serde_json::{Value, json};

use super::error::{ErrorKind, Result, SqsError};
use super::model::{Settings, Text};
use super::names::{Names, queue_of_arn};

/// Attributes that the store does not interpret; they are stored with the queue.
const KEPT: [&str; 4] = [KMS, KMS_REUSE, SSE, POLICY];
const SSE: &str = "SqsManagedSseEnabled";
const KMS: &str = "KmsMasterKeyId";
const KMS_REUSE: &str = "KmsDataKeyReusePeriodSeconds";
/// Stored with the queue, because the store has no such limit.
const THROUGHPUT: &str = "FifoThroughputLimit";
/// The document of the permissions.
pub(crate) const POLICY: &str = "Policy";

fn unknown(name: &str) -> SqsError {
    let name = hapax_core::policy::truncate(name, 100);
    SqsError::new(ErrorKind::InvalidAttributeName, format!("Unknown Attribute {name}."))
}

fn bad_value(name: &str) -> SqsError {
    SqsError::new(ErrorKind::InvalidAttributeValue, format!("Invalid value for the parameter {name}."))
}

fn seconds(name: &str, text: &str, min: u64, max: u64) -> Result<u64> {
    let value = text.trim().parse::<u64>().ok().filter(|value| (min..=max).contains(value));
    value.map(|seconds| seconds * 1000).ok_or_else(|| bad_value(name))
}

/// SQS accepts booleans in any case, for example Python's `str(True)`.
pub(crate) fn boolean(name: &str, text: &str) -> Result<bool> {
    match text.to_ascii_lowercase().as_str() {
        "true" => Ok(true),
        "false" => Ok(false),
        _ => Err(bad_value(name)),
    }
}

/// Applies attributes to a configuration.
pub(crate) fn apply(config: &mut QueueConfig, settings: &Settings) -> Result<()> {
    for (name, value) in settings {
        set(config, name, &value.0)?;
    }
    if config.extra.get(THROUGHPUT).is_some_and(|limit| limit == "perMessageGroupId")
        && config.dedup.scope != DedupScope::Group
    {
        return Err(SqsError::new(
            ErrorKind::InvalidAttributeValue,
            "Invalid value for the parameter FifoThroughputLimit. Reason: perMessageGroupId is allowed only when \
             the value for DeduplicationScope is messageGroup.",
        ));
    }
    Ok(())
}

/// Sets one attribute.
pub(crate) fn set(config: &mut QueueConfig, name: &str, text: &str) -> Result<()> {
    let fifo = config.is_fifo();
    match name {
        "VisibilityTimeout" => config.lease_ms = seconds(name, text, 0, 43_200)?,
        "DelaySeconds" => config.delay_ms = seconds(name, text, 0, 900)?,
        "MessageRetentionPeriod" => config.retention_ms = seconds(name, text, 60, 1_209_600)?,
        "ReceiveMessageWaitTimeSeconds" => config.wait_ms = seconds(name, text, 0, 20)?,
        "MaximumMessageSize" => config.message_bytes_max = seconds(name, text, 1024, 1_048_576)? / 1000,
        "RedrivePolicy" => {
            let (dead_letter, max_attempts) = redrive_policy(text)?.unzip();
            config.extra.remove(QueueConfig::EXTRA_OWN_DEAD_LETTERS);
            config.dead_letter = dead_letter;
            config.retry.max_attempts = max_attempts.unwrap_or(0);
        }
        "RedriveAllowPolicy" => config.redrive_allow = redrive_allow(text)?,
        // The kind was already decided at creation.
        "FifoQueue" | "ContentBasedDeduplication" if !fifo => return Err(unknown(name)),
        "FifoQueue" => fifo_stays(text)?,
        "ContentBasedDeduplication" => config.dedup.content_based = boolean(name, text)?,
        "DeduplicationScope" | THROUGHPUT if !fifo => {
            let text = format!("You can specify the {name} only when FifoQueue is set to true.");
            return Err(SqsError::new(ErrorKind::InvalidAttributeName, text));
        }
        "DeduplicationScope" => {
            config.dedup.scope = match text {
                "queue" => DedupScope::Queue,
                "messageGroup" => DedupScope::Group,
                _ => return Err(bad_value(name)),
            }
        }
        THROUGHPUT => match text {
            "perQueue" => drop(config.extra.remove(name)),
            "perMessageGroupId" => drop(config.extra.insert(name.to_owned(), text.to_owned())),
            _ => return Err(bad_value(name)),
        },
        _ if KEPT.contains(&name) => keep(config, name, text)?,
        _ => return Err(unknown(name)),
    }
    Ok(())
}

fn fifo_stays(text: &str) -> Result<()> {
    if boolean("FifoQueue", text)? {
        return Ok(());
    }
    let text = "Invalid value for the parameter FifoQueue. Reason: Modifying queue type is not supported.";
    Err(SqsError::new(ErrorKind::InvalidAttributeValue, text))
}

fn keep(config: &mut QueueConfig, name: &str, text: &str) -> Result<()> {
    let lower;
    let mut text = text;
    match name {
        POLICY if !text.is_empty() => {
            let object = serde_json::from_str::<Value>(text).is_ok_and(|policy| policy.is_object());
            if !object {
                return Err(bad_value(name));
            }
        }
        SSE if boolean(name, text)? && config.extra.contains_key(KMS) => {
            return Err(SqsError::new(
                ErrorKind::InvalidAttributeName,
                "You can use one type of server-side encryption (SSE) at one time. You can either enable KMS SSE or \
                 SQS SSE.",
            ));
        }
        SSE => {
            lower = text.to_ascii_lowercase();
            text = &lower;
        }
        KMS if !text.is_empty() => drop(config.extra.insert(SSE.to_owned(), "false".to_owned())),
        KMS_REUSE => drop(seconds(name, text, 60, 86_400)?),
        _ => {}
    }
    if text.is_empty() {
        config.extra.remove(name);
    } else {
        config.extra.insert(name.to_owned(), text.to_owned());
    }
    Ok(())
}

/// The dead-letter queue and the maximum number of attempts.
fn redrive_policy(text: &str) -> Result<Option<(DeadLetterPolicy, u32)>> {
    if text.is_empty() {
        return Ok(None);
    }
    let bad = |reason: &str| SqsError::value("RedrivePolicy", text, reason);
    let policy: Value =
        serde_json::from_str(text).map_err(|_| bad("Redrive policy is not a valid JSON map."))?;
    let policy = policy.as_object().ok_or_else(|| bad("Redrive policy is not a valid JSON map."))?;
    if policy.is_empty() {
        return Ok(None);
    }
    let missing = |name: &str| bad(&format!("Redrive policy does not contain mandatory attribute: {name}."));
    let arn = policy.get("deadLetterTargetArn").ok_or_else(|| missing("deadLetterTargetArn"))?;
    let count = policy.get("maxReceiveCount").ok_or_else(|| missing("maxReceiveCount"))?;
    let queue =
        arn.as_str().and_then(queue_of_arn).ok_or_else(|| bad("Invalid value for deadLetterTargetArn."))?;
    let number = match count {
        Value::String(text) => text.trim().parse().ok(),
        other => other.as_u64(),
    };
    let max_attempts = number.filter(|count| (1..=1000).contains(count)).ok_or_else(|| {
        let shown = count.as_str().map_or_else(|| count.to_string(), str::to_owned);
        bad(&format!(
            "Invalid value for maxReceiveCount: {shown}, valid values are from 1 to 1000 both inclusive."
        ))
    })?;
    Ok(Some((DeadLetterPolicy { queue }, max_attempts as u32)))
}

/// AWS accepts a queue as its own dead-letter queue, the store does not: the policy is kept for the client to read, and
/// messages beyond `maxReceiveCount` stay in the queue.
pub(crate) fn keep_own_dead_letters(config: &mut QueueConfig, queue: &QueueName) {
    if config.dead_letter.as_ref().is_some_and(|dead| dead.queue == *queue) {
        let kept = format!("{} {queue}", max_receive_count(config));
        config.extra.insert(QueueConfig::EXTRA_OWN_DEAD_LETTERS.to_owned(), kept);
        config.dead_letter = None;
        config.retry.max_attempts = 0;
    }
}

/// Whether the queue of this configuration is its own dead-letter queue.
pub(crate) fn has_own_dead_letters(config: &QueueConfig) -> bool {
    config.dead_letter.is_none() && config.extra.contains_key(QueueConfig::EXTRA_OWN_DEAD_LETTERS)
}

/// The name of the dead-letter queue, and the limit on attempts.
fn dead_letters(config: &QueueConfig) -> Option<(QueueName, u32)> {
    if let Some(dead) = &config.dead_letter {
        return Some((dead.queue.clone(), max_receive_count(config)));
    }
    let (count, queue) = config.extra.get(QueueConfig::EXTRA_OWN_DEAD_LETTERS)?.split_once(' ')?;
    Some((QueueName::new(queue).ok()?, count.parse().ok()?))
}

/// The limit on attempts in SQS's form. A native queue may have dead letters without a limit, for rejected messages:
/// then this is the highest number that SQS allows.
pub(crate) fn max_receive_count(config: &QueueConfig) -> u32 {
    config.retry.limit().unwrap_or(RetryPolicy::MAX_ATTEMPTS_MAX)
}

fn redrive_allow(text: &str) -> Result<RedriveAllow> {
    if text.is_empty() {
        return Ok(RedriveAllow::All);
    }
    let bad = |reason: &str| SqsError::value("RedriveAllowPolicy", text, reason);
    let policy: Value =
        serde_json::from_str(text).map_err(|_| bad("Redrive allow policy is not a valid JSON map."))?;
    let sources = policy.get("sourceQueueArns").and_then(Value::as_array);
    match (policy.get("redrivePermission").and_then(Value::as_str), sources) {
        (Some("allowAll"), None) => Ok(RedriveAllow::All),
        (Some("denyAll"), None) => Ok(RedriveAllow::None),
        (Some("byQueue"), Some(arns)) if (1..=10).contains(&arns.len()) => {
            let queues: Option<Vec<QueueName>> =
                arns.iter().map(|arn| arn.as_str().and_then(queue_of_arn)).collect();
            queues.map(RedriveAllow::Queues).ok_or_else(|| bad("Invalid value for sourceQueueArns."))
        }
        (Some("byQueue"), _) => Err(bad("sourceQueueArns must name 1 to 10 queues.")),
        (Some("allowAll" | "denyAll"), _) => Err(bad("sourceQueueArns is allowed with byQueue only.")),
        _ => Err(bad("redrivePermission must be allowAll, denyAll or byQueue.")),
    }
}

/// All readable attributes, in the order of the response.
const READABLE: [&str; 21] = [
    "QueueArn",
    "ApproximateNumberOfMessages",
    "ApproximateNumberOfMessagesNotVisible",
    "ApproximateNumberOfMessagesDelayed",
    "CreatedTimestamp",
    "LastModifiedTimestamp",
    "VisibilityTimeout",
    "MaximumMessageSize",
    "MessageRetentionPeriod",
    "DelaySeconds",
    "ReceiveMessageWaitTimeSeconds",
    "RedrivePolicy",
    "RedriveAllowPolicy",
    "Policy",
    "FifoQueue",
    "ContentBasedDeduplication",
    "DeduplicationScope",
    THROUGHPUT,
    KMS,
    KMS_REUSE,
    SSE,
];

/// The attributes that a client requests, by their names in [`READABLE`].
pub(crate) fn wanted(names: Option<&[Text<'_>]>) -> Result<Vec<&'static str>> {
    let names = names.unwrap_or_default();
    for name in names.iter().map(Text::as_str) {
        if name != "All" && !READABLE.contains(&name) {
            return Err(unknown(name));
        }
    }
    let asked = |name: &&str| names.iter().any(|asked| asked.as_str() == "All" || asked.as_str() == *name);
    Ok(READABLE.into_iter().filter(asked).collect())
}

/// Whether a counter is among the attributes, so that the store must be queried.
pub(crate) fn needs_stats(wanted: &[&str]) -> bool {
    wanted.iter().any(|name| name.starts_with("ApproximateNumber"))
}

/// The values of attributes; those that do not apply to the queue are left out.
pub(crate) fn values(
    wanted: &[&'static str],
    info: &QueueInfo,
    stats: &QueueStats,
    names: &Names,
) -> Vec<(&'static str, String)> {
    wanted.iter().filter_map(|name| Some((*name, value(name, info, stats, names)?))).collect()
}

fn value(name: &str, info: &QueueInfo, stats: &QueueStats, names: &Names) -> Option<String> {
    match name {
        "QueueArn" => Some(names.arn(&info.name)),
        "ApproximateNumberOfMessages" => Some(stats.ready.to_string()),
        "ApproximateNumberOfMessagesNotVisible" => Some(stats.in_flight.to_string()),
        "ApproximateNumberOfMessagesDelayed" => Some(stats.delayed.to_string()),
        "CreatedTimestamp" => Some((info.created_ms / 1000).to_string()),
        "LastModifiedTimestamp" => Some((info.modified_ms / 1000).to_string()),
        _ => configured(name, &info.config, names),
    }
}

/// The value of a configured attribute, not of a counter. Two configurations with equal values look the same to a
/// client.
pub(crate) fn configured(name: &str, config: &QueueConfig, names: &Names) -> Option<String> {
    let in_seconds = |ms: u64| Some((ms / 1000).to_string());
    let on_fifo = |text: &str| config.is_fifo().then(|| text.to_owned());
    match name {
        "VisibilityTimeout" => in_seconds(config.lease_ms),
        "MaximumMessageSize" => Some(config.message_bytes_max.to_string()),
        "MessageRetentionPeriod" => in_seconds(config.retention_ms),
        "DelaySeconds" => in_seconds(config.delay_ms),
        "ReceiveMessageWaitTimeSeconds" => in_seconds(config.wait_ms),
        "RedrivePolicy" => dead_letters(config).map(|(queue, max)| {
            json!({ "deadLetterTargetArn": names.arn(&queue), "maxReceiveCount": max }).to_string()
        }),
        "RedriveAllowPolicy" => match &config.redrive_allow {
            RedriveAllow::All => None,
            RedriveAllow::None => Some(json!({ "redrivePermission": "denyAll" }).to_string()),
            RedriveAllow::Queues(queues) => {
                let arns: Vec<_> = queues.iter().map(|queue| names.arn(queue)).collect();
                Some(json!({ "redrivePermission": "byQueue", "sourceQueueArns": arns }).to_string())
            }
        },
        "FifoQueue" => on_fifo("true"),
        "ContentBasedDeduplication" => on_fifo(if config.dedup.content_based { "true" } else { "false" }),
        "DeduplicationScope" => on_fifo(match config.dedup.scope {
            DedupScope::Queue => "queue",
            DedupScope::Group => "messageGroup",
        }),
        THROUGHPUT => on_fifo(config.extra.get(name).map_or("perQueue", String::as_str)),
        // Stored and returned as in SQS, `true` by default; the encryption is done by the disk below the store.
        SSE => Some(config.extra.get(name).map_or("true", String::as_str).to_owned()),
        // Returned only if there is a key.
        KMS_REUSE => {
            let period = config.extra.get(name).map_or("300", String::as_str);
            config.extra.contains_key(KMS).then(|| period.to_owned())
        }
        _ => config.extra.get(name).cloned(),
    }
}

#[cfg(test)]
#[path = "attributes_tests.rs"]
mod tests;
