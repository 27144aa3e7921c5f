//! What a tier costs and what it keeps: the same messages through the same worker, at each tier on each store.
//!
//! Cost: messages handled in a second with 64 in flight; the time from a send to the settle with one; processor time, bytes
//! written and syncs for each message. What it keeps: messages lost and effects repeated after the worker's process was killed several times.
//! `docs/tiers.md` explains the tables.

mod killed;
mod places;
mod syncs;
mod work;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use hapax::Tier;
use hapax::core::OnDoubt;
use places::{Place, Site, Used};
use work::Flow;

/// A tier, and what happens to a message whose run was interrupted.
#[derive(Debug, Clone, Copy)]
struct Mode {
    name: &'static str,
    tier: Tier,
    on_doubt: OnDoubt,
}

const fn mode(name: &'static str, tier: Tier, on_doubt: OnDoubt) -> Mode {
    Mode { name, tier, on_doubt }
}

impl Mode {
    const ALL: [Self; 5] = [
        mode("at-most-once", Tier::AtMostOnce, OnDoubt::Retry),
        mode("at-least-once", Tier::AtLeastOnce, OnDoubt::Retry),
        mode("effectively-once", Tier::EffectivelyOnce, OnDoubt::Retry),
        mode("effectively-once, park", Tier::EffectivelyOnce, OnDoubt::Park),
        mode("transactional", Tier::Transactional, OnDoubt::Retry),
    ];
}

struct Args {
    places: Vec<Place>,
    messages: usize,
    rounds: usize,
    latencies: usize,
    kills: usize,
}

const USAGE: &str =
    "use --quick, --stores embedded,postgres,redis, --messages 6400, --rounds 3, --latencies 300, --kills 10";

fn parse(mut args: impl Iterator<Item = String>) -> Result<Args, String> {
    let mut parsed =
        Args { places: Place::ALL.to_vec(), messages: 6_400, rounds: 3, latencies: 300, kills: 10 };
    while let Some(arg) = args.next() {
        let mut value = || args.next().ok_or_else(|| format!("{arg} needs a value; {USAGE}"));
        let number =
            |text: String| text.parse::<usize>().map_err(|error| format!("{text}: {error}; {USAGE}"));
        match arg.as_str() {
            // Cargo passes it; the tables are Markdown in any case.
            "--bench" | "--markdown" => {}
            "--quick" => {
                (parsed.messages, parsed.rounds, parsed.latencies, parsed.kills) = (320, 1, 20, 2);
            }
            "--stores" => {
                let place = |name: &str| {
                    Place::ALL
                        .into_iter()
                        .find(|place| place.name() == name)
                        .ok_or_else(|| format!("{name}; {USAGE}"))
                };
                parsed.places = value()?.split(',').map(place).collect::<Result<_, _>>()?;
            }
            "--messages" => parsed.messages = number(value()?)?.max(64),
            "--rounds" => parsed.rounds = number(value()?)?.max(1),
            "--latencies" => parsed.latencies = number(value()?)?.max(1),
            "--kills" => parsed.kills = number(value()?)?,
            _ => return Err(format!("unknown argument {arg}; {USAGE}")),
        }
    }
    Ok(parsed)
}

fn main() -> ExitCode {
    let child = killed::Child::from_environment();
    if child.is_none()
        && let Some(ended) = syncs::run_counted()
    {
        return ended;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime starts");
    if let Some(child) = child {
        runtime.block_on(child.run());
        return ExitCode::SUCCESS;
    }
    let args = match parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("error: {problem}");
            return ExitCode::from(2);
        }
    };
    runtime.block_on(costs(&args));
    if args.kills > 0 {
        runtime.block_on(losses(&args));
    }
    ExitCode::SUCCESS
}

