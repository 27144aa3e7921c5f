use std::sync::Arc;

use hapax_core::policy;
use hapax_core::validate::{self, MessageShape};
use hapax_core::{
    Attributes, EntryId, GroupId, KeySource, MessageId, MessageKey, Priority, SendError, Sent, Tier,
};

use super::{Engine, MEMORY_BYTES_A_MESSAGE, Queue, Wave, dedup};
use crate::browse::parse_attributes;
use crate::record::{
    BodyRow, Content, DeadRow, DedupRow, FLAG_KEYED, MessageMeta, MessageRow, Record, State,
};
use crate::time::Now;

/// A message ready for the engine, encoded and checksummed on the sender's thread.
#[derive(Debug, Clone)]
pub(crate) struct PreparedMessage {
    pub content: Content,
    pub bytes: u64,
    /// Count of attributes.
    pub attributes: usize,
    pub delay_ms: Option<u64>,
    pub deliver_at_ms: Option<u64>,
    pub group: Option<GroupId>,
    pub priority: Priority,
    /// SHA-256 of the body in hexadecimal, if the queue uses content-based deduplication.
    pub content_id: Option<String>,
    /// The sender's key; `None` if it was not looked up yet.
    pub sender_key: Option<Box<SenderKey>>,
}

impl PreparedMessage {
    fn shape(&self) -> MessageShape {
        MessageShape {
            bytes: self.bytes,
            attributes: self.attributes,
            delay_ms: self.delay_ms,
            deliver_at_ms: self.deliver_at_ms,
            has_group: self.group.is_some(),
            has_dedup: self.content.dedup.is_some(),
            priority: self.priority,
        }
    }
}

/// The idempotency key that a message itself states.
#[derive(Debug, Clone)]
pub(crate) struct SenderKey {
    /// JSON pointer in the body at which it was looked up.
    pub pointer: Option<Arc<str>>,
    pub key: Option<MessageKey>,
}

impl SenderKey {
    pub fn find(attributes: &Attributes, body: &[u8], pointer: Option<Arc<str>>) -> Self {
        let key = MessageKey::explicit(attributes, body, pointer.as_deref());
        Self { pointer, key }
    }

    /// The part that must be stored separately: a key in an attribute is stored with the attributes.
    pub fn stored(&self) -> Option<MessageKey> {
        self.key.clone().filter(|key| key.source == KeySource::Body)
    }
}

impl Engine {
    /// The deduplication key of a message whose window is longer than memory covers. The writer looks it up in the
    /// index and passes the result to [`Engine::send`].
    pub fn dedup_lookup(&self, queue: u32, message: &PreparedMessage, now: Now) -> Option<u128> {
        let queue = self.queue(queue);
        let key = dedup::key(&queue.config, message)?;
        (queue.config.dedup.window_ms > dedup::MEMORY_MS && queue.dedup.seen(key, now.ms()).is_none())
            .then_some(key)
    }

    /// Looks up the sender's key, unless the sender's thread already did so with the queue's current pointer.
    pub fn find_sender_key(&self, queue: u32, message: &mut PreparedMessage) {
        let config = &self.queue(queue).config;
        let pointer = config.key_pointer.as_deref();
        let wanted = pointer.is_some() || config.tier == Tier::EffectivelyOnce;
        let found = match &message.sender_key {
            Some(sender_key) => sender_key.pointer.as_deref() == pointer,
            None => !wanted,
        };
        if found {
            return;
        }
        let Content { dedup, attributes, body, .. } = message.content.clone();
        let parsed = attributes.as_deref().map(parse_attributes).unwrap_or_default();
        let sender_key = SenderKey::find(&parsed, &body, pointer.map(Into::into));
        message.content = Content::new(dedup, attributes, sender_key.stored(), body);
        message.sender_key = Some(Box::new(sender_key));
    }

    /// The ledger entry of a message with the id `id` and the source of its key, if its queue is effectively once.
    pub fn entry_of(
        &self,
        queue: u32,
        message: &PreparedMessage,
        id: MessageId,
    ) -> Option<(EntryId, KeySource)> {
        let queue = self.queue(queue);
        if queue.config.tier != Tier::EffectivelyOnce {
            return None;
        }
        let content = &message.content;
        let hashed = (content.dedup.is_none() && queue.config.dedup.content_based)
            .then(|| message.content_id.clone().unwrap_or_else(|| dedup::content_id(&content.body)));
        let sender_key = message.sender_key.as_ref().and_then(|sender_key| sender_key.key.clone());
        let decided = MessageKey::decide(sender_key, content.dedup.as_deref().or(hashed.as_deref()), id);
        Some((EntryId::of_queue(&queue.name, decided.key), decided.source))
    }

    /// The sequence number of the next accepted message.
    pub fn next_seq(&self) -> u64 {
        self.wave.counters.next_seq
    }

