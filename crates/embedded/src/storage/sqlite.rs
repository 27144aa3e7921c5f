//! SQLite under the seam: one writing connection, WAL, one transaction per wave.

use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::{CommitError, Durability, FoundBody, ReadError, Storage, rows, schema, write};
use crate::OpenError;
use crate::checkpoint::{Checkpoint, Checkpointer};
use crate::engine::{Loaded, Loader};
use crate::ids::Ids;
use crate::record::{DeadRow, DedupRow, Header, Record};

/// A file and how to open it.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub file: PathBuf,
    /// Another VFS than the operating system's, for tests.
    pub vfs: Option<String>,
}

impl Place {
    pub fn connect(&self) -> rusqlite::Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = match &self.vfs {
            None => Connection::open_with_flags(&self.file, flags)?,
            Some(vfs) => Connection::open_with_flags_and_vfs(&self.file, flags, vfs.as_str())?,
        };
        connection.busy_timeout(std::time::Duration::from_secs(10))?;
        connection.set_prepared_statement_cache_capacity(64);
        Ok(connection)
    }
}

/// How full the WAL may get before it is copied back into the database, in pages of 4 KiB.
const WAL_PAGES_MAX: u64 = 4_000;
/// Page cache of the writing connection, in KiB.
const CACHE_KIB: i64 = 32 * 1024;

pub(crate) struct Sqlite {
    /// Not closed after a failed write: closing would checkpoint, and so retry what failed.
    db: ManuallyDrop<Connection>,
    place: Place,
    secret: [u8; 32],
    ids: Ids,
    durability: Durability,
    wal_pages: Arc<AtomicU64>,
    checkpointer: Checkpointer,
    broken: bool,
}

impl Sqlite {
    /// Opens or creates the file, at the version that `steps` make.
    pub fn open(place: Place, steps: &[&str], checkpoint: Checkpoint) -> Result<Self, OpenError> {
        let mut db = place.connect()?;
        let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        if mode != "wal" {
            return Err(OpenError::NoWal { file: place.file, mode });
        }
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "wal_autocheckpoint", 0)?;
        db.pragma_update(None, "cache_size", -CACHE_KIB)?;
        db.pragma_update(None, "foreign_keys", false)?;
        schema::prepare(&mut db, &place.file, steps)?;
        first_rows(&mut db)?;

