//! What `hapax top` draws. Names and messages come from elsewhere and are escaped.

use std::fmt::Write as _;

use crossterm::style::{Attribute, Color, ContentStyle, Stylize as _};
use hapax_observe::Located;

use super::data::{QueueRow, Snapshot};
use super::{Page, Screen};
use crate::text::{escape, messages, show_bytes, show_ms, show_time, word};

const HELP: &str = "up/down, Page Up/Down move   Enter queue   a advice   o overview   q quit";

/// A line of text in one style.
#[derive(Debug, Clone)]
struct Line {
    text: String,
    style: ContentStyle,
}

impl Line {
    fn colored(text: impl Into<String>, color: Color) -> Self {
        Self { text: text.into(), style: ContentStyle::new().with(color) }
    }

    fn bold(text: impl Into<String>) -> Self {
        Self { text: text.into(), style: ContentStyle::new().attribute(Attribute::Bold) }
    }
}

impl From<String> for Line {
    fn from(text: String) -> Self {
        Self { text, style: ContentStyle::new() }
    }
}

/// The screen's lines, each cut to the width, the last one with the keys.
pub(super) fn lines(screen: &Screen, width: usize, height: usize) -> Vec<String> {
    let mut lines = head(screen);
    lines.push(Line::from(String::new()));
    lines.extend(match screen.page {
        Page::Overview => overview(screen, width, height.saturating_sub(lines.len() + 3)),
        Page::Queue => queue(screen),
        Page::Advice => advice(screen),
    });
    let mut lines: Vec<Line> = lines.iter().flat_map(|line| wrapped(line, width)).collect();
    let body = height.saturating_sub(1);
    lines.truncate(body);
    lines.resize(body, Line::from(String::new()));
    lines.push(Line::colored(cut(HELP, width), Color::DarkGrey));
    lines.iter().map(|line| line.style.apply(&line.text).to_string()).collect()
}

fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

/// A long line as several; those after the first are indented.
fn wrapped(line: &Line, width: usize) -> Vec<Line> {
    let mut parts = Vec::new();
    let mut rest: Vec<char> = line.text.chars().collect();
    let width = width.max(8);
    while rest.len() > width {
        let space = rest[..width].iter().rposition(|c| *c == ' ').filter(|at| *at > width / 2);
        let end = space.unwrap_or(width);
        let tail = rest.split_off(end);
        parts.push(rest.into_iter().collect::<String>());
        rest = "    ".chars().chain(tail.into_iter().skip_while(|c| *c == ' ')).collect();
    }
    parts.push(rest.into_iter().collect());
    parts.into_iter().map(|text| Line { text, style: line.style }).collect()
}

fn head(screen: &Screen) -> Vec<Line> {
    let now = &screen.now;
    let waiting: u64 = now.queues.iter().map(|queue| queue.stats.ready + queue.stats.in_flight).sum();
    let queues = match (now.queues.len() + now.more, now.more) {
        (1, _) => "1 queue".to_owned(),
        (all, 0) => format!("{all} queues"),
        (all, _) => format!("{} of {all} queues", now.queues.len()),
    };
    let (place, time) = (escape(&now.place), show_time(now.at_ms));
    let mut lines = vec![Line::bold(format!("Hapax {place}  {time}  {queues}  {}", messages(waiting)))];
    if let Some(ledger) = &now.ledger {
        let asked = ledger.granted + ledger.replayed;
        let hits = if asked == 0 { "-".to_owned() } else { percent(ledger.replayed, asked) };
        lines.push(Line::from(format!(
            "Ledger  {} entries  hits {hits} ({} of {asked})  in progress {}  other request {}  in doubt {}",
            ledger.entries, ledger.replayed, ledger.conflicts, ledger.mismatches, ledger.in_doubt,
        )));
    }
    lines.push(match (&screen.problem, now.advice.findings.len()) {
        (Some(problem), _) => Line::colored(problem.clone(), Color::Red),
        (None, 0) => Line::colored("No advice", Color::Green),
        (None, 1) => Line::colored("1 finding: press a", Color::Yellow),
        (None, many) => Line::colored(format!("{many} findings: press a"), Color::Yellow),
    });
    lines
}

