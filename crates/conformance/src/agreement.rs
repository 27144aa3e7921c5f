//! Random calls to a store and to the obvious one in memory: every answer, every counter and every halted group must be the
//! same. The seed is printed with a failure.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::policy::{Jitter, RetryPolicy};
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, DeadLetterPolicy, Delivery, EndClaim, EntryId, Extend, Grant, GroupId,
    Json, ManualClock, NewMessage, OnDead, OnDoubt, QueueConfig, QueueName, QueueStats, Receive,
    RecordedOutcome, Resolution, Settle, Settlement, Store, Tier,
};

use crate::MemoryStore;

/// A kind of store that is compared.
#[async_trait]
pub trait Subject: Send + Sync {
    /// An empty store with this clock.
    async fn fresh(&self, clock: Arc<ManualClock>) -> Arc<dyn Store>;

    /// The clock was moved: does what time causes.
    async fn clock_moved(&self, store: &dyn Store);
}

/// Compares a store with the one in memory, with this number of calls for each seed.
pub async fn compare(subject: &dyn Subject, seeds: Range<u64>, steps: usize) {
    for seed in seeds {
        let mut pair = Pair::new(subject, seed).await;
        for _ in 0..steps {
            pair.story.step += 1;
            pair.step().await;
        }
    }
}

/// Calls that are listed with a failure.
const LISTED_MAX: usize = 60;

/// Says what was called when an assertion failed.
struct Story {
    seed: u64,
    step: usize,
    calls: VecDeque<String>,
}

impl Story {
    fn add(&mut self, call: std::fmt::Arguments<'_>) {
        self.calls.push_back(format!("step {}: {call}", self.step));
        if self.calls.len() > LISTED_MAX {
            self.calls.pop_front();
        }
    }
}

impl Drop for Story {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("seed {}, step {}, after", self.seed, self.step);
            self.calls.iter().for_each(|call| eprintln!("  {call}"));
        }
    }
}

const QUEUES: [&str; 4] = ["jobs", "dead", "jobs.fifo", "dead.fifo"];
const KEYS: [&str; 3] = ["a", "b", "c"];

fn name(queue: &str) -> QueueName {
    QueueName::new(queue).unwrap()
}

/// The same thing in both stores.
struct Both<T> {
    ours: T,
    memory: T,
}

struct Pair<'s> {
    subject: &'s dyn Subject,
    stores: Both<Arc<dyn Store>>,
    clock: Arc<ManualClock>,
    rng: fastrand::Rng,
    /// Every delivery made, with its queue.
    made: Vec<(QueueName, Both<Delivery>)>,
    granted: Vec<(EntryId, Both<Grant>)>,
    sent: u32,
    story: Story,
}

/// What must be equal of a delivery: all but what a store chooses itself.
fn seen(delivery: &Delivery) -> String {
    let story = delivery.dead.as_ref();
    format!(
        "{:?} attempt {} deliveries {} lease {} sent {} first {} group {:?} key {:?} dead {:?}",
        delivery.body,
        delivery.attempt,
        delivery.deliveries,
        delivery.lease_ms,
        delivery.sent_ms,
        delivery.first_received_ms,
        delivery.group,
        delivery.key_source,
        story.map(|dead| (
            &dead.source,
            dead.cause,
            &dead.error,
            dead.attempts,
            dead.deliveries,
            dead.died_ms
        )),
    )
}

fn seen_claim(claim: &Claim) -> String {
    match claim {
        Claim::Granted(grant) => format!("granted for {} takeover {}", grant.lease_ms, grant.takeover),
        other => format!("{other:?}"),
    }
}

