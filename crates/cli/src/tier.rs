//! What the CLI says about a queue's tier.

use hapax::QueueName;
use hapax::core::policy::tier::Finding;
use hapax::core::{QueueConfig, Store};
use hapax_observe::advice;

/// Facts that only a worker knows about its handler; the worker checks them when it starts.
pub const UNKNOWN_HERE: [&str; 4] = [
    "how long the handler takes",
    "what is done about a claim in doubt, and whether the effect honours the derived key",
    "a database of the handler's own, or another ledger",
    "where the keys of messages really come from",
];

/// The warnings about a queue that was created or changed.
pub async fn warnings(store: &dyn Store, queue: &QueueName, config: &QueueConfig) -> Vec<String> {
    // Not to know is no reason to fail: the queue is made.
    let found = advice::of_policy(store, config).await;
    let line = |finding: &Finding| {
        let cannot = if finding.is_refusal() { "its tier cannot hold here: " } else { "" };
        format!("queue {queue}: {cannot}{finding}")
    };
    found.iter().map(line).collect()
}
