//! The controls: consumers as they are often written, over the same queues, servers and bank. Each has to be caught.

use std::sync::Arc;
use std::time::Duration;

use hapax::core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, EntryState, Json, Owner, RecordedOutcome,
    ledger::TTL_MS_DEFAULT,
};
use hapax::{Delivery, QueueName, Receive, Settle};

use super::Workplace;
use crate::recorder::{Pay, Payment};
use crate::workload::{Shape, Workload};

/// How long a control takes between its two steps.
const GAP: Duration = Duration::from_millis(100);

/// Consumes a control's queue, one message at a time.
pub async fn consume(place: Arc<Workplace>, workload: Workload) -> anyhow::Result<()> {
    let queue = workload.queue(&place.run);
    let store = place.hapax.store();
    loop {
        let lease_ms = Some(place.lease.as_millis() as u64);
        let receive = Receive { wait_ms: Some(1_000), lease_ms, ..Receive::up_to(1) };
        let Ok(deliveries) = store.receive(&queue, receive).await else {
            tokio::time::sleep(Duration::from_millis(50)).await;
            continue;
        };
        for delivery in deliveries {
            handle(&place, &workload, &queue, &delivery).await?;
        }
    }
}

async fn handle(
    place: &Workplace,
    workload: &Workload,
    queue: &QueueName,
    delivery: &Delivery,
) -> anyhow::Result<()> {
    match workload.shape {
        Shape::AckBefore => {
            ack(place, queue, delivery).await;
            gap(place, workload).await?;
            pay(place, workload, delivery).await
        }
        Shape::AckAfter => {
            pay(place, workload, delivery).await?;
            gap(place, workload).await?;
            ack(place, queue, delivery).await;
            Ok(())
        }
        _ => {
            let id = EntryId::of_queue(queue, delivery.key.clone());
            let entry = place.ledger().entry(&id).await;
            // Fails open: if it cannot be looked up, it is taken to be new.
            if !matches!(entry, Ok(Some(entry)) if entry.state == EntryState::Completed) {
                pay(place, workload, delivery).await?;
                gap(place, workload).await?;
                mark(place, id).await;
            }
            ack(place, queue, delivery).await;
            Ok(())
        }
    }
}

/// The time between two steps: a kill is aimed at it, so that every run shows what it does to such a program.
async fn gap(place: &Workplace, workload: &Workload) -> anyhow::Result<()> {
    place.reporter.gap(workload.name, true).await?;
    tokio::time::sleep(GAP).await;
    place.reporter.gap(workload.name, false).await?;
    Ok(())
}

async fn pay(place: &Workplace, workload: &Workload, delivery: &Delivery) -> anyhow::Result<()> {
    let payment: Payment = serde_json::from_slice(&delivery.body)?;
    let pay = Pay {
        who: place.reporter.who().to_owned(),
        workload: workload.name.to_owned(),
        payment,
        key: delivery.key.to_string(),
        fence: 0,
        deliveries: delivery.deliveries,
        takeover: false,
    };
    place.reporter.pay(&pay).await.map(drop)
}

/// Records the key after the fact. Errors are ignored, as such code does.
async fn mark(place: &Workplace, id: EntryId) {
    let owner = Owner::new(format!("naive-{:016x}", fastrand::u64(..))).expect("a valid owner");
    let claimed = place
        .ledger()
        .claim(vec![ClaimRequest::new(id.clone(), owner, place.lease.as_millis() as u64)])
        .await;
    if let Ok(claimed) = claimed
        && let Some(Ok(Claim::Granted(grant))) = claimed.into_iter().next()
    {
        let outcome = RecordedOutcome::done(Json::of("paid").expect("a text"));
        let ending = ClaimEnding::Complete { outcome, ttl_ms: TTL_MS_DEFAULT };
        let _ = place.ledger().end(vec![EndClaim { id, token: grant.token, ending }]).await;
    }
}

async fn ack(place: &Workplace, queue: &QueueName, delivery: &Delivery) {
    let _ = place.hapax.store().settle(queue, vec![Settle::ack(delivery.receipt.clone())]).await;
}
