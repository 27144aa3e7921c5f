//! Random operation sequences against the model: every answer and every counter must agree, through restarts.

use std::collections::BTreeSet;
use std::sync::Arc;

use hapax_core::policy::{Jitter, RetryPolicy};
use hapax_core::{
    AdminError, DeadLetterPolicy, DedupPolicy, DedupScope, FailureCause, ManualClock, OnDead, Priority,
    QueueConfig, QueueName, RedriveFilter, RedriveRequest, SettleError, Settlement,
};
use proptest::prelude::*;

use super::model::{Model, ModelPlace, NewModelMessage};
use super::rig::{self, ReplyReceiver};
use super::sim_storage::SimStorage;
use crate::checkpoint::Checkpoint;
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::storage::sqlite::{DbLocation, Sqlite};
use crate::storage::{Storage, schema};
use crate::time::Now;
use crate::writer::{Op, RawDelivery, Writer};

const QUEUES: [&str; 4] = ["std", "std-dead", "ord.fifo", "ord-dead.fifo"];
const MAIN: [usize; 2] = [0, 2];
const RETENTION_MS: u64 = 600_000;

/// The configuration of the queues.
#[derive(Debug, Clone)]
struct Setup {
    halt: bool,
    by_content: bool,
    by_group: bool,
    window_ms: u64,
    base_ms: u64,
    max_attempts: u32,
}

/// One operation; `pick` selects among the deliveries made so far, the latest first.
#[derive(Debug, Clone)]
enum Operation {
    Send { queue: usize, news: Vec<NewModelMessage> },
    Receive(Receive),
    Settle { settles: Vec<(usize, ReceiptChange, Settlement)> },
    Extend { pick: usize, receipt_change: ReceiptChange, lease_ms: u64, own_lease: bool },
    Purge { queue: usize },
    SetQueue { main: usize, max_attempts: u32, base_ms: u64 },
    Release { pick: usize },
    ReleaseGroup { group: u8 },
    Discard { pick: usize },
    Redrive { from: usize, to_other: bool, cause: Option<FailureCause>, per_second: u32 },
    CancelRedrive,
}

#[derive(Debug, Clone)]
struct Receive {
    queue: usize,
    max: usize,
    lease_ms: Option<u64>,
    kind: Kind,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Plain,
    AckOnReceive,
    /// Under an attempt id.
    Attempt(u8),
}

/// What is wrong with a receipt.
#[derive(Debug, Clone, Copy, PartialEq)]
enum ReceiptChange {
    None,
    Garbage,
    OtherQueue,
    OtherFence,
}

#[derive(Debug, Clone)]
enum Step {
    Wave(Vec<Operation>),
    Advance(u64),
    Restart,
}

fn receipt_change() -> impl Strategy<Value = ReceiptChange> {
    prop_oneof![20 => Just(ReceiptChange::None), 1 => Just(ReceiptChange::Garbage), 1 => Just(ReceiptChange::OtherQueue), 1 => Just(ReceiptChange::OtherFence)]
}

fn settlement() -> impl Strategy<Value = Settlement> {
    let error = proptest::option::of(Just("boom".to_owned()));
    prop_oneof![
        3 => Just(Settlement::Ack),
        4 => (proptest::option::of(prop_oneof![Just(0), 1u64..5_000]), error)
            .prop_map(|(after_ms, error)| Settlement::Retry { after_ms, error }),
        2 => prop_oneof![Just(0), 1u64..3_000].prop_map(|after_ms| Settlement::Defer { after_ms }),
        1 => Just(Settlement::Reject { reason: "bad".into() }),
        1 => Just(Settlement::Park { reason: "in doubt".into() }),
    ]
}

