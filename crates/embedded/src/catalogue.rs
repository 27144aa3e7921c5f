//! The queues and their configurations as of the last commit, for callers that only look: a listing of many thousand
//! queues does not stop the writer.

use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use hapax_core::{QueueInfo, QueueName};

use crate::record::{QueueRow, Record};

#[derive(Default)]
pub(crate) struct Catalogue {
    queues: RwLock<BTreeMap<QueueName, QueueRow>>,
}

impl Catalogue {
    pub fn new(rows: impl Iterator<Item = QueueRow>) -> Self {
        let queues = rows.map(|row| (row.name.clone(), row)).collect();
        Self { queues: RwLock::new(queues) }
    }

    /// Takes over what a wave has changed. The writer calls it between the commit and the answers, so a caller whose
    /// change was answered finds it here.
    pub fn committed(&self, records: &[Record]) {
        let changed = records.iter().filter_map(|record| match record {
            Record::Queue(row) => Some(row),
            _ => None,
        });
        for row in changed {
            let mut queues = self.queues.write().unwrap_or_else(PoisonError::into_inner);
            if row.deleted {
                queues.remove(&row.name);
            } else {
                queues.insert(row.name.clone(), row.clone());
            }
        }
    }

    pub fn find(&self, name: &QueueName) -> Option<QueueInfo> {
        self.queues.read().unwrap_or_else(PoisonError::into_inner).get(name).map(QueueRow::info)
    }

    /// All queues in order of their names. Rows share their configuration, so the lock is held for a moment only.
    pub fn list(&self) -> Vec<QueueInfo> {
        let rows: Vec<QueueRow> =
            self.queues.read().unwrap_or_else(PoisonError::into_inner).values().cloned().collect();
        rows.iter().map(QueueRow::info).collect()
    }
}
