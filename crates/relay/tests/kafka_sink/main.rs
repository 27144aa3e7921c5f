//! Relays from a real PostgreSQL into a real Kafka: each message once for readers of committed records, in order per key.
//!
//! This binary is also the relay that is killed, when its environment says so.

mod crashes;
mod fixture;
mod held;
#[path = "../relays/fixture.rs"]
#[allow(dead_code, reason = "the other tests of relays use more of it")]
mod outbox;
mod recreated;
mod refusals;
mod secured;
mod several;
mod sqlite;
mod three_nodes;

use hapax_faults::KafkaServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

use fixture::Setting;

/// Lists tests by their names.
macro_rules! tests {
    ($($module:ident::$name:ident),+ $(,)?) => {
        [$((stringify!($name), $module::$name as fn(&Setting))),+]
    };
}

fn main() -> std::process::ExitCode {
    if fixture::is_child() {
        fixture::run_child();
    }
    let tests = tests![
        refusals::records_have_key_id_and_headers,
        refusals::the_positions_topic_is_compacted_or_refused,
        refusals::a_cluster_without_transaction_version_2_is_refused,
        crashes::a_relay_killed_at_each_request_publishes_once,
        crashes::a_relay_that_dies_after_its_commit_repeats_nothing,
        crashes::a_killed_broker_is_waited_for,
        several::a_relay_that_is_stopped_inside_a_transaction_is_fenced,
        several::a_relay_that_is_stopped_before_its_records_is_fenced,
        several::a_relay_that_wakes_before_it_takes_over_publishes_nothing,
        several::relays_that_are_killed_and_stopped_publish_once,
        held::a_message_whose_topic_is_missing_is_parked,
        held::a_message_too_large_for_its_topic_is_parked,
        held::a_held_message_is_published_once,
        held::the_list_of_published_messages_stays_short,
        held::a_restored_outbox_loses_no_message,
        recreated::a_topic_that_is_created_again_gets_what_follows_once,
        recreated::a_positions_topic_that_is_created_again_repeats_nothing,
        recreated::a_positions_topic_that_is_away_is_waited_for,
        sqlite::an_outbox_in_a_file_is_published_once,
        secured::a_relay_publishes_over_tls_and_every_mechanism,
        secured::a_missing_right_is_told_at_the_start,
    ];
    let long = tests![three_nodes::each_message_is_there_once_while_brokers_of_three_are_killed];
    let trial = |(name, test): (&'static str, fn(&Setting))| {
        Trial::ignorable_test(name, move || match (outbox::shared(), KafkaServer::jars()) {
            (Ok(server), Ok(_)) => {
                test(&Setting { server, broker: fixture::broker() });
                Ok::<_, Failed>(Completion::Completed)
            }
            (Err(why), _) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
            (_, Err(why)) => Ok(Completion::ignored_with(why)),
        })
    };
    let long = long.map(|(name, test)| {
        if outbox::is_long() {
            return trial((name, test));
        }
        Trial::ignorable_test(name, || Ok(Completion::ignored_with("long: set HAPAX_LONG to run it")))
    });
    // The proxy's faults are those of one test at a time.
    let arguments = Arguments { test_threads: Some(1), ..Arguments::from_args() };
    libtest_mimic::run(&arguments, tests.into_iter().map(trial).chain(long).collect()).exit_code()
}
