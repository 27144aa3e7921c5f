//! Known-bad variants of Hapax, all in the test build and selected at run time: `hapax verify` finds each. Every variant is
//! tried in the long run, and its time is written to its row of the table in docs/guarantees.md; the short run tries two.

mod common;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use common::{hapax, preload};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use serde_json::Value;

/// A variant: its name, the workload that shows it, the faults that it needs, and the violation.
type Mutant = (&'static str, &'static str, &'static str, &'static str);

const WORKER: &str = "kill -9 of a worker,pause";
const DUPLICATE: &str = "SendMessage: request duplicated";
const CLAIM: &str = "claim: response,pause";

const MUTANTS: [Mutant; 36] = [
    ("ended-key-granted", "claims", CLAIM, "effect-twice"),
    ("held-key-granted", "parked", DUPLICATE, "effect-twice"),
    ("doubt-retried-under-park", "parked", WORKER, "effect-twice"),
    ("fence-repeated", "claims", "pause", "fence-backwards"),
    ("stale-end-accepted", "claims", "pause", "stale-settle-accepted"),
    ("completion-not-recorded", "claims", "pause", "effect-twice"),
    ("outcome-of-another-key", "claims", CLAIM, "outcome-differs"),
    ("answer-of-another-tenant", "charges", "kill -9 of the proxies", "accepted-but-lost"),
    ("ended-key-busy", "claims", CLAIM, "register-not-linearizable"),
    ("ack-before-run", "payments", WORKER, "accepted-but-lost"),
    ("derived-key-per-run", "payments", WORKER, "effect-twice"),
    ("ended-key-run", "parked", DUPLICATE, "effect-twice"),
    ("held-key-run", "parked", DUPLICATE, "effect-twice"),
    ("doubtful-key-run", "parked", WORKER, "effect-twice"),
    ("group-overtaken", "accounts", WORKER, "order-violated"),
    ("expired-message-dropped", "payments", WORKER, "accepted-but-lost"),
    ("delivery-fence-repeated", "payments", WORKER, "fence-backwards"),
    ("stale-receipt-accepted", "deliveries", "pause", "stale-settle-accepted"),
    ("lease-cut-short", "deliveries", "pause", "granted-while-held"),
    ("dead-letter-dropped", "redrive", "pause", "accepted-but-lost"),
    ("dedup-forgotten-on-restart", "accounts", "kill -9 of a server", "duplicate-accepted"),
    ("redriven-message-dropped", "redrive", "SendMessage: response cut", "accepted-but-lost"),
    ("stale-extend-accepted", "claims", "pause", "stale-settle-accepted"),
    ("extension-not-recorded", "claims", "pause", "granted-while-held"),
    ("ttl-too-short", "claims", CLAIM, "effect-twice"),
    ("relay-marks-first", "orders", "relay while it publishes", "accepted-but-lost"),
    ("relay-never-marks", "orders", "relay after publishing", "published-not-marked"),
    ("relay-out-of-order", "orders", "relay while it publishes", "order-violated"),
    ("relay-skips-gap", "orders", "order's transaction", "accepted-but-lost"),
    ("publish-repeated-as-new", "orders", "relay after publishing", "duplicate-accepted"),
    ("halted-group-released", "halted", "pause,SendMessage: response cut", "order-violated"),
    ("commit-not-synced", "payments", "power cut", "accepted-but-lost"),
    ("unknown-commit-retried", "accounts", "COMMIT: response cut", "duplicate-accepted"),
    ("unknown-send-failed", "payments", "SendMessage: response cut", "failed-but-done"),
    ("lease-by-wall-clock", "claims", "step of the wall clocks", "granted-while-held"),
    ("inbox-not-recorded", "transfers", DUPLICATE, "effect-twice"),
];

/// Variants of the processor of Kafka. Their runs start a broker, so their times are not compared with the others'.
const ON_KAFKA: [Mutant; 4] = [
    ("kafka-offsets-apart", "processor", "kill -9 of a processor,zombie", "accepted-but-lost"),
    ("kafka-abort-left-out", "processor", "EndTxn: response dropped", "effect-twice"),
    ("kafka-unanswered-commit-failed", "processor", "EndTxn: response dropped", "effect-twice"),
    ("kafka-settled-unread", "processor", "EndTxn: unanswered", "effect-twice"),
];

/// Faults are injected for this long at first, and longer if nothing was found.
const TIMES: [&str; 3] = ["3s", "10s", "30s"];
/// Time until a variant is found: of the slowest, and of most.
const WORST: Duration = Duration::from_mins(1);
const MEDIAN: Duration = Duration::from_secs(10);

/// What the run of a variant needs beside its faults.
fn needs(name: &str, folder: &Path) -> Vec<String> {
    let words = |words: [&str; 2]| words.map(str::to_owned).to_vec();
    match name {
        "commit-not-synced" | "lease-by-wall-clock" => {
            words(["--preload", &preload::library(folder).display().to_string()])
        }
        _ if name.starts_with("kafka-") => words(["--broker", "private:kafka"]),
        "unknown-commit-retried" | "relay-skips-gap" => words(["--store", "private:postgres"]),
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
        let noted = String::from_utf8_lossy(&output.stderr);
        println!("{name} was not found in {time} of faults: {}", noted.lines().last().unwrap_or_default());
        said = format!("{noted}\n{report:#}");
    }
    panic!("{name} was not found: {said}");
}

