//! `hapax ledger …`: claimed keys, their outcomes, and decisions about those in doubt.

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand, ValueEnum};
use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::store::SharedStore;
use hapax::core::{EntryFilter, EntryId, EntryState, EntryView, Json, RecordedOutcome, Resolution, Scope};
use hapax::{IdempotencyKey, QueueName};
use serde_json::json;

use crate::confirm::Confirm;
use crate::output::{Output, note};
use crate::remote::Remote;
use crate::text::{escape, parse_ms, parse_word, show_body, show_bytes, show_ms, show_time};
use crate::usage;

/// Maximum number of entries that one call reads.
const PAGE: usize = 100;

/// Handles the ledger: claimed keys, their outcomes, and those in doubt.
#[derive(Debug, Args)]
pub struct LedgerArgs {
    #[command(subcommand)]
    command: LedgerCommand,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Subcommand)]
enum LedgerCommand {
    /// Lists entries, ordered by their last claim.
    #[command(after_help = "\
Examples:
  hapax ledger list --state in_doubt
  hapax ledger list --queue payments --limit 1000 --json
  hapax ledger list --scope tenant-7/charges

In a pipe a line has: scope, key, state, time of the claim, takeovers, remaining lease, outcome.")]
    List {
        /// Only entries of this scope.
        #[arg(long)]
        scope: Option<Scope>,
        /// Only entries of this queue's messages: short for --scope queue/NAME.
        #[arg(long, value_name = "NAME", conflicts_with = "scope")]
        queue: Option<QueueName>,
        /// Only entries in this state: processing, in_doubt, completed, failed.
        #[arg(long, value_parser = parse_word::<EntryState>)]
        state: Option<EntryState>,
        /// Maximum count.
        #[arg(long, default_value_t = 100, value_name = "N")]
        limit: usize,
    },
    /// Shows one entry.
    #[command(after_help = "\
Examples:
  hapax ledger show queue/payments order-7
  hapax ledger show --queue payments order-7 --json")]
    Show(EntryArgs),
    /// Decides about an entry in doubt: did its effect happen?
    #[command(after_help = "\
Examples:
  hapax ledger resolve --queue payments order-7 --as completed --outcome '{\"charge\":\"ch_1\"}'
  hapax ledger resolve tenant-7/charges order-7 --as absent
  hapax ledger resolve 'http/proxy/anyone/POST /orders' order-7 --as completed \
    --outcome '{\"http_response\": {\"status\": 201, \"body\": {\"json\": {\"charge\": \"ch_1\"}}}}'

The outcome of an HTTP request is the response that its duplicates get.
First find out, where the effect would show, whether it happened: `completed` keeps it from ever being run,
`absent` lets it run. Messages that were parked because of the doubt are delivered again.")]
    Resolve(Resolve),
    /// Deletes an entry without a holder: the effect may then happen again.
    #[command(after_help = "\
Examples:
  hapax ledger forget queue/payments order-7
  hapax ledger forget --queue payments order-7 --yes")]
    Forget {
        #[command(flatten)]
        entry: EntryArgs,
        /// Your name, for the audit.
        #[arg(long, value_name = "NAME")]
        by: Option<String>,
        #[command(flatten)]
        confirm: Confirm,
    },
}

#[derive(Debug, Args)]
struct EntryArgs {
    /// The scope and the key; with --queue the key alone.
    #[arg(required = true, num_args = 1..=2, value_names = ["SCOPE", "KEY"])]
    entry: Vec<String>,
    /// The queue of the message with this key: short for the scope queue/NAME.
    #[arg(long, value_name = "NAME")]
    queue: Option<QueueName>,
}

