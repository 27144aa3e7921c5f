//! A store with every kind of thing that a store holds, for tests that copy it.

use std::sync::OnceLock;

use hapax::core::store::SharedStore;
use hapax::core::{Attribute, Claim, ClaimEnding, ClaimRequest, EndClaim, Json, RecordedOutcome};
use hapax::{
    DeadLetterPolicy, EntryId, MessageId, NewMessage, OnDead, OnDoubt, Priority, QueueConfig, QueueName,
    Receive, Settle, Settlement, StoreError, Tier,
};
use tokio::runtime::Runtime;

/// One runtime for the whole process: a store works on the one that it was opened on.
pub fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    RUNTIME.get_or_init(|| tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap())
}

pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    runtime().block_on(future)
}

pub fn queue(name: &str) -> QueueName {
    name.parse().unwrap()
}

fn dying(dead: &str, config: QueueConfig) -> QueueConfig {
    let dead_letter = Some(DeadLetterPolicy { queue: queue(dead) });
    QueueConfig { dead_letter, ..config }
}

pub fn text(body: &str) -> NewMessage {
    NewMessage::new(body.as_bytes().to_vec())
}

pub async fn send(store: &SharedStore, to: &str, message: NewMessage) -> MessageId {
    store.send(&queue(to), vec![message]).await.unwrap().remove(0).unwrap().id
}

pub async fn one(store: &SharedStore, from: &str) -> hapax::Delivery {
    store.receive(&queue(from), Receive::up_to(1)).await.unwrap().remove(0)
}

async fn settle(store: &SharedStore, of: &str, delivery: &hapax::Delivery, settlement: Settlement) {
    let settle = Settle::new(delivery.receipt.clone(), settlement);
    store.settle(&queue(of), vec![settle]).await.unwrap().remove(0).unwrap();
}

pub async fn claim(store: &SharedStore, scope: &str, key: &str) -> Result<Claim, StoreError> {
    let id = EntryId::new(scope.parse().unwrap(), key.parse().unwrap());
    let request = ClaimRequest {
        on_doubt: OnDoubt::Park,
        fingerprint: Some(format!("of-{key}").parse().unwrap()),
        ..ClaimRequest::new(id, "me".parse().unwrap(), 3_600_000)
    };
    Ok(store.claim(vec![request]).await?.remove(0).unwrap())
}

pub async fn complete(store: &SharedStore, scope: &str, key: &str, outcome: &str) {
    let Claim::Granted(grant) = claim(store, scope, key).await.unwrap() else { panic!("{key} is free") };
    let id = EntryId::new(scope.parse().unwrap(), key.parse().unwrap());
    let outcome = RecordedOutcome::done(Json::parse(outcome).unwrap());
    // Longer than an import keeps every entry.
    let ending = ClaimEnding::Complete { outcome, ttl_ms: 30 * 86_400_000 };
    store.end(vec![EndClaim { id, token: grant.token, ending }]).await.unwrap().remove(0).unwrap();
}

/// Every kind of thing that a store holds. The names of the queues are in the order in which they are copied.
pub const QUEUES: [&str; 6] = ["jobs-dead", "jobs", "once", "resting", "steps-dead.fifo", "steps.fifo"];

/// Deduplication ids are remembered for longer than the test takes.
fn remembering() -> QueueConfig {
    let mut config = QueueConfig::default();
    config.dedup.window_ms = 21_600_000;
    config
}

pub async fn filled(store: &SharedStore) {
    let halting = QueueConfig { on_dead: OnDead::HaltGroup, ..QueueConfig::fifo() };
    for (name, config) in [
        ("jobs-dead", QueueConfig::default()),
        ("jobs", dying("jobs-dead", remembering())),
        ("once", QueueConfig::default().tier(Tier::EffectivelyOnce)),
        ("resting", QueueConfig::default()),
        ("steps-dead.fifo", QueueConfig::fifo()),
        ("steps.fifo", dying("steps-dead.fifo", halting)),
    ] {
        store.create_queue(&queue(name), config).await.unwrap();
    }
    jobs(store).await;
    for (group, body) in [("halted", "h0"), ("halted", "h1"), ("free", "f0"), ("free", "f1"), ("free", "f2")]
    {
        let dedup = body.parse().unwrap();
        send(store, "steps.fifo", text(body).group(group.parse().unwrap()).dedup(dedup)).await;
    }
    let first = one(store, "steps.fifo").await;
    settle(store, "steps.fifo", &first, Settlement::Reject { reason: "broken".into() }).await;
    send(store, "resting", text("asleep")).await;
    store.pause_queue(&queue("resting"), "ann", Some("incident")).await.unwrap();

    complete(store, "tenant-a/orders", "7", r#"{"paid":1}"#).await;
    complete(store, "tenant-b/orders", "7", r#"{"paid":2}"#).await;
    claim(store, "tenant-a/orders", "held").await.unwrap();
    send(store, "once", text("parked")).await;
    let parked = one(store, "once").await;
    claim(store, "queue/once", parked.key.as_str()).await.unwrap();
    settle(store, "once", &parked, Settlement::Park { reason: "in doubt".into() }).await;
}

fn in_six_hours() -> u64 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    now.as_millis() as u64 + 21_600_000
}

async fn jobs(store: &SharedStore) {
    send(store, "jobs", text("dead")).await;
    let dead = one(store, "jobs").await;
    settle(store, "jobs", &dead, Settlement::Reject { reason: "never".into() }).await;
    send(store, "jobs", text("retried")).await;
    let retried = one(store, "jobs").await;
    let again = Settlement::Retry { after_ms: Some(21_600_000), error: Some("not yet".into()) };
    settle(store, "jobs", &retried, again).await;
    send(store, "jobs", text("acked").dedup("gone".parse().unwrap())).await;
    let acked = one(store, "jobs").await;
    settle(store, "jobs", &acked, Settlement::Ack).await;
    send(store, "jobs", text("flying")).await;
    one(store, "jobs").await;
    let urgent = text("urgent").priority(Priority(7)).group("tenant-a".parse().unwrap());
    send(store, "jobs", urgent.attribute("colour", Attribute::text("red"))).await;
    send(store, "jobs", text("later").deliver_at_ms(in_six_hours())).await;
    send(store, "jobs", text("known").dedup("waits".parse().unwrap())).await;
    send(store, "jobs", NewMessage::new(vec![0xff; 700_000])).await;
    // More than one page.
    for _ in 0..6 {
        let batch = (0..100).map(|number| text(&format!("n{number}"))).collect();
        store.send(&queue("jobs"), batch).await.unwrap();
    }
}
