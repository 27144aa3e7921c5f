//! A test binary that runs one of its own tests in a second process.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};

use hapax_core::QueueName;
use hapax_faults::{Process, rerun_test};

const FOLDER: &str = "HAPAX_TEST_CHILD_FOLDER";

/// The working folder, if this process is the child.
pub fn child_folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Starts the test `name` of this binary as a separate process.
pub fn start_child(name: &str, folder: &Path) -> Process {
    Process::start(rerun_test(name).env(FOLDER, folder)).unwrap()
}

/// Prints one line from the child: the reader gets it complete or not at all.
pub fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    out.write_all(format!("{line}\n").as_bytes()).unwrap();
    out.flush().unwrap();
}

/// Starts the test `child` as a process, tells it a number, and kills it when `read_line` has accepted `enough` lines. The
/// lines that it printed before it died are also passed to `read_line`.
pub fn kill_child_after(folder: &Path, number: u64, enough: usize, mut read_line: impl FnMut(&str) -> bool) {
    let mut child = start_child("child", folder);
    child.write_line(&number.to_string());
    let mut count = 0;
    while count < enough {
        let line = child.next_line().unwrap_or_else(|| panic!("it ended by itself:\n{}", child.log()));
        count += usize::from(read_line(&line));
    }
    assert_eq!(child.kill().signal(), Some(9), "it ended by itself:\n{}", child.log());
    while let Some(line) = child.next_line() {
        read_line(&line);
    }
}

pub fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// `HAPAX_SEED`, or the test's own seed; printed, so that a failure can be replayed.
pub fn seed(own: u64) -> u64 {
    let seed = std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(own);
    println!("HAPAX_SEED={seed} replays this");
    seed
}

pub fn long() -> bool {
    std::env::var_os("HAPAX_LONG").is_some()
}
