//! The tables.

use std::time::Duration;

use crate::args::Args;
use crate::measure::{median, table, thousands};
use crate::{Kind, Turn};

pub const OURS: usize = 0;
pub const SQLITE: usize = 1;
pub const OURS_DEEP: usize = 2;
pub const SQLITE_DEEP: usize = 3;
pub const CONTESTANTS: usize = 4;

/// The rounds of all contestants at one number of callers.
pub struct Cell {
    pub kind: Kind,
    pub in_flight: usize,
    pub rounds: Vec<[Turn; CONTESTANTS]>,
}

fn rate(turn: &Turn) -> f64 {
    turn.done as f64 / turn.secs
}

fn each(value: f64, turn: &Turn) -> f64 {
    value / turn.done.max(1) as f64
}

impl Cell {
    fn median_of(&self, value: impl Fn(&[Turn; CONTESTANTS]) -> f64) -> f64 {
        median(self.rounds.iter().map(value))
    }

    /// How much faster `which` is than `than`, within the same round.
    fn ratio(&self, which: usize, than: usize) -> f64 {
        self.median_of(|round| rate(&round[which]) / rate(&round[than]))
    }

    /// CPU time of one claim with its completion, in microseconds.
    fn cpu_us(&self, which: usize) -> f64 {
        self.median_of(|round| each(round[which].cpu_secs * 1e6, &round[which]))
    }

    fn cpu_ratio(&self, which: usize, than: usize) -> f64 {
        let cpu = |turn: &Turn| each(turn.cpu_secs, turn);
        self.median_of(|round| cpu(&round[which]) / cpu(&round[than]))
    }

    fn row(&self, ours: usize, sqlite: usize) -> Vec<String> {
        vec![
            self.in_flight.to_string(),
            thousands(self.median_of(|round| rate(&round[ours]))),
            thousands(self.median_of(|round| rate(&round[sqlite]))),
            format!("{:.2}", self.ratio(ours, sqlite)),
            format!("{:.4}", self.median_of(|round| each(round[ours].synced as f64, &round[ours]))),
            format!("{:.4}", self.median_of(|round| each(round[sqlite].synced as f64, &round[sqlite]))),
            format!("{:.1}", self.cpu_us(ours)),
            format!("{:.1}", self.cpu_us(sqlite)),
        ]
    }

    /// Latencies of one contestant over all rounds.
    fn latencies(&self, which: usize, of: impl Fn(&Turn) -> &Vec<Duration>) -> String {
        let mut all: Vec<_> = self.rounds.iter().flat_map(|round| of(&round[which])).copied().collect();
        all.sort_unstable();
        let at = |q: f64| match all.len() {
            0 => "-".into(),
            len => format!("{:.0}", all[((len - 1) as f64 * q) as usize].as_secs_f64() * 1e6),
        };
        format!("{} / {}", at(0.5), at(0.99))
    }
}

pub fn print(args: &Args, cells: &[Cell]) {
    let columns = [
        "in flight",
        "Hapax/s",
        "SQLite/s",
        "of SQLite",
        "syncs each",
        "SQLite's",
        "CPU us each",
        "SQLite's",
    ];
    let of = |kind: Kind| cells.iter().filter(move |cell| cell.kind == kind);
    let kinds = [(Kind::Miss, "Claim and complete, fresh key"), (Kind::Hit, "Claim, key completed before")];
    let deep = format!("{} entries", thousands(args.depth as f64));
    for (kind, name) in kinds {
        let rows = |ours, sqlite| of(kind).map(|cell| cell.row(ours, sqlite)).collect::<Vec<_>>();
        table(args.markdown, &format!("{name}, empty ledger"), &columns, &rows(OURS, SQLITE));
        if args.depth > 0 {
            table(args.markdown, &format!("{name}, {deep}"), &columns, &rows(OURS_DEEP, SQLITE_DEEP));
        }
    }
    if args.depth > 0 {
        let row = |cell: &Cell| {
            let kind = if cell.kind == Kind::Miss { "miss" } else { "hit" };
            let cost = |shallow, deep| format!("{:.2}", cell.ratio(shallow, deep));
            let cpu = |shallow, deep| format!("{:.2}", cell.cpu_ratio(deep, shallow));
            vec![
                kind.into(),
                cell.in_flight.to_string(),
                cost(OURS, OURS_DEEP),
                cost(SQLITE, SQLITE_DEEP),
                cpu(OURS, OURS_DEEP),
                cpu(SQLITE, SQLITE_DEEP),
            ]
        };
        let rows: Vec<_> = cells.iter().map(row).collect();
        let columns = ["key", "in flight", "Hapax, time", "SQLite, time", "Hapax, CPU", "SQLite, CPU"];
        table(args.markdown, &format!("Cost with {deep} over cost in an empty ledger"), &columns, &rows);
    }
    let mut rows = Vec::new();
    for cell in cells.iter().filter(|cell| cell.in_flight == 1) {
        let mut row = |name: &str, of: fn(&Turn) -> &Vec<Duration>| {
            let deep = |which| if args.depth > 0 { cell.latencies(which, of) } else { "-".into() };
            rows.push(vec![
                name.into(),
                cell.latencies(OURS, of),
                cell.latencies(SQLITE, of),
                deep(OURS_DEEP),
                deep(SQLITE_DEEP),
            ]);
        };
        if cell.kind == Kind::Miss {
            row("claim", |turn| &turn.first);
            row("complete", |turn| &turn.second);
        } else {
            row("claim, hit", |turn| &turn.first);
        }
    }
    if !rows.is_empty() {
        let columns = ["us, p50 / p99", "Hapax, empty", "SQLite, empty", "Hapax, deep", "SQLite, deep"];
        table(args.markdown, "Latency of one caller", &columns, &rows);
    }
}
