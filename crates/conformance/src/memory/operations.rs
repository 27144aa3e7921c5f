use hapax_core::policy;
use hapax_core::store::FailedAttempt;
use hapax_core::{
    AdminError, DedupId, Delivery, EntryId, Extend, FailureCause, MessageId, MessageKey, MessageState,
    MessageView, NewMessage, QueueConfig, QueueName, QueueStats, Receipt, Receive, RemainingLease, Revision,
    SendError, Sent, Settle, SettleError, Settled, Settlement, StoreError, validate,
};
use sha2::{Digest as _, Sha256};

use super::state::{Message, MessagePlace, Queue, State};

impl State {
    pub fn of(&mut self, name: &QueueName) -> Result<&mut Queue, StoreError> {
        self.queues.get_mut(name).ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    pub fn send(&mut self, name: &QueueName, new: NewMessage) -> Result<Sent, SendError> {
        let (id, now_ms) = (self.new_id(), self.now_ms);
        let queue = self.queues.get_mut(name).unwrap();
        let config = &queue.info.config;
        let bytes = new.bytes();
        let visible = validate::message(config, (&new).into(), now_ms)?;
        let content =
            config.dedup.content_based.then(|| policy::content_id(&Sha256::digest(&new.body).into()));
        let dedup = new.dedup.or_else(|| content.map(|id| DedupId::new(id).unwrap()));
        let key =
            dedup.as_ref().map(|id| policy::dedup_key(config.dedup.scope, new.group.as_ref(), id.as_str()));
        let known = key.as_ref().and_then(|key| queue.dedup.get(key));
        if let Some(&(_, id, sequence)) =
            known.filter(|(first_ms, ..)| policy::is_duplicate(*first_ms, config.dedup.window_ms, now_ms))
        {
            queue.totals.duplicates += 1;
            return Ok(Sent { id, sequence, duplicate: true });
        }
        let full = |quota: &str, used, max| SendError::QuotaExceeded { quota: quota.into(), used, max };
        if let Some(max) = config.quota.messages_max.filter(|max| queue.messages.len() as u64 >= *max) {
            return Err(full("quota.messages_max", queue.messages.len() as u64, max));
        }
        if let Some(max) = config.quota.bytes_max.filter(|max| queue.bytes() + bytes > *max) {
            return Err(full("quota.bytes_max", queue.bytes(), max));
        }
        queue.sequence += 1;
        queue.totals.sent += 1;
        if let Some(key) = key {
            queue.dedup.insert(key, (now_ms, id, queue.sequence));
        }
        let explicit = MessageKey::explicit(&new.attributes, &new.body, config.key_pointer.as_deref());
        let due_ms = visible.due_ms;
        let place =
            if due_ms == now_ms { MessagePlace::Ready } else { MessagePlace::Hidden { until: due_ms } };
        let key = MessageKey::decide(explicit, dedup.as_ref().map(DedupId::as_str), id);
        let entry = queue.is_effectively_once().then(|| EntryId::of_queue(name, key.key.clone()));
        let message = Message {
            key,
            needs: entry.into_iter().collect(),
            id,
            place,
            body: new.body,
            attributes: new.attributes,
            sent_ms: now_ms,
            retained_from_ms: visible.retained_from_ms,
            first_received_ms: 0,
            attempts: 0,
            deliveries: 0,
            group: new.group,
            dedup,
            priority: new.priority,
            dead: None,
            died_at: 0,
            parked: None,
            history: Vec::new(),
            consumer: None,
            fence: 0,
            received_ms: 0,
            bytes,
            turn: 0,
        };
        queue.messages.insert(queue.sequence, message);
        Ok(Sent { id, sequence: queue.sequence, duplicate: false })
    }

    pub fn receive(&mut self, name: &QueueName, ask: &Receive) -> Result<Vec<Delivery>, StoreError> {
        let now_ms = self.now_ms;
        let queue = self.of(name)?;
        let lease_ms = ask.lease_ms.unwrap_or(queue.info.config.lease_ms);
        if let Some((since_ms, receipts)) =
            ask.attempt_id.as_ref().and_then(|id| queue.tries.get(id)).cloned()
        {
            let own = |r: &Receipt| queue.find(r).ok().filter(|s| queue.messages[s].in_flight());
            let found: Vec<u64> = receipts.iter().filter_map(own).take(ask.max).collect();
            if now_ms < since_ms + policy::ATTEMPT_ID_MS && !found.is_empty() {
                for sequence in &found {
                    let m = queue.messages.get_mut(sequence).unwrap();
                    let MessagePlace::InFlight { until, received, own } = m.place else {
                        panic!("not in flight")
                    };
                    let renewed = policy::extend_deadline(received, now_ms, lease_ms).unwrap_or(until);
                    m.place = MessagePlace::InFlight { until: until.max(renewed), received, own };
                }
                return Ok(found.iter().map(|s| queue.delivery(*s, now_ms)).collect());
            }
        }
        if let Some(max) = queue.max_attempts() {
            let out = |m: &Message| m.place == MessagePlace::Ready && m.attempts >= max;
            let over: Vec<u64> = queue.messages.iter().filter(|(_, m)| out(m)).map(|(s, _)| *s).collect();
            for sequence in over {
                let last = self.queues[name].messages[&sequence].history.last().cloned();
                let (cause, error) = last.map_or((FailureCause::Expired, None), |f| (f.cause, f.error));
                self.move_to_dead_letters(name, sequence, cause, error.as_deref());
            }
        }
        let (mut fence, queue) = (self.fence, self.queues.get_mut(name).unwrap());
        let room = policy::IN_FLIGHT_MAX.saturating_sub(queue.in_flight());
        if room == 0 && !queue.info.config.is_fifo() {
            return Err(StoreError::TooManyInFlight { queue: name.clone(), in_flight: queue.in_flight() });
        }
        let mut got = Vec::new();
        for sequence in queue.candidates().into_iter().take(ask.max.min(room as usize)) {
            fence = (fence + 1).max(now_ms * 1000);
            let m = queue.messages.get_mut(&sequence).unwrap();
            m.place = MessagePlace::InFlight { until: now_ms + lease_ms, received: now_ms, own: false };
            m.attempts += 1;
            m.deliveries += 1;
            m.fence = fence;
            m.received_ms = now_ms;
            m.consumer.clone_from(&ask.consumer);
            m.first_received_ms = if m.first_received_ms == 0 { now_ms } else { m.first_received_ms };
            got.push(queue.delivery(sequence, now_ms));
            queue.totals.delivered += 1;
        }
        if let Some(id) = ask.attempt_id.clone().filter(|_| !got.is_empty()) {
            queue.tries.insert(id, (now_ms, got.iter().map(|d| d.receipt.clone()).collect()));
        }
        self.fence = fence;
        for delivery in got.iter().filter(|_| ask.ack_on_receive) {
            self.ack(name, delivery.sequence);
        }
        self.tick(now_ms);
        Ok(got)
    }

    pub fn settle(&mut self, name: &QueueName, mut settle: Settle) -> Result<Settled, SettleError> {
        let now_ms = self.now_ms;
        // A claim that was lost keeps its message; an effect that happened is recorded even if its delivery is stale.
        if let Some(end) = &settle.claim {
            self.end(end).map_err(SettleError::Claim)?;
        }
        // What would release it has happened already.
        let decided = |id: &EntryId| !self.ledger.is_in_doubt(id, now_ms);
        if matches!(settle.settlement, Settlement::Park { .. })
            && settle.parked_for.as_ref().is_some_and(decided)
        {
            settle.settlement = Settlement::Defer { after_ms: 0 };
        }
        let sequence = self.find(name, &settle.receipt)?;
        let queue = self.queues.get_mut(name).unwrap();
        if !queue.messages[&sequence].in_flight() {
            match settle.settlement {
                Settlement::Ack if !queue.info.config.is_fifo() => {}
                Settlement::Ack => return Err(SettleError::Expired),
                _ => return Err(SettleError::NotInFlight),
            }
        }
        Ok(match settle.settlement {
            Settlement::Ack => self.ack(name, sequence),
            Settlement::Retry { after_ms, error } => {
                queue.totals.retried += 1;
                queue.put_back_later_in_group(sequence);
                queue.messages.get_mut(&sequence).unwrap().received_ms = 0;
                self.fail(name, sequence, FailureCause::Retry, error.as_deref(), after_ms)
            }
            Settlement::Defer { after_ms } => {
                queue.totals.deferred += 1;
                queue.put_back_later_in_group(sequence);
                State::put_back(queue, sequence, after_ms, now_ms);
                let m = queue.messages.get_mut(&sequence).unwrap();
                (m.attempts, m.received_ms) = (m.attempts - 1, 0);
                Settled::Returned { after_ms }
            }
            Settlement::Park { reason } => {
                queue.put_back_later_in_group(sequence);
                self.remember(name, sequence, FailureCause::InDoubt, Some(&reason));
                let queue = self.queues.get_mut(name).unwrap();
                queue.halt(sequence);
                let m = queue.messages.get_mut(&sequence).unwrap();
                m.attempts -= 1;
                (m.place, m.parked) = (MessagePlace::Parked, Some((FailureCause::InDoubt, Some(reason))));
                Settled::Parked
            }
            Settlement::Reject { reason } => {
                queue.put_back_later_in_group(sequence);
                self.remember(name, sequence, FailureCause::Rejected, Some(&reason));
                self.move_to_dead_letters(name, sequence, FailureCause::Rejected, Some(&reason))
            }
        })
    }

    fn ack(&mut self, name: &QueueName, sequence: u64) -> Settled {
        let queue = self.queues.get_mut(name).unwrap();
        let m = queue.messages.remove(&sequence).unwrap();
        queue.totals.acked += 1;
        if let Some(story) = &m.dead {
            self.clear_waits(&m, &story.source);
        }
        Settled::Acked
    }

    /// The message that a receipt names; one that has died is not gone.
    fn find(&mut self, name: &QueueName, receipt: &Receipt) -> Result<u64, SettleError> {
        let queue = self.queues.get_mut(name).unwrap();
        let found = queue.find(receipt);
        let target = queue.info.config.dead_letter.as_ref().map(|dead| dead.queue.clone());
        let id = receipt.as_str().split('|').nth(1).unwrap_or_default().to_owned();
        let is_dead = |m: &Message| m.id.to_string() == id && m.dead.is_some();
        let target = target.and_then(|target| self.queues.get(&target));
        let died = target.is_some_and(|target| target.messages.values().any(is_dead));
        if found == Err(SettleError::Gone) && died { Err(SettleError::Dead) } else { found }
    }

    pub fn extend(&mut self, name: &QueueName, extend: &Extend) -> Result<RemainingLease, SettleError> {
        let now_ms = self.now_ms;
        let sequence = self.find(name, &extend.receipt)?;
        let queue = self.queues.get_mut(name).unwrap();
        let fifo = queue.info.config.is_fifo();
        let m = queue.messages.get_mut(&sequence).unwrap();
        let (received, own) = match m.place {
            MessagePlace::InFlight { received, own, .. } => (received, own || extend.own_lease),
            MessagePlace::Ready | MessagePlace::Hidden { .. } if m.received_ms != 0 && !fifo => {
                if extend.lease_ms == 0 {
                    m.place = MessagePlace::Ready;
                    return Ok(RemainingLease { lease_ms: 0 });
                }
                (m.received_ms, extend.own_lease)
            }
            _ => return Err(SettleError::NotInFlight),
        };
        let until = policy::extend_deadline(received, now_ms, extend.lease_ms)?;
        let failed_late = |failed: &FailedAttempt| failed.deliveries == m.deliveries && !m.in_flight();
        if m.history.last().is_some_and(failed_late) {
            m.history.pop();
        }
        if extend.lease_ms == 0 {
            queue.totals.retried += 1;
            self.fail(name, sequence, FailureCause::Retry, None, Some(0));
        } else {
            m.place = MessagePlace::InFlight { until, received, own };
        }
        Ok(RemainingLease { lease_ms: extend.lease_ms })
    }

    pub fn new_revision(&mut self) -> Revision {
        self.revision += 1;
        Revision(self.revision)
    }

    /// Fails if less than the interval has passed since `last_ms`.
    pub fn wait(&self, last_ms: Option<u64>, interval_ms: u64) -> Result<(), AdminError> {
        validate::interval(self.now_ms, last_ms, interval_ms, || "it".into())
    }

    pub fn check(&self, name: &QueueName, config: &QueueConfig) -> Result<(), AdminError> {
        validate::queue(name, config, |dead| self.queues.get(dead).map(|queue| &queue.info.config))
    }
}

impl Queue {
    /// The message that was delivered under a receipt, and the fence of that delivery.
    fn delivered<'a>(&self, receipt: &'a Receipt) -> Result<(u64, &'a str), SettleError> {
        let parts: Vec<&str> = receipt.as_str().split('|').collect();
        let [queue, id, sequence, fence] = parts[..] else { return Err(SettleError::Malformed) };
        if queue != self.info.name.as_str() {
            return Err(SettleError::Malformed);
        }
        let sequence = sequence.parse().map_err(|_| SettleError::Malformed)?;
        let is_it = |m: &&Message| m.id.to_string() == id;
        self.messages.get(&sequence).filter(is_it).map(|_| (sequence, fence)).ok_or(SettleError::Gone)
    }

