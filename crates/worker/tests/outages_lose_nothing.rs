//! A store or a ledger that does not answer: the outcomes of runs are recorded once it answers again, other messages
//! wait, and nothing happens twice.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::time::{claim_left_ms, manual_clock, pass_leases, ticking};
use common::{Rig, TestLedger, TestSource, run_until, until, wait_for};
use hapax_core::{EntryId, ManualClock, NewMessage, QueueConfig, Tier};
use hapax_worker::{Cx, Idempotent, IdempotentError};
use tokio::sync::Notify;

const LEASE: Duration = Duration::from_secs(15);
const STEP: Duration = Duration::from_millis(50);
/// Long beside the time that passes while calls are repeated.
const LONG: Duration = Duration::from_hours(1);
const LONG_MS: u64 = LONG.as_millis() as u64;

type Answer = std::future::Ready<Result<u32, String>>;

fn counting() -> (Arc<AtomicU32>, impl Fn(u32, Cx) -> Answer + Send + Sync + Clone) {
    let runs = Arc::<AtomicU32>::default();
    let counted = runs.clone();
    let handler = move |_: u32, _: Cx| {
        counted.fetch_add(1, Ordering::SeqCst);
        std::future::ready(Ok(7))
    };
    (runs, handler)
}

#[tokio::test]
async fn a_settle_without_an_answer_is_repeated() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::tier(tier).await;
        let source = TestSource::new(&rig);
        source.unanswered.store(3, Ordering::SeqCst);
        rig.send(NewMessage::new("1")).await;
        let (runs, handler) = counting();
        let worker = rig.builder().source(source.clone()).handler(handler).build().await.unwrap();
        let report = run_until(worker, |counts| counts.done == 1).await;
        assert!(report.drained, "{report:?}");
        assert_eq!((report.counts.settle_repeats, report.counts.stale_settles), (3, 0), "{tier:?}");
        assert_eq!(source.settle_calls.load(Ordering::SeqCst), 4);
        let totals = rig.stats().await.totals;
        assert_eq!((totals.acked, totals.delivered, runs.load(Ordering::SeqCst)), (1, 1, 1));
    }
}

#[tokio::test]
async fn a_settle_waits_for_the_store_and_its_lease_is_kept() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let source = TestSource::new(&rig);
    rig.send(NewMessage::new("1")).await;
    let (runs, handler) = counting();
    let down = source.clone();
    let handler = move |number: u32, cx: Cx| {
        down.down.store(true, Ordering::SeqCst);
        handler(number, cx)
    };
    let builder = rig.builder().source(source.clone()).handler(handler);
    let worker = builder.lease(Duration::from_secs(5)).build().await.unwrap();
    let watch = worker.watch();
    let back = async {
        wait_for(&watch, |counts| counts.settle_repeats >= 2).await;
        source.down.store(false, Ordering::SeqCst);
        until("it is acked", async || rig.stats().await.totals.acked == 1).await;
    };
    worker.run(back).await.unwrap();
    assert_eq!((runs.load(Ordering::SeqCst), rig.stats().await.totals.expired), (1, 0));
}

#[tokio::test]
async fn without_its_ledger_nothing_runs() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    rig.elsewhere.down.store(true, Ordering::SeqCst);
    rig.send(NewMessage::new("1")).await;
    let (runs, handler) = counting();
    let worker = rig.builder_elsewhere().handler(handler).build().await.unwrap();
    let watch = worker.watch();
    let back = async {
        wait_for(&watch, |counts| counts.fail_closed == 2).await;
        assert_eq!(runs.load(Ordering::SeqCst), 0, "closed by default");
        rig.elsewhere.down.store(false, Ordering::SeqCst);
        wait_for(&watch, |counts| counts.done == 1).await;
    };
    let report = worker.run(back).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let totals = rig.stats().await.totals;
    assert_eq!((totals.retried, totals.expired), (0, 0), "no attempt is counted: {report:?}");
}

