//! Implements the store's traits; the writer thread answers.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use async_trait::async_trait;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, CounterScope, Delivery, Discarded, Examination, Extend,
    FailureCause, Fence, GroupId, Maintenance, MessageId, MessageView, NewMessage, Order, Page, QueueAdmin,
    QueueConfig, QueueInfo, QueueName, QueueStats, QueueStore, Receive, RedriveRequest, RedriveTask,
    RemainingLease, Revision, SendError, Sent, Settle, SettleError, Settled, StoreError, StoreStatus,
    SupportedSettlements, Transfer, WakeUp, policy, validate,
};
use tokio::sync::oneshot;

use crate::browse::{self, BrowseScope, parse_attributes};
use crate::catalogue::SenderHints;
use crate::claims::EndOp;
use crate::engine::{Engine, PreparedMessage, ReceiveRequest, SenderKey, content_id};
use crate::environment::many_in_doubt;
use crate::record::Content;
use crate::storage::sqlite::free_bytes;
use crate::time::Now;
use crate::writer::{AfterWave, Op, RawDelivery, SettleOp, no_room};
use crate::{Embedded, StoreState};

type ReplyReceiver<T> = oneshot::Receiver<Result<T, StoreError>>;

/// The writer ended without an answer: the operation may have been executed.
fn gone() -> StoreError {
    StoreError::OutcomeUnknown("the store ended before it answered".into())
}

impl StoreState {
    pub(crate) async fn answer<T>(answer: ReplyReceiver<T>) -> Result<T, StoreError> {
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Why the disk is too full for sends, or `None`.
    fn no_room(&self) -> Option<String> {
        let folder = self.location.file.parent().filter(|_| self.location.vfs.is_none())?;
        no_room(free_bytes(folder)?, self.reserve_bytes)
    }

    /// Runs a job on the engine inside a wave and waits for the commit.
    pub(crate) async fn job<T: Send + 'static>(
        &self,
        job: impl FnOnce(&mut Engine, Now) -> T + Send + 'static,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        let job = move |engine: &mut Engine, now: Now| -> AfterWave {
            let value = job(engine, now);
            Box::new(move |failed| drop(reply.send(failed.map_or(Ok(value), Err))))
        };
        self.op_queue.push(Op::Job(Box::new(job)))?;
        Self::answer(answer).await
    }

    /// Fails calls that bypass the writer in the same way as the writer would.
    fn check_running(&self) -> Result<(), StoreError> {
        match self.op_queue.closed().or_else(|| self.report().stopped) {
            Some(stopped) => Err(stopped),
            None => Ok(()),
        }
    }

    fn delivery(&self, raw: RawDelivery) -> Delivery {
        let entry = raw.leased.entry;
        let id = self.ids.id(entry.seq);
        let attributes = raw.content.attributes.as_deref().map(parse_attributes).unwrap_or_default();
        let decided = raw.content.decided_key(&attributes, id);
        Delivery {
            id,
            attributes,
            body: raw.content.body,
            receipt: self.codec.seal(raw.leased.delivery),
            fence: Fence(raw.leased.delivery.fence),
            attempt: entry.attempts,
            deliveries: entry.deliveries,
            lease_ms: raw.lease_ms,
            sent_ms: entry.sent_ms,
            first_received_ms: entry.first_ms,
            sequence: entry.order,
            group: raw.group,
            dedup: raw.content.dedup.and_then(|dedup| dedup.parse().ok()),
            priority: hapax_core::Priority(entry.priority),
            key: decided.key,
            key_source: decided.source,
            dead: raw.dead,
        }
    }
}

/// A receive in progress. If it is dropped early, it cancels itself or returns the deliveries that did not reach the
/// caller.
struct Receiving<'a> {
    state: &'a StoreState,
    id: u64,
    /// It names its attempt: its repeat may hold the same deliveries already, so they are not given back.
    repeatable: bool,
    answer: Option<ReplyReceiver<Vec<RawDelivery>>>,
}

impl Drop for Receiving<'_> {
    fn drop(&mut self) {
        let Some(mut answer) = self.answer.take() else { return };
        answer.close();
        let op = match answer.try_recv() {
            Ok(Ok(raw)) if raw.is_empty() || self.repeatable => return,
            Ok(Ok(raw)) => Op::GiveBack(raw.iter().map(|raw| raw.leased.delivery).collect()),
            Ok(Err(_)) => return,
            Err(_) => Op::Cancel { id: self.id },
        };
        // If the store is closed, there is nothing to cancel.
        let _ = self.state.op_queue.push(op);
    }
}

fn prepare(message: NewMessage, sender_hints: Option<&SenderHints>) -> PreparedMessage {
    let bytes = message.bytes();
    let encode = || serde_json::to_string(&message.attributes).expect("attributes are plain data");
    let attributes = (!message.attributes.is_empty()).then(encode);
    let by_content =
        sender_hints.is_some_and(|sender_hints| sender_hints.by_content) && message.dedup.is_none();
    let content_id = by_content.then(|| content_id(&message.body));
    let sender_key = sender_hints.filter(|sender_hints| sender_hints.keyed).map(|sender_hints| {
        Box::new(SenderKey::find(&message.attributes, &message.body, sender_hints.pointer.clone()))
    });
    let key = sender_key.as_ref().and_then(|sender_key| sender_key.stored());
    let dedup = message.dedup.map(String::from);
    PreparedMessage {
        content: Content::new(dedup, attributes, key, message.body),
        bytes,
        attributes: message.attributes.len(),
        delay_ms: message.delay_ms,
        deliver_at_ms: message.deliver_at_ms,
        group: message.group,
        priority: message.priority,
        content_id,
        sender_key,
    }
}