    /// Accepts one message, or returns the first message with the same deduplication id inside the window.
    pub fn send(
        &mut self,
        now: Now,
        queue: u32,
        mut message: PreparedMessage,
        stored: Option<DedupRow>,
        entry_id: Option<EntryId>,
        ids: impl Fn(u64) -> MessageId,
    ) -> Result<Sent, SendError> {
        let quota = self.quota;
        let (queue, wave) = self.queue_and_wave(queue);
        let visible = validate::message(&queue.config, message.shape(), now.ms())?;
        if message.content.dedup.is_none() && queue.config.dedup.content_based {
            let content_id =
                message.content_id.take().unwrap_or_else(|| dedup::content_id(&message.content.body));
            let Content { attributes, key, body, .. } = message.content;
            message.content = Content::new(Some(content_id), attributes, key, body);
        }

        let window_ms = queue.config.dedup.window_ms;
        let key = dedup::key(&queue.config, &message);
        if let Some(key) = key {
            let seen = queue.dedup.seen(key, now.ms()).or_else(|| stored.map(dedup::DedupEntry::from));
            // A purge also forgets the deduplication ids of the purged messages.
            let seen = seen.filter(|seen| seen.seq >= queue.purged_before);
            if let Some(seen) = seen.filter(|seen| policy::is_duplicate(seen.sent_ms, window_ms, now.ms())) {
                queue.totals.duplicates += 1;
                return Ok(Sent { id: ids(seen.seq), sequence: seen.order, duplicate: true });
            }
        }
        // Checked only now: a repeated send takes no space, and its sender must learn that the first one was accepted.
        within_quotas(queue, wave, &quota, message.bytes)?;

        let seq = wave.next_seq();
        let entry = MessageMeta {
            seq,
            order: seq,
            sent_ms: now.ms(),
            base_ms: visible.retained_from_ms,
            due_ms: visible.due_ms,
            fence: 0,
            first_ms: 0,
            received_ms: 0,
            attempts: 0,
            deliveries: 0,
            bytes: message.bytes as u32,
            group: 0,
            state: if visible.due_ms == now.ms() { State::Ready } else { State::Delayed },
            priority: message.priority.0,
            flags: if entry_id.is_some() { FLAG_KEYED } else { 0 },
        };
        if let Some(key) = key {
            let row = DedupRow { key, seq, order: seq, sent_ms: now.ms() };
            queue.remember(wave, row);
        }
        queue.totals.sent += 1;
        queue.add(wave, entry, message.group, message.content);
        if let Some(id) = entry_id {
            self.link(seq, id.hash());
        }
        Ok(Sent { id: ids(seq), sequence: seq, duplicate: false })
    }
}

impl Queue {
    /// Inserts a message with its body and records both.
    pub(super) fn add(
        &mut self,
        wave: &mut Wave,
        entry: MessageMeta,
        group: Option<GroupId>,
        content: Content,
    ) {
        self.insert(wave, entry, group.as_ref());
        wave.inserted.push((entry.seq, wave.records.len()));
        let body = BodyRow { seq: entry.seq, origin: self.id, content };
        wave.records.push(Record::Insert(MessageRow { queue: self.id, entry, group }, body));
        wave.durable = true;
    }
}

impl Wave {
    /// The body of a message inserted in this wave; the storage does not have it yet.
    pub fn fresh_body(&self, seq: u64) -> Option<&BodyRow> {
        let at = self.inserted.binary_search_by_key(&seq, |(seq, _)| *seq).ok()?;
        match &self.records[self.inserted[at].1] {
            Record::Insert(_, body) => Some(body),
            _ => None,
        }
    }

    /// The dead-letter row of a message that died in this wave; the storage does not have it yet either.
    pub fn fresh_dead(&self, seq: u64) -> Option<&DeadRow> {
        self.records.iter().rev().find_map(|record| match record {
            Record::Dead(dead) if dead.seq == seq => Some(dead),
            _ => None,
        })
    }

    /// The latest error of a message in this wave's records.
    pub fn fresh_error(&self, seq: u64) -> Option<String> {
        self.records.iter().rev().find_map(|record| match record {
            Record::History { seq: of, failed } if *of == seq => failed.error.clone(),
            _ => None,
        })
    }
}

pub(super) fn within_quotas(
    queue: &Queue,
    wave: &Wave,
    store: &super::StoreQuota,
    bytes: u64,
) -> Result<(), SendError> {
    let of_queue = |field: &str, used: u64, more: u64, max: Option<u64>| match max {
        // Formats the name only if there is a quota.
        Some(_) => check(&format!("{field} of queue {}", queue.name), used, more, max),
        None => Ok(()),
    };
    let quota = &queue.config.quota;
    of_queue("quota.messages_max", queue.table.len() as u64, 1, quota.messages_max)?;
    of_queue("quota.bytes_max", queue.table.counts().bytes, bytes, quota.bytes_max)?;
    within_store_quota(wave, store, bytes)
}

fn check(quota: &str, used: u64, more: u64, max: Option<u64>) -> Result<(), SendError> {
    match max {
        Some(max) if used + more > max => Err(SendError::QuotaExceeded { quota: quota.into(), used, max }),
        _ => Ok(()),
    }
}

/// Whether the whole store can take one more message of `bytes`.
fn within_store_quota(wave: &Wave, store: &super::StoreQuota, bytes: u64) -> Result<(), SendError> {
    let memory = wave.counters.messages * MEMORY_BYTES_A_MESSAGE;
    check("the store's messages_max", wave.counters.messages, 1, store.messages_max)?;
    check("the store's bytes_max", wave.counters.bytes, bytes, store.bytes_max)?;
    check("the store's memory_bytes_max", memory, MEMORY_BYTES_A_MESSAGE, store.memory_bytes_max)
}

impl super::Engine {
    /// The reason why even the smallest message would be refused, if it would.
    pub fn refuses_sends(&self) -> Option<String> {
        within_store_quota(&self.wave, &self.quota, 1).err().map(|error| error.to_string())
    }
}
