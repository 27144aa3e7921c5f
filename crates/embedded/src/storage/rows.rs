//! Conversion between rows and values.

use bytes::Bytes;
use hapax_core::store::FailedAttempt;
use hapax_core::{DeadLetter, FailureCause, GroupId, IdempotencyKey, MessageKey, QueueName};
use rusqlite::types::ValueRef;
use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, Row, params};

use super::{FoundBody, ReadError};
use crate::crc::Crc;
use crate::record::{
    BodyRow, Content, DeadRow, DedupRow, Header, MessageMeta, MessageRow, QueueRow, State, history_crc,
    key_source_of,
};

/// The columns of `message` in the order in which [`message`] reads them.
pub(crate) const MESSAGE_COLUMNS: &str = "seq, queue, ord, state, due_ms, attempts, fence, sent_ms, base_ms, \
     first_ms, received_ms, bytes, priority, flags, grp, crc, deliveries";

/// SQLite's integers are signed. A flipped bit may make one negative; then the checksum does not match.
fn unsigned(row: &Row<'_>, at: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(at).map(|value| value as u64)
}

/// Reads a number. If a flipped bit has changed its type, the result is 0 and `sound` becomes false.
fn lenient(row: &Row<'_>, at: usize, sound: &mut bool) -> rusqlite::Result<u64> {
    if let ValueRef::Integer(value) = row.get_ref(at)? {
        return Ok(value as u64);
    }
    *sound = false;
    Ok(0)
}

/// A metadata row, and whether it is sound.
pub(crate) fn message(row: &Row<'_>) -> rusqlite::Result<(MessageRow, bool)> {
    let mut sound = true;
    let mut number = |at: usize| lenient(row, at, &mut sound);
    let state = State::from_u8(number(3)? as u8);
    let group = match row.get_ref(14)? {
        ValueRef::Null => Ok(None),
        value => value.as_str().map_err(drop).and_then(|text| GroupId::new(text).map_err(drop)).map(Some),
    };
    let entry = MessageMeta {
        seq: number(0)?,
        order: number(2)?,
        due_ms: number(4)?,
        attempts: number(5)? as u32,
        deliveries: number(16)? as u32,
        fence: number(6)?,
        sent_ms: number(7)?,
        base_ms: number(8)?,
        first_ms: number(9)?,
        received_ms: number(10)?,
        bytes: number(11)? as u32,
        priority: number(12)? as u8,
        flags: number(13)? as u8,
        state: state.unwrap_or(State::Parked),
        group: 0,
    };
    let (queue, crc) = (number(1)? as u32, number(15)?);
    let readable = sound && state.is_some() && group.is_ok();
    let message = MessageRow { queue, entry, group: group.unwrap_or_default() };
    let sound = readable && crc == u64::from(message.crc());
    Ok((message, sound))
}

/// The readable part of a row that SQLite cannot decode: its key, and its queue if possible.
pub(crate) fn broken_message(connection: &Connection, seq: u64) -> MessageRow {
    let sql = "SELECT queue FROM message WHERE seq = ?1";
    let queue = connection.query_row(sql, [seq as i64], |row| row.get(0)).unwrap_or(u32::MAX);
    MessageRow { queue, entry: MessageMeta::unreadable(seq), group: None }
}

/// The error for rows that are not in key order or cannot be found by their keys.
pub(crate) fn broken_tree() -> rusqlite::Error {
    let corrupt = rusqlite::ffi::Error::new(rusqlite::ffi::SQLITE_CORRUPT);
    let problem = "the messages are not in order of their keys: the database is malformed";
    rusqlite::Error::SqliteFailure(corrupt, Some(problem.into()))
}

/// Whether SQLite reports a broken page or row. That damages the messages on it, not the whole store.
pub(crate) fn is_corrupt(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}

/// The columns of `queue` in the order in which [`queue`] reads them.
pub(crate) const QUEUE_COLUMNS: &str =
    "id, name, config, created_ms, modified_ms, purged_before, deleted, crc, revision, purged_ms, paused";

