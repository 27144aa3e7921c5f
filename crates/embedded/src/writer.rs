//! Group commit: all pending operations are applied as one wave, written in one transaction, then answered.
//!
//! No answer is sent before its wave is committed. That rule is why "accepted" means "durable".

mod ledger;
mod transfer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{
    DeadLetter, EntryId, Extend, GroupId, IdempotencyKey, Imported, KeySource, MessageId, QueueName,
    RemainingLease, SendError, Sent, SettleError, Settled, Settlement, StoreError, StoreTotals,
    TransferScope,
};
use tokio::sync::oneshot;

use crate::browse::parse_attributes;
use crate::catalogue::Catalogue;
use crate::claims::{ClaimWaiters, EndOp, LedgerOp};
use crate::engine::{Engine, Leased, NearDoubtLimit, PreparedMessage, Queue, ReceiveRequest};
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::record::{BodyRow, Content, FLAG_DEAD, ImportedRow};
use crate::storage::{CommitError, Durability, FoundBody, ReadError, Storage};
use crate::time::{Now, StoreTime};
use crate::transfer::PreparedItem;
use crate::waiters::{Waiter, Waiters};

pub(crate) type Reply<T> = oneshot::Sender<Result<T, StoreError>>;

/// A delivery as the writer produces it. The caller's thread converts it to the public type.
#[derive(Debug)]
pub(crate) struct RawDelivery {
    pub leased: Leased,
    pub content: Content,
    pub group: Option<GroupId>,
    pub dead: Option<DeadLetter>,
    pub lease_ms: u64,
}

/// Runs after the wave; the argument is `None` if the wave was committed.
pub(crate) type AfterWave = Box<dyn FnOnce(Option<StoreError>) + Send>;
/// Runs inside the wave and returns what to do after it.
pub(crate) type EngineJob = Box<dyn FnOnce(&mut Engine, Now) -> AfterWave + Send>;

/// An operation for the writer.
pub(crate) enum Op {
    Send {
        queue: QueueName,
        batch: Vec<Result<PreparedMessage, SendError>>,
        reply: Reply<Vec<Result<Sent, SendError>>>,
    },
    Receive {
        id: u64,
        queue: QueueName,
        request: ReceiveRequest,
        wait_ms: Option<u64>,
        /// When the caller sent the request. Its wait counts from then, not from when the writer processes it.
        asked: Now,
        reply: Reply<Vec<RawDelivery>>,
    },
    /// The caller of this receive dropped it.
    Cancel {
        id: u64,
    },
    /// Deliveries that were made but never reached their receiver.
    GiveBack(Vec<DeliveryRef>),
    Settle {
        queue: QueueName,
        batch: Vec<SettleOp>,
        reply: Reply<Vec<Result<Settled, SettleError>>>,
    },
    Extend {
        queue: QueueName,
        batch: Vec<(Option<DeliveryRef>, Extend)>,
        reply: Reply<Vec<Result<RemainingLease, SettleError>>>,
    },
    /// An operator lets parked messages continue.
    Release {
        queue: QueueName,
        seqs: Vec<u64>,
        reply: Reply<u64>,
    },
    Ledger(LedgerOp),
    Import {
        to: TransferScope,
        items: Vec<PreparedItem>,
        reply: Reply<Vec<Result<Imported, SendError>>>,
    },
    Job(EngineJob),
}

/// Ends a delivery, and its claim if one was made for it.
pub(crate) struct SettleOp {
    pub delivery: Option<DeliveryRef>,
    pub settlement: Settlement,
    pub claim: Option<EndOp>,
    /// Parked only while the entry with this hash is in doubt.
    pub parked_for: Option<u128>,
}

impl Op {
    pub fn bytes(&self) -> usize {
        match self {
            Self::Send { batch, .. } => batch.iter().flatten().map(|message| message.bytes as usize).sum(),
            Self::Settle { batch, .. } => {
                batch.iter().filter_map(|settling| settling.claim.as_ref()).map(EndOp::bytes).sum()
            }
            Self::Ledger(op) => op.bytes(),
            Self::Import { items, .. } => items.iter().map(|item| item.item.bytes()).sum(),
            _ => 0,
        }
    }

    /// Whether the operation adds data to the store.
    pub fn adds_data(&self) -> bool {
        matches!(self, Self::Send { .. } | Self::Import { .. } | Self::Ledger(LedgerOp::Claim { .. }))
    }

