//! Writes records as SQL.

use hapax_core::{IdempotencyKey, MessageKey};
use rusqlite::{CachedStatement, Connection, params};

use super::{attempts, documents, ledger, rows};
use crate::record::{
    BodyRow, DeadRow, FLAG_DEAD, FLAG_HISTORY, FLAG_KEYED, Header, LedgerRow, MessageMeta, MessageRow,
    QueueRow, Record, halted_crc, history_crc, key_source_code, key_source_of, redrive_crc,
};

/// The writing of one wave. Holds the statements used in every message's lifecycle, so that each is looked up once per
/// wave.
pub(super) struct RecordWriter<'a> {
    db: &'a Connection,
    secret: &'a [u8; 32],
    insert: PreparedStatement<'a>,
    insert_body: PreparedStatement<'a>,
    update: PreparedStatement<'a>,
    delete: PreparedStatement<'a>,
    delete_body: PreparedStatement<'a>,
}

type PreparedStatement<'a> = Option<CachedStatement<'a>>;

fn prepared<'h, 'a>(
    prepared: &'h mut PreparedStatement<'a>,
    db: &'a Connection,
    sql: &str,
) -> rusqlite::Result<&'h mut CachedStatement<'a>> {
    if prepared.is_none() {
        *prepared = Some(db.prepare_cached(sql)?);
    }
    Ok(prepared.as_mut().expect("just put there"))
}

impl<'a> RecordWriter<'a> {
    pub fn new(db: &'a Connection, secret: &'a [u8; 32]) -> Self {
        Self { db, secret, insert: None, insert_body: None, update: None, delete: None, delete_body: None }
    }

    /// Writes one record inside the open transaction.
    pub fn write(&mut self, record: &Record) -> rusqlite::Result<()> {
        let db = self.db;
        match record {
            Record::Insert(message, body) => {
                insert(prepared(&mut self.insert, db, INSERT)?, message)?;
                insert_body(prepared(&mut self.insert_body, db, INSERT_BODY)?, body)
            }
            Record::Update(message) => update(prepared(&mut self.update, db, UPDATE)?, message),
            Record::Delete { seq, flags } => {
                found(prepared(&mut self.delete, db, DELETE)?.execute([*seq as i64])?)?;
                prepared(&mut self.delete_body, db, DELETE_BODY)?.execute([*seq as i64])?;
                delete_rest(db, *seq, *flags)
            }
            record => write_rare(db, record, self.secret),
        }
    }
}

