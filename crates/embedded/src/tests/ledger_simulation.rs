//! Claimants, workers, operators, faults and time from one seed, on the ledger and the queue beside it.
//!
//! The checks, through crashes, power cuts and full disks: a key never has two live tokens; a completed effect does not
//! run again before its entry expires; a superseded token writes nothing; an ack and its completion happen both or
//! neither; no entry of a live message is pruned; a rollback leaves nothing; memory and disk agree.

use std::collections::BTreeMap;
use std::sync::Arc;

use hapax_core::ledger::protocol::{ClaimDecision, Stage};
use hapax_core::{
    ClaimEnding, ClaimRequest, EntryId, Json, ManualClock, OnDoubt, QueueConfig, QueueName, RecordedOutcome,
    Resolution, ResolveError, SettleError, Settlement, StoreError, Tier, TokenError,
};
use tokio::sync::oneshot;

use super::rig::{self, ReplyReceiver};
use super::sim_storage::{Fault, SimStorage};
use crate::claims::{ClaimOp, ClaimReply, EndOp, LedgerOp, RenewOp};
use crate::ids::Ids;
use crate::receipt::DeliveryRef;
use crate::record::{Content, State};
use crate::time::StoreTime;
use crate::writer::{Op, RawDelivery, SettleOp, Writer};

const KEYS: usize = 6;
/// Keys from here on belong to messages.
const QUEUED: usize = 3;
const STEPS: usize = 200;
const FAR_FUTURE_MS: u64 = 366 * 24 * 3_600_000;

/// What all participants together know about one key.
#[derive(Default)]
struct ExpectedEntry {
    /// The newest grant that an owner was told of, and until when it holds for sure.
    held: Option<(u64, u64)>,
    newest: u64,
    /// Its holder gave it up or may have, or an operator decided or may have.
    free: bool,
    /// An operation on it has an unknown outcome.
    disturbed: bool,
    /// When it was first known to be completed, its time to live, and its outcome.
    completed: Option<(u64, u64, RecordedOutcome)>,
    /// Outcomes with which it may have been completed.
    possible: Vec<RecordedOutcome>,
}

enum PendingOp {
    Send(usize, ReplyReceiver<rig::Sends>),
    Receive(ReplyReceiver<Vec<RawDelivery>>),
    Claim(usize, String, bool, ReplyReceiver<ClaimReply>),
    Renew(usize, u64, u64, ReplyReceiver<Vec<Result<hapax_core::RemainingLease, TokenError>>>),
    End(usize, u64, ClaimEnding, ReplyReceiver<Vec<Result<(), TokenError>>>),
    Settle(usize, DeliveryRef, Option<(u64, ClaimEnding)>, ReplyReceiver<rig::Settles>),
    Decide(usize, ReplyReceiver<Result<(), ResolveError>>),
}

struct Sim {
    rng: fastrand::Rng,
    clock: Arc<ManualClock>,
    writer: Option<Writer<SimStorage>>,
    time: StoreTime,
    queue: QueueName,
    keys: Vec<ExpectedEntry>,
    waiting: Vec<PendingOp>,
    /// Grants that owners were told of: key, owner, fence.
    tokens: Vec<(usize, String, u64)>,
    deliveries: Vec<(usize, DeliveryRef)>,
    /// Accepted messages and their keys.
    sent: BTreeMap<u64, usize>,
    /// Settles that ended a claim: delivery, key, fence.
    pairs: Vec<(DeliveryRef, usize, u64)>,
    /// How many times completion was requested for each claim, and when first.
    completions: BTreeMap<u64, (u32, u64)>,
    /// Completed entries that a live message needs: fence and message.
    needed: Vec<(u64, u64)>,
    /// Keys for which a claim waits in this wave: the order of the claims is unknown.
    contested: Vec<usize>,
    next: u64,
    tell: bool,
}

fn id(key: usize) -> EntryId {
    let scope = if key < QUEUED { "api".to_owned() } else { "queue/once".to_owned() };
    EntryId::new(scope.parse().unwrap(), format!("k{key}").parse().unwrap())
}

fn received_reply<T>(crashed: bool, answer: &mut ReplyReceiver<T>) -> Option<Result<T, StoreError>> {
    if crashed {
        return Some(Err(StoreError::OutcomeUnknown("crashed".into())));
    }
    answer.try_recv().ok()
}

