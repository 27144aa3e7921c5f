use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use hapax_core::policy::{self, AfterFailure};
use hapax_core::store::{FailedAttempt, QueueTotals};
use hapax_core::{
    Attributes, DeadLetter, DedupId, Delivery, Document, DocumentName, EntryId, FailureCause, Fence, GroupId,
    MessageId, MessageKey, OnDead, Priority, QueueInfo, QueueName, Receipt, RedriveState, RedriveTask,
    Settled, Tier,
};

use super::ledger::Entries;

#[derive(Clone, Copy, PartialEq)]
pub enum MessagePlace {
    Ready,
    Hidden {
        until: u64,
    },
    /// `own`: its lease was changed alone ([`hapax_core::Extend::own`]).
    InFlight {
        until: u64,
        received: u64,
        own: bool,
    },
    Parked,
}

#[derive(Clone)]
pub struct Message {
    pub id: MessageId,
    pub place: MessagePlace,
    pub body: Bytes,
    pub attributes: Attributes,
    pub sent_ms: u64,
    pub retained_from_ms: u64,
    pub first_received_ms: u64,
    pub attempts: u32,
    pub deliveries: u32,
    pub group: Option<GroupId>,
    pub dedup: Option<DedupId>,
    pub priority: Priority,
    /// Decided when the message was sent; it stays with the message.
    pub key: MessageKey,
    /// Entries of the ledger that are kept as long as it lives.
    pub needs: BTreeSet<EntryId>,
    pub dead: Option<DeadLetter>,
    /// Its sequence in the queue in which it died.
    pub died_at: u64,
    pub parked: Option<(FailureCause, Option<String>)>,
    pub history: Vec<FailedAttempt>,
    pub consumer: Option<String>,
    pub fence: u64,
    /// Time of the latest delivery; 0 once it was taken back uncounted.
    pub received_ms: u64,
    pub bytes: u64,
    /// The sequence from which it waits behind others (standard queues).
    pub turn: u64,
}

pub struct Queue {
    pub info: QueueInfo,
    pub messages: BTreeMap<u64, Message>,
    pub sequence: u64,
    pub dedup: HashMap<String, (u64, MessageId, u64)>,
    /// Messages that need a decision, by id, with their groups, which are halted.
    pub undecided: BTreeMap<MessageId, GroupId>,
    /// Groups that wait behind the others, with the sequence since which they wait.
    pub turns: HashMap<GroupId, u64>,
    pub tries: HashMap<String, (u64, Vec<Receipt>)>,
    pub totals: QueueTotals,
    pub purged_ms: Option<u64>,
}

pub struct Redrive {
    pub task: RedriveTask,
    pub pending: Vec<u64>,
}

#[derive(Default)]
pub struct State {
    pub start_ms: u64,
    pub now_ms: u64,
    pub fence: u64,
    pub next_id: u128,
    pub random: u64,
    pub queues: BTreeMap<QueueName, Queue>,
    pub redrives: Vec<Redrive>,
    pub revision: u64,
    pub deleted: HashMap<QueueName, u64>,
    pub documents: BTreeMap<DocumentName, Document>,
    pub ledger: Entries,
}

impl Message {
    pub fn in_flight(&self) -> bool {
        matches!(self.place, MessagePlace::InFlight { .. })
    }
}

impl Queue {
    pub fn max_attempts(&self) -> Option<u32> {
        self.info.config.retry.limit()
    }

    /// When a lease or a delay ends next.
    fn next_ms(&self) -> u64 {
        let due = |m: &Message| match m.place {
            MessagePlace::Hidden { until } | MessagePlace::InFlight { until, .. } => until,
            MessagePlace::Ready | MessagePlace::Parked => u64::MAX,
        };
        self.messages.values().map(due).min().unwrap_or(u64::MAX)
    }

    /// Whether its handlers claim keys of the ledger.
    pub fn is_effectively_once(&self) -> bool {
        self.info.config.tier == Tier::EffectivelyOnce
    }

    pub fn bytes(&self) -> u64 {
        self.messages.values().map(|m| m.bytes).sum()
    }

