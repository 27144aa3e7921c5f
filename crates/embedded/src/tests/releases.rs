//! A decision releases every message that is parked for it, in steps, whatever happens between them.

use std::sync::Arc;

use hapax_core::{
    ClaimRequest, Clock as _, EntryId, ManualClock, OnDoubt, QueueConfig, QueueName, Resolution, SettleError,
    Settled, Settlement, Tier,
};
use tokio::sync::oneshot;

use super::rig;
use super::sim_storage::{Fault, SimStorage};
use crate::claims::{ClaimOp, LedgerOp};
use crate::ids::Ids;
use crate::record::Content;
use crate::writer::{Op, SettleOp, Writer};

/// Enough for several steps of 1,000.
const MESSAGES: usize = 2_500;
/// More than a decision once released, which had 10,000 as its limit.
const MANY: usize = 10_500;
const LEASE_MS: u64 = 1_000;

struct Parked {
    clock: Arc<ManualClock>,
    writer: Writer<SimStorage>,
    queue: QueueName,
    id: EntryId,
}

fn attributes() -> String {
    r#"{"hapax-idempotency-key":{"data_type":"String","value":{"text":"k"}}}"#.to_owned()
}

impl Parked {
    /// A key in doubt, and many messages parked for it.
    fn new() -> Self {
        Self::with(MESSAGES)
    }

    fn with(messages: usize) -> Self {
        let clock = Arc::new(ManualClock::at_ms(rig::START_MS));
        let mut writer = rig::open(SimStorage::new(), &clock, Ids::fixed(1), 1);
        let queue = rig::name("once");
        rig::create(&mut writer, &queue, QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() });
        let id = EntryId::of_queue(&queue, "k".parse().unwrap());
        let mut parked = Self { clock, writer, queue, id };
        let outgoing = || {
            let mut outgoing = rig::outgoing("x", None, None);
            outgoing.content = Content::new(None, Some(attributes()), None, "x".into());
            outgoing
        };
        let batch = (0..messages).map(|_| outgoing()).collect();
        parked.writer.run(&mut vec![rig::send(&parked.queue, batch).0]);
        parked.claim();
        parked.clock.advance_ms(LEASE_MS);
        let settled = parked.park(messages);
        assert!(settled.iter().all(|settled| *settled == Ok(Settled::Parked)), "{settled:?}");
        parked
    }

    fn claim(&mut self) {
        let (reply, _answer) = oneshot::channel();
        let mut request = ClaimRequest::new(self.id.clone(), "ann".parse().unwrap(), LEASE_MS);
        request.on_doubt = OnDoubt::Park;
        let claiming = Box::new(ClaimOp { hash: self.id.hash(), request, delivery: None });
        let asked = rig::now(&mut self.writer, |_, now| now);
        self.writer.run(&mut vec![Op::Ledger(LedgerOp::Claim { claiming, asked, reply })]);
    }

    /// Receives messages and parks them for the key.
    fn park(&mut self, count: usize) -> Vec<Result<Settled, SettleError>> {
        let asked = rig::now(&mut self.writer, |_, now| now);
        let request = rig::request(count, Some(60_000));
        let (op, mut answer) = rig::receive(1, &self.queue, request, asked, 0);
        self.writer.run(&mut vec![op]);
        let raw = answer.try_recv().expect("an answer").expect("no fault");
        assert_eq!(raw.len(), count);
        let hash = self.id.hash();
        let settling = |delivery| SettleOp {
            delivery: Some(delivery),
            settlement: Settlement::Park { reason: "in doubt".into() },
            claim: None,
            parked_for: Some(hash),
        };
        let batch = raw.iter().map(|raw| settling(raw.leased.delivery)).collect();
        let (reply, mut answer) = oneshot::channel();
        self.writer.run(&mut vec![Op::Settle { queue: self.queue.clone(), batch, reply }]);
        answer.try_recv().expect("an answer").expect("no fault")
    }

    fn resolve(&mut self) {
        let (reply, mut answer) = oneshot::channel();
        let (id, by) = (self.id.clone(), "eva".to_owned());
        let op = LedgerOp::Resolve { id, resolution: Resolution::Absent, by, reply };
        self.writer.run(&mut vec![Op::Ledger(op)]);
        answer.try_recv().expect("an answer").expect("no fault").expect("it is in doubt");
    }

    /// Ready and parked messages, as memory and as the rows have them.
    fn counts(&self) -> (u64, u64) {
        let id = self.writer.engine.find(&self.queue).unwrap();
        let stats = self.writer.engine.queue(id).stats();
        (stats.ready, stats.parked)
    }

    fn reopen(self) -> Self {
        let Self { clock, writer, queue, id } = self;
        let writer = rig::open(writer.storage.after_process_death(), &clock, Ids::fixed(1), 1);
        Self { clock, writer, queue, id }
    }

    /// Lets the writer do what is due, as its thread does.
    fn finish(&mut self) -> usize {
        let mut waves = 0;
        while self.writer.sleep() == Some(std::time::Duration::ZERO) {
            self.writer.run(&mut Vec::new());
            waves += 1;
            assert!(waves < 100, "it never comes to an end");
        }
        waves
    }
}

