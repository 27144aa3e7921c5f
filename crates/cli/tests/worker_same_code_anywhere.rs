//! The library's worker: the same code over a local store and over a server.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::Server;
use hapax::core::{EntryId, EntryState};
use hapax::worker::Counts;
use hapax::{Cx, HandlerOutcome, Hapax, IdempotencyKey, QueueConfig, Tier, WorkerBuilder};
use serde::{Deserialize, Serialize};

const PATIENCE: Duration = Duration::from_mins(3);

#[derive(Serialize, Deserialize)]
struct Charge {
    cents: u64,
}

/// The context that a run saw.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    derived_key: String,
    fence: u64,
    takeover: bool,
}

async fn run_until(builder: WorkerBuilder, enough: impl Fn(Counts) -> bool) -> Counts {
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let deadline = Instant::now() + PATIENCE;
    let shutdown = async {
        while !enough(watch.counts()) {
            assert!(Instant::now() < deadline, "it took too long: {:?}", watch.counts());
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let report = worker.run(shutdown).await.unwrap();
    assert!(report.drained, "{report:?}");
    report.counts
}

/// The whole scenario: an effect in doubt, its takeover, and duplicates that get the outcome.
async fn story(url: &str) {
    let hapax = Hapax::open(url).await.unwrap();
    let charges = hapax.queue::<Charge>("charges").unwrap();
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::default() };
    charges.ensure(config).await.unwrap();
    let key = IdempotencyKey::new("order-7").unwrap();
    let send = async || {
        charges.send_with(&Charge { cents: 1999 }, |message| message.idempotency_key(&key)).await.unwrap();
    };
    let seen: Arc<Mutex<Vec<Seen>>> = Arc::default();
    let effect = seen.clone();
    let charge = move |charge: Charge, cx: Cx| {
        let told = Seen {
            derived_key: cx.derived_key("charge").to_string(),
            fence: cx.fence().0,
            takeover: cx.is_takeover(),
        };
        effect.lock().unwrap().push(told);
        async move {
            if cx.is_takeover() {
                HandlerOutcome::Done(charge.cents)
            } else {
                HandlerOutcome::in_doubt("the call timed out")
            }
        }
    };
    send().await;
    let counts = run_until(charges.worker(charge.clone()), |counts| counts.done == 1).await;
    assert_eq!((counts.in_doubt, counts.takeovers), (1, 1), "{url}");
    {
        let seen = seen.lock().unwrap();
        let [first, second] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!((first.takeover, second.takeover), (false, true), "{url}");
        assert_eq!(first.derived_key, second.derived_key, "{url}");
        assert!(first.fence < second.fence, "{url}: {seen:?}");
    }
    for _ in 0..5 {
        send().await;
    }
    let counts = run_until(charges.worker(charge), |counts| counts.replayed == 5).await;
    assert_eq!(counts.done, 0);
    assert_eq!(seen.lock().unwrap().len(), 2, "{url}: duplicates cause no effect");
    let entry = hapax.ledger().entry(&EntryId::of_queue(charges.name(), key)).await.unwrap().unwrap();
    assert_eq!(entry.state, EntryState::Completed);
    assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), "1999", "{url}");
}

#[tokio::test]
async fn in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    story(&format!("embedded:{}", folder.path().display())).await;
}

#[tokio::test]
async fn over_a_server() {
    let server = Server::start();
    story(&server.endpoint).await;
}
