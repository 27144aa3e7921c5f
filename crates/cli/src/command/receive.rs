//! `hapax receive`.

use anyhow::bail;
use clap::Args;
use hapax::core::QueueInfo;
use hapax::core::store::SharedStore;
use hapax::{Delivery, QueueName, Receive, Settle};
use hapax_client::wire::DeliveryItem;

use crate::output::{Output, note};
use crate::remote::Remote;
use crate::text::{escape, parse_ms, show_body, show_ms, show_time};

/// The most that one request asks for or acks.
const BATCH: usize = 100;

/// The most that are held and printed at once.
const MAX: u64 = 10_000;

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
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=MAX))]
    max: u64,
    /// How long to wait for the first message [default: the queue's].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    wait: Option<u64>,
    /// How long the messages are leased [default: the queue's].
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    lease: Option<u64>,
    /// Acks each message once it is printed: it is gone then.
    #[arg(long)]
    ack: bool,
    #[command(flatten)]
    remote: Remote,
}

/// Runs it.
pub async fn run(args: ReceiveArgs) -> anyhow::Result<()> {
    let (out, store) = (args.remote.output(), args.remote.connect().await?);
    let mut received: Vec<Delivery> = Vec::new();
    while (received.len() as u64) < args.max {
        let max = (args.max as usize - received.len()).min(BATCH);
        let wait_ms = if received.is_empty() { args.wait } else { Some(0) };
        let receive = Receive {
            max,
            wait_ms,
            lease_ms: args.lease,
            consumer: Some(Remote::by()),
            ..Receive::default()
        };
        let more = store.receive(&args.queue, receive).await?;
        if more.is_empty() {
            break;
        }
        received.extend(more);
    }
    if received.is_empty() {
        explain_nothing(&store, &args.queue, out).await;
    }
    if out.is_json() {
        // As the native API has them.
        let items: Vec<DeliveryItem> = received.iter().cloned().map(Into::into).collect();
        out.value(&items)?;
    } else if !received.is_empty() {
        let chars_max = if out.is_terminal() { 1000 } else { usize::MAX };
        let row = |delivery: &Delivery| {
            let body = show_body(&delivery.body, chars_max);
            vec![delivery.id.to_string(), delivery.attempt.to_string(), body]
        };
        out.rows(&["message", "attempt", "body"], received.iter().map(row).collect())?;
    }
    if !args.ack {
        if let (Some(first), true) = (received.first(), out.is_terminal()) {
            let lease = show_ms(first.lease_ms);
            note(&format!(
                "Not acked: each returns when its lease of {lease} runs out. Add --ack to take it."
            ));
        }
        return Ok(());
    }
    // Printed first: the reader has the messages before they are deleted.
    let receipts: Vec<_> = received.iter().map(|delivery| Settle::ack(delivery.receipt.clone())).collect();
    for (number, batch) in receipts.chunks(BATCH).enumerate() {
        let answers = store.settle(&args.queue, batch.to_vec()).await?;
        for (index, answer) in answers.into_iter().enumerate() {
            if let Err(error) = answer {
                let id = received[number * BATCH + index].id;
                bail!("message {id} was printed but not acked: {error}");
            }
        }
    }
    Ok(())
}

/// Says why nothing was received: the queue is paused; or, to a person, that nothing is ready.
async fn explain_nothing(store: &SharedStore, queue: &QueueName, out: Output) {
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
