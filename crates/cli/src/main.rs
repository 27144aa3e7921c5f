//! `hapax`: serve queues, send, receive, handle dead letters. Glue code only: each command is a call into a library.

mod command;
mod config_file;
mod confirm;
mod json;
mod output;
mod remote;
mod serve;
mod store;
mod text;
mod tier;

use std::fmt;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser, Subcommand};
use hapax::{AdminError, StoreError};

use crate::command::{
    backup, bench, copy, dead, doctor, ledger, message, migrate, outbox, parked, proxy, queue, receive,
    relay, send, top, transfer, verify, work,
};
use crate::config_file::Problems;

const EXAMPLES: &str = "\
Examples:
  hapax serve
  hapax send --create emails '{\"to\":\"ada@example.com\"}'
  hapax receive emails --ack
  hapax queues

Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// Durable queues for jobs whose effects happen once.
#[derive(Debug, Parser)]
#[command(name = "hapax", version, after_help = EXAMPLES, arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Runs the server: durable queues with AWS SQS's API.
    #[command(after_help = "\
Examples:
  hapax serve
  hapax serve --listen 127.0.0.1:9400 --store embedded:/var/lib/hapax
  hapax serve --config hapax.toml --print-config
  PGPASSWORD=… hapax serve --store postgres://hapax@db.example/shop --migrate
  hapax serve --store redis+cluster://10.0.0.1,10.0.0.2?hapax_durability=replicated
  HAPAX_KEY_SECRET=… hapax serve --listen 0.0.0.0:9324 --key-id AKTEAM

SIGTERM or SIGINT stops it after the requests under way; a second one stops it at once.")]
    Serve(Box<serve::ServeArgs>),
    /// Runs a reverse proxy that makes requests with an Idempotency-Key take effect once.
    #[command(after_help = "\
Examples:
  hapax proxy --upstream http://127.0.0.1:8080
  hapax proxy --upstream http://127.0.0.1:8080 --key-required --on-doubt retry --ledger http://127.0.0.1:9324
  hapax proxy --upstream http://127.0.0.1:8080 --ledger postgres://hapax@db.example/shop
  hapax proxy --config proxy.toml --print-config

A request that is sent again with its key gets the first response, marked Idempotent-Replayed: true.
SIGTERM or SIGINT stops it after the requests under way; a second one stops it at once.")]
    Proxy(Box<proxy::ProxyArgs>),
    /// Sends a message, or one for each line of a file.
    Send(send::SendArgs),
    /// Receives messages, and optionally acks them.
    Receive(receive::ReceiveArgs),
    /// Runs a command for each message of a queue.
    Work(Box<work::WorkArgs>),
    /// Lists queues and their message counts.
    Queues(queue::QueuesArgs),
    /// Creates, changes, empties, deletes and shows queues.
    Queue(Box<queue::QueueArgs>),
    /// Lists, shows, redrives and deletes dead letters: messages out of attempts, or rejected.
    Dead(dead::DeadArgs),
    /// Lists, releases and deletes parked messages, and releases halted groups.
    Parked(parked::ParkedArgs),
    /// Shows and resolves the ledger's entries: claimed keys, their outcomes, and those in doubt.
    Ledger(ledger::LedgerArgs),
    /// Shows what happened to a message.
    Message(message::MessageArgs),
    /// Explains why a message ran twice, or why it did not.
    Why(message::WhyArgs),
    /// Shows queues, one queue and advice, live.
    Top(top::TopArgs),
    /// Publishes the messages of an outbox, which business transactions have written.
    Relay(Box<relay::RelayArgs>),
    /// Shows an outbox, and retries or skips messages that a sink has refused.
    Outbox(outbox::OutboxArgs),
    /// Looks after Kafka: the configuration check, lag, and open transactions.
    #[cfg(feature = "kafka")]
    Kafka(command::kafka::KafkaArgs),
    /// Says how a program with this command is built.
    #[cfg(not(feature = "kafka"))]
    #[command(hide = true, disable_help_flag = true)]
    Kafka {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
        _args: Vec<std::ffi::OsString>,
    },
    /// Writes a copy of the running store to a file.
    Backup(backup::BackupArgs),
    /// Restores a backup into a new folder; the restored store is paused.
    Restore(backup::RestoreArgs),
    /// Makes a paused store deliver messages again.
    Resume(backup::ResumeArgs),
    /// Writes queues and ledger to a file of JSON lines, to be imported into another store.
    Export(transfer::ExportArgs),
    /// Reads what `hapax export` wrote into this store.
    Import(transfer::ImportArgs),
    /// Copies queues and ledger to another store, so that it can be repeated, and closes the source.
    Copy(copy::CopyArgs),
    /// Makes a database ready for this version: creates its schema, or changes an older one.
    Migrate(migrate::MigrateArgs),
    /// Checks what queues promise against what their store can do.
    Doctor(doctor::DoctorArgs),
    /// Measures a server: send, receive and ack from many connections at once.
    Bench(bench::BenchArgs),
    /// Shows which guarantee holds on a store, by breaking things.
    Verify(Box<verify::VerifyArgs>),
    /// Prints a completion script for a shell.
    #[command(after_help = "\
