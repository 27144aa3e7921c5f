//! The administration seam over HTTP.

use std::collections::HashMap;
use std::fmt::Write as _;

use async_trait::async_trait;
use hapax_core::policy::tier::ObservedQueue;
use hapax_core::{
    AdminError, Browse, Discarded, Examination, GroupId, IdempotencyKey, Maintenance, MessageId,
    MessageState, MessageView, Page, QueueAdmin, QueueConfig, QueueInfo, QueueName, QueueStats,
    RedriveRequest, RedriveTask, Revision, StoreError, StoreStatus, Transfer, validate,
};
use hapax_observe::{Advice, Story};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde::Deserialize;

use crate::Client;
use crate::transport::{Effect, Failure};
use crate::wire::{
    CountResponse, DiscardBody, HaltedGroups, MessagesPage, PauseBody, PurgeBody, QueueFigures, QueueItem,
    QueuesResponse, RedriveBody, RedrivesResponse, ReleaseMessagesBody, ResumeBody, ServerStatus,
    StatsResponse, StoriesResponse,
};

fn read_error(failure: Failure) -> StoreError {
    failure.into_store_error(Effect::None)
}

fn change_error(failure: Failure) -> StoreError {
    failure.into_store_error(Effect::Change)
}

fn admin_error(failure: Failure) -> AdminError {
    failure.into_admin_error(Effect::Change)
}

/// The body of the response to a create.
#[derive(Deserialize)]
struct CreateResponse {
    created: bool,
}

fn state_parameter(state: MessageState) -> &'static str {
    match state {
        MessageState::Ready => "ready",
        MessageState::Delayed => "delayed",
        MessageState::InFlight => "in-flight",
        MessageState::Parked => "parked",
    }
}

#[async_trait]
impl QueueAdmin for Client {
    async fn create_queue_with_interval(
        &self,
        name: &QueueName,
        config: QueueConfig,
        interval_ms: u64,
    ) -> Result<bool, AdminError> {
        let mut path = format!("/v1/queues/{name}");
        if interval_ms > 0 {
            let _ = write!(path, "?interval_ms={interval_ms}");
        }
        let created: Result<CreateResponse, _> = self.transport.put(&path, &config).await;
        created.map(|answer| answer.created).map_err(admin_error)
    }

    async fn queue(&self, name: &QueueName) -> Result<QueueInfo, StoreError> {
        let item: QueueItem = self.transport.get(&format!("/v1/queues/{name}")).await.map_err(read_error)?;
        Ok(item.into())
    }

    async fn set_queue(
        &self,
        name: &QueueName,
        config: QueueConfig,
        expected: Option<Revision>,
    ) -> Result<Revision, AdminError> {
        let mut path = format!("/v1/queues/{name}/config");
        if let Some(expected) = expected {
            let _ = write!(path, "?revision={expected}");
        }
        let item: QueueItem = self.transport.put(&path, &config).await.map_err(admin_error)?;
        Ok(item.revision)
    }

    async fn pause_queue(&self, name: &QueueName, by: &str, reason: Option<&str>) -> Result<(), StoreError> {
        let body = PauseBody { by: Some(by.to_owned()), reason: reason.map(str::to_owned) };
        self.transport.post(&format!("/v1/queues/{name}/pause"), &body).await.map_err(change_error)
    }

    async fn resume_queue(&self, name: &QueueName, by: &str) -> Result<(), StoreError> {
        let body = ResumeBody { by: Some(by.to_owned()) };
        self.transport.post(&format!("/v1/queues/{name}/resume"), &body).await.map_err(change_error)
    }

    async fn delete_queue(&self, name: &QueueName) -> Result<(), StoreError> {
        self.transport.delete(&format!("/v1/queues/{name}")).await.map_err(change_error)
    }

    async fn queues(&self) -> Result<Vec<QueueInfo>, StoreError> {
        let answer: QueuesResponse = self.transport.get("/v1/queues").await.map_err(read_error)?;
        Ok(answer.queues.into_iter().map(Into::into).collect())
    }

    async fn stats(&self, name: &QueueName) -> Result<QueueStats, StoreError> {
        self.transport.get(&format!("/v1/queues/{name}/stats")).await.map_err(read_error)
    }

    async fn stats_of(&self, names: &[QueueName]) -> Result<Vec<Option<QueueStats>>, StoreError> {
        let found: HashMap<QueueName, QueueStats> = match names {
            [] | [_] => HashMap::new(),
            // A key that may not list queues asks for each.
            _ => match self.figures().await {
                Ok(figures) => figures.into_iter().map(|queue| (queue.name, queue.stats)).collect(),
                Err(error) if error.is_retryable() => return Err(error),
                Err(_) => HashMap::new(),
            },
        };
        let mut all = Vec::with_capacity(names.len());
        for name in names {
            all.push(match found.get(name) {
                Some(stats) => Some(*stats),
                // It does not exist, or the answer says why it is not shown.
                None => match self.stats(name).await {
                    Ok(stats) => Some(stats),
                    Err(StoreError::NoSuchQueue(_)) => None,
                    Err(error) => return Err(error),
                },
            });
        }
        Ok(all)
    }

    async fn observed(&self, name: &QueueName) -> Result<Option<ObservedQueue>, StoreError> {
        self.transport.get(&format!("/v1/queues/{name}/observed")).await.map(Some).map_err(read_error)
    }

    async fn purge_with_interval(&self, name: &QueueName, interval_ms: u64) -> Result<u64, AdminError> {
        let path = format!("/v1/queues/{name}/purge");
        let body = PurgeBody { interval_ms: (interval_ms > 0).then_some(interval_ms) };
        let answer: CountResponse = self.transport.post(&path, &body).await.map_err(admin_error)?;
        Ok(answer.count)
    }