impl<'s> Pair<'s> {
    async fn new(subject: &'s dyn Subject, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let ours = subject.fresh(clock.clone()).await;
        let memory: Arc<dyn Store> = MemoryStore::new(clock.clone());
        let retry = RetryPolicy {
            base_ms: rng.u64(0..2) * 500,
            cap_ms: 3_000,
            jitter: Jitter::None,
            max_attempts: rng.u32(1..4),
        };
        let on_dead = if rng.bool() { OnDead::HaltGroup } else { OnDead::Continue };
        for (queue, dead) in [(1, None), (3, None), (0, Some(1)), (2, Some(3))] {
            let base = if queue >= 2 { QueueConfig::sqs_fifo() } else { QueueConfig::sqs() };
            let config = match dead {
                None => base,
                Some(dead) => QueueConfig {
                    lease_ms: 2_000,
                    retry,
                    tier: Tier::EffectivelyOnce,
                    dead_letter: Some(DeadLetterPolicy { queue: name(QUEUES[dead]) }),
                    on_dead: if queue == 2 { on_dead } else { OnDead::Continue },
                    ..base
                },
            };
            for store in [&ours, &memory] {
                assert!(store.create_queue(&name(QUEUES[queue]), config.clone()).await.unwrap());
            }
        }
        let stores = Both { ours, memory };
        let story = Story { seed, step: 0, calls: VecDeque::new() };
        Self { subject, stores, clock, rng, made: Vec::new(), granted: Vec::new(), sent: 0, story }
    }

    fn queue(&mut self) -> QueueName {
        name(QUEUES[self.rng.usize(0..QUEUES.len())])
    }

    async fn send(&mut self) {
        let fifo = self.rng.bool();
        self.sent += 1;
        let mut message = NewMessage::new(format!("message {}", self.sent));
        if fifo || self.rng.bool() {
            message = message.group(GroupId::new(format!("g{}", self.rng.u8(0..3))).unwrap());
        }
        if fifo || self.rng.u8(0..4) == 0 {
            // A few repeat.
            let id = if self.rng.u8(0..5) == 0 { 0 } else { self.sent };
            message = message.dedup(format!("d{id}").parse().unwrap());
        }
        if self.rng.u8(0..4) == 0 {
            message = message.idempotency_key(&KEYS[self.rng.usize(0..3)].parse().unwrap());
        }
        if !fifo && self.rng.u8(0..4) == 0 {
            message = message.delay_ms(self.rng.u64(0..2_000));
        }
        let queue = name(if fifo { "jobs.fifo" } else { "jobs" });
        self.story.add(format_args!("send to {queue}: {message:?}"));
        let ours = self.stores.ours.send(&queue, vec![message.clone()]).await.unwrap().remove(0);
        let memory = self.stores.memory.send(&queue, vec![message]).await.unwrap().remove(0);
        assert_eq!(ours.map(|sent| sent.duplicate), memory.map(|sent| sent.duplicate));
    }

    async fn receive(&mut self) {
        let (queue, max) = (self.queue(), self.rng.usize(1..4));
        let lease_ms = (self.rng.bool()).then(|| self.rng.u64(1..4_000));
        let ask = Receive {
            lease_ms,
            ack_on_receive: self.rng.u8(0..10) == 0,
            wait_ms: Some(0),
            ..Receive::up_to(max)
        };
        let ours = self.stores.ours.receive(&queue, ask.clone()).await.unwrap();
        let memory = self.stores.memory.receive(&queue, ask).await.unwrap();
        let all = |got: &[Delivery]| got.iter().map(seen).collect::<Vec<_>>();
        self.story.add(format_args!("receive {max} from {queue}: {:?}", all(&ours)));
        assert_eq!(all(&ours), all(&memory), "received from {queue}");
        let both = ours.into_iter().zip(memory).map(|(ours, memory)| Both { ours, memory });
        self.made.extend(both.map(|both| (queue.clone(), both)));
    }

    fn pick(&mut self) -> Option<usize> {
        let count = self.made.len();
        (count > 0).then(|| count - 1 - self.rng.usize(0..count.min(6)))
    }

    fn settlement(&mut self) -> Settlement {
        match self.rng.u8(0..8) {
            0..3 => Settlement::Ack,
            3..5 => Settlement::Retry {
                after_ms: self.rng.bool().then(|| self.rng.u64(0..2_000)),
                error: self.rng.bool().then(|| "boom".to_owned()),
            },
            5 => Settlement::Defer { after_ms: self.rng.u64(0..2_000) },
            6 => Settlement::Reject { reason: "bad".into() },
            _ => Settlement::Park { reason: "in doubt".into() },
        }
    }

