//! Selects the next message: groups, their order, and fairness between them.
//!
//! Every message belongs to a group; messages without one share group 0. The waiting messages of a group are ordered by
//! priority, then by position. `heads` holds the first message of every group that can be received from now, so the
//! next message is found without checking blocked groups.
//!
//! A failed message gets a new requeue order: on a standard queue it waits behind the ready messages. On a FIFO queue
//! it keeps its position, and its group waits behind the other groups. The order is not stored: after a restart a failed
//! message may come first again.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use hapax_core::GroupId;

/// Index of an entry in a table.
pub(crate) type Slot = u32;

/// The group shared by all messages without a group.
pub(crate) const UNGROUPED: u32 = 0;

/// Orders messages: smaller comes first. The priority is in the top byte, the position below it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key(u64);

impl Key {
    pub fn new(priority: u8, order: u64) -> Self {
        assert!(order < 1 << 56, "2^56 messages were sent");
        Self(u64::from(u8::MAX - priority) << 56 | order)
    }

    fn order(self) -> u64 {
        self.0 & ((1 << 56) - 1)
    }

    fn has_priority_of(self, other: Self) -> bool {
        self.0 >> 56 == other.0 >> 56
    }
}

/// Minimum number of in-flight messages of a noisy tenant.
const NOISY_IN_FLIGHT_MIN: u32 = 30;
/// A noisy tenant also holds more than one in this many of the queue's in-flight messages.
const NOISY_SHARE: u64 = 10;

#[derive(Debug, Default)]
struct Group {
    name: Option<GroupId>,
    /// Waiting messages and whether each is visible. Invisible ones are kept only in FIFO queues, where order matters.
    waiting: BTreeMap<Key, (Slot, bool)>,
    /// In-flight messages by position; only in FIFO queues, where order matters.
    in_flight_by_order: BTreeMap<u64, Slot>,
    in_flight: u32,
    /// Messages in any state.
    members: u32,
    /// Parked messages and dead letters that need a decision: while there are any, the group is halted.
    undecided: BTreeSet<u64>,
    /// The position from which it waits behind other groups (FIFO).
    requeue_order: u64,
    head: Option<Key>,
}

impl Group {
    /// The first position in flight (FIFO): nothing behind it can be delivered.
    fn first_in_flight(&self) -> u64 {
        if hapax_core::mutant::is("group-overtaken") {
            return u64::MAX;
        }
        self.in_flight_by_order.first_key_value().map_or(u64::MAX, |(order, _)| *order)
    }
}

/// All groups of one queue.
#[derive(Debug)]
pub(crate) struct Groups {
    fifo: bool,
    list: Vec<Option<Group>>,
    free: Vec<u32>,
    names: HashMap<GroupId, u32>,
    heads: BTreeMap<Key, u32>,
    in_flight: u64,
    halted: BTreeSet<u32>,
    /// Groups that may have become empty. They are dropped when the wave is committed, because a rollback needs them.
    idle: Vec<u32>,
}

impl Groups {
    pub fn new(fifo: bool) -> Self {
        Self {
            fifo,
            list: vec![Some(Group::default())],
            free: Vec::new(),
            names: HashMap::new(),
            heads: BTreeMap::new(),
            in_flight: 0,
            halted: BTreeSet::new(),
            idle: Vec::new(),
        }
    }

    fn group(&self, at: u32) -> &Group {
        self.list[at as usize].as_ref().expect("a group in use is there")
    }

    fn group_mut(&mut self, at: u32) -> &mut Group {
        self.list[at as usize].as_mut().expect("a group in use is there")
    }

    pub fn name(&self, at: u32) -> Option<&GroupId> {
        self.group(at).name.as_ref()
    }

    pub fn find(&self, name: &GroupId) -> Option<u32> {
        self.names.get(name).copied()
    }

    /// The group's index; creates the group if it is new.
    pub fn intern(&mut self, name: Option<&GroupId>) -> u32 {
        let Some(name) = name else { return UNGROUPED };
        if let Some(&at) = self.names.get(name) {
            return at;
        }
        let group = Group { name: Some(name.clone()), ..Group::default() };
        let at = self.free.pop().unwrap_or_else(|| {
            self.list.push(None);
            self.list.len() as u32 - 1
        });
        self.list[at as usize] = Some(group);
        self.names.insert(name.clone(), at);
        self.idle.push(at);
        at
    }

