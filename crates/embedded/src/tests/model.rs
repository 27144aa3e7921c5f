//! The queue semantics of the design, as simple as possible: one list per queue with linear search, no index, no rows,
//! no waves.

mod queue;

use hapax_core::policy::LEASE_MS_MAX;
use hapax_core::store::QueueTotals;
use hapax_core::{
    FailureCause, OnDead, QueueConfig, QueueName, RedriveState, SettleError, Settled, Settlement,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ModelPlace {
    Ready,
    Delayed,
    InFlight,
    Parked,
}

/// The origin of a dead letter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Death {
    pub source: QueueName,
    place: u64,
    pub cause: FailureCause,
    pub error: Option<String>,
    pub attempts: u32,
    pub deliveries: u32,
    pub first_ms: u64,
    pub died_ms: u64,
}

#[derive(Debug, Clone)]
pub(super) struct Message {
    pub body: String,
    /// The store's number, once an answer contained it.
    pub seq: Option<u64>,
    pub fence: u64,
    place: u64,
    pub priority: u8,
    pub group: Option<u8>,
    pub sent_ms: u64,
    base_ms: u64,
    pub due_ms: u64,
    received_ms: u64,
    /// In flight under a lease of its own.
    own: bool,
    pub first_ms: u64,
    pub attempts: u32,
    pub deliveries: u32,
    /// The position from which it waits behind others (standard queues).
    requeue_order: u64,
    pub at: ModelPlace,
    pub death: Option<Death>,
    last_error: Option<String>,
    /// Parked because it is out of attempts or was rejected.
    out: bool,
}

/// A receive that may be repeated.
#[derive(Debug, Clone)]
struct Attempt {
    id: u8,
    at_ms: u64,
    /// Number and fence of each.
    deliveries: Vec<(u64, u64)>,
}

#[derive(Debug, Clone)]
pub(super) struct Queue {
    pub name: QueueName,
    pub config: QueueConfig,
    pub messages: Vec<Message>,
    /// Numbers of messages that need a decision, with their groups, which are halted.
    pub undecided: Vec<(u64, u8)>,
    /// Groups that wait behind the others, with the position since which they wait.
    requeue_orders: Vec<(u8, u64)>,
    attempts: Vec<Attempt>,
    /// Key, when, and the number of the first send.
    seen: Vec<((Option<u8>, String), u64, u64)>,
    purged_before: u64,
    pub totals: QueueTotals,
}

#[derive(Debug, Clone)]
pub(super) struct Redrive {
    pub id: u64,
    pub from: usize,
    to: Option<usize>,
    cause: Option<FailureCause>,
    per_second: u64,
    pub state: RedriveState,
    pub total: u64,
    pub moved: u64,
    pub left: u64,
    upto: u64,
    cursor: u64,
    /// Positions that still have to be processed.
    pending: Vec<u64>,
    stepped_ms: u64,
}

/// A message to send.
#[derive(Debug, Clone)]
pub(super) struct NewModelMessage {
    pub body: String,
    pub group: Option<u8>,
    pub dedup: Option<String>,
    pub priority: u8,
    pub delay_ms: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Model {
    pub now_ms: u64,
    pub queues: Vec<Queue>,
    pub redrives: Vec<Redrive>,
    place: u64,
}

impl Model {
    pub fn create(&mut self, name: QueueName, config: QueueConfig) {
        self.queues.push(Queue {
            name,
            config,
            messages: Vec::new(),
            undecided: Vec::new(),
            requeue_orders: Vec::new(),
            attempts: Vec::new(),
            seen: Vec::new(),
            purged_before: 0,
            totals: QueueTotals::default(),
        });
    }

    fn next_place(&mut self) -> u64 {
        self.place += 1;
        self.place
    }

    fn find(&self, name: &QueueName) -> Option<usize> {
        self.queues.iter().position(|queue| queue.name == *name)
    }

