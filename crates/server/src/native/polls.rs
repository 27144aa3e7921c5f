//! Receives that wait for messages: counts them, and cancels them by the name that their caller chose.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use hapax_core::QueueName;
use tokio::sync::Notify;

/// Caller, queue and the caller's name for the receive.
type Name = (String, QueueName, String);

#[derive(Default)]
pub(super) struct Polls {
    named: Mutex<HashMap<Name, Arc<Notify>>>,
    count: AtomicUsize,
}

impl Polls {
    fn lock(&self) -> MutexGuard<'_, HashMap<Name, Arc<Notify>>> {
        self.named.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a receive until the guard is dropped; `None` if its name is in use.
    pub(super) fn begin(&self, name: Option<Name>) -> Option<Poll<'_>> {
        let cancel = Arc::new(Notify::new());
        if let Some(name) = &name {
            match self.lock().entry(name.clone()) {
                Entry::Occupied(_) => return None,
                Entry::Vacant(free) => drop(free.insert(cancel.clone())),
            }
        }
        self.count.fetch_add(1, Ordering::SeqCst);
        Some(Poll { polls: self, name, cancel })
    }

    /// Cancels a receive; `false` if there is none with this name.
    pub(super) fn cancel(&self, name: &Name) -> bool {
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

pub(super) struct Poll<'a> {
    polls: &'a Polls,
    name: Option<Name>,
    cancel: Arc<Notify>,
}

impl Poll<'_> {
    /// Resolves when the receive has been cancelled.
    pub(super) async fn cancelled(&self) {
        self.cancel.notified().await;
    }
}

impl Drop for Poll<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            self.polls.lock().remove(name);
        }
        self.polls.count.fetch_sub(1, Ordering::SeqCst);
    }
}
