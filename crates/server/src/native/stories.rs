//! What happened to a message or a key and why, and what an operator should change.

use std::sync::Arc;

use axum::extract::{Path, State};
use hapax_client::wire::StoriesResponse;
use hapax_core::policy::tier::ObservedQueue;
use hapax_core::{IdempotencyKey, MessageId, QueueName};
use hapax_observe::advice::{self, Advice, Known};
use hapax_observe::{Story, story};
use serde::Deserialize;

use super::Api;
use super::input::{Caller, Params};
use super::problem::{ApiError, JsonResult};

pub(super) async fn of_message(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path((queue, id)): Path<(String, String)>,
) -> JsonResult<Story> {
    let queue = caller.allowed_queue("BrowseMessages", &queue)?;
    let id: MessageId =
        id.parse().map_err(|error: hapax_core::name::NameError| ApiError::invalid(error.to_string()))?;
    let story = story::of_message(&*native.store, native.observer(), &queue, id).await?;
    let unknown =
        || hapax_core::AdminError::NotFound(format!("message {id} in queue {queue}, nor anything about it"));
    Ok(axum::Json(story.ok_or_else(unknown)?))
}

pub(super) async fn of_key(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path((queue, key)): Path<(String, String)>,
) -> JsonResult<StoriesResponse> {
    let queue = caller.allowed_queue("BrowseMessages", &queue)?;
    let key = IdempotencyKey::new(key).map_err(|error| ApiError::invalid(error.to_string()))?;
    let stories = story::of_key(&*native.store, native.observer(), &queue, &key).await?;
    Ok(axum::Json(StoriesResponse { stories }))
}

/// The latest minutes of a queue, as this process saw them.
pub(super) async fn observed(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> JsonResult<ObservedQueue> {
    let queue = caller.allowed_queue("GetQueueAttributes", &queue)?;
    native.store.queue(&queue).await?;
    Ok(axum::Json(native.observer().and_then(|observer| observer.window(&queue)).unwrap_or_default()))
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct AdviceParams {
    /// How long producers keep repeating a send, in ms.
    producer_retry_ms: Option<u64>,
}

/// A key for some queues is told about these alone.
pub(super) async fn advise(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Params(AdviceParams { producer_retry_ms }): Params<AdviceParams>,
) -> JsonResult<Advice> {
    caller.check_action("GetAdvice")?;
    let shows = |queue: &QueueName| caller.check_queue("GetQueueAttributes", queue).is_ok();
    let shows: Option<&(dyn Fn(&QueueName) -> bool + Sync)> =
        if caller.identity().may_see_all() { None } else { Some(&shows) };
    Ok(axum::Json(native.advice(producer_retry_ms, shows).await?))
}

impl Api {
    /// The findings about queues that `shows` accepts, all if it is `None`, and then about the store.
    pub(super) async fn advice(
        &self,
        producer_retry_ms: Option<u64>,
        shows: Option<&(dyn Fn(&QueueName) -> bool + Sync)>,
    ) -> Result<Advice, hapax_core::StoreError> {
        let ran_unprotected = self.process_samples.sum("hapax_http_ran_unprotected_total");
        let known = Known { observer: self.observer(), ran_unprotected, producer_retry_ms, shows };
        advice::of_store(&*self.store, &known, shows.is_none()).await
    }
}
