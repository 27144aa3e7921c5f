//! A Hapax queue as a sink, on any store.

use async_trait::async_trait;
use hapax_core::message::IDEMPOTENCY_KEY_ATTRIBUTE;
use hapax_core::outbox::{OutboxMessage, PublishAnswer, Publisher, SinkDedup, SinkDescription};
use hapax_core::store::SharedStore;
use hapax_core::{
    AdminError, Attribute, DedupId, GroupId, NewMessage, QueueConfig, QueueName, SendError, StoreError,
    policy, validate,
};

use super::{SinkError, waves};

/// The attribute with a message's topic.
pub const TOPIC_ATTRIBUTE: &str = "hapax-topic";
/// The attribute with a message's key.
pub const KEY_ATTRIBUTE: &str = "hapax-key";

/// Messages of one send.
const BATCH_MAX: usize = 500;
/// Sends at the same time.
const CALLS_MAX: usize = 4;
/// How often a change of the queue's configuration is tried against others.
const CHANGES_MAX: usize = 5;

/// A queue. The outbox's id is the deduplication id and, unless the message has one, the idempotency key; on a FIFO queue the
/// key is the group.
pub struct QueueSink {
    store: SharedStore,
    queue: QueueName,
    config: QueueConfig,
    name: String,
}

impl QueueSink {
    /// Publishes to a queue, which is created if it does not exist (FIFO if its name ends in `.fifo`). Its deduplication
    /// window is set to its retention: inside it, a message that is published again is recognised.
    pub async fn open(store: SharedStore, queue: QueueName, place: &str) -> Result<Self, SinkError> {
        let failed = |error: &dyn std::fmt::Display| SinkError(format!("queue {queue} at {place}: {error}"));
        let default = if queue.is_fifo() { QueueConfig::fifo() } else { QueueConfig::default() };
        for _ in 0..CHANGES_MAX {
            let info = match store.queue(&queue).await {
                Ok(info) => info,
                Err(StoreError::NoSuchQueue(_)) => {
                    let mut config = default.clone();
                    config.dedup.window_ms = config.retention_ms;
                    match store.create_queue(&queue, config).await {
                        Ok(_) | Err(AdminError::Exists(..)) => continue,
                        Err(error) => return Err(failed(&error)),
                    }
                }
                Err(error) => return Err(failed(&error)),
            };
            let mut config = info.config.clone();
            if config.dedup.window_ms < config.retention_ms {
                config.dedup.window_ms = config.retention_ms;
                match store.set_queue(&queue, config, Some(info.revision)).await {
                    Ok(_) | Err(AdminError::RevisionConflict { .. }) => continue,
                    Err(error) => return Err(failed(&error)),
                }
            }
            let name = format!("queue {queue} at {place}");
            return Ok(Self { store, queue, config: info.config, name });
        }
        Err(failed(&"its configuration keeps changing"))
    }

    fn message(&self, from: &OutboxMessage) -> Result<NewMessage, String> {
        let mut message = NewMessage::new(from.body.clone());
        for (name, value) in &from.headers {
            message = message.attribute(name.as_str(), Attribute::text(value.as_str()));
        }
        message = message.attribute(TOPIC_ATTRIBUTE, Attribute::text(from.topic.as_str()));
        if let Some(key) = &from.key {
            message = message.attribute(KEY_ATTRIBUTE, Attribute::text(key.as_str()));
        }
        if !from.headers.contains_key(IDEMPOTENCY_KEY_ATTRIBUTE) {
            message = message.attribute(IDEMPOTENCY_KEY_ATTRIBUTE, Attribute::text(from.id.as_str()));
        }
        let id = if hapax_core::mutant::is("publish-repeated-as-new") {
            format!("{}-{:x}", from.id, fastrand::u64(..))
        } else {
            from.id.clone()
        };
        message.dedup = Some(DedupId::new(&id).map_err(|error| error.to_string())?);
        if self.config.is_fifo() {
            message.group = Some(group(from)?);
        } else {
            message.deliver_at_ms = from.deliver_at_ms;
        }
        let valid = validate::message(&self.config, (&message).into(), from.enqueued_ms);
        valid.map_err(|error| error.to_string())?;
        Ok(message)
    }

