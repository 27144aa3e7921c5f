//! A handler that blocks the only thread of its runtime for longer than the lease: the heartbeat continues on its own
//! thread, and nothing is delivered twice.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::time::{block_on_another_thread, manual_clock, pass_leases};
use common::{Rig, run_until};
use hapax_core::{NewMessage, QueueConfig, Tier};
use hapax_worker::Cx;

const LEASE: Duration = Duration::from_mins(1);

async fn block(tier: Tier) {
    let clock = manual_clock();
    let config = QueueConfig { tier, ..QueueConfig::sqs() };
    let rig = Arc::new(Rig::on_clock(config, clock.clone()).await);
    rig.send(NewMessage::new("1")).await;
    let runs = Arc::new(AtomicU32::new(0));
    let handler = {
        let (runs, rig, clock) = (runs.clone(), rig.clone(), clock.clone());
        move |_: u32, cx: Cx| {
            runs.fetch_add(1, Ordering::SeqCst);
            let left_ms = async || rig.delivery_left_ms(&clock).await;
            block_on_another_thread(|| pass_leases(&clock, LEASE, 4, left_ms));
            assert!(!cx.is_cancelled());
            async {}
        }
    };
    let worker = rig.builder().handler(handler).clock(clock).lease(LEASE).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done + counts.panics == 1).await;
    let stats = rig.stats().await;
    assert_eq!((stats.totals.expired, stats.totals.delivered, stats.totals.acked), (0, 1, 1), "{report:?}");
    assert_eq!((runs.load(Ordering::SeqCst), report.counts.lost_leases), (1, 0));
    assert!(report.counts.heartbeats >= 4, "{report:?}");
}

#[tokio::test(flavor = "current_thread")]
async fn at_least_once() {
    block(Tier::AtLeastOnce).await;
}

#[tokio::test(flavor = "current_thread")]
async fn effectively_once() {
    block(Tier::EffectivelyOnce).await;
}
