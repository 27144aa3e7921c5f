//! The ledger's background work: recording which leases have ended, removing entries whose time is over, counting.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hapax_core::{EntryState, Scope, StoreError};
use sqlx::{PgConnection, Row as _};

use super::LedgerState;
use super::rooms::OpenCount;
use super::rows::{Hash, Known, Snapshot};
use crate::error::{Access, Failure};

/// Time between two sweeps.
const EVERY: Duration = Duration::from_secs(2);
/// Open entries that one sweep looks at. The next one continues after them.
const OPEN_MAX: i64 = 1_000;
/// Ended entries that one step looks at, and the steps of one sweep.
const DUE_MAX: i64 = 500;
const DUE_STEPS: usize = 20;
/// Time until an entry that a message needs is looked at again.
const NEEDED_AGAIN_MS: i64 = 3_600_000;
/// A sweep begins where the last one found something, so that it does not read what others have deleted and a long
/// transaction keeps. From the beginning only this often, for what was committed late.
const FROM_THE_BEGINNING: Duration = Duration::from_mins(5);
/// Fences that a transaction which commits late may be behind.
const LATE: i64 = 100_000;

/// Damaged entries that are logged one by one.
const DAMAGED_MAX: usize = 1_000;

/// Where the next sweep continues.
#[derive(Clone)]
pub(super) struct Cursor {
    /// The last open entry that was looked at.
    open_fence: i64,
    /// The first open entry of this round, and below which fence the next round need not look.
    first_open: Option<i64>,
    floor: i64,
    counts: HashMap<Scope, OpenCount>,
    /// Damaged entries that were logged.
    damaged: HashSet<Hash>,
    /// Ended entries up to this time were removed.
    pruned_ms: i64,
    begun: Instant,
}

impl Default for Cursor {
    fn default() -> Self {
        let begun = Instant::now();
        let (counts, damaged) = (HashMap::new(), HashSet::new());
        Self { open_fence: 0, first_open: None, floor: 0, counts, damaged, pruned_ms: 0, begun }
    }
}

impl Cursor {
    /// Logs damaged entries, each once.
    fn log_damage(&mut self, snapshot: &Snapshot) {
        for (hash, known) in &snapshot.keys {
            let Some(damage) = &known.damage else { continue };
            if self.damaged.len() < DAMAGED_MAX && self.damaged.insert(*hash) {
                let (id, remedy) =
                    (&known.id, "claims of its key are refused until it is forgotten: hapax ledger forget");
                tracing::error!(%id, damage, remedy, "a ledger entry is damaged");
            }
        }
    }
}

/// Sweeps until the store is dropped or closed.
pub(super) async fn run(ledger: Weak<LedgerState>) {
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(ledger) = ledger.upgrade() else { return };
        if let Err(error) = sweep(&ledger).await {
            tracing::debug!(%error, "the ledger's sweep failed; it is tried again");
        }
    }
}

/// Sweeps once.
pub(super) async fn sweep(ledger: &Arc<LedgerState>) -> Result<(), StoreError> {
    let mut cursor = ledger.cursor.lock().await;
    let (state, from) = (ledger.clone(), cursor.clone());
    let swept = ledger.pool.repeat("sweep", Access::Read, move |connection| {
        let (state, mut next) = (state.clone(), from.clone());
        Box::pin(async move {
            step(&state, connection, &mut next).await?;
            Ok(next)
        })
    });
    *cursor = swept.await?;
    Ok(())
}

async fn step(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    cursor: &mut Cursor,
) -> Result<(), Failure> {
    if cursor.begun.elapsed() > FROM_THE_BEGINNING {
        (cursor.pruned_ms, cursor.floor, cursor.begun) = (0, 0, Instant::now());
    }
    lapse(ledger, connection, cursor).await?;
    for _ in 0..DUE_STEPS {
        if prune(ledger, connection, cursor).await? < DUE_MAX as usize {
            break;
        }
    }
    sqlx::query("SELECT hapax.ledger_fold()").execute(connection).await?;
    Ok(())
}

