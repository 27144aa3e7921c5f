//! The tier check, with what can be known from here about a queue.

use hapax::QueueName;
use hapax::core::policy::tier::{Facts, Finding, check};
use hapax::core::store::QueueTotals;
use hapax::core::{QueueAdmin, QueueConfig};

/// What only a worker knows about its handler; it checks these when it starts.
pub const NOT_KNOWN: [&str; 4] = [
    "how long the handler takes",
    "what is done about a claim in doubt, and whether the effect honours the derived key",
    "the handler's own database or ledger",
    "where the keys of messages really come from",
];

/// What a queue's policy and its store say about its tier. `dead_retention_ms` and `totals` where they are known.
pub fn findings(
    store: &dyn QueueAdmin,
    config: &QueueConfig,
    dead_retention_ms: Option<u64>,
    totals: Option<QueueTotals>,
    producer_retry_ms: Option<u64>,
) -> Vec<Finding> {
    let facts = Facts::new(config.clone(), store.capabilities());
    check(&Facts { dead_retention_ms, totals, producer_retry_ms, ..facts })
}

/// The lines to tell whoever made or changed a queue, if there is something to tell.
pub async fn warnings(store: &dyn QueueAdmin, queue: &QueueName, config: &QueueConfig) -> Vec<String> {
    let dead = match &config.dead_letter {
        // Not to know is no reason to fail: the queue is made.
        Some(dead) => store.queue(&dead.queue).await.ok(),
        None => None,
    };
    let found = findings(store, config, dead.map(|dead| dead.config.retention_ms), None, None);
    let line = |finding: &Finding| {
        let cannot = if finding.is_refusal() { "its tier cannot hold here: " } else { "" };
        format!("queue {queue}: {cannot}{finding}")
    };
    found.iter().map(line).collect()
}