#[async_trait]
impl QueueStore for Embedded {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::none("embedded");
        can.leases = true;
        can.settles = SupportedSettlements::ALL;
        (can.atomic_settle, can.atomic_moves, can.settle_ends_claims) = (true, true, true);
        (can.durable_lease, can.fence) = (true, true);
        (can.order, can.halt_group) = (Order::PerGroup, true);
        (can.priorities, can.browse, can.redrive) = (true, true, true);
        can.wake_up = WakeUp::Push;
        can.dedup_ms_max = policy::RETENTION_MS_MAX;
        can.message_bytes_max = policy::MESSAGE_BYTES_MAX;
        // Only one process has the folder open, and the counters start with it.
        can.counters = CounterScope::Process;
        can
    }

    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        validate::batch("messages", batch.len())?;
        let (reply, answer) = oneshot::channel();
        let sender_hints = self.state.catalogue.sender_hints(queue);
        let batch = batch.into_iter().map(|message| Ok(prepare(message, sender_hints.as_deref()))).collect();
        self.state.op_queue.push(Op::Send { queue: queue.clone(), batch, reply })?;
        StoreState::answer(answer).await
    }

    async fn receive(&self, queue: &QueueName, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        validate::receive(&receive)?;
        let (reply, answer) = oneshot::channel();
        let id = self.state.receives.fetch_add(1, Ordering::Relaxed);
        let repeatable = receive.attempt_id.is_some();
        let request = ReceiveRequest {
            max: receive.max,
            lease_ms: receive.lease_ms,
            consumer: receive.consumer.map(Into::into),
            ack_on_receive: receive.ack_on_receive,
            attempt_id: receive.attempt_id,
        };
        let asked = self.state.time.now();
        let op = Op::Receive { id, queue: queue.clone(), request, wait_ms: receive.wait_ms, asked, reply };
        self.state.op_queue.push(op)?;
        let mut receiving = Receiving { state: &self.state, id, repeatable, answer: Some(answer) };
        let answer = receiving.answer.as_mut().expect("just put there").await;
        receiving.answer = None;
        let raw = answer.unwrap_or_else(|_| Err(gone()))?;
        Ok(raw.into_iter().map(|raw| self.state.delivery(raw)).collect())
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        validate::batch("settle", batch.len())?;
        let (reply, answer) = oneshot::channel();
        let codec = &self.state.codec;
        let settling = |settle: Settle| SettleOp {
            delivery: codec.open(&settle.receipt),
            settlement: settle.settlement,
            claim: settle.claim.map(|end| EndOp::new(codec, end)),
            parked_for: settle.parked_for.map(|id| id.hash()),
        };
        let batch = batch.into_iter().map(settling).collect();
        self.state.op_queue.push(Op::Settle { queue: queue.clone(), batch, reply })?;
        StoreState::answer(answer).await
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        validate::batch("extend", batch.len())?;
        let (reply, answer) = oneshot::channel();
        let batch =
            batch.into_iter().map(|extend| (self.state.codec.open(&extend.receipt), extend)).collect();
        self.state.op_queue.push(Op::Extend { queue: queue.clone(), batch, reply })?;
        StoreState::answer(answer).await
    }
}

