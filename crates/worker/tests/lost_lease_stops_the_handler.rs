//! A worker that cannot renew its lease stops its handler at the next await, by its own clock; its later calls cannot
//! affect the delivery of its successor.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use common::time::{claim_left_ms, manual_clock, pass_leases, ticking};
use common::{Rig, TIMEOUT, TestSource, until, wait_for};
use hapax_core::{
    Claim, ClaimEnding, ClaimRequest, EndClaim, EntryId, EntryState, Json, Ledger as _, ManualClock,
    NewMessage, QueueConfig, QueueStore as _, Receive, RecordedOutcome, Settle, Settled, Tier,
};
use hapax_worker::Cx;

/// Long beside the time that passes while the worker repeats its calls.
const LEASE: Duration = Duration::from_hours(1);
const LEASE_MS: u64 = LEASE.as_millis() as u64;
const STEP: Duration = Duration::from_millis(50);

async fn rig(tier: Tier) -> (Arc<ManualClock>, Rig) {
    let clock = manual_clock();
    (clock.clone(), Rig::on_clock(QueueConfig { tier, ..QueueConfig::sqs() }, clock).await)
}

/// Records that the handler was dropped before its end.
struct Canary(Arc<AtomicBool>);

impl Drop for Canary {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_stops_at_its_next_await_and_its_settle_is_refused() {
    let (clock, rig) = rig(Tier::AtLeastOnce).await;
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
    let builder = rig.builder().source(source.clone()).handler(handler).clock(clock.clone()).lease(LEASE);
    // One at a time, so that the worker itself does not receive the message again when its lease runs out.
    let worker = builder.concurrency(1).build().await.unwrap();
    let watch = worker.watch();
    let steal = async {
        until("the store is down", async || source.down.load(Ordering::SeqCst)).await;
        clock.advance_ms(LEASE_MS);
        until("the handler is dropped", async || dropped.load(Ordering::SeqCst)).await;
        until("its task is told", async || told.load(Ordering::SeqCst)).await;
        wait_for(&watch, |counts| counts.lost_leases == 1).await;
        // Another consumer gets the message; then the store answers the zombie again.
        let receive = Receive { lease_ms: Some(LEASE_MS), ..Receive::default() };
        let successor = rig.store.receive(&rig.queue, receive).await.unwrap().pop().unwrap();
        assert_eq!(successor.attempt, 2);
        source.down.store(false, Ordering::SeqCst);
        wait_for(&watch, |counts| counts.stale_settles == 1).await;
        assert_eq!(rig.stats().await.in_flight, 1, "the successor still holds it");
        let acked = rig.store.settle(&rig.queue, vec![Settle::ack(successor.receipt)]).await.unwrap();
        assert_eq!(acked, [Ok(Settled::Acked)]);
    };
    let running = tokio::time::timeout(TIMEOUT, worker.run(steal));
    let report = ticking(&clock, STEP, running).await.unwrap().unwrap();
    assert_eq!((report.counts.done, report.counts.stale_settles), (0, 1), "{report:?}");
}

/// The handler blocks its thread, so it cannot be stopped. Its claim lapses because the ledger is unreachable, and
/// passes to another holder: the handler's outcome is refused, and its delivery is not acked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_zombies_outcome_is_refused_and_its_message_replays_the_successors() {
    let (clock, rig) = rig(Tier::EffectivelyOnce).await;
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
    let builder = rig.builder_elsewhere().handler(handler).clock(clock.clone()).lease(LEASE);
    let worker = builder.concurrency(1).build().await.unwrap();
    let watch = worker.watch();
    let id = EntryId::of_queue(&rig.queue, key);
    let ledger = rig.elsewhere.clone();
    let take_over = async {
        until("the handler runs", async || started.load(Ordering::SeqCst)).await;
        ledger.down.store(true, Ordering::SeqCst);
        // The delivery is renewed, its claim is not.
        for _ in 0..5 {
            clock.advance_ms(LEASE_MS / 6);
            until("the delivery is renewed", async || rig.delivery_left_ms(&clock).await > LEASE_MS / 2)
                .await;
        }
        clock.advance_ms(LEASE_MS / 6);
        wait_for(&watch, |counts| counts.lost_leases == 1).await;
        ledger.down.store(false, Ordering::SeqCst);
        let mut request = ClaimRequest::new(id.clone(), "successor".parse().unwrap(), LEASE_MS);
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
    let running = tokio::time::timeout(TIMEOUT, worker.run(take_over));
    let report = ticking(&clock, STEP, running).await.unwrap().unwrap();
    assert_eq!(report.counts.stale_settles, 1, "{report:?}");
    let outcome = rig.elsewhere.entry(&id).await.unwrap().unwrap().outcome.unwrap();
    assert_eq!(outcome.value.unwrap().as_str(), "\"the successor's\"");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_is_renewed_after_its_delivery_reached_the_longest_lease() {
    let (clock, rig) = rig(Tier::EffectivelyOnce).await;
    rig.send(NewMessage::new("1")).await;
    let source = TestSource::new(&rig);
    source.too_long.store(true, Ordering::SeqCst);
    let (runs, go_on) = (Arc::<AtomicU32>::default(), Arc::new(tokio::sync::Notify::new()));
    let handler = {
        let (runs, go_on) = (runs.clone(), go_on.clone());
        move |_: u32, _: Cx| {
            let (runs, go_on) = (runs.clone(), go_on.clone());
            async move {
                runs.fetch_add(1, Ordering::SeqCst);
                go_on.notified().await;
                Ok::<_, String>(7)
            }
        }
    };
    let builder = rig.builder().source(source).clock(clock.clone()).lease(LEASE).handler(handler);
    let worker = builder.build().await.unwrap();
    let watch = worker.watch();
    let acked = async {
        until("it runs", async || runs.load(Ordering::SeqCst) == 1).await;
        pass_leases(&clock, LEASE, 4, async || claim_left_ms(&*rig.store).await).await;
        go_on.notify_one();
        wait_for(&watch, |counts| counts.done + counts.in_doubt > 0).await;
        // A second delivery that waits for this one may lose its own lease meanwhile; the claim is still held.
        assert_eq!((watch.counts().in_doubt, watch.counts().takeovers), (0, 0), "its claim was renewed");
        let acked = until("it is acked", async || rig.stats().await.totals.acked == 1);
        ticking(&clock, STEP, acked).await;
    };
    tokio::time::timeout(TIMEOUT, worker.run(acked)).await.unwrap().unwrap();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
}
