//! `hapax queues` and `hapax queue …`.

use clap::{Args, Subcommand};
use hapax::core::store::SharedStore;
use hapax::core::{QueueInfo, QueueStats, RedriveAllow};
use hapax::{MessageId, QueueConfig, QueueKind, QueueName, QueuePair};
use hapax_client::wire::pause_reason_problem;
use serde_json::json;

use super::dead::discard;
use super::policy::PolicyArgs;
use crate::confirm::Confirm;
use crate::json::QueueReport;
use crate::output::{Output, note};
use crate::remote::Remote;
use crate::text::{escape, messages, show_bytes, show_ms, show_time, word};
use crate::tier;

/// Lists queues and their message counts.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax queues
  hapax queues --json | jq -r '.[] | select(.stats.ready > 1000) | .name'

In a pipe a line has: name, ready, in flight, delayed, parked, bytes, dead-letter queue.")]
pub struct QueuesArgs {
    #[command(flatten)]
    remote: Remote,
}

/// Creates, changes, empties, deletes and shows queues.
#[derive(Debug, Args)]
pub struct QueueArgs {
    #[command(subcommand)]
    command: QueueCommand,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Subcommand)]
enum QueueCommand {
    /// Creates a queue. A name that ends in .fifo creates a FIFO queue.
    #[command(after_help = "\
Examples:
  hapax queue create emails --dead-letters
  hapax queue create charges --dead-letters --tier effectively-once --key-pointer /order --lease 2m
  hapax queue create orders.fifo --dead-letters --dedup-content
  hapax queue create failed --retention 14d
  hapax queue create urgent --dead-letter failed --max-attempts 5")]
    Create {
        /// Its name.
        queue: QueueName,
        /// Also creates a dead-letter queue, NAME-dead, which keeps messages for 14 days.
        #[arg(long, conflicts_with_all = ["dead_letter", "no_dead_letter"])]
        dead_letters: bool,
        #[command(flatten)]
        policy: PolicyArgs,
    },
    /// Changes a queue's policy; other fields stay as they are.
    #[command(after_help = "\
Examples:
  hapax queue set emails --lease 5m
  hapax queue set emails --no-dead-letter")]
    Set {
        /// The queue.
        queue: QueueName,
        #[command(flatten)]
        policy: PolicyArgs,
    },
    /// Deletes a queue and everything in it.
    #[command(after_help = "Examples:\n  hapax queue delete emails\n  hapax queue delete emails --yes")]
    Delete {
        /// The queue.
        queue: QueueName,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Deletes all messages in a queue.
    #[command(after_help = "Examples:\n  hapax queue purge emails\n  hapax queue purge emails --yes")]
    Purge {
        /// The queue.
        queue: QueueName,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Stops deliveries from a queue until it is resumed; it still accepts messages.
    #[command(
        after_help = "Examples:\n  hapax queue pause emails\n  hapax queue pause emails --reason 'mail server upgrade'"
    )]
    Pause {
        /// The queue.
        queue: QueueName,
        /// What for; shown in listings. At most 1000 characters.
        #[arg(long, value_name = "TEXT", value_parser = parse_reason)]
        reason: Option<String>,
    },
    /// Makes a paused queue deliver messages again.
    #[command(after_help = "Examples:\n  hapax queue resume emails")]
    Resume {
        /// The queue.
        queue: QueueName,
    },
    /// Deletes waiting or parked messages by id, permanently; messages in flight are not deleted.
    #[command(
        after_help = "Examples:\n  hapax queue discard emails 0190a3c2-7b1e-8def-8000-0000000000ff\n  hapax queue discard emails ID ID --yes"
    )]
    Discard {
        /// The queue.
        queue: QueueName,
        /// The messages.
        #[arg(required = true)]
        id: Vec<MessageId>,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Shows a queue's policy and counters.
    #[command(after_help = "Examples:\n  hapax queue show emails\n  hapax queue show emails --json")]
    Show {
        /// The queue.
        queue: QueueName,
    },
}

fn parse_reason(text: &str) -> Result<String, String> {
    pause_reason_problem(text).map_or_else(|| Ok(text.to_owned()), Err)
}

