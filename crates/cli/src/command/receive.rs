//! `hapax receive`.

use anyhow::{Context as _, bail};
use clap::Args;
use hapax::core::store::SharedStore;
use hapax::core::{QueueInfo, StoreError};
use hapax::{Delivery, QueueName, Receive, Settle};
use hapax_client::wire::DeliveryItem;

use crate::output::{Output, note};
use crate::remote::Remote;
use crate::text::{escape, parse_ms, show_body, show_ms, show_time};

/// Maximum number of messages of one receive or ack request.
const BATCH_MAX: usize = 100;

/// The most that are held and printed at once.
const RECEIVE_MAX: u64 = 10_000;

/// Receives messages, and acks them if asked to.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax receive emails                      shows one message; it returns when its lease runs out
  hapax receive emails --ack --max 100      takes up to 100 messages
  hapax receive emails --ack --wait 20s     waits for one
  hapax receive emails --json | jq -r '.[].body'

Control characters are escaped; --json has the exact bodies.")]
pub struct ReceiveArgs {
    /// The queue.
    queue: QueueName,
    /// Maximum count, 1 to 10000. More than 100 are asked for in several requests, until none is ready.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=RECEIVE_MAX))]
    max: u64,
    /// How long to wait for the first message [default: the queue's].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    wait: Option<u64>,
    /// How long the messages are leased [default: the queue's].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u64>,
    /// Acks each message after it was printed, which deletes it.
    #[arg(long)]
    ack: bool,
    #[command(flatten)]
    remote: Remote,
}

pub async fn run(args: ReceiveArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    let (received, failure) = receive(&store, &args).await;
    match failure {
        Some(error) if received.is_empty() => return Err(error.into()),
        None if received.is_empty() => explain_no_messages(&store, &args.queue, out).await,
        _ => {}
    }
    show(&received, out)?;
    if args.ack {
        // Printed first: the reader has the messages before they are deleted.
        ack(&store, &args.queue, &received).await?;
    } else if let (Some(first), true) = (received.first(), out.is_terminal()) {
        let lease = show_ms(first.lease_ms);
        note(&format!("Not acked: each returns when its lease of {lease} runs out. Add --ack to take it."));
    }
    match failure {
        Some(error) => {
            let (count, max) = (received.len(), args.max);
            Err(error).with_context(|| format!("{count} of at most {max} messages were received"))
        }
        None => Ok(()),
    }
}

/// Receives until there are enough, none is ready, or a request fails. What was received before a failure is leased to
/// this command and seen by no other, so it is returned beside the failure.
async fn receive(store: &SharedStore, args: &ReceiveArgs) -> (Vec<Delivery>, Option<StoreError>) {
    let mut received: Vec<Delivery> = Vec::new();
    while (received.len() as u64) < args.max {
        let max = (args.max as usize - received.len()).min(BATCH_MAX);
        let wait_ms = if received.is_empty() { args.wait } else { Some(0) };
        let receive = Receive {
            max,
            wait_ms,
            lease_ms: args.lease,
            consumer: Some(Remote::user_name()),
            ..Receive::default()
        };
        match store.receive(&args.queue, receive).await {
            Ok(more) if more.is_empty() => break,
            Ok(more) => received.extend(more),
            Err(error) => return (received, Some(error)),
        }
    }
    (received, None)
}

fn show(received: &[Delivery], out: Output) -> anyhow::Result<()> {
    if out.is_json() {
        // In the format of the native API.
        let items: Vec<DeliveryItem> = received.iter().cloned().map(Into::into).collect();
        return out.value(&items);
    }
    if received.is_empty() {
        return Ok(());
    }
    let chars_max = if out.is_terminal() { 1000 } else { usize::MAX };
    let row = |delivery: &Delivery| {
        let body = show_body(&delivery.body, chars_max);
        vec![delivery.id.to_string(), delivery.attempt.to_string(), body]
    };
    out.rows(&["message", "attempt", "body"], received.iter().map(row).collect())
}

async fn ack(store: &SharedStore, queue: &QueueName, received: &[Delivery]) -> anyhow::Result<()> {
    for batch in received.chunks(BATCH_MAX) {
        let acks = batch.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
        let answers = store.settle(queue, acks).await?;
        for (delivery, answer) in batch.iter().zip(answers) {
            if let Err(error) = answer {
                bail!("message {} was printed but not acked: {error}", delivery.id);
            }
        }
    }
    Ok(())
}

/// Says why nothing was received: the queue is paused; or, to a person, that nothing is ready.
async fn explain_no_messages(store: &SharedStore, queue: &QueueName, out: Output) {
    // A key that may receive need not be allowed to look at the queue.
    let Ok(QueueInfo { paused: Some(paused), .. }) = store.queue(queue).await else {
        if out.is_terminal() {
            note(&format!("No message of {queue} is ready. --wait 20s waits for one."));
        }
        return;
    };
    let why = paused.reason.as_ref().map(|reason| format!(": {}", escape(reason))).unwrap_or_default();
    let (since, by) = (show_time(paused.since_ms), escape(&paused.by));
    note(&format!("{queue} is paused since {since} by {by}{why}; `hapax queue resume {queue}` ends it"));
}
