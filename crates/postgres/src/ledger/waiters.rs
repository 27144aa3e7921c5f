//! Claims that wait for a key: woken at once by a change in this process, by a hint of another process, and from time to
//! time in case a hint was lost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::{Notify, broadcast};

use super::rows::Hash;
use crate::hints::{Hint, Hints, Topic};

/// How often all waiting claims look again while hints arrive, and while none do.
const POLL_LISTENING: Duration = Duration::from_secs(2);
const POLL_ALONE: Duration = Duration::from_millis(250);

#[derive(Default)]
struct State {
    /// The calls that wait, by the keys that they wait for.
    by_key: HashMap<u64, Vec<Arc<Notify>>>,
    /// A task looks after them.
    attended: bool,
}

/// The claims of one process that wait.
pub(super) struct Waiters {
    state: Mutex<State>,
    hints: Hints,
    runtime: Handle,
}

/// The first 8 bytes of a hash, as hints carry them.
pub(super) fn short(hash: &Hash) -> u64 {
    u64::from_be_bytes(hash[..8].try_into().expect("8 of 16 bytes"))
}

impl Waiters {
    pub fn new(hints: Hints, runtime: Handle) -> Arc<Self> {
        Arc::new(Self { state: Mutex::default(), hints, runtime })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a call for these keys. It is woken by every change from now on, until the registration is dropped.
    pub fn register(self: &Arc<Self>, keys: Vec<u64>) -> Registration {
        let changed = Arc::new(Notify::new());
        let mut state = self.state();
        for key in &keys {
            state.by_key.entry(*key).or_default().push(changed.clone());
        }
        if !state.attended && !keys.is_empty() {
            state.attended = true;
            let hints = self.hints.subscribe();
            self.runtime.spawn(attend(Arc::downgrade(self), hints));
        }
        drop(state);
        Registration { waiters: self.clone(), keys, changed }
    }

    /// Wakes the calls that wait for these keys, here and in other processes.
    pub fn freed(&self, hashes: &[Hash]) {
        self.wake(hashes.iter().map(short));
        self.hints.publish(Topic::Ledger, hashes.iter().map(short));
    }

    fn wake(&self, keys: impl IntoIterator<Item = u64>) {
        let state = self.state();
        for waiting in keys.into_iter().filter_map(|key| state.by_key.get(&key)) {
            for changed in waiting {
                changed.notify_one();
            }
        }
    }

    pub fn wake_all(&self) {
        let state = self.state();
        for changed in state.by_key.values().flatten() {
            changed.notify_one();
        }
    }

    fn poll_every(&self) -> Duration {
        if self.hints.is_listening() { POLL_LISTENING } else { POLL_ALONE }
    }

    /// Ends the attendance if no call waits.
    fn dismiss(&self) -> bool {
        let mut state = self.state();
        state.attended = !state.by_key.is_empty();
        !state.attended
    }
}

/// Passes hints on and lets all waiting calls look again at intervals: at the same time, so that they are merged.
async fn attend(waiters: Weak<Waiters>, mut hints: broadcast::Receiver<Hint>) {
    loop {
        let Some(every) = waiters.upgrade().map(|waiters| waiters.poll_every()) else { return };
        let hint = tokio::time::timeout(every, hints.recv()).await;
        let Some(waiters) = waiters.upgrade() else { return };
        match hint {
            Ok(Ok(Hint { topic: Topic::Ledger, keys: Some(keys) })) => waiters.wake(keys),
            Ok(
                Ok(Hint { topic: Topic::Ledger, keys: None }) | Err(broadcast::error::RecvError::Lagged(_)),
            ) => {
                waiters.wake_all();
            }
            Ok(Ok(Hint { topic: Topic::Queues | Topic::Outbox, .. })) => {}
            Ok(Err(broadcast::error::RecvError::Closed)) => return,
            Err(_) if waiters.dismiss() => return,
            Err(_) => waiters.wake_all(),
        }
    }
}

/// A waiting call.
pub(super) struct Registration {
    waiters: Arc<Waiters>,
    keys: Vec<u64>,
    changed: Arc<Notify>,
}

impl Registration {
    /// Waits for a change since the registration or the last call, at most this long.
    pub async fn wait(&self, at_most: Duration) {
        // Either way the caller looks again.
        let _ = tokio::time::timeout(at_most, self.changed.notified()).await;
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut state = self.waiters.state();
        for key in &self.keys {
            if let Some(waiting) = state.by_key.get_mut(key) {
                waiting.retain(|changed| !Arc::ptr_eq(changed, &self.changed));
                if waiting.is_empty() {
                    state.by_key.remove(key);
                }
            }
        }
    }
}
