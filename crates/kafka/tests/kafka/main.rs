//! Kafka, on one real broker for all cases.
//!
//! A case is `shared`, and runs beside others on topics and with ids of its own, or it is `alone`, because it kills or pauses
//! the broker. Without a broker all cases are skipped.

mod admin;
mod broker;
mod compressed;
mod consumers;
mod delayed_commit;
mod hostile;
mod members;
mod processor;
mod producer;
mod publisher;
mod rebalances;
mod recreated;
mod security;
mod sticky;
mod the_broker;
mod to_database;
mod to_postgres;

use std::sync::{LazyLock, PoisonError, RwLock};

use libtest_mimic::{Arguments, Trial};

use broker::Broker;
use hapax_faults::KafkaServer;

/// A test of this binary.
struct Case {
    name: &'static str,
    alone: bool,
    run: fn(&Broker),
}

/// A case that leaves the broker as it is.
fn shared(name: &'static str, run: fn(&Broker)) -> Case {
    Case { name, alone: false, run }
}

/// A case that disturbs all clients of the broker.
fn alone(name: &'static str, run: fn(&Broker)) -> Case {
    Case { name, alone: true, run }
}

/// Started by the first case; it ends with this process.
static BROKER: LazyLock<RwLock<Broker>> = LazyLock::new(|| RwLock::new(Broker::start()));

fn main() {
    to_postgres::child();
    if processor::is_child() {
        return processor::run_child();
    }
    if hostile::is_child() {
        return hostile::run_child();
    }
    if members::is_child() {
        return members::run_child();
    }
    let arguments = Arguments::from_args();
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    let cases = [
        the_broker::cases(),
        delayed_commit::cases(),
        processor::cases(),
        compressed::cases(),
        members::cases(),
        producer::cases(),
        rebalances::cases(),
        recreated::cases(),
        security::cases(),
        sticky::cases(),
        publisher::cases(),
        consumers::cases(),
        admin::cases(),
        hostile::cases(),
        to_database::cases(),
        to_postgres::cases(),
    ];
    let trials = cases.into_iter().flatten().map(|case| {
        let trial = Trial::test(case.name, move || {
            if case.alone {
                (case.run)(&BROKER.write().unwrap_or_else(PoisonError::into_inner));
            } else {
                (case.run)(&BROKER.read().unwrap_or_else(PoisonError::into_inner));
            }
            Ok(())
        });
        trial.with_ignored_flag(installed.is_err())
    });
    libtest_mimic::run(&arguments, trials.collect()).exit();
}
