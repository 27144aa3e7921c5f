//! Export and import: moving queues and ledger to another store.

use std::sync::Arc;

use axum::extract::State;
use hapax_client::wire::{CopyBody, FenceBound, ImportBody, ImportResponse, Results, transfer_scope};
use hapax_core::{ExportPage, QueueName, Transfer};
use http::StatusCode;
use serde::Deserialize;

use super::Api;
use super::input::{Caller, Json, Params};
use super::problem::{ApiError, JsonResult};

impl Api {
    fn transfer(&self) -> Result<&dyn Transfer, ApiError> {
        let unsupported = "this server's store cannot be exported or imported";
        self.store.transfer().ok_or_else(|| ApiError::not_implemented(unsupported))
    }
}

pub(super) async fn fence(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<FenceBound> {
    caller.check_operator("ExportStore")?;
    Ok(axum::Json(FenceBound { fence: native.transfer()?.fence_bound().await? }))
}

pub(super) async fn raise_fence(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(FenceBound { fence }): Json<FenceBound>,
) -> Result<StatusCode, ApiError> {
    caller.check_operator("ImportStore")?;
    native.transfer()?.raise_fence(fence).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(super) async fn ledger_copy(State(native): State<Arc<Api>>, caller: Caller) -> JsonResult<CopyBody> {
    caller.check_operator("ExportStore")?;
    let copy = native.transfer()?.ledger_copy().await?;
    Ok(axum::Json(CopyBody { copy, ..CopyBody::default() }))
}

pub(super) async fn set_copy(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(CopyBody { queue, copy, by }): Json<CopyBody>,
) -> Result<StatusCode, ApiError> {
    // Closed, a queue is both exported and imported to; it has to be opened by the same key.
    caller.check_operator("ExportStore")?;
    caller.check_operator("ImportStore")?;
    native.transfer()?.set_copy(&transfer_scope(queue), copy, &by).await?;
    Ok(StatusCode::NO_CONTENT)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ExportParams {
    queue: Option<QueueName>,
    after: Option<String>,
    #[serde(default = "limit_default")]
    limit: usize,
}

fn limit_default() -> usize {
    100
}

pub(super) async fn export(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Params(ExportParams { queue, after, limit }): Params<ExportParams>,
) -> JsonResult<ExportPage> {
    caller.check_operator("ExportStore")?;
    let page = native.transfer()?.export(&transfer_scope(queue), after.as_deref(), limit).await?;
    Ok(axum::Json(page))
}

pub(super) async fn import(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Json(ImportBody { queue, items }): Json<ImportBody>,
) -> JsonResult<Results<ImportResponse>> {
    caller.check_operator("ImportStore")?;
    let answers = native.transfer()?.import(&transfer_scope(queue), items).await?;
    Ok(axum::Json(Results::new(answers, |imported| ImportResponse { imported })))
}
