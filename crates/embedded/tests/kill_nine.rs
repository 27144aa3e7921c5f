//! A process is killed repeatedly under load: nothing accepted is lost, nothing acked comes back, fences only grow.

mod common;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{child_folder, kill_child_after, long, queue, say, seed};
use hapax_core::{Browse, NewMessage, QueueAdmin, QueueConfig, QueueStore, Receive, Settle};
use hapax_embedded::{Embedded, Options};

async fn produce(store: Arc<Embedded>, next: Arc<AtomicU64>) {
    loop {
        let first = next.fetch_add(3, Ordering::Relaxed);
        let batch = (first..first + 3)
            .map(|number| NewMessage::new(format!("{number} {}", ".".repeat((number % 50) as usize * 40))));
        say(&format!("sending {first}"));
        for sent in store.send(&queue(), batch.collect()).await.unwrap() {
            sent.unwrap();
        }
        say(&format!("sent {first}"));
    }
}

async fn consume(store: Arc<Embedded>, turn: u64) {
    for round in turn.. {
        let receive = Receive { max: 4, wait_ms: Some(100), ..Receive::default() };
        let deliveries = store.receive(&queue(), receive).await.unwrap();
        for delivery in deliveries {
            let number = number(&delivery.body);
            say(&format!("fence {} {number}", delivery.fence.0));
            if round % 3 == 0 {
                let retry = vec![Settle::retry(delivery.receipt, "again")];
                store.settle(&queue(), retry).await.unwrap()[0].as_ref().unwrap();
                continue;
            }
            say(&format!("acking {number}"));
            store.settle(&queue(), vec![Settle::ack(delivery.receipt)]).await.unwrap()[0].as_ref().unwrap();
            say(&format!("acked {number}"));
        }
    }
}

fn number(body: &[u8]) -> u64 {
    std::str::from_utf8(body).unwrap().split(' ').next().unwrap().parse().unwrap()
}

/// The process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Some(folder) = child_folder() else { return };
    let store = Arc::new(Embedded::open(folder, Options::default()).unwrap());
    store.create_queue(&queue(), QueueConfig::sqs()).await.unwrap();
    // The test harness has already begun a line.
    say("");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let next = Arc::new(AtomicU64::new(line.trim().parse().unwrap()));
    let mut tasks = tokio::task::JoinSet::new();
    for turn in 0..4 {
        tasks.spawn(produce(store.clone(), next.clone()));
        tasks.spawn(consume(store.clone(), turn));
    }
    tasks.join_next().await.unwrap().unwrap();
}

/// The output of the killed processes.
#[derive(Default)]
struct ChildOutput {
    next: u64,
    there: BTreeSet<u64>,
    maybe_sent: BTreeSet<u64>,
    maybe_acked: BTreeSet<u64>,
    acked: BTreeSet<u64>,
    fence_max: u64,
    fences: BTreeSet<u64>,
}

impl ChildOutput {
    fn read_line(&mut self, line: &str) -> bool {
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let (Some(what), Some(value)) = (words.first(), number(1)) else { return false };
        match *what {
            "sending" => {
                self.maybe_sent.extend(value..value + 3);
                self.next = self.next.max(value + 3);
            }
            "sent" => {
                self.there.extend((value..value + 3).filter(|n| !self.acked.contains(n)));
                self.maybe_sent.retain(|n| !(value..value + 3).contains(n));
            }
            "fence" => {
                let message = number(2).unwrap();
                assert!(!self.acked.contains(&message), "message {message} came back after its ack");
                assert!(value > self.fence_max, "fence {value} was handed out after {}", self.fence_max);
                assert!(self.fences.insert(value), "fence {value} was handed out twice");
            }
            "acking" => drop(self.maybe_acked.insert(value)),
            "acked" => {
                self.maybe_acked.remove(&value);
                self.there.remove(&value);
                self.acked.insert(value);
            }
            _ => return false,
        }
        true
    }

    /// After a kill: compares, and resolves the unknown outcomes.
    fn check(&mut self, found: &BTreeSet<u64>) {
        let lost = self.there.iter().find(|n| !found.contains(n) && !self.maybe_acked.contains(n));
        assert_eq!(lost, None, "an accepted message is lost");
        assert_eq!(found.intersection(&self.acked).next(), None, "an acked message came back");
        let unsent = found.iter().find(|n| !self.there.contains(n) && !self.maybe_sent.contains(n));
        assert_eq!(unsent, None, "a message that nobody sent");
        self.acked.extend(self.maybe_acked.iter().filter(|n| !found.contains(n)));
        self.there.clone_from(found);
        self.maybe_sent.clear();
        self.maybe_acked.clear();
        // Consumers of one process print their fences in any order; those of the next process are all greater.
        self.fence_max = self.fences.last().copied().unwrap_or(self.fence_max).max(self.fence_max);
        self.fences.clear();
    }
}

async fn messages(folder: &Path) -> BTreeSet<u64> {
    let store = Embedded::open(folder, Options::default()).unwrap();
    let status = store.status().await.unwrap();
    assert_eq!((status.stopped, status.warnings), (None, Vec::new()));
    let mut found = BTreeSet::new();
    let mut after = None;
    loop {
        let browse = Browse { limit: 1_000, after, ..Browse::default() };
        let page = store.browse(&queue(), browse).await.unwrap();
        for item in page.items {
            assert!(found.insert(number(&item.body.unwrap())), "a message is there twice");
        }
        after = page.next;
        if after.is_none() {
            return found;
        }
    }
}

#[tokio::test]
async fn killed_under_load_many_times() {
    if child_folder().is_some() {
        return;
    }
    let mut rng = fastrand::Rng::with_seed(seed(9));
    let folder = tempfile::tempdir().unwrap();
    let mut output = ChildOutput::default();
    for _ in 0..if long() { 1_000 } else { 40 } {
        kill_child_after(folder.path(), output.next, rng.usize(1..400), |line| output.read_line(line));
        output.check(&messages(folder.path()).await);
    }
    println!("{} sent, {} acked, {} there", output.next, output.acked.len(), output.there.len());
    assert!(output.acked.len() > 50 && output.next > 500, "little happened");
}