#[async_trait]
impl QueueAdmin for Embedded {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        let name = name.clone();
        self.state.job(move |engine, now| engine.create_queue(now, &name, config, interval_ms)).await?
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        self.state.check_running()?;
        self.state.catalogue.find(name).ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        let name = name.clone();
        self.state.job(move |engine, now| engine.set_queue(now, &name, config, expected)).await?
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        let (name, by, reason) = (name.clone(), by.to_owned(), reason.map(str::to_owned));
        self.state.job(move |engine, now| engine.pause_queue(now, &name, &by, reason.as_deref())).await?
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        let (name, by) = (name.clone(), by.to_owned());
        self.state.job(move |engine, now| engine.resume_queue(now, &name, &by)).await?
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        let name = name.clone();
        self.state.job(move |engine, now| engine.delete_queue(now, &name)).await?
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        self.state.check_running()?;
        let (reply, answer) = oneshot::channel();
        let state = self.state.clone();
        // Copying many configurations takes time, so neither the writer nor the caller's runtime does it.
        let job = Box::new(move |_: &rusqlite::Connection| drop(reply.send(Ok(state.catalogue.list()))));
        self.threads.reader.lock().unwrap_or_else(PoisonError::into_inner).submit(job)?;
        StoreState::answer(answer).await
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        let name = name.clone();
        self.state.job(move |engine, _| engine.find(&name).map(|id| engine.queue(id).stats())).await?
    }

    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let names = names.to_vec();
        // One job, because each is answered with the commit of its wave: a page of metrics waits for one commit, not for one of
        // each queue.
        let read = move |engine: &mut Engine, _: Now| {
            let of = |name| engine.find(name).ok().map(|id| engine.queue(id).stats());
            names.iter().map(of).collect()
        };
        self.state.job(read).await
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        let name = name.clone();
        self.state.job(move |engine, now| engine.purge(now, &name, interval_ms)).await?
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        validate::page(browse.limit)?;
        let name = name.clone();
        let found = self.state.job(move |engine, now| {
            let id = engine.find(&name)?;
            let queue = engine.queue(id);
            let damaged = queue.table.parked_for(FailureCause::Damaged);
            let scope = BrowseScope { queue: id, purged_before: queue.purged_before, damaged };
            Ok::<_, StoreError>((scope, now.ms()))
        });
        let (scope, now_ms) = found.await??;
        let (reply, answer) = oneshot::channel();
        let ids = self.state.ids.clone();
        let job = Box::new(move |db: &rusqlite::Connection| {
            let page = browse::page(db, &ids, &scope, &browse, now_ms);
            let _ =
                reply.send(page.map_err(|error| StoreError::Unavailable(format!("a read failed ({error})"))));
        });
        self.threads.reader.lock().unwrap_or_else(PoisonError::into_inner).submit(job)?;
        StoreState::answer(answer).await
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        validate::batch("ids", ids.len())?;
        let (name, seqs, by) = (name.clone(), self.seqs(&ids), by.to_owned());
        let ids = self.state.ids.clone();
        let discard = move |engine: &mut Engine, now| {
            let (count, in_flight) =
                engine.discard(now, engine.find_open(&name)?, &seqs, &by, |seq| ids.id(seq));
            let in_flight = in_flight.into_iter().map(|seq| ids.id(seq)).collect();
            Ok(Discarded { count, in_flight })
        };
        self.state.job(discard).await?
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        validate::batch("ids", ids.len())?;
        let (reply, answer) = oneshot::channel();
        self.state.op_queue.push(Op::Release { queue: name.clone(), seqs: self.seqs(&ids), reply })?;
        StoreState::answer(answer).await
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        let (name, group) = (name.clone(), group.clone());
        self.state.job(move |engine, now| engine.release_group(now, engine.find_open(&name)?, &group)).await?
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        let name = name.clone();
        self.state
            .job(move |engine, _| {
                let halted = engine.queue(engine.find(&name)?).table.groups.halted();
                Ok(halted.into_iter().map(|(group, _)| group).collect())
            })
            .await?
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.state.job(move |engine, now| engine.start_redrive(now, request)).await?
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        let from = from.clone();
        self.state.job(move |engine, _| engine.redrives(&from)).await?
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.state.job(move |engine, now| engine.cancel_redrive(now, id)).await?
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        let look =
            |engine: &mut Engine, _| (engine.usage(), engine.header().paused.clone(), engine.refuses_sends());
        let found = self.state.job(look).await;
        let report = self.state.report();
        let (usage, paused, over_quota) = match found {
            Ok(found) => found,
            // A stopped store reports that it stopped, and what it held as far as it knows.
            Err(_) if report.stopped.is_some() => (report.usage, None, None),
            Err(error) => return Err(error),
        };
        Ok(StoreStatus {
            paused,
            refuses_sends: self.state.no_room().or(over_quota),
            stopped: report.stopped.map(|stopped| stopped.to_string()),
            warnings: report.warnings,
            withheld: false,
            messages: usage.messages,
            bytes: usage.bytes,
            totals: report.stats,
        })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        let mut examination = self.state.environment.examine();
        // A store that has stopped is still examined.
        let look = |engine: &mut Engine, _| engine.near_bound();
        if let Ok(near) = self.state.job(look).await {
            examination.findings.extend(many_in_doubt(&near));
        }
        Ok(examination)
    }

    async fn close(&self) -> Result<(), StoreError> {
        let (done, closed) = oneshot::channel();
        let (state, threads) = (self.state.clone(), self.threads.clone());
        // Joining the writer blocks, and the caller's runtime must not block.
        let close = move || {
            threads.close(&state);
            let _ = done.send(());
        };
        let failed = |error| StoreError::Unavailable(format!("no thread could be started: {error}"));
        std::thread::Builder::new().name("hapax-close".into()).spawn(close).map_err(failed)?;
        closed.await.map_err(|_| gone())
    }

    fn maintenance(&self) -> Option<&dyn Maintenance> {
        Some(self)
    }

    fn transfer(&self) -> Option<&dyn Transfer> {
        Some(self)
    }
}

#[async_trait]
impl Maintenance for Embedded {
    async fn resume(&self, by: &str) -> Result<(), StoreError> {
        let by = by.to_owned();
        self.state.job(move |engine, now| engine.resume(now, &by)).await
    }
}

impl Embedded {
    fn seqs(&self, ids: &[MessageId]) -> Vec<u64> {
        ids.iter().filter_map(|id| self.state.ids.seq(*id)).collect()
    }
}
