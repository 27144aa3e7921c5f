//! The tier check, with what can be known from here about a queue.

use hapax::QueueName;
use hapax::core::ledger::TTL_MS_DEFAULT;
use hapax::core::policy::tier::{Facts, Finding, LedgerFacts, check};
use hapax::core::store::QueueTotals;
use hapax::core::{QueueConfig, Store};

/// What only a worker knows about its handler; it checks these when it starts.
pub const NOT_KNOWN: [&str; 4] = [
    "how long the handler takes",
    "what is done about a claim in doubt, and whether the effect honours the derived key",
    "a database of the handler's own, or another ledger",
    "where the keys of messages really come from",
];

/// What a queue's policy and its store say about its tier. `dead_retention_ms` and `totals` where they are known.
pub fn findings(
    store: &dyn Store,
    config: &QueueConfig,
    dead_retention_ms: Option<u64>,
    totals: Option<QueueTotals>,
    producer_retry_ms: Option<u64>,
) -> Vec<Finding> {
    let facts = Facts::new(config.clone(), store.capabilities());
    check(&Facts { dead_retention_ms, totals, producer_retry_ms, ledger: own_ledger(store), ..facts })
}

/// The ledger in the queue's own store, if it has one.
fn own_ledger(store: &dyn Store) -> Option<LedgerFacts> {
    let held = store.capabilities().settle_ends_claims;
    let facts = || LedgerFacts { can: store.ledger_capabilities(), same_store: true, ttl_ms: TTL_MS_DEFAULT };
    held.then(facts)
}

/// The warnings about a queue that was created or changed.
pub async fn warnings(store: &dyn Store, queue: &QueueName, config: &QueueConfig) -> Vec<String> {
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
