//! Changes caused by time: delays end, leases expire, retention ends, rows are swept.

use hapax_core::FailureCause;

use super::{Engine, Undo};
use crate::record::{Record, State};
use crate::time::Now;

/// Maximum number of messages whose timers one wave processes, so that it stays short.
const STEPS_MAX: usize = 2_000;
/// Maximum number of rows of purged and deleted queues that one wave deletes.
const SWEEP_MAX: usize = 500;

impl Engine {
    /// When the next timer is due, in the store's time.
    pub fn next_timer(&self) -> Option<u64> {
        let frozen = self.ledger_copy().is_some();
        let released = self.releases.is_empty() || frozen;
        let idle = self.sweep.is_empty() && self.tombstones.is_empty() && released;
        let now = if idle { None } else { Some(0) };
        let queues = self.timers.first().map(|(at_ms, _)| *at_ms);
        let tasks = self.tasks.values().filter_map(super::Task::next_ms).min();
        let ledger = self.ledger.next_ms().filter(|_| !frozen);
        now.into_iter().chain(queues).chain(tasks).chain(ledger).min()
    }

    /// Processes due timers up to a bound; the rest stays due. The writer steps the redrives, because they read from
    /// the storage.
    pub fn run_timers(&mut self, now: Now, mut random: impl FnMut() -> u64) {
        let mut steps = 0;
        while let Some(&(at_ms, queue)) = self.timers.first() {
            if at_ms > now.ms() || steps >= STEPS_MAX {
                break;
            }
            steps += self.run_queue(now, queue, STEPS_MAX - steps, &mut random);
            self.reschedule(queue);
            steps += 1;
        }
        self.sweep_rows();
    }

    fn run_queue(
        &mut self,
        now: Now,
        queue: u32,
        steps_max: usize,
        random: &mut impl FnMut() -> u64,
    ) -> usize {
        let mut steps = 0;
        while steps < steps_max {
            let Some(slot) = self.queue(queue).table.first_due(now.ms()) else { break };
            let mut entry = *self.queue(queue).table.get(slot);
            match entry.state {
                State::Delayed => {
                    // In memory only: the row holds the time since when it is ready.
                    entry.state = State::Ready;
                    let (queue, wave) = self.queue_and_wave(queue);
                    queue.replace(wave, slot, entry);
                }
                State::InFlight => {
                    self.queue_and_wave(queue).0.totals.expired += 1;
                    self.put_back_rest_of_batch(now, queue, &entry);
                    if hapax_core::mutant::is("expired-message-dropped") {
                        let (queue, wave) = self.queue_and_wave(queue);
                        queue.delete(wave, slot);
                        continue;
                    }
                    self.fail(now, queue, slot, FailureCause::Expired, None, None, random());
                }
                State::Ready | State::Parked => unreachable!("only delayed and in-flight messages are due"),
            }
            steps += 1;
        }
        let (queue, wave) = self.queue_and_wave(queue);
        queue.forget_ids(wave, now.ms());
        steps += queue.forget_attempts(wave, now.ms(), steps_max.saturating_sub(steps));
        let id = queue.id;
        while steps < steps_max && self.drop_aged(now, id) {
            steps += 1;
        }
        steps
    }

    /// Drops one message whose retention is over, or notes why it is kept; says whether there was one to look at. What
    /// waits in a halted group and the dead letters that a group waits for are not dropped: someone has to decide first.
    fn drop_aged(&mut self, now: Now, id: u32) -> bool {
        let queue = self.queue_and_wave(id).0;
        if queue.table.recheck_one() {
            return true;
        }
        let retained_from = now.ms().saturating_sub(queue.config.retention_ms);
        let Some(slot) = queue.table.first_aged(retained_from) else { return false };
        let entry = *queue.table.get(slot);
        let halted = queue.table.groups.is_halted(entry.group);
        let awaited = self.waiting_for(entry.seq).next().is_some();
        if awaited {
            self.kept_letters.insert(entry.seq, id);
        }
        let (queue, wave) = self.queue_and_wave(id);
        if halted || awaited {
            queue.table.keep(slot);
        } else {
            queue.delete(wave, slot);
            queue.totals.retention_dropped += 1;
        }
        true
    }

    /// Files when the queue needs attention next.
    pub(super) fn reschedule(&mut self, id: u32) {
        let Some(queue) = self.queues.get_mut(id as usize).and_then(Option::as_mut) else { return };
        let due = queue.table.next_due_ms();
        let aging = queue.table.next_aging_ms(queue.config.retention_ms);
        let dedup = queue.dedup.next_ms(queue.config.dedup.window_ms);
        let next = [due, aging, dedup, queue.attempts.next_ms()].into_iter().flatten().min();
        let next = next.filter(|_| !queue.is_closed());
        if queue.timer != next {
            if let Some(before) = queue.timer {
                self.timers.remove(&(before, id));
            }
            if let Some(next) = next {
                self.timers.insert((next, id));
            }
            queue.timer = next;
        }
    }

    fn sweep_rows(&mut self) {
        if !self.sweep.is_empty() {
            let rows: Vec<_> = self.sweep.drain(..self.sweep.len().min(SWEEP_MAX)).collect();
            self.wave.records.extend(rows.iter().map(|&(seq, flags)| Record::Delete { seq, flags }));
            self.wave.journal.push(Undo::Swept(rows));
        } else if !self.tombstones.is_empty() {
            let ids = std::mem::take(&mut self.tombstones);
            self.wave.records.extend(ids.iter().map(|&id| Record::ForgetQueue { id }));
            self.wave.journal.push(Undo::Forgotten(ids));
        }
    }
}
