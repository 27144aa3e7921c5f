//! Each result of a handler ends its delivery as documented, at every tier.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use common::{Rig, dies_after, run_until};
use hapax_core::{
    EntryId, EntryState, FailureCause, IdempotencyKey, KeySource, Ledger, NewMessage, OnDoubt, QueueConfig,
    Tier,
};
use hapax_worker::{Cx, HandlerOutcome, OnError};

fn keyed(body: &str, key: &str) -> NewMessage {
    NewMessage::new(body.to_owned()).idempotency_key(&IdempotencyKey::new(key).unwrap())
}

/// Returns the outcome that its message names.
async fn obey(word: String, cx: Cx) -> Result<HandlerOutcome<String>, String> {
    match word.as_str() {
        "done" => Ok(HandlerOutcome::Done(format!("attempt {}", cx.attempt()))),
        "retry" if cx.attempt() == 1 => Ok(HandlerOutcome::retry("not yet")),
        "reject" => Ok(HandlerOutcome::reject("never")),
        "error" if cx.attempt() == 1 => Err("broken pipe".into()),
        "panic" if cx.attempt() == 1 => panic!("boom"),
        other => Ok(HandlerOutcome::Done(other.to_owned())),
    }
}

#[tokio::test]
async fn at_least_once() {
    let rig = Rig::new(dies_after(5, QueueConfig::sqs())).await;
    for word in ["done", "retry", "reject", "error", "panic"] {
        rig.send(NewMessage::new(format!("{word:?}"))).await;
    }
    rig.send(NewMessage::new("{\"no\":\"text\"}")).await;
    let worker = rig.builder().handler(obey).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 4 && counts.rejected == 2).await;
    assert!(report.drained, "{report:?}");
    let counts = report.counts;
    assert_eq!((counts.retried, counts.panics, counts.delivered, counts.in_doubt), (3, 1, 9, 0));
    let dead = rig.messages("dead").await;
    let errors: Vec<_> = dead.iter().map(|dead| dead.dead.clone().unwrap()).collect();
    assert!(errors.iter().all(|dead| dead.cause == FailureCause::Rejected));
    let errors: Vec<_> = errors.into_iter().map(|dead| dead.error.unwrap()).collect();
    assert!(errors.iter().any(|error| error == "never"));
    assert!(
        errors.iter().any(|error| error.contains("the body is not what the handler takes")),
        "{errors:?}"
    );
    assert_eq!(rig.messages("jobs").await, []);
}

#[tokio::test]
async fn at_most_once_is_acked_before_the_handler_starts() {
    let rig = Rig::tier(Tier::AtMostOnce).await;
    rig.send(NewMessage::new("1")).await;
    let store = rig.store.clone();
    let queue = rig.queue.clone();
    let look = move |_: u32, _: Cx| {
        let (store, queue) = (store.clone(), queue.clone());
        async move {
            let stats = hapax_core::QueueAdmin::stats(&*store, &queue).await.unwrap();
            assert_eq!((stats.in_flight, stats.ready, stats.totals.acked), (0, 0, 1));
        }
    };
    let worker = rig.builder().handler(look).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done + counts.panics == 1).await;
    assert_eq!((report.counts.done, report.counts.panics), (1, 0));
}

