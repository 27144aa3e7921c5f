//! `hapax migrate`: makes a database ready for this version.

use clap::Args;
use hapax::postgres::{self, MigrationReport, Options, SCHEMA_VERSION};
use hapax::{StoreUrl, without_secrets};
use serde_json::json;

use anyhow::Context as _;

use crate::output::Output;
use crate::usage;

/// Applies the migrations that the schema `hapax` of a database is missing.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax migrate --store postgres://localhost/shop --dry-run
  PGPASSWORD=… hapax migrate --store postgres://owner@db.example/shop?sslmode=verify-full

The role needs the right to create the schema, or to own it. Several processes may do it at the same time. Servers of the
version before continue beside it.")]
pub struct MigrateArgs {
    /// The database: postgres://USER@HOST/DATABASE.
    #[arg(long, value_name = "URL", env = "HAPAX_STORE", hide_env_values = true)]
    store: String,
    /// Applies the migrations and rolls them back: shows what would be done, and that it can be done.
    #[arg(long)]
    dry_run: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// Runs `hapax migrate`.
pub async fn run(args: MigrateArgs) -> anyhow::Result<()> {
    let shown = without_secrets(&args.store);
    match args.store.parse()? {
        StoreUrl::Postgres(_) => {}
        StoreUrl::Embedded(_) => {
            return Err(usage(format!(
                "--store {shown}: an embedded store migrates itself when it is opened"
            )));
        }
        StoreUrl::Redis(_) => {
            return Err(usage(format!("--store {shown}: Redis has no schema; nothing has to be migrated")));
        }
        _ => return Err(usage(format!("--store {shown}: use postgres://HOST/DATABASE"))),
    }
    let report = postgres::migrate(&args.store, &Options::default(), args.dry_run).await;
    let MigrationReport { from, applied, dry_run, .. } = report.with_context(|| shown.clone())?;
    let steps: Vec<String> = applied.iter().map(|(version, name)| format!("{version} {name}")).collect();
    let sentence = match (steps.is_empty(), dry_run) {
        (true, _) => format!("{shown} has version {from} of the schema: nothing to do"),
        (false, true) => format!("{shown} has version {from} of the schema; missing: {}", steps.join(", ")),
        (false, false) => {
            format!("{shown} has version {SCHEMA_VERSION} of the schema; applied: {}", steps.join(", "))
        }
    };
    let applied: Vec<_> =
        applied.iter().map(|(version, name)| json!({ "version": version, "name": name })).collect();
    let value = json!({ "from": from, "to": SCHEMA_VERSION, "applied": applied, "dry_run": dry_run });
    Output::new(args.json).done(&sentence, &value)
}
