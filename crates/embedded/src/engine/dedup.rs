//! Remembered deduplication ids. Recent ones are in memory; with long windows, older ones are only in the index.

use std::collections::{BTreeMap, BTreeSet};

use hapax_core::QueueConfig;
use hapax_core::policy;

use super::{PreparedMessage, Queue, Undo, Wave};
use crate::maps::NumberMap;
use crate::record::{DedupRow, Record};

/// How long an id stays in memory: 5 min.
pub(crate) const MEMORY_MS: u64 = policy::DEDUP_WINDOW_MS_DEFAULT;
/// Maximum number of rows deleted from the index in one wave.
const PRUNE_MAX: u64 = 2_000;
const MINUTE_MS: u64 = 60_000;

/// The first message sent with an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DedupEntry {
    pub seq: u64,
    pub order: u64,
    pub sent_ms: u64,
}

impl From<DedupRow> for DedupEntry {
    fn from(row: DedupRow) -> Self {
        Self { seq: row.seq, order: row.order, sent_ms: row.sent_ms }
    }
}

/// A deduplication id made from a body.
pub(crate) fn content_id(body: &[u8]) -> String {
    use sha2::Digest as _;
    policy::content_id(&sha2::Sha256::digest(body).into())
}

/// What the id of a message is remembered as.
pub(super) fn key(config: &QueueConfig, message: &PreparedMessage) -> Option<u128> {
    if config.dedup.window_ms == 0 {
        return None;
    }
    let hashed = (config.dedup.content_based && message.content_id.is_none())
        .then(|| content_id(&message.content.body));
    let content =
        if config.dedup.content_based { message.content_id.as_deref().or(hashed.as_deref()) } else { None };
    let id = message.content.dedup.as_deref().or(content)?;
    Some(policy::dedup_hash(config.dedup.scope, message.group.as_ref(), id))
}

#[derive(Debug, Default)]
pub(crate) struct Dedup {
    recent: NumberMap<u128, DedupEntry>,
    /// Keys of `recent` by age; the first is the oldest.
    by_age: BTreeSet<(u64, u128)>,
    /// How many rows the index has for each minute, to prune without looking; never 0.
    minutes: BTreeMap<u64, u64>,
}

impl Dedup {
    pub fn seen(&self, key: u128, now_ms: u64) -> Option<DedupEntry> {
        self.recent.get(&key).copied().filter(|seen| policy::is_duplicate(seen.sent_ms, MEMORY_MS, now_ms))
    }

    /// Takes a row into memory. Rows of an import come in any order of `sent_ms`.
    pub fn add(&mut self, row: DedupRow) -> Option<DedupEntry> {
        self.count(row.sent_ms / MINUTE_MS, 1);
        self.by_age.insert((row.sent_ms, row.key));
        self.recent.insert(row.key, row.into())
    }

    /// Counts rows that are only in the index.
    pub fn count(&mut self, minute: u64, rows: u64) {
        *self.minutes.entry(minute).or_default() += rows;
    }

    pub(super) fn undo_add(&mut self, key: u128, before: Option<DedupEntry>, sent_ms: u64) {
        if before.is_none_or(|seen| seen.sent_ms != sent_ms) {
            self.by_age.remove(&(sent_ms, key));
        }
        match before {
            Some(seen) => drop(self.recent.insert(key, seen)),
            None => drop(self.recent.remove(&key)),
        }
        self.uncount(sent_ms / MINUTE_MS, 1);
    }

    fn uncount(&mut self, minute: u64, rows: u64) {
        let count = self.minutes.get_mut(&minute).expect("an added row was counted");
        *count -= rows;
        if *count == 0 {
            self.minutes.remove(&minute);
        }
    }

    pub(super) fn undo_prune(&mut self, minute: u64, count: u64) {
        self.count(minute, count);
    }

    /// Ids inside their window, in key order.
    #[cfg(test)]
    pub fn remembered(&self, now_ms: u64) -> Vec<(u128, DedupEntry)> {
        let mut seen: Vec<_> =
            self.recent.keys().filter_map(|&key| Some((key, self.seen(key, now_ms)?))).collect();
        seen.sort_unstable_by_key(|(key, _)| *key);
        seen
    }

    /// When the next ids leave memory or the index.
    pub fn next_ms(&self, window_ms: u64) -> Option<u64> {
        let forget = self.by_age.first().map(|(sent_ms, _)| sent_ms + MEMORY_MS + MINUTE_MS);
        let prune = self.minutes.first_key_value().map(|(minute, _)| (minute + 1) * MINUTE_MS + window_ms);
        forget.into_iter().chain(prune).min()
    }
}

impl Queue {
    /// Remembers a send's deduplication id.
    pub(super) fn remember(&mut self, wave: &mut Wave, row: DedupRow) {
        let before = self.dedup.add(row);
        wave.journal.push(Undo::DedupAdded { queue: self.id, key: row.key, before, sent_ms: row.sent_ms });
        wave.records.push(Record::Dedup { queue: self.id, row });
    }

    /// Drops ids that are older than the window, a bounded number at a time.
    pub(super) fn forget_ids(&mut self, wave: &mut Wave, now_ms: u64) {
        // Not journaled: an id that left memory is of no use any more, whether or not the wave is committed.
        while let Some(&(sent_ms, key)) = self.dedup.by_age.first() {
            if policy::is_duplicate(sent_ms, MEMORY_MS, now_ms) {
                break;
            }
            self.dedup.by_age.pop_first();
            if self.dedup.recent.get(&key).is_some_and(|seen| seen.sent_ms == sent_ms) {
                self.dedup.recent.remove(&key);
            }
        }
        let window_ms = self.config.dedup.window_ms;
        if let Some((&minute, &count)) = self.dedup.minutes.first_key_value() {
            let before_ms = (minute + 1) * MINUTE_MS;
            if before_ms + window_ms <= now_ms {
                let pruned = count.min(PRUNE_MAX);
                self.dedup.uncount(minute, pruned);
                wave.journal.push(Undo::DedupPruned { queue: self.id, minute, count: pruned });
                wave.records.push(Record::PruneDedup { queue: self.id, before_ms, limit: PRUNE_MAX as u32 });
            }
        }
    }
}
