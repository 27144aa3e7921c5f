//! How deliveries end: retries with backoff, the retry topic, deferrals, dead letters, and the broker's limit.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use hapax_core::policy::{Jitter, RetryPolicy};
use hapax_core::{Extend, Settle, Settled, Settlement, Source as _};
use hapax_kafka::share::{ShareOptions, headers};
use hapax_worker::{Cx, HandlerOutcome, Worker};

use crate::broker::{Broker, LOCK, is_empty, next, run_until};
use crate::{Case, shared};

pub fn cases() -> Vec<Case> {
    vec![
        shared("a_retry_within_a_lock_is_held_and_then_released", a_retry_within_a_lock),
        shared("a_retry_beyond_a_lock_goes_through_the_retry_topic", a_retry_beyond_a_lock),
        shared("a_rejected_record_is_a_dead_letter_with_its_error", a_rejected_record),
        shared("at_the_brokers_limit_the_handler_is_not_run", at_the_brokers_limit),
        shared("a_deferral_counts_no_attempt_and_no_delivery", a_deferral_counts_no_attempt),
    ]
}

fn retry(base_ms: u64, attempts: u32) -> RetryPolicy {
    RetryPolicy { base_ms, cap_ms: 60_000, jitter: Jitter::None, max_attempts: attempts }
}

/// Runs a handler that always fails until its record is dead. Returns its attempts and the times between them.
fn fail_until_dead(broker: &Broker, options: ShareOptions) -> (Vec<u32>, Vec<Duration>) {
    let source = broker.source(options);
    let runs = Arc::new(Mutex::new(Vec::new()));
    let seen = runs.clone();
    broker.block_on(async {
        let handler = move |_: u32, cx: Cx| {
            seen.lock().unwrap().push((cx.attempt(), Instant::now()));
            async move { HandlerOutcome::<()>::retry(format!("no luck {}", cx.attempt())) }
        };
        let worker = Worker::from_source(source.clone()).handler(handler).build().await.unwrap();
        run_until(worker, |counts| counts.died == 1).await;
        is_empty(&source).await;
    });
    let runs = runs.lock().unwrap();
    let gaps = runs.windows(2).map(|pair| pair[1].1 - pair[0].1).collect();
    (runs.iter().map(|(attempt, _)| *attempt).collect(), gaps)
}

fn a_retry_within_a_lock(broker: &Broker) {
    let options = ShareOptions { retry: retry(400, 3), ..broker.prepare("within-a-lock", 1) };
    broker.send("within-a-lock", ["7".to_owned()]);
    let (attempts, gaps) = fail_until_dead(broker, options);
    assert_eq!(attempts, [1, 2, 3]);
    assert!(gaps[0] >= Duration::from_millis(400) && gaps[1] >= Duration::from_millis(800), "{gaps:?}");
    let dead = broker.read("within-a-lock-dead", 1).remove(0);
    assert_eq!(dead.value, "7");
    assert_eq!(dead.headers[headers::ERROR], "no luck 3");
    assert_eq!(dead.headers[headers::CAUSE], "retry");
    assert_eq!(dead.headers[headers::ATTEMPTS], "3");
    assert_eq!(dead.headers[headers::TOPIC], "within-a-lock");
    assert!(dead.headers[headers::KEY].ends_with("/0/0"), "{dead:?}");
    assert_eq!(broker.end("within-a-lock-retry"), 0, "no copy was needed");
}