    async fn settle(&mut self) {
        let Some(at) = self.pick() else { return };
        let settlement = self.settlement();
        let with_claim = self.granted.len().checked_sub(1).filter(|_| self.rng.bool());
        let ending = self.ending();
        let (queue, both) = &self.made[at];
        let settle = |delivery: &Delivery, which: fn(&Both<Grant>) -> &Grant| {
            let claim = with_claim.map(|at| {
                let (id, grants) = &self.granted[at];
                EndClaim { id: id.clone(), token: which(grants).token.clone(), ending: ending.clone() }
            });
            vec![Settle { claim, ..Settle::new(delivery.receipt.clone(), settlement.clone()) }]
        };
        let ours = self.stores.ours.settle(queue, settle(&both.ours, |grants| &grants.ours)).await;
        let memory = self.stores.memory.settle(queue, settle(&both.memory, |grants| &grants.memory)).await;
        self.story.add(format_args!(
            "{settlement:?} of {} in {queue}, claim {:?}: {ours:?}",
            seen(&both.ours),
            with_claim.map(|at| (&self.granted[at].0, &ending))
        ));
        assert_eq!(ours, memory, "{settlement:?} of {} in {queue}", seen(&both.ours));
    }

    async fn extend(&mut self) {
        let Some(at) = self.pick() else { return };
        let lease_ms = if self.rng.u8(0..4) == 0 { 0 } else { self.rng.u64(1..5_000) };
        let own_lease = self.rng.bool();
        let (queue, both) = &self.made[at];
        let extend =
            |delivery: &Delivery| vec![Extend { receipt: delivery.receipt.clone(), lease_ms, own_lease }];
        let ours = self.stores.ours.extend(queue, extend(&both.ours)).await;
        let memory = self.stores.memory.extend(queue, extend(&both.memory)).await;
        self.story.add(format_args!("extend {} in {queue} by {lease_ms}: {ours:?}", seen(&both.ours)));
        assert_eq!(ours, memory, "extended by {lease_ms} in {queue}: {}", seen(&both.ours));
    }

    async fn release_or_discard(&mut self) {
        let Some(at) = self.pick() else { return };
        let (queue, both) = &self.made[at];
        let (ours, memory) = (vec![both.ours.id], vec![both.memory.id]);
        if self.rng.bool() {
            let ours = self.stores.ours.release(queue, ours).await.unwrap();
            self.story.add(format_args!("release {} in {queue}: {ours}", seen(&both.ours)));
            assert_eq!(ours, self.stores.memory.release(queue, memory).await.unwrap(), "released");
        } else {
            let ours = self.stores.ours.discard(queue, ours, "test").await.unwrap();
            self.story.add(format_args!("discard {} in {queue}: {ours:?}", seen(&both.ours)));
            let memory = self.stores.memory.discard(queue, memory, "test").await.unwrap();
            assert_eq!(
                (ours.count, ours.in_flight.len()),
                (memory.count, memory.in_flight.len()),
                "discarded"
            );
        }
    }

    async fn release_group(&mut self) {
        let group = GroupId::new(format!("g{}", self.rng.u8(0..3))).unwrap();
        let ours = self.stores.ours.release_group(&name("jobs.fifo"), &group).await;
        let memory = self.stores.memory.release_group(&name("jobs.fifo"), &group).await;
        self.story.add(format_args!("release group {group}: {ours:?}"));
        assert_eq!(ours.is_ok(), memory.is_ok(), "release {group}");
    }

    fn ending(&mut self) -> ClaimEnding {
        let outcome = RecordedOutcome::done(Json::of("done").unwrap());
        match self.rng.u8(0..3) {
            0 => ClaimEnding::Complete { outcome, ttl_ms: 1_000 * self.rng.u64(1..4) },
            1 => ClaimEnding::Release,
            _ => ClaimEnding::Doubt,
        }
    }