    /// Returns `Some(number)` of the first send if this one repeats it, `Err` if it is not acceptable. A new message
    /// gets the number `seq`.
    pub fn send(&mut self, queue: usize, new: &NewModelMessage, seq: u64) -> Result<Option<u64>, ()> {
        let place = self.next_place();
        let now_ms = self.now_ms;
        let queue = &mut self.queues[queue];
        let fifo = queue.config.is_fifo();
        let by_content = queue.config.dedup.content_based;
        let acceptable = new.group.is_some()
            && new.priority == 0
            && new.delay_ms.is_none()
            && (new.dedup.is_some() || by_content);
        if fifo && !acceptable {
            return Err(());
        }
        let content = by_content.then(|| format!("content {}", new.body));
        if let Some(id) = new.dedup.clone().or(content) {
            let scoped = queue.config.dedup.scope == hapax_core::DedupScope::Group;
            let key = (new.group.filter(|_| scoped), id);
            let window_ms = queue.config.dedup.window_ms;
            let first = queue.seen.iter().rev().find(|(seen, ..)| *seen == key);
            if let Some((_, _, first)) = first.filter(|(_, at_ms, _)| now_ms < at_ms + window_ms) {
                queue.totals.duplicates += 1;
                return Ok(Some(*first));
            }
            queue.seen.push((key, now_ms, seq));
        }
        let delay_ms = new.delay_ms.unwrap_or(queue.config.delay_ms);
        queue.totals.sent += 1;
        queue.messages.push(Message {
            body: new.body.clone(),
            seq: Some(seq),
            fence: 0,
            place,
            priority: new.priority,
            group: new.group,
            sent_ms: now_ms,
            base_ms: now_ms,
            due_ms: now_ms + delay_ms,
            received_ms: 0,
            own: false,
            first_ms: 0,
            attempts: 0,
            deliveries: 0,
            requeue_order: 0,
            at: if delay_ms == 0 { ModelPlace::Ready } else { ModelPlace::Delayed },
            death: None,
            last_error: None,
            out: false,
        });
        Ok(None)
    }

    /// Leases messages; the caller sets the fence and number of each.
    pub fn receive(&mut self, queue: usize, max: usize, lease_ms: Option<u64>, ack: bool) -> Vec<Message> {
        let mut leased = Vec::new();
        while leased.len() < max {
            let places = self.queues[queue].next(max - leased.len());
            let Some(first) = places.first() else { break };
            let limit = self.max_attempts(queue);
            if self.queues[queue].by_place(*first).attempts >= limit {
                let at = self.queues[queue].index(*first);
                self.move_to_dead_letters(queue, at, FailureCause::Retry, None);
                continue;
            }
            let fifo = self.queues[queue].config.is_fifo();
            // If attempts are limited, a head that has failed is delivered alone.
            let failed = self.queues[queue].by_place(*first).attempts > 0;
            let alone = fifo && limit < u32::MAX && (failed || limit == 1);
            for place in places.into_iter().take(if alone { 1 } else { max }) {
                if self.queues[queue].by_place(place).attempts >= limit {
                    break;
                }
                let now_ms = self.now_ms;
                let queue = &mut self.queues[queue];
                let lease_ms = lease_ms.unwrap_or(queue.config.lease_ms);
                let at = queue.index(place);
                let message = &mut queue.messages[at];
                message.attempts += 1;
                message.deliveries += 1;
                message.at = ModelPlace::InFlight;
                message.received_ms = now_ms;
                message.own = false;
                message.due_ms = now_ms + lease_ms.min(LEASE_MS_MAX);
                if message.first_ms == 0 {
                    message.first_ms = now_ms;
                }
                leased.push(message.clone());
                queue.totals.delivered += 1;
            }
        }
        for message in leased.iter().filter(|_| ack) {
            let at = self.queues[queue].index(message.place);
            self.queues[queue].messages.remove(at);
            self.queues[queue].totals.acked += 1;
            self.clear_waits(message);
        }
        leased
    }