    /// The message that a receipt names, whether or not it is the newest of its receipts.
    pub fn named(&self, receipt: &Receipt) -> Option<u64> {
        self.delivered(receipt).ok().map(|(sequence, _)| sequence)
    }

    /// Lets parked messages continue; counts them.
    pub fn release(&mut self, now_ms: u64, ids: &[MessageId]) -> u64 {
        let mut released = Vec::new();
        for m in self.messages.values_mut() {
            if m.place == MessagePlace::Parked && ids.contains(&m.id) {
                (m.place, m.attempts, m.received_ms, m.parked) = (MessagePlace::Ready, 0, 0, None);
                m.history.clear();
                m.retained_from_ms = now_ms;
                released.push(m.id);
            }
        }
        self.unhalt(now_ms, |id, _| released.contains(id));
        released.len() as u64
    }

    pub fn find(&mut self, receipt: &Receipt) -> Result<u64, SettleError> {
        let (sequence, fence) = self.delivered(receipt)?;
        let m = &self.messages[&sequence];
        if m.fence.to_string() != fence {
            self.totals.stale += 1;
            return Err(SettleError::Stale);
        }
        match &m.parked {
            Some((FailureCause::InDoubt | FailureCause::Damaged, _)) => Err(SettleError::NotInFlight),
            Some(_) => Err(SettleError::Dead),
            None => Ok(sequence),
        }
    }

