use hapax_core::{FailureCause, GroupId, OnDead, Settled, policy};

use super::groups::{Slot, UNGROUPED};
use super::{Engine, Undo};
use crate::record::{DeadRow, FLAG_DEAD, MessageMeta, MessageRow, Record, State, park_flags};
use crate::time::Now;

impl Engine {
    /// Moves a message that is out of attempts or rejected to its dead-letter queue, within this wave, so it is never
    /// in both queues or in neither. Without a dead-letter queue it is parked, not dropped.
    pub(super) fn move_to_dead_letters(
        &mut self,
        now: Now,
        queue: u32,
        slot: Slot,
        cause: FailureCause,
        error: Option<&str>,
    ) -> Settled {
        let policy = self.queue(queue).config.dead_letter.as_ref();
        let target = policy.and_then(|dead| self.names.get(&dead.queue)).copied();
        self.queue_and_wave(queue).0.totals.dead += 1;
        let Some(target) = target else {
            self.park(now, queue, slot, cause);
            return Settled::Parked;
        };
        self.halt(now, queue, slot);
        let (source, wave) = self.queue_and_wave(queue);
        if hapax_core::mutant::is("dead-letter-dropped") {
            source.delete(wave, slot);
            return Settled::Dead;
        }

        let died = *source.table.get(slot);
        let group = source.table.group_name(&died);
        source.remove(wave, slot);
        let dead = DeadRow {
            seq: died.seq,
            source: source.name.clone(),
            source_order: died.order,
            cause,
            error: error.map(|error| policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()),
            attempts: died.attempts,
            deliveries: died.deliveries,
            first_ms: died.first_ms,
            died_ms: now.ms(),
        };
        let (target, wave) = self.queue_and_wave(target);
        let mut entry = died;
        entry.order = wave.next_seq();
        // As in SQS: a standard queue's dead letter keeps its age, a FIFO queue's age starts again.
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

    /// Parks a message in its own queue until an operator decides.
    pub(super) fn park(&mut self, now: Now, queue: u32, slot: Slot, cause: FailureCause) {
        self.halt(now, queue, slot);
        let (queue, wave) = self.queue_and_wave(queue);
        let mut entry = *queue.table.get(slot);
        entry.state = State::Parked;
        entry.flags = park_flags(entry.flags, cause);
        queue.update(wave, slot, entry);
    }

    /// Called before a message is parked or moved to the dead letters. If the queue is configured so, its group is
    /// halted until an operator decides about the message. In-flight messages behind it are put back uncounted;
    /// consumers of messages ahead of it may finish.
    fn halt(&mut self, now: Now, queue: u32, slot: Slot) {
        let source = self.queue(queue);
        let entry = *source.table.get(slot);
        let is_mutant = hapax_core::mutant::is("halted-group-released");
        if source.config.on_dead != OnDead::HaltGroup || entry.group == UNGROUPED || is_mutant {
            return;
        }
        let group = source.table.group_name(&entry).expect("a group has a name");
        self.await_decision(queue, &group, entry.seq);
        self.put_back_later_in_group(now, queue, &entry);
    }

    /// Halts a group until someone decides about a message; 0 stands for one that is not known.
    pub(super) fn await_decision(&mut self, queue: u32, group: &GroupId, seq: u64) {
        let (source, wave) = self.queue_and_wave(queue);
        let at = source.table.groups.intern(Some(group));
        let was = source.table.set_undecided(at, seq, true);
        wave.journal.push(Undo::Undecided { queue, group: at, seq, was });
        wave.records.push(Record::Halt { queue, group: group.clone(), seq });
        wave.durable = true;
        if seq != 0 {
            self.undecided.insert((seq, queue));
        }
    }

    /// The queues in which a group waits for a decision about a message: its own, and those that it died in.
    pub(super) fn waiting_for(&self, seq: u64) -> impl Iterator<Item = u32> {
        self.undecided.range((seq, 0)..=(seq, u32::MAX)).map(|(_, queue)| *queue)
    }

    /// Someone decided about a message, here or among the dead letters: no group waits for it any more. Gives the queues
    /// that had waited.
    pub(super) fn clear_waits(&mut self, now: Now, queue: u32, slot: Slot) -> Vec<u32> {
        if self.undecided.is_empty() {
            return Vec::new();
        }
        let table = &self.queue(queue).table;
        let entry = *table.get(slot);
        let group = table.group_name(&entry);
        let mut waited: Vec<u32> = self.waiting_for(entry.seq).collect();
        waited.retain(|waits| self.clear_wait(now, *waits, group.as_ref(), entry.seq));
        waited
    }

    /// An operator released a parked message in its own queue. A queue that it died in waits on: the message is still a
    /// dead letter.
    pub(super) fn clear_waits_here(&mut self, now: Now, queue: u32, slot: Slot) {
        let table = &self.queue(queue).table;
        let entry = *table.get(slot);
        let group = table.group_name(&entry);
        if self.undecided.contains(&(entry.seq, queue)) {
            self.clear_wait(now, queue, group.as_ref(), entry.seq);
        }
    }

    /// No group of this queue waits for a message any more. If no other does, its age counts again; says whether one had
    /// waited.
    pub(super) fn not_awaited(&mut self, seq: u64, queue: u32) -> bool {
        let was = self.undecided.remove(&(seq, queue));
        if was
            && self.waiting_for(seq).next().is_none()
            && let Some(at) = self.kept_letters.remove(&seq)
            && let Some(queue) = self.queues[at as usize].as_mut()
        {
            queue.table.recheck_letter(seq);
            self.wave.touched.insert(at);
        }
        was
    }

    /// Takes a message out of those that a group waits for; says whether it was among them. `group` is the message's, as
    /// far as that is known.
    pub(super) fn clear_wait(&mut self, now: Now, queue: u32, group: Option<&GroupId>, seq: u64) -> bool {
        self.not_awaited(seq, queue);
        if self.queues.get(queue as usize).is_none_or(Option::is_none) {
            return false;
        }
        let groups = &self.queue(queue).table.groups;
        let Some((at, group)) = groups.waiting_for(group, seq) else { return false };
        let (source, wave) = self.queue_and_wave(queue);
        source.table.set_undecided(at, seq, false);
        wave.journal.push(Undo::Undecided { queue, group: at, seq, was: true });
        wave.records.push(Record::Unhalt { queue, group, seq });
        wave.durable = true;
        self.renew_kept(now, queue, at);
        true
    }

    /// A group is no longer halted: what was kept in it beyond the retention has a whole retention from now on. In this
    /// very wave, since a restart finds no trace of the halt. That costs a write for each such message, once.
    fn renew_kept(&mut self, now: Now, queue: u32, group: u32) {
        let (queue, wave) = self.queue_and_wave(queue);
        if queue.table.groups.is_halted(group) {
            return;
        }
        let retained_from = now.ms().saturating_sub(queue.config.retention_ms);
        let kept = |slot: &Slot| queue.table.get(*slot).base_ms < retained_from;
        for slot in queue.table.groups.waiting(group).filter(kept).collect::<Vec<_>>() {
            let entry = MessageMeta { base_ms: now.ms(), ..*queue.table.get(slot) };
            queue.update(wave, slot, entry);
        }
    }
}
