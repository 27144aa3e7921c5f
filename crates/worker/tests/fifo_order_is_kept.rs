//! FIFO groups: in order, one after another; a failed message is not overtaken, and those behind it lose no attempt.

mod common;

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use common::{Rig, TestSource, run_until};
use hapax_core::{DedupId, GroupId, NewMessage, QueueConfig, Tier};
use hapax_worker::{Cx, HandlerOutcome};

type Seen = Arc<Mutex<BTreeMap<String, Vec<(u32, u32)>>>>;

fn message(group: &str, number: u32) -> NewMessage {
    NewMessage::new(number.to_string())
        .group(GroupId::new(group).unwrap())
        .dedup(DedupId::new(format!("{group}-{number}")).unwrap())
}

fn note(seen: &Seen, number: u32, cx: &Cx) {
    let group = cx.group().unwrap().as_str().to_owned();
    seen.lock().unwrap().entry(group).or_default().push((number, cx.attempt()));
}

async fn rig(tier: Tier) -> Rig {
    let rig = Rig::new(QueueConfig { tier, ..QueueConfig::sqs_fifo() }).await;
    for number in 0..10 {
        for group in ["a", "b", "c"] {
            rig.send(message(group, number)).await;
        }
    }
    rig
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn with_failures_in_the_middle() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = rig(tier).await;
        let seen = Seen::default();
        let running = Arc::new(Mutex::new(std::collections::BTreeSet::new()));
        let handler = {
            let (seen, running) = (seen.clone(), running.clone());
            move |number: u32, cx: Cx| {
                let (seen, running) = (seen.clone(), running.clone());
                async move {
                    let group = cx.group().unwrap().clone();
                    assert!(running.lock().unwrap().insert(group.clone()), "one of a group at a time");
                    note(&seen, number, &cx);
                    tokio::task::yield_now().await;
                    running.lock().unwrap().remove(&group);
                    if number % 4 == 3 && cx.attempt() == 1 {
                        return HandlerOutcome::retry("again");
                    }
                    HandlerOutcome::Done(number)
                }
            }
        };
        let worker = rig.builder().handler(handler).build().await.unwrap();
        let report = run_until(worker, |counts| counts.done == 30).await;
        assert_eq!((report.counts.retried, report.counts.panics), (6, 0), "{tier:?}");
        let expected: Vec<_> =
            (0..10).flat_map(|n| (1..=if n % 4 == 3 { 2 } else { 1 }).map(move |a| (n, a))).collect();
        for (group, seen) in seen.lock().unwrap().iter() {
            assert_eq!(
                *seen, expected,
                "group {group} at {tier:?}: in order, attempts of the rest uncounted"
            );
        }
        assert_eq!(rig.stats().await.totals.expired, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn in_batches_of_one_group() {
    let rig = rig(Tier::EffectivelyOnce).await;
    let seen = Seen::default();
    let handler = {
        let seen = seen.clone();
        move |batch: Vec<(u32, Cx)>| {
            let seen = seen.clone();
            async move {
                let group = batch[0].1.group().unwrap().clone();
                let each = |(number, cx): (u32, Cx)| {
                    assert_eq!(cx.group(), Some(&group), "a batch has one group");
                    note(&seen, number, &cx);
                    if number == 5 && cx.attempt() == 1 {
                        HandlerOutcome::retry("again")
                    } else {
                        HandlerOutcome::Done(number)
                    }
                };
                batch.into_iter().map(each).collect()
            }
        }
    };
    let worker = rig.builder().batch_handler(4, handler).build().await.unwrap();
    let report = run_until(worker, |counts| counts.done == 30).await;
    assert_eq!(
        (report.counts.retried, report.counts.replayed),
        (3, 6),
        "6 and 7 ran behind 5 and are not run again"
    );
    for (group, seen) in seen.lock().unwrap().iter() {
        let numbers: Vec<_> = seen.iter().map(|(number, _)| *number).collect();
        let firsts: Vec<_> =
            seen.iter().filter(|(_, attempt)| *attempt == 1).map(|(number, _)| *number).collect();
        assert!(firsts.is_sorted(), "group {group}: {numbers:?}");
        assert_eq!(numbers.iter().filter(|number| **number == 5).count(), 2, "{numbers:?}");
        assert!(
            numbers.iter().filter(|number| **number != 5).count() == 9,
            "the others ran once: {numbers:?}"
        );
    }
    assert_eq!(rig.messages("jobs.fifo").await, []);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn with_a_retry_whose_answer_is_lost() {
    for tier in [Tier::AtLeastOnce, Tier::EffectivelyOnce] {
        let rig = rig(tier).await;
        let source = TestSource::new(&rig);
        let seen = Seen::default();
        let handler = {
            let (seen, source) = (seen.clone(), source.clone());
            move |number: u32, cx: Cx| {
                let (seen, source) = (seen.clone(), source.clone());
                async move {
                    note(&seen, number, &cx);
                    if number == 3 && cx.attempt() == 1 {
                        source.unanswered.fetch_add(1, Ordering::SeqCst);
                        return HandlerOutcome::retry("again");
                    }
                    HandlerOutcome::Done(number)
                }
            }
        };
        let builder = rig.builder().source(source);
        let worker = builder.handler(handler).build().await.unwrap();
        run_until(worker, |counts| counts.done >= 30).await;
        let expected: Vec<_> =
            (0..10).flat_map(|n| (1..=if n == 3 { 2 } else { 1 }).map(move |a| (n, a))).collect();
        for (group, seen) in seen.lock().unwrap().iter() {
            assert_eq!(*seen, expected, "group {group} at {tier:?}: what goes back is not overtaken");
        }
    }
}
