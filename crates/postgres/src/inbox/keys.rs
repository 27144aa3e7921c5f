//! Keys that transactions of this process have entered, or are about to: one at a time each. Its duplicates wait here,
//! without a connection.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;

type Hash = [u8; 16];
type Turns = HashMap<Hash, Arc<tokio::sync::Mutex<()>>>;

#[derive(Default)]
pub(super) struct Keys {
    turns: Mutex<Turns>,
}

impl Keys {
    /// Waits for the key's turn; `None` if it does not come in time.
    pub async fn enter(self: &Arc<Self>, key: Hash, wait: Duration) -> Option<KeyGuard> {
        let turn = self.turns().entry(key).or_default().clone();
        let mut guard = KeyGuard { keys: self.clone(), key, turn: None };
        // Dropping the guard forgets the key if no one else uses it, also if this future is dropped.
        guard.turn = Some(tokio::time::timeout(wait, turn.lock_owned()).await.ok()?);
        Some(guard)
    }

    fn turns(&self) -> std::sync::MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The turn of one transaction.
pub(super) struct KeyGuard {
    keys: Arc<Keys>,
    key: Hash,
    turn: Option<OwnedMutexGuard<()>>,
}

impl Drop for KeyGuard {
    fn drop(&mut self) {
        drop(self.turn.take());
        let mut turns = self.keys.turns();
        if turns.get(&self.key).is_some_and(|turn| Arc::strong_count(turn) == 1) {
            turns.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_entered_by_one_at_a_time_and_forgotten_after_the_last() {
        let keys = Arc::new(Keys::default());
        let first = keys.enter([1; 16], Duration::from_mins(1)).await.unwrap();
        assert!(keys.enter([1; 16], Duration::from_millis(1)).await.is_none(), "it is taken");
        let other = keys.enter([2; 16], Duration::from_mins(1)).await.unwrap();
        let waiting = tokio::spawn({
            let keys = keys.clone();
            async move { keys.enter([1; 16], Duration::from_mins(1)).await.is_some() }
        });
        tokio::task::yield_now().await;
        drop((first, other));
        assert!(waiting.await.unwrap());
        assert!(keys.turns().is_empty());
    }
}
