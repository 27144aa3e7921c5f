//! Named documents. All of them are in memory, because they are few and small.

use std::collections::BTreeMap;
use std::ops::Bound;

use hapax_core::copy::LEDGER_COPY;
use hapax_core::documents::{BYTES_MAX, COUNT_MAX, PAGE_BYTES_MAX, TOTAL_BYTES_MAX};
use hapax_core::{
    CopyState, Document, DocumentError, DocumentFilter, DocumentName, DocumentPage, ExpectedRevision, Json,
    Revision, StoreError,
};

use super::{Engine, Undo};
use crate::record::Record;
use crate::time::Now;

/// The documents and their total size.
#[derive(Default)]
pub(super) struct DocumentMap {
    by_name: BTreeMap<DocumentName, Document>,
    bytes: usize,
    /// What the document of [`LEDGER_COPY`] says.
    pub ledger_copy: Option<CopyState>,
}

fn bytes(document: &Document) -> usize {
    document.name.as_str().len() + document.value.as_str().len()
}

impl DocumentMap {
    pub fn load(&mut self, document: Document) {
        self.set(&document.name.clone(), Some(document));
    }

    /// Sets or removes a document; returns the previous one.
    pub fn set(&mut self, name: &DocumentName, document: Option<Document>) -> Option<Document> {
        self.bytes += document.as_ref().map_or(0, bytes);
        if name.as_str() == LEDGER_COPY {
            let parse = |document: &Document| serde_json::from_str(document.value.as_str()).ok();
            self.ledger_copy = document.as_ref().and_then(parse);
        }
        let before = match document {
            Some(document) => self.by_name.insert(name.clone(), document),
            None => self.by_name.remove(name),
        };
        self.bytes -= before.as_ref().map_or(0, bytes);
        before
    }
}

impl Engine {
    pub fn document(&self, name: &DocumentName) -> Option<Document> {
        self.documents.by_name.get(name).cloned()
    }

    pub fn documents(&self, filter: &DocumentFilter) -> DocumentPage {
        let from = match &filter.after {
            Some(after) if after.as_str() >= filter.prefix.as_str() => {
                Bound::Excluded(after.as_str().to_owned())
            }
            _ => Bound::Included(filter.prefix.clone()),
        };
        let all =
            self.documents.by_name.range::<str, _>((from.as_ref().map(String::as_str), Bound::Unbounded));
        let matching = all.map(|(_, document)| document);
        let mut matching = matching.take_while(|document| document.name.as_str().starts_with(&filter.prefix));
        let (mut page, mut size) = (DocumentPage::default(), 0);
        for document in matching.by_ref() {
            size += bytes(document);
            let full = page.items.len() == filter.limit || (size > PAGE_BYTES_MAX && !page.items.is_empty());
            if full {
                page.next = page.items.last().map(|last: &Document| last.name.clone());
                break;
            }
            page.items.push(document.clone());
        }
        page
    }

    pub fn put_document(
        &mut self,
        now: Now,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError> {
        let before = self.documents.by_name.get(name);
        expected.check(name, before.map(|before| before.revision))?;
        if value.as_str().len() > BYTES_MAX {
            return Err(DocumentError::TooLarge {
                bytes: value.as_str().len() as u64,
                bytes_max: BYTES_MAX as u64,
            });
        }
        let more = (name.as_str().len() + value.as_str().len()).saturating_sub(before.map_or(0, bytes));
        if before.is_none() && self.documents.by_name.len() >= COUNT_MAX {
            let full = format!("it has {COUNT_MAX} documents, the maximum");
            return Err(StoreError::Full(full).into());
        }
        if self.documents.bytes + more > TOTAL_BYTES_MAX {
            let full = format!("its documents have {} of {TOTAL_BYTES_MAX} bytes", self.documents.bytes);
            return Err(StoreError::Full(full).into());
        }
        let revision = Revision(self.wave.next_seq());
        let document = Document { name: name.clone(), revision, modified_ms: now.ms(), value };
        self.wave.records.push(Record::Document(document.clone()));
        self.set_document(name, Some(document));
        Ok(revision)
    }

    pub fn delete_document(
        &mut self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError> {
        let before = self.documents.by_name.get(name);
        expected.check(name, before.map(|before| before.revision))?;
        if before.is_none() {
            return Ok(false);
        }
        self.wave.records.push(Record::DropDocument { name: name.clone() });
        self.set_document(name, None);
        Ok(true)
    }

    fn set_document(&mut self, name: &DocumentName, document: Option<Document>) {
        let before = self.documents.set(name, document).map(Box::new);
        self.wave.journal.push(Undo::Document { name: name.clone(), before });
        self.wave.durable = true;
    }
}
