//! Point 6: delay, priorities and fair sharing on standard queues.

use hapax_core::{MessageState, NewMessage, Priority, QueueConfig, SendError};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{bodies, config, group, in_group, text};

fn tenant(name: &str, body: impl Into<String>) -> NewMessage {
    text(body).group(group(name))
}

pub(crate) async fn a_delayed_message_is_hidden_until_its_delay_is_over(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send(&jobs, text("a").delay_ms(1_000)).await;
    assert_eq!(t.browse(&jobs).await[0].state, MessageState::Delayed);
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.ready, stats.delayed), (0, 1));
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(t.one(&jobs).await.attempt, 1);
}

pub(crate) async fn a_queue_delays_messages_that_do_not_say(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { delay_ms: 1_000, ..config() }).await;
    t.send(&jobs, text("at once").delay_ms(0)).await;
    t.send_all(&jobs, &["later"]).await;
    assert_eq!(t.one(&jobs).await.body, "at once");
    t.hidden_for(&jobs, 1_000).await;
    assert_eq!(t.one(&jobs).await.body, "later");
}

pub(crate) async fn a_delay_is_not_part_of_the_lease(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send(&jobs, text("a").delay_ms(2 * LEASE_MS)).await;
    t.hidden_for(&jobs, 2 * LEASE_MS).await;
    assert_eq!(t.one(&jobs).await.attempt, 1);
    t.hidden_for(&jobs, LEASE_MS).await;
    assert_eq!(t.one(&jobs).await.attempt, 2);
}

pub(crate) async fn messages_come_in_order_of_sending(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    for body in ["a", "b", "c"] {
        t.send_all(&jobs, &[body]).await;
    }
    t.send_all(&jobs, &["d", "e"]).await;
    t.restart().await;
    assert_eq!(bodies(&t.receive(&jobs, 2).await), ["a", "b"]);
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["c", "d", "e"]);
}

pub(crate) async fn a_higher_priority_comes_first_then_the_order_of_sending(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    for (body, priority) in [("low", 0), ("mid-1", 5), ("top-1", 9), ("mid-2", 5), ("top-2", 9)] {
        t.send(&jobs, text(body).priority(Priority(priority))).await;
    }
    let got = t.receive(&jobs, 2).await;
    assert_eq!(bodies(&got), ["top-1", "top-2"]);
    t.fail(&jobs, &got[1], "boom").await;
    t.crash().await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["top-2", "mid-1", "mid-2", "low"]);
}

pub(crate) async fn a_quiet_group_overtakes_a_noisy_one(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let noise = (0..200).map(|n| tenant("noisy", format!("noisy-{n}"))).collect();
    assert!(t.send_batch(&jobs, noise).await.iter().all(Result::is_ok));
    assert_eq!(t.receive(&jobs, 40).await.len(), 40);
    t.send(&jobs, tenant("quiet", "quiet-1")).await;
    t.send(&jobs, tenant("quiet", "quiet-2")).await;
    assert_eq!(bodies(&t.receive(&jobs, 1).await), ["quiet-1"]);
    let rest = bodies(&t.receive(&jobs, 5).await);
    assert_eq!(rest[0], "quiet-2");
    assert_eq!(rest.len(), 5, "a noisy group is served when no quiet one waits");
}

/// Noise is a share of the deliveries, not only a number of them.
pub(crate) async fn a_group_with_a_small_share_of_the_deliveries_keeps_its_turn(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let message = |n: usize| if n < 30 { tenant("small", n.to_string()) } else { text(n.to_string()) };
    assert!(t.send_batch(&jobs, (0..310).map(message).collect()).await.iter().all(Result::is_ok));
    let mut held = 0;
    while held < 310 {
        held += t.receive(&jobs, 100).await.len();
    }
    t.send(&jobs, tenant("small", "first")).await;
    t.send(&jobs, text("second")).await;
    assert_eq!(bodies(&t.receive(&jobs, 1).await), ["first"]);
}

pub(crate) async fn a_group_with_few_deliveries_keeps_its_turn_beside_a_noisy_one(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let message = |n: usize| tenant(if n < 40 { "noisy" } else { "few" }, n.to_string());
    assert!(t.send_batch(&jobs, (0..50).map(message).collect()).await.iter().all(Result::is_ok));
    assert_eq!(t.receive(&jobs, 50).await.len(), 50);
    t.send(&jobs, tenant("few", "first")).await;
    t.send(&jobs, tenant("quiet", "second")).await;
    assert_eq!(bodies(&t.receive(&jobs, 1).await), ["first"]);
}