    /// What is still held of the deliveries of a receive that is repeated, at most `max`; `None` if there is none.
    pub fn receive_again(
        &mut self,
        queue: usize,
        id: u8,
        max: usize,
        lease_ms: Option<u64>,
    ) -> Option<Vec<Message>> {
        let now_ms = self.now_ms;
        let queue = &mut self.queues[queue];
        let Attempt { at_ms, deliveries, .. } =
            queue.attempts.iter().find(|attempt| attempt.id == id)?.clone();
        let lease_ms = lease_ms.unwrap_or(queue.config.lease_ms);
        let held = |(seq, fence): &(u64, u64)| {
            let named = |message: &&mut Message| message.seq == Some(*seq) && message.fence == *fence;
            let message =
                queue.messages.iter_mut().find(named).filter(|message| message.at == ModelPlace::InFlight)?;
            let until_ms = now_ms + lease_ms;
            if until_ms - message.received_ms <= LEASE_MS_MAX {
                message.due_ms = message.due_ms.max(until_ms);
            }
            Some(message.clone())
        };
        if now_ms >= at_ms + 300_000 {
            return None;
        }
        let again: Vec<_> = deliveries.iter().filter_map(held).take(max).collect();
        (!again.is_empty()).then_some(again)
    }

    /// A receive that is not a repeat was answered.
    pub fn remember(&mut self, queue: usize, id: u8, deliveries: Vec<(u64, u64)>) {
        let attempts = &mut self.queues[queue].attempts;
        attempts.retain(|attempt| attempt.id != id);
        attempts.push(Attempt { id, at_ms: self.now_ms, deliveries });
    }

    /// Notes what the store said about a delivery.
    pub fn delivered(&mut self, queue: usize, message: &Message, seq: u64, fence: u64) {
        let found = self.queues[queue].messages.iter_mut().find(|other| other.place == message.place);
        if let Some(found) = found {
            assert!(found.seq.is_none_or(|known| known == seq), "another message than expected");
            (found.seq, found.fence) = (Some(seq), fence);
        }
    }

    fn max_attempts(&self, queue: usize) -> u32 {
        self.queues[queue].config.retry.limit().unwrap_or(u32::MAX)
    }

    /// The message that a receipt names.
    fn held(&mut self, queue: usize, seq: u64, fence: u64) -> Result<usize, SettleError> {
        let named = |message: &Message| message.seq == Some(seq) && message.fence != 0;
        let Some(at) = self.queues[queue].messages.iter().position(named) else {
            let target =
                self.queues[queue].config.dead_letter.clone().and_then(|dead| self.find(&dead.queue));
            let dead = |message: &Message| named(message) && message.death.is_some();
            let died = target.is_some_and(|target| self.queues[target].messages.iter().any(dead));
            return Err(if died { SettleError::Dead } else { SettleError::Gone });
        };
        let queue = &mut self.queues[queue];
        if queue.messages[at].fence != fence {
            queue.totals.stale += 1;
            return Err(SettleError::Stale);
        }
        if queue.messages[at].out {
            return Err(SettleError::Dead);
        }
        Ok(at)
    }