    pub fn view(sequence: u64, m: &Message) -> MessageView {
        let (state, due_ms) = match m.place {
            MessagePlace::Ready => (MessageState::Ready, m.sent_ms),
            MessagePlace::Hidden { until } => (MessageState::Delayed, until),
            MessagePlace::InFlight { until, .. } => (MessageState::InFlight, until),
            MessagePlace::Parked => (MessageState::Parked, m.sent_ms),
        };
        MessageView {
            id: m.id,
            state,
            body: Some(m.body.clone()),
            attributes: m.attributes.clone(),
            attempts: m.attempts,
            deliveries: m.deliveries,
            sent_ms: m.sent_ms,
            due_ms,
            sequence,
            group: m.group.clone(),
            dedup: m.dedup.clone(),
            priority: m.priority,
            dead: m.dead.clone(),
            parked: m.parked.clone(),
            history: m.history.clone(),
        }
    }

    pub fn stats(&self) -> QueueStats {
        let count =
            |f: fn(&MessagePlace) -> bool| self.messages.values().filter(|m| f(&m.place)).count() as u64;
        QueueStats {
            ready: count(|p| *p == MessagePlace::Ready),
            delayed: count(|p| matches!(p, MessagePlace::Hidden { .. })),
            in_flight: self.in_flight(),
            parked: count(|p| *p == MessagePlace::Parked),
            halted: self.waiting_in_halted(),
            bytes: self.bytes(),
            oldest_sent_ms: self.messages.values().map(|m| m.sent_ms).min(),
            totals: self.totals,
        }
    }
}
