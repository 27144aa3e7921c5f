//! What processors count, and what follows from it.

use hapax_core::policy::tier::{Finding, Severity};

hapax_core::process_counters! {
    /// What the processors of this process have done since it was started.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
    pub struct ProcessorCounts, counted by pub struct ProcessorCells, is "hapax_kafka", labels ["group"];
    /// Input records whose transaction was committed.
    records,
    /// Transactions that were committed.
    commits,
    /// Transactions that were aborted.
    aborts,
    /// Commits of unknown outcome that were settled.
    settled,
    /// Attempts at a record that failed.
    failures,
    /// Records that went to the dead-letter topic.
    dead,
    /// Processors that ended because another one had taken their transactional id.
    producer_fenced,
}

impl ProcessorCounts {
    /// The warning `producer-fenced`, if a processor was fenced.
    ///
    /// ```
    /// use hapax_kafka::processor::ProcessorCounts;
    ///
    /// let fenced = ProcessorCounts { producer_fenced: 1, ..ProcessorCounts::default() };
    /// assert_eq!(fenced.fenced_finding("billing").unwrap().code, "producer-fenced");
    /// assert_eq!(ProcessorCounts::default().fenced_finding("billing"), None);
    /// ```
    pub fn fenced_finding(&self, group: &str) -> Option<Finding> {
        let fenced = self.producer_fenced;
        if fenced == 0 {
            return None;
        }
        let message = format!(
            "{fenced} processors of group {group} ended because another producer took their transactional id; what they had not \
             committed was aborted, and others process it"
        );
        let remedy = "give each instance a transactional id of its own that it keeps over restarts; if there is only one instance, it \
                      was replaced while it was stopped or cut off, and nothing has to be done";
        Some(warning("producer-fenced", message, remedy))
    }
}

fn warning(code: &'static str, message: String, remedy: &str) -> Finding {
    Finding { code: code.into(), severity: Severity::Warning, message, remedy: remedy.to_owned() }
}
