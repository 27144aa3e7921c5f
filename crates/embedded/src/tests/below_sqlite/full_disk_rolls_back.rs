//! A full disk: operations are refused, memory rolls back with SQLite, and free space is enough to continue.

use hapax_core::StoreError;

use super::{Rig, say, seeds, sweep};
use crate::engine::Counters;

fn used_bytes(rig: &Rig) -> u64 {
    rig.disk.files().iter().filter_map(|file| rig.disk.contents(file)).map(|bytes| bytes.len() as u64).sum()
}

/// Steps once. If the wave was refused, nothing may have changed except the fence, which only grows.
fn step(rig: &mut Rig) -> bool {
    let usage = |rig: &mut Rig| Counters { fence: 0, ..rig.writer().engine.usage() };
    let before = (rig.stats(), usage(rig));
    match rig.step().error {
        None => false,
        Some(StoreError::Full(_)) => {
            assert_eq!((rig.stats(), usage(rig)), before, "a refused wave left a trace");
            assert_eq!(rig.writer().stopped, None);
            true
        }
        Some(other) => panic!("a full disk answered: {other}"),
    }
}

#[test]
fn refused_while_full_and_going_on_with_room() {
    for seed in seeds(12) {
        say(seed, "full disk");
        let mut rig = Rig::started(seed);
        rig.wal_pages_max = 25;
        rig.open().unwrap();
        let mut refused = 0;
        for _ in 0..8 {
            let room = rig.rng.u64(..60_000);
            rig.disk.set_capacity(Some(used_bytes(&rig) + room));
            for _ in 0..12 {
                refused += usize::from(step(&mut rig));
            }
            rig.verify().unwrap();
            rig.disk.set_capacity(None);
            // Longer than the store pauses its timers.
            rig.clock.advance_ms(1_000);
            assert_eq!(rig.steps(3), None, "there is room again");
            rig.verify().unwrap();
        }
        assert!(refused > 5, "the disk was hardly ever full: {refused}");
        if rig.rng.bool() {
            rig.power_loss();
        } else {
            rig.disk.process_crash();
        }
        rig.open().unwrap();
        rig.verify().unwrap();
    }
}

#[test]
fn a_short_write_at_any_place_rolls_back_and_the_store_goes_on() {
    for seed in seeds(1) {
        say(seed, "short writes");
        sweep(seed, 7, 50, |nth| {
            let mut rig = Rig::started(seed);
            rig.wal_pages_max = 25;
            rig.open().unwrap();
            rig.disk.short_write_at(nth);
            let refused = (0..14).filter(|_| step(&mut rig)).count();
            assert!(refused <= 1);
            if rig.disk.faults_pending() {
                return false;
            }
            rig.verify().unwrap();
            rig.power_loss();
            rig.open().unwrap();
            rig.verify().unwrap();
            true
        });
    }
}
