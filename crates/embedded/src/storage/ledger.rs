//! The ledger's rows: encoding, decoding and lookup.

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::{EntryFilter, EntryId, EntryState, Fence, Json, OnDoubt, Page, RecordedOutcome};
use rusqlite::types::ValueRef;
use rusqlite::{CachedStatement, Connection, ErrorCode, OptionalExtension, Row, params};

use super::{DueEntry, FoundEntry, rows};
use crate::crc::Crc;
use crate::engine::{LoadedRow, Loader};
use crate::record::{LedgerRow, Tally};

/// The columns in the order in which [`entry`] reads them. The outcome is last, so that a query can leave it out.
const COLUMNS: &str = "fence, id, scope, key, state, owner, fingerprint, lease_ms, at_ms, ttl_ms, on_doubt, claimed_ms, \
                       takeovers, omitted, outcome_crc, prune_ms, crc, outcome";

/// All columns except the outcome. The row's checksum covers them and the outcome's checksum.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Columns {
    fence: u64,
    hash: Vec<u8>,
    scope: String,
    key: String,
    state: u64,
    owner: String,
    fingerprint: Option<String>,
    lease_ms: u64,
    at_ms: u64,
    ttl_ms: u64,
    on_doubt: u64,
    claimed_ms: u64,
    takeovers: u64,
    omitted: Option<u64>,
    outcome_crc: u32,
    prune_ms: Option<u64>,
}

fn outcome_crc(outcome: Option<&str>) -> u32 {
    let mut crc = Crc::new();
    crc.text(outcome);
    crc.end()
}

impl Columns {
    fn of(row: &LedgerRow) -> (Self, Option<&str>) {
        let entry = &row.entry;
        let (state, lease_ms, at_ms, ttl_ms, on_doubt, outcome) = match &entry.stage {
            Stage::Processing { lease_ms, until_ms, on_doubt, doubted } => {
                (u64::from(*doubted), *lease_ms, *until_ms, 0, *on_doubt, None)
            }
            Stage::Completed { at_ms, ttl_ms, outcome } => {
                (2 + u64::from(outcome.failed), 0, *at_ms, *ttl_ms, OnDoubt::Retry, Some(outcome))
            }
        };
        let value = outcome.and_then(|outcome| outcome.value.as_ref()).map(Json::as_str);
        let columns = Self {
            fence: entry.fence.0,
            hash: row.id.hash().to_le_bytes().to_vec(),
            scope: row.id.scope.as_str().to_owned(),
            key: row.id.key.as_str().to_owned(),
            state,
            owner: entry.owner.as_str().to_owned(),
            fingerprint: entry.fingerprint.as_ref().map(|text| text.as_str().to_owned()),
            lease_ms,
            at_ms,
            ttl_ms,
            on_doubt: u64::from(on_doubt == OnDoubt::Park),
            claimed_ms: entry.claimed_ms,
            takeovers: entry.takeovers.into(),
            omitted: outcome.and_then(|outcome| outcome.omitted_bytes),
            outcome_crc: outcome_crc(value),
            // Open entries are in memory, and the engine knows when they expire. With a time here, every heartbeat
            // would move the entry in the index.
            prune_ms: outcome.and_then(|_| entry.prune_ms()),
        };
        (columns, value)
    }

    fn crc(&self) -> u32 {
        let mut crc = Crc::new();
        for word in [self.fence, self.state, self.lease_ms, self.at_ms, self.ttl_ms, self.on_doubt] {
            crc.word(word);
        }
        crc.word(self.claimed_ms).word(self.takeovers).word(self.outcome_crc.into());
        for word in [self.omitted, self.prune_ms] {
            crc.part(word.map(u64::to_le_bytes).as_ref().map(|bytes| &bytes[..]));
        }
        crc.part(Some(&self.hash)).text(Some(&self.scope)).text(Some(&self.key)).text(Some(&self.owner));
        crc.text(self.fingerprint.as_deref());
        crc.end()
    }

