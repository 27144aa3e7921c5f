//! A batch of claims: free keys are claimed by one statement; what is there already is read, decided about and written
//! back, again and again for those that someone else changed meanwhile.

use std::collections::{HashMap, HashSet};

use hapax_core::ledger::DOUBT_RETENTION_MS;
use hapax_core::ledger::protocol::{self, ClaimDecision, LedgerEntry, Stage};
use hapax_core::{ClaimError, ClaimRequest, Fence, OnDoubt, Scope};
use sqlx::{Connection as _, PgConnection, Row as _};

use super::rooms::Room;
use super::rows::{Hash, Known, Reading, Snapshot};
use super::{LedgerState, ROUNDS_MAX, contended, partly};
use crate::error::Failure;
use crate::transaction::{pause_after_conflict, repeat_conflicts};

/// A claim on its way to the database.
#[derive(Clone)]
pub(super) struct Asked {
    pub request: ClaimRequest,
    pub hash: Hash,
    /// The message whose delivery the claim is for.
    pub message: Option<i64>,
    /// It has waited, and was counted before.
    pub again: bool,
}

/// The claims of one call.
pub(super) type ClaimCall = Vec<Asked>;

/// The decision about a claim, and its time.
pub(super) struct Decided {
    pub decision: Result<ClaimDecision, ClaimError>,
    pub now_ms: u64,
}

/// Decides the claims of several calls.
pub(super) async fn claim_batch(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    calls: &[ClaimCall],
) -> Result<Vec<Vec<Decided>>, Failure> {
    let asked: Vec<&Asked> = calls.iter().flatten().collect();
    let mut decided: Vec<Option<Decided>> = asked.iter().map(|_| None).collect();
    // Behind a pooler it is a part of a transaction, which a failure rolls back.
    let commits = !connection.is_in_transaction();
    for number in 0..ROUNDS_MAX {
        let open: Vec<usize> = (0..asked.len()).filter(|at| decided[*at].is_none()).collect();
        if open.is_empty() {
            let mut decided = decided.into_iter().flatten();
            return Ok(calls.iter().map(|call| decided.by_ref().take(call.len()).collect()).collect());
        }
        match round(ledger, connection, &asked, &open, &mut decided).await {
            Ok(()) => {}
            // What was decided is committed and counted: only the rest is decided again.
            Err(failure) if failure.is_conflict() && commits => pause_after_conflict(number as u64).await,
            Err(failure) => return Err(partly(failure, commits && decided.iter().any(Option::is_some))),
        }
    }
    Err(partly(contended(), commits && decided.iter().any(Option::is_some)))
}

/// One round: decides those of the open claims whose keys no other session changes at the same time.
async fn round(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    asked: &[&Asked],
    open: &[usize],
    decided: &mut [Option<Decided>],
) -> Result<(), Failure> {
    let mut rooms = Rooms::of(ledger, connection, open.iter().map(|at| asked[*at])).await?;
    let first = first_of_each_key(asked, open, &mut rooms);
    let fresh = claim_free(connection, &first).await?;
    for (hash, grant) in &fresh {
        let at = open.iter().copied().find(|at| asked[*at].hash == *hash).expect("it was asked for");
        ledger.rooms.add(&asked[at].request.id.scope, 1);
        ledger.count_claim(&Ok(grant.decision()), true, false);
        decided[at] = Some(Decided { decision: Ok(grant.decision()), now_ms: grant.now_ms });
    }
    let rest: Vec<usize> = open.iter().copied().filter(|at| decided[*at].is_none()).collect();
    if rest.is_empty() {
        return Ok(());
    }
    let unknown = rest.iter().map(|at| asked[*at]).filter(|asked| !fresh.contains_key(&asked.hash));
    let reading = Reading { spare: true, ..Reading::default() };
    let mut snapshot = Snapshot::read(connection, unknown.map(|asked| &asked.request.id), reading).await?;
    for (hash, grant) in fresh {
        let at = first.iter().find(|asked| asked.hash == hash).expect("it was asked for");
        snapshot.now_ms = snapshot.now_ms.max(grant.now_ms);
        snapshot.keys.insert(hash, Known::fresh(at.request.id.clone(), grant.entry));
    }
    let attempted: HashSet<Hash> = first.iter().map(|asked| asked.hash).collect();
    let mut decisions = Vec::new();
    for at in rest {
        let asked = asked[at];
        if let Err(damaged) = snapshot.key(&asked.hash).check() {
            decided[at] = Some(Decided { decision: Err(damaged.into()), now_ms: snapshot.now_ms });
            continue;
        }
        let absent = snapshot.key(&asked.hash).entry.is_none() && !snapshot.key(&asked.hash).is_over();
        if absent {
            // It was removed since the attempt to claim it, or there was no room for it.
            if let (false, Some(refusal)) =
                (attempted.contains(&asked.hash), rooms.refusal(&asked.request.id.scope))
            {
                decided[at] = Some(Decided { decision: Err(refusal), now_ms: snapshot.now_ms });
            }
            continue;
        }
        // Without a decision, it was in doubt only since it was read: the next round draws a fence for it.
        decisions.extend(decide(asked, &mut snapshot).map(|decision| (at, decision)));
    }
    let lost = snapshot.write(connection).await?;
    decisions.retain(|(at, _)| !lost.contains(&asked[*at].hash));
    let links = Links::of(&decisions, asked);
    let linked = repeat_conflicts(connection, &|connection| Box::pin(links.clone().write(connection))).await;
    linked.map_err(|failure| partly(failure, true))?;
    for (at, (decision, granted_anew)) in decisions {
        ledger.count_claim(&decision, granted_anew, asked[at].again);
        decided[at] = Some(Decided { decision, now_ms: snapshot.now_ms });
    }
    Ok(())
}

