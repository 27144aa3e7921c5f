//! The queues' part of the seams. There are no queues in Redis: whatever needs one is refused.

use async_trait::async_trait;
use hapax_core::{
    AdminError, Batch, Browse, Capabilities, Delivery, Discarded, Examination, Extend, GroupId, MessageId,
    MessageView, NewMessage, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName, QueueStats, QueueStore,
    Receive, RedriveRequest, RedriveTask, RemainingLease, Revision, SendError, Sent, Settle, SettleError,
    Settled, StoreError, StoreStatus,
};

use crate::RedisStore;

const NONE: &str =
    "the Redis store has a ledger and no queues; keep queues in an embedded store, PostgreSQL or a server";

fn none() -> AdminError {
    AdminError::Refused(NONE.to_owned())
}

fn no_such(name: &QueueName) -> StoreError {
    StoreError::NoSuchQueue(name.clone())
}

#[async_trait]
impl QueueStore for RedisStore {
    fn capabilities(&self) -> Capabilities {
        Capabilities::none("redis")
    }

    async fn send(&self, queue: &QueueName, _: Vec<NewMessage>) -> Batch<Sent, SendError> {
        Err(no_such(queue))
    }

    async fn receive(&self, queue: &QueueName, _: Receive) -> Result<Vec<Delivery>, StoreError> {
        Err(no_such(queue))
    }

    async fn settle(&self, queue: &QueueName, _: Vec<Settle>) -> Batch<Settled, SettleError> {
        Err(no_such(queue))
    }

    async fn extend(&self, queue: &QueueName, _: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        Err(no_such(queue))
    }
}

#[async_trait]
impl QueueAdmin for RedisStore {
    async fn create_queue_with_interval(
        &self,
        _: &QueueName,
        _: QueueConfig,
        _: u64,
    ) -> Result<bool, AdminError> {
        Err(none())
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        Err(no_such(name))
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        _: QueueConfig,
        _: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        Err(no_such(name).into())
    }

    async fn pause_queue(&self, name: &QueueName, _: &str, _: Option<&str>) -> Result<(), StoreError> {
        Err(no_such(name))
    }

    async fn resume_queue(&self, name: &QueueName, _: &str) -> Result<(), StoreError> {
        Err(no_such(name))
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        Err(no_such(name))
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        Ok(Vec::new())
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        Err(no_such(name))
    }

    async fn purge_with_interval(&self, name: &QueueName, _: u64) -> Result<u64, AdminError> {
        Err(no_such(name).into())
    }

    async fn browse(&self, name: &QueueName, _: Browse) -> Result<Page<MessageView>, StoreError> {
        Err(no_such(name))
    }

    async fn discard(&self, name: &QueueName, _: Vec<MessageId>, _: &str) -> Result<Discarded, StoreError> {
        Err(no_such(name))
    }

    async fn release(&self, name: &QueueName, _: Vec<MessageId>) -> Result<u64, StoreError> {
        Err(no_such(name))
    }

    async fn release_group(&self, name: &QueueName, _: &GroupId) -> Result<(), AdminError> {
        Err(no_such(name).into())
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        Err(no_such(name))
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        Err(no_such(&request.from).into())
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        Err(no_such(from))
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        Err(AdminError::NotFound(format!("redrive {id}")))
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        // An error says that Redis cannot be reached.
        self.base.runner.topology.refresh().await?;
        let warnings = self.base.runner.refusal().map(|error| error.to_string()).into_iter().collect();
        Ok(StoreStatus { stopped: self.base.stopped(), warnings, ..StoreStatus::default() })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.base.guard.examine().await
    }

    async fn close(&self) -> Result<(), StoreError> {
        self.shut_down();
        self.base.ledger.quiet().await;
        Ok(())
    }
}