fn percent(part: u64, of: u64) -> String {
    let tenths = part.saturating_mul(1000).checked_div(of).unwrap_or(0);
    format!("{}.{}%", tenths / 10, tenths % 10)
}

/// How much a counter grows per second between the last two readings.
fn rate(screen: &Screen, name: &str, counter: fn(&QueueRow) -> u64) -> String {
    let Some(before) = &screen.before else { return "-".to_owned() };
    let of = |snapshot: &Snapshot| snapshot.queues.iter().find(|queue| queue.name == name).map(counter);
    let (Some(old), Some(new)) = (of(before), of(&screen.now)) else { return "-".to_owned() };
    let ms = screen.now.at_ms.saturating_sub(before.at_ms).max(1);
    let per_second = new.saturating_sub(old).saturating_mul(1000) / ms;
    per_second.to_string()
}

/// The columns of the overview. Those that a terminal of 80 characters has no room for are left out in a narrow one: the page of a
/// queue has them.
const COLUMNS: [&str; 10] =
    ["queue", "tier", "ready", "flight", "parked", "sent/s", "acked/s", "repeated", "P99", "lease"];
const WIDE: [&str; 3] = ["tier", "flight", "parked"];
/// Characters of a row with all columns.
const WIDTH_OF_ALL: usize = 24 + 17 + 8 * 9;

/// A row of the overview, in one line.
fn row(cells: [&str; 10], width: usize) -> String {
    let mut text = String::new();
    for (name, cell) in COLUMNS.into_iter().zip(cells) {
        if width < WIDTH_OF_ALL && WIDE.contains(&name) {
            continue;
        }
        let _ = match name {
            "queue" => write!(text, "{:<24}", cut(cell, 24)),
            "tier" => write!(text, " {cell:<16}"),
            _ => write!(text, " {cell:>8}"),
        };
    }
    cut(&text, width)
}

/// At most `rows` queues, the selected one among them.
fn overview(screen: &Screen, width: usize, rows: usize) -> Vec<Line> {
    let mut lines = vec![Line::bold(row(COLUMNS, width))];
    let first = screen.selected.saturating_sub(rows.saturating_sub(1));
    for (at, queue) in screen.now.queues.iter().enumerate().skip(first).take(rows.max(1)) {
        let seen = &queue.seen;
        let name = if queue.paused { format!("{} (paused)", queue.name) } else { queue.name.clone() };
        let repeated =
            if seen.delivered == 0 { "-".to_owned() } else { percent(seen.expired, seen.delivered) };
        let cells = [
            &escape(&name),
            &word(&queue.tier),
            &queue.stats.ready.to_string(),
            &queue.stats.in_flight.to_string(),
            &queue.stats.parked.to_string(),
            &rate(screen, &queue.name, |queue| queue.stats.totals.sent),
            &rate(screen, &queue.name, |queue| queue.stats.totals.acked),
            &repeated,
            &seen.held_p99_ms.map_or_else(|| "-".to_owned(), show_ms),
            &show_ms(queue.lease_ms),
        ];
        let text = row(cells.map(String::as_str), width);
        let advised = screen.now.advice.findings.iter().any(|located| is_about(located, queue));
        let mut line = if advised { Line::colored(text, Color::Yellow) } else { Line::from(text) };
        if at == screen.selected {
            line.style = line.style.attribute(Attribute::Reverse);
        }
        lines.push(line);
    }
    lines
}

fn is_about(located: &Located, queue: &QueueRow) -> bool {
    located.queue.as_ref().is_some_and(|name| name.as_str() == queue.name)
}

