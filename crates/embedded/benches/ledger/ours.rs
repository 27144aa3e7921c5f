//! Hapax in process: one task per caller; each claims a key and, if granted, completes it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hapax_core::ledger::TTL_MS_DEFAULT;
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, Fingerprint, Grant, Ledger, Owner, RecordedOutcome,
};
use hapax_embedded::{Embedded, Options};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::{Contestant, Kind, OUTCOME, SCOPE, Turn, fingerprint, key, owner, random_below};

const LEASE_MS: u64 = 30_000;

pub struct Ours<'a> {
    runtime: &'a Runtime,
    shared: Arc<StoreState>,
}

struct StoreState {
    store: Embedded,
    outcome: RecordedOutcome,
    /// Keys below this one have been claimed, and were completed before the turn began.
    next: AtomicU64,
}

fn request(number: u64) -> ClaimRequest {
    let id = EntryId::new(SCOPE.parse().expect("a scope"), key(number).parse().expect("a key"));
    let fingerprint = Fingerprint::new(fingerprint(number)).expect("a fingerprint");
    let owner = Owner::new(owner(number)).expect("an owner");
    ClaimRequest { fingerprint: Some(fingerprint), ..ClaimRequest::new(id, owner, LEASE_MS) }
}

impl StoreState {
    fn complete(&self, id: EntryId, grant: Grant) -> EndClaim {
        let ending = ClaimEnding::Complete { outcome: self.outcome.clone(), ttl_ms: TTL_MS_DEFAULT };
        EndClaim { id, token: grant.token, ending }
    }

    async fn claim_and_complete(&self) -> (Duration, Duration) {
        let request = request(self.next.fetch_add(1, Ordering::Relaxed));
        let id = request.id.clone();
        let start = Instant::now();
        let claim = self.store.claim(vec![request]).await.expect("the store answers").pop();
        let claimed = start.elapsed();
        let Some(Ok(Claim::Granted(grant))) = claim else { panic!("a fresh key: {claim:?}") };
        let ended = self.store.end(vec![self.complete(id, grant)]).await;
        assert!(ended.expect("the store answers")[0].is_ok());
        (claimed, start.elapsed().saturating_sub(claimed))
    }

    async fn replay(&self, below: u64) -> Duration {
        // A repeated request comes from another owner with the same request.
        let number = random_below(below);
        let request = ClaimRequest { owner: Owner::new("again").expect("an owner"), ..request(number) };
        let start = Instant::now();
        let claim = self.store.claim(vec![request]).await.expect("the store answers").pop();
        let claimed = start.elapsed();
        let Some(Ok(Claim::Completed { outcome, .. })) = claim else { panic!("an old key: {claim:?}") };
        assert_eq!(outcome, self.outcome);
        claimed
    }
}

impl<'a> Ours<'a> {
    /// A ledger with this many completed entries, created through its API.
    pub fn open(runtime: &'a Runtime, folder: &Path, entries: u64) -> Self {
        const BATCH: u64 = 1000;
        let store = Embedded::open(folder, Options::default()).expect("the store opens");
        let outcome = RecordedOutcome::done(hapax_core::Json::parse(OUTCOME).expect("JSON"));
        let shared = StoreState { store, outcome, next: AtomicU64::new(entries) };
        for from in (0..entries).step_by(BATCH as usize) {
            let requests: Vec<_> = (from..entries.min(from + BATCH)).map(request).collect();
            let ids: Vec<_> = requests.iter().map(|request| request.id.clone()).collect();
            let claims = runtime.block_on(shared.store.claim(requests)).expect("the store answers");
            let ends = ids.into_iter().zip(claims).map(|(id, claim)| match claim {
                Ok(Claim::Granted(grant)) => shared.complete(id, grant),
                other => panic!("a fresh key: {other:?}"),
            });
            let ended = runtime.block_on(shared.store.end(ends.collect())).expect("the store answers");
            assert!(ended.iter().all(Result::is_ok));
        }
        Self { runtime, shared: Arc::new(shared) }
    }
}

impl Contestant for Ours<'_> {
    fn turn(&mut self, kind: Kind, in_flight: usize, time: Duration) -> Turn {
        let before = self.shared.store.commit_stats();
        let below = self.shared.next.load(Ordering::Relaxed);
        let start = Instant::now();
        let until = start + time;
        let turns = self.runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for _ in 0..in_flight {
                let shared = self.shared.clone();
                tasks.spawn(async move {
                    let mut turn = Turn::default();
                    while Instant::now() < until {
                        match kind {
                            Kind::Miss => {
                                let (claim, complete) = shared.claim_and_complete().await;
                                turn.first.push(claim);
                                turn.second.push(complete);
                            }
                            Kind::Hit => turn.first.push(shared.replay(below).await),
                        }
                    }
                    turn
                });
            }
            tasks.join_all().await
        });
        let secs = start.elapsed().as_secs_f64();
        let after = self.shared.store.commit_stats();
        let mut all = Turn { secs, synced: after.synced - before.synced, ..Turn::default() };
        for turn in turns {
            all.done += turn.first.len() as u64;
            all.first.extend(turn.first);
            all.second.extend(turn.second);
        }
        all
    }
}
