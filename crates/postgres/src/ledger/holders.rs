//! What the holder of a claim does: renewing and ending it.

use std::collections::HashSet;

use hapax_core::ledger::protocol::{self, LedgerEntry, Stage};
use hapax_core::{ClaimEnding, EndClaim, EntryId, Fence, RemainingLease, Renew, Scope, Token, TokenError};
use sqlx::{Connection as _, PgConnection};

use super::claim::lease_ms;
use super::complete::Completions;
use super::rows::{Hash, Reading, Snapshot, hash_of};
use super::{LedgerState, ROUNDS_MAX, contended, partly};
use crate::error::Failure;
use crate::transaction::pause_after_conflict;

/// Entries that were freed or given up, so that a claim which waits for them may be answered.
pub(super) type Freed = Vec<Hash>;

/// What the ends of claims did that has to be told outside of their transaction, once it was committed.
#[derive(Debug, Default)]
pub(crate) struct ClaimsEnded {
    pub(super) freed: Freed,
    pub(super) stale: u64,
    pub(super) completed: u64,
    /// The scopes of entries that are not open any more, one for each entry.
    pub(super) closed: Vec<Scope>,
}

impl ClaimsEnded {
    fn of(ends: &[&EndClaim], answers: &[Held<()>]) -> Self {
        let mut ended = Self { freed: freed(ends, answers), ..Self::default() };
        for (end, answer) in ends.iter().zip(answers) {
            match (answer, &end.ending) {
                (Ok(((), true)), ClaimEnding::Complete { .. }) => {
                    ended.completed += 1;
                    ended.closed.push(end.id.scope.clone());
                }
                (Ok(((), true)), ClaimEnding::Release) => ended.closed.push(end.id.scope.clone()),
                (Err(TokenError::Stale), _) => ended.stale += 1,
                _ => {}
            }
        }
        ended
    }
}

/// An operation of a holder on one entry.
trait Holding {
    type Answer: Clone;

    fn id(&self) -> &EntryId;

    fn token(&self) -> &Token;

    /// Decides, and changes the entry. Also says whether a claim that waits should look again.
    fn decide(&self, fence: Fence, hash: &Hash, snapshot: &mut Snapshot) -> Held<Self::Answer>;
}

impl Holding for Renew {
    type Answer = RemainingLease;

    fn id(&self) -> &EntryId {
        &self.id
    }

    fn token(&self) -> &Token {
        &self.token
    }

    fn decide(&self, fence: Fence, hash: &Hash, snapshot: &mut Snapshot) -> Held<RemainingLease> {
        let now_ms = snapshot.now_ms;
        let known = snapshot.key(hash);
        let renewed = protocol::renew(known.entry.as_ref(), fence, self.lease_ms, now_ms)?;
        let remaining = RemainingLease { lease_ms: lease_ms(&renewed, now_ms) };
        let shorter = known.entry.as_ref().is_some_and(|before| until_ms(&renewed) < until_ms(before));
        known.set(now_ms, Some(renewed));
        Ok((remaining, shorter))
    }
}

fn until_ms(entry: &LedgerEntry) -> u64 {
    match entry.stage {
        Stage::Processing { until_ms, .. } => until_ms,
        Stage::Completed { at_ms, .. } => at_ms,
    }
}

impl Holding for EndClaim {
    type Answer = ();

    fn id(&self) -> &EntryId {
        &self.id
    }

    fn token(&self) -> &Token {
        &self.token
    }

    fn decide(&self, fence: Fence, hash: &Hash, snapshot: &mut Snapshot) -> Held<()> {
        let now_ms = snapshot.now_ms;
        let known = snapshot.key(hash);
        let change = protocol::end(known.entry.as_ref(), fence, &self.ending, now_ms)?;
        Ok(((), known.apply(now_ms, change)))
    }
}

/// Renews the claims of several calls.
pub(super) async fn renew_batch(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    calls: &[Vec<Renew>],
) -> Result<Vec<Vec<Result<RemainingLease, TokenError>>>, Failure> {
    let all: Vec<&Renew> = calls.iter().flatten().collect();
    let answers = hold(ledger, connection, &all, Reading::default()).await?;
    ledger.count_stale(&answers);
    ledger.waiters.freed(&freed(&all, &answers));
    Ok(regroup(calls, answers))
}

/// Ends the claims of several calls.
pub(super) async fn end_batch(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    calls: &[Vec<EndClaim>],
) -> Result<Vec<Vec<Result<(), TokenError>>>, Failure> {
    let all: Vec<&EndClaim> = calls.iter().flatten().collect();
    let completed = complete_held(ledger, connection, &all).await?;
    let answers = hold_rest(ledger, connection, &all, Reading::default(), completed).await?;
    ledger.ended(&ClaimsEnded::of(&all, &answers));
    Ok(regroup(calls, answers))
}

