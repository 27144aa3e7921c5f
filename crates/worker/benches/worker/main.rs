//! The worker compared with bare receive-settle loops, on stores of the same kind with the same trivial handler.
//!
//! Messages are sent before each turn and not timed. Contestants take turns in one process, in an order that rotates
//! from round to round; a ratio is the median of the rounds' ratios. Instructions are counted in separate processes.
//! `docs/BENCHMARKS.md` explains the tables.

mod args;
mod contestant;
mod instructions;
#[path = "../../../embedded/benches/shared/measure.rs"]
mod measure;
mod report;

use std::path::Path;
use std::time::Instant;

use args::Args;
use contestant::{Contestant, Rig};
use report::{Cell, Counted};

/// The measurements of one contestant in one turn.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    messages: f64,
    secs: f64,
    /// Commits that waited for an fsync.
    synced: f64,
    /// CPU time of all threads.
    cpu_secs: f64,
}

const CONTESTANTS: usize = Contestant::ALL.len();

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
        .enable_all()
        .build()
        .expect("a runtime starts");
    if let Some((contestant, messages)) = args.child {
        let child = instructions::child(contestant, &args.folder, messages, args.in_flight[0]);
        return runtime.block_on(child);
    }
    std::fs::create_dir_all(&args.folder).expect("the folder for benchmarks can be made");
    let folder = tempfile::Builder::new().prefix("worker-").tempdir_in(&args.folder).expect("a folder");
    let cells = runtime.block_on(compare(&args, folder.path()));
    let counted = match instructions::possible() {
        _ if args.counts == 0 => Vec::new(),
        Ok(()) => runtime.block_on(count(&args, folder.path())),
        Err(why) => {
            eprintln!("instructions are not counted: {why}");
            Vec::new()
        }
    };
    report::print(args.markdown, &cells, &counted);
}

/// Number of messages, so that a turn takes about the same time at any number in flight.
fn messages_of(args: &Args, in_flight: usize) -> usize {
    match in_flight {
        0..8 => (args.messages / 16).max(1),
        8..256 => args.messages,
        _ => args.messages * 3,
    }
}

async fn compare(args: &Args, folder: &Path) -> Vec<Cell> {
    let mut cells: Vec<Cell> = args.in_flight.iter().map(|&in_flight| Cell::new(in_flight)).collect();
    for round in 0..args.rounds {
        for cell in &mut cells {
            let messages = messages_of(args, cell.in_flight);
            let mut turns = [Turn::default(); CONTESTANTS];
            for at in 0..CONTESTANTS {
                let which = (round + at) % CONTESTANTS;
                turns[which] = turn(Contestant::ALL[which], folder, messages, cell.in_flight).await;
            }
            cell.rounds.push(turns);
        }
        eprintln!("round {} of {}", round + 1, args.rounds);
    }
    cells
}

async fn turn(contestant: Contestant, folder: &Path, messages: usize, in_flight: usize) -> Turn {
    // A new store each time: the ledger entries of an earlier turn would slow down only this contestant.
    let folder = folder.join(contestant.name());
    let rig = Rig::open(contestant, &folder).await;
    rig.fill(messages).await;
    let (before, cpu_before) = (rig.commit_stats(), measure::cpu_secs());
    let start = Instant::now();
    let done = rig.run(messages, in_flight).await;
    let secs = start.elapsed().as_secs_f64();
    let cpu_secs = measure::cpu_secs() - cpu_before;
    assert_eq!((done, rig.ready().await), (messages as u64, 0), "all were handled");
    let synced = (rig.commit_stats().synced - before.synced) as f64;
    drop(rig);
    std::fs::remove_dir_all(&folder).expect("the folder can be removed");
    Turn { messages: done as f64, secs, synced, cpu_secs }
}

async fn count(args: &Args, folder: &Path) -> Vec<Counted> {
    let mut counted = Vec::new();
    for &in_flight in &args.in_flight {
        let few = messages_of(args, in_flight) / 8 + in_flight;
        let many = few + messages_of(args, in_flight) / 2 + 4 * in_flight;
        let mut rounds = Vec::new();
        for round in 0..args.counts {
            let mut each = [0.0; CONTESTANTS];
            for (at, contestant) in Contestant::ALL.into_iter().enumerate() {
                each[at] = instructions::count(contestant, folder, in_flight, few, many).await;
            }
            rounds.push(each);
            eprintln!("instructions, {in_flight} in flight: round {} of {}", round + 1, args.counts);
        }
        counted.push(Counted { in_flight, rounds });
    }
    counted
}
