//! A queue's configuration: every field with its meaning, unit, default and limit.

mod fields;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::AdminError;
use crate::name::QueueName;
use crate::policy::{self, RetryPolicy};
use fields::Fields;

/// Whether a queue keeps order.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum QueueKind {
    /// Highest priority first, then roughly in order of sending, shared fairly between groups.
    #[default]
    Standard,
    /// Strictly in order within each group.
    Fifo,
}

/// The guarantee that a queue's consumers want; checked against the store's features, never just asserted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Tier {
    /// Acked on receive: a message may be lost.
    AtMostOnce,
    /// Acked after the handler: it may run twice.
    #[default]
    AtLeastOnce,
    /// A ledger claim around the handler; duplicates get the recorded outcome.
    EffectivelyOnce,
    /// Ledger entry and business write in one transaction.
    Transactional,
}

/// Where dead letters go. The retry policy decides when a message dies ([`RetryPolicy::max_attempts`]).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeadLetterPolicy {
    /// The queue that takes the dead letters; of the same kind.
    pub queue: QueueName,
}

/// Which queues may name this one as their dead-letter queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RedriveAllow {
    /// Any queue.
    #[default]
    All,
    /// No queue.
    None,
    /// These queues, at most ten.
    Queues(Vec<QueueName>),
}

/// What happens to a FIFO group when one of its messages is parked or goes to the dead letters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OnDead {
    /// The group continues with the next message, as SQS does: its order has a gap.
    #[default]
    Continue,
    /// The group is halted until each such message was redriven, released, resolved or discarded, or the group was
    /// released.
    HaltGroup,
}

/// Within which set of messages a deduplication id is unique.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DedupScope {
    /// The whole queue.
    #[default]
    Queue,
    /// The message's group.
    Group,
}

/// How duplicate sends are recognised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct DedupPolicy {
    /// How long a deduplication id is remembered, even after its message was deleted. 0 turns deduplication off; at
    /// most the retention. Default 5 minutes.
    pub window_ms: u64,
    /// Uses the SHA-256 of the body as the id of a message without one. Default off.
    pub content_based: bool,
    /// Within which set of messages an id is unique. Default the queue.
    pub scope: DedupScope,
}

impl Default for DedupPolicy {
    fn default() -> Self {
        Self { window_ms: policy::DEDUP_WINDOW_MS_DEFAULT, content_based: false, scope: DedupScope::Queue }
    }
}

/// How much a queue may hold. A send beyond it is refused with a retryable error.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Quota {
    /// Maximum number of messages, in any state. Default no limit.
    pub messages_max: Option<u64>,
    /// Maximum bytes of bodies and attributes. Default no limit.
    pub bytes_max: Option<u64>,
}

/// A queue's configuration.
///
/// The defaults ([`QueueConfig::default`], [`QueueConfig::fifo`]) suit a handler that may fail: backoff, and a limit on
/// attempts. [`QueueConfig::sqs`] has the defaults of SQS. In JSON and TOML a missing field has the default of the
/// queue's kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Fields")]
pub struct QueueConfig {
    /// Standard or FIFO; cannot be changed later. Default standard.
    pub kind: QueueKind,
    /// The guarantee its consumers want. Default at-least-once.
    pub tier: Tier,
    /// How long a consumer may work on a delivery before the message returns. 0 to 12 h; default 30 s.
    pub lease_ms: u64,
    /// How long a message is kept. 60 s to 14 days; default 4 days.
    pub retention_ms: u64,
    /// How long a new message stays invisible. 0 to 15 min; default 0.
    pub delay_ms: u64,
    /// How long a receive waits if it does not set its own wait. 0 to 20 s; default 0.
    pub wait_ms: u64,
    /// The largest message, body and attributes together. 1 KiB to 1 MiB; default 1 MiB.
    pub message_bytes_max: u64,
    /// When a failed delivery returns, and how often it is tried. Default 1 s, doubling up to 5 min (FIFO: 10 s), with
    /// full jitter; 20 attempts.
    pub retry: RetryPolicy,
    /// Where dead letters go. Default nowhere: a message that is rejected or out of attempts is parked in its own queue.
    pub dead_letter: Option<DeadLetterPolicy>,
    /// Which queues may name this one as their dead-letter queue. Default all.
    pub redrive_allow: RedriveAllow,
    /// Whether a parked message or a dead letter halts its FIFO group. Default halt-group on FIFO queues.
    pub on_dead: OnDead,
    /// How duplicate sends are recognised.
    pub dedup: DedupPolicy,
    /// How much the queue may hold.
    pub quota: Quota,
    /// JSON pointer to the idempotency key inside the body, for example `/order/id`. Default none.
    pub key_pointer: Option<String>,
    /// User-defined labels, at most 50. Shown, never interpreted.
    pub tags: BTreeMap<String, String>,
    /// Attributes that a wire protocol keeps with the queue and the store does not interpret.
    pub extra: BTreeMap<String, String>,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            kind: QueueKind::Standard,
            tier: Tier::AtLeastOnce,
            lease_ms: policy::LEASE_MS_DEFAULT,
            retention_ms: policy::RETENTION_MS_DEFAULT,
            delay_ms: 0,
            wait_ms: 0,
            message_bytes_max: policy::MESSAGE_BYTES_MAX,
            retry: RetryPolicy::default(),
            dead_letter: None,
            redrive_allow: RedriveAllow::All,
            on_dead: OnDead::Continue,
            dedup: DedupPolicy::default(),
            quota: Quota::default(),
            key_pointer: None,
            tags: BTreeMap::new(),
            extra: BTreeMap::new(),
        }
    }
}

