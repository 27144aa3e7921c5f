//! A deep queue: what it takes in memory and how long it takes to open again.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::args::Args;
use crate::ours::Ours;
use crate::report::{Store, median};

/// Memory that is the process's own: without pages of files, which the operating system can take back.
fn own_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells a process about itself");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line for it");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    kib * 1024
}

/// Has the operating system forget what it cached of the store's files. Needs no privileges, unlike dropping all.
fn forget_cached(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("the folder is there").flatten() {
        let file = File::open(entry.path()).expect("the file is there");
        file.sync_all().expect("the file can be synced");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice is taken");
    }
}

fn reopen<'a>(
    runtime: &'a Runtime,
    folder: &Path,
    bytes: usize,
    args: &Args,
    cold: bool,
) -> (Ours<'a>, Duration) {
    if cold {
        forget_cached(folder);
    }
    let start = Instant::now();
    let ours = Ours::open(runtime, folder, bytes);
    let took = start.elapsed();
    assert_eq!(ours.ready(), args.depth, "every message is there");
    (ours, took)
}

/// Fills a store through its API, then opens it again and again. Gives it back open.
pub fn fill_and_reopen<'a>(
    runtime: &'a Runtime,
    folder: &Path,
    bytes: usize,
    args: &Args,
) -> (Ours<'a>, Store) {
    let before = own_bytes();
    let start = Instant::now();
    let mut ours = Ours::open(runtime, folder, bytes);
    ours.fill(args.depth);
    let fill = start.elapsed();
    let memory = own_bytes().saturating_sub(before);

    let (mut warm, mut cold) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        for (times, is_cold) in [(&mut cold, true), (&mut warm, false)] {
            drop(ours);
            let (opened, took) = reopen(runtime, folder, bytes, args, is_cold);
            ours = opened;
            times.push(took.as_secs_f64());
        }
    }
    let store = Store {
        bytes,
        messages: args.depth,
        fill_secs: fill.as_secs_f64(),
        memory_bytes: memory,
        reopened_bytes: own_bytes().saturating_sub(before),
        warm_secs: median(warm),
        cold_secs: median(cold),
    };
    (ours, store)
}
