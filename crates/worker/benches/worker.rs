//! The worker beside a bare loop that receives as many at once and settles them, over the same embedded store in the
//! same run: messages a second, CPU time and syncs for each message.
//!
//! For instructions, run one contestant at a time under callgrind and subtract what filling the queue takes:
//! `valgrind --tool=callgrind worker --only fill|bare|worker|once --messages 20000`.
#![allow(missing_docs, reason = "a benchmark")]

use std::sync::Arc;
use std::time::{Duration, Instant};

use hapax_core::{
    NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{Cx, Worker};

const IN_FLIGHT: usize = 64;

struct Rig {
    store: Arc<Embedded>,
    queue: QueueName,
    messages: u64,
    _folder: tempfile::TempDir,
}

impl Rig {
    async fn new(messages: u64, tier: Tier) -> Self {
        // A real disk, else the syncs cost nothing.
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a folder");
        let store = Arc::new(Embedded::open(folder.path(), Options::default()).expect("the store opens"));
        let queue = QueueName::new("jobs").expect("a name");
        let config = QueueConfig { tier, ..QueueConfig::default() };
        store.create_queue(&queue, config).await.expect("a queue is made");
        let body = format!("\"{}\"", "x".repeat(254));
        let mut left = messages;
        while left > 0 {
            let count = left.min(1_000);
            let batch = (0..count).map(|_| NewMessage::new(body.clone())).collect();
            assert!(store.send(&queue, batch).await.expect("sent").iter().all(Result::is_ok));
            left -= count;
        }
        Self { store, queue, messages, _folder: folder }
    }

    async fn bare(&self) {
        let mut left = self.messages;
        while left > 0 {
            let receive = Receive { max: IN_FLIGHT, wait_ms: Some(20_000), ..Receive::default() };
            let deliveries = self.store.receive(&self.queue, receive).await.expect("received");
            left -= deliveries.len() as u64;
            let acks = deliveries.into_iter().map(|delivery| Settle::ack(delivery.receipt)).collect();
            assert!(self.store.settle(&self.queue, acks).await.expect("settled").iter().all(Result::is_ok));
        }
    }

    async fn worker(&self) {
        let handler = async |_: bytes::Bytes, _: Cx| {};
        let builder = Worker::builder(self.store.clone(), self.queue.clone()).raw_handler(handler);
        let worker = builder.concurrency(IN_FLIGHT).build().await.expect("a worker");
        let (watch, messages) = (worker.watch(), self.messages);
        let done = async move {
            while watch.counts().done < messages {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let report = worker.run(done).await.expect("it runs");
        assert!(report.drained && report.counts.delivered == messages, "{report:?}");
    }
}

/// CPU time of this process so far.
fn cpu() -> Duration {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
    let ticks = |at: usize| fields.get(at).and_then(|ticks| ticks.parse::<u64>().ok()).unwrap_or(0);
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

async fn turn(what: &str, messages: u64) -> f64 {
    let tier = if what == "once" { Tier::EffectivelyOnce } else { Tier::AtLeastOnce };
    let rig = Rig::new(messages, tier).await;
    let (start, cpu_before, before) = (Instant::now(), cpu(), rig.store.commit_stats());
    match what {
        "fill" => return 0.0,
        "bare" => rig.bare().await,
        _ => rig.worker().await,
    }
    let (took, after) = (start.elapsed(), rig.store.commit_stats());
    let rate = messages as f64 / took.as_secs_f64();
    let cpu_us = (cpu() - cpu_before).as_micros() as f64 / messages as f64;
    let syncs = (after.synced - before.synced) as f64 / messages as f64;
    println!("{what:>7}: {rate:>9.0} messages/s, {cpu_us:>6.1} us of CPU and {syncs:.4} syncs a message");
    rate
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let value = |name: &str| args.iter().position(|arg| arg == name).and_then(|at| args.get(at + 1));
    let messages = value("--messages").map_or(50_000, |count| count.parse().expect("a number"));
    let rounds = if args.iter().any(|arg| arg == "--quick") { 2 } else { 5 };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    if let Some(only) = value("--only") {
        runtime.block_on(turn(only, messages));
        return;
    }
    let mut rates = [const { Vec::new() }; 3];
    for _ in 0..rounds {
        for (rates, what) in rates.iter_mut().zip(["bare", "worker", "once"]) {
            rates.push(runtime.block_on(turn(what, messages)));
        }
    }
    let median = |rates: &mut Vec<f64>| {
        rates.sort_by(f64::total_cmp);
        rates[rates.len() / 2]
    };
    let [bare, worker, once] = rates.each_mut().map(median);
    println!("at-least-once against the bare loop: {:.2}", worker / bare);
    println!("effectively-once against the bare loop: {:.2}", once / bare);
}