/// Runs `hapax queues`.
pub async fn list(args: QueuesArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    let all = store.queues().await?;
    let names: Vec<QueueName> = all.iter().map(|info| info.name.clone()).collect();
    let counted = store.stats_of(&names).await?;
    // A queue that was deleted meanwhile is not an error.
    let queues: Vec<_> =
        all.into_iter().zip(counted).filter_map(|(info, stats)| Some((info, stats?))).collect();
    let status = store.status().await?;
    for trouble in status.stopped.iter().chain(&status.warnings) {
        note(&format!("warning: {}", escape(trouble)));
    }
    if out.is_json() {
        let reports = queues.into_iter().map(|(info, stats)| QueueReport::new(info, stats));
        return out.value(&reports.collect::<Vec<_>>());
    }
    if queues.is_empty() {
        note("No queues yet. Make one: hapax queue create NAME");
        return Ok(());
    }
    let row = |(info, stats): &(QueueInfo, QueueStats)| {
        let count = |n: u64| n.to_string();
        let dead = info.config.dead_letter.as_ref().map_or("-", |dead| dead.queue.as_str());
        let bytes = if out.is_terminal() { show_bytes(stats.bytes) } else { count(stats.bytes) };
        let counts = [stats.ready, stats.in_flight, stats.delayed, stats.parked].map(count);
        let name = if out.is_terminal() && info.paused.is_some() {
            format!("{} (paused)", info.name)
        } else {
            info.name.to_string()
        };
        [vec![name], counts.to_vec(), vec![bytes, dead.to_owned()]].concat()
    };
    let heading = ["queue", "ready", "in flight", "delayed", "parked", "size", "dead letters to"];
    out.rows(&heading, queues.iter().map(row).collect())
}

/// Runs `hapax queue …`.
pub async fn run(args: QueueArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    match args.command {
        QueueCommand::Create { queue, dead_letters, policy } => {
            let kind = if queue.is_fifo() { QueueKind::Fifo } else { QueueKind::Standard };
            let mut config = QueueConfig::of(kind);
            policy.apply_to(&mut config);
            let (created, dead) = if dead_letters {
                let pair = QueuePair::new(queue.clone(), config)?;
                let created = pair.create(&store).await?;
                config = pair.config;
                (created, Some(pair.dead_name))
            } else {
                (store.create_queue(&queue, config.clone()).await?, None)
            };
            print_warnings(&tier::warnings(store.as_ref(), &queue, &config).await);
            let sentence = if created { "created" } else { "was there already, with the same policy" };
            let with =
                dead.as_ref().map(|dead| format!("; its dead letters go to {dead}")).unwrap_or_default();
            let json = json!({ "name": queue, "created": created, "dead_letters": dead });
            out.done(&format!("{queue} {sentence}{with}"), &json)
        }
        QueueCommand::Set { queue, policy } => {
            let QueueInfo { mut config, revision, .. } = store.queue(&queue).await?;
            policy.apply_to(&mut config);
            store.set_queue(&queue, config.clone(), Some(revision)).await?;
            print_warnings(&tier::warnings(store.as_ref(), &queue, &config).await);
            out.done(&format!("{queue} changed"), &json!({ "name": queue, "config": config }))
        }
        QueueCommand::Delete { queue, confirm } => {
            let held = message_count(&store, &queue).await?;
            confirm.ask(&format!("Delete queue {queue} and {} in it?", messages(held)))?;
            store.delete_queue(&queue).await?;
            out.done(&format!("{queue} deleted"), &json!({ "name": queue, "deleted": true }))
        }
        QueueCommand::Purge { queue, confirm } => {
            let held = message_count(&store, &queue).await?;
            confirm.ask(&format!("Delete {} of queue {queue}?", messages(held)))?;
            let purged = store.purge(&queue).await?;
            out.done(&format!("{} deleted", messages(purged)), &json!({ "name": queue, "purged": purged }))
        }
        QueueCommand::Pause { queue, reason } => {
            store.pause_queue(&queue, &Remote::user_name(), reason.as_deref()).await?;
            out.done(&format!("{queue} is paused"), &json!({ "name": queue, "paused": true }))
        }
        QueueCommand::Resume { queue } => {
            store.resume_queue(&queue, &Remote::user_name()).await?;
            out.done(&format!("{queue} hands out messages"), &json!({ "name": queue, "paused": false }))
        }
        QueueCommand::Discard { queue, id, confirm } => {
            confirm.ask(&format!("Delete {} of queue {queue} for good?", messages(id.len() as u64)))?;
            let discarded = discard(&store, &queue, &id).await?;
            let json =
                json!({ "name": queue, "discarded": discarded.count, "in_flight": discarded.in_flight });
            out.done(&format!("{} deleted", messages(discarded.count)), &json)
        }
        QueueCommand::Show { queue } => {
            let (info, stats) = (store.queue(&queue).await?, store.stats(&queue).await?);
            if out.is_json() { out.value(&QueueReport::new(info, stats)) } else { show(&info, &stats, out) }
        }
    }
}

