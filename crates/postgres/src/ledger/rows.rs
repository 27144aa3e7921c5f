//! Entries as they are stored: read, changed in memory by decisions, and written back if no other session has changed them meanwhile.

use std::collections::{HashMap, HashSet};

use hapax_core::ledger::protocol::{EntryChange, LedgerEntry, Stage};
use hapax_core::{EntryId, EntryState, Fence, Fingerprint, Json, OnDoubt, RecordedOutcome, StoreError};
use sha2::{Digest as _, Sha256};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row as _};

use crate::error::Failure;

/// The id of an entry's row: the hash of scope and key.
pub(crate) type Hash = [u8; 16];

/// The same as the SQL function `hapax.entry_id`. Not [`EntryId::hash`], which SQL cannot compute.
pub(crate) fn hash_of(id: &EntryId) -> Hash {
    let mut hasher = Sha256::new();
    for part in [id.scope.as_str(), id.key.as_str()] {
        hasher.update((part.len() as u64).to_be_bytes());
        hasher.update(part);
    }
    let digest: [u8; 32] = hasher.finalize().into();
    *digest.first_chunk().expect("16 of 32 bytes")
}

/// What a write compares with: the row that a decision was made from.
#[derive(Debug, Clone, Copy)]
struct Stored {
    fence: i64,
    version: i32,
    open: bool,
}

/// A key as a decision sees it.
pub(super) struct Known {
    pub id: EntryId,
    /// `None`: there is none, or its time is over and no message needs it, or it is damaged.
    pub entry: Option<LedgerEntry>,
    /// The row is there and cannot be read, for this reason. It is never taken for absent: its effect would happen again.
    pub damage: Option<String>,
    /// A fence for a new claim.
    pub spare: Option<Fence>,
    stored: Option<Stored>,
    over: bool,
    changed: bool,
    /// The doubt about it has ended by the change.
    cleared: bool,
}

impl Known {
    /// The entry of a claim that was just made.
    pub fn fresh(id: EntryId, entry: LedgerEntry) -> Self {
        let stored = Some(Stored { fence: entry.fence.0 as i64, version: 0, open: true });
        Self { stored, ..Self::new(id, Some(entry)) }
    }

    fn new(id: EntryId, entry: Option<LedgerEntry>) -> Self {
        let (over, changed, cleared) = (false, false, false);
        Self { id, entry, damage: None, spare: None, stored: None, over, changed, cleared }
    }

    /// Fails if the row is damaged.
    pub fn check(&self) -> Result<(), StoreError> {
        match &self.damage {
            Some(damage) => Err(StoreError::Damaged(format!("{}: {damage}", self.id))),
            None => Ok(()),
        }
    }

    /// A row is there, but its time is over.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Whether the row is held or in doubt.
    pub fn was_open(&self) -> bool {
        self.stored.is_some_and(|stored| stored.open)
    }

    /// Changes the entry, or removes it.
    pub fn set(&mut self, now_ms: u64, entry: Option<LedgerEntry>) {
        let in_doubt = |entry: Option<&LedgerEntry>| {
            entry.is_some_and(|entry| entry.state(now_ms) == EntryState::InDoubt)
        };
        self.cleared |= in_doubt(self.entry.as_ref()) && !in_doubt(entry.as_ref());
        self.entry = entry;
        self.damage = None;
        self.changed = true;
    }

    /// Applies a decision; `false` if there is nothing to change.
    pub fn apply(&mut self, now_ms: u64, change: EntryChange) -> bool {
        match change {
            EntryChange::Write(entry) => self.set(now_ms, Some(entry)),
            EntryChange::Delete => self.set(now_ms, None),
            EntryChange::Unchanged => return false,
        }
        true
    }

    /// Removes a row whose time is over.
    pub fn remove_over(&mut self) {
        self.changed |= self.over;
    }

