//! Export and import.

use hapax_core::{ExportedItem, Fence, Imported, QueueName, TransferScope};
use serde::{Deserialize, Serialize};

/// `GET /v1/transfer`, and `POST /v1/transfer/fence`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct FenceBound {
    /// Every fence that was given out is below it; raised, every fence from then on is at least this.
    pub fence: Fence,
}

/// `POST /v1/transfer/items`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportBody {
    /// Where to; the ledger when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// At most 1,000.
    pub items: Vec<ExportedItem>,
}

/// The answer to one item.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ImportResponse {
    /// What was done with it.
    pub imported: Imported,
}

/// The scope that a queue's name, or none, stands for.
pub fn transfer_scope(queue: Option<QueueName>) -> TransferScope {
    queue.map_or(TransferScope::Ledger, TransferScope::Queue)
}
