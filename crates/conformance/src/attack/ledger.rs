//! Clients that claim the same keys: one holder at a time, fences grow, no stale completion is accepted, and every duplicate
//! hears the same outcome.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryState, Grant, Json, Ledger, Owner,
    RecordedOutcome, Renew, TokenError,
};
use tokio::task::JoinSet;

use super::{Random, patiently, seed};

type Store = Arc<dyn Ledger>;

const CLIENTS: usize = 12;
/// Short, so that leases end while their holders work.
const LEASE_MS: u64 = 800;
/// Clients that claim the same key.
const SHARE: usize = 4;

/// A claim that was granted.
struct Granted {
    begun: Instant,
    answered: Instant,
    owner: String,
    fence: u64,
}

/// An attempt to end a claim.
struct Ended {
    begun: Instant,
    fence: u64,
    /// The outcome; `None`: the claim was given back.
    outcome: Option<String>,
    /// `None`: unknown.
    done: Option<Result<(), TokenError>>,
}

#[derive(Default)]
struct Key {
    granted: Vec<Granted>,
    ended: Vec<Ended>,
    heard: BTreeSet<String>,
}

type History = Mutex<BTreeMap<String, Key>>;

/// Clients that claim keys of a ledger, until [`end`](Self::end).
pub struct LedgerAttack {
    clients: Arc<Clients>,
    tasks: JoinSet<()>,
}

struct Clients {
    stores: Vec<Store>,
    history: History,
    over: AtomicBool,
}

impl LedgerAttack {
    /// Starts the clients; they are spread over the stores, which are processes on the same data.
    pub fn begin(stores: Vec<Store>) -> Self {
        let clients = Arc::new(Clients { stores, history: History::default(), over: AtomicBool::new(false) });
        let mut tasks = JoinSet::new();
        for n in 0..CLIENTS {
            tasks.spawn(work(clients.clone(), n));
        }
        Self { clients, tasks }
    }

    /// How many keys were claimed so far.
    pub fn keys(&self) -> usize {
        self.clients.history.lock().unwrap().len()
    }

    /// Call this after the last fault: every client ends its key, and the history is checked.
    ///
    /// # Panics
    /// If something happened that must not happen, or a key does not end.
    pub async fn end(self) {
        self.clients.over.store(true, Ordering::SeqCst);
        self.tasks.join_all().await;
        let history = std::mem::take(&mut *self.clients.history.lock().unwrap());
        check(&self.clients.stores[0], &history).await;
    }
}

fn entry_id(key: &str) -> EntryId {
    EntryId::new("orders".parse().unwrap(), key.parse().unwrap())
}

fn request(key: &str, owner: &str, lease_ms: u64) -> ClaimRequest {
    ClaimRequest::new(entry_id(key), Owner::new(owner).unwrap(), lease_ms)
}

fn ending(key: &str, grant: &Grant, outcome: &str) -> EndClaim {
    let outcome = RecordedOutcome::done(Json::of(outcome).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    EndClaim { id: entry_id(key), token: grant.token.clone(), ending }
}

/// Claims keys that other clients claim too, and completes them; sometimes too late, sometimes never.
async fn work(clients: Arc<Clients>, n: usize) {
    let mut random = Random::new(seed() * 1_000 + n as u64);
    let mut number = 0;
    while !clients.over.load(Ordering::SeqCst) {
        number += 1;
        let key = format!("{}-{number}", n / SHARE);
        let owner = format!("{n}-{number}");
        let store = &clients.stores[n % clients.stores.len()];
        finish(store, &clients.history, &key, &owner, &mut random).await;
        tokio::time::sleep(random.ms(10)).await;
    }
}

/// Asks until the key has an outcome.
async fn finish(store: &Store, history: &History, key: &str, owner: &str, random: &mut Random) {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_mins(5), "{key} does not end");
        let begun = Instant::now();
        let ask = ClaimRequest { wait_ms: random.below(500), ..request(key, owner, LEASE_MS) };
        let Ok(answer) = tokio::time::timeout(random.patience(), store.claim(vec![ask])).await else {
            continue;
        };
        match answer.map(|mut answers| answers.remove(0)) {
            Ok(Ok(Claim::Granted(grant))) => {
                let granted = Granted {
                    begun,
                    answered: Instant::now(),
                    owner: owner.to_owned(),
                    fence: grant.fence.0,
                };
                history.lock().unwrap().entry(key.to_owned()).or_default().granted.push(granted);
                hold(store, history, key, &grant, random).await;
            }
            Ok(Ok(Claim::Completed { outcome, .. })) => {
                let outcome = outcome.value.unwrap().as_str().to_owned();
                history.lock().unwrap().entry(key.to_owned()).or_default().heard.insert(outcome);
                return;
            }
            Ok(Ok(Claim::InProgress { .. } | Claim::InDoubt { .. })) => {}
            Ok(Err(ClaimError::Store(error))) | Err(error) => assert!(error.is_retryable(), "{key}: {error}"),
            Ok(Err(error)) => panic!("{key}: {error}"),
        }
        tokio::time::sleep(random.ms(20)).await;
    }
}

