//! Helpers for the ledger cases.

use std::future::Future;
use std::panic::Location;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryFilter, EntryId, EntryState, EntryView,
    Fingerprint, Grant, IdempotencyKey, Json, Ledger, LedgerStats, OnDoubt, Owner, RecordedOutcome, Renew,
    Resolution, ResolveError, Scope, StoreError, Token, TokenError,
};
use tokio::task::JoinHandle;

use crate::trial::{LEASE_MS, SLACK_MS, Trial};

/// A lease, in ms, that does not expire while a case runs.
pub(crate) const LONG_LEASE_MS: u64 = 600_000;

/// How long outcomes are stored, in ms, if the case does not depend on it.
pub(crate) const TTL_MS: u64 = 3_600_000;

pub(crate) fn id(key: &str) -> EntryId {
    EntryId::new(Scope::new("suite").expect("a scope"), IdempotencyKey::new(key).expect("a key"))
}

pub(crate) fn owner(name: &str) -> Owner {
    Owner::new(name).expect("an owner")
}

/// The fingerprint of a request, as the request carries it.
#[allow(clippy::unnecessary_wraps, reason = "a request may carry none")]
pub(crate) fn fingerprint(text: &str) -> Option<Fingerprint> {
    Some(Fingerprint::new(text).expect("a fingerprint"))
}

/// A claim that does not wait, takes over expired claims, and does not expire itself.
pub(crate) fn ask(id: &EntryId, by: &str) -> ClaimRequest {
    ClaimRequest::new(id.clone(), owner(by), LONG_LEASE_MS)
}

/// A claim that expires after the suite's lease.
pub(crate) fn brief(id: &EntryId, by: &str) -> ClaimRequest {
    ClaimRequest { lease_ms: LEASE_MS, ..ask(id, by) }
}

/// A claim that does not take over expired claims.
pub(crate) fn parking(id: &EntryId, by: &str) -> ClaimRequest {
    ClaimRequest { on_doubt: OnDoubt::Park, ..ask(id, by) }
}

/// A claim that waits the maximum time.
pub(crate) fn waiting(id: &EntryId, by: &str) -> ClaimRequest {
    ClaimRequest { wait_ms: 20_000, ..ask(id, by) }
}

pub(crate) fn json(text: &str) -> Json {
    Json::of(text).expect("a JSON text")
}

pub(crate) fn done(text: &str) -> RecordedOutcome {
    RecordedOutcome::done(json(text))
}

pub(crate) fn failed(text: &str) -> RecordedOutcome {
    RecordedOutcome::failed(json(text))
}

pub(crate) fn complete(outcome: &RecordedOutcome) -> ClaimEnding {
    ClaimEnding::Complete { outcome: outcome.clone(), ttl_ms: TTL_MS }
}

/// The end of a claim.
pub(crate) fn ends(id: &EntryId, token: &Token, ending: ClaimEnding) -> EndClaim {
    EndClaim { id: id.clone(), token: token.clone(), ending }
}

pub(crate) fn happened(outcome: &RecordedOutcome) -> Resolution {
    Resolution::Completed { outcome: outcome.clone(), ttl_ms: TTL_MS }
}

/// The outcome that a claim replays.
pub(crate) fn replayed(claim: &Claim) -> Option<&RecordedOutcome> {
    match claim {
        Claim::Completed { outcome, .. } => Some(outcome),
        _ => None,
    }
}

/// An entry without its time-dependent fields.
pub(crate) fn at_rest(view: Option<EntryView>) -> Option<EntryView> {
    view.map(|view| EntryView { lease_ms: 0, ..view })
}

impl Trial {
    pub(crate) fn ledger(&self) -> Arc<dyn Ledger> {
        self.harness.ledger().expect("the harness has a ledger: implement Harness::ledger")
    }

    // Claiming.

    pub(crate) async fn claim_batch(&self, batch: Vec<ClaimRequest>) -> Vec<Result<Claim, ClaimError>> {
        let count = batch.len();
        let answers = self.within("claim", self.ledger().claim(batch)).await.expect("claim");
        assert_eq!(answers.len(), count, "one answer per claim");
        answers
    }

    pub(crate) async fn try_claim(&self, request: ClaimRequest) -> Result<Claim, ClaimError> {
        self.claim_batch(vec![request]).await.remove(0)
    }

    pub(crate) async fn claim(&self, request: ClaimRequest) -> Claim {
        self.try_claim(request).await.expect("the claim is acceptable")
    }

    /// Claims an available key.
    #[track_caller]
    pub(crate) fn grant(&self, request: ClaimRequest) -> impl Future<Output = Grant> + Send {
        let at = Location::caller();
        async move {
            let id = request.id.clone();
            match self.claim(request).await {
                Claim::Granted(grant) => grant,
                other => panic!("{}: {id} can be claimed, got {other:?} (at {at})", self.case),
            }
        }
    }

    /// Checks a claim's lease, as exactly as the clock allows.
    #[track_caller]
    pub(crate) fn lasts(&self, lease_ms: u64, expected_ms: u64) {
        let least = if self.exact() { expected_ms } else { expected_ms.saturating_sub(SLACK_MS) };
        let fits = (least..=expected_ms).contains(&lease_ms);
        assert!(fits, "{}: {lease_ms} ms are left, not {expected_ms}", self.case);
    }

