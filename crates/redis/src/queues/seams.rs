//! The queues' part of the seams.

use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::capabilities::CounterScope;
use hapax_core::policy;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, Delivery, Discarded, Examination, Extend, GroupId, Ledger as _,
    MessageId, MessageView, NewMessage, Order, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName,
    QueueStats, QueueStore, Receive, RedriveRequest, RedriveTask, RemainingLease, Revision, SendError, Sent,
    Settle, SettleError, Settled, StoreError, StoreStatus, SupportedSettlements, TokenError, Transfer,
    WakeUp, validate,
};

use super::{POLL_MS_MAX, Queues};
use crate::RedisStore;
use crate::error::question;
use crate::keys::{shard_of, shard_of_queue};

impl RedisStore {
    /// The queues, unless the store is closed.
    fn queues_part(&self) -> Result<&Arc<Queues>, StoreError> {
        self.base.begin()?;
        Ok(&self.base.queues)
    }
}

#[async_trait]
impl QueueStore for RedisStore {
    fn capabilities(&self) -> Capabilities {
        let mut can = Capabilities::none("redis");
        let ledger = self.ledger_capabilities();
        can.leases = true;
        can.settles = SupportedSettlements::ALL;
        (can.atomic_settle, can.settle_ends_claims) = (true, true);
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
        self.queues_part()?.send(queue, batch).await
    }

    async fn receive(&self, queue: &QueueName, ask: Receive) -> Result<Vec<Delivery>, StoreError> {
        self.queues_part()?.receive(queue, ask).await
    }

    async fn settle(&self, queue: &QueueName, mut batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let queues = self.queues_part()?;
        validate::batch("settle", batch.len())?;
        // A claim in another shard is ended before: a stale token blocks the settle.
        let own = shard_of_queue(queue);
        let is_foreign =
            |settle: &Settle| settle.claim.as_ref().is_some_and(|end| shard_of(&end.id.scope) != own);
        if !batch.iter().any(is_foreign) {
            return queues.settle(queue, batch).await;
        }
        let mut blocked = vec![None; batch.len()];
        for (settle, blocked) in batch.iter_mut().zip(&mut blocked).filter(|(settle, _)| is_foreign(settle)) {
            let end = settle.claim.take().into_iter().collect();
            *blocked = self.end(end).await?.pop().and_then(Result::err);
        }
        let free = batch.into_iter().zip(&blocked).filter(|(_, blocked)| blocked.is_none());
        let mut settled = queues.settle(queue, free.map(|(settle, _)| settle).collect()).await?.into_iter();
        let each = |blocked: Option<TokenError>| match blocked {
            Some(error) => Err(SettleError::Claim(error)),
            None => settled.next().expect("one answer per settle"),
        };
        Ok(blocked.into_iter().map(each).collect())
    }

    async fn extend(&self, queue: &QueueName, batch: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        self.queues_part()?.extend(queue, batch).await
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
        let queues = self.queues_part()?;
        policy::tier::fits_store(&config, &self.capabilities())?;
        queues.create(name, &config, interval_ms).await
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        Ok(question(self.queues_part()?.read_info(name).await)?.0)
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        policy::tier::fits_store(&config, &self.capabilities())?;
        self.queues_part()?.set(name, &config, expected).await
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        self.queues_part()?.pause(name, by, reason).await
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        self.queues_part()?.resume(name, by).await
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        match self.queues_part()?.clear(name, "delete", 0).await {
            Ok(_) => Ok(()),
            Err(AdminError::Store(error)) => Err(error),
            Err(error) => Err(StoreError::Invalid(error.to_string())),
        }
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        question(self.queues_part()?.infos().await)
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        question(self.queues_part()?.stats(name).await)
    }

    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        question(self.queues_part()?.stats_of(names).await)
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        self.queues_part()?.clear(name, "purge", interval_ms).await
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        question(self.queues_part()?.browse(name, &browse).await)
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        self.queues_part()?.discard(name, &ids, by).await
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        self.queues_part()?.release(name, &ids).await
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        self.queues_part()?.release_group(name, group).await
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        question(self.queues_part()?.halted(name).await)
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.queues_part()?.start_redrive(request).await
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        question(self.queues_part()?.redrives(from).await)
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.queues_part()?.cancel_redrive(id).await
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        // An error says that Redis cannot be reached.
        self.base.runner.topology.refresh().await?;
        let warnings = self.base.runner.refusal().map(|error| error.to_string()).into_iter().collect();
        let (messages, bytes) = question(self.base.queues.sums().await)?;
        Ok(StoreStatus { stopped: self.base.stopped(), warnings, messages, bytes, ..StoreStatus::default() })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.base.guard.examine().await
    }

    fn transfer(&self) -> Option<&dyn Transfer> {
        Some(self)
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.shut_down();
        self.base.ledger.quiet().await;
        self.base.queues.quiet().await;
        Ok(())
    }
}
