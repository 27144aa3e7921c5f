//! The suite against a store that is obvious and keeps everything in memory: the cases do not contradict each other.

mod reference;

use std::sync::Arc;

use async_trait::async_trait;
use hapax_conformance::{Factory, Harness, RecordedOutcome, cases};
use hapax_core::{ManualClock, QueueAdmin};
use reference::Reference;

struct InMemory {
    clock: Arc<ManualClock>,
    store: Arc<Reference>,
}

#[async_trait]
impl Harness for InMemory {
    fn store(&self) -> Arc<dyn QueueAdmin> {
        Arc::clone(&self.store) as Arc<dyn QueueAdmin>
    }

    async fn advance_ms(&self, ms: u64) {
        self.clock.advance_ms(ms);
    }

    async fn restart(&mut self) {
        self.store = self.store.reopened();
    }

    async fn crash(&mut self) {
        self.restart().await;
    }

    fn fast_time(&self) -> bool {
        true
    }

    fn can_set_wall_back(&self) -> bool {
        true
    }

    fn set_wall_back(&self, ms: u64) {
        use hapax_core::Clock as _;
        self.clock.set_wall_ms(self.clock.wall_ms() - ms);
    }
}

struct InMemoryStores;

#[async_trait]
impl Factory for InMemoryStores {
    async fn fresh(&self) -> Box<dyn Harness> {
        let clock = Arc::new(ManualClock::at_ms(1_700_000_000_000));
        Box::new(InMemory { store: Reference::new(Arc::clone(&clock)), clock })
    }
}

mod every {
    use super::InMemoryStores;

    hapax_conformance::queue_suite!(InMemoryStores);
}

#[test]
fn a_plain_loop_runs_the_cases_too() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for case in cases().iter().filter(|case| case.point == 2) {
        let outcome = runtime.block_on(async { case.run(InMemoryStores.fresh().await).await });
        assert_eq!(outcome, RecordedOutcome::Passed, "{case}");
    }
}

#[test]
fn every_point_has_cases_and_every_case_its_own_name() {
    for point in 0..=11 {
        assert!(cases().iter().any(|case| case.point == point), "point {point}");
    }
    let mut names: Vec<_> = cases().iter().map(|case| case.name).collect();
    names.sort_unstable();
    assert!(names.windows(2).all(|pair| pair[0] != pair[1]));
}