    /// Whether the operation need not wait for the disk: after a power cut a delivery is either still known or made
    /// again.
    fn skips_sync(&self) -> bool {
        match self {
            Self::Receive { request, .. } => !request.ack_on_receive,
            Self::Cancel { .. } | Self::GiveBack(_) => true,
            Self::Ledger(op) => op.skips_sync(),
            _ => false,
        }
    }
}

/// A dead letter's content for redelivery, and its key. If the key is the message's id, it is stored with the content,
/// because the redriven message gets a new id.
fn with_key(id: MessageId, content: Content) -> (Content, IdempotencyKey) {
    let attributes = content.attributes.as_deref().map(parse_attributes).unwrap_or_default();
    let decided = content.decided_key(&attributes, id);
    let key = decided.key.clone();
    if decided.source != KeySource::MessageId {
        return (content, key);
    }
    (Content::new(content.dedup, content.attributes, Some(decided), content.body), key)
}

/// Answers to send after the commit.
enum PendingReply {
    Sent(Reply<Vec<Result<Sent, SendError>>>, Vec<Result<Sent, SendError>>),
    Received {
        reply: Reply<Vec<RawDelivery>>,
        raw: Vec<RawDelivery>,
        /// The receive names its attempt: what its caller did not see is kept for the repeat.
        repeatable: bool,
    },
    Settled(Reply<Vec<Result<Settled, SettleError>>>, Vec<Result<Settled, SettleError>>),
    Extended(Reply<Vec<Result<RemainingLease, SettleError>>>, Vec<Result<RemainingLease, SettleError>>),
    Imported(Reply<Vec<Result<Imported, SendError>>>, Vec<Result<Imported, SendError>>),
    /// Of the ledger: run with the error, if there was one.
    Ledger(AfterWave),
    Job(AfterWave),
}

/// Maximum number of operations in a wave, so that its transaction stays short.
const WAVE_OPS_MAX: usize = 4_096;
/// Maximum bytes of bodies in a wave.
const WAVE_BYTES_MAX: usize = 32 * 1024 * 1024;
/// After a commit failed on a full disk, timers, pruning and redrives pause for this long: the same rows would fail
/// again.
const HOLD_MS: u64 = 500;

pub(crate) struct Writer<S> {
    pub engine: Engine,
    pub storage: S,
    pub catalogue: Arc<Catalogue>,
    time: Arc<StoreTime>,
    ids: Ids,
    rng: fastrand::Rng,
    waiters: Waiters,
    claims: ClaimWaiters,
    pending_replies: Vec<PendingReply>,
    /// Deliveries whose receiver was dropped before they reached it.
    unseen: Vec<DeliveryRef>,
    /// Those of `unseen` that this wave gives back.
    given_back: Vec<DeliveryRef>,
    /// Ids that this wave took over from another store.
    imported: Vec<ImportedRow>,
    /// Sends are refused when less room is left.
    reserve_bytes: u64,
    /// Free disk space, queried once per wave; `u64::MAX` if unknown.
    free_bytes: Option<u64>,
    hold_until_ms: u64,
    pub stopped: Option<StoreError>,
    pub stats: StoreTotals,
    /// How long the last commit took that waited for the disk.
    pub sync_time: Duration,
    /// Messages found damaged since the store was opened.
    pub damaged: Vec<String>,
}

impl<S: Storage> Writer<S> {
    pub fn new(
        engine: Engine,
        storage: S,
        time: Arc<StoreTime>,
        ids: Ids,
        seed: u64,
        reserve_bytes: u64,
    ) -> Self {
        let catalogue = Arc::new(Catalogue::new(engine.queues().into_iter().map(Queue::row)));
        Self {
            engine,
            storage,
            catalogue,
            time,
            ids,
            rng: fastrand::Rng::with_seed(seed),
            waiters: Waiters::default(),
            claims: ClaimWaiters::default(),
            pending_replies: Vec::new(),
            unseen: Vec::new(),
            given_back: Vec::new(),
            imported: Vec::new(),
            reserve_bytes,
            free_bytes: None,
            hold_until_ms: 0,
            stopped: None,
            stats: StoreTotals::default(),
            sync_time: Duration::ZERO,
            damaged: Vec::new(),
        }
    }

