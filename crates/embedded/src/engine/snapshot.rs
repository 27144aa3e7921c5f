//! The engine's state as text, so that tests can compare two states.

use hapax_core::{GroupId, QueueName};

use super::Engine;
use crate::record::{MessageMeta, State};
use crate::time::Now;

impl Engine {
    /// The queues with due timers, in the order in which `run_timers` processes them.
    pub fn due_queues(&self, now_ms: u64) -> Vec<QueueName> {
        let due = self.timers.iter().take_while(|(at_ms, _)| *at_ms <= now_ms);
        due.map(|(_, queue)| self.queue(*queue).name.clone()).collect()
    }

    /// Every message with its queue and group, by sequence number.
    pub fn messages(&self) -> Vec<(u32, MessageMeta, Option<GroupId>)> {
        let of_queue = |queue: &super::Queue| {
            let with_group =
                |(_, entry): (_, &MessageMeta)| (queue.id, *entry, queue.table.group_name(entry));
            queue.table.iter().map(with_group).collect::<Vec<_>>()
        };
        let mut messages: Vec<_> = self.queues.iter().flatten().flat_map(|queue| of_queue(queue)).collect();
        messages.sort_by_key(|(_, entry, _)| entry.seq);
        messages
    }

    /// Everything that the rows determine, one line each. Left out: fences (they may jump ahead), counters since the
    /// opening, and who holds what.
    pub fn snapshot(&self, now: Now) -> Vec<String> {
        let mut lines = Vec::new();
        for (queue, mut entry, group) in self.messages() {
            if entry.state == State::Delayed && entry.due_ms <= now.ms() {
                entry.state = State::Ready;
            }
            // An index into memory, not stored state.
            entry.group = 0;
            lines.push(format!("message {queue} {group:?} {entry:?}"));
        }
        for queue in self.queues.iter().flatten() {
            lines.push(format!("queue {:?}", queue.row()));
            lines.push(format!("halted {} {:?}", queue.id, queue.table.groups.halted()));
            lines.push(format!("attempts {} {:?}", queue.id, queue.attempts.remembered(now.ms())));
            lines.push(format!("dedup {} {:?}", queue.id, queue.dedup.remembered(now.ms())));
        }
        lines.extend(self.tasks.values().map(|task| format!("redrive {:?}", task.record())));
        let mut sweep: Vec<_> = self.sweep.iter().collect();
        sweep.sort_unstable();
        let mut tombstones = self.tombstones.clone();
        tombstones.sort_unstable();
        lines.push(format!("sweep {sweep:?} {tombstones:?}"));
        let counters = &self.wave.counters;
        lines.push(format!("counters {} {} {}", counters.next_seq, counters.messages, counters.bytes));
        lines.push(format!("paused {:?}", self.header.paused));
        lines.extend(self.ledger_snapshot(now));
        lines
    }
}
