//! A worker that is told to stop finishes its running deliveries within a timeout. Those that do not end by then are
//! put back or left to their lease, and the report says so.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use common::{Rig, until};
use hapax_core::{EntryId, EntryState, Ledger as _, MessageState, NewMessage, Tier};
use hapax_worker::Cx;

#[tokio::test]
async fn what_ends_in_time_is_settled() {
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
async fn what_does_not_is_put_back_or_left() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::tier(tier).await;
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
        let builder = rig.builder().handler(handler).drain(Duration::from_millis(100));
        let worker = builder.lease(Duration::from_millis(2_500)).build().await.unwrap();
        let stop = async { until("both run", async || started.load(Ordering::SeqCst) == 2).await };
        let begun = Instant::now();
        let report = worker.run(stop).await.unwrap();
        assert!(begun.elapsed() < Duration::from_secs(8), "the bound holds");
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
        until("the lease runs out: no heartbeat goes on", async || {
            found("\"blocks\"", &rig.messages("jobs").await).0 == MessageState::Ready
        })
        .await;
        end.store(true, Ordering::SeqCst);
    }
}

#[tokio::test]
async fn a_dropped_worker_settles_nothing_more() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    rig.send(NewMessage::new("1")).await;
    let started = Arc::<AtomicBool>::default();
    let handler = {
        let started = started.clone();
        move |_: u32, _: Cx| {
            started.store(true, Ordering::SeqCst);
            async { tokio::time::sleep(Duration::from_millis(300)).await }
        }
    };
    let worker = rig.builder().handler(handler).lease(Duration::from_millis(700)).build().await.unwrap();
    let running = tokio::spawn(worker.run(std::future::pending()));
    until("it runs", async || started.load(Ordering::SeqCst)).await;
    running.abort();
    until("the message returns by its lease", async || rig.stats().await.totals.expired == 1).await;
    assert_eq!(rig.stats().await.totals.acked, 0);
}
