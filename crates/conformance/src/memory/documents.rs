use async_trait::async_trait;
use hapax_core::documents::{BYTES_MAX, PAGE_BYTES_MAX, TOTAL_BYTES_MAX};
use hapax_core::{
    Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, Documents, ExpectedRevision, Json,
    Revision, StoreError,
};

use super::MemoryStore;

#[async_trait]
impl Documents for MemoryStore {
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError> {
        Ok(self.now().documents.get(name).cloned())
    }

    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError> {
        filter.validate()?;
        let state = self.now();
        let behind = |name: &DocumentName| filter.after.as_ref().is_none_or(|after| name > after);
        let wanted = |name: &DocumentName| name.as_str().starts_with(&filter.prefix) && behind(name);
        let mut page = DocumentPage::default();
        let mut bytes = 0;
        for (name, document) in state.documents.iter().filter(|(name, _)| wanted(name)) {
            bytes += document.value.as_str().len();
            if page.items.len() == filter.limit || (bytes > PAGE_BYTES_MAX && !page.items.is_empty()) {
                page.next = page.items.last().map(|last: &Document| last.name.clone());
                break;
            }
            page.items.push(Document { name: name.clone(), ..document.clone() });
        }
        Ok(page)
    }

    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let mut state = self.now();
        expected.check(name, state.documents.get(name).map(|document| document.revision))?;
        let bytes = value.as_str().len();
        if bytes > BYTES_MAX {
            return Err(DocumentError::TooLarge { bytes: bytes as u64, bytes_max: BYTES_MAX as u64 });
        }
        let size = |name: &DocumentName, value: &Json| name.as_str().len() + value.as_str().len();
        let others = state.documents.iter().filter(|(other, _)| *other != name);
        let total: usize = others.map(|(other, document)| size(other, &document.value)).sum();
        if total + size(name, &value) > TOTAL_BYTES_MAX {
            return Err(StoreError::Full("its documents have all bytes that they may have".to_owned()).into());
        }
        let (revision, modified_ms) = (state.new_revision(), state.now_ms);
        state.documents.insert(name.clone(), Document { name: name.clone(), revision, modified_ms, value });
        Ok(revision)
    }

    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        let mut state = self.now();
        expected.check(name, state.documents.get(name).map(|document| document.revision))?;
        Ok(state.documents.remove(name).is_some())
    }
}
