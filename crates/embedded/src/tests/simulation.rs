//! Clients, faults and time from one seed. A failure reports the seed and how to replay it.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use hapax_core::policy::RetryPolicy;
use hapax_core::{
    DeadLetterPolicy, ManualClock, OnDead, QueueConfig, QueueName, RedriveFilter, RedriveRequest, Settlement,
    StoreError,
};

use super::history::{self, Accepted, History};
use super::rig::{self, ReplyReceiver};
use super::sim_storage::{Fault, SimStorage};
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::time::StoreTime;
use crate::writer::{Op, RawDelivery, Writer};

const QUEUES: [&str; 5] = ["jobs", "jobs-dead", "ord.fifo", "ord-dead.fifo", "once"];
/// The queue whose messages are acked on receive.
const ONCE: usize = 4;
const STEPS: usize = 150;
/// Sends are repeated for this long: inside the deduplication window of 5 min.
const REPEAT_MS: u64 = 240_000;

/// A pending answer of a client.
enum PendingOp {
    Send(Vec<usize>, ReplyReceiver<rig::Sends>),
    Receive(Receive),
    Settle(usize, Vec<(Option<DeliveryRef>, Settlement)>, ReplyReceiver<rig::Settles>),
    Extend(usize, DeliveryRef, u64, ReplyReceiver<rig::Extends>),
    Purge(usize, ReplyReceiver<Result<u64, hapax_core::AdminError>>),
    Admin(ReplyReceiver<bool>),
}

struct Receive {
    queue: usize,
    attempt_id: Option<String>,
    waits: bool,
    answer: ReplyReceiver<Vec<RawDelivery>>,
}

struct Sim {
    rng: fastrand::Rng,
    clock: Arc<ManualClock>,
    writer: Option<Writer<SimStorage>>,
    /// Runs beside the store's own clock, to know the store's time.
    time: StoreTime,
    names: Vec<QueueName>,
    history: History,
    /// Receives that wait for a message.
    waiting: Vec<Receive>,
    /// Deliveries that clients hold or once held, the latest last.
    receipts: Vec<(usize, DeliveryRef)>,
    /// Receives that can be repeated, and their deliveries.
    attempts: BTreeMap<String, Vec<DeliveryRef>>,
    next_id: u64,
    hash: DefaultHasher,
    /// A single seed is replayed: print the events.
    tell: bool,
}

fn is_fifo(queue: usize) -> bool {
    rig::name(QUEUES[queue]).is_fifo()
}

