use hapax_core::{Cause, OnDead, Settled, policy};

use super::groups::{Slot, UNGROUPED};
use super::{Engine, Queue, Undo, Wave};
use crate::record::{DeadRow, FLAG_DEAD, MessageMeta, MessageRow, Record, State, park_flags};
use crate::time::Now;

impl Engine {
    /// A message is out of attempts or rejected: it moves to its dead-letter queue in this very wave, so it is never
    /// in both or in neither. Where there is no such queue it is parked, not dropped.
    pub(super) fn die(
        &mut self,
        now: Now,
        queue: u32,
        slot: Slot,
        cause: Cause,
        error: Option<&str>,
    ) -> Settled {
        let policy = self.queue(queue).config.dead_letter.as_ref();
        let target = policy.and_then(|dead| self.names.get(&dead.queue)).copied();
        let (source, wave) = self.at(queue);
        source.totals.dead += 1;
        let Some(target) = target else {
            source.park(wave, slot, cause);
            return Settled::Parked;
        };

        let died = *source.table.get(slot);
        let group = source.table.group_name(&died);
        source.remove(wave, slot);
        let dead = DeadRow {
            seq: died.seq,
            source: source.name.clone(),
            source_order: died.order,
            cause,
            error: error.map(|error| policy::cut(error, policy::ERROR_BYTES_MAX).to_owned()),
            attempts: died.attempts,
            deliveries: died.deliveries,
            first_ms: died.first_ms,
            died_ms: now.ms(),
        };
        if source.config.on_dead == OnDead::HaltGroup {
            self.halt(now, queue, &died);
        }

        let (target, wave) = self.at(target);
        let mut entry = died;
        entry.order = wave.next_seq();
        // As SQS: a standard queue's dead letter keeps its age, a FIFO queue's starts anew.
        entry.base_ms = if target.config.is_fifo() { now.ms() } else { died.base_ms };
        entry.due_ms = now.ms();
        entry.state = State::Ready;
        entry.attempts = 0;
        entry.first_ms = 0;
        entry.received_ms = 0;
        entry.flags |= FLAG_DEAD;
        let slot = target.insert(wave, entry, group.as_ref());
        let entry = *target.table.get(slot);
        wave.records.push(Record::Update(MessageRow { queue: target.id, entry, group }));
        wave.records.push(Record::Dead(dead));
        Settled::Dead
    }

    /// A group stands still. What is in flight behind the dead one comes back uncounted; who works on one ahead of it
    /// may finish.
    fn halt(&mut self, now: Now, queue: u32, died: &MessageMeta) {
        let group = died.group;
        if group == UNGROUPED {
            return;
        }
        for slot in self.queue(queue).table.groups.flying_behind(group, died.order) {
            self.put_back(now, queue, slot, 0);
        }
        let (queue, wave) = self.at(queue);
        queue.set_halted(wave, group, true);
    }
}

impl Queue {
    pub(super) fn park(&mut self, wave: &mut Wave, slot: Slot, cause: Cause) {
        let mut entry = *self.table.get(slot);
        entry.state = State::Parked;
        entry.flags = park_flags(entry.flags, cause);
        self.update(wave, slot, entry);
    }

    pub(super) fn set_halted(&mut self, wave: &mut Wave, group: u32, halted: bool) {
        let before = self.table.groups.is_halted(group);
        if before == halted {
            return;
        }
        self.table.groups.set_halted(group, halted);
        wave.journal.push(Undo::Halted { queue: self.id, group, before });
        let (queue, group) =
            (self.id, self.table.groups.name(group).expect("a halted group has a name").clone());
        wave.records.push(if halted {
            Record::Halt { queue, group }
        } else {
            Record::Unhalt { queue, group }
        });
    }
}
