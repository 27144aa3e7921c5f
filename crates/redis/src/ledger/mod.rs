//! The ledger: which keys have been claimed, by which owner, and with which outcome. Each operation on an entry is one
//! script, hence atomic; `scripts/common.lua` describes what is kept.

mod answer;
mod calls;
mod operators;
mod sweep;
pub(crate) mod transfer;
pub(crate) mod waiters;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use hapax_core::{
    Batch, Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, Page, RemainingLease, Renew, Resolution, ResolveError, StoreError,
    TokenError, validate,
};
use redis::Value;

use crate::RedisStore;
use crate::connect::Durability;
use crate::error::question;
use crate::keys::{SHARDS, member, shard_of};
use crate::queues::{Claims, POLL_MS_MIN, Queues};
use crate::run::{Call, Runner};
use answer::{Answer, Claimed};
use operators::Decision;
use waiters::{Asking, Waiters};

pub(crate) use answer::token_refusal;
pub(crate) use calls::end_arguments;
pub(crate) use sweep::run as run_sweeper;

/// The ledger's part of a store.
pub(crate) struct LedgerState {
    pub runner: Arc<Runner>,
    /// Their parked messages continue when a doubt ends.
    queues: Arc<Queues>,
    waiters: Arc<Waiters>,
    asking: Arc<Asking>,
    stats: Arc<Mutex<LedgerStats>>,
    /// The shard at which the next sweep begins.
    next_shard: Mutex<usize>,
}

/// A claim on its way.
struct Asked {
    at: usize,
    request: ClaimRequest,
    member: String,
    nonce: String,
    /// It has waited, and was counted before.
    again: bool,
}

impl LedgerState {
    pub fn new(runner: Arc<Runner>, queues: Arc<Queues>) -> Self {
        let Claims { waiters, stats } = queues.claims.clone();
        Self { runner, queues, waiters, asking: Arc::default(), stats, next_shard: Mutex::default() }
    }

    /// Doubts have ended: the messages that are parked for them continue. What fails here is done by a sweep.
    async fn resume(&self, id: &EntryId, resumed: &[String]) {
        for member in resumed {
            if let Err(error) = Box::pin(self.queues.resume_parked(shard_of(&id.scope), member)).await {
                tracing::debug!(%error, entry = %id, "messages that are parked for a doubt continue later");
            }
        }
    }

    fn stats(&self) -> MutexGuard<'_, LedgerStats> {
        self.stats.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// All calls that were made before have been answered, or wait for a key.
    pub async fn quiet(&self) {
        self.asking.passed().await;
    }

    /// The clock was moved by hand.
    pub async fn clock_moved(self: &Arc<Self>) -> Result<(), StoreError> {
        sweep::sweep_all(self).await?;
        self.waiters.wake_all();
        Ok(())
    }

    fn count_claim(&self, claimed: &Claimed, again: bool) {
        let mut stats = self.stats();
        match claimed {
            Claimed::Granted { grant, is_new: true } => {
                stats.granted += 1;
                stats.takeovers += u64::from(grant.takeover);
            }
            Claimed::Granted { is_new: false, .. } | Claimed::Full { .. } => {}
            Claimed::Ended { .. } => stats.replayed += 1,
            Claimed::Held { .. } => stats.conflicts += u64::from(!again),
            Claimed::InDoubt { .. } => stats.in_doubt += 1,
            Claimed::Mismatch => stats.mismatches += 1,
        }
    }

