//! Queues and ledger on PostgreSQL beside what a team would write by hand, on a private server with fsync on.
//!
//! Contestants take turns in one process, each in a database of its own, in an order that rotates from round to round; a
//! ratio is the median of the rounds' ratios. Statements and pages are counted in turns of their own, because counting
//! costs time. `docs/BENCHMARKS.md` explains the tables.

mod args;
mod complaints;
mod contestants;
mod held;
mod ledger;
#[path = "../../../embedded/benches/shared/measure.rs"]
mod measure;
mod server;
mod transactions;

use std::time::Duration;

use args::Args;
use contestants::{Contestant, Load, SHALLOW, UNSYNCED};
use ledger::Ledgers;
use measure::{median, table, thousands};
use server::{Server, Statements, Used};
use transactions::{How, Transactions};

const CLIENTS: usize = 16;
/// Numbers of clients whose throughput is compared.
const CLIENT_COUNTS: [usize; 6] = [1, 4, 16, 64, 256, 1024];
/// Receives of each queue in a round of the part `depth`.
const RECEIVES: usize = 40;
const LONG_POLLS: usize = 1_000;

/// The result of one contestant's turn.
#[derive(Debug, Clone, Copy, Default)]
struct Turn {
    done: f64,
    secs: f64,
    used: Used,
}

impl Turn {
    fn rate(&self) -> f64 {
        self.done / self.secs
    }

    /// Microseconds of processor time for each, of the server and of this process.
    fn cpu_us(&self) -> (f64, f64) {
        let each = |secs: f64| secs * 1e6 / self.done.max(1.0);
        (each(self.used.server_cpu_secs), each(self.used.client_cpu_secs))
    }
}

/// The turns of one contestant, one of each round, and what was counted.
#[derive(Default)]
struct Series {
    turns: Vec<Turn>,
    counted: Statements,
}

impl Series {
    fn median_of(&self, value: impl Fn(&Turn) -> f64) -> f64 {
        median(self.turns.iter().map(value))
    }

    /// How many times as fast as another contestant, within the same round; with the quarters.
    fn ratio(&self, other: &Self) -> String {
        let ratios = || self.turns.iter().zip(&other.turns).map(|(ours, theirs)| ours.rate() / theirs.rate());
        let mut sorted: Vec<f64> = ratios().collect();
        sorted.sort_by(f64::total_cmp);
        let at = |quarter: usize| sorted[(sorted.len() - 1) * quarter / 4];
        format!("{:.2} ({:.2} to {:.2})", median(ratios()), at(1), at(3))
    }

    fn row(&self, name: &str, than: &Self) -> Vec<String> {
        vec![
            name.to_owned(),
            thousands(self.median_of(Turn::rate)),
            self.ratio(than),
            format!("{:.0}", self.median_of(|turn| turn.used.wal_bytes / turn.done.max(1.0))),
            format!("{:.3}", self.counted.calls),
            format!("{:.1}", self.counted.buffers),
            format!("{:.0}", self.median_of(|turn| turn.cpu_us().0)),
            format!("{:.0}", self.median_of(|turn| turn.cpu_us().1)),
        ]
    }
}

const COLUMNS: [&str; 8] = [
    "contestant",
    "a second",
    "of SKIP LOCKED",
    "WAL bytes each",
    "statements each",
    "pages each",
    "server CPU us each",
    "client CPU us each",
];

