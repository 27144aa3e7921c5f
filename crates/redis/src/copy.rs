//! Queues and the ledger while they are copied to another store or from one. What is closed is so in Redis itself, so that
//! every script that runs afterwards refuses. A queue says why in its `info`, the ledger in the `meta` of each shard.

use hapax_core::{CopyState, StoreError};

use crate::error::unexpected;

/// A state as the scripts keep it: a word that they understand, and the JSON.
pub(crate) fn stored(state: &CopyState) -> String {
    let word = match state {
        CopyState::To { complete: false, .. } => "to",
        CopyState::To { complete: true, .. } => "complete",
        CopyState::From { .. } => "from",
    };
    format!("{word} {}", serde_json::to_string(state).expect("a state is plain data"))
}

pub(crate) fn read(stored: &str) -> Result<CopyState, StoreError> {
    let json = stored.split_once(' ').map_or("", |(_, json)| json);
    serde_json::from_str(json).map_err(|_| unexpected("copy"))
}

/// The error of an operation on what is closed.
pub(crate) fn refusal(stored: &str, what: &str) -> StoreError {
    read(stored).map_or_else(|error| error, |state| state.refusal(what))
}