async fn hold(store: &Store, history: &History, key: &str, grant: &Grant, random: &mut Random) {
    match random.below(12) {
        // It hangs until its lease is over, and completes nevertheless.
        0 => tokio::time::sleep(Duration::from_millis(LEASE_MS + random.below(300))).await,
        // It is gone.
        1 => return,
        2 => {
            let renew = Renew { id: entry_id(key), token: grant.token.clone(), lease_ms: LEASE_MS };
            let _ = tokio::time::timeout(random.patience(), store.renew(vec![renew])).await;
        }
        _ => tokio::time::sleep(random.ms(20)).await,
    }
    let outcome = format!("{key} by {}", grant.fence.0);
    let release = random.below(10) == 0;
    for _ in 0..3 {
        let mut end = ending(key, grant, &outcome);
        if release {
            end.ending = ClaimEnding::Release;
        }
        let outcome = (!release).then(|| Json::of(&outcome).unwrap().as_str().to_owned());
        let at = {
            let mut history = history.lock().unwrap();
            let ended = &mut history.get_mut(key).unwrap().ended;
            ended.push(Ended { begun: Instant::now(), fence: grant.fence.0, outcome, done: None });
            ended.len() - 1
        };
        match tokio::time::timeout(random.patience(), store.end(vec![end])).await {
            Ok(Ok(mut answers)) => {
                history.lock().unwrap().get_mut(key).unwrap().ended[at].done = Some(answers.remove(0));
                return;
            }
            Ok(Err(error)) => assert!(error.is_retryable(), "{key}: {error}"),
            Err(_) => {}
        }
    }
}

async fn check(store: &Store, history: &BTreeMap<String, Key>) {
    let grants: usize = history.values().map(|key| key.granted.len()).sum();
    eprintln!("{} keys, {grants} grants", history.len());
    for (name, key) in history {
        check_holders(name, key);
        assert!(key.heard.len() <= 1, "{name}: duplicates heard {:?}", key.heard);
        let accepted = key.ended.iter().filter(|ended| ended.done == Some(Ok(())));
        let accepted: BTreeSet<&String> = accepted.filter_map(|ended| ended.outcome.as_ref()).collect();
        assert!(accepted.len() <= 1, "{name}: completed as {accepted:?}");
        for heard in &key.heard {
            assert!(
                accepted.iter().all(|accepted| *accepted == heard),
                "{name}: {accepted:?}, heard {heard}"
            );
            let tried = key.ended.iter().any(|ended| ended.outcome.as_ref() == Some(heard));
            assert!(tried, "{name}: {heard} was never recorded");
            let id = entry_id(name);
            let entry = patiently(|| store.entry(&id)).await.unwrap();
            assert_eq!(entry.state, EntryState::Completed, "{name}");
            assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), heard, "{name}");
        }
    }
}

fn check_holders(name: &str, key: &Key) {
    for one in &key.granted {
        let lease_ends = one.begun + Duration::from_millis(LEASE_MS);
        let its = key.ended.iter().filter(|ended| ended.fence == one.fence);
        let until = its.map(|ended| ended.begun).fold(lease_ends, Instant::min);
        for two in key.granted.iter().filter(|two| two.fence != one.fence) {
            if two.fence > one.fence {
                assert!(two.answered >= until, "{name}: {} and {} hold it", one.owner, two.owner);
            } else {
                assert!(two.begun <= one.answered, "{name}: fence {} after {}", two.fence, one.fence);
            }
        }
        for ended in key.ended.iter().filter(|ended| ended.fence < one.fence && ended.done == Some(Ok(()))) {
            assert!(ended.begun <= one.answered, "{name}: a stale claim was ended");
        }
        let same = key.granted.iter().filter(|two| two.fence == one.fence);
        assert!(same.into_iter().all(|two| two.owner == one.owner), "{name}: two owners have one fence");
    }
}
