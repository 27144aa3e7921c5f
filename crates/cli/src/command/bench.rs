//! `hapax bench`: a simple load test. `cargo xtask bench server` compares with other servers.

use hapax::core::store::SharedStore;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::Args;
use hapax::{NewMessage, QueueConfig, QueueName, Receive, Settle};
use serde_json::json;

use crate::output::progress;
use crate::remote::Remote;
use crate::text::parse_ms;

/// Measures a server: send, receive and ack from many connections at once.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  hapax bench
  hapax bench --connections 64 --size 4096 --batch 10 --time 30s
  hapax bench --json

It works in a queue of its own, which it deletes at the end.")]
pub struct BenchArgs {
    /// Number of concurrent connections.
    #[arg(long, short, default_value_t = 16, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    connections: u16,
    /// The size of a body in bytes.
    #[arg(long, default_value_t = 256, value_name = "BYTES", value_parser = clap::value_parser!(u32).range(0..=1_048_576))]
    size: u32,
    /// Messages per request.
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=10))]
    batch: u8,
    /// Duration of the test.
    #[arg(long, default_value = "10s", value_name = "TIME", value_parser = parse_ms)]
    time: u64,
    #[command(flatten)]
    remote: Remote,
}

/// The duration of each request, in microseconds.
#[derive(Default)]
struct Samples {
    send: Vec<u32>,
    receive: Vec<u32>,
    ack: Vec<u32>,
    /// Messages that were sent, received and acked.
    acked: u64,
}

pub async fn run(args: BenchArgs) -> anyhow::Result<()> {
    let out = args.remote.output();
    let store = args.remote.connect().await?;
    let queue = QueueName::new(format!("hapax-bench-{:08x}", fastrand::u32(..)))?;
    store.create_queue(&queue, QueueConfig::default()).await?;
    let measured = load(&args, &store, &queue).await;
    store.delete_queue(&queue).await.with_context(|| format!("queue {queue} is left behind"))?;
    let (mut samples, seconds) = measured?;
    let rate = samples.acked as f64 / seconds;
    let mut steps = Vec::new();
    for (name, times) in
        [("send", &mut samples.send), ("receive", &mut samples.receive), ("ack", &mut samples.ack)]
    {
        times.sort_unstable();
        steps.push((name, times.len(), quantile_ms(times, 0.5), quantile_ms(times, 0.99)));
    }
    if out.is_json() {
        let step = |&(name, requests, p50_ms, p99_ms): &(&str, usize, f64, f64)| {
            (name.to_owned(), json!({ "requests": requests, "p50_ms": p50_ms, "p99_ms": p99_ms }))
        };
        let steps: serde_json::Map<_, _> = steps.iter().map(step).collect();
        return out.value(&json!({
            "connections": args.connections,
            "size": args.size,
            "batch": args.batch,
            "seconds": seconds,
            "messages": samples.acked,
            "messages_per_second": rate,
            "steps": steps,
        }));
    }
    let row = |(name, requests, p50, p99): (&str, usize, f64, f64)| {
        vec![name.to_owned(), requests.to_string(), format!("{p50:.2} ms"), format!("{p99:.2} ms")]
    };
    out.rows(&["", "requests", "p50", "p99"], steps.into_iter().map(row).collect())?;
    let acked = samples.acked;
    crate::output::raw(&format!(
        "{rate:.0} messages/s sent, received and acked ({acked} in {seconds:.1} s)\n"
    ))
}

async fn load(args: &BenchArgs, store: &SharedStore, queue: &QueueName) -> anyhow::Result<(Samples, f64)> {
    let mut stores = vec![store.clone()];
    while stores.len() < usize::from(args.connections) {
        // A server gets one connection each; a store is shared, and merges the calls of its users.
        stores.push(if args.remote.is_store() { store.clone() } else { args.remote.connect().await? });
    }
    let (body, batch) = (vec![b'x'; args.size as usize], usize::from(args.batch));
    let bar = progress(None, "messages");
    let start = Instant::now();
    let end = start + Duration::from_millis(args.time);
    let mut tasks = tokio::task::JoinSet::new();
    for store in stores {
        let (queue, body, bar) = (queue.clone(), body.clone(), bar.clone());
        tasks.spawn(async move {
            let mut samples = Samples::default();
            while Instant::now() < end {
                cycle(&store, &queue, &body, batch, &mut samples).await?;
                bar.inc(batch as u64);
            }
            anyhow::Ok(samples)
        });
    }
    let mut all = Samples::default();
    while let Some(done) = tasks.join_next().await {
        let samples = done??;
        all.send.extend(samples.send);
        all.receive.extend(samples.receive);
        all.ack.extend(samples.ack);
        all.acked += samples.acked;
    }
    bar.finish_and_clear();
    Ok((all, start.elapsed().as_secs_f64()))
}

/// Sends a batch, receives as many messages (its own or others'), and acks them.
async fn cycle(
    store: &SharedStore,
    queue: &QueueName,
    body: &[u8],
    batch: usize,
    samples: &mut Samples,
) -> anyhow::Result<()> {
    let messages = (0..batch).map(|_| NewMessage::new(body.to_vec())).collect();
    let start = Instant::now();
    for answer in store.send(queue, messages).await? {
        answer?;
    }
    samples.send.push(start.elapsed().as_micros() as u32);
    let start = Instant::now();
    let received = store.receive(queue, Receive { wait_ms: Some(1000), ..Receive::up_to(batch) }).await?;
    samples.receive.push(start.elapsed().as_micros() as u32);
    let receipts: Vec<_> = received.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
    if receipts.is_empty() {
        return Ok(());
    }
    let start = Instant::now();
    for answer in store.settle(queue, receipts).await? {
        answer?;
        samples.acked += 1;
    }
    samples.ack.push(start.elapsed().as_micros() as u32);
    Ok(())
}

/// A quantile of sorted microseconds, in milliseconds.
fn quantile_ms(sorted: &[u32], quantile: f64) -> f64 {
    let at = (sorted.len() as f64 * quantile) as usize;
    sorted.get(at.min(sorted.len().saturating_sub(1))).map_or(0.0, |us| f64::from(*us) / 1000.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let sorted: Vec<u32> = (1..=100).map(|n| n * 1000).collect();
        assert!((quantile_ms(&sorted, 0.5) - 51.0).abs() < 0.001);
        assert!((quantile_ms(&sorted, 0.99) - 100.0).abs() < 0.001);
        assert!(quantile_ms(&[], 0.5).abs() < 0.001);
    }
}
