//! For operators: stored messages, parked ones, halted groups, redrives, the store itself.

use std::sync::Arc;

use axum::extract::{Path, State};
use hapax_client::wire::{
    BackupBody, BackupResponse, CountResponse, DiscardBody, HaltedGroups, MessagesPage, RedriveBody,
    RedrivesResponse, ReleaseMessagesBody, ResumeBody, ServerStatus,
};
use hapax_core::{
    AdminError, Browse, Discarded, Examination, GroupId, MessageId, MessageState, QueueName, RedriveRequest,
    RedriveTask, StoreStatus,
};
use http::StatusCode;
use serde::{Deserialize, Serialize};

use super::Api;
use super::input::{Caller, Json, Params};
use super::problem::{ApiError, JsonResult};

/// Default number of messages per page.
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
) -> JsonResult<MessagesPage> {
    let queue = caller.allowed_queue("BrowseMessages", &queue)?;
    let BrowseParams { state, id, after, limit } = params;
    let page = native.store.browse(&queue, Browse { state, id, after, limit }).await?;
    let messages = page.items.into_iter().map(Into::into).collect();
    Ok(axum::Json(MessagesPage { messages, next: page.next }))
}

pub(super) async fn discard(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(DiscardBody { ids, by }): Json<DiscardBody>,
) -> JsonResult<Discarded> {
    let queue = caller.allowed_queue("DiscardMessages", &queue)?;
    Ok(axum::Json(native.store.discard(&queue, ids, &caller.audit_name(by)).await?))
}

pub(super) async fn release(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
    Json(ReleaseMessagesBody { ids }): Json<ReleaseMessagesBody>,
) -> JsonResult<CountResponse> {
    let queue = caller.allowed_queue("ReleaseMessages", &queue)?;
    Ok(axum::Json(CountResponse { count: native.store.release(&queue, ids).await? }))
}

pub(super) async fn halted(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(queue): Path<String>,
) -> JsonResult<HaltedGroups> {
    let queue = caller.allowed_queue("GetQueueAttributes", &queue)?;
    Ok(axum::Json(HaltedGroups { groups: native.store.halted_groups(&queue).await? }))
}

pub(super) async fn release_group(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path((queue, group)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    let queue = caller.allowed_queue("ReleaseMessages", &queue)?;
    let group = GroupId::new(group).map_err(|error| ApiError::invalid(error.to_string()))?;
    native.store.release_group(&queue, &group).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn start_redrive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(body): Json<RedriveBody>,
) -> Result<(StatusCode, axum::Json<RedriveTask>), ApiError> {
    caller.check_queue("StartMessageMoveTask", &body.from)?;
    let RedriveBody { from, to, mut filter, per_second, by } = body;
    caller.check_redrive(&native.store, &from, to.as_ref(), &mut filter).await?;
    let by = caller.audit_name(by);
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
) -> JsonResult<RedrivesResponse> {
    caller.check_queue("ListMessageMoveTasks", &from)?;
    let redrives = native.store.redrives(&from).await?.into_iter();
    Ok(axum::Json(RedrivesResponse {
        redrives: redrives.filter(|task| caller.identity().may_see_task(task)).collect(),
    }))
}

/// Cancels a redrive. The number does not tell to which queue it belongs, so it is searched among the queues that the
/// caller may manage.
pub(super) async fn cancel_redrive(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(id): Path<String>,
) -> JsonResult<RedriveTask> {
    caller.check_action("CancelMessageMoveTask")?;
    let missing = || AdminError::NotFound(format!("redrive {id}"));
    let number: u64 = id.parse().map_err(|_| missing())?;
    for queue in native.store.queues().await? {
        if caller.check_queue("CancelMessageMoveTask", &queue.name).is_ok()
            && native
                .store
                .redrives(&queue.name)
                .await?
                .iter()
                .any(|task| task.id == number && caller.identity().may_see_task(task))
        {
            return Ok(axum::Json(native.store.cancel_redrive(number).await?));
        }
    }
    Err(missing().into())
}

/// Capabilities are visible to every caller; the store's size and problems only to a key for all queues.
pub(super) async fn status(
    State(native): State<Arc<Api>>,
    caller: Caller,
) -> JsonResult<ServerStatus<VisibleStatus>> {
    let status = native.store.status().await?;
    let withheld = !caller.identity().may_see_all();
    let status = if withheld {
        VisibleStatus::Restricted { paused: status.paused, stopped: status.stopped }
    } else {
        VisibleStatus::All(status)
    };
    Ok(axum::Json(ServerStatus {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        capabilities: native.store.capabilities(),
        ledger: Some(native.store.ledger_capabilities()),
        status,
        withheld,
    }))
}

/// The store's status, as far as the caller may see it.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum VisibleStatus {
    All(StoreStatus),
    Restricted { paused: Option<String>, stopped: Option<String> },
}

pub(super) async fn examine(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<Examination> {
    caller.check_operator("ExamineStore")?;
    Ok(axum::Json(native.store.examine().await?))
}

pub(super) async fn resume(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(body): Json<ResumeBody>,
) -> Result<StatusCode, ApiError> {
    caller.check_operator("ResumeStore")?;
    let unsupported = "this server's store is never paused by a restored backup";
    let maintenance = native.store.maintenance().ok_or_else(|| ApiError::not_implemented(unsupported))?;
    maintenance.resume(&caller.audit_name(body.by)).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn backup(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(BackupBody { to }): Json<BackupBody>,
) -> JsonResult<BackupResponse> {
    caller.check_operator("BackupStore")?;
    let unsupported = "this server's store has its own tools for backups; use those";
    let backups = native.backups.clone().ok_or_else(|| ApiError::not_implemented(unsupported))?;
    let file = backups.file(&to).map_err(ApiError::invalid)?;
    let path = file.display().to_string();
    match tokio::task::spawn_blocking(move || backups.take(&file)).await {
        Ok(Ok(())) => Ok(axum::Json(BackupResponse { path })),
        Ok(Err(problem)) => Err(AdminError::Refused(problem).into()),
        Err(_) => Err(hapax_core::StoreError::OutcomeUnknown("the backup was interrupted".into()).into()),
    }
}
