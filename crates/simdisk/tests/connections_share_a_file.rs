//! Locks and shared memory across connections, and files without a name.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{DB, code, commit, connect, open, surviving_prefix};
use hapax_simdisk::SimDisk;
use rusqlite::{Connection, OpenFlags, ffi};

#[test]
fn connections_in_wal_mode_see_each_others_commits() {
    let disk = SimDisk::new(1);
    let mut one = open(&disk, "FULL").unwrap();
    let mut two = open(&disk, "FULL").unwrap();
    let mode: String = two.query_row("PRAGMA journal_mode", [], |row| row.get(0)).unwrap();
    assert_eq!(mode, "wal");
    for n in (1..100).step_by(2) {
        commit(&mut one, n).unwrap();
        assert_eq!(surviving_prefix(&two), n);
        commit(&mut two, n + 1).unwrap();
        assert_eq!(surviving_prefix(&one), n + 1);
    }
}

#[test]
fn a_reader_keeps_its_snapshot_while_a_writer_commits() {
    let disk = SimDisk::new(1);
    let mut writer = open(&disk, "FULL").unwrap();
    let reader = connect(&disk).unwrap();
    commit(&mut writer, 1).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    assert_eq!(surviving_prefix(&reader), 1);
    (2..60).for_each(|n| commit(&mut writer, n).unwrap());
    assert_eq!(surviving_prefix(&reader), 1);
    reader.execute_batch("COMMIT").unwrap();
    assert_eq!(surviving_prefix(&reader), 59);
}

#[test]
fn a_second_writer_is_busy() {
    for mode in ["WAL", "DELETE"] {
        let disk = SimDisk::new(1);
        let one = open(&disk, "FULL").unwrap();
        one.execute_batch(&format!("PRAGMA journal_mode = {mode}")).unwrap();
        let two = connect(&disk).unwrap();
        two.busy_timeout(Duration::ZERO).unwrap();
        one.execute_batch("BEGIN IMMEDIATE; INSERT INTO mark VALUES (1)").unwrap();
        let error = two.execute_batch("BEGIN IMMEDIATE").unwrap_err();
        assert_eq!(code(&error), ffi::SQLITE_BUSY, "{mode}");
        let seen = two.query_row("SELECT count(*) FROM mark", [], |row| row.get::<_, i64>(0));
        assert_eq!(seen.unwrap(), 0, "{mode}: a reader is let in beside the writer");
        one.execute_batch("COMMIT").unwrap();
        two.execute_batch("BEGIN IMMEDIATE; COMMIT").unwrap();
    }
}

#[test]
fn a_rollback_journal_makes_the_committer_wait_for_readers() {
    let disk = SimDisk::new(1);
    let writer = open(&disk, "FULL").unwrap();
    writer.execute_batch("PRAGMA journal_mode = DELETE").unwrap();
    writer.busy_timeout(Duration::ZERO).unwrap();
    let reader = connect(&disk).unwrap();
    reader.execute_batch("BEGIN").unwrap();
    assert_eq!(surviving_prefix(&reader), 0);
    writer.execute_batch("BEGIN; INSERT INTO mark VALUES (1)").unwrap();
    assert_eq!(code(&writer.execute_batch("COMMIT").unwrap_err()), ffi::SQLITE_BUSY);
    let late = connect(&disk).unwrap();
    late.busy_timeout(Duration::ZERO).unwrap();
    let error = late.query_row("SELECT count(*) FROM mark", [], |_| Ok(())).unwrap_err();
    assert_eq!(code(&error), ffi::SQLITE_BUSY, "a pending writer keeps new readers out");
    reader.execute_batch("COMMIT").unwrap();
    writer.execute_batch("COMMIT").unwrap();
}

