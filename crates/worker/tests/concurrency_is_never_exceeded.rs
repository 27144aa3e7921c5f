//! No more handlers run at once than `concurrency` says, also when a delivery that waited for its duplicate starts while a
//! receive is open; and a worker that drains waits for each delivery that it has.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Rig, TIMEOUT, until, wait_for};
use hapax_core::{DedupId, GroupId, Ledger as _, MessageState, NewMessage, QueueConfig, Tier};
use hapax_worker::{Cx, HandlerOutcome, StopWhen, WorkerBuilder};
use tokio::sync::Semaphore;

/// Far longer than a test may take.
const LEASE: Duration = Duration::from_mins(10);

/// Counts the calls of a handler that are under way, and holds each up until it is let go on.
#[derive(Clone)]
struct Calls {
    now: Arc<AtomicUsize>,
    most: Arc<AtomicUsize>,
    go_on: Arc<Semaphore>,
}

impl Calls {
    fn new() -> Self {
        Self { now: Arc::default(), most: Arc::default(), go_on: Arc::new(Semaphore::new(0)) }
    }

    async fn pass(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        self.go_on.acquire().await.unwrap().forget();
        self.now.fetch_sub(1, Ordering::SeqCst);
    }

    fn now(&self) -> usize {
        self.now.load(Ordering::SeqCst)
    }

    async fn is_running(&self) {
        until("a handler runs", async || self.now() > 0).await;
    }

    /// Another one would have begun by now.
    async fn is_alone(&self) {
        for _ in 0..200 {
            assert!(self.now() <= 1, "{} handlers at once", self.now());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Has it called for each message, or for many at once.
    fn handle(&self, builder: WorkerBuilder, batch: bool) -> WorkerBuilder {
        let calls = self.clone();
        if batch {
            return builder.batch_handler(10, move |numbers: Vec<(u32, Cx)>| {
                let calls = calls.clone();
                async move {
                    calls.pass().await;
                    numbers.iter().map(|_| HandlerOutcome::Done(())).collect::<Vec<_>>()
                }
            });
        }
        builder.handler(move |_: u32, _: Cx| {
            let calls = calls.clone();
            async move { calls.pass().await }
        })
    }
}

fn message(key: &str, group: Option<&str>) -> NewMessage {
    let message = NewMessage::new("1").idempotency_key(&key.parse().unwrap());
    match group {
        Some(group) => message.group(GroupId::new(group).unwrap()).dedup(DedupId::new(group).unwrap()),
        None => message,
    }
}

/// A worker elsewhere that holds the key `duplicate` until the returned permit is added, then ends as told.
async fn duplicate_elsewhere(
    rig: &Rig,
    group: Option<&str>,
    ends: HandlerOutcome<()>,
) -> (Arc<Semaphore>, tokio::task::JoinHandle<()>) {
    let calls = Calls::new();
    let go_on = calls.go_on.clone();
    let running = calls.clone();
    let handler = move |_: u32, _: Cx| {
        let (calls, ends) = (calls.clone(), ends.clone());
        async move {
            calls.pass().await;
            ends
        }
    };
    let builder = rig.builder().handler(handler).lease(LEASE).stop_when(StopWhen::AfterOne);
    let worker = builder.build().await.unwrap();
    rig.send(message("duplicate", group)).await;
    let task = tokio::spawn(async move {
        worker.run(std::future::pending()).await.unwrap();
    });
    running.is_running().await;
    (go_on, task)
}

async fn one_at_a_time(fifo: bool, batch: bool) {
    let config = if fifo { QueueConfig::fifo() } else { QueueConfig::sqs() };
    let rig = Rig::new(QueueConfig { tier: Tier::EffectivelyOnce, ..config }).await;
    let group = |name: &'static str| fifo.then_some(name);
    let ends = HandlerOutcome::retry_after(Duration::from_mins(5), "not now");
    let (go_on, elsewhere) = duplicate_elsewhere(&rig, group("first"), ends).await;

    let calls = Calls::new();
    let worker = calls.handle(rig.builder().concurrency(1).lease(LEASE), batch).build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        rig.send(message("duplicate", group("second"))).await;
        let received = async || rig.stats().await.in_flight == 2;
        until("the duplicate is received", received).await;
        // It is woken while the next receive is open, and takes the slot.
        tokio::time::sleep(Duration::from_millis(50)).await;
        go_on.add_permits(1);
        elsewhere.await.unwrap();
        calls.is_running().await;
        for name in ["third", "fourth", "fifth"] {
            rig.send(message(name, group(name))).await;
        }
        calls.is_alone().await;
        calls.go_on.add_permits(100);
        wait_for(&watch, |counts| counts.done == 4).await;
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!(calls.most.load(Ordering::SeqCst), 1, "fifo {fifo}, batch {batch}");
}

#[tokio::test]
async fn in_a_standard_queue() {
    one_at_a_time(false, false).await;
}

#[tokio::test]
async fn in_a_fifo_queue() {
    one_at_a_time(true, false).await;
}

#[tokio::test]
async fn in_batches() {
    one_at_a_time(false, true).await;
}

#[tokio::test]
async fn in_batches_of_a_fifo_queue() {
    one_at_a_time(true, true).await;
}

/// A batch of a FIFO queue has one group: what one receive brings of several groups takes turns.
#[tokio::test]
async fn with_groups_that_one_receive_brought() {
    let rig = Rig::new(QueueConfig { tier: Tier::AtLeastOnce, ..QueueConfig::fifo() }).await;
    for name in ["a", "b", "c", "d"] {
        rig.send(message(name, Some(name))).await;
    }
    let calls = Calls::new();
    let worker = calls.handle(rig.builder().concurrency(1).lease(LEASE), true).build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        calls.is_running().await;
        calls.is_alone().await;
        calls.go_on.add_permits(100);
        wait_for(&watch, |counts| counts.done == 4).await;
    };
    tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert_eq!(calls.most.load(Ordering::SeqCst), 1);
}

/// A turn of a key that is handed on by a delivery without a slot.
#[tokio::test]
async fn with_a_run_permit_that_is_passed_on() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let (go_on, elsewhere) = duplicate_elsewhere(&rig, None, HandlerOutcome::Done(())).await;
    let calls = Calls::new();
    let builder = rig.builder().concurrency(1).lease(LEASE).per_group(1);
    let worker = calls.handle(builder, false).build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        rig.send(message("duplicate", None).group(GroupId::new("hot").unwrap())).await;
        wait_for(&watch, |counts| counts.delivered == 1).await;
        rig.send(message("second", None).group(GroupId::new("hot").unwrap())).await;
        wait_for(&watch, |counts| counts.delivered == 2).await;
        rig.send(message("third", None)).await;
        calls.is_running().await;
        go_on.add_permits(1);
        elsewhere.await.unwrap();
        wait_for(&watch, |counts| counts.replayed == 1).await;
        calls.is_alone().await;
        calls.go_on.add_permits(100);
        wait_for(&watch, |counts| counts.done == 2).await;
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!(calls.most.load(Ordering::SeqCst), 1);
}

