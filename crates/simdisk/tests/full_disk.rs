//! A disk that becomes full and then gets more space.

mod common;

use common::{code, commit, connect, open, surviving_prefix};
use hapax_simdisk::SimDisk;
use rusqlite::ffi;

#[test]
fn a_full_disk_refuses_commits_until_there_is_room() {
    for slack in [0, 1, 100, 4096, 5000, 50_000] {
        let disk = SimDisk::new(slack);
        assert_eq!(disk.free_bytes(), u64::MAX);
        let mut db = open(&disk, "FULL").unwrap();
        commit(&mut db, 1).unwrap();
        let used: u64 =
            disk.files().iter().filter_map(|file| disk.contents(file)).map(|b| b.len() as u64).sum();
        disk.set_capacity(Some(used + slack));
        assert_eq!(disk.free_bytes(), slack);
        let mut next = 2;
        let error = loop {
            match commit(&mut db, next) {
                Ok(()) => next += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(code(&error), ffi::SQLITE_FULL);
        assert_eq!(surviving_prefix(&db), next - 1);
        disk.set_capacity(Some(used + 1_000_000));
        commit(&mut db, next).unwrap();
        disk.power_loss();
        assert_eq!(surviving_prefix(&connect(&disk).unwrap()), next);
    }
}

#[test]
fn deleting_a_file_gives_its_room_back() {
    let disk = SimDisk::new(1);
    let mut db = open(&disk, "FULL").unwrap();
    disk.set_capacity(Some(1_000_000));
    (1..=5).for_each(|n| commit(&mut db, n).unwrap());
    let with_wal = disk.free_bytes();
    drop(db);
    assert_eq!(disk.files(), [common::DB]);
    assert!(disk.free_bytes() > with_wal);
}
