//! Messages from an operator's view: browse, discard, purge, counters; and batches.

use hapax_core::metrics::{self, Metrics as _};
use hapax_core::store::QueueTotals;
use hapax_core::{
    Attribute, AttributeValue, Browse, Discarded, Extend, MessageId, MessageState, Priority, QueueStats,
    Receipt, Receive, SendError, Settle, SettleError, Settled, Settlement,
};

use crate::trial::{LEASE_MS, Trial};
use crate::values::{attribute, bodies, config, dedup, group, reject, seen, text};

pub(crate) async fn a_message_arrives_as_it_was_sent(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let binary =
        Attribute { data_type: "Binary.png".into(), value: AttributeValue::Binary(vec![0, 255, 7].into()) };
    let sent = text("\u{e4}\0\n")
        .attribute("kind", attribute("order"))
        .attribute("picture", binary)
        .group(group("tenant"))
        .dedup(dedup("d-1"))
        .priority(Priority(7));
    let answer = t.send(&jobs, sent.clone()).await;
    assert!(!answer.duplicate);
    t.restart().await;
    let got = t.one(&jobs).await;
    assert_eq!((got.id, got.sequence, got.attempt), (answer.id, answer.sequence, 1));
    assert_eq!((got.body.clone(), got.attributes.clone()), (sent.body, sent.attributes));
    assert_eq!((got.group.clone(), got.dedup.clone(), got.priority), (sent.group, sent.dedup, sent.priority));
    assert!(got.dead.is_none());
    assert!(got.sent_ms > 0 && got.first_received_ms >= got.sent_ms);
    assert!(got.lease_ms <= LEASE_MS && got.lease_ms > 0);
}

pub(crate) async fn an_empty_body_is_a_message(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &[""]).await;
    assert!(t.one(&jobs).await.body.is_empty());
}

pub(crate) async fn times_of_a_message_stay_across_attempts(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.advance(500).await;
    let first = t.one(&jobs).await;
    if t.exact() {
        assert_eq!(first.first_received_ms, first.sent_ms + 500);
    }
    t.advance(500).await;
    t.fail(&jobs, &first, "boom").await;
    let second = t.one(&jobs).await;
    assert_eq!((second.sent_ms, second.first_received_ms), (first.sent_ms, first.first_received_ms));
    assert_eq!((second.id, second.sequence), (first.id, first.sequence));
}

pub(crate) async fn browsing_neither_delivers_nor_counts(t: Trial) {
    let jobs = t.standard("jobs").await;
    let sent = t.send_all(&jobs, &["a"]).await[0];
    for _ in 0..3 {
        let seen = t.browse(&jobs).await;
        assert_eq!((seen[0].id, seen[0].state, seen[0].attempts), (sent.id, MessageState::Ready, 0));
        assert_eq!(seen[0].body.as_deref(), Some(b"a".as_slice()));
    }
    assert_eq!(t.stats(&jobs).await.totals.delivered, 0);
    assert_eq!(t.one(&jobs).await.attempt, 1);
}

pub(crate) async fn browsing_shows_each_state(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["parked", "in-flight"]).await;
    let parked = t.receive(&jobs, 1).await.remove(0);
    assert_eq!(t.settle(&jobs, &parked, reject("bad")).await, Ok(Settled::Parked));
    let held = t.receive(&jobs, 1).await.remove(0);
    t.send_all(&jobs, &["ready"]).await;
    t.send(&jobs, text("delayed").delay_ms(60_000)).await;

    for (state, body) in [
        (MessageState::Parked, "parked"),
        (MessageState::InFlight, "in-flight"),
        (MessageState::Ready, "ready"),
        (MessageState::Delayed, "delayed"),
    ] {
        let browse = Browse { state: Some(state), limit: 10, ..Browse::default() };
        let page = t.store().browse(&jobs, browse).await.unwrap();
        assert_eq!(seen(&page.items), [body]);
        assert_eq!(page.items[0].state, state);
    }
    let all = t.browse(&jobs).await;
    assert_eq!(
        all[1].due_ms,
        all[1].sent_ms.max(held.first_received_ms) + LEASE_MS,
        "a lease's end is shown"
    );
    assert_eq!(all[3].due_ms, all[3].sent_ms + 60_000, "a delay's end is shown");
    let browse = Browse { id: Some(held.id), limit: 10, ..Browse::default() };
    assert_eq!(seen(&t.store().browse(&jobs, browse).await.unwrap().items), ["in-flight"]);
}

