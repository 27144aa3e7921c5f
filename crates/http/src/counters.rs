//! What the layer has done: counted as it happens.

use serde::Serialize;

hapax_core::process_counters! {
    /// What the layer has done since it was made.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
    pub struct Counters, counted by pub(crate) struct Cells, is "hapax_http", labels ["service"];
    /// Requests that passed untouched: no key, or a method or route without a policy for keys.
    passed,
    /// Requests that ran under a claim: misses.
    ran,
    /// Of these, runs over an earlier one that broke off.
    takeovers,
    /// Duplicates that got the recorded answer: hits.
    replayed,
    /// Duplicates of an answer that was not kept: 409.
    unreplayable,
    /// Duplicates that met the first one still running: 409.
    conflicts,
    /// Keys used again for another request: 422.
    mismatches,
    /// Runs that ended in doubt.
    doubts,
    /// Requests turned away because their key is in doubt: 409.
    in_doubt,
    /// Requests refused for their key, their tenant or their body: 400, 408, 413.
    refused,
    /// Requests refused because the ledger could not be reached: 503.
    outages,
    /// Requests that ran without protection because the ledger could not be reached.
    open_passes,
    /// Answers that could not be recorded.
    unrecorded,
}