    /// Returns `None` if a column has an unexpected type or the checksum does not match.
    fn read(row: &Row<'_>) -> rusqlite::Result<Option<Self>> {
        let mut sound = true;
        let mut number = |at: usize| {
            if let Ok(ValueRef::Integer(value)) = row.get_ref(at) {
                return value as u64;
            }
            sound = false;
            0
        };
        let text = |at: usize| row.get_ref(at).ok().and_then(|value| value.as_str().ok()).map(str::to_owned);
        let optional = |at: usize| -> rusqlite::Result<bool> { Ok(row.get_ref(at)? != ValueRef::Null) };
        let (fingerprint, omitted, prune) = (optional(6)?, optional(13)?, optional(15)?);
        let columns = Self {
            fence: number(0),
            hash: row.get_ref(1)?.as_blob().unwrap_or_default().to_vec(),
            scope: text(2).unwrap_or_default(),
            key: text(3).unwrap_or_default(),
            state: number(4),
            owner: text(5).unwrap_or_default(),
            fingerprint: if fingerprint { Some(text(6).unwrap_or_default()) } else { None },
            lease_ms: number(7),
            at_ms: number(8),
            ttl_ms: number(9),
            on_doubt: number(10),
            claimed_ms: number(11),
            takeovers: number(12),
            omitted: if omitted { Some(number(13)) } else { None },
            outcome_crc: number(14) as u32,
            prune_ms: if prune { Some(number(15)) } else { None },
        };
        let crc = number(16);
        Ok((sound && crc == u64::from(columns.crc())).then_some(columns))
    }

    /// Returns `None` if the outcome does not match its checksum or a value is invalid.
    fn row(self, outcome: Option<&str>) -> Option<LedgerRow> {
        if outcome_crc(outcome) != self.outcome_crc {
            return None;
        }
        let id = EntryId { scope: self.scope.parse().ok()?, key: self.key.parse().ok()? };
        if self.hash != id.hash().to_le_bytes() {
            return None;
        }
        let stage = match self.state {
            0 | 1 => Stage::Processing {
                lease_ms: self.lease_ms,
                until_ms: self.at_ms,
                on_doubt: if self.on_doubt == 1 { OnDoubt::Park } else { OnDoubt::Retry },
                doubted: self.state == 1,
            },
            2 | 3 => {
                let value = outcome.map(Json::parse).transpose().ok()?;
                let outcome = RecordedOutcome { failed: self.state == 3, value, omitted_bytes: self.omitted };
                Stage::Completed { at_ms: self.at_ms, ttl_ms: self.ttl_ms, outcome }
            }
            _ => return None,
        };
        let entry = LedgerEntry {
            fingerprint: self.fingerprint.map(|text| text.parse()).transpose().ok()?,
            owner: self.owner.parse().ok()?,
            fence: Fence(self.fence),
            claimed_ms: self.claimed_ms,
            takeovers: u32::try_from(self.takeovers).ok()?,
            stage,
        };
        Some(LedgerRow { id, entry })
    }
}

/// Decodes an entry; `None` if its row is damaged.
fn entry(row: &Row<'_>) -> rusqlite::Result<Option<LedgerRow>> {
    let Some(columns) = Columns::read(row)? else { return Ok(None) };
    let outcome = match row.get_ref(17)? {
        ValueRef::Null => None,
        value => match value.as_str() {
            Ok(text) => Some(text),
            Err(_) => return Ok(None),
        },
    };
    Ok(columns.row(outcome))
}

fn fence_of(db: &Connection, hash: u128) -> rusqlite::Result<Option<i64>> {
    let sql = "SELECT fence FROM ledger WHERE id = ?1";
    db.prepare_cached(sql)?.query_row([&hash.to_le_bytes()[..]], |row| row.get(0)).optional()
}

/// Looks up an entry by its hash, in two steps: with a single query SQLite would take the id from the index, and a row
/// whose own id is damaged would look sound.
pub(super) fn find(db: &Connection, hash: u128) -> rusqlite::Result<FoundEntry> {
    let look = || -> rusqlite::Result<FoundEntry> {
        let Some(fence) = fence_of(db, hash)? else { return Ok(FoundEntry::Absent) };
        let sql = format!("SELECT {COLUMNS} FROM ledger WHERE fence = ?1");
        let found = db.prepare_cached(&sql)?.query_row([fence], entry).optional()?;
        Ok(match found {
            Some(Some(row)) if row.id.hash() == hash => FoundEntry::Sound(row),
            Some(_) => FoundEntry::Damaged("its bytes do not match their checksum".into()),
            None => FoundEntry::Damaged("its row cannot be found".into()),
        })
    };
    match look() {
        Err(error) if rows::is_corrupt(&error) => Ok(FoundEntry::Damaged(error.to_string())),
        found => found,
    }
}

