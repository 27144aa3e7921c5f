//! Export and import of entries.

use hapax_core::ledger::protocol::{LedgerEntry, Stage};
use hapax_core::ledger::{DOUBT_RETENTION_MS, TTL_MS_MAX};
use hapax_core::transfer::{IMPORTED_MS_MIN, PAGE_BYTES_MAX};
use hapax_core::{
    EntryId, ExportPage, ExportedEntry, ExportedItem, ExportedStage, Fence, Imported, SendError, validate,
};
use sqlx::{PgConnection, Row as _};

use super::rows::{Hash, Reading, Snapshot, hash_of};
use crate::error::Failure;

fn exported(id: EntryId, entry: LedgerEntry, now_ms: u64) -> ExportedEntry {
    let stage = match entry.stage {
        Stage::Processing { until_ms, on_doubt, .. } => {
            ExportedStage::InDoubt { since_ms: until_ms.min(now_ms), on_doubt }
        }
        Stage::Completed { at_ms, ttl_ms, outcome } => ExportedStage::Completed { at_ms, ttl_ms, outcome },
    };
    ExportedEntry {
        id,
        owner: entry.owner,
        fingerprint: entry.fingerprint,
        claimed_ms: entry.claimed_ms,
        takeovers: entry.takeovers,
        stage,
    }
}

/// One page of the ledger, behind a fence.
pub(crate) async fn export(db: &mut PgConnection, after: u64, limit: usize) -> Result<ExportPage, Failure> {
    let sql = "SELECT fence, id FROM hapax.ledger_entry WHERE fence > $1 ORDER BY fence LIMIT $2";
    let rows = sqlx::query(sql).bind(after as i64).bind(limit as i64).fetch_all(&mut *db).await?;
    let mut found: Vec<(u64, Hash)> = Vec::new();
    for row in &rows {
        let hash = Hash::try_from(row.try_get::<&[u8], _>("id")?);
        found.extend(hash.ok().map(|hash| (row.get::<i64, _>("fence") as u64, hash)));
    }
    let hashes: Vec<Hash> = found.iter().map(|(_, hash)| *hash).collect();
    let mut snapshot = Snapshot::read_stored(db, &hashes).await?;
    let (mut page, mut bytes) = (ExportPage::default(), 0);
    let whole = rows.len() < limit;
    let mut last = after;
    for (fence, hash) in found {
        let item = snapshot.keys.remove(&hash).and_then(|known| match known.damage {
            Some(problem) => {
                Some(ExportedItem::Damaged { what: format!("ledger entry {}", known.id), problem })
            }
            None => Some(ExportedItem::Entry(Box::new(exported(known.id, known.entry?, snapshot.now_ms)))),
        });
        if let Some(item) = item {
            bytes += item.bytes() + 1;
            if bytes > PAGE_BYTES_MAX && !page.items.is_empty() {
                page.next = Some(last.to_string());
                return Ok(page);
            }
            page.items.push(item);
        }
        last = fence;
    }
    page.next = (!whole).then(|| last.to_string());
    Ok(page)
}

/// Adds an entry under a key that this store does not know.
pub(crate) async fn import(
    db: &mut PgConnection,
    exported: ExportedEntry,
) -> Result<Result<Imported, SendError>, Failure> {
    if let Err(error) = validate::import_entry(&exported) {
        return Ok(Err(error));
    }
    let hash = hash_of(&exported.id);
    let mut snapshot = Snapshot::read(db, [&exported.id], Reading { lock: true, spare: false }).await?;
    let now_ms = snapshot.now_ms;
    snapshot.key(&hash).check()?;
    if snapshot.key(&hash).entry.is_some() {
        return Ok(Ok(Imported::AlreadyThere));
    }
    // Its time may be over because a message needed it, which may come later.
    let kept_ms = now_ms + IMPORTED_MS_MIN;
    let stage = match exported.stage {
        ExportedStage::InDoubt { since_ms, on_doubt } => {
            let until_ms = since_ms.max(kept_ms.saturating_sub(DOUBT_RETENTION_MS)).min(now_ms);
            Stage::Processing { lease_ms: 1, until_ms, on_doubt, doubted: true }
        }
        ExportedStage::Completed { at_ms, ttl_ms, outcome } => {
            let end_ms = (at_ms + ttl_ms).clamp(kept_ms, now_ms + TTL_MS_MAX);
            let outcome = outcome.without_oversize_value();
            Stage::Completed { at_ms, ttl_ms: end_ms.saturating_sub(at_ms), outcome }
        }
    };
    let fence: i64 = sqlx::query_scalar("SELECT nextval('hapax.fence')").fetch_one(&mut *db).await?;
    let entry = LedgerEntry {
        fingerprint: exported.fingerprint,
        owner: exported.owner,
        fence: Fence(fence as u64),
        claimed_ms: exported.claimed_ms,
        takeovers: exported.takeovers,
        stage,
    };
    snapshot.key(&hash).set(now_ms, Some(entry));
    let lost = snapshot.write(db).await?;
    Ok(Ok(if lost.is_empty() { Imported::Added } else { Imported::AlreadyThere }))
}