fn config(queue: usize, halt: bool) -> QueueConfig {
    let base = if is_fifo(queue) { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
    let dead = || Some(DeadLetterPolicy { queue: rig::name(QUEUES[queue + 1]) });
    match queue {
        0 => QueueConfig {
            retry: RetryPolicy::exponential(200, 3_000).attempts(3),
            dead_letter: dead(),
            ..base
        },
        2 => QueueConfig {
            retry: base.retry.attempts(3),
            on_dead: if halt { OnDead::HaltGroup } else { OnDead::Continue },
            dead_letter: dead(),
            ..base
        },
        _ => base,
    }
}

impl Sim {
    fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
        let mut rng = fastrand::Rng::with_seed(seed);
        let names: Vec<_> = QUEUES.iter().map(|queue| rig::name(queue)).collect();
        let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), rng.u64(..));
        let halt = rng.bool();
        for queue in [1, 3, 0, 2, 4] {
            rig::create(&mut writer, &names[queue], config(queue, halt));
        }
        Self {
            rng,
            time: StoreTime::start(clock.clone(), 0),
            clock,
            writer: Some(writer),
            names,
            history: History::default(),
            waiting: Vec::new(),
            receipts: Vec::new(),
            attempts: BTreeMap::new(),
            next_id: 0,
            hash: DefaultHasher::new(),
            tell: std::env::var("HAPAX_SEED").is_ok(),
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.u32(..100) < percent
    }

    fn note(&mut self, what: impl std::fmt::Debug) {
        let what = format!("{what:?}");
        if self.tell {
            eprintln!("{} {what}", self.now_ms());
        }
        what.hash(&mut self.hash);
    }

    fn writer(&mut self) -> &mut Writer<SimStorage> {
        self.writer.as_mut().expect("open")
    }

    fn now_ms(&self) -> u64 {
        self.time.now().ms()
    }

    fn run(mut self) -> u64 {
        for _ in 0..STEPS {
            match self.rng.u32(..100) {
                0..75 => self.wave(),
                75..95 => self.pass_time(),
                _ => self.restart(),
            }
        }
        self.restart();
        self.hash.finish()
    }

    fn pass_time(&mut self) {
        let ms = match self.rng.u32(..10) {
            0..5 => self.rng.u64(0..300),
            5..9 => self.rng.u64(0..20_000),
            _ => self.rng.u64(0..250_000),
        };
        self.clock.advance_us(ms * 1000 + self.rng.u64(..1000));
        if self.chance(20) {
            let wall_ms = hapax_core::Clock::wall_ms(&*self.clock);
            let jump_ms = self.rng.u64(..60_000);
            self.clock.set_wall_ms(if self.rng.bool() { wall_ms - jump_ms } else { wall_ms + jump_ms });
        }
    }

    /// One wave of several clients, with or without a fault.
    fn wave(&mut self) {
        let fault = self.chance(12).then(|| Fault::ALL[self.rng.usize(..Fault::ALL.len())]);
        let (fail_reads, no_room) = (self.chance(1), self.chance(5));
        let (mut ops, mut asked) = (Vec::new(), Vec::new());
        for _ in 0..self.rng.usize(0..6) {
            if let Some((op, ask)) = self.ask() {
                ops.push(op);
                asked.push(ask);
            }
        }
        if self.chance(10) && !self.waiting.is_empty() {
            // A client drops its receive.
            let at = self.rng.usize(..self.waiting.len());
            self.waiting.swap_remove(at);
        }
        let now = self.time.now();
        let writer = self.writer.as_mut().expect("open");
        let before = (fault == Some(Fault::Full)).then(|| (writer.engine.snapshot(now), totals(writer)));
        let storage = &mut writer.storage;
        (storage.fault, storage.fail_reads, storage.free_bytes) = (fault, fail_reads, no_room.then_some(10));
        writer.run(&mut ops);
        let failed = writer.storage.fault.take() != fault;
        writer.storage.fail_reads = false;
        self.note((fault, failed, asked.len()));
        if let (Some(before), true) = (before, failed) {
            let writer = self.writer();
            assert_eq!(
                (writer.engine.snapshot(now), totals(writer)),
                before,
                "a rollback left something behind"
            );
        }
        self.collect_replies(asked);
        if self.writer().stopped.is_some() {
            self.refused();
            return self.restart();
        }
        self.check();
    }

    /// A stopped store rejects every operation.
    fn refused(&mut self) {
        if self.writer().storage.crashed {
            return;
        }
        let (op, mut answer) = rig::send(&self.names[0], vec![rig::outgoing("m0", None, None)]);
        self.writer().run(&mut vec![op]);
        let refused = matches!(answer.try_recv(), Ok(Err(StoreError::Unavailable(_))));
        assert!(refused, "a stopped store took a message");
    }

    /// The content of the queues: message and queue.
    fn there(&self) -> Vec<(usize, u32)> {
        let writer = self.writer.as_ref().expect("open");
        let bodies = &writer.storage.committed.bodies;
        let of = |seq: &u64| history::number(&bodies.get(seq).expect("a message has a body").content.body);
        writer.engine.messages().iter().map(|(queue, entry, _)| (of(&entry.seq), *queue)).collect()
    }

    fn check(&mut self) {
        let writer = self.writer.as_ref().expect("open");
        writer.engine.check();
        writer.storage.committed.check();
        self.history.census(&self.there());
    }

    /// The process dies or the power is cut; the store is reopened.
    fn restart(&mut self) {
        self.waiting.clear();
        self.attempts.clear();
        let writer = self.writer.take().expect("open");
        let before = writer.stopped.is_none().then_some(writer.engine);
        let before_now = self.time.now();
        let power_loss = self.rng.bool();
        let mut storage = writer.storage;
        let lost = if power_loss { self.rng.u64(0..=storage.unsynced()) } else { 0 };
        if power_loss {
            storage = storage.after_power_loss(lost);
            self.history.power_loss(storage.commits, lost > 0);
        } else {
            storage = storage.after_process_death();
        }
        self.note(("restart", power_loss, lost));
        self.time = StoreTime::start(self.clock.clone(), storage.committed.header.clock_ms);
        let seed = self.rng.u64(..);
        let ids = Ids::fixed(1);
        self.writer = Some(rig::open(storage, &self.clock, ids, seed));
        if let (Some(before), 0) = (before, lost) {
            let now = before_now.max(self.time.now());
            let after = self.writer().engine.snapshot(now);
            assert_eq!(after, before.snapshot(now), "memory and disk differ");
        }
        self.check();
    }

    fn ask(&mut self) -> Option<(Op, PendingOp)> {
        Some(match self.rng.u32(..100) {
            0..22 => self.ask_send(),
            22..29 => self.ask_again()?,
            29..62 => self.ask_receive(),
            62..88 => self.ask_settle()?,
            88..95 => {
                let (queue, delivery) = self.pick()?;
                let lease_ms = if self.chance(15) { 0 } else { self.rng.u64(1..20_000) };
                let (op, answer) =
                    rig::extend(&self.names[queue], vec![(Some(delivery), lease_ms, self.rng.bool())]);
                (op, PendingOp::Extend(queue, delivery, lease_ms, answer))
            }
            95..99 => {
                let from = if self.rng.bool() { 1 } else { 3 };
                let request = RedriveRequest {
                    from: self.names[from].clone(),
                    to: self.rng.bool().then(|| self.names[from - 1].clone()),
                    filter: RedriveFilter::default(),
                    per_second: Some(self.rng.u32(1..100)),
                    by: "simulation".into(),
                };
                let (op, answer) = rig::job(move |engine, now| engine.start_redrive(now, request).is_ok());
                (op, PendingOp::Admin(answer))
            }
            _ => {
                let queue = self.rng.usize(..QUEUES.len());
                let name = self.names[queue].clone();
                let (op, answer) = rig::job(move |engine, now| engine.purge(now, &name, 0));
                // A purge also forgets the deduplication ids: earlier sends are not repeated after it.
                for message in self.history.messages.iter_mut().filter(|message| message.queue == queue) {
                    message.repeatable = false;
                }
                (op, PendingOp::Purge(queue, answer))
            }
        })
    }

    fn outgoing(&self, message: usize) -> crate::engine::PreparedMessage {
        let known = &self.history.messages[message];
        rig::outgoing(&history::body(message), known.dedup.as_deref(), known.group.map(rig::group))
    }

    fn ask_send(&mut self) -> (Op, PendingOp) {
        let queue = [0, 0, 2, 2, ONCE][self.rng.usize(..5)];
        let (mut batch, mut numbers) = (Vec::new(), Vec::new());
        for _ in 0..self.rng.usize(1..4) {
            let group = (queue == 2 || self.chance(30)).then(|| self.rng.u8(..3));
            let dedup = queue == 2 || self.rng.bool();
            let number = self.history.new_message(queue, group, dedup, self.now_ms());
            let mut outgoing = self.outgoing(number);
            if queue != 2 {
                outgoing.delay_ms = self.chance(20).then(|| self.rng.u64(..5_000));
                outgoing.priority = hapax_core::Priority(self.rng.u8(..3));
            }
            batch.push(outgoing);
            numbers.push(number);
        }
        let (op, answer) = rig::send(&self.names[queue], batch);
        (op, PendingOp::Send(numbers, answer))
    }

    /// Repeats a send whose outcome is unknown, or whose sender is not sure.
    fn ask_again(&mut self) -> Option<(Op, PendingOp)> {
        let now_ms = self.now_ms();
        let may = |message: &history::Message| {
            message.repeatable && message.outcome != Accepted::No && now_ms < message.first_try_ms + REPEAT_MS
        };
        let numbers: Vec<_> =
            (0..self.history.messages.len()).filter(|at| may(&self.history.messages[*at])).collect();
        let unknown = |at: &usize| self.history.messages[*at].outcome == Accepted::Maybe;
        let number = numbers.iter().copied().rev().find(unknown).or_else(|| self.rng.choice(numbers))?;
        let outgoing = self.outgoing(number);
        let (op, answer) = rig::send(&self.names[self.history.messages[number].queue], vec![outgoing]);
        Some((op, PendingOp::Send(vec![number], answer)))
    }

    fn ask_receive(&mut self) -> (Op, PendingOp) {
        let queue = [0, 0, 0, 1, 2, 2, 2, 3, ONCE][self.rng.usize(..9)];
        let lease_ms = self.chance(70).then(|| self.rng.u64(..15_000));
        let mut request = rig::request(self.rng.usize(1..5), lease_ms);
        request.ack_on_receive = queue == ONCE;
        if queue == 2 && self.chance(30) {
            let again = self.attempts.keys().next_back().filter(|_| self.rng.bool());
            let fresh = || format!("attempt {:05}", self.next_id);
            request.attempt_id = Some(again.cloned().unwrap_or_else(fresh));
        }
        let attempt_id = request.attempt_id.clone();
        let waits = attempt_id.is_none() && self.chance(30);
        let wait_ms = if waits { 20_000 } else { 0 };
        self.next_id += 1;
        let (op, answer) = rig::receive(self.next_id, &self.names[queue], request, self.time.now(), wait_ms);
        (op, PendingOp::Receive(Receive { queue, attempt_id, waits, answer }))
    }

    /// Picks a delivery: mostly one of the latest, sometimes a very old one.
    fn pick(&mut self) -> Option<(usize, DeliveryRef)> {
        let count = self.receipts.len();
        let back = if self.chance(80) { self.rng.usize(..8) } else { self.rng.usize(..count.max(1)) };
        self.receipts.get(count.checked_sub(back + 1)?).copied()
    }

    fn ask_settle(&mut self) -> Option<(Op, PendingOp)> {
        let (queue, delivery) = self.pick()?;
        let settlement = match self.rng.u32(..10) {
            0..5 => Settlement::Ack,
            5..8 => Settlement::Retry {
                after_ms: self.rng.bool().then(|| self.rng.u64(..2_000)),
                error: Some("boom".into()),
            },
            8 => Settlement::Defer { after_ms: self.rng.u64(..2_000) },
            _ => Settlement::Reject { reason: "bad".into() },
        };
        let mut batch = vec![(Some(delivery), settlement)];
        if self.chance(10) {
            batch.push((None, Settlement::Ack));
            batch.push((Some(DeliveryRef { seq: delivery.seq + 100_000, ..delivery }), Settlement::Ack));
        }
        let (op, answer) = rig::settle(&self.names[queue], batch.clone());
        Some((op, PendingOp::Settle(queue, batch, answer)))
    }

    /// Clients read their answers, and the consequences are recorded.
    fn collect_replies(&mut self, asked: Vec<PendingOp>) {
        let crashed = self.writer().storage.crashed;
        let now_ms = self.now_ms();
        let mut fences = Vec::new();
        self.history.expire(now_ms);
        let mut receives = std::mem::take(&mut self.waiting);
        for asked in asked {
            match asked {
                PendingOp::Send(numbers, mut answer) => match received_reply(crashed, &mut answer) {
                    ReplyState::Nothing => {}
                    ReplyState::Unknown => {
                        self.note(("unknown", &numbers));
                        for number in numbers {
                            self.history.sent(number, None);
                        }
                    }
                    ReplyState::Done(sent) => {
                        self.note((&numbers, &sent));
                        for (number, sent) in numbers.iter().zip(sent) {
                            self.history.sent(*number, Some(&sent.expect("a valid message")));
                        }
                    }
                },
                // Waiting receives are served last, or with messages for which no client of this wave has a receipt.
                PendingOp::Receive(receive) if receive.waits => receives.push(receive),
                PendingOp::Receive(receive) => self.hear_receive(receive, crashed, now_ms, &mut fences),
                PendingOp::Settle(queue, batch, mut answer) => {
                    let answer = received_reply(crashed, &mut answer);
                    let fifo = is_fifo(queue);
                    for (at, (delivery, settlement)) in batch.iter().enumerate() {
                        let Some(delivery) = delivery else { continue };
                        match &answer {
                            ReplyState::Nothing => {}
                            ReplyState::Unknown => {
                                self.history.settled(*delivery, settlement, fifo, now_ms, None);
                            }
                            ReplyState::Done(settled) => {
                                self.note((delivery, &settled[at]));
                                self.history.settled(*delivery, settlement, fifo, now_ms, Some(&settled[at]));
                            }
                        }
                    }
                }
                PendingOp::Extend(queue, delivery, lease_ms, mut answer) => {
                    let fifo = is_fifo(queue);
                    let answer = match received_reply(crashed, &mut answer) {
                        ReplyState::Nothing => continue,
                        ReplyState::Unknown => None,
                        ReplyState::Done(mut extended) => Some(extended.remove(0).map(|left| left.lease_ms)),
                    };
                    self.note((delivery, &answer));
                    self.history.extended(delivery, lease_ms, fifo, now_ms, answer.as_ref());
                }
                PendingOp::Purge(queue, mut answer) => {
                    if !matches!(received_reply(crashed, &mut answer), ReplyState::Nothing) {
                        self.note(("purged", queue));
                        self.may_be_gone(queue);
                    }
                }
                PendingOp::Admin(mut answer) => self.note(answer.try_recv().is_ok()),
            }
        }
        for receive in receives {
            self.hear_receive(receive, crashed, now_ms, &mut fences);
        }
        self.history.fences(fences);
    }

    fn hear_receive(&mut self, mut receive: Receive, crashed: bool, now_ms: u64, fences: &mut Vec<u64>) {
        let commit = self.writer().storage.commits;
        let raw = match received_reply(crashed, &mut receive.answer) {
            ReplyState::Nothing if receive.answer.is_terminated() => return,
            ReplyState::Nothing => return self.waiting.push(receive),
            ReplyState::Unknown if receive.queue == ONCE => return self.may_be_gone(ONCE),
            ReplyState::Unknown => {
                // If it was a repeated one, its leases may have begun again.
                let again = receive.attempt_id.and_then(|id| self.attempts.get(&id));
                return again.into_iter().flatten().for_each(|delivery| self.history.uncertain(*delivery));
            }
            ReplyState::Done(raw) => raw,
        };
        let delivery: Vec<_> = raw.iter().map(|raw| raw.leased.delivery).collect();
        self.note(&delivery);
        let fifo = is_fifo(receive.queue);
        // What is still held of the first answer, or else only new deliveries.
        let first = receive.attempt_id.as_ref().and_then(|id| self.attempts.get(id));
        let again = first.is_some_and(|first| delivery.iter().any(|delivery| first.contains(delivery)));
        assert!(
            !again || delivery.iter().all(|delivery| first.is_some_and(|first| first.contains(delivery)))
        );
        if again {
            self.history.repeated.extend(&delivery);
        } else {
            fences.extend(delivery.iter().map(|delivery| delivery.fence));
        }
        self.history.delivered(&raw, fifo, receive.queue == ONCE, now_ms, commit);
        if receive.queue != ONCE && !again {
            self.receipts.extend(delivery.iter().map(|delivery| (receive.queue, *delivery)));
        }
        if let (Some(id), false) = (receive.attempt_id, raw.is_empty() || again) {
            self.attempts.insert(id, delivery);
        }
    }

    /// Every message of a queue may be gone: purged, or delivered to a client that is gone.
    fn may_be_gone(&mut self, queue: usize) {
        let of_queue = |message: &history::Message| message.queue == queue || message.queue + 1 == queue;
        let numbers: Vec<_> =
            (0..self.history.messages.len()).filter(|at| of_queue(&self.history.messages[*at])).collect();
        self.history.maybe_gone(numbers.into_iter());
    }
}

