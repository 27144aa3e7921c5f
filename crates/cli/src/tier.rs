//! The tier check, with the facts about a queue that are known to the CLI.

use hapax::QueueName;
use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::policy::tier::{Facts, Finding, LedgerFacts, check};
use hapax::core::store::QueueTotals;
use hapax::core::{QueueConfig, Store, StoreError};

/// Facts that only a worker knows about its handler; the worker checks them when it starts.
pub const UNKNOWN_HERE: [&str; 4] = [
    "how long the handler takes",
    "what is done about a claim in doubt, and whether the effect honours the derived key",
    "a database of the handler's own, or another ledger",
    "where the keys of messages really come from",
];

/// What is known about the queue that takes a queue's dead letters.
#[derive(Debug, Clone, Copy, Default)]
pub struct DeadQueue {
    /// How long it keeps messages, where that is known.
    retention_ms: Option<u64>,
    /// It is named but does not exist.
    is_missing: bool,
}

impl DeadQueue {
    /// Looks at the dead-letter queue that a policy names, if it names one. Fails with its name.
    pub async fn of(store: &dyn Store, config: &QueueConfig) -> Result<Self, (QueueName, StoreError)> {
        let Some(dead) = &config.dead_letter else { return Ok(Self::default()) };
        match store.queue(&dead.queue).await {
            Ok(found) => Ok(Self { retention_ms: Some(found.config.retention_ms), is_missing: false }),
            Err(StoreError::NoSuchQueue(_)) => Ok(Self { retention_ms: None, is_missing: true }),
            Err(error) => Err((dead.queue.clone(), error)),
        }
    }
}

/// What a queue's policy and its store say about its tier. `dead` and `totals` where they are known.
pub fn findings(
    store: &dyn Store,
    config: &QueueConfig,
    dead: DeadQueue,
    totals: Option<QueueTotals>,
    producer_retry_ms: Option<u64>,
) -> Vec<Finding> {
    let facts = Facts::new(config.clone(), store.capabilities());
    check(&Facts {
        dead_retention_ms: dead.retention_ms,
        dead_queue_missing: dead.is_missing,
        totals,
        producer_retry_ms,
        ledger: own_ledger(store),
        ..facts
    })
}

/// The ledger in the queue's own store, if it has one.
fn own_ledger(store: &dyn Store) -> Option<LedgerFacts> {
    let held = store.capabilities().settle_ends_claims;
    let facts = || LedgerFacts {
        capabilities: store.ledger_capabilities(),
        same_store: true,
        ttl_ms: TTL_MS_DEFAULT,
    };
    held.then(facts)
}

/// The warnings about a queue that was created or changed.
pub async fn warnings(store: &dyn Store, queue: &QueueName, config: &QueueConfig) -> Vec<String> {
    // Not to know is no reason to fail: the queue is made.
    let dead = DeadQueue::of(store, config).await.unwrap_or_default();
    let found = findings(store, config, dead, None, None);
    let line = |finding: &Finding| {
        let cannot = if finding.is_refusal() { "its tier cannot hold here: " } else { "" };
        format!("queue {queue}: {cannot}{finding}")
    };
    found.iter().map(line).collect()
}