pub(crate) fn queue_crc(row: &QueueRow, config: &str, paused: Option<&str>) -> u32 {
    let words =
        [u64::from(row.id), row.created_ms, row.modified_ms, row.purged_before, u64::from(row.deleted)];
    let more = (row.revision, row.purged_ms, paused);
    queue_row_crc(words, row.name.as_str().as_bytes(), config, more)
}

/// The checksum of a queue's row. It covers id, created, modified, purged before, deleted, name, configuration,
/// revision, last purge and pause. A row of version 2 lacks the last three and keeps its original checksum.
pub(crate) fn queue_row_crc(
    words: [u64; 5],
    name: &[u8],
    config: &str,
    more: (u64, u64, Option<&str>),
) -> u32 {
    let mut crc = Crc::new();
    for word in words {
        crc.word(word);
    }
    crc.part(Some(name)).part(Some(config.as_bytes()));
    if more != (0, 0, None) {
        crc.word(more.0).word(more.1).text(more.2);
    }
    crc.end()
}

fn bytes_of(value: ValueRef<'_>) -> &[u8] {
    match value {
        ValueRef::Text(bytes) | ValueRef::Blob(bytes) => bytes,
        _ => &[],
    }
}

pub(crate) fn queue(row: &Row<'_>) -> rusqlite::Result<Result<QueueRow, ReadError>> {
    let text = |at| row.get_ref(at).map(|value| String::from_utf8_lossy(bytes_of(value)).into_owned());
    let (name, config) = (text(1)?, text(2)?);
    let damaged =
        |what: &str| ReadError(format!("the row of queue {name:?} is damaged ({what}); restore a backup"));
    let paused_text = match row.get_ref(10)? {
        ValueRef::Null => None,
        value => Some(String::from_utf8_lossy(bytes_of(value)).into_owned()),
    };
    let pause = paused_text.as_deref().map(serde_json::from_str).transpose();
    let parsed = match (QueueName::new(&name), serde_json::from_str(&config), pause) {
        (Ok(name), Ok(config), Ok(pause)) => (name, config, pause),
        _ => return Ok(Err(damaged("it cannot be read"))),
    };
    let mut sound = true;
    let mut number = |at: usize| lenient(row, at, &mut sound);
    let queue = QueueRow {
        id: number(0)? as u32,
        name: parsed.0,
        config: std::sync::Arc::new(parsed.1),
        created_ms: number(3)?,
        modified_ms: number(4)?,
        purged_before: number(5)?,
        deleted: number(6)? != 0,
        revision: number(8)?,
        purged_ms: number(9)?,
        paused: parsed.2,
    };
    let crc = number(7)?;
    let sound = sound && crc == u64::from(queue_crc(&queue, &config, paused_text.as_deref()));
    Ok(if sound { Ok(queue) } else { Err(damaged("its checksum does not fit")) })
}

pub(crate) fn header_crc(header: &Header, secret: &[u8]) -> u32 {
    let mut crc = Crc::new();
    for word in [header.clock_ms, header.fence_floor, header.next_seq, header.rows] {
        crc.bytes(&word.to_le_bytes());
    }
    crc.part(header.paused.as_deref().map(str::as_bytes)).part(Some(secret));
    crc.end()
}

/// The store's header row and its secret.
pub(crate) fn header(connection: &Connection) -> Result<(Header, [u8; 32]), ReadError> {
    let sql = "SELECT clock_ms, fence_floor, next_seq, paused, secret, crc, message_rows FROM store";
    let read = connection.query_row(sql, [], |row| {
        let header = Header {
            clock_ms: unsigned(row, 0)?,
            fence_floor: unsigned(row, 1)?,
            next_seq: unsigned(row, 2)?,
            rows: unsigned(row, 6)?,
            paused: row.get(3)?,
        };
        Ok((header, row.get::<_, Vec<u8>>(4)?, unsigned(row, 5)? as u32))
    });
    let damaged = |why: &str| ReadError(format!("the store's own row is damaged ({why}); restore a backup"));
    let (header, secret, crc) = read.map_err(|error| damaged(&error.to_string()))?;
    if crc != header_crc(&header, &secret) {
        return Err(damaged("its checksum does not fit"));
    }
    let secret = secret.try_into().map_err(|_| damaged("its secret has another length"))?;
    Ok((header, secret))
}

