//! The output of commands with `--json`: the same format as in the native API.

use hapax::core::{MessageView, QueueInfo, QueueStats};
use hapax_client::wire::{MessageItem, QueueItem};
use serde::Serialize;

/// Browsed messages in the format of the native API.
pub fn messages(messages: Vec<MessageView>) -> Vec<MessageItem> {
    messages.into_iter().map(MessageItem::from).collect()
}

/// A queue, its policy and its counters.
#[derive(Debug, Serialize)]
pub struct QueueReport {
    #[serde(flatten)]
    queue: QueueItem,
    stats: QueueStats,
}

impl QueueReport {
    /// Combines configuration and counters.
    pub fn new(info: QueueInfo, stats: QueueStats) -> Self {
        Self { queue: info.into(), stats }
    }
}
