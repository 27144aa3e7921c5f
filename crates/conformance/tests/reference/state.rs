use std::collections::{BTreeMap, BTreeSet, HashMap};

use bytes::Bytes;
use hapax_core::policy::{self, AfterFailure};
use hapax_core::store::{FailedAttempt, QueueTotals};
use hapax_core::{
    Attributes, Cause, DeadLetter, DedupId, Delivery, Fence, GroupId, MessageId, MessageKey, OnDead,
    Priority, QueueInfo, QueueName, Receipt, RedriveState, RedriveTask, Settled,
};

#[derive(Clone, Copy, PartialEq)]
pub enum Place {
    Ready,
    Hidden { until: u64 },
    Flight { until: u64, received: u64, batch: u64 },
    Parked,
}

#[derive(Clone)]
pub struct Message {
    pub id: MessageId,
    pub place: Place,
    pub body: Bytes,
    pub attributes: Attributes,
    pub sent_ms: u64,
    pub first_received_ms: u64,
    pub attempts: u32,
    pub deliveries: u32,
    pub group: Option<GroupId>,
    pub dedup: Option<DedupId>,
    pub priority: Priority,
    /// Decided when the message was sent; stays with it wherever it goes.
    pub key: MessageKey,
    pub dead: Option<DeadLetter>,
    /// Its sequence in the queue it died in.
    pub died_at: u64,
    pub parked: Option<(Cause, Option<String>)>,
    pub history: Vec<FailedAttempt>,
    pub consumer: Option<String>,
    pub fence: u64,
    pub bytes: u64,
}

pub struct Queue {
    pub info: QueueInfo,
    pub messages: BTreeMap<u64, Message>,
    pub sequence: u64,
    pub dedup: HashMap<String, (u64, MessageId, u64)>,
    pub halted: BTreeSet<GroupId>,
    pub tries: HashMap<String, (u64, Vec<Receipt>)>,
    pub totals: QueueTotals,
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
    pub batch: u64,
    pub next_id: u128,
    pub random: u64,
    pub queues: BTreeMap<QueueName, Queue>,
    pub redrives: Vec<Redrive>,
}

impl Message {
    pub fn in_flight(&self) -> bool {
        matches!(self.place, Place::Flight { .. })
    }
}

impl Queue {
    pub fn max_attempts(&self) -> Option<u32> {
        self.info.config.retry.limit()
    }

    pub fn bytes(&self) -> u64 {
        self.messages.values().map(|m| m.bytes).sum()
    }

    pub fn in_flight(&self) -> u64 {
        self.messages.values().filter(|m| m.in_flight()).count() as u64
    }

    pub fn delivery(&self, sequence: u64, now_ms: u64) -> Delivery {
        let m = &self.messages[&sequence];
        let Place::Flight { until, .. } = m.place else { panic!("not in flight") };
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

    /// What a receive would take, in order.
    pub fn candidates(&self) -> Vec<u64> {
        let mut flight: HashMap<&GroupId, u64> = HashMap::new();
        for m in self.messages.values().filter(|m| m.in_flight()) {
            if let Some(group) = &m.group {
                *flight.entry(group).or_default() += 1;
            }
        }
        if self.info.config.is_fifo() {
            let mut blocked: BTreeSet<&GroupId> = self.halted.iter().chain(flight.keys().copied()).collect();
            let mut found = Vec::new();
            for (sequence, m) in self.messages.iter().filter(|(_, m)| m.place != Place::Parked) {
                let group = m.group.as_ref().expect("a FIFO message has a group");
                if blocked.contains(group) {
                    continue;
                }
                if m.place == Place::Ready {
                    found.push(*sequence);
                } else {
                    blocked.insert(group);
                }
            }
            return found;
        }
        let all = self.in_flight();
        let noisy = |m: &Message| {
            m.group.as_ref().and_then(|g| flight.get(g)).is_some_and(|&count| count >= 30 && count * 10 > all)
        };
        let ready = self.messages.iter().filter(|(_, m)| m.place == Place::Ready);
        let mut found: Vec<_> = ready.map(|(s, m)| (9 - m.priority.0, noisy(m), *s)).collect();
        found.sort_unstable();
        found.into_iter().map(|(_, _, sequence)| sequence).collect()
    }
}

impl State {
    pub fn random(&mut self) -> u64 {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.random ^ (self.random >> 29)
    }

    pub fn new_id(&mut self) -> MessageId {
        self.next_id += 1;
        MessageId(1 << 100 | self.next_id)
    }

    /// A delivery failed: by policy it returns or dies.
    pub fn fail(
        &mut self,
        name: &QueueName,
        sequence: u64,
        cause: Cause,
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
        settled.unwrap_or_else(|| self.die(name, sequence, cause, error))
    }

