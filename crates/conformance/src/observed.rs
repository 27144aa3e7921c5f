//! A harness whose stores are observed.

use std::sync::Arc;

use async_trait::async_trait;
use hapax_core::store::SharedStore;
use hapax_core::{Documents, Ledger, QueueAdmin};
use hapax_observe::ObservedStore;

use crate::{Factory, Harness};

/// Makes the stores of another factory, each behind an [`ObservedStore`]: a store that is observed is still that store.
pub struct Observed<F>(pub F);

#[async_trait]
impl<F: Factory> Factory for Observed<F> {
    async fn fresh(&self) -> Box<dyn Harness> {
        let inner = self.0.fresh().await;
        let (store, second) = observed(&*inner);
        Box::new(ObservedHarness { inner, store, second })
    }
}

fn observed(inner: &dyn Harness) -> (Arc<ObservedStore>, Option<Arc<ObservedStore>>) {
    let observe = |store: SharedStore| Arc::new(ObservedStore::new(store));
    (observe(inner.whole().expect("the harness has the store as a whole")), inner.second_whole().map(observe))
}

struct ObservedHarness {
    inner: Box<dyn Harness>,
    store: Arc<ObservedStore>,
    second: Option<Arc<ObservedStore>>,
}

impl ObservedHarness {
    /// What was observed ends with its process.
    fn reopened(&mut self) {
        (self.store, self.second) = observed(&*self.inner);
    }
}

#[async_trait]
impl Harness for ObservedHarness {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        self.store.clone()
    }

    fn ledger(&self) -> Option<Arc<dyn Ledger>> {
        Some(self.store.clone())
    }

    fn documents(&self) -> Option<Arc<dyn Documents>> {
        Some(self.store.clone())
    }

    fn second_store(&self) -> Option<Arc<dyn QueueAdmin>> {
        self.second.clone().map(|store| store as Arc<dyn QueueAdmin>)
    }

    fn second_ledger(&self) -> Option<Arc<dyn Ledger>> {
        self.second.clone().map(|store| store as Arc<dyn Ledger>)
    }

    async fn quiet(&self) {
        self.inner.quiet().await;
    }

    async fn advance_ms(&self, ms: u64) {
        self.inner.advance_ms(ms).await;
    }

    async fn restart(&mut self) {
        self.inner.restart().await;
        self.reopened();
    }

    async fn crash(&mut self) {
        self.inner.crash().await;
        self.reopened();
    }

    fn fast_time(&self) -> bool {
        self.inner.fast_time()
    }

    fn exact_time(&self) -> bool {
        self.inner.exact_time()
    }

    fn can_set_wall_back(&self) -> bool {
        self.inner.can_set_wall_back()
    }

    fn set_wall_back(&self, ms: u64) {
        self.inner.set_wall_back(ms);
    }
}