pub(crate) async fn browsing_goes_page_by_page_in_order(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a", "b", "c", "d", "e"]).await;
    let (mut all, mut after, mut pages) = (Vec::new(), None, 0);
    loop {
        let page = t.store().browse(&jobs, Browse { after, limit: 2, ..Browse::default() }).await.unwrap();
        assert!(page.items.len() <= 2);
        all.extend(page.items);
        pages += 1;
        match page.next {
            Some(next) if pages < 10 => after = Some(next),
            _ => break,
        }
    }
    assert_eq!(seen(&all), ["a", "b", "c", "d", "e"]);
    assert!(all.windows(2).all(|pair| pair[0].sequence < pair[1].sequence));
}

pub(crate) async fn discarding_deletes_what_is_not_in_flight(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let sent = t.send_all(&jobs, &["held", "parked", "ready", "kept"]).await;
    let held = t.receive(&jobs, 1).await.remove(0);
    let parked = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &parked, reject("bad")).await.unwrap();
    let delayed = t.send(&jobs, text("delayed").delay_ms(60_000)).await;
    let ids = vec![sent[0].id, sent[1].id, sent[2].id, delayed.id, MessageId(7)];
    let in_flight = vec![held.id];
    let discarded = t.store().discard(&jobs, ids.clone(), "suite").await;
    assert_eq!(discarded, Ok(Discarded { count: 3, in_flight: in_flight.clone() }));
    assert_eq!(t.store().discard(&jobs, ids, "suite").await, Ok(Discarded { count: 0, in_flight }));
    t.ack(&jobs, &held).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["kept"]);
    t.crash().await;
    assert_eq!(seen(&t.browse(&jobs).await), ["kept"]);
    assert_eq!(t.one(&jobs).await.body, "kept");
}

pub(crate) async fn purging_deletes_everything_that_is_there(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["held", "parked", "ready"]).await;
    let held = t.receive(&jobs, 1).await.remove(0);
    let parked = t.receive(&jobs, 1).await.remove(0);
    t.settle(&jobs, &parked, reject("bad")).await.unwrap();
    t.send(&jobs, text("delayed").delay_ms(1_000)).await;
    assert_eq!(t.store().purge(&jobs).await, Ok(4));
    assert_eq!(t.settle(&jobs, &held, Settlement::Ack).await, Err(SettleError::Gone));
    assert_eq!(t.extend(&jobs, &held, LEASE_MS).await, Err(SettleError::Gone));
    t.send_all(&jobs, &["new"]).await;
    assert_eq!(t.stats(&jobs).await.totals.sent, 5, "a purge takes nothing back");

    t.restart().await;
    t.pass(LEASE_MS).await;
    assert_eq!(seen(&t.browse(&jobs).await), ["new"]);
    assert_eq!(t.one(&jobs).await.body, "new");
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.ready, stats.delayed, stats.in_flight, stats.parked, stats.bytes), (0, 0, 1, 0, 3));
}

pub(crate) async fn a_purged_fifo_group_goes_on(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send_group(&jobs, "g", &["a", "b"]).await;
    t.receive(&jobs, 1).await;
    assert_eq!(t.store().purge(&jobs).await, Ok(2));
    t.send_group(&jobs, "g", &["c"]).await;
    assert_eq!(t.one(&jobs).await.body, "c");
}

