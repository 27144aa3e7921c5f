//! A receive that leaves no trace when it is dropped.
//!
//! A local store sees that its caller is gone. A server does so only by the closed connection, and by then its answer
//! may be on the wire: the messages would be leased to nobody. So a receive runs in a task of its own; when the caller
//! is gone, the task asks the server to cancel it, and gives back what comes nevertheless, uncounted.

use std::time::Duration;

use hapax_core::policy::WAIT_MS_MAX;
use hapax_core::{Delivery, How, QueueName, Receive, Settle, StoreError};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::Client;
use crate::connect::UnderWay;
use crate::store::settle_quietly;
use crate::transport::{Effect, Failure};
use crate::wire::{Deliveries, ReceiveRequest};

/// How often the server is asked to cancel before the connection is closed instead: behind a load balancer, each
/// request may reach another server.
const CANCEL_TRIES: u32 = 6;

pub(crate) async fn receive(
    client: &Client,
    queue: &QueueName,
    receive: Receive,
) -> Result<Vec<Delivery>, StoreError> {
    let (tell, told) = oneshot::channel();
    let under_way = client.begin_wait();
    let call = Call {
        client: client.clone(),
        queue: queue.clone(),
        keeps: receive.ack_on_receive || receive.attempt_id.is_some(),
        wait: Duration::from_millis(receive.wait_ms.unwrap_or(WAIT_MS_MAX)),
        cancel_id: format!("{:032x}", fastrand::u128(..)),
    };
    tokio::spawn(call.run(receive, tell, under_way));
    match told.await {
        Ok(Ok(held)) => Ok(held.take()),
        Ok(Err(error)) => Err(error),
        Err(_) => Err(StoreError::OutcomeUnknown("the runtime is shutting down".into())),
    }
}

/// Deliveries that nobody has looked at. Dropped, they go back.
struct Held {
    call: Option<(Call, Vec<Delivery>, UnderWay)>,
    runtime: Handle,
}

impl Held {
    fn take(mut self) -> Vec<Delivery> {
        self.call.take().map(|(_, deliveries, _)| deliveries).unwrap_or_default()
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some((call, deliveries, under_way)) = self.call.take() {
            self.runtime.spawn(async move {
                call.give_back(deliveries).await;
                drop(under_way);
            });
        }
    }
}

struct Call {
    client: Client,
    queue: QueueName,
    /// Nothing is given back: it was acked on receive, or the receive names its attempt, and a repeat of it may hold the
    /// same deliveries already.
    keeps: bool,
    wait: Duration,
    cancel_id: String,
}

impl Call {
    async fn run(
        self,
        receive: Receive,
        mut tell: oneshot::Sender<Result<Held, StoreError>>,
        under_way: UnderWay,
    ) {
        if tell.is_closed() {
            return;
        }
        let body = ReceiveRequest { cancel_id: Some(self.cancel_id.clone()), ..receive.into() };
        let path = format!("/v1/queues/{}/receive", self.queue);
        let transport = self.client.transport.clone();
        let request = transport.post_within(&path, &body, self.wait + transport.timeout);
        tokio::pin!(request);
        let answer = tokio::select! {
            biased;
            answer = request.as_mut() => answer,
            () = tell.closed() => return self.cancel(request).await,
        };
        let answer = answer
            .map_err(|failure| failure.into_store(Effect::Change))
            .and_then(deliveries)
            .map(|deliveries| Held { call: Some((self, deliveries, under_way)), runtime: Handle::current() });
        // What comes back here is dropped, and so given back.
        drop(tell.send(answer));
    }

    /// The caller is gone: ends the request and gives back what it brings.
    async fn cancel(&self, mut request: impl Future<Output = Result<Deliveries, Failure>> + Unpin) {
        let path = format!("/v1/queues/{}/receives/{}", self.queue, self.cancel_id);
        for round in 0..CANCEL_TRIES {
            // Not found: it has not arrived yet, it has been answered, or it is at another server.
            let found = match self.client.transport.delete::<()>(&path).await {
                Ok(()) => true,
                Err(Failure::Refused(..)) => false,
                Err(_) => return,
            };
            let patience =
                if found { self.client.transport.timeout } else { Duration::from_millis(10 << round) };
            if let Ok(answer) = tokio::time::timeout(patience, &mut request).await {
                if let Ok(deliveries) = answer.map_err(|f| f.into_store(Effect::Change)).and_then(deliveries)
                {
                    self.give_back(deliveries).await;
                }
                return;
            }
        }
    }

    /// Puts messages back as if they had not been received.
    async fn give_back(&self, deliveries: Vec<Delivery>) {
        if self.keeps || deliveries.is_empty() {
            return;
        }
        let defer = |delivery: Delivery| Settle::new(delivery.receipt, How::Defer { after_ms: 0 });
        settle_quietly(&self.client, &self.queue, deliveries.into_iter().map(defer).collect()).await;
    }
}

fn deliveries(answer: Deliveries) -> Result<Vec<Delivery>, StoreError> {
    let unreadable =
        |error| StoreError::OutcomeUnknown(format!("the server's answer cannot be read: {error}"));
    answer.deliveries.into_iter().map(|item| Delivery::try_from(item).map_err(unreadable)).collect()
}
