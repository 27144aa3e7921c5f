//! The ledger's background work: recording which leases have ended, removing entries whose time is over, counting.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use hapax_core::{EntryState, Scope, StoreError};
use sqlx::{PgConnection, Row as _};

use super::LedgerState;
use super::rooms::OpenCount;
use super::rows::{Hash, Snapshot};
use crate::error::{Access, Failure};

/// Time between two sweeps.
const EVERY: Duration = Duration::from_secs(2);
/// Open entries that one sweep looks at. The next one continues after them.
const OPEN_MAX: i64 = 1_000;
/// Entries that one step removes, and the steps of one sweep.
const PRUNE_MAX: i32 = 500;
const PRUNE_STEPS: usize = 20;
/// Time until an entry that a message needs is looked at again.
const NEEDED_AGAIN_MS: i64 = 3_600_000;
/// A sweep begins where the last one ended, and from the beginning this often: a row may have been locked or committed
/// late.
const FROM_THE_BEGINNING: Duration = Duration::from_mins(1);

/// Where the next sweep continues.
pub(super) struct Cursor {
    /// The last open entry that was looked at.
    open_fence: i64,
    counts: HashMap<Scope, OpenCount>,
    /// Ended entries up to this time were removed.
    pruned_ms: i64,
    begun: Instant,
}

impl Default for Cursor {
    fn default() -> Self {
        Self { open_fence: 0, counts: HashMap::new(), pruned_ms: 0, begun: Instant::now() }
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
    let state = ledger.clone();
    let mut next = std::mem::take(&mut *cursor);
    let swept = ledger.pool.run("sweep", Access::Read, move |connection| {
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
    lapse(ledger, connection, cursor).await?;
    if cursor.begun.elapsed() > FROM_THE_BEGINNING {
        (cursor.pruned_ms, cursor.begun) = (0, Instant::now());
    }
    for _ in 0..PRUNE_STEPS {
        let prune = sqlx::query("SELECT seen, removed, last_ms FROM hapax.ledger_prune($1, $2, $3)")
            .bind(cursor.pruned_ms)
            .bind(PRUNE_MAX)
            .bind(NEEDED_AGAIN_MS);
        let row = prune.fetch_one(&mut *connection).await?;
        let (seen, removed): (i64, i64) = (row.try_get(0)?, row.try_get(1)?);
        // Others of the same millisecond may be left.
        cursor.pruned_ms = row.try_get::<i64, _>(2)? - 1;
        ledger.stats().pruned += removed as u64;
        if seen < i64::from(PRUNE_MAX) {
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
    let sql = "SELECT fence, id FROM hapax.ledger_open WHERE fence > $1 ORDER BY fence LIMIT $2";
    let rows = sqlx::query(sql).bind(cursor.open_fence).bind(OPEN_MAX).fetch_all(&mut *connection).await?;
    let mut hashes = Vec::new();
    for row in &rows {
        cursor.open_fence = row.try_get(0)?;
        hashes.extend(Hash::try_from(row.try_get::<&[u8], _>(1)?));
    }
    let mut snapshot = Snapshot::read_stored(connection, &hashes).await?;
    let now_ms = snapshot.now_ms;
    let mut removed = Vec::new();
    for (hash, known) in snapshot.keys.iter_mut().filter(|(_, known)| known.was_open()) {
        if known.is_over() {
            known.remove_over();
            removed.push(*hash);
            continue;
        }
        known.note_lapse(now_ms);
        let in_doubt = known.entry.as_ref().is_some_and(|entry| entry.state(now_ms) == EntryState::InDoubt);
        let count = cursor.counts.entry(known.id.scope.clone()).or_default();
        count.open += 1;
        count.in_doubt += u64::from(in_doubt);
    }
    let lost = snapshot.write(connection).await?;
    ledger.stats().pruned += removed.iter().filter(|hash| !lost.contains(*hash)).count() as u64;
    if (rows.len() as i64) < OPEN_MAX {
        ledger.counted(&std::mem::take(&mut cursor.counts));
        cursor.open_fence = 0;
    }
    Ok(())
}