/// A link whose message is gone protects nothing.
pub(super) fn links(
    db: &Connection,
    hash: u128,
    after: u64,
    limit: usize,
) -> rusqlite::Result<Vec<(u64, u32)>> {
    let sql = "SELECT keyed.seq, message.queue FROM keyed JOIN message ON message.seq = keyed.seq \
               WHERE keyed.entry = ?1 AND keyed.seq > ?3 ORDER BY keyed.seq LIMIT ?2";
    let mut statement = db.prepare_cached(sql)?;
    let link = |row: &Row<'_>| Ok((row.get::<_, i64>(0)? as u64, row.get::<_, i64>(1)? as u32));
    statement.query_map(params![&hash.to_le_bytes()[..], limit as i64, after as i64], link)?.collect()
}

fn released_crc(hash: u128, after: u64) -> u32 {
    let mut crc = Crc::new();
    crc.bytes(&hash.to_le_bytes()).word(after);
    crc.end()
}

/// Remembers up to which message those parked for an entry have been released, or that all have been.
pub(super) fn put_released(db: &Connection, hash: u128, after: Option<u64>) -> rusqlite::Result<()> {
    let entry = hash.to_le_bytes();
    match after {
        Some(after) => {
            let sql = "INSERT OR REPLACE INTO released (entry, after, crc) VALUES (?1, ?2, ?3)";
            let crc = released_crc(hash, after);
            db.prepare_cached(sql)?.execute(params![&entry[..], after as i64, crc])?;
        }
        None => drop(db.prepare_cached("DELETE FROM released WHERE entry = ?1")?.execute([&entry[..]])?),
    }
    Ok(())
}

fn load_released(db: &Connection, loader: &mut Loader) -> rusqlite::Result<()> {
    let mut statement = db.prepare("SELECT entry, after, crc FROM released")?;
    let mut found = statement.query([])?;
    while let Some(row) = found.next()? {
        let hash = row.get_ref(0)?.as_blob().ok().and_then(|hash| hash.try_into().ok());
        let (hash, after) = (hash.map(u128::from_le_bytes), row.get::<_, i64>(1)? as u64);
        match hash {
            Some(hash) if row.get::<_, u32>(2)? == released_crc(hash, after) => {
                loader.add(LoadedRow::Released { hash, after });
            }
            _ => loader.warn(
                "a row about messages that are to be released is damaged; look at `parked list` and release them",
            ),
        }
    }
    Ok(())
}

/// Ended entries that have expired, and the time when the next one expires.
pub(super) fn due(
    db: &Connection,
    now_ms: u64,
    limit: usize,
) -> rusqlite::Result<(Vec<DueEntry>, Option<u64>)> {
    let columns = COLUMNS.strip_suffix(", outcome").expect("the outcome is last");
    let sql = format!(
        "SELECT {columns}, EXISTS (SELECT 1 FROM keyed JOIN message ON message.seq = keyed.seq \
         WHERE keyed.entry = ledger.id) FROM ledger WHERE prune_ms <= ?1 ORDER BY prune_ms LIMIT ?2"
    );
    let mut statement = db.prepare_cached(&sql)?;
    let mut found = statement.query(params![now_ms as i64, limit as i64])?;
    let mut due = Vec::new();
    while let Some(row) = found.next()? {
        let columns = Columns::read(row)?;
        // A flipped bit, in the row or in the index's copy of `prune_ms`, may make an entry look due too early: it
        // stays.
        let damaged = columns.as_ref().is_none_or(|columns| columns.hash.len() != 16);
        let hash = columns.and_then(|columns| columns.hash.try_into().ok()).map(u128::from_le_bytes);
        due.push(DueEntry {
            hash: hash.unwrap_or_default(),
            fence: row.get::<_, i64>(0)? as u64,
            linked: row.get(17)?,
            damaged,
        });
    }
    let next = "SELECT prune_ms FROM ledger WHERE prune_ms > ?1 ORDER BY prune_ms LIMIT 1";
    let next = db.prepare_cached(next)?.query_row([now_ms as i64], |row| row.get::<_, i64>(0)).optional()?;
    Ok((due, next.map(|next| next as u64)))
}

