//! Share groups as a source of workers, on one real broker for all cases.
//!
//! A case is `shared`, and runs beside others on topics and groups of its own, or it is `alone`, because it stops the broker
//! or cuts connections. Without a broker all cases are skipped.

mod broker;
mod disturbed;
mod ends;
mod leases;
mod once;
mod refused;
mod worked_on;

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

/// A case that disturbs other clients of the broker.
fn alone(name: &'static str, run: fn(&Broker)) -> Case {
    Case { name, alone: true, run }
}

/// Started by the first case; it ends with this process.
static BROKER: LazyLock<RwLock<Broker>> = LazyLock::new(|| RwLock::new(Broker::start()));

fn main() {
    if once::is_child() {
        return once::run_child();
    }
    let arguments = Arguments::from_args();
    let installed = KafkaServer::jars();
    if let Err(why) = &installed {
        eprintln!("skipped: {why}");
    }
    let cases = [
        worked_on::cases(),
        leases::cases(),
        ends::cases(),
        once::cases(),
        refused::cases(),
        disturbed::cases(),
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
