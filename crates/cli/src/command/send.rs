//! `hapax send`.

use std::io::{BufRead, BufReader, IsTerminal as _, Read as _};
use std::path::PathBuf;

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use hapax::core::policy;
use hapax::core::store::SharedStore;
use hapax::{
    AdminError, Attribute, DedupId, GroupId, IdempotencyKey, NewMessage, Priority, QueueConfig, QueueKind,
    QueueName, StoreError,
};
use hapax_client::wire::time::from_rfc3339;
use serde_json::json;

use crate::output::{Output, progress};
use crate::remote::Remote;
use crate::text::{parse_ms, parse_pair};
use crate::usage;

/// Maximum number of messages in one request.
const BATCH_MAX: usize = 100;

/// Sends a message, or one for each line of a file.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax send emails '{\"to\":\"ada@example.com\"}'
  hapax send emails - < letter.txt
  hapax send emails hello --delay 5m --attribute kind=greeting
  hapax send emails reminder --deliver-at 2026-12-24T18:00:00Z
  hapax send orders.fifo paid --group customer-7 --dedup order-42
  hapax send emails --file addresses.txt")]
pub struct SendArgs {
    /// The queue.
    queue: QueueName,
    /// The body; if it is - or missing, it is read from standard input.
    #[arg(conflicts_with = "file")]
    body: Option<String>,
    /// Sends each line of this file as a separate message; - is standard input.
    #[arg(long, value_name = "FILE", conflicts_with = "dedup")]
    file: Option<PathBuf>,
    /// Creates the queue first if it does not exist.
    #[arg(long)]
    create: bool,
    /// The group: a FIFO queue keeps order within it, a standard queue shares deliveries fairly between groups.
    #[arg(long)]
    group: Option<GroupId>,
    /// Deduplication id: a repeated send inside the queue's window adds no second message.
    #[arg(long, value_name = "ID")]
    dedup: Option<DedupId>,
    /// Hides the message for this time (30s, 5m).
    #[arg(long, value_name = "TIME", value_parser = parse_ms)]
    delay: Option<u64>,
    /// Hides the message until this time, at most 366 days ahead (UTC, 2026-12-24T18:00:00Z).
    #[arg(long, value_name = "TIME", value_parser = parse_time, conflicts_with = "delay")]
    deliver_at: Option<u64>,
    /// Urgency on a standard queue: 0 to 9, higher first.
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=9))]
    priority: u8,
    /// The idempotency key: identifies the intended effect.
    #[arg(long)]
    key: Option<IdempotencyKey>,
    /// An attribute; may be repeated.
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
        message.deliver_at_ms = self.deliver_at;
        for (name, value) in &self.attribute {
            message = message.attribute(name, Attribute::text(value));
        }
        if let Some(key) = &self.key {
            message = message.idempotency_key(key);
        }
        message
    }
}

fn parse_time(text: &str) -> Result<u64, String> {
    from_rfc3339(text)
        .ok_or_else(|| format!("{text:?} is not a time in UTC; write it as 2026-12-24T18:00:00Z"))
}

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

