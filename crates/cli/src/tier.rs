//! What the CLI says about a queue's tier.

use std::fmt;

use hapax::QueueName;
use hapax::core::policy::tier::Finding;
use hapax::core::{QueueConfig, Store, Tier};
use hapax_observe::advice;
use serde::Serialize;

/// Facts that only a worker knows about its handler; the worker checks them when it starts.
pub const UNKNOWN_HERE: [&str; 4] = [
    "for how long its heartbeats extend a lease",
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
    /// Waits for the disk, of a message that shares none with others.
    pub syncs: f64,
    /// The number of these waits, its send included; not a multiple.
    pub syncs_alone: f64,
}

/// Store, tier, processor time, bytes, syncs, and their number. A test compares them with the page.
const COSTS: [(&str, Tier, [f64; 4]); 9] = [
    ("embedded", Tier::AtMostOnce, [0.9, 0.8, 0.5, 1.0]),
    ("embedded", Tier::EffectivelyOnce, [2.8, 5.6, 1.5, 3.0]),
    ("embedded", Tier::Transactional, [29.9, 34.4, 1.5, 3.0]),
    ("postgres", Tier::AtMostOnce, [0.9, 1.0, 1.0, 3.0]),
    ("postgres", Tier::EffectivelyOnce, [5.7, 4.1, 1.3, 4.0]),
    ("postgres", Tier::Transactional, [5.8, 3.0, 1.0, 3.0]),
    ("redis", Tier::AtMostOnce, [0.9, 1.4, 0.7, 2.0]),
    ("redis", Tier::EffectivelyOnce, [3.9, 4.3, 1.3, 3.9]),
    ("redis", Tier::Transactional, [10.9, 48.8, 1.4, 4.0]),
];

/// What a tier costs on this kind of store, as measured; `None` for the tier that the others are compared with.
pub fn cost(store: &str, tier: Tier) -> Option<TierCost> {
    let (.., figures) = COSTS.into_iter().find(|(name, of, ..)| *name == store && *of == tier)?;
    let [cpu, bytes, syncs, syncs_alone] = figures;
    Some(TierCost { cpu, bytes, syncs, syncs_alone })
}

impl fmt::Display for TierCost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, bytes, syncs, syncs_alone } = self;
        write!(
            f,
            "{cpu:.1} times the processor time, {bytes:.1} times the bytes and {syncs:.1} times the syncs of at-least-once \
             ({syncs_alone:.1} syncs for a message alone; messages in flight share them)"
        )
    }
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
        let cells = |start: &str| -> Vec<&str> {
            let row = page.lines().find(|line| line.starts_with(start)).expect(start);
            row.split('|').map(str::trim).collect()
        };
        let columns = cells("| store | tier | CPU us |");
        let at = |name: &str| columns.iter().position(|column| *column == name).expect(name);
        // The multiple is beside its figure.
        let places = [
            at("of it the database's") + 1,
            at("bytes written") + 1,
            at("syncs alone") + 1,
            at("syncs alone"),
        ];
        for (store, tier, figures) in COSTS {
            let row = cells(&format!("| {store} | `{}` |", word(&tier)));
            let on_page = places.map(|place| row[place]);
            assert_eq!(on_page, figures.map(|figure| format!("{figure:.1}")), "{store}, {tier:?}");
        }
    }
}
