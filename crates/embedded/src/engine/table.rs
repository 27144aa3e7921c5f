//! The live messages of one queue, with every index derived from their state.
//!
//! Only `insert`, `replace` and `remove` change a message; each moves it between the indexes. Therefore a wave can be
//! undone by restoring old entries.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use hapax_core::{FailureCause, GroupId};

use super::groups::{Groups, Key, Slot};
use crate::maps::NumberMap;
use crate::record::{MessageMeta, State, parked_cause};

#[derive(Debug)]
pub(crate) struct Table {
    entries: Vec<Option<MessageMeta>>,
    free: Vec<Slot>,
    pub groups: Groups,
    /// Delayed and in-flight messages by due time, then by position: leases that expire at the same time expire in
    /// order, even though a restart assigns new slots.
    due: BTreeSet<(u64, u64, Slot)>,
    /// Waiting messages by the start of their retention.
    aging: BTreeSet<(u64, Slot)>,
    /// Messages in flight and those in `kept` likewise: they are not dropped, but count for the oldest.
    aging_kept: BTreeSet<(u64, Slot)>,
    /// Waiting messages, with their group, whose retention is over but that are not dropped: their group is halted, or
    /// another queue's group is halted for them. They get here one by one when their time comes, so that halting a group
    /// costs the same however many messages wait in it.
    kept: BTreeSet<(u32, Slot)>,
    /// Groups whose kept messages may have to be dropped now.
    recheck: BTreeSet<u32>,
    /// Requeue order of failed messages of a standard queue: they wait behind those that were ready then.
    requeue_orders: NumberMap<u64, u64>,
    /// Messages that were delivered at least once: only these can be named by a receipt.
    delivered: NumberMap<u64, Slot>,
    parked: BTreeMap<u64, Slot>,
    /// All messages by place and number, while the queue is exported.
    places: Option<BTreeMap<(u64, u64), Slot>>,
    ready: usize,
    delayed: usize,
    in_flight: usize,
    bytes: u64,
}

