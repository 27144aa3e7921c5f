//! One line for each ended delivery, and a summary of all.

use std::time::Duration;

use hapax::worker::{Counts, SettledDelivery};
use hapax::{Settled, Settlement};
use serde_json::json;

use crate::output::{Output, note, raw};
use crate::text::{escape, show_body, show_ms};

/// Prints the lines.
#[derive(Debug, Clone, Copy)]
pub struct Reporter(Output);

impl Reporter {
    pub fn new(out: Output) -> Self {
        Self(out)
    }

    /// `words` describes how the command ended.
    pub fn print(self, end: &SettledDelivery<'_>, words: &str) {
        let (ended, detail) = (end_word(end), detail(end, words));
        let (id, attempt, ms) = (end.delivery.id, end.delivery.attempt, end.held.as_millis() as u64);
        let text = if self.0.is_json() {
            let mut value = json!({
                "id": id, "attempt": attempt, "key": end.key, "ended": ended, "ran": end.ran, "ms": ms,
            });
            if let Some(Settled::Returned { after_ms }) = end.settled {
                value["after_ms"] = after_ms.into();
            }
            if !detail.is_empty() {
                value["detail"] = detail.into();
            }
            format!("{value}\n")
        } else if self.0.is_terminal() {
            let detail = show_body(detail.as_bytes(), 120);
            format!("{ended:<9} {id}  attempt {attempt}  {:>7}  {detail}\n", show_ms(ms.max(1)))
        } else {
            format!("{ended}\t{id}\t{attempt}\t{ms}\t{}\n", escape(&detail))
        };
        if let Err(error) = raw(&text) {
            // Continue to work without a reader.
            note(&format!("the report of {id} cannot be written: {error}"));
        }
    }
}

/// One word for the end of a delivery.
fn end_word(end: &SettledDelivery<'_>) -> &'static str {
    match (end.settled, end.settlement) {
        (Some(Settled::Acked), _) if end.ran => "done",
        (Some(Settled::Acked), _) => "replayed",
        (Some(Settled::Returned { .. }), Settlement::Defer { .. }) => "deferred",
        (Some(Settled::Returned { .. }), _) => "retried",
        (Some(Settled::Dead | Settled::Parked), Settlement::Reject { .. }) => "rejected",
        (Some(Settled::Dead), _) => "dead",
        (Some(Settled::Parked), _) => "parked",
        (None, _) => "lost",
    }
}

fn detail(end: &SettledDelivery<'_>, words: &str) -> String {
    match (end.settled, end.settlement) {
        (None, _) => end.error.clone().unwrap_or_default(),
        (Some(Settled::Acked), _) => words.to_owned(),
        (
            _,
            Settlement::Retry { error: Some(why), .. }
            | Settlement::Reject { reason: why }
            | Settlement::Park { reason: why },
        ) => why.clone(),
        _ => words.to_owned(),
    }
}

/// One sentence about all deliveries, for the end.
pub fn summary(counts: &Counts, took: Duration) -> String {
    let parts = [
        (counts.done, "done"),
        (counts.replayed, "replayed"),
        (counts.retried.saturating_sub(counts.died), "retried"),
        (counts.died, "dead"),
        (counts.deferred, "deferred"),
        (counts.rejected, "rejected"),
        (counts.parked, "parked"),
        (counts.lost_leases, "lost their lease"),
    ];
    let parts: Vec<_> =
        parts.iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} {what}")).collect();
    let of = if parts.is_empty() { String::new() } else { format!(": {}", parts.join(", ")) };
    let plural = if counts.delivered == 1 { "delivery" } else { "deliveries" };
    format!("{} {plural} in {}{of}", counts.delivered, show_ms((took.as_millis() as u64).max(1)))
}
