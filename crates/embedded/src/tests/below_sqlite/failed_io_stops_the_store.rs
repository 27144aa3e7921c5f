//! After a failed write or fsync the outcome is *unknown*, and the disk is not touched until the store is reopened.

use hapax_core::StoreError;

use super::{Rig, say, seeds, sweep};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    Sync,
    Write,
    Read,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    ProcessDies,
    PowerFails,
}

fn arm(rig: &Rig, fault: Fault, nth: u64) {
    match fault {
        Fault::Sync => rig.disk.fail_sync_at(nth),
        Fault::Write => rig.disk.fail_write_at(nth),
        Fault::Read => rig.disk.fail_read_at(nth),
    }
}

/// The store must only return `Unavailable`, and the disk must not be touched again.
fn stays_stopped(rig: &mut Rig) {
    let before = rig.disk.counters();
    let stopped = rig.writer().stopped.clone().expect("the store has stopped");
    assert!(matches!(&stopped, StoreError::Unavailable(why) if why.contains("start it again")), "{stopped}");
    for _ in 0..5 {
        assert_eq!(rig.step().error, Some(stopped.clone()));
    }
    rig.drop_writer();
    let after = rig.disk.counters();
    assert_eq!(
        (before.writes, before.syncs),
        (after.writes, after.syncs),
        "the disk was written after a failure: something was retried, or SQLite was closed"
    );
}

/// Returns false if the run ended before the nth operation.
fn fail_at(seed: u64, fault: Fault, suffix: &str, nth: u64, then: Then) -> bool {
    let mut rig = Rig::started(seed);
    rig.wal_pages_max = 25;
    rig.open().unwrap();
    assert_eq!(rig.steps(3), None);
    rig.disk.only_files_ending_in(suffix);
    arm(&rig, fault, nth);
    let Some(error) = rig.steps(16) else { return false };
    let expected = match fault {
        Fault::Sync | Fault::Write => matches!(error, StoreError::OutcomeUnknown(_)),
        // Nothing was written yet, so nothing is unknown, unless the read happened in the commit itself.
        Fault::Read => matches!(error, StoreError::OutcomeUnknown(_) | StoreError::Unavailable(_)),
    };
    assert!(expected, "{fault:?} {nth}: {error}");
    assert!(!rig.disk.faults_pending());
    stays_stopped(&mut rig);

    rig.disk.clear_faults();
    match then {
        Then::PowerFails => rig.power_loss(),
        Then::ProcessDies => {
            rig.disk.process_crash();
            rig.rewrite_wal();
        }
    }
    rig.open().unwrap();
    rig.verify().unwrap();
    assert_eq!(rig.steps(6), None);
    rig.verify().unwrap();
    // Later data must not depend on what the failed fsync left in the page cache.
    rig.power_loss();
    rig.open().unwrap();
    rig.verify().unwrap();
    true
}

fn fail_everywhere(fault: Fault, suffix: &str, stride: u64, at_least: u64) {
    for seed in seeds(1) {
        for then in [Then::ProcessDies, Then::PowerFails] {
            say(seed, &format!("{fault:?} fails on *{suffix}, then {then:?}"));
            sweep(seed, stride, at_least, |nth| fail_at(seed, fault, suffix, nth, then));
        }
    }
}

#[test]
fn when_an_fsync_of_the_log_fails() {
    fail_everywhere(Fault::Sync, "-wal", 1, 10);
}

#[test]
fn when_a_write_to_the_log_fails() {
    fail_everywhere(Fault::Write, "-wal", 9, 50);
}

#[test]
fn when_an_fsync_of_the_database_fails_in_a_checkpoint() {
    fail_everywhere(Fault::Sync, "hapax.db", 1, 2);
}

#[test]
fn when_a_write_to_the_database_fails_in_a_checkpoint() {
    fail_everywhere(Fault::Write, "hapax.db", 5, 10);
}

#[test]
fn when_a_read_fails() {
    fail_everywhere(Fault::Read, "", 5, 2);
}

#[test]
fn without_the_log_being_rewritten_a_failed_fsync_would_take_later_sends_with_it() {
    // Shows why `Embedded::open` rewrites the log: the sweeps above would notice if it did not.
    let loses = |seed: u64| {
        let mut rig = Rig::started(seed);
        rig.wal_pages_max = 10_000;
        rig.open().unwrap();
        rig.steps(3);
        rig.disk.fail_sync_at(1);
        while rig.steps(1).is_none() {}
        rig.drop_writer();
        rig.disk.process_crash();
        rig.open().unwrap();
        rig.verify().unwrap();
        rig.steps(5);
        rig.power_loss();
        rig.open().unwrap();
        rig.verify().is_err()
    };
    assert!((0..10).any(loses));
}