pub(crate) fn body(connection: &Connection, seq: u64) -> rusqlite::Result<FoundBody> {
    Ok(bodies(connection, &[seq])?.pop().expect("one for each"))
}

/// Reads several bodies with one statement: looking that up takes longer than reading a small body.
pub(crate) fn bodies(connection: &Connection, seqs: &[u64]) -> rusqlite::Result<Vec<FoundBody>> {
    let sql = "SELECT origin, dedup, attributes, body, crc, key_source, key FROM body WHERE seq = ?1";
    let damaged = |error: &rusqlite::Error| FoundBody::Damaged(error.to_string());
    let mut statement = match connection.prepare_cached(sql) {
        Err(error) if is_corrupt(&error) => return Ok(seqs.iter().map(|_| damaged(&error)).collect()),
        prepared => prepared?,
    };
    let mut found = Vec::with_capacity(seqs.len());
    for seq in seqs {
        found.push(match read_body(&mut statement, *seq) {
            Err(error) if is_corrupt(&error) => damaged(&error),
            found => found?,
        });
    }
    Ok(found)
}

fn read_body(statement: &mut CachedStatement<'_>, seq: u64) -> rusqlite::Result<FoundBody> {
    let mut rows = statement.query(params![seq as i64])?;
    let Some(row) = rows.next()? else {
        return Ok(FoundBody::Damaged("its body is missing".into()));
    };
    let text = |at: usize| -> rusqlite::Result<Result<Option<String>, ()>> {
        Ok(match row.get_ref(at)? {
            ValueRef::Null => Ok(None),
            value => value.as_str().map(|text| Some(text.to_owned())).map_err(drop),
        })
    };
    let (Ok(dedup), Ok(attributes), Ok(key)) = (text(1)?, text(2)?, text(6)?) else {
        return Ok(FoundBody::Damaged("its text is not UTF-8".into()));
    };
    let bytes = match row.get_ref(3)? {
        ValueRef::Blob(bytes) => Bytes::copy_from_slice(bytes),
        _ => return Ok(FoundBody::Damaged("its body is not a blob".into())),
    };
    let mut sound = true;
    let origin = lenient(row, 0, &mut sound)? as u32;
    let crc = lenient(row, 4, &mut sound)?;
    let key = match key {
        None => None,
        Some(text) => {
            let source = key_source_of(lenient(row, 5, &mut sound)?);
            let (Ok(key), Some(source)) = (IdempotencyKey::new(text), source) else {
                return Ok(FoundBody::Damaged("its idempotency key cannot be read".into()));
            };
            Some(MessageKey { key, source })
        }
    };
    let content = Content::new(dedup, attributes, key, bytes);
    if !sound || crc != u64::from(BodyRow::crc(seq, origin, content.crc)) {
        return Ok(FoundBody::Damaged("its bytes do not match their checksum".into()));
    }
    Ok(FoundBody::Sound(BodyRow { seq, origin, content }))
}

fn cause(text: &str) -> FailureCause {
    [FailureCause::Retry, FailureCause::Expired, FailureCause::Rejected, FailureCause::InDoubt]
        .into_iter()
        .find(|c| c.as_str() == text)
        .unwrap_or(FailureCause::Damaged)
}

