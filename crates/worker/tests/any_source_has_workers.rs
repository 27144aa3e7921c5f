//! A worker needs a source and nothing else: no queue, no store, no lease.

mod common;

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::time::{claim_left_ms, manual_clock, pass_leases};
use common::{Rig, TIMEOUT, run_until, wait_for};
use hapax_conformance::MemoryInbox;
use hapax_core::{
    Batch, Capabilities, Delivery, Extend, NewMessage, QueueAdmin as _, QueueConfig, QueueSource,
    QueueStore as _, Receipt, Receive, RemainingLease, Scope, Settle, SettleError, Settled, Settlement,
    Source, SourceDescription, StoreError, Tier,
};
use hapax_worker::{Cx, HandlerOutcome, Worker};
use tokio::sync::Notify;

/// A log with partitions: no leases, no administration; a delivery ends when it is settled or revoked.
struct Log {
    capabilities: Capabilities,
    waiting: Mutex<VecDeque<Delivery>>,
    settled: Mutex<Vec<Settlement>>,
    revoked: Mutex<Vec<Receipt>>,
    revoke: Notify,
    arrived: Notify,
}

impl Log {
    /// A log with the deliveries of a real store's queue.
    async fn of(rig: &Rig, bodies: &[&str]) -> Arc<Self> {
        for body in bodies {
            rig.send(NewMessage::new(body.to_string())).await;
        }
        let waiting = rig.store.receive(&rig.queue, Receive::up_to(100)).await.unwrap();
        Arc::new(Self {
            capabilities: rig.store.capabilities(),
            waiting: Mutex::new(waiting.into_iter().map(|one| Delivery { lease_ms: 0, ..one }).collect()),
            settled: Mutex::default(),
            revoked: Mutex::default(),
            revoke: Notify::new(),
            arrived: Notify::new(),
        })
    }
}

#[async_trait::async_trait]
impl Source for Log {
    async fn describe(&self) -> Result<SourceDescription, StoreError> {
        Ok(SourceDescription {
            name: "orders.v1".into(),
            queue: None,
            scope: Scope::new("log/orders.v1").unwrap(),
            config: QueueConfig::default(),
            dead_retention_ms: None,
            lease_ms: None,
            held_p99_ms: None,
            capabilities: self.capabilities.clone(),
        })
    }

    async fn next(&self, receive: Receive) -> Result<Vec<Delivery>, StoreError> {
        assert_eq!(receive.lease_ms, None, "nothing is leased");
        let next: Vec<_> = {
            let mut waiting = self.waiting.lock().unwrap();
            let count = receive.max.min(waiting.len());
            waiting.drain(..count).collect()
        };
        if next.is_empty() {
            self.arrived.notified().await;
        }
        Ok(next)
    }

    async fn settle(&self, batch: Vec<Settle>) -> Batch<Settled, SettleError> {
        let mut settled = self.settled.lock().unwrap();
        Ok(batch
            .into_iter()
            .map(|settle| {
                settled.push(settle.settlement);
                Ok(Settled::Acked)
            })
            .collect())
    }

    async fn extend(&self, _: Vec<Extend>) -> Batch<RemainingLease, SettleError> {
        panic!("a source without leases is not asked to keep any");
    }

    async fn revoked(&self) -> Vec<Receipt> {
        self.revoke.notified().await;
        std::mem::take(&mut *self.revoked.lock().unwrap())
    }
}

#[tokio::test]
async fn a_source_without_leases_is_worked_on() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let log = Log::of(&rig, &["1", "2", "3"]).await;
    let seen = Arc::new(Mutex::new(Vec::new()));
    let handler = {
        let seen = seen.clone();
        move |number: u32, cx: Cx| {
            seen.lock().unwrap().push((number, cx.queue().to_owned()));
            async move { if number == 2 { HandlerOutcome::retry("busy") } else { HandlerOutcome::Done(()) } }
        }
    };
    // A short lease would end the deliveries if it applied to them.
    let builder = Worker::from_source(log.clone()).handler(handler).lease(Duration::from_millis(1));
    let report = run_until(builder.build().await.unwrap(), |counts| counts.done + counts.retried == 3).await;
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.lost_leases, log.settled.lock().unwrap().len()), (0, 3));
    let mut seen = std::mem::take(&mut *seen.lock().unwrap());
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3].map(|number| (number, "orders.v1".to_owned())));
}