fn queue(screen: &Screen) -> Vec<Line> {
    let Some(queue) = screen.now.queues.get(screen.selected) else { return Vec::new() };
    let (stats, totals, seen) = (&queue.stats, &queue.stats.totals, &queue.seen);
    let p = |ms: Option<u64>| ms.map_or_else(|| "-".to_owned(), show_ms);
    let per_second = |counter: fn(&QueueRow) -> u64| rate(screen, &queue.name, counter);
    let oldest = stats.oldest_sent_ms.map_or_else(|| "-".to_owned(), show_time);
    let died = seen.dead_error.as_ref().map_or_else(
        || seen.dead.to_string(),
        |common| format!("{}, most with: {}", seen.dead, escape(&common.error)),
    );
    let facts = [
        (
            "waiting",
            format!(
                "{} ready, {} delayed, {} in flight, {} parked, {} in halted groups",
                stats.ready, stats.delayed, stats.in_flight, stats.parked, stats.halted
            ),
        ),
        ("size", format!("{}, oldest sent {oldest}", show_bytes(stats.bytes))),
        (
            "per second",
            format!(
                "{} sent, {} delivered, {} acked, {} returned",
                per_second(|queue| queue.stats.totals.sent),
                per_second(|queue| queue.stats.totals.delivered),
                per_second(|queue| queue.stats.totals.acked),
                per_second(|queue| queue.stats.totals.retried),
            ),
        ),
        (
            "in all",
            format!(
                "{} sent, {} suppressed, {} acked, {} dead, {} dropped by age",
                totals.sent, totals.duplicates, totals.acked, totals.dead, totals.retention_dropped
            ),
        ),
        (
            "lease",
            format!(
                "{}; deliveries are held {} (median), {} (P99)",
                show_ms(queue.lease_ms),
                p(seen.held_p50_ms),
                p(seen.held_p99_ms)
            ),
        ),
        (
            "repeated",
            format!(
                "{} of {} deliveries because a lease ran out ({}), {} settled too late",
                seen.expired,
                seen.delivered,
                percent(seen.expired, seen.delivered),
                seen.late
            ),
        ),
        ("consumers", format!("{} started, {} stopped", seen.consumers_started, seen.consumers_stopped)),
        (
            "keys",
            format!("{} claimed, {} replayed, {} in progress", seen.granted, seen.replayed, seen.conflicts),
        ),
        ("died", died),
    ];
    let (name, tier) = (escape(&queue.name), word(&queue.tier));
    let title = match seen.window_ms {
        // A store that is read directly, or a queue that this server has not seen used.
        0 => format!("{name} ({tier})"),
        window_ms => format!("{name} ({tier}), the latest {}", show_ms(window_ms)),
    };
    let mut lines = vec![Line::bold(title)];
    lines.extend(facts.into_iter().map(|(name, value)| Line::from(format!("{name:>11}  {value}"))));
    lines.push(Line::from(String::new()));
    let about = screen.now.advice.findings.iter().filter(|located| is_about(located, queue));
    lines.extend(about.flat_map(finding_lines));
    lines
}

fn finding_lines(located: &Located) -> [Line; 2] {
    let finding = &located.finding;
    let color = if finding.is_refusal() { Color::Red } else { Color::Yellow };
    let place = located.queue.as_ref().map_or("store", |queue| queue.as_str());
    let what = format!("{} {}: {}", escape(place), finding.code, escape(&finding.message));
    [Line::colored(what, color), Line::from(format!("  -> {}", escape(&finding.remedy)))]
}

fn advice(screen: &Screen) -> Vec<Line> {
    let findings = &screen.now.advice.findings;
    if findings.is_empty() {
        return vec![Line::from("Nothing to advise, as far as was seen.".to_owned())];
    }
    let first = screen.first_finding.min(findings.len() - 1);
    let mut lines = Vec::new();
    if findings.len() > 1 {
        lines.push(Line::bold(format!("Findings {} to {}", first + 1, findings.len())));
    }
    lines.extend(findings[first..].iter().flat_map(finding_lines));
    lines
}