/// Completes claims that are simply held, by one statement. The others have no answer yet.
async fn complete_held(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    all: &[&EndClaim],
) -> Result<Vec<Option<Held<()>>>, Failure> {
    let (mut asked, mut seen) = (Completions::default(), HashSet::new());
    for (at, end) in all.iter().enumerate() {
        let hash = hash_of(&end.id);
        // What comes first in the batch is decided first.
        let is_first = seen.insert(hash);
        if let (true, ClaimEnding::Complete { outcome, ttl_ms }, Some(fence)) =
            (is_first, &end.ending, ledger.fence_of(&hash, &end.token))
        {
            asked.push(at, hash, fence, outcome.clone().without_oversize_value(), *ttl_ms);
        }
    }
    let mut answers: Vec<Option<Held<()>>> = all.iter().map(|_| None).collect();
    for at in asked.write(connection).await? {
        answers[at] = Some(Ok(((), true)));
    }
    Ok(answers)
}

/// Ends claims in the transaction of a settle. After its commit, the caller passes the second part to
/// [`LedgerState::ended`].
pub(super) async fn end_in(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    ends: &[&EndClaim],
) -> Result<(Vec<Result<(), TokenError>>, ClaimsEnded), Failure> {
    let reading = Reading { lock: true, ..Reading::default() };
    let answers = hold(ledger, connection, ends, reading).await?;
    let ended = ClaimsEnded::of(ends, &answers);
    Ok((answers.into_iter().map(|answer| answer.map(|_| ())).collect(), ended))
}

/// The answer to one operation, and whether it changed the entry so that a claim which waits should look again.
pub(super) type Held<T> = Result<(T, bool), TokenError>;

fn freed<H: Holding>(all: &[&H], answers: &[Held<H::Answer>]) -> Freed {
    let changed = all.iter().zip(answers).filter(|(_, answer)| matches!(answer, Ok((_, true))));
    changed.map(|(one, _)| hash_of(one.id())).collect()
}

async fn hold<H: Holding + Sync>(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    all: &[&H],
    reading: Reading,
) -> Result<Vec<Held<H::Answer>>, Failure>
where
    H::Answer: Send,
{
    hold_rest(ledger, connection, all, reading, all.iter().map(|_| None).collect()).await
}

/// The same for those that have no answer yet.
async fn hold_rest<H: Holding + Sync>(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    all: &[&H],
    reading: Reading,
    mut answers: Vec<Option<Held<H::Answer>>>,
) -> Result<Vec<Held<H::Answer>>, Failure>
where
    H::Answer: Send,
{
    // With locks, and behind a pooler, it is a part of a transaction, which a failure rolls back. Otherwise, what other
    // rounds have decided is committed, and only the one that failed is repeated.
    let commits = !reading.lock && !connection.is_in_transaction();
    for number in 0..ROUNDS_MAX {
        let open: Vec<usize> = (0..all.len()).filter(|at| answers[*at].is_none()).collect();
        if open.is_empty() {
            return Ok(answers.into_iter().flatten().collect());
        }
        match hold_round(ledger, connection, all, &open, reading).await {
            Ok(decided) => decided.into_iter().for_each(|(at, decision)| answers[at] = Some(decision)),
            Err(failure) if failure.is_conflict() && commits => {
                pause_after_conflict(number as u64).await;
            }
            Err(failure) => return Err(partly(failure, commits && open.len() < all.len())),
        }
    }
    Err(partly(contended(), commits && answers.iter().any(Option::is_some)))
}

/// Decides those whose entries no other session changes at the same time.
async fn hold_round<H: Holding + Sync>(
    ledger: &LedgerState,
    connection: &mut PgConnection,
    all: &[&H],
    open: &[usize],
    reading: Reading,
) -> Result<Vec<(usize, Held<H::Answer>)>, Failure>
where
    H::Answer: Send,
{
    let mut snapshot = Snapshot::read(connection, open.iter().map(|at| all[*at].id()), reading).await?;
    let mut decided = Vec::new();
    for &at in open {
        let hash = hash_of(all[at].id());
        let fence = ledger.fence_of(&hash, all[at].token()).ok_or(TokenError::Stale);
        let sound = snapshot.key(&hash).check().map_err(|_| TokenError::Damaged);
        let fence = fence.and_then(|fence| sound.map(|()| fence));
        let decision = fence.and_then(|fence| all[at].decide(fence, &hash, &mut snapshot));
        decided.push((at, hash, decision));
    }
    let lost: HashSet<Hash> = snapshot.write(connection).await?;
    let written = decided.into_iter().filter(|(_, hash, _)| !lost.contains(hash));
    Ok(written.map(|(at, _, decision)| (at, decision)).collect())
}

fn regroup<In, Out>(calls: &[Vec<In>], answers: Vec<Held<Out>>) -> Vec<Vec<Result<Out, TokenError>>> {
    let mut answers = answers.into_iter().map(|answer| answer.map(|(answer, _)| answer));
    calls.iter().map(|call| answers.by_ref().take(call.len()).collect()).collect()
}

/// The part of a batch that an end takes up: its outcome may be large.
pub(super) fn weight(end: &EndClaim) -> usize {
    match &end.ending {
        ClaimEnding::Complete { outcome, .. } => {
            1 + outcome.value.as_ref().map_or(0, |value| value.as_str().len() / 4096)
        }
        ClaimEnding::Release | ClaimEnding::Doubt => 1,
    }
}
