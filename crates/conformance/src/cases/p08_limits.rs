//! Point 8: limits are SQS's; each is accepted at its edge and refused beyond it.

use hapax_core::policy::{DELAY_MS_MAX, IN_FLIGHT_MAX, LEASE_MS_MAX, MESSAGE_BYTES_MAX, WAIT_MS_MAX};
use hapax_core::{NewMessage, QueueConfig, Receive, SendError, StoreError};

use crate::trial::Trial;
use crate::values::{attribute, bodies, config, fifo_config, in_group, now, patient, seen, text};

pub(crate) async fn the_largest_message_is_one_mebibyte(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let body: Vec<u8> = (0..MESSAGE_BYTES_MAX).map(|n| (n % 251) as u8).collect();
    t.send(&jobs, NewMessage::new(body.clone())).await;
    let larger = t.try_send(&jobs, NewMessage::new(vec![0; body.len() + 1])).await;
    assert_eq!(
        larger,
        Err(SendError::TooLarge { bytes: MESSAGE_BYTES_MAX + 1, bytes_max: MESSAGE_BYTES_MAX })
    );
    t.restart().await;
    assert!(t.one(&jobs).await.body == body, "the body is whole");
}

pub(crate) async fn a_queue_sets_its_own_largest_message(t: Trial) {
    let jobs = t.create("jobs", QueueConfig { message_bytes_max: 1024, ..config() }).await;
    // Name 1, type 6 ("String"), value 17.
    let message = |body: usize| text("x".repeat(body)).attribute("k", attribute(&"v".repeat(17)));
    assert!(t.try_send(&jobs, message(1000)).await.is_ok());
    let larger = t.try_send(&jobs, message(1001)).await;
    assert_eq!(larger, Err(SendError::TooLarge { bytes: 1025, bytes_max: 1024 }), "attributes count");
}

pub(crate) async fn a_batch_may_have_a_thousand_messages_and_a_mebibyte_each(t: Trial) {
    let jobs = t.standard("jobs").await;
    let batch = (0..1000).map(|n| text(n.to_string())).collect();
    assert!(t.send_batch(&jobs, batch).await.iter().all(Result::is_ok));
    let got = t.receive(&jobs, 1000).await;
    assert_eq!(bodies(&got), (0..1000).map(|n| n.to_string()).collect::<Vec<_>>());
    let large = || NewMessage::new(vec![7; MESSAGE_BYTES_MAX as usize]);
    assert!(t.send_batch(&jobs, vec![large(), large(), large()]).await.iter().all(Result::is_ok));
}

pub(crate) async fn a_receive_out_of_range_is_refused(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    for refused in [
        now(0),
        now(Receive::MAX + 1),
        Receive { wait_ms: Some(WAIT_MS_MAX + 1), ..now(1) },
        Receive { lease_ms: Some(LEASE_MS_MAX + 1), ..now(1) },
    ] {
        let got = t.store().receive(&jobs, refused.clone()).await;
        assert!(matches!(got, Err(StoreError::Invalid(_))), "{refused:?}: {got:?}");
    }
    let edge = Receive { lease_ms: Some(LEASE_MS_MAX), ..patient(Receive::MAX) };
    assert_eq!(t.receive_with(&jobs, edge).await.len(), 1);
}

pub(crate) async fn a_delay_is_at_most_fifteen_minutes(t: Trial) {
    let jobs = t.standard("jobs").await;
    let long = t.try_send(&jobs, text("a").delay_ms(DELAY_MS_MAX + 1)).await;
    assert!(matches!(long, Err(SendError::Invalid(_))), "{long:?}");
    t.send(&jobs, text("b").delay_ms(DELAY_MS_MAX)).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["b"]);
}

/// Puts as many messages in flight as a queue may have, one group per thousand.
async fn fill(t: &Trial, config: QueueConfig, name: &str) -> hapax_core::QueueName {
    let jobs = t.create(name, QueueConfig { lease_ms: LEASE_MS_MAX, ..config }).await;
    for round in 0..IN_FLIGHT_MAX / 1000 {
        let batch = (0..1000).map(|n| in_group(&format!("g{round}"), &format!("{round}-{n}"))).collect();
        assert!(t.send_batch(&jobs, batch).await.iter().all(Result::is_ok));
        assert_eq!(t.receive(&jobs, 1000).await.len(), 1000);
    }
    t.send(&jobs, in_group("last", "last")).await;
    jobs
}

pub(crate) async fn a_standard_queue_has_at_most_120k_in_flight(t: Trial) {
    let jobs = fill(&t, config(), "jobs").await;
    let full = StoreError::TooManyInFlight { queue: jobs.clone(), in_flight: IN_FLIGHT_MAX };
    assert_eq!(t.store().receive(&jobs, now(1)).await, Err(full));
}

pub(crate) async fn a_fifo_queue_with_120k_in_flight_hands_out_nothing(t: Trial) {
    let jobs = fill(&t, fifo_config(), "jobs.fifo").await;
    t.none(&jobs).await;
}