/// Decides one claim of an entry that is there. Also says whether it was granted under a new fence. `None`: it needs a new
/// fence, and none was drawn.
fn decide(asked: &Asked, snapshot: &mut Snapshot) -> Option<(Result<ClaimDecision, ClaimError>, bool)> {
    let now_ms = snapshot.now_ms;
    let known = snapshot.key(&asked.hash);
    let (before, spare) = (known.entry.as_ref().map(|entry| entry.fence), known.spare);
    let mut missing = false;
    let fence = || {
        missing = spare.is_none();
        spare.unwrap_or(Fence(0))
    };
    let decision = protocol::claim(known.entry.as_ref(), &asked.request, now_ms, fence);
    if missing {
        return None;
    }
    let mut granted_anew = false;
    match &decision {
        Ok(ClaimDecision::Granted { entry, .. }) => {
            granted_anew = before != Some(entry.fence);
            known.set(now_ms, Some(entry.clone()));
        }
        Ok(ClaimDecision::InDoubt { .. }) => known.note_lapse(now_ms),
        _ => {}
    }
    Some((decision, granted_anew))
}

type Decisions = [(usize, (Result<ClaimDecision, ClaimError>, bool))];

/// The entries of claims that name a delivery: they are kept as long as its message.
#[derive(Clone, Default)]
struct Links {
    ids: Vec<Vec<u8>>,
    messages: Vec<i64>,
    granted: Vec<bool>,
}

impl Links {
    fn of(decisions: &Decisions, asked: &[&Asked]) -> Self {
        let mut links = Self::default();
        for (at, (decision, _)) in decisions {
            if let (Some(message), Ok(decision)) = (asked[*at].message, decision) {
                links.ids.push(asked[*at].hash.to_vec());
                links.messages.push(message);
                links.granted.push(matches!(decision, ClaimDecision::Granted { .. }));
            }
        }
        links
    }

    async fn write(self, connection: &mut PgConnection) -> Result<(), Failure> {
        if !self.ids.is_empty() {
            let link = sqlx::query("SELECT hapax.link_entries($1, $2, $3)").bind(self.ids);
            link.bind(self.messages).bind(self.granted).execute(connection).await?;
        }
        Ok(())
    }
}

/// The first claim of each key, sorted by key, as far as there is room for it.
fn first_of_each_key<'a>(asked: &[&'a Asked], open: &[usize], rooms: &mut Rooms) -> Vec<&'a Asked> {
    let mut seen = HashSet::new();
    let mut first: Vec<&Asked> = Vec::new();
    for asked in open.iter().map(|at| asked[*at]) {
        if seen.insert(asked.hash) && rooms.take(&asked.request.id.scope) {
            first.push(asked);
        }
    }
    first.sort_by_key(|asked| asked.hash);
    first
}

