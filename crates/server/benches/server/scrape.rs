//! `/metrics` of a server with many queues: how long a page takes, and whether the writer notices.
//!
//! The same sends are measured without scrapes, with one each second, and with one after the other, interleaved in each round. A Prometheus
//! asks every 15 s or less often, so one each second is already fifteen times as much.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::client::{self, Connection, Load, Measured};
use crate::servers::Server;
use crate::text;

/// Queues of the server. Each has sent, delivered and deleted a message, so that it has all its figures.
const QUEUES: usize = 1_000;
/// Pages that are measured on the idle server.
const IDLE_PAGES: usize = 200;
/// The page must not take longer, on the idle server and beside the load.
const PAGE_MS_MAX: f64 = 50.0;
/// Sends beside one scrape each second, as a share of those without.
const SENDS_MIN: f64 = 0.97;

const LOAD: Load = Load { cycle: false, body_bytes: 256, batch: 1, connections: 16 };

/// How often the page is asked for beside the load.
#[derive(Clone, Copy)]
enum Pace {
    Never,
    EachSecond,
    Always,
}

impl Pace {
    const ALL: [Self; 3] = [Self::Never, Self::EachSecond, Self::Always];

    fn words(self) -> &'static str {
        match self {
            Self::Never => "none",
            Self::EachSecond => "one each second",
            Self::Always => "one after the other",
        }
    }
}

/// What was measured at one pace, in all rounds.
#[derive(Default)]
struct Beside {
    sends: Vec<Measured>,
    pages_ms: Vec<f64>,
}

/// Measures pages of an idle and of a busy server, prints the table, and says whether the aims are met.
pub async fn run(server: &Server, rounds: usize, round: Duration, markdown: bool) -> Result<(), String> {
    client::fill_queues(server, QUEUES).await?;
    eprintln!("{IDLE_PAGES} pages of the idle server");
    let mut connection = Connection::open(server).await?;
    let mut idle_ms = Vec::new();
    for _ in 0..IDLE_PAGES {
        idle_ms.push(page(&mut connection).await?);
    }
    let bytes = page_bytes(&mut connection).await?;
    let mut all = Pace::ALL.map(|pace| (pace, Beside::default()));
    for number in 0..rounds {
        for (pace, beside) in &mut all {
            let (end, ended) = oneshot::channel();
            let scraper = tokio::spawn(scrape(Connection::open(server).await?, *pace, ended));
            beside.sends.push(client::measure(server, LOAD, round).await?);
            drop(end);
            beside.pages_ms.extend(scraper.await.map_err(text)??);
        }
        eprintln!("round {} of {rounds}", number + 1);
    }
    println!("{QUEUES} queues, a page of {} KiB; sends: {LOAD}\n", bytes / 1024);
    print(&mut idle_ms, &mut all, markdown);
    Ok(())
}

/// Asks for pages until it is told to end; the times that they took.
async fn scrape(
    mut connection: Connection,
    pace: Pace,
    mut ended: oneshot::Receiver<()>,
) -> Result<Vec<f64>, String> {
    let pause = match pace {
        Pace::Never => return Ok(Vec::new()),
        Pace::EachSecond => Duration::from_secs(1),
        Pace::Always => Duration::ZERO,
    };
    let mut pages_ms = Vec::new();
    loop {
        pages_ms.push(page(&mut connection).await?);
        if tokio::time::timeout(pause, &mut ended).await.is_ok() {
            return Ok(pages_ms);
        }
    }
}

/// Asks for one page; the milliseconds that it took.
async fn page(connection: &mut Connection) -> Result<f64, String> {
    let start = Instant::now();
    connection.get("/metrics").await?;
    Ok(start.elapsed().as_secs_f64() * 1000.0)
}

/// The bytes of a page that has the figures of all queues.
async fn page_bytes(connection: &mut Connection) -> Result<usize, String> {
    let page = connection.get("/metrics").await?;
    let queues = page.matches("\nhapax_queue_sent_total{").count();
    let delivered = page.matches("\nhapax_delivery_granted_total{").count();
    if queues < QUEUES || delivered < QUEUES {
        return Err(format!("the page has the figures of {queues} queues and the deliveries of {delivered}"));
    }
    Ok(page.len())
}

fn print(idle_ms: &mut [f64], all: &mut [(Pace, Beside); 3], markdown: bool) {
    let rate = |beside: &Beside| {
        let of = |one: &Measured| one.messages as f64 / one.time.as_secs_f64();
        median(&mut beside.sends.iter().map(of).collect::<Vec<_>>())
    };
    let without = rate(&all[0].1);
    let [edge, line] = if markdown { ["| ", " | "] } else { ["", "   "] };
    let row = |cells: [String; 7]| println!("{edge}{}{}", cells.join(line), edge.trim_end());
    row(["scrapes", "sends/s", "of none", "p50 ms", "p99 ms", "page p50 ms", "page max ms"]
        .map(str::to_owned));
    if markdown {
        println!("|---|{}", "--:|".repeat(6));
    }
    let mut met = Vec::new();
    for (pace, beside) in all.iter_mut() {
        let mut sends_ms: Vec<f64> =
            beside.sends.iter().flat_map(|one| &one.latencies_us).map(|us| f64::from(*us) / 1000.0).collect();
        let sends_rate = rate(beside);
        let share = sends_rate / without;
        let pages = &mut beside.pages_ms;
        let page = |percent, pages: &mut Vec<f64>| {
            if pages.is_empty() { "-".to_owned() } else { format!("{:.1}", quantile(pages, percent)) }
        };
        row([
            pace.words().to_owned(),
            format!("{sends_rate:.0}"),
            format!("{share:.3}"),
            format!("{:.2}", quantile(&mut sends_ms, 50)),
            format!("{:.2}", quantile(&mut sends_ms, 99)),
            page(50, pages),
            page(100, pages),
        ]);
        if matches!(pace, Pace::EachSecond) {
            met.push((
                format!("sends beside one scrape each second: {share:.3} of those without"),
                share >= SENDS_MIN,
            ));
            let max = quantile(pages, 100);
            met.push((format!("slowest page beside the sends: {max:.1} ms"), max <= PAGE_MS_MAX));
        }
    }
    let (p50, max) = (quantile(idle_ms, 50), quantile(idle_ms, 100));
    println!();
    met.push((format!("idle pages: median {p50:.1} ms, slowest {max:.1} ms"), max <= PAGE_MS_MAX));
    for (what, is_met) in met {
        println!("- {what}: {}", if is_met { "met" } else { "**missed**" });
    }
    println!("\nAims: a page within {PAGE_MS_MAX} ms, and {SENDS_MIN} of the sends.");
}

fn median(values: &mut [f64]) -> f64 {
    quantile(values, 50)
}

/// The value that `percent` of the values do not exceed; 0 if there are none.
fn quantile(values: &mut [f64], percent: usize) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = (values.len() * percent / 100).min(values.len().saturating_sub(1));
    values.get(at).copied().unwrap_or_default()
}
