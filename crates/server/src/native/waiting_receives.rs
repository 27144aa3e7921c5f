//! Receives that wait for messages: counts them, and cancels them by the name that their caller chose.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::QueueName;
use tokio::sync::Notify;

/// Caller, queue and the caller's name for the receive.
type ReceiveName = (String, QueueName, String);

#[derive(Default)]
pub(super) struct WaitingReceives {
    named: Mutex<HashMap<ReceiveName, Arc<Notify>>>,
    count: AtomicUsize,
}

impl WaitingReceives {
    fn lock(&self) -> MutexGuard<'_, HashMap<ReceiveName, Arc<Notify>>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a receive until the guard is dropped; `None` if its name is in use.
    pub(super) fn begin(&self, name: Option<ReceiveName>) -> Option<WaitingReceive<'_>> {
        let cancel = Arc::new(Notify::new());
        if let Some(name) = &name {
            match self.lock().entry(name.clone()) {
                Entry::Occupied(_) => return None,
                Entry::Vacant(free) => drop(free.insert(cancel.clone())),
            }
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        Some(WaitingReceive { waiting_receives: self, name, cancel })
    }

    /// Cancels a receive; `false` if there is none with this name.
    pub(super) fn cancel(&self, name: &ReceiveName) -> bool {
        let found = self.lock().get(name).cloned();
        if let Some(cancel) = &found {
            cancel.notify_one();
        }
        found.is_some()
    }

    pub(super) fn len(&self) -> usize {
        self.count.load(Ordering::SeqCst)
    }
}

pub(super) struct WaitingReceive<'a> {
    waiting_receives: &'a WaitingReceives,
    name: Option<ReceiveName>,
    cancel: Arc<Notify>,
}

impl WaitingReceive<'_> {
    /// Resolves when the receive has been cancelled.
    pub(super) async fn cancelled(&self) {
        self.cancel.notified().await;
    }
}

impl Drop for WaitingReceive<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            self.waiting_receives.lock().remove(name);
        }
        self.waiting_receives.count.fetch_sub(1, Ordering::SeqCst);
    }
}
