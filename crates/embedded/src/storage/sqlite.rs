//! Storage in SQLite: one writing connection, WAL, one transaction per wave.

use std::mem::ManuallyDrop;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rusqlite::{Connection, ErrorCode, OpenFlags};

use super::{
    CommitError, DueEntry, Durability, FoundBody, FoundEntry, ReadError, Storage, attempts, documents,
    ledger, rows, schema, write,
};
use crate::OpenError;
use crate::checkpoint::{Checkpoint, CheckpointPass, Checkpointer};
use crate::engine::{LoadedRow, Loader};
use crate::ids::Ids;
use crate::record::{DeadRow, DedupRow, Header, Record, halted_crc, redrive_crc};

/// A database file and how to open it.
#[derive(Debug, Clone)]
pub(crate) struct DbLocation {
    pub file: PathBuf,
    /// VFS to use instead of the operating system's, for tests.
    pub vfs: Option<String>,
}

impl DbLocation {
    fn wal(&self) -> PathBuf {
        let mut path = self.file.clone().into_os_string();
        path.push("-wal");
        path.into()
    }

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

/// Size of the WAL, in pages of 4 KiB, at which it is checkpointed. Every commit writes a few pages again, and SQLite looks
/// for each version of a page among all older ones in the WAL: at 4,000 pages a lifecycle takes 1.3 times as many
/// instructions. Tests may set less.
const WAL_PAGES_MAX: u64 = 2_000;
/// Page cache of the writing connection, in KiB. A queue works at its two ends, so a small cache is enough. A larger
/// one costs time: if a commit has split a page into freed pages, SQLite walks the whole cache
/// (`pcache1TruncateUnsafe`; measured at 32 MiB: 5% of the server's CPU time).
const CACHE_KIB: i64 = 8 * 1024;

/// Time until a ledger with damaged pages is checked for pruning again.
const DAMAGED_AGAIN_MS: u64 = 24 * 3600 * 1000;

pub(crate) struct Sqlite {
    /// Not closed after a failed write: closing would checkpoint and thereby retry the failed write.
    db: ManuallyDrop<Connection>,
    location: DbLocation,
    secret: [u8; 32],
    ids: Ids,
    durability: Durability,
    wal_pages: Arc<AtomicU64>,
    /// Size of the WAL, in pages, at which it is checkpointed.
    pub wal_pages_max: u64,
    checkpointer: Checkpointer,
    broken: bool,
}

impl Sqlite {
    /// Opens or creates the file at the version that `steps` produce.
    pub fn open(
        location: DbLocation,
        steps: &[schema::Step],
        checkpoint: Checkpoint,
    ) -> Result<Self, OpenError> {
        let mut db = location.connect()?;
        schema::check(&db, &location.file, steps)?;
        let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0))?;
        if mode != "wal" {
            return Err(OpenError::NoWal { file: location.file, mode });
        }
        db.pragma_update(None, "synchronous", "FULL")?;
        db.pragma_update(None, "wal_autocheckpoint", 0)?;
        db.pragma_update(None, "cache_size", -CACHE_KIB)?;
        db.pragma_update(None, "foreign_keys", false)?;
        make_wal_durable(&db, &location)?;
        schema::prepare(&mut db, &location.file, steps)?;
        first_rows(&mut db)?;

