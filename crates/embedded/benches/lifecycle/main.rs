//! Send, receive and ack one message, with many in flight: Hapax beside a bare SQLite loop and a bare log.
//!
//! All contestants run in one process and take turns, in an order that rotates from round to round; a ratio is the
//! median of the rounds' ratios. `docs/BENCHMARKS.md` explains the tables.

mod args;
mod log;
#[path = "../shared/measure.rs"]
mod measure;
mod memory;
mod ours;
mod report;
mod sqlite;

use std::path::Path;
use std::time::Duration;

use args::Args;
use log::Log;
use ours::Ours;
use report::{Cell, Series, Store};
use sqlite::Sqlite;

/// The result of one contestant's turn.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    lifecycles: u64,
    secs: f64,
    commits: u64,
    synced: u64,
    operations: u64,
    /// CPU time of all threads, in seconds.
    cpu_secs: f64,
}

impl Turn {
    fn rate(&self) -> f64 {
        self.lifecycles as f64 / self.secs
    }
}

/// A contestant that can be run for a given time.
trait Contestant {
    fn turn(&mut self, in_flight: usize, time: Duration) -> Turn;
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
    if let Some(folder) = &args.open {
        return memory::open_here(&runtime, folder, &args);
    }
    std::fs::create_dir_all(&args.folder).expect("the folder for benchmarks can be made");
    let folder = tempfile::Builder::new().prefix("lifecycle-").tempdir_in(&args.folder).expect("a folder");
    if let Some(count) = args.count {
        let ours = Ours::open(&runtime, folder.path(), args.bytes[0]);
        return if args.observed { ours.run_observed(count) } else { ours.run(count) };
    }

    let mut series = Vec::new();
    let mut stores = Vec::new();
    for &bytes in &args.bytes {
        let folder = folder.path().join(bytes.to_string());
        let (cells, store) = compare(&args, &runtime, &folder, bytes);
        series.push(Series { bytes, depth: args.depth, cells });
        stores.extend(store);
        std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    }
    report::print(&args, &series, &stores);
}

/// Runs every contestant with one body size.
fn compare(
    args: &Args,
    runtime: &tokio::runtime::Runtime,
    folder: &Path,
    bytes: usize,
) -> (Vec<Cell>, Option<Store>) {
    let make = |name: &str| {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder).expect("a folder can be made");
        folder
    };
    let mut store = None;
    let mut deep = None;
    if args.depth > 0 {
        // Runs first, while the process has allocated almost nothing, so that memory can be measured.
        eprintln!("{bytes} B: filling {} messages", args.depth);
        let (ours, measured) = memory::fill_and_reopen(runtime, &make("deep"), bytes, args);
        store = Some(measured);
        deep = Some((ours, Sqlite::open(&make("deep-sqlite"), bytes, args.depth)));
    }
    let mut shallow = Ours::open(runtime, &make("shallow"), bytes);
    let mut sqlite = Sqlite::open(&make("sqlite"), bytes, 0);
    let mut log = Log::open(&make("log"), bytes);

    let mut cells: Vec<Cell> = args.in_flight.iter().map(|&in_flight| Cell::new(in_flight)).collect();
    for round in 0..args.rounds {
        for cell in &mut cells {
            let mut contestants: Vec<(usize, &mut dyn Contestant)> =
                vec![(report::OURS, &mut shallow), (report::SQLITE, &mut sqlite), (report::LOG, &mut log)];
            if let Some((ours, sqlite)) = &mut deep {
                contestants.extend([
                    (report::OURS_DEEP, ours as &mut dyn Contestant),
                    (report::SQLITE_DEEP, sqlite),
                ]);
            }
            let count = contestants.len();
            contestants.rotate_left(round % count);
            let mut turns = [Turn::default(); report::CONTESTANTS];
            for (which, contestant) in contestants {
                let before = measure::cpu_secs();
                let turn = contestant.turn(cell.in_flight, args.time);
                turns[which] = Turn { cpu_secs: measure::cpu_secs() - before, ..turn };
            }
            cell.rounds.push(turns);
        }
        eprintln!("{bytes} B: round {} of {}", round + 1, args.rounds);
    }
    (cells, store)
}
