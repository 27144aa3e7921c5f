//! The writer and SQLite on a simulated disk, in one thread: the same seed gives the same run.
//!
//! `HAPAX_SEED=n` replays one seed, `HAPAX_LONG=1` runs many more.

mod crashes_lose_nothing;
mod failed_io_stops_the_store;
mod full_disk_rolls_back;
mod ledger;
mod rig;

use ledger::Ledger;
use rig::Rig;

/// The seeds of this run: `few` of them, or many more if requested.
fn seeds(few: u64) -> Vec<u64> {
    if let Some(seed) = std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok()) {
        return vec![seed];
    }
    (0..few * scale()).collect()
}

fn scale() -> u64 {
    if std::env::var_os("HAPAX_LONG").is_some() { 50 } else { 1 }
}

/// Printed if the test fails.
fn say(seed: u64, what: &str) {
    println!("HAPAX_SEED={seed} replays this ({what})");
}

/// Calls `at` with the 1st, 2nd... position of a fault until it returns that the run ended before. CI tests one
/// position in `stride`, from a different start with each seed.
fn sweep(seed: u64, stride: u64, at_least: u64, mut at: impl FnMut(u64) -> bool) {
    let stride = if scale() > 1 { 1 } else { stride };
    let mut nth = 1 + seed % stride;
    while at(nth) {
        nth += stride;
    }
    println!("{nth} places");
    assert!(nth > at_least, "the sweep ended early: {nth}");
}
