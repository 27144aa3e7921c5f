//! The features of a store. A tier, a queue or a worker that needs more is refused at start-up.

use serde::{Deserialize, Serialize};

/// The order that a store keeps inside a FIFO group.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// In the order in which sends were answered.
    PerGroup,
    /// No order.
    #[default]
    None,
}

/// How a waiting receive learns that a message has arrived.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WakeUp {
    /// Not at all: a receive returns at once, and the caller has to repeat it.
    #[default]
    None,
    /// The store wakes it at once.
    Push,
    /// The store checks again at this interval.
    Poll {
        /// The longest time between two checks.
        every_ms: u64,
    },
}

/// The scope of the counters of a queue and of the ledger.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum CounterScope {
    /// The operations of this process since it opened the store.
    #[default]
    Process,
    /// All operations in the store, by any process.
    Store,
}

/// The ways to end a delivery other than an ack.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct SupportedSettlements {
    /// A retry after the delay of the queue's policy, or at once.
    pub retry: bool,
    /// A retry after a delay that the consumer asks for.
    pub retry_after: bool,
    /// Put back without counting an attempt.
    pub defer: bool,
    /// To the dead letters.
    pub reject: bool,
    /// Set aside in its own queue until an operator decides.
    pub park: bool,
}

impl SupportedSettlements {
    /// All of them.
    pub const ALL: Self = Self { retry: true, retry_after: true, defer: true, reject: true, park: true };
}

/// The features of a store. A feature that the store does not declare counts as missing, also one that is newer than
/// the store.
///
/// ```
/// # use hapax_core::{Capabilities, Order};
/// let mut can = Capabilities::none("my-store");
/// can.fence = true;
/// assert_eq!((can.order, can.durable_lease), (Order::None, false));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Capabilities {
    /// The store's name, for messages.
    pub name: String,
    /// A delivery has a lease, which ends by itself and can be extended.
    pub leases: bool,
    /// How a delivery may end other than by an ack.
    pub settles: SupportedSettlements,
    /// A settle's parts (ack, dead letter, history) happen in one transaction.
    pub atomic_settle: bool,
    /// A message moves to the dead letters and back in one transaction. Otherwise it takes two steps, and is in neither
    /// queue between them; it is never in both and never lost.
    pub atomic_moves: bool,
    /// A settle may end a claim of the ledger in the same store, in the same transaction.
    pub settle_ends_claims: bool,
    /// A delivery survives a crash of the store's process.
    pub durable_lease: bool,
    /// Fences only grow, also across restarts and restores.
    pub fence: bool,
    /// The order that is kept.
    pub order: Order,
    /// A FIFO group can be halted while one of its messages is dead or parked.
    pub halt_group: bool,
    /// Urgent messages of a standard queue are delivered first.
    pub priorities: bool,
    /// Messages can be read without a delivery.
    pub browse: bool,
    /// Dead letters can be moved back.
    pub redrive: bool,
    /// How a waiting receive is woken.
    pub wake_up: WakeUp,
    /// The longest deduplication window.
    pub dedup_ms_max: u64,
    /// The largest message, body and attributes together.
    pub message_bytes_max: u64,
    /// The scope of the counters.
    pub counters: CounterScope,
}

impl Capabilities {
    /// A store without any feature; set the fields one by one.
    pub fn none(name: impl Into<String>) -> Self {
        Self { name: name.into(), ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_store_does_not_say_it_cannot_do() {
        let older: Capabilities = serde_json::from_str(r#"{"name":"older","fence":true}"#).unwrap();
        assert_eq!(older, Capabilities { fence: true, ..Capabilities::none("older") });
        let newer: Capabilities = serde_json::from_str(r#"{"name":"newer","flies":true}"#).unwrap();
        assert_eq!(newer, Capabilities::none("newer"));
    }
}
