//! What operators do: looking at entries, listing them, and deciding about those in doubt.

use hapax_core::ledger::protocol;
use hapax_core::{
    EntryFilter, EntryId, EntryState, EntryView, Fence, Page, Resolution, ResolveError, Scope, StoreError,
    policy,
};
use sqlx::{PgConnection, Row as _};

use super::holders::Freed;
use super::rows::{Hash, Reading, Snapshot, hash_of};
use super::{ROUNDS_MAX, contended};
use crate::error::Failure;
use crate::transaction::Transaction;

/// Entries that one page looks at. A page that found fewer than it may have says where to continue.
const SCAN_MAX: i64 = 5_000;
/// Maximum bytes of the operator's name in the audit.
const BY_BYTES_MAX: usize = 256;

/// Reads one entry.
pub(super) async fn entry(connection: &mut PgConnection, id: &EntryId) -> Result<Option<EntryView>, Failure> {
    let hash = hash_of(id);
    for _ in 0..ROUNDS_MAX {
        let mut snapshot = Snapshot::read(connection, [id], Reading::default()).await?;
        let now_ms = snapshot.now_ms;
        snapshot.key(&hash).check()?;
        snapshot.key(&hash).note_lapse(now_ms);
        if snapshot.write(connection).await?.is_empty() {
            return Ok(snapshot.key(&hash).entry.as_ref().map(|entry| entry.view(id.clone(), now_ms)));
        }
    }
    Err(contended())
}

/// Lists one page.
pub(super) async fn entries(
    connection: &mut PgConnection,
    filter: &EntryFilter,
) -> Result<Page<EntryView>, Failure> {
    let found = scan(connection, filter).await?;
    for _ in 0..ROUNDS_MAX {
        let mut snapshot = Snapshot::read_stored(connection, &found.hashes).await?;
        let now_ms = snapshot.now_ms;
        snapshot.keys.values_mut().for_each(|known| known.note_lapse(now_ms));
        if !snapshot.write(connection).await?.is_empty() {
            continue;
        }
        let known = found.hashes.iter().filter_map(|hash| snapshot.keys.get(hash));
        let views = known.filter_map(|known| known.entry.as_ref().map(|e| e.view(known.id.clone(), now_ms)));
        let items = views.filter(|view| filter.state.is_none_or(|state| state == view.state)).collect();
        return Ok(Page { items, next: found.next });
    }
    Err(contended())
}

struct Found {
    hashes: Vec<Hash>,
    next: Option<u64>,
}

async fn scan(connection: &mut PgConnection, filter: &EntryFilter) -> Result<Found, Failure> {
    let open = matches!(filter.state, Some(EntryState::Processing | EntryState::InDoubt));
    let stages: &[i16] = match filter.state {
        None => &[0, 1, 2, 3],
        Some(EntryState::Processing | EntryState::InDoubt) => &[0, 1],
        Some(EntryState::Completed) => &[2],
        Some(EntryState::Failed) => &[3],
    };
    let table = if open {
        "fence, id, scope, 0::smallint AS stage FROM hapax.ledger_open"
    } else {
        "fence, id, scope, stage FROM hapax.ledger_entry"
    };
    let sql = format!(
        "WITH scan AS MATERIALIZED (SELECT {table} WHERE fence > $1 ORDER BY fence LIMIT $2),
              fit AS MATERIALIZED (SELECT fence, id FROM scan
                WHERE ($3::text IS NULL OR scope = $3) AND stage = ANY ($4) ORDER BY fence LIMIT $5)
         SELECT (SELECT count(*) FROM scan), (SELECT max(fence) FROM scan),
                ARRAY(SELECT fence FROM fit ORDER BY fence), ARRAY(SELECT id FROM fit ORDER BY fence)"
    );
    let limit = filter.limit as i64;
    let row = sqlx::query(&sql)
        .bind(filter.after.unwrap_or_default().min(i64::MAX as u64) as i64)
        .bind(SCAN_MAX.max(limit + 1))
        .bind(filter.scope.as_ref().map(Scope::as_str))
        .bind(stages)
        .bind(limit + 1)
        .fetch_one(connection)
        .await?;
    let (scanned, last): (i64, Option<i64>) = (row.try_get(0)?, row.try_get(1)?);
    let (fences, mut hashes): (Vec<i64>, Vec<Vec<u8>>) = (row.try_get(2)?, row.try_get(3)?);
    let next = if hashes.len() > filter.limit {
        hashes.truncate(filter.limit);
        Some(fences[filter.limit - 1] as u64)
    } else {
        last.filter(|_| scanned >= SCAN_MAX.max(limit + 1)).map(|last| last as u64)
    };
    let hashes = hashes.into_iter().map(|hash| Hash::try_from(hash.as_slice()));
    let hashes = hashes.collect::<Result<_, _>>();
    let damaged = |_| StoreError::Damaged("an id in the ledger has another length than 16 bytes".to_owned());
    Ok(Found { hashes: hashes.map_err(damaged)?, next })
}

