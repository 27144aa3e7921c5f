//! Share groups as a source of workers, on one real broker for all cases.

mod broker;
#[path = "../common/cases.rs"]
mod cases;
mod disturbed;
mod ends;
mod leases;
mod once;
mod refused;
mod secured;
mod worked_on;

use std::sync::LazyLock;

use broker::Broker;
use cases::{alone, shared};

type Case = cases::Case<Broker>;

static BROKER: LazyLock<Broker> = LazyLock::new(Broker::start);

fn main() {
    if once::is_child() {
        return once::run_child();
    }
    let cases = [
        worked_on::cases(),
        leases::cases(),
        ends::cases(),
        once::cases(),
        refused::cases(),
        disturbed::cases(),
        secured::cases(),
    ];
    cases::run(&BROKER, cases.into_iter().flatten());
}
