//! One line for each delivery that ended.

use std::time::Duration;

use hapax::{How, IdempotencyKey, MessageId, SettleError, Settled};
use serde_json::json;

use crate::output::{Output, note, raw};
use crate::text::{escape, show_body, show_ms};

/// How a delivery ended.
pub struct Line<'a> {
    pub id: MessageId,
    pub attempt: u32,
    pub key: IdempotencyKey,
    /// The command was run for it.
    pub ran: bool,
    pub took: Duration,
    pub how: &'a How,
    pub answer: &'a Result<Settled, SettleError>,
    /// How the command ended.
    pub words: String,
}

/// Prints them.
#[derive(Debug, Clone, Copy)]
pub struct Reporter(Output);

impl Reporter {
    pub fn new(out: Output) -> Self {
        Self(out)
    }

    pub fn print(self, line: &Line<'_>) {
        let (ended, detail) = (ended(line), detail(line));
        let ms = line.took.as_millis() as u64;
        let text = if self.0.is_json() {
            let mut value = json!({
                "id": line.id, "attempt": line.attempt, "key": line.key, "ended": ended, "ran": line.ran, "ms": ms,
            });
            if let Ok(Settled::Returned { after_ms }) = line.answer {
                value["after_ms"] = (*after_ms).into();
            }
            if !detail.is_empty() {
                value["detail"] = detail.into();
            }
            format!("{value}\n")
        } else if self.0.is_terminal() {
            let detail = show_body(detail.as_bytes(), 120);
            format!("{ended:<9} {}  attempt {}  {:>7}  {detail}\n", line.id, line.attempt, show_ms(ms.max(1)))
        } else {
            format!("{ended}\t{}\t{}\t{ms}\t{}\n", line.id, line.attempt, escape(&detail))
        };
        if let Err(error) = raw(&text) {
            // The work goes on, whoever reads about it.
            note(&format!("the report of {} cannot be written: {error}", line.id));
        }
    }
}

/// One word for it.
fn ended(line: &Line<'_>) -> &'static str {
    match (line.answer, line.how) {
        (Ok(Settled::Acked), _) if line.ran => "done",
        (Ok(Settled::Acked), _) => "replayed",
        (Ok(Settled::Returned { .. }), How::Defer { .. }) => "deferred",
        (Ok(Settled::Returned { .. }), _) => "retried",
        (Ok(Settled::Dead), How::Reject { .. }) | (Ok(Settled::Parked), How::Reject { .. }) => "rejected",
        (Ok(Settled::Dead), _) => "dead",
        (Ok(Settled::Parked), _) => "parked",
        (Err(_), _) => "lost",
    }
}

fn detail(line: &Line<'_>) -> String {
    match (line.answer, line.how) {
        (Err(error), _) => error.to_string(),
        (Ok(Settled::Acked), _) => line.words.clone(),
        (
            _,
            How::Retry { error: Some(why), .. } | How::Reject { reason: why } | How::Park { reason: why },
        ) => why.clone(),
        _ => line.words.clone(),
    }
}
