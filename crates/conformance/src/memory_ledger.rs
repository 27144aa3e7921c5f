//! The smallest ledger that keeps the protocol: a map behind a lock. It judges the suite, and stands in where a test
//! needs a ledger and not its durability.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::ledger::protocol::{self, Claimed, Ended, LedgerEntry, Stage};
use hapax_core::{
    Batch, Claim, ClaimEnd, ClaimError, ClaimRequest, Clock, EntryFilter, EntryId, EntryView, Fence, Grant,
    Ledger, LedgerCapabilities, LedgerStats, Page, Remaining, Renew, Resolution, ResolveError, StoreError,
    Token, TokenError, validate,
};
use tokio::sync::Notify;

/// A ledger in memory.
pub struct MemoryLedger {
    clock: Arc<dyn Clock>,
    entries: Mutex<BTreeMap<EntryId, LedgerEntry>>,
    stats: Mutex<LedgerStats>,
    fence: AtomicU64,
    changed: Notify,
}

impl MemoryLedger {
    /// An empty ledger on a clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        Self {
            clock,
            entries: Mutex::default(),
            stats: Mutex::default(),
            fence: AtomicU64::new(1),
            changed: Notify::new(),
        }
    }

    fn now_ms(&self) -> u64 {
        self.clock.wall_ms()
    }

    fn next_fence(&self) -> Fence {
        Fence(self.fence.fetch_add(1, Ordering::Relaxed))
    }

    fn count(&self, count: impl FnOnce(&mut LedgerStats)) {
        count(&mut self.stats.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Counts a claim by its answer, however long it waited for it.
    fn count_claim(&self, claim: &Result<Claim, ClaimError>) {
        self.count(|stats| match claim {
            Ok(Claim::Granted(grant)) => {
                stats.granted += 1;
                stats.takeovers += u64::from(grant.takeover);
            }
            Ok(Claim::Completed { .. }) => stats.replayed += 1,
            Ok(Claim::InProgress { .. }) => stats.conflicts += 1,
            Ok(Claim::InDoubt { .. }) => stats.in_doubt += 1,
            Err(ClaimError::Mismatch) => stats.mismatches += 1,
            Err(_) => {}
        });
    }

    fn count_stale<T>(&self, answer: Result<T, TokenError>) -> Result<T, TokenError> {
        if matches!(answer, Err(TokenError::Stale)) {
            self.count(|stats| stats.stale += 1);
        }
        answer
    }

    /// Looks, with every entry that is over removed first.
    fn with<T>(&self, step: impl FnOnce(&mut BTreeMap<EntryId, LedgerEntry>, u64) -> T) -> T {
        let now_ms = self.now_ms();
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let before = entries.len();
        entries.retain(|_, entry| entry.prune_ms().is_none_or(|prune_ms| now_ms < prune_ms));
        let pruned = before - entries.len();
        self.count(|stats| stats.pruned += pruned as u64);
        step(&mut entries, now_ms)
    }

    /// Changes something; whoever waits looks again. A claim that waits does not call it, or it would wake itself.
    fn change<T>(&self, step: impl FnOnce(&mut BTreeMap<EntryId, LedgerEntry>, u64) -> T) -> T {
        let result = self.with(step);
        self.changed.notify_waiters();
        result
    }

    fn try_claim(&self, request: &ClaimRequest) -> Result<Claim, ClaimError> {
        request.validate()?;
        self.with(|entries, now_ms| {
            let claimed = protocol::claim(entries.get(&request.id), request, now_ms, || self.next_fence())?;
            Ok(match claimed {
                Claimed::Granted { entry, takeover } => {
                    let view = entry.view(request.id.clone(), now_ms);
                    let grant = Grant {
                        token: token(entry.fence),
                        fence: entry.fence,
                        lease_ms: view.lease_ms,
                        takeover,
                    };
                    entries.insert(request.id.clone(), entry);
                    Claim::Granted(grant)
                }
                Claimed::Completed { outcome, at_ms } => Claim::Completed { outcome, at_ms },
                Claimed::InProgress { retry_after_ms } => Claim::InProgress { retry_after_ms },
                Claimed::InDoubt { since_ms } => Claim::InDoubt { since_ms },
            })
        })
    }

    async fn claim_one(&self, request: &ClaimRequest) -> Result<Claim, ClaimError> {
        let deadline_ms = self.now_ms().saturating_add(request.wait_ms);
        loop {
            let changed = self.changed.notified();
            match self.try_claim(request)? {
                Claim::InProgress { .. } if self.now_ms() < deadline_ms => {
                    // Time may pass without anyone telling: a lapsed lease changes nothing in the map.
                    let _ = tokio::time::timeout(Duration::from_millis(5), changed).await;
                }
                claim => return Ok(claim),
            }
        }
    }
}

fn token(fence: Fence) -> Token {
    Token::new(format!("t{fence}")).expect("printable")
}

fn fence_of(token: &Token) -> Result<Fence, TokenError> {
    token.as_str().strip_prefix('t').and_then(|fence| fence.parse().ok()).map(Fence).ok_or(TokenError::Stale)
}

fn write(entries: &mut BTreeMap<EntryId, LedgerEntry>, id: &EntryId, ended: Ended) {
    match ended {
        Ended::Write(entry) => drop(entries.insert(id.clone(), entry)),
        Ended::Delete => drop(entries.remove(id)),
        Ended::Unchanged => {}
    }
}

#[async_trait]
impl Ledger for MemoryLedger {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        LedgerCapabilities { name: "memory".into(), durable: false, fence: true, may_evict: false }
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        let mut claims = Vec::with_capacity(batch.len());
        for request in &batch {
            let claim = self.claim_one(request).await;
            self.count_claim(&claim);
            claims.push(claim);
        }
        Ok(claims)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<Remaining, TokenError> {
        validate::batch("renew", batch.len())?;
        let renew = |renew: Renew| {
            self.change(|entries, now_ms| {
                let fence = fence_of(&renew.token)?;
                let entry = protocol::renew(entries.get(&renew.id), fence, renew.lease_ms, now_ms)?;
                let lease_ms = entry.view(renew.id.clone(), now_ms).lease_ms;
                entries.insert(renew.id, entry);
                Ok(Remaining { lease_ms })
            })
        };
        Ok(batch.into_iter().map(renew).map(|answer| self.count_stale(answer)).collect())
    }

    async fn end(&self, batch: Vec<ClaimEnd>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        let end = |end: ClaimEnd| {
            self.change(|entries, now_ms| {
                let ended = protocol::end(entries.get(&end.id), fence_of(&end.token)?, &end.ending, now_ms)?;
                let completed =
                    matches!(&ended, Ended::Write(LedgerEntry { stage: Stage::Completed { .. }, .. }));
                self.count(|stats| stats.completed += u64::from(completed));
                write(entries, &end.id, ended);
                Ok(())
            })
        };
        Ok(batch.into_iter().map(end).map(|answer| self.count_stale(answer)).collect())
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        Ok(self.with(|entries, now_ms| entries.get(id).map(|entry| entry.view(id.clone(), now_ms))))
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        validate::page(filter.limit)?;
        let views = self.with(|entries, now_ms| {
            let views = entries.iter().map(|(id, entry)| entry.view(id.clone(), now_ms));
            views.collect::<Vec<_>>()
        });
        let fits = |view: &EntryView| {
            filter.scope.as_ref().is_none_or(|scope| *scope == view.id.scope)
                && filter.state.is_none_or(|state| state == view.state)
                && filter.after.is_none_or(|after| view.fence.0 > after)
        };
        let mut items: Vec<_> = views.into_iter().filter(fits).collect();
        items.sort_by_key(|view| view.fence);
        let more = items.len() > filter.limit;
        items.truncate(filter.limit);
        let next = items.last().filter(|_| more).map(|view| view.fence.0);
        Ok(Page { items, next })
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, _by: &str) -> Result<(), ResolveError> {
        self.change(|entries, now_ms| {
            let ended = protocol::resolve(id, entries.get(id), &resolution, now_ms, || self.next_fence())?;
            write(entries, id, ended);
            Ok(())
        })
    }

    async fn forget(&self, id: &EntryId, _by: &str) -> Result<(), ResolveError> {
        self.change(|entries, now_ms| {
            protocol::forget(id, entries.get(id), now_ms)?;
            entries.remove(id);
            Ok(())
        })
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        let (entries, open) = self.with(|entries, _| {
            let open = entries.values().filter(|entry| matches!(entry.stage, Stage::Processing { .. }));
            (entries.len() as u64, open.count() as u64)
        });
        let stats = *self.stats.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(LedgerStats { entries, open, ..stats })
    }
}
