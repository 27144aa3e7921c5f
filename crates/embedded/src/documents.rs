//! Implements the document store; the writer thread answers.

use async_trait::async_trait;
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, ExpectedRevision, Json,
    Revision, StoreError,
};

use crate::Embedded;

#[async_trait]
impl Documents for Embedded {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        let name = name.clone();
        self.state.job(move |engine, _| engine.document(&name)).await
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        filter.validate()?;
        self.state.job(move |engine, _| engine.documents(&filter)).await
    }

    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let name = name.clone();
        self.state.job(move |engine, now| engine.put_document(now, &name, value, expected)).await?
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        let name = name.clone();
        self.state.job(move |engine, _| engine.delete_document(&name, expected)).await?
    }
}
