//! The ledger of the store: a map, the protocol of the core, and the messages that need an entry.

use std::collections::BTreeMap;

use async_trait::async_trait;
use hapax_core::ledger::protocol::{self, ClaimDecision, EntryChange, LedgerEntry, Stage};
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryState, EntryView,
    FailureCause, Fence, Grant, Ledger, LedgerCapabilities, LedgerStats, MessageId, Page, QueueName, Receipt,
    RemainingLease, Renew, Resolution, ResolveError, StoreError, Token, TokenError, validate,
};

use super::MemoryStore;
use super::state::{MessagePlace, State};

/// The entries, and what has happened to them since the store was opened.
#[derive(Default)]
pub struct Entries {
    map: BTreeMap<EntryId, LedgerEntry>,
    stats: LedgerStats,
}

impl Entries {
    /// As after a restart: claims that are held get a full lease, counters begin again.
    pub fn reopen(&mut self, now_ms: u64) {
        self.stats = LedgerStats::default();
        for entry in self.map.values_mut() {
            let lapsed = entry.lapsed(now_ms);
            *entry = lapsed.unwrap_or_else(|| entry.clone()).after_restart(now_ms);
        }
    }

    pub fn is_in_doubt(&self, id: &EntryId, now_ms: u64) -> bool {
        self.map.get(id).is_some_and(|entry| entry.state(now_ms) == EntryState::InDoubt)
    }

    fn count_stale<T>(&mut self, answer: Result<T, TokenError>) -> Result<T, TokenError> {
        self.stats.stale += u64::from(matches!(answer, Err(TokenError::Stale)));
        answer
    }
}

fn token(fence: Fence) -> Token {
    Token::new(format!("t{fence}")).expect("printable")
}

fn fence_of(token: &Token) -> Result<Fence, TokenError> {
    token.as_str().strip_prefix('t').and_then(|fence| fence.parse().ok()).map(Fence).ok_or(TokenError::Stale)
}

impl State {
    /// Decides a claim. `waited`: it was tried before, and its conflict was counted then.
    fn claim(&mut self, request: &ClaimRequest, waited: bool) -> Result<Claim, ClaimError> {
        request.validate()?;
        let (now_ms, fence) = (self.now_ms, Fence(self.next_fence()));
        let before = self.ledger.map.get(&request.id).map(|entry| entry.fence);
        let claimed = protocol::claim(self.ledger.map.get(&request.id), request, now_ms, || fence);
        let stats = &mut self.ledger.stats;
        match &claimed {
            Ok(ClaimDecision::Granted { entry, takeover }) if before != Some(entry.fence) => {
                stats.granted += 1;
                stats.takeovers += u64::from(*takeover);
            }
            Ok(ClaimDecision::Completed { .. }) => stats.replayed += 1,
            Ok(ClaimDecision::InProgress { .. }) => stats.conflicts += u64::from(!waited),
            Ok(ClaimDecision::InDoubt { .. }) => stats.in_doubt += 1,
            Err(ClaimError::Mismatch) => stats.mismatches += 1,
            Ok(ClaimDecision::Granted { .. }) | Err(_) => {}
        }
        let claimed = claimed?;
        if let Some((queue, receipt)) = &request.delivery {
            self.link(queue, receipt, &request.id, matches!(claimed, ClaimDecision::Granted { .. }));
        }
        Ok(match claimed {
            ClaimDecision::Granted { entry, takeover } => {
                let (fence, view) = (entry.fence, entry.view(request.id.clone(), now_ms));
                self.write(&request.id, Some(entry));
                Claim::Granted(Grant { token: token(fence), fence, lease_ms: view.lease_ms, takeover })
            }
            ClaimDecision::Completed { outcome, at_ms } => Claim::Completed { outcome, at_ms },
            ClaimDecision::InProgress { retry_after_ms } => Claim::InProgress { retry_after_ms },
            ClaimDecision::InDoubt { since_ms } => Claim::InDoubt { since_ms },
        })
    }

    fn renew(&mut self, renew: &Renew) -> Result<RemainingLease, TokenError> {
        let entry = self.ledger.map.get(&renew.id);
        let renewed = fence_of(&renew.token)
            .and_then(|fence| protocol::renew(entry, fence, renew.lease_ms, self.now_ms));
        let entry = self.ledger.count_stale(renewed)?;
        let lease_ms = entry.view(renew.id.clone(), self.now_ms).lease_ms;
        self.write(&renew.id, Some(entry));
        Ok(RemainingLease { lease_ms })
    }

    pub fn end(&mut self, end: &EndClaim) -> Result<(), TokenError> {
        let entry = self.ledger.map.get(&end.id);
        let ended =
            fence_of(&end.token).and_then(|fence| protocol::end(entry, fence, &end.ending, self.now_ms));
        let ended = self.ledger.count_stale(ended)?;
        let completed =
            matches!(&ended, EntryChange::Write(LedgerEntry { stage: Stage::Completed { .. }, .. }));
        self.ledger.stats.completed += u64::from(completed);
        self.apply(&end.id, ended);
        Ok(())
    }

    fn resolve(&mut self, id: &EntryId, resolution: &Resolution) -> Result<(), ResolveError> {
        let (now_ms, fence) = (self.now_ms, Fence(self.next_fence()));
        let ended = protocol::resolve(id, self.ledger.map.get(id), resolution, now_ms, || fence)?;
        self.apply(id, ended);
        Ok(())
    }

    fn apply(&mut self, id: &EntryId, ended: EntryChange) {
        match ended {
            EntryChange::Write(entry) => self.write(id, Some(entry)),
            EntryChange::Delete => self.write(id, None),
            EntryChange::Unchanged => {}
        }
    }

