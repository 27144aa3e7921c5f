//! `hapax send`.

use std::io::{BufRead, BufReader, IsTerminal as _, Read as _};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use hapax::core::{QueueAdmin, policy};
use hapax::{
    AdminError, Attribute, DedupId, GroupId, IdempotencyKey, NewMessage, Priority, QueueConfig, QueueKind,
    QueueName,
};
use serde_json::json;

use crate::output::{Output, progress};
use crate::remote::Remote;
use crate::text::{parse_ms, parse_pair};
use crate::usage;

/// The most messages that one request carries.
const BATCH: usize = 100;

/// Sends a message, or one for each line of a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax send emails '{\"to\":\"ada@example.com\"}'
  hapax send emails - < letter.txt
  hapax send emails hello --delay 5m --attribute kind=greeting
  hapax send orders.fifo paid --group customer-7 --dedup order-42
  hapax send emails --file addresses.txt")]
pub struct SendArgs {
    /// The queue.
    queue: QueueName,
    /// The body; - or nothing reads it from standard input.
    #[arg(conflicts_with = "file")]
    body: Option<String>,
    /// Sends each line of this file as a message of its own; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "dedup")]
    file: Option<PathBuf>,
    /// Creates the queue first if it is not there.
    #[arg(long)]
    create: bool,
    /// The group: ordered within it on a FIFO queue, shared fairly between groups on a standard one.
    #[arg(long)]
    group: Option<GroupId>,
    /// Names this send: repeated inside the queue's window, it adds nothing.
    #[arg(long, value_name = "ID")]
    dedup: Option<DedupId>,
    /// Hides the message for this long (30s, 5m).
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    delay: Option<u64>,
    /// Urgency on a standard queue: 0 to 9, higher first.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: u8,
    /// The idempotency key: names the intended effect.
    #[arg(long)]
    key: Option<IdempotencyKey>,
    /// A value beside the body; may be repeated.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_pair)]
    attribute: Vec<(String, String)>,
    #[command(flatten)]
    remote: Remote,
}

impl SendArgs {
    fn message(&self, body: Vec<u8>) -> NewMessage {
        let mut message = NewMessage::new(body).priority(Priority(self.priority));
        message.group.clone_from(&self.group);
        message.dedup.clone_from(&self.dedup);
        message.delay_ms = self.delay;
        for (name, value) in &self.attribute {
            message = message.attribute(name, Attribute::text(value));
        }
        if let Some(key) = &self.key {
            message = message.idempotency_key(key);
        }
        message
    }
}

/// Runs it.
pub async fn run(args: SendArgs) -> anyhow::Result<()> {
    let out = args.remote.output();
    let body = if args.file.is_none() { Some(read_body(args.body.as_deref())?) } else { None };
    let store = args.remote.connect().await?;
    if args.create {
        create(&store, &args.queue).await?;
    }
    match body {
        Some(body) => send_one(&store, &args.queue, args.message(body), out).await,
        None => send_lines(&store, &args, out).await,
    }
}

fn read_body(given: Option<&str>) -> anyhow::Result<Vec<u8>> {
    match given {
        Some(body) if body != "-" => return Ok(body.as_bytes().to_vec()),
        None if std::io::stdin().is_terminal() => {
            return Err(usage("no body: give one, or - to read it from standard input"));
        }
        _ => {}
    }
    let mut body = Vec::new();
    std::io::stdin().lock().read_to_end(&mut body).context("standard input")?;
    Ok(body)
}

/// Creates a queue with the defaults of its kind, unless it is there, with whatever policy.
async fn create(store: &Arc<dyn QueueAdmin>, queue: &QueueName) -> anyhow::Result<()> {
    let kind = if queue.is_fifo() { QueueKind::Fifo } else { QueueKind::Standard };
    match store.create_queue(queue, QueueConfig { kind, ..QueueConfig::default() }).await {
        Ok(_) | Err(AdminError::Exists(..)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn send_one(
    store: &Arc<dyn QueueAdmin>,
    queue: &QueueName,
    message: NewMessage,
    out: Output,
) -> anyhow::Result<()> {
    let answer = store.send(queue, vec![message]).await?.pop();
    let sent = answer.ok_or_else(|| anyhow!("the server answered nothing"))??;
    let again = if sent.duplicate { " (sent before; nothing added)" } else { "" };
    out.done(&format!("{}{again}", sent.id), &sent)
}

async fn send_lines(store: &Arc<dyn QueueAdmin>, args: &SendArgs, out: Output) -> anyhow::Result<()> {
    let path = args.file.as_deref().context("no file")?;
    let (lines, bytes): (Box<dyn BufRead>, _) = if path.as_os_str() == "-" {
        (Box::new(std::io::stdin().lock()), None)
    } else {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let bytes = file.metadata().ok().map(|meta| meta.len());
        (Box::new(BufReader::new(file)), bytes)
    };
    // Lines are not known beforehand; bytes are.
    let bar = progress(bytes, "sending (bytes)");
    let mut bulk =
        Bulk { store, queue: &args.queue, batch: Vec::new(), bytes: 0, line: 0, sent: 0, duplicates: 0 };
    for line in lines.split(b'\n') {
        let mut line = line.with_context(|| path.display().to_string())?;
        let length = line.len() as u64 + 1;
        if line.last() == Some(&b'\r') {
            line.pop();
        }
        bulk.push(args.message(line)).await?;
        bar.inc(length);
    }
    bulk.flush().await?;
    bar.finish_and_clear();
    let Bulk { sent, duplicates, .. } = bulk;
    let sentence = format!("{sent} sent, {duplicates} of them sent before");
    out.done(&sentence, &json!({ "sent": sent, "duplicates": duplicates }))
}

/// Sends messages in batches, in order.
struct Bulk<'a> {
    store: &'a Arc<dyn QueueAdmin>,
    queue: &'a QueueName,
    batch: Vec<NewMessage>,
    bytes: u64,
    /// The number of the last line that was sent.
    line: u64,
    sent: u64,
    duplicates: u64,
}

impl Bulk<'_> {
    async fn push(&mut self, message: NewMessage) -> anyhow::Result<()> {
        let bytes = message.bytes();
        if self.batch.len() == BATCH || self.bytes + bytes > policy::MESSAGE_BYTES_MAX {
            self.flush().await?;
        }
        self.bytes += bytes;
        self.batch.push(message);
        Ok(())
    }

    async fn flush(&mut self) -> anyhow::Result<()> {
        if self.batch.is_empty() {
            return Ok(());
        }
        self.bytes = 0;
        let after = format!("after line {}; what came before is sent", self.line);
        let answers = self.store.send(self.queue, std::mem::take(&mut self.batch)).await.context(after)?;
        for answer in answers {
            self.line += 1;
            match answer {
                Ok(sent) => {
                    self.sent += 1;
                    self.duplicates += u64::from(sent.duplicate);
                }
                Err(error) => bail!("line {}: {error}", self.line),
            }
        }
        Ok(())
    }
}
