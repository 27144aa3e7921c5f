//! What is kept of a call while it is passed on to the store.

use hapax_core::{ClaimEnding, ClaimRequest, QueueName, Settle, Settlement};

use super::Observer;
use crate::life::shortened;

/// What is needed of a settle after it was passed on.
pub(crate) struct SettleSummary {
    /// The hash of its receipt.
    pub delivery: u64,
    pub(super) settlement: SettlementKind,
    pub(super) completes: bool,
}

pub(super) enum SettlementKind {
    Ack,
    Failed(Option<String>),
    Deferred,
}

impl SettleSummary {
    pub fn new(observer: &Observer, settle: &Settle) -> Self {
        let settlement = match &settle.settlement {
            Settlement::Ack => SettlementKind::Ack,
            Settlement::Retry { error, .. } => SettlementKind::Failed(error.as_deref().map(shortened)),
            Settlement::Reject { reason } | Settlement::Park { reason } => {
                SettlementKind::Failed(Some(shortened(reason)))
            }
            Settlement::Defer { .. } => SettlementKind::Deferred,
        };
        let completes =
            settle.claim.as_ref().is_some_and(|claim| matches!(claim.ending, ClaimEnding::Complete { .. }));
        Self { delivery: observer.hash(&settle.receipt), settlement, completes }
    }
}

/// What is needed of a claim after it was passed on.
pub(crate) struct ClaimSummary {
    pub(super) id: hapax_core::EntryId,
    /// Queue and hash of the receipt of the delivery that it is for.
    pub delivery: Option<(QueueName, u64)>,
}

impl ClaimSummary {
    pub fn new(observer: &Observer, request: &ClaimRequest) -> Self {
        let delivery = request.delivery.as_ref();
        let delivery = delivery.map(|(queue, receipt)| (queue.clone(), observer.hash(receipt)));
        Self { id: request.id.clone(), delivery }
    }
}
