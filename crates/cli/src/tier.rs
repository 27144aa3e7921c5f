//! What the CLI says about a queue's tier.

use hapax::QueueName;
use hapax::core::policy::tier::Finding;
use hapax::core::{QueueConfig, Store, Tier};
use hapax_observe::advice;
use serde::Serialize;

/// Facts that only a worker knows about its handler; the worker checks them when it starts.
pub const UNKNOWN_HERE: [&str; 4] = [
    "how long the handler takes",
    "what is done about a claim in doubt, and whether the effect honours the derived key",
    "a database of the handler's own, or another ledger",
    "where the keys of messages really come from",
];

/// The page that the figures of [`cost`] come from.
pub const COSTS_PAGE: &str = "docs/tiers.md";

/// What a message costs at a tier, as a multiple of what it costs at `at-least-once` on the same store.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TierCost {
    /// Processor time of all processes.
    pub cpu: f64,
    /// Bytes written to files.
    pub bytes: f64,
}

/// Store, tier, processor time and bytes. A test compares them with the page.
const COSTS: [(&str, Tier, f64, f64); 9] = [
    ("embedded", Tier::AtMostOnce, 0.8, 0.6),
    ("embedded", Tier::EffectivelyOnce, 1.9, 3.1),
    ("embedded", Tier::Transactional, 10.5, 25.4),
    ("postgres", Tier::AtMostOnce, 1.0, 1.0),
    ("postgres", Tier::EffectivelyOnce, 3.9, 4.1),
    ("postgres", Tier::Transactional, 5.1, 2.9),
    ("redis", Tier::AtMostOnce, 0.6, 1.0),
    ("redis", Tier::EffectivelyOnce, 2.1, 2.7),
    ("redis", Tier::Transactional, 4.9, 24.0),
];

/// What a tier costs on this kind of store, as measured; `None` for the tier that the others are compared with.
pub fn cost(store: &str, tier: Tier) -> Option<TierCost> {
    let (.., cpu, bytes) = COSTS.into_iter().find(|(name, of, ..)| *name == store && *of == tier)?;
    Some(TierCost { cpu, bytes })
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::word;

    #[test]
    fn the_page_has_the_same_figures() {
        let page = include_str!("../../../docs/tiers.md");
        for (store, tier, cpu, bytes) in COSTS {
            let start = format!("| {store} | `{}` |", word(&tier));
            let row = page.lines().find(|line| line.starts_with(&start)).expect(&start);
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let (of_cpu, of_bytes) = (format!("{cpu:.1}"), format!("{bytes:.1}"));
            assert!(cells.contains(&of_cpu.as_str()) && cells.contains(&of_bytes.as_str()), "{row}");
        }
    }
}
