//! Fifty messages with the same intended effect, all delivered at the same time: the effect happens once, and all fifty
//! end with its outcome.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{Rig, run_until, until};
use hapax_core::{
    EntryId, EntryState, FailureCause, Json, Ledger as _, NewMessage, QueueStore as _, RecordedOutcome, Tier,
};
use hapax_worker::{Cx, Worker};
use tokio::sync::Notify;

const COPIES: u64 = 50;

/// Sends the copies and runs them; the handler holds its claim until all duplicates have found it in progress.
async fn fifty(outcome: Result<&'static str, &'static str>) -> (Rig, RecordedOutcome) {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let key = "order-7".parse().unwrap();
    let copies = (0..COPIES).map(|_| NewMessage::new(r#"{"cents":1999}"#).idempotency_key(&key));
    for sent in rig.store.send(&rig.queue, copies.collect()).await.unwrap() {
        sent.unwrap();
    }
    let (effects, all_met) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
    let (counted, wait) = (effects.clone(), all_met.clone());
    let handler = move |_: serde_json::Value, _: Cx| {
        let (counted, wait) = (counted.clone(), wait.clone());
        async move {
            counted.fetch_add(1, Ordering::SeqCst);
            wait.notified().await;
            match outcome {
                Ok(value) => hapax_worker::HandlerOutcome::Done(value),
                Err(reason) => hapax_worker::HandlerOutcome::reject(reason),
            }
        }
    };
    // Duplicates that find the key in progress return after this lease; the heartbeat keeps the claim from lapsing
    // earlier.
    let worker = Worker::builder(rig.store.clone(), rig.queue.clone())
        .handler(handler)
        .concurrency(COPIES as usize)
        .lease(Duration::from_secs(3))
        .build()
        .await
        .unwrap();
    let watch = worker.watch();
    let met = async {
        // 49 duplicates were deferred while the first was running.
        until("every duplicate has met the one at work", async || watch.counts().deferred >= COPIES - 1)
            .await;
        all_met.notify_one();
    };
    let ended = run_until(worker, |counts| counts.done + counts.rejected + counts.replayed == COPIES);
    let (report, ()) = tokio::join!(ended, met);
    assert!(report.drained, "{report:?}");
    assert_eq!(effects.load(Ordering::SeqCst), 1, "{report:?}");
    assert_eq!((report.counts.replayed, report.counts.takeovers), (COPIES - 1, 0), "{report:?}");

    let ledger = rig.store.ledger_stats().await.unwrap();
    assert_eq!((ledger.granted, ledger.completed, ledger.replayed), (1, 1, COPIES - 1), "{ledger:?}");
    assert!(ledger.conflicts >= COPIES - 1, "{ledger:?}");
    let entry = rig.store.entry(&EntryId::of_queue(&rig.queue, key)).await.unwrap().unwrap();
    assert_eq!(entry.takeovers, 0);
    let recorded = entry.outcome.unwrap();
    let state = if recorded.failed { EntryState::Failed } else { EntryState::Completed };
    assert_eq!(entry.state, state);
    (rig, recorded)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_effect_and_fifty_acks() {
    let (rig, recorded) = fifty(Ok("charged 1999")).await;
    assert_eq!(recorded, RecordedOutcome::done(Json::of("charged 1999").unwrap()));
    let stats = rig.stats().await;
    assert_eq!((stats.ready, stats.delayed, stats.in_flight, stats.parked), (0, 0, 0, 0), "{stats:?}");
    assert_eq!((stats.totals.acked, stats.totals.expired, stats.totals.dead), (COPIES, 0, 0), "{stats:?}");
}

/// Duplicates get exactly the recorded outcome: here it can be read from the messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn one_refusal_and_fifty_equal_reasons() {
    let (rig, recorded) = fifty(Err("the account is closed")).await;
    assert_eq!(recorded, RecordedOutcome::failed(Json::of("the account is closed").unwrap()));
    let parked = rig.messages("jobs").await;
    assert_eq!(parked.len() as u64, COPIES);
    for message in parked {
        let (cause, reason) =
            message.parked.expect("without a dead-letter queue a rejected message is parked");
        assert_eq!((cause, reason.as_deref()), (FailureCause::Rejected, Some("the account is closed")));
    }
    assert_eq!(rig.stats().await.parked, COPIES);
}
