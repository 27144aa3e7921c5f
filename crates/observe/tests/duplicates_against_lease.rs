//! How many deliveries are repeated, for leases from a fifth to five times the 99th percentile of the work; with consumers
//! that stay, and with consumers that are scaled in and out. On a real store, whose time is moved by hand.
//!
//! docs/leases.md shows the table and the plot; `HAPAX_BLESS=1` writes both when the figures have changed.

mod common;

use std::fmt::Write as _;
use std::path::Path;

use common::Rig;
use hapax_core::policy::RetryPolicy;
use hapax_core::{Delivery, NewMessage, QueueAdmin as _, QueueConfig};

const DOCS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs");
const MESSAGES: usize = 80;
/// The 99th percentile of the work.
const P99_MS: u64 = 1_000;
/// Leases, in per cent of it.
const LEASES: [u64; 8] = [20, 40, 60, 80, 100, 150, 250, 500];
const STEP_MS: u64 = 50;
/// In the scaled runs a consumer is killed, and another one started, this often.
const SCALE_MS: u64 = 700;

/// Work times: most are short, one in a hundred takes P99 or longer.
fn work_ms(random: &mut Random) -> u64 {
    match random.below(100) {
        0..60 => 100 + random.below(200),
        60..90 => 300 + random.below(300),
        90..99 => 600 + random.below(400),
        _ => P99_MS,
    }
}

/// A small generator, so that the figures are the same everywhere.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }
}

struct Consumer {
    name: String,
    work: Option<(Delivery, u64)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Figures {
    deliveries: u64,
    expired: u64,
    late: u64,
    /// How long until everything was done.
    took_ms: u64,
}

async fn run(lease_ms: u64, scaled: bool) -> Figures {
    let config = QueueConfig { lease_ms, retry: RetryPolicy::exponential(0, 0), ..QueueConfig::default() };
    let rig = Rig::new(config).await;
    let mut random = Random(7);
    for _ in 0..MESSAGES {
        rig.send(NewMessage::new("a")).await;
    }
    let new = |number: usize| Consumer { name: format!("consumer-{number}"), work: None };
    let mut consumers: Vec<Consumer> = (0..6).map(new).collect();
    let (mut now_ms, mut started) = (0, consumers.len());
    loop {
        for consumer in &mut consumers {
            if let Some((delivery, until_ms)) = &consumer.work {
                if *until_ms > now_ms {
                    continue;
                }
                let _ = rig.ack(delivery).await;
                consumer.work = None;
            }
            if let Some(delivery) = rig.receive(&consumer.name).await {
                consumer.work = Some((delivery, now_ms + work_ms(&mut random)));
            }
        }
        let stats = rig.store.stats(&rig.queue).await.unwrap();
        if stats.ready + stats.delayed + stats.in_flight == 0 {
            let figures = rig.store.observer().figures(&rig.queue);
            return Figures {
                deliveries: stats.totals.delivered,
                expired: figures.repeated_after_expiry,
                late: figures.late,
                took_ms: now_ms,
            };
        }
        assert!(now_ms < 600_000, "it does not end: {stats:?}");
        rig.clock.advance_ms(STEP_MS);
        now_ms += STEP_MS;
        if scaled && now_ms % SCALE_MS == 0 && now_ms <= 8 * SCALE_MS {
            // The container is gone, with what it held; another one starts.
            let gone = random.below(consumers.len() as u64) as usize;
            consumers[gone] = new(started);
            started += 1;
        }
    }
}

fn share(figures: Figures) -> f64 {
    figures.expired as f64 / figures.deliveries as f64 * 100.0
}

fn table(rows: &[(u64, Figures, Figures)]) -> String {
    let mut text = "| lease ÷ P99 | repeated | settled too late | done after | repeated, scaled in and out | done after |\n\
                    |--:|--:|--:|--:|--:|--:|\n"
        .to_owned();
    for (percent, steady, scaled) in rows {
        let seconds = |figures: &Figures| figures.took_ms as f64 / 1000.0;
        let _ = writeln!(
            text,
            "| {:.1} | {:.1}% | {} | {:.1} s | {:.1}% | {:.1} s |",
            *percent as f64 / 100.0,
            share(*steady),
            steady.late,
            seconds(steady),
            share(*scaled),
            seconds(scaled),
        );
    }
    text
}

/// A plot of both curves, drawn by hand: lease on the x axis, share of repeated deliveries on the y axis.
fn plot(rows: &[(u64, Figures, Figures)]) -> String {
    let x = |percent: u64| 60.0 + (percent as f64 / 20.0).ln() / 25f64.ln() * 520.0;
    let y = |share: f64| 260.0 - share / 100.0 * 220.0;
    let line = |of: fn(&(u64, Figures, Figures)) -> Figures, color: &str| {
        let points: String = rows
            .iter()
            .fold(String::new(), |text, row| format!("{text}{:.1},{:.1} ", x(row.0), y(share(of(row)))));
        format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{color}\" stroke-width=\"2\"/>\n",
            points.trim_end()
        )
    };
    let mut svg = "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 620 320\" font-family=\"sans-serif\" font-size=\"12\">\n\
                   <rect width=\"620\" height=\"320\" fill=\"white\"/>\n"
        .to_owned();
    for share in [0, 25, 50, 75, 100] {
        let at = y(f64::from(share));
        let _ = writeln!(svg, "<line x1=\"60\" x2=\"580\" y1=\"{at:.1}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>");
        let _ = writeln!(svg, "<text x=\"52\" y=\"{:.1}\" text-anchor=\"end\">{share}%</text>", at + 4.0);
    }
    for (percent, ..) in rows {
        let ratio = *percent as f64 / 100.0;
        let _ =
            writeln!(svg, "<text x=\"{:.1}\" y=\"278\" text-anchor=\"middle\">{ratio}</text>", x(*percent));
    }
    svg += &line(|row| row.1, "#1f77b4");
    svg += &line(|row| row.2, "#d62728");
    svg += "<text x=\"320\" y=\"305\" text-anchor=\"middle\">lease ÷ P99 of the work</text>\n\
            <text x=\"420\" y=\"60\" fill=\"#1f77b4\">consumers that stay</text>\n\
            <text x=\"420\" y=\"78\" fill=\"#d62728\">consumers scaled in and out</text>\n</svg>\n";
    svg
}

