//! The harness of the suites of the queues, the ledger and the documents.

use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Case, Factory, Harness, MemoryStore, Need};
use hapax_core::store::SharedStore;
use hapax_core::{Clock as _, Documents, Ledger, ManualClock, QueueAdmin};
use hapax_redis::{Durability, Options, RedisStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Makes stores on the servers of this URL.
struct Fresh {
    url: fn() -> String,
    durability: Durability,
    /// Whether the queues are part of the suite.
    queues: bool,
}

struct InRedis {
    /// The queues, if they are not part of the suite.
    memory: Option<Arc<MemoryStore>>,
    clock: Arc<ManualClock>,
    url: String,
    options: Options,
    store: RedisStore,
    second: RedisStore,
}

impl InRedis {
    fn queues(&self, store: &RedisStore) -> Arc<dyn QueueAdmin> {
        match &self.memory {
            Some(memory) => memory.clone(),
            None => Arc::new(store.clone()),
        }
    }
}

#[async_trait]
impl Factory for Fresh {
    async fn fresh(&self) -> Box<dyn Harness> {
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let (durability, url) = (self.durability, (self.url)());
        let options = Options { durability, clock: Some(clock.clone()), ..super::options() };
        let store = RedisStore::open(&url, options.clone()).await.unwrap();
        let second = RedisStore::open(&url, options.clone()).await.unwrap();
        let memory = || MemoryStore::new(Arc::new(ManualClock::at_ms(1_800_000_000_000)));
        let memory = (!self.queues).then(memory);
        Box::new(InRedis { memory, clock, url, options, store, second })
    }
}

#[async_trait]
impl Harness for InRedis {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.queues(&self.store)
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.store.clone()))
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(Arc::new(self.store.clone()))
    }

    fn whole(&self) -> Option<SharedStore> {
        Some(Arc::new(self.store.clone()))
    }

    fn second_whole(&self) -> Option<SharedStore> {
        Some(Arc::new(self.second.clone()))
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(self.queues(&self.second))
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.second.clone()))
    }

    async fn quiet(&self) {
        self.store.quiet().await;
        self.second.quiet().await;
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
        for store in [&self.store, &self.second] {
            store.clock_moved().await.unwrap();
            store.quiet().await;
        }
    }

    /// The servers of the tests are shared, so their restart is only told to the store; `redis_outages` restarts one.
    async fn restart(&mut self) {
        self.store.shut_down();
        self.store = RedisStore::open(&self.url, self.options.clone()).await.unwrap();
        self.store.server_restarted().await.unwrap();
    }

    async fn crash(&mut self) {
        self.restart().await;
    }

    fn fast_time(&self) -> bool {
        true
    }

    fn exact_time(&self) -> bool {
        true
    }

    /// Leases and delays of queues follow the clock of the server, also back; `tokens` shows that fences do not.
    fn can_set_wall_back(&self) -> bool {
        self.memory.is_some()
    }

    fn set_wall_back(&self, ms: u64) {
        self.clock.set_wall_ms(self.clock.wall_ms() - ms);
    }
}

/// Cases of the queues that cannot run.
const QUEUE_SKIPS: &[&str] = &[
    "p10_fences::fences_grow_when_the_wall_clock_was_set_back",
    "p10_fences::a_wall_clock_set_back_holds_nothing_up",
];

/// Runs the suite of the queues. Without Redis each case is reported as ignored.
pub fn queues(url: fn() -> String, durability: Durability) -> ExitCode {
    let suites = [
        hapax_conformance::cases(),
        with_queues(hapax_conformance::ledger_cases()),
        hapax_conformance::observed_cases(),
    ];
    match super::missing() {
        None => hapax_conformance::main(Fresh { url, durability, queues: true }, &suites, QUEUE_SKIPS),
        Some(why) => ignored(&suites, why),
    }
}

fn ignored(suites: &[&'static [Case]], why: &'static str) -> ExitCode {
    let ignored = |case: &Case| {
        Trial::ignorable_test(case.to_string(), move || {
            Ok::<_, Failed>(Completion::ignored_with(format!("needs Redis 7: {why}")))
        })
    };
    let trials = suites.iter().flat_map(|suite| suite.iter()).map(ignored).collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

/// The cases of the ledger that need queues in the same store come with the queues.
fn with_queues(cases: &'static [Case]) -> &'static [Case] {
    let together = cases.iter().filter(|case| case.needs.contains(&Need::OneStore));
    Vec::leak(together.copied().collect())
}

fn without_queues(cases: &'static [Case]) -> &'static [Case] {
    let own = cases.iter().filter(|case| !case.needs.contains(&Need::OneStore));
    Vec::leak(own.copied().collect())
}

/// Runs the suites. Without Redis each case is reported as ignored.
pub fn main(url: fn() -> String, durability: Durability) -> ExitCode {
    let suites = [without_queues(hapax_conformance::ledger_cases()), hapax_conformance::document_cases()];
    match super::missing() {
        None => hapax_conformance::main(Fresh { url, durability, queues: false }, &suites, &[]),
        Some(why) => ignored(&suites, why),
    }
}
