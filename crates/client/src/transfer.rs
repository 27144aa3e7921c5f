//! Export and import over HTTP.

use std::fmt::Write as _;

use async_trait::async_trait;
use hapax_core::transfer::PAGE_BYTES_MAX;
use hapax_core::{
    AdminError, Batch, ExportPage, ExportedItem, Fence, Imported, SendError, StoreError, Transfer,
    TransferScope, validate,
};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::Client;
use crate::transport::{Effect, Failure};
use crate::wire::{Element, FenceBound, ImportBody, ImportedAnswer, Results};

fn change(failure: Failure) -> StoreError {
    failure.into_store(Effect::Change)
}

#[async_trait]
impl Transfer for Client {
    async fn fence_bound(&self) -> Result<Fence, StoreError> {
        let answer: Result<FenceBound, Failure> = self.transport.get("/v1/transfer").await;
        answer.map(|bound| bound.fence).map_err(|failure| failure.into_store(Effect::None))
    }

    async fn raise_fence(&self, bound: Fence) -> Result<(), StoreError> {
        self.transport.post("/v1/transfer/fence", &FenceBound { fence: bound }).await.map_err(change)
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
        self.transport.get(&path).await.map_err(|failure| failure.into_admin(Effect::None))
    }

    async fn import(&self, to: &TransferScope, items: Vec<ExportedItem>) -> Batch<Imported, SendError> {
        validate::batch("items", items.len())?;
        let mut answers = Vec::with_capacity(items.len());
        for items in parts(items) {
            let queue = match to {
                TransferScope::Queue(queue) => Some(queue.clone()),
                TransferScope::Ledger => None,
            };
            let expected = items.len();
            let body = ImportBody { queue, items };
            let part: Results<ImportedAnswer> =
                self.transport.post("/v1/transfer/items", &body).await.map_err(change)?;
            if part.results.len() != expected {
                let why = format!("the server gave {} answers to {expected} items", part.results.len());
                return Err(StoreError::OutcomeUnknown(why));
            }
            answers.extend(part.results.into_iter().map(|element| match element {
                Element::Done(answer) => Ok(answer.imported),
                Element::Failed { error } => Err(error.to_send()),
            }));
        }
        Ok(answers)
    }
}

/// Cuts a batch into requests that the server reads. An import can be repeated, so it may be done in parts.
fn parts(items: Vec<ExportedItem>) -> Vec<Vec<ExportedItem>> {
    let (mut parts, mut part, mut bytes) = (Vec::new(), Vec::new(), 0);
    for item in items {
        if bytes > 0 && bytes + item.bytes() > PAGE_BYTES_MAX {
            parts.push(std::mem::take(&mut part));
            bytes = 0;
        }
        bytes += item.bytes() + 1;
        part.push(item);
    }
    // An empty batch is asked about too: the queue may not exist.
    parts.push(part);
    parts
}
