//! A claim under which nothing ran is released, no matter how its answer was lost: with `park` its key would otherwise
//! stay in doubt until an operator decides.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use hapax_claim::{ClaimResponse, Claims, Owners, Timer};
use hapax_conformance::MemoryStore;
use hapax_core::{
    Batch, Claim, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryView, Ledger,
    LedgerCapabilities, LedgerStats, ManualClock, OnDoubt, Owner, Page, RemainingLease, Renew, Resolution,
    ResolveError, StoreError, TokenError,
};
use tokio::sync::Notify;

const LEASE_MS: u64 = 10_000;

/// A ledger on a manual clock. The given numbers of calls take effect but lose their answer.
struct Lossy {
    inner: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    claims_lost: AtomicU32,
    renewals_lost: AtomicU32,
    ends_lost: AtomicU32,
    /// Duration of each claim call.
    claim_takes_ms: u64,
    claimed: Notify,
    /// Claims of these owners lose their answers.
    lost_to: Mutex<Vec<Owner>>,
    /// Claims of these owners do not reach it.
    cut_off: Mutex<Vec<Owner>>,
    /// Number of claims that are answered with an error of the store for this claim alone.
    failing: AtomicU32,
    /// The owner of each claim that was answered.
    answered: Mutex<Vec<Owner>>,
}

fn lossy(claims_lost: u32) -> Lossy {
    let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
    Lossy {
        inner: MemoryStore::new(clock.clone()),
        clock,
        claims_lost: claims_lost.into(),
        renewals_lost: 0.into(),
        ends_lost: 0.into(),
        claim_takes_ms: 0,
        claimed: Notify::new(),
        lost_to: Mutex::default(),
        cut_off: Mutex::default(),
        failing: 0.into(),
        answered: Mutex::default(),
    }
}

fn lose<T>(left: &AtomicU32, answer: T) -> Result<T, StoreError> {
    let lost = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok();
    if lost { Err(StoreError::OutcomeUnknown("told so".into())) } else { Ok(answer) }
}

