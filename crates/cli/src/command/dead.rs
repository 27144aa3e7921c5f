//! `hapax dead …`: dead letters and their redrive.

use std::time::Duration;

use std::collections::BTreeSet;

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use hapax::core::store::SharedStore;
use hapax::core::validate::BATCH_MAX;
use hapax::core::{Browse, Discarded, FailureCause, MessageView, RedriveState, RedriveTask, StoreError};
use hapax::{MessageId, QueueName, RedriveFilter, RedriveRequest};
use hapax_client::wire::MessageItem;
use serde_json::json;

use crate::confirm::Confirm;
use crate::json;
use crate::output::{Output, note, progress};
use crate::remote::Remote;
use crate::text::{escape, messages, parse_word, show_body, show_time, word};
use crate::usage;

/// Poll interval for the progress of a running redrive.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Handles dead letters: messages out of attempts, or rejected.
#[derive(Debug, Args)]
pub struct DeadArgs {
    #[command(subcommand)]
    command: DeadCommand,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Subcommand)]
enum DeadCommand {
    /// Lists the dead letters of a dead-letter queue.
    #[command(after_help = "\
Examples:
  hapax dead list emails-dead
  hapax dead list emails-dead --limit 1000 --json

In a pipe a line has: id, source queue, cause, attempts, time of death, error, body.")]
    List {
        /// The dead-letter queue.
        queue: QueueName,
        /// Maximum count.
        #[arg(long, default_value_t = 100, value_name = "N")]
        limit: usize,
    },
    /// Shows one dead letter with its history.
    #[command(after_help = "Examples:\n  hapax dead show emails-dead 0190a3c2-7b1e-8def-8000-0000000000ff")]
    Show {
        /// The dead-letter queue.
        queue: QueueName,
        /// The message.
        id: MessageId,
    },
    /// Moves dead letters back to their source queues, or to another queue.
    #[command(after_help = "\
Examples:
  hapax dead redrive emails-dead
  hapax dead redrive emails-dead --cause expired --per-second 50
  hapax dead redrive emails-dead --error-contains 'timed out' --to emails-slow
  hapax dead redrive emails-dead --id 0190a3c2-7b1e-8def-8000-0000000000ff")]
    Redrive(RedriveArgs),
    /// Lists redrives out of a queue, running and ended: by whom, when, how many messages.
    #[command(after_help = "Examples:\n  hapax dead redrives emails-dead")]
    Redrives {
        /// The dead-letter queue.
        queue: QueueName,
    },
    /// Stops a running redrive; messages that it has moved stay moved.
    #[command(after_help = "Examples:\n  hapax dead cancel 7")]
    Cancel {
        /// The redrive's number.
        id: u64,
    },
    /// Deletes dead letters permanently.
    #[command(after_help = "\
Examples:
  hapax dead purge emails-dead
  hapax dead purge emails-dead --id 0190a3c2-7b1e-8def-8000-0000000000ff --yes")]
    Purge {
        /// The dead-letter queue.
        queue: QueueName,
        /// Only this message; may be repeated.
        #[arg(long)]
        id: Vec<MessageId>,
        #[command(flatten)]
        confirm: Confirm,
    },
}

#[derive(Debug, Args)]
struct RedriveArgs {
    /// The dead-letter queue.
    queue: QueueName,
    /// Moves the messages to this queue instead of their source queues.
    #[arg(long, value_name = "QUEUE")]
    to: Option<QueueName>,
    /// Only this message; may be repeated.
    #[arg(long)]
    id: Vec<MessageId>,
    /// Only those that died of this cause: retry, expired, rejected, damaged.
    #[arg(long, value_parser = parse_word::<FailureCause>)]
    cause: Option<FailureCause>,
    /// Only those that came from this queue.
    #[arg(long, value_name = "QUEUE")]
    source: Option<QueueName>,
    /// Only those whose last error contains this text.
    #[arg(long, value_name = "TEXT")]
    error_contains: Option<String>,
    /// Maximum messages per second, 1 to 10000 [default: 500].
    #[arg(long, value_name = "N")]
    per_second: Option<u32>,
    /// Starts the redrive and does not wait for its end.
    #[arg(long)]
    detach: bool,
}