impl Sim {
    fn new(seed: u64) -> Self {
        let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), rng.u64(..));
        let queue = rig::name("once");
        let config = QueueConfig { tier: Tier::EffectivelyOnce, lease_ms: 5_000, ..QueueConfig::sqs() };
        rig::create(&mut writer, &queue, config);
        Self {
            rng,
            time: StoreTime::start(clock.clone(), 0),
            clock,
            writer: Some(writer),
            queue,
            keys: (0..KEYS).map(|_| ExpectedEntry::default()).collect(),
            waiting: Vec::new(),
            tokens: Vec::new(),
            deliveries: Vec::new(),
            sent: BTreeMap::new(),
            pairs: Vec::new(),
            completions: BTreeMap::new(),
            needed: Vec::new(),
            contested: Vec::new(),
            next: 0,
            tell: std::env::var("HAPAX_SEED").is_ok(),
        }
    }

    fn chance(&mut self, percent: u32) -> bool {
        self.rng.u32(..100) < percent
    }

    fn note(&self, what: impl std::fmt::Debug) {
        if self.tell {
            eprintln!("{} {what:?}", self.now_ms());
        }
    }

    fn now_ms(&self) -> u64 {
        self.time.now().ms()
    }

    fn writer(&mut self) -> &mut Writer<SimStorage> {
        self.writer.as_mut().expect("open")
    }

    fn run(mut self) {
        for _ in 0..STEPS {
            match self.rng.u32(..100) {
                0..75 => self.wave(),
                75..94 => {
                    let ms = if self.chance(90) { self.rng.u64(..4_000) } else { self.rng.u64(..7_200_000) };
                    self.clock.advance_us(ms * 1000 + self.rng.u64(..1000));
                }
                _ => self.restart(),
            }
        }
        self.restart();
    }

    fn wave(&mut self) {
        let fault = self.chance(12).then(|| Fault::ALL[self.rng.usize(..Fault::ALL.len())]);
        let fail_reads = self.chance(1);
        let (mut ops, mut asked) = (Vec::new(), Vec::new());
        for _ in 0..self.rng.usize(0..6) {
            if let Some((op, ask)) = self.ask() {
                ops.push(op);
                asked.push(ask);
            }
        }
        if self.chance(10) && !self.waiting.is_empty() {
            // A caller drops its claim.
            let at = self.rng.usize(..self.waiting.len());
            if let PendingOp::Claim(key, ..) = self.waiting.swap_remove(at) {
                self.keys[key].disturbed = true;
            }
        }
        let now = self.time.now();
        let writer = self.writer.as_mut().expect("open");
        let before =
            (fault == Some(Fault::Full)).then(|| (writer.engine.snapshot(now), writer.engine.ledger_stats()));
        (writer.storage.fault, writer.storage.fail_reads) = (fault, fail_reads);
        writer.run(&mut ops);
        let failed = writer.storage.fault.take() != fault;
        writer.storage.fail_reads = false;
        if let (Some(before), true) = (before, failed) {
            let after = (writer.engine.snapshot(now), writer.engine.ledger_stats());
            assert_eq!(after, before, "a rollback left something behind");
        }
        self.collect_replies(asked);
        if self.writer().stopped.is_some() {
            return self.restart();
        }
        self.check();
    }

    fn restart(&mut self) {
        for asked in std::mem::take(&mut self.waiting) {
            if let PendingOp::Claim(key, ..) = asked {
                self.keys[key].disturbed = true;
            }
        }
        let writer = self.writer.take().expect("open");
        let before = writer.stopped.is_none().then_some(writer.engine);
        let before_now = self.time.now();
        let mut storage = writer.storage;
        let lost = if self.rng.bool() { self.rng.u64(0..=storage.unsynced()) } else { 0 };
        storage = if lost > 0 { storage.after_power_loss(lost) } else { storage.after_process_death() };
        self.note(("restart", lost));
        self.time = StoreTime::start(self.clock.clone(), storage.committed.header.clock_ms);
        let seed = self.rng.u64(..);
        self.writer = Some(rig::open(storage, &self.clock, Ids::fixed(1), seed));
        if let (Some(before), 0) = (before, lost) {
            let now = before_now.max(self.time.now());
            assert_eq!(self.writer().engine.snapshot(now), before.snapshot(now), "memory and disk differ");
        }
        self.check();
    }

    fn ask(&mut self) -> Option<(Op, PendingOp)> {
        Some(match self.rng.u32(..100) {
            0..8 => self.ask_send(),
            8..18 => {
                self.next += 1;
                let request = rig::request(2, Some(self.rng.u64(1..5_000)));
                let (op, answer) = rig::receive(self.next, &self.queue, request, self.time.now(), 0);
                (op, PendingOp::Receive(answer))
            }
            18..50 => self.ask_claim(),
            50..60 => {
                let (key, _, fence) = self.token()?;
                let lease_ms = self.rng.u64(1..6_000);
                let (reply, answer) = oneshot::channel();
                let keep = RenewOp { id: id(key), hash: id(key).hash(), fence: Some(fence), lease_ms };
                let op = Op::Ledger(LedgerOp::Renew { batch: vec![keep], reply });
                (op, PendingOp::Renew(key, fence, lease_ms, answer))
            }
            60..78 => {
                let (key, _, fence) = self.token()?;
                let ending = self.ending(key, fence);
                let (reply, answer) = oneshot::channel();
                let end =
                    EndOp { id: id(key), hash: id(key).hash(), fence: Some(fence), ending: ending.clone() };
                self.note(("end", key, fence, &ending));
                (
                    Op::Ledger(LedgerOp::End { batch: vec![end], reply }),
                    PendingOp::End(key, fence, ending, answer),
                )
            }
            78..96 => self.ask_settle()?,
            _ => {
                let key = self.rng.usize(..QUEUED);
                let (reply, answer) = oneshot::channel();
                let (id, by) = (id(key), "sim".to_owned());
                let op = if self.rng.bool() {
                    LedgerOp::Resolve { id, resolution: Resolution::Absent, by, reply }
                } else {
                    LedgerOp::Forget { id, by, reply }
                };
                (Op::Ledger(op), PendingOp::Decide(key, answer))
            }
        })
    }

    fn ask_send(&mut self) -> (Op, PendingOp) {
        let key = self.rng.usize(QUEUED..KEYS);
        let attributes =
            format!(r#"{{"hapax-idempotency-key":{{"data_type":"String","value":{{"text":"k{key}"}}}}}}"#);
        let mut outgoing = rig::outgoing(&format!("{key}"), None, None);
        outgoing.content = Content::new(None, Some(attributes), None, format!("{key}").into());
        let (op, answer) = rig::send(&self.queue, vec![outgoing]);
        (op, PendingOp::Send(key, answer))
    }

    fn ask_claim(&mut self) -> (Op, PendingOp) {
        let delivery = self.chance(50).then(|| self.delivery()).flatten();
        let key = delivery.map_or_else(|| self.rng.usize(..KEYS), |(key, _)| key);
        self.next += 1;
        let again = self.tokens.iter().rev().find(|(at, ..)| *at == key).map(|(_, owner, _)| owner.clone());
        let owner = again.filter(|_| self.rng.u8(..10) == 0).unwrap_or_else(|| format!("o{}", self.next));
        let mut request = ClaimRequest::new(id(key), owner.parse().unwrap(), self.rng.u64(1..6_000));
        request.on_doubt = if self.chance(30) { OnDoubt::Park } else { OnDoubt::Retry };
        request.wait_ms = if self.chance(30) { self.rng.u64(..20_000) } else { 0 };
        let receipt = || hapax_core::Receipt::new("opened").unwrap();
        request.delivery = delivery.map(|_| (self.queue.clone(), receipt()));
        let delivery = delivery.map(|(_, delivery)| delivery);
        let waits = request.wait_ms > 0;
        let (reply, answer) = oneshot::channel();
        let claiming = Box::new(ClaimOp { hash: id(key).hash(), request, delivery });
        let op = LedgerOp::Claim { claiming, asked: self.time.now(), reply };
        (Op::Ledger(op), PendingOp::Claim(key, owner, waits, answer))
    }

    /// Picks a token, mostly one of the latest.
    fn token(&mut self) -> Option<(usize, String, u64)> {
        let back =
            if self.chance(80) { self.rng.usize(..4) } else { self.rng.usize(..self.tokens.len().max(1)) };
        self.tokens.get(self.tokens.len().checked_sub(back + 1)?).cloned()
    }

    fn delivery(&mut self) -> Option<(usize, DeliveryRef)> {
        let count = self.deliveries.len();
        self.deliveries.get(count.checked_sub(self.rng.usize(..4) + 1)?).copied()
    }

    fn ending(&mut self, key: usize, fence: u64) -> ClaimEnding {
        match self.rng.u32(..10) {
            0..6 => {
                let outcome = RecordedOutcome::done(Json::of(&fence).unwrap());
                self.keys[key].possible.push(outcome.clone());
                let now_ms = self.now_ms();
                self.completions.entry(fence).or_insert((0, now_ms)).0 += 1;
                // Entries of messages never expire, because otherwise their disappearance would prove nothing.
                let ttl_ms = if key < QUEUED { 1_000 + fence % 2_000_000 } else { FAR_FUTURE_MS };
                ClaimEnding::Complete { outcome, ttl_ms }
            }
            6..8 => ClaimEnding::Release,
            _ => ClaimEnding::Doubt,
        }
    }

    /// A message is deleted only together with a completion, or after one was seen.
    fn ask_settle(&mut self) -> Option<(Op, PendingOp)> {
        let (key, delivery) = self.delivery()?;
        let token = self.tokens.iter().rev().find(|(at, ..)| *at == key).map(|(_, _, fence)| *fence);
        let completed = self.keys[key].completed.is_some();
        let (settlement, claim) = match (token, self.rng.u32(..10)) {
            (Some(fence), 0..6) => {
                let ending = self.ending(key, fence);
                let settlement = match ending {
                    ClaimEnding::Complete { .. } => Settlement::Ack,
                    _ => Settlement::Defer { after_ms: 0 },
                };
                (settlement, Some((fence, ending)))
            }
            (_, 6..8) if completed => (Settlement::Ack, None),
            _ => (Settlement::Retry { after_ms: Some(0), error: None }, None),
        };
        if let (Settlement::Ack, Some((fence, _))) = (&settlement, &claim) {
            self.pairs.push((delivery, key, *fence));
        }
        let end = claim.clone().map(|(fence, ending)| EndOp {
            id: id(key),
            hash: id(key).hash(),
            fence: Some(fence),
            ending,
        });
        let (reply, answer) = oneshot::channel();
        self.note(("settle", key, delivery, &settlement, &claim));
        let batch = vec![SettleOp { delivery: Some(delivery), settlement, claim: end, parked_for: None }];
        Some((
            Op::Settle { queue: self.queue.clone(), batch, reply },
            PendingOp::Settle(key, delivery, claim, answer),
        ))
    }

    fn collect_replies(&mut self, asked: Vec<PendingOp>) {
        let crashed = self.writer().storage.crashed;
        let mut later = std::mem::take(&mut self.waiting);
        let waits = |asked: &PendingOp| match asked {
            PendingOp::Claim(key, _, true, _) => Some(*key),
            _ => None,
        };
        self.contested = later.iter().chain(&asked).filter_map(waits).collect();
        for asked in asked {
            match asked {
                PendingOp::Claim(_, _, true, _) => later.push(asked),
                asked => drop(self.collect_reply(asked, crashed)),
            }
        }
        // Waiting claims are served last.
        for asked in later {
            let left = self.collect_reply(asked, crashed);
            self.waiting.extend(left);
        }
    }

    /// Records an answer; returns the operation if it has none yet.
    fn collect_reply(&mut self, asked: PendingOp, crashed: bool) -> Option<PendingOp> {
        let now_ms = self.now_ms();
        match asked {
            PendingOp::Send(key, mut answer) => {
                if let Some(Ok(sent)) = received_reply(crashed, &mut answer) {
                    self.sent.insert(sent[0].as_ref().expect("a valid message").sequence, key);
                }
            }
            PendingOp::Receive(mut answer) => {
                if let Some(Ok(raw)) = received_reply(crashed, &mut answer) {
                    for raw in raw {
                        let key = std::str::from_utf8(&raw.content.body).unwrap().parse().unwrap();
                        self.deliveries.push((key, raw.leased.delivery));
                    }
                }
            }
            PendingOp::Claim(key, owner, waits, mut answer) => match received_reply(crashed, &mut answer) {
                None if answer.is_terminated() => {}
                None => return Some(PendingOp::Claim(key, owner, waits, answer)),
                Some(Err(StoreError::OutcomeUnknown(_))) => self.keys[key].disturbed = true,
                Some(Err(_)) => {}
                Some(Ok(claimed)) => {
                    let (claimed, _) = claimed.expect("no fingerprints here");
                    self.note(("claimed", key, &owner, &claimed));
                    self.claimed(key, owner, claimed, now_ms);
                }
            },
            PendingOp::Renew(key, fence, lease_ms, mut answer) => {
                let known = &mut self.keys[key];
                let held = known.held.as_mut().filter(|(held, _)| *held == fence);
                match (received_reply(crashed, &mut answer), held) {
                    (Some(Ok(renewed)), held) if renewed[0].is_ok() => {
                        assert_eq!(known.newest, fence, "a superseded token was renewed");
                        held.expect("the newest is held").1 = now_ms + lease_ms;
                    }
                    (Some(Err(StoreError::OutcomeUnknown(_))), Some(held)) => {
                        held.1 = held.1.min(now_ms + lease_ms);
                    }
                    _ => {}
                }
            }
            PendingOp::End(key, fence, ending, mut answer) => match received_reply(crashed, &mut answer) {
                Some(Ok(ended)) => self.ended(key, fence, &ending, ended[0], now_ms),
                Some(Err(StoreError::OutcomeUnknown(_))) => self.keys[key].unknown(),
                _ => {}
            },
            PendingOp::Settle(key, delivery, claim, mut answer) => {
                match (received_reply(crashed, &mut answer), claim) {
                    (Some(Ok(settled)), Some((fence, ending))) => {
                        self.note(("settled", key, delivery, &settled[0]));
                        let ended = match settled[0] {
                            Err(SettleError::Claim(error)) => Err(error),
                            _ => Ok(()),
                        };
                        self.ended(key, fence, &ending, ended, now_ms);
                    }
                    (Some(Err(StoreError::OutcomeUnknown(_))), Some(_)) => self.keys[key].unknown(),
                    _ => {}
                }
            }
            PendingOp::Decide(key, mut answer) => {
                let received_reply = received_reply(crashed, &mut answer);
                if matches!(received_reply, Some(Ok(Ok(())) | Err(StoreError::OutcomeUnknown(_)))) {
                    self.keys[key].unknown();
                    self.keys[key].completed = None;
                }
            }
        }
        None
    }

    fn claimed(&mut self, key: usize, owner: String, claimed: ClaimDecision, now_ms: u64) {
        let known = &mut self.keys[key];
        match claimed {
            ClaimDecision::Granted { entry, .. } => {
                let Stage::Processing { until_ms, .. } = entry.stage else { panic!("granted, but not held") };
                let fence = entry.fence.0;
                if known.held.is_some_and(|(held, _)| held == fence) {
                    known.held = Some((fence, until_ms));
                    return;
                }
                // The same claim again, which may wait and is therefore heard last, though it was answered first.
                let told = self.tokens.contains(&(key, owner.clone(), fence));
                if told && fence < known.newest && self.contested.contains(&key) {
                    return;
                }
                assert!(fence > known.newest, "fences of key {key} step back");
                if let Some((at_ms, ttl_ms, outcome)) = &known.completed {
                    assert!(now_ms >= at_ms + ttl_ms, "key {key} completed as {outcome:?} and runs again");
                }
                if let (Some((held, until_ms)), false) = (known.held, known.free) {
                    assert!(now_ms >= until_ms, "two live tokens of key {key}: {held} and {fence}");
                }
                let newest = ExpectedEntry {
                    held: Some((fence, until_ms)),
                    newest: fence,
                    ..ExpectedEntry::default()
                };
                let possible = std::mem::take(&mut known.possible);
                *known = ExpectedEntry { possible, ..newest };
                self.tokens.push((key, owner, fence));
            }
            ClaimDecision::Completed { outcome, at_ms } => {
                assert!(known.possible.contains(&outcome), "key {key} has an outcome that nobody gave");
                if let Some((_, _, before)) = &known.completed {
                    assert!(*before == outcome || known.disturbed, "the outcome of key {key} changed");
                }
                // Only the completing client knows the time to live; from here on it may already have passed.
                let ttl_ms = if key < QUEUED { 0 } else { FAR_FUTURE_MS };
                known.completed.get_or_insert((at_ms, ttl_ms, outcome));
            }
            ClaimDecision::InProgress { .. } | ClaimDecision::InDoubt { .. } => {}
        }
    }

    fn ended(
        &mut self,
        key: usize,
        fence: u64,
        ending: &ClaimEnding,
        ended: Result<(), TokenError>,
        now_ms: u64,
    ) {
        let contested = self.contested.contains(&key);
        let at_ms = self.completions.get(&fence).map_or(now_ms, |(_, first_ms)| *first_ms);
        let known = &mut self.keys[key];
        let newest = known.newest == fence;
        match ended {
            Ok(()) => {
                assert!(newest, "key {key}: a superseded token ended a claim");
                known.free = true;
                if let ClaimEnding::Complete { outcome, ttl_ms } = ending {
                    known.completed.get_or_insert((at_ms, *ttl_ms, outcome.clone()));
                }
            }
            Err(TokenError::Stale) => {
                let completes = matches!(ending, ClaimEnding::Complete { .. });
                let kept = newest && !known.disturbed && !contested && completes;
                assert!(!kept, "key {key}: the completion of the newest holder was refused");
            }
            Err(_) => {}
        }
    }

    /// Checks the rows after every wave.
    fn check(&mut self) {
        let writer = self.writer.as_ref().expect("open");
        writer.engine.check();
        let tables = &writer.storage.committed;
        tables.check();
        let completed = |key: usize| {
            let rows = tables.ledger.values().filter(|(row, _)| row.id == id(key));
            rows.filter(|(row, _)| matches!(row.entry.stage, Stage::Completed { .. })).count() == 1
        };
        for (seq, key) in &self.sent {
            let there = tables.messages.contains_key(seq);
            assert!(there || completed(*key), "message {seq} is gone and key {key} is not completed");
        }
        for (delivery, key, fence) in &self.pairs {
            let ended = tables.ledger.get(fence).is_some_and(|(row, _)| {
                row.id == id(*key) && matches!(row.entry.stage, Stage::Completed { .. })
            });
            let held = tables
                .messages
                .get(&delivery.seq)
                .is_some_and(|row| row.entry.fence == delivery.fence && row.entry.state == State::InFlight);
            // If completion was requested more than once, it is unknown which request ended the claim.
            let once = self.completions[fence].0 == 1;
            assert!(
                !ended || !held || !once,
                "key {key} is completed and its delivery {delivery:?} was not acked"
            );
        }
        for (fence, seq) in &self.needed {
            let live = tables.messages.contains_key(seq);
            assert!(!live || tables.ledger.contains_key(fence), "the entry of live message {seq} was pruned");
        }
        let ended = |hash: u128| {
            let mut rows = tables.ledger.values();
            rows.find(|(row, _)| row.id.hash() == hash && matches!(row.entry.stage, Stage::Completed { .. }))
        };
        let needed =
            tables.keyed.iter().filter_map(|(seq, hash)| Some((ended(*hash)?.0.entry.fence.0, *seq)));
        self.needed = needed.collect();
    }
}

