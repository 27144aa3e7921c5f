//! Each bound as a table: accepted at its edge, refused beyond it, and the answer names the field.

use super::*;
use crate::policy::{DELAY_MS_MAX, DELIVER_AHEAD_MS_MAX, INTERVAL_MS_MAX, LEASE_MS_MAX, WAIT_MS_MAX};
use crate::queue::{DeadLetterPolicy, DedupPolicy};
use crate::store::RedriveFilter;

const NOW_MS: u64 = 1_000;

fn name(text: &str) -> QueueName {
    QueueName::new(text).unwrap()
}

/// What a refusal says, "" if there is none.
fn refusal<T, E: std::fmt::Display>(answer: Result<T, E>) -> String {
    answer.err().map(|error| error.to_string()).unwrap_or_default()
}

/// Runs a table: an expectation is "" for what is accepted, else the beginning of the refusal.
fn table<T: std::fmt::Debug>(rows: Vec<(T, &str)>, check: impl Fn(&T) -> String) {
    for (row, expected) in rows {
        let said = check(&row);
        assert_eq!(said.is_empty(), expected.is_empty(), "{row:?}: {said:?}, expected {expected:?}");
        assert!(said.starts_with(expected), "{row:?}: {said:?}, expected {expected:?}");
    }
}

fn plain() -> MessageShape {
    (&NewMessage::new("x")).into()
}

#[test]
fn messages_on_a_standard_queue() {
    let config = QueueConfig { message_bytes_max: 1024, ..QueueConfig::default() };
    let last_ms = NOW_MS + DELIVER_AHEAD_MS_MAX;
    let rows = vec![
        (plain(), ""),
        (MessageShape { bytes: 0, ..plain() }, ""),
        (MessageShape { bytes: 1024, ..plain() }, ""),
        (MessageShape { bytes: 1025, ..plain() }, "the message has 1025 bytes, the queue allows 1024"),
        (MessageShape { attributes: ATTRIBUTES_MAX, ..plain() }, ""),
        (MessageShape { attributes: ATTRIBUTES_MAX + 1, ..plain() }, "101 attributes are too many"),
        (MessageShape { delay_ms: Some(0), ..plain() }, ""),
        (MessageShape { delay_ms: Some(DELAY_MS_MAX), ..plain() }, ""),
        (MessageShape { delay_ms: Some(DELAY_MS_MAX + 1), ..plain() }, "delay_ms: 900001 is out of range"),
        (MessageShape { deliver_at_ms: Some(last_ms), ..plain() }, ""),
        (MessageShape { deliver_at_ms: Some(last_ms + 1), ..plain() }, "deliver_at_ms: "),
        (MessageShape { deliver_at_ms: Some(9), delay_ms: Some(9), ..plain() }, "deliver_at_ms: give"),
        (MessageShape { priority: Priority(9), ..plain() }, ""),
        (MessageShape { priority: Priority(10), ..plain() }, "priority: 10 is out of range; use 0 to 9"),
        (MessageShape { has_group: true, has_dedup: true, ..plain() }, ""),
    ];
    table(rows, |shape| refusal(message(&config, *shape, NOW_MS)));
}

#[test]
fn messages_on_a_fifo_queue() {
    let config = QueueConfig::fifo();
    let by_content = QueueConfig {
        dedup: DedupPolicy { content_based: true, ..DedupPolicy::default() },
        ..QueueConfig::fifo()
    };
    let whole = MessageShape { has_group: true, has_dedup: true, ..plain() };
    let rows = vec![
        (whole, ""),
        (MessageShape { has_group: false, ..whole }, "group: "),
        (MessageShape { has_dedup: false, ..whole }, "dedup: "),
        (MessageShape { delay_ms: Some(0), ..whole }, "delay_ms: a FIFO queue has one delay"),
        (MessageShape { deliver_at_ms: Some(0), ..whole }, "deliver_at_ms: a FIFO queue"),
        (MessageShape { priority: Priority(1), ..whole }, "priority: a FIFO queue"),
    ];
    table(rows, |shape| refusal(message(&config, *shape, NOW_MS)));
    let rows = vec![
        (MessageShape { has_dedup: false, ..whole }, ""),
        (plain(), "group: a FIFO queue needs a group"),
    ];
    table(rows, |shape| refusal(message(&by_content, *shape, NOW_MS)));
}

