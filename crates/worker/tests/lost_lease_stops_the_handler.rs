//! A worker that cannot renew its lease stops its handler at the next await, by its own clock; its later calls cannot
//! affect the delivery of its successor.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::{Rig, TestSource, until, wait_for};
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, EntryState, Json, Ledger as _, NewMessage,
    QueueStore as _, Receive, RecordedOutcome, Settle, Settled, Tier,
};
use hapax_worker::Cx;

/// Records that the handler was dropped before its end.
struct Canary(Arc<AtomicBool>);

impl Drop for Canary {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn at_its_next_await_and_its_settle_is_refused() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    rig.send(NewMessage::new("1")).await;
    let source = TestSource::new(&rig);
    let (dropped, told, runs) =
        (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default(), AtomicU32::new(0));
    let handler = {
        let (dropped, told, source) = (dropped.clone(), told.clone(), source.clone());
        move |_: u32, cx: Cx| {
            assert_eq!(runs.fetch_add(1, Ordering::SeqCst), 0, "only the first delivery is ours");
            let (canary, told, source) = (Canary(dropped.clone()), told.clone(), source.clone());
            async move {
                let _canary = canary;
                source.down.store(true, Ordering::SeqCst);
                tokio::spawn(async move {
                    cx.cancelled().await;
                    told.store(cx.is_cancelled(), Ordering::SeqCst);
                });
                std::future::pending::<()>().await;
            }
        }
    };
    let builder = rig.builder().source(source.clone()).handler(handler).lease(Duration::from_millis(300));
    // One at a time, so that the worker itself does not receive the message again when its lease runs out.
    let worker = builder.concurrency(1).build().await.unwrap();
    let watch = worker.watch();
    let steal = async {
        until("the handler is dropped", async || dropped.load(Ordering::SeqCst)).await;
        until("its task is told", async || told.load(Ordering::SeqCst)).await;
        wait_for(&watch, |counts| counts.lost_leases == 1).await;
        // Another consumer gets the message; then the store answers the zombie again.
        let receive = Receive { wait_ms: Some(20_000), lease_ms: Some(60_000), ..Receive::default() };
        let successor = rig.store.receive(&rig.queue, receive).await.unwrap().pop().unwrap();
        assert_eq!(successor.attempt, 2);
        source.down.store(false, Ordering::SeqCst);
        wait_for(&watch, |counts| counts.stale_settles == 1).await;
        assert_eq!(rig.stats().await.in_flight, 1, "the successor still holds it");
        let acked = rig.store.settle(&rig.queue, vec![Settle::ack(successor.receipt)]).await.unwrap();
        assert_eq!(acked, [Ok(Settled::Acked)]);
    };
    let report = worker.run(steal).await.unwrap();
    assert_eq!((report.counts.done, report.counts.stale_settles), (0, 1), "{report:?}");
}

/// The handler blocks its thread, so it cannot be stopped. Its claim lapses because the ledger is unreachable, and
/// passes to another holder: the handler's outcome is refused, and its delivery is not acked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zombies_outcome_is_refused_and_its_message_replays_the_successors() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    let key = "order-7".parse().unwrap();
    rig.send(NewMessage::new("1").idempotency_key(&key)).await;
    let (started, go_on) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let handler = {
        let (started, go_on) = (started.clone(), go_on.clone());
        move |_: u32, cx: Cx| {
            // The second delivery finds the successor's outcome and does not run.
            assert_eq!(cx.attempt(), 1);
            started.store(true, Ordering::SeqCst);
            while !go_on.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            async { Ok::<_, String>("the zombie's") }
        }
    };
    let builder = rig.builder_elsewhere().handler(handler).lease(Duration::from_millis(300));
    let worker = builder.concurrency(1).build().await.unwrap();
    let watch = worker.watch();
    let id = EntryId::of_queue(&rig.queue, key);
    let ledger = rig.elsewhere.clone();
    let take_over = async {
        until("the handler runs", async || started.load(Ordering::SeqCst)).await;
        ledger.down.store(true, Ordering::SeqCst);
        wait_for(&watch, |counts| counts.lost_leases == 1).await;
        ledger.down.store(false, Ordering::SeqCst);
        let mut request = ClaimRequest::new(id.clone(), "successor".parse().unwrap(), 1_500);
        let entry = ledger.entry(&id).await.unwrap().unwrap();
        request.fingerprint = entry.fingerprint;
        until("the claim lapses", async || {
            ledger.entry(&id).await.unwrap().unwrap().state == EntryState::InDoubt
        })
        .await;
        let claim = ledger.claim(vec![request]).await.unwrap().pop().unwrap().unwrap();
        let Claim::Granted(grant) = claim else { panic!("{claim:?}") };
        assert!(grant.takeover);
        go_on.store(true, Ordering::SeqCst);
        wait_for(&watch, |counts| counts.stale_settles == 1).await;
        assert_eq!(rig.stats().await.totals.acked, 0, "a stale token blocks the ack");
        let outcome = RecordedOutcome::done(Json::of("the successor's").unwrap());
        let ending = ClaimEnding::Complete { outcome, ttl_ms: 60_000 };
        let end = EndClaim { id: id.clone(), token: grant.token, ending };
        assert_eq!(ledger.end(vec![end]).await.unwrap(), [Ok(())]);
        wait_for(&watch, |counts| counts.replayed == 1).await;
    };
    let report = worker.run(take_over).await.unwrap();
    assert_eq!(report.counts.stale_settles, 1, "{report:?}");
    let outcome = rig.elsewhere.entry(&id).await.unwrap().unwrap().outcome.unwrap();
    assert_eq!(outcome.value.unwrap().as_str(), "\"the successor's\"");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn but_a_claim_is_kept_when_its_delivery_cannot_be_kept_any_longer() {
    let rig = Rig::tier(Tier::EffectivelyOnce).await;
    rig.send(NewMessage::new("1")).await;
    let source = TestSource::new(&rig);
    source.too_long.store(true, Ordering::SeqCst);
    let runs = Arc::<AtomicU32>::default();
    let handler = {
        let runs = runs.clone();
        move |_: u32, _: Cx| {
            runs.fetch_add(1, Ordering::SeqCst);
            async {
                // Many times the lease.
                tokio::time::sleep(Duration::from_secs(3)).await;
                Ok::<_, String>(7)
            }
        }
    };
    let builder = rig.builder().source(source).lease(Duration::from_millis(600)).handler(handler);
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let acked = async {
        wait_for(&watch, |counts| counts.done + counts.in_doubt > 0).await;
        // A second delivery that waits for this one may lose its own lease meanwhile; the claim is still held.
        assert_eq!((watch.counts().in_doubt, watch.counts().takeovers), (0, 0), "its claim was renewed");
        until("it is acked", async || rig.stats().await.totals.acked == 1).await;
    };
    worker.run(acked).await.unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