impl ExpectedEntry {
    /// An operation may have ended the claim.
    fn unknown(&mut self) {
        self.free = true;
        self.disturbed = true;
    }
}

struct Replay(u64);

impl Drop for Replay {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("replay with: HAPAX_SEED={} cargo test -p hapax-embedded ledger_simulation", self.0);
        }
    }
}

#[test]
fn ledger_simulation_grants_once_and_ends_once_through_faults() {
    let seeds = match (std::env::var("HAPAX_SEED"), std::env::var("HAPAX_LONG")) {
        (Ok(seed), _) => {
            let seed = seed.parse().expect("HAPAX_SEED is a number");
            seed..seed + 1
        }
        (_, Ok(long)) if long == "1" => 0..20_000,
        _ => 0..400,
    };
    for seed in seeds {
        let _replay = Replay(seed);
        Sim::new(seed).run();
    }
}

#[test]
fn a_longer_lease_that_was_answered_survives_a_power_cut() {
    let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
    let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
    let claim = |writer: &mut Writer<SimStorage>, owner: &str| {
        let request = ClaimRequest::new(id(0), owner.parse().unwrap(), 1_000);
        let claiming = Box::new(ClaimOp { hash: id(0).hash(), request, delivery: None });
        let (reply, mut answer) = oneshot::channel();
        let asked = crate::time::Now { us: 0 };
        writer.run(&mut vec![Op::Ledger(LedgerOp::Claim { claiming, asked, reply })]);
        answer.try_recv().unwrap().unwrap().unwrap().0
    };
    let ClaimDecision::Granted { entry, .. } = claim(&mut writer, "a") else { panic!("the key is free") };
    let (reply, mut answer) = oneshot::channel();
    let keep = RenewOp { id: id(0), hash: id(0).hash(), fence: Some(entry.fence.0), lease_ms: 60_000 };
    writer.run(&mut vec![Op::Ledger(LedgerOp::Renew { batch: vec![keep], reply })]);
    assert_eq!(answer.try_recv().unwrap().unwrap()[0].map(|left| left.lease_ms), Ok(60_000));
    let lost = writer.storage.unsynced();
    let mut writer = rig::open(writer.storage.after_power_loss(lost), &clock, Ids::fixed(1), 1);
    clock.advance_ms(59_999);
    let claimed = claim(&mut writer, "b");
    assert!(matches!(claimed, ClaimDecision::InProgress { .. }), "two live tokens: {claimed:?}");
}