        let wal_pages = Arc::new(AtomicU64::new(0));
        let pages = wal_pages.clone();
        db.wal_hook(Some(move |_: &mut rusqlite::hooks::Wal, frames: std::ffi::c_int| {
            pages.store(frames as u64, Ordering::Relaxed);
            Ok(())
        }))?;
        let (header, secret) = rows::header(&db).map_err(crate::damaged)?;
        if header.paused.is_some() {
            // Restored from a backup: ids issued after the backup was taken must not be issued again.
            Ids::begin_epoch(&db, header.next_seq)?;
        }
        Ids::prune_imported(&db, header.clock_ms)?;
        let ids = Ids::load(&db)?
            .ok_or_else(|| OpenError::Damaged("an epoch's row is damaged; restore a backup".into()))?;
        let checkpointer = Checkpointer::start(&location, checkpoint)?;
        let durability = Durability::PowerLoss;
        let db = ManuallyDrop::new(db);
        let wal_pages_max = WAL_PAGES_MAX;
        Ok(Self {
            db,
            location,
            secret,
            ids,
            durability,
            wal_pages,
            wal_pages_max,
            checkpointer,
            broken: false,
        })
    }

    pub fn secret(&self) -> [u8; 32] {
        self.secret
    }

    pub fn ids(&self) -> Ids {
        self.ids.clone()
    }

    fn set_durability(&mut self, mut durability: Durability) -> rusqlite::Result<()> {
        // The first commits are synced, and later ones now and then: else a power cut would take the queues, too.
        let pages = self.wal_pages.load(Ordering::Relaxed);
        if hapax_core::mutant::is("commit-not-synced") && pages > 100 && !pages.is_multiple_of(16) {
            durability = Durability::ProcessDeath;
        }
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
        let mut to = write::RecordWriter::new(&self.db, &self.secret);
        for record in records {
            to.write(record)?;
        }
        drop(to);
        self.db.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }

    /// Begins a transaction for the bodies that a wave reads. Without it, each read would take the file's locks again.
    fn begin_reads(&self) -> rusqlite::Result<()> {
        if self.db.is_autocommit() {
            self.db.prepare_cached("BEGIN")?.execute([])?;
        }
        Ok(())
    }

    fn end_reads(&self) -> rusqlite::Result<()> {
        if !self.db.is_autocommit() {
            // A rollback, not a commit: after a read of a damaged page a commit would fail, and there is nothing to
            // commit.
            self.db.prepare_cached("ROLLBACK")?.execute([])?;
        }
        Ok(())
    }

    /// Rolls back after `error`. Returns whether the state before the transaction is restored.
    fn rolled_back(&mut self, error: &rusqlite::Error) -> bool {
        let full = error.sqlite_error_code() == Some(ErrorCode::DiskFull);
        full && (self.db.is_autocommit() || self.db.execute_batch("ROLLBACK").is_ok())
            && self.db.is_autocommit()
    }

    /// Checkpoints the WAL when it has grown. Most of the copying happens on the checkpointing thread.
    fn bound_wal(&mut self) -> Result<(), CommitError> {
        let unknown = |problem: String| CommitError::Unknown(format!("checkpoint failed: {problem}"));
        if let Some(problem) = self.checkpointer.failure() {
            return Err(unknown(problem));
        }
        if self.wal_pages.load(Ordering::Relaxed) < self.wal_pages_max {
            return Ok(());
        }
        if self.checkpointer.ask() {
            // The checkpointing thread has copied nearly all of the WAL. The pages written meanwhile are copied here,
            // between two waves, so that the WAL restarts from its beginning. Otherwise a writer that never pauses
            // would let it grow without bound.
            match crate::checkpoint::run(&self.db) {
                Ok(CheckpointPass::Ran | CheckpointPass::Full) => {}
                Err(error) => return Err(unknown(error.to_string())),
            }
        }
        Ok(())
    }

    /// A checkpoint that has failed since the last commit is not retried either.
    fn stop_checkpoints(&mut self) {
        self.checkpointer.stop();
        self.broken |= self.checkpointer.failure().is_some();
    }

    /// Checkpoints and closes.
    pub fn close(mut self) {
        self.stop_checkpoints();
        if !self.broken {
            // If this fails, the WAL remains, and the next open recovers from it.
            let _ = self.end_reads();
            let _ = self.db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        }
    }
}

impl Drop for Sqlite {
    fn drop(&mut self) {
        self.stop_checkpoints();
        if !self.broken {
            // `ManuallyDrop::drop` would need unsafe code; replacing the connection drops the old one.
            drop(std::mem::replace(
                &mut *self.db,
                Connection::open_in_memory().expect("memory for a connection"),
            ));
        }
    }
}

/// Rewrites the WAL's bytes in place and syncs them.
///
/// The WAL may hold data that was written but never synced: the process died before its fsync, or the fsync failed and
/// the operating system marked the pages as clean. From now on the store serves this data (a repeated send returns
/// "duplicate", a repeated ack "gone") and commits follow it, so a power cut must not undo it. After a failed fsync
/// another sync is not enough. Writing the same bytes to the same place is safe at any time.
fn make_wal_durable(db: &Connection, location: &DbLocation) -> Result<(), OpenError> {
    let path = location.wal();
    let io = |error| OpenError::Io { path: path.clone(), error };
    // A simulated disk is not in the file system; its tests do this themselves.
    if location.vfs.is_some() || std::fs::metadata(&path).map_or(0, |file| file.len()) == 0 {
        return Ok(());
    }
    // The lock keeps out every other writer, including other programs.
    db.execute_batch("BEGIN IMMEDIATE")?;
    let rewritten = rewrite(&path).map_err(io);
    db.execute_batch("ROLLBACK")?;
    rewritten
}

fn rewrite(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::FileExt;
    let file = std::fs::OpenOptions::new().read(true).write(true).open(path)?;
    let mut chunk = vec![0; 1024 * 1024];
    let mut at = 0;
    loop {
        let count = file.read_at(&mut chunk, at)?;
        if count == 0 {
            return file.sync_all();
        }
        file.write_all_at(&chunk[..count], at)?;
        at += count as u64;
    }
}