pub async fn run(args: DeadArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    match args.command {
        DeadCommand::List { queue, limit } => list(&store, &queue, limit, out).await,
        DeadCommand::Show { queue, id } => show(&store, &queue, id, out).await,
        DeadCommand::Redrive(redrive) => {
            if redrive.detach && args.remote.is_store() {
                return Err(usage(
                    "--detach needs a server, which continues the redrive after this command has ended",
                ));
            }
            self::redrive(&store, redrive, out).await
        }
        DeadCommand::Redrives { queue } => {
            let tasks = store.redrives(&queue).await?;
            if out.is_json() {
                return out.value(&tasks);
            }
            let row = |task: &RedriveTask| {
                let to = task.to.as_ref().map_or("source", |to| to.as_str());
                let moved = format!("{} of {}", task.moved, task.total);
                let start = show_time(task.started_ms);
                vec![task.id.to_string(), word(&task.state), moved, to.to_owned(), start, escape(&task.by)]
            };
            out.rows(&["redrive", "state", "moved", "to", "started", "by"], tasks.iter().map(row).collect())
        }
        DeadCommand::Cancel { id } => {
            let task = store.cancel_redrive(id).await?;
            out.done(&format!("redrive {id} {}: {} moved", word(&task.state), task.moved), &task)
        }
        DeadCommand::Purge { queue, id, confirm } => purge(&store, &queue, id, confirm, out).await,
    }
}

