//! In a test binary of its own: it seeds SQLite's random numbers, which the whole process shares.

mod common;

use common::{commit, open};
use hapax_simdisk::{Counters, SimDisk, seed_sqlite_randomness};

type Survivors = (Vec<(String, Option<Vec<u8>>)>, Counters);

fn survivors(seed: u64) -> Survivors {
    seed_sqlite_randomness(1);
    let disk = SimDisk::new(seed);
    drop(open(&disk, "FULL").unwrap());
    for first in [1, 101, 201] {
        let mut db = open(&disk, "NORMAL").unwrap();
        (first..first + 28).for_each(|n| commit(&mut db, n).unwrap());
        disk.power_loss();
    }
    let files = disk.files().into_iter().map(|name| (name.clone(), disk.contents(&name))).collect();
    (files, disk.counters())
}

#[test]
fn the_same_seed_and_operations_leave_the_same_bytes_and_other_seeds_others() {
    let mut distinct = std::collections::BTreeSet::new();
    for seed in 0..20 {
        let once = survivors(seed);
        assert_eq!(once, survivors(seed), "seed {seed}");
        distinct.insert(once.0);
    }
    assert!(distinct.len() > 10, "only {} outcomes of 20 seeds", distinct.len());
}