#[test]
fn an_accepted_message_has_its_visibility() {
    let config = QueueConfig { delay_ms: 7, ..QueueConfig::default() };
    let due = |shape| message(&config, shape, NOW_MS).map(|visible| visible.due_ms);
    assert_eq!(due(plain()), Ok(NOW_MS + 7));
    assert_eq!(due(MessageShape { delay_ms: Some(3), ..plain() }), Ok(NOW_MS + 3));
    assert_eq!(due(MessageShape { deliver_at_ms: Some(NOW_MS + 9), ..plain() }), Ok(NOW_MS + 9));
}

#[test]
fn receives() {
    let up_to = Receive::up_to;
    let long = |bytes: usize| Some("x".repeat(bytes));
    let rows = vec![
        (up_to(0), "max: 0 is out of range; use 1 to 1000"),
        (up_to(1), ""),
        (up_to(Receive::MAX), ""),
        (up_to(Receive::MAX + 1), "max: 1001"),
        (Receive { lease_ms: Some(0), ..up_to(1) }, ""),
        (Receive { lease_ms: Some(LEASE_MS_MAX), ..up_to(1) }, ""),
        (Receive { lease_ms: Some(LEASE_MS_MAX + 1), ..up_to(1) }, "lease_ms: 43200001"),
        (Receive { wait_ms: Some(WAIT_MS_MAX), ..up_to(1) }, ""),
        (Receive { wait_ms: Some(WAIT_MS_MAX + 1), ..up_to(1) }, "wait_ms: 20001"),
        (Receive { attempt_id: long(128), ..up_to(1) }, ""),
        (Receive { attempt_id: long(129), ..up_to(1) }, "attempt_id's length: 129"),
        (
            Receive { attempt_id: long(1), ack_on_receive: true, ..up_to(1) },
            "attempt_id: a receive that acks",
        ),
        (Receive { consumer: long(256), ..up_to(1) }, ""),
        (Receive { consumer: long(257), ..up_to(1) }, "consumer's length: 257"),
    ];
    table(rows, |ask| refusal(receive(ask)));
}

#[test]
fn batches_and_pages() {
    let rows = vec![(0, ""), (BATCH_MAX, ""), (BATCH_MAX + 1, "ids: 1001 elements are too many")];
    table(rows, |count| refusal(batch("ids", *count)));
    let rows = vec![(0, "limit: 0 is out of range"), (1, ""), (PAGE_MAX, ""), (PAGE_MAX + 1, "limit: 1001")];
    table(rows, |limit| refusal(page(*limit)));
}

#[test]
fn dead_letter_targets() {
    let to = |dead: &str| QueueConfig {
        dead_letter: Some(DeadLetterPolicy { queue: name(dead) }),
        ..QueueConfig::default()
    };
    let allowing = |redrive_allow| Some(QueueConfig { redrive_allow, ..QueueConfig::default() });
    let absent = "dead_letter.queue: queue dead does not exist; create it first";
    let rows = vec![
        ((QueueConfig::default(), None), ""),
        ((to("dead"), None), absent),
        ((to("dead"), allowing(RedriveAllow::All)), ""),
        ((to("dead"), allowing(RedriveAllow::None)), "dead_letter.queue: queue dead takes no dead letters"),
        ((to("dead"), allowing(RedriveAllow::Queues(vec![name("jobs")]))), ""),
        (
            (to("dead"), allowing(RedriveAllow::Queues(vec![name("other")]))),
            "dead_letter.queue: queue dead takes no dead letters of this queue",
        ),
        ((to("jobs"), allowing(RedriveAllow::All)), "dead_letter.queue: a queue cannot be its own"),
        ((to("dead.fifo"), allowing(RedriveAllow::All)), "dead_letter.queue: a FIFO queue needs"),
        ((QueueConfig { lease_ms: LEASE_MS_MAX + 1, ..to("dead") }, None), "lease_ms: "),
    ];
    table(rows, |(config, dead)| refusal(queue(&name("jobs"), config, |_| dead.as_ref())));
}

