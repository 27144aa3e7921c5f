//! A store that is observed is still that store: it passes the suites of the store behind it.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness};
use hapax_core::{Clock as _, Documents, Ledger, ManualClock, QueueAdmin};
use hapax_embedded::{Embedded, Options};
use hapax_observe::{ObservedStore, Observer};
use tempfile::TempDir;

struct Fresh;

struct Observed {
    clock: Arc<ManualClock>,
    _root: TempDir,
    folder: PathBuf,
    store: Option<Arc<ObservedStore>>,
}

fn open(folder: &Path, clock: &Arc<ManualClock>) -> Arc<ObservedStore> {
    let options = Options { clock: clock.clone(), ..Options::default() };
    let store = Arc::new(Embedded::open(folder, options).unwrap());
    let observer = Arc::new(Observer::with_clock(clock.clone()));
    Arc::new(ObservedStore::with_observer(store, observer))
}

#[async_trait]
impl Factory for Fresh {
    async fn fresh(&self) -> Box<dyn Harness> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("store");
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let store = Some(open(&folder, &clock));
        Box::new(Observed { clock, _root: root, folder, store })
    }
}

#[async_trait]
impl Harness for Observed {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.store.clone().unwrap()
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(self.store.clone().unwrap())
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(self.store.clone().unwrap())
    }

    async fn quiet(&self) {
        // The writer answers in order: once it answers this, it has processed all earlier operations.
        self.store.as_ref().unwrap().ledger_stats().await.unwrap();
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
    }

    async fn restart(&mut self) {
        self.store.take().unwrap().close().await.unwrap();
        self.store = Some(open(&self.folder, &self.clock));
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

    fn can_set_wall_back(&self) -> bool {
        true
    }

    fn set_wall_back(&self, ms: u64) {
        self.clock.set_wall_ms(self.clock.wall_ms() - ms);
    }
}

/// Only one process may open a folder.
const SKIPS: &[&str] = &[
    "p12_two_handles::*",
    "p14_copy::a_queue_closed_on_one_handle_is_closed_on_the_other",
    "l14_two_handles::*",
];

fn main() -> ExitCode {
    hapax_conformance::main(Fresh, &[hapax_conformance::cases(), hapax_conformance::ledger_cases()], SKIPS)
}
