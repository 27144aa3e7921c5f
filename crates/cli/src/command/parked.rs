//! `hapax parked …`: messages and groups that wait for an operator's decision.

use clap::{Args, Subcommand};
use hapax::core::store::SharedStore;
use hapax::core::{Browse, MessageState, MessageView};
use hapax::{GroupId, MessageId, QueueName};
use serde_json::json;

use super::dead::discard;
use crate::confirm::Confirm;
use crate::json;
use crate::output::{Output, note};
use crate::remote::Remote;
use crate::text::{self, escape, show_body, show_time};

/// Maximum count of messages that one call releases, and of one page.
const BATCH_MAX: usize = 100;

/// Handles parked messages and halted groups, which wait for your decision.
#[derive(Debug, Args)]
pub struct ParkedArgs {
    #[command(subcommand)]
    command: ParkedCommand,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Subcommand)]
enum ParkedCommand {
    /// Lists the parked messages of a queue, and its halted groups.
    #[command(after_help = "Examples:\n  hapax parked list emails\n  hapax parked list emails --json")]
    List {
        /// The queue.
        queue: QueueName,
    },
    /// Makes parked messages ready again, with their attempts at zero, or releases a halted group.
    #[command(after_help = "\
Examples:
  hapax parked release emails 0190a3c2-7b1e-8def-8000-0000000000ff
  hapax parked release emails --all
  hapax parked release orders.fifo --group customer-7")]
    Release {
        /// The queue.
        queue: QueueName,
        #[command(flatten)]
        which: ParkedSelection,
    },
    /// Deletes parked messages permanently.
    #[command(after_help = "\
Examples:
  hapax parked discard emails 0190a3c2-7b1e-8def-8000-0000000000ff
  hapax parked discard emails --all --yes")]
    Discard {
        /// The queue.
        queue: QueueName,
        /// The messages.
        #[arg(required_unless_present = "all")]
        id: Vec<MessageId>,
        /// All parked messages.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        #[command(flatten)]
        confirm: Confirm,
    },
}

#[derive(Debug, Args)]
#[group(required = true)]
struct ParkedSelection {
    /// The messages.
    id: Vec<MessageId>,
    /// All parked messages.
    #[arg(long, conflicts_with = "id")]
    all: bool,
    /// A FIFO group that is halted because one of its messages died.
    #[arg(long, conflicts_with_all = ["id", "all"])]
    group: Option<GroupId>,
}

pub async fn run(args: ParkedArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    match args.command {
        ParkedCommand::List { queue } => list(&store, &queue, out).await,
        ParkedCommand::Release { queue, which: ParkedSelection { group: Some(group), .. } } => {
            store.release_group(&queue, &group).await?;
            let json = json!({ "name": queue, "group": group, "released": true });
            out.done(&format!("group {group} released"), &json)
        }
        ParkedCommand::Release { queue, which } => {
            let ids = if which.all { ids(&parked(&store, &queue).await?) } else { which.id };
            let mut released = 0;
            for batch in ids.chunks(BATCH_MAX) {
                released += store.release(&queue, batch.to_vec()).await?;
            }
            let json = json!({ "name": queue, "released": released });
            out.done(&format!("{} released", text::messages(released)), &json)
        }
        ParkedCommand::Discard { queue, id, all, confirm } => {
            let ids = if all { ids(&parked(&store, &queue).await?) } else { id };
            confirm
                .ask(&format!("Delete {} of queue {queue} for good?", text::messages(ids.len() as u64)))?;
            let discarded = discard(&store, &queue, &ids).await?.count;
            let json = json!({ "name": queue, "discarded": discarded });
            out.done(&format!("{} deleted", text::messages(discarded)), &json)
        }
    }
}

fn ids(messages: &[MessageView]) -> Vec<MessageId> {
    messages.iter().map(|message| message.id).collect()
}

async fn parked(store: &SharedStore, queue: &QueueName) -> anyhow::Result<Vec<MessageView>> {
    let (mut found, mut after) = (Vec::new(), None);
    loop {
        let browse =
            Browse { state: Some(MessageState::Parked), after, limit: BATCH_MAX, ..Browse::default() };
        let page = store.browse(queue, browse).await?;
        found.extend(page.items);
        after = page.next;
        if after.is_none() {
            return Ok(found);
        }
    }
}

async fn list(store: &SharedStore, queue: &QueueName, out: Output) -> anyhow::Result<()> {
    let messages = parked(store, queue).await?;
    let groups = store.halted_groups(queue).await?;
    if out.is_json() {
        return out.value(&json!({ "messages": json::messages(messages), "halted_groups": groups }));
    }
    for group in &groups {
        note(&format!("group {group} is halted; hapax parked release {queue} --group {group} releases it"));
    }
    if messages.is_empty() {
        note(&format!("No parked messages in {queue}."));
        return Ok(());
    }
    let chars_max = if out.is_terminal() { 100 } else { usize::MAX };
    let row = |message: &MessageView| {
        let (cause, error) = match &message.parked {
            Some((cause, error)) => (cause.as_str(), error.as_deref().unwrap_or("-")),
            None => ("-", "-"),
        };
        let body = message.body.as_ref().map_or("(damaged)".to_owned(), |body| show_body(body, chars_max));
        let (sent, attempts) = (show_time(message.sent_ms), message.attempts.to_string());
        vec![message.id.to_string(), cause.to_owned(), attempts, sent, escape(error), body]
    };
    out.rows(&["message", "cause", "attempts", "sent", "error", "body"], messages.iter().map(row).collect())
}
