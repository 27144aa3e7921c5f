//! Memory of the process for a deep queue, and the time to reopen that queue.

use std::fs::File;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use tokio::runtime::Runtime;

use crate::args::Args;
use crate::measure::median;
use crate::ours::Ours;
use crate::report::Store;

/// Memory of the process without file pages, which the operating system can reclaim.
fn own_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells a process about itself");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a line for it");
    let kib: u64 = line.trim().trim_end_matches("kB").trim().parse().expect("a number");
    kib * 1024
}

/// Makes the operating system drop its cache of the store's files. Unlike dropping all caches, this needs no
/// privileges.
fn forget_cached(folder: &Path) {
    for entry in std::fs::read_dir(folder).expect("the folder is there").flatten() {
        let file = File::open(entry.path()).expect("the file is there");
        file.sync_all().expect("the file can be synced");
        rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed).expect("advice is taken");
    }
}

/// Opens the store in a separate process, where nothing else has used memory. Returns the time that took and the memory
/// left in use.
fn open_elsewhere(folder: &Path, bytes: usize, args: &Args) -> (f64, u64) {
    let program = std::env::current_exe().expect("a program knows where it is");
    let output = Command::new(program)
        .args(["--open", folder.to_str().expect("a path in UTF-8"), "--depth", &args.depth.to_string()])
        .args(["--bytes", &bytes.to_string()])
        .output()
        .expect("the program can be started");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    let (secs, memory) = text.trim().split_once(' ').expect("two numbers");
    (secs.parse().expect("a number"), memory.parse().expect("a number"))
}

/// The part of [`open_elsewhere`] that runs in the other process.
pub fn open_here(runtime: &Runtime, folder: &Path, args: &Args) {
    let before = own_bytes();
    let start = Instant::now();
    let ours = Ours::open(runtime, folder, args.bytes[0]);
    let secs = start.elapsed().as_secs_f64();
    assert_eq!(ours.ready(), args.depth, "every message is there");
    println!("{secs} {}", own_bytes().saturating_sub(before));
}

/// Fills a store through its API, then reopens it repeatedly. Returns it open.
pub fn fill_and_reopen<'a>(
    runtime: &'a Runtime,
    folder: &Path,
    bytes: usize,
    args: &Args,
) -> (Ours<'a>, Store) {
    let before = own_bytes();
    let start = Instant::now();
    let ours = Ours::open(runtime, folder, bytes);
    ours.fill(args.depth);
    let fill = start.elapsed();
    // Later sizes reuse memory that the first one left behind, so their figures would be too low.
    let first = args.bytes.first() == Some(&bytes);
    let memory = first.then(|| own_bytes().saturating_sub(before));
    drop(ours);

    let (mut warm, mut cold, mut reopened) = (Vec::new(), Vec::new(), 0);
    for _ in 0..3 {
        forget_cached(folder);
        cold.push(open_elsewhere(folder, bytes, args).0);
        let (secs, memory) = open_elsewhere(folder, bytes, args);
        warm.push(secs);
        reopened = memory;
    }
    let store = Store {
        bytes,
        messages: args.depth,
        fill_secs: fill.as_secs_f64(),
        memory_bytes: memory,
        reopened_bytes: reopened,
        warm_secs: median(warm),
        cold_secs: median(cold),
    };
    (Ours::open(runtime, folder, bytes), store)
}
