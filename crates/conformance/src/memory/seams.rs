use std::collections::{BTreeMap, HashMap};

use async_trait::async_trait;
use hapax_core::policy;
use hapax_core::store::QueueTotals;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, Delivery, Discarded, EntryId, Examination, Extend, GroupId,
    MessageId, MessageView, NewMessage, Order, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName,
    QueuePause, QueueStats, QueueStore, Receive, RedriveRequest, RedriveState, RedriveTask, RemainingLease,
    Revision, SendError, Sent, Settle, SettleError, Settled, StoreError, StoreStatus, SupportedSettlements,
    WakeUp, validate,
};

use super::MemoryStore;
use super::state::{Message, MessagePlace, Queue, Redrive};

#[async_trait]
impl QueueStore for MemoryStore {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::none("memory");
        can.leases = true;
        can.settles = SupportedSettlements::ALL;
        (can.atomic_settle, can.atomic_moves, can.settle_ends_claims) = (true, true, true);
        (can.durable_lease, can.fence) = (true, true);
        (can.order, can.halt_group) = (Order::PerGroup, true);
        (can.priorities, can.browse, can.redrive) = (true, true, true);
        can.wake_up = WakeUp::Push;
        can.dedup_ms_max = policy::RETENTION_MS_MAX;
        can.message_bytes_max = policy::MESSAGE_BYTES_MAX;
        (self.lacks)(&mut can);
        can
    }

    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        validate::batch("messages", batch.len())?;
        let can = self.capabilities();
        let mut state = self.change();
        state.of(queue)?;
        let send = |message: NewMessage| {
            policy::tier::priority_fits_store(message.priority, &can)?;
            state.send(queue, message)
        };
        let answers = batch.into_iter().map(send).collect();
        Ok(answers)
    }

    async fn receive(&self, queue: &QueueName, ask: Receive) -> Result<Vec<Delivery>, StoreError> {
        validate::receive(&ask)?;
        let (wait_ms, from_ms) = {
            let mut state = self.now();
            (ask.wait_ms.unwrap_or(state.of(queue)?.info.config.wait_ms), state.now_ms)
        };
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let left_ms = {
                let mut state = self.now();
                let before = state.movements();
                let got = state.receive(queue, &ask);
                if state.movements() > before {
                    self.changed.notify_waiters();
                }
                let got = got?;
                if !got.is_empty() || state.now_ms >= from_ms + wait_ms {
                    return Ok(got);
                }
                state.next_ms().min(from_ms + wait_ms).saturating_sub(state.now_ms)
            };
            self.wait(changed, left_ms).await;
        }
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        validate::batch("settle", batch.len())?;
        let mut state = self.change();
        state.of(queue)?;
        let answers = batch.into_iter().map(|settle| state.settle(queue, settle)).collect();
        Ok(answers)
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        validate::batch("extend", batch.len())?;
        let mut state = self.change();
        state.of(queue)?;
        let answers = batch.iter().map(|extend| state.extend(queue, extend)).collect();
        Ok(answers)
    }
}

