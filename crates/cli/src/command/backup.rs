//! `hapax backup`, `hapax restore` and `hapax resume`.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::Args;
use hapax::embedded::{Embedded, Options};
use serde_json::json;

use crate::remote::Remote;
use crate::store::{Store, folder};
use crate::usage;

/// Writes a copy of the running store to a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax backup /var/backups/hapax-monday.db
  hapax backup monday.db --endpoint embedded:./hapax-data     while no server runs

The server writes the file, on its own machine, where no file may be yet. Sends and settles continue meanwhile.")]
pub struct BackupArgs {
    /// The file to write.
    to: PathBuf,
    #[command(flatten)]
    remote: Remote,
}

/// Puts a backup into a new folder; the store opens paused there.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax restore monday.db --store embedded:./restored
  hapax serve --store embedded:./restored
  hapax resume

What was settled after the backup was taken would be delivered again: look first, then resume.")]
pub struct RestoreArgs {
    /// The backup.
    from: PathBuf,
    /// Where to: embedded:PATH, a folder that holds no store.
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", default_value = "embedded:./hapax-data")]
    store: String,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Lets a paused store hand out messages again.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  hapax resume")]
pub struct ResumeArgs {
    #[command(flatten)]
    remote: Remote,
}

/// Runs `hapax backup`.
pub async fn backup(args: BackupArgs) -> anyhow::Result<()> {
    let to = std::path::absolute(&args.to).with_context(|| args.to.display().to_string())?;
    if args.remote.is_local() {
        let store = Store::open_existing(&args.remote.endpoint, Options::default()).await?;
        let write = store.backup_function().context("this store has its own tools for backups; use those")?;
        let file = to.clone();
        tokio::task::spawn_blocking(move || write(&file)).await?.map_err(anyhow::Error::msg)?;
    } else {
        let name = to.to_str().with_context(|| format!("{} is not valid UTF-8", to.display()))?;
        args.remote.client().await?.backup(name).await?;
    }
    args.remote.output().done(&format!("backup written to {}", to.display()), &json!({ "to": to }))
}

/// Runs `hapax restore`.
pub async fn restore(args: RestoreArgs) -> anyhow::Result<()> {
    let Some(folder) = folder(&args.store).map(ToOwned::to_owned) else {
        return Err(usage(format!("--store {}: only an embedded:PATH can be restored to", args.store)));
    };
    let (from, to) = (args.from.clone(), folder.clone());
    tokio::task::spawn_blocking(move || Embedded::restore(from, to)).await??;
    let sentence = format!(
        "restored to {0}; it opens paused: start `hapax serve --store embedded:{0}`, look, then `hapax resume`",
        folder.display()
    );
    crate::output::Output::new(args.json).done(&sentence, &json!({ "to": folder, "paused": true }))
}

/// Runs `hapax resume`.
pub async fn resume(args: ResumeArgs) -> anyhow::Result<()> {
    let store = args.remote.connect().await?;
    let Some(maintenance) = store.maintenance() else {
        anyhow::bail!("this store is never paused by a restored backup: there is nothing to resume");
    };
    maintenance.resume(&Remote::by()).await?;
    args.remote.output().done("the store hands out messages", &json!({ "resumed": true }))
}
