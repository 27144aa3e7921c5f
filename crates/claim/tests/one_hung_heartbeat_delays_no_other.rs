//! A renewal that the ledger does not answer costs the claims that it is about, not those that are held beside them. All
//! on a clock that is moved by hand.

use std::collections::HashSet;
use std::future::pending;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax_claim::{ClaimResponse, Claims, HeldClaim, LeaseKeeper, Owners, Timer};
use hapax_conformance::MemoryStore;
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, ManualClock, Page, RemainingLease, Renew, Resolution, ResolveError,
    StoreError, TokenError,
};

const LEASE_MS: u64 = 12_000;

/// A ledger that never answers a renewal with one of these keys in it.
struct Hanging {
    inner: Arc<MemoryStore>,
    stuck: Mutex<HashSet<String>>,
    under_way: AtomicUsize,
    under_way_max: AtomicUsize,
}

/// Counts a call as under way until it is answered or given up.
struct UnderWay<'a>(&'a AtomicUsize);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[async_trait]
impl Ledger for Hanging {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.inner.ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        self.inner.claim(batch).await
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        let now = self.under_way.fetch_add(1, Ordering::SeqCst) + 1;
        self.under_way_max.fetch_max(now, Ordering::SeqCst);
        let _under_way = UnderWay(&self.under_way);
        let hangs = {
            let stuck = self.stuck.lock().unwrap();
            batch.iter().any(|renew| stuck.contains(renew.id.key.as_str()))
        };
        if hangs {
            pending::<()>().await;
        }
        self.inner.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        self.inner.end(batch).await
    }

    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError> {
        self.inner.entry(id).await
    }

    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError> {
        self.inner.entries(filter).await
    }

    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError> {
        self.inner.resolve(id, resolution, by).await
    }

    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError> {
        self.inner.forget(id, by).await
    }

    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError> {
        self.inner.ledger_stats().await
    }
}

struct Rig {
    ledger: Arc<Hanging>,
    clock: Arc<ManualClock>,
    timer: Timer,
    claims: Claims,
    holder: Arc<LeaseKeeper>,
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let ledger = Arc::new(Hanging {
            inner: MemoryStore::new(clock.clone()),
            stuck: Mutex::default(),
            under_way: AtomicUsize::new(0),
            under_way_max: AtomicUsize::new(0),
        });
        let timer = Timer::new(clock.clone());
        let claims = Claims::new(ledger.clone(), timer.clone());
        let holder = LeaseKeeper::new(None, Some(ledger.clone()), timer.clone(), Arc::new(())).unwrap();
        Self { ledger, clock, timer, claims, holder }
    }

    async fn hold(&self, key: &str) -> HeldClaim {
        let id = EntryId::new("shop".parse().unwrap(), key.parse().unwrap());
        let request = ClaimRequest::new(id, Owners::new("test").next(), LEASE_MS);
        let answer = self.claims.claim(vec![request]).await.remove(0);
        let ClaimResponse::Granted(granted) = answer else { panic!("{answer:?}") };
        self.claims.hold(&self.holder, granted, LEASE_MS)
    }

    fn sticks(&self, keys: impl IntoIterator<Item = String>) {
        self.ledger.stuck.lock().unwrap().extend(keys);
    }

    /// Lets time pass in small steps. After each of them, what does not hang is renewed before its lease is nearly over.
    async fn pass(&self, held: &[HeldClaim], ms: u64) {
        let step_ms = LEASE_MS / 48;
        for _ in 0..ms / step_ms {
            self.clock.advance_ms(step_ms);
            let now_us = self.timer.now_us();
            for claim in held {
                let hangs = self.ledger.stuck.lock().unwrap().contains(claim.id().key.as_str());
                let lease = claim.lease();
                // The heartbeat has seen the new time, and what does not hang is not nearly over.
                let seen = || lease.stop().is_some() || lease.renew_at_us() > now_us;
                let kept = || hangs || lease.until_us() >= now_us + LEASE_MS * 1000 / 12;
                let waiting = async {
                    while !(seen() && kept()) {
                        tokio::time::sleep(Duration::from_millis(1)).await;
                    }
                };
                let waited = tokio::time::timeout(Duration::from_secs(20), waiting).await;
                waited.unwrap_or_else(|_| panic!("{} is not renewed", claim.id()));
            }
        }
    }
}

fn lost(held: &[HeldClaim]) -> Vec<String> {
    let lost = held.iter().filter(|claim| claim.lease().stop().is_some());
    lost.map(|claim| claim.id().key.to_string()).collect()
}

#[tokio::test]
async fn for_claims_that_are_due_together() {
    let rig = Rig::new();
    rig.sticks(["order-7".to_owned()]);
    let mut held = Vec::new();
    for number in 0..1_000 {
        held.push(rig.hold(&format!("order-{number}")).await);
    }
    rig.pass(&held, 3 * LEASE_MS).await;
    assert_eq!(lost(&held), ["order-7"]);
}

#[tokio::test]
async fn for_claims_that_are_due_at_other_times() {
    let rig = Rig::new();
    rig.sticks((0..6).map(|number| format!("order-{}", 3 * number)));
    let mut held = Vec::new();
    for number in 0..18 {
        held.push(rig.hold(&format!("order-{number}")).await);
        rig.pass(&held, LEASE_MS / 12).await;
    }
    rig.pass(&held, 2 * LEASE_MS).await;
    assert_eq!(lost(&held), ["order-0", "order-3", "order-6", "order-9", "order-12", "order-15"]);
}

#[tokio::test]
async fn heartbeat_calls_in_flight_are_bounded() {
    let rig = Rig::new();
    let mut held = Vec::new();
    for number in 0..200 {
        rig.sticks([format!("order-{number}")]);
        held.push(rig.hold(&format!("order-{number}")).await);
        rig.clock.advance_ms(LEASE_MS / 200);
    }
    for _ in 0..48 {
        rig.clock.advance_ms(LEASE_MS / 24);
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    let all_lost = async {
        while lost(&held).len() < 200 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), all_lost).await.expect("all are lost");
    let most = rig.ledger.under_way_max.load(Ordering::SeqCst);
    assert!((2..=16).contains(&most), "{most} calls at once");
    // What hung is over: a new claim is kept.
    rig.ledger.stuck.lock().unwrap().clear();
    let fresh = [rig.hold("fresh").await];
    rig.pass(&fresh, 3 * LEASE_MS).await;
    assert!(lost(&fresh).is_empty());
}