    pub fn join(&mut self, at: u32) {
        self.group_mut(at).members += 1;
    }

    pub fn leave(&mut self, at: u32) {
        let group = self.group_mut(at);
        group.members -= 1;
        if group.members == 0 && at != UNGROUPED {
            self.idle.push(at);
        }
    }

    /// Removes groups that are no longer referenced.
    pub fn sweep(&mut self) {
        for at in std::mem::take(&mut self.idle) {
            let gone = self.list[at as usize]
                .as_ref()
                .is_some_and(|group| group.members == 0 && group.undecided.is_empty());
            if gone {
                let group = self.list[at as usize].take().expect("just seen");
                self.names.remove(group.name.as_ref().expect("only named groups go idle"));
                self.free.push(at);
            }
        }
    }

    /// Adds a message that waits to be received, `visible` or not yet.
    pub fn add_waiting(&mut self, at: u32, key: Key, slot: Slot, visible: bool) {
        if visible || self.fifo {
            let before = self.group_mut(at).waiting.insert(key, (slot, visible));
            assert!(before.is_none(), "two messages have the same place");
            self.refresh(at);
        }
    }

    pub fn remove_waiting(&mut self, at: u32, key: Key, visible: bool) {
        if visible || self.fifo {
            let before = self.group_mut(at).waiting.remove(&key);
            assert!(before.is_some(), "a waiting message is in its group");
            self.refresh(at);
        }
    }

    pub fn add_in_flight(&mut self, at: u32, order: u64, slot: Slot) {
        self.in_flight += 1;
        self.group_mut(at).in_flight += 1;
        if self.fifo {
            self.group_mut(at).in_flight_by_order.insert(order, slot);
            self.refresh(at);
        }
    }

    pub fn remove_in_flight(&mut self, at: u32, order: u64) {
        self.in_flight -= 1;
        self.group_mut(at).in_flight -= 1;
        if self.fifo {
            self.group_mut(at).in_flight_by_order.remove(&order);
            self.refresh(at);
        }
    }

    /// In-flight messages of a FIFO group behind the given position.
    pub fn in_flight_behind(&self, at: u32, order: u64) -> Vec<Slot> {
        self.group(at).in_flight_by_order.range(order + 1..).map(|(_, &slot)| slot).collect()
    }

    pub fn is_halted(&self, at: u32) -> bool {
        self.halted.contains(&at)
    }

    /// What waits in a group; in a FIFO queue that includes what is not visible yet.
    pub fn waiting(&self, at: u32) -> impl Iterator<Item = Slot> {
        self.group(at).waiting.values().map(|(slot, _)| *slot)
    }

    /// The group that is halted for a message, with its name. `name` tells where to look; a message whose row is damaged
    /// has lost its group, so all that are halted are looked at then.
    pub fn waiting_for(&self, name: Option<&GroupId>, seq: u64) -> Option<(u32, GroupId)> {
        let waits = |at: &u32| self.group(*at).undecided.contains(&seq);
        let named = name.and_then(|name| self.find(name)).filter(waits);
        let at = named.or_else(|| self.halted.iter().copied().find(waits))?;
        Some((at, self.name(at)?.clone()))
    }

    /// The messages that a halted group waits for a decision about.
    pub fn undecided(&self, at: u32) -> &BTreeSet<u64> {
        &self.group(at).undecided
    }

    /// Adds a message to those that need a decision, or removes it. Returns whether it was there.
    pub fn set_undecided(&mut self, at: u32, seq: u64, undecided: bool) -> bool {
        let group = self.group_mut(at);
        let was = if undecided { !group.undecided.insert(seq) } else { group.undecided.remove(&seq) };
        if group.undecided.is_empty() {
            self.halted.remove(&at);
            self.idle.push(at);
        } else {
            self.halted.insert(at);
        }
        self.refresh(at);
        was
    }

    /// Halted groups by name, each with the messages that it waits for.
    pub fn halted(&self) -> Vec<(GroupId, Vec<u64>)> {
        let named = |&at: &u32| {
            let group = self.group(at);
            Some((group.name.clone()?, group.undecided.iter().copied().collect()))
        };
        let mut halted: Vec<_> = self.halted.iter().filter_map(named).collect();
        halted.sort();
        halted
    }