async fn list(store: &SharedStore, queue: &QueueName, limit: usize, out: Output) -> anyhow::Result<()> {
    let mut dead: Vec<MessageView> = Vec::new();
    let mut after = None;
    while dead.len() < limit {
        let page = store.browse(queue, Browse { after, limit: 100, ..Browse::default() }).await?;
        dead.extend(page.items.into_iter().filter(|message| message.dead.is_some()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    dead.truncate(limit);
    if out.is_json() {
        return out.value(&json::messages(dead));
    }
    if dead.is_empty() {
        let policy = store.queue(queue).await?.config.dead_letter;
        let hint = policy.map(|p| format!(" Its own dead letters go to {}.", p.queue)).unwrap_or_default();
        note(&format!("No dead letters in {queue}.{hint}"));
        return Ok(());
    }
    let chars_max = if out.is_terminal() { 100 } else { usize::MAX };
    let row = |message: &MessageView| {
        let letter = message.dead.as_ref()?;
        let error = escape(letter.error.as_deref().unwrap_or("-"));
        let body = message.body.as_ref().map_or("(damaged)".to_owned(), |body| show_body(body, chars_max));
        Some(vec![
            message.id.to_string(),
            letter.source.to_string(),
            letter.cause.as_str().to_owned(),
            letter.attempts.to_string(),
            show_time(letter.died_ms),
            error,
            body,
        ])
    };
    let heading = ["message", "from", "cause", "attempts", "died", "error", "body"];
    out.rows(&heading, dead.iter().filter_map(row).collect())
}

async fn show(store: &SharedStore, queue: &QueueName, id: MessageId, out: Output) -> anyhow::Result<()> {
    let page = store.browse(queue, Browse { id: Some(id), limit: 1, ..Browse::default() }).await?;
    let message = page.items.into_iter().next();
    let message = message.with_context(|| format!("queue {queue} has no message {id}"))?;
    if out.is_json() {
        return out.value(&MessageItem::from(message));
    }
    let mut rows = vec![
        ("message", id.to_string()),
        ("state", word(&message.state)),
        ("sent", show_time(message.sent_ms)),
    ];
    if let Some(dead) = &message.dead {
        rows.push(("came from", dead.source.to_string()));
        rows.push(("cause", dead.cause.as_str().to_owned()));
        rows.push(("error", escape(dead.error.as_deref().unwrap_or("-"))));
        rows.push(("attempts", dead.attempts.to_string()));
        rows.push(("first received", show_time(dead.first_received_ms)));
        rows.push(("died", show_time(dead.died_ms)));
    }
    for (name, attribute) in &message.attributes {
        let value = attribute.as_text().map_or_else(|| "(binary)".to_owned(), escape);
        rows.push(("attribute", format!("{} = {value}", escape(name))));
    }
    for failed in &message.history {
        let (at, cause) = (show_time(failed.at_ms), failed.cause.as_str());
        let error = failed.error.as_deref().unwrap_or("-");
        let who = failed.consumer.as_deref().map(|who| format!(" ({who})")).unwrap_or_default();
        let text = format!("attempt {} {at} {cause}{who}: {error}", failed.attempt);
        rows.push(("history", escape(&text)));
    }
    rows.push(("body", message.body.as_ref().map_or("(damaged)".into(), |body| show_body(body, usize::MAX))));
    out.rows(&[], rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect())
}

async fn redrive(store: &SharedStore, redrive: RedriveArgs, out: Output) -> anyhow::Result<()> {
    let filter = RedriveFilter {
        ids: redrive.id,
        cause: redrive.cause,
        source: redrive.source,
        error_contains: redrive.error_contains,
        ..RedriveFilter::default()
    };
    let (from, to, per_second) = (redrive.queue, redrive.to, redrive.per_second);
    let request = RedriveRequest { from: from.clone(), to, filter, per_second, by: Remote::user_name() };
    let mut task = store.start_redrive(request).await?;
    if redrive.detach {
        return out.done(&format!("redrive {} of {} started", task.id, messages(task.total)), &task);
    }
    let bar = progress(Some(task.total), "redriving");
    while task.state == RedriveState::Running {
        bar.set_position(task.moved + task.left);
        tokio::time::sleep(POLL_INTERVAL).await;
        let tasks = store
            .redrives(&from)
            .await
            .with_context(|| format!("redrive {} continues in the server", task.id))?;
        let same = tasks.into_iter().find(|other| other.id == task.id);
        task = same.with_context(|| format!("redrive {} is gone: was queue {from} deleted?", task.id))?;
    }
    bar.finish_and_clear();
    let RedriveTask { id, moved, left, .. } = task;
    match task.state {
        RedriveState::Failed => {
            let failure = task.failure.unwrap_or_default();
            bail!("redrive {id} failed: {failure}; {moved} moved, {left} left")
        }
        RedriveState::Cancelled => bail!("redrive {id} was cancelled; {moved} moved, {left} left"),
        RedriveState::Completed | RedriveState::Running => {
            out.done(&format!("{moved} moved, {left} left"), &task)
        }
    }
}

/// Deletes messages, and says which were left because a consumer has them, and how many are not there.
pub async fn discard(
    store: &SharedStore,
    queue: &QueueName,
    ids: &[MessageId],
) -> Result<Discarded, StoreError> {
    let mut all = Discarded::default();
    let ids: BTreeSet<&MessageId> = ids.iter().collect();
    let ids: Vec<MessageId> = ids.into_iter().copied().collect();
    for batch in ids.chunks(BATCH_MAX) {
        let Discarded { count, in_flight } =
            store.discard(queue, batch.to_vec(), &Remote::user_name()).await?;
        all.count += count;
        for id in &in_flight {
            note(&format!("message {id} is in flight and was left; discard it when its lease is over"));
        }
        all.in_flight.extend(in_flight);
    }
    match (ids.len() as u64).saturating_sub(all.count + all.in_flight.len() as u64) {
        0 => {}
        1 => note(&format!("1 message was not found in {queue}")),
        missing => note(&format!("{missing} messages were not found in {queue}")),
    }
    Ok(all)
}

async fn purge(
    store: &SharedStore,
    queue: &QueueName,
    ids: Vec<MessageId>,
    confirm: Confirm,
    out: Output,
) -> anyhow::Result<()> {
    let what = if ids.is_empty() { "everything".to_owned() } else { messages(ids.len() as u64) };
    confirm.ask(&format!("Delete {what} of queue {queue} for good?"))?;
    let purged =
        if ids.is_empty() { store.purge(queue).await? } else { discard(store, queue, &ids).await?.count };
    out.done(&format!("{} deleted", messages(purged)), &json!({ "name": queue, "purged": purged }))
}