    /// Records that the lease has ended, before anyone is told so.
    pub fn note_lapse(&mut self, now_ms: u64) {
        if let Some(lapsed) = self.entry.as_ref().and_then(|entry| entry.lapsed(now_ms)) {
            self.set(now_ms, Some(lapsed));
        }
    }
}

/// Some keys at one time.
pub(super) struct Snapshot {
    pub now_ms: u64,
    pub keys: HashMap<Hash, Known>,
}

/// How to read.
#[derive(Clone, Copy, Default)]
pub(super) struct Reading {
    /// Locks the rows until the end of the transaction, so that a write always finds them unchanged.
    pub lock: bool,
    /// Draws a fence for each entry that can be claimed or resolved.
    pub spare: bool,
}

impl Snapshot {
    pub fn empty() -> Self {
        Self { now_ms: 0, keys: HashMap::new() }
    }

    /// Reads these keys.
    pub async fn read<'i>(
        connection: &mut PgConnection,
        ids: impl IntoIterator<Item = &'i EntryId>,
        how: Reading,
    ) -> Result<Self, Failure> {
        let by_hash: HashMap<Hash, &EntryId> = ids.into_iter().map(|id| (hash_of(id), id)).collect();
        let hashes: Vec<Hash> = by_hash.keys().copied().collect();
        let rows = read_rows(connection, &hashes, how).await?;
        Self::from_rows(&rows, |hash, _| Ok(by_hash.get(hash).map(|&id| id.clone())))
    }

    /// Reads rows by their hashes; those that are not there are left out.
    pub async fn read_stored(connection: &mut PgConnection, hashes: &[Hash]) -> Result<Self, Failure> {
        let rows = read_rows(connection, hashes, Reading::default()).await?;
        Self::from_rows(&rows, |_, row| {
            let (scope, key) =
                (row.try_get::<Option<&str>, _>("scope")?, row.try_get::<Option<&str>, _>("key")?);
            match scope.zip(key) {
                Some((scope, key)) => Ok(Some(EntryId::new(valid("scope", scope)?, valid("key", key)?))),
                None => Ok(None),
            }
        })
    }

    fn from_rows(
        rows: &[PgRow],
        id_of: impl Fn(&Hash, &PgRow) -> Result<Option<EntryId>, Failure>,
    ) -> Result<Self, Failure> {
        let mut snapshot = Self::empty();
        for row in rows {
            let hash = Hash::try_from(row.try_get::<&[u8], _>("id")?).map_err(|_| damaged("id"))?;
            snapshot.now_ms = row.try_get::<i64, _>("now_ms")? as u64;
            match id_of(&hash, row) {
                Ok(Some(id)) => drop(snapshot.keys.insert(hash, known(id, row)?)),
                Ok(None) => {}
                // Only a reader that does not know the key sees this; for the others the key is damaged or sound.
                Err(Failure::Store(StoreError::Damaged(what))) => {
                    tracing::error!(row = format!("{:032x}", u128::from_be_bytes(hash)), %what, "a ledger entry is damaged, and its key is not known");
                }
                Err(other) => return Err(other),
            }
        }
        Ok(snapshot)
    }

    pub fn key(&mut self, hash: &Hash) -> &mut Known {
        self.keys.get_mut(hash).expect("the key was read")
    }

    /// Writes what was changed. Returns the keys that someone else changed since they were read: nothing was written for
    /// them.
    pub async fn write(&self, connection: &mut PgConnection) -> Result<HashSet<Hash>, Failure> {
        let mut changed: Vec<(&Hash, &Known)> = self.keys.iter().filter(|(_, known)| known.changed).collect();
        if changed.is_empty() {
            return Ok(HashSet::new());
        }
        changed.sort_by_key(|(hash, _)| **hash);
        let written = write_rows(connection, &changed).await?;
        Ok(changed.into_iter().map(|(hash, _)| *hash).filter(|hash| !written.contains(hash)).collect())
    }
}

