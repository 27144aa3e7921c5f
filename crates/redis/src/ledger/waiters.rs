//! Claims that wait for a key, and calls that are on their way.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The claims of this process that wait, by the entries that they wait for.
#[derive(Default)]
pub(crate) struct Waiters(Mutex<HashMap<String, Vec<Arc<Notify>>>>);

impl Waiters {
    /// Registers a call. It is woken by every change in this process from now on, until the registration is dropped.
    pub fn register(self: &Arc<Self>, members: Vec<String>) -> Registration {
        let changed = Arc::new(Notify::new());
        let mut waiting = locked(&self.0);
        for member in &members {
            waiting.entry(member.clone()).or_default().push(changed.clone());
        }
        drop(waiting);
        Registration { waiters: self.clone(), members, changed }
    }

    /// An entry was freed, ended or given up.
    pub fn freed(&self, member: &str) {
        locked(&self.0).get(member).into_iter().flatten().for_each(|waiting| waiting.notify_one());
    }

    pub fn wake_all(&self) {
        locked(&self.0).values().flatten().for_each(|waiting| waiting.notify_one());
    }
}

/// A call that waits.
pub(crate) struct Registration {
    waiters: Arc<Waiters>,
    members: Vec<String>,
    changed: Arc<Notify>,
}

impl Registration {
    /// Returns after a change, or after this time.
    pub async fn wait(&self, max: Duration) {
        // Past the time, the caller looks as well.
        let _ = tokio::time::timeout(max, self.changed.notified()).await;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut waiting = locked(&self.waiters.0);
        for member in &self.members {
            if let Some(those) = waiting.get_mut(member) {
                those.retain(|other| !Arc::ptr_eq(other, &self.changed));
                if those.is_empty() {
                    waiting.remove(member);
                }
            }
        }
    }
}

/// The calls that are on their way to Redis.
#[derive(Default)]
pub(crate) struct Asking {
    numbers: Mutex<(u64, BTreeSet<u64>)>,
    changed: Notify,
}

impl Asking {
    /// A call begins; it ends when the ticket is dropped.
    pub fn begin(self: &Arc<Self>) -> Ticket {
        let mut numbers = locked(&self.numbers);
        numbers.0 += 1;
        let number = numbers.0;
        numbers.1.insert(number);
        Ticket { asking: self.clone(), number }
    }

    /// Returns when the calls that have begun before have ended. Each of them is bounded in time.
    pub async fn passed(&self) {
        let last = locked(&self.numbers).0;
        loop {
            let changed = self.changed.notified();
            if locked(&self.numbers).1.first().is_none_or(|first| *first > last) {
                return;
            }
            changed.await;
        }
    }
}

/// A call on its way.
pub(crate) struct Ticket {
    asking: Arc<Asking>,
    number: u64,
}

impl Drop for Ticket {
    fn drop(&mut self) {
        locked(&self.asking.numbers).1.remove(&self.number);
        self.asking.changed.notify_waiters();
    }
}