/// Writes records that are not part of every message's lifecycle.
fn write_rare(db: &Connection, record: &Record, secret: &[u8; 32]) -> rusqlite::Result<()> {
    match record {
        Record::Insert(..) | Record::Update(_) | Record::Delete { .. } => unreachable!("written above"),
        Record::Dead(row) => insert_dead(db, row),
        Record::History { seq, failed } => {
            let sql = "INSERT INTO history (seq, attempt, at_ms, cause, error, consumer, crc, deliveries) \
                       VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";
            let cause = failed.cause.as_str();
            db.prepare_cached(sql)?.execute(params![
                *seq as i64,
                failed.attempt,
                failed.at_ms as i64,
                cause,
                failed.error,
                failed.consumer,
                history_crc(*seq, failed),
                failed.deliveries
            ])?;
            if failed.deliveries > hapax_core::policy::HISTORY_MAX {
                let trim = "DELETE FROM history WHERE seq = ?1 AND rowid NOT IN \
                            (SELECT rowid FROM history WHERE seq = ?1 ORDER BY rowid DESC LIMIT ?2)";
                db.prepare_cached(trim)?.execute(params![*seq as i64, hapax_core::policy::HISTORY_MAX])?;
            }
            Ok(())
        }
        Record::TakeBackFailure { seq, deliveries } => {
            let sql = "DELETE FROM history WHERE seq = ?1 AND deliveries = ?2";
            db.prepare_cached(sql)?.execute(params![*seq as i64, deliveries])?;
            Ok(())
        }
        Record::ForgetHistory { seq } => execute(db, "DELETE FROM history WHERE seq = ?1", *seq),
        Record::AcceptBody { seq } => accept_body(db, *seq),
        Record::Dedup { queue, row } => {
            let sql = "INSERT OR REPLACE INTO dedup (queue, key, seq, ord, sent_ms, crc) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            let key = row.key.to_le_bytes();
            db.prepare_cached(sql)?.execute(params![
                queue,
                &key[..],
                row.seq as i64,
                row.order as i64,
                row.sent_ms as i64,
                row.crc(*queue)
            ])?;
            Ok(())
        }
        Record::PruneDedup { queue, before_ms, limit } => {
            let sql = "DELETE FROM dedup WHERE queue = ?1 AND key IN \
                       (SELECT key FROM dedup WHERE queue = ?1 AND sent_ms < ?2 LIMIT ?3)";
            db.prepare_cached(sql)?.execute(params![queue, *before_ms as i64, limit])?;
            Ok(())
        }
        Record::Attempt { queue, row } => attempts::put(db, *queue, row),
        Record::ForgetAttempt { queue, key } => attempts::drop(db, *queue, *key),
        Record::Queue(row) => put_queue(db, row),
        Record::DeletedQueue { name, at_ms } => documents::put_deleted(db, name, *at_ms),
        Record::PruneDeletedQueues { before_ms } => documents::prune_deleted(db, *before_ms),
        Record::Document(document) => documents::put(db, document),
        Record::DropDocument { name } => documents::drop(db, name),
        Record::ForgetQueue { id } => {
            for table in ["dedup", "halted", "receive_attempt"] {
                db.execute(&format!("DELETE FROM {table} WHERE queue = ?1"), params![id])?;
            }
            execute(db, "DELETE FROM queue WHERE id = ?1", u64::from(*id))
        }
        Record::Halt { queue, group, seq } => put_halted(db, *queue, group.as_str(), *seq),
        Record::Unhalt { queue, group, seq } => {
            let sql = "DELETE FROM halted WHERE queue = ?1 AND grp = ?2 AND seq = ?3";
            db.prepare_cached(sql)?.execute(params![queue, group.as_str(), *seq as i64])?;
            Ok(())
        }
        Record::Redrive { task, upto, cursor } => {
            let json = serde_json::to_string(task).expect("a redrive is plain data");
            let sql =
                "INSERT OR REPLACE INTO redrive (id, task, upto, cursor, crc) VALUES (?1, ?2, ?3, ?4, ?5)";
            let crc = redrive_crc(task.id, &json, *upto, *cursor);
            db.prepare_cached(sql)?.execute(params![
                task.id as i64,
                json,
                *upto as i64,
                *cursor as i64,
                crc
            ])?;
            Ok(())
        }
        Record::ForgetRedrive { id } => execute(db, "DELETE FROM redrive WHERE id = ?1", *id),
        Record::Ledger { row, before } => put_entry(db, row, *before),
        Record::DropEntry { fence } => found(db.prepare_cached(ledger::DELETE)?.execute([*fence as i64])?),
        Record::DropDamaged { hash } => ledger::drop_damaged(db, *hash),
        Record::PostponeEntry { fence, prune_ms } => ledger::postpone(db, *fence, *prune_ms),
        Record::LedgerRows(tally) => ledger::put_tally(db, *tally),
        Record::Released { hash, after } => ledger::put_released(db, *hash, *after),
        Record::Link { seq, hash } => {
            let sql = "INSERT OR IGNORE INTO keyed (seq, entry) VALUES (?1, ?2)";
            db.prepare_cached(sql)?.execute(params![*seq as i64, &hash.to_le_bytes()[..]])?;
            Ok(())
        }
        Record::Imported(row) => {
            let sql =
                "INSERT INTO imported (seq, id, queue, gone, at_ms, crc) VALUES (?1, ?2, ?3, ?4, ?5, ?6)";
            let id = row.id.0.to_le_bytes();
            db.prepare_cached(sql)?.execute(params![
                row.seq as i64,
                &id[..],
                row.queue,
                row.gone,
                row.at_ms as i64,
                row.crc()
            ])?;
            Ok(())
        }
        Record::Header(header) => put_header(db, header, secret),
        Record::Audit { at_ms, by, what } => {
            let sql = "INSERT INTO audit (at_ms, by, what) VALUES (?1, ?2, ?3)";
            db.prepare_cached(sql)?.execute(params![*at_ms as i64, by, what])?;
            Ok(())
        }
    }
}

