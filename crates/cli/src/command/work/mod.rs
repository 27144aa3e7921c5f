//! `hapax work`: runs a command for each delivery of a queue.

pub mod environment;
pub mod process;
mod report;
mod start;
mod watchdog;

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::IsTerminal as _;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use bytes::Bytes;
use clap::{Args, ValueEnum};
use hapax::core::Json;
use hapax::core::ledger::OUTCOME_BYTES_MAX;
use hapax::core::store::SharedStore;
use hapax::worker::StopWhen;
use hapax::{
    Cx, HandlerOutcome, OnDoubt, OnError, QueueName, Receipt, Settlement, Tier, Worker, WorkerBuilder,
};
use hapax_client::otlp::OtlpEndpoint;
use hapax_server::process::{ProcessPage, Readiness, store_readiness};
use serde::{Serialize, Serializer};
use tokio::sync::{Notify, oneshot, watch};
use tracing_subscriber::filter::LevelFilter;

use self::process::{CapturedOutput, CommandResult, CommandRunner, HaltState, StopReason};
use self::report::{Reporter, summary};
pub use self::start::{START_COMMAND, start};
pub use self::watchdog::{WATCHDOG_COMMAND, Watchdog, watch};
use crate::output::note;
use crate::remote::Remote;
use crate::serve::Signals;
use crate::text::{parse_ms, parse_word, show_bytes};

/// Exit code: nothing happened, retry (`EX_TEMPFAIL` of sysexits.h).
pub const EXIT_RETRY: i32 = 75;
/// Exit code: nothing happened, and no retry with this body can succeed (`EX_DATAERR`).
pub const EXIT_REJECT: i32 = 65;
/// The worker waits this much longer than the commands, so that each delivery is settled by its command's result.
const SETTLE_MARGIN: Duration = Duration::from_secs(3);

/// Runs a command for each message of a queue, until SIGTERM or SIGINT.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax work emails -- ./send-email.sh
  hapax work payments --tier effectively-once --on-doubt park --concurrency 4 -- python3 pay.py
  hapax work emails --metrics 127.0.0.1:9400 -- ./send-email.sh
  hapax work nightly --until-empty --json -- sh -c 'jq -r .path | xargs rm -f'

The body is the command's standard input. What the command says by its exit code:
  0      done; its standard output is recorded as the outcome (at effectively-once), which duplicates get: as JSON
         if it is JSON, else as a text; of more than 1 MiB only the fact that it ended is kept
  75     retry: nothing happened, try again by the queue's policy; standard error's end is kept as the error
  65     reject: nothing happened, and nothing will; to the dead letters
  other  by --on-error; by default in doubt at effectively-once: something may have happened; else a retry
A command that is killed by a signal, or that had to be stopped, leaves its effect in doubt.

Its environment:
  HAPAX_IDEMPOTENCY_KEY  identity of the intended effect
  HAPAX_DERIVED_KEY      a key to pass on to whatever the command calls: the same in each attempt and duplicate
  HAPAX_FENCE            a number that grows with every run for the same key: lets a sink turn zombies away
  HAPAX_TAKEOVER         1 if an earlier run may have acted, which is not known; else 0
  HAPAX_ATTEMPT          this delivery's ordinal, from 1
  HAPAX_MESSAGE_ID, HAPAX_QUEUE, HAPAX_GROUP (of a message with a group)
  HAPAX_LEASE_DEADLINE   when the lease or --run-max ends, in milliseconds since 1970, as known at the start; a
                         heartbeat renews the lease while the command runs
  HAPAX_ATTR_NAME        a text attribute: letters in upper case, other characters as _; up to 64 KiB in all

Each command is a process group: what it started ends with it. When its lease is lost it is killed; so it is when
`hapax work` itself is killed, by SIGKILL too.