/// What waits for a slot is put back when the worker ends, before what runs has ended.
#[tokio::test]
async fn a_drain_puts_back_what_waits_for_a_slot() {
    let rig = Rig::new(QueueConfig { tier: Tier::AtLeastOnce, ..QueueConfig::fifo() }).await;
    for name in ["a", "b", "c"] {
        rig.send(message(name, Some(name))).await;
    }
    let calls = Calls::new();
    let worker = calls.handle(rig.builder().concurrency(1).lease(LEASE), true).build().await.unwrap();
    let then = async {
        until("two are put back", async || rig.stats().await.ready == 2).await;
        calls.go_on.add_permits(100);
    };
    let both = async { tokio::join!(worker.run(calls.is_running()), then).0 };
    let report = tokio::time::timeout(TIMEOUT, both).await.unwrap().unwrap();
    assert_eq!((report.drained, report.counts.done, report.put_back), (true, 1, 2), "{report:?}");
    let stats = rig.stats().await;
    assert_eq!((stats.in_flight, stats.ready, stats.totals.acked), (0, 2, 1), "{stats:?}");
}

/// A claim that is under way when the worker is told to stop, and finds a running duplicate: the delivery goes back at once.
#[tokio::test]
async fn a_drain_waits_for_a_delivery_that_meets_a_duplicate_meanwhile() {
    for (fifo, batch) in [(false, false), (true, false), (false, true), (true, true)] {
        let config = if fifo { QueueConfig::fifo() } else { QueueConfig::sqs() };
        let rig = Rig::new(QueueConfig { tier: Tier::EffectivelyOnce, ..config }).await;
        let group = |name: &'static str| fifo.then_some(name);
        let busy = Calls::new();
        let builder = rig.builder_elsewhere().lease(LEASE).stop_when(StopWhen::AfterOne);
        let holder = busy.handle(builder, false).build().await.unwrap();
        rig.send(message("duplicate", group("first"))).await;
        let holder = tokio::spawn(holder.run(std::future::pending()));
        busy.is_running().await;

        let hold = rig.elsewhere.hold_claims();
        let builder = rig.builder_elsewhere().lease(LEASE);
        let worker = Calls::new().handle(builder, batch).build().await.unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(worker.run(async {
            let _ = stopped.await;
        }));
        let before = rig.elsewhere.calls.load(Ordering::SeqCst);
        rig.send(message("duplicate", group("second"))).await;
        until("it is asked for", async || rig.elsewhere.calls.load(Ordering::SeqCst) > before).await;
        stop.send(()).unwrap();
        // The drain has begun when the worker has seen the stop.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
        drop(hold);
        let report = tokio::time::timeout(TIMEOUT, running).await.unwrap().unwrap().unwrap();
        assert_eq!((report.drained, report.put_back), (true, 1), "fifo {fifo}, batch {batch}: {report:?}");
        let states: Vec<_> = rig.messages(rig.queue.as_str()).await.iter().map(|one| one.state).collect();
        let ready = states.iter().filter(|state| **state == MessageState::Ready).count();
        assert_eq!(ready, 1, "fifo {fifo}, batch {batch}: it is put back: {states:?}");
        assert_eq!(rig.elsewhere.ledger_stats().await.unwrap().granted, 1);
        holder.abort();
    }
}
