//! A bare SQLite loop over the same rows: one thread, statements prepared once, one transaction per group. No engine,
//! no checksums, no responses.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OptionalExtension, Statement, params};

use crate::{Contestant, Kind, OUTCOME, SCOPE, Turn, fingerprint, key, owner, random_below};

/// The store's table of entries and its indexes.
const TABLES: &str = "
CREATE TABLE ledger (
    fence INTEGER PRIMARY KEY, id BLOB NOT NULL, scope TEXT NOT NULL, key TEXT NOT NULL, state INTEGER NOT NULL,
    owner TEXT NOT NULL, fingerprint TEXT, lease_ms INTEGER NOT NULL, at_ms INTEGER NOT NULL, ttl_ms INTEGER NOT NULL,
    on_doubt INTEGER NOT NULL, claimed_ms INTEGER NOT NULL, takeovers INTEGER NOT NULL, omitted INTEGER,
    outcome_crc INTEGER NOT NULL, prune_ms INTEGER, crc INTEGER NOT NULL, outcome TEXT
);
CREATE UNIQUE INDEX ledger_id ON ledger (id);
CREATE INDEX ledger_prune ON ledger (prune_ms);
";
/// A time like those that a store writes, in ms.
const NOW_MS: i64 = 1_760_000_000_000;
/// The start of fences: a time in microseconds.
const FENCE: i64 = NOW_MS * 1000;
const TTL_MS: i64 = 4 * 24 * 3600 * 1000;

pub struct Sqlite {
    db: Connection,
    next: i64,
}

struct Statements<'a> {
    begin: Statement<'a>,
    commit: Statement<'a>,
    insert: Statement<'a>,
    update: Statement<'a>,
    find: Statement<'a>,
}

/// Stands for the hash of scope and key: equally random, and cheaper.
fn id(number: i64) -> [u8; 16] {
    let mut x = (number as u64).wrapping_add(0x9e37_79b9_7f4a_7c15).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x ^= x >> 31;
    let y = x.wrapping_mul(0x94d0_49bb_1331_11eb);
    let mut id = [0; 16];
    id[..8].copy_from_slice(&y.to_le_bytes());
    id[8..].copy_from_slice(&x.to_le_bytes());
    id
}

impl<'a> Statements<'a> {
    fn prepare(db: &'a Connection) -> rusqlite::Result<Self> {
        Ok(Self {
            begin: db.prepare("BEGIN IMMEDIATE")?,
            commit: db.prepare("COMMIT")?,
            insert: db.prepare(
                "INSERT INTO ledger (fence, id, scope, key, state, owner, fingerprint, lease_ms, at_ms, ttl_ms, \
                 on_doubt, claimed_ms, takeovers, outcome_crc, crc) \
                 VALUES (?1, ?2, ?3, ?4, 0, ?5, ?6, 30000, ?7, 0, 0, ?7, 0, 77777777, 77777777)",
            )?,
            update: db.prepare(
                "UPDATE ledger SET state = 2, at_ms = ?3, ttl_ms = ?4, prune_ms = ?3 + ?4, crc = 99999999, \
                 outcome_crc = 99999999, outcome = ?5 WHERE fence = ?1 AND id = ?2",
            )?,
            find: db.prepare(
                "SELECT fence, scope, key, state, owner, fingerprint, lease_ms, at_ms, ttl_ms, on_doubt, claimed_ms, \
                 takeovers, omitted, outcome_crc, prune_ms, crc, outcome FROM ledger WHERE id = ?1",
            )?,
        })
    }

    /// Looks up each key and inserts it, synced.
    fn claim(&mut self, numbers: std::ops::Range<i64>) -> rusqlite::Result<()> {
        self.begin.execute([])?;
        for number in numbers {
            let id = id(number);
            let found = self.find.query_row([&id[..]], |row| row.get::<_, i64>(0)).optional()?;
            assert_eq!(found, None);
            let plain = number as u64;
            self.insert.execute(params![
                FENCE + number,
                &id[..],
                SCOPE,
                key(plain),
                owner(plain),
                fingerprint(plain),
                NOW_MS
            ])?;
        }
        self.commit.execute([])?;
        Ok(())
    }

    fn complete(&mut self, numbers: std::ops::Range<i64>) -> rusqlite::Result<()> {
        self.begin.execute([])?;
        for number in numbers {
            let changed = self.update.execute(params![
                FENCE + number,
                &id(number)[..],
                NOW_MS + number / 64,
                TTL_MS,
                OUTCOME
            ])?;
            assert_eq!(changed, 1);
        }
        self.commit.execute([])?;
        Ok(())
    }

    fn replay(&mut self, below: u64) -> rusqlite::Result<()> {
        let id = id(random_below(below) as i64);
        let outcome: String = self.find.query_row([&id[..]], |row| row.get(16))?;
        assert_eq!(outcome, OUTCOME);
        Ok(())
    }
}

impl Sqlite {
    pub fn open(folder: &Path, entries: u64) -> Self {
        let db = Connection::open(folder.join("bare.db")).expect("a database can be made");
        let mode: String = db.query_row("PRAGMA journal_mode = WAL", [], |row| row.get(0)).expect("a mode");
        assert_eq!(mode, "wal");
        // The store's settings.
        db.pragma_update(None, "synchronous", "FULL").expect("a mode is set");
        db.pragma_update(None, "cache_size", -8 * 1024).expect("a cache");
        db.pragma_update(None, "wal_autocheckpoint", 4_000).expect("a bound on the WAL");
        db.execute_batch(TABLES).expect("tables can be made");
        let entries = entries as i64;
        let mut statements = Statements::prepare(&db).expect("the statements are sound");
        for from in (0..entries).step_by(1000) {
            let numbers = from..entries.min(from + 1000);
            statements.claim(numbers.clone()).expect("entries can be written");
            statements.complete(numbers).expect("entries can be written");
        }
        drop(statements);
        Self { db, next: entries }
    }
}

impl Contestant for Sqlite {
    fn turn(&mut self, kind: Kind, in_flight: usize, time: Duration) -> Turn {
        let mut turn = Turn::default();
        let (group, below) = (in_flight as i64, self.next as u64);
        let mut statements = Statements::prepare(&self.db).expect("the statements are sound");
        let start = Instant::now();
        while start.elapsed() < time {
            let began = Instant::now();
            match kind {
                Kind::Miss => {
                    let numbers = self.next..self.next + group;
                    statements.claim(numbers.clone()).expect("entries can be written");
                    let claimed = began.elapsed();
                    turn.first.push(claimed);
                    statements.complete(numbers).expect("entries can be written");
                    turn.second.push(began.elapsed().saturating_sub(claimed));
                    self.next += group;
                    turn.synced += 2;
                }
                Kind::Hit => {
                    for _ in 0..in_flight {
                        statements.replay(below).expect("entries can be read");
                    }
                    turn.first.push(began.elapsed());
                }
            }
            turn.done += in_flight as u64;
        }
        turn.secs = start.elapsed().as_secs_f64();
        turn
    }
}
