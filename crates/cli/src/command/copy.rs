//! `hapax copy`.

use std::time::{Duration, Instant};

use clap::Args;
use hapax::copy::{self, CopyPlan, CopyProgress, CopyReport, CopyRequest};
use hapax::core::store::SharedStore;
use hapax::{QueueName, StoreUrl};
use indicatif::ProgressBar;

use crate::output::{self, Output, note};
use crate::remote::Remote;
use crate::store::{Store, StoreOptions, is_store};
use crate::usage;

/// Time between two lines about pages, where there is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Copies queues and ledger to another store, so that it can be repeated, and closes the source.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax copy --from embedded:./hapax-data --to postgres://hapax@db.example/shop --dry-run
  hapax copy --from embedded:./hapax-data --to postgres://hapax@db.example/shop
  hapax copy --from http://old:9324 --to http://new:9324 --queue jobs --queue jobs-dead
  hapax copy --release --from embedded:./hapax-data           the way back: the source is open again

A store is the URL of a server (then the token in HAPAX_TOKEN is for both), postgres://HOST/DATABASE, redis://HOST, or, while no server
runs on it, embedded:PATH. The source is closed: sends, receives, settles and claims are refused there with a retryable
error that names the target. What is in flight is copied as returned, a claim that is held as in doubt: stop workers and
proxies first. If it is interrupted, repeat it: nothing is added twice. The queues of the target open when everything is
there and the checksums of both sides are equal.")]
pub struct CopyArgs {
    /// The store to copy from.
    #[arg(long, value_name = "URL")]
    from: String,
    /// The store to copy to. A database must have the schema (`hapax migrate`); a folder is made if there is none.
    #[arg(long, value_name = "URL", required_unless_present = "release", conflicts_with = "release")]
    to: Option<String>,
    /// A queue; repeat it for several. Default: all queues and the ledger. With it, the entries of these queues are copied
    /// too, and the ledger of the source stays open.
    #[arg(long = "queue", value_name = "QUEUE")]
    queues: Vec<QueueName>,
    /// Says what would be copied, and changes nothing.
    #[arg(long, conflicts_with = "release")]
    dry_run: bool,
    /// Opens what was closed in --from for a copy. What was done in the target since is not brought back.
    #[arg(long)]
    release: bool,
    /// Prints JSON.
    #[arg(long)]
    json: bool,
}

/// A store, and its name for the refusals of the other one.
struct Side {
    store: SharedStore,
    name: String,
}

async fn open(url: &str, existing: bool) -> anyhow::Result<Side> {
    let name = match url.parse()? {
        StoreUrl::Embedded(path) => format!("embedded:{}", std::path::absolute(path)?.display()),
        named => named.to_string(),
    };
    let store = if !is_store(url) {
        Remote::at(url).connect().await?
    } else if existing {
        Store::open_existing(url, StoreOptions::default()).await?.admin().clone()
    } else {
        Store::open(url, StoreOptions::default()).await?.admin().clone()
    };
    Ok(Side { store, name })
}

/// Runs `hapax copy`.
pub async fn run(args: CopyArgs) -> anyhow::Result<()> {
    let output = Output::new(args.json);
    let from = open(&args.from, true).await?;
    let ended = match &args.to {
        None => release(&args, &from, output).await,
        Some(to) => {
            // A dry run makes no store.
            let to = open(to, args.dry_run).await?;
            let ended = copy_to(&args, &from, &to, output).await;
            to.store.close().await?;
            ended
        }
    };
    from.store.close().await?;
    ended
}

async fn release(args: &CopyArgs, from: &Side, output: Output) -> anyhow::Result<()> {
    let opened = copy::release(&from.store, &args.queues, &Remote::user_name()).await?;
    let sentence = match opened.as_slice() {
        [] => format!("nothing was closed in {}", from.name),
        opened => format!("open again in {}: {}", from.name, opened.join(", ")),
    };
    output.done(&sentence, &serde_json::json!({ "opened": opened }))
}

async fn copy_to(args: &CopyArgs, from: &Side, to: &Side, output: Output) -> anyhow::Result<()> {
    let request = CopyRequest {
        queues: args.queues.clone(),
        from: from.name.clone(),
        to: to.name.clone(),
        by: Remote::user_name(),
    };
    if from.name == to.name {
        return Err(usage(format!("--from and --to both name {}", from.name)));
    }
    if args.dry_run {
        let plan = copy::plan(&from.store, &to.store, &request).await?;
        return show_plan(&plan, &request, output);
    }
    let began = Instant::now();
    let mut shown = Shown::default();
    let report = copy::copy(&from.store, &to.store, &request, &mut |step| shown.show(step)).await;
    shown.end();
    show_report(&report?, &request, began.elapsed(), output)
}

