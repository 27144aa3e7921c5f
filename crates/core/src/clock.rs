//! Time as a parameter: a store reads a [`Clock`], which a test can move.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Called after a clock was moved by hand, so that threads waiting on it check the time again.
pub type ClockHook = Arc<dyn Fn() + Send + Sync>;

/// Wall time, which may jump, and monotonic time, which may not.
pub trait Clock: Send + Sync {
    /// Milliseconds since 1970.
    fn wall_ms(&self) -> u64;

    /// Microseconds since some fixed point; never goes backwards.
    fn monotonic_us(&self) -> u64;

    /// How long a thread may really sleep until the clock has advanced by `us`; `None` if the clock only moves by hand
    /// and then calls the hook of [`Clock::on_moved`].
    fn sleep_for(&self, us: u64) -> Option<Duration>;

    /// Registers a hook that is called after each move by hand. Clocks that run by themselves ignore it.
    fn on_moved(&self, _hook: ClockHook) {}
}

/// The machine's clock.
#[derive(Debug)]
pub struct SystemClock {
    start: Instant,
}

impl Default for SystemClock {
    fn default() -> Self {
        Self { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn wall_ms(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
    }

    fn monotonic_us(&self) -> u64 {
        #[cfg(feature = "mutants")]
        if crate::mutant::is("lease-by-wall-clock") {
            return crate::mutant::wall_us();
        }
        self.start.elapsed().as_micros() as u64
    }

    fn sleep_for(&self, us: u64) -> Option<Duration> {
        Some(Duration::from_micros(us))
    }
}

/// A clock for tests that moves only by a call.
///
/// ```
/// # use hapax_core::{Clock, ManualClock};
/// let clock = ManualClock::at_ms(1_700_000_000_000);
/// clock.advance_ms(250);
/// assert_eq!(clock.wall_ms(), 1_700_000_000_250);
/// ```
pub struct ManualClock {
    wall_us: AtomicU64,
    monotonic_us: AtomicU64,
    hooks: Mutex<Vec<ClockHook>>,
}

impl ManualClock {
    /// A clock that starts at the given wall time.
    pub fn at_ms(wall_ms: u64) -> Self {
        Self { wall_us: (wall_ms * 1000).into(), monotonic_us: 0.into(), hooks: Mutex::default() }
    }

    /// Lets time pass: both wall and monotonic time grow.
    pub fn advance_ms(&self, ms: u64) {
        self.advance_us(ms * 1000);
    }

    /// Lets time pass, in microseconds.
    pub fn advance_us(&self, us: u64) {
        self.wall_us.fetch_add(us, Ordering::SeqCst);
        self.monotonic_us.fetch_add(us, Ordering::SeqCst);
        self.call_hooks();
    }

    /// Sets the wall clock, as an operator or NTP would; no time passes.
    pub fn set_wall_ms(&self, wall_ms: u64) {
        self.wall_us.store(wall_ms * 1000, Ordering::SeqCst);
        self.call_hooks();
    }

    fn call_hooks(&self) {
        let hooks = self.hooks.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for hook in hooks {
            hook();
        }
    }
}

impl Clock for ManualClock {
    fn wall_ms(&self) -> u64 {
        self.wall_us.load(Ordering::SeqCst) / 1000
    }

    fn monotonic_us(&self) -> u64 {
        self.monotonic_us.load(Ordering::SeqCst)
    }

    fn sleep_for(&self, _us: u64) -> Option<Duration> {
        None
    }

    fn on_moved(&self, hook: ClockHook) {
        self.hooks.lock().unwrap_or_else(PoisonError::into_inner).push(hook);
    }
}
