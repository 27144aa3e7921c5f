//! Export and import over HTTP.

use std::fmt::Write as _;

use async_trait::async_trait;
use hapax_core::transfer::{PAGE_BYTES_MAX, RefusedGroups};
use hapax_core::{
    AdminError, Batch, CopyState, ExportPage, ExportedItem, Fence, Imported, SendError, StoreError, Transfer,
    TransferScope, validate,
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::Client;
use crate::transport::{Effect, Failure};
use crate::wire::{CopyBody, FenceBound, ImportBody, ImportResponse, ItemResult, Results};

fn change_error(failure: Failure) -> StoreError {
    failure.into_store_error(Effect::Change)
}

#[async_trait]
impl Transfer for Client {
    async fn fence_bound(&self) -> Result<Fence, StoreError> {
        let answer: Result<FenceBound, Failure> = self.transport.get("/v1/transfer").await;
        answer.map(|bound| bound.fence).map_err(|failure| failure.into_store_error(Effect::None))
    }

    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        self.transport.post("/v1/transfer/fence", &FenceBound { fence: bound }).await.map_err(change_error)
    }

    async fn set_copy(
        &self,
        scope: &TransferScope,
        state: Option<CopyState>,
        by: &str,
    ) -> Result<(), AdminError> {
        let body = CopyBody { queue: queue_of(scope), copy: state, by: by.to_owned() };
        let done = self.transport.post("/v1/transfer/copy", &body).await;
        done.map_err(|failure| failure.into_admin_error(Effect::Change))
    }

    async fn ledger_copy(&self) -> Result<Option<CopyState>, StoreError> {
        let state: Result<CopyBody, Failure> = self.transport.get("/v1/transfer/copy").await;
        state.map(|body| body.copy).map_err(|failure| failure.into_store_error(Effect::None))
    }

    async fn export(
        &self,
        from: &TransferScope,
        after: Option<&str>,
        limit: usize,
    ) -> Result<ExportPage, AdminError> {
        let mut path = format!("/v1/transfer/items?limit={limit}");
        if let TransferScope::Queue(queue) = from {
            let _ = write!(path, "&queue={queue}");
        }
        if let Some(after) = after {
            let _ = write!(path, "&after={}", utf8_percent_encode(after, NON_ALPHANUMERIC));
        }
        self.transport.get(&path).await.map_err(|failure| failure.into_admin_error(Effect::None))
    }

    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        validate::batch("items", items.len())?;
        let mut answers = Vec::with_capacity(items.len());
        let mut refused = RefusedGroups::default();
        for part in split_batch(items) {
            let checks: Vec<_> =
                part.iter().map(|item| (refused.check(item), item.group().cloned())).collect();
            let items: Vec<_> = part
                .into_iter()
                .zip(&checks)
                .filter(|(_, (check, _))| check.is_ok())
                .map(|(item, _)| item)
                .collect();
            if items.is_empty() && !checks.is_empty() {
                answers.extend(checks.into_iter().filter_map(|(check, _)| check.err()).map(Err));
                continue;
            }
            let mut results = self.import_part(to, items).await?.into_iter();
            for (check, group) in checks {
                let answer = check.and_then(|()| results.next().expect("counted"));
                if answer.is_err() {
                    refused.add(group);
                }
                answers.push(answer);
            }
        }
        Ok(answers)
    }
}

fn queue_of(scope: &TransferScope) -> Option<hapax_core::QueueName> {
    match scope {
        TransferScope::Queue(queue) => Some(queue.clone()),
        TransferScope::Ledger => None,
    }
}

impl Client {
    /// One request; gives as many answers as there are items.
    async fn import_part(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        let expected = items.len();
        let body = ImportBody { queue: queue_of(to), items };
        let part: Results<ImportResponse> =
            self.transport.post("/v1/transfer/items", &body).await.map_err(change_error)?;
        if part.results.len() != expected {
            let why = format!("the server gave {} results for {expected} items", part.results.len());
            return Err(StoreError::OutcomeUnknown(why));
        }
        let answer = |element| match element {
            ItemResult::Done(ImportResponse { imported }) => Ok(imported),
            ItemResult::Failed { error } => Err(error.to_send_error()),
        };
        Ok(part.results.into_iter().map(answer).collect())
    }
}

/// Cuts a batch into requests that the server reads. An import can be repeated, so it may be done in parts.
fn split_batch(items: Vec<ExportedItem>) -> Vec<Vec<ExportedItem>> {
    let (mut parts, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
    for item in items {
        let size = item.bytes() + 1;
        if bytes > 0 && bytes + size > PAGE_BYTES_MAX {
            parts.push(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes += size;
        part.push(item);
    }
    // An empty batch is asked about too: the queue may not exist.
    parts.push(part);
    parts
}
