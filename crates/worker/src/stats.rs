//! What a worker has done, readable while it runs.

use std::sync::atomic::{AtomicU64, Ordering};

use hapax_claim::{HeartbeatEvents, Stop};
use serde::Serialize;

/// A counter.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub fn add(&self) {
        self.add_many(1);
    }

    pub fn add_many(&self, many: usize) {
        self.0.fetch_add(many as u64, Ordering::Relaxed);
    }
}

impl HeartbeatEvents for Stats {
    fn beat(&self) {
        self.heartbeats.add();
    }

    fn failed(&self) {
        self.heartbeat_errors.add();
    }

    fn stopped(&self, stop: Stop) {
        match stop {
            Stop::Lost => self.lost_leases.add(),
            Stop::TimedOut => self.timeouts.add(),
            Stop::Drained | Stop::Abandoned => {}
        }
    }
}

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// A worker's counters.
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $(pub $name: Counter,)*
        }

        /// What a worker has done since it was built.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
        #[non_exhaustive]
        pub struct Counts {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Stats {
            pub fn counts(&self) -> Counts {
                Counts { $($name: self.$name.0.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Deliveries received.
    delivered,
    /// Handler runs that ended well.
    done,
    /// Deliveries given back for another attempt.
    retried,
    /// Deliveries rejected: by the handler, or because they do not fit it.
    rejected,
    /// Duplicates that got the recorded outcome; their handler did not run.
    replayed,
    /// Deliveries put back uncounted, because their key was in progress or their turn did not come.
    deferred,
    /// Claims that were left in doubt: a panic, a time limit, a cancellation, or the handler said so.
    in_doubt,
    /// Claims taken over from a holder that lapsed.
    takeovers,
    /// Messages parked because their key is in doubt.
    parked,
    /// Keys that were used before for another body.
    mismatches,
    /// Leases lost while their handler ran or waited.
    lost_leases,
    /// Settles that the store refused because the lease had passed to someone else.
    stale_settles,
    /// Handler runs that panicked.
    panics,
    /// Handler runs that took longer than `run_ms_max`.
    timeouts,
    /// Deliveries put back because the ledger could not be asked.
    fail_closed,
    /// Settles whose lease had less than a fifth left.
    near_expiry,
    /// Settles that were repeated because the store's answer was not known.
    settle_repeats,
    /// Settles that were given up because the store did not answer in time; the messages return.
    settle_failures,
    /// Receives that failed.
    receive_errors,
    /// Heartbeats sent, each for everything that was due.
    heartbeats,
    /// Heartbeats that the store did not answer well.
    heartbeat_errors,
}