    /// Messages that wait in halted groups.
    pub fn waiting_in_halted(&self) -> u64 {
        self.halted.iter().map(|at| self.group(*at).waiting.len() as u64).sum()
    }

    /// A FIFO group waits behind the others from `requeue_order` on; returns the previous value.
    pub fn set_requeue_order(&mut self, at: u32, requeue_order: u64) -> u64 {
        let before = std::mem::replace(&mut self.group_mut(at).requeue_order, requeue_order);
        self.refresh(at);
        before
    }

    fn refresh(&mut self, at: u32) {
        let fifo = self.fifo;
        let group = self.group_mut(at);
        let first = group.waiting.first_key_value().filter(|(_, (_, visible))| *visible);
        let head = match first {
            Some((key, _)) if !fifo => Some(*key),
            Some((key, _)) if group.undecided.is_empty() && group.first_in_flight() > key.order() => {
                Some(Key::new(0, key.order().max(group.requeue_order)))
            }
            _ => None,
        };
        let before = std::mem::replace(&mut group.head, head);
        if before != head {
            if let Some(before) = before {
                self.heads.remove(&before);
            }
            if let Some(head) = head {
                self.heads.insert(head, at);
            }
        }
    }

    pub fn any_available(&self) -> bool {
        !self.heads.is_empty()
    }

    /// The next messages of one group. Standard queue: one. FIFO: up to `max` consecutive visible messages with nothing
    /// in flight before them.
    pub fn next(&self, max: usize) -> Vec<Slot> {
        let Some(at) = self.pick() else { return Vec::new() };
        let (group, take) = (self.group(at), if self.fifo { max } else { 1 });
        let first_in_flight = group.first_in_flight();
        let row =
            group.waiting.iter().take_while(|(key, (_, visible))| *visible && key.order() < first_in_flight);
        row.take(take).map(|(_, (slot, _))| *slot).collect()
    }

    /// Of the highest priority, picks quiet tenants first; among noisy ones, the one with the fewest messages in flight.
    fn pick(&self) -> Option<u32> {
        let (highest, first) = self.heads.first_key_value()?;
        if self.fifo || !self.is_noisy(*first) {
            return Some(*first);
        }
        let equal = || {
            let heads = self.heads.iter().take_while(|(key, _)| key.has_priority_of(*highest));
            heads.map(|(_, at)| *at)
        };
        // Each noisy group holds more than a tenth, so there are at most nine, and few heads are skipped.
        equal().find(|&at| !self.is_noisy(at)).or_else(|| equal().min_by_key(|&at| self.group(at).in_flight))
    }

    fn is_noisy(&self, at: u32) -> bool {
        let in_flight = self.group(at).in_flight;
        at != UNGROUPED
            && in_flight >= NOISY_IN_FLIGHT_MIN
            && u64::from(in_flight) * NOISY_SHARE > self.in_flight
    }

    /// Checks the invariants; `waiting` is the number of visible waiting messages.
    #[cfg(test)]
    pub fn check(&self, waiting: usize, in_flight: usize) {
        let groups = || self.list.iter().flatten();
        let visible: usize =
            groups().flat_map(|g| g.waiting.values()).filter(|(_, visible)| *visible).count();
        assert_eq!(visible, waiting, "every ready message waits in its group");
        assert_eq!(groups().map(|g| g.in_flight as usize).sum::<usize>(), in_flight);
        assert_eq!(self.in_flight as usize, in_flight);
        assert_eq!(groups().filter(|g| g.head.is_some()).count(), self.heads.len());
        for (key, at) in &self.heads {
            assert_eq!(self.group(*at).head, Some(*key));
        }
        if self.fifo {
            for group in groups() {
                assert_eq!(group.in_flight_by_order.len(), group.in_flight as usize);
                let first = group.waiting.first_key_value().map_or(u64::MAX, |(key, _)| key.order());
                assert!(
                    group.head.is_none() || first < group.first_in_flight(),
                    "nothing is in flight before a head"
                );
            }
            let halted = |at: &u32| !self.group(*at).undecided.is_empty();
            assert!(self.halted.iter().all(halted));
        }
    }
}