pub(super) const INSERT: &str = "INSERT INTO ledger (fence, id, scope, key, state, owner, fingerprint, lease_ms, at_ms, \
                                ttl_ms, on_doubt, claimed_ms, takeovers, omitted, outcome_crc, prune_ms, crc, outcome) \
                                VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18)";
/// Scope and key never change while the fence stays the same.
pub(super) const UPDATE: &str = "UPDATE ledger SET state = ?5, owner = ?6, fingerprint = ?7, lease_ms = ?8, at_ms = ?9, \
                                ttl_ms = ?10, on_doubt = ?11, claimed_ms = ?12, takeovers = ?13, omitted = ?14, \
                                outcome_crc = ?15, prune_ms = ?16, crc = ?17, outcome = ?18 \
                                WHERE fence = ?1 AND id = ?2 AND scope = ?3 AND key = ?4";
pub(super) const DELETE: &str = "DELETE FROM ledger WHERE fence = ?1";

/// Binds a row to [`INSERT`] or [`UPDATE`] and returns the number of rows written.
pub(super) fn put(to: &mut CachedStatement<'_>, row: &LedgerRow) -> rusqlite::Result<usize> {
    let (columns, outcome) = Columns::of(row);
    to.execute(params![
        columns.fence as i64,
        columns.hash,
        columns.scope,
        columns.key,
        columns.state as i64,
        columns.owner,
        columns.fingerprint,
        columns.lease_ms as i64,
        columns.at_ms as i64,
        columns.ttl_ms as i64,
        columns.on_doubt as i64,
        columns.claimed_ms as i64,
        columns.takeovers as i64,
        columns.omitted.map(|bytes| bytes as i64),
        columns.outcome_crc,
        columns.prune_ms.map(|ms| ms as i64),
        columns.crc(),
        outcome
    ])
}

/// Changes the time when an ended entry is checked again. A damaged entry stays damaged.
pub(super) fn postpone(db: &Connection, fence: u64, prune_ms: u64) -> rusqlite::Result<()> {
    let sql = format!("SELECT {COLUMNS} FROM ledger WHERE fence = ?1");
    let read = |row: &Row<'_>| Columns::read(row);
    let found = db.prepare_cached(&sql)?.query_row([fence as i64], read).optional()?.flatten();
    let crc = found.map(|columns| Columns { prune_ms: Some(prune_ms), ..columns }.crc());
    let sql = "UPDATE ledger SET prune_ms = ?2, crc = coalesce(?3, crc) WHERE fence = ?1";
    db.prepare_cached(sql)?.execute(params![fence as i64, prune_ms as i64, crc])?;
    Ok(())
}

/// Removes a damaged entry. If its row and the index disagree, the index is rebuilt first.
pub(super) fn drop_damaged(db: &Connection, hash: u128) -> rusqlite::Result<()> {
    let Some(fence) = fence_of(db, hash)? else { return Ok(()) };
    db.execute_batch("SAVEPOINT damaged")?;
    match db.execute(DELETE, [fence]) {
        Ok(1) => {}
        Err(error) if !rows::is_corrupt(&error) => return Err(error),
        _ => {
            db.execute_batch("ROLLBACK TO damaged; REINDEX ledger")?;
            // Looked up by its hash if the hash is sound, otherwise by its fence.
            let fence = fence_of(db, hash)?.unwrap_or(fence);
            db.execute(DELETE, [fence])?;
        }
    }
    db.execute_batch("RELEASE damaged")
}

