//! The ledger: which keys have been claimed, by which owner, and with which outcome.
//!
//! A batch reads its rows, decides by `hapax_core::ledger::protocol`, and writes each row back only if it has not changed
//! since; what has changed is read and decided again. See `migrations/0002_ledger.sql`. Claims of free keys and completions
//! of claims that are held need no reading: for them the statement's own condition is the decision.

mod claim;
mod complete;
mod holders;
mod operators;
mod rooms;
mod rows;
mod sweep;
pub(crate) mod transfer;
mod waiters;

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax_core::ledger::protocol::ClaimDecision;
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Fence, Grant, Ledger,
    LedgerCapabilities, LedgerStats, Page, RemainingLease, Renew, Resolution, ResolveError, Scope,
    StoreError, Token, TokenError, validate,
};
use sqlx::PgConnection;
use tokio::task::AbortHandle;

use crate::PostgresStore;
use crate::error::{Access, Failure};
use crate::merge::Merger;
use crate::pool::Pool;
use crate::seal::Seal;
use claim::{Asked, ClaimCall, Decided};
pub(crate) use holders::ClaimsEnded;
use holders::{Freed, Held};
use operators::Decision;
use rooms::{OpenCount, Rooms};
use rows::Hash;
pub(crate) use rows::hash_of;
use sweep::Cursor;
use waiters::Waiters;

/// How often a batch decides again about entries that others changed at the same time.
const ROUNDS_MAX: usize = 50;
/// Elements of a merged batch.
const WEIGHT_MAX: usize = 500;
/// A scope raises the alarm at this part of its bound, in percent.
const ALARM_PERCENT: u64 = 80;

/// Others changed the same entries all the time.
fn contended() -> Failure {
    let problem = format!("the same keys of the ledger were changed by others {ROUNDS_MAX} times in a row");
    StoreError::Overloaded(problem).into()
}

/// The statements of a batch are transactions of their own. If one fails after another has changed something, it is not true
/// that nothing was done.
fn partly(failure: Failure, done: bool) -> Failure {
    if !done || failure.is_conflict() {
        return failure;
    }
    StoreError::OutcomeUnknown(format!("a part of the batch was done: {failure}")).into()
}

type Renewed = Vec<Result<RemainingLease, TokenError>>;
type Ended = Vec<Result<(), TokenError>>;

/// The ledger's part of a store.
pub(crate) struct LedgerState {
    pool: Pool,
    seal: Seal,
    waiters: Arc<Waiters>,
    rooms: Rooms,
    stats: Mutex<LedgerStats>,
    cursor: tokio::sync::Mutex<Cursor>,
    in_doubt_per_scope_max: u64,
    /// Scopes whose many doubts were logged.
    alarmed: Mutex<HashSet<Scope>>,
}

impl LedgerState {
    fn stats(&self) -> MutexGuard<'_, LedgerStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn token(&self, hash: &Hash, fence: Fence) -> Token {
        Token::new(self.seal.seal(hash, &fence.0.to_le_bytes())).expect("a sealed token is short")
    }

    fn fence_of(&self, hash: &Hash, token: &Token) -> Option<Fence> {
        self.seal.open(hash, token.as_str()).map(|bytes| Fence(u64::from_le_bytes(bytes)))
    }

    fn count_claim(&self, decision: &Result<ClaimDecision, ClaimError>, granted_anew: bool, again: bool) {
        let mut stats = self.stats();
        match decision {
            Ok(ClaimDecision::Granted { takeover, .. }) if granted_anew => {
                stats.granted += 1;
                stats.takeovers += u64::from(*takeover);
            }
            Ok(ClaimDecision::Completed { .. }) => stats.replayed += 1,
            Ok(ClaimDecision::InProgress { .. }) => stats.conflicts += u64::from(!again),
            Ok(ClaimDecision::InDoubt { .. }) => stats.in_doubt += 1,
            Err(ClaimError::Mismatch) => stats.mismatches += 1,
            Ok(ClaimDecision::Granted { .. }) | Err(_) => {}
        }
    }

    fn count_stale<T>(&self, answers: &[Held<T>]) {
        let stale = answers.iter().filter(|answer| matches!(answer, Err(TokenError::Stale))).count();
        self.stats().stale += stale as u64;
    }

    /// Counts the ends of claims after their transaction was committed, and wakes claims that wait for the entries.
    fn ended(&self, ended: &ClaimsEnded) {
        let mut stats = self.stats();
        stats.stale += ended.stale;
        stats.completed += ended.completed;
        drop(stats);
        for scope in &ended.closed {
            self.rooms.add(scope, -1);
        }
        self.waiters.freed(&ended.freed);
    }

    /// A sweep has counted the open entries of all scopes.
    fn counted(&self, counts: &HashMap<Scope, OpenCount>) {
        self.rooms.counted(counts);
        let max = self.in_doubt_per_scope_max;
        let many: HashMap<&Scope, u64> = counts
            .iter()
            .filter(|(_, count)| count.in_doubt * 100 >= max.saturating_mul(ALARM_PERCENT))
            .map(|(scope, count)| (scope, count.in_doubt))
            .collect();
        let mut alarmed = self.alarmed.lock().unwrap_or_else(PoisonError::into_inner);
        alarmed.retain(|scope| many.contains_key(scope));
        for (scope, in_doubt) in many {
            if !alarmed.insert(scope.clone()) {
                continue;
            }
            tracing::warn!(
                %scope,
                in_doubt,
                max,
                "many keys of a scope are in doubt; resolve some, or its claims will be refused"
            );
        }
    }

    fn answer(&self, hash: &Hash, decided: Decided) -> Result<Claim, ClaimError> {
        Ok(match decided.decision? {
            ClaimDecision::Granted { entry, takeover } => Claim::Granted(Grant {
                token: self.token(hash, entry.fence),
                fence: entry.fence,
                lease_ms: claim::lease_ms(&entry, decided.now_ms),
                takeover,
            }),
            ClaimDecision::Completed { outcome, at_ms } => Claim::Completed { outcome, at_ms },
            ClaimDecision::InProgress { retry_after_ms } => Claim::InProgress { retry_after_ms },
            ClaimDecision::InDoubt { since_ms } => Claim::InDoubt { since_ms },
        })
    }
}