async fn read_rows(
    connection: &mut PgConnection,
    hashes: &[Hash],
    how: Reading,
) -> Result<Vec<PgRow>, Failure> {
    if hashes.is_empty() {
        return Ok(Vec::new());
    }
    let hashes: Vec<&[u8]> = hashes.iter().map(<[u8; 16]>::as_slice).collect();
    let read = sqlx::query("SELECT * FROM hapax.ledger_read($1, $2, $3)")
        .bind(hashes)
        .bind(how.lock)
        .bind(how.spare);
    Ok(read.fetch_all(connection).await?)
}

fn known(id: EntryId, row: &PgRow) -> Result<Known, Failure> {
    // Behind the entry's own, though the sequence was set back since by a failover.
    let own: i64 = row.try_get::<Option<i64>, _>("fence")?.unwrap_or(0);
    let spare = row.try_get::<Option<i64>, _>("spare")?.map(|fence| Fence(fence.max(own + 1) as u64));
    let over: bool = row.try_get("over")?;
    let mut known = Known { spare, over, ..Known::new(id, None) };
    if let Some(stage) = row.try_get::<Option<i16>, _>("stage")? {
        let (fence, version) = (row.try_get("fence")?, row.try_get("version")?);
        known.stored = Some(Stored { fence, version, open: stage < 2 });
        let started_ms = row.try_get::<i64, _>("started_ms")? as u64;
        match entry(stage, row) {
            Ok(entry) => known.entry = Some(entry.after_restart(started_ms)).filter(|_| !over),
            Err(Failure::Store(StoreError::Damaged(what))) => {
                (known.damage, known.over) = (Some(what), false);
            }
            Err(other) => return Err(other),
        }
    }
    Ok(known)
}

fn entry(stage: i16, row: &PgRow) -> Result<LedgerEntry, Failure> {
    let number = |column: &str| row.try_get::<i64, _>(column).map(|value| value as u64);
    let (lease_ms, until_ms) = (number("lease_ms")?, number("until_ms")?);
    let stage = if stage < 2 {
        let on_doubt = if row.try_get("parks")? { OnDoubt::Park } else { OnDoubt::Retry };
        Stage::Processing { lease_ms, until_ms, on_doubt, doubted: stage == 1 }
    } else {
        let value = row.try_get::<Option<&str>, _>("outcome")?;
        let value = value.map(Json::parse).transpose().map_err(|_| damaged("outcome"))?;
        let omitted_bytes = row.try_get::<Option<i64>, _>("omitted_bytes")?.map(|bytes| bytes as u64);
        let outcome = RecordedOutcome { failed: stage == 3, value, omitted_bytes };
        Stage::Completed { at_ms: until_ms, ttl_ms: lease_ms, outcome }
    };
    let fingerprint = row.try_get::<Option<&str>, _>("fingerprint")?;
    Ok(LedgerEntry {
        fingerprint: fingerprint.map(|text| valid("fingerprint", text)).transpose()?,
        owner: valid("owner", row.try_get("owner")?)?,
        fence: Fence(number("fence")?),
        claimed_ms: number("claimed_ms")?,
        takeovers: row.try_get::<i32, _>("takeovers")? as u32,
        stage,
    })
}

fn valid<T: std::str::FromStr>(column: &str, text: &str) -> Result<T, Failure> {
    text.parse().map_err(|_| damaged(column).into())
}

fn damaged(column: &str) -> StoreError {
    StoreError::Damaged(format!("the column {column} of a row of hapax.ledger_entry"))
}

/// The columns of the rows to write, as arrays.
#[derive(Default)]
struct Columns<'k> {
    ids: Vec<&'k [u8]>,
    old_fences: Vec<Option<i64>>,
    old_versions: Vec<Option<i32>>,
    was_open: Vec<bool>,
    scopes: Vec<&'k str>,
    keys: Vec<&'k str>,
    fences: Vec<Option<i64>>,
    owners: Vec<Option<&'k str>>,
    fingerprints: Vec<Option<&'k str>>,
    claimed: Vec<Option<i64>>,
    takeovers: Vec<Option<i32>>,
    stages: Vec<Option<i16>>,
    leases: Vec<Option<i64>>,
    untils: Vec<Option<i64>>,
    parks: Vec<Option<bool>>,
    prunes: Vec<Option<i64>>,
    outcomes: Vec<Option<&'k str>>,
    omitted: Vec<Option<i64>>,
    cleared: Vec<&'k [u8]>,
}

