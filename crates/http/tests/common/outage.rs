//! A ledger that the test can make unavailable: the real one behind a switch.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use async_trait::async_trait;
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, Page, RemainingLease, Renew, Resolution, ResolveError, StoreError,
    TokenError,
};

/// A ledger behind a switch.
pub struct SwitchedLedger {
    inner: Arc<dyn Ledger>,
    down: AtomicBool,
    /// Number of claims whose result is to be lost after the claim was made.
    lose_claims: AtomicUsize,
    /// Number of requested claims.
    claims: AtomicUsize,
    renews_fail: AtomicBool,
}

impl SwitchedLedger {
    pub fn new(inner: Arc<dyn Ledger>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            down: AtomicBool::new(false),
            lose_claims: AtomicUsize::new(0),
            claims: AtomicUsize::new(0),
            renews_fail: AtomicBool::new(false),
        })
    }

    pub fn down(&self, down: bool) {
        self.down.store(down, Ordering::SeqCst);
    }

    pub fn lose_claims(&self, count: usize) {
        self.lose_claims.store(count, Ordering::SeqCst);
    }

    pub fn claims(&self) -> usize {
        self.claims.load(Ordering::SeqCst)
    }

    pub fn renews_fail(&self, fail: bool) {
        self.renews_fail.store(fail, Ordering::SeqCst);
    }

    fn up(&self) -> Result<&dyn Ledger, StoreError> {
        if self.down.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable("switched off".into()));
        }
        Ok(&*self.inner)
    }
}

#[async_trait]
impl Ledger for SwitchedLedger {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.inner.ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        self.claims.fetch_add(1, Ordering::SeqCst);
        let claims = self.up()?.claim(batch).await?;
        let lose = |left: usize| left.checked_sub(1);
        if self.lose_claims.fetch_update(Ordering::SeqCst, Ordering::SeqCst, lose).is_ok() {
            return Err(StoreError::OutcomeUnknown("the answer got lost".into()));
        }
        Ok(claims)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        if self.renews_fail.load(Ordering::SeqCst) {
            return Err(StoreError::Unavailable("no renewals".into()));
        }
        self.up()?.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        self.up()?.end(batch).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        self.up()?.entry(id).await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        self.up()?.entries(filter).await
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.up()?.resolve(id, resolution, by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.up()?.forget(id, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.up()?.ledger_stats().await
    }
}