/// Prints warnings about a queue that was created or changed; they are not a failure of the command.
fn print_warnings(warnings: &[String]) {
    for warning in warnings {
        note(&format!("warning: {}", escape(warning)));
    }
}

async fn message_count(store: &SharedStore, queue: &QueueName) -> anyhow::Result<u64> {
    let stats = store.stats(queue).await?;
    Ok(stats.ready + stats.delayed + stats.in_flight + stats.parked)
}

fn show(info: &QueueInfo, stats: &QueueStats, out: Output) -> anyhow::Result<()> {
    let (config, totals) = (&info.config, &stats.totals);
    let retry = match config.retry.base_ms {
        0 => "at once".to_owned(),
        base_ms => {
            let longest = show_ms(config.retry.ceiling_ms(u32::MAX));
            format!("from {} up to {longest}, jitter {}", show_ms(base_ms), word(&config.retry.jitter))
        }
    };
    let attempts = match config.retry.limit() {
        Some(max) => format!("at most {max}"),
        None => "no limit".to_owned(),
    };
    let dead = config.dead_letter.as_ref().map_or("none".to_owned(), |dead| dead.queue.to_string());
    let allow = match &config.redrive_allow {
        RedriveAllow::Queues(queues) => queues.iter().map(QueueName::as_str).collect::<Vec<_>>().join(", "),
        other => word(other),
    };
    let dedup = match config.dedup.window_ms {
        0 => "off".to_owned(),
        window_ms => {
            let by = if config.dedup.content_based { "id or content" } else { "id" };
            format!("by {by} for {}, within the {}", show_ms(window_ms), word(&config.dedup.scope))
        }
    };
    let paused = info.paused.as_ref().map_or("no".to_owned(), |paused| {
        let why = paused.reason.as_ref().map(|reason| format!(": {}", escape(reason))).unwrap_or_default();
        format!("since {} by {}{why}", show_time(paused.since_ms), escape(&paused.by))
    });
    let limit = |limit: Option<u64>| limit.map_or("none".to_owned(), |limit| limit.to_string());
    let tags: Vec<_> = config.tags.iter().map(|(name, value)| escape(&format!("{name}={value}"))).collect();
    let rows = [
        ("name", info.name.to_string()),
        ("kind", word(&config.kind)),
        ("tier", word(&config.tier)),
        ("created", show_time(info.created_ms)),
        ("changed", show_time(info.modified_ms)),
        ("revision", info.revision.to_string()),
        ("paused", paused),
        ("lease", show_ms(config.lease_ms)),
        ("retention", show_ms(config.retention_ms)),
        ("delay", show_ms(config.delay_ms)),
        ("wait", show_ms(config.wait_ms)),
        ("largest message", show_bytes(config.message_bytes_max)),
        ("retry", retry),
        ("attempts", attempts),
        ("dead letters to", dead),
        ("dead letters from", allow),
        ("on dead", word(&config.on_dead)),
        ("deduplication", dedup),
        ("most messages", limit(config.quota.messages_max)),
        ("most bytes", limit(config.quota.bytes_max)),
        ("key pointer", config.key_pointer.as_deref().map_or("none".to_owned(), escape)),
        ("tags", tags.join(", ")),
        ("ready", stats.ready.to_string()),
        ("in flight", stats.in_flight.to_string()),
        ("delayed", stats.delayed.to_string()),
        ("parked", stats.parked.to_string()),
        ("bytes", stats.bytes.to_string()),
        ("oldest sent", stats.oldest_sent_ms.map_or("-".to_owned(), show_time)),
        ("sent since start", totals.sent.to_string()),
        ("duplicates suppressed", totals.duplicates.to_string()),
        ("delivered", totals.delivered.to_string()),
        ("acked", totals.acked.to_string()),
        ("retried", totals.retried.to_string()),
        ("leases run out", totals.expired.to_string()),
        ("dead", totals.dead.to_string()),
        ("stale receipts refused", totals.stale.to_string()),
    ];
    let rows = rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    out.rows(&[], rows)
}
