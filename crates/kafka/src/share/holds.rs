//! Records that are kept under their lock: until their next attempt is due, or until they are in the dead-letter topic.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use hapax_core::FailureCause;
use tokio::time::{Instant, sleep_until};

use super::engine::Engine;
use super::record::now_ms;
use super::session::{AckError, Kind};
use super::state::Held;
use crate::wire::Backoff;

/// Records of the retry topic that are held at the same time. A partition allows 2,000 locks by default.
const HELD_BACK_MAX: usize = 500;
/// Records that may be on their way to the dead letters before no more are fetched.
const BURIED_MAX: usize = 100;
/// What happens when a record's time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Then {
    /// It is given back to the group, which counts a delivery.
    Release,
    /// It is delivered by this member, under the same lock.
    Deliver,
}

/// Counts down at the end of a task, also if that is aborted.
struct Counted {
    engine: Arc<Engine>,
    count: fn(&Engine) -> &AtomicUsize,
}

impl Counted {
    fn new(engine: &Arc<Engine>, count: fn(&Engine) -> &AtomicUsize) -> Self {
        count(engine).fetch_add(1, Ordering::SeqCst);
        Self { engine: engine.clone(), count }
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        (self.count)(&self.engine).fetch_sub(1, Ordering::SeqCst);
        self.engine.shared.wake_sessions();
    }
}

impl Engine {
    /// Whether no more records of the retry topic are fetched.
    pub fn holds_enough(&self) -> bool {
        self.held_back.load(Ordering::SeqCst) >= HELD_BACK_MAX
    }

    /// Whether records are on their way to the dead letters.
    pub fn buries(&self) -> bool {
        self.buried.load(Ordering::SeqCst) > 0
    }

    /// Whether no more records are fetched at all.
    pub fn buries_enough(&self) -> bool {
        self.buried.load(Ordering::SeqCst) >= BURIED_MAX
    }

    /// A record was locked for us.
    pub fn arrived(self: &Arc<Self>, held: Arc<Held>) {
        self.shared.acquired(&held);
        let max = self.options.retry.max_attempts;
        if held.delivery_count >= self.settings.limit {
            let error = format!(
                "it was delivered {} times and not settled; the broker drops it after this delivery",
                held.delivery_count
            );
            return self.bury(held, error);
        }
        if held.attempt > max {
            let error = format!(
                "it was delivered {} times and not settled; {max} attempts are allowed",
                held.deliveries
            );
            return self.bury(held, error);
        }
        match held.record.not_before_ms.map(|at_ms| at_ms.saturating_sub(now_ms())) {
            Some(after_ms) if after_ms > 0 => self.hold(held, Duration::from_millis(after_ms), Then::Deliver),
            _ => self.shared.is_ready(held),
        }
    }

    /// Keeps a record locked for this time.
    pub fn hold(self: &Arc<Self>, held: Arc<Held>, time: Duration, then: Then) {
        let (engine, due) = (self.clone(), Instant::now() + time);
        let counted = Counted::new(self, |engine| &engine.held_back);
        tokio::spawn(async move {
            let _counted = counted;
            if !engine.keep_until(&held, due).await {
                return;
            }
            match then {
                Then::Release => {
                    let _ = engine.acknowledge(&held, Kind::Release).await;
                    engine.shared.released(&held);
                }
                Then::Deliver => {
                    if let Some(again) = engine.shared.replace(&held, engine.receipt(held.place)) {
                        engine.shared.is_ready(again);
                    }
                }
            }
        });
    }

    /// Renews a lock until a time. `false`: the lock was lost.
    async fn keep_until(&self, held: &Arc<Held>, due: Instant) -> bool {
        loop {
            if !self.shared.is_held(held) {
                return false;
            }
            let now = Instant::now();
            // Half of the lock is left for the attempt that follows.
            let half = self.shared.lock() / 2;
            let renew_at = held.until().checked_sub(half).unwrap_or(now);
            if now >= due && now < renew_at {
                return true;
            }
            if now < renew_at {
                sleep_until(due.min(renew_at)).await;
                continue;
            }
            match self.renew(held).await {
                Ok(()) => {}
                Err(AckError::Stale) => {
                    self.shared.released(held);
                    return false;
                }
                Err(AckError::Again(problem)) => {
                    if Instant::now() >= held.until() {
                        self.shared.released(held);
                        return false;
                    }
                    tracing::debug!(problem, "a lock is renewed again");
                    tokio::time::sleep(half / 20).await;
                }
            }
        }
    }

    /// Moves a record that is not run any more to the dead letters.
    fn bury(self: &Arc<Self>, held: Arc<Held>, error: String) {
        tracing::warn!(message_id = %held.record.id, attempt = held.attempt, error, "a record goes to the dead letters");
        let engine = self.clone();
        let counted = Counted::new(self, |engine| &engine.buried);
        tokio::spawn(async move {
            let _counted = counted;
            let mut backoff = Backoff::new();
            while engine.keep_until(&held, Instant::now()).await {
                let copied = held.copied.load(Ordering::SeqCst)
                    || match engine.copies.dead(&held, FailureCause::Expired, &error).await {
                        Ok(()) => true,
                        Err(error) => {
                            tracing::error!(%error, message_id = %held.record.id, "a dead letter cannot be written; trying again");
                            false
                        }
                    };
                held.copied.store(copied, Ordering::SeqCst);
                if copied && !matches!(engine.acknowledge(&held, Kind::Accept).await, Err(AckError::Again(_)))
                {
                    break;
                }
                backoff.wait().await;
            }
            engine.shared.released(&held);
        });
    }
}
