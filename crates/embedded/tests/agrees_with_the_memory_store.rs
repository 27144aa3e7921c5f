//! Random calls to this store and to the obvious one in memory have the same answers.

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use hapax_conformance::agreement::{Subject, compare};
use hapax_core::{ManualClock, Store};
use hapax_embedded::{Embedded, Options};

/// Stores in folders that are kept until the test ends.
#[derive(Default)]
struct InFolders(Mutex<Vec<tempfile::TempDir>>);

#[async_trait]
impl Subject for InFolders {
    async fn fresh(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let folder = tempfile::tempdir().unwrap();
        let store = Embedded::open(folder.path(), Options { clock, ..Options::default() }).unwrap();
        self.0.lock().unwrap().push(folder);
        Arc::new(store)
    }

    async fn clock_moved(&self, store: &dyn Store) {
        for _ in 0..3 {
            store.status().await.unwrap();
        }
    }
}

#[tokio::test]
async fn in_every_answer_counter_and_halted_group() {
    let long = std::env::var_os("HAPAX_LONG").is_some();
    compare(&InFolders::default(), 0..if long { 300 } else { 12 }, 150).await;
}