/// Mostly messages that both kinds of queue accept, so that few sends are wasted.
fn new(queue: usize) -> impl Strategy<Value = NewModelMessage> {
    let dedup = prop_oneof![3 => 0u32..1_000_000, 1 => 0u32..4];
    let odd = prop_oneof![5 => Just(false), 1 => Just(true)];
    let delay_ms = prop_oneof![3 => Just(None), 1 => (0u64..2_000).prop_map(Some)];
    (0u32..1_000_000, 0u8..3, dedup, 0u8..4, delay_ms, odd).prop_map(
        move |(body, group, dedup, priority, delay_ms, odd)| {
            let fifo = queue >= 2;
            NewModelMessage {
                // A few bodies repeat, for deduplication by content.
                body: format!("body {}", if odd { body % 4 } else { body }),
                group: (fifo || group > 0).then_some(group),
                dedup: (fifo != odd).then(|| format!("id {dedup}")),
                priority: if fifo { u8::from(odd && priority == 3) } else { priority },
                delay_ms: delay_ms.filter(|_| !fifo),
            }
        },
    )
}

fn an_op() -> impl Strategy<Value = Operation> {
    let any_queue = || 0usize..QUEUES.len();
    let main = || proptest::sample::select(&MAIN[..]);
    let pick = || prop_oneof![4 => 0usize..4, 1 => 0usize..60];
    let lease_ms = prop_oneof![2 => Just(None), 1 => Just(Some(0)), 3 => (1u64..5_000).prop_map(Some)];
    let to_extend =
        prop_oneof![1 => Just(0u64), 4 => 1u64..10_000, 1 => Just(hapax_core::policy::LEASE_MS_MAX)];
    let cause = proptest::option::of(proptest::sample::select(
        &[FailureCause::Retry, FailureCause::Expired, FailureCause::Rejected][..],
    ));
    let kind = prop_oneof![
        5 => Just(Kind::Plain), 1 => Just(Kind::AckOnReceive), 4 => (0u8..3).prop_map(Kind::Attempt)
    ];
    prop_oneof![
        8 => main().prop_flat_map(|queue| {
            proptest::collection::vec(new(queue), 1..4).prop_map(move |news| Operation::Send { queue, news })
        }),
        8 => (any_queue(), 1usize..5, lease_ms, kind)
            .prop_map(|(queue, max, lease_ms, kind)| Operation::Receive(Receive { queue, max, lease_ms, kind })),
        8 => proptest::collection::vec((pick(), receipt_change(), settlement()), 1..4).prop_map(|settles| Operation::Settle { settles }),
        3 => (pick(), receipt_change(), to_extend, any::<bool>())
            .prop_map(|(pick, receipt_change, lease_ms, own_lease)| Operation::Extend { pick, receipt_change, lease_ms, own_lease }),
        1 => any_queue().prop_map(|queue| Operation::Purge { queue }),
        1 => (main(), 1u32..4, prop_oneof![Just(0u64), Just(700)])
            .prop_map(|(main, max_attempts, base_ms)| Operation::SetQueue { main, max_attempts, base_ms }),
        1 => pick().prop_map(|pick| Operation::Release { pick }),
        1 => (0u8..3).prop_map(|group| Operation::ReleaseGroup { group }),
        1 => pick().prop_map(|pick| Operation::Discard { pick }),
        2 => (any_queue(), any::<bool>(), cause, prop_oneof![Just(1u32), Just(20), Just(500)])
            .prop_map(|(from, to_other, cause, per_second)| Operation::Redrive { from, to_other, cause, per_second }),
        1 => Just(Operation::CancelRedrive),
    ]
}

fn a_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => proptest::collection::vec(an_op(), 1..4).prop_map(Step::Wave),
        4 => proptest::sample::select(&[1u64, 99, 100, 700, 1_000, 2_500, 5_000, 30_000, 61_000, 301_000][..])
            .prop_map(Step::Advance),
        1 => Just(Step::Restart),
    ]
}

fn a_setup() -> impl Strategy<Value = Setup> {
    let window_ms = proptest::sample::select(&[0u64, 5_000, 300_000, 580_000][..]);
    (any::<bool>(), any::<bool>(), any::<bool>(), window_ms, prop_oneof![Just(0u64), Just(500)], 1u32..4)
        .prop_map(|(halt, by_content, by_group, window_ms, base_ms, max_attempts)| Setup {
            halt,
            by_content,
            by_group,
            window_ms,
            base_ms,
            max_attempts,
        })
}

