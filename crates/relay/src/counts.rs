//! What a relay counts.

hapax_core::process_counters! {
    /// What a relay has done since it was started.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct RelayCounts, counted by pub(crate) struct RelayCells, is "hapax_relay", labels ["route"];
    /// Messages that the sink has accepted.
    published,
    /// Messages that the sink had already: a duplicate that was avoided.
    duplicates,
    /// Messages that the sink will never accept: parked.
    refused,
    /// Attempts that failed and are repeated.
    failed,
    /// Calls of a sink that took nothing.
    unavailable,
    /// Messages that were set aside, behind a refused or failed one.
    held,
    /// Buckets that another relay has taken over.
    lost_buckets,
    /// Tables of the outbox that were emptied.
    rotated,
    /// Operations on the outbox's database that failed.
    store_errors,
}

hapax_core::metrics! {
    /// What a relay says about itself now.
    #[derive(Debug, Clone, Copy)]
    pub(crate) struct RelayState is "hapax_relay", kept by Process, labels ["route"];
    plain {}
    nested {}
    /// Whether it makes progress: 1, or 0 if nothing could be published for 30 s.
    gauge ready,
}
