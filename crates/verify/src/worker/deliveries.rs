//! Consumers without a worker of Hapax, over the queue's own API: receive, pay, ack. The bank recognises a payment, so a message
//! may be delivered twice; what is shown is that leases and receipts do what they promise.

use std::sync::Arc;
use std::time::Duration;

use hapax::{Delivery, QueueName, Receive, Settle};

use super::Workplace;
use crate::history::{Act, Answer};
use crate::recorder::{Pay, Payment};
use crate::workload::Workload;

/// How long the work on a message takes after its payment: long enough to aim a pause at.
const WORK_MS: std::ops::Range<u64> = 60..140;
/// The same for a message that was delivered before: long enough that its first consumer, which was stopped past its lease, comes
/// back and acks while this one holds the message; shorter than the lease.
const WORK_AGAIN: Duration = Duration::from_millis(800);
/// Pause after a receive that found nothing, or failed.
const IDLE: Duration = Duration::from_millis(30);

/// Consumes a queue, one message at a time.
pub async fn consume(place: Arc<Workplace>, workload: Workload) -> anyhow::Result<()> {
    let queue = workload.queue(&place.run);
    let store = place.hapax.store();
    loop {
        // Without waiting: the lease of a message that came while a receive waited would be counted from too early.
        let lease_ms = Some(place.lease.as_millis() as u64);
        let receive = Receive { wait_ms: Some(0), lease_ms, ..Receive::up_to(1) };
        let asked_ms = place.reporter.now_ms().await?;
        let received = store.receive(&queue, receive).await.unwrap_or_default();
        if received.is_empty() {
            tokio::time::sleep(IDLE).await;
        }
        for delivery in received {
            handle(&place, &workload, &queue, &delivery, asked_ms).await?;
        }
    }
}

async fn handle(
    place: &Workplace,
    workload: &Workload,
    queue: &QueueName,
    delivery: &Delivery,
    asked_ms: u64,
) -> anyhow::Result<()> {
    let payment: Payment = serde_json::from_slice(&delivery.body)?;
    let (id, message) = (payment.id.clone(), delivery.id.to_string());
    let (fence, deliveries, lease_ms) = (delivery.fence.0, delivery.deliveries, delivery.lease_ms);
    let delivered =
        Act::Delivered { id: id.clone(), message: message.clone(), fence, deliveries, asked_ms, lease_ms };
    place.reporter.report(workload.name, vec![delivered]).await?;
    let pay = Pay {
        who: place.reporter.who().to_owned(),
        workload: workload.name.to_owned(),
        key: payment.id.clone(),
        payment,
        fence: 0,
        deliveries,
        takeover: false,
    };
    place.reporter.pay(&pay).await?;
    // Only the second one: on a slow machine, a third would wait for a fourth, and so on.
    let work = if deliveries == 2 { WORK_AGAIN } else { Duration::from_millis(fastrand::u64(WORK_MS)) };
    place.reporter.gap(workload.name, true).await?;
    tokio::time::sleep(work).await;
    place.reporter.gap(workload.name, false).await?;
    let settled = place.hapax.store().settle(queue, vec![Settle::ack(delivery.receipt.clone())]).await;
    let (answer, error) = match settled.map(|settled| settled.into_iter().next()) {
        Ok(Some(Ok(_))) => (Answer::Ok, None),
        Ok(Some(Err(error))) => (Answer::Failed, Some(error.to_string())),
        Ok(None) => (Answer::Unknown, None),
        Err(error) => (Answer::Unknown, Some(error.to_string())),
    };
    let settle = Act::Settle { id, message, fence, ack: true, answer, ran: true, deliveries, error };
    place.reporter.report(workload.name, vec![settle]).await.map(drop)
}
