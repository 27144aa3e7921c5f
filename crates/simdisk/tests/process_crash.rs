//! Kill -9: the operating system keeps all written data.

mod common;

use common::{commit, connect, open, surviving_prefix};
use hapax_simdisk::SimDisk;

#[test]
fn a_normal_commit_survives() {
    for seed in 0..50 {
        let disk = SimDisk::new(seed);
        let mut db = open(&disk, "NORMAL").unwrap();
        (1..=20).for_each(|n| commit(&mut db, n).unwrap());
        disk.process_crash();
        assert!(commit(&mut db, 21).is_err());
        assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 20);
    }
}

#[test]
fn an_open_transaction_vanishes() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    commit(&mut db, 1).unwrap();
    // Too big for the page cache: uncommitted pages are in the WAL when the process dies.
    db.execute_batch("PRAGMA cache_size = 5; BEGIN; INSERT INTO entry VALUES (2, zeroblob(500000))").unwrap();
    disk.process_crash();
    assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 1);
}

#[test]
fn the_process_may_die_at_every_single_change() {
    for nth in 1_u64.. {
        let disk = SimDisk::new(nth);
        disk.process_crash_at(nth);
        let opened = open(&disk, "NORMAL").ok();
        let last = opened
            .map_or(0, |mut db| (1..=8).take_while(|n| commit(&mut db, *n).is_ok()).last().unwrap_or(0));
        if disk.faults_pending() {
            return;
        }
        let survived = surviving_prefix(&open(&disk, "NORMAL").unwrap());
        assert!(survived == last || survived == last + 1, "change {nth}: {survived} of {last} survived");
    }
}

#[test]
fn what_was_unsynced_can_still_be_lost() {
    let lost = (0..40).filter(|seed| {
        let disk = SimDisk::new(*seed);
        drop(open(&disk, "FULL").unwrap());
        let mut db = open(&disk, "NORMAL").unwrap();
        commit(&mut db, 1).unwrap();
        disk.process_crash();
        disk.power_loss();
        surviving_prefix(&connect(&disk).unwrap()) == 0
    });
    assert!(lost.count() > 0);
}
