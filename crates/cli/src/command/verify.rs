//! `hapax verify`: shows which guarantee holds on a store, or on Kafka, by breaking things.

#[cfg(feature = "kafka")]
mod on_kafka;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::{Args, Parser as _};
use hapax::Tier;
use hapax_verify::fault::{Fault, ROUND};
use hapax_verify::report::{Report, Verdict};
use hapax_verify::roles::{self, Role};
use hapax_verify::workload::{self, HANDLER, Workload};
use hapax_verify::{Options, PROXIED, Progress, UserHandler, check_upstream};
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};

use crate::output::{self, Output};
use crate::text::{parse_ms, parse_word};
use crate::{Cli, Command, usage};

pub use hapax_verify::roles::ROLE_COMMAND;

/// Time of a run that says nothing else.
const TIME_MS_DEFAULT: u64 = 60_000;
/// Time of faults in `--quick`: one round with every fault; start and drain come on top.
const TIME_MS_QUICK: u64 = 40_000;

/// Shows which guarantee holds, by breaking things: kills, pauses, lost and repeated requests.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax verify --quick
  hapax verify --store postgres://hapax@db.example/empty --for 10m
  hapax verify --store redis://localhost/5 --only payments,accounts --html report.html
  hapax verify --quick --seed 42 --junit verify.xml
  hapax verify --broker kafka://localhost:9092 --for 10m        (a build with the feature kafka)

Real processes are started, and killed, on this machine: servers of the store, workers, producers. The store has to be
empty; without --store it is a temporary folder. Naive programs run beside, and have to be caught.

Exit codes: 0 held; 1 violated, invalid, inconclusive or failed; 2 wrong usage.")]
pub struct VerifyArgs {
    /// Under a minute in all, on a temporary store unless --store names one.
    #[arg(long, conflicts_with = "time")]
    quick: bool,
    /// The store: embedded:PATH, postgres://…, redis://…; it has to be empty. private:postgres, private:redis,
    /// private:postgres-patroni, private:redis-sentinel and private:redis-cluster start servers of their own, which are killed
    /// too [default: a temporary folder].
    #[arg(long, value_name = "URL")]
    store: Option<String>,
    /// Runs on Kafka instead of a store: kafka://HOST:PORT,… (a plain listener), or private:kafka, which starts a broker that is
    /// stopped too.
    #[cfg(feature = "kafka")]
    #[arg(
        long,
        value_name = "URL",
        conflicts_with_all = [
            "store", "ledger", "tier", "handler_cmd", "upstream", "failover_cmd", "preload", "shared_store"
        ]
    )]
    broker: Option<String>,
    /// Adds a control: librdkafka's transactions, behind delayed commits.
    #[cfg(feature = "kafka")]
    #[arg(long, hide = true, requires = "broker")]
    librdkafka: bool,
    /// A ledger in another store: postgres://… or redis://….
    #[arg(long, value_name = "URL")]
    ledger: Option<String>,
    /// Only workloads of this tier: at-least-once, effectively-once or transactional.
    #[arg(long, value_name = "TIER", value_parser = parse_word::<Tier>)]
    tier: Option<Tier>,
    /// How long faults are injected [default: 1m].
    #[arg(long = "for", value_name = "TIME", value_parser = parse_ms)]
    time: Option<u64>,
    /// Repeats a schedule of faults [default: random].
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
    /// Lists workloads and faults, and exits.
    #[arg(long)]
    list: bool,
    /// Only these workloads; the controls are always there.
    #[arg(long, value_name = "WORKLOAD", value_delimiter = ',')]
    only: Vec<String>,
    /// Only faults whose name contains one of these texts, for example `kill -9`.
    #[arg(long, value_name = "TEXT", value_delimiter = ',')]
    faults: Vec<String>,
    /// Your own handler: a command for the shell, run by `hapax work` for each message of the workload `handler`. It has to
    /// POST the message's body to HAPAX_VERIFY_SINK, with HAPAX_DERIVED_KEY as Idempotency-Key.
    #[arg(long, value_name = "CMD")]
    handler_cmd: Option<String>,
    /// Your own service behind `hapax proxy`, for the workload `charges`: http://HOST:PORT/PATH.
    #[arg(long, value_name = "URL")]
    upstream: Option<String>,
    /// Makes a replica of your store take over: a command for the shell, run as a fault, such as `patronictl failover …`. It
    /// has to end when the replica leads.
    #[arg(long, value_name = "CMD")]
    failover_cmd: Option<String>,
    /// A library with faults of disk and clock, which is loaded into processes of the run: crates/verify/preload/faults.c.
    #[arg(long, value_name = "FILE", hide = true)]
    preload: Option<PathBuf>,
    /// Uses a store that holds other queues or ledger entries. Its servers elsewhere are not touched.
    #[arg(long)]
    shared_store: bool,
    /// Writes a page with the timeline of faults.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Writes a report for CI systems.
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
    /// Keeps the history of all operations: one event in JSON per line.
    #[arg(long, value_name = "FILE")]
    history: Option<PathBuf>,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

