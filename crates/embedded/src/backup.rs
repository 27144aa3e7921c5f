//! Copies of a running store, and their restoration.

use std::fs::{File, Metadata, TryLockError};
use std::io::{ErrorKind, Read as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rusqlite::Connection;

use crate::storage::sqlite::DbLocation;
use crate::storage::{self, schema};
use crate::{DATABASE, OpenError};

/// How a file of SQLite begins.
const SQLITE: &[u8] = b"SQLite format 3\0";

/// Writes a consistent copy of the database to `to`, which must not exist. It appears whole or not at all.
pub(crate) fn copy(db: &Connection, to: &Path) -> Result<(), OpenError> {
    copy_and(db, to, |_| Ok(()))
}

fn copy_and(
    db: &Connection,
    to: &Path,
    change: impl FnOnce(&mut Connection) -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let io = |error| OpenError::Io { path: to.to_owned(), error };
    let part = beside(to, ".part");
    let _claimed = claim(&part)?;
    // Looked at while the part is claimed, so that of two copies under one name the second finds the first.
    if to.exists() {
        let _ = std::fs::remove_file(&part);
        return Err(OpenError::Exists { path: to.to_owned() });
    }
    let filled = fill(db, &part, change).and_then(|()| std::fs::rename(&part, to).map_err(io));
    if let Err(error) = filled {
        // This call created the file, and it is incomplete.
        let _ = std::fs::remove_file(&part);
        return Err(error);
    }
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
}

fn beside(path: &Path, end: &str) -> PathBuf {
    let mut beside = path.to_owned().into_os_string();
    beside.push(end);
    PathBuf::from(beside)
}

/// Makes the empty file that a copy is written to. Its lock says that the copy is under way: a file without one was left
/// by a process that was killed, and is replaced.
fn claim(part: &Path) -> Result<File, OpenError> {
    let io = |error| OpenError::Io { path: part.to_owned(), error };
    let taken = || OpenError::Exists { path: part.to_owned() };
    // Created here and by no other process, readable by no other user; SQLite fills a file that is empty.
    let create = || File::options().write(true).create_new(true).mode(0o600).open(part);
    let made = match create() {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            remove_left(part)?;
            create()
        }
        made => made,
    };
    let file =
        made.map_err(|error| if error.kind() == ErrorKind::AlreadyExists { taken() } else { io(error) })?;
    let id = |metadata: Metadata| (metadata.dev(), metadata.ino());
    // On a medium without locks the copy is made all the same; if it is killed, its part has to be removed by hand.
    if let Err(TryLockError::WouldBlock) = file.try_lock() {
        return Err(taken());
    }
    // Before it was locked it looked as if it had been left.
    let there = std::fs::symlink_metadata(part).map(id);
    if there.ok() != Some(file.metadata().map(id).map_err(io)?) {
        return Err(taken());
    }
    // SQLite would take another copy's journal for this one's.
    for journal in ["-journal", "-wal"] {
        remove(&beside(part, journal))?;
    }
    Ok(file)
}

/// Removes what a killed process left of a copy. Another program's file stays, and so does a copy under way.
fn remove_left(part: &Path) -> Result<(), OpenError> {
    let io = |error| OpenError::Io { path: part.to_owned(), error };
    let taken = || OpenError::Exists { path: part.to_owned() };
    match std::fs::symlink_metadata(part) {
        Ok(left) if left.is_file() => {}
        Ok(_) => return Err(taken()),
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io(error)),
    }
    let file = File::open(part).map_err(io)?;
    let mut start = Vec::new();
    (&file).take(SQLITE.len() as u64).read_to_end(&mut start).map_err(io)?;
    // The first page may not have been written yet.
    let ours = SQLITE.starts_with(&start) || start.iter().all(|byte| *byte == 0);
    if ours && file.try_lock().is_ok() { remove(part) } else { Err(taken()) }
}

fn remove(path: &Path) -> Result<(), OpenError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != ErrorKind::NotFound => {
            Err(OpenError::Io { path: path.to_owned(), error })
        }
        _ => Ok(()),
    }
}

fn fill(
    db: &Connection,
    part: &Path,
    change: impl FnOnce(&mut Connection) -> Result<(), OpenError>,
) -> Result<(), OpenError> {
    let io = |error| OpenError::Io { path: part.to_owned(), error };
    let name = part.to_str().ok_or_else(|| OpenError::Path { path: part.to_owned() })?;
    db.execute("VACUUM INTO ?1", [name])?;
    let mut copy = Connection::open(part)?;
    // A single file that can be copied: no WAL beside it.
    let _: String = copy.query_row("PRAGMA journal_mode = DELETE", [], |row| row.get(0))?;
    change(&mut copy)?;
    copy.close().map_err(|(_, error)| error)?;
    File::open(part).and_then(|file| file.sync_all()).map_err(io)
}

/// Writes a backup. It is paused when it is opened as a store: messages that were settled after the backup was taken
/// would be delivered again.
pub(crate) fn take(location: &DbLocation, to: &Path, now_ms: u64) -> Result<(), OpenError> {
    let db = location.connect()?;
    copy_and(&db, to, |copy| {
        let transaction = copy.transaction()?;
        let (mut header, secret) = storage::header(&transaction).map_err(crate::damaged)?;
        header.paused = Some(format!(
            "it was restored from a backup taken at {now_ms} (ms since 1970); messages settled after that will be \
             delivered again and messages sent after that are missing; resume it when that is acceptable"
        ));
        storage::put_header(&transaction, &header, &secret)?;
        transaction.commit()?;
        Ok(())
    })
}

/// Copies a backup into an empty or new folder.
pub(crate) fn restore(backup: &Path, folder: &Path) -> Result<(), OpenError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error| OpenError::Io { path, error }
    };
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let to = folder.join(DATABASE);
    for journal in ["-wal", "-journal"] {
        // SQLite would replay another store's log into this one.
        let path = folder.join(format!("{DATABASE}{journal}"));
        if path.exists() {
            return Err(OpenError::Exists { path });
        }
    }
    let source = Connection::open_with_flags(backup, rusqlite::OpenFlags::SQLITE_OPEN_READ_ONLY)
        .map_err(|_| OpenError::Io { path: backup.to_owned(), error: std::io::ErrorKind::NotFound.into() })?;
    schema::recognise(&source, backup)?;
    let sound: String = source.query_row("PRAGMA integrity_check(1)", [], |row| row.get(0))?;
    if sound != "ok" {
        return Err(OpenError::Damaged(format!("{}: {sound}", backup.display())));
    }
    copy(&source, &to)
}