In a pipe a line has: done, replayed, retried, deferred, rejected, dead, parked or lost; message; attempt;
milliseconds; detail. What the command prints goes to standard error, each line behind the end of its message's id; the
last line there is a summary.")]
pub struct WorkArgs {
    /// The queue.
    queue: QueueName,
    /// The command and its arguments.
    #[arg(last = true, required = true, value_name = "CMD")]
    command: Vec<OsString>,
    /// Number of concurrent commands: up to 1000.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    concurrency: u16,
    /// The guarantee: at-most-once, at-least-once, effectively-once [default: the queue's].
    #[arg(long, value_parser = parse_word::<Tier>)]
    tier: Option<Tier>,
    /// How long a crash of this worker delays a message, or auto: adapted to the command's run times [default: the
    /// queue's].
    #[arg(long, value_name = "TIME", value_parser = parse_lease)]
    lease: Option<LeaseArg>,
    /// Time limit of one command; after it the command gets SIGTERM [default: no limit].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    run_max: Option<u64>,
    /// What to do if an earlier run may have caused the effect: retry, park.
    #[arg(long, default_value = "retry", value_parser = parse_word::<OnDoubt>)]
    on_doubt: OnDoubt,
    /// Meaning of exit codes other than 0, 65 and 75: nothing happened (retry, reject), or the effect may have happened
    /// (doubt). [default: doubt at effectively-once, else retry]
    #[arg(long, value_name = "HOW")]
    on_error: Option<ErrorPolicy>,
    /// Declares that the effect happens once for each HAPAX_DERIVED_KEY, no matter how often the command runs.
    #[arg(long)]
    idempotent_by_derived_key: bool,
    /// Maximum number of starts per second.
    #[arg(long, value_name = "PER-SECOND")]
    rate: Option<f64>,
    /// Ends after one delivery that was not just put back.
    #[arg(long)]
    once: bool,
    /// Ends when no message is ready and no command runs; does not wait for delayed messages.
    #[arg(long)]
    until_empty: bool,
    /// Does not print the commands' output.
    #[arg(long)]
    quiet: bool,
    /// How long to wait for running commands at the end; after it they get SIGTERM.
    #[arg(long, default_value = "30s", value_name = "TIME", value_parser = parse_ms)]
    drain: u64,
    /// Shows counters at http://ADDR/metrics, and at /readyz whether work can be received: port 0 takes a free one. Only a loopback
    /// address, unless --metrics-insecure.
    #[arg(long, value_name = "ADDR")]
    metrics: Option<SocketAddr>,
    /// Shows counters on an address beyond loopback, too: whoever reaches it sees the queue's name and numbers.
    #[arg(long, requires = "metrics")]
    metrics_insecure: bool,
    /// Sends the spans of traced messages to this OpenTelemetry collector, OTLP over HTTP.
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp: Option<String>,
    /// Time between SIGTERM and SIGKILL for a command.
    #[arg(long, default_value = "5s", value_name = "TIME", value_parser = parse_ms)]
    kill_after: u64,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Clone, Copy)]
enum LeaseArg {
    Auto,
    Fixed(Duration),
}

fn parse_lease(text: &str) -> Result<LeaseArg, String> {
    match text {
        "auto" => Ok(LeaseArg::Auto),
        _ => parse_ms(text).map(|ms| LeaseArg::Fixed(Duration::from_millis(ms))).map_err(|e| e + ", or auto"),
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ErrorPolicy {
    /// Nothing happened.
    Retry,
    /// Nothing happened, and no retry can succeed.
    Reject,
    /// The effect may have happened.
    Doubt,
}

impl From<ErrorPolicy> for OnError {
    fn from(policy: ErrorPolicy) -> Self {
        match policy {
            ErrorPolicy::Retry => Self::Retry,
            ErrorPolicy::Reject => Self::Reject,
            ErrorPolicy::Doubt => Self::InDoubt,
        }
    }
}

/// Standard output as an outcome. If it is too large it has no JSON: the ledger then keeps a marker.
enum CommandOutcome {
    Json(Json),
    TooLarge,
}

impl Serialize for CommandOutcome {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Json(json) => json.serialize(to),
            Self::TooLarge => Err(serde::ser::Error::custom("the output is too large to be kept")),
        }
    }
}

fn outcome_value(stdout: &CapturedOutput) -> CommandOutcome {
    if stdout.is_cut() {
        return CommandOutcome::TooLarge;
    }
    let text = String::from_utf8_lossy(&stdout.bytes);
    let text = text.trim_end_matches(['\n', '\r']);
    let json = match text {
        "" => Json::of(&()).ok(),
        text => Json::parse(text).or_else(|_| Json::of(text)).ok(),
    };
    let fits = json.filter(|json| json.as_str().len() <= OUTCOME_BYTES_MAX);
    fits.map_or(CommandOutcome::TooLarge, CommandOutcome::Json)
}

