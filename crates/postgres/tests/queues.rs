//! The queues on PostgreSQL pass the queue suite, and with the ledger the cases that need both in one store. The database's clock is replaced by one that only the suite moves.

mod common;

use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use common::{Clock, Database};
use hapax_conformance::{Case, CaseOutcome, Factory, Harness, Need};
use hapax_core::store::SharedStore;
use hapax_core::{Ledger, QueueAdmin};
use hapax_postgres::{Options, PostgresStore};
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// What the store does not do. The database's clock is the store's, and leases and delays follow it when it is set back.
const MISSING: &[&str] = &["p10_fences::a_wall_clock_set_back_holds_nothing_up"];

/// Cases that the store declares it cannot run.
const SKIPS: &[&str] = &[];

/// Databases that no test uses now.
static FREE: Mutex<Vec<Database>> = Mutex::new(Vec::new());

struct InDatabase {
    /// Receives wait for the disk.
    synced: bool,
    database: Option<Database>,
    clock: Clock,
    store: PostgresStore,
    second: PostgresStore,
}

impl Drop for InDatabase {
    fn drop(&mut self) {
        self.store.shut_down();
        self.second.shut_down();
        FREE.lock().unwrap().extend(self.database.take());
    }
}

impl InDatabase {
    async fn open(&self) -> PostgresStore {
        open(self.database.as_ref().expect("it is given back at the end"), self.synced).await
    }
}

#[async_trait]
impl Harness for InDatabase {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        Arc::new(self.store.clone())
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.store.clone()))
    }

    fn whole(&self) -> Option<SharedStore> {
        Some(Arc::new(self.store.clone()))
    }

    fn second_whole(&self) -> Option<SharedStore> {
        Some(Arc::new(self.second.clone()))
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(Arc::new(self.second.clone()))
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        Some(Arc::new(self.second.clone()))
    }

    async fn quiet(&self) {
        self.store.quiet().await;
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms).await;
        for store in [&self.store, &self.second] {
            store.clock_moved().await.unwrap();
        }
    }

    async fn restart(&mut self) {
        self.store.close().await.unwrap();
        self.store = self.open().await;
    }

    async fn crash(&mut self) {
        self.store.shut_down();
        self.store = self.open().await;
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
        let url = self.database.as_ref().expect("it is given back at the end").direct_url();
        let back = move || common::block_on(common::set_back_ms(&url, ms));
        std::thread::spawn(back).join().unwrap();
    }
}

/// Cases that need leases which survive a crash of the database's server run with receives that wait for the disk, which is
/// the default; the others with receives that do not, where a case may find more.
struct Databases {
    synced: bool,
}

async fn open(database: &Database, synced: bool) -> PostgresStore {
    let options = Options { sync_receives: synced, ..Options::default() };
    PostgresStore::open(&database.url(), options).await.unwrap()
}

#[async_trait]
impl Factory for Databases {
    async fn fresh(&self) -> Box<dyn Harness> {
        let server = common::shared().expect("it was asked for before");
        let free = FREE.lock().unwrap().pop();
        let database = match free {
            Some(database) => {
                database.clear().await;
                database
            }
            None => Database::migrated(server).await,
        };
        let clock = database.with_clock().await;
        let synced = self.synced;
        let (store, second) = (open(&database, synced).await, open(&database, synced).await);
        Box::new(InDatabase { synced, database: Some(database), clock, store, second })
    }
}

/// The queue suite, what is told of messages, and the cases of the ledger suite that need queues in the same store.
fn cases() -> impl Iterator<Item = &'static Case> {
    let ledger = hapax_conformance::ledger_cases().iter().filter(|case| case.needs.contains(&Need::OneStore));
    let told = hapax_conformance::observed_cases();
    hapax_conformance::cases()
        .iter()
        .chain(ledger)
        .chain(told)
        .filter(|case| common::smoke::is_selected(case))
}

fn is_listed(list: &[&str], case: &Case) -> bool {
    let all = format!("{}::*", case.module);
    list.iter().any(|name| *name == case.to_string() || *name == all)
}

fn trial(case: &'static Case) -> Trial {
    Trial::ignorable_test(case.to_string(), move || {
        if let Err(why) = common::shared() {
            return Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}")));
        }
        if is_listed(MISSING, case) {
            return Ok(Completion::ignored_with("declared: the store does not do it yet"));
        }
        let databases = Databases { synced: case.needs.contains(&Need::DurableLease) };
        match common::block_on(async { case.run(databases.fresh().await).await }) {
            CaseOutcome::Passed => Ok(Completion::Completed),
            CaseOutcome::Skipped(why) if case.is_heavy() || is_listed(SKIPS, case) => {
                Ok(Completion::ignored_with(format!("declared: {why}")))
            }
            CaseOutcome::Skipped(why) => Err(Failed::from(format!("skipped, but not in the list: {why}"))),
        }
    })
}

/// Every name in the lists is that of a case, and what is skipped cannot run.
fn the_lists_are_exact() -> Trial {
    Trial::ignorable_test("the_lists_of_skipped_cases_are_exact", || {
        if let Err(why) = common::shared() {
            return Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}")));
        }
        if common::smoke::is_smoke() {
            return Ok(Completion::ignored_with("declared: only a selection of the cases is run"));
        }
        common::block_on(async {
            let harness = Databases { synced: true }.fresh().await;
            let wrong: Vec<String> = cases()
                .filter(|case| !case.is_heavy() && !is_listed(MISSING, case))
                .filter(|case| case.missing(&*harness).is_some() != is_listed(SKIPS, case))
                .map(ToString::to_string)
                .collect();
            let known = |name: &&str| cases().any(|case| is_listed(&[name], case));
            let unknown: Vec<_> = MISSING.iter().chain(SKIPS).filter(|name| !known(name)).collect();
            if wrong.is_empty() && unknown.is_empty() {
                return Ok(Completion::Completed);
            }
            Err(Failed::from(format!("listed wrongly: {wrong:?}; not cases: {unknown:?}")))
        })
    })
}

fn main() -> ExitCode {
    let trials = cases().map(trial).chain([the_lists_are_exact()]);
    libtest_mimic::run(&Arguments::from_args(), trials.collect()).exit_code()
}
