//! The document cases; `document_suite.rs` lists them.

pub(crate) mod d00_documents;