pub(crate) async fn counters_are_exact(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    assert_eq!(t.stats(&jobs).await, hapax_core::QueueStats::default());
    t.send_all(&jobs, &["acked", "retried", "deferred", "held"]).await;
    t.send(&jobs, text("once").dedup(dedup("d")).delay_ms(60_000)).await;
    assert!(t.send(&jobs, text("twice").dedup(dedup("d"))).await.duplicate);
    let first = t.receive(&jobs, 1).await.remove(0);
    t.ack(&jobs, &first).await;
    let got = t.receive(&jobs, 2).await;
    t.fail(&jobs, &got[0], "boom").await;
    t.settle(&jobs, &got[1], Settlement::Defer { after_ms: 60_000 }).await.unwrap();
    assert_eq!(t.receive(&jobs, 1).await.len(), 1);

    let stats = t.stats(&jobs).await;
    assert_eq!((stats.ready, stats.delayed, stats.in_flight, stats.parked), (1, 2, 1, 0));
    assert_eq!(stats.bytes, "retried".len() as u64 + 8 + 4 + 4);
    let totals = stats.totals;
    assert_eq!((totals.sent, totals.duplicates, totals.delivered), (5, 1, 4));
    assert_eq!((totals.acked, totals.retried, totals.deferred), (1, 1, 1));
    assert_eq!((totals.expired, totals.dead, totals.stale, totals.damaged), (0, 0, 0, 0));

    t.restart().await;
    let again = t.stats(&jobs).await;
    assert_eq!((again.ready, again.delayed, again.in_flight, again.parked), (1, 2, 1, 0));
    assert_eq!((again.bytes, again.oldest_sent_ms), (stats.bytes, stats.oldest_sent_ms));
    let whole = t.store().status().await.unwrap();
    assert_eq!((whole.messages, whole.bytes), (4, stats.bytes));
}

pub(crate) async fn each_way_to_end_a_delivery_is_counted(t: Trial) {
    let (jobs, dead) = t.with_dead(5, config()).await;
    t.send_all(&jobs, &["at once", "given back", "rejected"]).await;
    let at_once = Receive { ack_on_receive: true, ..Receive::up_to(1) };
    assert_eq!(t.within("receive", t.store().receive(&jobs, at_once)).await.unwrap().len(), 1); // acked 1
    let got = t.receive(&jobs, 2).await;
    t.extend(&jobs, &got[0], 0).await.unwrap(); // retried 1
    t.settle(&jobs, &got[1], reject("bad")).await.unwrap(); // dead 1
    let totals = t.stats(&jobs).await.totals;
    assert_eq!((totals.delivered, totals.acked, totals.retried, totals.dead), (3, 1, 1, 1), "{totals:?}");
    assert_eq!((totals.expired, totals.deferred, totals.stale), (0, 0, 0), "{totals:?}");
    assert_eq!((t.stats(&dead).await.totals, t.stats(&dead).await.ready), (QueueTotals::default(), 1));
    // Where there are no dead letters, what dies is parked, and counted all the same.
    let letter = t.one(&dead).await;
    assert_eq!(t.settle(&dead, &letter, reject("again")).await, Ok(Settled::Parked));
    assert_eq!((t.stats(&dead).await.totals.dead, t.stats(&dead).await.parked), (1, 1));
}