    pub fn in_flight(&self) -> u64 {
        self.messages.values().filter(|m| m.in_flight()).count() as u64
    }

    pub fn delivery(&self, sequence: u64, now_ms: u64) -> Delivery {
        let m = &self.messages[&sequence];
        let MessagePlace::InFlight { until, .. } = m.place else { panic!("not in flight") };
        Delivery {
            id: m.id,
            body: m.body.clone(),
            attributes: m.attributes.clone(),
            receipt: Receipt::new(format!("{}|{}|{sequence}|{}", self.info.name, m.id, m.fence)).unwrap(),
            fence: Fence(m.fence),
            attempt: m.attempts,
            deliveries: m.deliveries,
            lease_ms: until - now_ms,
            sent_ms: m.sent_ms,
            first_received_ms: m.first_received_ms,
            sequence,
            group: m.group.clone(),
            dedup: m.dedup.clone(),
            priority: m.priority,
            key: m.key.key.clone(),
            key_source: m.key.source,
            dead: m.dead.clone(),
        }
    }

    /// The messages that a receive would take, in order.
    pub fn candidates(&self) -> Vec<u64> {
        if self.info.paused.is_some() {
            return Vec::new();
        }
        let mut flight: HashMap<&GroupId, u64> = HashMap::new();
        for m in self.messages.values().filter(|m| m.in_flight()) {
            if let Some(group) = &m.group {
                *flight.entry(group).or_default() += 1;
            }
        }
        if self.info.config.is_fifo() {
            return self.fifo_candidates();
        }
        let all = self.in_flight();
        let noisy = |m: &Message| {
            m.group.as_ref().and_then(|g| flight.get(g)).is_some_and(|&count| count >= 30 && count * 10 > all)
        };
        let ready = self.messages.iter().filter(|(_, m)| m.place == MessagePlace::Ready);
        let mut found: Vec<_> =
            ready.map(|(s, m)| (9 - m.priority.0, noisy(m), m.turn.max(*s), *s)).collect();
        found.sort_unstable();
        found.into_iter().map(|(.., sequence)| sequence).collect()
    }

    /// Group by group: the messages with nothing in flight or delayed before them.
    fn fifo_candidates(&self) -> Vec<u64> {
        let mut blocked: BTreeSet<&GroupId> = self.undecided.values().collect();
        let mut groups: BTreeMap<&GroupId, Vec<u64>> = BTreeMap::new();
        for (sequence, m) in self.messages.iter().filter(|(_, m)| m.place != MessagePlace::Parked) {
            let group = m.group.as_ref().expect("a FIFO message has a group");
            if blocked.contains(group) {
                continue;
            }
            let row = groups.entry(group).or_default();
            // If attempts are limited, a head that has failed is delivered alone.
            let alone = |first: &u64| self.max_attempts() == Some(1) || self.messages[first].attempts > 0;
            if m.place != MessagePlace::Ready
                || (self.max_attempts().is_some() && row.first().is_some_and(alone))
            {
                blocked.insert(group);
            } else {
                row.push(*sequence);
            }
        }
        let turn = |group: &GroupId| self.turns.get(group).copied().unwrap_or(0);
        let mut rows: Vec<_> = groups.into_iter().filter(|(_, row)| !row.is_empty()).collect();
        rows.sort_by_key(|(group, row)| row[0].max(turn(group)));
        rows.into_iter().flat_map(|(_, row)| row).collect()
    }

    pub fn halted_groups(&self) -> Vec<GroupId> {
        self.undecided.values().cloned().collect::<BTreeSet<_>>().into_iter().collect()
    }

    pub fn waiting_in_halted(&self) -> u64 {
        let halted = self.halted_groups();
        let waits = |m: &&Message| matches!(m.place, MessagePlace::Ready | MessagePlace::Hidden { .. });
        let in_halted = |m: &&Message| m.group.as_ref().is_some_and(|group| halted.contains(group));
        self.messages.values().filter(waits).filter(in_halted).count() as u64
    }

