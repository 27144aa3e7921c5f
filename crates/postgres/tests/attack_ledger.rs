//! Several processes and many clients claim the same keys of one database, under faults at random times. A checker that
//! knows nothing of the store reads the history: one holder at a time, fences grow, no stale completion is accepted, and
//! every duplicate hears the same outcome.
//!
//! `HAPAX_SEED=n` chooses other faults, `HAPAX_LONG=1` runs twenty times as long.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::trouble::{Random, Site, seed, time};
use common::{Database, PATIENCE, Server, patiently};
use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryState, Grant, Json, Ledger as _,
    Owner, RecordedOutcome, Renew, StoreError, TokenError,
};
use hapax_postgres::{Options, PostgresStore};
use sqlx::Executor as _;

fn main() -> std::process::ExitCode {
    common::main(tests![
        the_ledger_survives,
        a_claim_that_waits_is_woken_by_another_process,
        a_batch_that_was_done_in_part_does_not_say_that_nothing_was_done,
    ])
}

const PROCESSES: usize = 3;
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

async fn the_ledger_survives(_: &'static Server) {
    let run = || {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async {
            let site = Arc::new(Site::start(PROCESSES).await);
            let (history, over) = (Arc::new(History::default()), Arc::new(AtomicBool::new(false)));
            let mut tasks = tokio::task::JoinSet::new();
            for n in 0..CLIENTS {
                tasks.spawn(work(site.clone(), history.clone(), over.clone(), n));
            }
            let enough = || history.lock().unwrap().len() > 50;
            site.trouble(time(10), &over, enough).await;
            tasks.join_all().await;
            let history = std::mem::take(&mut *history.lock().unwrap());
            check(&site.stores[0], &history).await;
        });
    };
    std::thread::spawn(run).join().unwrap();
}

/// Claims keys that other clients claim too, and completes them; sometimes too late, sometimes never.
async fn work(site: Arc<Site>, history: Arc<History>, over: Arc<AtomicBool>, n: usize) {
    let mut random = Random::new(seed() * 1_000 + n as u64);
    let mut number = 0;
    while !over.load(Ordering::SeqCst) {
        number += 1;
        let key = format!("{}-{number}", n / SHARE);
        let owner = format!("{n}-{number}");
        let store = &site.stores[n % PROCESSES];
        finish(store, &history, &key, &owner, &mut random).await;
        tokio::time::sleep(random.ms(10)).await;
    }
}

/// One call in ten is dropped at a random time.
fn patience(random: &mut Random) -> Duration {
    if random.below(10) == 0 { random.ms(15) } else { Duration::from_mins(2) }
}

/// Asks until the key has an outcome.
async fn finish(store: &PostgresStore, history: &History, key: &str, owner: &str, random: &mut Random) {
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < Duration::from_mins(5), "{key} does not end");
        let begun = Instant::now();
        let ask = ClaimRequest { wait_ms: random.below(500), ..request(key, owner, LEASE_MS) };
        let Ok(answer) = tokio::time::timeout(patience(random), store.claim(vec![ask])).await else {
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

async fn hold(store: &PostgresStore, history: &History, key: &str, grant: &Grant, random: &mut Random) {
    match random.below(12) {
        // It hangs until its lease is over, and completes nevertheless.
        0 => tokio::time::sleep(Duration::from_millis(LEASE_MS + random.below(300))).await,
        // It is gone.
        1 => return,
        2 => {
            let renew = Renew { id: entry_id(key), token: grant.token.clone(), lease_ms: LEASE_MS };
            let _ = tokio::time::timeout(patience(random), store.renew(vec![renew])).await;
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
        match tokio::time::timeout(patience(random), store.end(vec![end])).await {
            Ok(Ok(mut answers)) => {
                history.lock().unwrap().get_mut(key).unwrap().ended[at].done = Some(answers.remove(0));
                return;
            }
            Ok(Err(error)) => assert!(error.is_retryable(), "{key}: {error}"),
            Err(_) => {}
        }
    }
}

async fn check(store: &PostgresStore, history: &BTreeMap<String, Key>) {
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

async fn granted(store: &PostgresStore, ask: ClaimRequest) -> Grant {
    match store.claim(vec![ask]).await.unwrap().remove(0) {
        Ok(Claim::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// By a hint, and by looking itself when the connection that listens is cut.
async fn a_claim_that_waits_is_woken_by_another_process(server: &'static Server) {
    let database = Database::migrated(server).await;
    let (store, second) = (database.open().await, database.open().await);
    let mut admin = database.connect().await;
    for cut in [false, true, false] {
        let key = format!("{cut}-{:?}", Instant::now());
        let grant = granted(&store, request(&key, "ann", 120_000)).await;
        let waiting = {
            let (second, key) = (second.clone(), key.clone());
            let ask = ClaimRequest { wait_ms: 20_000, ..request(&key, "bob", 120_000) };
            tokio::spawn(async move { second.claim(vec![ask]).await.unwrap().remove(0) })
        };
        tokio::task::yield_now().await;
        second.quiet().await;
        if cut {
            let kill = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity \
                        WHERE datname = current_database() AND query LIKE 'LISTEN%'";
            let start = Instant::now();
            while admin.fetch_all(kill).await.unwrap().is_empty() {
                assert!(start.elapsed() < PATIENCE, "no connection listens");
            }
        }
        store.end(vec![ending(&key, &grant, "paid")]).await.unwrap().remove(0).unwrap();
        let answer = tokio::time::timeout(Duration::from_secs(15), waiting).await;
        let answer = answer.expect("it is woken long before its wait is over").unwrap();
        assert!(matches!(answer, Ok(Claim::Completed { .. })), "{answer:?}");
    }
}

/// The statements of a batch are transactions of their own: if a later one fails, the first claims are granted.
async fn a_batch_that_was_done_in_part_does_not_say_that_nothing_was_done(server: &'static Server) {
    let database = Database::migrated(server).await;
    let options = Options { operation_timeout: Duration::from_secs(2), ..Options::default() };
    let impatient = PostgresStore::open(&database.url(), options).await.unwrap();
    let store = database.open().await;
    granted(&store, request("old", "ann", 1)).await;
    let mut other = database.connect().await;
    for n in 0..20 {
        let key = format!("new {n}");
        other.execute("BEGIN; SELECT 1 FROM hapax.ledger_entry FOR UPDATE").await.unwrap();
        tokio::time::sleep(Duration::from_millis(5)).await;
        let batch = vec![request(&key, "bob", 60_000), request("old", "bob", 60_000)];
        let answer = impatient.claim(batch).await;
        other.execute("ROLLBACK").await.unwrap();
        if store.entry(&entry_id(&key)).await.unwrap().is_none() {
            // The machine was too slow for the first claim: its time limit has ended both.
            assert!(answer.is_err(), "{answer:?}");
            continue;
        }
        assert!(matches!(answer, Err(StoreError::OutcomeUnknown(_))), "{answer:?}");
        // The caller repeats, and gets what it holds.
        granted(&store, request(&key, "bob", 60_000)).await;
        return;
    }
    panic!("no first claim was granted");
}
