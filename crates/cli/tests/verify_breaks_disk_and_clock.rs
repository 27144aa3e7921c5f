//! `hapax verify` with faults that need a library of the tests in the processes of a run: a disk that fails, is slow or loses
//! power, and clients whose clock is set.

mod common;

use std::fs;
use std::path::Path;
use std::process::Command;

use common::{preload, run};
use serde_json::Value;

/// Runs a program with the library; its disk does what the mode says, and its clock is some seconds ahead.
fn run_with(library: &Path, folder: &Path, mode: u8, ahead_s: i64, shell: &str) -> (bool, String) {
    let control = folder.join("control");
    let shift = ahead_s * 1_000;
    fs::write(&control, [&[mode, 0, 0, 0, 0, 0, 0, 0][..], &shift.to_le_bytes()].concat()).unwrap();
    let mut command = Command::new("sh");
    command.args(["-c", shell]).current_dir(folder);
    command.env("LD_PRELOAD", library).env("VERIFY_FAULTS_CONTROL", &control);
    let done = command.output().unwrap();
    (done.status.success(), String::from_utf8_lossy(&done.stdout).into_owned())
}

#[test]
fn the_library_breaks_disk_and_clock_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let library = preload::library(folder.path());
    let copy = "dd if=/dev/zero of=copy bs=512 count=4 conv=fsync 2>&1";
    for (mode, works) in [(b'n', true), (b'f', false), (b'w', false), (b's', true)] {
        let (worked, said) = run_with(&library, folder.path(), mode, 0, copy);
        assert_eq!(worked, works, "{said}");
        assert_eq!(said.contains("Input/output error"), !works, "{said}");
        assert!(run_with(&library, folder.path(), mode, 0, "echo a pipe | cat").0, "pipes work");
    }
    let clock =
        |ahead_s| run_with(&library, folder.path(), b'n', ahead_s, "date +%s").1.trim().parse::<i64>();
    let now = clock(0).unwrap();
    for ahead_s in [3_600, -3_600] {
        let moved = clock(ahead_s).unwrap() - now;
        assert!((ahead_s..ahead_s + 60).contains(&moved), "{moved} s instead of {ahead_s}");
    }
}

#[test]
fn the_guarantee_holds_on_a_disk_that_fails_and_with_clocks_that_are_set() {
    let folder = tempfile::tempdir().unwrap();
    let library = preload::library(folder.path());
    let faults = "fsync fails,writes fail,slow disk,power cut,clock,kill -9 of a worker";
    let args = ["verify", "--json", "--for", "12s", "--seed", "3", "--only", "payments,accounts,claims"];
    let more = ["--faults", faults, "--preload", &library.display().to_string()];
    let done = run(&folder, &[&args[..], &more].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    assert_eq!((done.code, &report["verdict"]), (Some(0), &"held".into()), "{}\n{report:#}", done.stderr);
    // How many fit into the time depends on the machine. A step of the clock is right if it changes nothing.
    let is_of_disk = |fault: &&Value| {
        let name = fault["fault"].as_str().unwrap();
        ["fsync fails", "writes fail", "slow disk", "power cut"].iter().any(|of| name.contains(of))
    };
    let mut of_disk = report["faults"].as_array().unwrap().iter().filter(is_of_disk);
    assert!(of_disk.any(|fault| fault["bit"] == true), "no fault of the disk bit: {}", done.stderr);
}