#[async_trait]
impl Ledger for Lossy {
    fn ledger_capabilities(&self) -> LedgerCapabilities {
        self.inner.ledger_capabilities()
    }

    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError> {
        let owner = batch[0].owner.clone();
        if self.cut_off.lock().unwrap().contains(&owner) {
            return Err(StoreError::Unavailable("told so".into()));
        }
        if let Err(error) = lose(&self.failing, ()) {
            return Ok(batch.iter().map(|_| Err(ClaimError::Store(error.clone()))).collect());
        }
        let inner = self.inner.clone();
        // As a server does it: it goes on when its caller has gone.
        let answer = tokio::spawn(async move { inner.claim(batch).await }).await.unwrap()?;
        self.clock.advance_ms(self.claim_takes_ms);
        self.claimed.notify_one();
        if self.lost_to.lock().unwrap().contains(&owner) {
            return Err(StoreError::OutcomeUnknown("told so".into()));
        }
        let answer = lose(&self.claims_lost, answer)?;
        self.answered.lock().unwrap().push(owner);
        Ok(answer)
    }

    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError> {
        lose(&self.renewals_lost, ())?;
        self.inner.renew(batch).await
    }

    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError> {
        lose(&self.ends_lost, ())?;
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

fn request(key: &str) -> ClaimRequest {
    let id = EntryId::new("shop".parse().unwrap(), key.parse().unwrap());
    let request = ClaimRequest::new(id, Owners::new("test").next(), LEASE_MS);
    ClaimRequest { on_doubt: OnDoubt::Park, ..request }
}

fn claims(ledger: &Arc<Lossy>) -> Claims {
    Claims::new(ledger.clone(), Timer::new(ledger.clock.clone()))
}

/// Advances the clock in small steps while the future waits on it.
async fn with_time<T>(clock: &ManualClock, future: impl Future<Output = T>) -> T {
    let running = async {
        loop {
            clock.advance_ms(20);
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        value = future => value,
        () = running => unreachable!("it runs until the other one ends"),
    }
}

impl Lossy {
    /// Waits until a claim of this owner was answered.
    async fn until_answered(&self, owner: &Owner) {
        let answered = async {
            while !self.answered.lock().unwrap().contains(owner) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let answered = with_time(&self.clock, answered);
        tokio::time::timeout(Duration::from_mins(1), answered).await.expect("it is not asked for again");
    }
}

async fn until_absent(ledger: &Lossy, id: &EntryId) {
    let absent = async {
        while ledger.entry(id).await.unwrap().is_some() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    let given_back = with_time(&ledger.clock, absent);
    tokio::time::timeout(Duration::from_mins(1), given_back).await.expect("it is not given back");
}

#[tokio::test]
async fn a_claim_whose_every_answer_was_lost() {
    let ledger = Arc::new(lossy(6));
    let request = request("order-1");
    let id = request.id.clone();
    let answer = with_time(&ledger.clock, claims(&ledger).claim(vec![request])).await.remove(0);
    assert!(matches!(answer, ClaimResponse::Unavailable(StoreError::OutcomeUnknown(_))), "{answer:?}");
    until_absent(&ledger, &id).await;
}

#[tokio::test]
async fn an_outage_that_outlasts_the_lease() {
    let ledger = Arc::new(lossy(12));
    ledger.ends_lost.store(10, Ordering::SeqCst);
    let request = request("order-1");
    let id = request.id.clone();
    with_time(&ledger.clock, claims(&ledger).claim(vec![request.clone()])).await;
    ledger.clock.advance_ms(2 * LEASE_MS);

    // Another claim of this process must not mistake the remains of the first for a doubt.
    let other = ClaimRequest { owner: Owners::new("test").next(), ..request };
    let mut met = Vec::new();
    while ledger.entry(&id).await.unwrap().is_some() {
        let answer = with_time(&ledger.clock, claims(&ledger).claim(vec![other.clone()])).await.remove(0);
        let granted = matches!(answer, ClaimResponse::Granted(_));
        met.push(answer);
        if granted {
            break;
        }
    }
    let doubts = met.iter().filter(|answer| matches!(answer, ClaimResponse::InDoubt)).count();
    let waits = met.iter().filter(|answer| matches!(answer, ClaimResponse::InProgress { .. })).count();
    assert!(doubts == 0 && waits > 0, "{doubts} doubts, {waits} times in progress");
}

#[tokio::test]
async fn a_claim_that_is_dropped_while_it_is_asked_for() {
    let ledger = Arc::new(lossy(u32::MAX));
    let request = request("order-1");
    let id = request.id.clone();
    let claims = claims(&ledger);
    tokio::select! {
        answers = claims.claim(vec![request]) => panic!("{answers:?}"),
        () = ledger.claimed.notified() => {}
    }
    assert!(ledger.entry(&id).await.unwrap().is_some(), "it was claimed");
    ledger.claims_lost.store(0, Ordering::SeqCst);
    until_absent(&ledger, &id).await;
}

#[tokio::test]
async fn a_grant_that_came_late_and_cannot_be_confirmed() {
    let ledger = Arc::new(Lossy { claim_takes_ms: LEASE_MS / 2, ..lossy(0) });
    ledger.renewals_lost.store(1, Ordering::SeqCst);
    ledger.ends_lost.store(3, Ordering::SeqCst);
    let request = request("order-1");
    let id = request.id.clone();
    let answer = claims(&ledger).claim(vec![request]).await.remove(0);
    assert!(
        matches!(&answer, ClaimResponse::Unconfirmed(error) if error.to_string().contains("confirmed")),
        "{answer:?}"
    );
    until_absent(&ledger, &id).await;
}

#[tokio::test]
async fn a_grant_that_came_late_counts_from_its_confirmation() {
    let ledger = Arc::new(Lossy { claim_takes_ms: LEASE_MS / 2, ..lossy(0) });
    let answer = claims(&ledger).claim(vec![request("order-1")]).await.remove(0);
    let ClaimResponse::Granted(granted) = answer else { panic!("{answer:?}") };
    assert_eq!((granted.asked_us, granted.grant.lease_ms), (LEASE_MS / 2 * 1000, LEASE_MS));
    let quick = Arc::new(Lossy { claim_takes_ms: LEASE_MS / 5, ..lossy(0) });
    let answer = claims(&quick).claim(vec![request("order-1")]).await.remove(0);
    let ClaimResponse::Granted(granted) = answer else { panic!("{answer:?}") };
    assert_eq!(granted.asked_us, 0, "it came in time");
}

#[tokio::test]
async fn a_lost_answer_is_the_same_claim() {
    let ledger = Arc::new(lossy(3));
    let answer = with_time(&ledger.clock, claims(&ledger).claim(vec![request("order-1")])).await.remove(0);
    let ClaimResponse::Granted(granted) = answer else { panic!("{answer:?}") };
    assert!(!granted.grant.takeover);
    assert_eq!(ledger.claims_lost.load(Ordering::SeqCst), 0, "three answers were lost");
    assert_eq!(ledger.ledger_stats().await.unwrap().granted, 1, "asked four times, one claim");
}

/// Two claims of one key are given back; the one that owes nothing is done first.
#[tokio::test]
async fn two_claims_of_one_key_that_are_given_back() {
    let ledger = Arc::new(lossy(0));
    let first = request("order-1");
    let again = || ClaimRequest { owner: Owners::new("test").next(), ..first.clone() };
    let (second, id) = (again(), first.id.clone());
    *ledger.lost_to.lock().unwrap() = vec![first.owner.clone(), second.owner.clone()];
    for request in [first.clone(), second.clone()] {
        let answer = with_time(&ledger.clock, claims(&ledger).claim(vec![request])).await.remove(0);
        assert!(matches!(answer, ClaimResponse::Unavailable(_)), "{answer:?}");
    }
    ledger.cut_off.lock().unwrap().push(first.owner.clone());
    ledger.clock.advance_ms(2 * LEASE_MS);
    ledger.lost_to.lock().unwrap().clear();
    ledger.until_answered(&second.owner).await;
    for _ in 0..50 {
        let answer = claims(&ledger).claim(vec![again()]).await.remove(0);
        assert!(
            matches!(answer, ClaimResponse::InProgress { .. }),
            "{answer:?}: the first one is still owed"
        );
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    ledger.cut_off.lock().unwrap().clear();
    until_absent(&ledger, &id).await;
    let answer = claims(&ledger).claim(vec![again()]).await.remove(0);
    assert!(matches!(answer, ClaimResponse::Granted(_)), "{answer:?}");
}

/// A server goes on waiting for a caller that has gone, and grants the claim when the holder has ended.
#[tokio::test]
async fn a_claim_that_is_dropped_while_it_waits_for_its_holder() {
    for on_doubt in [OnDoubt::Park, OnDoubt::Retry] {
        let ledger = Arc::new(lossy(0));
        let held = ClaimRequest { on_doubt, ..request("order-1") };
        let id = held.id.clone();
        let answer = claims(&ledger).claim(vec![held.clone()]).await.remove(0);
        let ClaimResponse::Granted(holder) = answer else { panic!("{answer:?}") };
        let owner = Owners::new("test").next();
        let waits = ClaimRequest { owner: owner.clone(), wait_ms: 5_000, ..held };
        let claims = claims(&ledger);
        tokio::select! {
            biased;
            answers = claims.claim(vec![waits]) => panic!("{answers:?}"),
            () = tokio::time::sleep(Duration::from_millis(20)) => {}
        }
        // The first attempt to give it back finds the holder at work.
        ledger.until_answered(&owner).await;
        drop(holder);
        let granted = async || {
            let entry = ledger.entry(&id).await.unwrap();
            entry.is_some_and(|entry| entry.owner == owner)
        };
        for _ in 0..1_000 {
            if granted().await {
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        let given_back = tokio::time::timeout(Duration::from_secs(15), until_absent(&ledger, &id)).await;
        assert!(given_back.is_ok(), "{on_doubt:?}: {:?}", ledger.entry(&id).await);
    }
}

/// The store answers the batch, but cannot tell about this claim.
#[tokio::test]
async fn a_claim_that_the_store_cannot_answer_when_it_is_given_back() {
    let ledger = Arc::new(lossy(6));
    let request = request("order-1");
    let id = request.id.clone();
    let asking = claims(&ledger);
    ledger.lost_to.lock().unwrap().push(request.owner.clone());
    let answer = with_time(&ledger.clock, asking.claim(vec![request])).await.remove(0);
    assert!(matches!(answer, ClaimResponse::Unavailable(_)), "{answer:?}");
    ledger.failing.store(3, Ordering::SeqCst);
    ledger.claims_lost.store(0, Ordering::SeqCst);
    ledger.lost_to.lock().unwrap().clear();
    until_absent(&ledger, &id).await;
    assert_eq!(ledger.failing.load(Ordering::SeqCst), 0, "it was asked for until the store could tell");
}
