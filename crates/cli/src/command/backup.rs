//! `hapax backup`, `hapax restore` and `hapax resume`.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use clap::Args;
use hapax::embedded::Embedded;
use serde_json::json;

use crate::remote::Remote;
use crate::store::{Store, StoreOptions, folder};
use crate::usage;

/// Writes a copy of the running store to a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax backup monday.db
  hapax backup /mnt/copies/monday.db --endpoint embedded:./hapax-data     while no server runs

The server writes the file, on its own machine, into its folder for backups (`backups` in the store's folder, or
--store-backup-folder of `hapax serve`), where no file of that name may be yet. Sends and settles continue meanwhile.
While no server runs, the file may be anywhere.")]
pub struct BackupArgs {
    /// The file to write: its name, or its path in the server's folder for backups.
    to: PathBuf,
    #[command(flatten)]
    remote: Remote,
}

/// Restores a backup into a new folder; the restored store is paused.
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
    /// The target: embedded:PATH, a folder without a store.
    #[arg(
        long,
        value_name = "URL",
        env = "HAPAX_STORE",
        hide_env_values = true,
        default_value = "embedded:./hapax-data"
    )]
    store: String,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Makes a paused store deliver messages again.
#[derive(Debug, Args)]
#[command(after_help = "Examples:\n  hapax resume")]
pub struct ResumeArgs {
    #[command(flatten)]
    remote: Remote,
}

/// Runs `hapax backup`.
pub async fn backup(args: BackupArgs) -> anyhow::Result<()> {
    let written = if args.remote.is_store() {
        let file = std::path::absolute(&args.to).with_context(|| args.to.display().to_string())?;
        let store = Store::open_existing(&args.remote.endpoint, StoreOptions::default()).await?;
        let write = store
            .backup_function()
            .context("the database has its own tools for backups, for example pg_dump; use those")?;
        let to = file.clone();
        tokio::task::spawn_blocking(move || write(&to)).await?.map_err(anyhow::Error::msg)?;
        file.display().to_string()
    } else {
        args.remote.client().await?.backup(&name_for_server(&args.to)?).await?
    };
    args.remote.output().done(&format!("backup written to {written}"), &json!({ "to": written }))
}

/// How a server is told about a file: a name means one in its folder for backups, and everything else where the user is.
fn name_for_server(to: &Path) -> anyhow::Result<String> {
    let is_name = to.file_name() == Some(to.as_os_str());
    let path = if is_name {
        to.to_owned()
    } else {
        std::path::absolute(to).with_context(|| to.display().to_string())?
    };
    Ok(path.to_str().with_context(|| format!("{} is not valid UTF-8", to.display()))?.to_owned())
}

/// Runs `hapax restore`.
pub async fn restore(args: RestoreArgs) -> anyhow::Result<()> {
    let Some(folder) = folder(&args.store) else {
        return Err(usage(format!(
            "--store {}: only an embedded:PATH can be restored to; a database has its own tools",
            hapax::without_secrets(&args.store)
        )));
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
    maintenance.resume(&Remote::user_name()).await?;
    args.remote.output().done("the store hands out messages", &json!({ "resumed": true }))
}