        let wal_pages = Arc::new(AtomicU64::new(0));
        let pages = wal_pages.clone();
        db.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, frames: std::ffi::c_int| {
            pages.store(frames as u64, Ordering::Relaxed);
            Ok(())
        }))?;
        let (header, secret) = rows::header(&db).map_err(crate::damaged)?;
        if header.paused.is_some() {
            // Restored: ids that were given out after the backup was taken must not be given out again.
            Ids::begin_epoch(&db, header.next_seq)?;
        }
        let ids = Ids::load(&db)?;
        let checkpointer = Checkpointer::start(&place, checkpoint)?;
        let durability = Durability::PowerLoss;
        let db = ManuallyDrop::new(db);
        Ok(Self { db, place, secret, ids, durability, wal_pages, checkpointer, broken: false })
    }

    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    pub fn ids(&self) -> Ids {
        self.ids.clone()
    }

    fn set_durability(&mut self, durability: Durability) -> rusqlite::Result<()> {
        if self.durability != durability {
            let mode = if durability == Durability::PowerLoss { "FULL" } else { "NORMAL" };
            self.db.pragma_update(None, "synchronous", mode)?;
            self.durability = durability;
        }
        Ok(())
    }

    fn transact(&mut self, records: &[Record], durability: Durability) -> rusqlite::Result<()> {
        self.end_reads()?;
        self.set_durability(durability)?;
        self.db.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let mut to = write::Writing::new(&self.db, &self.secret);
        for record in records {
            to.write(record)?;
        }
        drop(to);
        self.db.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    /// Begins a transaction for the bodies that a wave reads; else each read would take the file's locks anew.
    fn begin_reads(&self) -> rusqlite::Result<()> {
        if self.db.is_autocommit() {
            self.db.prepare_cached("BEGIN")?.execute([])?;
        }
        Ok(())
    }

    fn end_reads(&self) -> rusqlite::Result<()> {
        if !self.db.is_autocommit() {
            self.db.prepare_cached("COMMIT")?.execute([])?;
        }
        Ok(())
    }

    /// Rolls back after `error`; tells whether that left everything as it was before.
    fn rolled_back(&mut self, error: &rusqlite::Error) -> bool {
        let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        full && (self.db.is_autocommit() || self.db.execute_batch("ROLLBACK").is_ok())
            && self.db.is_autocommit()
    }

    /// Has the WAL copied back when it has grown; the bulk of it off this thread.
    fn bound_wal(&mut self) -> Result<(), CommitError> {
        let unknown = |problem: String| CommitError::Unknown(format!("checkpoint failed: {problem}"));
        if let Some(problem) = self.checkpointer.failure() {
            return Err(unknown(problem));
        }
        if self.wal_pages.load(Ordering::Relaxed) < WAL_PAGES_MAX {
            return Ok(());
        }
        if self.checkpointer.ask() {
            // The other thread has copied nearly all of it. What came meanwhile is copied here, between two waves,
            // so that the WAL starts anew: a writer that never pauses would let it grow for ever.
            crate::checkpoint::run(&self.db).map_err(|error| unknown(error.to_string()))?;
        }
        Ok(())
    }

    /// Closes in good order.
    pub fn close(mut self) {
        self.checkpointer.stop();
        if !self.broken {
            // A failure here leaves the WAL, which the next open recovers from.
            let _ = self.end_reads();
            let _ = self.db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        }
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        self.checkpointer.stop();
        if !self.broken {
            // `ManuallyDrop::drop` would need unsafe code; putting another connection there drops this one.
            drop(std::mem::replace(
                &mut *self.db,
                Connection::open_in_memory().expect("memory for a connection"),
            ));
        }
    }
}

/// Gives a new store its secret, its first epoch and its counters.
fn first_rows(db: &mut Connection) -> Result<(), OpenError> {
    let rows: i64 = db.query_row("SELECT count(*) FROM store", [], |row| row.get(0))?;
    if rows > 0 {
        return Ok(());
    }
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret).map_err(|error| OpenError::Random(error.to_string()))?;
    let header = Header { next_seq: 1, fence_floor: 1, ..Header::default() };
    let transaction = db.transaction()?;
    transaction.execute(
        "INSERT INTO store (one, secret, clock_ms, fence_floor, next_seq, paused, crc) VALUES (1, ?1, 0, 1, 1, NULL, ?2)",
        rusqlite::params![&secret[..], rows::header_crc(&header, &secret)],
    )?;
    Ids::begin_epoch(&transaction, 1)?;
    transaction.commit()?;
    Ok(())
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
fn read(error: rusqlite::Error) -> ReadError {
    ReadError(error.to_string())
}

/// A page that SQLite itself finds broken damages the messages on it, not the store.
fn is_corrupt(error: &rusqlite::Error) -> bool {
    matches!(error.sqlite_error_code(), Some(ErrorCode::DatabaseCorrupt | ErrorCode::NotADatabase))
}

impl Storage for Sqlite {
    fn header(&mut self) -> Result<Header, ReadError> {
        rows::header(&self.db).map(|(header, _)| header)
    }

    fn load(&mut self, loader: &mut Loader) -> Result<(), ReadError> {
        load(&self.db, loader).map_err(read)?
    }