/// The ledger's operations, merged.
pub(crate) struct PostgresLedger {
    state: Arc<LedgerState>,
    claims: Merger<ClaimCall, Vec<Decided>>,
    renewals: Merger<Vec<Renew>, Renewed>,
    ends: Merger<Vec<EndClaim>, Ended>,
    sweeper: AbortHandle,
}

impl PostgresLedger {
    pub fn new(base: &crate::Base) -> Self {
        let pool = base.pool.clone();
        let max = base.options.in_doubt_per_scope_max;
        let state = Arc::new(LedgerState {
            pool: pool.clone(),
            seal: base.seal.clone(),
            waiters: Waiters::new(base.hints.clone(), pool.runtime().clone()),
            rooms: Rooms::new(max),
            stats: Mutex::default(),
            cursor: tokio::sync::Mutex::default(),
            in_doubt_per_scope_max: max,
            alarmed: Mutex::default(),
        });
        let (claiming, renewing, ending) = (state.clone(), state.clone(), state.clone());
        let claims =
            Merger::new(pool.clone(), "claim", Access::Write, WEIGHT_MAX, move |connection, calls| {
                let ledger = claiming.clone();
                Box::pin(async move { claim::claim_batch(&ledger, connection, &calls).await })
            });
        let renewals =
            Merger::new(pool.clone(), "renew", Access::Write, WEIGHT_MAX, move |connection, calls| {
                let ledger = renewing.clone();
                Box::pin(async move { holders::renew_batch(&ledger, connection, &calls).await })
            });
        let ends = Merger::new(pool.clone(), "end", Access::Write, WEIGHT_MAX, move |connection, calls| {
            let ledger = ending.clone();
            Box::pin(async move { holders::end_batch(&ledger, connection, &calls).await })
        });
        let sweeper = pool.runtime().spawn(sweep::run(Arc::downgrade(&state))).abort_handle();
        Self { state, claims, renewals, ends, sweeper }
    }

    /// Ends claims in the transaction of a settle, one answer per claim. After its commit, the caller passes the second
    /// part to [`ended`](Self::ended).
    pub async fn end_in(
        &self,
        connection: &mut PgConnection,
        ends: &[&EndClaim],
    ) -> Result<(Ended, ClaimsEnded), Failure> {
        holders::end_in(&self.state, connection, ends).await
    }

    /// The transaction of [`end_in`](Self::end_in) was committed: counts, and wakes claims that wait for the entries.
    pub fn ended(&self, ended: &ClaimsEnded) {
        self.state.ended(ended);
    }

    pub fn close(&self) {
        self.sweeper.abort();
    }

    /// All calls that were made before have been answered, or wait for a key.
    pub async fn quiet(&self) {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        self.claims.passed().await;
        self.renewals.passed().await;
        self.ends.passed().await;
    }

    /// The clock was moved by hand.
    pub async fn clock_moved(&self) -> Result<(), StoreError> {
        self.state.waiters.wake_all();
        sweep::sweep(&self.state).await
    }