    /// Groups no longer wait for these messages; says whether any had. What was kept in a group that is not halted any more
    /// has its whole retention again.
    pub fn unhalt(&mut self, now_ms: u64, decided: impl Fn(&MessageId, &GroupId) -> bool) -> bool {
        let before = self.halted_groups();
        let gone: Vec<_> = self.undecided.extract_if(.., |id, group| decided(id, group)).collect();
        let after = self.halted_groups();
        let free = |group: &GroupId| before.contains(group) && !after.contains(group);
        let retention_ms = self.info.config.retention_ms;
        for m in self.messages.values_mut().filter(|m| m.group.as_ref().is_some_and(free)) {
            let waits = matches!(m.place, MessagePlace::Ready | MessagePlace::Hidden { .. });
            if waits && m.retained_from_ms + retention_ms < now_ms {
                m.retained_from_ms = now_ms;
            }
        }
        !gone.is_empty()
    }

    /// A message is parked or dead: where the queue says so, its group is halted for it.
    pub fn halt(&mut self, sequence: u64) {
        if self.info.config.on_dead != OnDead::HaltGroup {
            return;
        }
        let m = &self.messages[&sequence];
        self.undecided.extend(m.group.clone().map(|group| (m.id, group)));
        self.put_back_later_in_group(sequence);
    }

    /// Puts back, uncounted, the messages in flight behind a message of a FIFO group.
    pub fn put_back_later_in_group(&mut self, sequence: u64) {
        if !self.info.config.is_fifo() {
            return;
        }
        let group = self.messages[&sequence].group.clone();
        for (_, m) in self.messages.range_mut(sequence + 1..) {
            if m.group == group && m.in_flight() {
                m.place = MessagePlace::Ready;
                m.attempts -= 1;
            }
        }
    }

    /// A lease ended: so did those of its batch behind it, but for deliveries with a lease of their own.
    fn put_back_rest_of_batch(&mut self, sequence: u64) {
        let own = |m: &Message| matches!(m.place, MessagePlace::InFlight { own: true, .. });
        if !self.info.config.is_fifo() || own(&self.messages[&sequence]) {
            return;
        }
        let group = self.messages[&sequence].group.clone();
        for (_, m) in self.messages.range_mut(sequence + 1..) {
            if m.group == group && m.in_flight() && !own(m) {
                m.place = MessagePlace::Ready;
                m.attempts -= 1;
            }
        }
    }
}

impl State {
    pub fn random(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random ^ (self.random >> 29)
    }

    /// The fence of the next delivery or claim; it counts as used once something holds it.
    pub fn next_fence(&self) -> u64 {
        (self.fence + 1).max(self.now_ms * 1000)
    }

    pub fn new_id(&mut self) -> MessageId {
        self.next_id += 1;
        MessageId(1 << 100 | self.next_id)
    }

    /// A delivery failed: by policy it is retried or becomes a dead letter.
    pub fn fail(
        &mut self,
        name: &QueueName,
        sequence: u64,
        cause: FailureCause,
        error: Option<&str>,
        asked: Option<u64>,
    ) -> Settled {
        let (random, now_ms) = (self.random(), self.now_ms);
        self.remember(name, sequence, cause, error);
        let queue = self.queues.get_mut(name).unwrap();
        let m = queue.messages.get_mut(&sequence).unwrap();
        let attempts = m.attempts;
        let after = policy::after_failure(&queue.info.config.retry, attempts, asked, random);
        let settled = match after {
            AfterFailure::Dead => None,
            AfterFailure::Retry { after_ms } => {
                Self::put_back(queue, sequence, after_ms, now_ms);
                Some(Settled::Returned { after_ms })
            }
        };
        settled.unwrap_or_else(|| self.move_to_dead_letters(name, sequence, cause, error))
    }

    /// Makes a message visible behind the ready ones, and moves its FIFO group behind the other groups.
    pub fn put_back(queue: &mut Queue, sequence: u64, after_ms: u64, now_ms: u64) {
        queue.sequence += 1;
        let turn = queue.sequence;
        let m = queue.messages.get_mut(&sequence).unwrap();
        m.place = if after_ms == 0 {
            MessagePlace::Ready
        } else {
            MessagePlace::Hidden { until: now_ms + after_ms }
        };
        m.turn = turn;
        if let Some(group) = m.group.clone() {
            queue.turns.insert(group, turn);
        }
    }

