//! What a worker has done, readable while it runs.

use hapax_claim::{HeartbeatEvents, Stop};
use serde::Serialize;

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

hapax_core::process_counters! {
    /// What a worker has done since it was built.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
    #[non_exhaustive]
    pub struct Counts, counted by pub(crate) struct Stats, is "hapax_worker", labels ["queue"];
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
