//! A store or a ledger that does not answer: the outcomes of runs are recorded once it answers again, other messages
//! wait, and nothing happens twice.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::time::{manual_clock, ticking};
use common::{Rig, TestSource, run_until, until, wait_for};
use hapax_core::{NewMessage, QueueConfig, Tier};
use hapax_worker::Cx;

const LEASE: Duration = Duration::from_secs(15);
const STEP: Duration = Duration::from_millis(50);

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
    let ledger = Arc::new(common::TestLedger::on_clock(clock.clone()));
    ledger.unanswered.store(6, Ordering::SeqCst);
    let id = hapax_core::EntryId::new("shop".parse().unwrap(), "order-7".parse().unwrap());
    let once = || {
        let once = hapax_worker::Idempotent::new(ledger.clone(), id.clone()).clock(clock.clone());
        once.lease(LEASE).on_doubt(hapax_core::OnDoubt::Park).wait(Duration::ZERO)
    };
    let lost = ticking(&clock, STEP, once().run(async |_| Ok::<u32, String>(7))).await.unwrap_err();
    assert!(matches!(lost, hapax_worker::IdempotentError::Ledger(_)), "{lost}");
    let runs = until("it runs, and is never in doubt", async || {
        match once().run(async |run| Ok::<_, String>(run.is_takeover())).await {
            Ok(takeover) => {
                assert!(!takeover);
                true
            }
            Err(hapax_worker::IdempotentError::InProgress { .. }) => false,
            Err(error) => panic!("{error}"),
        }
    });
    ticking(&clock, STEP, runs).await;
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
            while beats.1.load(Ordering::SeqCst) < 4 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        }
    };
    // Long enough for the heartbeat thread to print the panic message.
    let builder = rig.builder().source(source).handler(slow).lease(Duration::from_secs(3));
    let report = run_until(builder.build().await.unwrap(), |counts| counts.done == 1).await;
    assert_eq!((report.counts.lost_leases, rig.stats().await.totals.expired), (0, 0), "{report:?}");
}
