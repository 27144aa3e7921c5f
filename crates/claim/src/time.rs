//! Waiting on a clock that a test may move by hand.

use std::future::Future;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use hapax_core::{Clock, SystemClock};
use tokio::sync::Notify;

/// A holder's monotonic time, and waits on it.
#[derive(Clone)]
pub struct Timer {
    clock: Arc<dyn Clock>,
    moved: Arc<Notify>,
}

impl Timer {
    /// A timer on this clock.
    pub fn new(clock: Arc<dyn Clock>) -> Self {
        let moved = Arc::new(Notify::new());
        let tell = moved.clone();
        clock.on_moved(Arc::new(move || tell.notify_waiters()));
        Self { clock, moved }
    }

    /// A timer on the machine's clock; one for the whole process, so that its readings are comparable.
    pub fn system() -> Self {
        static SYSTEM: LazyLock<Timer> = LazyLock::new(|| Timer::new(Arc::new(SystemClock::default())));
        SYSTEM.clone()
    }

    /// Microseconds since some fixed point; never goes backwards.
    pub fn now_us(&self) -> u64 {
        self.clock.monotonic_us()
    }

    /// Completes when the clock has reached `at_us`; on a clock moved by hand, soon after it was moved there.
    pub async fn sleep_until(&self, at_us: u64) {
        loop {
            let now_us = self.now_us();
            if at_us <= now_us {
                return;
            }
            // A clock that runs by itself needs no hook: most waits end early, and cost no more than their timer.
            if let Some(real) = self.clock.sleep_for(at_us - now_us) {
                tokio::time::sleep(real).await;
                continue;
            }
            let moved = self.moved.notified();
            tokio::pin!(moved);
            moved.as_mut().enable();
            // It may have been moved there just before the hook was set.
            if self.now_us() < at_us {
                moved.await;
            }
        }
    }

    /// Completes when this much time has passed.
    pub async fn sleep_ms(&self, ms: u64) {
        self.sleep_until(self.now_us().saturating_add(ms.saturating_mul(1000))).await;
    }

    /// Waits for `future`, at most this long; `None` when the time is over.
    pub async fn timeout<T>(&self, ms: u64, future: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.sleep_ms(ms) => None,
        }
    }

    /// How long a thread may really sleep until `at_us`; `None`: until [`Timer::moved`].
    pub(crate) fn real_until(&self, at_us: u64) -> Option<Duration> {
        self.clock.sleep_for(at_us.saturating_sub(self.now_us()))
    }

    /// Calls this whenever the clock was moved by hand.
    pub(crate) fn on_moved(&self, hook: impl Fn() + Send + Sync + 'static) {
        self.clock.on_moved(Arc::new(hook));
    }
}
