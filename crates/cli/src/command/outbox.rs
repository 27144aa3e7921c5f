//! `hapax outbox …`: what waits in an outbox, and decisions about parked messages.

use anyhow::bail;
use clap::{Args, Subcommand};
use hapax::core::outbox::{HeldMessage, OutboxMessage, OutboxStore, RouteStatus};
use hapax::relay;
use serde_json::{Value, json};

use crate::confirm::Confirm;
use crate::output::{Output, note};
use crate::text::{self, escape, show_body, show_time};

/// Maximum count of messages that are listed.
const LIST_MAX: usize = 1_000;

/// Shows an outbox, and decides about messages that a sink has refused.
#[derive(Debug, Args)]
pub struct OutboxArgs {
    #[command(subcommand)]
    command: OutboxCommand,
    /// The outbox: postgres://HOST/DATABASE (with its password in PGPASSWORD) or sqlite:PATH.
    #[arg(long, global = true, value_name = "URL", env = "HAPAX_OUTBOX", hide_env_values = true)]
    from: Option<String>,
    /// Prints JSON.
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum OutboxCommand {
    /// Shows each route: where it leads, how much waits, since when, and what is parked.
    #[command(
        after_help = "Examples:\n  hapax outbox status --from postgres://localhost/shop\n  hapax outbox status --json"
    )]
    Status,
    /// Lists messages that a route has not published.
    #[command(
        after_help = "Examples:\n  hapax outbox list --from postgres://localhost/shop\n  hapax outbox list --route orders --limit 20"
    )]
    List {
        /// The route.
        #[arg(long, default_value = "default")]
        route: String,
        /// Maximum count of messages.
        #[arg(long, default_value_t = 100)]
        limit: usize,
    },
    /// Lists messages that are set aside: parked ones, and with --all those that are tried again or wait behind one.
    #[command(
        after_help = "Examples:\n  hapax outbox parked --from postgres://localhost/shop\n  hapax outbox parked --all --json"
    )]
    Parked {
        /// Only this route.
        #[arg(long)]
        route: Option<String>,
        /// Also those that are not parked.
        #[arg(long)]
        all: bool,
    },
    /// Tries parked messages again; what waits behind them follows in order.
    #[command(
        after_help = "Examples:\n  hapax outbox retry 0b54ae53-3d9b-4a5f-9d7c-d2b0d0b3c0de\n  hapax outbox retry --all --route orders"
    )]
    Retry {
        /// The message.
        #[arg(required_unless_present = "all")]
        id: Option<String>,
        /// All parked messages of the route.
        #[arg(long, conflicts_with = "id")]
        all: bool,
        /// The route.
        #[arg(long, default_value = "default")]
        route: String,
    },
    /// Deletes a message that is set aside, without publishing it; what waits behind it follows.
    #[command(
        after_help = "Examples:\n  hapax outbox skip 0b54ae53-3d9b-4a5f-9d7c-d2b0d0b3c0de\n  hapax outbox skip 0b54ae53-3d9b-4a5f-9d7c-d2b0d0b3c0de --route orders --yes"
    )]
    Skip {
        /// The message.
        id: String,
        /// The route.
        #[arg(long, default_value = "default")]
        route: String,
        #[command(flatten)]
        confirm: Confirm,
    },
    /// Forgets a route that is not used any more: what it has not published is no longer kept for it.
    #[command(after_help = "Examples:\n  hapax outbox forget old-route --yes")]
    Forget {
        /// The route.
        route: String,
        #[command(flatten)]
        confirm: Confirm,
    },
}

pub async fn run(args: OutboxArgs) -> anyhow::Result<()> {
    let Some(from) = &args.from else {
        return Err(crate::usage("--from is missing: which outbox? For example postgres://localhost/shop"));
    };
    let outbox = relay::open_outbox(from).await?;
    let (outbox, out) = (outbox.as_ref(), Output::new(args.json));
    match args.command {
        OutboxCommand::Status => status(outbox, out).await,
        OutboxCommand::List { route, limit } => list(outbox, &route, limit, out).await,
        OutboxCommand::Parked { route, all } => parked(outbox, route.as_deref(), all, out).await,
        OutboxCommand::Retry { id, route, .. } => {
            let retried = outbox.retry(&route, id.as_deref(), &operator()).await?;
            if let (0, Some(id)) = (retried, &id) {
                bail!("route {route} has no parked message {id}; `hapax outbox parked` lists them");
            }
            out.done(&format!("{} tried again", text::messages(retried)), &json!({ "retried": retried }))
        }
        OutboxCommand::Skip { id, route, confirm } => {
            confirm.ask(&format!("Delete message {id} of route {route} unpublished?"))?;
            if !outbox.skip(&route, &id, &operator()).await? {
                bail!("route {route} has not set aside message {id}; `hapax outbox parked --all` lists them");
            }
            out.done("deleted", &json!({ "skipped": id }))
        }
        OutboxCommand::Forget { route, confirm } => {
            confirm.ask(&format!("Forget route {route}, with everything that it has not published?"))?;
            if !outbox.forget(&route, &operator()).await? {
                bail!("there is no route {route}; `hapax outbox status` lists them");
            }
            out.done("forgotten", &json!({ "forgotten": route }))
        }
    }
}

