//! Relays from a real PostgreSQL, under everything that can go wrong.

mod crashes;
mod failing_sinks;
mod fixture;
mod naive;
mod real_sinks;
mod sharing;
mod sqlite;
mod storm;

use hapax_faults::PostgresServer;
use libtest_mimic::{Arguments, Completion, Failed, Trial};

/// Lists tests by their names.
macro_rules! tests {
    ($($module:ident::$name:ident),+ $(,)?) => {
        [$((stringify!($name), (|server| fixture::block_on($module::$name(server))) as fn(&'static PostgresServer))),+]
    };
}

fn main() -> std::process::ExitCode {
    let tests = tests![
        storm::out_of_order_commits_lose_nothing,
        storm::tables_stay_small_under_load,
        failing_sinks::a_sink_that_is_down_gets_everything_in_order,
        failing_sinks::poison_blocks_only_its_key,
        failing_sinks::a_new_message_does_not_overtake_a_held_one,
        failing_sinks::nothing_is_read_while_too_many_keys_are_held,
        failing_sinks::a_message_that_keeps_failing_is_parked,
        failing_sinks::a_message_that_hangs_delays_no_other_key,
        failing_sinks::a_later_time_is_waited_for,
        crashes::a_crash_at_every_step_repeats_nothing_at_a_deduplicating_sink,
        crashes::a_restarted_database_is_waited_for,
        crashes::an_outage_within_a_round_repeats_nothing,
        crashes::a_restored_backup_swallows_no_message,
        crashes::a_database_restored_under_a_relay_loses_nothing,
        sharing::two_relays_share_the_work_in_order,
        sharing::a_stopped_relay_is_replaced_and_fenced,
        sharing::a_bucket_that_came_back_is_read_again,
        sharing::a_bucket_that_was_taken_is_not_published_further,
        sharing::routes_do_not_wait_for_each_other,
        sharing::a_stalled_relay_is_not_ready,
        real_sinks::a_queue_takes_each_message_once,
        real_sinks::a_stream_of_nats_takes_each_message_once,
        real_sinks::a_webhook_is_signed_and_judged_by_its_status,
        sqlite::a_file_has_an_outbox_too,
        sqlite::looks_of_a_relay_do_not_wait_for_writers,
        sqlite::messages_that_no_route_takes_are_not_in_the_way,
    ];
    let trial = |(name, test): (&'static str, fn(&'static PostgresServer))| {
        Trial::ignorable_test(name, move || match fixture::shared() {
            Ok(_) if name.contains("of_nats") && real_sinks::nats_is_missing() => {
                Ok(Completion::ignored_with("needs nats-server"))
            }
            Ok(server) => {
                test(server);
                Ok::<_, Failed>(Completion::Completed)
            }
            Err(why) => Ok(Completion::ignored_with(format!("needs PostgreSQL 15: {why}"))),
        })
    };
    libtest_mimic::run(&Arguments::from_args(), tests.into_iter().map(trial).collect()).exit_code()
}
