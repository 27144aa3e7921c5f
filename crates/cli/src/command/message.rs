//! `hapax message show` and `hapax why`: a message's life, and the chain of causes behind it.

use anyhow::{Context as _, bail};
use clap::{Args, Subcommand};
use hapax::core::StoreError;
use hapax::core::store::SharedStore;
use hapax::{IdempotencyKey, MessageId, QueueName};
use hapax_observe::life::{Event, Moment};
use hapax_observe::{Story, story};

use crate::output::Output;
use crate::remote::Remote;
use crate::text::{escape, show_ms, show_time_ms, word};

/// Shows messages.
#[derive(Debug, Args)]
pub struct MessageArgs {
    #[command(subcommand)]
    command: MessageCommand,
    #[command(flatten)]
    remote: Remote,
}

#[derive(Debug, Subcommand)]
enum MessageCommand {
    /// Shows what happened to a message: deliveries, returns, refusals, claims of its key, its death.
    #[command(after_help = "\
Examples:
  hapax message show emails 0190a3c2-7b1e-8def-8000-0000000000ff
  hapax message show emails 0190a3c2-7b1e-8def-8000-0000000000ff --json

Kept is what happened after a message's first delivery, for up to seven days and 3 MiB in all; of messages that were delivered
once and acked, one in a thousand. In a pipe a line has: time, event, details.")]
    Show {
        /// The queue.
        queue: QueueName,
        /// The message.
        id: MessageId,
    },
}

/// Explains why a message ran twice, or why it did not.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax why payments 0190a3c2-7b1e-8def-8000-0000000000ff
  hapax why payments order-7
  hapax why payments order-7 --json

One sentence for each link of the chain of causes; the last ones say what to do.")]
pub struct WhyArgs {
    /// The queue.
    queue: QueueName,
    /// The message's id, or its idempotency key.
    id_or_key: String,
    #[command(flatten)]
    remote: Remote,
}

/// A server that tells stories, or a store that is read directly.
enum Teller {
    Server(hapax_client::Client),
    Store(SharedStore),
}

impl Teller {
    async fn of(remote: &Remote) -> anyhow::Result<Self> {
        Ok(if remote.is_store() {
            Self::Store(remote.connect().await?)
        } else {
            Self::Server(remote.client().await?)
        })
    }

    async fn story(&self, queue: &QueueName, id: MessageId) -> anyhow::Result<Option<Story>> {
        match self {
            Self::Server(client) => match client.story(queue, id).await {
                Ok(story) => Ok(Some(story)),
                Err(hapax::AdminError::NotFound(_)) => Ok(None),
                Err(error) => Err(error.into()),
            },
            Self::Store(store) => Ok(story::of_message(store.as_ref(), None, queue, id).await?),
        }
    }

    async fn key_stories(&self, queue: &QueueName, key: &IdempotencyKey) -> Result<Vec<Story>, StoreError> {
        match self {
            Self::Server(client) => client.key_stories(queue, key).await,
            Self::Store(store) => story::of_key(store.as_ref(), None, queue, key).await,
        }
    }
}

pub async fn run(args: MessageArgs) -> anyhow::Result<()> {
    let MessageCommand::Show { queue, id } = args.command;
    let out = args.remote.output();
    let story = Teller::of(&args.remote).await?.story(&queue, id).await?;
    let story = story.with_context(|| {
        format!("nothing is known about message {id} in queue {queue}: it is not there, and nothing unusual was kept about it")
    })?;
    if out.is_json() {
        return out.value(&story);
    }
    print(&story, out)
}