/// The outcome that an exit stands for, and its description for people.
fn handler_outcome(result: &CommandResult) -> (HandlerOutcome<CommandOutcome>, String) {
    let how = match (result.code, result.signal) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => "ended in an unknown way".to_owned(),
    };
    let how = match result.stopped {
        Some(StopReason::TimedOut) => format!("it ran for longer than --run-max and was stopped: {how}"),
        Some(StopReason::ShutDown) => format!("it was stopped at the end of the drain: {how}"),
        None => how,
    };
    let own_words = |how: &str| if result.stderr.is_empty() { how.to_owned() } else { result.stderr.clone() };
    let error = if result.stderr.is_empty() { how.clone() } else { format!("{how}: {}", result.stderr) };
    let outcome = match result.code {
        Some(0) => {
            let value = outcome_value(&result.stdout);
            let words = match value {
                CommandOutcome::Json(_) => String::new(),
                CommandOutcome::TooLarge if result.stdout.is_open => {
                    "its output is not kept: something that it started holds its output open".to_owned()
                }
                CommandOutcome::TooLarge => {
                    format!("its output of {} is too large to be kept", show_bytes(result.stdout.total))
                }
            };
            return (HandlerOutcome::Done(value), words);
        }
        Some(EXIT_RETRY) => HandlerOutcome::retry(own_words(&how)),
        Some(EXIT_REJECT) => HandlerOutcome::reject(own_words(&how)),
        Some(_) if result.stopped.is_none() => HandlerOutcome::Failed { error: error.clone() },
        // A command that was stopped by our own shutdown is not the message's fault.
        _ if result.stopped == Some(StopReason::ShutDown) => {
            HandlerOutcome::Interrupted { error: error.clone() }
        }
        _ => HandlerOutcome::in_doubt(&error),
    };
    (outcome, error)
}

/// The handler of each delivery.
struct CommandHandler {
    runner: CommandRunner,
    stale: Vec<OsString>,
    halt: watch::Receiver<HaltState>,
    /// Number of running commands.
    running: AtomicUsize,
    /// How each command ended, as text, until its delivery is settled.
    words: Mutex<HashMap<Receipt, String>>,
    /// Why no command can be started, if so.
    fatal: Mutex<Option<String>>,
    failed: Notify,
}

