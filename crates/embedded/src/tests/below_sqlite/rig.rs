//! A writer on a simulated disk, and random work for it.

use std::sync::Arc;

use hapax_core::ledger::TTL_MS_MAX;
use hapax_core::ledger::protocol::ClaimDecision;
use hapax_core::policy::{RETENTION_MS_MAX, RetryPolicy};
use hapax_core::{
    ClaimEnding, ClaimRequest, DeadLetterPolicy, EntryId, Json, ManualClock, Priority, QueueConfig,
    QueueName, QueueStats, Receipt, SendError, Sent, SettleError, Settled, Settlement, StoreError,
};
use hapax_simdisk::SimDisk;
use tokio::sync::oneshot;

use super::Ledger;
use crate::OpenError;
use crate::checkpoint::Checkpoint;
use crate::claims::{ClaimOp, ClaimReply, EndOp, LedgerOp};
use crate::engine::{Loader, PreparedMessage, ReceiveRequest};
use crate::receipt::DeliveryRef;
use crate::record::Content;
use crate::storage::Storage;
use crate::storage::schema::STEPS;
use crate::storage::sqlite::{DbLocation, Sqlite};
use crate::time::StoreTime;
use crate::writer::{Op, RawDelivery, SettleOp, Writer};

fn entry_id(number: u64) -> EntryId {
    EntryId::of_queue(&queue_name(0), format!("n{number}").parse().unwrap())
}

fn complete(number: u64, fence: u64) -> EndOp {
    let outcome = hapax_core::RecordedOutcome::done(Json::of(&number).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: TTL_MS_MAX };
    let id = entry_id(number);
    EndOp { hash: id.hash(), id, fence: Some(fence), ending }
}

pub const DATABASE: &str = "hapax.db";
const QUEUES: [&str; 2] = ["jobs", "dead"];
type ReplyReceiver<T> = oneshot::Receiver<Result<T, StoreError>>;

/// A delivery that a client holds.
#[derive(Clone, Copy)]
pub struct HeldDelivery {
    number: u64,
    delivery: DeliveryRef,
    queue: usize,
    /// The fence of its claim.
    claim: Option<u64>,
}

enum PendingOp {
    Send(Vec<u64>, ReplyReceiver<Vec<Result<Sent, SendError>>>),
    Receive(usize, ReplyReceiver<Vec<RawDelivery>>),
    Settle(Vec<(HeldDelivery, Settlement)>, ReplyReceiver<Vec<Result<Settled, SettleError>>>),
    Claim(HeldDelivery, ReplyReceiver<ClaimReply>),
}

/// The result of a wave.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct StepResult {
    /// The error of every operation in the wave; `None` if all were answered.
    pub error: Option<StoreError>,
}

pub struct Rig {
    pub disk: SimDisk,
    pub clock: Arc<ManualClock>,
    pub rng: fastrand::Rng,
    pub ledger: Ledger,
    /// Small, so that checkpoints happen often.
    pub wal_pages_max: u64,
    pub body_bytes_max: usize,
    held: Vec<HeldDelivery>,
    writer: Option<Writer<Sqlite>>,
}

impl Rig {
    pub fn new(seed: u64) -> Self {
        Self {
            disk: SimDisk::new(seed),
            clock: Arc::new(ManualClock::at_ms(1_800_000_000_000)),
            rng: fastrand::Rng::with_seed(seed),
            ledger: Ledger::default(),
            wal_pages_max: 40,
            body_bytes_max: 6_000,
            held: Vec::new(),
            writer: None,
        }
    }

    /// A rig with an open store and its queues.
    pub fn started(seed: u64) -> Self {
        let mut rig = Self::new(seed);
        rig.open().unwrap();
        rig.create_queues().unwrap();
        rig
    }