#[tokio::test]
async fn a_claim_and_a_completion_without_an_answer_are_repeated() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let key = "order-7".parse().unwrap();
    rig.send(NewMessage::new("1").idempotency_key(&key)).await;
    let (runs, handler) = counting();
    rig.elsewhere.unanswered.store(2, Ordering::SeqCst);
    let ledger = rig.elsewhere.clone();
    let losing = move |number: u32, cx: Cx| {
        assert!(!cx.is_takeover(), "the same owner gets the same claim");
        ledger.unanswered.store(2, Ordering::SeqCst);
        handler(number, cx)
    };
    let worker = rig.builder_elsewhere().handler(losing).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 1).await;
    assert_eq!((report.drained, report.counts.stale_settles, report.counts.fail_closed), (true, 0, 0));
    assert_eq!(rig.stats().await.totals.acked, 1);

    rig.send(NewMessage::new("1").idempotency_key(&key)).await;
    let (_, handler) = counting();
    let worker = rig.builder_elsewhere().handler(handler).build().await.unwrap();
    run_until(worker, |counts| counts.replayed == 1).await;
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// Nothing ran under a claim whose every answer was lost, so its message is neither parked nor a takeover.
#[tokio::test]
async fn a_claim_whose_every_answer_was_lost_is_no_doubt() {
    let clock = manual_clock();
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    rig.elsewhere.unanswered.store(6, Ordering::SeqCst);
    rig.send(NewMessage::new("1")).await;
    let (runs, handler) = counting();
    let told = move |number: u32, cx: Cx| {
        assert!(!cx.is_takeover(), "no run was before it");
        handler(number, cx)
    };
    let builder = rig.builder_elsewhere().handler(told).on_doubt(hapax_core::OnDoubt::Park);
    // Shorter than a wait in the ledger: the lost claim lapses while the next delivery waits, unless it is released.
    let worker = builder.clock(clock.clone()).lease(LEASE).build().await.unwrap();
    let running = run_until(worker, |counts| counts.done + counts.parked == 1);
    let report = ticking(&clock, STEP, running).await;
    assert_eq!((report.counts.parked, report.counts.in_doubt, report.counts.panics), (0, 0, 0), "{report:?}");
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}

