//! Fifty duplicates at the same time: one effect, fifty equal answers.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::time::{claim_left_ms, manual_clock, pass_leases, ticking};
use common::{Rig, run_until, until};
use hapax_core::{EntryId, Fence, IdempotencyKey, Ledger as _, NewMessage, OnDoubt, QueueConfig, Tier};
use hapax_worker::{Cx, Idempotent, IdempotentError, OnError, idempotent};
use tokio::sync::Notify;
use tokio::task::JoinSet;

fn id(key: &str) -> EntryId {
    EntryId::new("test".parse().unwrap(), key.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn calls_of_an_idempotent_function() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let effects = Arc::new(AtomicU32::new(0));
    let mut calls = JoinSet::new();
    for _ in 0..50 {
        let (store, effects) = (rig.store.clone(), effects.clone());
        calls.spawn(async move {
            let charge = || async move {
                let charged = effects.fetch_add(1, Ordering::SeqCst) + 1;
                tokio::time::sleep(Duration::from_millis(50)).await;
                Ok::<_, String>(format!("charge number {charged}"))
            };
            idempotent(store, id("order-7"), charge).await.unwrap()
        });
    }
    let answers = calls.join_all().await;
    assert_eq!(effects.load(Ordering::SeqCst), 1);
    assert_eq!(answers, vec!["charge number 1".to_owned(); 50]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn messages_of_a_queue_with_two_workers() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let key = IdempotencyKey::new("order-7").unwrap();
    for _ in 0..50 {
        rig.send(NewMessage::new("7").idempotency_key(&key)).await;
    }
    let effects = Arc::new(AtomicU32::new(0));
    let charge = {
        let effects = effects.clone();
        move |_: u32, _: Cx| {
            let effects = effects.clone();
            async move {
                tokio::time::sleep(Duration::from_millis(30)).await;
                effects.fetch_add(1, Ordering::SeqCst);
            }
        }
    };
    let builder = rig.builder().handler(charge).lease(Duration::from_mins(1));
    let (one, two) = (builder.clone().build().await.unwrap(), builder.build().await.unwrap());
    let (watch, other) = (one.watch(), two.watch());
    let both = move |counts: &hapax_worker::Counts, other: &hapax_worker::Watch| {
        counts.done + counts.replayed + other.counts().done + other.counts().replayed == 50
    };
    let (one, two) = tokio::join!(run_until(one, |c| both(c, &other)), run_until(two, |c| both(c, &watch)));
    assert_eq!(effects.load(Ordering::SeqCst), 1);
    assert_eq!((one.counts.done + two.counts.done, one.counts.replayed + two.counts.replayed), (1, 49));
    let stats = rig.stats().await;
    assert_eq!((stats.totals.acked, stats.totals.expired, stats.totals.retried), (50, 0, 0));
}

#[tokio::test]
async fn an_error_frees_the_key_and_a_rejection_stays() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let once = |key| Idempotent::new(rig.store.clone(), id(key));
    let failed = once("a").run(async |_| Err::<u32, _>("busy")).await.unwrap_err();
    assert!(matches!(failed, IdempotentError::Failed("busy")));
    assert_eq!(once("a").run(async |_| Ok::<_, String>(3)).await.unwrap(), 3);

    let rejected = once("b").on_error(OnError::Reject).run(async |_| Err::<u32, _>("no such account")).await;
    assert!(matches!(rejected, Err(IdempotentError::Failed("no such account"))));
    let again = once("b").run(async |_| Ok::<_, String>(3)).await.unwrap_err();
    assert!(
        matches!(&again, IdempotentError::FailedBefore { reason } if reason == "no such account"),
        "{again}"
    );
}

#[tokio::test]
async fn a_panic_leaves_doubt() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let (store, first) = (rig.store.clone(), Arc::new(AtomicU32::new(0)));
    let seen = first.clone();
    let boom = tokio::spawn(async move {
        let once = Idempotent::new(store, id("a"));
        let run = async |run: hapax_worker::Run| -> Result<u32, String> {
            seen.store(u32::from(run.fence() > Fence(0)), Ordering::SeqCst);
            panic!("boom")
        };
        once.run(run).await
    });
    assert!(boom.await.unwrap_err().is_panic());
    assert_eq!(first.load(Ordering::SeqCst), 1);
    let once = || Idempotent::new(rig.store.clone(), id("a"));
    let parked = once().on_doubt(OnDoubt::Park).run(async |_| Ok::<_, String>(1)).await;
    assert!(matches!(parked, Err(IdempotentError::InDoubt)));
    let takeover = once().run(async |run| Ok::<_, String>(run.is_takeover())).await.unwrap();
    assert!(takeover);
}

#[tokio::test]
async fn another_request_under_the_same_key_is_refused() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let once = |request: &str| Idempotent::new(rig.store.clone(), id("a")).fingerprint_of(request);
    assert_eq!(once("10 EUR").run(async |_| Ok::<_, String>(10)).await.unwrap(), 10);
    assert_eq!(once("10 EUR").run(async |_| Ok::<_, String>(11)).await.unwrap(), 10);
    let other = once("20 EUR").run(async |_| Ok::<_, String>(20)).await;
    assert!(matches!(other, Err(IdempotentError::Mismatch)));
}

#[tokio::test]
async fn a_long_run_keeps_its_claim_and_a_dropped_one_lets_it_lapse() {
    const LEASE: Duration = Duration::from_secs(15);
    let clock = manual_clock();
    let rig = Rig::on_clock(QueueConfig::sqs(), clock.clone()).await;
    let once = |key| Idempotent::new(rig.store.clone(), id(key)).clock(clock.clone()).lease(LEASE);
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (first, begun, wait) = (once("a"), started.clone(), go_on.clone());
    let long = tokio::spawn(async move {
        first
            .run(async |_| {
                begun.notify_one();
                wait.notified().await;
                Ok::<_, String>(1)
            })
            .await
    });
    started.notified().await;
    pass_leases(&clock, LEASE, 4, async || claim_left_ms(&*rig.store).await).await;
    let duplicate = tokio::spawn(once("a").run(async |_| Ok::<_, String>(2)));
    until("the duplicate asks", async || rig.store.ledger_stats().await.unwrap().conflicts == 1).await;
    go_on.notify_one();
    assert_eq!(duplicate.await.unwrap().unwrap(), 1, "the duplicate waits for it");
    assert_eq!(long.await.unwrap().unwrap(), 1);

    let hanging = once("b").run(async |_| {
        started.notify_one();
        std::future::pending::<Result<bool, String>>().await
    });
    tokio::select! {
        _ = hanging => panic!("it hangs"),
        () = started.notified() => {}
    }
    let next = once("b").run(async |run| Ok::<_, String>(run.is_takeover()));
    assert!(ticking(&clock, Duration::from_millis(50), next).await.unwrap());
}
