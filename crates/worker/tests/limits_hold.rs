//! Concurrency, limits per key, rates and the time limit of a run.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::time::{manual_clock, ticking};
use common::{Rig, TIMEOUT, run_until, until, wait_for};
use hapax_core::{
    DedupId, EntryId, EntryState, GroupId, Ledger as _, ManualClock, NewMessage, OnDoubt, QueueConfig, Tier,
};
use hapax_worker::{Cx, HandlerOutcome};

#[derive(Default)]
struct Running {
    now: BTreeMap<String, usize>,
    most: BTreeMap<String, usize>,
}

impl Running {
    fn begin(&mut self, key: &str) {
        let now = self.now.entry(key.to_owned()).or_default();
        *now += 1;
        let most = self.most.entry(key.to_owned()).or_default();
        *most = (*most).max(*now);
    }

    fn end(&mut self, key: &str) {
        *self.now.get_mut(key).unwrap() -= 1;
    }

    /// Whether as many runs as the limits allow were once seen together: two of the limited group, more without a group.
    fn together(&self, key: &str) -> bool {
        let wanted = match key {
            "hot" => 2,
            "none" => 3,
            _ => 0,
        };
        self.most.get(key).is_some_and(|most| *most >= wanted)
    }
}

async fn per_group(tier: Tier, hot: usize) {
    let rig = Rig::tier(tier).await;
    for number in 0..hot {
        rig.send(NewMessage::new(number.to_string()).group(GroupId::new("hot").unwrap())).await;
    }
    for number in 0..10 {
        rig.send(NewMessage::new(number.to_string()).group(GroupId::new("cold").unwrap())).await;
        rig.send(NewMessage::new(number.to_string())).await;
    }
    let running = Arc::new(Mutex::new(Running::default()));
    let handler = {
        let running = running.clone();
        move |_: u32, cx: Cx| {
            let running = running.clone();
            async move {
                let key = cx.group().map_or("none", GroupId::as_str).to_owned();
                running.lock().unwrap().begin(&key);
                running.lock().unwrap().begin("all");
                while !running.lock().unwrap().together(&key) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                // Time for runs that the limits do not allow.
                tokio::time::sleep(Duration::from_millis(3)).await;
                running.lock().unwrap().end("all");
                running.lock().unwrap().end(&key);
            }
        }
    };
    let builder = rig.builder().handler(handler).concurrency(8).per_group(2);
    let total = (hot + 20) as u64;
    let report = run_until(builder.build().await.unwrap(), |counts| counts.done == total).await;
    assert!(report.drained);
    let most = running.lock().unwrap().most.clone();
    assert_eq!(most["hot"], 2, "{most:?}");
    assert!(most["cold"] <= 2 && most["none"] > 2 && most["all"] <= 8, "{most:?}");
    let totals = rig.stats().await.totals;
    assert_eq!((totals.acked, totals.expired, totals.retried), (total, 0, 0));
}

#[tokio::test]
async fn runs_per_group_are_limited() {
    per_group(Tier::AtLeastOnce, 30).await;
    per_group(Tier::EffectivelyOnce, 30).await;
}

#[tokio::test]
async fn starts_per_second_are_limited() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    for _ in 0..30 {
        rig.send(NewMessage::new("1")).await;
    }
    let (clock, starts) = (manual_clock(), Arc::<AtomicUsize>::default());
    let handler = {
        let starts = starts.clone();
        move |_: u32, _: Cx| {
            starts.fetch_add(1, Ordering::SeqCst);
            async {}
        }
    };
    let builder = rig.builder().handler(handler).clock(clock.clone()).per_second(40.0);
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    // 4 at once, then one every 25 ms.
    let script = async {
        for allowed in 4..=30 {
            wait_for(&watch, |counts| counts.done >= allowed).await;
            assert_eq!(starts.load(Ordering::SeqCst) as u64, allowed);
            clock.advance_ms(25);
        }
    };
    worker.run(script).await.unwrap();
}