fn main() -> ExitCode {
    let long = |name: String, test: Box<dyn Fn() + Send>| {
        Trial::ignorable_test(name, move || {
            if std::env::var_os("HAPAX_LONG").is_none() {
                return Ok(Completion::ignored_with("long: set HAPAX_LONG to run it"));
            }
            test();
            Ok::<_, Failed>(Completion::Completed)
        })
    };
    let find = |mutant: &Mutant| {
        let mutant = *mutant;
        long(format!("finds_{}", mutant.0), Box::new(move || find(&mutant)))
    };
    let mut tests: Vec<Trial> = MUTANTS.iter().map(find).collect();
    // After the others, which write the table.
    let in_time = "every_variant_is_in_the_table_and_was_found_in_time".to_owned();
    tests.push(long(in_time, Box::new(every_variant_was_found_in_time)));
    tests.extend(ON_KAFKA.map(|mutant| {
        let find = move || println!("{} {:?}", mutant.0, time_to_find(&mutant));
        long(format!("finds_{}", mutant.0), Box::new(find))
    }));
    tests.push(Trial::test("a_variant_is_found", || {
        a_variant_is_found();
        Ok(())
    }));
    let mut args = Arguments::from_args();
    // A run has a dozen processes.
    args.test_threads = Some(1);
    libtest_mimic::run(&args, tests).exit_code()
}

/// Finds a variant, and writes its row.
fn find(mutant: &Mutant) {
    let time = time_to_find(mutant);
    println!("{} {time:?}", mutant.0);
    Table::read().set(mutant, time).write();
    assert!(time <= WORST, "it took {time:?}");
}

fn a_variant_is_found() {
    // The full table is made by the other tests.
    for name in ["ended-key-run", "expired-message-dropped"] {
        let mutant = MUTANTS.iter().find(|mutant| mutant.0 == name).unwrap();
        time_to_find(mutant);
    }
}

fn every_variant_was_found_in_time() {
    let rows = Table::read().rows;
    let mut times: Vec<Duration> = Vec::new();
    for mutant in &MUTANTS {
        let row = rows.iter().find(|row| row.starts_with(&begin_of(mutant)));
        let row = row
            .unwrap_or_else(|| panic!("the table has no row of {}; run finds_{0} with HAPAX_LONG", mutant.0));
        let seconds = row.trim_end_matches(" s |").rsplit(' ').next().and_then(|time| time.parse().ok());
        times.push(Duration::from_secs(seconds.unwrap_or_else(|| panic!("no time: {row}"))));
    }
    assert_eq!(rows.len(), MUTANTS.len(), "the table has rows that no variant has");
    times.sort();
    assert!(times[times.len() - 1] <= WORST && times[times.len() / 2] <= MEDIAN, "{times:?}");
}

/// How the row of a variant begins.
fn begin_of((name, workload, _, anomaly): &Mutant) -> String {
    format!("| {name} | {workload} | {anomaly} | ")
}

/// The table in the page with the guarantees, between its two marks.
struct Table {
    before: String,
    rows: Vec<String>,
    after: String,
}

impl Table {
    const BEGIN: &str = "<!-- variants: begin -->\n";
    const END: &str = "<!-- variants: end -->";
    const HEAD: &str = "| variant | workload | violation | found after |\n|---|---|---|--:|\n";

    fn page() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guarantees.md")
    }

    fn read() -> Self {
        let text = std::fs::read_to_string(Self::page()).unwrap();
        let (before, rest) = text.split_once(Self::BEGIN).expect("the page has a mark");
        let (table, after) = rest.split_once(Self::END).expect("the page has a mark");
        let rows = table.lines().skip(2).map(str::to_owned).collect();
        Self { before: before.to_owned(), rows, after: after.to_owned() }
    }

    /// Replaces the row of a variant. Rows are in the order of the variants.
    fn set(mut self, mutant: &Mutant, time: Duration) -> Self {
        let is_of = |row: &String, mutant: &Mutant| row.starts_with(&begin_of(mutant));
        self.rows.retain(|row| !is_of(row, mutant) && MUTANTS.iter().any(|mutant| is_of(row, mutant)));
        self.rows.push(format!("{}{:.0} s |", begin_of(mutant), time.as_secs_f64()));
        self.rows.sort_by_key(|row| MUTANTS.iter().position(|mutant| is_of(row, mutant)));
        self
    }

    fn write(&self) {
        let rows = self.rows.join("\n");
        let text = [&self.before, Self::BEGIN, Self::HEAD, &rows, "\n", Self::END, &self.after].concat();
        std::fs::write(Self::page(), text).unwrap();
    }
}
