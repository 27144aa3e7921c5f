//! A transaction that is open for long keeps dead rows from being vacuumed: how the rates of the queues change meanwhile.
//!
//! Every turn is one of Hapax through two stores, one of the table with SKIP LOCKED, both in databases where such a
//! transaction is open, and one of Hapax in a database without: what is lost there is lost to other work of the machine.
//! Single messages; a quarter of the leases is extended, every twentieth is left to end.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use sqlx::Executor as _;

use crate::args::Args;
use crate::contestants::{Contestant, Load, SHALLOW};
use crate::measure::{median, table, thousands};
use crate::server::Server;

const CLIENTS: usize = 16;
const NAMES: [&str; 3] = ["Hapax, xmin held", "SKIP LOCKED, xmin held", "Hapax, nothing held"];
const COLOURS: [&str; 3] = ["#1668b5", "#c2410c", "#8a8a8a"];
/// Durations of their turns, in parts of a period.
const SHARES: [u32; 3] = [1, 1, 1];

/// The rates of one period.
struct Point {
    at_secs: f64,
    rates: [f64; 3],
}

pub async fn run(args: &Args, server: &mut Server) {
    let mut all = [
        Contestant::hapax(server, NAMES[0], "hapax_held", "jobs", 2).await,
        Contestant::skip_locked(server, "skip_locked_held").await,
        Contestant::hapax(server, NAMES[2], "hapax_free", "jobs", 2).await,
    ];
    // The loop alone needs no such index; ending leases does.
    let index = "CREATE INDEX job_deadline ON job (deadline) WHERE state = 1";
    server.connect(&all[1].database).await.execute(index).await.expect("an index is made");
    let part = (args.held / 120).clamp(Duration::from_millis(100), Duration::from_secs(1));
    let load = |at: usize| Load { clients: CLIENTS, batch: 1, time: part * SHARES[at], troubled: true };
    for (at, contestant) in all.iter_mut().enumerate() {
        contestant.fill(server, SHALLOW).await;
        contestant.turn(server, load(at)).await;
    }
    let mut holders = Vec::new();
    for contestant in &all[..2] {
        let mut holder = server.connect(&contestant.database).await;
        holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ").await.expect("it begins");
        holder.execute("SELECT 1").await.expect("it has a snapshot");
        holders.push(holder);
    }
    let (start, mut points, mut total) = (Instant::now(), Vec::new(), [0; 3]);
    while start.elapsed() < args.held {
        let mut rates = [0.0; 3];
        for (at, contestant) in all.iter_mut().enumerate() {
            contestant.sweep(server).await;
            let (done, secs) = contestant.turn(server, load(at)).await;
            (rates[at], total[at]) = (done as f64 / secs, total[at] + done);
        }
        points.push(Point { at_secs: start.elapsed().as_secs_f64(), rates });
    }
    for mut holder in holders {
        holder.execute("COMMIT").await.expect("the transaction was open until now");
    }
    report(args, &points, total);
    if let Some(folder) = &args.plot {
        write(folder, &points);
    }
}

fn report(args: &Args, points: &[Point], total: [u64; 3]) {
    let held = args.held.as_secs_f64();
    let window = (held / 10.0).max(10.0).min(held / 2.0);
    let rate = |at: usize, from: f64, to: f64| {
        median(points.iter().filter(|point| (from..to).contains(&point.at_secs)).map(|point| point.rates[at]))
    };
    let first = |at: usize| rate(at, 0.0, window);
    let last = |at: usize| rate(at, held - window, f64::MAX);
    let row = |at: usize| {
        let (first_rate, last_rate) = (first(at), last(at));
        // What the machine did to the contestant without a held transaction is taken out.
        let steady = (last_rate / last(2)) / (first_rate / first(2));
        vec![
            NAMES[at].to_owned(),
            thousands(total[at] as f64),
            thousands(first_rate),
            thousands(last_rate),
            format!("{:.2}", last_rate / first_rate),
            format!("{steady:.2}"),
        ]
    };
    let columns = ["contestant", "lifecycles", "first", "last", "last of first", "the same, of nothing held"];
    let title = format!("A transaction is open for {held:.0} s; rates of the first and last {window:.0} s");
    table(args.markdown, &title, &columns, &[row(0), row(1), row(2)]);
    println!("\nHapax of SKIP LOCKED in the last {window:.0} s: {:.1}", last(0) / last(1));
}

fn write(folder: &Path, points: &[Point]) {
    std::fs::create_dir_all(folder).expect("the folder can be made");
    let mut csv = String::from("seconds,hapax_held,skip_locked_held,hapax_free\n");
    for Point { at_secs, rates } in points {
        writeln!(csv, "{at_secs:.1},{:.0},{:.0},{:.0}", rates[0], rates[1], rates[2])
            .expect("a string grows");
    }
    std::fs::write(folder.join("held-xmin.csv"), csv).expect("the figures are written");
    std::fs::write(folder.join("held-xmin.svg"), svg(points)).expect("the plot is written");
}

/// A plot of rates over time.
fn svg(points: &[Point]) -> String {
    let secs = points.last().map_or(1.0, |point| point.at_secs).max(1.0);
    let highest = points.iter().flat_map(|point| point.rates).fold(1.0, f64::max);
    let step = [100.0, 200.0, 500.0, 1_000.0, 2_000.0, 5_000.0, 10_000.0];
    let step = step.into_iter().find(|step| highest / step <= 6.0).unwrap_or(20_000.0);
    let top = (highest / step).ceil() * step;
    let x = |at: f64| 60.0 + 600.0 * at / secs;
    let y = |rate: f64| 250.0 - 220.0 * rate / top;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 700 310\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"700\" height=\"310\" fill=\"#fff\"/>\n",
    );
    let mut line = |text: String| writeln!(svg, "{text}").expect("a string grows");
    for number in 0..=(top / step) as u32 {
        let (rate, at) = (f64::from(number) * step, y(f64::from(number) * step));
        line(format!(
            "<path d=\"M60 {at:.0}H660\" stroke=\"#ddd\"/><text x=\"54\" y=\"{:.0}\" text-anchor=\"end\">{}</text>",
            at + 4.0,
            thousands(rate)
        ));
    }
    for number in 0..=5 {
        let at = secs * f64::from(number) / 5.0;
        line(format!("<text x=\"{:.0}\" y=\"268\" text-anchor=\"middle\">{at:.0} s</text>", x(at)));
    }
    for at in 0..3 {
        let path: Vec<String> =
            points.iter().map(|point| format!("{:.1},{:.1}", x(point.at_secs), y(point.rates[at]))).collect();
        let colour = COLOURS[at];
        line(format!(
            "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>",
            path.join(" ")
        ));
        let left = 60 + 210 * at;
        line(format!(
            "<path d=\"M{left} 290h24\" stroke=\"{colour}\" stroke-width=\"3\"/><text x=\"{}\" y=\"294\">{}</text>",
            left + 30,
            NAMES[at]
        ));
    }
    line(
        "<text x=\"60\" y=\"18\">Lifecycles a second of 16 clients while a transaction is open</text>"
            .to_owned(),
    );
    line("</svg>".to_owned());
    svg
}