#[tokio::test]
async fn duplicates_end_where_the_lease_exceeds_the_work() {
    let mut rows = Vec::new();
    for percent in LEASES {
        let lease_ms = P99_MS * percent / 100;
        rows.push((percent, run(lease_ms, false).await, run(lease_ms, true).await));
    }
    let (table, plot) = (table(&rows), plot(&rows));
    println!("{table}");
    for (percent, steady, scaled) in &rows {
        // Just at the longest run it depends on who is first.
        assert!(*percent == 100 || (steady.expired == 0) == (*percent > 100), "{percent}: {steady:?}");
        assert!(scaled.expired > 0, "{percent}: what a killed consumer held comes back: {scaled:?}");
    }
    let shares: Vec<f64> = rows.iter().map(|(_, steady, _)| share(*steady)).collect();
    assert!(shares.is_sorted_by(|a, b| a >= b), "a longer lease repeats less: {shares:?}");
    let last = rows.last().unwrap();
    assert!(
        last.2.took_ms > last.1.took_ms + 3_000,
        "a lease far above the work delays what a killed consumer held"
    );
    let (page, drawing) = (Path::new(DOCS).join("leases.md"), Path::new(DOCS).join("leases.svg"));
    let text = std::fs::read_to_string(&page).unwrap();
    if std::env::var_os("HAPAX_BLESS").is_some() {
        let begin = text.find("| lease ÷ P99").unwrap_or(text.len());
        let end = text[begin..].find("\n\n").map_or(text.len(), |at| begin + at + 1);
        std::fs::write(&page, format!("{}{table}{}", &text[..begin], &text[end..])).unwrap();
        std::fs::write(&drawing, &plot).unwrap();
        return;
    }
    assert!(text.contains(&table), "docs/leases.md has other figures; HAPAX_BLESS=1 writes them:\n{table}");
    assert_eq!(std::fs::read_to_string(drawing).unwrap(), plot, "docs/leases.svg is of other figures");
}
