//! The queues' part of the seams. A store that was opened without queues has none.

use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::capabilities::CounterScope;
use hapax_core::policy;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, Delivery, Discarded, Examination, Extend, GroupId, Ledger as _,
    MessageId, MessageView, NewMessage, Order, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName,
    QueueStats, QueueStore, Receive, RedriveRequest, RedriveTask, RemainingLease, Revision, SendError, Sent,
    Settle, SettleError, Settled, StoreError, StoreStatus, SupportedSettlements, WakeUp,
};

use super::Queues;
use super::receive::POLL_MS_MAX;
use crate::RedisStore;

const NONE: &str =
    "the Redis store has a ledger and no queues; keep queues in an embedded store, PostgreSQL or a server";

impl RedisStore {
    /// The queues, for an operation on this one.
    fn queues_for(&self, name: &QueueName) -> Result<&Arc<Queues>, StoreError> {
        self.base.begin()?;
        self.base.queues.as_ref().ok_or_else(|| StoreError::NoSuchQueue(name.clone()))
    }
}

#[async_trait]
impl QueueStore for RedisStore {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::none("redis");
        if self.base.queues.is_none() {
            return can;
        }
        let ledger = self.ledger_capabilities();
        can.leases = true;
        can.settles = SupportedSettlements::ALL;
        can.atomic_settle = true;
        (can.durable_lease, can.fence) = (ledger.durable, ledger.fence);
        (can.order, can.halt_group) = (Order::PerGroup, true);
        (can.priorities, can.browse, can.redrive) = (true, true, true);
        can.wake_up = WakeUp::Poll { every_ms: POLL_MS_MAX };
        can.dedup_ms_max = policy::RETENTION_MS_MAX;
        can.message_bytes_max = policy::MESSAGE_BYTES_MAX;
        can.counters = CounterScope::Store;
        can
    }

    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        self.queues_for(queue)?.send(queue, batch).await
    }

    async fn receive(&self, queue: &QueueName, ask: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.queues_for(queue)?.receive(queue, ask).await
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.queues_for(queue)?.settle(queue, batch).await
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.queues_for(queue)?.extend(queue, batch).await
    }
}

#[async_trait]
impl QueueAdmin for RedisStore {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        let Some(queues) = &self.base.queues else { return Err(AdminError::Refused(NONE.to_owned())) };
        self.base.begin()?;
        policy::tier::fits_store(&config, &self.capabilities())?;
        queues.create(name, &config, interval_ms).await
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        Ok(self.queues_for(name)?.read_info(name).await?.0)
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        self.queues_for(name)?.set(name, &config, expected).await
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        self.queues_for(name)?.pause(name, by, reason).await
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        self.queues_for(name)?.resume(name, by).await
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        match self.queues_for(name)?.clear(name, "delete", 0).await {
            Ok(_) => Ok(()),
            Err(AdminError::Store(error)) => Err(error),
            Err(error) => Err(StoreError::Invalid(error.to_string())),
        }
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        self.base.begin()?;
        match &self.base.queues {
            Some(queues) => queues.infos().await,
            None => Ok(Vec::new()),
        }
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        self.queues_for(name)?.stats(name).await
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        self.queues_for(name)?.clear(name, "purge", interval_ms).await
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        self.queues_for(name)?.browse(name, &browse).await
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        self.queues_for(name)?.discard(name, &ids, by).await
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        self.queues_for(name)?.release(name, &ids).await
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        self.queues_for(name)?.release_group(name, group).await
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        self.queues_for(name)?.halted(name).await
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.queues_for(&request.from)?.start_redrive(request).await
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        self.queues_for(from)?.redrives(from).await
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.base.begin()?;
        match &self.base.queues {
            Some(queues) => queues.cancel_redrive(id).await,
            None => Err(AdminError::NotFound(format!("redrive {id}"))),
        }
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        // An error says that Redis cannot be reached.
        self.base.runner.topology.refresh().await?;
        let warnings = self.base.runner.refusal().map(|error| error.to_string()).into_iter().collect();
        let (messages, bytes) = match &self.base.queues {
            Some(queues) => queues.sums().await?,
            None => (0, 0),
        };
        Ok(StoreStatus { stopped: self.base.stopped(), warnings, messages, bytes, ..StoreStatus::default() })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.base.guard.examine().await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.shut_down();
        self.base.ledger.quiet().await;
        if let Some(queues) = &self.base.queues {
            queues.quiet().await;
        }
        Ok(())
    }
}
