//! What a queue needs and its store does not have is refused where the queue is made or changed; a message that needs it
//! is refused where it is sent.

use std::sync::Arc;

use hapax_conformance::MemoryStore;
use hapax_core::{
    AdminError, Capabilities, DedupPolicy, ManualClock, NewMessage, OnDead, Order, Priority, QueueAdmin as _,
    QueueConfig, QueueName, QueueStore as _, SendError,
};

/// A feature that is missing, the field that needs it, a configuration that does, and one that narrowly does not.
type Row = (fn(&mut Capabilities), &'static str, fn() -> QueueConfig, fn() -> QueueConfig);

const ROWS: [Row; 4] = [
    (|can| can.order = Order::None, "kind", QueueConfig::sqs_fifo, QueueConfig::sqs),
    (
        |can| can.halt_group = false,
        "on_dead",
        QueueConfig::fifo,
        || QueueConfig { on_dead: OnDead::Continue, ..QueueConfig::fifo() },
    ),
    (
        |can| can.dedup_ms_max = 300_000,
        "dedup.window_ms",
        || QueueConfig {
            dedup: DedupPolicy { window_ms: 300_001, ..DedupPolicy::default() },
            ..QueueConfig::sqs()
        },
        QueueConfig::sqs,
    ),
    (
        |can| can.message_bytes_max = 65_536,
        "message_bytes_max",
        || QueueConfig { message_bytes_max: 65_537, ..QueueConfig::sqs() },
        || QueueConfig { message_bytes_max: 65_536, ..QueueConfig::sqs() },
    ),
];

fn block_on(test: impl Future<Output = ()>) {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test);
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at_ms(1_700_000_000_000))
}

fn name(config: &QueueConfig) -> QueueName {
    QueueName::new(if config.is_fifo() { "q.fifo" } else { "q" }).unwrap()
}

#[test]
fn refuses_queues_that_need_more() {
    block_on(queues_that_need_more());
}

async fn queues_that_need_more() {
    for (lacks, field, needs, does_not) in ROWS {
        let store = MemoryStore::lacking(clock(), lacks);
        let refused = |answer: Result<(), AdminError>| {
            let error = answer.unwrap_err();
            let named = matches!(&error, AdminError::Config { field: named, .. } if *named == field);
            let text = error.to_string();
            assert!(named && text.contains("memory store") && text.contains("another store"), "{text}");
        };
        refused(store.create_queue(&name(&needs()), needs()).await.map(drop));
        let config = does_not();
        assert_eq!(store.create_queue(&name(&config), config.clone()).await, Ok(true), "{field}");
        if needs().kind == config.kind {
            refused(store.set_queue(&name(&config), needs(), None).await.map(drop));
            assert_eq!(store.queue(&name(&config)).await.unwrap().config, config, "nothing was changed");
        }
        let full = MemoryStore::new(clock());
        assert_eq!(full.create_queue(&name(&needs()), needs()).await, Ok(true), "{field}");
    }
}

#[test]
fn refuses_urgent_messages_and_takes_the_others() {
    block_on(urgent_messages());
}

async fn urgent_messages() {
    let store = MemoryStore::lacking(clock(), |can| can.priorities = false);
    let queue = QueueName::new("q").unwrap();
    store.create_queue(&queue, QueueConfig::sqs()).await.unwrap();
    let batch = vec![NewMessage::new("plain"), NewMessage::new("urgent").priority(Priority(1))];
    let answers = store.send(&queue, batch).await.unwrap();
    assert!(answers[0].is_ok(), "{answers:?}");
    let Err(SendError::Invalid(text)) = &answers[1] else { panic!("{answers:?}") };
    assert!(text.starts_with("priority: the memory store has no priorities"), "{text}");
    assert_eq!(store.stats(&queue).await.unwrap().ready, 1);
}