pub(crate) fn dead(connection: &Connection, seq: u64) -> rusqlite::Result<Option<DeadRow>> {
    let sql = "SELECT source, source_ord, cause, error, attempts, first_ms, died_ms, crc, deliveries \
         FROM dead WHERE seq = ?1";
    let row = connection.prepare_cached(sql)?.query_row([seq as i64], |row| {
        let Ok(source) = QueueName::new(row.get::<_, String>(0)?) else { return Ok(None) };
        let dead = DeadRow {
            seq,
            source,
            source_order: unsigned(row, 1)?,
            cause: cause(&row.get::<_, String>(2)?),
            error: row.get(3)?,
            attempts: unsigned(row, 4)? as u32,
            deliveries: unsigned(row, 8)? as u32,
            first_ms: unsigned(row, 5)?,
            died_ms: unsigned(row, 6)?,
        };
        // A damaged dead-letter row counts as absent: a redrive must not follow it to a queue that it never named.
        let sound = unsigned(row, 7)? as u32 == dead.crc();
        Ok(sound.then_some(dead))
    });
    match row {
        Err(rusqlite::Error::FromSqlConversionFailure(..) | rusqlite::Error::InvalidColumnType(..)) => {
            Ok(None)
        }
        row => Ok(row.optional()?.flatten()),
    }
}

impl From<DeadRow> for DeadLetter {
    fn from(row: DeadRow) -> Self {
        Self {
            source: row.source,
            cause: row.cause,
            error: row.error,
            attempts: row.attempts,
            deliveries: row.deliveries,
            first_received_ms: row.first_ms,
            died_ms: row.died_ms,
        }
    }
}

pub(crate) fn history(connection: &Connection, seq: u64) -> rusqlite::Result<Vec<FailedAttempt>> {
    let sql = "SELECT attempt, at_ms, cause, error, consumer, crc, deliveries FROM history \
               WHERE seq = ?1 ORDER BY rowid";
    let mut statement = connection.prepare_cached(sql)?;
    let mut rows = statement.query([seq as i64])?;
    let mut history = Vec::new();
    while let Some(row) = rows.next()? {
        // Text that cannot be decoded is as damaged as text that does not match the checksum.
        let Ok((cause_text, error, consumer)) = texts(row) else { continue };
        let failed = FailedAttempt {
            attempt: unsigned(row, 0)? as u32,
            deliveries: unsigned(row, 6)? as u32,
            at_ms: unsigned(row, 1)?,
            cause: cause(&cause_text),
            error,
            consumer,
        };
        if unsigned(row, 5)? as u32 == history_crc(seq, &failed) {
            history.push(failed);
        }
    }
    Ok(history)
}

/// The latest error in a message's history.
pub(crate) fn last_error(connection: &Connection, seq: u64) -> rusqlite::Result<Option<String>> {
    Ok(history(connection, seq)?.into_iter().rev().find_map(|failed| failed.error))
}

fn texts(row: &Row<'_>) -> rusqlite::Result<(String, Option<String>, Option<String>)> {
    Ok((row.get(2)?, row.get(3)?, row.get(4)?))
}

/// A remembered deduplication id; `None` if its row is damaged: accepting a send twice is better than dropping one.
pub(crate) fn dedup(row: &Row<'_>) -> rusqlite::Result<Option<(u32, DedupRow)>> {
    let (Ok(key), queue) =
        (<[u8; 16]>::try_from(row.get_ref(0)?.as_blob().unwrap_or_default()), unsigned(row, 4)?)
    else {
        return Ok(None);
    };
    let dedup = DedupRow {
        key: u128::from_le_bytes(key),
        seq: unsigned(row, 1)?,
        order: unsigned(row, 2)?,
        sent_ms: unsigned(row, 3)?,
    };
    let sound = unsigned(row, 5)? as u32 == dedup.crc(queue as u32);
    Ok(sound.then_some((queue as u32, dedup)))
}

/// The columns of `dedup` in the order in which [`dedup`] reads them.
pub(crate) const DEDUP_COLUMNS: &str = "key, seq, ord, sent_ms, queue, crc";
