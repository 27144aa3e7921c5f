//! Export and import.

use hapax_core::{CopyState, ExportedItem, Fence, Imported, QueueName, TransferScope};
use serde::{Deserialize, Serialize};

/// `GET /v1/transfer`, and `POST /v1/transfer/fence`.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct FenceBound {
    /// Every fence that was given out is below it; raised, every fence from then on is at least this.
    pub fence: Fence,
}

/// `GET /v1/transfer/copy`: the state of the ledger; `POST /v1/transfer/copy`: the new state of a queue or of the ledger.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyBody {
    /// Which queue; the ledger when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// Why it is closed; open when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copy: Option<CopyState>,
    /// Who asks, for the audit.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub by: String,
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
