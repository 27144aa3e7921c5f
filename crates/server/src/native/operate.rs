//! For operators: messages at rest, parked ones, halted groups, redrives, the store itself.

use std::sync::Arc;

use axum::extract::{Path, State};
use hapax_client::wire::{
    BackupBody, Count, Halted, Ids, Messages, RedriveBody, Redrives, ResumeBody, Status,
};
use hapax_core::{
    AdminError, Browse, Examination, GroupId, MessageId, MessageState, QueueName, RedriveRequest, RedriveTask,
};
use http::StatusCode;
use serde::Deserialize;

use super::Api;
use super::input::{Caller, Json, Params, bounded};
use super::problem::ApiError;

type Answer<T> = Result<axum::Json<T>, ApiError>;

/// Messages of a page when nothing else is asked for.
const LIMIT_DEFAULT: usize = 100;

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct BrowseParams {
    state: Option<MessageState>,
    id: Option<MessageId>,
    after: Option<u64>,
    limit: usize,
}

impl Default for BrowseParams {
    fn default() -> Self {
        Self { state: None, id: None, after: None, limit: LIMIT_DEFAULT }
    }
}

pub(super) async fn browse(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Params(params): Params<BrowseParams>,
) -> Answer<Messages> {
    let queue = caller.queue("BrowseMessages", &queue)?;
    let BrowseParams { state, id, after, limit } = params;
    let page = native.store.browse(&queue, Browse { state, id, after, limit }).await?;
    let messages = page.items.into_iter().map(Into::into).collect();
    Ok(axum::Json(Messages { messages, next: page.next }))
}

pub(super) async fn discard(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(Ids { ids }): Json<Ids>,
) -> Answer<Count> {
    let queue = caller.queue("DiscardMessages", &queue)?;
    bounded("ids", ids.len())?;
    Ok(axum::Json(Count { count: native.store.discard(&queue, ids).await? }))
}

pub(super) async fn release(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(Ids { ids }): Json<Ids>,
) -> Answer<Count> {
    let queue = caller.queue("ReleaseMessages", &queue)?;
    bounded("ids", ids.len())?;
    Ok(axum::Json(Count { count: native.store.release(&queue, ids).await? }))
}

pub(super) async fn halted(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> Answer<Halted> {
    let queue = caller.queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(Halted { groups: native.store.halted_groups(&queue).await? }))
}

pub(super) async fn release_group(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path((queue, group)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let queue = caller.queue("ReleaseMessages", &queue)?;
    let group = GroupId::new(group).map_err(|error| ApiError::invalid(error.to_string()))?;
    native.store.release_group(&queue, &group).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn start_redrive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(body): Json<RedriveBody>,
) -> Result<(StatusCode, axum::Json<RedriveTask>), ApiError> {
    caller.on("StartMessageMoveTask", &body.from)?;
    if let Some(to) = &body.to {
        caller.on("SendMessage", to)?;
    }
    let RedriveBody { from, to, filter, per_second, by } = body;
    let by = caller.name(by);
    let task = native.store.start_redrive(RedriveRequest { from, to, filter, per_second, by }).await?;
    Ok((StatusCode::CREATED, axum::Json(task)))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RedriveParams {
    from: QueueName,
}

pub(super) async fn redrives(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Params(RedriveParams { from }): Params<RedriveParams>,
) -> Answer<Redrives> {
    caller.on("ListMessageMoveTasks", &from)?;
    Ok(axum::Json(Redrives { redrives: native.store.redrives(&from).await? }))
}

/// The number alone does not say whose queue it is about, so it is looked for among the queues that the caller may
/// decide on.
pub(super) async fn cancel_redrive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(id): Path<String>,
) -> Answer<RedriveTask> {
    caller.store("CancelMessageMoveTask")?;
    let missing = || AdminError::NotFound(format!("redrive {id}"));
    let number: u64 = id.parse().map_err(|_| missing())?;
    for queue in native.store.queues().await? {
        if caller.on("CancelMessageMoveTask", &queue.name).is_ok()
            && native.store.redrives(&queue.name).await?.iter().any(|task| task.id == number)
        {
            return Ok(axum::Json(native.store.cancel_redrive(number).await?));
        }
    }
    Err(missing().into())
}

pub(super) async fn status(State(native): State<Arc<Api>>, _: Caller) -> Answer<Status> {
    Ok(axum::Json(Status {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        capabilities: native.store.capabilities(),
        ledger: Some(native.store.ledger_capabilities()),
        status: native.store.status().await?,
    }))
}

pub(super) async fn examine(State(native): State<Arc<Api>>, caller: Caller) -> Answer<Examination> {
    caller.operate("ExamineStore")?;
    Ok(axum::Json(native.store.examine().await?))
}

pub(super) async fn resume(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(body): Json<ResumeBody>,
) -> Result<StatusCode, ApiError> {
    caller.operate("ResumeStore")?;
    let unsupported = "this server's store is never paused by a restored backup";
    let maintenance = native.store.maintenance().ok_or_else(|| ApiError::not_implemented(unsupported))?;
    maintenance.resume(&caller.name(body.by)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn backup(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(BackupBody { to }): Json<BackupBody>,
) -> Result<StatusCode, ApiError> {
    caller.operate("BackupStore")?;
    let unsupported = "this server's store has its own tools for backups; use those";
    let write = native.backup.clone().ok_or_else(|| ApiError::not_implemented(unsupported))?;
    let path = std::path::PathBuf::from(to);
    if !path.is_absolute() {
        return Err(ApiError::invalid("to: use an absolute path on the server's machine"));
    }
    let written = tokio::task::spawn_blocking(move || write(&path)).await;
    match written {
        Ok(Ok(())) => Ok(StatusCode::NO_CONTENT),
        Ok(Err(problem)) => Err(AdminError::Refused(problem).into()),
        Err(_) => Err(hapax_core::StoreError::OutcomeUnknown("the backup was interrupted".into()).into()),
    }
}
