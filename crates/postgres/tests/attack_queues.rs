//! Several processes and many clients on one database, under faults at random times. The checker is
//! `hapax_conformance::attack`.
//!
//! `HAPAX_SEED=n` chooses other faults, `HAPAX_LONG=1` runs twenty times as long.

mod common;

use std::sync::Arc;

use common::trouble::Site;
use hapax_conformance::attack::{QueueAttack, time};
use hapax_core::QueueAdmin;

fn main() -> std::process::ExitCode {
    common::main(&[
        common::Test { name: "a_standard_queue_survives", run: |_| attack(false) },
        common::Test { name: "a_fifo_queue_survives", run: |_| attack(true) },
    ])
}

const PROCESSES: usize = 3;

fn attack(fifo: bool) {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let site = Arc::new(Site::start(PROCESSES).await);
        let stores = site.stores.iter().map(|store| Arc::new(store.clone()) as Arc<dyn QueueAdmin>);
        let attack = QueueAttack::begin(stores.collect(), "orders", fifo).await;
        site.trouble(time(12), || attack.accepted() > 150).await;
        attack.end().await;
    });
}