/// Whether SQLite can remove a damaged entry at all: tries it and rolls back.
pub(super) fn can_drop(db: &Connection, hash: u128) -> rusqlite::Result<bool> {
    db.execute_batch("BEGIN IMMEDIATE")?;
    let dropped = drop_damaged(db, hash);
    if !db.is_autocommit() {
        db.execute_batch("ROLLBACK")?;
    }
    match dropped {
        Ok(()) => Ok(true),
        Err(error) if rows::is_corrupt(&error) => Ok(false),
        Err(rusqlite::Error::SqliteFailure(error, _)) if error.code == ErrorCode::ConstraintViolation => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

/// Maximum number of rows that one page scans, and maximum bytes of outcomes in a page. A page with a single entry may
/// exceed the bytes.
const PAGE_ROWS_MAX: usize = 20_000;
const PAGE_BYTES_MAX: usize = 16 * 1024 * 1024;

/// One page of entries, ordered by fence. Damaged and expired entries are left out. A page may be short or empty even
/// if more entries follow.
pub(crate) fn page(db: &Connection, filter: &EntryFilter, now_ms: u64) -> rusqlite::Result<Page<LedgerRow>> {
    let state = match filter.state {
        None => "1",
        Some(EntryState::Processing | EntryState::InDoubt) => "prune_ms IS NULL",
        Some(EntryState::Completed) => "state = 2",
        Some(EntryState::Failed) => "state = 3",
    };
    let sql = format!("SELECT {COLUMNS} FROM ledger WHERE fence > ?1 AND {state} ORDER BY fence");
    let after = i64::try_from(filter.after.unwrap_or(0)).unwrap_or(i64::MAX);
    let mut statement = db.prepare_cached(&sql)?;
    let mut found = statement.query([after])?;
    let (mut items, mut bytes, mut last, mut looked) = (Vec::new(), 0, after, 0);
    while let Some(row) = found.next()? {
        if items.len() == filter.limit || bytes > PAGE_BYTES_MAX || looked == PAGE_ROWS_MAX {
            return Ok(Page { items, next: Some(last as u64) });
        }
        looked += 1;
        last = row.get::<_, i64>(0)?;
        let in_scope = filter
            .scope
            .as_ref()
            .is_none_or(|scope| row.get_ref(2).is_ok_and(|at| at.as_str() == Ok(scope.as_str())));
        if !in_scope {
            continue;
        }
        let Some(row) = entry(row)? else { continue };
        let over = row.is_over(now_ms) && links(db, row.id.hash(), 0, 1)?.is_empty();
        if !over {
            if let Stage::Completed { outcome, .. } = &row.entry.stage {
                bytes += outcome.value.as_ref().map_or(0, |json| json.as_str().len());
            }
            items.push(row);
        }
    }
    Ok(Page { items, next: None })
}

/// The entries that a message needs.
pub(crate) fn of_message(db: &Connection, seq: u64) -> rusqlite::Result<Vec<EntryId>> {
    let sql = "SELECT ledger.scope, ledger.key FROM keyed JOIN ledger ON ledger.id = keyed.entry WHERE keyed.seq = ?1";
    let read = |row: &Row<'_>| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?));
    let found: Vec<_> = db.prepare_cached(sql)?.query_map([seq as i64], read)?.flatten().collect();
    let id =
        |(scope, key): (String, String)| Some(EntryId { scope: scope.parse().ok()?, key: key.parse().ok()? });
    Ok(found.into_iter().filter_map(id).collect())
}

/// A row by its fence; `None` if it is damaged.
type Exported = (u64, Option<LedgerRow>);

/// All entries behind a fence, at most `limit` and about `bytes_max`; and where the next page begins.
pub(crate) fn export(
    db: &Connection,
    after: u64,
    limit: usize,
    bytes_max: usize,
) -> rusqlite::Result<(Vec<Exported>, Option<u64>)> {
    let sql = format!("SELECT {COLUMNS} FROM ledger WHERE fence > ?1 ORDER BY fence LIMIT ?2");
    let mut statement = db.prepare_cached(&sql)?;
    let after = i64::try_from(after).unwrap_or(i64::MAX);
    let mut found = statement.query(params![after, limit as i64 + 1])?;
    let (mut rows, mut bytes): (Vec<Exported>, usize) = (Vec::new(), 0);
    while let Some(row) = found.next()? {
        if rows.len() == limit || bytes > bytes_max {
            let last = rows.last().map(|(fence, _)| *fence);
            return Ok((rows, last));
        }
        bytes += row.get_ref(17)?.as_str().map_or(0, str::len);
        rows.push((row.get::<_, i64>(0)? as u64, entry(row)?));
    }
    Ok((rows, None))
}

fn tally_crc(tally: Tally) -> u32 {
    let mut crc = Crc::new();
    crc.word(tally.rows).bytes(&tally.sum.to_le_bytes());
    crc.end()
}

pub(super) fn put_tally(db: &Connection, tally: Tally) -> rusqlite::Result<()> {
    let sql = "INSERT OR REPLACE INTO ledger_rows (one, rows, sum, crc) VALUES (1, ?1, ?2, ?3)";
    let sum = tally.sum.to_le_bytes();
    db.prepare_cached(sql)?.execute(params![tally.rows as i64, &sum[..], tally_crc(tally)])?;
    Ok(())
}

/// The tally as stored; `None` if its row is damaged.
fn written(db: &Connection) -> Option<Tally> {
    let sql = "SELECT rows, sum, crc FROM ledger_rows";
    let read = db.query_row(sql, [], |row| {
        let sum = row.get_ref(1)?.as_blob().ok().and_then(|sum| sum.try_into().ok()).map(u128::from_le_bytes);
        let tally = Tally { rows: row.get::<_, i64>(0)? as u64, sum: sum.unwrap_or_default() };
        Ok((tally, row.get::<_, i64>(2)? as u32))
    });
    match read.optional() {
        Ok(Some((tally, crc))) if crc == tally_crc(tally) => Some(tally),
        // Never written: there has never been an entry.
        Ok(None) => Some(Tally::default()),
        _ => None,
    }
}

/// The tally counted from the index or the table; `None` if it cannot be read.
fn seen(db: &Connection, from: &str) -> rusqlite::Result<Option<Tally>> {
    let count = || -> rusqlite::Result<Tally> {
        let mut statement = db.prepare(&format!("SELECT id FROM ledger {from}"))?;
        let mut found = statement.query([])?;
        let mut tally = Tally::default();
        while let Some(row) = found.next()? {
            let hash = row.get_ref(0)?.as_blob().ok().and_then(|hash| hash.try_into().ok());
            tally.add(hash.map(u128::from_le_bytes).unwrap_or_default());
        }
        Ok(tally)
    };
    match count() {
        Err(error) if rows::is_corrupt(&error) => Ok(None),
        tally => tally.map(Some),
    }
}

const BY_INDEX: &str = "INDEXED BY ledger_id";
const BY_TABLE: &str = "NOT INDEXED";

/// Passes the open entries and the total count to the loader.
pub(super) fn load(db: &Connection, loader: &mut Loader) -> rusqlite::Result<()> {
    let written = written(db);
    let mut found = seen(db, BY_INDEX)?;
    if found != written && written.is_some() && seen(db, BY_TABLE)? == written {
        // All rows exist, but the index does not reach all of them: a claim would treat such an entry as absent.
        match db.execute_batch("REINDEX ledger") {
            Err(error) if rows::is_corrupt(&error) => {}
            reindexed => reindexed?,
        }
        found = seen(db, BY_INDEX)?;
        if found == written {
            loader.warn("the ledger's index was damaged and was rebuilt from its rows");
        }
    }
    match load_open(db, loader) {
        Err(error) if rows::is_corrupt(&error) => loader.warn(&format!(
            "the ledger is damaged ({error}); claims on what is damaged are refused; restore a backup beside this \
             store to compare"
        )),
        done => done?,
    }
    if found != written || found.is_none() {
        let (found, written) = (found.unwrap_or_default(), written.unwrap_or_default());
        loader.warn(&format!(
            "{} of {written} ledger entries cannot be found in the file, which is damaged; a claim on one of them would \
             let its effect happen again; restore a backup beside this store to compare",
            written.rows.saturating_sub(found.rows).max(1),
            written = written.rows
        ));
    }
    load_released(db, loader)?;
    // What is missing stays expected, so that every opening says so.
    let tally = written.or(found).unwrap_or_default();
    // 0 makes the first pruning pass find out which entries are due.
    loader.add(LoadedRow::Entries { tally, prune_ms: Some(0) });
    Ok(())
}

fn load_open(db: &Connection, loader: &mut Loader) -> rusqlite::Result<()> {
    let sql = format!("SELECT {COLUMNS} FROM ledger WHERE prune_ms IS NULL ORDER BY fence");
    let mut statement = db.prepare(&sql)?;
    let mut found = statement.query([])?;
    let mut damaged = 0;
    while let Some(row) = found.next()? {
        match entry(row)? {
            Some(row) => loader.add(LoadedRow::Entry(row)),
            None => damaged += 1,
        }
    }
    if damaged > 0 {
        loader.warn(&format!(
            "{damaged} ledger entries were found damaged; claims on them are refused until someone forgets them"
        ));
    }
    Ok(())
}
