//! Which data power loss may take, and which it may not.

mod common;

use common::{DB, commit, connect, open, surviving_prefix};
use hapax_simdisk::SimDisk;

/// Commits from `next` to `upto`, or until the power fails. At the end the power fails in any case, before the
/// connection closes, because a close would sync. Returns the last acknowledged commit.
fn commit_until_power_loss(disk: &SimDisk, synchronous: &str, next: u32, upto: u32) -> u32 {
    let Ok(mut db) = open(disk, synchronous) else { return next - 1 };
    let last = (next..=upto).take_while(|n| commit(&mut db, *n).is_ok()).last();
    disk.power_loss();
    last.unwrap_or(next - 1)
}

#[test]
fn a_full_commit_survives_and_nothing_tears() {
    let mut lost_in_flight = 0;
    let mut kept_in_flight = 0;
    for seed in 0..200 {
        let disk = SimDisk::new(seed);
        drop(open(&disk, "FULL").unwrap());
        let mut rng = fastrand::Rng::with_seed(seed);
        let mut acknowledged = 0;
        // Two rounds, so that the second one starts from the files that the first left behind.
        for _ in 0..2 {
            disk.power_loss_at(rng.u64(1..150));
            let last = commit_until_power_loss(&disk, "FULL", acknowledged + 1, acknowledged + 25);
            disk.power_loss_at(0);
            let survived = surviving_prefix(&connect(&disk).unwrap());
            assert!(survived == last || survived == last + 1, "seed {seed}: {survived} of {last} survived");
            kept_in_flight += u32::from(survived > last);
            lost_in_flight += u32::from(survived == last);
            acknowledged = survived;
        }
    }
    assert!(lost_in_flight > 0 && kept_in_flight > 0, "{lost_in_flight} lost, {kept_in_flight} kept");
}

#[test]
fn power_may_fail_at_every_single_change() {
    for nth in 1_u64.. {
        let disk = SimDisk::new(nth);
        disk.power_loss_at(nth);
        let last = commit_until_power_loss(&disk, "FULL", 1, 8);
        if disk.faults_pending() {
            assert!(nth > 30, "the sweep covered the run");
            return;
        }
        let Ok(db) = open(&disk, "FULL") else { panic!("change {nth}: does not open") };
        let survived = surviving_prefix(&db);
        assert!(survived == last || survived == last + 1, "change {nth}: {survived} of {last} survived");
    }
}

#[test]
fn a_second_power_loss_during_recovery_does_no_harm() {
    for seed in 0..40 {
        let disk = SimDisk::new(seed);
        let last = commit_until_power_loss(&disk, "FULL", 1, 12);
        for nth in 1..6 {
            disk.power_loss_at(nth);
            let db = connect(&disk).unwrap();
            // Recovery may fail midway; it must not damage anything.
            _ = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
        }
        disk.power_loss_at(0);
        disk.power_loss();
        assert_eq!(surviving_prefix(&connect(&disk).unwrap()), last, "seed {seed}");
    }
}

#[test]
fn a_normal_commit_may_vanish_but_only_from_the_end() {
    let mut vanished = 0;
    for seed in 0..100 {
        let disk = SimDisk::new(seed);
        drop(open(&disk, "FULL").unwrap());
        let last = commit_until_power_loss(&disk, "NORMAL", 1, 10 + seed as u32 % 20);
        let survived = surviving_prefix(&connect(&disk).unwrap());
        assert!(survived <= last);
        vanished += u64::from(survived < last);
    }
    assert!(vanished > 0, "the disk never lost an unsynced commit");
}

#[test]
fn a_lying_fsync_loses_a_full_commit() {
    let mut harmed = 0;
    for seed in 0..40 {
        let disk = SimDisk::new(seed);
        drop(open(&disk, "FULL").unwrap());
        disk.lie_on_sync(true);
        let last = commit_until_power_loss(&disk, "FULL", 1, 20);
        assert_eq!(last, 20);
        let whole = std::panic::catch_unwind(|| surviving_prefix(&connect(&disk).unwrap()) == last);
        harmed += u64::from(!whole.unwrap_or(false));
    }
    assert!(harmed > 0, "the disk cannot lose: the other tests prove nothing");
}

#[test]
fn a_rollback_journal_with_extra_sync_keeps_every_commit() {
    for seed in 0..60 {
        let disk = SimDisk::new(seed);
        let db = open(&disk, "FULL").unwrap();
        db.execute_batch("PRAGMA journal_mode = DELETE").unwrap();
        drop(db);
        let mut db = connect(&disk).unwrap();
        db.execute_batch("PRAGMA synchronous = EXTRA").unwrap();
        disk.power_loss_at(1 + seed * 3);
        let last = (1..=12).take_while(|n| commit(&mut db, *n).is_ok()).last().unwrap_or(0);
        disk.power_loss_at(0);
        disk.power_loss();
        let survived = surviving_prefix(&connect(&disk).unwrap());
        assert!(survived == last || survived == last + 1, "seed {seed}: {survived} of {last} survived");
    }
}

#[test]
fn handles_of_before_are_dead_and_do_no_harm() {
    let disk = SimDisk::new(7);
    let mut before = open(&disk, "FULL").unwrap();
    commit(&mut before, 1).unwrap();
    disk.power_loss();
    assert!(commit(&mut before, 2).is_err());
    let mut after = open(&disk, "FULL").unwrap();
    commit(&mut after, 2).unwrap();
    assert!(before.query_row("SELECT count(*) FROM entry", [], |row| row.get::<_, i64>(0)).is_err());
    drop(before);
    commit(&mut after, 3).unwrap();
    assert!(disk.files().contains(&format!("{DB}-wal")), "the dead connection's close left the WAL alone");
    assert_eq!(surviving_prefix(&after), 3);
}
