//! How far a bucket can be read: up to a number below which no open transaction can still commit one.
//!
//! A poll reads the bucket's last number first, and then the transactions that write to it. When all of those have ended, every
//! number up to the one read is committed or rolled back, whatever was begun since. So a sample is kept for each poll; the
//! horizon is the last number of the newest sample whose writers have all ended.
//!
//! This holds while the server runs. A crash forgets numbers that no committed transaction had drawn, so they are drawn again,
//! and gives transactions that were prepared for two-phase commit another name: then everything is forgotten here, too.

use std::collections::{BTreeMap, VecDeque};

/// Samples of a bucket that are kept. With more, the newest ones are left out until the oldest writers have ended.
const SAMPLES_MAX: usize = 32;

#[derive(Debug, Default)]
pub(super) struct Horizon {
    /// Of the server; changes when it is started.
    incarnation: String,
    buckets: BTreeMap<u16, Bucket>,
}

#[derive(Debug, Default)]
struct Bucket {
    horizon: u64,
    samples: VecDeque<Sample>,
}

#[derive(Debug)]
struct Sample {
    last: u64,
    /// The transactions that could commit a number up to `last`, and have not ended.
    writers: Vec<String>,
}

impl Horizon {
    /// The next polls are of this incarnation of the server.
    pub fn of_incarnation(&mut self, incarnation: &str) -> &mut Self {
        if self.incarnation != incarnation {
            *self = Self { incarnation: incarnation.to_owned(), ..Self::default() };
        }
        self
    }

    /// Takes a poll of a bucket: its last number, and the writers that were there afterwards. Returns the horizon.
    pub fn observe(&mut self, bucket: u16, last: u64, writers: Vec<String>) -> u64 {
        let bucket = self.buckets.entry(bucket).or_default();
        if last < bucket.horizon {
            // The database was restored.
            *bucket = Bucket::default();
        }
        if writers.is_empty() || hapax_core::mutant::is("relay-skips-gap") {
            bucket.samples.clear();
            bucket.horizon = bucket.horizon.max(last);
            return bucket.horizon;
        }
        for sample in &mut bucket.samples {
            sample.writers.retain(|writer| writers.contains(writer));
        }
        let ended = bucket.samples.iter().filter(|sample| sample.writers.is_empty());
        bucket.horizon = ended.map(|sample| sample.last).fold(bucket.horizon, u64::max);
        bucket.samples.retain(|sample| !sample.writers.is_empty());
        let is_new = bucket.samples.back().is_none_or(|newest| newest.last < last);
        if is_new && last > bucket.horizon && bucket.samples.len() < SAMPLES_MAX {
            bucket.samples.push_back(Sample { last, writers });
        }
        bucket.horizon
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn writers(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    #[test]
    fn nothing_is_waited_for_without_writers() {
        let mut horizon = Horizon::default();
        assert_eq!(horizon.observe(1, 7, vec![]), 7);
        assert_eq!(horizon.observe(2, 3, vec![]), 3, "buckets are apart");
    }

    #[test]
    fn writers_that_came_later_delay_nothing() {
        let mut horizon = Horizon::default();
        assert_eq!(horizon.observe(1, 5, writers(&["3/1"])), 0);
        assert_eq!(horizon.observe(1, 6, writers(&["3/1", "4/1"])), 0);
        assert_eq!(
            horizon.observe(1, 9, writers(&["4/1", "5/1"])),
            5,
            "the writer of the first sample has ended"
        );
        assert_eq!(horizon.observe(1, 12, writers(&["5/1"])), 6);
        assert_eq!(
            horizon.observe(1, 12, writers(&["3/2"])),
            12,
            "the session's next transaction is another one"
        );
    }

    #[test]
    fn a_restarted_server_is_observed_from_the_start() {
        let mut horizon = Horizon::default();
        assert_eq!(horizon.of_incarnation("a").observe(1, 9, vec![]), 9);
        assert_eq!(horizon.of_incarnation("a").observe(1, 12, writers(&["3/1"])), 9);
        // It has forgotten that the numbers up to 9 were drawn and rolled back; one of them is open now.
        assert_eq!(horizon.of_incarnation("b").observe(1, 12, writers(&["3/2"])), 0);
        assert_eq!(horizon.of_incarnation("b").observe(1, 12, writers(&["-1/900"])), 12);
    }

    #[test]
    fn numbers_that_went_back_are_not_trusted() {
        let mut horizon = Horizon::default();
        assert_eq!(horizon.observe(1, 9, vec![]), 9);
        assert_eq!(horizon.observe(1, 4, writers(&["3/1"])), 0);
        assert_eq!(horizon.observe(1, 12, writers(&["3/1"])), 0);
        assert_eq!(horizon.observe(1, 12, writers(&["4/1"])), 12);
    }

    #[test]
    fn a_writer_that_stays_open_costs_bounded_memory() {
        let mut horizon = Horizon::default();
        for last in 1..1_000 {
            assert_eq!(horizon.observe(1, last, writers(&["3/1"])), 0);
        }
        assert_eq!(horizon.buckets[&1].samples.len(), SAMPLES_MAX);
        assert_eq!(horizon.observe(1, 1_000, writers(&["4/1"])), SAMPLES_MAX as u64);
        assert_eq!(horizon.observe(1, 1_001, vec![]), 1_001);
    }
}