    /// How long to sleep if no operation arrives; `None` means until one arrives.
    pub fn sleep(&self) -> Option<Duration> {
        let timer = self.engine.next_timer().map(|at_ms| at_ms.max(self.hold_until_ms));
        let unseen = (!self.unseen.is_empty()).then_some(self.hold_until_ms);
        let waits = self.waiters.next_deadline_ms().into_iter().chain(self.claims.next_ms());
        let next_ms = timer.into_iter().chain(unseen).chain(waits).min();
        // Work that is already due runs now, even if a test moves the clock by hand.
        if next_ms.is_some_and(|next_ms| next_ms <= self.time.now().ms()) {
            return Some(Duration::ZERO);
        }
        self.time.sleep_until(next_ms?)
    }

    /// Applies the operations that need not wait for the disk in a wave of their own and leaves the rest. A receive in
    /// the same wave as sends would wait for their sync, and its ack would come one sync later.
    pub fn run_unsynced(&mut self, ops: &mut Vec<Op>) {
        if ops.iter().any(Op::skips_sync) {
            let mut unsynced: Vec<_> = ops.extract_if(.., |op| op.skips_sync()).collect();
            self.run(&mut unsynced);
        }
    }

    /// Applies all operations, in one or more waves.
    pub fn run(&mut self, ops: &mut Vec<Op>) {
        let mut ops = ops.drain(..).peekable();
        loop {
            let (mut count, mut bytes) = (0, 0);
            let now = self.begin();
            while count < WAVE_OPS_MAX && bytes < WAVE_BYTES_MAX {
                let Some(op) = ops.next() else { break };
                bytes += op.bytes();
                count += 1;
                self.apply(now, op);
            }
            self.end(now);
            if ops.peek().is_none() {
                return;
            }
        }
    }

    fn begin(&mut self) -> Now {
        let now = self.time.now();
        self.free_bytes = None;
        if self.stopped.is_some() {
            return now;
        }
        if now.ms() >= self.hold_until_ms {
            let frozen = self.engine.ledger_copy().is_some();
            // Pruning runs first: before the wave's own changes, the links in the storage are up to date.
            if !frozen {
                self.prune(now);
            }
            let unseen = std::mem::take(&mut self.unseen);
            self.give_back(now, unseen);
            if !frozen {
                self.engine.lapse_claims(now);
                self.step_releases(now);
            }
            self.step_redrives(now);
            let rng = &mut self.rng;
            self.engine.run_timers(now, || rng.u64(..));
        }
        now
    }

    fn end(&mut self, now: Now) {
        if self.stopped.is_none() {
            self.serve_claims(now);
            self.release_parked(now);
        }
        if self.stopped.is_none() {
            for queue in self.engine.touched() {
                self.serve(now, queue);
            }
            while let Some(waiter) = self.waiters.overdue(now.ms()) {
                let _ = waiter.reply.send(Ok(Vec::new()));
            }
        }
        for NearDoubtLimit { scope, in_doubt, max } in self.engine.take_alarms() {
            tracing::warn!(
                %scope, in_doubt, max,
                "keys of this scope are in doubt; at the maximum its new keys are refused: resolve some"
            );
        }
        let failed = self.commit(now);
        for answer in std::mem::take(&mut self.pending_replies) {
            self.send_reply(answer, failed.as_ref());
        }
    }

    fn commit(&mut self, now: Now) -> Option<StoreError> {
        let failed = self.try_commit(now);
        self.given_back.clear();
        for row in std::mem::take(&mut self.imported) {
            if failed.is_some() {
                self.ids.drop_imported(&row);
            }
        }
        failed
    }

    fn try_commit(&mut self, now: Now) -> Option<StoreError> {
        if let Some(stopped) = &self.stopped {
            return Some(stopped.clone());
        }
        if !self.engine.finish_records(now) {
            self.engine.commit();
            return None;
        }
        let durability =
            if self.engine.wave.durable { Durability::PowerLoss } else { Durability::ProcessDeath };
        let start = Instant::now();
        match self.storage.commit(&self.engine.wave.records, durability) {
            Ok(()) => {
                self.stats.commits += 1;
                if durability == Durability::PowerLoss {
                    self.stats.synced += 1;
                    self.sync_time = start.elapsed();
                }
                self.catalogue.committed(&self.engine.wave.records);
                self.engine.commit();
                None
            }
            Err(CommitError::Full(problem)) => {
                self.engine.rollback();
                // The rollback also undid the return of these deliveries: the writer must return them again.
                self.unseen.append(&mut self.given_back);
                self.hold_until_ms = now.ms() + HOLD_MS;
                Some(StoreError::Full(problem))
            }
            Err(CommitError::Unknown(problem)) => {
                let remedy =
                    "the store has stopped; look at the disk, then start it again: it recovers by itself";
                self.stop(StoreError::Unavailable(format!("a write failed ({problem}); {remedy}")));
                Some(StoreError::OutcomeUnknown(format!("a write failed ({problem})")))
            }
        }
    }

