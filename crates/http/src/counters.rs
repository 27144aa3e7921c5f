//! Counters of the layer.

use serde::Serialize;

hapax_core::process_counters! {
    /// What the layer has done since it was made.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
    pub struct Counters, counted by pub(crate) struct Cells, is "hapax_http", labels ["service"];
    /// Requests that passed untouched: no key, or a method or route without a policy for keys.
    passed,
    /// Requests that ran under a claim: misses.
    ran,
    /// Of these, runs after an interrupted earlier run.
    takeovers,
    /// Duplicates that got the recorded response: hits.
    replayed,
    /// Duplicates of a response that was not stored: 409.
    refused_not_stored,
    /// Duplicates that arrived while the first request was running: 409.
    refused_in_progress,
    /// Keys reused for another request: 422.
    refused_mismatch,
    /// Runs that ended in doubt.
    ended_in_doubt,
    /// Requests refused because their key is in doubt: 409.
    refused_in_doubt,
    /// Requests refused because of their key, their tenant or their body: 400, 408, 413.
    refused_invalid,
    /// Requests refused because the ledger could not be reached: 503.
    refused_by_outage,
    /// Requests that ran without protection because the ledger could not be reached.
    ran_unprotected,
    /// Responses that could not be recorded.
    unrecorded,
}
