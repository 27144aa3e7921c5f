//! Workers are killed repeatedly under load: a message's ack and its claim's completion exist both or neither, and an
//! acknowledged claim exists.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use common::{child_folder, kill_child_after, long, queue, say, seed};
use hapax_core::ledger::TTL_MS_DEFAULT;
use hapax_core::{
    Browse, Claim, ClaimEnding, ClaimRequest, Delivery, EndClaim, EntryFilter, EntryId, EntryState, Json,
    Ledger, NewMessage, QueueAdmin, QueueConfig, QueueStore, Receive, RecordedOutcome, Settle, Settled,
    Settlement, Tier,
};
use hapax_embedded::{Embedded, Options};

fn entry(number: u64) -> EntryId {
    EntryId::of_queue(&queue(), format!("key-{number}").parse().unwrap())
}

async fn produce(store: Arc<Embedded>, next: Arc<AtomicU64>) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        say(&format!("sending {number}"));
        let message = NewMessage::new(number.to_string()).idempotency_key(&entry(number).key);
        store.send(&queue(), vec![message]).await.unwrap().remove(0).unwrap();
        say(&format!("sent {number}"));
    }
}

async fn work(store: Arc<Embedded>) {
    loop {
        let receive = Receive { max: 2, wait_ms: Some(100), ..Receive::default() };
        for delivery in store.receive(&queue(), receive).await.unwrap() {
            run(&store, delivery).await;
        }
    }
}

async fn run(store: &Embedded, delivery: Delivery) {
    let number: u64 = std::str::from_utf8(&delivery.body).unwrap().parse().unwrap();
    let owner = format!("{}-{number}", std::process::id()).parse().unwrap();
    let mut request = ClaimRequest::new(entry(number), owner, 60_000);
    request.delivery = Some((queue(), delivery.receipt.clone()));
    let Claim::Granted(grant) = store.claim(vec![request]).await.unwrap().remove(0).unwrap() else {
        panic!("nobody else works on message {number}");
    };
    say(&format!("granted {number} {}", grant.fence));
    let outcome = RecordedOutcome::done(Json::of(&number).unwrap());
    let ending = ClaimEnding::Complete { outcome, ttl_ms: TTL_MS_DEFAULT };
    let claim = Some(EndClaim { id: entry(number), token: grant.token, ending });
    let settle = Settle { receipt: delivery.receipt, settlement: Settlement::Ack, claim, parked_for: None };
    say(&format!("completing {number}"));
    let settled = store.settle(&queue(), vec![settle]).await.unwrap().remove(0).unwrap();
    assert_eq!(settled, Settled::Acked);
    say(&format!("completed {number}"));
}

/// The process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn child() {
    let Some(folder) = child_folder() else { return };
    let store = Arc::new(Embedded::open(folder, Options::default()).unwrap());
    // The lease outlasts the test: each message is delivered once, so its holder can always settle it.
    let config = QueueConfig { tier: Tier::EffectivelyOnce, lease_ms: 12 * 3_600_000, ..QueueConfig::sqs() };
    store.create_queue(&queue(), config).await.unwrap();
    say("");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let next = Arc::new(AtomicU64::new(line.trim().parse().unwrap()));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..4 {
        tasks.spawn(produce(store.clone(), next.clone()));
        tasks.spawn(work(store.clone()));
    }
    tasks.join_next().await.unwrap().unwrap();
}

/// The output of the killed processes.
#[derive(Default)]
struct ChildOutput {
    next: u64,
    sent: BTreeSet<u64>,
    maybe_sent: BTreeSet<u64>,
    granted: BTreeMap<u64, u64>,
    completed: BTreeSet<u64>,
}

impl ChildOutput {
    fn read_line(&mut self, line: &str) -> bool {
        let words: Vec<_> = line.split(' ').collect();
        let number = |at: usize| words.get(at).and_then(|word| word.parse::<u64>().ok());
        let (Some(what), Some(value)) = (words.first(), number(1)) else { return false };
        match *what {
            "sending" => {
                self.maybe_sent.insert(value);
                self.next = self.next.max(value + 1);
            }
            "sent" => drop(self.sent.insert(value)),
            "granted" => drop(self.granted.insert(value, number(2).unwrap())),
            "completing" => {}
            "completed" => drop(self.completed.insert(value)),
            _ => return false,
        }
        true
    }
}

/// The existing messages, and the entries with their states.
async fn found(folder: &Path) -> (BTreeSet<u64>, BTreeMap<u64, (EntryState, u64)>) {
    let store = Embedded::open(folder, Options::default()).unwrap();
    assert_eq!(store.status().await.unwrap().warnings, Vec::<String>::new());
    let (mut messages, mut entries) = (BTreeSet::new(), BTreeMap::new());
    let mut after = None;
    loop {
        let page = store.browse(&queue(), Browse { limit: 1_000, after, ..Browse::default() }).await.unwrap();
        let number = |body: &[u8]| std::str::from_utf8(body).unwrap().parse::<u64>().unwrap();
        messages.extend(page.items.iter().map(|item| number(item.body.as_ref().unwrap())));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    loop {
        let page =
            store.entries(EntryFilter { after, limit: 1_000, ..EntryFilter::default() }).await.unwrap();
        for view in page.items {
            let number = view.id.key.as_str().strip_prefix("key-").unwrap().parse().unwrap();
            assert!(entries.insert(number, (view.state, view.fence.0)).is_none(), "two entries of one key");
        }
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(store.ledger_stats().await.unwrap().entries, entries.len() as u64);
    (messages, entries)
}

#[tokio::test]
async fn acks_and_completions_are_there_both_or_neither() {
    if child_folder().is_some() {
        return;
    }
    let mut rng = fastrand::Rng::with_seed(seed(5));
    let folder = tempfile::tempdir().unwrap();
    let mut output = ChildOutput::default();
    for _ in 0..if long() { 1_000 } else { 30 } {
        kill_child_after(folder.path(), output.next, rng.usize(1..300), |line| output.read_line(line));

        let (messages, entries) = found(folder.path()).await;
        let state = |number: &u64| entries.get(number).map(|(state, _)| *state);
        for number in &output.sent {
            let (there, completed) =
                (messages.contains(number), state(number) == Some(EntryState::Completed));
            assert!(there != completed, "message {number}: there {there}, completed {completed}");
        }
        for (number, (state, _)) in &entries {
            let there = messages.contains(number);
            assert_ne!(
                there,
                *state == EntryState::Completed,
                "message {number} is {state:?}, there: {there}"
            );
        }
        for (number, fence) in &output.granted {
            assert_eq!(entries.get(number).map(|(_, fence)| fence), Some(fence), "an answered claim is lost");
        }
        assert!(output.completed.iter().all(|number| state(number) == Some(EntryState::Completed)));
    }
    println!("{} sent, {} granted, {} completed", output.next, output.granted.len(), output.completed.len());
    assert!(output.completed.len() > 50, "little happened");
}
