//! The harness of the suites.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness};
use hapax_core::store::SharedStore;
use hapax_core::{Clock, Documents, Ledger, ManualClock, QueueAdmin};
use hapax_embedded::{Embedded, Options};
use tempfile::TempDir;

/// Makes stores in folders of their own.
pub struct Fresh;

struct InFolder {
    clock: Arc<ManualClock>,
    root: TempDir,
    folder: PathBuf,
    crashes: u32,
    store: Option<Arc<Embedded>>,
}

fn open(folder: &Path, clock: &Arc<ManualClock>) -> Arc<Embedded> {
    let options = Options { clock: clock.clone(), ..Options::default() };
    Arc::new(Embedded::open(folder, options).unwrap())
}

#[async_trait]
impl Factory for Fresh {
    async fn fresh(&self) -> Box<dyn Harness> {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("0");
        let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
        let store = Some(open(&folder, &clock));
        Box::new(InFolder { clock, root, folder, crashes: 0, store })
    }
}

#[async_trait]
impl Harness for InFolder {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.store.clone().unwrap()
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(self.store.clone().unwrap())
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(self.store.clone().unwrap())
    }

    fn whole(&self) -> Option<SharedStore> {
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
        self.store.take().unwrap().close();
        self.store = Some(open(&self.folder, &self.clock));
    }

    /// A killed process leaves the current content of its files.
    async fn crash(&mut self) {
        self.crashes += 1;
        let after = self.root.path().join(self.crashes.to_string());
        std::fs::create_dir(&after).unwrap();
        for file in ["hapax.db", "hapax.db-wal"] {
            std::fs::copy(self.folder.join(file), after.join(file)).unwrap();
        }
        self.folder = after;
        self.store = Some(open(&self.folder, &self.clock));
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

/// Cases that cannot run, because only one process may open a folder.
pub const SKIPS: &[&str] = &[
    "p00_counters::counters_follow_what_another_handle_changes",
    "p12_two_handles::*",
    "p14_copy::a_queue_closed_on_one_handle_is_closed_on_the_other",
    "l13_releases::a_release_on_one_handle_clears_for_the_other",
    "l14_two_handles::*",
];
