//! Single failures: each reaches the caller as an error, and later operations are correct.

mod common;

use common::{DB, code, commit, connect, open, surviving_prefix};
use hapax_simdisk::SimDisk;
use rusqlite::ffi;

#[test]
fn a_failed_fsync_fails_the_commit_and_its_data_never_becomes_durable() {
    let disk = SimDisk::new(3);
    let mut db = open(&disk, "FULL").unwrap();
    commit(&mut db, 1).unwrap();
    disk.fail_sync_at(1);
    assert_eq!(code(&commit(&mut db, 2).unwrap_err()), ffi::SQLITE_IOERR_FSYNC);
    assert!(!disk.faults_pending());
    disk.power_loss();
    assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 1);
}

#[test]
fn a_commit_that_failed_in_fsync_may_reappear_after_kill_9() {
    let disk = SimDisk::new(3);
    let mut db = open(&disk, "FULL").unwrap();
    commit(&mut db, 1).unwrap();
    disk.fail_sync_at(1);
    commit(&mut db, 2).unwrap_err();
    disk.process_crash();
    assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 2);
}

#[test]
fn a_store_that_goes_on_after_a_failed_fsync_can_lose_an_acknowledged_commit() {
    let lost = (0..20).filter(|seed| {
        let disk = SimDisk::new(*seed);
        let mut db = open(&disk, "FULL").unwrap();
        disk.fail_sync_at(1);
        commit(&mut db, 1).unwrap_err();
        // Recovery treats the failed commit as a real one, and the next commit follows it in the
        // WAL.
        disk.process_crash();
        let mut db = open(&disk, "FULL").unwrap();
        let next = surviving_prefix(&db) + 1;
        commit(&mut db, next).unwrap();
        disk.power_loss();
        surviving_prefix(&connect(&disk).unwrap()) < next
    });
    assert!(lost.count() > 0, "a failed fsync did no harm: it is not as on Linux");
}

#[test]
fn a_failed_write_fails_the_commit_and_the_next_succeeds() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    commit(&mut db, 1).unwrap();
    disk.fail_write_at(1);
    assert_eq!(code(&commit(&mut db, 2).unwrap_err()), ffi::SQLITE_IOERR_WRITE);
    commit(&mut db, 2).unwrap();
    disk.power_loss();
    assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 2);
}

#[test]
fn a_short_write_is_a_full_disk_and_the_next_commit_succeeds() {
    for nth in 1_u64.. {
        let disk = SimDisk::new(nth);
        let mut db = open(&disk, "FULL").unwrap();
        db.execute_batch("PRAGMA wal_autocheckpoint = 0").unwrap();
        commit(&mut db, 1).unwrap();
        disk.short_write_at(nth);
        let second = commit(&mut db, 2);
        if disk.faults_pending() {
            assert!(nth > 3, "the sweep covered the commit");
            return;
        }
        assert_eq!(code(&second.unwrap_err()), ffi::SQLITE_FULL);
        commit(&mut db, 2).unwrap();
        disk.power_loss();
        assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 2);
    }
}

#[test]
fn a_failed_read_fails_the_query_once() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    (1..=10).for_each(|n| commit(&mut db, n).unwrap());
    drop(db);
    let db = connect(&disk).unwrap();
    db.execute_batch("PRAGMA cache_size = 5").unwrap();
    db.query_row("SELECT count(*) FROM mark", [], |_| Ok(())).unwrap();
    disk.fail_read_at(1);
    let sum = || db.query_row("SELECT sum(length(body)) FROM entry", [], |row| row.get::<_, i64>(0));
    assert_eq!(code(&sum().unwrap_err()), ffi::SQLITE_IOERR_READ);
    sum().unwrap();
}

#[test]
fn faults_can_be_kept_to_the_database_or_its_wal() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    db.execute_batch("PRAGMA wal_autocheckpoint = 0").unwrap();
    disk.only_files_ending_in(".db");
    disk.fail_write_at(1);
    commit(&mut db, 1).unwrap();
    assert!(disk.faults_pending());
    let checkpoint = db.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(()));
    assert_eq!(code(&checkpoint.unwrap_err()), ffi::SQLITE_IOERR_WRITE);
    disk.clear_faults();
    assert_eq!(surviving_prefix(&db), 1);
}

#[test]
fn a_flipped_byte_stays_flipped() {
    let disk = SimDisk::new(1);
    let db = open(&disk, "FULL").unwrap();
    db.execute_batch("CREATE TABLE note (t TEXT); INSERT INTO note VALUES ('needle in a page')").unwrap();
    drop(db);
    let found = disk.find(DB, b"needle");
    assert_eq!(found.len(), 1);
    assert!(disk.flip_byte(DB, found[0]));
    assert!(!disk.flip_byte(DB, u64::MAX));
    disk.power_loss();
    assert!(disk.find(DB, b"needle").is_empty());
    assert_eq!(disk.find(DB, b"eedle"), [found[0] + 1]);
}

#[test]
fn counters_count() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    let before = disk.counters();
    commit(&mut db, 1).unwrap();
    let after = disk.counters();
    assert_eq!(after.syncs, before.syncs + 1, "one fsync per commit in WAL mode");
    assert!(after.writes > before.writes);
    assert!(after.bytes_written >= before.bytes_written + 4096);
    assert!(after.reads > 0 && after.bytes_read > 0);
}