impl Setup {
    fn config(&self, queue: usize) -> QueueConfig {
        let fifo = queue >= 2;
        let base = if fifo { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
        if !MAIN.contains(&queue) {
            return QueueConfig { retention_ms: 2 * RETENTION_MS, ..base };
        }
        QueueConfig {
            retention_ms: RETENTION_MS,
            lease_ms: 2_000,
            retry: RetryPolicy {
                base_ms: self.base_ms,
                cap_ms: 3_000,
                jitter: Jitter::None,
                max_attempts: self.max_attempts,
            },
            dead_letter: Some(DeadLetterPolicy { queue: rig::name(QUEUES[queue + 1]) }),
            on_dead: if self.halt && fifo { OnDead::HaltGroup } else { OnDead::Continue },
            dedup: DedupPolicy {
                window_ms: self.window_ms,
                content_based: self.by_content,
                scope: if self.by_group { DedupScope::Group } else { DedupScope::Queue },
            },
            ..base
        }
    }
}

/// The answers of one wave, compared when it has ended.
enum ExpectedReply {
    Sent(usize, Vec<NewModelMessage>, ReplyReceiver<rig::Sends>),
    Received(Receive, ReplyReceiver<Vec<RawDelivery>>),
    Settled(usize, Vec<(Option<DeliveryRef>, Settlement)>, ReplyReceiver<rig::Settles>),
    Extended(usize, Option<DeliveryRef>, u64, bool, ReplyReceiver<rig::Extends>),
    Purged(usize, ReplyReceiver<Result<u64, AdminError>>),
    Set(usize, QueueConfig, ReplyReceiver<Result<hapax_core::Revision, AdminError>>),
    Released(DeliveryRef, ReplyReceiver<u64>),
    ReleasedGroup(u8, ReplyReceiver<Result<(), AdminError>>),
    Discarded(DeliveryRef, ReplyReceiver<u64>),
    Redriven(usize, Option<usize>, Option<FailureCause>, u32, ReplyReceiver<Result<u64, AdminError>>),
    Cancelled(u64, ReplyReceiver<bool>),
}

struct Run<S, R> {
    writer: Option<Writer<S>>,
    reopen: R,
    clock: Arc<ManualClock>,
    names: Vec<QueueName>,
    model: Model,
    /// Every delivery made, the latest last.
    made: Vec<DeliveryRef>,
    fence: u64,
    seq: u64,
}

fn got<T>(answer: &mut ReplyReceiver<T>) -> T {
    answer.try_recv().expect("an answer").expect("no fault")
}

impl<S: Storage, R: Fn(S) -> (S, Ids)> Run<S, R> {
    fn start(setup: &Setup, storage: S, ids: Ids, reopen: R) -> Self {
        let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
        let mut writer = rig::open(storage, &clock, ids, 7);
        let names: Vec<_> = QUEUES.iter().map(|queue| rig::name(queue)).collect();
        let mut model = Model::default();
        model.now_ms = rig::START_MS;
        for queue in [1, 3, 0, 2] {
            rig::create(&mut writer, &names[queue], setup.config(queue));
        }
        for (queue, name) in names.iter().enumerate() {
            model.create(name.clone(), setup.config(queue));
        }
        Self { writer: Some(writer), reopen, clock, names, model, made: Vec::new(), fence: 0, seq: 0 }
    }

    fn writer(&mut self) -> &mut Writer<S> {
        self.writer.as_mut().expect("open")
    }

    /// Processes everything that is due, also in the model.
    fn drain(&mut self) {
        let now_ms = self.model.now_ms;
        let writer = self.writer();
        let order = writer.engine.due_queues(now_ms);
        writer.run(&mut Vec::new());
        while writer.engine.next_timer().is_some_and(|at_ms| at_ms <= now_ms) {
            writer.run(&mut Vec::new());
        }
        self.model.tick(&order);
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Advance(ms) => {
                self.clock.advance_ms(*ms);
                self.model.now_ms += ms;
            }
            Step::Restart => {
                let writer = self.writer.take().expect("open");
                let (storage, ids) = (self.reopen)(writer.storage);
                self.writer = Some(rig::open(storage, &self.clock, ids, 8));
                self.model.restart();
            }
            Step::Wave(ops) => {
                self.drain();
                let (mut wave, mut awaited): (Vec<_>, Vec<_>) =
                    ops.iter().filter_map(|op| self.make(op)).unzip();
                self.writer().run(&mut wave);
                for awaited in &mut awaited {
                    self.compare(awaited);
                }
            }
        }
        self.writer().engine.check();
        self.drain();
        self.writer().engine.check();
        self.compare_stats();
    }

