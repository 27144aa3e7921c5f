//! A worker that is told to stop finishes its running deliveries within a timeout. Those that do not end by then are
//! put back or left to their lease, and the report says so.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::time::{manual_clock, ticking};
use common::{Rig, TIMEOUT, until};
use hapax_core::{EntryId, EntryState, Ledger as _, MessageState, NewMessage, QueueConfig, Tier};
use hapax_worker::Cx;

/// Far longer than a drain, which itself needs some time to pass.
const LEASE: Duration = Duration::from_hours(10);
const STEP: Duration = Duration::from_millis(500);

#[tokio::test]
async fn deliveries_that_end_in_time_are_settled() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    for _ in 0..4 {
        rig.send(NewMessage::new("1")).await;
    }
    let (started, go_on) = (Arc::<AtomicU32>::default(), Arc::new(tokio::sync::Semaphore::new(0)));
    let handler = {
        let (started, go_on) = (started.clone(), go_on.clone());
        move |_: u32, _: Cx| {
            let (started, go_on) = (started.clone(), go_on.clone());
            async move {
                started.fetch_add(1, Ordering::SeqCst);
                let _ = go_on.acquire().await.map(tokio::sync::SemaphorePermit::forget);
            }
        }
    };
    let worker = rig.builder().handler(handler).concurrency(3).build().await.unwrap();
    let stop = async {
        until("three run", async || started.load(Ordering::SeqCst) == 3).await;
        go_on.add_permits(3);
    };
    let report = worker.run(stop).await.unwrap();
    assert_eq!((report.drained, report.counts.done, report.put_back, report.left), (true, 3, 0, 0));
    assert_eq!(rig.stats().await.ready, 1, "nothing new was received");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn deliveries_past_the_drain_timeout_are_put_back_or_left() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let clock = manual_clock();
        let rig = Rig::on_clock(QueueConfig { tier, ..QueueConfig::sqs() }, clock.clone()).await;
        rig.send(NewMessage::new("\"awaits\"").idempotency_key(&"awaits".parse().unwrap())).await;
        rig.send(NewMessage::new("\"blocks\"").idempotency_key(&"blocks".parse().unwrap())).await;
        let (started, end) = (Arc::<AtomicU32>::default(), Arc::<AtomicBool>::default());
        let handler = {
            let (started, end) = (started.clone(), end.clone());
            move |word: String, _: Cx| {
                let (started, end) = (started.clone(), end.clone());
                async move {
                    started.fetch_add(1, Ordering::SeqCst);
                    while word == "blocks" && !end.load(Ordering::SeqCst) {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    std::future::pending::<()>().await;
                }
            }
        };
        let builder = rig.builder().handler(handler).clock(clock.clone()).drain(Duration::from_secs(10));
        let worker = builder.lease(LEASE).build().await.unwrap();
        let stop = async { until("both run", async || started.load(Ordering::SeqCst) == 2).await };
        let stopping = tokio::time::timeout(TIMEOUT, worker.run(stop));
        let report = ticking(&clock, STEP, stopping).await.expect("the bound holds").unwrap();
        assert_eq!((report.drained, report.put_back, report.left), (false, 1, 1), "{tier:?}: {report:?}");
        let found = |word: &str, all: &[hapax_core::MessageView]| {
            let message = all.iter().find(|message| message.body.as_ref().unwrap() == word).unwrap();
            (message.state, message.attempts)
        };
        let messages = rig.messages("jobs").await;
        assert_eq!(found("\"awaits\"", &messages), (MessageState::Ready, 0), "put back uncounted");
        assert_eq!(found("\"blocks\"", &messages).0, MessageState::InFlight, "left to its lease");
        if tier == Tier::EffectivelyOnce {
            let id = EntryId::of_queue(&rig.queue, "awaits".parse().unwrap());
            assert_eq!(rig.store.entry(&id).await.unwrap().unwrap().state, EntryState::InDoubt);
        }
        let runs_out = until("the lease runs out: no heartbeat continues", async || {
            found("\"blocks\"", &rig.messages("jobs").await).0 == MessageState::Ready
        });
        ticking(&clock, LEASE / 12, runs_out).await;
        end.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_dropped_worker_settles_nothing_more() {
    let clock = manual_clock();
    let config = QueueConfig { tier: Tier::AtLeastOnce, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    rig.send(NewMessage::new("1")).await;
    let (started, go_on) = (Arc::new(tokio::sync::Notify::new()), Arc::new(tokio::sync::Notify::new()));
    let handler = {
        let (started, go_on) = (started.clone(), go_on.clone());
        move |_: u32, _: Cx| {
            let (started, go_on) = (started.clone(), go_on.clone());
            async move {
                started.notify_one();
                go_on.notified().await;
            }
        }
    };
    let builder = rig.builder().handler(handler).clock(clock.clone());
    let worker = builder.lease(LEASE).build().await.unwrap();
    let running = tokio::spawn(worker.run(std::future::pending()));
    started.notified().await;
    running.abort();
    assert!(running.await.unwrap_err().is_cancelled());
    go_on.notify_one();
    let returns = until("it returns by its lease", async || rig.stats().await.totals.expired == 1);
    ticking(&clock, LEASE / 12, returns).await;
    assert_eq!(rig.stats().await.totals.acked, 0);
}