#[cfg(test)]
pub(super) mod samples {
    use hapax::core::policy::tier::{Finding, ObservedQueue, Severity};
    use hapax::core::{LedgerStats, QueueStats, Tier};
    use hapax_observe::{Advice, Located};

    use super::*;

    pub fn snapshot(at_ms: u64, acked: u64) -> Snapshot {
        let mut stats = QueueStats { ready: 7, ..QueueStats::default() };
        stats.totals.acked = acked;
        let seen = ObservedQueue {
            window_ms: 600_000,
            delivered: 1_000,
            expired: 31,
            held_p99_ms: Some(41_000),
            ..ObservedQueue::default()
        };
        let row = |name: &str, seen| QueueRow {
            name: name.to_owned(),
            tier: Tier::EffectivelyOnce,
            lease_ms: 30_000,
            paused: false,
            stats,
            seen,
        };
        let finding = Finding {
            code: "leases-expire".into(),
            severity: Severity::Warning,
            message: "lease 30 s, P99 41 s\u{1b}[2J".into(),
            remedy: "set the lease to 75 s".into(),
        };
        let queue = Some("payments".parse().unwrap());
        Snapshot {
            at_ms,
            place: "http://127.0.0.1:9324".into(),
            queues: vec![row("emails", ObservedQueue::default()), row("payments", seen)],
            more: 0,
            ledger: Some(LedgerStats { granted: 9, replayed: 1, ..LedgerStats::default() }),
            advice: Advice { findings: vec![Located { queue, finding }], not_seen: Vec::new() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(page: Page, width: usize) -> String {
        let mut screen = Screen { page, selected: 1, ..Screen::default() };
        screen.update(Ok(samples::snapshot(1_000_000, 10)));
        screen.update(Ok(samples::snapshot(1_002_000, 30)));
        let drawn = lines(&screen, width, 24);
        assert_eq!(drawn.len(), 24);
        drawn.join("\n")
    }

    #[test]
    fn the_overview_has_rates_and_what_is_repeated() {
        let text = drawn(Page::Overview, 120);
        let row = text.lines().find(|line| line.contains("payments")).unwrap();
        for word in ["effectively-once", " 7 ", " 10 ", "3.1%", "41s", "30s"] {
            assert!(row.contains(word), "{word}: {text}");
        }
        assert!(text.contains("hits 10.0% (1 of 10)") && text.contains("1 finding: press a"), "{text}");
    }

    #[test]
    fn a_row_of_a_narrow_overview_stays_in_one_line() {
        for width in [60, 80, 112, 113] {
            let text = drawn(Page::Overview, width);
            let about: Vec<_> = text.lines().skip_while(|line| !line.contains("queue   ")).take(4).collect();
            assert!(about[1].contains("emails") && about[2].contains("payments"), "{width}: {text}");
            assert_eq!(about[2].contains("effectively-once"), width == 113, "{width}: {text}");
            // P99 and lease are what the page is for.
            assert_eq!(about[2].contains("41s") && about[2].contains("30s"), width >= 80, "{width}: {text}");
        }
    }

    #[test]
    fn a_queue_and_the_advice_say_what_to_set_and_escape_what_they_show() {
        for page in [Page::Queue, Page::Advice] {
            let text = drawn(page, 100);
            assert!(
                text.contains("payments leases-expire") && text.contains("-> set the lease to 75 s"),
                "{text}"
            );
            assert!(
                !text.contains("\u{1b}[2J"),
                "what a message contains does not reach the terminal: {text:?}"
            );
        }
        assert!(drawn(Page::Queue, 100).contains("31 of 1000 deliveries because a lease ran out (3.1%)"));
    }

    #[test]
    fn a_small_terminal_is_filled_and_no_more() {
        for width in [1, 5, 20, 40] {
            for page in [Page::Overview, Page::Queue, Page::Advice] {
                drawn(page, width);
            }
        }
    }
}