    pub fn open(&mut self) -> Result<(), OpenError> {
        self.writer = None;
        let location = DbLocation { file: DATABASE.into(), vfs: Some(self.disk.vfs_name().into()) };
        let mut storage = Sqlite::open(location, STEPS, Checkpoint::Inline)?;
        storage.wal_pages_max = self.wal_pages_max;
        let header = storage.header().map_err(crate::damaged)?;
        let time = std::sync::Arc::new(StoreTime::start(self.clock.clone(), header.clock_ms));
        let mut loader = Loader::new(header, crate::StoreQuota::default(), time.now());
        storage.load(&mut loader).map_err(crate::damaged)?;
        assert_eq!(loader.damaged, 0, "a crash damages no row");
        let ids = storage.ids();
        let engine = loader.finish();
        engine.check();
        self.writer = Some(Writer::new(engine, storage, time, ids, self.rng.u64(..), 0));
        Ok(())
    }

    /// Does what `Embedded::open` does to real files before SQLite reads them.
    pub fn rewrite_wal(&self) {
        let wal = format!("{DATABASE}-wal");
        if let Some(bytes) = self.disk.contents(&wal) {
            self.disk.install(&wal, &bytes);
        }
    }

    pub fn writer(&mut self) -> &mut Writer<Sqlite> {
        self.writer.as_mut().expect("the store is open")
    }

    /// Drops the writer, as a program does that ends regularly.
    pub fn drop_writer(&mut self) {
        self.writer = None;
    }

    pub fn create_queues(&mut self) -> Result<(), StoreError> {
        for name in [QUEUES[1], QUEUES[0]] {
            let dead_letter = (name == QUEUES[0]).then(|| DeadLetterPolicy { queue: queue_name(1) });
            let limit = if dead_letter.is_some() { 3 } else { 0 };
            let config = QueueConfig {
                retry: RetryPolicy::at_once().attempts(limit),
                dead_letter,
                retention_ms: RETENTION_MS_MAX,
                lease_ms: 5_000,
                ..QueueConfig::sqs()
            };
            let name = QueueName::new(name).unwrap();
            let (reply, mut answer) = oneshot::channel();
            let job = Op::Job(Box::new(move |engine, now| {
                let created = engine.create_queue(now, &name, config, 0);
                Box::new(move |failed| drop(reply.send(failed.map_or(Ok(created), Err))))
            }));
            self.writer().run(&mut vec![job]);
            answer.try_recv().expect("a job is answered")?.unwrap();
        }
        Ok(())
    }

    pub fn stats(&mut self) -> Vec<QueueStats> {
        let engine = &self.writer().engine;
        engine.check();
        engine.queues().iter().map(|queue| queue.stats()).collect()
    }

    /// One wave of one to four random operations, after a random delay.
    pub fn step(&mut self) -> StepResult {
        let passed_ms = [0, 0, 1, 40, 1_000, 6_000, 120_000][self.rng.usize(..7)];
        self.clock.advance_ms(passed_ms);
        let mut asked = Vec::new();
        let mut ops = Vec::new();
        for _ in 0..self.rng.usize(1..5) {
            let (ask, op) = match self.rng.u8(..10) {
                0..4 => self.send(),
                4..6 => self.receive(),
                _ if self.held.is_empty() => self.receive(),
                6..8 => self.claim(),
                _ => self.settle(),
            };
            asked.push(ask);
            ops.push(op);
        }
        self.writer().run(&mut ops);
        let mut outcome = StepResult::default();
        for ask in asked {
            let error = self.take(ask);
            assert!(
                outcome.error.is_none() || error.is_some(),
                "one commit failed for some and not for others"
            );
            outcome.error = outcome.error.or(error);
        }
        outcome
    }

    /// Steps `count` times, or until an operation fails.
    pub fn steps(&mut self, count: usize) -> Option<StoreError> {
        (0..count).find_map(|_| self.step().error)
    }