    pub fn remember(&mut self, name: &QueueName, sequence: u64, cause: FailureCause, error: Option<&str>) {
        let m = self.queues.get_mut(name).unwrap().messages.get_mut(&sequence).unwrap();
        m.history.push(FailedAttempt {
            attempt: m.attempts,
            deliveries: m.deliveries,
            at_ms: self.now_ms,
            cause,
            error: error.map(|error| policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned()),
            consumer: m.consumer.take(),
        });
        if m.history.len() > policy::HISTORY_MAX as usize {
            m.history.remove(0);
        }
    }

    pub fn move_to_dead_letters(
        &mut self,
        name: &QueueName,
        sequence: u64,
        cause: FailureCause,
        error: Option<&str>,
    ) -> Settled {
        let target = self.queues[name].info.config.dead_letter.as_ref().map(|dead| dead.queue.clone());
        let target = target.filter(|dead| self.queues.contains_key(dead));
        let queue = self.queues.get_mut(name).unwrap();
        queue.totals.dead += 1;
        queue.halt(sequence);
        let Some(target) = target else {
            let m = queue.messages.get_mut(&sequence).unwrap();
            (m.place, m.parked) = (MessagePlace::Parked, Some((cause, error.map(str::to_owned))));
            return Settled::Parked;
        };
        let mut m = queue.messages.remove(&sequence).unwrap();
        m.dead = Some(DeadLetter {
            source: name.clone(),
            cause,
            error: error.map(str::to_owned).or_else(|| last_error(&m.history)),
            attempts: m.attempts,
            deliveries: m.deliveries,
            first_received_ms: m.first_received_ms,
            died_ms: self.now_ms,
        });
        (m.died_at, m.attempts, m.received_ms, m.place) = (sequence, 0, 0, MessagePlace::Ready);
        (m.first_received_ms, m.turn) = (0, 0);
        let dead = self.queues.get_mut(&target).unwrap();
        if dead.info.config.is_fifo() {
            m.retained_from_ms = self.now_ms;
        }
        dead.sequence += 1;
        dead.messages.insert(dead.sequence, m);
        Settled::Dead
    }

