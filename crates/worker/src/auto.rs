//! How long a lease is: fixed, or following what the handler needs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hapax_core::policy;

/// How long deliveries and claims are leased.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LeaseLength {
    /// Always so long. 1 ms to 12 h.
    Fixed {
        /// The length.
        ms: u64,
    },
    /// Follows the handler's times.
    Auto(AutoLease),
}

/// A lease that follows the handler's times: `margin` times their 99th percentile, within bounds.
///
/// ```
/// use hapax_worker::{AutoLease, TimeSketch};
/// let auto = AutoLease { start_ms: 30_000, ..AutoLease::default() };
/// let mut times = TimeSketch::default();
/// assert_eq!(auto.lease_ms(&times), 30_000, "nothing is known yet");
/// for _ in 0..1_000 {
///     times.record(20_000);
/// }
/// assert!((40_000..50_000).contains(&auto.lease_ms(&times)));
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AutoLease {
    /// The lease while little is known. Default: the queue's.
    pub start_ms: u64,
    /// Never shorter. Default 5 s: a heartbeat needs room, and so does a pause.
    pub min_ms: u64,
    /// Never longer. Default 15 min: it is how long a crash holds a message up.
    pub max_ms: u64,
    /// How much longer than the 99th percentile. Default 2.
    pub margin: f64,
}

impl Default for AutoLease {
    fn default() -> Self {
        Self { start_ms: policy::LEASE_MS_DEFAULT, min_ms: 5_000, max_ms: 15 * 60 * 1000, margin: 2.0 }
    }
}

/// So many times must be known before they count.
const SAMPLES_MIN: f64 = 20.0;

impl AutoLease {
    /// The lease for what is known about the handler's times.
    pub fn lease_ms(&self, times: &TimeSketch) -> u64 {
        let max_ms = self.max_ms.clamp(1, policy::LEASE_MS_MAX);
        let wanted_ms = if times.weight() < SAMPLES_MIN {
            // One slow run among the first is reason enough to lengthen, none to shorten.
            self.start_ms.max((times.quantile(1.0) as f64 * self.margin) as u64)
        } else {
            (times.quantile(0.99) as f64 * self.margin) as u64
        };
        wanted_ms.clamp(self.min_ms.clamp(1, max_ms), max_ms)
    }
}

/// Four buckets per doubling: a quantile is at most a fifth too high, never too low.
const PER_DOUBLING: f64 = 4.0;
/// Enough for 12 h in milliseconds.
const BUCKETS: usize = 104;
/// After so much weight, all of it is halved: the sketch forgets.
const WEIGHT_MAX: f64 = 1024.0;

/// How long handlers took, lately: a histogram of fixed size with logarithmic buckets, whose past fades.
#[derive(Debug, Clone, PartialEq)]
pub struct TimeSketch {
    buckets: [f32; BUCKETS],
    weight: f64,
}

impl Default for TimeSketch {
    fn default() -> Self {
        Self { buckets: [0.0; BUCKETS], weight: 0.0 }
    }
}

impl TimeSketch {
    /// Adds a time.
    pub fn record(&mut self, ms: u64) {
        let bucket = ((ms.max(1) as f64).log2() * PER_DOUBLING).ceil() as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1.0;
        self.weight += 1.0;
        if self.weight >= WEIGHT_MAX {
            self.buckets.iter_mut().for_each(|count| *count /= 2.0);
            self.weight /= 2.0;
        }
    }

    /// How much is known; fades with time.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The time that a share `q` of the runs did not exceed; 0 if nothing is known.
    pub fn quantile(&self, q: f64) -> u64 {
        // From the slow end: at least this share is slower or equal, rounding against short leases.
        let mut slower = self.weight * (1.0 - q);
        for (bucket, count) in self.buckets.iter().enumerate().rev() {
            slower -= f64::from(*count);
            if *count > 0.0 && slower < 0.0 {
                return 2f64.powf(bucket as f64 / PER_DOUBLING).ceil() as u64;
            }
        }
        0
    }
}

/// The lease of one worker, as it is now.
pub(crate) struct LeaseTime {
    ms: AtomicU64,
    auto: Option<(AutoLease, Mutex<TimeSketch>)>,
}

impl LeaseTime {
    pub fn new(length: LeaseLength) -> Self {
        match length {
            LeaseLength::Fixed { ms } => Self { ms: AtomicU64::new(ms), auto: None },
            LeaseLength::Auto(auto) => {
                let times = TimeSketch::default();
                Self { ms: AtomicU64::new(auto.lease_ms(&times)), auto: Some((auto, Mutex::new(times))) }
            }
        }
    }

    pub fn ms(&self) -> u64 {
        self.ms.load(Ordering::Relaxed)
    }

    /// A delivery was held for so long.
    pub fn record(&self, held_us: u64) {
        if let Some((auto, times)) = &self.auto {
            let mut times = times.lock().unwrap_or_else(PoisonError::into_inner);
            times.record(held_us.div_ceil(1000));
            self.ms.store(auto.lease_ms(&times), Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sketch(times: impl IntoIterator<Item = u64>) -> TimeSketch {
        let mut sketch = TimeSketch::default();
        times.into_iter().for_each(|ms| sketch.record(ms));
        sketch
    }

    #[test]
    fn a_quantile_is_never_too_low_and_at_most_a_fifth_too_high() {
        for ms in [1u64, 2, 3, 7, 10, 99, 100, 1_000, 12_345, 3_600_000, 43_200_000] {
            let found = sketch([ms; 10]).quantile(0.99);
            assert!((ms..=ms + ms / 5 + 1).contains(&found), "{ms}: {found}");
        }
    }

    #[test]
    fn a_percentile_looks_at_the_slow_end() {
        let mixed = (0..1_000).map(|n| if n % 50 == 0 { 8_000 } else { 10 });
        assert!(sketch(mixed.clone()).quantile(0.99) >= 8_000, "2% are slow");
        assert!(sketch(mixed).quantile(0.5) < 13);
        assert_eq!(TimeSketch::default().quantile(0.99), 0);
    }

    #[test]
    fn the_lease_follows_a_shift_both_ways_within_its_bounds() {
        let auto = AutoLease { start_ms: 30_000, min_ms: 1_000, max_ms: 100_000, margin: 2.0 };
        let mut times = sketch([100; 2_000]);
        assert_eq!(auto.lease_ms(&times), 1_000, "the lower bound");
        for _ in 0..20 {
            times.record(40_000);
        }
        assert!(auto.lease_ms(&times) >= 80_000, "2% of slow runs lengthen it");
        for _ in 0..20_000 {
            times.record(100);
        }
        assert_eq!(auto.lease_ms(&times), 1_000, "what is long past is forgotten");
        assert_eq!(auto.lease_ms(&sketch([43_200_000; 100])), 100_000, "the upper bound");
    }

    #[test]
    fn a_few_samples_may_lengthen_but_not_shorten() {
        let auto = AutoLease { start_ms: 30_000, min_ms: 10, max_ms: 600_000, margin: 2.0 };
        assert_eq!(auto.lease_ms(&sketch([5; 3])), 30_000);
        assert!(auto.lease_ms(&sketch([5, 60_000])) >= 120_000);
    }
}