    fn send(&mut self) -> (PendingOp, Op) {
        let numbers: Vec<_> = (0..self.rng.u64(1..4)).map(|n| self.ledger.next + n).collect();
        self.ledger.next += numbers.len() as u64;
        let batch = numbers.iter().map(|&number| {
            let filler = self.rng.usize(..self.body_bytes_max);
            let body = Ledger::body(number, filler);
            let delay_ms = self.rng.bool().then(|| self.rng.u64(..3_000));
            let bytes = body.len() as u64;
            let content = Content::new(None, None, None, body.into());
            Ok(PreparedMessage {
                content,
                bytes,
                delay_ms,
                deliver_at_ms: None,
                group: None,
                priority: Priority(0),
                attributes: 0,
                content_id: None,
                sender_key: None,
            })
        });
        let batch = batch.collect();
        let (reply, answer) = oneshot::channel();
        (PendingOp::Send(numbers, answer), Op::Send { queue: queue_name(0), batch, reply })
    }

    fn receive(&mut self) -> (PendingOp, Op) {
        let queue = usize::from(self.rng.u8(..4) == 0);
        let request = ReceiveRequest {
            max: self.rng.usize(1..4),
            lease_ms: self.rng.bool().then(|| self.rng.u64(..10_000)),
            consumer: None,
            ack_on_receive: false,
            attempt_id: None,
        };
        let (reply, answer) = oneshot::channel();
        // It does not wait, so the request time does not matter.
        let asked = crate::time::Now { us: 0 };
        let op = Op::Receive { id: 0, queue: queue_name(queue), request, wait_ms: Some(0), asked, reply };
        (PendingOp::Receive(queue, answer), op)
    }

    fn settle(&mut self) -> (PendingOp, Op) {
        let first = self.held.swap_remove(self.rng.usize(..self.held.len()));
        let (mut batch, mut rest) = (vec![first], Vec::new());
        for held in std::mem::take(&mut self.held) {
            if held.queue == first.queue && batch.len() < 3 { batch.push(held) } else { rest.push(held) }
        }
        self.held = rest;
        let settlement = |rng: &mut fastrand::Rng| match rng.u8(..10) {
            0..6 => Settlement::Ack,
            6 => Settlement::Reject { reason: "no".into() },
            7 => Settlement::Defer { after_ms: 100 },
            _ => Settlement::Retry { after_ms: None, error: Some("again".into()) },
        };
        let batch: Vec<_> = batch.into_iter().map(|held| (held, settlement(&mut self.rng))).collect();
        let settling = |(held, settlement): &(HeldDelivery, Settlement)| SettleOp {
            delivery: Some(held.delivery),
            settlement: settlement.clone(),
            claim: held
                .claim
                .filter(|_| *settlement == Settlement::Ack)
                .map(|fence| complete(held.number, fence)),
            parked_for: None,
        };
        let settles = batch.iter().map(settling);
        let (reply, answer) = oneshot::channel();
        let op = Op::Settle { queue: queue_name(first.queue), batch: settles.collect(), reply };
        let pairs = batch.iter().filter(|(_, settlement)| *settlement == Settlement::Ack);
        let pairs = pairs.filter_map(|(held, _)| Some((held.delivery.seq, held.delivery.fence, held.claim?)));
        self.ledger.pairs.extend(pairs);
        (PendingOp::Settle(batch, answer), op)
    }

    /// A claim for one of the deliveries.
    fn claim(&mut self) -> (PendingOp, Op) {
        let held = self.held[self.rng.usize(..self.held.len())];
        let owner = format!("o{}", held.delivery.fence).parse().unwrap();
        let mut request = ClaimRequest::new(entry_id(held.number), owner, 3_000);
        request.delivery = Some((queue_name(held.queue), Receipt::new("opened").unwrap()));
        let hash = request.id.hash();
        let claiming = Box::new(ClaimOp { hash, request, delivery: Some(held.delivery) });
        let (reply, answer) = oneshot::channel();
        let asked = crate::time::Now { us: 0 };
        (PendingOp::Claim(held, answer), Op::Ledger(LedgerOp::Claim { claiming, asked, reply }))
    }

