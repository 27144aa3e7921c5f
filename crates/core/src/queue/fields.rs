//! A configuration as it is written in JSON or TOML: a missing field gets the default of the queue's kind.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{DeadLetterPolicy, DedupPolicy, OnDead, QueueConfig, QueueKind, Quota, RedriveAllow, Tier};
use crate::policy::{Jitter, RetryPolicy};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RetryFields {
    base_ms: Option<u64>,
    cap_ms: Option<u64>,
    jitter: Option<Jitter>,
    max_attempts: Option<u32>,
}

/// The fields of [`QueueConfig`], each of which may be missing.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fields {
    #[serde(default)]
    kind: QueueKind,
    tier: Option<Tier>,
    lease_ms: Option<u64>,
    retention_ms: Option<u64>,
    delay_ms: Option<u64>,
    wait_ms: Option<u64>,
    message_bytes_max: Option<u64>,
    retry: Option<RetryFields>,
    dead_letter: Option<DeadLetterPolicy>,
    redrive_allow: Option<RedriveAllow>,
    on_dead: Option<OnDead>,
    dedup: Option<DedupPolicy>,
    quota: Option<Quota>,
    key_pointer: Option<String>,
    tags: Option<BTreeMap<String, String>>,
    extra: Option<BTreeMap<String, String>>,
}

impl RetryFields {
    fn over(self, default: RetryPolicy) -> RetryPolicy {
        RetryPolicy {
            base_ms: self.base_ms.unwrap_or(default.base_ms),
            cap_ms: self.cap_ms.unwrap_or(default.cap_ms),
            jitter: self.jitter.unwrap_or(default.jitter),
            max_attempts: self.max_attempts.unwrap_or(default.max_attempts),
        }
    }
}

impl From<Fields> for QueueConfig {
    fn from(given: Fields) -> Self {
        let default = Self::of(given.kind);
        Self {
            kind: given.kind,
            tier: given.tier.unwrap_or(default.tier),
            lease_ms: given.lease_ms.unwrap_or(default.lease_ms),
            retention_ms: given.retention_ms.unwrap_or(default.retention_ms),
            delay_ms: given.delay_ms.unwrap_or(default.delay_ms),
            wait_ms: given.wait_ms.unwrap_or(default.wait_ms),
            message_bytes_max: given.message_bytes_max.unwrap_or(default.message_bytes_max),
            retry: given.retry.map_or(default.retry, |retry| retry.over(default.retry)),
            dead_letter: given.dead_letter,
            redrive_allow: given.redrive_allow.unwrap_or(default.redrive_allow),
            on_dead: given.on_dead.unwrap_or(default.on_dead),
            dedup: given.dedup.unwrap_or(default.dedup),
            quota: given.quota.unwrap_or(default.quota),
            key_pointer: given.key_pointer,
            tags: given.tags.unwrap_or_default(),
            extra: given.extra.unwrap_or_default(),
        }
    }
}
