//! One queue: its configuration, its messages, and the primitives that change them under a wave's journal.

use std::sync::Arc;

use hapax_core::store::{FailedAttempt, QueueTotals};
use hapax_core::{FailureCause, GroupId, QueueConfig, QueueName, QueuePause, QueueStats, policy};

use super::attempts::Attempts;
use super::dedup::Dedup;
use super::groups::Slot;
use super::table::Table;
use super::transfer::GroupWait;
use super::{Undo, Wave};
use crate::maps::NumberMap;
use crate::record::{FLAG_HISTORY, FLAG_KEYED, MessageMeta, MessageRow, QueueRow, Record, State};

pub(crate) struct Queue {
    pub id: u32,
    pub name: QueueName,
    pub config: Arc<QueueConfig>,
    pub created_ms: u64,
    pub modified_ms: u64,
    pub purged_before: u64,
    /// The configuration's revision.
    pub revision: u64,
    /// When it was last purged, in ms; 0 if never.
    pub purged_ms: u64,
    pub paused: Option<QueuePause>,
    pub table: Table,
    /// What its halted groups wait for in other queues, by place, while it is exported.
    pub waits: Option<Vec<GroupWait>>,
    pub dedup: Dedup,
    pub totals: QueueTotals,
    /// When this queue next needs attention, as filed in the engine's timers.
    pub timer: Option<u64>,
    pub attempts: Attempts,
    /// Who holds what, for the history of failed attempts; only a help for people, so not journaled.
    pub holders: NumberMap<u64, Arc<str>>,
    wave: u64,
}

impl Queue {
    pub fn new(id: u32, name: QueueName, config: Arc<QueueConfig>, now_ms: u64) -> Self {
        let table = Table::new(config.is_fifo());
        Self {
            id,
            name,
            config,
            created_ms: now_ms,
            modified_ms: now_ms,
            purged_before: 0,
            revision: 0,
            purged_ms: 0,
            paused: None,
            table,
            waits: None,
            dedup: Dedup::default(),
            totals: QueueTotals::default(),
            timer: None,
            attempts: Attempts::default(),
            holders: NumberMap::default(),
            wave: u64::MAX,
        }
    }

    /// Saves the counters before the first change of a wave.
    pub(super) fn touch(&mut self, wave: &mut Wave) {
        if self.wave != wave.number {
            self.wave = wave.number;
            wave.touched.insert(self.id);
            wave.journal.push(Undo::Totals { queue: self.id, totals: self.totals });
        }
    }

    pub(super) fn insert(
        &mut self,
        wave: &mut Wave,
        mut entry: MessageMeta,
        group: Option<&GroupId>,
    ) -> Slot {
        entry.group = self.table.groups.intern(group);
        let slot = self.table.insert(entry);
        wave.counters.messages += 1;
        wave.counters.bytes += u64::from(entry.bytes);
        wave.journal.push(Undo::Entry { queue: self.id, slot, before: None });
        slot
    }

    pub(super) fn replace(&mut self, wave: &mut Wave, slot: Slot, entry: MessageMeta) {
        let before = self.table.replace(slot, entry);
        if before.state == State::InFlight && entry.state != State::InFlight {
            self.holders.remove(&entry.seq);
        }
        wave.journal.push(Undo::Entry { queue: self.id, slot, before: Some(before) });
    }

    pub(super) fn remove(&mut self, wave: &mut Wave, slot: Slot) -> MessageMeta {
        let entry = self.table.remove(slot);
        self.holders.remove(&entry.seq);
        wave.counters.messages -= 1;
        wave.counters.bytes -= u64::from(entry.bytes);
        wave.journal.push(Undo::Entry { queue: self.id, slot, before: Some(entry) });
        entry
    }

    /// Changes a message and records it.
    pub(super) fn update(&mut self, wave: &mut Wave, slot: Slot, entry: MessageMeta) {
        self.replace(wave, slot, entry);
        let row = MessageRow { queue: self.id, entry, group: self.table.group_name(&entry) };
        wave.records.push(Record::Update(row));
    }

    /// Removes a message and records it.
    pub(super) fn delete(&mut self, wave: &mut Wave, slot: Slot) -> MessageMeta {
        let entry = self.remove(wave, slot);
        if entry.flags & FLAG_KEYED != 0 {
            wave.ledger.unlink(entry.seq);
        }
        wave.records.push(Record::Delete { seq: entry.seq, flags: entry.flags });
        entry
    }

    /// Adds to a message's history and sets the flag in `entry`; the caller stores the entry.
    pub(super) fn record_failure(
        &mut self,
        wave: &mut Wave,
        entry: &mut MessageMeta,
        at_ms: u64,
        cause: FailureCause,
        error: Option<&str>,
    ) {
        let consumer = self.holders.get(&entry.seq).map(ToString::to_string);
        let error = error.map(|error| policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned());
        entry.flags |= FLAG_HISTORY;
        let failed = FailedAttempt {
            attempt: entry.attempts,
            deliveries: entry.deliveries,
            at_ms,
            cause,
            error,
            consumer,
        };
        wave.records.push(Record::History { seq: entry.seq, failed });
    }

    pub fn row(&self) -> QueueRow {
        QueueRow {
            id: self.id,
            name: self.name.clone(),
            config: self.config.clone(),
            created_ms: self.created_ms,
            modified_ms: self.modified_ms,
            purged_before: self.purged_before,
            deleted: false,
            revision: self.revision,
            purged_ms: self.purged_ms,
            paused: self.paused.clone(),
        }
    }

    /// Restores the fields of [`Queue::row`], but not the messages.
    pub(super) fn restore(&mut self, row: QueueRow) {
        self.config = row.config;
        self.modified_ms = row.modified_ms;
        self.revision = row.revision;
        self.purged_ms = row.purged_ms;
        self.paused = row.paused;
    }

    pub fn stats(&self) -> QueueStats {
        let counts = self.table.counts();
        QueueStats {
            ready: counts.ready,
            delayed: counts.delayed,
            in_flight: counts.in_flight,
            parked: counts.parked,
            halted: self.table.groups.waiting_in_halted(),
            bytes: counts.bytes,
            oldest_sent_ms: self.table.oldest_sent_ms(),
            totals: self.totals,
        }
    }

    pub fn max_attempts(&self) -> Option<u32> {
        self.config.retry.limit()
    }
}
