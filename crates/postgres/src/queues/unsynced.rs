//! Receives and extensions that do not wait for the disk, if the options say so. Such receives use only fences up to a floor that is durable before:
//! a crash of the server may lose a receive after its deliveries were handed out, and its fences must not be drawn again. See
//! `migrations/0001_fences.sql`.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use super::{Inner, lock};
use crate::error::Access;

/// How far ahead of the clock the floor is, in microseconds.
const AHEAD_US: i64 = 10_000_000;
/// Time between two of them, while there are receives.
const EVERY: Duration = Duration::from_secs(3);

/// The floor that this process has made durable.
#[derive(Default)]
pub(super) struct Floor {
    value: AtomicI64,
    /// There were receives since it was made.
    used: AtomicBool,
    made: std::sync::Mutex<Option<Instant>>,
}

impl Inner {
    /// The fence up to which a receive of a standard queue need not wait for the disk; 0: it has to.
    pub(super) fn unsynced_upto(&self) -> i64 {
        if self.base.options.syncs_receives() {
            return 0;
        }
        let value = self.fence_floor.value.load(Ordering::Relaxed);
        if !self.fence_floor.used.swap(true, Ordering::Relaxed) && value == 0 {
            self.sweeper.sooner();
        }
        value
    }

    /// Makes a higher floor durable, if there were receives and it is time to.
    pub(super) async fn keep_floor(&self) {
        let floor = &self.fence_floor;
        let is_new = lock(&floor.made).is_some_and(|made| made.elapsed() < EVERY);
        if is_new || !floor.used.swap(false, Ordering::Relaxed) {
            return;
        }
        let raised = self.base.pool.repeat_here("raise the floor of fences", Access::Write, |db| {
            Box::pin(async move {
                let raise = sqlx::query_scalar("SELECT hapax.raise_floor($1)").bind(AHEAD_US);
                Ok(raise.fetch_one(db).await?)
            })
        });
        match raised.await {
            Ok(value) => {
                floor.value.store(value, Ordering::Relaxed);
                *lock(&floor.made) = Some(Instant::now());
            }
            Err(error) => {
                tracing::debug!(%error, "receives wait for the disk until the floor of fences is raised");
            }
        }
    }
}
