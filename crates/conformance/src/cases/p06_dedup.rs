//! Point 6: deduplication of sends.

use hapax_core::{DedupPolicy, DedupScope, QueueConfig, QueueName};

use crate::trial::Trial;
use crate::values::{attribute, bodies, dedup, fifo_config, group, in_group, text};

const WINDOW: u64 = 2_000;
const HOUR: u64 = 3_600_000;

fn policy(dedup: DedupPolicy) -> QueueConfig {
    QueueConfig { dedup, ..fifo_config() }
}

fn window(window_ms: u64) -> DedupPolicy {
    DedupPolicy { window_ms, ..DedupPolicy::default() }
}

/// Receives and acks all ready messages; returns their bodies.
async fn drain(t: &Trial, jobs: &QueueName) -> Vec<String> {
    let got = t.receive(jobs, 10).await;
    for delivery in &got {
        t.ack(jobs, delivery).await;
    }
    bodies(&got)
}

pub(crate) async fn a_repeated_send_adds_nothing_and_answers_as_the_first(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let first = t.send(&jobs, text("first").group(group("g")).dedup(dedup("once"))).await;
    t.send_group(&jobs, "g", &["between"]).await;
    let second = t.send(&jobs, text("second").group(group("h")).dedup(dedup("once"))).await;
    assert!(!first.duplicate && second.duplicate);
    assert_eq!((second.id, second.sequence), (first.id, first.sequence));
    assert_eq!(drain(&t, &jobs).await, ["first", "between"]);
    let totals = t.stats(&jobs).await.totals;
    assert_eq!((totals.sent, totals.duplicates), (2, 1));
}

pub(crate) async fn a_repetition_inside_one_batch_is_suppressed(t: Trial) {
    let jobs = t.fifo("jobs").await;
    let sent = t.send_batch(&jobs, vec![in_group("g", "a"), in_group("g", "a"), in_group("g", "b")]).await;
    let sent: Vec<_> = sent.into_iter().map(Result::unwrap).collect();
    assert_eq!(sent.iter().map(|s| s.duplicate).collect::<Vec<_>>(), [false, true, false]);
    assert_eq!(sent[0].id, sent[1].id);
    assert_eq!(drain(&t, &jobs).await, ["a", "b"]);
}

pub(crate) async fn an_id_is_remembered_after_its_message_was_acked(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    let first = t.send_group(&jobs, "g", &["a"]).await[0];
    assert_eq!(drain(&t, &jobs).await, ["a"]);
    for round in 0..3 {
        let again = t.send(&jobs, in_group("g", "a")).await;
        assert_eq!(
            (again.duplicate, again.id, again.sequence),
            (true, first.id, first.sequence),
            "round {round}"
        );
        t.none(&jobs).await;
        if round == 0 { t.restart().await } else { t.crash().await }
    }
}

pub(crate) async fn an_id_is_forgotten_exactly_at_the_end_of_its_window(mut t: Trial) {
    let jobs = t.create("jobs.fifo", policy(window(WINDOW))).await;
    let first = t.send(&jobs, in_group("g", "a")).await;
    if t.exact() {
        t.advance(WINDOW - 1).await;
        assert!(t.send(&jobs, in_group("g", "a")).await.duplicate, "the last millisecond is inside");
        t.restart().await;
        assert!(t.send(&jobs, in_group("g", "a")).await.duplicate, "a duplicate does not prolong it");
        t.advance(1).await;
    } else {
        t.pass(WINDOW).await;
    }
    let next = t.send(&jobs, in_group("g", "a")).await;
    assert!(!next.duplicate && next.id != first.id && next.sequence > first.sequence);
    let again = t.send(&jobs, in_group("g", "a")).await;
    assert_eq!((again.duplicate, again.id), (true, next.id), "a new window has begun");
}

pub(crate) async fn the_default_window_is_five_minutes(t: Trial) {
    let jobs = t.fifo("jobs").await;
    t.send(&jobs, in_group("g", "a")).await;
    t.advance(299_999).await;
    assert!(t.send(&jobs, in_group("g", "a")).await.duplicate);
    t.advance(1).await;
    assert!(!t.send(&jobs, in_group("g", "a")).await.duplicate);
}

pub(crate) async fn a_window_of_hours_holds_through_restarts(mut t: Trial) {
    let jobs = t.create("jobs.fifo", policy(window(2 * HOUR))).await;
    let first = t.send(&jobs, in_group("g", "a")).await;
    assert_eq!(drain(&t, &jobs).await, ["a"]);
    t.advance(HOUR).await;
    t.restart().await;
    let again = t.send(&jobs, in_group("g", "a")).await;
    assert_eq!((again.duplicate, again.id, again.sequence), (true, first.id, first.sequence));
    t.advance(HOUR - 1).await;
    t.crash().await;
    assert!(t.send(&jobs, in_group("g", "a")).await.duplicate);
    t.advance(1).await;
    assert!(!t.send(&jobs, in_group("g", "a")).await.duplicate);
}

pub(crate) async fn many_ids_of_a_long_window_are_told_apart(mut t: Trial) {
    let jobs = t.create("jobs.fifo", policy(window(2 * HOUR))).await;
    let ids: Vec<String> = (0..300).map(|n| format!("id-{n}")).collect();
    let batch = |ids: &[String]| ids.iter().map(|id| in_group("g", id)).collect::<Vec<_>>();
    assert!(
        t.send_batch(&jobs, batch(&ids[..200])).await.iter().all(|s| s.as_ref().is_ok_and(|s| !s.duplicate))
    );
    t.advance(HOUR).await;
    t.restart().await;
    let again = t.send_batch(&jobs, batch(&ids)).await;
    let duplicates = again.iter().filter(|s| s.as_ref().unwrap().duplicate).count();
    assert_eq!(duplicates, 200);
    assert!(again[200..].iter().all(|s| !s.as_ref().unwrap().duplicate));
}