    async fn browse(&self, name: &QueueName, browse: Browse) -> Result<Page<MessageView>, StoreError> {
        let mut path = format!("/v1/queues/{name}/messages?limit={}", browse.limit);
        if let Some(state) = browse.state {
            let _ = write!(path, "&state={}", state_parameter(state));
        }
        if let Some(id) = browse.id {
            let _ = write!(path, "&id={id}");
        }
        if let Some(after) = browse.after {
            let _ = write!(path, "&after={after}");
        }
        let answer: MessagesPage = self.transport.get(&path).await.map_err(read_error)?;
        let unreadable =
            |why| StoreError::Unavailable(format!("the server's response cannot be read: {why}"));
        let views = answer.messages.into_iter().map(MessageView::try_from).collect::<Result<Vec<_>, _>>();
        Ok(Page { items: views.map_err(unreadable)?, next: answer.next })
    }

    async fn discard(
        &self,
        name: &QueueName,
        ids: Vec<MessageId>,
        by: &str,
    ) -> Result<Discarded, StoreError> {
        validate::batch("ids", ids.len())?;
        let body = DiscardBody { ids, by: Some(by.to_owned()) };
        self.transport.post(&format!("/v1/queues/{name}/discard"), &body).await.map_err(change_error)
    }

    async fn release(&self, name: &QueueName, ids: Vec<MessageId>) -> Result<u64, StoreError> {
        validate::batch("ids", ids.len())?;
        let path = format!("/v1/queues/{name}/release");
        let answer: CountResponse =
            self.transport.post(&path, &ReleaseMessagesBody { ids }).await.map_err(change_error)?;
        Ok(answer.count)
    }

    async fn release_group(&self, name: &QueueName, group: &GroupId) -> Result<(), AdminError> {
        let group = utf8_percent_encode(group.as_str(), NON_ALPHANUMERIC);
        let path = format!("/v1/queues/{name}/halted/{group}/release");
        self.transport.post(&path, &()).await.map_err(admin_error)
    }

    async fn halted_groups(&self, name: &QueueName) -> Result<Vec<GroupId>, StoreError> {
        let answer: HaltedGroups =
            self.transport.get(&format!("/v1/queues/{name}/halted")).await.map_err(read_error)?;
        Ok(answer.groups)
    }

    async fn start_redrive(&self, request: RedriveRequest) -> Result<RedriveTask, AdminError> {
        self.transport.post("/v1/redrives", &RedriveBody::from(request)).await.map_err(admin_error)
    }

    async fn redrives(&self, from: &QueueName) -> Result<Vec<RedriveTask>, StoreError> {
        let answer: RedrivesResponse =
            self.transport.get(&format!("/v1/redrives?from={from}")).await.map_err(read_error)?;
        Ok(answer.redrives)
    }

    async fn cancel_redrive(&self, id: u64) -> Result<RedriveTask, AdminError> {
        self.transport.delete(&format!("/v1/redrives/{id}")).await.map_err(admin_error)
    }

    async fn status(&self) -> Result<StoreStatus, StoreError> {
        let ServerStatus { status, withheld, .. } = self.server_status().await?;
        Ok(StoreStatus { withheld, ..status })
    }

    async fn examine(&self) -> Result<Examination, StoreError> {
        self.transport.get("/v1/examine").await.map_err(read_error)
    }

    /// Ends the use of this client and its clones. The server continues to run, and running calls finish.
    async fn close(&self) -> Result<(), StoreError> {
        self.transport.close();
        Ok(())
    }

    fn maintenance(&self) -> Option<&dyn Maintenance> {
        Some(self)
    }

    fn transfer(&self) -> Option<&dyn Transfer> {
        Some(self)
    }
}

#[async_trait]
impl Maintenance for Client {
    async fn resume(&self, by: &str) -> Result<(), StoreError> {
        let body = ResumeBody { by: Some(by.to_owned()) };
        self.transport.post("/v1/resume", &body).await.map_err(change_error)
    }
}

impl Client {
    /// The server's version and the status of its store, with whether this client's key may see all of it.
    pub async fn server_status(&self) -> Result<ServerStatus, StoreError> {
        self.transport.get::<ServerStatus>("/v1/status").await.map_err(read_error)
    }

    /// The figures of all queues whose counters this client's key may see.
    pub async fn figures(&self) -> Result<Vec<QueueFigures>, StoreError> {
        let answer: StatsResponse = self.transport.get("/v1/stats").await.map_err(read_error)?;
        Ok(answer.queues)
    }

    /// What happened to a message, and why.
    pub async fn story(&self, queue: &QueueName, id: MessageId) -> Result<Story, AdminError> {
        let path = format!("/v1/queues/{queue}/messages/{id}/story");
        self.transport.get(&path).await.map_err(|failure| failure.into_admin_error(Effect::None))
    }

    /// What happened to the messages with a key, and why.
    pub async fn key_stories(
        &self,
        queue: &QueueName,
        key: &IdempotencyKey,
    ) -> Result<Vec<Story>, StoreError> {
        let key = utf8_percent_encode(key.as_str(), NON_ALPHANUMERIC);
        let path = format!("/v1/queues/{queue}/keys/{key}/stories");
        let answer: StoriesResponse = self.transport.get(&path).await.map_err(read_error)?;
        Ok(answer.stories)
    }

    /// What an operator should know and change.
    pub async fn advice(&self, producer_retry_ms: Option<u64>) -> Result<Advice, StoreError> {
        let query = producer_retry_ms.map_or_else(String::new, |ms| format!("?producer_retry_ms={ms}"));
        self.transport.get(&format!("/v1/advice{query}")).await.map_err(read_error)
    }
}
