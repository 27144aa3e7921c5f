//! The length of a lease: fixed, or adapted to the run times of the handler.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use hapax_core::policy;

/// How long deliveries and claims are leased.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum LeaseLength {
    /// The same for each lease. 1 ms to 12 h.
    Fixed {
        /// The length.
        ms: u64,
    },
    /// Adapts to the run times of the handler.
    Auto(AutoLease),
}

/// A lease that adapts to the run times of the handler: `margin` times their 99th percentile, within limits.
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
    /// The lease while few run times are known. Default: the queue's.
    pub start_ms: u64,
    /// Minimum. Default 5 s: leaves time for a heartbeat and for a short pause of the process.
    pub min_ms: u64,
    /// Maximum. Default 15 min: a crash delays a message by up to one lease.
    pub max_ms: u64,
    /// Factor on the 99th percentile. Default 2.
    pub margin: f64,
}

impl Default for AutoLease {
    fn default() -> Self {
        Self { start_ms: policy::LEASE_MS_DEFAULT, min_ms: 5_000, max_ms: 15 * 60 * 1000, margin: 2.0 }
    }
}

/// Minimum number of run times before they determine the lease.
const SAMPLES_MIN: f64 = 20.0;

impl AutoLease {
    /// The lease for these run times.
    pub fn lease_ms(&self, times: &TimeSketch) -> u64 {
        let max_ms = self.max_ms.clamp(1, policy::LEASE_MS_MAX);
        let wanted_ms = if times.weight() < SAMPLES_MIN {
            // One slow run among the first ones may lengthen the lease; quick ones do not shorten it yet.
            self.start_ms.max((times.quantile(1.0) as f64 * self.margin) as u64)
        } else {
            (times.quantile(0.99) as f64 * self.margin) as u64
        };
        wanted_ms.clamp(self.min_ms.clamp(1, max_ms), max_ms)
    }
}

/// Four buckets per doubling: a quantile is at most a fifth too high, and never too low.
const PER_DOUBLING: f64 = 4.0;
/// Enough buckets for 12 h in milliseconds.
const BUCKETS: usize = 104;
/// At this weight all weights are halved, so that the sketch forgets old run times.
const WEIGHT_MAX: f64 = 1024.0;

/// Recent run times of handlers: a histogram of fixed size with logarithmic buckets, in which old values lose weight.
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
    /// Adds a run time.
    pub fn record(&mut self, ms: u64) {
        let bucket = ((ms.max(1) as f64).log2() * PER_DOUBLING).ceil() as usize;
        self.buckets[bucket.min(BUCKETS - 1)] += 1.0;
        self.weight += 1.0;
        if self.weight >= WEIGHT_MAX {
            self.buckets.iter_mut().for_each(|count| *count /= 2.0);
            self.weight /= 2.0;
        }
    }

    /// The number of recorded run times, with less weight for old ones.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// The run time that a fraction `q` of the runs did not exceed; 0 if there are none.
    pub fn quantile(&self, q: f64) -> u64 {
        // Counts from the slow end and rounds up, so that a lease is never too short.
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

/// The current lease of one worker.
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

    /// Records how long a delivery was held.
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
