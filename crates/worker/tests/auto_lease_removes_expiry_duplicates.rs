//! Handler run times that grow past a fixed lease cause duplicates in a plain consumer; a lease that adapts to them
//! does not.

mod common;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use common::time::manual_clock;
use common::{Rig, TIMEOUT, until};
use hapax_core::{
    ManualClock, NewMessage, QueueAdmin as _, QueueConfig, QueueName, QueueStore as _, Receive, Settle, Tier,
};
use hapax_embedded::{Embedded, Options};
use hapax_worker::{AutoLease, Cx, TimeSketch};

/// Run times that grow from 2 s to 60 s, with an occasional slow one.
fn time_ms(number: u64) -> u64 {
    let slow = if number % 40 == 7 { 3 } else { 2 };
    (2_000 + number * 58_000 / 200) * slow / 2
}

/// A plain consumer on a manual clock: it receives, works for the time that its message says, and settles. No
/// heartbeat. Returns how many messages were delivered more than once, and how often.
async fn consume(mut lease_ms: impl FnMut(u64) -> u64) -> (usize, u64) {
    let folder = tempfile::tempdir().unwrap();
    let clock = Arc::new(ManualClock::at_ms(1_800_000_000_000));
    let store =
        Embedded::open(folder.path(), Options { clock: clock.clone(), ..Options::default() }).unwrap();
    let queue = QueueName::new("jobs").unwrap();
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    let mut deliveries: BTreeMap<u64, u64> = BTreeMap::new();
    for number in 0..200u64 {
        store.send(&queue, vec![NewMessage::new(number.to_string())]).await.unwrap()[0].as_ref().unwrap();
        let mut took_ms = 0;
        loop {
            let receive = Receive { lease_ms: Some(lease_ms(took_ms)), ..Receive::default() };
            let Some(delivery) = store.receive(&queue, receive).await.unwrap().pop() else { break };
            let which: u64 = std::str::from_utf8(&delivery.body).unwrap().parse().unwrap();
            *deliveries.entry(which).or_default() += 1;
            // The lease runs out while it works: another consumer also gets the message.
            took_ms = time_ms(which);
            if took_ms > delivery.lease_ms {
                clock.advance_ms(delivery.lease_ms);
                let again =
                    store.receive(&queue, Receive { lease_ms: Some(600_000), ..Receive::default() }).await;
                let again = again.unwrap().pop().unwrap();
                *deliveries.entry(which).or_default() += 1;
                clock.advance_ms(took_ms - delivery.lease_ms);
                assert!(store.settle(&queue, vec![Settle::ack(delivery.receipt)]).await.unwrap()[0].is_err());
                store.settle(&queue, vec![Settle::ack(again.receipt)]).await.unwrap()[0].as_ref().unwrap();
            } else {
                clock.advance_ms(took_ms);
                store.settle(&queue, vec![Settle::ack(delivery.receipt)]).await.unwrap()[0].as_ref().unwrap();
            }
        }
    }
    let twice = deliveries.values().filter(|times| **times > 1).count();
    (twice, deliveries.values().sum())
}

#[tokio::test]
async fn a_plain_consumer_whose_handler_slows_down() {
    let (twice, all) = consume(|_| 30_000).await;
    assert!(
        twice > 75 && all > 275,
        "a fixed lease of 30 s duplicates what takes longer: {twice} of 200, {all}"
    );

    let auto = AutoLease { start_ms: 30_000, ..AutoLease::default() };
    let mut times = TimeSketch::default();
    let follow = |took_ms: u64| {
        if took_ms > 0 {
            times.record(took_ms);
        }
        auto.lease_ms(&times)
    };
    assert_eq!(
        consume(follow).await,
        (0, 200),
        "the same handler times, a lease that follows them, no heartbeat"
    );
}

/// The same with a worker. One run is also far slower than all before it: the heartbeat covers that case.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_whose_handler_slows_down() {
    const MIN_MS: u64 = 300;
    let clock = manual_clock();
    let config = QueueConfig { lease_ms: 400, tier: Tier::AtLeastOnce, ..QueueConfig::sqs() };
    let rig = Rig::on_clock(config, clock.clone()).await;
    for number in 0..40u64 {
        rig.send(NewMessage::new(number.to_string())).await;
    }
    let runs = Arc::new(Mutex::new(BTreeMap::<u64, u32>::new()));
    let handler = {
        let (runs, timer) = (runs.clone(), hapax_claim::Timer::new(clock.clone()));
        move |number: u64, _: Cx| {
            *runs.lock().unwrap().entry(number).or_default() += 1;
            let took_ms = if number < 30 { 5 } else { 150 * (number - 29) };
            let timer = timer.clone();
            async move { timer.sleep_ms(took_ms).await }
        }
    };
    let auto = AutoLease { start_ms: 400, min_ms: MIN_MS, max_ms: 10_000, margin: 2.0 };
    let builder = rig.builder().handler(handler).clock(clock.clone()).concurrency(10);
    let worker = builder.lease_auto_with(auto).build().await.unwrap();
    let watch = worker.watch();
    assert_eq!(watch.lease_ms(), 400, "it starts from what it is given");
    let script = async {
        while watch.counts().done < 40 {
            clock.advance_ms(MIN_MS / 12);
            // A heartbeat is due after a third of a lease.
            until("every lease is renewed", async || rig.delivery_left_ms(&clock).await >= MIN_MS / 2).await;
        }
    };
    let report = tokio::time::timeout(TIMEOUT, worker.run(script)).await.unwrap().unwrap();
    let totals = rig.stats().await.totals;
    assert_eq!((totals.expired, totals.stale, totals.delivered), (0, 0, 40), "{report:?}");
    assert!(runs.lock().unwrap().values().all(|runs| *runs == 1));
    assert!(watch.lease_ms() >= 3_000, "the lease followed: {}", watch.lease_ms());
}