fn operator() -> String {
    std::env::var("USER").unwrap_or_else(|_| "operator".to_owned())
}

async fn status(outbox: &dyn OutboxStore, out: Output) -> anyhow::Result<()> {
    let routes = outbox.status().await?;
    if out.is_json() {
        return out.value(&routes);
    }
    if routes.is_empty() {
        note("No route is known: no relay has published from this outbox yet.");
    }
    let row = |status: &RouteStatus| {
        let oldest = status.oldest_ms.map_or("-".to_owned(), show_time);
        let number = |number: u64| number.to_string();
        vec![
            escape(&status.route),
            escape(&format!("{}; {}", status.target, status.after_a_crash)),
            escape(&status.topics.join(" ")),
            number(status.relays),
            number(status.lag),
            oldest,
            number(status.held),
            number(status.parked),
        ]
    };
    let heading = ["route", "sink", "topics", "relays", "waiting", "oldest", "set aside", "parked"];
    out.rows(&heading, routes.iter().map(row).collect())
}

fn message_json(message: &OutboxMessage) -> Value {
    let mut value = json!(message);
    value["body"] = json!(String::from_utf8_lossy(&message.body));
    value
}

async fn list(outbox: &dyn OutboxStore, route: &str, limit: usize, out: Output) -> anyhow::Result<()> {
    let messages = outbox.unpublished(route, limit.min(LIST_MAX)).await?;
    if out.is_json() {
        return out.value(&messages.iter().map(message_json).collect::<Vec<_>>());
    }
    if messages.is_empty() {
        note(&format!("Route {route} has published everything that was committed."));
    }
    let row = |message: &OutboxMessage| cells(message, out).to_vec();
    out.rows(&["message", "topic", "key", "enqueued", "body"], messages.iter().map(row).collect())
}

fn cells(message: &OutboxMessage, out: Output) -> [String; 5] {
    let chars_max = if out.is_terminal() { 100 } else { usize::MAX };
    let key = message.key.as_deref().map_or("-".to_owned(), escape);
    let body = show_body(&message.body, chars_max);
    [message.id.clone(), escape(&message.topic), key, show_time(message.enqueued_ms), body]
}

async fn parked(outbox: &dyn OutboxStore, route: Option<&str>, all: bool, out: Output) -> anyhow::Result<()> {
    let held = outbox.held(route, !all, LIST_MAX).await?;
    if out.is_json() {
        let value = |(route, held): &(String, HeldMessage)| {
            let mut value = json!(held);
            value["route"] = json!(route);
            value["message"] = message_json(&held.message);
            value
        };
        return out.value(&held.iter().map(value).collect::<Vec<_>>());
    }
    if held.is_empty() {
        note(if all { "No messages are set aside." } else { "No messages are parked." });
    }
    let row = |(route, held): &(String, HeldMessage)| {
        let state = match held {
            HeldMessage { parked: true, .. } => "parked",
            HeldMessage { retry_after_ms: Some(_), .. } => "tried again",
            _ => "waits",
        };
        let [id, topic, key, enqueued, body] = cells(&held.message, out);
        let error = held.error.as_deref().map_or("-".to_owned(), escape);
        vec![
            if route.is_empty() { "-".to_owned() } else { escape(route) },
            id,
            state.to_owned(),
            held.attempts.to_string(),
            topic,
            key,
            enqueued,
            error,
            body,
        ]
    };
    let heading = ["route", "message", "state", "attempts", "topic", "key", "enqueued", "error", "body"];
    out.rows(&heading, held.iter().map(row).collect())
}
