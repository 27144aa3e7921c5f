//! The tables, their versions, and the migrations from older versions.
//!
//! Assumptions about the medium: a page that was written and synced reads back unchanged or the read fails; a page that
//! was not synced may be old, new or torn after a power cut. SQLite's WAL handles unsynced pages. The rows' checksums
//! detect a medium that returns changed pages.

use std::path::Path;

use rusqlite::Connection;

use super::migrate;
use crate::OpenError;

/// `HAPX`, in the header of the file, so that another program's database is not mistaken for a store.
const APPLICATION_ID: i64 = 0x4841_5058;

/// A migration from one version to the next: SQL statements, then a function for what SQL cannot do.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    pub sql: &'static str,
    pub then: fn(&Connection) -> rusqlite::Result<()>,
}

const fn sql(sql: &'static str) -> Step {
    Step { sql, then: |_| Ok(()) }
}

/// Steps from an empty file to the current version. Version N is the result of the first N steps.
pub(crate) const STEPS: &[Step] = &[
    sql("
CREATE TABLE store (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    secret BLOB NOT NULL,              -- seals receipts
    clock_ms INTEGER NOT NULL,
    fence_floor INTEGER NOT NULL,
    next_seq INTEGER NOT NULL,
    message_rows INTEGER NOT NULL,     -- how many rows `message` has
    paused TEXT,                       -- why deliveries are paused
    crc INTEGER NOT NULL
);
-- A message's id is made of its seq and the salt of the last epoch that began at or before it. A restored backup
-- begins a new epoch, so that ids given out after the backup was taken are not given out again.
CREATE TABLE epoch (first_seq INTEGER PRIMARY KEY, salt INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE queue (
    id INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    config TEXT NOT NULL,              -- JSON
    created_ms INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    purged_before INTEGER NOT NULL,
    deleted INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE message (
    seq INTEGER PRIMARY KEY,
    queue INTEGER NOT NULL,
    ord INTEGER NOT NULL,              -- place in the queue
    state INTEGER NOT NULL,            -- 0 ready, 1 delayed until due_ms, 2 in flight until due_ms, 3 parked
    due_ms INTEGER NOT NULL,
    attempts INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    base_ms INTEGER NOT NULL,          -- retention counts from here
    first_ms INTEGER NOT NULL,
    received_ms INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    priority INTEGER NOT NULL,
    flags INTEGER NOT NULL,
    grp TEXT,
    crc INTEGER NOT NULL
);
CREATE TABLE body (
    seq INTEGER PRIMARY KEY,
    origin INTEGER NOT NULL,           -- the queue it was sent to
    dedup TEXT,
    attributes TEXT,                   -- JSON
    body BLOB NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE dead (
    seq INTEGER PRIMARY KEY,
    source TEXT NOT NULL,
    source_ord INTEGER NOT NULL,
    cause TEXT NOT NULL,
    error TEXT,
    attempts INTEGER NOT NULL,
    first_ms INTEGER NOT NULL,
    died_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE history (
    seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    at_ms INTEGER NOT NULL,
    cause TEXT NOT NULL,
    error TEXT,
    consumer TEXT,
    crc INTEGER NOT NULL
);
CREATE INDEX history_seq ON history (seq);
CREATE TABLE dedup (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,
    seq INTEGER NOT NULL,
    ord INTEGER NOT NULL,
    sent_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
CREATE INDEX dedup_age ON dedup (queue, sent_ms);
CREATE TABLE halted (
    queue INTEGER NOT NULL,
    grp TEXT NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, grp)
) WITHOUT ROWID;
CREATE TABLE redrive (
    id INTEGER PRIMARY KEY,
    task TEXT NOT NULL,                -- JSON
    upto INTEGER NOT NULL,
    cursor INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
CREATE TABLE audit (at_ms INTEGER NOT NULL, by TEXT NOT NULL, what TEXT NOT NULL);
"),
    sql("
-- The key is the fence of the last grant: rows are in the order of their claims, and new ones go to the end.
CREATE TABLE ledger (
    fence INTEGER PRIMARY KEY,
    id BLOB NOT NULL,                  -- hash of scope and key
    scope TEXT NOT NULL,
    key TEXT NOT NULL,
    state INTEGER NOT NULL,            -- 0 held until at_ms, 1 in doubt since at_ms, 2 completed at at_ms, 3 failed then
    owner TEXT NOT NULL,
    fingerprint TEXT,
    lease_ms INTEGER NOT NULL,         -- 0 once it is recorded that it has ended
    at_ms INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL,
    on_doubt INTEGER NOT NULL,         -- 0 retry, 1 park
    claimed_ms INTEGER NOT NULL,
    takeovers INTEGER NOT NULL,
    omitted INTEGER,                   -- size of an outcome that was too large to keep
    outcome_crc INTEGER NOT NULL,
    prune_ms INTEGER,                  -- when to look whether it can go; NULL while it is open
    crc INTEGER NOT NULL,              -- over all other columns but the outcome, which has its own
    outcome TEXT
);
CREATE UNIQUE INDEX ledger_id ON ledger (id);
CREATE INDEX ledger_prune ON ledger (prune_ms);
CREATE TABLE ledger_rows (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    rows INTEGER NOT NULL,             -- how many rows `ledger` has
    sum BLOB NOT NULL,                 -- exclusive or of their ids: tells when the index has lost one
    crc INTEGER NOT NULL
);
-- Which entries a message needs: they are not pruned while it lives. No checksum: a row that is there protects, however
-- it reads.
CREATE TABLE keyed (seq INTEGER NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (seq, entry)) WITHOUT ROWID;
CREATE INDEX keyed_entry ON keyed (entry);
"),
    Step {
        sql: "
-- All deliveries of a message; `attempts` are those that count against the queue's limit. Its checksum has them only where
-- the two differ, so the rows need no new one.
ALTER TABLE message ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0;
UPDATE message SET deliveries = attempts;
ALTER TABLE dead ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0;
UPDATE dead SET deliveries = attempts;
ALTER TABLE history ADD COLUMN deliveries INTEGER NOT NULL DEFAULT 0;
UPDATE history SET deliveries = attempt;
-- The idempotency key, where attributes, dedup and the message id do not tell it: found in the body when the message
-- was sent, or carried along by a redrive.
ALTER TABLE body ADD COLUMN key_source INTEGER; -- 0 attribute, 1 body, 2 dedup id, 3 message id
ALTER TABLE body ADD COLUMN key TEXT;
-- A FIFO group is halted while there is a row: one for each message that someone has to decide about.
ALTER TABLE halted RENAME TO halted_groups;
CREATE TABLE halted (
    queue INTEGER NOT NULL,
    grp TEXT NOT NULL,
    seq INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, grp, seq)
) WITHOUT ROWID;
-- Rows of version 2 have 0, 0 and NULL here; their checksums stay as they are (see `queue_crc`).
ALTER TABLE queue ADD COLUMN revision INTEGER NOT NULL DEFAULT 0;
ALTER TABLE queue ADD COLUMN purged_ms INTEGER NOT NULL DEFAULT 0; -- when it was last purged
ALTER TABLE queue ADD COLUMN paused TEXT;                          -- JSON; NULL unless the queue is paused
-- Names of queues that were deleted a short time ago.
CREATE TABLE deleted_queue (name TEXT PRIMARY KEY, at_ms INTEGER NOT NULL, crc INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE document (
    name TEXT PRIMARY KEY,
    revision INTEGER NOT NULL,
    modified_ms INTEGER NOT NULL,
    value TEXT NOT NULL,               -- JSON
    crc INTEGER NOT NULL
) WITHOUT ROWID;
",
        then: migrate::to_version_3,
    },
    sql("
-- Receives that name their attempt and may be repeated for five minutes.
CREATE TABLE receive_attempt (
    queue INTEGER NOT NULL,
    key BLOB NOT NULL,                 -- hash of the attempt id
    at_ms INTEGER NOT NULL,            -- when it was first answered
    deliveries BLOB NOT NULL,          -- number and fence of each, 8 bytes each, little-endian
    crc INTEGER NOT NULL,
    PRIMARY KEY (queue, key)
) WITHOUT ROWID;
-- Messages that came from another store keep their ids. A row outlives its message, so that an import that is repeated
-- does not bring the message back.
CREATE TABLE imported (
    seq INTEGER PRIMARY KEY,
    id BLOB NOT NULL,
    queue INTEGER NOT NULL,
    gone INTEGER NOT NULL,             -- 1: the message was gone before, only its deduplication id came
    at_ms INTEGER NOT NULL,
    crc INTEGER NOT NULL
);
-- Entries whose doubt is over while messages are still parked for it; those up to `after` go on already.
CREATE TABLE released (
    entry BLOB PRIMARY KEY,            -- hash of scope and key
    after INTEGER NOT NULL,            -- seq of a message
    crc INTEGER NOT NULL
) WITHOUT ROWID;
"),
];

/// The file's version; 0 for an empty file. Fails if the file is not a Hapax store or its version is unknown.
fn version(connection: &Connection, file: &Path, known: i64) -> Result<i64, OpenError> {
    let application: i64 = connection.pragma_query_value(None, "application_id", |row| row.get(0))?;
    let version: i64 = connection.pragma_query_value(None, "user_version", |row| row.get(0))?;
    let objects: i64 = connection.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
    if (objects > 0 || version > 0) && application != APPLICATION_ID {
        return Err(OpenError::NotOurs { file: file.to_owned() });
    }
    if version > known {
        return Err(OpenError::Newer { file: file.to_owned(), version, known });
    }
    Ok(version)
}

/// Fails, before anything is changed, if `steps` cannot migrate the file.
pub(crate) fn check(connection: &Connection, file: &Path, steps: &[Step]) -> Result<(), OpenError> {
    version(connection, file, steps.len() as i64).map(drop)
}

/// Fails if the file is not a store that this version can open.
pub(crate) fn recognise(connection: &Connection, file: &Path) -> Result<(), OpenError> {
    match version(connection, file, STEPS.len() as i64)? {
        0 => Err(OpenError::NotOurs { file: file.to_owned() }),
        _ => Ok(()),
    }
}

/// Migrates the file to the version that `steps` produce. Before an older version is changed, a backup is written
/// beside it; the older version can open that backup.
pub(crate) fn prepare(connection: &mut Connection, file: &Path, steps: &[Step]) -> Result<(), OpenError> {
    let wanted = steps.len() as i64;
    let version = version(connection, file, wanted)?;
    if version == wanted {
        return Ok(());
    }
    if version > 0 {
        let backup = file.with_file_name(format!("before-migration-from-v{version}.db"));
        // An existing backup comes from an earlier attempt that was killed before it changed anything, or from an
        // earlier migration that was undone. In the second case it is older than the data that this migration changes.
        if backup.exists() {
            let io = |error| OpenError::Io { path: backup.clone(), error };
            std::fs::remove_file(&backup).map_err(io)?;
        }
        crate::backup::copy(connection, &backup)?;
    }
    let transaction = connection.transaction_with_behavior(rusqlite::TransactionBehavior::Exclusive)?;
    for step in &steps[version as usize..] {
        transaction.execute_batch(step.sql)?;
        (step.then)(&transaction)?;
    }
    transaction.pragma_update(None, "application_id", APPLICATION_ID)?;
    transaction.pragma_update(None, "user_version", wanted)?;
    transaction.commit()?;
    Ok(())
}