pub(crate) fn put_header(db: &Connection, header: &Header, secret: &[u8; 32]) -> rusqlite::Result<()> {
    let sql = "UPDATE store SET clock_ms = ?1, fence_floor = ?2, next_seq = ?3, message_rows = ?4, paused = ?5, crc = ?6 WHERE one = 1";
    db.prepare_cached(sql)?.execute(params![
        header.clock_ms as i64,
        header.fence_floor as i64,
        header.next_seq as i64,
        header.rows as i64,
        header.paused,
        rows::header_crc(header, secret)
    ])?;
    Ok(())
}

fn execute(db: &Connection, sql: &str, number: u64) -> rusqlite::Result<()> {
    db.prepare_cached(sql)?.execute([number as i64])?;
    Ok(())
}

const INSERT: &str = "INSERT INTO message (seq, queue, ord, state, due_ms, attempts, fence, sent_ms, base_ms, \
                      first_ms, received_ms, bytes, priority, flags, grp, crc, deliveries) \
                      VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17)";

fn insert(to: &mut CachedStatement<'_>, row: &MessageRow) -> rusqlite::Result<()> {
    let e: &MessageMeta = &row.entry;
    to.execute(params![
        e.seq as i64,
        row.queue,
        e.order as i64,
        e.state as u8,
        e.due_ms as i64,
        e.attempts,
        e.fence as i64,
        e.sent_ms as i64,
        e.base_ms as i64,
        e.first_ms as i64,
        e.received_ms as i64,
        e.bytes,
        e.priority,
        e.flags,
        row.group.as_ref().map(hapax_core::GroupId::as_str),
        row.crc(),
        e.deliveries
    ])?;
    Ok(())
}

/// Writes every column: the old values need not be read, and they may be damaged.
const UPDATE: &str = "UPDATE message SET queue = ?2, ord = ?3, state = ?4, due_ms = ?5, attempts = ?6, fence = ?7, \
                      sent_ms = ?8, base_ms = ?9, first_ms = ?10, received_ms = ?11, bytes = ?12, priority = ?13, \
                      flags = ?14, grp = ?15, crc = ?16, deliveries = ?17 WHERE seq = ?1";

fn update(to: &mut CachedStatement<'_>, row: &MessageRow) -> rusqlite::Result<()> {
    let e = &row.entry;
    let count = to.execute(params![
        e.seq as i64,
        row.queue,
        e.order as i64,
        e.state as u8,
        e.due_ms as i64,
        e.attempts,
        e.fence as i64,
        e.sent_ms as i64,
        e.base_ms as i64,
        e.first_ms as i64,
        e.received_ms as i64,
        e.bytes,
        e.priority,
        e.flags,
        row.group.as_ref().map(hapax_core::GroupId::as_str),
        row.crc(),
        e.deliveries
    ])?;
    found(count)
}

/// A row that was scanned or written must be found by its key. If it is not, the tree is broken, and continuing would
/// let settled messages reappear at the next scan.
fn found(count: usize) -> rusqlite::Result<()> {
    if count == 1 { Ok(()) } else { Err(rows::broken_tree()) }
}

const INSERT_BODY: &str = "INSERT INTO body (seq, origin, dedup, attributes, body, crc, key_source, key) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)";

fn insert_body(to: &mut CachedStatement<'_>, row: &BodyRow) -> rusqlite::Result<()> {
    let content = &row.content;
    to.execute(params![
        row.seq as i64,
        row.origin,
        content.dedup,
        content.attributes,
        &content.body[..],
        BodyRow::crc(row.seq, row.origin, content.crc),
        content.key.as_ref().map(|key| key_source_code(key.source)),
        content.key.as_ref().map(|key| key.key.as_str())
    ])?;
    Ok(())
}

const DELETE: &str = "DELETE FROM message WHERE seq = ?1";
const DELETE_BODY: &str = "DELETE FROM body WHERE seq = ?1";

fn delete_rest(db: &Connection, seq: u64, flags: u8) -> rusqlite::Result<()> {
    if flags & FLAG_HISTORY != 0 {
        execute(db, "DELETE FROM history WHERE seq = ?1", seq)?;
    }
    if flags & FLAG_DEAD != 0 {
        execute(db, "DELETE FROM dead WHERE seq = ?1", seq)?;
    }
    if flags & FLAG_KEYED != 0 {
        execute(db, "DELETE FROM keyed WHERE seq = ?1", seq)?;
    }
    Ok(())
}

