//! The tables.

use crate::Turn;
use crate::args::Args;
use crate::measure::{median, table, thousands};

pub const OURS: usize = 0;
pub const SQLITE: usize = 1;
pub const LOG: usize = 2;
pub const OURS_DEEP: usize = 3;
pub const SQLITE_DEEP: usize = 4;
pub const CONTESTANTS: usize = 5;

/// The rounds of all contestants with one number of lifecycles in flight.
pub struct Cell {
    pub in_flight: usize,
    pub rounds: Vec<[Turn; CONTESTANTS]>,
}

/// All cells of one body size.
pub struct Series {
    pub bytes: usize,
    pub depth: u64,
    pub cells: Vec<Cell>,
}

/// Measurements of an idle deep queue.
pub struct Store {
    pub bytes: usize,
    pub messages: u64,
    pub fill_secs: f64,
    pub memory_bytes: Option<u64>,
    pub reopened_bytes: u64,
    pub warm_secs: f64,
    pub cold_secs: f64,
}

impl Cell {
    pub fn new(in_flight: usize) -> Self {
        Self { in_flight, rounds: Vec::new() }
    }

    fn median_of(&self, value: impl Fn(&[Turn; CONTESTANTS]) -> f64) -> f64 {
        median(self.rounds.iter().map(value))
    }

    fn rate(&self, which: usize) -> f64 {
        self.median_of(|round| round[which].rate())
    }

    /// How much faster `which` is than `than`, within the same round.
    fn ratio(&self, which: usize, than: usize) -> f64 {
        self.median_of(|round| round[which].rate() / round[than].rate())
    }

    /// CPU time of one lifecycle, in microseconds.
    fn cpu_us(&self, which: usize) -> f64 {
        self.median_of(|round| round[which].cpu_secs * 1e6 / round[which].lifecycles.max(1) as f64)
    }

    fn row(&self, ours: usize, sqlite: usize) -> Vec<String> {
        vec![
            self.in_flight.to_string(),
            thousands(self.rate(ours)),
            thousands(self.rate(sqlite)),
            thousands(self.rate(LOG)),
            format!("{:.2}", self.ratio(ours, sqlite)),
            format!("{:.2}", self.ratio(ours, LOG)),
            format!("{:.1}", self.median_of(|r| r[ours].operations as f64 / r[ours].commits.max(1) as f64)),
            format!("{:.4}", self.median_of(|r| r[ours].synced as f64 / r[ours].lifecycles.max(1) as f64)),
            format!("{:.1}", self.cpu_us(ours)),
            format!("{:.1}", self.cpu_us(sqlite)),
        ]
    }
}

pub fn print(args: &Args, series: &[Series], stores: &[Store]) {
    let columns = [
        "in flight",
        "Hapax/s",
        "SQLite/s",
        "log/s",
        "of SQLite",
        "of log",
        "ops a commit",
        "syncs a lifecycle",
        "CPU us a lifecycle",
        "SQLite's",
    ];
    for one in series {
        let rows = |ours, sqlite| one.cells.iter().map(|cell| cell.row(ours, sqlite)).collect::<Vec<_>>();
        table(args.markdown, &format!("{} B, empty queue", one.bytes), &columns, &rows(OURS, SQLITE));
        if one.depth > 0 {
            let title = format!("{} B, {} messages in the queue", one.bytes, thousands(one.depth as f64));
            table(args.markdown, &title, &columns, &rows(OURS_DEEP, SQLITE_DEEP));
            let cost = |cell: &Cell| {
                let cost = |shallow, deep| format!("{:.2}", cell.ratio(shallow, deep));
                vec![cell.in_flight.to_string(), cost(OURS, OURS_DEEP), cost(SQLITE, SQLITE_DEEP)]
            };
            let title = format!("{} B, cost in the deep queue over cost in the empty one", one.bytes);
            let rows: Vec<_> = one.cells.iter().map(cost).collect();
            table(args.markdown, &title, &["in flight", "Hapax", "SQLite"], &rows);
        }
    }
    if stores.is_empty() {
        return;
    }
    let columns = [
        "body",
        "messages",
        "fill s",
        "memory B a message",
        "after reopening",
        "reopen warm s",
        "reopen cold s",
    ];
    let row = |store: &Store| {
        let each = |bytes: u64| format!("{:.0}", bytes as f64 / store.messages as f64);
        vec![
            store.bytes.to_string(),
            thousands(store.messages as f64),
            format!("{:.1}", store.fill_secs),
            store.memory_bytes.map_or("-".into(), each),
            each(store.reopened_bytes),
            format!("{:.2}", store.warm_secs),
            format!("{:.2}", store.cold_secs),
        ]
    };
    table(args.markdown, "A deep queue at rest", &columns, &stores.iter().map(row).collect::<Vec<_>>());
}
