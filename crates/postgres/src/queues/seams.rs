//! The queues' part of the seams.

use async_trait::async_trait;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, CounterScope, Delivery, Discarded, Examination, Extend, GroupId,
    MessageId, MessageView, NewMessage, Order, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName,
    QueueStats, QueueStore, Receive, RedriveRequest, RedriveTask, RemainingLease, Revision, SendError, Sent,
    Settle, SettleError, Settled, StoreError, StoreStatus, SupportedSettlements, WakeUp, policy,
};

use crate::PostgresStore;

impl PostgresStore {
    pub(super) fn opened(&self) -> Result<&std::sync::Arc<super::Inner>, StoreError> {
        self.queues.inner.begin()?;
        Ok(&self.queues.inner)
    }
}

#[async_trait]
impl QueueStore for PostgresStore {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::none("postgres");
        can.leases = true;
        can.settles = SupportedSettlements::ALL;
        (can.atomic_settle, can.atomic_moves, can.settle_ends_claims) = (true, true, true);
        (can.durable_lease, can.fence) = (self.base.durable && self.base.options.syncs_receives(), true);
        (can.order, can.halt_group) = (Order::PerGroup, true);
        (can.priorities, can.browse, can.redrive) = (true, true, true);
        can.wake_up = WakeUp::Push;
        can.dedup_ms_max = policy::RETENTION_MS_MAX;
        can.message_bytes_max = policy::MESSAGE_BYTES_MAX;
        can.counters = CounterScope::Process;
        can
    }

    async fn send(&self, queue: &QueueName, batch: Vec<NewMessage>) -> Batch<Sent, SendError> {
        self.opened()?.send(queue, batch).await
    }

    async fn receive(&self, queue: &QueueName, ask: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.opened()?.receive(queue, ask).await
    }

    async fn settle(&self, queue: &QueueName, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        self.opened()?.settle(queue, batch).await
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.opened()?.extend(queue, batch).await
    }
}

#[async_trait]
impl QueueAdmin for PostgresStore {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        self.opened()?.create_queue(name, config, interval_ms).await
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        Ok(self.opened()?.read_queue(name).await?.as_ref().clone().info())
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        self.opened()?.set_queue(name, config, expected).await
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        self.opened()?.pause(name, by, reason).await
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        self.opened()?.resume(name, by).await
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        self.opened()?.delete_queue(name).await
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        self.opened()?.list().await
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        self.opened()?.stats(name).await
    }

    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        self.opened()?.stats_of(names).await
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        self.opened()?.purge(name, interval_ms).await
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        self.opened()?.browse(name, browse).await
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        self.opened()?.discard(name, ids, by).await
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        self.opened()?.release(name, ids).await
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        self.opened()?.release_group(name, group).await
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        self.opened()?.halted_groups(name).await
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.opened()?.start_redrive(request).await
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        self.opened()?.redrives(from).await
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.opened()?.cancel_redrive(id).await
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        self.opened()?.status().await
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.opened()?;
        crate::findings::examine(&self.base).await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.shut_down();
        Ok(())
    }

    fn transfer(&self) -> Option<&dyn hapax_core::Transfer> {
        Some(self)
    }
}