async fn costs(args: &Args) {
    println!(
        "| store | tier | messages/s | CPU us | of it the database's | of `at-least-once` | bytes written | of `at-least-once` | syncs, 64 in flight | syncs alone | of `at-least-once` | send to settle, median | 99th percentile |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|");
    for &place in &args.places {
        let Some(site) = Site::start(place) else { continue };
        let modes: Vec<Mode> = Mode::ALL.into_iter().filter(|mode| mode.on_doubt == OnDoubt::Retry).collect();
        // Rounds of all tiers take turns, so that a busy minute of the machine is none of one tier.
        let mut turns: Vec<Vec<(f64, Used)>> = vec![Vec::new(); modes.len()];
        for _ in 0..args.rounds {
            for (mode, turns) in modes.iter().zip(&mut turns) {
                turns.push(throughput(&site, *mode, args.messages).await);
            }
        }
        let median = |turns: &[(f64, Used)], of: fn(&(f64, Used)) -> f64| {
            let mut values: Vec<f64> = turns.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let cpu: fn(&(f64, Used)) -> f64 = |(_, used)| used.cpu_us + used.server_cpu_us;
        let base = modes.iter().position(|mode| mode.tier == Tier::AtLeastOnce).expect("it is a tier");
        let mut single = Vec::new();
        for mode in &modes {
            single.push(latencies(&site, *mode, args.latencies).await);
        }
        for ((mode, of_mode), (times, alone)) in modes.iter().zip(&turns).zip(&single) {
            let value = |of| median(of_mode, of);
            let ratio = |of| value(of) / median(&turns[base], of);
            let at = |share: usize| times[(times.len() * share / 100).min(times.len() - 1)];
            println!(
                "| {} | `{}` | {:.0} | {:.0} | {:.0} | {:.1} | {:.0} | {:.1} | {:.3} | {alone:.1} | {:.1} | {:.1} ms | {:.1} ms |",
                place.name(),
                mode.name,
                value(|turn| turn.0),
                value(cpu),
                value(|(_, used)| used.server_cpu_us),
                ratio(cpu),
                value(|(_, used)| used.bytes),
                ratio(|(_, used)| used.bytes),
                value(|(_, used)| used.syncs),
                alone / single[base].1,
                at(50),
                at(99),
            );
        }
    }
}

/// Messages a second with 64 in flight, and what each used.
async fn throughput(site: &Site, mode: Mode, messages: usize) -> (f64, Used) {
    let flow = Flow::open(&site.fresh().await, mode).await;
    flow.send(messages).await;
    let before = site.used();
    let start = Instant::now();
    flow.work(messages, 64).await;
    let secs = start.elapsed().as_secs_f64();
    let used = site.used().since(&before).for_each(messages);
    flow.close().await;
    (messages as f64 / secs, used)
}

/// Milliseconds from the send of a message to its settle, with one in flight, sorted; and the syncs of each.
async fn latencies(site: &Site, mode: Mode, count: usize) -> (Vec<f64>, f64) {
    let flow = Flow::open(&site.fresh().await, mode).await;
    let before = site.used();
    let mut times: Vec<f64> =
        flow.one_by_one(count).await.iter().map(|time| time.as_secs_f64() * 1e3).collect();
    let used = site.used().since(&before).for_each(count);
    flow.close().await;
    times.sort_by(f64::total_cmp);
    (times, used.syncs)
}

async fn losses(args: &Args) {
    println!(
        "\n| store | tier | kills | sent | lost | effects made twice or more | waiting for a decision | of it not begun | running | ended |"
    );
    println!("|---|---|--:|--:|--:|--:|--:|--:|--:|--:|");
    for &place in &args.places {
        let Some(site) = Site::start(place) else { continue };
        for mode in Mode::ALL {
            let after = killed::measure(&site, mode, args.kills).await;
            let [not_begun, running, ended] = after.stages;
            println!(
                "| {} | `{}` | {} | {} | {} | {} | {} | {not_begun} | {running} | {ended} |",
                place.name(),
                mode.name,
                after.kills,
                after.sent,
                after.lost,
                after.repeated,
                after.parked,
            );
        }
    }
}

/// Timeout of every wait; only a failure reaches it.
const PATIENCE: Duration = Duration::from_mins(3);