fn put_entry(db: &Connection, row: &LedgerRow, before: Option<u64>) -> rusqlite::Result<()> {
    if before == Some(row.entry.fence.0) {
        return found(ledger::put(&mut db.prepare_cached(ledger::UPDATE)?, row)?);
    }
    if let Some(before) = before {
        found(db.prepare_cached(ledger::DELETE)?.execute([before as i64])?)?;
    }
    found(ledger::put(&mut db.prepare_cached(ledger::INSERT)?, row)?)
}

fn insert_dead(db: &Connection, row: &DeadRow) -> rusqlite::Result<()> {
    let mut row = row.clone();
    if row.error.is_none() {
        // An expired lease has no error of its own, so the latest reported error is kept: it is the most useful one.
        row.error = rows::last_error(db, row.seq)?;
    }
    let sql = "INSERT OR REPLACE INTO dead (seq, source, source_ord, cause, error, attempts, first_ms, died_ms, crc, \
               deliveries) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)";
    db.prepare_cached(sql)?.execute(params![
        row.seq as i64,
        row.source.as_str(),
        row.source_order as i64,
        row.cause.as_str(),
        row.error,
        row.attempts,
        row.first_ms as i64,
        row.died_ms as i64,
        row.crc(),
        row.deliveries
    ])?;
    Ok(())
}

pub(super) fn put_halted(db: &Connection, queue: u32, group: &str, seq: u64) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO halted (queue, grp, seq, crc) VALUES (?1, ?2, ?3, ?4)";
    db.prepare_cached(sql)?.execute(params![queue, group, seq as i64, halted_crc(queue, group, seq)])?;
    Ok(())
}

fn put_queue(db: &Connection, row: &QueueRow) -> rusqlite::Result<()> {
    let config = serde_json::to_string(&*row.config).expect("a configuration is plain data");
    let paused = row.paused.as_ref().map(|paused| serde_json::to_string(paused).expect("plain data"));
    let sql = format!(
        "INSERT OR REPLACE INTO queue ({}) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
        rows::QUEUE_COLUMNS
    );
    db.prepare_cached(&sql)?.execute(params![
        row.id,
        row.name.as_str(),
        config,
        row.created_ms as i64,
        row.modified_ms as i64,
        row.purged_before as i64,
        row.deleted,
        rows::queue_crc(row, &config, paused.as_deref()),
        row.revision as i64,
        row.purged_ms as i64,
        paused
    ])?;
    Ok(())
}

/// Recomputes a body's checksum from the current bytes. A missing body becomes an empty one. The caller's next update
/// does the same for the metadata.
fn accept_body(db: &Connection, seq: u64) -> rusqlite::Result<()> {
    let found = db.query_row(
        "SELECT origin, CAST(dedup AS BLOB), CAST(attributes AS BLOB), CAST(body AS BLOB), \
         CAST(key AS BLOB), key_source FROM body WHERE seq = ?1",
        [seq as i64],
        |row| {
            let text =
                |at| row.get::<_, Option<Vec<u8>>>(at).map(|v| v.and_then(|v| String::from_utf8(v).ok()));
            let origin = row.get::<_, u32>(0).unwrap_or_default();
            let key = text(4)?.and_then(|key| IdempotencyKey::new(key).ok());
            let source = row.get::<_, u32>(5).ok().and_then(|code| key_source_of(code.into()));
            let key = key.zip(source).map(|(key, source)| MessageKey { key, source });
            Ok((origin, text(1)?, text(2)?, key, row.get::<_, Option<Vec<u8>>>(3)?.unwrap_or_default()))
        },
    );
    let (origin, dedup, attributes, key, body) = match found {
        Ok(found) => found,
        // SQLite cannot decode the row: nothing in it can be accepted.
        Err(error) if rows::is_corrupt(&error) => (0, None, None, None, Vec::new()),
        Err(rusqlite::Error::QueryReturnedNoRows) => (0, None, None, None, Vec::new()),
        Err(error) => return Err(error),
    };
    let attributes = attributes.filter(|json| serde_json::from_str::<hapax_core::Attributes>(json).is_ok());
    let content = crate::record::Content::new(dedup, attributes, key, body.into());
    execute(db, DELETE_BODY, seq)?;
    insert_body(&mut db.prepare_cached(INSERT_BODY)?, &BodyRow { seq, origin, content })
}
