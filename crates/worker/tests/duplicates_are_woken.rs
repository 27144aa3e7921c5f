//! A duplicate of a running delivery gets the outcome when that delivery ends, not when its lease would end.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::time::manual_clock;
use common::{Rig, TIMEOUT, until, wait_for};
use hapax_core::{Clock as _, MessageState, MessageView, NewMessage, QueueConfig, QueueKind, Tier};
use hapax_worker::{Cx, HandlerOutcome, StopWhen};
use tokio::sync::Notify;

/// Far longer than the test may take: a duplicate that waits for the end of the lease fails the test.
const LEASE: Duration = Duration::from_mins(10);

fn duplicate(group: Option<&str>) -> NewMessage {
    let message = NewMessage::new("1").idempotency_key(&"order-7".parse().unwrap());
    match group {
        Some(group) => {
            let dedup = hapax_core::DedupId::new(group).unwrap();
            message.group(hapax_core::GroupId::new(group).unwrap()).dedup(dedup)
        }
        None => message,
    }
}

/// A handler that waits until the test lets it continue.
fn held_up() -> (Arc<Notify>, Arc<Notify>, impl Fn(u32, Cx) -> BoxedRun + Clone + Send + Sync) {
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (started, go_on) = (started.clone(), go_on.clone());
        move |_: u32, _: Cx| {
            let (started, go_on) = (started.clone(), go_on.clone());
            Box::pin(async move {
                started.notify_one();
                go_on.notified().await;
                HandlerOutcome::Done(7u32)
            }) as BoxedRun
        }
    };
    (started, go_on, handler)
}

type BoxedRun = std::pin::Pin<Box<dyn Future<Output = HandlerOutcome<u32>> + Send>>;

async fn woken(config: QueueConfig, groups: [Option<&str>; 2], concurrency: usize) {
    // No time passes: neither the wait nor the lease can end by itself.
    let clock = manual_clock();
    let rig = Rig::on_clock(QueueConfig { tier: Tier::EffectivelyOnce, ..config }, clock.clone()).await;
    let (started, go_on, handler) = held_up();
    let builder = rig.builder().clock(clock).handler(handler).lease(LEASE).concurrency(concurrency);
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        rig.send(duplicate(groups[0])).await;
        started.notified().await;
        rig.send(duplicate(groups[1])).await;
        until("the duplicate is received", async || watch.counts().delivered == 2).await;
        go_on.notify_one();
        wait_for(&watch, |counts| counts.replayed == 1).await;
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.done, report.counts.replayed), (1, 1));
    assert_eq!(report.counts.deferred, 0, "it was woken; it did not come back to ask again");
    assert_eq!(rig.stats().await.totals.acked, 2);
}

#[tokio::test]
async fn in_a_standard_queue() {
    woken(QueueConfig::default(), [None, None], 2).await;
}

#[tokio::test]
async fn in_another_group_of_a_fifo_queue() {
    let config = QueueConfig { kind: QueueKind::Fifo, ..QueueConfig::fifo() };
    woken(config, [Some("a"), Some("b")], 2).await;
}

/// A worker elsewhere that holds the duplicates' key until it is aborted.
async fn busy_elsewhere(rig: &Rig, group: Option<&str>) -> tokio::task::JoinHandle<()> {
    let (started, _, handler) = held_up();
    let worker = rig.builder().handler(handler).lease(LEASE).concurrency(1).build().await.unwrap();
    let running = tokio::spawn(async move {
        let _ = worker.run(std::future::pending()).await;
    });
    rig.send(duplicate(group)).await;
    started.notified().await;
    running
}

fn other(group: Option<&str>) -> NewMessage {
    let message = NewMessage::new("2");
    match group {
        Some(group) => message
            .group(hapax_core::GroupId::new(group).unwrap())
            .dedup(hapax_core::DedupId::new("other").unwrap()),
        None => message,
    }
}

/// What waits for a running duplicate holds no slot, so another message runs meanwhile; and at its end the worker puts
/// it back at once instead of waiting for the duplicate. No time passes: what waits for some to pass hangs.
async fn holds_no_slot(config: QueueConfig, batch: bool, duplicates: usize) {
    let fifo = config.is_fifo();
    let clock = manual_clock();
    let rig = Rig::on_clock(QueueConfig { tier: Tier::EffectivelyOnce, ..config }, clock.clone()).await;
    let in_group = |name: &'static str| fifo.then_some(name);
    let elsewhere = busy_elsewhere(&rig, in_group("first")).await;
    let builder = rig.builder().clock(clock).concurrency(1).lease(LEASE);
    let builder = if batch {
        builder.batch_handler(10, async |numbers: Vec<(u32, Cx)>| {
            numbers.iter().map(|_| HandlerOutcome::Done(())).collect::<Vec<_>>()
        })
    } else {
        builder.handler(async |_: u32, _: Cx| {})
    };
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        for number in 0..duplicates {
            let group = format!("duplicate-{number}");
            rig.send(duplicate(fifo.then_some(&group))).await;
        }
        wait_for(&watch, |counts| counts.delivered >= 1).await;
        rig.send(other(in_group("other"))).await;
        wait_for(&watch, |counts| counts.done == 1).await;
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.done, report.counts.replayed), (1, 0), "{report:?}");
    elsewhere.abort();
}