pub(crate) async fn content_based_ids_are_the_sha_256_of_the_body(t: Trial) {
    let jobs =
        t.create("jobs.fifo", policy(DedupPolicy { content_based: true, ..DedupPolicy::default() })).await;
    let first = t.send(&jobs, text("hello").group(group("g"))).await;
    let again = t.send(&jobs, text("hello").group(group("g")).attribute("other", attribute("x"))).await;
    assert_eq!((again.duplicate, again.id), (true, first.id), "only the body counts");
    assert!(!t.send(&jobs, text("hello!").group(group("g"))).await.duplicate);
    let own = t.send(&jobs, text("hello").group(group("g")).dedup(dedup("own"))).await;
    assert!(!own.duplicate, "an id that was given comes first");
    let hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
    let same = t.send(&jobs, text("other body").group(group("g")).dedup(dedup(hash))).await;
    assert_eq!((same.duplicate, same.id), (true, first.id), "the hash is an id like any other");
    let got = t.receive(&jobs, 10).await;
    assert_eq!(got[0].dedup.as_ref().map(ToString::to_string).as_deref(), Some(hash));
    assert_eq!(bodies(&got), ["hello", "hello!", "hello"]);
}

pub(crate) async fn ids_can_be_compared_within_their_group(mut t: Trial) {
    let jobs = t
        .create("jobs.fifo", policy(DedupPolicy { scope: DedupScope::Group, ..DedupPolicy::default() }))
        .await;
    let message = |name: &str| text(name).group(group(name)).dedup(dedup("same"));
    let (g, h) = (t.send(&jobs, message("g")).await, t.send(&jobs, message("h")).await);
    assert!(!g.duplicate && !h.duplicate && g.id != h.id);
    t.restart().await;
    let again = t.send(&jobs, message("h")).await;
    assert_eq!((again.duplicate, again.id), (true, h.id));
}

pub(crate) async fn a_window_of_zero_suppresses_nothing(t: Trial) {
    let jobs = t.create("jobs.fifo", policy(window(0))).await;
    assert!(!t.send(&jobs, in_group("g", "a")).await.duplicate);
    assert!(!t.send(&jobs, in_group("g", "a")).await.duplicate);
    assert_eq!(drain(&t, &jobs).await, ["a", "a"]);
}

pub(crate) async fn standard_queues_honour_ids_that_are_given(mut t: Trial) {
    let jobs = t.standard("jobs").await;
    let first = t.send(&jobs, text("a").dedup(dedup("once"))).await;
    assert_eq!(drain(&t, &jobs).await, ["a"]);
    t.restart().await;
    let again = t.send(&jobs, text("a").dedup(dedup("once"))).await;
    assert_eq!((again.duplicate, again.id), (true, first.id));
    t.send_all(&jobs, &["same", "same"]).await;
    assert_eq!(drain(&t, &jobs).await, ["same", "same"], "without an id nothing is a duplicate");
}

pub(crate) async fn queues_do_not_share_ids(t: Trial) {
    let (a, b) = (t.fifo("a").await, t.fifo("b").await);
    assert!(!t.send(&a, in_group("g", "x")).await.duplicate);
    assert!(!t.send(&b, in_group("g", "x")).await.duplicate);
}

pub(crate) async fn a_refused_send_remembers_no_id(t: Trial) {
    let jobs = t.create("jobs.fifo", QueueConfig { message_bytes_max: 1024, ..fifo_config() }).await;
    let large = text("x".repeat(1025)).group(group("g")).dedup(dedup("once"));
    assert!(t.try_send(&jobs, large).await.is_err());
    let sent = t.send(&jobs, text("small").group(group("g")).dedup(dedup("once"))).await;
    assert!(!sent.duplicate);
    assert_eq!(drain(&t, &jobs).await, ["small"]);
}

pub(crate) async fn a_purge_forgets_the_ids(mut t: Trial) {
    let jobs = t.fifo("jobs").await;
    let other = t.fifo("other").await;
    t.send(&jobs, in_group("g", "a")).await;
    t.send(&other, in_group("g", "a")).await;
    t.store().purge(&jobs).await.unwrap();
    let next = t.send(&jobs, in_group("g", "a")).await;
    assert!(!next.duplicate, "its message was purged");
    let again = t.send(&jobs, in_group("g", "a")).await;
    assert_eq!((again.duplicate, again.id), (true, next.id), "the id counts from the new send on");
    assert!(t.send(&other, in_group("g", "a")).await.duplicate, "another queue keeps its ids");
    t.store().purge(&jobs).await.unwrap();
    t.crash().await;
    assert!(!t.send(&jobs, in_group("g", "a")).await.duplicate, "also after a crash");
    assert_eq!(drain(&t, &jobs).await, ["a"]);
}

pub(crate) async fn a_purge_forgets_the_ids_of_a_long_window(mut t: Trial) {
    let jobs = t.create("jobs.fifo", policy(window(2 * HOUR))).await;
    t.send(&jobs, in_group("g", "a")).await;
    t.advance(HOUR).await;
    t.store().purge(&jobs).await.unwrap();
    t.restart().await;
    let next = t.send(&jobs, in_group("g", "a")).await;
    assert!(!next.duplicate);
    t.advance(HOUR).await;
    assert_eq!(t.send(&jobs, in_group("g", "a")).await.id, next.id);
}