#[test]
fn redrives() {
    let request = |to: Option<&str>, per_second| RedriveRequest {
        from: name("dead"),
        to: to.map(name),
        filter: RedriveFilter::default(),
        per_second,
        by: "test".into(),
    };
    let many = |ids, sources| RedriveFilter {
        ids: vec![crate::name::MessageId(1); ids],
        sources: vec![name("jobs"); sources],
        ..RedriveFilter::default()
    };
    let filtered = |filter| RedriveRequest { filter, ..request(None, None) };
    let rows = vec![
        (request(None, None), ""),
        (request(None, Some(0)), "per_second: 0 is out of range; use 1 to 10000"),
        (request(None, Some(1)), ""),
        (request(None, Some(10_000)), ""),
        (request(None, Some(10_001)), "per_second: 10001"),
        (request(Some("dead"), None), "queue dead is where the messages are already"),
        (request(Some("jobs"), None), ""),
        (request(Some("jobs.fifo"), None), "queue jobs.fifo is not of the same kind as dead"),
        (filtered(many(BATCH_MAX, BATCH_MAX)), ""),
        (filtered(many(BATCH_MAX + 1, 0)), "filter.ids: 1001 elements are too many"),
        (filtered(many(0, BATCH_MAX + 1)), "filter.sources: 1001 elements are too many"),
    ];
    let (standard, fifo) = (QueueConfig::default(), QueueConfig::fifo());
    table(rows, |ask| {
        let to = ask.to.as_ref().map(|to| if to.is_fifo() { &fifo } else { &standard });
        refusal(redrive(ask, &standard, to))
    });
    assert_eq!(redrive(&request(None, None), &standard, None), Ok(REDRIVE_PER_SECOND_DEFAULT));
    assert_eq!(redrive(&request(None, Some(7)), &standard, None), Ok(7));
}

#[test]
fn intervals() {
    let rows = vec![
        ((None, 0), ""),
        ((None, INTERVAL_MS_MAX), ""),
        ((None, INTERVAL_MS_MAX + 1), "interval_ms: 300001 is out of range; use 0 to 300000"),
        ((Some(NOW_MS), 0), ""),
        ((Some(NOW_MS - 60), 60), ""),
        ((Some(NOW_MS - 59), 60), "it was purged less than the wanted interval ago; try again in 1 ms"),
    ];
    table(rows, |(last_ms, wanted_ms)| {
        refusal(interval(NOW_MS, *last_ms, *wanted_ms, || "it was purged".into()))
    });
}

#[test]
fn exported_messages() {
    let id = crate::name::MessageId(7);
    let json = serde_json::json!({
        "id": id, "sequence": 1, "body": {"text": "x"}, "group": "g", "dedup": "d", "key": "k", "key_source": "body",
        "sent_ms": 1, "retained_from_ms": 1, "visible_ms": 1, "attempts": 1, "deliveries": 1, "fence": 5,
    });
    let whole: ExportedMessage = serde_json::from_value(json).unwrap();
    let with = |change: &dyn Fn(&mut ExportedMessage)| {
        let mut message = whole.clone();
        change(&mut message);
        message
    };
    let last = NUMBER_END - 1;
    let parked = Some(crate::store::FailureCause::Rejected);
    let rows = vec![
        (whole.clone(), ""),
        (with(&|m| m.group = None), "group: "),
        (with(&|m| m.visible_ms = last), ""),
        (with(&|m| m.visible_ms = NUMBER_END), "message 00000000-0000-0000-0000-000000000007: a time"),
        (with(&|m| m.sequence = NUMBER_END), "message "),
        (with(&|m| m.fence.0 = NUMBER_END), "message "),
        (with(&|m| m.deliveries = 0), "message 00000000-0000-0000-0000-000000000007: it has more attempts"),
        (with(&|m| (m.parked, m.undecided) = (parked, true)), ""),
        (with(&|m| m.undecided = true), "message 00000000-0000-0000-0000-000000000007: only a parked"),
    ];
    table(rows, |message| refusal(import(&QueueConfig::fifo(), message)));
}