    pub fn settle(
        &mut self,
        queue: usize,
        seq: u64,
        fence: u64,
        settlement: &Settlement,
    ) -> Result<Settled, SettleError> {
        let at = self.held(queue, seq, fence)?;
        let fifo = self.queues[queue].config.is_fifo();
        let message = self.queues[queue].messages[at].clone();
        let late = matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed);
        if *settlement == Settlement::Ack && late && fifo {
            return Err(SettleError::Expired);
        }
        if message.at != ModelPlace::InFlight && !(*settlement == Settlement::Ack && late) {
            return Err(SettleError::NotInFlight);
        }
        match settlement {
            Settlement::Ack => {
                let message = self.queues[queue].messages.remove(at);
                self.clear_waits(&message);
                self.queues[queue].totals.acked += 1;
                Ok(Settled::Acked)
            }
            Settlement::Retry { after_ms, error } => {
                self.queues[queue].totals.retried += 1;
                self.put_back_later_in_group(queue, &message, message.place);
                self.queues[queue].messages[at].received_ms = 0;
                Ok(self.fail(queue, at, FailureCause::Retry, error.clone(), *after_ms))
            }
            Settlement::Defer { after_ms } => {
                self.queues[queue].totals.deferred += 1;
                self.put_back_later_in_group(queue, &message, message.place);
                let after_ms = (*after_ms).min(LEASE_MS_MAX);
                self.wait_behind(queue, at);
                self.put_back(queue, at, after_ms);
                Ok(Settled::Returned { after_ms })
            }
            Settlement::Park { reason } => {
                self.put_back_later_in_group(queue, &message, message.place);
                self.halt(queue, &message);
                let message = &mut self.queues[queue].messages[at];
                message.last_error = Some(reason.clone());
                message.attempts -= 1;
                message.at = ModelPlace::Parked;
                Ok(Settled::Parked)
            }
            Settlement::Reject { reason } => {
                self.put_back_later_in_group(queue, &message, message.place);
                self.queues[queue].messages[at].last_error = Some(reason.clone());
                Ok(self.move_to_dead_letters(queue, at, FailureCause::Rejected, Some(reason.clone())))
            }
        }
    }

