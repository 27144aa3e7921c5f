//! Copies of a store while it runs, and their way back.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rusqlite::Connection;

use crate::storage::sqlite::DbLocation;
use crate::storage::{self, schema};
use crate::{DATABASE, OpenError};

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
    if to.exists() {
        return Err(OpenError::Exists { path: to.to_owned() });
    }
    let mut part = to.to_owned().into_os_string();
    part.push(".part");
    let part = std::path::PathBuf::from(part);
    // Made here and by nobody else, readable by nobody else; SQLite fills a file that is empty.
    let made = File::options().write(true).create_new(true).mode(0o600).open(&part);
    made.map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => OpenError::Exists { path: part.clone() },
        _ => io(error),
    })?;
    let filled = fill(db, &part, change).and_then(|()| std::fs::rename(&part, to).map_err(io));
    if let Err(error) = filled {
        // Ours, and of no use.
        let _ = std::fs::remove_file(&part);
        return Err(error);
    }
    let folder = to.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(io)
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
    // One file that can be carried away: no WAL beside it.
    let _: String = copy.query_row("PRAGMA journal_mode = DELETE", [], |row| row.get(0))?;
    change(&mut copy)?;
    copy.close().map_err(|(_, error)| error)?;
    File::open(part).and_then(|file| file.sync_all()).map_err(io)
}

/// Writes a backup. Opened in place of a store it is paused: what was settled after the backup was taken would be
/// handed out again.
pub(crate) fn take(place: &DbLocation, to: &Path, now_ms: u64) -> Result<(), OpenError> {
    let db = place.connect()?;
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

/// Puts a backup into an empty or new folder.
pub(crate) fn restore(backup: &Path, folder: &Path) -> Result<(), OpenError> {
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error| OpenError::Io { path, error }
    };
    std::fs::create_dir_all(folder).map_err(io(folder))?;
    let to = folder.join(DATABASE);
    for journal in ["-wal", "-journal"] {
        // SQLite would take another store's log for this one's.
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