#[test]
fn a_checkpoint_in_another_thread_runs_beside_the_writer_and_readers() {
    let disk = SimDisk::new(1);
    let mut writer = open(&disk, "FULL").unwrap();
    writer.execute_batch("PRAGMA wal_autocheckpoint = 0").unwrap();
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let checkpointer = scope.spawn(|| {
            let db = connect(&disk).unwrap();
            let mut moved = 0;
            while !done.load(Ordering::Relaxed) {
                moved +=
                    db.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |row| row.get::<_, i64>(2)).unwrap();
                std::thread::yield_now();
            }
            moved
        });
        let reader = scope.spawn(|| {
            let db = connect(&disk).unwrap();
            let mut seen = 0;
            while !done.load(Ordering::Relaxed) {
                db.execute_batch("BEGIN").unwrap();
                let now = surviving_prefix(&db);
                db.execute_batch("COMMIT").unwrap();
                assert!(now >= seen);
                seen = now;
            }
        });
        (1..=200).for_each(|n| commit(&mut writer, n).unwrap());
        done.store(true, Ordering::Relaxed);
        assert!(checkpointer.join().unwrap() > 0);
        reader.join().unwrap();
    });
    drop(writer);
    disk.power_loss();
    assert_eq!(surviving_prefix(&connect(&disk).unwrap()), 200);
}

#[test]
fn power_loss_in_the_middle_of_threads_at_work_keeps_what_was_acknowledged() {
    for seed in 0..20 {
        let disk = SimDisk::new(seed);
        let mut writer = open(&disk, "FULL").unwrap();
        writer.execute_batch("PRAGMA wal_autocheckpoint = 0").unwrap();
        let checkpointer = connect(&disk).unwrap();
        disk.power_loss_at(40 + seed * 5);
        let last = std::thread::scope(|scope| {
            scope.spawn(|| {
                let checkpoint = "PRAGMA wal_checkpoint(RESTART)";
                while checkpointer.query_row(checkpoint, [], |_| Ok(())).is_ok() {
                    std::thread::yield_now();
                }
                drop(checkpointer);
            });
            (1..10_000).take_while(|n| commit(&mut writer, *n).is_ok()).last().unwrap_or(0)
        });
        drop(writer);
        let survived = surviving_prefix(&connect(&disk).unwrap());
        assert!(survived == last || survived == last + 1, "seed {seed}: {survived} of {last} survived");
    }
}

#[test]
fn vacuum_and_spilled_temporary_tables_leave_no_stray_files() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    (1..=20).for_each(|n| commit(&mut db, n).unwrap());
    db.execute_batch("PRAGMA temp_store = FILE; VACUUM INTO 'copy.db'; VACUUM").unwrap();
    let copy = Connection::open_with_flags_and_vfs("copy.db", OpenFlags::default(), disk.vfs_name()).unwrap();
    assert_eq!(surviving_prefix(&copy), 20);
    let before = disk.counters();
    copy.execute_batch(
        "PRAGMA temp_store = FILE; PRAGMA temp.cache_size = 5; CREATE TEMP TABLE t AS SELECT * FROM entry",
    )
    .unwrap();
    assert!(
        disk.counters().writes > before.writes,
        "too big for its cache, it went to a file without a name"
    );
    let sum = |table: &str| {
        let sql = format!("SELECT sum(length(body)) FROM {table}");
        copy.query_row(&sql, [], |row| row.get::<_, i64>(0)).unwrap()
    };
    assert_eq!(sum("temp.t"), sum("entry"));
    drop(copy);
    drop(db);
    assert_eq!(disk.files(), ["copy.db", DB]);
}

#[test]
fn a_read_only_connection_reads_and_cannot_write() {
    let disk = SimDisk::new(1);
    let mut writer = open(&disk, "FULL").unwrap();
    commit(&mut writer, 1).unwrap();
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let mut reader = Connection::open_with_flags_and_vfs(DB, flags, disk.vfs_name()).unwrap();
    assert_eq!(surviving_prefix(&reader), 1);
    assert_eq!(code(&commit(&mut reader, 2).unwrap_err()), ffi::SQLITE_READONLY);
    let missing = Connection::open_with_flags_and_vfs("none.db", flags, disk.vfs_name());
    assert_eq!(code(&missing.unwrap_err()), ffi::SQLITE_CANTOPEN);
}

#[test]
fn connections_outlive_the_value_that_made_their_disk() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    drop(disk);
    commit(&mut db, 1).unwrap();
    assert_eq!(surviving_prefix(&db), 1);
}
