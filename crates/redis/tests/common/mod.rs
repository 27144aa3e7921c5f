//! Private Redis servers for the tests of one process, and a store with a prefix of its own for each test.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod slots;
pub mod suite;

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use hapax_core::{
    Claim, ClaimEnding, ClaimError, ClaimRequest, EndClaim, EntryId, EntryView, Grant, Json, Ledger as _,
    RecordedOutcome, StoreError, TokenError,
};
use hapax_faults::{RedisCluster, RedisServer};
use hapax_redis::{Options, RedisStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// The settings that the level `local` needs.
pub const DURABLE: &[&str] = &["appendonly yes", "appendfsync always"];

/// Why there is no server; `None`: there is.
pub fn missing() -> Option<&'static str> {
    static MISSING: OnceLock<Option<String>> = OnceLock::new();
    let missing = MISSING.get_or_init(|| {
        let found = std::process::Command::new("redis-server").arg("--version").output();
        found.err().map(|error| format!("redis-server: {error}"))
    });
    missing.as_deref()
}

/// The server of this process.
pub fn shared() -> &'static RedisServer {
    static SERVER: OnceLock<RedisServer> = OnceLock::new();
    SERVER.get_or_init(|| RedisServer::start(DURABLE).unwrap())
}

/// The Cluster of this process. No replica takes over because the machine is busy.
pub fn shared_cluster() -> &'static RedisCluster {
    static CLUSTER: OnceLock<RedisCluster> = OnceLock::new();
    CLUSTER.get_or_init(|| RedisCluster::start(&["cluster-node-timeout 120000"]).unwrap())
}

/// A test, as a function.
pub struct Test {
    pub name: &'static str,
    pub run: fn(),
}

/// Lists tests by their names.
#[macro_export]
macro_rules! tests {
    ($($name:ident),+ $(,)?) => {
        &[$($crate::common::Test { name: stringify!($name), run: || $crate::common::block_on($name()) }),+]
    };
}

/// Runs tests. Without Redis each is reported as ignored, with the reason.
pub fn main(tests: &'static [Test]) -> std::process::ExitCode {
    let trial = |test: &'static Test| {
        Trial::ignorable_test(test.name, move || match missing() {
            None => {
                (test.run)();
                Ok::<_, Failed>(Completion::Completed)
            }
            Some(why) => Ok(Completion::ignored_with(format!("needs Redis 7: {why}"))),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.iter().map(trial).collect()).exit_code()
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// A prefix that no other test uses.
pub fn prefix() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    format!("t{}", NUMBER.fetch_add(1, Ordering::Relaxed))
}

/// Options with a prefix of their own.
pub fn options() -> Options {
    Options { prefix: prefix(), ..Options::default() }
}

/// The URL of a server.
pub fn url(server: &RedisServer) -> String {
    format!("redis://{}", server.address())
}

pub fn id(key: &str) -> EntryId {
    EntryId::new("orders".parse().unwrap(), key.parse().unwrap())
}

pub fn ask(key: &str, owner: &str) -> ClaimRequest {
    ClaimRequest::new(id(key), owner.parse().unwrap(), 60_000)
}

/// The answer to one claim.
pub async fn claim(store: &RedisStore, request: ClaimRequest) -> Result<Claim, ClaimError> {
    store.claim(vec![request]).await?.remove(0)
}

pub async fn granted(store: &RedisStore, request: ClaimRequest) -> Grant {
    match claim(store, request).await {
        Ok(Claim::Granted(grant)) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// The end of a claim with an outcome.
pub fn completed(key: &str, grant: &Grant, outcome: &str) -> EndClaim {
    let outcome = RecordedOutcome::done(Json::of(outcome).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 3_600_000 };
    EndClaim { id: id(key), token: grant.token.clone(), ending }
}

/// How long a test repeats a call that may be repeated, with this pause. Only a failure reaches the end.
pub const PATIENCE: Duration = Duration::from_mins(2);
const PAUSE: Duration = Duration::from_millis(20);

/// Asks again after an error that may be repeated, as long as the patience lasts.
async fn again_and_again<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(
    what: &str,
    is_retryable: impl Fn(&E) -> bool,
    mut call: impl FnMut() -> F,
) -> T {
    let start = Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => {
                assert!(is_retryable(&error), "{what}: {error}");
                assert!(start.elapsed() < PATIENCE, "{what}: the store did not come back: {error}");
            }
        }
        tokio::time::sleep(PAUSE).await;
    }
}

/// Asks again after an error that may be repeated.
pub async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(call: impl FnMut() -> F) -> T {
    again_and_again("a call", StoreError::is_retryable, call).await
}

/// The answer to a claim, asked again after an error that may be repeated.
pub async fn claim_patiently(store: &RedisStore, request: ClaimRequest) -> Claim {
    let what = format!("claim of {}", request.id);
    again_and_again(&what, ClaimError::is_retryable, || claim(store, request.clone())).await
}

/// A claim that is granted, asked again after an error that may be repeated: replicas may confirm it late.
pub async fn granted_patiently(store: &RedisStore, request: ClaimRequest) -> Grant {
    match claim_patiently(store, request).await {
        Claim::Granted(grant) => grant,
        other => panic!("not granted: {other:?}"),
    }
}

/// Ends a claim, repeating after errors.
pub async fn end_patiently(store: &RedisStore, end: EndClaim) -> Result<(), TokenError> {
    patiently(|| store.end(vec![end.clone()])).await.remove(0)
}

/// Reads an entry, repeating after errors.
pub async fn entry_patiently(store: &RedisStore, id: EntryId) -> Option<EntryView> {
    patiently(|| store.entry(&id)).await
}

/// Claims and completes a key, repeating after errors: with the same owner and the same outcome.
pub async fn effect(store: &RedisStore, key: &str) -> Grant {
    let grant = granted_patiently(store, ask(key, "ann")).await;
    assert_eq!(end_patiently(store, completed(key, &grant, key)).await, Ok(()), "{key}");
    grant
}