fn between(field: &'static str, value: u64, min: u64, max: u64) -> Result<(), AdminError> {
    if (min..=max).contains(&value) {
        Ok(())
    } else {
        Err(AdminError::Config { field, problem: format!("{value} is out of range; use {min} to {max}") })
    }
}

fn require(field: &'static str, holds: bool, problem: &str) -> Result<(), AdminError> {
    if holds { Ok(()) } else { Err(AdminError::Config { field, problem: problem.to_owned() }) }
}

impl QueueConfig {
    /// The key in `extra` under which the SQS API keeps that a queue names itself as its dead-letter queue, as AWS allows.
    /// Such a queue has neither a limit on attempts nor dead letters: a message that fails returns.
    pub const EXTRA_OWN_DEAD_LETTERS: &'static str = "RedrivePolicy";

    /// The defaults of a queue of this kind.
    ///
    /// ```
    /// # use hapax_core::{OnDead, QueueConfig, QueueKind};
    /// let fifo = QueueConfig::of(QueueKind::Fifo);
    /// assert_eq!((fifo.retry.cap_ms, fifo.on_dead), (10_000, OnDead::HaltGroup));
    /// ```
    pub fn of(kind: QueueKind) -> Self {
        match kind {
            QueueKind::Standard => Self::default(),
            QueueKind::Fifo => Self::fifo(),
        }
    }

    /// The defaults of a FIFO queue: as [`QueueConfig::default`], but with shorter delays between attempts, and a
    /// parked or dead message halts its group.
    pub fn fifo() -> Self {
        Self {
            kind: QueueKind::Fifo,
            retry: RetryPolicy::fifo(),
            on_dead: OnDead::HaltGroup,
            ..Self::default()
        }
    }

    /// The defaults of SQS: a failed message is visible again at once, without a limit on attempts.
    pub fn sqs() -> Self {
        Self { retry: RetryPolicy::at_once(), ..Self::default() }
    }

    /// The defaults of SQS for a FIFO queue: a group continues when one of its messages goes to the dead letters.
    pub fn sqs_fifo() -> Self {
        Self { kind: QueueKind::Fifo, ..Self::sqs() }
    }

    /// Whether the queue keeps order.
    pub fn is_fifo(&self) -> bool {
        self.kind == QueueKind::Fifo
    }

    /// Checks every field against its limits; the error names the first field that is out of range.
    ///
    /// ```
    /// # use hapax_core::{QueueConfig, QueueName};
    /// let name = QueueName::new("jobs").unwrap();
    /// let error = QueueConfig { lease_ms: 43_200_001, ..QueueConfig::default() }.validate(&name).unwrap_err();
    /// assert_eq!(error.to_string(), "lease_ms: 43200001 is out of range; use 0 to 43200000");
    /// ```
    pub fn validate(&self, name: &QueueName) -> Result<(), AdminError> {
        require(
            "kind",
            name.is_fifo() == self.is_fifo(),
            "a FIFO queue's name ends in .fifo, no other queue's does",
        )?;
        between("lease_ms", self.lease_ms, 0, policy::LEASE_MS_MAX)?;
        between("retention_ms", self.retention_ms, policy::RETENTION_MS_MIN, policy::RETENTION_MS_MAX)?;
        between("delay_ms", self.delay_ms, 0, policy::DELAY_MS_MAX)?;
        between("wait_ms", self.wait_ms, 0, policy::WAIT_MS_MAX)?;
        between("message_bytes_max", self.message_bytes_max, 1024, policy::MESSAGE_BYTES_MAX)?;
        between(
            "dedup.window_ms",
            self.dedup.window_ms,
            0,
            self.retention_ms.max(policy::DEDUP_WINDOW_MS_DEFAULT),
        )?;
        self.retry.validate()?;
        if let Some(dead) = &self.dead_letter {
            require("dead_letter.queue", dead.queue != *name, "a queue cannot be its own dead-letter queue")?;
            let same_kind = dead.queue.is_fifo() == self.is_fifo();
            require(
                "dead_letter.queue",
                same_kind,
                "a FIFO queue needs a FIFO dead-letter queue, a standard one a standard one",
            )?;
        }
        if let RedriveAllow::Queues(queues) = &self.redrive_allow {
            require("redrive_allow.queues", (1..=10).contains(&queues.len()), "name 1 to 10 queues")?;
        }
        require(
            "on_dead",
            self.is_fifo() || self.on_dead == OnDead::Continue,
            "halt-group needs a FIFO queue",
        )?;
        if let Some(pointer) = &self.key_pointer {
            let form = pointer.starts_with('/') && pointer.len() <= 256;
            require("key_pointer", form, "use a JSON pointer of at most 256 bytes, for example /order/id")?;
        }
        require("tags", self.tags.len() <= 50, "at most 50 tags")?;
        let short =
            |(key, value): (&String, &String)| !key.is_empty() && key.len() <= 512 && value.len() <= 1024;
        require(
            "tags",
            self.tags.iter().all(short),
            "a tag's key has 1 to 512 bytes, its value at most 1024",
        )?;
        let extra_bytes: usize = self.extra.iter().map(|(key, value)| key.len() + value.len()).sum();
        require("extra", extra_bytes <= 64 * 1024, "at most 64 KiB")
    }