impl VerifyArgs {
    fn workloads(&self) -> anyhow::Result<Vec<Workload>> {
        for name in &self.only {
            let known = Workload::named(name).ok_or_else(|| {
                usage(format!("there is no workload {name}; `hapax verify --list` shows those that are"))
            })?;
            if known.name == HANDLER && self.handler_cmd.is_none() {
                return Err(usage("the workload handler needs --handler-cmd"));
            }
            if known.is_control() {
                return Err(usage(format!("{name} is a control, and part of every run")));
            }
            if known.is_on_kafka() {
                return Err(usage(format!("the workload {name} needs --broker")));
            }
        }
        let wanted = |workload: &Workload| {
            workload.is_control()
                || (workload.name != HANDLER || self.handler_cmd.is_some())
                    && (self.only.is_empty() || self.only.iter().any(|name| name == workload.name))
                    && self.tier.is_none_or(|tier| tier == workload.tier)
        };
        let mut chosen: Vec<Workload> = workload::ALL.into_iter().filter(wanted).collect();
        if chosen.iter().all(|workload| workload.is_control() || !workload.is_relayed()) {
            // Without a relay of Hapax there is no process for the naive one.
            chosen.retain(|workload| !workload.is_relayed());
        }
        if chosen.iter().all(Workload::is_control) {
            return Err(usage("no workload is left; `hapax verify --list` shows their tiers"));
        }
        Ok(chosen)
    }

    /// Programs of the user's that no workload would use, or that cannot be used.
    fn check_user_programs(&self, workloads: &[Workload]) -> anyhow::Result<()> {
        let has = |name: &str| workloads.iter().any(|workload| workload.name == name);
        if let Some(url) = &self.upstream {
            check_upstream(url).map_err(|error| usage(format!("--upstream {url}: {error}")))?;
            if !has(PROXIED) {
                return Err(usage("--upstream is for the workload charges, which is not chosen"));
            }
        }
        if self.handler_cmd.is_some() && !has(HANDLER) {
            return Err(usage("--handler-cmd is for the workload handler, which is not chosen"));
        }
        Ok(())
    }

    fn faults(&self) -> anyhow::Result<Vec<Fault>> {
        self.chosen(&ROUND)
    }

    /// The faults of a round whose names were asked for.
    fn chosen<F: Copy + ToString>(&self, round: &[F]) -> anyhow::Result<Vec<F>> {
        let wanted = |fault: &F| {
            let name = fault.to_string();
            self.faults.is_empty() || self.faults.iter().any(|text| name.contains(text.as_str()))
        };
        let faults: Vec<F> = round.iter().copied().filter(wanted).collect();
        if faults.is_empty() {
            return Err(usage("no fault has such a name; `hapax verify --list` shows those that are"));
        }
        Ok(faults)
    }

    /// The seed, and the time of faults in milliseconds.
    fn schedule(&self) -> (u64, u64) {
        let seed = self.seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
        (seed, self.time.unwrap_or(if self.quick { TIME_MS_QUICK } else { TIME_MS_DEFAULT }))
    }