impl<'k> Columns<'k> {
    fn push(&mut self, hash: &'k Hash, known: &'k Known) {
        let entry = known.entry.as_ref();
        self.ids.push(hash);
        self.old_fences.push(known.stored.map(|stored| stored.fence));
        self.old_versions.push(known.stored.map(|stored| stored.version));
        self.was_open.push(known.was_open());
        self.scopes.push(known.id.scope.as_str());
        self.keys.push(known.id.key.as_str());
        self.fences.push(entry.map(|entry| entry.fence.0 as i64));
        self.owners.push(entry.map(|entry| entry.owner.as_str()));
        self.fingerprints.push(entry.and_then(|entry| entry.fingerprint.as_ref()).map(Fingerprint::as_str));
        self.claimed.push(entry.map(|entry| entry.claimed_ms as i64));
        self.takeovers.push(entry.map(|entry| entry.takeovers as i32));
        self.prunes.push(entry.and_then(LedgerEntry::prune_ms).map(|ms| ms as i64));
        self.push_stage(entry.map(|entry| &entry.stage));
        if known.cleared {
            self.cleared.push(hash);
        }
    }

    fn push_stage(&mut self, stage: Option<&'k Stage>) {
        let (number, lease_ms, until_ms, parks, outcome) = match stage {
            None => (None, None, None, None, None),
            Some(Stage::Processing { lease_ms, until_ms, on_doubt, doubted }) => {
                let parks = *on_doubt == OnDoubt::Park;
                (Some(i16::from(*doubted)), Some(*lease_ms), Some(*until_ms), Some(parks), None)
            }
            Some(Stage::Completed { at_ms, ttl_ms, outcome }) => {
                let number = if outcome.failed { 3 } else { 2 };
                (Some(number), Some(*ttl_ms), Some(*at_ms), Some(false), Some(outcome))
            }
        };
        self.stages.push(number);
        self.leases.push(lease_ms.map(|ms| ms as i64));
        self.untils.push(until_ms.map(|ms| ms as i64));
        self.parks.push(parks);
        self.outcomes.push(outcome.and_then(|outcome| outcome.value.as_ref()).map(Json::as_str));
        self.omitted.push(outcome.and_then(|outcome| outcome.omitted_bytes).map(|bytes| bytes as i64));
    }
}

async fn write_rows(
    connection: &mut PgConnection,
    changed: &[(&Hash, &Known)],
) -> Result<HashSet<Hash>, Failure> {
    let mut columns = Columns::default();
    for (hash, known) in changed {
        columns.push(hash, known);
    }
    let sql = "SELECT hapax.ledger_write($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, \
               $18, $19)";
    let write = sqlx::query(sql)
        .bind(columns.ids)
        .bind(columns.old_fences)
        .bind(columns.old_versions)
        .bind(columns.was_open)
        .bind(columns.scopes)
        .bind(columns.keys)
        .bind(columns.fences)
        .bind(columns.owners)
        .bind(columns.fingerprints)
        .bind(columns.claimed)
        .bind(columns.takeovers)
        .bind(columns.stages)
        .bind(columns.leases)
        .bind(columns.untils)
        .bind(columns.parks)
        .bind(columns.prunes)
        .bind(columns.outcomes)
        .bind(columns.omitted)
        .bind(columns.cleared);
    let mut written = HashSet::new();
    for row in write.fetch_all(connection).await? {
        written.insert(Hash::try_from(row.try_get::<&[u8], _>(0)?).map_err(|_| damaged("id"))?);
    }
    Ok(written)
}
