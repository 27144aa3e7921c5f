//! Kafka, on one real broker for most cases.

mod admin;
mod bounds;
mod broker;
#[path = "../common/cases.rs"]
mod cases;
mod compressed;
mod consumers;
mod delayed_commit;
mod hostile;
mod krafka;
mod krafka_audit;
mod late_requests;
mod members;
mod old_versions;
mod overlap;
mod processor;
mod producer;
mod publisher;
mod rebalances;
mod recreated;
mod security;
mod sent_ahead;
mod sticky;
mod the_broker;
mod three_nodes;
mod to_database;
mod to_postgres;

use std::sync::LazyLock;

use broker::Broker;
use cases::{alone, long, shared};

type Case = cases::Case<Broker>;

static BROKER: LazyLock<Broker> = LazyLock::new(Broker::start);

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
    let cases = [
        the_broker::cases(),
        delayed_commit::cases(),
        processor::cases(),
        bounds::cases(),
        compressed::cases(),
        members::cases(),
        overlap::cases(),
        producer::cases(),
        rebalances::cases(),
        recreated::cases(),
        security::cases(),
        sent_ahead::cases(),
        sticky::cases(),
        publisher::cases(),
        consumers::cases(),
        admin::cases(),
        hostile::cases(),
        to_database::cases(),
        to_postgres::cases(),
        old_versions::cases(),
        three_nodes::cases(),
        late_requests::cases(),
        krafka_audit::cases(),
    ];
    cases::run(&BROKER, cases.into_iter().flatten());
}