    fn picked(&self, pick: usize) -> Option<(usize, DeliveryRef)> {
        let delivery = *self.made.iter().rev().nth(pick.checked_rem(self.made.len())?)?;
        let name = &self.writer.as_ref()?.engine.queue(delivery.queue).name;
        Some((self.names.iter().position(|other| other == name)?, delivery))
    }

    fn changed_receipt(
        queue: usize,
        delivery: DeliveryRef,
        receipt_change: ReceiptChange,
    ) -> (usize, Option<DeliveryRef>) {
        match receipt_change {
            ReceiptChange::None => (queue, Some(delivery)),
            ReceiptChange::Garbage => (queue, None),
            ReceiptChange::OtherQueue => ((queue + 1) % QUEUES.len(), Some(delivery)),
            ReceiptChange::OtherFence => {
                (queue, Some(DeliveryRef { fence: delivery.fence + 1_000_000_000, ..delivery }))
            }
        }
    }

    fn make(&self, op: &Operation) -> Option<(Op, ExpectedReply)> {
        let name = |queue: usize| self.names[queue].clone();
        Some(match op.clone() {
            Operation::Send { queue, news } => {
                let outgoing = |new: &NewModelMessage| {
                    let mut outgoing =
                        rig::outgoing(&new.body, new.dedup.as_deref(), new.group.map(rig::group));
                    (outgoing.priority, outgoing.delay_ms) = (Priority(new.priority), new.delay_ms);
                    outgoing
                };
                let (op, answer) = rig::send(&name(queue), news.iter().map(outgoing).collect());
                (op, ExpectedReply::Sent(queue, news, answer))
            }
            Operation::Receive(receive) => {
                let mut request = rig::request(receive.max, receive.lease_ms);
                match receive.kind {
                    Kind::Plain => {}
                    Kind::AckOnReceive => request.ack_on_receive = true,
                    Kind::Attempt(id) => request.attempt_id = Some(format!("attempt {id}")),
                }
                let now = Now { us: self.model.now_ms * 1000 };
                let (op, answer) = rig::receive(0, &name(receive.queue), request, now, 0);
                (op, ExpectedReply::Received(receive, answer))
            }
            Operation::Settle { settles } => {
                let (queue, _) = self.picked(settles[0].0)?;
                let settle = |(pick, receipt_change, settlement): &(usize, ReceiptChange, Settlement)| {
                    let (own, delivery) = self.picked(*pick).expect("something was picked before");
                    // Receipts of other queues are malformed here, which is tested too.
                    (Self::changed_receipt(own, delivery, *receipt_change).1, settlement.clone())
                };
                let settles: Vec<_> = settles.iter().map(settle).collect();
                let (op, answer) = rig::settle(&name(queue), settles.clone());
                (op, ExpectedReply::Settled(queue, settles, answer))
            }
            Operation::Extend { pick, receipt_change, lease_ms, own_lease } => {
                let (queue, delivery) = self.picked(pick)?;
                let (queue, delivery) = Self::changed_receipt(queue, delivery, receipt_change);
                let (op, answer) = rig::extend(&name(queue), vec![(delivery, lease_ms, own_lease)]);
                (op, ExpectedReply::Extended(queue, delivery, lease_ms, own_lease, answer))
            }
            Operation::Purge { queue } => {
                let name = name(queue);
                let (op, answer) = rig::job(move |engine, now| engine.purge(now, &name, 0));
                (op, ExpectedReply::Purged(queue, answer))
            }
            Operation::SetQueue { main, max_attempts, base_ms } => {
                let mut config = self.model.queues[main].config.clone();
                config.retry.max_attempts = max_attempts;
                config.retry.base_ms = base_ms;
                let (name, set) = (name(main), config.clone());
                let (op, answer) = rig::job(move |engine, now| engine.set_queue(now, &name, set, None));
                (op, ExpectedReply::Set(main, config, answer))
            }
            Operation::Release { pick } => {
                let (_, delivery) = self.picked(pick)?;
                let (op, answer) =
                    rig::job(move |engine, now| engine.release(now, delivery.queue, &[delivery.seq]));
                (op, ExpectedReply::Released(delivery, answer))
            }
            Operation::ReleaseGroup { group } => {
                let id = self.writer.as_ref()?.engine.find(&name(2)).ok()?;
                let (op, answer) =
                    rig::job(move |engine, now| engine.release_group(now, id, &rig::group(group)));
                (op, ExpectedReply::ReleasedGroup(group, answer))
            }
            Operation::Discard { pick } => {
                let (_, delivery) = self.picked(pick)?;
                let (op, answer) = rig::job(move |engine, now| {
                    engine
                        .discard(now, delivery.queue, &[delivery.seq], "model", |seq| {
                            hapax_core::MessageId(seq.into())
                        })
                        .0
                });
                (op, ExpectedReply::Discarded(delivery, answer))
            }
            Operation::Redrive { from, to_other, cause, per_second } => {
                let to = to_other.then_some(from ^ 1);
                let filter = RedriveFilter { cause, ..RedriveFilter::default() };
                let request = RedriveRequest {
                    from: name(from),
                    to: to.map(name),
                    filter,
                    per_second: Some(per_second),
                    by: "test".into(),
                };
                let (op, answer) =
                    rig::job(move |engine, now| engine.start_redrive(now, request).map(|task| task.id));
                (op, ExpectedReply::Redriven(from, to, cause, per_second, answer))
            }
            Operation::CancelRedrive => {
                let id = self.model.redrives.last()?.id;
                let (op, answer) = rig::job(move |engine, now| engine.cancel_redrive(now, id).is_ok());
                (op, ExpectedReply::Cancelled(id, answer))
            }
        })
    }