    pub fn extend(
        &mut self,
        queue: usize,
        seq: u64,
        fence: u64,
        lease_ms: u64,
        own: bool,
    ) -> Result<u64, SettleError> {
        let at = self.held(queue, seq, fence)?;
        let now_ms = self.now_ms;
        let fifo = self.queues[queue].config.is_fifo();
        let message = &mut self.queues[queue].messages[at];
        let late = matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed)
            && message.received_ms != 0
            && !fifo;
        if message.at != ModelPlace::InFlight && !late {
            return Err(SettleError::NotInFlight);
        }
        if late && lease_ms == 0 {
            (message.at, message.due_ms) = (ModelPlace::Ready, now_ms);
            return Ok(0);
        }
        if lease_ms == 0 {
            self.queues[queue].totals.retried += 1;
            self.fail(queue, at, FailureCause::Retry, None, Some(0));
            return Ok(0);
        }
        let total_ms = now_ms + lease_ms - message.received_ms;
        if total_ms > LEASE_MS_MAX {
            return Err(SettleError::LeaseTooLong { lease_ms: total_ms, lease_ms_max: LEASE_MS_MAX });
        }
        message.due_ms = now_ms + lease_ms;
        message.at = ModelPlace::InFlight;
        message.own |= own;
        Ok(lease_ms)
    }

    fn fail(
        &mut self,
        queue: usize,
        at: usize,
        cause: FailureCause,
        error: Option<String>,
        asked_ms: Option<u64>,
    ) -> Settled {
        let limit = self.max_attempts(queue);
        let retry = self.queues[queue].config.retry;
        let now_ms = self.now_ms;
        let message = &mut self.queues[queue].messages[at];
        if error.is_some() {
            message.last_error.clone_from(&error);
        }
        if message.attempts >= limit {
            return self.move_to_dead_letters(queue, at, cause, error);
        }
        self.wait_behind(queue, at);
        let message = &mut self.queues[queue].messages[at];
        let cap_ms = if retry.cap_ms == 0 { LEASE_MS_MAX } else { retry.cap_ms };
        let backoff_ms = (retry.base_ms * 2u64.pow(message.attempts.min(30) - 1)).min(cap_ms);
        let after_ms = asked_ms.unwrap_or(backoff_ms).min(LEASE_MS_MAX);
        message.at = if after_ms == 0 { ModelPlace::Ready } else { ModelPlace::Delayed };
        message.due_ms = now_ms + after_ms;
        Settled::Returned { after_ms }
    }

    fn put_back(&mut self, queue: usize, at: usize, after_ms: u64) {
        let message = &mut self.queues[queue].messages[at];
        message.attempts -= 1;
        message.received_ms = 0;
        message.at = if after_ms == 0 { ModelPlace::Ready } else { ModelPlace::Delayed };
        message.due_ms = self.now_ms + after_ms;
    }

    /// Puts back, uncounted, the messages of the same FIFO group in flight behind `place`.
    fn put_back_later_in_group(&mut self, queue: usize, failed: &Message, place: u64) {
        if !self.queues[queue].config.is_fifo() {
            return;
        }
        for at in 0..self.queues[queue].messages.len() {
            let other = &self.queues[queue].messages[at];
            if other.group == failed.group && other.at == ModelPlace::InFlight && other.place > place {
                self.put_back(queue, at, 0);
            }
        }
    }

    /// The same when a lease ends, but for deliveries with a lease of their own.
    fn put_back_rest_of_batch(&mut self, queue: usize, ended: &Message) {
        if !self.queues[queue].config.is_fifo() || ended.own {
            return;
        }
        for at in 0..self.queues[queue].messages.len() {
            let other = &self.queues[queue].messages[at];
            let behind = other.group == ended.group && other.place > ended.place;
            if behind && other.at == ModelPlace::InFlight && !other.own {
                self.put_back(queue, at, 0);
            }
        }
    }

    fn move_to_dead_letters(
        &mut self,
        queue: usize,
        at: usize,
        cause: FailureCause,
        error: Option<String>,
    ) -> Settled {
        self.queues[queue].totals.dead += 1;
        let target = self.queues[queue].config.dead_letter.clone().and_then(|dead| self.find(&dead.queue));
        let message = self.queues[queue].messages[at].clone();
        self.halt(queue, &message);
        let Some(target) = target else {
            let message = &mut self.queues[queue].messages[at];
            (message.at, message.out) = (ModelPlace::Parked, true);
            return Settled::Parked;
        };
        let mut message = self.queues[queue].messages.remove(at);
        message.death = Some(Death {
            source: self.queues[queue].name.clone(),
            place: message.place,
            cause,
            error: error.or_else(|| message.last_error.clone()),
            attempts: message.attempts,
            deliveries: message.deliveries,
            first_ms: message.first_ms,
            died_ms: self.now_ms,
        });
        message.place = self.next_place();
        if self.queues[target].config.is_fifo() {
            message.base_ms = self.now_ms;
        }
        message.due_ms = self.now_ms;
        message.at = ModelPlace::Ready;
        (message.attempts, message.first_ms, message.received_ms, message.requeue_order) = (0, 0, 0, 0);
        self.queues[target].messages.push(message);
        Settled::Dead
    }

    /// A message is parked or dead: if the queue is configured so, its group is halted for it.
    fn halt(&mut self, queue: usize, message: &Message) {
        if self.queues[queue].config.on_dead != OnDead::HaltGroup {
            return;
        }
        self.put_back_later_in_group(queue, message, message.place);
        let group = message.group.expect("a FIFO message has a group");
        self.queues[queue].undecided.push((message.seq.expect("it was delivered"), group));
    }

    /// A message was decided about, wherever it is: no group waits for it any more. Returns the queue that waited.
    fn clear_waits(&mut self, message: &Message) -> Option<usize> {
        let seq = message.seq?;
        let now_ms = self.now_ms;
        self.queues.iter_mut().position(|queue| queue.unhalt(now_ms, |other, _| other == seq))
    }

    /// A failed message waits behind the ready ones, its FIFO group behind the other groups.
    fn wait_behind(&mut self, queue: usize, at: usize) {
        let requeue_order = self.next_place();
        let queue = &mut self.queues[queue];
        let fifo = queue.config.is_fifo();
        let message = &mut queue.messages[at];
        match message.group.filter(|_| fifo) {
            Some(group) => {
                queue.requeue_orders.retain(|(other, _)| *other != group);
                queue.requeue_orders.push((group, requeue_order));
            }
            None => message.requeue_order = requeue_order,
        }
    }

    pub fn purge(&mut self, queue: usize) -> u64 {
        let place = self.next_place();
        for message in self.queues[queue].messages.clone() {
            self.clear_waits(&message);
        }
        self.queues[queue].requeue_orders.clear();
        let queue = &mut self.queues[queue];
        queue.purged_before = place;
        queue.undecided.clear();
        queue.seen.clear();
        let count = queue.messages.len() as u64;
        queue.messages.clear();
        count
    }

    pub fn discard(&mut self, queue: usize, seq: u64) -> u64 {
        let messages = &mut self.queues[queue].messages;
        let Some(at) = messages
            .iter()
            .position(|message| message.seq == Some(seq) && message.at != ModelPlace::InFlight)
        else {
            return 0;
        };
        let message = messages.remove(at);
        self.clear_waits(&message);
        1
    }

    pub fn release(&mut self, queue: usize, seq: u64) -> u64 {
        let now_ms = self.now_ms;
        let named = |message: &&mut Message| message.seq == Some(seq) && message.at == ModelPlace::Parked;
        let Some(message) = self.queues[queue].messages.iter_mut().find(named) else { return 0 };
        message.at = ModelPlace::Ready;
        (message.due_ms, message.base_ms) = (now_ms, now_ms);
        message.attempts = 0;
        message.received_ms = 0;
        message.last_error = None;
        message.out = false;
        // Only its own queue: one that it died in waits on.
        self.queues[queue].unhalt(now_ms, |other, _| other == seq);
        1
    }

    pub fn release_group(&mut self, queue: usize, group: u8) -> bool {
        let now_ms = self.now_ms;
        self.queues[queue].unhalt(now_ms, |_, other| other == group)
    }

    pub fn start_redrive(
        &mut self,
        id: u64,
        from: usize,
        to: Option<usize>,
        cause: Option<FailureCause>,
        per_second: u64,
    ) -> bool {
        let running = |task: &Redrive| task.from == from && task.state == RedriveState::Running;
        if self.redrives.iter().any(running) || to == Some(from) {
            return false;
        }
        let upto = self.next_place();
        let mut task = Redrive {
            id,
            from,
            to,
            cause,
            per_second,
            state: RedriveState::Running,
            total: 0,
            moved: 0,
            left: 0,
            upto,
            cursor: 0,
            pending: Vec::new(),
            stepped_ms: self.now_ms,
        };
        self.fill(&mut task);
        task.total = task.pending.len() as u64;
        self.redrives.push(task);
        true
    }

    fn fill(&self, task: &mut Redrive) {
        let places = self.queues[task.from].messages.iter().map(|message| message.place);
        task.pending = places.filter(|place| task.cursor < *place && *place < task.upto).collect();
        task.pending.sort_unstable();
    }

    pub fn cancel_redrive(&mut self, id: u64) -> bool {
        let running = |task: &&mut Redrive| task.id == id && task.state == RedriveState::Running;
        let Some(task) = self.redrives.iter_mut().find(running) else { return false };
        task.state = RedriveState::Cancelled;
        true
    }

    fn step_redrives(&mut self) {
        for at in 0..self.redrives.len() {
            let mut task = self.redrives[at].clone();
            // Ten times a second, or at the rate of single messages if that is lower.
            let step_ms = 1_000_u64.div_ceil(task.per_second).max(100);
            if task.state != RedriveState::Running || task.stepped_ms + step_ms > self.now_ms {
                continue;
            }
            let elapsed_ms = (self.now_ms - task.stepped_ms).min(1_000);
            let may = ((task.per_second * elapsed_ms / 1_000).max(1) as usize).min(task.pending.len());
            for place in task.pending.drain(..may).collect::<Vec<_>>() {
                task.cursor = place;
                if self.redrive(&task, place) {
                    task.moved += 1;
                } else {
                    task.left += 1;
                }
            }
            task.stepped_ms = self.now_ms;
            if task.pending.is_empty() {
                task.state = RedriveState::Completed;
            }
            self.redrives[at] = task;
        }
    }

    fn redrive(&mut self, task: &Redrive, place: u64) -> bool {
        let waits = |message: &Message| {
            message.place == place && matches!(message.at, ModelPlace::Ready | ModelPlace::Delayed)
        };
        let Some(at) = self.queues[task.from].messages.iter().position(waits) else { return false };
        let mut message = self.queues[task.from].messages[at].clone();
        let death = message.death.take();
        if task.cause.is_some() && task.cause != death.as_ref().map(|death| death.cause) {
            return false;
        }
        let source = death.as_ref().and_then(|death| self.find(&death.source));
        let Some(to) = task.to.or(source) else { return false };
        self.queues[task.from].messages.remove(at);
        message.place = self.next_place();
        let waited = self.clear_waits(&message);
        let queue = &mut self.queues[to];
        if let Some(death) = death
            && waited == Some(to)
            && death.place >= queue.purged_before
        {
            message.place = death.place;
        }
        let now_ms = self.now_ms;
        (message.sent_ms, message.base_ms, message.due_ms) = (now_ms, now_ms, now_ms);
        (message.fence, message.first_ms, message.received_ms, message.attempts) = (0, 0, 0, 0);
        (message.deliveries, message.requeue_order) = (0, 0);
        (message.seq, message.last_error, message.at) = (None, None, ModelPlace::Ready);
        queue.messages.push(message);
        true
    }

    /// The store was closed and opened again.
    pub fn restart(&mut self) {
        for queue in &mut self.queues {
            queue.totals = QueueTotals::default();
            // Not stored: a failed message may come first again.
            queue.requeue_orders.clear();
            queue.messages.iter_mut().for_each(|message| message.requeue_order = 0);
        }
        for at in 0..self.redrives.len() {
            let mut task = self.redrives[at].clone();
            if task.state == RedriveState::Running {
                self.fill(&mut task);
                task.stepped_ms = self.now_ms;
            }
            self.redrives[at] = task;
        }
    }

    /// Processes everything that time alone causes. The order of the queues is the engine's choice.
    pub fn tick(&mut self, first: &[QueueName]) {
        self.step_redrives();
        let rest = (0..self.queues.len()).filter(|queue| !first.contains(&self.queues[*queue].name));
        let order: Vec<usize> = first.iter().filter_map(|name| self.find(name)).chain(rest).collect();
        for _round in 0..2 {
            for &queue in &order {
                while let Some(at) = self.queues[queue].first_due(self.now_ms) {
                    if self.queues[queue].messages[at].at == ModelPlace::Delayed {
                        self.queues[queue].messages[at].at = ModelPlace::Ready;
                    } else {
                        self.queues[queue].totals.expired += 1;
                        let message = self.queues[queue].messages[at].clone();
                        self.put_back_rest_of_batch(queue, &message);
                        self.fail(queue, at, FailureCause::Expired, None, None);
                    }
                }
                let awaited: Vec<u64> =
                    self.queues.iter().flat_map(|queue| &queue.undecided).map(|(seq, _)| *seq).collect();
                let queue = &mut self.queues[queue];
                let from_ms = self.now_ms - queue.config.retention_ms;
                let before = queue.messages.len();
                let halted: Vec<_> = queue.undecided.iter().map(|(_, group)| Some(*group)).collect();
                queue.messages.retain(|message| {
                    let waited_for = message.seq.is_some_and(|seq| awaited.contains(&seq));
                    let kept = matches!(message.at, ModelPlace::InFlight | ModelPlace::Parked)
                        || halted.contains(&message.group);
                    kept || waited_for || message.base_ms >= from_ms
                });
                queue.totals.retention_dropped += (before - queue.messages.len()) as u64;
            }
        }
    }
}
