//! A handler that blocks the only thread of its runtime for longer than the lease: the heartbeat continues on its own
//! thread, and nothing is delivered twice.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Rig, run_until};
use hapax_core::{NewMessage, Tier};
use hapax_worker::Cx;

async fn block(tier: Tier) {
    let rig = Rig::tier(tier).await;
    rig.send(NewMessage::new("1")).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let handler = move |_: u32, cx: Cx| {
        counted.fetch_add(1, Ordering::SeqCst);
        std::thread::sleep(Duration::from_secs(2));
        assert!(!cx.is_cancelled());
        async {}
    };
    let worker = rig.builder().handler(handler).lease(Duration::from_millis(400)).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 1).await;
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