Examples:
  hapax completions bash > /etc/bash_completion.d/hapax
  hapax completions zsh > ~/.zfunc/_hapax
  hapax completions fish > ~/.config/fish/completions/hapax.fish")]
    Completions {
        /// The shell.
        shell: clap_complete::Shell,
    },
}

/// A usage error that is found only after the arguments were parsed.
#[derive(Debug)]
struct UsageError(String);

impl fmt::Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// An error that ends the program with exit code 2.
fn usage(problem: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(UsageError(problem.into()))
}

fn main() -> ExitCode {
    // Not commands for users, and they need no runtime.
    let mut args = std::env::args_os().skip(1);
    match args.next() {
        Some(first) if first == work::WATCHDOG_COMMAND => {
            work::watch();
            return ExitCode::SUCCESS;
        }
        Some(first) if first == work::START_COMMAND => return work::start(args),
        Some(first) if first == verify::ROLE_COMMAND => return verify::role(),
        _ => {}
    }
    let cli = Cli::parse();
    let result = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            let result = runtime.block_on(run(cli.command));
            // A store that hangs while it closes must not delay the exit.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(error.into()),
    };
    let Err(error) = result else { return ExitCode::SUCCESS };
    if is_broken_pipe(&error) {
        return ExitCode::SUCCESS;
    }
    let lines = match error.downcast_ref::<Problems>() {
        Some(problems) => problems.lines(),
        None => vec![sentence(&error)],
    };
    let lines: Vec<String> = lines.iter().map(|line| text::escape(line)).collect();
    output::note(&format!("error: {}", lines.join("\n")));
    ExitCode::from(if error.is::<UsageError>() { 2 } else { 1 })
}

/// An error and its causes, with commands instead of library calls as advice.
fn sentence(error: &anyhow::Error) -> String {
    let cause = |cause: &(dyn std::error::Error + 'static)| {
        let store = match cause.downcast_ref::<AdminError>() {
            Some(AdminError::Store(error)) => Some(error),
            _ => cause.downcast_ref::<StoreError>(),
        };
        match store {
            // The library's advice to create the queue does not help a user who wants to delete or read it.
            Some(StoreError::NoSuchQueue(queue)) => {
                format!("queue {queue} does not exist; `hapax queues` lists those that do")
            }
            _ => match (cause.downcast_ref(), cause.downcast_ref()) {
                (Some(AdminError::Exists(queue, field)), _)
                | (_, Some(hapax::Error::QueueDiffers { queue, field })) => format!(
                    "queue {queue} exists with another policy: its {field} differs; `hapax queue show {queue}` shows it, \
                     `hapax queue set {queue}` changes it"
                ),
                _ => text::with_units(&cause.to_string()),
            },
        }
    };
    error.chain().map(cause).collect::<Vec<_>>().join(": ")
}

/// The reader of our output has closed the pipe, as `head` does.
fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<std::io::Error>().is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Serve(args) => serve::run(*args).await,
        Command::Proxy(args) => proxy::run(*args).await,
        Command::Send(args) => send::run(args).await,
        Command::Receive(args) => receive::run(args).await,
        Command::Work(args) => work::run(*args).await,
        Command::Queues(args) => queue::list(args).await,
        Command::Queue(args) => queue::run(*args).await,
        Command::Dead(args) => dead::run(args).await,
        Command::Parked(args) => parked::run(args).await,
        Command::Ledger(args) => ledger::run(args).await,
        Command::Message(args) => message::run(args).await,
        Command::Why(args) => message::why(args).await,
        Command::Top(args) => top::run(args).await,
        Command::Relay(args) => relay::run(*args).await,
        Command::Outbox(args) => outbox::run(args).await,
        #[cfg(feature = "kafka")]
        Command::Kafka(args) => command::kafka::run(args).await,
        #[cfg(not(feature = "kafka"))]
        Command::Kafka { .. } => anyhow::bail!(
            "this program was built without Kafka: `cargo build --release -p hapax-cli --features kafka` builds one that has the command"
        ),
        Command::Backup(args) => backup::backup(args).await,
        Command::Restore(args) => backup::restore(args).await,
        Command::Resume(args) => backup::resume(args).await,
        Command::Export(args) => transfer::export(args).await,
        Command::Import(args) => transfer::import(args).await,
        Command::Copy(args) => copy::run(args).await,
        Command::Migrate(args) => migrate::run(args).await,
        Command::Doctor(args) => doctor::run(args).await,
        Command::Bench(args) => bench::run(args).await,
        Command::Verify(args) => verify::run(*args).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "hapax", &mut script);
            output::raw(&String::from_utf8_lossy(&script))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_are_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples() {
        fn check(command: &clap::Command) {
            for sub in command.get_subcommands().filter(|sub| sub.get_name() != "help") {
                check(sub);
                let leaf = sub.get_subcommands().next().is_none();
                let help = sub.get_after_help().map(ToString::to_string).unwrap_or_default();
                assert!(!leaf || help.contains("hapax "), "{} has no example", sub.get_name());
            }
        }
        check(&Cli::command());
    }
}
