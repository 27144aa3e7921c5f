//! Receives from a server, cancelled by name when their caller is gone.

use std::time::Duration;

use hapax_core::cancel_safe::{self, Fetch};
use hapax_core::policy::WAIT_MS_MAX;
use hapax_core::{Delivery, QueueName, Receive, Settle, Settlement, StoreError};
use tokio::runtime::Handle;

use crate::Client;
use crate::connect::CallGuard;
use crate::store::settle_ignoring_errors;
use crate::transport::{Effect, Failure};
use crate::wire::{ReceiveRequest, ReceiveResponse};

/// Maximum number of cancel requests before the connection is closed instead: behind a load balancer, each request may
/// reach another server.
const CANCEL_TRIES: u32 = 6;

pub(crate) async fn receive(
    client: &Client,
    queue: &QueueName,
    receive: Receive,
) -> Result<Vec<Delivery>, StoreError> {
    let call = ReceiveCall {
        client: client.clone(),
        queue: queue.clone(),
        receive: receive.clone(),
        cancel_id: format!("{:032x}", fastrand::u128(..)),
        _call_guard: client.count_call(),
    };
    let runtime = Handle::current();
    cancel_safe::receive(&receive, call, move |work| drop(runtime.spawn(work))).await
}

struct ReceiveCall {
    client: Client,
    queue: QueueName,
    receive: Receive,
    cancel_id: String,
    _call_guard: CallGuard,
}

impl Fetch for ReceiveCall {
    async fn fetch(&self, gone: impl Future<Output = ()> + Send) -> Result<Vec<Delivery>, StoreError> {
        let body = ReceiveRequest { cancel_id: Some(self.cancel_id.clone()), ..self.receive.clone().into() };
        let path = format!("/v1/queues/{}/receive", self.queue);
        let transport = &self.client.transport;
        let wait = Duration::from_millis(self.receive.wait_ms.unwrap_or(WAIT_MS_MAX));
        let request = transport.post_within(&path, &body, wait + transport.timeout);
        tokio::pin!(request);
        let answer = tokio::select! {
            biased;
            answer = request.as_mut() => answer,
            () = gone => self.cancel(request).await?,
        };
        answer.map_err(|failure| failure.into_store_error(Effect::Change)).and_then(to_deliveries)
    }

    async fn give_back(&self, deliveries: Vec<Delivery>) {
        let defer = |delivery: Delivery| Settle::new(delivery.receipt, Settlement::Defer { after_ms: 0 });
        settle_ignoring_errors(&self.client, &self.queue, deliveries.into_iter().map(defer).collect()).await;
    }
}

impl ReceiveCall {
    /// The caller is gone: has the server end the request, and waits for its answer.
    async fn cancel(
        &self,
        mut request: impl Future<Output = Result<ReceiveResponse, Failure>> + Unpin,
    ) -> Result<Result<ReceiveResponse, Failure>, StoreError> {
        let path = format!("/v1/queues/{}/receives/{}", self.queue, self.cancel_id);
        for round in 0..CANCEL_TRIES {
            // Not found: the receive has not arrived yet, has been answered, or is at another server.
            let found = match self.client.transport.delete::<()>(&path).await {
                Ok(()) => true,
                Err(Failure::Refused(..)) => false,
                Err(failure) => return Err(failure.into_store_error(Effect::Change)),
            };
            let timeout =
                if found { self.client.transport.timeout } else { Duration::from_millis(10 << round) };
            if let Ok(answer) = tokio::time::timeout(timeout, &mut request).await {
                return Ok(answer);
            }
        }
        Err(StoreError::OutcomeUnknown("the receive was cancelled, and its response did not come".into()))
    }
}

fn to_deliveries(answer: ReceiveResponse) -> Result<Vec<Delivery>, StoreError> {
    let unreadable =
        |error| StoreError::OutcomeUnknown(format!("the server's response cannot be read: {error}"));
    answer.deliveries.into_iter().map(|item| Delivery::try_from(item).map_err(unreadable)).collect()
}
