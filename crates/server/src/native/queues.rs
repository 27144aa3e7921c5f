//! Queues and their configuration.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use hapax_client::wire::{
    CountResponse, PauseBody, PurgeBody, QueueFigures, QueueItem, QueuesResponse, ResumeBody, StatsResponse,
    pause_reason_problem,
};
use hapax_core::{AdminError, QueueConfig, QueueName, QueueStats, Revision};
use http::StatusCode;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::Api;
use super::input::{Caller, Json, Params, parse};
use super::problem::{ApiError, JsonResult};

pub(super) async fn list(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<QueuesResponse> {
    caller.check_action("ListQueues")?;
    let queues = native.store.queues().await?;
    let visible = queues.into_iter().filter(|info| caller.may_see_queue(&info.name));
    Ok(axum::Json(QueuesResponse { queues: visible.map(QueueItem::from).collect() }))
}

/// A queue that was created or already existed.
#[derive(Serialize)]
struct Created {
    created: bool,
    #[serde(flatten)]
    queue: QueueItem,
}

/// Parses a new queue's configuration. Without a `kind`, the name decides whether it is FIFO.
fn config_of(name: &QueueName, mut fields: Map<String, Value>) -> Result<QueueConfig, ApiError> {
    if name.is_fifo() && !fields.contains_key("kind") {
        fields.insert("kind".to_owned(), "fifo".into());
    }
    parse(Value::Object(fields).to_string().as_bytes())
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct CreateParams {
    /// Fails if a queue of this name was deleted within this time, in ms.
    interval_ms: u64,
}

pub(super) async fn create(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Params(CreateParams { interval_ms }): Params<CreateParams>,
    Json(fields): Json<Map<String, Value>>,
) -> Result<Response, ApiError> {
    let name = caller.allowed_queue("CreateQueue", &queue)?;
    let config = config_of(&name, fields)?;
    caller.check_dead_letter_right(&config)?;
    let created = native.store.create_queue_with_interval(&name, config, interval_ms).await?;
    let queue = native.store.queue(&name).await?.into();
    let status = if created { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, axum::Json(Created { created, queue })).into_response())
}

pub(super) async fn show(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> JsonResult<QueueItem> {
    let name = caller.allowed_queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(native.store.queue(&name).await?.into()))
}

/// Merges as in RFC 7396: given values replace, null restores the default.
fn merge(target: &mut Value, change: Value) {
    let Value::Object(change) = change else {
        *target = change;
        return;
    };
    if !target.is_object() {
        *target = Value::Object(Map::new());
    }
    let Value::Object(target) = target else { return };
    for (key, value) in change {
        if value.is_null() {
            target.remove(&key);
        } else {
            merge(target.entry(key).or_insert(Value::Null), value);
        }
    }
}

#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ChangeParams {
    /// Fails unless the configuration still has this revision.
    revision: Option<Revision>,
}

/// Maximum number of attempts to apply a patch while others change the configuration.
const CHANGES_MAX: usize = 20;

pub(super) async fn change(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Params(ChangeParams { revision }): Params<ChangeParams>,
    Json(patch): Json<Map<String, Value>>,
) -> JsonResult<QueueItem> {
    let name = caller.allowed_queue("SetQueueAttributes", &queue)?;
    let mut tries = 1;
    loop {
        let before = native.store.queue(&name).await?;
        let config = patched(&before.config, patch.clone())?;
        if config.dead_letter != before.config.dead_letter {
            caller.check_dead_letter_right(&config)?;
        }
        match set(&native, &name, config, Some(revision.unwrap_or(before.revision))).await {
            // The caller named no revision: the patch is applied to the newest one.
            Err(AdminError::RevisionConflict { .. }) if revision.is_none() && tries < CHANGES_MAX => {
                tries += 1;
            }
            answer => return Ok(answer?),
        }
    }
}

fn patched(config: &QueueConfig, patch: Map<String, Value>) -> Result<QueueConfig, ApiError> {
    let mut fields = serde_json::to_value(config).map_err(|error| ApiError::invalid(error.to_string()))?;
    merge(&mut fields, Value::Object(patch));
    parse(fields.to_string().as_bytes())
}

pub(super) async fn replace(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Params(ChangeParams { revision }): Params<ChangeParams>,
    Json(fields): Json<Map<String, Value>>,
) -> JsonResult<QueueItem> {
    let name = caller.allowed_queue("SetQueueAttributes", &queue)?;
    let config = config_of(&name, fields)?;
    caller.check_dead_letter_right(&config)?;
    Ok(set(&native, &name, config, revision).await?)
}

async fn set(
    native: &Api,
    name: &QueueName,
    config: QueueConfig,
    expected: Option<Revision>,
) -> Result<axum::Json<QueueItem>, AdminError> {
    let revision = native.store.set_queue(name, config.clone(), expected).await?;
    let after = native.store.queue(name).await?;
    // The values that this call wrote, even if another change followed immediately.
    Ok(axum::Json(QueueItem { config, revision, ..QueueItem::from(after) }))
}

pub(super) async fn pause(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(body): Json<PauseBody>,
) -> Result<StatusCode, ApiError> {
    let name = caller.allowed_queue("PauseQueue", &queue)?;
    if let Some(problem) = body.reason.as_deref().and_then(pause_reason_problem) {
        return Err(ApiError::invalid(problem));
    }
    native.store.pause_queue(&name, &caller.audit_name(body.by), body.reason.as_deref()).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn resume(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(body): Json<ResumeBody>,
) -> Result<StatusCode, ApiError> {
    let name = caller.allowed_queue("PauseQueue", &queue)?;
    native.store.resume_queue(&name, &caller.audit_name(body.by)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn remove(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Result<StatusCode, ApiError> {
    let name = caller.allowed_queue("DeleteQueue", &queue)?;
    native.store.delete_queue(&name).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn stats(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> JsonResult<QueueStats> {
    let name = caller.allowed_queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(native.store.stats(&name).await?))
}

/// The figures of all queues whose counters the key may see.
pub(super) async fn all_stats(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<StatsResponse> {
    caller.check_action("ListQueues")?;
    let is_visible = |name: &QueueName| {
        caller.may_see_queue(name) && caller.check_queue("GetQueueAttributes", name).is_ok()
    };
    let all = native.store.queues().await?.into_iter();
    let names: Vec<QueueName> = all.map(|info| info.name).filter(is_visible).collect();
    let mut queues = Vec::with_capacity(names.len());
    for (name, stats) in names.iter().zip(native.store.stats_of(&names).await?) {
        // Else it was deleted meanwhile.
        let Some(stats) = stats else { continue };
        let observed = native.observer().and_then(|observer| observer.window(name)).unwrap_or_default();
        queues.push(QueueFigures { name: name.clone(), stats, observed });
    }
    Ok(axum::Json(StatsResponse { queues }))
}

pub(super) async fn purge(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(PurgeBody { interval_ms }): Json<PurgeBody>,
) -> JsonResult<CountResponse> {
    let name = caller.allowed_queue("PurgeQueue", &queue)?;
    let count = native.store.purge_with_interval(&name, interval_ms.unwrap_or_default()).await?;
    Ok(axum::Json(CountResponse { count }))
}