    /// Records the answers.
    fn take(&mut self, asked: PendingOp) -> Option<StoreError> {
        let ledger = &mut self.ledger;
        match asked {
            PendingOp::Claim(held, mut answer) => match answer.try_recv().expect("a claim is answered") {
                Ok(claimed) => {
                    self.claimed(&held, claimed.expect("a valid claim").0);
                    None
                }
                Err(error) => Some(error),
            },
            PendingOp::Send(numbers, mut answer) => match answer.try_recv().expect("a send is answered") {
                Ok(sent) => {
                    assert!(sent.iter().all(Result::is_ok));
                    ledger.there.extend(numbers);
                    None
                }
                Err(error) => {
                    let unknown = matches!(error, StoreError::OutcomeUnknown(_));
                    if unknown {
                        ledger.maybe_sent.extend(numbers);
                    } else {
                        ledger.gone.extend(numbers);
                    }
                    Some(error)
                }
            },
            PendingOp::Receive(queue, mut answer) => {
                match answer.try_recv().expect("a receive is answered") {
                    Ok(deliveries) => {
                        for raw in deliveries {
                            let number = Ledger::number(&raw.content.body).expect("a body of ours");
                            ledger.delivered(number, raw.leased.delivery.fence);
                            self.held.push(HeldDelivery {
                                number,
                                delivery: raw.leased.delivery,
                                queue,
                                claim: None,
                            });
                        }
                        None
                    }
                    Err(error) => Some(error),
                }
            }
            PendingOp::Settle(batch, mut answer) => match answer.try_recv().expect("a settle is answered") {
                Ok(settled) => {
                    for ((held, settlement), settled) in batch.iter().zip(settled) {
                        if *settlement == Settlement::Ack && settled.is_ok() {
                            ledger.acked(held.number, held.delivery.fence);
                        }
                        if let (Settlement::Ack, Some(fence), false) =
                            (settlement, held.claim, matches!(settled, Err(SettleError::Claim(_))))
                        {
                            ledger.completed.insert(held.number, fence);
                        }
                    }
                    None
                }
                Err(error) => {
                    if matches!(error, StoreError::OutcomeUnknown(_)) {
                        let acks = batch.iter().filter(|(_, settlement)| *settlement == Settlement::Ack);
                        ledger.maybe_acked.extend(acks.map(|(held, _)| held.number));
                    }
                    Some(error)
                }
            },
        }
    }

    fn claimed(&mut self, held: &HeldDelivery, claimed: ClaimDecision) {
        match claimed {
            ClaimDecision::Granted { entry, .. } => {
                let fence = entry.fence.0;
                assert!(!self.ledger.completed.contains_key(&held.number), "{} runs again", held.number);
                let before = self.ledger.granted.insert(held.number, fence);
                assert!(before.is_none_or(|before| before <= fence), "fences of a key step back");
                for other in self.held.iter_mut().filter(|other| other.delivery == held.delivery) {
                    other.claim = Some(fence);
                }
            }
            ClaimDecision::Completed { .. } => {
                let asked = self.ledger.pairs.iter().any(|(seq, ..)| *seq == held.delivery.seq);
                assert!(asked, "{} was completed by nobody", held.number);
            }
            ClaimDecision::InProgress { .. } | ClaimDecision::InDoubt { .. } => {}
        }
    }

    /// Compares the open store with the answers.
    pub fn verify(&mut self) -> Result<(), String> {
        let mut ledger = std::mem::take(&mut self.ledger);
        let verified = ledger.verify(self);
        self.ledger = ledger;
        verified?;
        let messages = self.writer().engine.usage().messages;
        assert_eq!(messages, self.ledger.there.len() as u64, "memory and disk differ");
        self.writer().engine.check();
        Ok(())
    }

    pub fn power_loss(&mut self) {
        self.disk.power_loss();
        self.ledger.latest.clear();
    }
}

pub fn queue_name(queue: usize) -> QueueName {
    QueueName::new(QUEUES[queue]).unwrap()
}