pub(crate) async fn a_noisy_group_is_served_before_lower_priorities(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let noise = (0..40).map(|n| tenant("noisy", n.to_string())).collect();
    assert!(t.send_batch(&jobs, noise).await.iter().all(Result::is_ok));
    assert_eq!(t.receive(&jobs, 40).await.len(), 40);
    t.send(&jobs, tenant("quiet", "low")).await;
    t.send(&jobs, tenant("noisy", "high-1").priority(Priority(5))).await;
    t.send(&jobs, tenant("quiet", "high-2").priority(Priority(5))).await;
    assert_eq!(bodies(&t.receive(&jobs, 10).await), ["high-2", "high-1", "low"]);
}

pub(crate) async fn a_noisy_group_alone_is_served_in_full(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let noise = (0..100).map(|n| tenant("noisy", n.to_string())).collect();
    assert!(t.send_batch(&jobs, noise).await.iter().all(Result::is_ok));
    let mut got = Vec::new();
    for _ in 0..10 {
        got.extend(bodies(&t.receive(&jobs, 10).await));
    }
    assert_eq!(got, (0..100).map(|n| n.to_string()).collect::<Vec<_>>());
}

pub(crate) async fn fair_sharing_loses_and_doubles_nothing(mut t: Trial) {
    let jobs = t.create("jobs", QueueConfig { lease_ms: 60_000, ..config() }).await;
    let message = |n: usize| match n % 10 {
        0 => tenant("b", n.to_string()),
        1 => text(n.to_string()),
        _ => tenant("a", n.to_string()),
    };
    assert!(t.send_batch(&jobs, (0..200).map(message).collect()).await.iter().all(Result::is_ok));
    let mut held = t.receive(&jobs, 45).await;
    let mut got: Vec<usize> = Vec::new();
    t.restart().await;
    loop {
        let batch = t.receive(&jobs, 7).await;
        held.extend(batch);
        if held.is_empty() {
            break;
        }
        for delivery in held.drain(..held.len().min(9)) {
            t.ack(&jobs, &delivery).await;
            got.push(String::from_utf8_lossy(&delivery.body).parse().unwrap());
        }
    }
    got.sort_unstable();
    assert_eq!(got, (0..200).collect::<Vec<_>>());
}

const YEAR_MS: u64 = 365 * 24 * 3600 * 1000;

pub(crate) async fn a_message_is_delivered_at_its_time_and_retained_from_then(t: Trial) {
    let jobs = t.standard("jobs").await;
    let retention_ms = t.config_of(&jobs).await.retention_ms;
    let now_ms = t.now_ms().await;
    let sent = t.send(&jobs, text("later").deliver_at_ms(now_ms + YEAR_MS)).await;
    t.send(&jobs, text("at once").deliver_at_ms(now_ms.saturating_sub(5))).await;
    assert_eq!(t.one(&jobs).await.body, "at once", "a time in the past means at once");
    let view = t.browse(&jobs).await.into_iter().find(|view| view.id == sent.id).unwrap();
    assert_eq!((view.state, view.due_ms), (MessageState::Delayed, now_ms + YEAR_MS));
    t.advance(YEAR_MS - 1_000).await;
    t.none(&jobs).await;
    t.advance(1_000).await;
    let got = t.one(&jobs).await;
    assert_eq!(got.id, sent.id, "its retention did not end while it was hidden");
    t.extend(&jobs, &got, 0).await.unwrap();
    t.advance(retention_ms - 1_000).await;
    assert_eq!(t.browse(&jobs).await.len(), 1, "retention counts from its delivery time");
    t.advance(2_000).await;
    t.holds(&jobs, 0).await;
}

pub(crate) async fn a_delivery_time_survives_a_crash(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let now_ms = t.now_ms().await;
    t.send(&jobs, text("later").deliver_at_ms(now_ms + 5_000)).await;
    t.crash().await;
    t.none(&jobs).await;
    t.pass(5_000).await;
    t.one(&jobs).await;
}

pub(crate) async fn a_delivery_time_that_cannot_be_is_refused(t: Trial) {
    let (jobs, fifo) = (t.standard("jobs").await, t.fifo("jobs").await);
    let now_ms = t.now_ms().await;
    let at = now_ms + 60_000;
    let far = t.try_send(&jobs, text("a").deliver_at_ms(now_ms + 2 * YEAR_MS)).await;
    let both = t.try_send(&jobs, text("a").deliver_at_ms(at).delay_ms(5)).await;
    let ordered = t.try_send(&fifo, in_group("g", "a").deliver_at_ms(at)).await;
    for refused in [far, both, ordered] {
        assert!(
            matches!(&refused, Err(SendError::Invalid(text)) if text.contains("deliver_at_ms")),
            "{refused:?}"
        );
    }
    t.none(&jobs).await;
}
