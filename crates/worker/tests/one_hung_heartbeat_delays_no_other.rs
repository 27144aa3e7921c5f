//! A heartbeat that the store does not answer costs the delivery that it is about, not those that are held beside it.

mod common;

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Rig, TIMEOUT, TestSource, until};
use hapax_core::{Clock as _, ManualClock, MessageId, NewMessage, QueueConfig, Tier};
use hapax_worker::{Cx, HandlerOutcome};
use tokio::sync::watch;

const LEASE: Duration = Duration::from_secs(12);
const MESSAGES: u32 = 20;

/// Handlers that run for three leases, while heartbeats about the first delivery hang.
async fn hang(tier: Tier) -> (u64, u64) {
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let rig = Rig::on_clock(QueueConfig { tier, ..QueueConfig::default() }, clock.clone()).await;
    for number in 0..MESSAGES {
        rig.send(NewMessage::new(number.to_string())).await;
    }
    let source = TestSource::new(&rig);
    let (go_on, wait) = watch::channel(false);
    let (runs, stuck) = (Arc::<AtomicU32>::default(), Arc::<Mutex<Option<MessageId>>>::default());
    let handler = {
        let (source, runs, stuck) = (source.clone(), runs.clone(), stuck.clone());
        move |_: u32, cx: Cx| {
            source.stuck.lock().unwrap().get_or_insert_with(|| cx.delivery().receipt.clone());
            stuck.lock().unwrap().get_or_insert_with(|| cx.message_id());
            runs.fetch_add(1, Ordering::SeqCst);
            let mut wait = wait.clone();
            async move {
                let _ = wait.wait_for(|go_on| *go_on).await;
                HandlerOutcome::Done(())
            }
        }
    };
    let builder = rig.builder().source(source.clone()).clock(clock.clone()).handler(handler).lease(LEASE);
    let worker = builder.concurrency(MESSAGES as usize).build().await.unwrap();
    let watch = worker.watch();
    let stop = async {
        until("all run", async || runs.load(Ordering::SeqCst) == MESSAGES).await;
        let step_ms = LEASE.as_millis() as u64 / 48;
        for _ in 0..3 * 48 {
            clock.advance_ms(step_ms);
            // Room for the heartbeat's thread to see the new time; it has many steps for each renewal.
            tokio::time::sleep(Duration::from_millis(5)).await;
            let enough_ms = clock.wall_ms() + 4 * step_ms;
            until("the others are renewed", async || {
                let others = rig
                    .messages("jobs")
                    .await
                    .into_iter()
                    .filter(|one| Some(one.id) != *stuck.lock().unwrap());
                others.into_iter().all(|one| one.due_ms >= enough_ms)
            })
            .await;
        }
        let found = (watch.counts().lost_leases, rig.stats().await.totals.expired);
        *source.stuck.lock().unwrap() = None;
        go_on.send_replace(true);
        found
    };
    let (stopped, stop_now) = tokio::sync::oneshot::channel();
    let running = worker.run(async {
        let _ = stopped.send(stop.await);
    });
    tokio::time::timeout(TIMEOUT, running).await.unwrap().unwrap();
    stop_now.await.unwrap()
}

#[tokio::test]
async fn at_least_once() {
    assert_eq!(hang(Tier::AtLeastOnce).await, (1, 1), "lost leases, deliveries that ran out");
}

/// The claim is the right to act, and it is kept; only the delivery runs out.
#[tokio::test]
async fn effectively_once() {
    assert_eq!(hang(Tier::EffectivelyOnce).await, (0, 1), "lost leases, deliveries that ran out");
}
