//! Small named JSON documents with a revision and compare-and-set: for schedules and other administrative state, so
//! that such a feature needs no new code in a store.
//!
//! ```
//! # use hapax_core::{Documents, DocumentName, ExpectedRevision, Json};
//! # async fn example(store: &dyn Documents) -> Result<(), hapax_core::DocumentError> {
//! let name = DocumentName::new("schedules/nightly").unwrap();
//! let first = store.put_document(&name, Json::parse(r#"{"at":"02:00"}"#).unwrap(), ExpectedRevision::Absent).await?;
//! // Changes what was read, or nothing.
//! store.put_document(&name, Json::parse(r#"{"at":"03:00"}"#).unwrap(), ExpectedRevision::Revision(first)).await?;
//! # Ok(())
//! # }
//! ```

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::error::StoreError;
use crate::ledger::Json;
use crate::name::{DocumentName, Revision};

/// The largest value of one document: 64 KiB of JSON.
pub const BYTES_MAX: usize = 64 * 1024;
/// The maximum number of documents in a store.
pub const COUNT_MAX: usize = 10_000;
/// Maximum total size of all documents of a store, names and values together: 16 MiB.
pub const TOTAL_BYTES_MAX: usize = 16 * 1024 * 1024;
/// A page of a listing ends before it exceeds this size, unless it has only one document: 1 MiB.
pub const PAGE_BYTES_MAX: usize = 1024 * 1024;

/// A document as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Document {
    /// Its name.
    pub name: DocumentName,
    /// Its revision; pass it as [`ExpectedRevision::Revision`] to change only the version that was read.
    pub revision: Revision,
    /// When it was last put.
    pub modified_ms: u64,
    /// Its value.
    pub value: Json,
}

/// The state in which a change expects the document. In any other state the change is refused.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ExpectedRevision {
    /// Any state.
    #[default]
    Any,
    /// No document of that name.
    Absent,
    /// The document with this revision.
    Revision(Revision),
}

impl ExpectedRevision {
    /// Compares the expectation with the document's actual revision.
    pub fn check(self, name: &DocumentName, actual: Option<Revision>) -> Result<(), DocumentError> {
        let (holds, expected) = match self {
            Self::Any => (true, None),
            Self::Absent => (actual.is_none(), None),
            Self::Revision(revision) => (actual == Some(revision), Some(revision)),
        };
        if holds { Ok(()) } else { Err(DocumentError::Conflict { name: name.clone(), expected, actual }) }
    }
}

/// Which documents to list, ordered by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DocumentFilter {
    /// Only names that begin with this text.
    pub prefix: String,
    /// Continue after this name, from an earlier page.
    pub after: Option<DocumentName>,
    /// Maximum count, 1 to 1,000. A page of large documents is shorter.
    pub limit: usize,
}

impl Default for DocumentFilter {
    fn default() -> Self {
        Self { prefix: String::new(), after: None, limit: 100 }
    }
}

impl DocumentFilter {
    /// The first page of the documents whose names begin with `prefix`.
    pub fn with_prefix(prefix: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), ..Self::default() }
    }

    /// Checks the limits.
    pub fn validate(&self) -> Result<(), StoreError> {
        crate::validate::page(self.limit)?;
        if self.prefix.len() > DocumentName::BYTES_MAX {
            let (bytes, max) = (self.prefix.len(), DocumentName::BYTES_MAX);
            return Err(StoreError::Invalid(format!(
                "prefix: {bytes} bytes are too many; use at most {max}"
            )));
        }
        Ok(())
    }
}

/// One page of documents.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DocumentPage {
    /// The documents, ordered by name.
    pub items: Vec<Document>,
    /// Pass it as `after` for the next page; `None` at the end.
    pub next: Option<DocumentName>,
}

/// Why a document was not changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DocumentError {
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The document is not in the state that the caller expected. Nothing was changed.
    #[error(
        "document {name} was expected {} and {}; read it again and repeat the change",
        shown(*expected, "not to exist", "with revision"),
        shown(*actual, "does not exist", "has revision")
    )]
    Conflict {
        /// The document.
        name: DocumentName,
        /// The revision that was expected; `None`: the document was expected not to exist.
        expected: Option<Revision>,
        /// The document's actual revision; `None`: it does not exist.
        actual: Option<Revision>,
    },
    /// The value is too large.
    #[error("the document has {bytes} bytes of JSON; the maximum is {bytes_max}")]
    TooLarge {
        /// Bytes of the value.
        bytes: u64,
        /// The maximum.
        bytes_max: u64,
    },
}

fn shown(revision: Option<Revision>, none: &str, some: &str) -> String {
    revision.map_or_else(|| none.to_owned(), |revision| format!("{some} {revision}"))
}

impl DocumentError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::Conflict { .. } => "revision-conflict",
            Self::TooLarge { .. } => "too-large",
        }
    }
}

/// The documents' seam. A change is durable when it returns.
#[async_trait]
pub trait Documents: Send + Sync {
    /// The document of that name, if it exists.
    async fn document(&self, name: &DocumentName) -> Result<Option<Document>, StoreError>;

    /// Lists documents, ordered by name.
    async fn documents(&self, filter: DocumentFilter) -> Result<DocumentPage, StoreError>;

    /// Creates or replaces a document and returns its new revision. After an unknown outcome, read the document: if it
    /// has the new value, the put succeeded.
    async fn put_document(
        &self,
        name: &DocumentName,
        value: Json,
        expected: ExpectedRevision,
    ) -> Result<Revision, DocumentError>;

    /// Deletes a document; `false` if it did not exist.
    async fn delete_document(
        &self,
        name: &DocumentName,
        expected: ExpectedRevision,
    ) -> Result<bool, DocumentError>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_segments() {
        for good in ["a", "schedules/nightly", "a/b/c.json", "A-b_9.x", &"n".repeat(200)] {
            assert!(DocumentName::new(good).is_ok(), "{good}");
        }
        for bad in ["", "/", "/a", "a/", "a//b", ".", "..", "a/../b", "a b", "ä", "a?b", &"n".repeat(201)] {
            assert!(DocumentName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_expected_is_compared_with_what_is_there() {
        let name = DocumentName::new("a").unwrap();
        let (one, two) = (Revision(1), Revision(2));
        for (expected, actual, holds) in [
            (ExpectedRevision::Any, None, true),
            (ExpectedRevision::Any, Some(one), true),
            (ExpectedRevision::Absent, None, true),
            (ExpectedRevision::Absent, Some(one), false),
            (ExpectedRevision::Revision(one), None, false),
            (ExpectedRevision::Revision(one), Some(one), true),
            (ExpectedRevision::Revision(one), Some(two), false),
        ] {
            assert_eq!(expected.check(&name, actual).is_ok(), holds, "{expected:?} {actual:?}");
        }
        let error = ExpectedRevision::Revision(one).check(&name, Some(two)).unwrap_err().to_string();
        assert!(error.contains("document a was expected with revision 1 and has revision 2"), "{error}");
    }
}