    /// Claims, and waits for keys that others hold.
    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        let mut answers: Vec<Option<Result<Claim, ClaimError>>> = Vec::with_capacity(batch.len());
        let mut pending: Vec<Asked> = Vec::new();
        for (at, request) in batch.into_iter().enumerate() {
            match request.validate() {
                Ok(()) => {
                    answers.push(None);
                    let (member, nonce) = (member(&request.id), calls::nonce());
                    pending.push(Asked { at, request, member, nonce, again: false });
                }
                Err(error) => answers.push(Some(Err(error))),
            }
        }
        let longest_ms = pending.iter().map(|asked| asked.request.wait_ms).max().unwrap_or_default();
        let (start, mut first_ms, mut poll_ms) = (Instant::now(), None, POLL_MS_MIN);
        while !pending.is_empty() {
            // Registered before the question: a change after the answer is not missed.
            let waiting = pending.iter().filter(|asked| asked.request.wait_ms > 0);
            let registration = self.waiters.register(waiting.map(|asked| asked.member.clone()).collect());
            let ticket = self.asking.begin();
            let decided = self.runner.run(pending.iter().map(|asked| self.claim_call(asked)).collect()).await;
            let decided: Vec<_> =
                decided.into_iter().map(|decided| decided.and_then(|value| self.claimed(value))).collect();
            if first_ms.is_none() && answers.iter().all(Option::is_none) && decided.iter().all(Result::is_err)
            {
                return Err(worst(decided.into_iter().filter_map(Result::err)));
            }
            // Redis's clock decides; ours only bounds the wait in case that one stands still.
            let is_stuck = start.elapsed() > Duration::from_millis(2 * longest_ms + 10_000);
            let (mut sleep_ms, mut still) = (poll_ms, Vec::new());
            for (mut asked, decided) in pending.into_iter().zip(decided) {
                let (claimed, now_ms) = match decided {
                    Ok((claimed, now_ms, resumed)) => {
                        self.resume(&asked.request.id, &resumed).await;
                        (claimed, now_ms)
                    }
                    Err(error) => {
                        answers[asked.at] = Some(Err(error.into()));
                        continue;
                    }
                };
                self.count_claim(&claimed, asked.again);
                let end_ms = *first_ms.get_or_insert(now_ms) + asked.request.wait_ms;
                match claimed {
                    Claimed::Held { retry_after_ms } if now_ms < end_ms && !is_stuck => {
                        sleep_ms = sleep_ms.min(retry_after_ms).min(end_ms - now_ms);
                        asked.again = true;
                        still.push(asked);
                    }
                    claimed => {
                        let max = self.runner.options.in_doubt_per_scope_max;
                        answers[asked.at] = Some(claimed.into_claim(&asked.request.id.scope, max));
                    }
                }
            }
            drop(ticket);
            pending = still;
            if !pending.is_empty() {
                registration.wait(Duration::from_millis(sleep_ms.max(1))).await;
                let longest = pending.iter().map(|asked| shard_of(&asked.request.id.scope));
                let longest = longest.map(|shard| self.queues.poll_ms_max(shard)).min();
                poll_ms = (2 * poll_ms).min(longest.unwrap_or(POLL_MS_MIN));
            }
        }
        Ok(answers.into_iter().flatten().collect())
    }

    fn claimed(&self, value: Value) -> Result<(Claimed, u64, Vec<String>), StoreError> {
        let mut answer = Answer::read("claim", value)?;
        self.stats().pruned += answer.pruned;
        Ok((Claimed::read(&mut answer)?, answer.now_ms, answer.resumed))
    }

    fn count_held(&self, pruned: u64, is_stale: bool) {
        let mut stats = self.stats();
        stats.pruned += pruned;
        stats.stale += u64::from(is_stale);
    }

    /// The answers to the calls of holders. An error of one is an error of the whole batch.
    async fn hold<T>(
        &self,
        what: &'static str,
        calls: Vec<Call>,
        ids: Vec<&EntryId>,
        mut each: impl FnMut(usize, &mut Answer) -> Result<T, StoreError>,
    ) -> Batch<T, TokenError> {
        let ticket = self.asking.begin();
        let values = whole(self.runner.run(calls).await)?;
        let mut answers = Vec::with_capacity(values.len());
        for (at, value) in values.into_iter().enumerate() {
            let mut answer = Answer::read(what, value)?;
            let refused = token_refusal(&answer.status);
            self.count_held(answer.pruned, refused == Some(TokenError::Stale));
            self.resume(ids[at], &answer.resumed).await;
            answers.push(match refused {
                Some(error) => Err(error),
                None => Ok(each(at, &mut answer)?),
            });
        }
        drop(ticket);
        Ok(answers)
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        let calls = batch.iter().map(|end| self.end_call(end)).collect();
        let each = |at: usize, answer: &mut Answer| {
            if answer.number()? == 1 {
                self.stats().completed += u64::from(matches!(batch[at].ending, ClaimEnding::Complete { .. }));
                self.waiters.freed(&member(&batch[at].id));
            }
            Ok(())
        };
        self.hold("end", calls, batch.iter().map(|end| &end.id).collect(), each).await
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        let calls = batch.iter().map(|renew| self.renew_call(renew)).collect();
        let each = |at: usize, answer: &mut Answer| {
            if answer.number()? == 1 {
                // The lease became shorter.
                self.waiters.freed(&member(&batch[at].id));
            }
            Ok(RemainingLease { lease_ms: calls::lease_ms(batch[at].lease_ms) })
        };
        self.hold("renew", calls, batch.iter().map(|renew| &renew.id).collect(), each).await
    }
}

