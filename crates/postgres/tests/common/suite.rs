//! The harness of the suites of the ledger and of the documents.

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use hapax_conformance::{Case, Factory, Harness, MemoryStore, Need};
use hapax_core::{Documents, Ledger, ManualClock, QueueAdmin};
use hapax_postgres::PostgresStore;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use super::{Clock, Database, smoke};

/// Makes databases whose URL has these parameters.
struct Fresh {
    query: &'static str,
}

struct InDatabase {
    /// The queues are not part of this suite.
    queues: Arc<MemoryStore>,
    clock: Clock,
    store: PostgresStore,
    second: Mutex<Option<PostgresStore>>,
    direct_url: String,
    // Last, so that the stores are dropped before it.
    database: Database,
}

#[async_trait]
impl Factory for Fresh {
    async fn fresh(&self) -> Box<dyn Harness> {
        let server = super::shared().unwrap_or_else(|why| panic!("needs PostgreSQL 15: {why}"));
        let database = Database::migrated_with(server, self.query).await;
        let clock = database.with_clock().await;
        let store = database.open().await;
        let queues = MemoryStore::new(Arc::new(ManualClock::at_ms(1_800_000_000_000)));
        let second = Mutex::new(Some(database.open().await));
        Box::new(InDatabase { queues, clock, store, second, direct_url: database.direct_url(), database })
    }
}

impl InDatabase {
    fn second(&self) -> PostgresStore {
        self.second.lock().unwrap().clone().expect("it is open")
    }
}

#[async_trait]
impl Harness for InDatabase {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.queues.clone()
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.store.clone()))
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(Arc::new(self.store.clone()))
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(self.queues.clone())
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.second()))
    }

    async fn quiet(&self) {
        self.store.quiet().await;
        self.second().quiet().await;
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms).await;
        for store in [&self.store, &self.second()] {
            store.clock_moved().await.unwrap();
            store.quiet().await;
        }
    }

    /// The server of the tests is shared, so its restart is only told to the store; `a_restarted_server` restarts one.
    async fn restart(&mut self) {
        self.store.shut_down();
        self.clock.server_restarted().await;
        self.store = self.database.open().await;
    }

    /// The process dies, and with it the connections; the server restarts too.
    async fn crash(&mut self) {
        self.restart().await;
    }

    fn fast_time(&self) -> bool {
        true
    }

    fn exact_time(&self) -> bool {
        true
    }

    fn can_set_wall_back(&self) -> bool {
        true
    }

    fn set_wall_back(&self, ms: u64) {
        let url = self.direct_url.clone();
        let back = move || super::block_on(super::set_back_ms(&url, ms));
        std::thread::spawn(back).join().unwrap();
    }
}

/// The cases to run. Those that need queues in the same store come with the queues.
fn selected(cases: &'static [Case]) -> &'static [Case] {
    let own = cases.iter().filter(|case| !case.needs.contains(&Need::OneStore) && smoke::is_selected(case));
    Vec::leak(own.copied().collect())
}

/// Runs the suites on databases whose URL has these parameters. Without a server each case is reported as ignored.
pub fn main(query: &'static str) -> ExitCode {
    let suites = [selected(hapax_conformance::ledger_cases()), selected(hapax_conformance::document_cases())];
    match super::shared() {
        Ok(_) => hapax_conformance::main(Fresh { query }, &suites, &[]),
        Err(why) => {
            let ignored = |case: &Case| {
                Trial::ignorable_test(case.to_string(), move || {
                    Ok::<_, Failed>(Completion::ignored_with(format!("needs PostgreSQL 15: {why}")))
                })
            };
            let trials = suites.iter().flat_map(|suite| suite.iter()).map(ignored).collect();
            libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
        }
    }
}
