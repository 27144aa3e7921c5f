//! Store, worker, HTTP layer and relay declare their metrics apart; a page that shows all of them needs each name once.
#![cfg(all(feature = "worker", feature = "http", feature = "relay"))]

use hapax::core::metrics::{KeptBy, Metric, Metrics, table_problems};
use hapax::core::{LedgerStats, QueueStats, StoreStatus};

fn of_processes() -> Vec<&'static Metric> {
    [hapax::worker::Counts::table(), hapax::http::Counters::table(), hapax::relay::RelayCounts::table()]
        .concat()
}

fn of_stores() -> Vec<&'static Metric> {
    [StoreStatus::table(), QueueStats::table(), LedgerStats::table(), hapax::relay::RouteStatus::table()]
        .concat()
}

#[test]
fn names_are_unique_and_well_formed() {
    let observed = hapax::observe::figures::DeliveryFigures::table();
    assert!(observed.iter().all(|metric| metric.kept_by == KeptBy::Process));
    assert_eq!(table_problems(&[of_stores(), of_processes(), observed].concat()), Vec::<String>::new());
}

#[test]
fn each_says_whether_the_process_or_the_store_keeps_it() {
    assert!(of_processes().iter().all(|metric| metric.kept_by == KeptBy::Process));
    assert!(of_stores().iter().all(|metric| metric.kept_by == KeptBy::Store));
}

#[test]
fn a_snapshot_is_complete() {
    let worker = hapax::worker::Counts::default().samples(&["jobs"]);
    let http = hapax::http::Counters::default().samples(&["shop"]);
    let relay = hapax::relay::RelayCounts::default().samples(&["orders"]);
    let names: Vec<_> = worker.iter().chain(&http).chain(&relay).map(|sample| sample.metric.name).collect();
    assert_eq!(names, of_processes().iter().map(|metric| metric.name).collect::<Vec<_>>());
}