/// The same for the store's own ledger and for one in another store.
async fn effectively_once(own: bool) {
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
    let rig = Rig::new(dies_after(5, config)).await;
    for word in ["done", "retry", "reject", "error"] {
        rig.send(keyed(&format!("{word:?}"), word)).await;
    }
    let builder = || if own { rig.builder() } else { rig.builder_elsewhere() };
    let ledger: Arc<dyn Ledger> = if own { rig.store.clone() } else { rig.elsewhere.clone() };
    let worker = builder().handler(obey).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 3 && counts.rejected == 1).await;
    // An error does not tell whether the effect happened, so the next run is a takeover.
    assert_eq!((report.counts.retried, report.counts.in_doubt, report.counts.takeovers), (2, 1, 1));
    for (key, state, value) in [
        ("done", EntryState::Completed, "\"attempt 1\""),
        ("retry", EntryState::Completed, "\"retry\""),
        ("reject", EntryState::Failed, "\"never\""),
        ("error", EntryState::Completed, "\"error\""),
    ] {
        let id = EntryId::of_queue(&rig.queue, key.parse().unwrap());
        let entry = ledger.entry(&id).await.unwrap().unwrap();
        assert_eq!(entry.state, state, "{key}");
        assert_eq!(entry.outcome.unwrap().value.unwrap().as_str(), value);
    }

    // Duplicates: each gets the recorded outcome without a run; another body under the same key is refused.
    for word in ["done", "retry", "reject", "error"] {
        rig.send(keyed(&format!("{word:?}"), word)).await;
    }
    rig.send(keyed("\"other\"", "done")).await;
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let never = move |_: String, _: Cx| {
        counted.fetch_add(1, Ordering::SeqCst);
        async {}
    };
    let worker = builder().handler(never).build().await.unwrap();
    let report = run_until(worker, |counts| counts.replayed == 4 && counts.mismatches == 1).await;
    assert!(report.drained);
    assert_eq!(runs.load(Ordering::SeqCst), 0);
    let dead: Vec<_> =
        rig.messages("dead").await.into_iter().map(|dead| dead.dead.unwrap().error.unwrap()).collect();
    assert_eq!(
        dead.iter().filter(|error| *error == "never").count(),
        2,
        "a recorded rejection is replayed as one"
    );
    assert!(
        dead.iter().any(|error| error.contains("was used before for a message with another body")),
        "{dead:?}"
    );
    assert_eq!(rig.messages("jobs").await, []);
}

#[tokio::test]
async fn effectively_once_in_one_store() {
    effectively_once(true).await;
}

#[tokio::test]
async fn effectively_once_with_a_ledger_elsewhere() {
    effectively_once(false).await;
}

#[tokio::test]
async fn a_panic_is_in_doubt_and_the_next_run_is_told() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    rig.send(NewMessage::new("1")).await;
    let handler = |_: u32, cx: Cx| async move {
        assert_eq!(cx.key_source(), KeySource::MessageId);
        assert!(cx.is_takeover(), "first run: nothing to take over");
    };
    let worker = rig.builder().handler(handler).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 1).await;
    let counts = report.counts;
    assert_eq!((counts.panics, counts.in_doubt, counts.takeovers, counts.retried), (1, 1, 1, 1));
}

#[tokio::test]
async fn doubt_is_parked_where_asked_for() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    rig.send(keyed("\"panic\"", "k1")).await;
    rig.send(keyed("\"error\"", "k2")).await;
    let worker = rig.builder().handler(obey).on_doubt(OnDoubt::Park).build().await.unwrap();
    let report = run_until(worker, |counts| counts.parked == 2).await;
    assert_eq!(
        (report.counts.done, report.counts.in_doubt),
        (0, 2),
        "an error that says nothing is doubt, too"
    );
    let parked = rig.messages("jobs").await;
    assert!(
        parked.iter().all(|message| message.parked.as_ref().unwrap().0 == FailureCause::InDoubt),
        "{parked:?}"
    );

    // A duplicate finds the key in doubt and is parked without a run.
    rig.send(keyed("\"panic\"", "k1")).await;
    let worker = rig.builder().handler(obey).on_doubt(OnDoubt::Park).build().await.unwrap();
    let report = run_until(worker, |counts| counts.parked == 1).await;
    assert_eq!((report.counts.panics, report.counts.done), (0, 0));
    assert_eq!(rig.stats().await.parked, 3);
}

#[tokio::test]
async fn an_error_means_what_the_worker_says() {
    for (on_error, expected) in [(OnError::Reject, (1, 0)), (OnError::InDoubt, (0, 1))] {
        let rig = Rig::tier(Tier::EffectivelyOnce).await;
        rig.send(keyed("\"error\"", "k")).await;
        let worker = rig.builder().handler(obey).on_error(on_error).build().await.unwrap();
        let report = run_until(worker, |counts| counts.rejected == 1 || counts.done == 1).await;
        assert_eq!((report.counts.rejected, report.counts.takeovers), expected, "{on_error:?}");
    }
}
