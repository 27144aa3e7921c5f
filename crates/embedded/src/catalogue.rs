//! The queues and their configurations as of the last commit, for read-only calls: listing many thousand queues does
//! not block the writer.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use hapax_core::{QueueConfig, QueueInfo, QueueName, Tier};

use crate::record::{QueueRow, Record};

/// What a queue wants to know of its messages beside what they say.
pub(crate) struct SenderHints {
    /// A hash of the body, for deduplication by content.
    pub by_content: bool,
    /// The idempotency key: for the tier that looks at the ledger, or because it may be in the body.
    pub keyed: bool,
    /// Where in the body that key is.
    pub pointer: Option<Arc<str>>,
}

impl SenderHints {
    /// `None` for a queue that wants nothing.
    fn of(config: &QueueConfig) -> Option<Arc<Self>> {
        let by_content = config.dedup.content_based;
        let keyed = config.tier == Tier::EffectivelyOnce || config.key_pointer.is_some();
        let pointer = config.key_pointer.as_deref().map(Into::into);
        (by_content || keyed).then(|| Arc::new(Self { by_content, keyed, pointer }))
    }
}

#[derive(Default)]
pub(crate) struct Catalogue {
    queues: RwLock<BTreeMap<QueueName, QueueRow>>,
    /// What senders can find out about messages of some queues, so that the writer need not. Only hints: where one is
    /// out of date, the writer works, or what the sender found is not used.
    hints: RwLock<HashMap<QueueName, Arc<SenderHints>>>,
}

impl Catalogue {
    pub fn new(rows: impl Iterator<Item = QueueRow>) -> Self {
        let queues: BTreeMap<_, _> = rows.map(|row| (row.name.clone(), row)).collect();
        let hint = |row: &QueueRow| Some((row.name.clone(), SenderHints::of(&row.config)?));
        let hints = queues.values().filter_map(hint).collect();
        Self { queues: RwLock::new(queues), hints: RwLock::new(hints) }
    }

    /// Applies a wave's changes. The writer calls this between the commit and the answers, so a caller that got the
    /// answer to its change sees the change here.
    pub fn committed(&self, records: &[Record]) {
        let changed = records.iter().filter_map(|record| match record {
            Record::Queue(row) => Some(row),
            _ => None,
        });
        for row in changed {
            let hint = SenderHints::of(&row.config).filter(|_| !row.deleted);
            let mut hints = self.hints.write().unwrap_or_else(PoisonError::into_inner);
            match hint {
                Some(hint) => hints.insert(row.name.clone(), hint),
                None => hints.remove(&row.name),
            };
            drop(hints);
            let mut queues = self.queues.write().unwrap_or_else(PoisonError::into_inner);
            if row.deleted {
                queues.remove(&row.name);
            } else {
                queues.insert(row.name.clone(), row.clone());
            }
        }
    }

    pub fn sender_hints(&self, name: &QueueName) -> Option<Arc<SenderHints>> {
        self.hints.read().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }

    pub fn find(&self, name: &QueueName) -> Option<QueueInfo> {
        self.queues.read().unwrap_or_else(PoisonError::into_inner).get(name).map(QueueRow::info)
    }

    /// All queues by name. Rows share their configuration, so the lock is held only briefly.
    pub fn list(&self) -> Vec<QueueInfo> {
        let rows: Vec<QueueRow> =
            self.queues.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        rows.iter().map(QueueRow::info).collect()
    }
}
