//! The tables.

use std::fmt::{self, Write as _};

use crate::client::{Load, Measured};

/// A load's rounds on each server, Hapax first.
pub struct Row {
    pub load: Load,
    pub servers: Vec<(&'static str, Vec<Measured>)>,
}

/// A summary of a server's rounds: the median round's rate, and latencies of all requests.
struct Summary {
    rate: f64,
    p50_us: u32,
    p99_us: u32,
    cpu_us_a_message: f64,
    messages_a_sync: Option<f64>,
}

impl Summary {
    fn of(rounds: &[Measured]) -> Self {
        let mut rates: Vec<f64> = rounds.iter().map(|m| m.messages as f64 / m.time.as_secs_f64()).collect();
        rates.sort_by(f64::total_cmp);
        let mut latencies: Vec<u32> = rounds.iter().flat_map(|m| m.latencies_us.iter().copied()).collect();
        latencies.sort_unstable();
        let at = |share: usize| latencies.get(latencies.len() * share / 100).copied().unwrap_or(0);
        let messages = rounds.iter().map(|m| m.messages).sum::<u64>().max(1) as f64;
        let synced: Option<u64> = rounds.iter().map(|m| m.synced).sum();
        Self {
            rate: rates[rates.len() / 2],
            p50_us: at(50),
            p99_us: at(99),
            cpu_us_a_message: rounds.iter().map(|m| m.cpu_us).sum::<u64>() as f64 / messages,
            messages_a_sync: synced.filter(|synced| *synced > 0).map(|synced| messages / synced as f64),
        }
    }
}

fn ratio(summaries: &[Summary]) -> String {
    match summaries {
        [ours, peer] => format!("{:.2}", ours.rate / peer.rate),
        _ => "-".to_owned(),
    }
}

fn ms(us: u32) -> String {
    format!("{:.2}", f64::from(us) / 1000.0)
}

fn thousands(rate: f64) -> String {
    let digits = format!("{rate:.0}");
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap_or("?")).collect();
    groups.join(",")
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<26}", self.load.to_string())?;
        let summaries: Vec<Summary> = self.servers.iter().map(|(_, rounds)| Summary::of(rounds)).collect();
        for ((name, _), s) in self.servers.iter().zip(&summaries) {
            let (rate, p50, p99) = (thousands(s.rate), ms(s.p50_us), ms(s.p99_us));
            let cpu = s.cpu_us_a_message;
            write!(f, " | {name} {rate:>7}/s p50 {p50:>6} p99 {p99:>6} ms {cpu:>6.1} us cpu")?;
            if let Some(messages) = s.messages_a_sync {
                write!(f, " {messages:>5.1} a sync")?;
            }
        }
        write!(f, " | {}x", ratio(&summaries))
    }
}

/// Prints the full tables after the last round.
pub fn print(rows: &[Row], markdown: bool) {
    if !markdown {
        for row in rows {
            println!("{row}");
        }
        return;
    }
    for (cycle, title) in [(true, "Send, receive, delete"), (false, "Send only")] {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.load.cycle == cycle).collect();
        let Some(first) = rows.first() else { continue };
        println!("\n### {title}\n");
        let mut head = "| body | batch | connections |".to_owned();
        for (name, _) in &first.servers {
            let _ = write!(head, " {name} msg/s | p50 ms | p99 ms | CPU us/msg |");
        }
        println!("{head} messages a sync | ratio |");
        println!("|{}", "---:|".repeat(5 + 4 * first.servers.len()));
        for row in rows {
            let Load { body_bytes, batch, connections, .. } = row.load;
            let mut line = format!("| {body_bytes} B | {batch} | {connections} |");
            let summaries: Vec<Summary> = row.servers.iter().map(|(_, rounds)| Summary::of(rounds)).collect();
            for s in &summaries {
                let (rate, p50, p99) = (thousands(s.rate), ms(s.p50_us), ms(s.p99_us));
                let _ = write!(line, " {rate} | {p50} | {p99} | {:.1} |", s.cpu_us_a_message);
            }
            let synced = summaries.first().and_then(|ours| ours.messages_a_sync);
            let synced = synced.map_or("-".to_owned(), |messages| format!("{messages:.1}"));
            println!("{line} {synced} | **{}** |", ratio(&summaries));
        }
    }
}
