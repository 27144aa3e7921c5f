//! The first and the last statements of a transaction, with their values in the text: only such a text can hold several
//! statements, and so take one round trip.

use std::fmt::Write as _;

use hapax_core::{InboxEntry, RecordedOutcome};

use crate::ledger::hash_of;

/// As `hapax.record` bounds it: one second to 366 days.
const TTL_MS_MIN: u64 = 1_000;
const TTL_MS_MAX: u64 = 31_622_400_000;

/// A text as a literal. The form with `E` means the same whatever `standard_conforming_strings` is; the encoding of our
/// connections is UTF-8, in which no part of a character looks like a quote or a backslash.
fn push_literal(sql: &mut String, text: &str) {
    sql.push_str("E'");
    for part in text.split_inclusive(['\'', '\\']) {
        sql.push_str(part);
        match part.as_bytes().last() {
            Some(b'\'') => sql.push('\''),
            Some(b'\\') => sql.push('\\'),
            _ => {}
        }
    }
    sql.push('\'');
}

fn push_id(sql: &mut String, entry: &InboxEntry) {
    sql.push_str("E'\\\\x");
    for byte in hash_of(&entry.id) {
        let _ = write!(sql, "{byte:02x}");
    }
    sql.push('\'');
}

/// Enters a key without an entry: one row, with `true` if that was done.
pub(super) fn push_enter(sql: &mut String, entry: &InboxEntry, wait_ms: u128) {
    sql.push_str("SELECT hapax.tx_enter(");
    push_id(sql, entry);
    for text in [entry.id.scope.as_str(), entry.id.key.as_str(), entry.fingerprint.as_str()] {
        sql.push_str(", ");
        push_literal(sql, text);
    }
    let _ = write!(sql, ", '{wait_ms}')");
}

/// Records an outcome and ends a delivery, with the numbers of `hapax.q_settle`, then commits.
pub(super) fn complete(
    entry: &InboxEntry,
    outcome: &RecordedOutcome,
    ttl_ms: u64,
    delivery: Option<(i32, i64, i64)>,
) -> String {
    let mut sql = String::with_capacity(256);
    sql.push_str("SELECT hapax.tx_record(");
    push_id(&mut sql, entry);
    sql.push_str(", ");
    match &outcome.value {
        Some(value) => push_literal(&mut sql, value.as_str()),
        None => sql.push_str("NULL"),
    }
    match outcome.omitted_bytes {
        Some(bytes) => drop(write!(sql, ", {bytes}")),
        None => sql.push_str(", NULL"),
    }
    let (ttl_ms, stage) = (ttl_ms.clamp(TTL_MS_MIN, TTL_MS_MAX), if outcome.failed { 3 } else { 2 });
    let _ = write!(sql, ", {ttl_ms}, {stage})");
    if let Some((queue_id, seq, fence)) = delivery {
        let _ = write!(sql, ", hapax.q_settle({queue_id}, {seq}, {fence})");
    }
    sql.push_str("; COMMIT");
    sql
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_and_backslashes_stay_inside_of_a_literal() {
        for (text, literal) in [
            ("", "E''"),
            ("order-7", "E'order-7'"),
            ("O'Neil", "E'O''Neil'"),
            ("'); DROP TABLE x; --", "E'''); DROP TABLE x; --'"),
            (r"a\", r"E'a\\'"),
            (r"\'", r"E'\\'''"),
            ("Größe — 1,5 kg", "E'Größe — 1,5 kg'"),
        ] {
            let mut sql = String::new();
            push_literal(&mut sql, text);
            assert_eq!(sql, literal);
        }
    }
}
