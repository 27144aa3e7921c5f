//! Redrives: move dead letters back at a bounded rate, and continue after a restart.

use std::collections::VecDeque;

use hapax_core::policy::DeadLetterRef;
use hapax_core::{
    AdminError, GroupId, MessageId, Priority, QueueName, RedriveRequest, RedriveState, RedriveTask,
    StoreError, Tier, policy, validate,
};

use super::groups::Slot;
use super::{Engine, Undo};
use crate::record::{Content, DeadRow, FLAG_KEYED, MessageMeta, Record, State};
use crate::time::Now;

/// A running redrive moves this often, or as often as it may move one message.
const STEP_MS: u64 = 100;
/// Maximum number of ended redrives per store that are kept for the audit.
const ENDED_MAX: usize = 1_000;

#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub info: RedriveTask,
    /// Only messages with a smaller order are moved: they were in the queue when the redrive started.
    upto: u64,
    /// Messages up to this order have been processed.
    cursor: u64,
    pending: VecDeque<(u64, Slot, u64)>,
    stepped_ms: u64,
}

/// A dead letter that a redrive processes next.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Candidate {
    pub seq: u64,
    order: u64,
    slot: Slot,
}

/// The next step of a redrive.
pub(crate) struct RedriveStep {
    pub task: u64,
    pub candidates: Vec<Candidate>,
}

impl Task {
    pub fn next_ms(&self) -> Option<u64> {
        let step_ms = 1_000_u64.div_ceil(self.info.per_second.into()).max(STEP_MS);
        (self.info.state == RedriveState::Running).then_some(self.stepped_ms + step_ms)
    }

    pub(super) fn record(&self) -> Record {
        Record::Redrive { task: self.info.clone(), upto: self.upto, cursor: self.cursor }
    }

    fn end(&mut self, now: Now, state: RedriveState) {
        self.info.state = state;
        self.info.ended_ms = Some(now.ms());
        self.pending.clear();
    }
}

impl Engine {
    pub fn start_redrive(&mut self, now: Now, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        let from = self.find_open(&request.from)?;
        let to = request.to.as_ref().map(|to| self.find_open(to)).transpose()?;
        let to = to.map(|to| &*self.queue(to).config);
        let per_second = validate::redrive(&request, &self.queue(from).config, to)?;
        let running =
            |task: &Task| task.info.from == request.from && task.info.state == RedriveState::Running;
        if self.tasks.values().any(running) {
            return Err(AdminError::RedriveRunning(request.from));
        }
        let id = self.tasks.last_key_value().map_or(1, |(id, _)| id + 1);
        let info = RedriveTask {
            id,
            from: request.from,
            to: request.to,
            filter: request.filter,
            per_second,
            by: policy::truncate(&request.by, 256).to_owned(),
            state: RedriveState::Running,
            started_ms: now.ms(),
            ended_ms: None,
            total: 0,
            moved: 0,
            left: 0,
            failure: None,
        };
        let upto = self.wave.counters.next_seq;
        let mut task = Task { info, upto, cursor: 0, pending: VecDeque::new(), stepped_ms: now.ms() };
        self.fill(&mut task);
        task.info.total = task.pending.len() as u64;
        let info = task.info.clone();
        self.wave.durable = true;
        self.save_task(task);
        Ok(info)
    }

    /// Lists the messages that a task still has to process.
    pub(super) fn fill(&self, task: &mut Task) {
        let Ok(from) = self.find(&task.info.from) else { return };
        let table = &self.queue(from).table;
        let waiting = table.iter().filter(|(_, entry)| task.cursor < entry.order && entry.order < task.upto);
        let mut pending: Vec<_> = waiting.map(|(slot, entry)| (entry.order, slot, entry.seq)).collect();
        pending.sort_unstable();
        task.pending = pending.into();
    }

    pub(super) fn load_task(&mut self, info: RedriveTask, upto: u64, cursor: u64, now: Now) {
        let mut task = Task { info, upto, cursor, pending: VecDeque::new(), stepped_ms: now.ms() };
        if task.info.state == RedriveState::Running {
            self.fill(&mut task);
        }
        self.tasks.insert(task.info.id, task);
    }

    fn save_task(&mut self, task: Task) {
        let id = task.info.id;
        self.wave.records.push(task.record());
        let before = self.tasks.insert(id, task).map(Box::new);
        self.wave.journal.push(Undo::Task { id, before });
        let ended: Vec<u64> =
            self.tasks.iter().filter(|(_, task)| task.info.ended_ms.is_some()).map(|(id, _)| *id).collect();
        for id in ended.iter().take(ended.len().saturating_sub(ENDED_MAX)) {
            let before = self.tasks.remove(id).map(Box::new);
            self.wave.records.push(Record::ForgetRedrive { id: *id });
            self.wave.journal.push(Undo::Task { id: *id, before });
        }
    }