    async fn claim(&mut self) {
        let delivery = self.pick().filter(|_| self.rng.bool());
        let id = match delivery {
            Some(at) => EntryId::of_queue(&self.made[at].0, self.made[at].1.ours.key.clone()),
            None => EntryId::of_queue(&name("jobs"), KEYS[self.rng.usize(0..3)].parse().unwrap()),
        };
        let by_id = delivery.is_some_and(|at| self.made[at].1.ours.key != self.made[at].1.memory.key);
        if by_id {
            // Its key is its id, which each store chooses.
            return;
        }
        let owner = format!("owner-{}", self.rng.u8(0..3)).parse().unwrap();
        let on_doubt = if self.rng.bool() { OnDoubt::Park } else { OnDoubt::Retry };
        let lease_ms = self.rng.u64(1..4_000);
        let request = ClaimRequest { on_doubt, ..ClaimRequest::new(id.clone(), owner, lease_ms) };
        let of = |which: fn(&Both<Delivery>) -> &Delivery| {
            let named = delivery.map(|at| (self.made[at].0.clone(), which(&self.made[at].1).receipt.clone()));
            vec![ClaimRequest { delivery: named, ..request.clone() }]
        };
        let ours = self.stores.ours.claim(of(|both| &both.ours)).await.unwrap().remove(0).unwrap();
        let memory = self.stores.memory.claim(of(|both| &both.memory)).await.unwrap().remove(0).unwrap();
        let of = delivery.map(|at| (&self.made[at].0, seen(&self.made[at].1.ours)));
        self.story.add(format_args!("claim {id} by {} for {of:?}: {ours:?}", request.owner));
        assert_eq!(seen_claim(&ours), seen_claim(&memory), "claim of {id}");
        if let (Claim::Granted(ours), Claim::Granted(memory)) = (ours, memory) {
            self.granted.push((id, Both { ours, memory }));
        }
    }

    async fn end_or_resolve(&mut self) {
        let ending = self.ending();
        let Some(at) = self.granted.len().checked_sub(1).map(|last| last - self.rng.usize(0..=last.min(3)))
        else {
            return;
        };
        let (id, both) = &self.granted[at];
        if self.rng.u8(0..3) == 0 {
            let ours = self.stores.ours.resolve(id, Resolution::Absent, "test").await;
            self.story.add(format_args!("resolve {id}: {ours:?}"));
            assert_eq!(
                ours,
                self.stores.memory.resolve(id, Resolution::Absent, "test").await,
                "resolve {id}"
            );
            return;
        }
        let end = |grant: &Grant| {
            vec![EndClaim { id: id.clone(), token: grant.token.clone(), ending: ending.clone() }]
        };
        let ours = self.stores.ours.end(end(&both.ours)).await;
        self.story.add(format_args!("{ending:?} of {id}: {ours:?}"));
        assert_eq!(ours, self.stores.memory.end(end(&both.memory)).await, "{ending:?} of {id}");
    }

    async fn compare(&self) {
        let Both { ours, memory } = &self.stores;
        for queue in QUEUES.map(name) {
            // A store may look at the first in each line, which need not be the one that was sent first.
            let without_age = |stats| QueueStats { oldest_sent_ms: None, ..stats };
            let (here, there) = (ours.stats(&queue).await.unwrap(), memory.stats(&queue).await.unwrap());
            assert_eq!(without_age(here), without_age(there), "{queue}");
            let mut halted = ours.halted_groups(&queue).await.unwrap();
            halted.sort_unstable();
            assert_eq!(halted, memory.halted_groups(&queue).await.unwrap(), "{queue}");
        }
        let (ours, memory) = (ours.ledger_stats().await.unwrap(), memory.ledger_stats().await.unwrap());
        let counts =
            |stats: hapax_core::LedgerStats| hapax_core::LedgerStats { entries: 0, pruned: 0, ..stats };
        // When an entry whose time is over is pruned is the store's choice.
        assert_eq!(counts(ours), counts(memory));
    }

    async fn advance(&mut self) {
        let ms = [1, 100, 500, 999, 2_000, 3_500][self.rng.usize(0..6)];
        self.story.add(format_args!("{ms} ms"));
        self.clock.advance_ms(ms);
        self.subject.clock_moved(&*self.stores.ours).await;
    }

    async fn step(&mut self) {
        match self.rng.u8(0..30) {
            0..6 => self.send().await,
            6..12 => self.receive().await,
            12..18 => self.settle().await,
            18..20 => self.extend().await,
            20..22 => self.release_or_discard().await,
            22 => self.release_group().await,
            23..25 => self.claim().await,
            25..27 => self.end_or_resolve().await,
            _ => self.advance().await,
        }
        self.compare().await;
    }
}