    fn index(&self, delivery: DeliveryRef) -> usize {
        let name = &self.writer.as_ref().expect("open").engine.queue(delivery.queue).name;
        self.names.iter().position(|other| other == name).expect("one of ours")
    }

    fn compare(&mut self, awaited: &mut ExpectedReply) {
        match awaited {
            ExpectedReply::Sent(queue, news, answer) => {
                for (new, sent) in news.iter().zip(got(answer)) {
                    let seq = sent.as_ref().map_or(0, |sent| sent.id.0 as u64 & ((1 << 62) - 1));
                    let expected = self.model.send(*queue, new, seq);
                    match (expected, sent) {
                        (Err(()), Err(_)) => {}
                        (Ok(None), Ok(sent)) => {
                            assert!(!sent.duplicate && seq > self.seq, "{sent:?} is not new");
                            self.seq = seq;
                        }
                        (Ok(Some(first)), Ok(sent)) => {
                            assert!(sent.duplicate && first == seq, "{sent:?}, not {first}");
                        }
                        (expected, sent) => panic!("{sent:?}, not {expected:?}"),
                    }
                }
            }
            ExpectedReply::Received(receive, answer) => self.compare_deliveries(receive, &got(answer)),
            ExpectedReply::Settled(queue, settles, answer) => {
                for ((delivery, settlement), settled) in settles.iter().zip(got(answer)) {
                    let expected = match delivery.filter(|delivery| self.index(*delivery) == *queue) {
                        None => Err(SettleError::Malformed),
                        Some(delivery) => self.model.settle(*queue, delivery.seq, delivery.fence, settlement),
                    };
                    assert_eq!(settled, expected, "{settlement:?}");
                }
            }
            ExpectedReply::Extended(queue, delivery, lease_ms, own_lease, answer) => {
                let expected = match delivery.filter(|delivery| self.index(*delivery) == *queue) {
                    None => Err(SettleError::Malformed),
                    Some(delivery) => {
                        self.model.extend(*queue, delivery.seq, delivery.fence, *lease_ms, *own_lease)
                    }
                };
                assert_eq!(got(answer)[0].clone().map(|left| left.lease_ms), expected);
            }
            ExpectedReply::Purged(queue, answer) => assert_eq!(got(answer), Ok(self.model.purge(*queue))),
            ExpectedReply::Set(queue, config, answer) => {
                got(answer).expect("a valid configuration");
                self.model.queues[*queue].config = config.clone();
            }
            ExpectedReply::Released(delivery, answer) => {
                let queue = self.index(*delivery);
                assert_eq!(got(answer), self.model.release(queue, delivery.seq));
            }
            ExpectedReply::ReleasedGroup(group, answer) => {
                assert_eq!(got(answer).is_ok(), self.model.release_group(2, *group));
            }
            ExpectedReply::Discarded(delivery, answer) => {
                let queue = self.index(*delivery);
                assert_eq!(got(answer), self.model.discard(queue, delivery.seq));
            }
            ExpectedReply::Redriven(from, to, cause, per_second, answer) => {
                let started = got(answer);
                let id = started.as_ref().copied().unwrap_or(0);
                let expected = self.model.start_redrive(id, *from, *to, *cause, u64::from(*per_second));
                assert_eq!(started.is_ok(), expected, "{started:?}");
            }
            ExpectedReply::Cancelled(id, answer) => assert_eq!(got(answer), self.model.cancel_redrive(*id)),
        }
    }

