//! `hapax export` and `hapax import`.

use std::fs::File;
use std::io::{BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use clap::Args;
use hapax::QueueName;
use hapax::core::store::SharedStore;
use hapax::transfer::{self, ExportReport, ExportRequest};

use crate::output::note;
use crate::remote::Remote;
use crate::store::{Store, StoreOptions};

/// Writes queues and ledger to a file of JSON lines, to be imported into another store.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax export --pause --to store.jsonl               all queues and the ledger
  hapax export --queue jobs-dead --queue jobs --pause > jobs.jsonl
  hapax export --pause | hapax import --endpoint http://other:9324

A queue has to be paused before it is exported. Meanwhile it is closed: nothing is accepted, and time does not change it; then
it is paused as before. A message in flight is exported as returned, a claim that is held as in doubt: stop workers and proxies
first. If an export is killed, repeat it, or open the queues with `hapax copy --release --from URL`.")]
pub struct ExportArgs {
    /// A queue; repeat it for several. Default: all queues and the ledger.
    #[arg(long = "queue", value_name = "QUEUE")]
    queues: Vec<QueueName>,
    /// Pauses queues that are not paused yet.
    #[arg(long)]
    pause: bool,
    /// The file to write; must not exist. Default: standard output.
    #[arg(long, value_name = "FILE")]
    to: Option<PathBuf>,
    #[command(flatten)]
    remote: Remote,
}

/// Reads what `hapax export` wrote into this store.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax import store.jsonl
  hapax import store.jsonl --endpoint embedded:./hapax-data     while no server runs; makes the store if there is none

Queues are created as they were. Messages keep their ids and their order, and go behind those that are there. If it is
interrupted, repeat it: what is there already is not added again.")]
pub struct ImportArgs {
    /// The file. Default: standard input.
    from: Option<PathBuf>,
    #[command(flatten)]
    remote: Remote,
}

/// Runs `hapax export`.
pub async fn export(args: ExportArgs) -> anyhow::Result<()> {
    let store = args.remote.connect().await?;
    let request = ExportRequest { queues: args.queues, pause: args.pause, by: Remote::user_name() };
    let report = if let Some(path) = &args.to {
        let report = write_file(&store, &request, path).await?;
        args.remote.output().done(&summary(&report), &report)?;
        report
    } else {
        let report = write(&store, &request, std::io::stdout()).await?;
        note(&summary(&report));
        report
    };
    for damaged in &report.damaged {
        note(&format!("not exported: {damaged}"));
    }
    match report.damaged.len() {
        0 => Ok(()),
        count => bail!("{count} damaged items were not exported"),
    }
}

async fn write(store: &SharedStore, request: &ExportRequest, to: impl Write) -> anyhow::Result<ExportReport> {
    Ok(transfer::export(store, request, &mut BufWriter::new(to)).await?)
}

async fn write_file(
    store: &SharedStore,
    request: &ExportRequest,
    path: &Path,
) -> anyhow::Result<ExportReport> {
    let file = File::create_new(path).with_context(|| path.display().to_string())?;
    let written = write(store, request, &file).await;
    if written.is_err() {
        // Part of an export is of no use, and would be in the way of the next one.
        let _ = std::fs::remove_file(path);
        return written;
    }
    file.sync_all().with_context(|| path.display().to_string())?;
    written
}

fn summary(report: &ExportReport) -> String {
    format!("{} queues and {} items exported", report.queues, report.items)
}

/// Runs `hapax import`.
pub async fn import(args: ImportArgs) -> anyhow::Result<()> {
    let store = if args.remote.is_store() {
        Store::open(&args.remote.endpoint, StoreOptions::default()).await?.admin().clone()
    } else {
        args.remote.connect().await?
    };
    let report = match &args.from {
        Some(path) => {
            let file = File::open(path).with_context(|| path.display().to_string())?;
            transfer::import(&store, &mut BufReader::new(file), &Remote::user_name()).await?
        }
        // Not locked: a lock of standard input cannot be held across an await.
        None => transfer::import(&store, &mut BufReader::new(std::io::stdin()), &Remote::user_name()).await?,
    };
    for refusal in &report.refusals {
        note(&format!("refused: {refusal}"));
    }
    let sentence = format!("{} items added, {} were there already", report.added, report.already_there);
    args.remote.output().done(&sentence, &report)?;
    match report.refused {
        0 => Ok(()),
        count => bail!("{count} items were refused"),
    }
}
