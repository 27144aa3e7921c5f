//! Point 10: fences only grow, and fit in 2^53.

use hapax_core::{Delivery, Fence, QueueName, Settlement};

use crate::trial::{LEASE_MS, Trial};
use crate::values::text;

/// Sends and receives one message; its fence must be greater than all before.
async fn beyond(t: &Trial, jobs: &QueueName, last: &mut Fence) -> Delivery {
    t.send_all(jobs, &["a"]).await;
    let got = t.one(jobs).await;
    assert!(got.fence > *last, "{} after {last}", got.fence);
    assert!(got.fence <= Fence::MAX);
    *last = got.fence;
    t.ack(jobs, &got).await;
    got
}

pub(crate) async fn fences_grow_with_every_delivery_of_the_store(t: Trial) {
    let (a, b) = (t.standard("a").await, t.standard("b").await);
    let mut last = Fence(0);
    for _ in 0..3 {
        beyond(&t, &a, &mut last).await;
        beyond(&t, &b, &mut last).await;
    }
    t.send_all(&a, &["1", "2", "3"]).await;
    for delivery in t.receive(&a, 10).await {
        assert!(delivery.fence > last, "in the order of the answer, too");
        last = delivery.fence;
        assert!(delivery.fence <= Fence::MAX);
    }
}

pub(crate) async fn a_message_has_a_larger_fence_at_every_delivery(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    let mut last = Fence(0);
    for round in 0..4 {
        let got = t.one(&jobs).await;
        assert!(got.fence > last);
        last = got.fence;
        match round {
            0 => drop(t.fail(&jobs, &got, "boom").await),
            1 => drop(t.settle(&jobs, &got, Settlement::Defer { after_ms: 0 }).await.unwrap()),
            2 => drop(t.extend(&jobs, &got, 0).await.unwrap()),
            _ => t.pass(LEASE_MS).await,
        }
    }
    assert!(t.one(&jobs).await.fence > last);
}

pub(crate) async fn fences_grow_through_restarts_and_crashes(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let mut last = Fence(0);
    for round in 0..6 {
        for _ in 0..3 {
            beyond(&t, &jobs, &mut last).await;
        }
        if round % 2 == 0 { t.crash().await } else { t.restart().await }
    }
    beyond(&t, &jobs, &mut last).await;
}

pub(crate) async fn fences_grow_when_the_wall_clock_was_set_back(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let mut last = Fence(0);
    beyond(&t, &jobs, &mut last).await;
    t.set_wall_back(3_600_000);
    beyond(&t, &jobs, &mut last).await;
    t.restart().await;
    beyond(&t, &jobs, &mut last).await;
    t.set_wall_back(3_600_000);
    t.crash().await;
    beyond(&t, &jobs, &mut last).await;
}

pub(crate) async fn a_wall_clock_set_back_holds_nothing_up(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["held"]).await;
    t.send(&jobs, text("delayed").delay_ms(LEASE_MS)).await;
    let held = t.one(&jobs).await;
    t.set_wall_back(3_600_000);
    t.none(&jobs).await;
    t.restart().await;
    t.none(&jobs).await;
    t.pass(LEASE_MS).await;
    let got = t.receive(&jobs, 10).await;
    assert_eq!(got.len(), 2, "lease and delay last as long as before");
    t.send_all(&jobs, &["new"]).await;
    assert!(t.one(&jobs).await.sent_ms >= held.sent_ms, "time never steps back");
}
