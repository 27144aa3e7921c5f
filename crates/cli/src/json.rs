//! What commands print with `--json`: the same form as the native API's.

use hapax::core::{MessageView, QueueInfo, QueueStats};
use hapax_client::wire::{MessageItem, QueueItem};
use serde::Serialize;

/// A message that was looked at.
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
    /// Puts both together.
    pub fn new(info: QueueInfo, stats: QueueStats) -> Self {
        Self { queue: info.into(), stats }
    }
}
