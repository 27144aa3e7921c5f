//! Receives that name their attempt. Repeated within five minutes, such a receive gives again what is still held of the
//! deliveries that it gave. It is stored together with them, so that it survives whatever they survive.
//!
//! An attempt of which no delivery is held any more tells nothing: repeating it is a new receive. So at most as many are
//! worth keeping as messages are in flight, and forgetting the others changes no answer.

use std::collections::BTreeSet;
use std::ops::Bound;

use hapax_core::policy::{self, ATTEMPT_ID_MS};

use super::groups::Slot;
use super::receive::{Leased, ReceiveRequest};
use super::{Engine, Queue, Undo, Wave};
use crate::maps::NumberMap;
use crate::receipt::DeliveryRef;
use crate::record::{AttemptRow, MessageMeta, Record, State};
use crate::time::Now;

/// Attempts beyond twice the messages in flight that are kept without looking whether they are still of use.
const SPARE: usize = 10_000;
/// How many attempts are looked at for each new one beyond that. At least half of them are of no use then, so their
/// number stops growing.
const LOOKS: usize = 4;
/// Rows of old attempts are deleted together.
const PRUNE_EVERY_MS: u64 = 60_000;

/// The attempts of one queue.
#[derive(Debug, Default)]
pub(crate) struct Attempts {
    known: NumberMap<u128, AttemptRow>,
    by_age: BTreeSet<(u64, u128)>,
    /// Up to where [`Queue::forget_useless`] has looked.
    looked_at: (u64, u128),
}

/// What an attempt id is remembered as: 128 bits of a cryptographic hash.
fn key(id: &str) -> u128 {
    let hash = blake3::hash(id.as_bytes());
    u128::from_le_bytes(hash.as_bytes()[..16].try_into().expect("a hash has 32 bytes"))
}

impl Attempts {
    /// Puts a row, or takes it out; gives the one before.
    pub fn set(&mut self, key: u128, row: Option<AttemptRow>) -> Option<AttemptRow> {
        let added = row.as_ref().map(|row| (row.at_ms, key));
        let before = match row {
            Some(row) => self.known.insert(key, row),
            None => self.known.remove(&key),
        };
        if let Some(before) = &before {
            self.by_age.remove(&(before.at_ms, key));
        }
        self.by_age.extend(added);
        before
    }

    fn get(&self, id: &str, now_ms: u64) -> Option<&AttemptRow> {
        self.known.get(&key(id)).filter(|row| now_ms < row.at_ms + ATTEMPT_ID_MS)
    }

    /// When rows are to be deleted next.
    pub fn next_ms(&self) -> Option<u64> {
        self.by_age.first().map(|(at_ms, _)| (at_ms + ATTEMPT_ID_MS).next_multiple_of(PRUNE_EVERY_MS))
    }

    /// Those that can still be repeated, in order of key.
    #[cfg(test)]
    pub fn remembered(&self, now_ms: u64) -> Vec<AttemptRow> {
        let mut rows: Vec<_> =
            self.known.values().filter(|row| now_ms < row.at_ms + ATTEMPT_ID_MS).cloned().collect();
        rows.sort_by_key(|row| row.key);
        rows
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        assert_eq!(self.known.len(), self.by_age.len());
        self.known.len()
    }
}

impl Queue {
    fn set_attempt(&mut self, wave: &mut Wave, key: u128, row: Option<AttemptRow>) {
        wave.records.push(match &row {
            Some(row) => Record::Attempt { queue: self.id, row: row.clone() },
            None => Record::ForgetAttempt { queue: self.id, key },
        });
        let before = self.attempts.set(key, row);
        wave.journal.push(Undo::Attempt { queue: self.id, key, before: before.map(Box::new) });
    }

    /// Forgets attempts that are too old to be repeated, at most `max`; says how many.
    pub(super) fn forget_attempts(&mut self, wave: &mut Wave, now_ms: u64, max: usize) -> usize {
        let old = |&&(at_ms, _): &&(u64, u128)| at_ms + ATTEMPT_ID_MS <= now_ms;
        let keys: Vec<u128> =
            self.attempts.by_age.iter().take_while(old).take(max).map(|(_, key)| *key).collect();
        for key in &keys {
            self.set_attempt(wave, *key, None);
        }
        keys.len()
    }