    /// Claims, and waits for keys that others hold.
    async fn claim(&self, asked: Vec<Result<Asked, ClaimError>>) -> Batch<Claim, ClaimError> {
        let mut answers: Vec<Option<Result<Claim, ClaimError>>> = Vec::with_capacity(asked.len());
        let mut pending: Vec<(usize, Asked)> = Vec::new();
        for (at, asked) in asked.into_iter().enumerate() {
            answers.push(None);
            match asked {
                Ok(asked) => pending.push((at, asked)),
                Err(error) => answers[at] = Some(Err(error)),
            }
        }
        let longest_ms = pending.iter().map(|(_, asked)| asked.request.wait_ms).max().unwrap_or_default();
        let (start, mut first_ms) = (Instant::now(), None);
        while !pending.is_empty() {
            // Registered before the question: a change after the answer is not missed.
            let waiting = pending.iter().filter(|(_, asked)| asked.request.wait_ms > 0);
            let keys = waiting.map(|(_, asked)| waiters::short(&asked.hash)).collect();
            let registration = self.state.waiters.register(keys);
            let decided = match self.ask(&pending).await {
                Ok(decided) => decided,
                Err(error) if first_ms.is_none() => return Err(error),
                // Some were answered before; the error belongs to those that still wait.
                Err(error) => {
                    for (at, _) in pending.drain(..) {
                        answers[at] = Some(Err(error.clone().into()));
                    }
                    break;
                }
            };
            let mut sleep_ms = u64::MAX;
            let mut still = Vec::new();
            // The database's clock decides; ours only bounds the wait in case that one stands still.
            let stuck = start.elapsed() > Duration::from_millis(2 * longest_ms + 10_000);
            for ((at, mut asked), decided) in pending.into_iter().zip(decided) {
                let now_ms = decided.now_ms;
                let end_ms = *first_ms.get_or_insert(now_ms) + asked.request.wait_ms;
                match decided.decision {
                    Ok(ClaimDecision::InProgress { retry_after_ms }) if now_ms < end_ms && !stuck => {
                        sleep_ms = sleep_ms.min(retry_after_ms).min(end_ms - now_ms);
                        asked.again = true;
                        still.push((at, asked));
                    }
                    _ => answers[at] = Some(self.state.answer(&asked.hash, decided)),
                }
            }
            pending = still;
            if !pending.is_empty() {
                registration.wait(Duration::from_millis(sleep_ms.max(1))).await;
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    async fn ask(&self, pending: &[(usize, Asked)]) -> Result<Vec<Decided>, StoreError> {
        let call: ClaimCall = pending.iter().map(|(_, asked)| asked.clone()).collect();
        let weight = call.len();
        self.claims.call(call, weight).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        let mut answers = Vec::with_capacity(batch.len());
        let mut part = Vec::new();
        let mut weight = 0;
        for end in batch {
            let more = holders::weight(&end);
            if weight + more > WEIGHT_MAX && !part.is_empty() {
                answers.extend(self.ends.call(std::mem::take(&mut part), weight).await?);
                weight = 0;
            }
            weight += more;
            part.push(end);
        }
        if !part.is_empty() {
            answers.extend(self.ends.call(part, weight).await?);
        }
        Ok(answers)
    }
}

#[async_trait]
impl Ledger for PostgresStore {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        let durable = self.base.durable;
        LedgerCapabilities { name: "postgres".into(), durable, fence: true, may_evict: false }
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        let asked = |request: ClaimRequest| {
            request.validate()?;
            let message = request.delivery.as_ref();
            let message = message.and_then(|(queue, receipt)| self.queues.message_of(queue, receipt));
            Ok(Asked { hash: hash_of(&request.id), message, again: false, request })
        };
        self.ledger.claim(batch.into_iter().map(asked).collect()).await
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        validate::batch("renew", batch.len())?;
        let weight = batch.len();
        if batch.is_empty() { Ok(Vec::new()) } else { self.ledger.renewals.call(batch, weight).await }
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        self.ledger.end(batch).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        let id = id.clone();
        let read = self.base.pool.repeat("entry", Access::Read, move |connection| {
            let id = id.clone();
            Box::pin(async move { operators::entry(connection, &id).await })
        });
        read.await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        validate::page(filter.limit)?;
        let read = self.base.pool.repeat("entries", Access::Read, move |connection| {
            let filter = filter.clone();
            Box::pin(async move { operators::entries(connection, &filter).await })
        });
        read.await
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.decide(id, "resolve", Decision::Resolve(resolution), by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.decide(id, "forget", Decision::Forget, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        // What was asked before is counted.
        self.ledger.claims.passed().await;
        self.ledger.ends.passed().await;
        let count = self.base.pool.repeat("ledger_stats", Access::Read, |connection| {
            Box::pin(async move { operators::count(connection).await })
        });
        let (entries, open) = count.await?;
        Ok(LedgerStats { entries, open, ..*self.ledger.state.stats() })
    }
}

impl PostgresStore {
    async fn decide(
        &self,
        id: &EntryId,
        what: &'static str,
        decision: Decision,
        by: &str,
    ) -> Result<(), ResolveError> {
        let asked = Arc::new((id.clone(), decision, by.to_owned()));
        let decided = self.base.pool.repeat(what, Access::Write, move |connection| {
            let asked = asked.clone();
            Box::pin(async move { operators::decide(connection, &asked.0, &asked.1, &asked.2).await })
        });
        let freed: Freed = decided.await??;
        self.ledger.state.waiters.freed(&freed);
        // Messages that were parked for the entry may continue, in whichever queue they are.
        self.queues.kick_all();
        Ok(())
    }
}
