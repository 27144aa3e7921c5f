//! A ledger of numbered transactions, whose survivors can be checked.
#![allow(dead_code, reason = "each test binary uses its part")]

use hapax_simdisk::SimDisk;
use rusqlite::{Connection, OpenFlags};

pub const DB: &str = "ledger.db";

/// A connection in WAL mode with a small auto-checkpoint, so that the database file is written too.
pub fn open(disk: &SimDisk, synchronous: &str) -> rusqlite::Result<Connection> {
    let db = connect(disk)?;
    db.execute_batch(&format!(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = {synchronous}; PRAGMA wal_autocheckpoint = 20;
         CREATE TABLE IF NOT EXISTS entry (n INTEGER PRIMARY KEY, body BLOB NOT NULL);
         CREATE TABLE IF NOT EXISTS mark (n INTEGER PRIMARY KEY);"
    ))?;
    Ok(db)
}

pub fn connect(disk: &SimDisk) -> rusqlite::Result<Connection> {
    Connection::open_with_flags_and_vfs(DB, OpenFlags::default(), disk.vfs_name())
}

/// Transaction `n` writes to two tables, and its size follows from `n`.
pub fn commit(db: &mut Connection, n: u32) -> rusqlite::Result<()> {
    let tx = db.transaction()?;
    tx.execute("INSERT INTO entry VALUES (?1, ?2)", (n, body(n)))?;
    tx.execute("INSERT INTO mark VALUES (?1)", [n])?;
    tx.commit()
}

fn body(n: u32) -> Vec<u8> {
    vec![n as u8; 50 + (n as usize * 7919) % 15_000]
}

/// Asserts that the database is sound and holds exactly the transactions 1..=m; returns m.
pub fn surviving_prefix(db: &Connection) -> u32 {
    let report: String = db.query_row("PRAGMA integrity_check", [], |row| row.get(0)).unwrap();
    assert_eq!(report, "ok");
    let mut entries = db.prepare("SELECT n, body FROM entry ORDER BY n").unwrap();
    let entries: Vec<(u32, Vec<u8>)> =
        entries.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect();
    let mut marks = db.prepare("SELECT n FROM mark ORDER BY n").unwrap();
    let marks: Vec<u32> = marks.query_map([], |row| row.get(0)).unwrap().map(Result::unwrap).collect();
    let last = entries.len() as u32;
    assert_eq!(marks, (1..=last).collect::<Vec<_>>(), "a prefix, and no torn transaction");
    for (at, (n, bytes)) in (1..).zip(entries) {
        assert_eq!(n, at);
        assert_eq!(bytes, body(n));
    }
    last
}

/// The extended result code of an error.
pub fn code(error: &rusqlite::Error) -> i32 {
    match error {
        rusqlite::Error::SqliteFailure(failure, _) => failure.extended_code,
        other => panic!("not an error of SQLite: {other}"),
    }
}