#[tokio::test]
async fn a_waiting_duplicate_holds_no_slot() {
    holds_no_slot(QueueConfig::sqs(), false, 1).await;
    holds_no_slot(QueueConfig::sqs(), true, 1).await;
}

#[tokio::test]
async fn a_waiting_duplicate_of_a_fifo_queue_holds_no_slot() {
    holds_no_slot(QueueConfig::fifo(), false, 1).await;
    holds_no_slot(QueueConfig::fifo(), true, 1).await;
}

#[tokio::test]
async fn many_waiting_duplicates_hold_no_slot() {
    holds_no_slot(QueueConfig::sqs(), false, 30).await;
    holds_no_slot(QueueConfig::fifo(), false, 30).await;
    holds_no_slot(QueueConfig::fifo(), true, 30).await;
}

/// On a clock that stands still, so that no token is added: only what starts uses one up.
#[tokio::test]
async fn a_duplicate_uses_no_start_of_the_rate() {
    for config in [QueueConfig::sqs(), QueueConfig::fifo()] {
        let clock = manual_clock();
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..config };
        let fifo = config.is_fifo();
        let rig = Rig::on_clock(config, clock.clone()).await;
        let elsewhere = busy_elsewhere(&rig, fifo.then_some("first")).await;
        for number in 0..5 {
            let group = format!("duplicate-{number}");
            rig.send(duplicate(fifo.then_some(&group))).await;
        }
        rig.send(other(fifo.then_some("other"))).await;
        let builder =
            rig.builder().handler(async |_: u32, _: Cx| {}).clock(clock).lease(LEASE).concurrency(2);
        let worker = builder.per_second(1.0).build().await.unwrap();
        let watch = worker.watch();
        let script = async {
            wait_for(&watch, |counts| counts.done == 1).await;
        };
        let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
        assert_eq!((report.counts.done, report.counts.replayed), (1, 0), "{report:?}");
        elsewhere.abort();
    }
}

/// A duplicate that finds no room to wait comes back less and less often while its duplicate is running.
#[tokio::test]
async fn a_duplicate_without_room_to_wait_does_not_spin() {
    for config in [QueueConfig::sqs(), QueueConfig::fifo()] {
        let clock = manual_clock();
        let config = QueueConfig { tier: Tier::EffectivelyOnce, ..config };
        let fifo = config.is_fifo();
        let rig = Rig::on_clock(config, clock.clone()).await;
        let elsewhere = busy_elsewhere(&rig, fifo.then_some("first")).await;
        for number in 0..10 {
            let group = format!("duplicate-{number}");
            rig.send(duplicate(fifo.then_some(&group))).await;
        }
        let builder = rig.builder().handler(async |_: u32, _: Cx| {}).clock(clock.clone()).lease(LEASE);
        let worker = builder.concurrency(1).build().await.unwrap();
        let script = async {
            // 7 s in all: shorter than a wait in the ledger, so that the one that has room keeps it.
            for after_ms in [1_000, 2_000, 4_000, 8_000] {
                let due_ms = clock.wall_ms() + after_ms;
                until("nine are put back for longer", async || {
                    let waits = |view: &&MessageView| view.state == MessageState::Delayed;
                    let all = rig.messages(rig.queue.as_str()).await;
                    let due: Vec<_> = all.iter().filter(waits).map(|view| view.due_ms).collect();
                    due == [due_ms; 9]
                })
                .await;
                if after_ms < 8_000 {
                    clock.advance_ms(after_ms);
                }
            }
        };
        let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
        assert_eq!(report.counts.delivered, 1 + 4 * 9, "{report:?}");
        elsewhere.abort();
    }
}

#[tokio::test]
async fn a_worker_that_stops_when_its_queue_is_empty_waits_for_duplicates() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    for _ in 0..5 {
        rig.send(duplicate(None)).await;
    }
    rig.send(NewMessage::new("2")).await;
    let settled = Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = settled.clone();
    let slow = async |number: u32, _: Cx| {
        tokio::time::sleep(Duration::from_millis(20)).await;
        HandlerOutcome::Done(number)
    };
    let builder = rig.builder().handler(slow).lease(LEASE).concurrency(2).stop_when(StopWhen::Empty);
    let worker = builder
        .on_settled(move |ended| seen.lock().unwrap().push((ended.ran, ended.settled, ended.key.to_string())))
        .build()
        .await
        .unwrap();
    let report = tokio::time::timeout(TIMEOUT, worker.run(std::future::pending())).await.unwrap().unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.done, report.counts.replayed), (2, 4), "{report:?}");
    let settled = settled.lock().unwrap();
    let acked =
        |ran| settled.iter().filter(|one| one.0 == ran && one.1 == Some(hapax_core::Settled::Acked)).count();
    assert_eq!((acked(true), acked(false)), (2, 4), "{settled:?}");
}

#[tokio::test]
async fn a_worker_that_stops_after_one_leaves_the_rest() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    for _ in 0..3 {
        rig.send(NewMessage::new("1")).await;
    }
    let builder = rig.builder().handler(async |_: u32, _: Cx| {}).stop_when(StopWhen::AfterOne);
    let worker = builder.build().await.unwrap();
    let report = tokio::time::timeout(TIMEOUT, worker.run(std::future::pending())).await.unwrap().unwrap();
    assert_eq!((report.counts.delivered, report.counts.done), (1, 1), "{report:?}");
    assert_eq!(rig.stats().await.ready, 2);
}
