//! `cargo xtask bench server`: the same client load on Hapax and on ElasticMQ, interleaved in one run.
//!
//! Hapax is the real `hapax` binary, which answers after data is on disk; ElasticMQ keeps its messages in memory. Both
//! run as separate processes on this machine, over loopback, beside one client thread. On few cores all three compete,
//! so only ratios within one run are meaningful, and CPU time per message is the most reliable figure.

mod client;
mod report;
mod scrape;
mod servers;

use std::time::Duration;

use client::{Load, Measured};
use report::Row;
use servers::Server;

const HELP: &str = "\
cargo xtask bench server [OPTIONS]
  --quick         256 B only, one short round: is it alive?
  --markdown      tables for docs/BENCHMARKS.md
  --only TEXT     only loads whose name contains TEXT, for example `cycle 256` or `x10 64`
  --rounds N      rounds of each load [default: 3]
  --no-peer       ours alone
  --scrape        instead of the loads: `/metrics` with 1,000 queues, and sends with and without scrapes
Environment: HAPAX_BIN is the binary to measure [default: target/release/hapax, built first], HAPAX_BENCH_DIR the
folder for data [default: target/bench]; it must be on a real disk.";

/// The command-line arguments.
struct Args {
    quick: bool,
    markdown: bool,
    only: Option<String>,
    rounds: usize,
    peer: bool,
    scrape: bool,
}

impl Args {
    fn read() -> Result<Self, String> {
        let mut args =
            Self { quick: false, markdown: false, only: None, rounds: 3, peer: true, scrape: false };
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value\n\n{HELP}"));
            match word.as_str() {
                "--quick" => args.quick = true,
                "--markdown" => args.markdown = true,
                "--no-peer" => args.peer = false,
                "--scrape" => args.scrape = true,
                "--only" => args.only = Some(value()?),
                "--rounds" => args.rounds = value()?.parse().map_err(|_| "--rounds needs a number")?,
                // Passed by cargo.
                "--bench" => {}
                _ => return Err(format!("unknown option {word}\n\n{HELP}")),
            }
        }
        if args.quick {
            args.rounds = 1;
        }
        Ok(args)
    }

    fn round(&self) -> Duration {
        Duration::from_millis(if self.quick { 500 } else { 1_500 })
    }

    fn loads(&self) -> Vec<Load> {
        let mut loads = Vec::new();
        for cycle in [false, true] {
            for body_bytes in if self.quick { &[256][..] } else { &[256, 4096] } {
                for batch in [1, 10] {
                    for connections in [1, 16, 64] {
                        loads.push(Load { cycle, body_bytes: *body_bytes, batch, connections });
                    }
                }
            }
        }
        loads.retain(|load| self.only.as_ref().is_none_or(|only| load.to_string().contains(only)));
        loads
    }
}

fn main() {
    let args = Args::read().unwrap_or_else(|problem| {
        eprintln!("{problem}");
        std::process::exit(2);
    });
    if let Err(problem) = run(&args) {
        eprintln!("error: {problem}");
        std::process::exit(1);
    }
}

fn run(args: &Args) -> Result<(), String> {
    // One thread: the client must leave the cores to the servers, equally for each.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(text)?;
    let mut servers = vec![servers::hapax()?];
    if args.scrape {
        // Long enough for several scrapes.
        return runtime.block_on(scrape::run(&servers[0], args.rounds, 4 * args.round(), args.markdown));
    }
    let empty_kib = servers[0].rss_kib();
    if args.peer {
        match servers::elasticmq() {
            Ok(server) => servers.push(server),
            Err(problem) => println!("ElasticMQ is not measured: {problem}\n"),
        }
    }
    for server in &servers {
        // A JVM needs time to warm up; Hapax does not.
        let jvm_s = if args.quick { 8 } else { 40 };
        let warm = Duration::from_secs(if server.name == "ElasticMQ" { jvm_s } else { 2 });
        runtime.block_on(warm_up(server, warm))?;
    }
    let mut rows = Vec::new();
    for load in args.loads() {
        let mut measured: Vec<Vec<Measured>> = servers.iter().map(|_| Vec::new()).collect();
        for _ in 0..args.rounds {
            for (server, measured) in servers.iter().zip(&mut measured) {
                measured.push(runtime.block_on(client::measure(server, load, args.round()))?);
            }
        }
        let names = servers.iter().map(|server| server.name);
        let row = Row { load, servers: names.zip(measured).collect() };
        eprintln!("{row}");
        rows.push(row);
    }
    report::print(&rows, args.markdown);
    println!("\nHapax's resident memory: {} MiB when empty.", empty_kib / 1024);
    for server in &servers {
        println!("{}'s after the load: {} MiB.", server.name, server.rss_kib() / 1024);
    }
    if !args.quick && args.only.is_none() {
        runtime.block_on(parked(&servers[0]))?;
    }
    Ok(())
}

async fn warm_up(server: &Server, time: Duration) -> Result<(), String> {
    for batch in [1, 10] {
        for cycle in [false, true] {
            let load = Load { cycle, body_bytes: 256, batch, connections: 16 };
            client::measure(server, load, time / 4).await?;
        }
    }
    Ok(())
}

/// The cost of a thousand idle long polls.
async fn parked(server: &Server) -> Result<(), String> {
    let window = Duration::from_secs(15);
    let polls = client::park(server, 1_000).await?;
    tokio::time::sleep(Duration::from_millis(1_500)).await;
    let before = server.cpu_us();
    tokio::time::sleep(window).await;
    let used_ms = (server.cpu_us() - before) / 1000;
    println!("1,000 parked long polls: {used_ms} ms of processor time in {} s.", window.as_secs());
    drop(polls);
    Ok(())
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}