    /// Writes or deletes an entry. If a doubt ends by that, the messages that are parked for it continue.
    fn write(&mut self, id: &EntryId, entry: Option<LedgerEntry>) {
        let now_ms = self.now_ms;
        let in_doubt = |entry: Option<&LedgerEntry>| {
            entry.is_some_and(|entry| entry.state(now_ms) == EntryState::InDoubt)
        };
        let cleared = in_doubt(self.ledger.map.get(id)) && !in_doubt(entry.as_ref());
        match entry {
            Some(entry) => {
                self.fence = self.fence.max(entry.fence.0);
                self.ledger.map.insert(id.clone(), entry);
            }
            None => drop(self.ledger.map.remove(id)),
        }
        for queue in self.queues.values_mut().filter(|_| cleared) {
            let waits = queue.messages.values().filter(|m| {
                matches!(m.parked, Some((FailureCause::InDoubt, _)))
                    && m.place == MessagePlace::Parked
                    && m.needs.contains(id)
            });
            let ids: Vec<MessageId> = waits.map(|m| m.id).collect();
            queue.release(now_ms, &ids);
        }
    }

    /// Keeps an entry as long as the message that a receipt names, which need not be its newest delivery.
    fn link(&mut self, queue: &QueueName, receipt: &Receipt, id: &EntryId, granted: bool) {
        let Some(queue) = self.queues.get_mut(queue) else { return };
        let Some(sequence) = queue.named(receipt) else { return };
        let needs = &mut queue.messages.get_mut(&sequence).expect("named").needs;
        // What was linked when it was sent is linked to another entry only by a claim that is given.
        if granted || needs.is_empty() {
            needs.insert(id.clone());
        }
    }

    /// Before a dead letter or a parked message comes back: it must not meet its recorded failure.
    pub fn clear_failure(&mut self, id: &EntryId) {
        let failed = |entry: &LedgerEntry| entry.state(self.now_ms) == EntryState::Failed;
        if self.ledger.map.get(id).is_some_and(failed) {
            self.ledger.map.remove(id);
        }
    }

    /// Removes entries whose time is over, unless a message needs them.
    pub fn prune(&mut self) {
        let over = |entry: &LedgerEntry| entry.prune_ms().is_some_and(|prune_ms| prune_ms <= self.now_ms);
        let mut ids: Vec<EntryId> =
            self.ledger.map.iter().filter(|(_, entry)| over(entry)).map(|(id, _)| id.clone()).collect();
        let needs = |id: &EntryId| {
            self.queues.values().flat_map(|queue| queue.messages.values()).any(|m| m.needs.contains(id))
        };
        ids.retain(|id| !needs(id));
        for id in &ids {
            self.ledger.map.remove(id);
            self.ledger.stats.pruned += 1;
        }
    }
}

#[async_trait]
impl Ledger for MemoryStore {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        LedgerCapabilities { name: "memory".into(), durable: true, fence: true, may_evict: false }
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        let mut answers: Vec<Option<Result<Claim, ClaimError>>> = vec![None; batch.len()];
        let (mut waited, from_ms) = (false, self.now().now_ms);
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            let mut wake_ms = u64::MAX;
            let now_ms = {
                let mut state = self.now();
                for (request, answer) in batch.iter().zip(&mut answers).filter(|(_, answer)| answer.is_none())
                {
                    let deadline_ms = from_ms.saturating_add(request.wait_ms);
                    match state.claim(request, waited) {
                        Ok(Claim::InProgress { retry_after_ms }) if state.now_ms < deadline_ms => {
                            wake_ms = wake_ms.min(deadline_ms).min(state.now_ms + retry_after_ms);
                        }
                        decided => {
                            *answer = Some(decided);
                            self.changed.notify_waiters();
                        }
                    }
                }
                state.now_ms
            };
            if wake_ms == u64::MAX {
                return Ok(answers.into_iter().flatten().collect());
            }
            waited = true;
            self.wait(changed, wake_ms - now_ms).await;
        }
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        validate::batch("renew", batch.len())?;
        let mut state = self.change();
        Ok(batch.iter().map(|renew| state.renew(renew)).collect())
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        let mut state = self.change();
        Ok(batch.iter().map(|end| state.end(end)).collect())
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        let state = self.now();
        Ok(state.ledger.map.get(id).map(|entry| entry.view(id.clone(), state.now_ms)))
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        validate::page(filter.limit)?;
        let state = self.now();
        let fits = |view: &EntryView| {
            filter.scope.as_ref().is_none_or(|scope| *scope == view.id.scope)
                && filter.state.is_none_or(|state| state == view.state)
                && filter.after.is_none_or(|after| view.fence.0 > after)
        };
        let views = state.ledger.map.iter().map(|(id, entry)| entry.view(id.clone(), state.now_ms));
        let mut items: Vec<_> = views.filter(fits).collect();
        items.sort_by_key(|view| view.fence);
        let more = items.len() > filter.limit;
        items.truncate(filter.limit);
        let next = items.last().filter(|_| more).map(|view| view.fence.0);
        Ok(Page { items, next })
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, _by: &str) -> Result<(), ResolveError> {
        self.change().resolve(id, &resolution)
    }

    async fn forget(&self, id: &EntryId, _by: &str) -> Result<(), ResolveError> {
        let mut state = self.change();
        protocol::forget(id, state.ledger.map.get(id), state.now_ms)?;
        state.write(id, None);
        Ok(())
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        let state = self.now();
        let open = state.ledger.map.values().filter(|entry| matches!(entry.stage, Stage::Processing { .. }));
        let (entries, open) = (state.ledger.map.len() as u64, open.count() as u64);
        Ok(LedgerStats { entries, open, ..state.ledger.stats })
    }
}