    /// The deliveries of an attempt that still hold their messages.
    fn held_of(&self, row: &AttemptRow) -> Vec<(DeliveryRef, Slot)> {
        let held = |&(seq, fence): &(u64, u64)| {
            let slot = self.table.delivered(seq)?;
            let entry = self.table.get(slot);
            let delivery = DeliveryRef { queue: self.id, seq, fence };
            (entry.fence == fence && entry.state == State::InFlight).then_some((delivery, slot))
        };
        row.deliveries.iter().filter_map(held).collect()
    }

    /// Forgets some of the attempts that are of no use, where there are many.
    fn forget_useless(&mut self, wave: &mut Wave) {
        let attempts = &self.attempts;
        if attempts.known.len() < SPARE + 2 * self.table.counts().in_flight as usize {
            return;
        }
        let next = attempts.by_age.range((Bound::Excluded(attempts.looked_at), Bound::Unbounded));
        let next: Vec<_> = next.take(LOOKS).copied().collect();
        let useless = |key: &u128| self.held_of(&self.attempts.known[key]).is_empty();
        let keys: Vec<u128> = next.iter().map(|(_, key)| *key).filter(useless).collect();
        // After the last one it begins again.
        self.attempts.looked_at = if next.len() < LOOKS { (0, 0) } else { next[LOOKS - 1] };
        for key in keys {
            self.set_attempt(wave, key, None);
        }
    }
}

impl Engine {
    /// What a receive gives again, because it was answered before, and until when each is leased then. Leases begin again,
    /// but none becomes shorter: its consumer may have extended it meanwhile. What cannot be renewed and whose lease is
    /// over, although no timer has looked yet, is not given.
    fn held_again(&self, now: Now, queue: u32, request: &ReceiveRequest) -> Vec<(DeliveryRef, Slot, u64)> {
        let queue = self.queue(queue);
        let lease_ms = request.lease_ms.unwrap_or(queue.config.lease_ms);
        let renewed = |(delivery, slot): (DeliveryRef, Slot)| {
            let entry = queue.table.get(slot);
            let renewed_ms = policy::extend_deadline(entry.received_ms, now.ms(), lease_ms);
            let due_ms = renewed_ms.map_or(entry.due_ms, |due_ms| due_ms.max(entry.due_ms));
            (due_ms >= now.ms()).then_some((delivery, slot, due_ms))
        };
        let row = request.attempt_id.as_ref().and_then(|id| queue.attempts.get(id, now.ms()));
        let held = row.map(|row| queue.held_of(row)).unwrap_or_default();
        held.into_iter().filter_map(renewed).collect()
    }

    /// Whether a receive repeats one whose deliveries are still held.
    pub fn repeats(&self, now: Now, queue: u32, request: &ReceiveRequest) -> bool {
        !self.held_again(now, queue, request).is_empty()
    }

    /// The deliveries of a receive that is repeated, as far as they still hold their messages and as many as are asked
    /// for.
    pub(super) fn receive_again(&mut self, now: Now, queue: u32, request: &ReceiveRequest) -> Vec<Leased> {
        let held = self.held_again(now, queue, request);
        if held.is_empty() {
            return Vec::new();
        }
        let (queue, wave) = self.queue_and_wave(queue);
        let renew = |(delivery, slot, due_ms): (DeliveryRef, Slot, u64)| {
            let entry = MessageMeta { due_ms, ..*queue.table.get(slot) };
            queue.update(wave, slot, entry);
            Leased { delivery, entry }
        };
        held.into_iter().take(request.max).map(renew).collect()
    }

    /// Remembers what a receive gave, so that it can be repeated.
    pub fn remember_receive(&mut self, now: Now, queue: u32, id: &str, deliveries: &[DeliveryRef]) {
        let (queue, wave) = self.queue_and_wave(queue);
        let deliveries: Vec<_> = deliveries.iter().map(|delivery| (delivery.seq, delivery.fence)).collect();
        let known = queue.attempts.get(id, now.ms());
        let repeated =
            |row: &&AttemptRow| deliveries.iter().any(|delivery| row.deliveries.contains(delivery));
        let at_ms = match known.filter(repeated) {
            Some(row) if deliveries.iter().all(|delivery| row.deliveries.contains(delivery)) => return,
            // One of them was found damaged and another taken in its place.
            Some(row) => row.at_ms,
            None => now.ms(),
        };
        queue.forget_useless(wave);
        let key = key(id);
        queue.set_attempt(wave, key, Some(AttemptRow { key, at_ms, deliveries }));
    }
}