/// Counts a running command until it is dropped.
struct RunningGuard<'a>(&'a AtomicUsize);

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl CommandHandler {
    async fn run(&self, body: Bytes, cx: &Cx) -> HandlerOutcome<CommandOutcome> {
        self.running.fetch_add(1, Ordering::SeqCst);
        let _guard = RunningGuard(&self.running);
        // The end of an id distinguishes messages better than its beginning, which is a time.
        let id = cx.message_id().to_string();
        let prefix = &id[id.len().saturating_sub(8)..];
        let result =
            self.runner.run(environment::variables(cx), &self.stale, body, prefix, self.halt.clone()).await;
        match result {
            Ok(result) => {
                let (outcome, words) = handler_outcome(&result);
                lock(&self.words).insert(cx.delivery().receipt.clone(), words);
                outcome
            }
            Err(error) => {
                let problem =
                    format!("the command {} cannot be started: {error}", self.runner.program.display());
                lock(&self.fatal).get_or_insert_with(|| problem.clone());
                self.failed.notify_one();
                HandlerOutcome::defer(Duration::ZERO, problem)
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub async fn run(args: WorkArgs) -> anyhow::Result<()> {
    let mut signals = Signals::new()?;
    let Some((program, arguments)) = args.command.split_first() else { bail!("there is no command") };
    process::check(Path::new(program))?;
    let logs = tracing_subscriber::fmt().with_writer(std::io::stderr).with_max_level(LevelFilter::WARN);
    // If another subscriber is already installed, keep it.
    let _ = logs.with_ansi(std::io::stderr().is_terminal()).try_init();

    let store = args.remote.connect().await?;
    let store_seen = store.clone();
    let begun = Instant::now();
    let watchdog = Arc::new(Watchdog::start().context("the watchdog of the commands cannot be started")?);
    let (halt, halted) = watch::channel(HaltState::Running);
    let ms = Duration::from_millis;
    let (drain, grace) = (ms(args.drain), ms(args.kill_after));
    let (program, run_max) = (program.clone(), args.run_max.map(ms));
    let runner = CommandRunner {
        program,
        args: arguments.to_vec(),
        run_max,
        grace,
        watchdog,
        shows_output: !args.quiet,
    };
    let commands = Arc::new(CommandHandler {
        runner,
        stale: environment::stale(),
        halt: halted,
        running: AtomicUsize::new(0),
        words: Mutex::default(),
        fatal: Mutex::new(None),
        failed: Notify::new(),
    });
    let handler = {
        let commands = commands.clone();
        move |body: Bytes, cx: Cx| {
            let commands = commands.clone();
            async move { commands.run(body, &cx).await }
        }
    };
    // What comes without a context is sampled by the server.
    let collector = args.otlp.as_deref().map(|url| OtlpEndpoint::new(url, "hapax-work")).transpose()?;
    let (tracer, exporter) = collector.map(|collector| collector.trace(0.0)).unzip();
    let traced_queue = args.queue.to_string();
    let (reporter, ended) = (Reporter::new(args.remote.output()), commands.clone());
    let builder = Worker::builder(store, args.queue.clone()).raw_handler(handler).on_settled(move |end| {
        let words = lock(&ended.words).remove(&end.delivery.receipt);
        if let Some(tracer) = tracer.as_ref().filter(|_| end.ran) {
            tracer.handled(
                &traced_queue,
                end.delivery,
                end.held,
                end.error.as_deref().or(failure(end.settlement)),
            );
        }
        reporter.print(end, words.as_deref().unwrap_or_default());
    });
    let worker = settings(builder, &args).drain(drain + grace + SETTLE_MARGIN).build().await?;

    let metrics = match args.metrics {
        Some(address) => Some(show_metrics(&worker, store_seen, address, &args).await?),
        None => None,
    };
    let stop = Notify::new();
    let watching = async {
        tokio::select! {
            () = signals.next() => note(&format!("stopping: {} to finish; once more to kill them", count(commands.running.load(Ordering::SeqCst)))),
            () = commands.failed.notified() => {}
        }
        stop.notify_one();
        tokio::select! {
            () = process::raise_after(&halt, drain, HaltState::Terminate) => {}
            () = signals.next() => drop(halt.send_replace(HaltState::Kill)),
        }
        tokio::select! {
            () = process::raise_after(&halt, grace, HaltState::Kill) => {}
            () = signals.next() => drop(halt.send_replace(HaltState::Kill)),
        }
        std::future::pending::<()>().await;
    };
    let report = tokio::select! {
        report = worker.run(stop.notified()) => report?,
        () = watching => unreachable!("it watches until the worker has ended"),
    };
    drop(metrics);
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    note(&summary(&report.counts, begun.elapsed()));
    if let Some(problem) = lock(&commands.fatal).take() {
        bail!("{problem}; what was received for it is put back");
    }
    if !report.drained {
        let left = report.left + report.unsettled + report.put_back;
        bail!("{left} deliveries could not be finished; they return when their leases run out");
    }
    Ok(())
}

/// Why a run failed, if it did.
fn failure(settlement: &Settlement) -> Option<&str> {
    match settlement {
        Settlement::Retry { error, .. } => Some(error.as_deref().unwrap_or("retry")),
        Settlement::Reject { reason } | Settlement::Park { reason } => Some(reason),
        Settlement::Ack | Settlement::Defer { .. } => None,
    }
}

/// Serves the worker's counters until the returned sender is dropped.
async fn show_metrics(
    worker: &Worker,
    store: SharedStore,
    address: SocketAddr,
    args: &WorkArgs,
) -> anyhow::Result<oneshot::Sender<()>> {
    let insecure = args.metrics_insecure;
    let listener = ProcessPage::bind(address, insecure).await.context("--metrics")?;
    note(&format!("metrics at http://{}/metrics", listener.local_addr()?));
    let (watch, queue) = (worker.watch(), args.queue.clone());
    let ready = move || -> Readiness {
        let (store, queue) = (store.clone(), queue.clone());
        Box::pin(async move { worker_readiness(&store, &queue).await })
    };
    let (end, ended) = oneshot::channel();
    let page = ProcessPage::new(move || watch.samples(), ready);
    tokio::spawn(page.run(listener, insecure, async {
        let _ = ended.await;
    }));
    Ok(end)
}

/// Work can be received: the store answers and hands out messages, and the queue is there and not paused.
async fn worker_readiness(store: &SharedStore, queue: &QueueName) -> Result<(), String> {
    store_readiness(store.as_ref()).await?;
    match store.queue(queue).await {
        Ok(info) if info.paused.is_some() => Err(format!("queue {queue} is paused")),
        Ok(_) => Ok(()),
        Err(error) => Err(error.to_string()),
    }
}

fn settings(builder: WorkerBuilder, args: &WorkArgs) -> WorkerBuilder {
    let mut builder = builder
        .concurrency(usize::from(args.concurrency))
        .on_doubt(args.on_doubt)
        .consumer(format!("hapax-work-{}", std::process::id()));
    if let Some(on_error) = args.on_error {
        builder = builder.on_error(on_error.into());
    }
    if let Some(tier) = args.tier {
        builder = builder.tier(tier);
    }
    if args.once {
        builder = builder.stop_when(StopWhen::AfterOne);
    } else if args.until_empty {
        builder = builder.stop_when(StopWhen::Empty);
    }
    builder = match args.lease {
        Some(LeaseArg::Auto) => builder.lease_auto(),
        Some(LeaseArg::Fixed(lease)) => builder.lease(lease),
        None => builder,
    };
    if let Some(run_ms) = args.run_max {
        // The command's own time limit comes first: it gets SIGTERM before it is killed.
        let longest = Duration::from_millis(run_ms.saturating_add(args.kill_after));
        builder = builder.run_max(longest + SETTLE_MARGIN);
    }
    if args.idempotent_by_derived_key {
        builder = builder.idempotent_by_derived_key();
    }
    match args.rate {
        Some(rate) => builder.per_second(rate),
        None => builder,
    }
}

fn count(commands: usize) -> String {
    if commands == 1 { "1 command".to_owned() } else { format!("{commands} commands") }
}