/// Creates a queue with the defaults of its kind. An existing queue stays as it is, with any policy.
async fn create(store: &SharedStore, queue: &QueueName) -> anyhow::Result<()> {
    let kind = if queue.is_fifo() { QueueKind::Fifo } else { QueueKind::Standard };
    match store.create_queue(queue, QueueConfig::of(kind)).await {
        Ok(_) | Err(AdminError::Exists(..)) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

async fn send_one(
    store: &SharedStore,
    queue: &QueueName,
    message: NewMessage,
    out: Output,
) -> anyhow::Result<()> {
    let answer = match store.send(queue, vec![message]).await {
        Err(StoreError::NoSuchQueue(_)) => {
            bail!("queue {queue} does not exist; --create makes it, `hapax queues` lists those that do")
        }
        answer => answer?.pop(),
    };
    let sent = answer.ok_or_else(|| anyhow!("the server answered nothing"))??;
    let again = if sent.duplicate { " (sent before; nothing added)" } else { "" };
    out.done(&format!("{}{again}", sent.id), &sent)
}

async fn send_lines(store: &SharedStore, args: &SendArgs, out: Output) -> anyhow::Result<()> {
    let path = args.file.as_deref().context("no file")?;
    let (lines, bytes): (Box<dyn BufRead>, _) = if path.as_os_str() == "-" {
        (Box::new(std::io::stdin().lock()), None)
    } else {
        let file = std::fs::File::open(path).with_context(|| path.display().to_string())?;
        let bytes = file.metadata().ok().map(|meta| meta.len());
        (Box::new(BufReader::new(file)), bytes)
    };
    // The number of lines is unknown; the number of bytes is known.
    let bar = progress(bytes, "sending (bytes)");
    let mut bulk = BatchSender {
        store,
        queue: &args.queue,
        batch: Vec::new(),
        bytes: 0,
        line: 0,
        sent: 0,
        duplicates: 0,
    };
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
    let BatchSender { sent, duplicates, .. } = bulk;
    let sentence = format!("{sent} sent, {duplicates} of them sent before");
    out.done(&sentence, &json!({ "sent": sent, "duplicates": duplicates }))
}

/// Sends messages in batches, in order.
struct BatchSender<'a> {
    store: &'a SharedStore,
    queue: &'a QueueName,
    batch: Vec<NewMessage>,
    bytes: u64,
    /// The number of the last sent line.
    line: u64,
    sent: u64,
    duplicates: u64,
}

impl BatchSender<'_> {
    async fn push(&mut self, message: NewMessage) -> anyhow::Result<()> {
        let bytes = message.bytes();
        if self.batch.len() == BATCH_MAX || self.bytes + bytes > policy::MESSAGE_BYTES_MAX {
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
        let mut refused = RefusedLines::default();
        for answer in answers {
            self.line += 1;
            match answer {
                Ok(sent) => {
                    self.sent += 1;
                    self.duplicates += u64::from(sent.duplicate);
                }
                Err(error) => refused.add(self.line, error.to_string()),
            }
        }
        if refused.0.is_empty() { Ok(()) } else { bail!("{}", refused.sentence(self.line, self.sent)) }
    }
}

/// The lines that were refused, by reason, in the order of the first occurrence.
#[derive(Debug, Default)]
struct RefusedLines(Vec<(String, Vec<u64>)>);

impl RefusedLines {
    fn add(&mut self, line: u64, reason: String) {
        match self.0.iter_mut().find(|(known, _)| *known == reason) {
            Some((_, lines)) => lines.push(line),
            None => self.0.push((reason, vec![line])),
        }
    }

    /// A sentence about all lines up to `last`, of which `sent` were accepted. No line after it was tried.
    fn sentence(&self, last: u64, sent: u64) -> String {
        let refused = self.0.iter().map(|(reason, lines)| {
            let were = if lines.len() == 1 { "was" } else { "were" };
            format!("{} {were} refused ({reason})", ranges(lines))
        });
        let rest = match sent {
            0 => "no line is sent".to_owned(),
            _ => format!("all other lines up to {last} are sent, none after it"),
        };
        refused.chain([rest]).collect::<Vec<_>>().join("; ")
    }
}

/// `line 2`, `lines 2, 5-7`.
fn ranges(lines: &[u64]) -> String {
    let runs = lines.chunk_by(|a, b| a + 1 == *b);
    let runs = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        one => one.iter().map(u64::to_string).collect(),
    });
    let word = if lines.len() == 1 { "line" } else { "lines" };
    format!("{word} {}", runs.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refused_line_is_named_with_its_reason() {
        let mut refused = RefusedLines::default();
        for (line, reason) in [(2, "large"), (5, "odd"), (7, "large"), (8, "large"), (9, "large")] {
            refused.add(line, reason.to_owned());
        }
        let expected = "lines 2, 7-9 were refused (large); line 5 was refused (odd); \
                        all other lines up to 100 are sent, none after it";
        assert_eq!(refused.sentence(100, 95), expected);
        let mut refused = RefusedLines::default();
        refused.add(1, "odd".to_owned());
        assert_eq!(refused.sentence(1, 0), "line 1 was refused (odd); no line is sent");
    }
}
