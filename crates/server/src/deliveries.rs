//! Deliveries on their way to a client: how large they are, and what happens to those that cannot be answered.

use hapax_core::{Delivery, How, QueueName, QueueStore, Settle};

/// Bytes of the bodies and attributes, before they are encoded.
pub(crate) fn bytes(deliveries: &[Delivery]) -> usize {
    let of = |delivery: &Delivery| {
        let attributes = delivery.attributes.iter();
        delivery.body.len() + attributes.map(|(name, value)| name.len() + value.value.len()).sum::<usize>()
    };
    deliveries.iter().map(of).sum()
}

/// Gives back deliveries that no client has seen: no attempt is counted. If that fails too, their leases run out.
pub(crate) async fn give_back<S>(store: &S, queue: &QueueName, deliveries: &[Delivery])
where
    S: QueueStore + ?Sized,
{
    let defer = |delivery: &Delivery| Settle::new(delivery.receipt.clone(), How::Defer { after_ms: 0 });
    if let Err(error) = store.settle(queue, deliveries.iter().map(defer).collect()).await {
        tracing::warn!(%queue, %error, "deliveries that could not be answered were not given back");
    }
}
