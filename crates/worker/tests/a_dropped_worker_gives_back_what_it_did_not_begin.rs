//! A worker that is dropped, or ends, after a claim was granted and before the handler began has done nothing: the claim is
//! given back. Under `park` each such key would otherwise wait for an operator, though nothing ran.

mod common;

use std::pin::Pin;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Rig, TIMEOUT, run_until, until};
use hapax_core::{
    DedupId, EntryFilter, GroupId, Ledger, ManualClock, NewMessage, OnDoubt, QueueConfig, Tier,
};
use hapax_worker::{Cx, HandlerOutcome, Point, WorkerBuilder};

const LEASE: Duration = Duration::from_mins(10);
const MESSAGES: u32 = 4;

#[derive(Debug, Clone, Copy)]
struct Case {
    fifo: bool,
    batch: bool,
    own_ledger: bool,
    at: Point,
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for at in [Point::AfterClaim, Point::BeforeEffect] {
        for bits in 0..8 {
            cases.push(Case { fifo: bits & 1 != 0, batch: bits & 2 != 0, own_ledger: bits & 4 != 0, at });
        }
    }
    cases
}

struct Bench {
    rig: Rig,
    clock: Arc<ManualClock>,
    runs: Arc<AtomicU32>,
    case: Case,
}

impl Bench {
    /// A queue with messages in two groups, each with a key of its own.
    async fn new(case: Case) -> Self {
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let config = if case.fifo { QueueConfig::fifo() } else { QueueConfig::sqs() };
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..config };
        let rig = Rig::on_clock(config, clock.clone()).await;
        for number in 0..MESSAGES {
            let message = NewMessage::new(number.to_string())
                .idempotency_key(&format!("order-{number}").parse().unwrap());
            let in_group = || {
                let group = GroupId::new(format!("group-{}", number % 2)).unwrap();
                message.clone().group(group).dedup(DedupId::new(number.to_string()).unwrap())
            };
            rig.send(if case.fifo { in_group() } else { message.clone() }).await;
        }
        Self { rig, clock, runs: Arc::default(), case }
    }

    fn builder(&self) -> WorkerBuilder {
        let rig = &self.rig;
        let builder = if self.case.own_ledger { rig.builder() } else { rig.builder_elsewhere() };
        let builder = builder.clock(self.clock.clone()).on_doubt(OnDoubt::Park).lease(LEASE);
        let runs = self.runs.clone();
        if self.case.batch {
            builder.batch_handler(10, move |numbers: Vec<(u32, Cx)>| {
                runs.fetch_add(numbers.len() as u32, Ordering::SeqCst);
                async move { numbers.iter().map(|_| HandlerOutcome::Done(())).collect::<Vec<_>>() }
            })
        } else {
            builder.handler(move |_: u32, _: Cx| {
                runs.fetch_add(1, Ordering::SeqCst);
                async {}
            })
        }
    }

    fn ledger(&self) -> Arc<dyn Ledger> {
        if self.case.own_ledger { self.rig.store.clone() } else { self.rig.elsewhere.clone() }
    }

    /// Lets the clock run while something waits on it.
    async fn with_time<T>(&self, future: impl Future<Output = T>) -> T {
        let running = async {
            loop {
                self.clock.advance_ms(10);
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::select! {
            value = future => value,
            () = running => unreachable!("it runs until the other one ends"),
        }
    }

    /// No claim is left, and another worker under `park` runs every message.
    async fn nothing_is_left(&self) {
        assert_eq!(self.runs.load(Ordering::SeqCst), 0, "{:?}: nothing ran", self.case);
        let ledger = self.ledger();
        let entries = async || {
            ledger.entries(EntryFilter { limit: 100, ..EntryFilter::default() }).await.unwrap().items
        };
        let given_back = until("the claims are given back", async || entries().await.is_empty());
        let given_back = tokio::time::timeout(TIMEOUT, given_back).await;
        assert!(given_back.is_ok(), "{:?}: claims are left: {:?}", self.case, entries().await);
        self.clock.advance_ms(LEASE.as_millis() as u64 + 1);
        let worker = self.builder().build().await.unwrap();
        let ended = run_until(worker, |counts| counts.done + counts.parked >= u64::from(MESSAGES));
        let counts = self.with_time(ended).await.counts;
        assert_eq!(
            (counts.done, counts.parked, counts.takeovers),
            (MESSAGES.into(), 0, 0),
            "{:?}",
            self.case
        );
        assert_eq!(self.rig.stats().await.totals.acked, u64::from(MESSAGES), "{:?}", self.case);
    }
}

type Running = Pin<Box<dyn Future<Output = ()> + Send>>;

#[tokio::test]
async fn when_its_run_is_dropped() {
    for case in cases() {
        let bench = Bench::new(case).await;
        // The hook drops the run in the middle of the delivery's own task, so that nothing else happens in between.
        let running = Arc::new(Mutex::new(None::<Running>));
        let dropped = running.clone();
        let hook = move |point| {
            if point == case.at {
                drop(dropped.lock().unwrap().take());
            }
        };
        let worker = bench.builder().hook(hook).build().await.unwrap();
        *running.lock().unwrap() = Some(Box::pin(async move {
            worker.run(std::future::pending()).await.unwrap();
        }));
        let driving = std::future::poll_fn(|cx| match running.lock().unwrap().as_mut() {
            Some(running) => running.as_mut().poll(cx),
            None => std::task::Poll::Ready(()),
        });
        // The hook wakes nothing: look again now and then.
        let looking = until("it is dropped", async || running.lock().unwrap().is_none());
        let either = async {
            tokio::select! {
                () = driving => {}
                () = looking => {}
            }
        };
        tokio::time::timeout(TIMEOUT, either).await.unwrap();
        bench.nothing_is_left().await;
    }
}

/// The drain gives up before the ledger has answered: the answer finds no worker that could settle.
#[tokio::test]
async fn when_its_drain_ends_before_the_ledger_answers() {
    for (fifo, batch) in [(false, false), (true, false), (false, true), (true, true)] {
        let bench = Bench::new(Case { fifo, batch, own_ledger: false, at: Point::AfterClaim }).await;
        let hold = bench.rig.elsewhere.hold_claims();
        let worker = bench.builder().drain(Duration::ZERO).build().await.unwrap();
        let claimed = async || bench.rig.elsewhere.ledger_stats().await.unwrap().granted > 0;
        let stop = until("keys are claimed", claimed);
        let report = bench.with_time(worker.run(stop)).await.unwrap();
        assert!(!report.drained, "{report:?}");
        drop(hold);
        bench.nothing_is_left().await;
    }
}

/// The runtime is dropped with the tasks of the worker: those that were to run what is claimed have not been polled yet.
#[test]
fn when_its_runtime_is_dropped() {
    for own_ledger in [false, true] {
        let case = Case { fifo: false, batch: false, own_ledger, at: Point::AfterClaim };
        let outside = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let bench = outside.block_on(Bench::new(case));
        // It looks at the test's future after each step of a task.
        let inside =
            tokio::runtime::Builder::new_current_thread().enable_all().event_interval(1).build().unwrap();
        let claimed = Arc::new(tokio::sync::Notify::new());
        let tell = claimed.clone();
        let hook = move |point| {
            if point == case.at {
                tell.notify_one();
            }
        };
        let worker = outside.block_on(bench.builder().hook(hook).build()).unwrap();
        inside.block_on(async move {
            tokio::spawn(worker.run(std::future::pending()));
            tokio::time::timeout(TIMEOUT, claimed.notified()).await.expect("a key is claimed");
        });
        drop(inside);
        outside.block_on(bench.nothing_is_left());
    }
}