/// On a clock that stands still, so that no start is added: those that a retry took back with it have used none up.
#[tokio::test]
async fn what_goes_back_behind_a_retry_uses_no_start() {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let config = QueueConfig { tier: Tier::AtLeastOnce, ..QueueConfig::fifo() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    let message = |group: &str, number: u32| {
        let dedup = DedupId::new(number.to_string()).unwrap();
        NewMessage::new(number.to_string()).group(GroupId::new(group).unwrap()).dedup(dedup)
    };
    for number in 0..3 {
        rig.send(message("a", number)).await;
    }
    let handler = |number: u32, _: Cx| async move {
        if number == 0 {
            return HandlerOutcome::retry_after(Duration::from_mins(5), "not now");
        }
        HandlerOutcome::Done(())
    };
    // Three at once, and then none on this clock.
    let builder = rig.builder().handler(handler).clock(clock).concurrency(3).per_second(30.0);
    let worker = builder.build().await.unwrap();
    let (watch, counters) = (worker.watch(), worker.watch());
    let script = async {
        wait_for(&watch, |counts| counts.retried == 1).await;
        for number in 3..5 {
            rig.send(message("b", number)).await;
        }
        wait_for(&watch, |counts| counts.done == 2).await;
    };
    let ended = tokio::time::timeout(TIMEOUT, worker.run(script)).await;
    let counts = counters.counts();
    assert!(ended.is_ok(), "one start was used of three: {counts:?}");
    assert_eq!((counts.retried, counts.done), (1, 2), "{counts:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_stopped_when_its_time_is_over() {
    const RUN_MAX: Duration = Duration::from_secs(10);
    for on_doubt in [OnDoubt::Retry, OnDoubt::Park] {
        let clock = manual_clock();
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
        let rig = Rig::on_clock(config, clock.clone()).await;
        rig.send(NewMessage::new("1").idempotency_key(&"k".parse().unwrap())).await;
        let (takeovers, dropped) = (Arc::<AtomicUsize>::default(), Arc::<AtomicBool>::default());
        let started = Arc::new(tokio::sync::Notify::new());
        let handler = {
            let (takeovers, dropped, started) = (takeovers.clone(), dropped.clone(), started.clone());
            move |_: u32, cx: Cx| {
                let (takeovers, dropped, started) = (takeovers.clone(), dropped.clone(), started.clone());
                async move {
                    assert!(cx.remaining() <= RUN_MAX, "{:?}", cx.remaining());
                    if cx.is_takeover() {
                        takeovers.fetch_add(1, Ordering::SeqCst);
                        return;
                    }
                    started.notify_one();
                    let canary = scopeguard(move || dropped.store(true, Ordering::SeqCst));
                    std::future::pending::<()>().await;
                    drop(canary);
                }
            }
        };
        let builder = rig.builder().handler(handler).clock(clock.clone()).on_doubt(on_doubt);
        let worker = builder.run_max(RUN_MAX).build().await.unwrap();
        let watch = worker.watch();
        let script = async {
            started.notified().await;
            clock.advance_ms(RUN_MAX.as_millis() as u64);
            wait_for(&watch, |counts| counts.done == 1 || counts.parked == 1).await;
        };
        let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
        assert!(dropped.load(Ordering::SeqCst));
        assert_eq!((report.counts.timeouts, report.counts.lost_leases), (1, 0), "{report:?}");
        let entry =
            rig.store.entry(&EntryId::of_queue(&rig.queue, "k".parse().unwrap())).await.unwrap().unwrap();
        let (state, taken) = match on_doubt {
            OnDoubt::Retry => (EntryState::Completed, 1),
            OnDoubt::Park => (EntryState::InDoubt, 0),
        };
        assert_eq!((entry.state, takeovers.load(Ordering::SeqCst)), (state, taken));
    }
}

/// A handler that never awaits cannot be stopped, but its lease is not renewed forever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heartbeats_end_with_the_time_limit() {
    const LEASE: Duration = Duration::from_mins(1);
    let clock = manual_clock();
    let config = QueueConfig { tier: Tier::AtLeastOnce, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    rig.send(NewMessage::new("1")).await;
    let end = Arc::<AtomicBool>::default();
    let handler = {
        let end = end.clone();
        move |_: u32, cx: Cx| {
            while cx.attempt() == 1 && !end.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(2));
            }
            async {}
        }
    };
    let builder = rig.builder().handler(handler).clock(clock.clone()).run_max(LEASE / 3);
    let worker = builder.lease(LEASE).build().await.unwrap();
    let watch = worker.watch();
    let second = async {
        wait_for(&watch, |counts| counts.delivered == 1).await;
        let expires = until("its lease runs out", async || rig.stats().await.totals.expired == 1);
        ticking(&clock, LEASE / 12, expires).await;
        wait_for(&watch, |counts| counts.done == 1).await;
        assert_eq!(rig.stats().await.totals.expired, 1);
        end.store(true, Ordering::SeqCst);
    };
    worker.run(second).await.unwrap();
}

fn scopeguard(run: impl FnOnce()) -> impl Drop {
    struct Guard<F: FnOnce()>(Option<F>);
    impl<F: FnOnce()> Drop for Guard<F> {
        fn drop(&mut self) {
            if let Some(run) = self.0.take() {
                run();
            }
        }
    }
    Guard(Some(run))
}