impl Table {
    pub fn new(fifo: bool) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            groups: Groups::new(fifo),
            due: BTreeSet::new(),
            aging: BTreeSet::new(),
            aging_kept: BTreeSet::new(),
            kept: BTreeSet::new(),
            recheck: BTreeSet::new(),
            requeue_orders: NumberMap::default(),
            delivered: NumberMap::default(),
            parked: BTreeMap::new(),
            places: None,
            ready: 0,
            delayed: 0,
            in_flight: 0,
            bytes: 0,
        }
    }

    pub fn get(&self, slot: Slot) -> &MessageMeta {
        self.entries[slot as usize].as_ref().expect("a slot in use holds an entry")
    }

    /// The entry at `slot`, if it still belongs to message `seq`.
    pub fn holds(&self, slot: Slot, seq: u64) -> Option<&MessageMeta> {
        self.entries.get(slot as usize)?.as_ref().filter(|entry| entry.seq == seq)
    }

    pub fn insert(&mut self, entry: MessageMeta) -> Slot {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() as Slot - 1
        });
        self.put(slot, entry);
        slot
    }

    /// Puts an entry back into a free slot, to undo a removal.
    pub fn restore(&mut self, slot: Slot, entry: MessageMeta) {
        let at = self.free.iter().rposition(|&free| free == slot).expect("a removed slot is free");
        self.free.swap_remove(at);
        self.put(slot, entry);
    }

    fn put(&mut self, slot: Slot, entry: MessageMeta) {
        self.entries[slot as usize] = Some(entry);
        self.groups.join(entry.group);
        self.bytes += u64::from(entry.bytes);
        self.index(slot, &entry);
    }

    pub fn remove(&mut self, slot: Slot) -> MessageMeta {
        let entry = self.entries[slot as usize].take().expect("a slot in use holds an entry");
        self.unindex(slot, &entry);
        if !self.requeue_orders.is_empty() {
            self.requeue_orders.remove(&entry.seq);
        }
        self.groups.leave(entry.group);
        self.bytes -= u64::from(entry.bytes);
        self.free.push(slot);
        entry
    }

    /// Replaces an entry; its message, group and size must stay the same.
    pub fn replace(&mut self, slot: Slot, entry: MessageMeta) -> MessageMeta {
        let before = self.entries[slot as usize].replace(entry).expect("a slot in use holds an entry");
        assert!(before.seq == entry.seq && before.group == entry.group && before.bytes == entry.bytes);
        self.unindex(slot, &before);
        self.index(slot, &entry);
        before
    }

    /// Makes a failed in-flight message wait behind the messages that are ready now. `requeue_order` is comparable with
    /// positions. Returns the previous value.
    pub fn set_requeue_order(&mut self, slot: Slot, requeue_order: u64) -> Option<u64> {
        let entry = self.get(slot);
        assert_eq!(entry.state, State::InFlight, "a waiting message is found by its requeue order");
        let seq = entry.seq;
        self.requeue_orders.insert(seq, requeue_order)
    }

    /// Restores a message's previous requeue order; the message is in flight, as it was when the order was set.
    pub fn restore_requeue_order(&mut self, seq: u64, before: Option<u64>) {
        match before {
            Some(requeue_order) => drop(self.requeue_orders.insert(seq, requeue_order)),
            None => drop(self.requeue_orders.remove(&seq)),
        }
    }

    /// Adds a message to those that its group waits for, or removes it. Returns whether it was there.
    pub fn set_undecided(&mut self, group: u32, seq: u64, undecided: bool) -> bool {
        let was = self.groups.set_undecided(group, seq, undecided);
        if !self.groups.is_halted(group) {
            self.recheck.insert(group);
        }
        was
    }

    /// A waiting message is not dropped although its retention is over, until its group is rechecked.
    pub fn keep(&mut self, slot: Slot) {
        let (base_ms, group) = (self.get(slot).base_ms, self.get(slot).group);
        assert!(self.aging.remove(&(base_ms, slot)), "a waiting message has an age");
        self.aging_kept.insert((base_ms, slot));
        self.kept.insert((group, slot));
    }

    /// No group waits for a dead letter any more, so its age counts again.
    pub fn recheck_letter(&mut self, seq: u64) {
        if let Some(slot) = self.delivered(seq) {
            self.recheck.insert(self.get(slot).group);
        }
    }

    /// Lets the age of one kept message count again, if that is due for any.
    pub fn recheck_one(&mut self) -> bool {
        while let Some(&group) = self.recheck.first() {
            let first = self.kept.range((group, 0)..=(group, Slot::MAX)).next().copied();
            if let Some((_, slot)) = first {
                self.kept.remove(&(group, slot));
                let aged = (self.get(slot).base_ms, slot);
                self.aging_kept.remove(&aged);
                self.aging.insert(aged);
                return true;
            }
            self.recheck.remove(&group);
        }
        false
    }

    fn key(&self, entry: &MessageMeta) -> Key {
        Key::new(entry.priority, self.requeue_orders.get(&entry.seq).copied().unwrap_or(entry.order))
    }

    fn forget_age(&mut self, slot: Slot, entry: &MessageMeta) {
        let kept = self.kept.remove(&(entry.group, slot));
        let from = if kept { &mut self.aging_kept } else { &mut self.aging };
        assert!(from.remove(&(entry.base_ms, slot)), "a waiting message has an age");
    }

    fn index(&mut self, slot: Slot, entry: &MessageMeta) {
        let key = self.key(entry);
        if let Some(places) = &mut self.places {
            places.insert((entry.order, entry.seq), slot);
        }
        match entry.state {
            State::Ready => {
                self.ready += 1;
                self.aging.insert((entry.base_ms, slot));
                self.groups.add_waiting(entry.group, key, slot, true);
            }
            State::Delayed => {
                self.delayed += 1;
                self.aging.insert((entry.base_ms, slot));
                self.due.insert((entry.due_ms, entry.order, slot));
                self.groups.add_waiting(entry.group, key, slot, false);
            }
            State::InFlight => {
                self.in_flight += 1;
                self.aging_kept.insert((entry.base_ms, slot));
                self.due.insert((entry.due_ms, entry.order, slot));
                self.groups.add_in_flight(entry.group, entry.order, slot);
            }
            State::Parked => {
                self.parked.insert(entry.seq, slot);
            }
        }
        if entry.fence != 0 {
            self.delivered.insert(entry.seq, slot);
        }
    }

    fn unindex(&mut self, slot: Slot, entry: &MessageMeta) {
        let key = self.key(entry);
        if let Some(places) = &mut self.places {
            places.remove(&(entry.order, entry.seq));
        }
        match entry.state {
            State::Ready => {
                self.ready -= 1;
                self.forget_age(slot, entry);
                self.groups.remove_waiting(entry.group, key, true);
            }
            State::Delayed => {
                self.delayed -= 1;
                self.forget_age(slot, entry);
                self.due.remove(&(entry.due_ms, entry.order, slot));
                self.groups.remove_waiting(entry.group, key, false);
            }
            State::InFlight => {
                self.in_flight -= 1;
                self.aging_kept.remove(&(entry.base_ms, slot));
                self.due.remove(&(entry.due_ms, entry.order, slot));
                self.groups.remove_in_flight(entry.group, entry.order);
            }
            State::Parked => {
                self.parked.remove(&entry.seq);
            }
        }
        if entry.fence != 0 {
            self.delivered.remove(&entry.seq);
        }
    }

    /// The slot of a message that a receipt may name.
    pub fn delivered(&self, seq: u64) -> Option<Slot> {
        self.delivered.get(&seq).copied()
    }

    pub fn parked(&self, seq: u64) -> Option<Slot> {
        self.parked.get(&seq).copied()
    }

    pub fn parked_for(&self, cause: FailureCause) -> Vec<u64> {
        let of = |(_, slot): &(&u64, &Slot)| parked_cause(self.get(**slot).flags) == Some(cause);
        self.parked.iter().filter(of).map(|(seq, _)| *seq).collect()
    }

    /// The first due delayed or in-flight message, if it is due by `now_ms`.
    pub fn first_due(&self, now_ms: u64) -> Option<Slot> {
        self.due.first().filter(|(due_ms, ..)| *due_ms <= now_ms).map(|(.., slot)| *slot)
    }

    /// The waiting message with the earliest start of retention, if that is before `before_ms`.
    pub fn first_aged(&self, before_ms: u64) -> Option<Slot> {
        self.aging.first().filter(|(base_ms, _)| *base_ms < before_ms).map(|(_, slot)| *slot)
    }

    pub fn next_due_ms(&self) -> Option<u64> {
        self.due.first().map(|(due_ms, ..)| *due_ms)
    }

    /// When the first retention of `retention_ms` ends; 0 if kept messages have to be looked at.
    pub fn next_aging_ms(&self, retention_ms: u64) -> Option<u64> {
        if !self.recheck.is_empty() {
            return Some(0);
        }
        self.aging.first().map(|(base_ms, _)| base_ms + retention_ms + 1)
    }

    /// When the oldest message that is not parked was sent.
    pub fn oldest_sent_ms(&self) -> Option<u64> {
        let firsts = self.aging.first().into_iter().chain(self.aging_kept.first());
        firsts.min().map(|(_, slot)| self.get(*slot).sent_ms)
    }

    /// Kept messages that are not in a halted group and not to be looked at again: those that others wait for.
    #[cfg(test)]
    pub fn kept_for_others(&self) -> impl Iterator<Item = u64> {
        let own = |group: &u32| self.groups.is_halted(*group) || self.recheck.contains(group);
        self.kept.iter().filter(move |(group, _)| !own(group)).map(|(_, slot)| self.get(*slot).seq)
    }

    /// The messages behind a place, in order. The first call looks at every message; then the order is kept up to date
    /// until [`Self::forget_places`].
    pub fn behind(&mut self, place: u64) -> impl Iterator<Item = &MessageMeta> {
        if self.places.is_none() {
            self.places = Some(self.iter().map(|(slot, entry)| ((entry.order, entry.seq), slot)).collect());
        }
        let behind = (Bound::Excluded((place, u64::MAX)), Bound::Unbounded);
        self.places.iter().flat_map(move |places| places.range(behind)).map(|(_, slot)| self.get(*slot))
    }

    pub fn forget_places(&mut self) {
        self.places = None;
    }

    /// All messages; slow, for rare operations.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, &MessageMeta)> {
        self.entries.iter().enumerate().filter_map(|(slot, entry)| Some((slot as Slot, entry.as_ref()?)))
    }

    pub fn group_name(&self, entry: &MessageMeta) -> Option<GroupId> {
        self.groups.name(entry.group).cloned()
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn counts(&self) -> Counts {
        let parked = self.parked.len() as u64;
        let (ready, delayed, in_flight) = (self.ready as u64, self.delayed as u64, self.in_flight as u64);
        Counts { ready, delayed, in_flight, parked, bytes: self.bytes }
    }

    /// Checks that every index agrees with the entries.
    #[cfg(test)]
    pub fn check(&self) {
        let count = |state| self.iter().filter(|(_, entry)| entry.state == state).count();
        let counts = self.counts();
        assert_eq!(count(State::Ready) as u64, counts.ready);
        assert_eq!(count(State::Delayed) as u64, counts.delayed);
        assert_eq!(count(State::InFlight) as u64, counts.in_flight);
        assert_eq!(count(State::Parked) as u64, counts.parked);
        assert_eq!(self.due.len() as u64, counts.delayed + counts.in_flight);
        assert_eq!(
            (self.aging.len() + self.aging_kept.len()) as u64,
            counts.ready + counts.delayed + counts.in_flight
        );
        assert_eq!(self.aging_kept.len(), self.in_flight + self.kept.len());
        assert_eq!(self.iter().filter(|(_, entry)| entry.fence != 0).count(), self.delivered.len());
        assert_eq!(self.iter().map(|(_, entry)| u64::from(entry.bytes)).sum::<u64>(), self.bytes);
        for (_, entry) in self.iter() {
            assert!(entry.state != State::InFlight || (entry.fence != 0 && entry.attempts > 0));
            assert!(entry.deliveries >= entry.attempts, "every attempt is a delivery");
        }
        if let Some(places) = &self.places {
            let expected = self.iter().map(|(slot, entry)| ((entry.order, entry.seq), slot)).collect();
            assert_eq!(*places, expected);
        }
        self.groups.check(self.ready, self.in_flight);
    }
}

/// Number of messages in each state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counts {
    pub ready: u64,
    pub delayed: u64,
    pub in_flight: u64,
    pub parked: u64,
    pub bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The writer stands still meanwhile, so it must not depend on how many messages wait.
    #[test]
    fn halting_a_group_moves_none_of_its_messages() {
        let mut table = Table::new(true);
        let group = table.groups.intern(Some(&"g".parse().unwrap()));
        for seq in 1..=1_000 {
            table.insert(MessageMeta { state: State::Ready, group, ..MessageMeta::unreadable(seq) });
        }
        for halted in [true, false] {
            table.set_undecided(group, 7, halted);
            assert_eq!((table.aging.len(), table.aging_kept.len()), (1_000, 0));
            table.check();
        }
    }
}