/// The claim is the only lease here: the heartbeat must be told of it when it is granted.
#[tokio::test]
async fn a_claim_is_renewed_where_the_source_has_no_leases() {
    const LEASE: Duration = Duration::from_mins(1);
    let clock = manual_clock();
    let config = QueueConfig { tier: Tier::EffectivelyOnce, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    let log = Log::of(&rig, &["1"]).await;
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (started, go_on) = (started.clone(), go_on.clone());
        move |_: u32, _: Cx| {
            let (started, go_on) = (started.clone(), go_on.clone());
            async move {
                started.notify_one();
                go_on.notified().await;
            }
        }
    };
    let builder = Worker::from_source(log.clone()).tier(Tier::EffectivelyOnce).ledger(rig.store.clone());
    let worker = builder.handler(handler).clock(clock.clone()).lease(LEASE).build().await.unwrap();
    let watch = worker.watch();
    let script = async {
        started.notified().await;
        pass_leases(&clock, LEASE, 4, async || claim_left_ms(&*rig.store).await).await;
        go_on.notify_one();
        wait_for(&watch, |counts| counts.done + counts.lost_leases == 1).await;
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    assert_eq!((report.counts.done, report.counts.lost_leases), (1, 0), "{report:?}");
}

#[tokio::test]
async fn a_revoked_delivery_stops_its_handler_and_no_other() {
    let rig = Rig::tier(Tier::AtLeastOnce).await;
    let log = Log::of(&rig, &["1", "2"]).await;
    let (started, go_on) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let handler = {
        let (log, started, go_on) = (log.clone(), started.clone(), go_on.clone());
        move |number: u32, cx: Cx| {
            let (log, started, go_on) = (log.clone(), started.clone(), go_on.clone());
            async move {
                if number == 1 {
                    log.revoked.lock().unwrap().push(cx.delivery().receipt.clone());
                    started.notify_one();
                    std::future::pending::<()>().await;
                }
                go_on.notified().await;
            }
        }
    };
    let worker = Worker::from_source(log.clone()).handler(handler).build().await.unwrap();
    let watch = worker.watch();
    let end = async {
        started.notified().await;
        log.revoke.notify_one();
        wait_for(&watch, |counts| counts.lost_leases == 1).await;
        go_on.notify_one();
        wait_for(&watch, |counts| counts.done == 1).await;
    };
    let report = worker.run(end).await.unwrap();
    assert!(report.drained, "{report:?}");
    assert_eq!((report.counts.done, report.counts.lost_leases), (1, 1));
}

#[tokio::test]
async fn a_deferral_of_the_handler_counts_no_attempt() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = Rig::new(common::dies_after(1, QueueConfig { tier, ..QueueConfig::default() })).await;
        rig.send(NewMessage::new("1")).await;
        let runs = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let counted = runs.clone();
        let handler = move |_: u32, cx: Cx| {
            let run = counted.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
            assert!(!cx.is_takeover(), "nothing happened before");
            async move {
                if run < 3 {
                    HandlerOutcome::defer(Duration::ZERO, "not now")
                } else {
                    HandlerOutcome::Done(7)
                }
            }
        };
        let report =
            run_until(rig.builder().handler(handler).build().await.unwrap(), |counts| counts.done == 1).await;
        assert_eq!((report.counts.deferred, report.counts.retried), (3, 0), "{tier:?}");
        assert_eq!(rig.stats().await.totals.dead, 0, "{tier:?}: a limit of one attempt was not reached");
    }
}

#[tokio::test]
async fn an_async_transaction_carries_the_effect_once() {
    let rig = Rig::tier(Tier::Transactional).await;
    let inbox = MemoryInbox::new(Duration::from_secs(5));
    let key = "order-7".parse().unwrap();
    for _ in 0..5 {
        rig.send(NewMessage::new("1999").idempotency_key(&key)).await;
    }
    rig.send(NewMessage::new("5")).await;
    let source = QueueSource::new(rig.store.clone(), rig.queue.clone());
    let builder =
        Worker::from_source(Arc::new(source)).async_transactional_handler(&inbox, |cents: u32, tx, cx| {
            Box::pin(async move {
                tokio::task::yield_now().await;
                tx.write(cents.to_string());
                if cents == 5 && cx.attempt() == 1 { Err("not yet") } else { Ok(cents) }
            })
        });
    let worker = builder.build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 2 && counts.replayed == 4).await;
    assert!(report.drained, "{report:?}");
    let mut effects = inbox.effects().await;
    effects.sort();
    assert_eq!(effects, ["1999", "5"], "the failed attempt was rolled back");
    assert_eq!(rig.store.stats(&rig.queue).await.unwrap().totals.acked, 6);
}