    fn compare_deliveries(&mut self, receive: &Receive, raw: &[RawDelivery]) {
        let now_ms = self.model.now_ms;
        let Receive { queue, max, lease_ms, kind } = *receive;
        let again = match kind {
            Kind::Attempt(id) => self.model.receive_again(queue, id, max, lease_ms),
            _ => None,
        };
        let repeated = again.is_some();
        let expected =
            again.unwrap_or_else(|| self.model.receive(queue, max, lease_ms, kind == Kind::AckOnReceive));
        let bodies: Vec<_> =
            raw.iter().map(|raw| String::from_utf8_lossy(&raw.content.body).into_owned()).collect();
        let expected_bodies: Vec<_> = expected.iter().map(|message| message.body.clone()).collect();
        assert_eq!(bodies, expected_bodies, "from {}", QUEUES[queue]);
        for (message, raw) in expected.iter().zip(raw) {
            let (delivery, entry) = (raw.leased.delivery, raw.leased.entry);
            if repeated {
                assert_eq!(
                    (Some(delivery.seq), delivery.fence),
                    (message.seq, message.fence),
                    "the same delivery"
                );
            } else {
                assert!(delivery.fence > self.fence, "fences grow");
                self.fence = delivery.fence;
                self.made.push(delivery);
            }
            assert_eq!((entry.attempts, entry.deliveries), (message.attempts, message.deliveries));
            assert_eq!((entry.sent_ms, entry.first_ms), (message.sent_ms, message.first_ms));
            assert_eq!(raw.group, message.group.map(rig::group));
            assert_eq!(entry.priority, message.priority);
            assert_eq!(raw.lease_ms, message.due_ms - now_ms);
            assert_eq!(raw.dead.is_some(), message.death.is_some());
            if let (Some(dead), Some(death)) = (&raw.dead, &message.death) {
                assert_eq!((&dead.source, dead.cause), (&death.source, death.cause));
                assert_eq!((dead.attempts, dead.first_received_ms), (death.attempts, death.first_ms));
                assert_eq!(dead.died_ms, death.died_ms);
                assert_eq!(dead.error, death.error);
            }
            self.model.delivered(queue, message, delivery.seq, delivery.fence);
        }
        if let (Kind::Attempt(id), false, false) = (kind, repeated, raw.is_empty()) {
            let deliveries = raw.iter().map(|raw| (raw.leased.delivery.seq, raw.leased.delivery.fence));
            self.model.remember(queue, id, deliveries.collect());
        }
    }

