//! Locks are leases: renewed while a handler runs, and lost with the connection or the time.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::{Extend, Receive, Settle, SettleError, Settled, Settlement, Source as _};
use hapax_kafka::share::ShareSource;
use hapax_kafka::wire::Connect;
use hapax_worker::{Cx, Worker};
use tokio::sync::Notify;

use crate::broker::{Broker, LOCK, PATIENCE, is_empty, next, run_until};
use crate::{Case, alone, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_renewed_lease_outlives_the_lock", a_renewed_lease_outlives_the_lock),
        shared("a_handler_that_blocks_its_runtime_keeps_its_lock", a_blocking_handler_keeps_its_lock),
        shared("a_lock_that_ran_out_is_another_delivery", a_lock_that_ran_out_is_another_delivery),
        alone("a_lost_connection_stops_its_handlers", a_lost_connection_stops_its_handlers),
        shared("a_dropped_receive_loses_no_record", a_dropped_receive_loses_no_record),
    ]
}

fn a_renewed_lease_outlives_the_lock(broker: &Broker) {
    let options = broker.prepare("renewed", 1);
    broker.send("renewed", ["1".to_owned(), "2".to_owned()]);
    let (source, other) = (broker.source(options.clone()), broker.source(options));
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    broker.block_on(async {
        let handler = move |_: u32, cx: Cx| {
            counted.fetch_add(1, Ordering::SeqCst);
            assert_eq!(cx.attempt(), 1);
            tokio::time::sleep(LOCK * 3)
        };
        let worker = Worker::from_source(source).handler(handler).build().await.unwrap();
        let running = run_until(worker, |counts| counts.done == 2);
        // Another member would get them as soon as their locks end.
        let looking = async {
            let start = Instant::now();
            while runs.load(Ordering::SeqCst) < 2 {
                assert!(start.elapsed() < PATIENCE, "the handlers did not start");
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            for _ in 0..5 {
                let receive = Receive { wait_ms: Some(1_000), ..Receive::up_to(10) };
                assert_eq!(other.next(receive).await.unwrap(), [], "they are locked");
            }
        };
        let (report, ()) = tokio::join!(running, looking);
        assert_eq!((report.counts.lost_leases, report.counts.stale_settles), (0, 0), "{report:?}");
        is_empty(&other).await;
    });
    assert_eq!(runs.load(Ordering::SeqCst), 2);
}

fn a_blocking_handler_keeps_its_lock(broker: &Broker) {
    let options = broker.prepare("blocking", 1);
    broker.send("blocking", ["1".to_owned()]);
    let other = broker.source(options.clone());
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let report = runtime.block_on(async {
        let source = Arc::new(ShareSource::connect(options).await.unwrap());
        let handler = move |_: u32, _: Cx| {
            std::thread::sleep(LOCK * 2);
            async {}
        };
        let worker = Worker::from_source(source).handler(handler).build().await.unwrap();
        run_until(worker, |counts| counts.done + counts.stale_settles >= 1).await
    });
    assert_eq!((report.counts.done, report.counts.stale_settles), (1, 0), "{report:?}");
    broker.block_on(is_empty(&other));
}

fn a_lock_that_ran_out_is_another_delivery(broker: &Broker) {
    let options = broker.prepare("ran-out", 1);
    broker.send("ran-out", ["1".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        let first = next(&source, 1).await.remove(0);
        let second = next(&source, 1).await.remove(0);
        assert_eq!((first.attempt, second.attempt, first.id), (1, 2, second.id));
        assert!(second.fence > first.fence);
        // The broker would take it for the second delivery's, because the member is the same.
        let late = Settle::new(first.receipt.clone(), Settlement::Ack);
        assert_eq!(source.settle(vec![late]).await.unwrap(), [Err(SettleError::Stale)]);
        let extend = Extend { receipt: first.receipt.clone(), lease_ms: 1_000, own_lease: false };
        assert_eq!(source.extend(vec![extend]).await.unwrap(), [Err(SettleError::Stale)]);
        assert_eq!(source.revoked().await, [first.receipt], "its handler has to stop");
        let ack = || Settle::ack(second.receipt.clone());
        assert_eq!(source.settle(vec![ack()]).await.unwrap(), [Ok(Settled::Acked)]);
        assert_eq!(source.settle(vec![ack()]).await.unwrap(), [Ok(Settled::Acked)], "safe to repeat");
        is_empty(&source).await;
    });
}

fn a_lost_connection_stops_its_handlers(broker: &Broker) {
    let mut options = broker.prepare("lost-connection", 1);
    options.connect = Connect::plain([broker.proxied().to_string()]);
    broker.send("lost-connection", ["1".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        let delivery = next(&source, 1).await.remove(0);
        broker.proxy().cut_all();
        // The next request notices it.
        let extend = Extend { receipt: delivery.receipt.clone(), lease_ms: 1_000, own_lease: false };
        assert_eq!(source.extend(vec![extend]).await.unwrap(), [Err(SettleError::Stale)]);
        let revoked = tokio::time::timeout(PATIENCE, source.revoked()).await;
        assert_eq!(revoked.expect("the session has ended"), [delivery.receipt]);
        let delivery = next(&source, 1).await.remove(0);
        assert_eq!(source.settle(vec![Settle::ack(delivery.receipt)]).await.unwrap(), [Ok(Settled::Acked)]);
    });
    broker.send("lost-connection", ["2".to_owned()]);
    let (started, attempts) = (Arc::new(Notify::new()), Arc::new(Mutex::new(Vec::new())));
    let (begun, seen) = (started.clone(), attempts.clone());
    broker.block_on(async {
        let handler = move |_: u32, cx: Cx| {
            let run = {
                let mut seen = seen.lock().unwrap();
                seen.push(cx.attempt());
                seen.len()
            };
            let begun = begun.clone();
            async move {
                if run == 1 {
                    begun.notify_one();
                    std::future::pending::<()>().await;
                }
            }
        };
        let worker = Worker::from_source(source.clone()).handler(handler).build().await.unwrap();
        let cut = async {
            started.notified().await;
            broker.proxy().cut_all();
        };
        let (report, ()) = tokio::join!(run_until(worker, |counts| counts.done == 1), cut);
        assert_eq!((report.counts.lost_leases, report.counts.done), (1, 1), "{report:?}");
    });
    assert_eq!(*attempts.lock().unwrap(), [1, 2], "the broker counts what it has delivered");
}

fn a_dropped_receive_loses_no_record(broker: &Broker) {
    let options = broker.prepare("dropped", 1);
    let source = broker.source(options);
    broker.block_on(async {
        is_empty(&source).await;
        let waiting = source.next(Receive { wait_ms: Some(20_000), ..Receive::up_to(10) });
        let dropped = tokio::time::timeout(Duration::from_millis(300), waiting).await;
        assert!(dropped.is_err());
    });
    broker.send("dropped", ["1".to_owned()]);
    broker.block_on(async {
        let delivery = next(&source, 10).await.remove(0);
        assert_eq!(delivery.body, "1");
        assert_eq!(source.settle(vec![Settle::ack(delivery.receipt)]).await.unwrap(), [Ok(Settled::Acked)]);
    });
}
