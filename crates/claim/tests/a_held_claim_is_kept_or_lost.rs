//! A held claim is renewed on a separate thread while its holder works; when the claim is lost, the holder is told. All
//! tests use a manual clock: none sleeps for a lease.

use std::sync::Arc;
use std::time::Duration;

use hapax_claim::{ClaimResponse, Claims, EndError, HeldClaim, LeaseKeeper, Owners, StopReason, Timer};
use hapax_conformance::MemoryStore;
use hapax_core::{
    ClaimEnding, ClaimRequest, EntryId, EntryState, Json, Ledger as _, ManualClock, OnDoubt, RecordedOutcome,
};

const LEASE_MS: u64 = 30_000;

struct Rig {
    ledger: Arc<MemoryStore>,
    clock: Arc<ManualClock>,
    claims: Claims,
    holder: Arc<LeaseKeeper>,
}

fn id() -> EntryId {
    EntryId::new("shop".parse().unwrap(), "order-1".parse().unwrap())
}

impl Rig {
    fn new() -> Self {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        let ledger = MemoryStore::new(clock.clone());
        let timer = Timer::new(clock.clone());
        let claims = Claims::new(ledger.clone(), timer.clone());
        let holder = LeaseKeeper::new(None, Some(ledger.clone()), timer, Arc::new(())).unwrap();
        Self { ledger, clock, claims, holder }
    }

    async fn hold(&self, on_doubt: OnDoubt) -> HeldClaim {
        let request = ClaimRequest::new(id(), Owners::new("test").next(), LEASE_MS);
        let answer = self.claims.claim(vec![ClaimRequest { on_doubt, ..request }]).await.remove(0);
        let ClaimResponse::Granted(granted) = answer else { panic!("{answer:?}") };
        self.claims.hold(&self.holder, granted, LEASE_MS)
    }

    async fn left_ms(&self) -> u64 {
        self.ledger.entry(&id()).await.unwrap().unwrap().lease_ms
    }
}

async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let holding = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), holding).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn it_is_renewed_for_as_long_as_it_is_held() {
    let rig = Rig::new();
    let held = rig.hold(OnDoubt::Park).await;
    for _ in 0..20 {
        rig.clock.advance_ms(LEASE_MS / 2);
        until("it is renewed", async || rig.left_ms().await == LEASE_MS).await;
    }
    assert_eq!(held.lease().stop(), None);
    let outcome = RecordedOutcome::done(Json::of("paid").unwrap());
    held.end(ClaimEnding::Complete { outcome, ttl_ms: 1_000_000 }).await.unwrap();
    let entry = rig.ledger.entry(&id()).await.unwrap().unwrap();
    assert_eq!((entry.state, entry.takeovers), (EntryState::Completed, 0));
}

#[tokio::test]
async fn it_is_kept_while_its_own_thread_is_blocked() {
    let rig = Rig::new();
    let held = rig.hold(OnDoubt::Park).await;
    // The runtime has no other thread than this one, so only the heartbeat thread can renew.
    rig.clock.advance_ms(LEASE_MS / 2);
    let deadline = std::time::Instant::now() + Duration::from_mins(1);
    while held.lease().until_us() < (LEASE_MS + LEASE_MS / 2) * 1000 {
        assert!(std::time::Instant::now() < deadline, "it is not renewed");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[tokio::test]
async fn a_holder_that_slept_past_its_lease_is_told() {
    let rig = Rig::new();
    let held = rig.hold(OnDoubt::Retry).await;
    rig.clock.advance_ms(2 * LEASE_MS);
    tokio::time::timeout(Duration::from_mins(1), held.lost()).await.expect("it is told");
    assert_eq!(held.lease().stop(), Some(StopReason::Lost));
    // Another holder takes over; the end of the first claim is refused.
    let other = rig.hold(OnDoubt::Retry).await;
    assert!(other.is_takeover() && other.fence() > held.fence());
    let refused = held.end(ClaimEnding::Release).await.unwrap_err();
    assert!(matches!(refused, EndError::Superseded(_)), "{refused}");
    other.end(ClaimEnding::Release).await.unwrap();
}

#[tokio::test]
async fn a_claim_that_is_dropped_lapses() {
    let rig = Rig::new();
    drop(rig.hold(OnDoubt::Park).await);
    rig.clock.advance_ms(LEASE_MS / 2);
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert_eq!(rig.left_ms().await, LEASE_MS / 2, "no heartbeat renews it");
    rig.clock.advance_ms(LEASE_MS);
    assert_eq!(rig.ledger.entry(&id()).await.unwrap().unwrap().state, EntryState::InDoubt);
}
