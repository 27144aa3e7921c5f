//! The buckets of this relay.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hapax_core::outbox::{BucketLease, Tended};

#[derive(Debug, Default)]
struct State {
    fences: BTreeMap<u16, u64>,
    /// Held messages of these are being published.
    retrying: BTreeSet<u16>,
    surplus: usize,
    valid_until: Option<Instant>,
}

/// What this relay holds. A lease counts from before it was asked for, on the monotonic clock.
#[derive(Debug, Default)]
pub struct Ownership {
    state: Mutex<State>,
}

impl Ownership {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes what the outbox says. Returns how many buckets were lost.
    pub fn renewed(&self, tended: &Tended, asked: Instant, lease: Duration) -> usize {
        let mut state = self.state();
        let fences: BTreeMap<u16, u64> =
            tended.held.iter().map(|lease| (lease.bucket, lease.fence)).collect();
        let lost = state.fences.iter().filter(|(bucket, fence)| fences.get(bucket) != Some(fence)).count();
        state.fences = fences;
        state.surplus = tended.surplus;
        state.valid_until = Some(asked + lease);
        lost
    }

    /// The lease of a bucket, while it lasts.
    pub fn lease(&self, bucket: u16) -> Option<BucketLease> {
        self.leases().into_iter().find(|lease| lease.bucket == bucket)
    }

    /// All leases, while they last.
    pub fn leases(&self) -> Vec<BucketLease> {
        let state = self.state();
        if state.valid_until.is_none_or(|until| Instant::now() >= until) {
            return Vec::new();
        }
        state.fences.iter().map(|(&bucket, &fence)| BucketLease { bucket, fence }).collect()
    }

    /// Whether the lease has ended because it could not be renewed. Whose the buckets are is known after the next renewal.
    pub fn has_lapsed(&self) -> bool {
        self.state().valid_until.is_none_or(|until| Instant::now() >= until)
    }

    /// These buckets were taken by another relay.
    pub fn lose(&self, buckets: &[u16]) {
        let mut state = self.state();
        for bucket in buckets {
            state.fences.remove(bucket);
        }
    }

    /// Leases that should be given back; they are not ours any more.
    pub fn take_surplus(&self) -> Vec<BucketLease> {
        let mut state = self.state();
        let idle = state.fences.iter().filter(|(bucket, _)| !state.retrying.contains(bucket));
        let given: Vec<BucketLease> =
            idle.rev().take(state.surplus).map(|(&bucket, &fence)| BucketLease { bucket, fence }).collect();
        state.surplus -= given.len();
        for lease in &given {
            state.fences.remove(&lease.bucket);
        }
        given
    }

    /// All leases, while they last, for publishing held messages: the buckets are not given back before
    /// [`retry_only`](Self::retry_only) says which of them are needed.
    pub fn leases_to_retry(&self) -> Vec<BucketLease> {
        let leases = self.leases();
        self.retry_only(leases.iter().map(|lease| lease.bucket).collect());
        // Some may have been given back before they were marked.
        let still_held = self.leases();
        leases.into_iter().filter(|lease| still_held.contains(lease)).collect()
    }

    /// Held messages of these buckets are being published; they are not given back meanwhile.
    pub fn retry_only(&self, buckets: BTreeSet<u16>) {
        self.state().retrying = buckets;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tended(buckets: std::ops::Range<u16>, fence: u64, surplus: usize) -> Tended {
        Tended { held: buckets.map(|bucket| BucketLease { bucket, fence }).collect(), surplus }
    }

    #[test]
    fn a_lease_ends_by_itself() {
        let ownership = Ownership::default();
        assert_eq!(ownership.leases(), []);
        let long = Duration::from_mins(10);
        ownership.renewed(&tended(0..3, 1, 0), Instant::now(), long);
        assert_eq!(ownership.leases().len(), 3);
        ownership.renewed(&tended(0..3, 1, 0), Instant::now().checked_sub(long).unwrap(), long);
        assert_eq!(ownership.leases(), [], "it counts from before it was asked for");
    }

    #[test]
    fn a_bucket_that_came_back_under_another_fence_was_lost() {
        let ownership = Ownership::default();
        let minute = Duration::from_mins(1);
        assert_eq!(ownership.renewed(&tended(0..4, 1, 0), Instant::now(), minute), 0);
        assert_eq!(ownership.renewed(&tended(0..2, 2, 0), Instant::now(), minute), 4);
    }

    #[test]
    fn a_bucket_in_use_is_not_given_back() {
        let ownership = Ownership::default();
        ownership.renewed(&tended(0..4, 1, 2), Instant::now(), Duration::from_mins(1));
        assert_eq!(ownership.leases_to_retry().len(), 4);
        assert_eq!(ownership.take_surplus(), [], "it is not known yet which ones are needed");
        ownership.retry_only([3].into());
        let given: Vec<u16> = ownership.take_surplus().iter().map(|lease| lease.bucket).collect();
        assert_eq!(given, [2, 1]);
        assert_eq!(ownership.take_surplus(), []);
        assert_eq!(ownership.leases_to_retry().len(), 2);
    }
}
