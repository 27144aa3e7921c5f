//! Rows of documents and of recently deleted queues.

use hapax_core::{Document, DocumentName, Json, QueueName, Revision};
use rusqlite::{Connection, params};

use super::ReadError;
use crate::engine::{LoadedRow, Loader};
use crate::record::{deleted_queue_crc, document_crc};

pub(super) fn put(db: &Connection, document: &Document) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO document (name, revision, modified_ms, value, crc) VALUES (?1, ?2, ?3, ?4, ?5)";
    db.prepare_cached(sql)?.execute(params![
        document.name.as_str(),
        document.revision.0 as i64,
        document.modified_ms as i64,
        document.value.as_str(),
        document_crc(document)
    ])?;
    Ok(())
}

pub(super) fn drop(db: &Connection, name: &DocumentName) -> rusqlite::Result<()> {
    db.prepare_cached("DELETE FROM document WHERE name = ?1")?.execute([name.as_str()])?;
    Ok(())
}

pub(super) fn put_deleted(db: &Connection, name: &QueueName, at_ms: u64) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO deleted_queue (name, at_ms, crc) VALUES (?1, ?2, ?3)";
    let crc = deleted_queue_crc(name.as_str(), at_ms);
    db.prepare_cached(sql)?.execute(params![name.as_str(), at_ms as i64, crc])?;
    Ok(())
}

pub(super) fn prune_deleted(db: &Connection, before_ms: u64) -> rusqlite::Result<()> {
    db.execute("DELETE FROM deleted_queue WHERE at_ms < ?1", [before_ms as i64])?;
    Ok(())
}

pub(super) fn load(db: &Connection, loader: &mut Loader) -> rusqlite::Result<Result<(), ReadError>> {
    let mut statement = db.prepare("SELECT CAST(name AS BLOB), at_ms, crc FROM deleted_queue")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let (name, at_ms, crc): (Vec<u8>, i64, u32) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let name = String::from_utf8_lossy(&name);
        match QueueName::new(&name) {
            Ok(name) if crc == deleted_queue_crc(name.as_str(), at_ms as u64) => {
                loader.add(LoadedRow::DeletedQueue { name, at_ms: at_ms as u64 });
            }
            _ => loader.warn("a row about a deleted queue is damaged; its name can be used again at once"),
        }
    }
    let sql = "SELECT CAST(name AS BLOB), revision, modified_ms, CAST(value AS BLOB), crc FROM document";
    let mut statement = db.prepare(sql)?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let (name, value): (Vec<u8>, Vec<u8>) = (row.get(0)?, row.get(3)?);
        let (revision, modified_ms, crc): (i64, i64, u32) = (row.get(1)?, row.get(2)?, row.get(4)?);
        let name = String::from_utf8_lossy(&name);
        let value = String::from_utf8(value).ok().and_then(|value| Json::parse(&value).ok());
        let document = DocumentName::new(&name).ok().zip(value).map(|(name, value)| Document {
            name,
            revision: Revision(revision as u64),
            modified_ms: modified_ms as u64,
            value,
        });
        match document {
            Some(document) if crc == document_crc(&document) => loader.add(LoadedRow::Document(document)),
            // As for a queue's row: if loading continued without it, an operator's decision would be lost silently.
            _ => {
                return Ok(Err(ReadError(format!(
                    "the row of document {name:?} is damaged (its checksum does not fit); restore a backup"
                ))));
            }
        }
    }
    Ok(Ok(()))
}
