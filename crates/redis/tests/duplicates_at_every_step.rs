//! Fifty duplicates of one request, and a holder or a server that dies at each step: one effect. Beside it, a middleware of
//! the usual shape (look up, run, store; run anyway if Redis fails) on the same Redis in the same places.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{DURABLE, ask, claim_patiently, completed, end_patiently, entry_patiently, id, options, url};
use hapax_core::{
    Claim, ClaimRequest, EntryState, Json, Ledger as _, ManualClock, OnDoubt, RecordedOutcome, Resolution,
};
use hapax_faults::RedisServer;
use hapax_redis::{Options, RedisStore};
use tokio::sync::Barrier;
use tokio::task::JoinSet;

const DUPLICATES: usize = 50;
const KEY: &str = "order-7";

fn main() -> std::process::ExitCode {
    common::main(tests![
        a_holder_that_dies_at_any_step_leaves_one_effect,
        a_server_that_dies_at_any_step_leaves_one_effect,
        the_usual_middleware_runs_many_times,
    ])
}

/// Where a holder or the server dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    BeforeClaim,
    AfterClaim,
    AfterEffect,
    AfterCompletion,
}

const STEPS: [Step; 4] = [Step::BeforeClaim, Step::AfterClaim, Step::AfterEffect, Step::AfterCompletion];

/// One process that serves one of the duplicates.
struct Duplicate {
    store: RedisStore,
    owner: String,
    effects: Arc<AtomicUsize>,
    /// It dies here.
    dies: Option<Step>,
    /// The server is killed here, by the one that holds the key.
    server: Option<(Step, Arc<RedisServer>)>,
}

impl Duplicate {
    async fn at(&self, step: Step) -> bool {
        if let Some((when, server)) = &self.server
            && *when == step
        {
            let server = server.clone();
            let restart = move || {
                server.kill();
                server.run().unwrap();
            };
            tokio::task::spawn_blocking(restart).await.unwrap();
        }
        self.dies == Some(step)
    }

    /// The outcome that the caller gets; `None`: this process died, or the key is in doubt.
    async fn serve(self) -> Option<RecordedOutcome> {
        if self.dies == Some(Step::BeforeClaim) {
            return None;
        }
        let request = ClaimRequest { on_doubt: OnDoubt::Park, wait_ms: 20_000, ..ask(KEY, &self.owner) };
        let grant = match claim_patiently(&self.store, request).await {
            Claim::Granted(grant) => grant,
            Claim::Completed { outcome, .. } => return Some(outcome),
            Claim::InDoubt { .. } | Claim::InProgress { .. } => return None,
        };
        if self.at(Step::AfterClaim).await {
            return None;
        }
        self.effects.fetch_add(1, Ordering::SeqCst);
        if self.at(Step::AfterEffect).await {
            return None;
        }
        let end = completed(KEY, &grant, "paid");
        let ended = end_patiently(&self.store, end.clone()).await;
        assert_eq!(ended, Ok(()));
        if self.at(Step::AfterCompletion).await {
            return None;
        }
        Some(RecordedOutcome::done(Json::of("paid").unwrap()))
    }
}

async fn a_holder_that_dies_at_any_step_leaves_one_effect() {
    for step in STEPS {
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let options = Options { clock: Some(clock.clone()), ..options() };
        let store = RedisStore::open(&url(common::shared()), options.clone()).await.unwrap();
        let effects = Arc::new(AtomicUsize::new(0));
        let duplicate = |n: usize, dies| Duplicate {
            store: store.clone(),
            owner: format!("process-{n}"),
            effects: effects.clone(),
            dies,
            server: None,
        };
        assert_eq!(duplicate(0, Some(step)).serve().await, None, "the first one dies");
        clock.advance_ms(60_000);
        store.clock_moved().await.unwrap();
        let rest = || {
            let mut all = JoinSet::new();
            (1..DUPLICATES).for_each(|n| drop(all.spawn(duplicate(n, None).serve())));
            all.join_all()
        };
        let mut answers = rest().await;
        if matches!(step, Step::AfterClaim | Step::AfterEffect) {
            assert!(
                answers.iter().all(Option::is_none),
                "{step:?}: it is in doubt, and no duplicate guesses"
            );
            let outcome = RecordedOutcome::done(Json::of("paid").unwrap());
            let happened = effects.load(Ordering::SeqCst) == 1;
            let truth =
                if happened { Resolution::Completed { outcome, ttl_ms: 60_000 } } else { Resolution::Absent };
            store.resolve(&id(KEY), truth, "operator").await.unwrap();
            answers = rest().await;
        }
        assert_eq!(effects.load(Ordering::SeqCst), 1, "{step:?}");
        let paid = RecordedOutcome::done(Json::of("paid").unwrap());
        assert!(answers.iter().all(|answer| answer.as_ref() == Some(&paid)), "{step:?}: {answers:?}");
    }
}

async fn a_server_that_dies_at_any_step_leaves_one_effect() {
    let server = Arc::new(RedisServer::start(DURABLE).unwrap());
    for step in &STEPS[1..] {
        let store = RedisStore::open(&url(&server), options()).await.unwrap();
        let effects = Arc::new(AtomicUsize::new(0));
        let mut all = JoinSet::new();
        for n in 0..DUPLICATES {
            let (store, effects) = (store.clone(), effects.clone());
            let server = Some((*step, server.clone()));
            all.spawn(
                Duplicate { store, owner: format!("process-{n}"), effects, dies: None, server }.serve(),
            );
        }
        let answers = all.join_all().await;
        let paid = RecordedOutcome::done(Json::of("paid").unwrap());
        assert!(answers.iter().any(Option::is_some), "{step:?}");
        // Those that waited longer than they may were told to come back.
        assert!(answers.iter().flatten().all(|outcome| *outcome == paid), "{step:?}: {answers:?}");
        assert_eq!(effects.load(Ordering::SeqCst), 1, "{step:?}");
        let entry = entry_patiently(&store, id(KEY)).await.unwrap();
        assert_eq!((entry.state, entry.takeovers), (EntryState::Completed, 0), "{step:?}");
    }
}

/// The middleware of the usual shape: looks the key up, runs, stores the outcome; runs as well when Redis fails.
async fn usual(server: Arc<RedisServer>, effects: Arc<AtomicUsize>, together: Arc<Barrier>) {
    let ask = |command: &'static [&'static str]| {
        let server = server.clone();
        tokio::task::spawn_blocking(move || server.cli(command).unwrap_or_default())
    };
    let found = ask(&["GET", KEY]).await.unwrap();
    // The others are at the same place: that is what a duplicate is.
    together.wait().await;
    if found.is_empty() {
        effects.fetch_add(1, Ordering::SeqCst);
        ask(&["SET", KEY, "paid"]).await.unwrap();
    }
}

async fn the_usual_middleware_runs_many_times() {
    const FEW: usize = 8;
    let server = Arc::new(RedisServer::start(DURABLE).unwrap());
    let effects = Arc::new(AtomicUsize::new(0));
    let run = async |count: usize| {
        let (mut all, together) = (JoinSet::new(), Arc::new(Barrier::new(count)));
        for _ in 0..count {
            all.spawn(usual(server.clone(), effects.clone(), together.clone()));
        }
        all.join_all().await;
        effects.swap(0, Ordering::SeqCst)
    };
    assert_eq!(run(FEW).await, FEW, "concurrent duplicates all run");
    assert_eq!(run(FEW).await, 0, "only later ones find the outcome");
    server.kill();
    assert_eq!(run(1).await, 1, "without Redis, what has run runs again");
}
