//! Rules on transactions of Kafka: what readers of committed records see of one is all of it, or nothing.

use std::collections::HashMap;

use super::{Anomaly, Findings};
use crate::history::{Act, Event, TransactionEnd};

/// Events of a witness beside the end of the transaction.
const SHOWN_MAX: usize = 4;

/// Checks a workload's events. `read_to_end`: the reader has seen everything that the topics will ever show.
pub(super) fn check(own: &[&Event], read_to_end: bool, findings: &mut Findings) {
    let mut shown: HashMap<&str, Vec<&Event>> = HashMap::new();
    for event in own {
        if let Act::Shown { transaction, .. } = &event.event.act {
            shown.entry(transaction).or_default().push(event);
        }
    }
    for event in own {
        let Act::Transaction { transaction, records, end, .. } = &event.event.act else { continue };
        findings.operations += 1;
        let seen = shown.get(transaction.as_str()).map_or(&[][..], Vec::as_slice);
        let mut witness = vec![*event];
        witness.extend(seen.iter().take(SHOWN_MAX));
        let count = seen.len() as u64;
        if *end == TransactionEnd::Aborted {
            findings.suppressed += records;
            if count > 0 {
                let says =
                    format!("the abort was answered with success, and {count} of its records are shown");
                findings.add(Anomaly::AbortedShown, transaction, says, &witness);
            }
            continue;
        }
        // Of a commit that was not answered, nothing may be shown.
        let nothing = count == 0 && *end == TransactionEnd::Unknown;
        if read_to_end && count < *records && !nothing {
            let says = format!("{count} of its {records} records are shown");
            findings.add(Anomaly::TransactionTorn, transaction, says, &witness);
        }
    }
}