/// The error of a batch none of whose elements has an answer: an unknown outcome before the others, which mean that nothing
/// was done.
pub(crate) fn worst(errors: impl Iterator<Item = StoreError>) -> StoreError {
    let mut worst = None;
    for error in errors {
        if worst.is_none() || matches!(error, StoreError::OutcomeUnknown(_)) {
            worst = Some(error);
        }
    }
    worst.expect("there is an error")
}

/// All answers, or one error for the batch. If a part was done, it is not true that nothing was.
pub(crate) fn whole(answers: Vec<Result<Value, StoreError>>) -> Result<Vec<Value>, StoreError> {
    let is_partly_done = answers.iter().any(Result::is_ok);
    if answers.iter().all(Result::is_ok) {
        return Ok(answers.into_iter().flatten().collect());
    }
    let error = worst(answers.into_iter().filter_map(Result::err));
    if is_partly_done && !matches!(error, StoreError::OutcomeUnknown(_)) {
        return Err(StoreError::OutcomeUnknown(format!("a part of the batch was done: {error}")));
    }
    Err(error)
}

#[async_trait]
impl Ledger for RedisStore {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        let runner = &self.base.runner;
        let fence = match runner.options.durability {
            Durability::Process => false,
            // A replica that is promoted may not know the last fences.
            Durability::Local => !runner.topology.has_replicas(),
            Durability::Replicated => true,
        };
        LedgerCapabilities {
            name: "redis".into(),
            durable: runner.options.durability != Durability::Process,
            fence,
            may_evict: self.base.guard.may_evict(),
        }
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        self.base.begin()?;
        self.base.ledger.claim(batch).await
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        validate::batch("renew", batch.len())?;
        self.base.begin()?;
        self.base.ledger.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        self.base.begin()?;
        self.base.ledger.end(batch).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        self.base.begin()?;
        question(self.base.ledger.entry(id).await)
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        validate::page(filter.limit)?;
        self.base.begin()?;
        question(self.base.ledger.entries(&filter).await)
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.base.begin()?;
        self.base.ledger.decide(id, &Decision::Resolve(resolution), by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.base.begin()?;
        self.base.ledger.decide(id, &Decision::Forget, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.base.begin()?;
        let ledger = &self.base.ledger;
        // What was asked before is counted.
        ledger.quiet().await;
        let count = |key: String, shard| {
            let mut command = redis::cmd("ZCARD");
            command.arg(key);
            Call::read("ledger_stats", shard, command)
        };
        let keys = &ledger.runner.keys;
        let all = (0..SHARDS).map(|shard| count(keys.all(shard), shard));
        let open = (0..SHARDS).map(|shard| count(keys.open(shard), shard));
        let counts = whole(ledger.runner.run(all.chain(open).collect()).await)?;
        let sum = |counts: &[Value]| -> u64 {
            counts.iter().map(|count| if let Value::Int(count) = count { *count as u64 } else { 0 }).sum()
        };
        let (entries, open) = (sum(&counts[..SHARDS]), sum(&counts[SHARDS..]));
        Ok(LedgerStats { entries, open, ..*ledger.stats() })
    }
}
