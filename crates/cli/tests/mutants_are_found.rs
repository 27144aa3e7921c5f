//! Known-bad variants of Hapax, all in the test build and selected at run time: `hapax verify` finds each. Every variant is
//! tried in the long run, and its time is written to the table in docs/guarantees.md; the short run tries two.

mod common;

use std::fmt::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{hapax, preload};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

/// A variant: its name, the workload that shows it, the faults that it needs, and the violation.
type Mutant = (&'static str, &'static str, &'static str, &'static str);

const WORKER: &str = "kill -9 of a worker,pause";

const MUTANTS: [Mutant; 28] = [
    ("ended-key-granted", "claims", "claim: response", "effect-twice"),
    ("held-key-granted", "parked", "SendMessage: request duplicated", "effect-twice"),
    ("doubt-retried-under-park", "parked", WORKER, "effect-twice"),
    ("fence-repeated", "claims", "pause", "fence-backwards"),
    ("stale-end-accepted", "claims", "pause", "stale-settle-accepted"),
    ("completion-not-recorded", "claims", "pause", "effect-twice"),
    ("outcome-of-another-key", "claims", "claim: response", "outcome-differs"),
    ("ended-key-busy", "claims", "claim: response", "register-not-linearizable"),
    ("ack-before-run", "payments", WORKER, "accepted-but-lost"),
    ("derived-key-per-run", "payments", WORKER, "effect-twice"),
    ("ended-key-run", "parked", "SendMessage: request duplicated", "effect-twice"),
    ("held-key-run", "parked", "SendMessage: request duplicated", "effect-twice"),
    ("doubtful-key-run", "parked", WORKER, "effect-twice"),
    ("group-overtaken", "accounts", WORKER, "order-violated"),
    ("expired-message-dropped", "payments", WORKER, "accepted-but-lost"),
    ("dead-letter-dropped", "redrive", "pause", "accepted-but-lost"),
    (
        "dedup-forgotten-on-restart",
        "accounts",
        "kill -9 of a server,SendMessage: response cut",
        "duplicate-accepted",
    ),
    ("redriven-message-dropped", "redrive", "SendMessage: response cut", "accepted-but-lost"),
    ("stale-extend-accepted", "claims", "pause", "stale-settle-accepted"),
    ("ttl-too-short", "claims", "claim: response", "effect-twice"),
    ("relay-marks-first", "orders", "relay while it publishes", "accepted-but-lost"),
    ("relay-never-marks", "orders", "relay after publishing", "published-not-marked"),
    ("publish-repeated-as-new", "orders", "relay after publishing", "duplicate-accepted"),
    ("halted-group-released", "halted", "pause,SendMessage: response cut", "order-violated"),
    ("commit-not-synced", "payments", "power cut", "accepted-but-lost"),
    ("unknown-commit-retried", "accounts", "COMMIT: response cut", "duplicate-accepted"),
    ("lease-by-wall-clock", "claims", "step of the wall clocks", "granted-while-held"),
    ("inbox-not-recorded", "transfers", "SendMessage: request duplicated", "effect-twice"),
];

/// Faults are injected for this long at first, and longer if nothing was found.
const TIMES: [&str; 3] = ["4s", "12s", "30s"];

/// What the run of a variant needs beside its faults.
fn needs(name: &str, folder: &Path) -> Vec<String> {
    let words = |words: [&str; 2]| words.map(str::to_owned).to_vec();
    match name {
        "commit-not-synced" | "lease-by-wall-clock" => {
            words(["--preload", &preload::library(folder).display().to_string()])
        }
        "unknown-commit-retried" => words(["--store", "private:postgres"]),
        _ => Vec::new(),
    }
}

/// Runs verify with a variant until it is found; returns the time that took.
fn time_to_find(mutant: &Mutant) -> Duration {
    let (name, workload, faults, anomaly) = mutant;
    let folder = tempfile::tempdir().unwrap();
    let needs = needs(name, folder.path());
    let start = Instant::now();
    let mut said = String::new();
    for time in TIMES {
        let args = ["verify", "--json", "--only", workload, "--faults", faults, "--seed", "1", "--for", time];
        let output = hapax(&folder, &args).args(&needs).env("HAPAX_MUTANT", name).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
        let rows = report["workloads"].as_array().cloned().unwrap_or_default();
        let found = |row: &Value| row["workload"] == *workload && row["counts"][*anomaly].as_u64() > Some(0);
        if rows.iter().any(found) {
            assert_eq!((output.status.code(), &report["verdict"]), (Some(1), &"violated".into()));
            return start.elapsed();
        }
        said = format!("{}\n{report:#}", String::from_utf8_lossy(&output.stderr));
    }
    panic!("{name} was not found: {said}");
}

fn main() -> ExitCode {
    let short = Trial::test("a_variant_is_found", || {
        a_variant_is_found();
        Ok(())
    });
    let long = Trial::ignorable_test("every_variant_is_found_within_a_minute", || {
        if std::env::var_os("HAPAX_LONG").is_none() {
            return Ok(Completion::ignored_with("long: set HAPAX_LONG to run it"));
        }
        every_variant_is_found_within_a_minute();
        Ok::<_, Failed>(Completion::Completed)
    });
    let mut args = Arguments::from_args();
    // A run has a dozen processes.
    args.test_threads = Some(1);
    libtest_mimic::run(&args, vec![short, long]).exit_code()
}

fn a_variant_is_found() {
    // The full table is made by the other test.
    for name in ["ended-key-run", "expired-message-dropped"] {
        let mutant = MUTANTS.iter().find(|mutant| mutant.0 == name).unwrap();
        time_to_find(mutant);
    }
}

fn every_variant_is_found_within_a_minute() {
    let mut times: Vec<(Mutant, Duration)> = Vec::new();
    for mutant in MUTANTS {
        times.push((mutant, time_to_find(&mutant)));
        println!("{} {:?}", mutant.0, times[times.len() - 1].1);
    }
    let mut table = String::from("| variant | workload | violation | found after |\n|---|---|---|--:|\n");
    for ((name, workload, _, anomaly), time) in &times {
        let _ = writeln!(table, "| {name} | {workload} | {anomaly} | {:.0} s |", time.as_secs_f64());
    }
    write_table(&table);
    let mut sorted: Vec<Duration> = times.iter().map(|(_, time)| *time).collect();
    sorted.sort();
    assert!(sorted[sorted.len() - 1] <= Duration::from_mins(1), "{table}");
}

/// Replaces the table between its two marks.
fn write_table(table: &str) {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guarantees.md");
    let text = std::fs::read_to_string(&page).unwrap();
    let (begin, end) = ("<!-- variants: begin -->\n", "<!-- variants: end -->");
    let (before, rest) = text.split_once(begin).expect("the page has a mark");
    let (_, after) = rest.split_once(end).expect("the page has a mark");
    std::fs::write(page, format!("{before}{begin}{table}{end}{after}")).unwrap();
}