/// An operator's decision.
pub(super) enum Decision {
    Resolve(Resolution),
    Forget,
}

/// Decides about an entry, with a note in the audit, in one transaction.
pub(super) async fn decide(
    connection: &mut PgConnection,
    id: &EntryId,
    decision: &Decision,
    by: &str,
) -> Result<Result<Freed, ResolveError>, Failure> {
    let mut transaction = Transaction::begin(connection).await?;
    let decided = decide_in(&mut transaction, id, decision, by).await;
    transaction.end(decided).await
}

async fn decide_in(
    db: &mut PgConnection,
    id: &EntryId,
    decision: &Decision,
    by: &str,
) -> Result<Result<Freed, ResolveError>, Failure> {
    let reading = Reading { lock: true, spare: matches!(decision, Decision::Resolve(_)) };
    let mut snapshot = Snapshot::read(db, [id], reading).await?;
    let (hash, now_ms) = (hash_of(id), snapshot.now_ms);
    let known = snapshot.key(&hash);
    let damage = known.check();
    let (entry, spare) = (known.entry.as_ref(), known.spare);
    let decided = match decision {
        Decision::Resolve(resolution) => {
            damage?;
            let fence = || -> Fence { spare.expect("a fence was drawn for an entry in doubt") };
            protocol::resolve(id, entry, resolution, now_ms, fence).map(|change| {
                let _ = known.apply(now_ms, change);
                format!("resolved the ledger's entry {id} as {}", word(resolution))
            })
        }
        Decision::Forget if damage.is_err() => {
            known.set(now_ms, None);
            Ok(format!("forgot the ledger's entry {id}, which was damaged"))
        }
        Decision::Forget => protocol::forget(id, entry, now_ms).map(|()| {
            known.set(now_ms, None);
            format!("forgot the ledger's entry {id}")
        }),
    };
    let what = match decided {
        Ok(what) => what,
        Err(refused) => return Ok(Err(refused)),
    };
    snapshot.write(db).await?;
    sqlx::query("INSERT INTO hapax.audit (at_ms, by, what) VALUES ($1, $2, $3)")
        .bind(now_ms as i64)
        .bind(policy::truncate(by, BY_BYTES_MAX))
        .bind(what)
        .execute(db)
        .await?;
    Ok(Ok(vec![hash]))
}

fn word(resolution: &Resolution) -> &'static str {
    match resolution {
        Resolution::Absent => "absent",
        Resolution::Completed { outcome, .. } if outcome.failed => "failed",
        Resolution::Completed { .. } => "completed",
    }
}

/// Entries, and those among them that are held or in doubt.
pub(super) async fn count(connection: &mut PgConnection) -> Result<(u64, u64), Failure> {
    let sql =
        "SELECT coalesce(sum(entries), 0)::bigint, coalesce(sum(open), 0)::bigint FROM hapax.ledger_count";
    let row = sqlx::query(sql).fetch_one(connection).await?;
    let number = |at: usize| row.try_get::<i64, _>(at).map(|count| u64::try_from(count).unwrap_or_default());
    Ok((number(0)?, number(1)?))
}
