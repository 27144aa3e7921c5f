//! A test binary that runs one of its own tests in a second process.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use hapax_core::QueueName;

const FOLDER: &str = "HAPAX_TEST_CHILD_FOLDER";

/// The folder to work in, when this process is the child.
pub fn child_folder() -> Option<PathBuf> {
    std::env::var_os(FOLDER).map(PathBuf::from)
}

/// Starts the test `name` of this binary as a process of its own.
pub fn start_child(name: &str, folder: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(FOLDER, folder)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

pub fn queue() -> QueueName {
    QueueName::new("jobs").unwrap()
}

/// `HAPAX_SEED`, or the test's own; printed, so that a failure can be replayed.
pub fn seed(own: u64) -> u64 {
    let seed = std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(own);
    println!("HAPAX_SEED={seed} replays this");
    seed
}

pub fn long() -> bool {
    std::env::var_os("HAPAX_LONG").is_some()
}