#[test]
fn every_message_is_released_a_bounded_number_at_a_time() {
    let mut parked = Parked::with(MANY);
    parked.resolve();
    let (ready, left) = parked.counts();
    assert!(ready > 0 && left > 0, "one step of several: {ready} {left}");
    assert!(parked.finish() >= 2);
    assert_eq!(parked.counts(), (MANY as u64, 0));
    assert!(parked.writer.storage.committed.released.is_empty(), "nothing is left to do");
}

#[test]
fn a_crash_after_any_step_loses_no_release() {
    for steps in 0..3 {
        let mut parked = Parked::new();
        parked.resolve();
        for _ in 0..steps {
            parked.writer.run(&mut Vec::new());
        }
        let mut parked = parked.reopen();
        parked.finish();
        assert_eq!(parked.counts(), (MESSAGES as u64, 0), "after {steps} steps");
    }
}

#[test]
fn a_step_that_does_not_fit_on_the_disk_is_made_later() {
    let mut parked = Parked::new();
    parked.resolve();
    let before = parked.counts();
    parked.writer.storage.fault = Some(Fault::Full);
    parked.writer.run(&mut Vec::new());
    assert_eq!(parked.counts(), before, "taken back");
    parked.clock.advance_ms(1_000);
    parked.finish();
    assert_eq!(parked.counts(), (MESSAGES as u64, 0));
}

#[test]
fn a_key_that_is_in_doubt_again_keeps_what_is_still_parked() {
    let mut parked = Parked::new();
    parked.resolve();
    let (reply, _answer) = oneshot::channel();
    let mut request = ClaimRequest::new(parked.id.clone(), "bob".parse().unwrap(), 1);
    request.on_doubt = OnDoubt::Park;
    let claiming = Box::new(ClaimOp { hash: parked.id.hash(), request, delivery: None });
    let asked = crate::time::Now { us: parked.clock.wall_ms() * 1000 };
    // Claimed in the next wave, which releases another part, and lapsed before the one after it.
    parked.writer.run(&mut vec![Op::Ledger(LedgerOp::Claim { claiming, asked, reply })]);
    let released = parked.counts().0;
    assert!(released < MESSAGES as u64, "{released}");
    parked.clock.advance_ms(1);
    parked.finish();
    assert_eq!(parked.counts().1, MESSAGES as u64 - released, "they wait for the next decision");
    parked.resolve();
    parked.finish();
    assert_eq!(parked.counts(), (MESSAGES as u64, 0));
}

#[test]
fn a_message_is_not_parked_for_a_doubt_that_is_over() {
    let mut parked = Parked::new();
    parked.resolve();
    parked.finish();
    let settled = parked.park(3);
    assert!(settled.iter().all(|settled| *settled == Ok(Settled::Returned { after_ms: 0 })), "{settled:?}");
    assert_eq!(parked.counts(), (MESSAGES as u64, 0));
}
