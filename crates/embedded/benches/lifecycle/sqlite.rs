//! A bare SQLite loop over the same rows: one thread, statements prepared once, one transaction per group. No engine,
//! no checksums, no responses.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Statement, params};

use crate::{Contestant, Turn};

const TABLES: &str = "
CREATE TABLE message (
    seq INTEGER PRIMARY KEY, queue INTEGER NOT NULL, ord INTEGER NOT NULL, state INTEGER NOT NULL,
    due_ms INTEGER NOT NULL, attempts INTEGER NOT NULL, fence INTEGER NOT NULL, sent_ms INTEGER NOT NULL,
    base_ms INTEGER NOT NULL, first_ms INTEGER NOT NULL, received_ms INTEGER NOT NULL, bytes INTEGER NOT NULL,
    priority INTEGER NOT NULL, flags INTEGER NOT NULL, grp TEXT, crc INTEGER NOT NULL
);
CREATE TABLE body (
    seq INTEGER PRIMARY KEY, origin INTEGER NOT NULL, dedup TEXT, attributes TEXT, body BLOB NOT NULL,
    crc INTEGER NOT NULL
);
";
/// A time like those that a store writes, in ms.
const NOW_MS: i64 = 1_760_000_000_000;

pub struct Sqlite {
    db: Connection,
    body: Vec<u8>,
    /// The first message of the queue, and the position after its last.
    head: i64,
    tail: i64,
}

struct Statements<'a> {
    begin: Statement<'a>,
    commit: Statement<'a>,
    insert: Statement<'a>,
    insert_body: Statement<'a>,
    lease: Statement<'a>,
    body: Statement<'a>,
    delete: Statement<'a>,
    delete_body: Statement<'a>,
}

impl<'a> Statements<'a> {
    fn prepare(db: &'a Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            begin: db.prepare("BEGIN IMMEDIATE")?,
            commit: db.prepare("COMMIT")?,
            insert: db.prepare(
                "INSERT INTO message (seq, queue, ord, state, due_ms, attempts, fence, sent_ms, base_ms, first_ms, \
                 received_ms, bytes, priority, flags, grp, crc) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
            )?,
            insert_body: db.prepare(
                "INSERT INTO body (seq, origin, dedup, attributes, body, crc) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
            )?,
            lease: db.prepare(
                "UPDATE message SET queue = ?2, ord = ?3, state = ?4, due_ms = ?5, attempts = ?6, fence = ?7, \
                 base_ms = ?8, first_ms = ?9, received_ms = ?10, flags = ?11, crc = ?12 WHERE seq = ?1",
            )?,
            body: db.prepare("SELECT origin, dedup, attributes, body, crc FROM body WHERE seq = ?1")?,
            delete: db.prepare("DELETE FROM message WHERE seq = ?1")?,
            delete_body: db.prepare("DELETE FROM body WHERE seq = ?1")?,
        })
    }

    fn send(&mut self, seqs: std::ops::Range<i64>, body: &[u8]) -> rusqlite::Result<()> {
        self.begin.execute([])?;
        let none: Option<&str> = None;
        for seq in seqs {
            let bytes = body.len() as i64;
            self.insert.execute(params![
                seq, 1, seq, 0, NOW_MS, 0, 0, NOW_MS, NOW_MS, 0, 0, bytes, 0, 0, none, 77_777_777
            ])?;
            self.insert_body.execute(params![seq, 1, none, none, body, 77_777_777])?;
        }
        self.commit.execute([])?;
        Ok(())
    }

    fn lease(&mut self, seqs: std::ops::Range<i64>) -> rusqlite::Result<usize> {
        let mut bytes = 0;
        self.begin.execute([])?;
        for seq in seqs {
            let (due_ms, fence) = (NOW_MS + 30_000, NOW_MS * 1000 + seq);
            self.lease
                .execute(params![seq, 1, seq, 2, due_ms, 1, fence, NOW_MS, NOW_MS, NOW_MS, 0, 77_777_777])?;
            bytes += self.body.query_row([seq], |row| row.get::<_, Vec<u8>>(3))?.len();
        }
        self.commit.execute([])?;
        Ok(bytes)
    }

    fn ack(&mut self, seqs: std::ops::Range<i64>) -> rusqlite::Result<()> {
        self.begin.execute([])?;
        for seq in seqs {
            self.delete.execute([seq])?;
            self.delete_body.execute([seq])?;
        }
        self.commit.execute([])?;
        Ok(())
    }
}

impl Sqlite {
    pub fn open(folder: &Path, bytes: usize, depth: u64) -> Self {
        let db = Connection::open(folder.join("bare.db")).expect("a database can be made");
        let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).expect("a mode");
        assert_eq!(mode, "wal");
        // The bound on the WAL is the store's; the cache is larger than the store's 8 MiB.
        db.pragma_update(None, "cache_size", -32 * 1024).expect("a cache");
        db.pragma_update(None, "wal_autocheckpoint", 4_000).expect("a bound on the WAL");
        db.execute_batch(TABLES).expect("tables can be made");
        let mut sqlite = Self { db, body: vec![7; bytes], head: 1, tail: 1 };
        let depth = depth as i64;
        let mut statements = Statements::prepare(&sqlite.db).expect("the statements are sound");
        while sqlite.tail <= depth {
            let to = (sqlite.tail + 1000).min(depth + 1);
            statements.send(sqlite.tail..to, &sqlite.body).expect("messages can be written");
            sqlite.tail = to;
        }
        drop(statements);
        sqlite
    }
}

impl Contestant for Sqlite {
    fn turn(&mut self, in_flight: usize, time: Duration) -> Turn {
        let mut turn = Turn::default();
        let group = in_flight as i64;
        let sync = |mode: &str| self.db.pragma_update(None, "synchronous", mode).expect("a mode is set");
        let mut statements = Statements::prepare(&self.db).expect("the statements are sound");
        let start = Instant::now();
        while start.elapsed() < time {
            sync("FULL");
            statements.send(self.tail..self.tail + group, &self.body).expect("messages can be written");
            sync("NORMAL");
            let bytes = statements.lease(self.head..self.head + group).expect("messages can be leased");
            assert_eq!(bytes, in_flight * self.body.len());
            sync("FULL");
            statements.ack(self.head..self.head + group).expect("messages can be deleted");
            self.head += group;
            self.tail += group;
            turn.lifecycles += in_flight as u64;
            turn.commits += 3;
            turn.synced += 2;
        }
        turn.operations = turn.lifecycles * 3;
        turn.secs = start.elapsed().as_secs_f64();
        turn
    }
}
