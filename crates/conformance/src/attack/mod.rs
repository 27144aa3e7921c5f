//! Many clients of a store that several processes share, while a test injects faults. A checker that knows nothing of the store
//! reads the history.
//!
//! ```text
//! let attack = QueueAttack::begin(stores, "orders", false).await;
//! while attack.accepted() < 100 { /* kill, pause, cut */ }
//! attack.end().await; // panics at what must not happen
//! ```
//!
//! `HAPAX_SEED=n` makes other choices, `HAPAX_LONG=1` runs twenty times as long.

mod history;
mod ledger;
mod queues;

use std::time::{Duration, Instant};

use hapax_core::StoreError;

pub use ledger::LedgerAttack;
pub use queues::QueueAttack;

/// Time for anything that is not stuck.
pub const PATIENCE: Duration = Duration::from_mins(3);

/// A small generator, so that one number replays the choices of a run.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// The same seed makes the same choices.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below a bound.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    /// A time below a number of milliseconds.
    pub fn ms(&mut self, bound: u64) -> Duration {
        Duration::from_millis(self.below(bound))
    }

    /// How long a client waits for an answer: one call in ten is dropped at a random time.
    fn patience(&mut self) -> Duration {
        if self.below(10) == 0 { self.ms(15) } else { Duration::from_mins(2) }
    }
}

/// The seed of a run: `HAPAX_SEED`, or a fixed one.
pub fn seed() -> u64 {
    std::env::var("HAPAX_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(7)
}

/// How long faults are injected: `seconds`, and twenty times as long with `HAPAX_LONG`.
pub fn time(seconds: u64) -> Duration {
    Duration::from_secs(if std::env::var_os("HAPAX_LONG").is_some() { 20 * seconds } else { seconds })
}

/// Repeats a call until the store answers. After a fault every call needs it: the store may notice a cut connection only at
/// its next use.
pub async fn patiently<T, F: Future<Output = Result<T, StoreError>>>(mut call: impl FnMut() -> F) -> T {
    let start = Instant::now();
    loop {
        match call().await {
            Ok(answer) => return answer,
            Err(error) => {
                assert!(error.is_retryable(), "{error}");
                assert!(start.elapsed() < PATIENCE, "the store does not come back: {error}");
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    }
}

/// How long after an outage the rate of before may take to come back.
pub const RECOVERY_MAX: Duration = Duration::from_secs(5);

/// Waits until the rate of a count is at least half of what it was, when `some` took the time `usual`; gives the time until that
/// began. Call it when the outage is over.
///
/// # Panics
/// If that has not begun after [`RECOVERY_MAX`].
pub async fn returns_to_half(done: impl Fn() -> usize, some: usize, usual: Duration) -> Duration {
    let (start, window) = (Instant::now(), 2 * usual);
    let mut samples: Vec<(Duration, usize)> = vec![(Duration::ZERO, done())];
    loop {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let (now, count) = (start.elapsed(), done());
        let fast =
            |(at, before): &&(Duration, usize)| now.saturating_sub(*at) <= window && count - before >= some;
        if let Some((began, _)) = samples.iter().find(fast) {
            return *began;
        }
        let made = count - samples[0].1;
        assert!(
            now <= RECOVERY_MAX + window,
            "{some} took {usual:?} before; {made} were made within {now:?} after the outage"
        );
        if now <= RECOVERY_MAX {
            samples.push((now, count));
        }
    }
}
