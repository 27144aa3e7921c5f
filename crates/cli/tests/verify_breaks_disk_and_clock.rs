//! `hapax verify` with faults that need a library of the tests in the processes of a run: a disk that fails, is slow or loses
//! power, and clients whose clock is set.

mod common;

use std::collections::BTreeMap;
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

/// Runs verify with these faults beside kills of workers; it holds. Returns the report and the history.
fn holds(faults: &str, only: &str) -> (Value, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let library = preload::library(folder.path());
    let faults = format!("{faults},kill -9 of a worker");
    let args = ["verify", "--json", "--for", "12s", "--seed", "3", "--only", only, "--faults", &faults];
    let more = ["--preload", &library.display().to_string(), "--history", "history.jsonl"];
    let done = run(&folder, &[&args[..], &more].concat());
    let report: Value =
        serde_json::from_str(&done.stdout).unwrap_or_else(|error| panic!("{error}: {done:?}"));
    assert_eq!((done.code, &report["verdict"]), (Some(0), &"held".into()), "{}\n{report:#}", done.stderr);
    let history = fs::read_to_string(folder.path().join("history.jsonl")).unwrap();
    (report, history.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
}

/// The faults with such a name that changed something.
fn bit<'r>(report: &'r Value, name: &str) -> Vec<&'r Value> {
    let named = |fault: &&Value| fault["fault"].as_str().unwrap().contains(name) && fault["bit"] == true;
    report["faults"].as_array().unwrap().iter().filter(named).collect()
}

#[test]
fn the_guarantee_holds_on_a_disk_that_fails() {
    let (report, _) = holds("fsync fails,writes fail,slow disk,power cut", "payments,accounts,claims");
    // How many fit into the time depends on the machine.
    let of_disk = ["fsync fails", "writes fail", "slow disk", "power cut"];
    assert!(
        of_disk.iter().any(|name| !bit(&report, name).is_empty()),
        "no fault of the disk bit: {report:#}"
    );
}

/// Nothing depends on a wall clock, so a step is right if it changes nothing. That it was there is seen by the clients' own
/// clocks, which they report beside what they do.
#[test]
fn the_guarantee_holds_with_clocks_that_are_set() {
    let (report, history) = holds("step of the wall clocks", "payments,accounts,claims");
    let steps = bit(&report, "step of the wall clocks");
    assert!(!steps.is_empty(), "no process saw its clock set: {report:#}");
    assert!(steps.iter().all(|step| step["caused"]["clocks_stepped"].as_u64() > Some(0)), "{steps:#?}");
    let mut ahead: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for event in history.iter().filter(|event| event["kind"] == "clock") {
        ahead.entry(event["who"].as_str().unwrap()).or_default().push(event["ahead_ms"].as_i64().unwrap());
    }
    let workers: Vec<_> = ahead.iter().filter(|(who, _)| who.starts_with("worker-")).collect();
    assert!(workers.len() >= 2, "{ahead:?}");
    for times in ahead.values() {
        assert!(times.iter().all(|ms| (10_000..=3_600_500).contains(&ms.unsigned_abs())), "{ahead:?}");
    }
    let other = |number: usize| workers[number].1.last().unwrap();
    assert_ne!(other(0) / 10_000, other(1) / 10_000, "the workers' clocks differ: {ahead:?}");
    // Not those of the recorder and of the process that injects the faults.
    assert!(!ahead.keys().any(|who| who.starts_with("director")), "{ahead:?}");
}