    fn options(&self) -> anyhow::Result<Options> {
        let (seed, time_ms) = self.schedule();
        let workloads = self.workloads()?;
        self.check_user_programs(&workloads)?;
        Ok(Options {
            program: program()?,
            store: self.store.clone(),
            ledger: self.ledger.clone(),
            workloads,
            faults: self.faults()?,
            time: Duration::from_millis(time_ms),
            seed,
            handler: self.handler_cmd.clone().map(UserHandler::Command),
            upstream: self.upstream.clone(),
            failover_command: self.failover_cmd.clone(),
            preload: self.preload.clone(),
            shared_store: self.shared_store,
            history: self.history.clone(),
            command: self.command(seed, time_ms),
        })
    }

    /// The command that repeats the run; secrets are left out of URLs.
    fn command(&self, seed: u64, time_ms: u64) -> String {
        let mut words = vec!["hapax verify".to_owned()];
        if self.quick {
            words.push("--quick".to_owned());
        } else {
            words.push(format!("--for {}s", time_ms / 1_000));
        }
        for (flag, url) in [("--store", &self.store), ("--ledger", &self.ledger)] {
            words.extend(url.as_ref().map(|url| format!("{flag} {}", hapax::without_secrets(url))));
        }
        #[cfg(feature = "kafka")]
        words.extend(self.broker.as_ref().map(|url| format!("--broker {url}")));
        #[cfg(feature = "kafka")]
        words.extend(self.librdkafka.then(|| "--librdkafka".to_owned()));
        words.extend(self.tier.map(|tier| format!("--tier {}", crate::text::word(&tier))));
        if !self.only.is_empty() {
            words.push(format!("--only {}", self.only.join(",")));
        }
        if !self.faults.is_empty() {
            words.push(format!("--faults '{}'", self.faults.join(",")));
        }
        words.extend(self.handler_cmd.as_ref().map(|command| format!("--handler-cmd '{command}'")));
        words.extend(self.upstream.as_ref().map(|url| format!("--upstream {}", hapax::without_secrets(url))));
        words.extend(self.failover_cmd.as_ref().map(|command| format!("--failover-cmd '{command}'")));
        words.extend(self.preload.as_ref().map(|file| format!("--preload {}", file.display())));
        words.push(format!("--seed {seed}"));
        words.join(" ")
    }
}

fn program() -> anyhow::Result<PathBuf> {
    std::env::current_exe().context("this program's own path")
}

async fn verify(args: &VerifyArgs, tell: &mut dyn FnMut(Progress<'_>)) -> anyhow::Result<Report> {
    #[cfg(feature = "kafka")]
    if let Some(broker) = &args.broker {
        return hapax_verify::kafka::run(&on_kafka::options(args, broker)?, tell).await;
    }
    hapax_verify::run(&args.options()?, tell).await
}

pub async fn run(args: VerifyArgs) -> anyhow::Result<()> {
    let out = Output::new(args.json);
    if args.list {
        return list(out);
    }
    let mut tell = |progress: Progress<'_>| match progress {
        Progress::Phase(phase) => output::note(&phase),
        Progress::Fault(fault) => {
            let caused = fault.caused.named().into_iter().filter(|(_, count)| *count > 0);
            let caused: Vec<String> = caused.map(|(name, count)| format!("{count} {name}")).collect();
            let bit = if fault.bit { "" } else { "did not bite; " };
            output::note(&format!(
                "{:>4}  {:<44} {bit}hit {}, caused: {}",
                fault.number,
                fault.fault,
                fault.hits,
                caused.join(", ")
            ));
        }
    };
    let report = tokio::select! {
        report = verify(&args, &mut tell) => report?,
        _ = tokio::signal::ctrl_c() => bail!("interrupted: there is no verdict"),
    };
    for (file, text) in
        [(&args.html, Report::to_html as fn(&Report) -> String), (&args.junit, Report::to_junit)]
    {
        if let Some(file) = file {
            std::fs::write(file, text(&report)).with_context(|| file.display().to_string())?;
        }
    }
    if out.is_json() {
        out.value(&report)?;
    } else {
        output::raw(&report.to_text())?;
    }
    match report.verdict {
        Verdict::Held => Ok(()),
        verdict => bail!("{}: {}", verdict.name(), report.why),
    }
}