    /// Makes a message visible, and what came behind it in its FIFO batch, uncounted.
    pub fn put_back(queue: &mut Queue, sequence: u64, after_ms: u64, now_ms: u64) {
        let m = queue.messages.get_mut(&sequence).unwrap();
        let was = (m.group.clone(), m.place);
        m.place = if after_ms == 0 { Place::Ready } else { Place::Hidden { until: now_ms + after_ms } };
        let Place::Flight { batch: own, .. } = was.1 else { return };
        if !queue.info.config.is_fifo() {
            return;
        }
        for (_, m) in queue.messages.range_mut(sequence + 1..) {
            if m.group == was.0 && matches!(m.place, Place::Flight { batch, .. } if batch == own) {
                m.place = Place::Ready;
                m.attempts -= 1;
            }
        }
    }

    pub fn remember(&mut self, name: &QueueName, sequence: u64, cause: Cause, error: Option<&str>) {
        let m = self.queues.get_mut(name).unwrap().messages.get_mut(&sequence).unwrap();
        m.history.push(FailedAttempt {
            attempt: m.attempts,
            deliveries: m.deliveries,
            at_ms: self.now_ms,
            cause,
            error: error.map(|error| policy::cut(error, policy::ERROR_BYTES_MAX).to_owned()),
            consumer: m.consumer.take(),
        });
        if m.history.len() > policy::HISTORY_MAX as usize {
            m.history.remove(0);
        }
    }

    pub fn die(&mut self, name: &QueueName, sequence: u64, cause: Cause, error: Option<&str>) -> Settled {
        let queue = self.queues.get_mut(name).unwrap();
        let Some(target) = queue.info.config.dead_letter.as_ref().map(|dead| dead.queue.clone()) else {
            let m = queue.messages.get_mut(&sequence).unwrap();
            (m.place, m.parked) = (Place::Parked, Some((cause, error.map(str::to_owned))));
            return Settled::Parked;
        };
        let mut m = queue.messages.remove(&sequence).unwrap();
        queue.totals.dead += 1;
        if queue.info.config.on_dead == OnDead::HaltGroup {
            queue.halted.extend(m.group.clone());
            for (_, behind) in queue.messages.range_mut(sequence + 1..) {
                if behind.group == m.group && matches!(behind.place, Place::Flight { .. }) {
                    behind.place = Place::Ready;
                    behind.attempts -= 1;
                }
            }
        }
        m.dead = Some(DeadLetter {
            source: name.clone(),
            cause,
            error: error.map(str::to_owned),
            attempts: m.attempts,
            deliveries: m.deliveries,
            first_received_ms: m.first_received_ms,
            died_ms: self.now_ms,
        });
        (m.died_at, m.attempts, m.place) = (sequence, 0, Place::Ready);
        let dead = self.queues.get_mut(&target).unwrap();
        dead.sequence += 1;
        dead.messages.insert(dead.sequence, m);
        Settled::Dead
    }

    /// What happens by itself until now.
    pub fn tick(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
        let names: Vec<QueueName> = self.queues.keys().cloned().collect();
        for name in &names {
            let over = |m: &Message| matches!(m.place, Place::Flight { until, .. } if until <= now_ms);
            let expired: Vec<u64> =
                self.queues[name].messages.iter().filter(|(_, m)| over(m)).map(|(s, _)| *s).collect();
            for sequence in expired {
                // An earlier one of its batch may have returned it.
                if self.queues[name].messages.get(&sequence).is_some_and(over) {
                    self.queues.get_mut(name).unwrap().totals.expired += 1;
                    self.fail(name, sequence, Cause::Expired, None, None);
                }
            }
            let queue = self.queues.get_mut(name).unwrap();
            for m in queue.messages.values_mut() {
                if matches!(m.place, Place::Hidden { until } if until <= now_ms) {
                    m.place = Place::Ready;
                }
            }
            let before = queue.messages.len();
            let retention_ms = queue.info.config.retention_ms;
            queue.messages.retain(|_, m| m.in_flight() || m.sent_ms + retention_ms > now_ms);
            queue.totals.retention_dropped += (before - queue.messages.len()) as u64;
        }
        for at in 0..self.redrives.len() {
            self.drive(at);
        }
    }

    fn drive(&mut self, at: usize) {
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
            let Some(mut m) = self.queues.get_mut(&from).and_then(|queue| queue.messages.remove(&sequence))
            else {
                self.redrives[at].task.left += 1;
                continue;
            };
            let story = m.dead.clone().expect("a dead letter");
            let home = to.is_none();
            let id = self.new_id();
            let Some(target) = self.queues.get_mut(&to.unwrap_or(story.source)) else {
                self.queues.get_mut(&from).unwrap().messages.insert(sequence, m);
                self.redrives[at].task.left += 1;
                continue;
            };
            target.sequence += 1;
            let mut place = target.sequence;
            if home && m.group.as_ref().is_some_and(|group| target.halted.remove(group)) {
                place = m.died_at;
            }
            (m.id, m.dead, m.place, m.sent_ms) = (id, None, Place::Ready, now_ms);
            (m.attempts, m.deliveries) = (0, 0);
            m.history.clear();
            target.messages.insert(place, m);
            self.redrives[at].task.moved += 1;
        }
    }
}