    /// Checks that another owner holds the key for this long.
    #[track_caller]
    pub(crate) fn busy(&self, claim: &Claim, expected_ms: u64) {
        match claim {
            Claim::InProgress { retry_after_ms } => self.lasts(*retry_after_ms, expected_ms),
            other => panic!("{}: someone else holds it, got {other:?}", self.case),
        }
    }

    // Renewing and ending.

    pub(crate) async fn renew(&self, id: &EntryId, token: &Token, lease_ms: u64) -> Result<u64, TokenError> {
        let renew = Renew { id: id.clone(), token: token.clone(), lease_ms };
        let mut answers = self.within("renew", self.ledger().renew(vec![renew])).await.expect("renew");
        assert_eq!(answers.len(), 1, "one answer per renewal");
        answers.remove(0).map(|remaining| remaining.lease_ms)
    }

    pub(crate) async fn end(
        &self,
        id: &EntryId,
        token: &Token,
        ending: ClaimEnding,
    ) -> Result<(), TokenError> {
        let end = ends(id, token, ending);
        let mut answers = self.within("end", self.ledger().end(vec![end])).await.expect("end");
        assert_eq!(answers.len(), 1, "one answer per end");
        answers.remove(0)
    }

    /// Claims a key and completes it.
    pub(crate) async fn completed(&self, id: &EntryId, outcome: &RecordedOutcome) -> Grant {
        let grant = self.grant(ask(id, "worker")).await;
        self.end(id, &grant.token, complete(outcome)).await.expect("the claim can be completed");
        grant
    }

    /// Lets a claim expire.
    pub(crate) async fn lapsed(&self, id: &EntryId, by: &str) -> Grant {
        let grant = self.grant(brief(id, by)).await;
        self.pass(LEASE_MS).await;
        grant
    }

    // Operating.

    pub(crate) async fn entry(&self, id: &EntryId) -> Option<EntryView> {
        self.within("entry", self.ledger().entry(id)).await.expect("entry")
    }

    pub(crate) async fn state(&self, id: &EntryId) -> Option<EntryState> {
        self.entry(id).await.map(|view| view.state)
    }

    pub(crate) async fn resolve(&self, id: &EntryId, as_: Resolution) -> Result<(), ResolveError> {
        self.within("resolve", self.ledger().resolve(id, as_, "conformance")).await
    }

    pub(crate) async fn forget(&self, id: &EntryId) -> Result<(), ResolveError> {
        self.within("forget", self.ledger().forget(id, "conformance")).await
    }

    pub(crate) async fn ledger_stats(&self) -> LedgerStats {
        self.within("ledger_stats", self.ledger().ledger_stats()).await.expect("ledger_stats")
    }

    /// All entries that match a filter, read in pages of its size.
    pub(crate) async fn entries(&self, filter: EntryFilter) -> Vec<EntryView> {
        let (mut all, mut after) = (Vec::new(), None);
        loop {
            let page = EntryFilter { after, ..filter.clone() };
            let page = self.within("entries", self.ledger().entries(page)).await.expect("entries");
            assert!(page.items.len() <= filter.limit, "{} entries on a page", page.items.len());
            all.extend(page.items);
            after = page.next;
            if after.is_none() {
                return all;
            }
        }
    }

    /// Waits until an entry is gone, which must happen after some time.
    #[track_caller]
    pub(crate) fn vanishes(&self, id: &EntryId) -> impl Future<Output = ()> + Send {
        let (at, id) = (Location::caller(), id.clone());
        async move {
            let start = Instant::now();
            while let Some(view) = self.entry(&id).await {
                assert!(start.elapsed() < self.timeout(), "{}: still there: {view:?} (at {at})", self.case);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
    }

    // Waiting.

    /// Starts a waiting claim, and lets it reach the ledger.
    pub(crate) async fn claim_waiting(&self, request: ClaimRequest) -> WaitingClaim {
        let ledger = self.ledger();
        let task = tokio::spawn(async move { ledger.claim(vec![request]).await });
        // The runtime has one thread: after a yield the new task has been polled.
        for _ in 0..3 {
            tokio::task::yield_now().await;
        }
        // A ledger may process the claim on its own thread; it answers later requests later, so this waits for the
        // claim.
        self.ledger_stats().await;
        WaitingClaim { task }
    }

    /// The result of a waiting claim.
    #[track_caller]
    pub(crate) fn answered(&self, waiting: WaitingClaim) -> impl Future<Output = Claim> + Send {
        let answer = self.within("a waiting claim", waiting.task);
        async move {
            let mut answers = answer.await.expect("the claim was not aborted").expect("claim");
            answers.remove(0).expect("the claim is acceptable")
        }
    }
}

/// A claim that waits in its own task.
pub(crate) struct WaitingClaim {
    task: JoinHandle<Result<Vec<Result<Claim, ClaimError>>, StoreError>>,
}

impl WaitingClaim {
    pub(crate) fn is_over(&self) -> bool {
        self.task.is_finished()
    }
}