pub async fn why(args: WhyArgs) -> anyhow::Result<()> {
    let WhyArgs { queue, id_or_key, remote } = args;
    let (out, teller) = (remote.output(), Teller::of(&remote).await?);
    let mut stories = Vec::new();
    if let Ok(id) = id_or_key.parse::<MessageId>() {
        stories.extend(teller.story(&queue, id).await?);
    }
    if stories.is_empty() {
        let key = IdempotencyKey::new(&id_or_key)?;
        stories = teller.key_stories(&queue, &key).await?;
    }
    if stories.is_empty() {
        bail!(
            "nothing is known about {} in queue {queue}: no such message is there, and nothing unusual was kept about it",
            escape(&id_or_key)
        );
    }
    if out.is_json() {
        return out.value(&stories);
    }
    let mut text = String::new();
    for story in &stories {
        if stories.len() > 1 {
            let head = story.id.map_or_else(|| "The key".to_owned(), |id| format!("Message {id}"));
            text.push_str(&head);
            text.push('\n');
        }
        for sentence in &story.because {
            text.push_str(&escape(sentence));
            text.push('\n');
        }
    }
    crate::output::raw(&text)
}

fn print(story: &Story, out: Output) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    let mut fact = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            rows.push(vec![String::new(), name.to_owned(), value]);
        }
    };
    fact("message", story.id.map(|id| id.to_string()));
    fact("key", story.key.as_ref().map(|key| escape(key.as_str())));
    fact("state", Some(story.state.as_ref().map_or_else(|| "not in the queue".to_owned(), word)));
    fact("its key is", story.entry.as_ref().map(word));
    if let Some(sent_ms) = story.sent_ms {
        rows.push(vec![show_time_ms(sent_ms), "sent".to_owned(), String::new()]);
    }
    for (at, moment) in story.moments.iter().enumerate() {
        if at == 1 && story.left_out > 0 {
            rows.push(vec![String::new(), "…".to_owned(), format!("{} events are left out", story.left_out)]);
        }
        let (event, details) = line(moment);
        rows.push(vec![show_time_ms(moment.at_ms), event, escape(&details)]);
    }
    out.rows(&["time", "event", ""], rows)
}

fn line(moment: &Moment) -> (String, String) {
    let text = |error: &Option<String>| error.clone().unwrap_or_default();
    let (event, details) = match &moment.event {
        Event::SentAgain => ("sent again", "the copy was suppressed".to_owned()),
        Event::Delivered { delivery, attempt, consumer, lease_ms } => {
            let consumer = consumer.as_ref().map_or_else(String::new, |name| format!(" to {name}"));
            let lease =
                if *lease_ms == 0 { String::new() } else { format!(", lease {}", show_ms(*lease_ms)) };
            ("delivered", format!("delivery {delivery}, attempt {attempt}{consumer}{lease}"))
        }
        Event::Expired { delivery, .. } => ("lease ran out", format!("of delivery {delivery}")),
        Event::CauseUnknown => ("delivered before", "elsewhere, or before the history began".to_owned()),
        Event::Acked { held_ms, .. } => {
            ("acked", held_ms.map_or_else(String::new, |ms| format!("after {}", show_ms(ms))))
        }
        Event::Returned { error, .. } => ("returned", text(error)),
        Event::Deferred { after_ms } => ("deferred", format!("for {}", show_ms(*after_ms))),
        Event::Died { error } => ("died", text(error)),
        Event::Parked { reason } => ("parked", text(reason)),
        Event::Refused { delivery, held_ms, code } => {
            ("settle refused", format!("delivery {delivery} after {}: {code}", show_ms(*held_ms)))
        }
        Event::Claimed { takeover: true } => ("key taken over", "an earlier run may have acted".to_owned()),
        Event::Claimed { takeover: false } => ("key claimed", "the handler may run".to_owned()),
        Event::Replayed => ("outcome replayed", "the handler did not run".to_owned()),
        Event::InProgress => ("key in progress", "another run has the key".to_owned()),
        Event::InDoubt => ("key in doubt", String::new()),
        Event::Mismatch => ("key reused", "for another content".to_owned()),
        Event::Completed => ("outcome recorded", String::new()),
        Event::StaleClaim => ("outcome refused", "the claim had passed to another run".to_owned()),
        other => return (word(other), String::new()),
    };
    (event.to_owned(), details)
}