    fn compare_stats(&mut self) {
        for (queue, name) in self.names.clone().into_iter().enumerate() {
            let engine = &self.writer.as_ref().expect("open").engine;
            let stats = engine.queue(engine.find(&name).expect("there")).stats();
            let model = &self.model.queues[queue];
            let counts = [stats.ready, stats.delayed, stats.in_flight, stats.parked];
            let expected = [ModelPlace::Ready, ModelPlace::Delayed, ModelPlace::InFlight, ModelPlace::Parked]
                .map(|at| model.count(at));
            assert_eq!(counts, expected, "{name}: ready, delayed, in flight, parked");
            assert_eq!(
                stats.bytes,
                model.messages.iter().map(|message| message.body.len() as u64).sum::<u64>()
            );
            assert_eq!(stats.totals, model.totals, "{name}");
            let oldest = model.oldest_sent_ms();
            assert!(stats.oldest_sent_ms.map_or(oldest.is_empty(), |ms| oldest.contains(&ms)), "{name}");
            let halted: Vec<_> = engine.queue(engine.find(&name).expect("there")).table.groups.halted();
            let halted = halted
                .into_iter()
                .flat_map(|(group, seqs)| seqs.into_iter().map(move |seq| (seq, group.clone())));
            let halted: BTreeSet<_> = halted.collect();
            let expected: BTreeSet<_> =
                model.undecided.iter().map(|(seq, group)| (*seq, rig::group(*group))).collect();
            assert_eq!(halted, expected);
            assert_eq!(stats.halted, model.waiting_in_halted(), "{name}");
            let tasks = engine.redrives(&name).expect("there");
            let tasks: Vec<_> = tasks.iter().map(|t| (t.id, t.state, t.total, t.moved, t.left)).collect();
            let expected = self.model.redrives.iter().rev().filter(|task| task.from == queue);
            let expected: Vec<_> = expected.map(|t| (t.id, t.state, t.total, t.moved, t.left)).collect();
            assert_eq!(tasks, expected, "redrives of {name}");
        }
    }
}

fn run<S: Storage>(setup: &Setup, steps: &[Step], storage: S, ids: Ids, reopen: impl Fn(S) -> (S, Ids)) {
    let mut run = Run::start(setup, storage, ids, reopen);
    for step in steps {
        run.step(step);
    }
    run.step(&Step::Restart);
}

fn cases(few: u32, many: u32) -> ProptestConfig {
    let long = std::env::var("HAPAX_LONG").is_ok_and(|long| long == "1");
    ProptestConfig {
        cases: if long { many } else { few },
        max_shrink_iters: 10_000,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(400, 20_000))]
    #[test]
    fn the_engine_does_what_the_model_does(setup in a_setup(), steps in proptest::collection::vec(a_step(), 1..80)) {
        let again = |storage: SimStorage| (storage.after_process_death(), Ids::fixed(9));
        run(&setup, &steps, SimStorage::new(), Ids::fixed(9), again);
    }
}

fn sqlite(file: &std::path::Path) -> (Sqlite, Ids) {
    let place = DbLocation { file: file.to_owned(), vfs: None };
    let storage = Sqlite::open(place, schema::STEPS, Checkpoint::Background).expect("a database");
    let ids = storage.ids();
    (storage, ids)
}

proptest! {
    #![proptest_config(cases(15, 500))]
    #[test]
    fn with_sqlite_below_it_does_too(setup in a_setup(), steps in proptest::collection::vec(a_step(), 1..40)) {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("hapax.db");
        let (storage, ids) = sqlite(&file);
        run(&setup, &steps, storage, ids, |storage| {
            storage.close();
            sqlite(&file)
        });
    }
}

proptest! {
    #![proptest_config(cases(100, 1_000))]
    #[test]
    fn a_jittered_retry_stays_within_its_policy(seed in any::<u64>(), base_ms in 1u64..10_000, cap_ms in 1u64..20_000) {
        let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
        let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), seed);
        let queue = rig::name("q");
        let retry = RetryPolicy::exponential(base_ms, cap_ms);
        rig::create(&mut writer, &queue, QueueConfig { retry, ..QueueConfig::sqs() });
        writer.run(&mut vec![rig::send(&queue, vec![rig::outgoing("x", None, None)]).0]);
        for attempt in 1..6 {
            let (op, mut answer) = rig::receive(0, &queue, rig::request(1, None), Now { us: 0 }, 0);
            writer.run(&mut vec![op]);
            let delivery = got(&mut answer)[0].leased.delivery;
            let (op, mut answer) = rig::settle(&queue, vec![(Some(delivery), Settlement::Retry { after_ms: None, error: None })]);
            writer.run(&mut vec![op]);
            let Ok(hapax_core::Settled::Returned { after_ms }) = got(&mut answer)[0] else { panic!("not returned") };
            prop_assert!(after_ms <= (base_ms << (attempt - 1)).min(cap_ms));
            clock.advance_ms(after_ms);
        }
    }
}