fn main() {
    let args = match Args::parse(std::env::args().skip(1)) {
        Ok(args) => args,
        Err(problem) => {
            eprintln!("error: {problem}");
            std::process::exit(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime starts").block_on(run(&args));
}

async fn run(args: &Args) {
    let mut server = Server::start().await;
    if args.wants("lifecycles") {
        for batch in [1, 10] {
            lifecycles(args, &mut server, batch).await;
        }
    }
    if args.wants("clients") {
        clients(args, &mut server).await;
    }
    if args.wants("depth") {
        depth(args, &mut server).await;
    }
    if args.wants("ledger") {
        ledgers(args, &mut server).await;
    }
    if args.wants("transactions") {
        let mut all = Vec::new();
        for how in How::ALL {
            all.push(Transactions::open(&mut server, how, CLIENTS).await);
        }
        for clients in [1, CLIENTS] {
            user_transactions(args, &mut server, &all, clients).await;
        }
    }
    if args.wants("complaints") {
        complaints::run(args, &mut server).await;
    }
    if args.wants("idle") {
        idle(args, &mut server).await;
    }
    if args.wants("held") {
        held::run(args, &mut server).await;
    }
}

async fn turn(server: &mut Server, contestant: &mut Contestant, load: Load) -> Turn {
    let before = server.counters().await;
    let (done, secs) = contestant.turn(server, load).await;
    Turn { done: done as f64, secs, used: server.used_since(&before).await }
}

async fn lifecycles(args: &Args, server: &mut Server, batch: usize) {
    let name = |of: &str| format!("{of}_{batch}");
    let mut all = [
        Contestant::hapax(server, "Hapax", &name("hapax"), "jobs", 1).await,
        Contestant::hapax(server, "Hapax, two servers", &name("hapax_two"), "jobs", 2).await,
        Contestant::hapax(server, UNSYNCED, &name("hapax_unsynced"), "jobs", 1).await,
        Contestant::skip_locked(server, &name("skip_locked")).await,
        Contestant::pgmq_style(server, &name("pgmq")).await,
    ];
    let load = Load { clients: CLIENTS, batch, time: args.time, troubled: false };
    for contestant in &mut all {
        contestant.fill(server, SHALLOW).await;
        contestant.turn(server, load).await;
    }
    let mut series: [Series; 5] = Default::default();
    for round in 0..args.rounds {
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            series[at].turns.push(turn(server, &mut all[at], load).await);
        }
    }
    for (contestant, series) in all.iter_mut().zip(&mut series) {
        server.count_statements().await;
        let (done, _) = contestant.turn(server, load).await;
        series.counted = each(server.counted(&contestant.database).await, done);
    }
    let rows: Vec<_> = all.iter().zip(&series).map(|(of, its)| its.row(of.name, &series[3])).collect();
    let title = format!("Lifecycles of {CLIENTS} clients, {batch} in a call");
    table(args.markdown, &title, &COLUMNS, &rows);
    println!(
        "\nHapax of pgmq style: {}, receives not synced: {}; two servers of one: {}",
        series[0].ratio(&series[4]),
        series[2].ratio(&series[4]),
        series[1].ratio(&series[0])
    );
}

fn each(counted: Statements, done: u64) -> Statements {
    let done = done.max(1) as f64;
    Statements { calls: counted.calls / done, buffers: counted.buffers / done }
}

async fn clients(args: &Args, server: &mut Server) {
    let mut all = [
        Contestant::hapax(server, "Hapax", "hapax_clients", "jobs", 1).await,
        Contestant::hapax(server, "Hapax, two servers", "hapax_clients_two", "jobs", 2).await,
    ];
    let mut series: [[Series; CLIENT_COUNTS.len()]; 2] = Default::default();
    for contestant in &mut all {
        contestant.fill(server, SHALLOW).await;
    }
    for round in 0..=args.rounds {
        for at in 0..CLIENT_COUNTS.len() {
            let at = (at + round) % CLIENT_COUNTS.len();
            let load = Load { clients: CLIENT_COUNTS[at], batch: 1, time: args.time, troubled: false };
            for (contestant, series) in all.iter_mut().zip(&mut series) {
                let turn = turn(server, contestant, load).await;
                // The first round warms up.
                if round > 0 {
                    series[at].turns.push(turn);
                }
            }
        }
    }
    let [one, two] = &series;
    let rates: Vec<f64> = one.iter().map(|series| series.median_of(Turn::rate)).collect();
    let best = rates.iter().copied().fold(0.0, f64::max);
    let row = |at: usize| {
        let (of_one, of_two) = (one[at].median_of(Turn::rate), two[at].median_of(Turn::rate));
        let count = CLIENT_COUNTS[at].to_string();
        let of_best = format!("{:.2}", of_one / best);
        vec![count, thousands(of_one), of_best, thousands(of_two), two[at].ratio(&one[at])]
    };
    let rows: Vec<_> = (0..CLIENT_COUNTS.len()).map(row).collect();
    table(
        args.markdown,
        "Clients, one message in a call",
        &["clients", "one server, a second", "of the best", "two servers, a second", "two of one"],
        &rows,
    );
}

async fn depth(args: &Args, server: &mut Server) {
    let deep = args.depth.max(SHALLOW);
    eprintln!("filling {deep} messages, twice");
    let mut all = [
        Contestant::hapax(server, "Hapax", "hapax_depth", "shallow", 1).await,
        Contestant::hapax(server, "Hapax", "hapax_depth", "deep", 1).await,
        Contestant::skip_locked(server, "skip_locked_shallow").await,
        Contestant::skip_locked(server, "skip_locked_deep").await,
    ];
    for (contestant, messages) in all.iter_mut().zip([SHALLOW, deep, SHALLOW, deep]) {
        contestant.fill(server, messages).await;
        contestant.receives(server, RECEIVES).await;
    }
    let mut times: [Vec<f64>; 4] = Default::default();
    for round in 0..args.rounds {
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            let measured = all[at].receives(server, RECEIVES).await;
            times[at].push(median(measured.iter().map(Duration::as_secs_f64)) * 1e6);
        }
    }
    let row = |name: &str, shallow: &[f64], deep: &[f64]| {
        let ratio = median(shallow.iter().zip(deep).map(|(shallow, deep)| deep / shallow));
        let us = |times: &[f64]| format!("{:.0}", median(times.iter().copied()));
        vec![name.to_owned(), us(shallow), us(deep), format!("{ratio:.2}")]
    };
    let rows = [row("Hapax", &times[0], &times[1]), row("SKIP LOCKED", &times[2], &times[3])];
    let deep = format!("us at {}", thousands(deep as f64));
    table(
        args.markdown,
        "A receive of one client",
        &["contestant", "us at 1,000", &deep, "deep of shallow"],
        &rows,
    );
}

async fn ledgers(args: &Args, server: &mut Server) {
    let mut ledgers = Ledgers::open(server, CLIENTS).await;
    ledgers.hapax(args.time).await;
    ledgers.sql(args.time).await;
    let mut series: [Series; 2] = Default::default();
    for round in 0..args.rounds {
        for at in 0..2 {
            let at = (at + round) % 2;
            let before = server.counters().await;
            let (done, secs) =
                if at == 0 { ledgers.hapax(args.time).await } else { ledgers.sql(args.time).await };
            series[at].turns.push(Turn { done: done as f64, secs, used: server.used_since(&before).await });
        }
    }
    for (at, its) in series.iter_mut().enumerate() {
        server.count_statements().await;
        let (done, _) = if at == 0 { ledgers.hapax(args.time).await } else { ledgers.sql(args.time).await };
        its.counted = each(server.counted(ledger::DATABASES[at]).await, done);
    }
    let names = ["Hapax", "INSERT and UPDATE"];
    let rows: Vec<_> = names.iter().zip(&series).map(|(name, its)| its.row(name, &series[1])).collect();
    let mut columns = COLUMNS;
    columns[2] = "of INSERT and UPDATE";
    table(args.markdown, &format!("Claim and complete a fresh key, {CLIENTS} clients"), &columns, &rows);
}

async fn user_transactions(args: &Args, server: &mut Server, all: &[Transactions], clients: usize) {
    let mut series: [Series; How::ALL.len()] = Default::default();
    for round in 0..=args.rounds {
        for at in 0..all.len() {
            let at = (at + round) % all.len();
            all[at].fill().await;
            let before = server.counters().await;
            let (done, secs) = all[at].turn(clients, args.time).await;
            let used = server.used_since(&before).await;
            // The first round warms up.
            if round > 0 {
                series[at].turns.push(Turn { done: done as f64, secs, used });
            }
        }
    }
    for (of, its) in all.iter().zip(&mut series) {
        of.fill().await;
        server.count_statements().await;
        let (done, _) = of.turn(clients, args.time).await;
        its.counted = each(server.counted(of.how.database()).await, done);
    }
    let rows: Vec<_> =
        How::ALL.iter().zip(&series).map(|(how, its)| its.row(how.name(), &series[0])).collect();
    let mut columns = COLUMNS;
    (columns[0], columns[2]) = ("of each", "of the transaction alone");
    table(args.markdown, &format!("A user's transaction, clients: {clients}"), &columns, &rows);
    println!(
        "\nEnter and record, of the table by hand: {}; with settle, of the transaction and then an ack: {}; \
         of that with enter and record: {}",
        series[4].ratio(&series[2]),
        series[7].ratio(&series[5]),
        series[7].ratio(&series[6])
    );
}

async fn idle(args: &Args, server: &mut Server) {
    let hapax = Contestant::hapax(server, "Hapax", "hapax_idle", "jobs", 1).await;
    let all = hapax.make_queues(100).await;
    let mut rows = Vec::new();
    for queues in [1, 10, 100] {
        let waiting = hapax.poll(LONG_POLLS, &all[..queues]);
        // Longer than the time in which the pauses between two looks grow.
        tokio::time::sleep(Duration::from_secs(4)).await;
        let window = Duration::from_secs(8);
        server.count_statements().await;
        let start = std::time::Instant::now();
        tokio::time::sleep(window).await;
        let secs = start.elapsed().as_secs_f64();
        let counted = server.counted("hapax_idle").await;
        drop(waiting);
        rows.push(vec![
            queues.to_string(),
            format!("{:.1}", counted.calls / secs),
            format!("{:.0}", counted.buffers / secs),
        ]);
    }
    let title = format!("{LONG_POLLS} receives that wait in one process");
    table(args.markdown, &title, &["queues", "statements a second", "pages a second"], &rows);
}
