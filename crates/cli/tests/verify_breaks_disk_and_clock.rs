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
    let clocks = clocks(&history);
    // A report is on its way for some time.
    for (_, ms) in clocks.values().flat_map(|process| &process.set) {
        assert!((-3_660_000..=3_600_500).contains(ms), "{clocks:?}");
    }
    let workers: Vec<_> = clocks.iter().filter(|(who, _)| who.starts_with("worker-")).collect();
    let mut pairs = 0;
    for (at, (one, first)) in workers.iter().enumerate() {
        for (other, second) in &workers[at + 1..] {
            let beside = first.begin.max(second.begin)..=first.end.min(second.end);
            // Two that do not run at the same time may be one worker, before and after a kill.
            if beside.is_empty() || first.set.is_empty() || second.set.is_empty() {
                continue;
            }
            pairs += 1;
            let same = |(at, ahead): &(u64, i64)| {
                second
                    .set
                    .iter()
                    .any(|(then, other)| at.abs_diff(*then) < 1_000 && ahead.abs_diff(*other) < 100)
            };
            assert!(!first.set.iter().any(same), "{one} and {other} have the same clock: {clocks:?}");
        }
    }
    assert!(pairs > 0, "no two workers saw their clocks set: {clocks:?}");
    // Not those of the recorder and of the process that injects the faults.
    let is_set = |who: &str| clocks.get(who).is_some_and(|process| !process.set.is_empty());
    assert!(!clocks.keys().any(|who| who.starts_with("director") && is_set(who)), "{clocks:?}");
}

/// A process of a run: the numbers of its first and last event, and when its clock was set, with how far it is ahead since.
#[derive(Debug)]
struct Clock {
    begin: u64,
    end: u64,
    set: Vec<(u64, i64)>,
}

/// By the name of the process; its tasks have names behind a slash.
fn clocks(history: &[Value]) -> BTreeMap<&str, Clock> {
    let mut clocks: BTreeMap<&str, Clock> = BTreeMap::new();
    for event in history {
        let (who, number) = (event["who"].as_str().unwrap(), event["n"].as_u64().unwrap());
        let process = who.split('/').next().unwrap();
        let clock = clocks.entry(process).or_insert(Clock { begin: number, end: number, set: Vec::new() });
        clock.end = number;
        if event["kind"] == "clock" {
            clock.set.push((event["ms"].as_u64().unwrap(), event["ahead_ms"].as_i64().unwrap()));
        }
    }
    clocks
}