    pub fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        self.find(from)?;
        let tasks = self.tasks.values().rev().filter(|task| task.info.from == *from);
        Ok(tasks.map(|task| task.info.clone()).collect())
    }

    pub fn cancel_redrive(&mut self, now: Now, id: u64) -> Result<RedriveTask, AdminError> {
        let task = self.tasks.get(&id).ok_or_else(|| AdminError::NotFound(format!("redrive {id}")))?;
        if task.info.state != RedriveState::Running {
            return Err(AdminError::Refused(format!("redrive {id} is not running any more")));
        }
        let mut task = task.clone();
        task.end(now, RedriveState::Cancelled);
        let info = task.info.clone();
        self.wave.durable = true;
        self.save_task(task);
        Ok(info)
    }

    /// The candidates that each running redrive may process by now.
    pub fn redrive_steps(&self, now: Now) -> Vec<RedriveStep> {
        let due = self.tasks.values().filter(|task| task.next_ms().is_some_and(|at_ms| at_ms <= now.ms()));
        let step = |task: &Task| {
            let elapsed_ms = (now.ms() - task.stepped_ms).min(1_000);
            let may = (u64::from(task.info.per_second) * elapsed_ms / 1_000).max(1) as usize;
            let next = task.pending.iter().take(may);
            let candidates = next.map(|&(order, slot, seq)| Candidate { seq, order, slot }).collect();
            RedriveStep { task: task.info.id, candidates }
        };
        due.map(step).collect()
    }

    /// Whether the candidate still waits in its slot. In-flight messages are left alone.
    pub fn redrivable(&self, task: u64, candidate: &Candidate) -> bool {
        let Ok(from) = self.find(&self.tasks[&task].info.from) else { return false };
        let entry = self.queue(from).table.holds(candidate.slot, candidate.seq);
        entry.is_some_and(|entry| matches!(entry.state, State::Ready | State::Delayed))
    }

    /// Whether a redrive's filter matches this dead letter.
    pub fn redrive_matches(&self, task: u64, id: MessageId, dead: Option<&DeadRow>) -> bool {
        let death = dead.map(|dead| DeadLetterRef {
            source: &dead.source,
            cause: dead.cause,
            error: dead.error.as_deref(),
            died_ms: dead.died_ms,
        });
        self.tasks[&task].info.filter.selects(id, death)
    }

    /// The queue to which a dead letter moves, if it still exists.
    pub fn redrive_target(&self, task: u64, dead: Option<&DeadRow>) -> Option<u32> {
        let info = &self.tasks[&task].info;
        let source = dead.map(|dead| &dead.source);
        self.find_open(info.to.as_ref().or(source)?).ok()
    }

    /// Whether the ledger must make the dead letter's effect happen once; then its key moves with it.
    pub fn redrive_keyed(&self, task: u64, candidate: &Candidate, to: u32, dead: Option<&DeadRow>) -> bool {
        let once = |id: u32| self.queue(id).config.tier == Tier::EffectivelyOnce;
        let linked = |id: u32| {
            let entry = self.queue(id).table.holds(candidate.slot, candidate.seq);
            entry.is_some_and(|entry| entry.flags & FLAG_KEYED != 0)
        };
        let source = dead.and_then(|dead| self.find(&dead.source).ok());
        once(to) || source.is_some_and(once) || self.find(&self.tasks[&task].info.from).is_ok_and(linked)
    }

    /// Moves one dead letter: it leaves and arrives in the same wave, under a new id. `link` is the ledger entry that
    /// it needs. Returns `false` if its previous queue is gone.
    #[expect(clippy::too_many_arguments, reason = "a decision's inputs, each of another type")]
    pub fn redrive(
        &mut self,
        now: Now,
        task: u64,
        candidate: &Candidate,
        to: u32,
        content: Content,
        dead: Option<&DeadRow>,
        link: Option<u128>,
    ) -> bool {
        let Ok(from) = self.find(&self.tasks[&task].info.from) else { return false };
        let waited = self.clear_waits(now, from, candidate.slot);
        let (queue, wave) = self.queue_and_wave(from);
        let group: Option<GroupId> = queue.table.group_name(queue.table.get(candidate.slot));
        let before = queue.delete(wave, candidate.slot);
        if hapax_core::mutant::is("redriven-message-dropped") {
            return true;
        }

        let (queue, wave) = self.queue_and_wave(to);
        let seq = wave.next_seq();
        let mut order = seq;
        if let Some(dead) = dead
            && dead.source == queue.name
            && waited.contains(&to)
            && dead.source_order >= queue.purged_before
        {
            // Its group waited for it: it takes its old place again. The places of earlier deaths are not known any more.
            order = dead.source_order;
        }
        let entry = MessageMeta {
            seq,
            order,
            sent_ms: now.ms(),
            base_ms: now.ms(),
            due_ms: now.ms(),
            fence: 0,
            first_ms: 0,
            received_ms: 0,
            attempts: 0,
            deliveries: 0,
            group: 0,
            state: State::Ready,
            flags: if link.is_some() { FLAG_KEYED } else { 0 },
            priority: if queue.config.is_fifo() { Priority::default().0 } else { before.priority },
            bytes: before.bytes,
        };
        queue.add(wave, entry, group, content);
        if let Some(hash) = link {
            self.link(seq, hash);
        }
        true
    }

    /// Records the progress of a step; a task with nothing left is completed.
    pub fn redrive_progress(&mut self, now: Now, step: &RedriveStep, moved: u64, left: u64) {
        let mut task = self.tasks[&step.task].clone();
        task.stepped_ms = now.ms();
        task.info.moved += moved;
        task.info.left += left;
        task.cursor = step.candidates.last().map_or(task.cursor, |last| last.order);
        task.pending.drain(..step.candidates.len());
        if self.find(&task.info.from).is_err() {
            task.info.failure = Some(format!("queue {} was deleted", task.info.from));
            task.end(now, RedriveState::Failed);
        } else if let Some(Err(error)) = task.info.to.as_ref().map(|to| self.find(to)) {
            task.info.failure = Some(error.to_string());
            task.end(now, RedriveState::Failed);
        } else if task.pending.is_empty() {
            task.end(now, RedriveState::Completed);
        }
        self.save_task(task);
    }
}