#[async_trait]
impl QueueAdmin for MemoryStore {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        let mut state = self.now();
        state.check(name, &config)?;
        if let Some(queue) = state.queues.get(name) {
            let differs = queue.info.config.first_difference(&config);
            return differs.map_or(Ok(false), |field| Err(AdminError::Exists(name.clone(), field)));
        }
        let now_ms = state.now_ms;
        state.wait(state.deleted.get(name).copied(), interval_ms)?;
        let revision = state.new_revision();
        let (created_ms, modified_ms) = (now_ms, now_ms);
        let info = QueueInfo { name: name.clone(), config, revision, created_ms, modified_ms, paused: None };
        // Sequences are never reused; otherwise a receipt of the old queue might match the new one.
        let sequence = state.next_id as u64;
        let (messages, dedup) = (BTreeMap::new(), HashMap::new());
        let (undecided, turns) = (BTreeMap::new(), HashMap::new());
        let (tries, totals) = (HashMap::new(), QueueTotals::default());
        let queue =
            Queue { info, messages, sequence, dedup, undecided, turns, tries, totals, purged_ms: None };
        state.queues.insert(name.clone(), queue);
        Ok(true)
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        Ok(self.now().of(name)?.info.clone())
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        let mut state = self.change();
        let actual = state.of(name)?.info.revision;
        if let Some(expected) = expected.filter(|expected| *expected != actual) {
            return Err(AdminError::RevisionConflict { what: format!("queue {name}"), expected, actual });
        }
        state.check(name, &config)?;
        if state.of(name)?.info.config == config {
            return Ok(actual);
        }
        let (revision, now_ms) = (state.new_revision(), state.now_ms);
        let info = &mut state.of(name)?.info;
        (info.config, info.revision, info.modified_ms) = (config, revision, now_ms);
        Ok(revision)
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        let mut state = self.now();
        let pause = QueuePause::new(state.now_ms, by, reason);
        state.of(name)?.info.paused.get_or_insert(pause);
        Ok(())
    }

    async fn resume_queue(&self, name: &QueueName, _by: &str) -> Result<(), StoreError> {
        self.change().of(name)?.info.paused = None;
        Ok(())
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        let mut state = self.change();
        state.of(name)?;
        let gone = state.queues.remove(name).into_iter().flat_map(|queue| queue.messages);
        state.clear_all_waits(gone.map(|(_, m)| m));
        let now_ms = state.now_ms;
        state.deleted.insert(name.clone(), now_ms);
        Ok(())
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        Ok(self.now().queues.values().map(|queue| queue.info.clone()).collect())
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        Ok(self.now().of(name)?.stats())
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        let mut state = self.change();
        let last_ms = state.of(name)?.purged_ms;
        state.wait(last_ms, interval_ms)?;
        let now_ms = state.now_ms;
        let queue = state.of(name)?;
        queue.purged_ms = Some(now_ms);
        queue.dedup.clear();
        queue.undecided.clear();
        let gone = std::mem::take(&mut queue.messages);
        let count = gone.len() as u64;
        state.clear_all_waits(gone.into_values());
        Ok(count)
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        validate::page(browse.limit)?;
        let mut state = self.now();
        let queue = state.of(name)?;
        let all = queue.messages.range(browse.after.map_or(0, |after| after + 1)..);
        let mut items: Vec<_> = all.map(|(s, m)| Queue::view(*s, m)).collect();
        items.retain(|v| browse.state.is_none_or(|s| v.state == s) && browse.id.is_none_or(|id| v.id == id));
        let more = items.len() > browse.limit;
        items.truncate(browse.limit);
        Ok(Page { next: items.last().filter(|_| more).map(|v| v.sequence), items })
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        _by: &str,
    ) -> Result<Discarded, StoreError> {
        validate::batch("ids", ids.len())?;
        let mut state = self.change();
        let now_ms = state.now_ms;
        let queue = state.of(name)?;
        let asked = |m: &Message| ids.contains(&m.id);
        let in_flight: Vec<_> =
            queue.messages.values().filter(|m| asked(m) && m.in_flight()).map(|m| m.id).collect();
        let gone: Vec<_> = queue.messages.extract_if(.., |_, m| asked(m) && !m.in_flight()).collect();
        queue.unhalt(now_ms, |id, _| gone.iter().any(|(_, m)| m.id == *id));
        let count = gone.len() as u64;
        state.clear_all_waits(gone.into_iter().map(|(_, m)| m));
        Ok(Discarded { count, in_flight })
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        validate::batch("ids", ids.len())?;
        let mut state = self.change();
        let now_ms = state.now_ms;
        let queue = state.of(name)?;
        let parked = |m: &&Message| m.place == MessagePlace::Parked && ids.contains(&m.id);
        let entries: Vec<EntryId> = queue
            .messages
            .values()
            .filter(parked)
            .map(|m| EntryId::of_queue(name, m.key.key.clone()))
            .collect();
        let released = queue.release(now_ms, &ids);
        for entry in entries {
            state.clear_failure(&entry);
        }
        Ok(released)
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        let mut state = self.change();
        let now_ms = state.now_ms;
        let removed = state.of(name)?.unhalt(now_ms, |_, other| other == group);
        if removed { Ok(()) } else { Err(AdminError::NotFound(format!("halted group {group}"))) }
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        Ok(self.now().of(name)?.halted_groups())
    }

    async fn start_redrive(&self, ask: RedriveRequest) -> Result<RedriveTask, AdminError> {
        let mut state = self.change();
        let from = state.of(&ask.from)?.info.config.clone();
        let to = ask.to.as_ref().map(|to| state.of(to).map(|to| to.info.config.clone())).transpose()?;
        let per_second = validate::redrive(&ask, &from, to.as_ref())?;
        if state.redrives.iter().any(|r| r.task.from == ask.from && r.task.state == RedriveState::Running) {
            return Err(AdminError::RedriveRunning(ask.from));
        }
        let (filter, now_ms, id) = (ask.filter, state.now_ms, state.redrives.len() as u64 + 1);
        let letters: Vec<_> =
            state.of(&ask.from)?.messages.iter().filter(|(_, m)| m.dead.is_some()).collect();
        let matches = |m: &Message| filter.selects(m.id, m.dead.as_ref().map(Into::into));
        let pending: Vec<u64> = letters.iter().filter(|(_, m)| matches(m)).map(|(s, _)| **s).collect();
        let total = letters.len() as u64;
        let task = RedriveTask {
            id,
            from: ask.from,
            to: ask.to,
            left: total - pending.len() as u64,
            filter,
            per_second,
            by: ask.by,
            state: RedriveState::Running,
            started_ms: now_ms,
            ended_ms: None,
            total,
            moved: 0,
            failure: None,
        };
        state.redrives.push(Redrive { task: task.clone(), pending });
        Ok(task)
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        let state = self.change();
        Ok(state.redrives.iter().rev().map(|r| r.task.clone()).filter(|task| task.from == *from).collect())
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        let mut state = self.now();
        let now_ms = state.now_ms;
        let found = state.redrives.iter_mut().find(|r| r.task.id == id);
        let task = &mut found.ok_or_else(|| AdminError::NotFound(format!("redrive {id}")))?.task;
        (task.state, task.ended_ms) = (RedriveState::Cancelled, Some(now_ms));
        Ok(task.clone())
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        let state = self.now();
        let messages = state.queues.values().map(|queue| queue.messages.len() as u64).sum();
        let bytes = state.queues.values().map(Queue::bytes).sum();
        Ok(StoreStatus { messages, bytes, ..StoreStatus::default() })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        Ok(Examination::default())
    }

    async fn close(&self) -> Result<(), StoreError> {
        Ok(())
    }
}
