//! A worker's counters, readable while it runs.

use hapax_claim::{HeartbeatEvents, StopReason};
use serde::Serialize;

impl HeartbeatEvents for Stats {
    fn beat(&self) {
        self.heartbeats.add();
    }

    fn failed(&self) {
        self.heartbeat_errors.add();
    }

    fn stopped(&self, stop: StopReason) {
        match stop {
            StopReason::Lost => self.lost_leases.add(),
            StopReason::TimedOut => self.timeouts.add(),
            StopReason::Drained | StopReason::Abandoned => {}
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
    /// Handler runs that succeeded.
    done,
    /// Deliveries returned for another attempt, with those whose message had none left.
    retried,
    /// Of these, deliveries whose message had no attempt left: it went to the dead letters, or was parked.
    died,
    /// Deliveries rejected by the handler, or because of a body that cannot be parsed or a reused key.
    rejected,
    /// Duplicates that got the recorded outcome; their handler did not run.
    replayed,
    /// Deliveries put back without counting an attempt, because their key was in progress or their turn did not come.
    deferred,
    /// Claims left in doubt, because of a panic, a time limit, a cancellation, or the handler's own outcome.
    in_doubt,
    /// Claims taken over from a holder whose lease lapsed.
    takeovers,
    /// Messages parked because their key is in doubt.
    parked,
    /// Deliveries whose key was used earlier for another body.
    mismatches,
    /// Leases lost while their handler ran or waited.
    lost_leases,
    /// Settles that the store refused because another consumer had the lease.
    stale_settles,
    /// Handler runs that panicked.
    panics,
    /// Handler runs that exceeded `run_max`.
    timeouts,
    /// Deliveries put back because the ledger was unavailable.
    fail_closed,
    /// Settles with less than a fifth of the lease left.
    near_expiry,
    /// Settles that were repeated because their outcome was unknown.
    settle_repeats,
    /// Settles that were abandoned because the store did not answer in time; the messages return.
    settle_failures,
    /// Receives that failed.
    receive_errors,
    /// Heartbeats sent, each for all leases that were due.
    heartbeats,
    /// Heartbeats that failed or got no answer in time.
    heartbeat_errors,
}