fn list(out: Output) -> anyhow::Result<()> {
    if out.is_json() {
        let workload = |workload: &Workload| {
            serde_json::json!({
                "workload": workload.name, "title": workload.title, "boundary": workload.boundary,
                "control": workload.is_control(),
                "tier": (!workload.is_control()).then_some(workload.tier),
            })
        };
        let workloads: Vec<_> = listed().iter().map(workload).collect();
        let mut value = serde_json::json!({ "workloads": workloads, "faults": names(&ROUND) });
        if cfg!(feature = "kafka") {
            value["kafka_faults"] = kafka_faults().into();
        }
        return out.value(&value);
    }
    let row = |workload: &Workload| {
        let tier =
            if workload.is_control() { "control".to_owned() } else { crate::text::word(&workload.tier) };
        vec![workload.name.to_owned(), tier, workload.title.to_owned(), workload.boundary.to_owned()]
    };
    out.rows(&["workload", "tier", "", "boundary"], listed().iter().map(row).collect())?;
    output::raw("\n")?;
    let rows = |names: Vec<String>| names.into_iter().map(|fault| vec![fault]).collect();
    out.rows(&["fault"], rows(names(&ROUND)))?;
    if cfg!(feature = "kafka") {
        output::raw("\n")?;
        out.rows(&["fault on Kafka"], rows(kafka_faults()))?;
    }
    Ok(())
}

/// The workloads that this program can run.
#[cfg(feature = "kafka")]
fn listed() -> Vec<Workload> {
    workload::ALL.into_iter().chain(on_kafka::workloads(false)).collect()
}

#[cfg(not(feature = "kafka"))]
fn listed() -> Vec<Workload> {
    workload::ALL.to_vec()
}

#[cfg(feature = "kafka")]
fn kafka_faults() -> Vec<String> {
    names(&on_kafka::faults())
}

#[cfg(not(feature = "kafka"))]
fn kafka_faults() -> Vec<String> {
    Vec::new()
}

fn names(round: &[impl ToString]) -> Vec<String> {
    let mut names: Vec<String> = round.iter().map(ToString::to_string).collect();
    names.dedup();
    names
}

/// Runs a child process of a run.
pub fn role() -> ExitCode {
    let run = || {
        let role = roles::begin()?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        runtime.block_on(async {
            match role {
                Role::Server(store) => {
                    // A write beyond a limit of the size of files fails; without a handler it would end the process.
                    let _limit = signal(SignalKind::from_raw(Signal::XFSZ.as_raw()))?;
                    let args = [
                        "hapax",
                        "serve",
                        "--listen",
                        "127.0.0.1:0",
                        "--log-level",
                        "error",
                        "--store",
                        &store,
                    ];
                    let migrate = store.starts_with("postgres").then_some("--migrate");
                    let cli = Cli::try_parse_from(args.into_iter().chain(migrate))?;
                    let Command::Serve(args) = cli.command else { bail!("not a server") };
                    crate::serve::run(*args).await
                }
                Role::Proxy(args) => {
                    let cli =
                        Cli::try_parse_from(["hapax", "proxy"].map(str::to_owned).into_iter().chain(args))?;
                    let Command::Proxy(args) = cli.command else { bail!("not a proxy") };
                    crate::command::proxy::run(*args).await
                }
                // The server may be down when it starts.
                Role::Handler(args) => roles::repeat(|| work(&args)).await,
                role => roles::run(role).await,
            }
        })
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

async fn work(args: &[String]) -> anyhow::Result<()> {
    let cli = Cli::try_parse_from(["hapax", "work"].into_iter().chain(args.iter().map(String::as_str)))?;
    let Command::Work(args) = cli.command else { bail!("not a worker") };
    crate::command::work::run(*args).await
}