    /// The name of the first field that differs, for an error message.
    pub fn first_difference(&self, other: &Self) -> Option<String> {
        let (a, b) = (serde_json::to_value(self).ok()?, serde_json::to_value(other).ok()?);
        let (a, b) = (a.as_object()?, b.as_object()?);
        a.iter().find(|(key, value)| b.get(*key) != Some(value)).map(|(key, _)| key.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(config: &QueueConfig, name: &str, field: &str) {
        let error = config.validate(&QueueName::new(name).unwrap()).unwrap_err().to_string();
        assert!(error.starts_with(field), "{error}");
    }

    #[test]
    fn defaults_are_valid() {
        QueueConfig::default().validate(&QueueName::new("q").unwrap()).unwrap();
        QueueConfig::fifo().validate(&QueueName::new("q.fifo").unwrap()).unwrap();
    }

    #[test]
    fn each_limit_is_named() {
        let ok = QueueConfig::default;
        refused(&QueueConfig { retention_ms: 59_999, ..ok() }, "q", "retention_ms");
        refused(&QueueConfig { delay_ms: 900_001, ..ok() }, "q", "delay_ms");
        refused(&QueueConfig { wait_ms: 20_001, ..ok() }, "q", "wait_ms");
        refused(&QueueConfig { on_dead: OnDead::HaltGroup, ..ok() }, "q", "on_dead");
        refused(&QueueConfig::fifo(), "q", "kind");
        refused(&QueueConfig { key_pointer: Some("order".into()), ..ok() }, "q", "key_pointer");
        let own = DeadLetterPolicy { queue: QueueName::new("q").unwrap() };
        refused(&QueueConfig { dead_letter: Some(own), ..ok() }, "q", "dead_letter.queue");
        let window = DedupPolicy { window_ms: policy::RETENTION_MS_MAX, ..DedupPolicy::default() };
        refused(&QueueConfig { dedup: window, ..ok() }, "q", "dedup.window_ms");
        let often = RetryPolicy::default().attempts(1_001);
        refused(&QueueConfig { retry: often, ..ok() }, "q", "retry.max_attempts");
    }

    #[test]
    fn a_field_that_is_not_given_has_the_default_of_the_kind() {
        let parse = |text: &str| serde_json::from_str::<QueueConfig>(text);
        assert_eq!(parse("{}").unwrap(), QueueConfig::default());
        assert_eq!(parse(r#"{"kind": "fifo"}"#).unwrap(), QueueConfig::fifo());
        let partly = parse(r#"{"retry": {"base_ms": 50}, "kind": "fifo", "on_dead": "continue"}"#).unwrap();
        let retry = RetryPolicy { base_ms: 50, ..RetryPolicy::fifo() };
        assert_eq!(partly, QueueConfig { retry, on_dead: OnDead::Continue, ..QueueConfig::fifo() });
        for wrong in [
            r#"{"retries": 1}"#,
            r#"{"retry": {"base": 1}}"#,
            r#"{"dead_letter": {"queue": "d", "max_attempts": 3}}"#,
        ] {
            let error = parse(wrong).unwrap_err().to_string();
            assert!(error.contains("unknown field"), "{error}");
        }
    }

    #[test]
    fn every_configuration_survives_json() {
        let all = [QueueConfig::default(), QueueConfig::fifo(), QueueConfig::sqs(), QueueConfig::sqs_fifo()];
        for config in all {
            let json = serde_json::to_string(&config).unwrap();
            assert_eq!(serde_json::from_str::<QueueConfig>(&json).unwrap(), config);
        }
    }

    #[test]
    fn a_difference_is_named() {
        let other = QueueConfig { delay_ms: 5, ..QueueConfig::default() };
        assert_eq!(QueueConfig::default().first_difference(&other).as_deref(), Some("delay_ms"));
        assert_eq!(other.first_difference(&other), None);
    }
}
