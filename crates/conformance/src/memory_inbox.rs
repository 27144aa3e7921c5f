//! A minimal [`AsyncInbox`]: a map and a list of effects, one transaction at a time. It is the reference for the suite,
//! and serves tests that do not need a real database.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use hapax_core::{
    AsyncInbox, EntryId, Fingerprint, InboxEntry, InboxError, InboxLookup, LedgerCapabilities,
    RecordedOutcome,
};
use tokio::sync::{Mutex, OwnedMutexGuard};

#[derive(Debug, Clone, Default)]
struct Data {
    entries: HashMap<EntryId, (Fingerprint, RecordedOutcome)>,
    effects: Vec<String>,
}

/// A database in memory. Clones share it.
#[derive(Debug, Clone)]
pub struct MemoryInbox {
    data: Arc<Mutex<Data>>,
    lock_timeout: Duration,
}

/// A transaction of a [`MemoryInbox`]; rolled back if it is dropped.
#[derive(Debug)]
pub struct MemoryTx {
    committed: OwnedMutexGuard<Data>,
    changed: Data,
}

impl MemoryTx {
    /// Makes a business write.
    pub fn write(&mut self, effect: impl Into<String>) {
        self.changed.effects.push(effect.into());
    }

    /// The business writes that this transaction sees.
    pub fn effects(&self) -> &[String] {
        &self.changed.effects
    }
}

impl MemoryInbox {
    /// An empty database with the maximum time that transactions wait for each other.
    pub fn new(lock_timeout: Duration) -> Self {
        Self { data: Arc::default(), lock_timeout }
    }

    /// The committed business writes.
    pub async fn effects(&self) -> Vec<String> {
        self.data.lock().await.effects.clone()
    }
}

#[async_trait]
impl AsyncInbox for MemoryInbox {
    type Tx = MemoryTx;
    type Connection = MemoryTx;

    fn inbox_capabilities(&self) -> LedgerCapabilities {
        // Declared durable because a test does not outlive its process.
        LedgerCapabilities { name: "memory".into(), durable: true, fence: true, may_evict: false }
    }

    async fn begin(&self, _entry: &InboxEntry) -> Result<MemoryTx, InboxError> {
        let locked = tokio::time::timeout(self.lock_timeout, self.data.clone().lock_owned()).await;
        let timeout_ms = self.lock_timeout.as_millis() as u64;
        let committed = locked.map_err(|_| InboxError::Locked { timeout_ms })?;
        let changed = committed.clone();
        Ok(MemoryTx { committed, changed })
    }

    fn connection(tx: &mut MemoryTx) -> &mut MemoryTx {
        tx
    }

    async fn rollback(&self, _tx: MemoryTx) {}

    async fn commit(&self, mut tx: MemoryTx) -> Result<(), InboxError> {
        *tx.committed = tx.changed;
        Ok(())
    }

    async fn enter(&self, tx: &mut MemoryTx, entry: &InboxEntry) -> Result<InboxLookup, InboxError> {
        Ok(match tx.changed.entries.get(&entry.id) {
            None => InboxLookup::Fresh,
            Some((known, _)) if *known != entry.fingerprint => InboxLookup::Mismatch,
            Some((_, outcome)) => InboxLookup::Completed(outcome.clone()),
        })
    }

    async fn record(
        &self,
        tx: &mut MemoryTx,
        entry: &InboxEntry,
        outcome: RecordedOutcome,
        _ttl_ms: u64,
    ) -> Result<(), InboxError> {
        tx.changed
            .entries
            .insert(entry.id.clone(), (entry.fingerprint.clone(), outcome.without_oversize_value()));
        Ok(())
    }
}