enum ReplyState<T> {
    /// Not done, or not yet answered.
    Nothing,
    Unknown,
    Done(T),
}

fn received_reply<T>(crashed: bool, answer: &mut ReplyReceiver<T>) -> ReplyState<T> {
    if crashed {
        return ReplyState::Unknown;
    }
    match answer.try_recv() {
        Ok(Ok(done)) => ReplyState::Done(done),
        Ok(Err(StoreError::OutcomeUnknown(_))) => ReplyState::Unknown,
        // The writer drops a reply without an answer only after a failed read: then nothing of its wave was written.
        Ok(Err(_)) | Err(_) => ReplyState::Nothing,
    }
}

fn totals(writer: &Writer<SimStorage>) -> Vec<hapax_core::store::QueueTotals> {
    writer.engine.queues().iter().map(|queue| queue.totals).collect()
}

/// Prints how to replay a failed seed.
struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with: HAPAX_SEED={} cargo test -p hapax-embedded simulation", self.0);
        }
    }
}

fn simulate(seed: u64) -> u64 {
    let _replay = Replay(seed);
    Sim::new(seed).run()
}

#[test]
fn simulation_of_faults_loses_nothing_and_repeats_nothing_acked() {
    // Enough seeds in the ordinary run to catch each deliberately introduced defect many times over.
    let seeds = match (std::env::var("HAPAX_SEED"), std::env::var("HAPAX_LONG")) {
        (Ok(seed), _) => {
            let seed = seed.parse().expect("HAPAX_SEED is a number");
            seed..seed + 1
        }
        (_, Ok(long)) if long == "1" => 0..20_000,
        _ => 0..400,
    };
    for seed in seeds {
        simulate(seed);
    }
}

#[test]
fn simulation_of_the_same_seed_is_the_same_run() {
    for seed in 0..5 {
        assert_eq!(simulate(seed), simulate(seed));
    }
    assert_ne!(simulate(1), simulate(2));
}