pub(crate) async fn what_is_counted_can_be_read_as_metrics(t: Trial) {
    let (jobs, idle) = (t.create("jobs", config()).await, t.create("idle", config()).await);
    t.send(&jobs, text("a")).await;
    t.send(&jobs, text("b")).await;
    let got = t.receive(&jobs, 1).await.remove(0);
    t.ack(&jobs, &got).await;
    let ledger = t.harness.ledger();
    let samples =
        t.within("metrics", metrics::of_store(&*t.store(), ledger.as_deref())).await.expect("metrics");
    let value = |name: &str, labels: &[(&'static str, String)]| {
        let mut found = samples.iter().filter(|sample| sample.metric.name == name && sample.labels == labels);
        let value = found.next().map(|sample| sample.value);
        assert!(found.next().is_none(), "{name} {labels:?} is there twice");
        value
    };
    for (queue, sent, acked, ready) in [(&jobs, 2, 1, 1), (&idle, 0, 0, 0)] {
        let of = [("queue", queue.to_string())];
        for metric in QueueStats::table() {
            let empty = ready == 0 && metric.unit == metrics::Unit::Milliseconds;
            assert_eq!(
                value(metric.name, &of).is_none(),
                empty,
                "{}: an empty queue has no oldest message",
                metric.name
            );
        }
        let totals = ["hapax_queue_sent_total", "hapax_queue_acked_total", "hapax_queue_ready"];
        assert_eq!(totals.map(|name| value(name, &of)), [Some(sent), Some(acked), Some(ready)], "{queue}");
    }
    assert_eq!(value("hapax_store_messages", &[]), Some(1));
    assert_eq!(value("hapax_ledger_granted_total", &[]), ledger.map(|_| 0));
}

pub(crate) async fn expiry_is_counted(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.one(&jobs).await;
    t.pass(LEASE_MS).await;
    t.one(&jobs).await;
    let stats = t.stats(&jobs).await;
    assert_eq!((stats.totals.expired, stats.totals.delivered, stats.in_flight), (1, 2, 1));
}

pub(crate) async fn the_oldest_message_is_known(t: Trial) {
    let jobs = t.standard("jobs").await;
    t.send_all(&jobs, &["a"]).await;
    t.advance(1_000).await;
    t.send_all(&jobs, &["b"]).await;
    let got = t.receive(&jobs, 2).await;
    assert_eq!(t.stats(&jobs).await.oldest_sent_ms, Some(got[0].sent_ms));
    t.ack(&jobs, &got[0]).await;
    assert_eq!(t.stats(&jobs).await.oldest_sent_ms, Some(got[1].sent_ms));
    t.ack(&jobs, &got[1]).await;
    assert_eq!(t.stats(&jobs).await.oldest_sent_ms, None);
}

pub(crate) async fn batches_answer_in_order_and_one_failure_fails_no_other(t: Trial) {
    let jobs = t.create("jobs", hapax_core::QueueConfig { message_bytes_max: 1024, ..config() }).await;
    let batch = vec![text("a"), text("x".repeat(1025)), text("b"), text("c").delay_ms(u64::MAX), text("d")];
    let sent = t.send_batch(&jobs, batch).await;
    assert_eq!(sent[1], Err(SendError::TooLarge { bytes: 1025, bytes_max: 1024 }));
    assert!(matches!(sent[3], Err(SendError::Invalid(_))), "{:?}", sent[3]);
    let got = t.receive(&jobs, 10).await;
    assert_eq!(bodies(&got), ["a", "b", "d"]);
    for (delivery, answer) in got.iter().zip([&sent[0], &sent[2], &sent[4]]) {
        assert_eq!(delivery.id, answer.as_ref().unwrap().id);
    }

    let garbage = Receipt::new("garbage").unwrap();
    let extend = |receipt: &Receipt| Extend { receipt: receipt.clone(), lease_ms: 5_000, own_lease: false };
    let extended = t.store().extend(&jobs, vec![extend(&garbage), extend(&got[0].receipt)]).await.unwrap();
    assert_eq!(extended[0], Err(SettleError::Malformed));
    assert!(extended[1].is_ok(), "{:?}", extended[1]);

    let settle = |settlement, at: usize| Settle::new(got[at].receipt.clone(), settlement);
    let batch = vec![
        settle(Settlement::Defer { after_ms: 0 }, 0),
        Settle::ack(garbage),
        settle(Settlement::Ack, 1),
        settle(reject("bad"), 2),
        settle(Settlement::Ack, 1),
    ];
    let settled = t.store().settle(&jobs, batch).await.unwrap();
    let expected = [
        Ok(Settled::Returned { after_ms: 0 }),
        Err(SettleError::Malformed),
        Ok(Settled::Acked),
        Ok(Settled::Parked),
        Err(SettleError::Gone),
    ];
    assert_eq!(settled, expected);
}

pub(crate) async fn an_empty_batch_is_no_error(t: Trial) {
    let jobs = t.standard("jobs").await;
    assert_eq!(t.store().send(&jobs, Vec::new()).await, Ok(Vec::new()));
    assert_eq!(t.store().settle(&jobs, Vec::new()).await, Ok(Vec::new()));
    assert_eq!(t.store().extend(&jobs, Vec::new()).await, Ok(Vec::new()));
}