    async fn send(&self, messages: Vec<NewMessage>) -> Vec<PublishAnswer> {
        let count = messages.len();
        match self.store.send(&self.queue, messages).await {
            Ok(sent) => sent
                .into_iter()
                .map(|one| match one {
                    Ok(sent) if sent.duplicate => PublishAnswer::Duplicate,
                    Ok(_) => PublishAnswer::Published,
                    Err(error @ SendError::QuotaExceeded { .. }) => {
                        PublishAnswer::Unavailable(error.to_string())
                    }
                    Err(error) => PublishAnswer::Refused(error.to_string()),
                })
                .collect(),
            Err(error) => vec![PublishAnswer::Unavailable(error.to_string()); count],
        }
    }
}

/// The group of a message: its key, else its own id. A key that is no group id is replaced by a hash.
fn group(message: &OutboxMessage) -> Result<GroupId, String> {
    let Some(key) = &message.key else { return GroupId::new(&message.id).map_err(|error| error.to_string()) };
    GroupId::new(key)
        .or_else(|_| GroupId::new(super::sha256_hex(key.as_bytes())).map_err(|error| error.to_string()))
}

#[async_trait]
impl Publisher for QueueSink {
    fn describe(&self) -> SinkDescription {
        let window_ms = self.config.dedup.window_ms;
        let mut warnings = Vec::new();
        if window_ms < policy::RETENTION_MS_DEFAULT {
            warnings.push(format!(
                "the queue remembers messages for {} s: a relay that is down for longer may repeat what it published last",
                window_ms / 1000
            ));
        }
        SinkDescription {
            name: self.name.clone(),
            dedup: SinkDedup::Window { window_ms },
            delays: !self.config.is_fifo(),
            batch_max: BATCH_MAX,
            calls_max: CALLS_MAX,
            warnings,
        }
    }

    async fn publish(&self, batch: &[OutboxMessage]) -> Vec<PublishAnswer> {
        let mut answers = vec![PublishAnswer::NotTried; batch.len()];
        let mut accepted = Vec::new();
        let mut blocked = std::collections::HashSet::new();
        for (index, message) in batch.iter().enumerate() {
            let key = message.ordered_key();
            match self.message(message) {
                _ if key.is_some_and(|key| blocked.contains(key)) => {}
                Ok(message) => accepted.push((index, message)),
                Err(problem) => {
                    answers[index] = PublishAnswer::Refused(problem);
                    blocked.extend(key);
                }
            }
        }
        // Everything that a store refuses of a single message was found above, except for a quota: there, a later message
        // of a key might have room that an earlier one had not.
        let quota = &self.config.quota;
        let parts = if quota.messages_max.is_none() && quota.bytes_max.is_none() {
            vec![accepted]
        } else {
            let indices: Vec<usize> = accepted.iter().map(|(index, _)| *index).collect();
            let open: Vec<OutboxMessage> = indices.iter().map(|&index| batch[index].clone()).collect();
            let mut rest = accepted.into_iter();
            waves(&open, BATCH_MAX).iter().map(|wave| rest.by_ref().take(wave.len()).collect()).collect()
        };
        for part in parts {
            let (indices, messages): (Vec<usize>, Vec<NewMessage>) = part.into_iter().unzip();
            if messages.is_empty() {
                continue;
            }
            let mut is_over = false;
            for (index, answer) in indices.into_iter().zip(self.send(messages).await) {
                is_over |= !matches!(answer, PublishAnswer::Published | PublishAnswer::Duplicate);
                answers[index] = answer;
            }
            if is_over {
                break;
            }
        }
        answers
    }
}