/// The room in the scopes of a batch.
struct Rooms {
    by_scope: HashMap<Scope, (Room, u64)>,
}

impl Rooms {
    async fn of<'a>(
        ledger: &LedgerState,
        connection: &mut PgConnection,
        asked: impl Iterator<Item = &'a Asked>,
    ) -> Result<Self, Failure> {
        let scopes: HashSet<&Scope> = asked.map(|asked| &asked.request.id.scope).collect();
        let mut by_scope = HashMap::new();
        for scope in scopes {
            let room = ledger.rooms.room(connection, scope).await?;
            by_scope.insert(scope.clone(), (room, room.left));
        }
        Ok(Self { by_scope })
    }

    fn take(&mut self, scope: &Scope) -> bool {
        let Some((_, left)) = self.by_scope.get_mut(scope) else { return false };
        let fits = *left > 0;
        *left = left.saturating_sub(1);
        fits
    }

    /// Why a claim cannot be made; `None`: there may be room, the next round will tell.
    fn refusal(&self, scope: &Scope) -> Option<ClaimError> {
        let (room, _) = self.by_scope.get(scope)?;
        (room.left == 0).then(|| room.refusal(scope))
    }
}

/// A claim of a key that was free.
struct Fresh {
    entry: LedgerEntry,
    now_ms: u64,
}

impl Fresh {
    fn decision(&self) -> ClaimDecision {
        ClaimDecision::Granted { entry: self.entry.clone(), takeover: false }
    }
}

async fn claim_free(
    connection: &mut PgConnection,
    first: &[&Asked],
) -> Result<HashMap<Hash, Fresh>, Failure> {
    if first.is_empty() {
        return Ok(HashMap::new());
    }
    let each = |get: fn(&Asked) -> &str| first.iter().map(|asked| get(asked)).collect::<Vec<_>>();
    let fingerprint =
        |asked: &&Asked| asked.request.fingerprint.as_ref().map(|text| text.as_str().to_owned());
    let claim =
        sqlx::query("SELECT id, fence, now_ms FROM hapax.ledger_claim($1, $2, $3, $4, $5, $6, $7, $8, $9)")
            .bind(first.iter().map(|asked| asked.hash.as_slice()).collect::<Vec<_>>())
            .bind(each(|asked| asked.request.id.scope.as_str()))
            .bind(each(|asked| asked.request.id.key.as_str()))
            .bind(each(|asked| asked.request.owner.as_str()))
            .bind(first.iter().map(fingerprint).collect::<Vec<_>>())
            .bind(first.iter().map(|asked| asked.request.lease_ms as i64).collect::<Vec<_>>())
            .bind(first.iter().map(|asked| asked.request.on_doubt == OnDoubt::Park).collect::<Vec<_>>())
            .bind(first.iter().map(|asked| asked.message).collect::<Vec<_>>())
            .bind(DOUBT_RETENTION_MS as i64);
    let mut fresh = HashMap::new();
    for row in claim.fetch_all(connection).await? {
        let id: &[u8] = row.try_get(0)?;
        let (fence, now_ms) = (row.try_get::<i64, _>(1)? as u64, row.try_get::<i64, _>(2)? as u64);
        let asked = first.iter().find(|asked| asked.hash == id).expect("only what was asked for is claimed");
        fresh.insert(asked.hash, Fresh { entry: fresh_entry(&asked.request, Fence(fence), now_ms), now_ms });
    }
    Ok(fresh)
}

/// The entry that the database has written for a free key: what the protocol decides for it.
fn fresh_entry(request: &ClaimRequest, fence: Fence, now_ms: u64) -> LedgerEntry {
    match protocol::claim(None, request, now_ms, || fence) {
        Ok(ClaimDecision::Granted { entry, .. }) => entry,
        other => unreachable!("a free key is granted, not {other:?}"),
    }
}

/// What remains of the lease of a granted entry.
pub(super) fn lease_ms(entry: &LedgerEntry, now_ms: u64) -> u64 {
    match entry.stage {
        Stage::Processing { until_ms, .. } => until_ms.saturating_sub(now_ms),
        Stage::Completed { .. } => unreachable!("a granted entry is held"),
    }
}
