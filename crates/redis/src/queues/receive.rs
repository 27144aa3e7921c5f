//! Receives.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::cancel_safe::{self, Fetch};
use hapax_core::{Delivery, QueueName, Receive, StoreError, validate};

use super::message::{DeliveryRef, Stored};
use super::{POLL_MS_MIN, Queues};
use crate::keys::shard_of_queue;
use crate::script::QueueScript;

/// Bytes of bodies in one answer; the message that goes beyond it is the last one.
const BYTES_MAX: u64 = 16 * 1024 * 1024;
/// Looks in a row that find more work of time than one of them may do.
const ROUNDS_MAX: usize = 50;

/// What a look has found.
struct Look {
    deliveries: Vec<Delivery>,
    now_ms: u64,
    /// When a lease or a delay ends; 0 if none does.
    next_ms: u64,
    wait_ms: u64,
}

/// One receive, which may be dropped.
struct Fetching {
    queues: Arc<Queues>,
    name: QueueName,
    ask: Receive,
}

impl Fetch for Fetching {
    async fn fetch(&self, gone: impl Future<Output = ()> + Send) -> Result<Vec<Delivery>, StoreError> {
        let mut gone = std::pin::pin!(gone);
        let (start, mut first_ms, mut poll_ms) = (Instant::now(), None, POLL_MS_MIN);
        loop {
            // Registered before the question: a change after the answer is not missed.
            let registration = self.queues.waiters.register(vec![self.name.as_str().to_owned()]);
            let look = {
                let _ticket = self.queues.asking.begin();
                self.queues.look(&self.name, &self.ask).await?
            };
            // Redis's clock decides; ours only bounds the wait in case that one stands still.
            let end_ms = *first_ms.get_or_insert(look.now_ms) + look.wait_ms;
            let is_stuck = start.elapsed() > Duration::from_millis(2 * look.wait_ms + 10_000);
            if !look.deliveries.is_empty() || look.now_ms >= end_ms || is_stuck {
                return Ok(look.deliveries);
            }
            let due_ms = if look.next_ms > look.now_ms { look.next_ms - look.now_ms } else { poll_ms };
            let sleep_ms = poll_ms.min(due_ms).min(end_ms - look.now_ms).max(1);
            tokio::select! {
                () = registration.wait(Duration::from_millis(sleep_ms)) => {}
                () = &mut gone => return Ok(Vec::new()),
            }
            poll_ms = (2 * poll_ms).min(self.queues.poll_ms_max(shard_of_queue(&self.name)));
        }
    }

    async fn give_back(&self, deliveries: Vec<Delivery>) {
        let named = deliveries.iter().rev().filter_map(|one| DeliveryRef::of(&self.name, &one.receipt).ok());
        self.queues.undo(&self.name, named.collect()).await;
    }
}

impl Queues {
    pub(super) async fn receive(
        self: &Arc<Self>,
        name: &QueueName,
        ask: Receive,
    ) -> Result<Vec<Delivery>, StoreError> {
        validate::receive(&ask)?;
        let runtime = tokio::runtime::Handle::current();
        let spawn = move |work| drop(runtime.spawn(work));
        let fetching = Fetching { queues: self.clone(), name: name.clone(), ask: ask.clone() };
        cancel_safe::receive(&ask, fetching, spawn).await
    }

    /// Takes what is ready now.
    async fn look(&self, name: &QueueName, ask: &Receive) -> Result<Look, StoreError> {
        for _ in 0..ROUNDS_MAX {
            let args = |config: &hapax_core::QueueConfig| {
                vec![
                    ask.max.to_string().into_bytes(),
                    ask.lease_ms.unwrap_or(config.lease_ms).to_string().into_bytes(),
                    ask.consumer.as_deref().unwrap_or_default().into(),
                    if ask.ack_on_receive { "1".into() } else { "0".into() },
                    ask.attempt_id.as_deref().unwrap_or_default().into(),
                    BYTES_MAX.to_string().into_bytes(),
                ]
            };
            let mut answer = self.ask(QueueScript::Receive, name, args).await?;
            self.after(name, &answer).await;
            let stored =
                answer.values.rows()?.into_iter().map(Stored::read).collect::<Result<Vec<_>, _>>()?;
            let (next_ms, more) = (answer.values.number()?, answer.values.number()? == 1);
            if answer.status == "crowded" {
                let in_flight = answer.values.number()?;
                return Err(StoreError::TooManyInFlight { queue: name.clone(), in_flight });
            }
            for one in &stored {
                self.saw_fence(one.fence);
            }
            if stored.is_empty() && more {
                continue;
            }
            if ask.attempt_id.is_some() && !stored.is_empty() {
                // Another receive of the same attempt may wait.
                self.waiters.freed(name.as_str());
            }
            let now_ms = answer.now_ms;
            let deliveries = stored.into_iter().map(|one| one.delivery(name, now_ms)).collect();
            let wait_ms = ask.wait_ms.unwrap_or(answer.config()?.wait_ms);
            return Ok(Look { deliveries, now_ms, next_ms, wait_ms });
        }
        Ok(Look { deliveries: Vec::new(), now_ms: 0, next_ms: 1, wait_ms: 0 })
    }
}