/// Records the lapse of leases, and removes open entries whose time is over.
async fn lapse(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    cursor: &mut Cursor,
) -> Result<(), Failure> {
    let sql = "SELECT fence, id FROM hapax.ledger_open_behind($1, $2)";
    let from = cursor.open_fence.max(cursor.floor);
    let rows = sqlx::query(sql).bind(from).bind(OPEN_MAX).fetch_all(&mut *connection).await?;
    let mut hashes = Vec::new();
    for row in &rows {
        cursor.open_fence = row.try_get(0)?;
        cursor.first_open.get_or_insert(cursor.open_fence);
        hashes.extend(Hash::try_from(row.try_get::<&[u8], _>(1)?));
    }
    let mut snapshot = Snapshot::read_stored(connection, &hashes).await?;
    cursor.log_damage(&snapshot);
    let now_ms = snapshot.now_ms;
    for known in snapshot.keys.values_mut().filter(|known| known.was_open()) {
        if known.is_over() {
            known.remove_over();
            continue;
        }
        known.note_lapse(now_ms);
        let in_doubt = known.entry.as_ref().is_some_and(|entry| entry.state(now_ms) == EntryState::InDoubt);
        let count = cursor.counts.entry(known.id.scope.clone()).or_default();
        count.open += 1;
        count.in_doubt += u64::from(in_doubt);
    }
    remove(ledger, connection, &snapshot).await?;
    if (rows.len() as i64) < OPEN_MAX {
        ledger.counted(&std::mem::take(&mut cursor.counts));
        // All that is open has a fence from here on, but for what was committed late.
        let first = cursor.first_open.take().unwrap_or(cursor.open_fence.max(cursor.floor));
        cursor.floor = cursor.floor.max(first - LATE);
        cursor.open_fence = 0;
    }
    Ok(())
}

/// Writes a snapshot, and counts the entries that were removed because their time was over.
async fn remove(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    snapshot: &Snapshot,
) -> Result<(), Failure> {
    let lost = snapshot.write(connection).await?;
    let removed = snapshot.keys.iter().filter(|(hash, known)| known.is_over() && !lost.contains(*hash));
    ledger.stats().pruned += removed.count() as u64;
    Ok(())
}

/// Removes ended entries whose time is over. Returns how many were looked at.
async fn prune(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    cursor: &mut Cursor,
) -> Result<usize, Failure> {
    let sql = "SELECT prune_ms, fence, id FROM hapax.ledger_due_behind($1, $2)";
    let rows = sqlx::query(sql).bind(cursor.pruned_ms).bind(DUE_MAX).fetch_all(&mut *connection).await?;
    if rows.is_empty() {
        return Ok(0);
    }
    let (mut times, mut fences, mut hashes) = (Vec::new(), Vec::new(), Vec::new());
    for row in &rows {
        times.push(row.try_get::<i64, _>(0)?);
        fences.push(row.try_get::<i64, _>(1)?);
        hashes.extend(Hash::try_from(row.try_get::<&[u8], _>(2)?));
    }
    let mut snapshot = Snapshot::read_stored(connection, &hashes).await?;
    cursor.log_damage(&snapshot);
    snapshot.keys.values_mut().for_each(Known::remove_over);
    remove(ledger, connection, &snapshot).await?;
    let ids: Vec<&[u8]> = hashes.iter().map(<[u8; 16]>::as_slice).collect();
    let done = sqlx::query("SELECT hapax.ledger_due_done($1, $2, $3, $4)").bind(&times).bind(fences);
    done.bind(ids).bind(NEEDED_AGAIN_MS).execute(connection).await?;
    // Others of the same millisecond may be left.
    cursor.pruned_ms = times.last().map_or(cursor.pruned_ms, |last| last - 1);
    Ok(rows.len())
}