/// The same for a call without a queue.
#[tokio::test]
async fn an_idempotent_call_whose_every_answer_was_lost_is_no_doubt() {
    let clock = manual_clock();
    let ledger = Arc::new(TestLedger::on_clock(clock.clone()));
    ledger.unanswered.store(6, Ordering::SeqCst);
    let id = EntryId::new("shop".parse().unwrap(), "order-7".parse().unwrap());
    let once = || {
        let once = Idempotent::new(ledger.clone(), id.clone()).clock(clock.clone());
        once.lease(LEASE).on_doubt(hapax_core::OnDoubt::Park).wait(Duration::ZERO)
    };
    let lost = ticking(&clock, STEP, once().run(async |_| Ok::<u32, String>(7))).await.unwrap_err();
    assert!(matches!(lost, IdempotentError::Ledger(_)), "{lost}");
    let runs = until("it runs, and is never in doubt", async || {
        match once().run(async |run| Ok::<_, String>(run.is_takeover())).await {
            Ok(takeover) => {
                assert!(!takeover);
                true
            }
            Err(IdempotentError::InProgress { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    });
    ticking(&clock, STEP, runs).await;
}

/// Two heartbeats fail, the first when a third of the lease has passed, and the third one gets through.
async fn fail_twice(clock: &ManualClock, failures: impl Fn() -> u32, down: impl Fn(bool)) {
    let before = failures();
    down(true);
    clock.advance_ms(LONG_MS * 2 / 5);
    until("a heartbeat fails", async || failures() > before).await;
    clock.advance_ms(LONG_MS / 10);
    until("it fails again", async || failures() > before + 1).await;
    down(false);
    clock.advance_ms(LONG_MS / 10);
}

/// An outage that begins and ends while a handler runs costs nothing, be it the ledger's, the queue's, or both.
#[tokio::test]
async fn heartbeats_that_fail_are_repeated_while_the_lease_lasts() {
    for (ledger_down, source_down) in [(true, false), (false, true), (true, true)] {
        let clock = manual_clock();
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
        let rig = Rig::on_clock(config, clock.clone()).await;
        let source = TestSource::new(&rig);
        rig.send(NewMessage::new("1")).await;
        let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (begun, wait) = (started.clone(), go_on.clone());
        let handler = move |_: u32, _: Cx| {
            let (begun, wait) = (begun.clone(), wait.clone());
            async move {
                begun.notify_one();
                wait.notified().await;
            }
        };
        let builder = rig.builder_elsewhere().source(source.clone()).handler(handler);
        let worker = builder.clock(clock.clone()).lease(LONG).concurrency(1).build().await.unwrap();
        let watch = worker.watch();
        let outage = async {
            started.notified().await;
            let down = |down: bool| {
                rig.elsewhere.down.store(down && ledger_down, Ordering::SeqCst);
                source.down.store(down && source_down, Ordering::SeqCst);
            };
            let failures = || u32::try_from(watch.counts().heartbeat_errors).expect("a few");
            fail_twice(&clock, failures, down).await;
            let left_ms =
                async || rig.delivery_left_ms(&clock).await.min(claim_left_ms(rig.elsewhere.as_ref()).await);
            until("both leases are renewed", async || left_ms().await > LONG_MS / 2).await;
            pass_leases(&clock, LONG, 2, left_ms).await;
            go_on.notify_one();
            wait_for(&watch, |counts| counts.done == 1).await;
        };
        let report = worker.run(outage).await.unwrap();
        let totals = rig.stats().await.totals;
        let case = format!("ledger {ledger_down}, queue {source_down}: {report:?}");
        assert_eq!((report.counts.lost_leases, totals.expired, totals.acked), (0, 0, 1), "{case}");
    }
}

#[tokio::test]
async fn an_idempotent_call_outlives_an_outage_of_its_ledger() {
    let clock = manual_clock();
    let ledger = Arc::new(TestLedger::on_clock(clock.clone()));
    let id = EntryId::new("shop".parse().unwrap(), "order-7".parse().unwrap());
    let once = Idempotent::new(ledger.clone(), id).clock(clock.clone()).lease(LONG);
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begun, wait) = (started.clone(), go_on.clone());
    let running = tokio::spawn(once.run(async move |_| {
        begun.notify_one();
        wait.notified().await;
        Ok::<u32, String>(7)
    }));
    started.notified().await;
    let failures = || ledger.calls.load(Ordering::SeqCst);
    fail_twice(&clock, failures, |down| ledger.down.store(down, Ordering::SeqCst)).await;
    let left_ms = async || claim_left_ms(ledger.as_ref()).await;
    until("the claim is renewed", async || left_ms().await > LONG_MS / 2).await;
    pass_leases(&clock, LONG, 2, left_ms).await;
    go_on.notify_one();
    assert_eq!(running.await.unwrap().unwrap(), 7, "it was not stopped");
}

/// An outage that outlasts the lease stops the call: another one may hold the key by then.
#[tokio::test]
async fn an_idempotent_call_stops_when_an_outage_outlasts_its_lease() {
    let clock = manual_clock();
    let ledger = Arc::new(TestLedger::on_clock(clock.clone()));
    let id = EntryId::new("shop".parse().unwrap(), "order-7".parse().unwrap());
    let once = Idempotent::new(ledger.clone(), id).clock(clock.clone()).lease(LONG);
    let started = Arc::new(Notify::new());
    let begun = started.clone();
    let running = tokio::spawn(once.run(async move |_| {
        begun.notify_one();
        std::future::pending::<Result<u32, String>>().await
    }));
    started.notified().await;
    let calls = || ledger.calls.load(Ordering::SeqCst);
    let before = calls();
    ledger.down.store(true, Ordering::SeqCst);
    clock.advance_ms(LONG_MS * 2 / 5);
    until("a heartbeat fails", async || calls() > before).await;
    clock.advance_ms(LONG_MS * 7 / 10);
    let ended =
        tokio::time::timeout(common::TIMEOUT, ticking(&clock, STEP, running)).await.expect("it stops");
    let lost = ended.unwrap().unwrap_err();
    // What became of it cannot be recorded, either.
    assert!(matches!(lost, IdempotentError::Lost | IdempotentError::NotRecorded(_)), "{lost:?}");
}

#[tokio::test]
async fn a_worker_whose_queue_is_deleted_says_so() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let (_, handler) = counting();
    let worker = rig.builder().handler(handler).build().await.unwrap();
    let running = tokio::spawn(worker.run(std::future::pending()));
    hapax_core::QueueAdmin::delete_queue(&*rig.store, &rig.queue).await.unwrap();
    let stopped = tokio::time::timeout(common::TIMEOUT, running).await.unwrap().unwrap().unwrap_err();
    assert_eq!(stopped.error.code(), "no-such-queue");
    assert!(stopped.report.drained && stopped.to_string().contains("queue jobs"), "{stopped}");
}

/// After a heartbeat that panics inside the user's source, heartbeats continue.
#[tokio::test]
async fn a_heartbeat_that_panics_is_followed_by_others() {
    struct Panics(Arc<TestSource>, AtomicU32);

    #[async_trait::async_trait]
    impl hapax_core::Source for Panics {
        async fn describe(&self) -> Result<hapax_core::SourceDescription, hapax_core::StoreError> {
            self.0.describe().await
        }
        async fn next(
            &self,
            receive: hapax_core::Receive,
        ) -> Result<Vec<hapax_core::Delivery>, hapax_core::StoreError> {
            self.0.next(receive).await
        }
        async fn settle(
            &self,
            batch: Vec<hapax_core::Settle>,
        ) -> hapax_core::Batch<hapax_core::Settled, hapax_core::SettleError> {
            self.0.settle(batch).await
        }
        async fn extend(
            &self,
            batch: Vec<hapax_core::Extend>,
        ) -> hapax_core::Batch<hapax_core::RemainingLease, hapax_core::SettleError> {
            assert!(self.1.fetch_add(1, Ordering::SeqCst) > 0, "the first heartbeat panics");
            self.0.extend(batch).await
        }
    }

    let rig = Rig::tier(Tier::AtLeastOnce).await;
    rig.send(NewMessage::new("1")).await;
    let source = Arc::new(Panics(TestSource::new(&rig), 0.into()));
    let beats = source.clone();
    let slow = move |_: u32, _: Cx| {
        let beats = beats.clone();
        async move {
            while beats.1.load(Ordering::SeqCst) < 3 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    };
    // Long enough for the heartbeat thread to print the panic message, also on a busy machine.
    let builder = rig.builder().source(source).handler(slow).lease(Duration::from_secs(9));
    let report = run_until(builder.build().await.unwrap(), |counts| counts.done == 1).await;
    assert_eq!((report.counts.lost_leases, rig.stats().await.totals.expired), (0, 0), "{report:?}");
}