    /// Rejects every further operation. Memory may be ahead of the disk, so it is not used again.
    fn stop(&mut self, error: StoreError) {
        for waiter in self.waiters.drain() {
            let _ = waiter.reply.send(Err(error.clone()));
        }
        for waiter in self.claims.drain() {
            let _ = waiter.reply.send(Err(error.clone()));
        }
        self.stopped = Some(error);
    }

    /// Stops after a failed read: nothing of this wave was written, and nothing more will be.
    fn stop_unread(&mut self, error: &ReadError) {
        self.engine.rollback();
        let remedy = "the store has stopped; look at the disk, then start it again";
        self.stop(StoreError::Unavailable(format!("a read failed ({error}); {remedy}")));
    }

    /// As `stop_unread`, for a failure while this receive was being served; its caller gets the error.
    fn stop_receive(&mut self, waiter: Waiter, error: &ReadError) {
        self.stop_unread(error);
        let stopped = self.stopped.clone().expect("just stopped");
        let _ = waiter.reply.send(Err(stopped));
    }

    fn send_reply(&mut self, answer: PendingReply, failed: Option<&StoreError>) {
        fn give<T>(reply: Reply<T>, value: T, failed: Option<&StoreError>) {
            // A caller that is gone needs no answer: the outcome of its operation is durable either way.
            let _ = reply.send(failed.map_or(Ok(value), |error| Err(error.clone())));
        }
        match answer {
            PendingReply::Sent(reply, sent) => give(reply, sent, failed),
            PendingReply::Settled(reply, settled) => give(reply, settled, failed),
            PendingReply::Extended(reply, remaining) => give(reply, remaining, failed),
            PendingReply::Imported(reply, imported) => give(reply, imported, failed),
            PendingReply::Ledger(done) | PendingReply::Job(done) => done(failed.cloned()),
            PendingReply::Received { reply, raw, repeatable } => {
                let answer = failed.map_or(Ok(raw), |error| Err(error.clone()));
                if let (Err(Ok(raw)), false) = (reply.send(answer), repeatable) {
                    self.unseen.extend(raw.iter().map(|raw| raw.leased.delivery));
                }
            }
        }
    }

    fn apply(&mut self, now: Now, op: Op) {
        match op {
            Op::Send { queue, batch, reply } => self.send(now, &queue, batch, reply),
            Op::Receive { id, queue, request, wait_ms, asked, reply } => {
                self.receive(now, id, &queue, request, wait_ms, asked, reply);
            }
            Op::Cancel { id } => drop(self.waiters.remove(id)),
            Op::GiveBack(delivery) => {
                if self.stopped.is_none() {
                    self.give_back(now, delivery);
                }
            }
            Op::Settle { queue, batch, reply } => match self.ready(&queue) {
                Err(error) => drop(reply.send(Err(error))),
                Ok(id) => self.settle(now, id, &batch, reply),
            },
            Op::Extend { queue, batch, reply } => match self.ready(&queue) {
                Err(error) => drop(reply.send(Err(error))),
                Ok(id) => {
                    self.stats.operations += batch.len() as u64;
                    let extended = batch.into_iter().map(|(delivery, extend)| {
                        let delivery = delivery.ok_or(SettleError::Malformed)?;
                        self.engine.extend(now, id, delivery, extend.lease_ms, extend.own_lease)
                    });
                    let extended = extended.collect();
                    self.pending_replies.push(PendingReply::Extended(reply, extended));
                }
            },
            Op::Release { queue, seqs, reply } => match self.ready(&queue) {
                Err(error) => drop(reply.send(Err(error))),
                Ok(id) => self.release(now, id, &seqs, reply),
            },
            Op::Ledger(op) => self.apply_ledger(now, op),
            Op::Import { to, items, reply } => self.import(now, &to, items, reply),
            Op::Job(job) => {
                // A stopped store still answers: the error replaces the job's result.
                let done = job(&mut self.engine, now);
                self.pending_replies.push(PendingReply::Job(done));
                self.drop_orphans();
            }
        }
    }