fn a_retry_beyond_a_lock(broker: &Broker) {
    let prepared = broker.prepare("beyond-a-lock", 1);
    let delay = LOCK + Duration::from_secs(1);
    let options = ShareOptions {
        retry: RetryPolicy { cap_ms: delay.as_millis() as u64, ..retry(delay.as_millis() as u64, 3) },
        retry_topic: Some("beyond-a-lock-retry".into()),
        ..prepared
    };
    broker.send("beyond-a-lock", ["7".to_owned()]);
    let (attempts, gaps) = fail_until_dead(broker, options);
    assert_eq!(attempts, [1, 2, 3], "they go on over the copies");
    assert!(gaps.iter().all(|gap| *gap + Duration::from_millis(5) >= delay), "{gaps:?}");
    let copies = broker.read("beyond-a-lock-retry", 2);
    let dead = broker.read("beyond-a-lock-dead", 1).remove(0);
    for name in [headers::KEY, headers::ORIGIN, headers::TOPIC] {
        let found: Vec<_> = copies.iter().chain([&dead]).map(|copy| &copy.headers[name]).collect();
        assert!(found.iter().all(|value| *value == found[0]), "{name}: {found:?}");
    }
    assert_eq!(dead.headers[headers::TOPIC], "beyond-a-lock");
    assert_eq!(copies[1].headers[headers::ERROR], "no luck 2");
    assert_eq!(dead.headers[headers::ATTEMPTS], "3");
    assert!(!dead.headers.contains_key(headers::NOT_BEFORE));
}

fn a_rejected_record(broker: &Broker) {
    let options = broker.prepare("rejected", 1);
    broker.send("rejected", ["1".to_owned(), "no number".to_owned(), "3".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        let handler = move |number: u32, _: Cx| async move {
            if number == 3 { HandlerOutcome::reject("no account") } else { HandlerOutcome::Done(()) }
        };
        let worker = Worker::from_source(source.clone()).handler(handler).build().await.unwrap();
        let report = run_until(worker, |counts| counts.done + counts.rejected == 3).await;
        assert_eq!(report.counts.rejected, 2, "{report:?}");
        is_empty(&source).await;
    });
    let mut dead = broker.read("rejected-dead", 2);
    dead.sort_by(|a, b| a.value.cmp(&b.value));
    assert_eq!((dead[0].value.as_str(), dead[0].headers[headers::ERROR].as_str()), ("3", "no account"));
    assert_eq!(dead[1].value, "no number");
    assert!(dead.iter().all(|dead| dead.headers[headers::CAUSE] == "rejected"), "{dead:?}");
}

fn at_the_brokers_limit(broker: &Broker) {
    let options = broker.prepare("the-limit", 1);
    broker.send("the-limit", ["7".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        for attempt in 1..5 {
            let delivery = next(&source, 1).await.remove(0);
            assert_eq!(delivery.attempt, attempt);
            // Given back as a lease that ends: counted, and without an error.
            let end = Extend { receipt: delivery.receipt, lease_ms: 0, own_lease: false };
            assert!(source.extend(vec![end]).await.unwrap()[0].is_ok());
        }
        is_empty(&source).await;
    });
    let dead = broker.read("the-limit-dead", 1).remove(0);
    assert_eq!((dead.value.as_str(), dead.headers[headers::CAUSE].as_str()), ("7", "expired"));
    let error = &dead.headers[headers::ERROR];
    assert!(error.contains("5 times") && error.contains("the broker drops it"), "{error}");
    assert_eq!(dead.headers[headers::DELIVERIES], "5");
}

fn a_deferral_counts_no_attempt(broker: &Broker) {
    let options = broker.prepare("deferred", 1);
    broker.send("deferred", ["7".to_owned()]);
    let source = broker.source(options);
    broker.block_on(async {
        // More often than the broker delivers a record.
        for deliveries in 1..8 {
            let delivery = next(&source, 1).await.remove(0);
            assert_eq!((delivery.attempt, delivery.deliveries), (1, deliveries));
            let defer = Settle::new(delivery.receipt, Settlement::Defer { after_ms: 50 });
            assert_eq!(source.settle(vec![defer]).await.unwrap(), [Ok(Settled::Returned { after_ms: 50 })]);
        }
        let delivery = next(&source, 1).await.remove(0);
        assert_eq!(source.settle(vec![Settle::ack(delivery.receipt)]).await.unwrap(), [Ok(Settled::Acked)]);
        is_empty(&source).await;
    });
    assert_eq!(broker.end("deferred-dead"), 0);
}
