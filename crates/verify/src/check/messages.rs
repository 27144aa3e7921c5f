//! Rules on the deliveries of one message, by how each of them ended.

use std::collections::BTreeMap;

use super::{Anomaly, Findings};
use crate::history::{Act, Answer, Event};

/// How much the times of the recorder and of the store may be rounded.
const ROUNDING_MS: u64 = 5;

/// The end of a delivery.
struct End<'a> {
    fence: u64,
    deliveries: u32,
    is_acked: bool,
    event: &'a Event,
}

/// Checks the deliveries of a payment. `forgets`: a fault of this run may take counts of deliveries back.
pub(super) fn check(id: &str, settles: &[&Event], forgets: bool, findings: &mut Findings) {
    let mut messages: BTreeMap<&str, Vec<End<'_>>> = BTreeMap::new();
    for event in settles {
        let Act::Settle { message, fence, ack, answer, deliveries, .. } = &event.event.act else { continue };
        let is_acked = *ack && *answer == Answer::Ok;
        let end = End { fence: *fence, deliveries: *deliveries, is_acked, event };
        messages.entry(message).or_default().push(end);
    }
    for (message, mut ends) in messages {
        ends.sort_by_key(|end| end.fence);
        check_acks(id, message, &ends, findings);
        if !forgets {
            check_fences(id, message, &ends, findings);
        }
    }
}

/// An accepted ack ends a message. A delivery with a larger fence was either handed out before it, and the ack was stale, or
/// after it, and the message had ended.
fn check_acks(id: &str, message: &str, ends: &[End<'_>], findings: &mut Findings) {
    let Some(acked) = ends.iter().find(|end| end.is_acked) else { return };
    let Some(newer) = ends.iter().rev().find(|end| end.fence > acked.fence) else {
        return;
    };
    let says = if newer.is_acked {
        format!("two deliveries of message {message} were acked")
    } else {
        format!(
            "the ack of message {message} with fence {} was accepted, and there is a delivery with fence {}",
            acked.fence, newer.fence
        )
    };
    findings.add(Anomaly::StaleSettleAccepted, id, says, &[acked.event, newer.event]);
}

/// The second delivery of a message has a larger fence than the first, and so on.
fn check_fences(id: &str, message: &str, ends: &[End<'_>], findings: &mut Findings) {
    for pair in ends.windows(2) {
        let [smaller, larger] = pair else { continue };
        let repeated = smaller.fence == larger.fence && smaller.deliveries != larger.deliveries;
        if repeated || smaller.deliveries > larger.deliveries {
            let says = format!(
                "message {message} had the fence {} in delivery {}, and {} in delivery {}",
                smaller.fence, smaller.deliveries, larger.fence, larger.deliveries
            );
            findings.add(Anomaly::FenceBackwards, id, says, &[smaller.event, larger.event]);
        }
    }
}

/// A message is not delivered to another while the time lasts that its consumer was told, counted from before it asked.
pub(super) fn check_leases(id: &str, delivered: &[&Event], findings: &mut Findings) {
    // Of each message: until when it was leased at least, by which fence and event.
    let mut leased: BTreeMap<&str, (u64, u64, &Event)> = BTreeMap::new();
    let mut in_order: Vec<_> = delivered
        .iter()
        .filter_map(|event| match &event.event.act {
            Act::Delivered { message, fence, asked_ms, lease_ms, .. } => {
                Some((*fence, message.as_str(), asked_ms + lease_ms, *event))
            }
            _ => None,
        })
        .collect();
    in_order.sort_by_key(|(fence, ..)| *fence);
    for (fence, message, until_ms, event) in in_order {
        match leased.get(message) {
            Some((lasts_ms, earlier, shown)) if *earlier < fence && event.ms + ROUNDING_MS < *lasts_ms => {
                let says = format!(
                    "message {message} was delivered with fence {fence} at the latest {} ms before the lease of fence {earlier} ended",
                    lasts_ms - event.ms
                );
                findings.add(Anomaly::GrantedWhileHeld, id, says, &[shown, event]);
            }
            _ => {}
        }
        leased.insert(message, (until_ms, fence, event));
    }
}