    fn give_back(&mut self, now: Now, unseen: Vec<DeliveryRef>) {
        for delivery in &unseen {
            self.engine.give_back(now, *delivery);
        }
        self.given_back.extend(unseen);
    }

    fn ready(&self, queue: &QueueName) -> Result<u32, StoreError> {
        match &self.stopped {
            Some(stopped) => Err(stopped.clone()),
            None => self.engine.find_open(queue),
        }
    }

    /// Fails the receives and claims that wait on what was just deleted or closed.
    fn drop_orphans(&mut self) {
        for (queue, error) in self.engine.take_closed() {
            match queue {
                Some(queue) => {
                    while let Some(waiter) = self.waiters.next(queue) {
                        let _ = waiter.reply.send(Err(error.clone()));
                    }
                }
                None => {
                    for waiter in self.claims.drain() {
                        let _ = waiter.reply.send(Err(error.clone()));
                    }
                }
            }
        }
        for (queue, name) in self.engine.take_deleted() {
            while let Some(waiter) = self.waiters.next(queue) {
                let _ = waiter.reply.send(Err(StoreError::NoSuchQueue(name.clone())));
            }
        }
    }

    fn send(
        &mut self,
        now: Now,
        queue: &QueueName,
        batch: Vec<Result<PreparedMessage, SendError>>,
        reply: Reply<Vec<Result<Sent, SendError>>>,
    ) {
        let ready = self.ready(queue).and_then(|id| self.check_room().map(|()| id));
        let id = match ready {
            Ok(id) => id,
            Err(error) => return drop(reply.send(Err(error))),
        };
        self.stats.operations += batch.len() as u64;
        let mut sent = Vec::with_capacity(batch.len());
        for message in batch {
            let mut message = match message {
                Ok(message) => message,
                Err(error) => {
                    sent.push(Err(error));
                    continue;
                }
            };
            match self.before_send(now, id, &mut message) {
                Ok((stored, entry)) => {
                    sent.push(self.engine.send(now, id, message, stored, entry, |seq| self.ids.id(seq)));
                }
                Err(error) => {
                    self.stop_unread(&error);
                    let stopped = self.stopped.clone().expect("just stopped");
                    return drop(reply.send(Err(stopped)));
                }
            }
        }
        self.pending_replies.push(PendingReply::Sent(reply, sent));
    }

    /// Reads what a send needs and memory does not hold: the first message with its deduplication id, and, if its queue
    /// requires it, its ledger entry.
    fn before_send(
        &mut self,
        now: Now,
        queue: u32,
        message: &mut PreparedMessage,
    ) -> Result<(Option<crate::record::DedupRow>, Option<hapax_core::EntryId>), ReadError> {
        let stored = self.known(now, queue, message)?;
        self.engine.find_sender_key(queue, message);
        let id = self.ids.id(self.engine.next_seq());
        let Some((entry, source)) = self.engine.entry_of(queue, message, id) else {
            return Ok((stored, None));
        };
        // A new id cannot have an entry yet.
        if source != KeySource::MessageId {
            self.clear_entry(now, &entry, false)?;
        }
        Ok((stored, Some(entry)))
    }

    /// Looks up a deduplication id that memory may no longer hold.
    fn known(
        &mut self,
        now: Now,
        queue: u32,
        message: &PreparedMessage,
    ) -> Result<Option<crate::record::DedupRow>, ReadError> {
        match self.engine.dedup_lookup(queue, message, now) {
            Some(key) => self.storage.dedup(queue, key),
            None => Ok(None),
        }
    }

