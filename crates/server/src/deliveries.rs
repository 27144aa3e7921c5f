//! Deliveries in responses: their size, and their return if the response cannot be sent.

use hapax_core::{Delivery, QueueName, QueueStore, Settle, Settlement};

/// Approximate size of a delivery's receipt, times and counters in a response.
const OVERHEAD_BYTES: usize = 512;

/// Approximate size of a response with these deliveries, before bodies and attributes are encoded.
pub(crate) fn response_bytes(deliveries: &[Delivery]) -> usize {
    let of = |delivery: &Delivery| {
        let attributes = delivery.attributes.iter();
        let attributes = attributes.map(|(name, value)| name.len() + value.value.len()).sum::<usize>();
        OVERHEAD_BYTES + delivery.key.as_str().len() + delivery.body.len() + attributes
    };
    deliveries.iter().map(of).sum()
}

/// Returns deliveries that no client received: no attempt is counted. If that fails too, their leases expire.
pub(crate) async fn give_back<S>(store: &S, queue: &QueueName, deliveries: &[Delivery])
where
    S: QueueStore + ?Sized,
{
    let defer =
        |delivery: &Delivery| Settle::new(delivery.receipt.clone(), Settlement::Defer { after_ms: 0 });
    match store.settle(queue, deliveries.iter().map(defer).collect()).await {
        Ok(answers) => {
            for error in answers.into_iter().filter_map(Result::err) {
                tracing::warn!(%queue, %error, "a delivery that could not be answered was not given back");
            }
        }
        Err(error) => {
            tracing::warn!(%queue, %error, "deliveries that could not be answered were not given back");
        }
    }
}