    fn commit(&mut self, records: &[Record], durability: Durability) -> Result<(), CommitError> {
        if self.broken {
            return Err(CommitError::Unknown("an earlier write failed".into()));
        }
        let committed = match self.transact(records, durability) {
            Ok(()) => self.bound_wal(),
            Err(error) if self.rolled_back(&error) => Err(CommitError::Full(error.to_string())),
            Err(error) => Err(CommitError::Unknown(error.to_string())),
        };
        self.broken = matches!(committed, Err(CommitError::Unknown(_)));
        committed
    }

    fn body(&mut self, seq: u64) -> Result<FoundBody, ReadError> {
        match self.begin_reads().and_then(|()| rows::body(&self.db, seq)) {
            Err(error) if is_corrupt(&error) => Ok(FoundBody::Damaged(error.to_string())),
            found => found.map_err(read),
        }
    }

    fn dead(&mut self, seq: u64) -> Result<Option<DeadRow>, ReadError> {
        rows::dead(&self.db, seq).map_err(read)
    }

    fn dedup(&mut self, queue: u32, key: u128) -> Result<Option<DedupRow>, ReadError> {
        use rusqlite::OptionalExtension;
        let sql = "SELECT key, seq, ord, sent_ms FROM dedup WHERE queue = ?1 AND key = ?2";
        let found = self.db.prepare_cached(sql).and_then(|mut statement| {
            statement.query_row(rusqlite::params![queue, &key.to_le_bytes()[..]], rows::dedup).optional()
        });
        found.map_err(read)
    }

    fn free_bytes(&self) -> Option<u64> {
        if self.place.vfs.is_some() {
            return None;
        }
        free_bytes(self.place.file.parent()?)
    }
}

pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

fn load(db: &Connection, loader: &mut Loader) -> rusqlite::Result<Result<(), ReadError>> {
    let sql = "SELECT id, name, config, created_ms, modified_ms, purged_before, deleted, crc FROM queue";
    let mut statement = db.prepare(sql)?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        match rows::queue(row)? {
            Ok(queue) => loader.add(Loaded::Queue(queue)),
            Err(error) => return Ok(Err(error)),
        }
    }

    let sql = format!("SELECT {} FROM message", rows::MESSAGE_COLUMNS);
    let mut statement = db.prepare(&sql)?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let (row, sound) = rows::message(row)?;
        loader.add(Loaded::Message { row, damaged: !sound });
    }

    let mut statement = db.prepare("SELECT queue, grp FROM halted")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        if let Ok(group) = hapax_core::GroupId::new(row.get::<_, String>(1)?) {
            loader.add(Loaded::Halted { queue: row.get(0)?, group });
        }
    }

    let from_ms = loader.dedup_memory_from_ms() as i64;
    let older =
        "SELECT queue, sent_ms / 60000, count(*) FROM dedup WHERE sent_ms < ?1 GROUP BY 1, 2 ORDER BY 2";
    let mut statement = db.prepare(older)?;
    let mut found = statement.query([from_ms])?;
    while let Some(row) = found.next()? {
        let (minute, rows): (i64, i64) = (row.get(1)?, row.get(2)?);
        loader.add(Loaded::DedupMinute { queue: row.get(0)?, minute: minute as u64, rows: rows as u64 });
    }
    let mut statement =
        db.prepare("SELECT key, seq, ord, sent_ms, queue FROM dedup WHERE sent_ms >= ?1 ORDER BY sent_ms")?;
    let mut found = statement.query([from_ms])?;
    while let Some(row) = found.next()? {
        loader.add(Loaded::Dedup { queue: row.get(4)?, row: rows::dedup(row)? });
    }

    let mut statement = db.prepare("SELECT task, upto, cursor FROM redrive ORDER BY id")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        if let Ok(task) = serde_json::from_str(&row.get::<_, String>(0)?) {
            let (upto, cursor): (i64, i64) = (row.get(1)?, row.get(2)?);
            loader.add(Loaded::Redrive { task, upto: upto as u64, cursor: cursor as u64 });
        }
    }
    Ok(Ok(()))
}