    fn check_room(&mut self) -> Result<(), StoreError> {
        let ask = || self.storage.free_bytes().unwrap_or(u64::MAX);
        let free = *self.free_bytes.get_or_insert_with(ask);
        no_room(free, self.reserve_bytes).map_or(Ok(()), |why| Err(StoreError::Full(why)))
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the operation")]
    fn receive(
        &mut self,
        now: Now,
        id: u64,
        queue: &QueueName,
        request: ReceiveRequest,
        wait_ms: Option<u64>,
        asked: Now,
        reply: Reply<Vec<RawDelivery>>,
    ) {
        let found = self.ready(queue).and_then(|queue| match &self.engine.header().paused {
            Some(paused) => Err(StoreError::Paused(paused.clone())),
            None => Ok(queue),
        });
        let queue = match found {
            Ok(queue) => queue,
            Err(error) => return drop(reply.send(Err(error))),
        };
        if reply.is_closed() {
            return;
        }
        self.stats.operations += 1;
        let config = &self.engine.queue(queue).config;
        let repeats = self.engine.repeats(now, queue, &request);
        if self.engine.in_flight_room(queue) == 0 && !config.is_fifo() && !repeats {
            let name = self.engine.queue(queue).name.clone();
            let in_flight = hapax_core::policy::IN_FLIGHT_MAX;
            return drop(reply.send(Err(StoreError::TooManyInFlight { queue: name, in_flight })));
        }
        let wait_ms = wait_ms.unwrap_or(config.wait_ms);
        let waiter = Waiter { id, queue, request, deadline_ms: asked.ms() + wait_ms, reply };
        // Those who wait already come first, but what a repeated receive gives is not for them.
        if repeats || !self.waiters.any(queue) {
            match self.hand_out(now, &waiter) {
                Err(error) => self.stop_receive(waiter, &error),
                Ok(raw) if raw.is_empty() && wait_ms > 0 => self.waiters.add(waiter),
                Ok(raw) => self.received(now, waiter, raw),
            }
        } else if wait_ms > 0 {
            self.waiters.add(waiter);
            self.serve(now, queue);
        } else {
            self.serve(now, queue);
            match self.hand_out(now, &waiter) {
                Err(error) => self.stop_receive(waiter, &error),
                Ok(raw) => self.received(now, waiter, raw),
            }
        }
    }

    /// Answers a receive, and with it those that wait under the same attempt id: they are repeats of it.
    fn received(&mut self, now: Now, waiter: Waiter, raw: Vec<RawDelivery>) {
        let attempt_id = waiter.request.attempt_id.filter(|_| !raw.is_empty());
        self.pending_replies.push(PendingReply::Received {
            reply: waiter.reply,
            raw,
            repeatable: attempt_id.is_some(),
        });
        let Some(id) = attempt_id else { return };
        while let Some(same) = self.waiters.next_attempt(waiter.queue, &id) {
            match self.hand_out(now, &same) {
                Err(error) => return self.stop_receive(same, &error),
                Ok(raw) => self.pending_replies.push(PendingReply::Received {
                    reply: same.reply,
                    raw,
                    repeatable: true,
                }),
            }
        }
    }

    /// Serves the waiting receives of a queue, oldest first, while messages are available.
    fn serve(&mut self, now: Now, queue: u32) {
        while self.waiters.any(queue) && self.engine.has_available(queue) {
            let Some(waiter) = self.waiters.next(queue) else { return };
            match self.hand_out(now, &waiter) {
                Err(error) => return self.stop_receive(waiter, &error),
                Ok(raw) if raw.is_empty() => return self.waiters.add(waiter),
                Ok(raw) => self.received(now, waiter, raw),
            }
        }
    }

    /// Leases messages and reads their bodies. A damaged message is parked and another one is taken instead.
    fn hand_out(&mut self, now: Now, waiter: &Waiter) -> Result<Vec<RawDelivery>, ReadError> {
        let mut handed = Vec::new();
        let mut request = waiter.request.clone();
        loop {
            let mut damaged = 0;
            let leased = self.engine.receive(now, waiter.queue, &request);
            let seqs = leased.iter().map(|leased| leased.delivery.seq);
            let stored: Vec<_> = seqs.filter(|seq| self.engine.wave.fresh_body(*seq).is_none()).collect();
            let mut stored = self.storage.bodies(&stored)?.into_iter();
            handed.reserve(leased.len());
            for leased in leased {
                let seq = leased.delivery.seq;
                let found = match self.engine.wave.fresh_body(seq) {
                    Some(body) => FoundBody::Sound(body.clone()),
                    None => stored.next().expect("one for each"),
                };
                if damaged > 0 && !self.engine.is_current(leased.delivery) {
                    // A damaged message ahead of it halted its group.
                    continue;
                }
                match found {
                    FoundBody::Sound(body) => {
                        handed.push(self.raw(now, leased, body)?);
                        if request.ack_on_receive {
                            self.engine.ack_leased(now, leased.delivery);
                        }
                    }
                    FoundBody::Damaged(problem) => {
                        damaged += 1;
                        self.engine.park_damaged(now, leased.delivery);
                        let message = self.ids.id(seq);
                        tracing::error!(message_id = %message, %problem, "a damaged message is parked, not delivered");
                        self.damaged.push(format!("message {message} is parked: {problem}"));
                    }
                }
            }
            if damaged == 0 {
                break;
            }
            // Only what was damaged is replaced: a repeated receive gives what it gave before, be that less than is
            // asked for now.
            request.max = damaged;
            request.attempt_id = None;
        }
        if let (Some(id), false) = (&waiter.request.attempt_id, handed.is_empty()) {
            let deliveries: Vec<_> = handed.iter().map(|raw| raw.leased.delivery).collect();
            self.engine.remember_receive(now, waiter.queue, id, &deliveries);
        }
        Ok(handed)
    }

    fn raw(&mut self, now: Now, leased: Leased, body: BodyRow) -> Result<RawDelivery, ReadError> {
        let seq = leased.delivery.seq;
        let dead = if leased.entry.flags & FLAG_DEAD == 0 {
            None
        } else if let Some(dead) = self.engine.wave.fresh_dead(seq).cloned() {
            // An expired lease has no error of its own, so the latest reported error is shown: it is the most useful
            // one.
            let error = match dead.error.clone().or_else(|| self.engine.wave.fresh_error(seq)) {
                Some(error) => Some(error),
                None => self.storage.last_error(seq)?,
            };
            Some(crate::record::DeadRow { error, ..dead })
        } else {
            self.storage.dead(seq)?
        };
        let group = self.engine.queue(leased.delivery.queue).table.group_name(&leased.entry);
        let lease_ms = leased.entry.due_ms.saturating_sub(now.ms());
        Ok(RawDelivery { leased, content: body.content, group, dead: dead.map(Into::into), lease_ms })
    }

    /// Moves as many messages as the running redrives may move by now.
    fn step_redrives(&mut self, now: Now) {
        for step in self.engine.redrive_steps(now) {
            let (mut moved, mut left) = (0, 0);
            for candidate in &step.candidates {
                match self.redrive(now, step.task, candidate) {
                    Ok(true) => moved += 1,
                    Ok(false) => left += 1,
                    Err(error) => return self.stop_unread(&error),
                }
            }
            self.engine.redrive_progress(now, &step, moved, left);
        }
    }

    fn redrive(
        &mut self,
        now: Now,
        task: u64,
        candidate: &crate::engine::Candidate,
    ) -> Result<bool, ReadError> {
        if !self.engine.redrivable(task, candidate) {
            return Ok(false);
        }
        let FoundBody::Sound(body) = self.storage.body(candidate.seq)? else { return Ok(false) };
        let dead = self.storage.dead(candidate.seq)?;
        let id = self.ids.id(candidate.seq);
        if !self.engine.redrive_matches(task, id, dead.as_ref()) {
            return Ok(false);
        }
        let Some(to) = self.engine.redrive_target(task, dead.as_ref()) else { return Ok(false) };
        let (content, key) = with_key(id, body.content);
        let mut link = None;
        if self.engine.redrive_keyed(task, candidate, to, dead.as_ref()) {
            let entry = EntryId::of_queue(&self.engine.queue(to).name, key);
            self.clear_entry(now, &entry, true)?;
            link = Some(entry.hash());
        }
        Ok(self.engine.redrive(now, task, candidate, to, content, dead.as_ref(), link))
    }

    /// Answers all waiting receives and claims because the store is closing.
    pub fn close(&mut self) {
        for waiter in self.waiters.drain() {
            let _ = waiter.reply.send(Ok(Vec::new()));
        }
        for waiter in self.claims.drain() {
            let _ = waiter.reply.send(Err(StoreError::Unavailable("the store is closed".into())));
        }
        // What was never seen goes back, and a lease that has ended is recorded as such.
        self.run(&mut Vec::new());
    }
}

/// The reason to refuse sends with `free_bytes` left on the disk, or `None`.
pub(crate) fn no_room(free_bytes: u64, reserve_bytes: u64) -> Option<String> {
    (free_bytes < reserve_bytes).then(|| {
        format!(
            "{free_bytes} bytes are left on the disk and the last {reserve_bytes} are kept for settling messages"
        )
    })
}
