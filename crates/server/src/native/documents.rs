//! Named JSON documents with compare-and-set. They belong to no queue, so only a key for all queues may access them.

use std::sync::Arc;

use axum::extract::{Path, State};
use hapax_client::wire::{DeleteResponse, DocumentResponse, DocumentsPage};
use hapax_core::{AdminError, Document, DocumentFilter, DocumentName, ExpectedRevision, Revision};
use serde::Deserialize;

use super::Api;
use super::input::{Caller, Json, Params};
use super::problem::{ApiError, JsonResult};

#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ListParams {
    prefix: String,
    after: Option<DocumentName>,
    limit: usize,
}

impl Default for ListParams {
    fn default() -> Self {
        let DocumentFilter { prefix, after, limit } = DocumentFilter::default();
        Self { prefix, after, limit }
    }
}

/// The state that a change requires.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields, default)]
pub(super) struct ChangeParams {
    revision: Option<Revision>,
    absent: bool,
}

impl ChangeParams {
    fn expected(&self) -> Result<ExpectedRevision, ApiError> {
        match (self.revision, self.absent) {
            (Some(_), true) => {
                Err(ApiError::invalid("absent: a document that is absent has no revision; give one"))
            }
            (Some(revision), false) => Ok(ExpectedRevision::Revision(revision)),
            (None, true) => Ok(ExpectedRevision::Absent),
            (None, false) => Ok(ExpectedRevision::Any),
        }
    }
}

fn named(name: &str) -> Result<DocumentName, ApiError> {
    DocumentName::new(name).map_err(|error| ApiError::invalid(error.to_string()))
}

pub(super) async fn list(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Params(ListParams { prefix, after, limit }): Params<ListParams>,
) -> JsonResult<DocumentsPage> {
    caller.check_operator("ListDocuments")?;
    let page = native.store.documents(DocumentFilter { prefix, after, limit }).await?;
    Ok(axum::Json(DocumentsPage { documents: page.items, next: page.next }))
}

pub(super) async fn show(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(name): Path<String>,
) -> JsonResult<Document> {
    caller.check_operator("GetDocument")?;
    let name = named(&name)?;
    let found = native.store.document(&name).await?;
    let missing = || AdminError::NotFound(format!("document {name}"));
    Ok(axum::Json(found.ok_or_else(missing)?))
}

pub(super) async fn put(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(name): Path<String>,
    Params(params): Params<ChangeParams>,
    Json(value): Json<hapax_core::Json>,
) -> JsonResult<DocumentResponse> {
    caller.check_operator("PutDocument")?;
    let name = named(&name)?;
    let revision = native.store.put_document(&name, value, params.expected()?).await?;
    Ok(axum::Json(DocumentResponse { name, revision }))
}

pub(super) async fn remove(
    State(native): State<Arc<Api>>,
    caller: Caller,
    Path(name): Path<String>,
    Params(params): Params<ChangeParams>,
) -> JsonResult<DeleteResponse> {
    caller.check_operator("DeleteDocument")?;
    let deleted = native.store.delete_document(&named(&name)?, params.expected()?).await?;
    Ok(axum::Json(DeleteResponse { deleted }))
}
