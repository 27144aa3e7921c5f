//! Implements the ledger: the writer thread answers operations, the reading thread listings.

use std::sync::PoisonError;

use async_trait::async_trait;
use hapax_core::ledger::protocol::{ClaimDecision, Stage};
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Grant, Ledger,
    LedgerCapabilities, LedgerStats, Page, RemainingLease, Renew, Resolution, ResolveError, StoreError,
    TokenError, validate,
};
use tokio::sync::oneshot;

use crate::claims::{ClaimOp, ClaimReply, EndOp, LedgerOp, RenewOp};
use crate::writer::Op;
use crate::{Embedded, StoreState, storage};

impl StoreState {
    fn claimed(&self, hash: u128, claimed: ClaimReply) -> Result<Claim, ClaimError> {
        let (claimed, now_ms) = claimed?;
        Ok(match claimed {
            ClaimDecision::Granted { entry, takeover } => {
                let Stage::Processing { until_ms, .. } = entry.stage else {
                    unreachable!("a granted entry is held")
                };
                Claim::Granted(Grant {
                    token: self.codec.token(hash, entry.fence.0),
                    fence: entry.fence,
                    lease_ms: until_ms - now_ms,
                    takeover,
                })
            }
            ClaimDecision::Completed { outcome, at_ms } => Claim::Completed { outcome, at_ms },
            ClaimDecision::InProgress { retry_after_ms } => Claim::InProgress { retry_after_ms },
            ClaimDecision::InDoubt { since_ms } => Claim::InDoubt { since_ms },
        })
    }

    async fn ask<T>(&self, op: impl FnOnce(crate::writer::Reply<T>) -> LedgerOp) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.op_queue.push(Op::Ledger(op(reply)))?;
        Self::answer(answer).await
    }
}

#[async_trait]
impl Ledger for Embedded {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        LedgerCapabilities { name: "embedded".into(), durable: true, fence: true, may_evict: false }
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        validate::batch("claims", batch.len())?;
        let asked = self.state.time.now();
        let (mut ops, mut answers) = (Vec::with_capacity(batch.len()), Vec::with_capacity(batch.len()));
        for request in batch {
            if let Err(error) = request.validate() {
                answers.push(Err(error));
                continue;
            }
            let hash = request.id.hash();
            let delivery = request.delivery.as_ref().and_then(|(_, receipt)| self.state.codec.open(receipt));
            let (reply, answer) = oneshot::channel();
            let claiming = Box::new(ClaimOp { hash, request, delivery });
            ops.push(Op::Ledger(LedgerOp::Claim { claiming, asked, reply }));
            answers.push(Ok((hash, answer)));
        }
        self.state.op_queue.push_all(ops)?;
        let mut claims = Vec::with_capacity(answers.len());
        for answer in answers {
            claims.push(match answer {
                Ok((hash, answer)) => self.state.claimed(hash, StoreState::answer(answer).await?),
                Err(error) => Err(error),
            });
        }
        Ok(claims)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        validate::batch("renew", batch.len())?;
        let batch = batch.into_iter().map(|renew| RenewOp::new(&self.state.codec, renew)).collect();
        self.state.ask(|reply| LedgerOp::Renew { batch, reply }).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        validate::batch("end", batch.len())?;
        let batch = batch.into_iter().map(|end| EndOp::new(&self.state.codec, end)).collect();
        self.state.ask(|reply| LedgerOp::End { batch, reply }).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        let id = id.clone();
        self.state.ask(|reply| LedgerOp::Read { id, reply }).await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        validate::page(filter.limit)?;
        let (reply, answer) = oneshot::channel();
        let now_ms = self.state.time.now().ms();
        let (wanted, state) = (filter.clone(), filter.state);
        let job = Box::new(move |db: &rusqlite::Connection| {
            let page = storage::ledger::page(db, &wanted, now_ms);
            let failed = |error| StoreError::Unavailable(format!("a read failed ({error})"));
            let _ = reply.send(page.map_err(failed));
        });
        self.threads.reader.lock().unwrap_or_else(PoisonError::into_inner).submit(job)?;
        let page = StoreState::answer(answer).await?;
        // Memory knows the current leases of open entries; the rows do not have the leases renewed at the opening of
        // the store.
        let hashes: Vec<_> = page.items.iter().map(|row| row.id.hash()).collect();
        let found = self.state.job(move |engine, now| (engine.open_entries(now, &hashes), now.ms())).await?;
        let (open, now_ms) = found;
        let rows = page.items.into_iter().zip(open);
        let views = rows.map(|(row, open)| open.unwrap_or(row.entry).view(row.id, now_ms));
        let items = views.filter(|view| state.is_none_or(|state| view.state == state)).collect();
        Ok(Page { items, next: page.next })
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        let (id, by) = (id.clone(), by.to_owned());
        self.state.ask(|reply| LedgerOp::Resolve { id, resolution, by, reply }).await?
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        let (id, by) = (id.clone(), by.to_owned());
        self.state.ask(|reply| LedgerOp::Forget { id, by, reply }).await?
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.state.job(|engine, _| engine.ledger_stats()).await
    }
}
