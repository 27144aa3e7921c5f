//! Payments in spite of crashes: whether each is made once depends on the tier, and on the checks of the bank.
//!
//! `cargo run --release --example payments [-- --seed N]`
//!
//! A producer sends each payment several times and dies midway; it starts again from the beginning. Workers are killed
//! with SIGKILL, at named points or at random times, and restarted until everything is settled. There are three banks,
//! each with its own queue at `effectively-once`:
//!
//! * `keyed` is idempotent by the derived key of each request: every payment is made once.
//! * `fenced` checks only the fence: it refuses zombies, but cannot know whether a worker paid before it died. A
//!   payment made just before a crash is made again.
//! * `trusting` checks nothing, so its queue parks messages in doubt: nothing is paid twice, and an operator has to
//!   resolve the parked messages. The end of this example does.
//!
//! The example ends with an error if one of these does not hold.
//!
//! `--store URL` uses another store than a folder, for example, with `--features redis`,
//! `redis+cluster://HOST,HOST?hapax_durability=replicated`; kill one of its masters meanwhile. The store should be empty.
//!
//! `--lease` shows another cause of duplicates: consumers without heartbeats whose lease is too short; see `leases.rs`.
//! `--lease http://127.0.0.1:9324` does it through a server, so that `hapax top` can look on.
//!
//! With `--features postgres` and `-- --postgres` the banks are tables in PostgreSQL, see `postgres.rs`.

mod bank;
mod leases;
#[cfg(feature = "postgres")]
mod postgres;
mod roles;
mod storm;
mod summary;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, bail};
use hapax::Hapax;

use crate::bank::{Bank, Banks};
use crate::roles::Kill;

/// A run takes a few seconds, the one on PostgreSQL a minute; a longer one than this has failed.
const PATIENCE: Duration = Duration::from_mins(10);

#[tokio::main]
async fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let run = async {
        match args[..] {
            ["produce", store, seed, payments, die_after] => {
                let hapax = roles::repeat(|| Hapax::open(store)).await?;
                roles::produce(&hapax, seed.parse()?, payments.parse()?, die_after.parse()?).await?;
                Ok(true)
            }
            ["work", store, bank, kill] => {
                let kill = if kill == "-" { None } else { Some(Kill::from_arg(kill, &Bank::NAMES)?) };
                let hapax = roles::repeat(|| Hapax::open(store)).await?;
                roles::work(&hapax, bank.parse()?, kill, || println!("ready")).await?;
                Ok(true)
            }
            [] => show(None, fastrand::u64(..1_000_000)).await,
            ["--lease"] => leases::show().await,
            ["--lease", url] => leases::show_at(url).await,
            ["--store", url] => show(Some(url), fastrand::u64(..1_000_000)).await,
            ["--seed", seed] => show(None, seed.parse().context("--seed takes a number")?).await,
            #[cfg(feature = "postgres")]
            ["work-postgres", url, task] => postgres::work(url, task).await.map(|()| true),
            #[cfg(feature = "postgres")]
            ["--postgres", ref rest @ ..] => postgres::show(rest).await,
            #[cfg(not(feature = "postgres"))]
            ["--postgres", ..] => bail!("--postgres needs the feature: cargo run --features postgres …"),
            _ => bail!(
                "usage: payments [--seed N | --store URL | --lease [URL]] | payments --postgres [URL] [--seconds N] [--seed N]"
            ),
        }
    };
    match tokio::time::timeout(PATIENCE, run).await {
        Ok(Ok(true)) => ExitCode::SUCCESS,
        Ok(Ok(false)) => ExitCode::FAILURE,
        Ok(Err(error)) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
        Err(_) => {
            eprintln!("error: not settled within {PATIENCE:?}");
            ExitCode::FAILURE
        }
    }
}

async fn show(given: Option<&str>, seed: u64) -> anyhow::Result<bool> {
    println!("seed {seed} (repeats the schedule of crashes: --seed {seed})\n");
    let folder = tempfile::tempdir()?;
    let url = given.map_or_else(|| format!("embedded:{}", folder.path().display()), str::to_owned);
    let banks = Banks::default();
    let address = banks.open().await?;
    let storm = storm::rage(&url, address, seed).await?;

    let hapax = roles::repeat(|| Hapax::open(&url)).await?;
    summary::lapsed(&hapax).await?;
    let mut holds = summary::print(&hapax, &banks, &storm).await?;
    holds &= summary::resolve(&hapax, &banks).await?;
    // No more kills: the resolved messages continue.
    roles::work(&hapax, address, None, || {}).await?;
    holds &= summary::print_end(&hapax, &banks).await?;
    Ok(holds)
}
