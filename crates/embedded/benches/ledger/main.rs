//! Claim and complete one key, with many concurrent callers: Hapax beside a bare SQLite loop over the same rows.
//!
//! A *miss* is a fresh key: claimed (synced), then completed (synced). A *hit* is a key that was completed before: one
//! claim that returns the recorded outcome. All contestants run in one process and take turns, in an order that rotates
//! from round to round; a ratio is the median of the rounds' ratios. `docs/BENCHMARKS.md` explains the tables.

mod args;
#[path = "../shared/measure.rs"]
mod measure;
mod ours;
mod report;
mod sqlite;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use args::Args;
use ours::Ours;
use report::Cell;
use sqlite::Sqlite;

/// Completed entries in a ledger that counts as empty: hits need some entries.
const SHALLOW: u64 = 1_000;
const SCOPE: &str = "queue/payments";
const OUTCOME: &str = r#"{"charge":"ch_1234567890","cents":1999,"status":"succeeded"}"#;

fn key(number: u64) -> String {
    format!("order-{number:012}")
}

fn owner(number: u64) -> String {
    format!("worker-12345-0123456789abcdef/{number}")
}

/// As long as the hex hash of a body.
fn fingerprint(number: u64) -> String {
    format!("{number:064x}")
}

fn random_below(below: u64) -> u64 {
    fastrand::u64(0..below)
}

/// Whether the key is fresh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Miss,
    Hit,
}

/// The result of one contestant's turn.
#[derive(Debug, Clone, Default)]
struct Turn {
    done: u64,
    secs: f64,
    /// Commits that waited for the disk.
    synced: u64,
    /// CPU time of all threads, in seconds.
    cpu_secs: f64,
    /// Durations of claims; in the bare loop, of groups of claims.
    first: Vec<Duration>,
    /// Durations of completions.
    second: Vec<Duration>,
}

/// A contestant that can be run for a given time.
trait Contestant {
    fn turn(&mut self, kind: Kind, in_flight: usize, time: Duration) -> Turn;
}

fn main() {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("error: {problem}");
            std::process::exit(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_time()
        .build()
        .expect("a runtime starts");
    std::fs::create_dir_all(&args.folder).expect("the folder for benchmarks can be made");
    let folder = tempfile::Builder::new().prefix("ledger-").tempdir_in(&args.folder).expect("a folder");
    let cells = compare(&args, &runtime, folder.path());
    report::print(&args, &cells);
}

fn make(folder: &Path, name: &str) -> PathBuf {
    let folder = folder.join(name);
    std::fs::create_dir_all(&folder).expect("a folder can be made");
    folder
}

fn compare(args: &Args, runtime: &tokio::runtime::Runtime, folder: &Path) -> Vec<Cell> {
    let mut deep = (args.depth > 0).then(|| {
        eprintln!("filling {} entries", args.depth);
        let start = Instant::now();
        let ours = Ours::open(runtime, &make(folder, "deep"), args.depth);
        eprintln!("filled in {:.1} s", start.elapsed().as_secs_f64());
        (ours, Sqlite::open(&make(folder, "deep-sqlite"), args.depth))
    });
    let mut cells: Vec<Cell> = Vec::new();
    for kind in [Kind::Miss, Kind::Hit] {
        cells.extend(args.in_flight.iter().map(|&in_flight| Cell { kind, in_flight, rounds: Vec::new() }));
    }
    for round in 0..args.rounds {
        // Recreated each round: the entries of one round would make the next round's ledger less empty.
        let shallow = make(folder, "shallow");
        let mut ours = Ours::open(runtime, &make(&shallow, "ours"), SHALLOW);
        let mut sqlite = Sqlite::open(&make(&shallow, "sqlite"), SHALLOW);
        for cell in &mut cells {
            let mut contestants: Vec<(usize, &mut dyn Contestant)> =
                vec![(report::OURS, &mut ours), (report::SQLITE, &mut sqlite)];
            if let Some((ours, sqlite)) = &mut deep {
                contestants.push((report::OURS_DEEP, ours));
                contestants.push((report::SQLITE_DEEP, sqlite));
            }
            let count = contestants.len();
            contestants.rotate_left(round % count);
            let mut turns: [Turn; report::CONTESTANTS] = Default::default();
            for (which, contestant) in contestants {
                let before = measure::cpu_secs();
                let turn = contestant.turn(cell.kind, cell.in_flight, args.time);
                turns[which] = Turn { cpu_secs: measure::cpu_secs() - before, ..turn };
            }
            cell.rounds.push(turns);
        }
        drop((ours, sqlite));
        std::fs::remove_dir_all(&shallow).expect("the folder can be removed");
        eprintln!("round {} of {}", round + 1, args.rounds);
    }
    cells
}
