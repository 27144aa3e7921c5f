//! Power loss and process death at every point: acknowledged operations survive.

use super::{Rig, say, scale, seeds, sweep};

#[derive(Clone, Copy, PartialEq, Eq)]
enum Crash {
    Power,
    Process,
}

/// Arms a crash at the nth change of the disk from now.
fn arm(rig: &Rig, crash: Crash, nth: u64) {
    match crash {
        Crash::Power => rig.disk.power_loss_at(nth),
        Crash::Process => rig.disk.process_crash_at(nth),
    }
}

/// Reopens the store after a crash and checks it.
fn recover(rig: &mut Rig, crash: Crash) {
    rig.disk.clear_faults();
    match crash {
        Crash::Power => rig.ledger.latest.clear(),
        Crash::Process => rig.rewrite_wal(),
    }
    rig.open().unwrap();
    rig.create_queues().unwrap();
    rig.verify().unwrap();
}

/// A store from its first write: creation, queues, work, checkpoints; it crashes at the nth change.
fn crash_at(seed: u64, crash: Crash, nth: u64) -> bool {
    let mut rig = Rig::new(seed);
    rig.wal_pages_max = 25;
    arm(&rig, crash, nth);
    let _ = rig.open().is_ok() && rig.create_queues().is_ok() && rig.steps(16).is_none();
    let crashed = !rig.disk.faults_pending();
    recover(&mut rig, crash);
    assert_eq!(rig.steps(5), None);
    rig.verify().unwrap();
    crashed
}

fn crash_everywhere(crash: Crash, name: &str) {
    for seed in seeds(1) {
        say(seed, name);
        sweep(seed, 4, 100, |nth| crash_at(seed, crash, nth));
    }
}

#[test]
fn power_lost_at_any_change_of_the_disk() {
    crash_everywhere(Crash::Power, "power loss sweep");
}

#[test]
fn process_killed_at_any_change_of_the_disk() {
    crash_everywhere(Crash::Process, "process death sweep");
}

#[test]
fn a_store_that_crashes_again_and_again() {
    for seed in seeds(6) {
        say(seed, "many crashes");
        let mut rig = Rig::started(seed);
        for _ in 0..30 * scale().min(4) {
            let crash = if rig.rng.bool() { Crash::Power } else { Crash::Process };
            let nth = rig.rng.u64(1..150);
            arm(&rig, crash, nth);
            rig.steps(60);
            if rig.disk.faults_pending() {
                match crash {
                    Crash::Power => rig.power_loss(),
                    Crash::Process => rig.disk.process_crash(),
                }
            }
            // Sometimes recovery itself is interrupted.
            if rig.rng.u8(..3) == 0 {
                rig.disk.clear_faults();
                let nth = rig.rng.u64(1..20);
                arm(&rig, Crash::Power, nth);
                rig.ledger.latest.clear();
                if rig.open().is_ok() {
                    rig.power_loss();
                }
            }
            recover(&mut rig, crash);
        }
        assert!(rig.ledger.gone.len() > 10 && rig.ledger.next > 100, "little happened");
    }
}

#[test]
fn a_disk_that_lies_about_fsync_is_found_out() {
    // Proves that the checks above can fail: the guarantee cannot hold on such a disk.
    let found_out = |seed: u64| {
        let mut rig = Rig::started(seed);
        rig.disk.lie_on_sync(true);
        rig.steps(30);
        rig.power_loss();
        rig.disk.clear_faults();
        let checked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            rig.open().map_err(|error| error.to_string()).and_then(|()| rig.verify())
        }));
        !matches!(checked, Ok(Ok(())))
    };
    let count = (0..20).filter(|seed| found_out(*seed)).count();
    assert!(count >= 10, "only {count} of 20 runs on a lying disk were found to lose something");
}