impl EntryArgs {
    fn id(&self) -> anyhow::Result<EntryId> {
        let (scope, key) = match (self.entry.as_slice(), &self.queue) {
            ([key], Some(queue)) => (Scope::of_queue(queue), key),
            ([scope, key], None) => (Scope::new(scope).map_err(|error| usage(error.to_string()))?, key),
            ([_], None) => return Err(usage("which scope? give SCOPE KEY, or --queue NAME KEY")),
            _ => return Err(usage("--queue takes the place of SCOPE; give one of them")),
        };
        Ok(EntryId::new(scope, IdempotencyKey::new(key).map_err(|error| usage(error.to_string()))?))
    }
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum ResolveAsArg {
    /// The effect happened.
    Completed,
    /// The effect did not happen.
    Absent,
}

#[derive(Debug, Args)]
struct Resolve {
    #[command(flatten)]
    entry: EntryArgs,
    /// Whether the effect happened.
    #[arg(long = "as", value_name = "HOW")]
    how: ResolveAsArg,
    /// With completed: the outcome for duplicates, as JSON [default: null]. For an HTTP request, a response: see the
    /// examples.
    #[arg(long, value_name = "JSON")]
    outcome: Option<String>,
    /// With completed: the effect failed permanently; duplicates get the same failure.
    #[arg(long)]
    failed: bool,
    /// With completed: how long the outcome is kept [default: 4d].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    ttl: Option<u64>,
    /// Your name, for the audit.
    #[arg(long, value_name = "NAME")]
    by: Option<String>,
}

impl Resolve {
    fn resolution(&self) -> anyhow::Result<Resolution> {
        match self.how {
            ResolveAsArg::Absent if self.outcome.is_some() || self.failed || self.ttl.is_some() => {
                Err(usage("--outcome, --failed and --ttl go with --as completed"))
            }
            ResolveAsArg::Absent => Ok(Resolution::Absent),
            ResolveAsArg::Completed => {
                let outcome = self.outcome.as_deref().unwrap_or("null");
                let value = Json::parse(outcome)
                    .map_err(|error| usage(format!("--outcome: {error}; write JSON, a text in quotes")))?;
                let outcome =
                    if self.failed { RecordedOutcome::failed(value) } else { RecordedOutcome::done(value) };
                Ok(Resolution::Completed { outcome, ttl_ms: self.ttl.unwrap_or(TTL_MS_DEFAULT) })
            }
        }
    }
}

pub async fn run(args: LedgerArgs) -> anyhow::Result<()> {
    let out = args.remote.output();
    match args.command {
        LedgerCommand::List { scope, queue, state, limit } => {
            let scope = scope.or_else(|| queue.as_ref().map(Scope::of_queue));
            list(&args.remote.connect().await?, scope, state, limit, out).await
        }
        LedgerCommand::Show(entry) => {
            let id = entry.id()?;
            let found = args.remote.connect().await?.entry(&id).await?;
            show(&found.with_context(|| format!("there is no entry {id}"))?, &args.remote)
        }
        LedgerCommand::Resolve(resolve) => {
            let (id, resolution) = (resolve.entry.id()?, resolve.resolution()?);
            let state = match &resolution {
                Resolution::Absent => "absent",
                Resolution::Completed { outcome, .. } if outcome.failed => "failed",
                Resolution::Completed { .. } => "completed",
            };
            let by = resolve.by.unwrap_or_else(Remote::user_name);
            args.remote.connect().await?.resolve(&id, resolution, &by).await?;
            out.done(
                &format!("{id} is {state}"),
                &json!({ "scope": id.scope, "key": id.key, "state": state }),
            )
        }
        LedgerCommand::Forget { entry, by, confirm } => {
            let id = entry.id()?;
            let store = args.remote.connect().await?;
            confirm.ask(&format!("Forget {id}, so that its effect may happen again?"))?;
            store.forget(&id, &by.unwrap_or_else(Remote::user_name)).await?;
            let json = json!({ "scope": id.scope, "key": id.key, "forgotten": true });
            out.done(&format!("{id} is forgotten"), &json)
        }
    }
}

async fn list(
    store: &SharedStore,
    scope: Option<Scope>,
    state: Option<EntryState>,
    limit: usize,
    out: Output,
) -> anyhow::Result<()> {
    if limit == 0 {
        bail!("--limit 0 lists nothing");
    }
    let (mut found, mut after) = (Vec::new(), None);
    while found.len() < limit {
        let filter = EntryFilter { scope: scope.clone(), state, after, limit: PAGE.min(limit - found.len()) };
        let page = store.entries(filter).await?;
        found.extend(page.items);
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    if out.is_json() {
        return out.value(&found);
    }
    if found.is_empty() {
        note("No such entries.");
        return Ok(());
    }
    let chars_max = if out.is_terminal() { 60 } else { usize::MAX };
    let row = |entry: &EntryView| {
        vec![
            escape(entry.id.scope.as_str()),
            escape(entry.id.key.as_str()),
            entry.state.as_str().to_owned(),
            show_time(entry.claimed_ms),
            entry.takeovers.to_string(),
            lease(entry),
            outcome(entry, chars_max),
        ]
    };
    let heading = ["scope", "key", "state", "claimed", "takeovers", "lease", "outcome"];
    out.rows(&heading, found.iter().map(row).collect())
}

fn lease(entry: &EntryView) -> String {
    match entry.state {
        EntryState::Processing => show_ms(entry.lease_ms),
        _ => "-".to_owned(),
    }
}

fn outcome(entry: &EntryView, chars_max: usize) -> String {
    match entry.outcome.as_ref().map(|outcome| (&outcome.value, outcome.omitted_bytes)) {
        Some((Some(value), _)) => show_body(value.as_str().as_bytes(), chars_max),
        Some((None, bytes)) => format!("({}, not kept)", show_bytes(bytes.unwrap_or_default())),
        None => "-".to_owned(),
    }
}

fn show(entry: &EntryView, remote: &Remote) -> anyhow::Result<()> {
    let out = remote.output();
    if out.is_json() {
        return out.value(entry);
    }
    let ended = match entry.state {
        EntryState::InDoubt => "in doubt since",
        _ => "ended",
    };
    let time = |ms: Option<u64>, without: &str| ms.map_or_else(|| without.to_owned(), show_time);
    let fingerprint = entry.fingerprint.as_ref().map_or("-", |fingerprint| fingerprint.as_str());
    let rows = [
        ("scope", escape(entry.id.scope.as_str())),
        ("key", escape(entry.id.key.as_str())),
        ("state", entry.state.as_str().to_owned()),
        ("fence", entry.fence.to_string()),
        ("owner", entry.owner.to_string()),
        ("fingerprint", fingerprint.to_owned()),
        ("claimed", show_time(entry.claimed_ms)),
        ("takeovers", entry.takeovers.to_string()),
        ("lease", lease(entry)),
        (ended, time(entry.ended_ms, "-")),
        ("kept until", time(entry.prune_ms, "someone decides")),
        ("outcome", outcome(entry, usize::MAX)),
    ];
    out.rows(&[], rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect())?;
    if entry.state == EntryState::InDoubt {
        note(&format!(
            "Find out whether the effect happened, then: hapax ledger resolve --as completed|absent --endpoint {} {}",
            hapax::without_secrets(&remote.endpoint),
            entry.id.shell_words()
        ));
    }
    Ok(())
}