/// Creates a new store's secret, first epoch and counters.
fn first_rows(db: &mut Connection) -> Result<(), OpenError> {
    let rows: i64 = db.query_row("SELECT count(*) FROM store", [], |row| row.get(0))?;
    if rows > 0 {
        return Ok(());
    }
    // Both rows were written in one transaction: if only one exists, the file is damaged, not new.
    let epochs: i64 = db.query_row("SELECT count(*) FROM epoch", [], |row| row.get(0))?;
    if epochs > 0 {
        return Err(OpenError::Damaged(
            "the store's own row is damaged (it is gone); restore a backup".into(),
        ));
    }
    let mut secret = [0u8; 32];
    getrandom::fill(&mut secret).map_err(|error| OpenError::Random(error.to_string()))?;
    let header = Header { next_seq: 1, fence_floor: 1, ..Header::default() };
    let transaction = db.transaction()?;
    transaction.execute(
        "INSERT INTO store (one, secret, clock_ms, fence_floor, next_seq, message_rows, paused, crc) \
         VALUES (1, ?1, 0, 1, 1, 0, NULL, ?2)",
        rusqlite::params![&secret[..], rows::header_crc(&header, &secret)],
    )?;
    Ids::begin_epoch(&transaction, 1)?;
    transaction.commit()?;
    Ok(())
}

#[expect(clippy::needless_pass_by_value, reason = "the form that map_err takes")]
fn read(error: rusqlite::Error) -> ReadError {
    let remedy = if rows::is_corrupt(&error) { "; restore a backup" } else { "" };
    ReadError(format!("{error}{remedy}"))
}

impl Storage for Sqlite {
    fn header(&mut self) -> Result<Header, ReadError> {
        rows::header(&self.db).map(|(header, _)| header)
    }

    fn load(&mut self, loader: &mut Loader) -> Result<(), ReadError> {
        load(&self.db, loader).map_err(read)??;
        loader.check_rows();
        Ok(())
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

    fn bodies(&mut self, seqs: &[u64]) -> Result<Vec<FoundBody>, ReadError> {
        if seqs.is_empty() {
            return Ok(Vec::new());
        }
        self.begin_reads().and_then(|()| rows::bodies(&self.db, seqs)).map_err(read)
    }

    fn dead(&mut self, seq: u64) -> Result<Option<DeadRow>, ReadError> {
        rows::dead(&self.db, seq).map_err(read)
    }

    fn last_error(&mut self, seq: u64) -> Result<Option<String>, ReadError> {
        rows::last_error(&self.db, seq).map_err(read)
    }

    fn dedup(&mut self, queue: u32, key: u128) -> Result<Option<DedupRow>, ReadError> {
        use rusqlite::OptionalExtension;
        let sql = format!("SELECT {} FROM dedup WHERE queue = ?1 AND key = ?2", rows::DEDUP_COLUMNS);
        let found = self.db.prepare_cached(&sql).and_then(|mut statement| {
            statement.query_row(rusqlite::params![queue, &key.to_le_bytes()[..]], rows::dedup).optional()
        });
        Ok(found.map_err(read)?.flatten().map(|(_, row)| row))
    }

    fn entry(&mut self, hash: u128) -> Result<FoundEntry, ReadError> {
        self.begin_reads().and_then(|()| ledger::find(&self.db, hash)).map_err(read)
    }

    fn can_drop(&mut self, hash: u128) -> Result<bool, ReadError> {
        self.end_reads().and_then(|()| ledger::can_drop(&self.db, hash)).map_err(read)
    }

    fn links(&mut self, hash: u128, after: u64, limit: usize) -> Result<Vec<(u64, u32)>, ReadError> {
        ledger::links(&self.db, hash, after, limit).map_err(read)
    }

    fn due_entries(&mut self, now_ms: u64, limit: usize) -> Result<(Vec<DueEntry>, Option<u64>), ReadError> {
        match ledger::due(&self.db, now_ms, limit) {
            // A damaged ledger is not pruned; claims on damaged entries report the damage.
            Err(error) if rows::is_corrupt(&error) => Ok((Vec::new(), Some(now_ms + DAMAGED_AGAIN_MS))),
            due => due.map_err(read),
        }
    }

    fn free_bytes(&self) -> Option<u64> {
        if self.location.vfs.is_some() {
            return None;
        }
        free_bytes(self.location.file.parent()?)
    }
}

pub(crate) fn free_bytes(folder: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(folder).ok()?;
    Some(stat.f_bavail * stat.f_frsize)
}

/// Scans the messages once, in key order. If SQLite cannot decode a row, the scan continues after it.
fn load_messages(db: &Connection, loader: &mut Loader) -> rusqlite::Result<()> {
    let sql = format!("SELECT {} FROM message WHERE seq > ?1 ORDER BY seq", rows::MESSAGE_COLUMNS);
    let mut statement = db.prepare(&sql)?;
    // The key of the last sound row, where the scan continues. A damaged row's key may be damaged too.
    let mut last = i64::MIN;
    loop {
        let mut found = statement.query([last])?;
        let mut strayed = false;
        let ended = loop {
            let row = match found.next() {
                Ok(Some(row)) => row,
                ended => break ended.map(drop),
            };
            match rows::message(row) {
                Ok((row, true)) if row.entry.seq as i64 <= last => return Err(rows::broken_tree()),
                Ok((row, sound)) => {
                    (last, strayed) = if sound { (row.entry.seq as i64, false) } else { (last, true) };
                    loader.add(LoadedRow::Message { row, damaged: !sound });
                }
                Err(error) => break Err(error),
            }
        };
        drop(found);
        match ended {
            Err(error) if rows::is_corrupt(&error) && !strayed => {
                // Either the row's key is readable, or the tree itself is broken, and then this query fails too.
                let next = "SELECT min(seq) FROM message WHERE seq > ?1";
                let seq: Option<i64> = db.query_row(next, [last], |row| row.get(0))?;
                let seq = seq.filter(|seq| *seq > last).ok_or(error)?;
                let row = rows::broken_message(db, seq as u64);
                loader.add(LoadedRow::Message { row, damaged: true });
                last = seq;
            }
            ended => return ended,
        }
    }
}

fn load(db: &Connection, loader: &mut Loader) -> rusqlite::Result<Result<(), ReadError>> {
    let sql = format!("SELECT {} FROM queue", rows::QUEUE_COLUMNS);
    let mut statement = db.prepare(&sql)?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        match rows::queue(row)? {
            Ok(queue) => loader.add(LoadedRow::Queue(queue)),
            Err(error) => return Ok(Err(error)),
        }
    }