    /// Processes everything that time alone causes up to now.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        let mut names: Vec<QueueName> = self.queues.keys().cloned().collect();
        names.sort_by_key(|name| self.queues[name].next_ms());
        for name in &names {
            let over =
                |m: &Message| matches!(m.place, MessagePlace::InFlight { until, .. } if until <= now_ms);
            let until = |m: &Message| {
                if let MessagePlace::InFlight { until, .. } = m.place { until } else { u64::MAX }
            };
            let expired = self.queues[name].messages.iter().filter(|(_, m)| over(m));
            let mut expired: Vec<(u64, u64)> = expired.map(|(s, m)| (until(m), *s)).collect();
            expired.sort_unstable();
            for (_, sequence) in expired {
                // An earlier one of its batch may have returned it.
                if self.queues[name].messages.get(&sequence).is_some_and(over) {
                    let queue = self.queues.get_mut(name).unwrap();
                    queue.totals.expired += 1;
                    queue.put_back_rest_of_batch(sequence);
                    self.fail(name, sequence, FailureCause::Expired, None, None);
                }
            }
            let awaited: BTreeSet<MessageId> =
                self.queues.values().flat_map(|queue| queue.undecided.keys().copied()).collect();
            let queue = self.queues.get_mut(name).unwrap();
            for m in queue.messages.values_mut() {
                if matches!(m.place, MessagePlace::Hidden { until } if until <= now_ms) {
                    m.place = MessagePlace::Ready;
                }
            }
            let before = queue.messages.len();
            let retention_ms = queue.info.config.retention_ms;
            let halted = queue.halted_groups();
            let in_halted = |m: &Message| m.group.as_ref().is_some_and(|g| halted.contains(g));
            let set_aside = |m: &Message| m.in_flight() || m.place == MessagePlace::Parked;
            let kept = |m: &Message| set_aside(m) || in_halted(m) || awaited.contains(&m.id);
            queue.messages.retain(|_, m| kept(m) || m.retained_from_ms + retention_ms >= now_ms);
            queue.totals.retention_dropped += (before - queue.messages.len()) as u64;
        }
        for at in 0..self.redrives.len() {
            self.step_redrive(at);
        }
        self.prune();
    }

    /// How many deliveries and deaths there were: each of them has others look when something happens next.
    pub fn movements(&self) -> u64 {
        self.queues.values().map(|queue| queue.totals.delivered + queue.totals.dead).sum()
    }

    /// When something happens next by itself, if a clock that runs by itself has to be waited for.
    pub fn next_ms(&self) -> u64 {
        let redrives = self.redrives.iter().any(|redrive| redrive.task.state == RedriveState::Running);
        let step_ms = if redrives { self.now_ms + 10 } else { u64::MAX };
        self.queues.values().map(Queue::next_ms).min().unwrap_or(u64::MAX).min(step_ms)
    }

    /// Someone decided about a message: no group that it left waits for it any more. Says whether that of its source had.
    pub fn clear_waits(&mut self, m: &Message, source: &QueueName) -> bool {
        let (now_ms, mut awaited) = (self.now_ms, false);
        for (name, queue) in &mut self.queues {
            awaited |= queue.unhalt(now_ms, |id, _| *id == m.id) && name == source;
        }
        awaited
    }

    /// These messages are gone: groups that waited for dead letters among them continue.
    pub fn clear_all_waits(&mut self, gone: impl Iterator<Item = Message>) {
        for m in gone {
            if let Some(story) = &m.dead {
                self.clear_waits(&m, &story.source);
            }
        }
    }

    fn step_redrive(&mut self, at: usize) {
        loop {
            let now_ms = self.now_ms;
            let Redrive { task, pending } = &mut self.redrives[at];
            if task.state != RedriveState::Running {
                return;
            }
            let Some(sequence) = pending.first().copied() else {
                (task.state, task.ended_ms) = (RedriveState::Completed, Some(now_ms));
                return;
            };
            if task.moved > u64::from(task.per_second) * (now_ms - task.started_ms) / 1000 {
                return;
            }
            pending.remove(0);
            let (from, to) = (task.from.clone(), task.to.clone());
            let waits = |m: &Message| matches!(m.place, MessagePlace::Ready | MessagePlace::Hidden { .. });
            let letters = self.queues.get_mut(&from).map(|queue| &mut queue.messages);
            let letters = letters.filter(|all| all.get(&sequence).is_some_and(waits));
            let Some(mut m) = letters.and_then(|all| all.remove(&sequence)) else {
                self.redrives[at].task.left += 1;
                continue;
            };
            let story = m.dead.clone().expect("a dead letter");
            let awaited = self.clear_waits(&m, &story.source);
            let home = awaited && to.as_ref().is_none_or(|to| *to == story.source);
            let id = self.new_id();
            let to = to.unwrap_or_else(|| story.source.clone());
            let once = |name| self.queues.get(name).is_some_and(Queue::is_effectively_once);
            if once(&to) || once(&story.source) || !m.needs.is_empty() {
                m.needs = BTreeSet::from([EntryId::of_queue(&to, m.key.key.clone())]);
            }
            let needs = m.needs.first().cloned();
            let Some(target) = self.queues.get_mut(&to) else {
                self.queues.get_mut(&from).unwrap().messages.insert(sequence, m);
                self.redrives[at].task.left += 1;
                continue;
            };
            target.sequence += 1;
            let mut place = target.sequence;
            if home {
                place = m.died_at;
            }
            (m.id, m.dead, m.place) = (id, None, MessagePlace::Ready);
            (m.sent_ms, m.retained_from_ms) = (now_ms, now_ms);
            (m.attempts, m.deliveries) = (0, 0);
            m.history.clear();
            target.messages.insert(place, m);
            self.redrives[at].task.moved += 1;
            if let Some(id) = needs {
                self.clear_failure(&id);
            }
        }
    }
}

/// The last error that a message has failed with.
fn last_error(history: &[FailedAttempt]) -> Option<String> {
    history.iter().rev().find_map(|failed| failed.error.clone())
}