fn show_plan(plan: &CopyPlan, request: &CopyRequest, output: Output) -> anyhow::Result<()> {
    let whole = request.queues.is_empty();
    if output.is_json() {
        let queue = |queue: &copy::PlannedQueue| {
            serde_json::json!({
                "queue": queue.info.name, "messages": queue.messages, "in_flight": queue.in_flight,
                "complete": queue.complete,
            })
        };
        let queues: Vec<_> = plan.queues.iter().map(queue).collect();
        let (entries, open) = (plan.entries, plan.open_entries);
        return output
            .value(&serde_json::json!({ "queues": queues, "entries": entries, "open_entries": open }));
    }
    let mut rows = vec![];
    if whole {
        let done = if plan.ledger_complete { "copied before" } else { "" };
        let open = format!("{} held or in doubt", plan.open_entries);
        rows.push(vec!["the ledger".to_owned(), format!("{} entries", plan.entries), open, done.to_owned()]);
    }
    for queue in &plan.queues {
        let done = if queue.complete { "copied before" } else { "" };
        let (messages, in_flight) = (queue.messages, queue.in_flight);
        rows.push(vec![
            format!("queue {}", queue.info.name),
            format!("{messages} messages"),
            format!("{in_flight} in flight"),
            done.to_owned(),
        ]);
    }
    output.rows(&[], rows)?;
    note(&format!(
        "nothing was changed; without --dry-run {} is closed and copied to {}",
        request.from, request.to
    ));
    Ok(())
}

fn show_report(
    report: &CopyReport,
    request: &CopyRequest,
    took: Duration,
    output: Output,
) -> anyhow::Result<()> {
    if output.is_json() {
        output.value(report)?;
    } else {
        let row = |part: &copy::CopiedPart| {
            vec![
                part.what.clone(),
                format!("{} items", part.items),
                format!("{} remembered ids", part.remembered),
                format!("{} added", part.added),
                part.checksum.clone().unwrap_or_else(|| "copied before".to_owned()),
            ]
        };
        output.rows(
            &["", "items", "deduplication ids", "added", "checksum"],
            report.parts.iter().map(row).collect(),
        )?;
    }
    for damaged in &report.damaged {
        note(&format!("not copied: {damaged}"));
    }
    let (items, added, took) = (report.items(), report.added(), took.as_secs_f64());
    if report.parts.iter().all(|part| part.checksum.is_none()) {
        note("everything was copied before; nothing was added");
    } else {
        note(&format!("{items} items are equal in both stores, {added} were added now, in {took:.1} s"));
    }
    note(&format!("use {} from now on; {} is closed", request.to, request.from));
    note(&format!(
        "the way back is `hapax copy --release --from {}`, without what {} does from now on",
        request.from, request.to
    ));
    match report.damaged.len() {
        0 => Ok(()),
        count => anyhow::bail!("{count} damaged items were not copied"),
    }
}

/// What was shown last: a bar on a terminal, lines otherwise.
#[derive(Default)]
struct Shown {
    bar: Option<(String, ProgressBar)>,
    line: Option<Instant>,
}

impl Shown {
    fn end(&mut self) {
        if let Some((_, bar)) = self.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn show(&mut self, step: &CopyProgress) {
        match step {
            CopyProgress::Page { what, items, total } => self.page(what, *items, *total),
            CopyProgress::Closed(what) => self.note(&format!("{what} is closed in the source")),
            CopyProgress::Verified(what) => self.note(&format!("{what} is equal in both stores")),
            CopyProgress::Opened(what) => self.note(&format!("{what} is open in the target")),
            CopyProgress::Created(_) | CopyProgress::Completed(_) => {}
        }
    }

    fn note(&mut self, line: &str) {
        self.end();
        note(line);
    }

    fn page(&mut self, what: &str, items: u64, total: u64) {
        if total == 0 {
            return;
        }
        if self.bar.as_ref().is_none_or(|(shown, _)| shown != what) {
            self.end();
            self.bar = Some((what.to_owned(), output::progress(Some(total), format!("copying {what}"))));
            self.line = None;
        }
        if let Some((_, bar)) = &self.bar {
            bar.set_length(total);
            bar.set_position(items);
            if bar.is_hidden() && self.line.is_none_or(|line| line.elapsed() >= LINE_EVERY) {
                self.line = Some(Instant::now());
                note(&format!("{what}: {items} of {total} items"));
            }
        }
    }
}
