//! The tables.

use crate::contestant::Contestant;
use crate::measure::{median, table, thousands};
use crate::{CONTESTANTS, Turn};

/// The rounds of all contestants at one number in flight.
pub struct Cell {
    pub in_flight: usize,
    pub rounds: Vec<[Turn; CONTESTANTS]>,
}

/// Instructions per message, by contestant.
pub struct Counted {
    pub in_flight: usize,
    pub rounds: Vec<[f64; CONTESTANTS]>,
}

fn at(which: Contestant) -> usize {
    Contestant::ALL.iter().position(|one| *one == which).expect("it is one of them")
}

fn rate(turn: &Turn) -> f64 {
    turn.messages / turn.secs
}

impl Cell {
    pub fn new(in_flight: usize) -> Self {
        Self { in_flight, rounds: Vec::new() }
    }

    fn median_of(&self, which: Contestant, value: impl Fn(&Turn) -> f64) -> f64 {
        median(self.rounds.iter().map(|round| value(&round[at(which)])))
    }

    /// The speed of `which` relative to `than`, within the same round, with the quartiles.
    fn ratio(&self, which: Contestant, than: Contestant) -> String {
        let mut ratios: Vec<f64> =
            self.rounds.iter().map(|round| rate(&round[at(which)]) / rate(&round[at(than)])).collect();
        ratios.sort_by(f64::total_cmp);
        let quarter = ratios.len() / 4;
        let (low, high) = (ratios[quarter], ratios[ratios.len() - 1 - quarter]);
        format!("{:.2} ({low:.2} to {high:.2})", median(ratios))
    }
}

pub fn print(markdown: bool, cells: &[Cell], counted: &[Counted]) {
    use Contestant::{AtLeastOnce, Bare, BareSingle, EffectivelyOnce};
    for (which, than) in [(AtLeastOnce, [Bare, BareSingle]), (EffectivelyOnce, [Bare, AtLeastOnce])] {
        let row = |cell: &Cell| {
            let each =
                |which, value: fn(&Turn) -> f64| cell.median_of(which, |turn| value(turn) / turn.messages);
            let more = median(cell.rounds.iter().map(|round| {
                let syncs = |which| round[at(which)].synced / round[at(which)].messages;
                syncs(which) - syncs(than[1])
            }));
            vec![
                cell.in_flight.to_string(),
                thousands(cell.median_of(which, rate)),
                thousands(cell.median_of(than[0], rate)),
                thousands(cell.median_of(than[1], rate)),
                cell.ratio(which, than[0]),
                cell.ratio(which, than[1]),
                format!("{:.4}", each(which, |turn| turn.synced)),
                format!("{more:+.4}"),
                format!("{:.1}", each(which, |turn| turn.cpu_secs * 1e6)),
                format!("{:.1}", each(than[0], |turn| turn.cpu_secs * 1e6)),
            ]
        };
        let names = than.map(Contestant::name);
        let columns = [
            "in flight".to_owned(),
            "worker/s".to_owned(),
            format!("{}/s", names[0]),
            format!("{}/s", names[1]),
            format!("of {}", names[0]),
            format!("of {}", names[1]),
            "syncs a message".to_owned(),
            format!("more than {}", names[1]),
            "CPU us a message".to_owned(),
            format!("{}'s", names[0]),
        ];
        let rows: Vec<_> = cells.iter().map(row).collect();
        table(markdown, &format!("Worker, {}", which.name()), &columns.each_ref().map(String::as_str), &rows);
    }
    if counted.is_empty() {
        return;
    }
    let row = |one: &Counted| {
        let of = |which| median(one.rounds.iter().map(|round| round[at(which)]));
        let ratio = |which, than| {
            let ratios = one.rounds.iter().map(|round| round[at(which)] / round[at(than)]);
            format!("{:.2}", median(ratios))
        };
        let mut row = vec![one.in_flight.to_string()];
        row.extend(Contestant::ALL.map(|which| thousands(of(which))));
        row.extend([ratio(AtLeastOnce, Bare), ratio(AtLeastOnce, BareSingle), ratio(EffectivelyOnce, Bare)]);
        row
    };
    let mut columns = vec!["in flight"];
    columns.extend(Contestant::ALL.map(Contestant::name));
    columns.extend(["at-least-once of bare", "of bare-single", "effectively-once of bare"]);
    table(markdown, "Instructions a message", &columns, &counted.iter().map(row).collect::<Vec<_>>());
}
