//! Point 8: the limits are SQS's; each is accepted at its edge and refused beyond it.

use hapax_core::policy::{DELAY_MS_MAX, IN_FLIGHT_MAX, LEASE_MS_MAX, MESSAGE_BYTES_MAX, WAIT_MS_MAX};
use hapax_core::validate::{ATTRIBUTES_MAX, BATCH_MAX};
use hapax_core::{
    Browse, Extend, MessageId, NewMessage, Priority, QueueConfig, QueueName, Receipt, Receive, RedriveFilter,
    RedriveRequest, SendError, Settle, StoreError,
};

use crate::trial::Trial;
use crate::values::{
    attribute, bodies, config, dedup, fifo_config, group, in_group, now, receive_waiting, redrive_from, seen,
    text,
};

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
    // Bytes of the attribute: name 1, type 6 ("String"), value 17.
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

pub(crate) async fn a_batch_beyond_a_thousand_is_refused_whole(t: Trial) {
    let jobs = t.standard("jobs").await;
    let (many, s) = (BATCH_MAX + 1, t.store());
    let receipt = Receipt::new("any").unwrap();
    let extend = Extend { receipt: receipt.clone(), lease_ms: 1, own_lease: false };
    let ids = vec![MessageId(1); many];
    let refused = |list: &str, said: Option<StoreError>| {
        let words = format!("{list}: 1001 elements are too many; use at most 1000");
        assert_eq!(said, Some(StoreError::Invalid(words)));
    };
    refused("messages", s.send(&jobs, vec![text("x"); many]).await.err());
    refused("settle", s.settle(&jobs, vec![Settle::ack(receipt); many]).await.err());
    refused("extend", s.extend(&jobs, vec![extend.clone(); many]).await.err());
    refused("ids", s.discard(&jobs, ids.clone(), "suite").await.err());
    refused("ids", s.release(&jobs, ids.clone()).await.err());
    assert_eq!(t.stats(&jobs).await.ready, 0, "nothing of it was sent");
    assert_eq!(s.extend(&jobs, vec![extend; BATCH_MAX]).await.map(|answers| answers.len()), Ok(BATCH_MAX));
    assert_eq!(s.release(&jobs, ids[..BATCH_MAX].to_vec()).await, Ok(0));
}

pub(crate) async fn a_page_has_one_to_a_thousand_rows(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b"]).await;
    let page = async |limit: usize| {
        let page = t.store().browse(&jobs, Browse { limit, ..Browse::default() }).await;
        page.map(|page| page.items.len())
    };
    let refused =
        |limit: usize| Err(StoreError::Invalid(format!("limit: {limit} is out of range; use 1 to 1000")));
    assert_eq!(page(0).await, refused(0));
    assert_eq!(page(1).await, Ok(1));
    assert_eq!(page(1000).await, Ok(2));
    assert_eq!(page(1001).await, refused(1001));
}

/// Each message of a batch that does not fit is refused in words that begin as said; "" is accepted.
async fn refused(t: &Trial, queue: &QueueName, rows: Vec<(NewMessage, &str)>) {
    let (batch, expected): (Vec<_>, Vec<_>) = rows.into_iter().unzip();
    for (answer, expected) in t.send_batch(queue, batch).await.into_iter().zip(expected) {
        let said = answer.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(
            said.starts_with(expected) && said.is_empty() == expected.is_empty(),
            "{said:?}, not {expected:?}"
        );
    }
}

fn with_attributes(count: usize) -> NewMessage {
    (0..count).fold(text("x"), |message, n| message.attribute(format!("a{n}"), attribute("v")))
}

pub(crate) async fn a_message_that_does_not_fit_its_queue_is_refused(t: Trial) {
    let jobs = t.standard("jobs").await;
    let rows = vec![
        (with_attributes(ATTRIBUTES_MAX), ""),
        (with_attributes(ATTRIBUTES_MAX + 1), "101 attributes are too many"),
        (text("x").priority(Priority::MAX), ""),
        (text("x").priority(Priority(10)), "priority: 10 is out of range"),
        (text("x").delay_ms(DELAY_MS_MAX), ""),
        (text("x").delay_ms(DELAY_MS_MAX + 1), "delay_ms: "),
        (text("x").deliver_at_ms(u64::MAX), "deliver_at_ms: "),
        (text("x").deliver_at_ms(1).delay_ms(1), "deliver_at_ms: "),
    ];
    refused(&t, &jobs, rows).await;
    assert_eq!(t.stats(&jobs).await.totals.sent, 3);
}

pub(crate) async fn a_fifo_message_that_does_not_fit_its_queue_is_refused(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let rows = vec![
        (in_group("g", "a"), ""),
        (text("x").dedup(dedup("x")), "group: "),
        (text("x").group(group("g")), "dedup: "),
        (in_group("g", "b").delay_ms(0), "delay_ms: "),
        (in_group("g", "c").deliver_at_ms(1), "deliver_at_ms: "),
        (in_group("g", "d").priority(Priority(1)), "priority: "),
    ];
    refused(&t, &jobs, rows).await;
    assert_eq!(t.stats(&jobs).await.totals.sent, 1);
}

pub(crate) async fn a_redrive_out_of_range_is_refused(t: Trial) {
    let dead = t.standard("dead").await;
    let other_kind = t.fifo("other").await;
    let base = || redrive_from(&dead);
    let many = RedriveFilter { ids: vec![MessageId(1); BATCH_MAX + 1], ..RedriveFilter::default() };
    for (request, expected) in [
        (RedriveRequest { per_second: Some(0), ..base() }, "per_second: 0 is out of range"),
        (RedriveRequest { per_second: Some(10_001), ..base() }, "per_second: 10001 is out of range"),
        (RedriveRequest { to: Some(dead.clone()), ..base() }, "queue dead is where"),
        (RedriveRequest { to: Some(other_kind), ..base() }, "queue other.fifo is not of the same kind"),
        (RedriveRequest { filter: many, ..base() }, "filter.ids: 1001 elements are too many"),
    ] {
        let said = t.store().start_redrive(request).await.unwrap_err().to_string();
        assert!(said.starts_with(expected), "{said:?}, not {expected:?}");
    }
    assert!(t.store().redrives(&dead).await.unwrap().is_empty(), "none of them was started");
}

pub(crate) async fn a_receive_out_of_range_is_refused(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    for refused in [
        now(0),
        now(Receive::MAX + 1),
        Receive { wait_ms: Some(WAIT_MS_MAX + 1), ..now(1) },
        Receive { lease_ms: Some(LEASE_MS_MAX + 1), ..now(1) },
        Receive { attempt_id: Some("x".repeat(129)), ..now(1) },
        Receive { consumer: Some("x".repeat(257)), ..now(1) },
    ] {
        let got = t.store().receive(&jobs, refused.clone()).await;
        assert!(matches!(got, Err(StoreError::Invalid(_))), "{refused:?}: {got:?}");
    }
    let edge = Receive { lease_ms: Some(LEASE_MS_MAX), ..receive_waiting(Receive::MAX) };
    assert_eq!(t.receive_with(&jobs, edge).await.len(), 1);
}

pub(crate) async fn a_delay_is_at_most_fifteen_minutes(t: Trial) {
    let jobs = t.standard("jobs").await;
    let long = t.try_send(&jobs, text("a").delay_ms(DELAY_MS_MAX + 1)).await;
    assert!(matches!(long, Err(SendError::Invalid(_))), "{long:?}");
    t.send(&jobs, text("b").delay_ms(DELAY_MS_MAX)).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["b"]);
}

/// Puts the maximum number of a queue's messages in flight, one group per thousand.
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