    load_messages(db, loader)?;

    let mut statement = db.prepare("SELECT queue, CAST(grp AS BLOB), crc, seq FROM halted")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let (queue, group, crc): (u32, Vec<u8>, u32) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let seq = row.get::<_, i64>(3)? as u64;
        let group = String::from_utf8(group).ok().filter(|group| crc == halted_crc(queue, group, seq));
        match group.and_then(|group| hapax_core::GroupId::new(group).ok()) {
            Some(group) => loader.add(LoadedRow::Halted { queue, group, seq }),
            None => loader.warn("a row about a halted group is damaged; that group may have continued"),
        }
    }

    let from_ms = loader.dedup_memory_from_ms() as i64;
    let older =
        "SELECT queue, sent_ms / 60000, count(*) FROM dedup WHERE sent_ms < ?1 GROUP BY 1, 2 ORDER BY 2";
    let mut statement = db.prepare(older)?;
    let mut found = statement.query([from_ms])?;
    while let Some(row) = found.next()? {
        let (minute, rows): (i64, i64) = (row.get(1)?, row.get(2)?);
        loader.add(LoadedRow::DedupMinute { queue: row.get(0)?, minute: minute as u64, rows: rows as u64 });
    }
    let sql = format!("SELECT {} FROM dedup WHERE sent_ms >= ?1 ORDER BY sent_ms", rows::DEDUP_COLUMNS);
    let mut statement = db.prepare(&sql)?;
    let mut found = statement.query([from_ms])?;
    while let Some(row) = found.next()? {
        match rows::dedup(row)? {
            Some((queue, row)) => loader.add(LoadedRow::Dedup { queue, row }),
            None => loader.warn("a remembered deduplication id is damaged; a repeated send may be accepted"),
        }
    }

    let mut statement =
        db.prepare("SELECT CAST(task AS BLOB), upto, cursor, crc, id FROM redrive ORDER BY id")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let (task, upto, cursor): (Vec<u8>, i64, i64) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let (crc, id): (u32, i64) = (row.get(3)?, row.get(4)?);
        let (upto, cursor) = (upto as u64, cursor as u64);
        let task =
            String::from_utf8(task).ok().filter(|task| crc == redrive_crc(id as u64, task, upto, cursor));
        match task.and_then(|task| serde_json::from_str(&task).ok()) {
            Some(task) => loader.add(LoadedRow::Redrive { task, upto, cursor }),
            None => loader.warn("a redrive's row is damaged; it does not continue"),
        }
    }
    attempts::load(db, loader)?;
    ledger::load(db, loader)?;
    documents::load(db, loader)
}
