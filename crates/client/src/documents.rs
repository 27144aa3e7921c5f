//! The documents' seam over HTTP.

use std::fmt::Write as _;

use async_trait::async_trait;
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, ExpectedRevision, Json,
    Revision, StoreError,
};
use http::StatusCode;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};

use crate::Client;
use crate::transport::{Effect, Failure};
use crate::wire::{DeleteResponse, DocumentResponse, DocumentsPage};

/// The URL path of a document; no character of a name needs escaping.
fn path(name: &DocumentName, expected: ExpectedRevision) -> String {
    let mut path = format!("/v1/documents/{name}");
    match expected {
        ExpectedRevision::Any => {}
        ExpectedRevision::Absent => path.push_str("?absent=true"),
        ExpectedRevision::Revision(revision) => {
            let _ = write!(path, "?revision={revision}");
        }
    }
    path
}

fn document_error(failure: Failure) -> DocumentError {
    if let Failure::Refused(_, problem) = &failure
        && let Some(error) = problem.to_document_error()
    {
        return error;
    }
    failure.into_store_error(Effect::Change).into()
}

#[async_trait]
impl Documents for Client {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        match self.transport.get(&path(name, ExpectedRevision::Any)).await {
            Ok(document) => Ok(Some(document)),
            Err(Failure::Refused(StatusCode::NOT_FOUND, problem)) if problem.code == "not-found" => Ok(None),
            Err(failure) => Err(failure.into_store_error(Effect::None)),
        }
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        let prefix = utf8_percent_encode(&filter.prefix, NON_ALPHANUMERIC);
        let mut path = format!("/v1/documents?prefix={prefix}&limit={}", filter.limit);
        if let Some(after) = &filter.after {
            let _ = write!(path, "&after={}", utf8_percent_encode(after.as_str(), NON_ALPHANUMERIC));
        }
        let page: DocumentsPage =
            self.transport.get(&path).await.map_err(|failure| failure.into_store_error(Effect::None))?;
        Ok(DocumentPage { items: page.documents, next: page.next })
    }

    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let answer: DocumentResponse =
            self.transport.put(&path(name, expected), &value).await.map_err(document_error)?;
        Ok(answer.revision)
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        let answer: DeleteResponse =
            self.transport.delete(&path(name, expected)).await.map_err(document_error)?;
        Ok(answer.deleted)
    }
}
