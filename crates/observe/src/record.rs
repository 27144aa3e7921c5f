//! What was observed of a message, completed by what its store has on record.
//!
//! A process observes the deliveries that it makes and the settles that pass through it. Of a message that another process
//! delivered or settled, the store's record of failed attempts tells the rest.

use std::collections::VecDeque;

use hapax_core::FailureCause;
use hapax_core::store::FailedAttempt;

use crate::life::{Event, Life, Moment};

/// Completes the events of a life from its record, in order of time.
pub(crate) fn complete(life: &mut Life) {
    for failed in std::mem::take(&mut life.record) {
        add(&mut life.moments, &failed);
        life.record.push(failed);
    }
    life.moments.make_contiguous().sort_by_key(|moment| moment.at_ms);
    drop_explained(life);
}

fn add(moments: &mut VecDeque<Moment>, failed: &FailedAttempt) {
    let number = failed.deliveries;
    let at = moments.iter().position(|moment| delivery_number(&moment.event) == Some(number));
    let Some(at) = at else {
        let delivered = Event::Delivered {
            delivery: number,
            attempt: failed.attempt,
            consumer: failed.consumer.clone(),
            lease_ms: 0,
        };
        let is_later = |moment: &Moment| delivery_number(&moment.event).is_some_and(|other| other > number);
        let before = moments.iter().position(is_later).unwrap_or(moments.len());
        // The clocks of the store and of this process differ; the order of the deliveries is certain.
        let at_ms = moments.get(before).map_or(failed.at_ms, |later| later.at_ms.min(failed.at_ms));
        moments.insert(before, Moment { at_ms, event: ending(failed) });
        moments.insert(before, Moment { at_ms, event: delivered });
        return;
    };
    let is_expiry = |event: &Event| matches!(event, Event::Expired { delivery, .. } if *delivery == number);
    let ends = |event: &Event| match failed.cause {
        FailureCause::Expired => is_expiry(event),
        _ => is_ending(event),
    };
    if failed.cause != FailureCause::Expired {
        // It was given back through another process, which this one took for an expiry.
        moments.retain(|moment| !is_expiry(&moment.event));
    }
    let after = moments.iter().skip(at + 1);
    let mut until_next = after.take_while(|moment| delivery_number(&moment.event) != Some(number + 1));
    if !until_next.any(|moment| ends(&moment.event)) {
        moments.insert(at + 1, Moment { at_ms: failed.at_ms, event: ending(failed) });
    }
}

fn delivery_number(event: &Event) -> Option<u32> {
    match event {
        Event::Delivered { delivery, .. } => Some(*delivery),
        _ => None,
    }
}

/// The consumer, or this process on its behalf, ended the delivery.
fn is_ending(event: &Event) -> bool {
    matches!(
        event,
        Event::Returned { .. } | Event::Deferred { .. } | Event::Died { .. } | Event::Parked { .. }
    )
}

fn ending(failed: &FailedAttempt) -> Event {
    let error = failed.error.clone();
    match failed.cause {
        FailureCause::Expired => Event::Expired { delivery: failed.deliveries, held_ms: 0 },
        FailureCause::Retry => Event::Returned { error, after_ms: 0 },
        FailureCause::Rejected => Event::Died { error },
        FailureCause::Damaged | FailureCause::InDoubt => Event::Parked { reason: error },
    }
}

/// Drops "cause unknown" where every delivery but the last has an end that is known.
fn drop_explained(life: &mut Life) {
    let last = life.deliveries();
    let mut ended = Vec::new();
    let mut current = None;
    for moment in &life.moments {
        match &moment.event {
            Event::Delivered { delivery, .. } => current = Some(*delivery),
            Event::Expired { delivery, .. } => ended.push(*delivery),
            event if is_ending(event) => ended.extend(current),
            _ => {}
        }
    }
    if (1..last).all(|number| ended.contains(&number)) {
        life.moments.retain(|moment| moment.event != Event::CauseUnknown);
    }
}

#[cfg(test)]
mod tests {
    use hapax_core::MessageId;

    use super::*;
    use crate::life::Subject;

    fn failed(deliveries: u32, at_ms: u64, cause: FailureCause) -> FailedAttempt {
        let error = (cause == FailureCause::Retry).then(|| "busy".to_owned());
        FailedAttempt {
            attempt: deliveries,
            deliveries,
            at_ms,
            cause,
            error,
            consumer: Some("anna".to_owned()),
        }
    }

    fn delivered(delivery: u32) -> Event {
        Event::Delivered { delivery, attempt: delivery, consumer: None, lease_ms: 1_000 }
    }

    fn completed(observed: &[(u64, Event)], record: Vec<FailedAttempt>) -> Vec<Event> {
        let mut life = Life::new(Subject::Message(MessageId(1)), None);
        for (at_ms, event) in observed {
            life.push(*at_ms, event.clone());
        }
        life.add_record(record);
        complete(&mut life);
        life.moments.into_iter().map(|moment| moment.event).collect()
    }

    #[test]
    fn what_another_process_delivered_is_told_by_the_record() {
        let seen = [(50, Event::CauseUnknown), (50, delivered(2))];
        let events = completed(&seen, vec![failed(1, 40, FailureCause::Expired)]);
        assert!(
            matches!(
                &events[..],
                [Event::Delivered { delivery: 1, lease_ms: 0, .. }, Event::Expired { delivery: 1, .. }, second]
                    if *second == delivered(2)
            ),
            "{events:?}"
        );
        let unknown = completed(
            &[(50, Event::CauseUnknown), (50, delivered(3))],
            vec![failed(1, 40, FailureCause::Expired)],
        );
        assert!(unknown.contains(&Event::CauseUnknown), "the second delivery has no known end: {unknown:?}");
    }

    #[test]
    fn what_was_given_back_elsewhere_did_not_expire() {
        let expired = Event::Expired { delivery: 1, held_ms: 20 };
        let seen = [(10, delivered(1)), (30, expired.clone()), (30, delivered(2))];
        let returned = Event::Returned { error: Some("busy".to_owned()), after_ms: 0 };
        let events = completed(&seen, vec![failed(1, 20, FailureCause::Retry)]);
        assert_eq!(events, [delivered(1), returned, delivered(2)]);
        assert_eq!(
            completed(&seen, vec![failed(1, 20, FailureCause::Expired)]),
            [delivered(1), expired, delivered(2)]
        );
    }

    #[test]
    fn what_was_observed_is_not_told_twice() {
        let returned = Event::Returned { error: Some("busy".to_owned()), after_ms: 7 };
        let seen = [(10, delivered(1)), (20, returned.clone()), (30, delivered(2))];
        let record = vec![failed(1, 20, FailureCause::Retry)];
        assert_eq!(completed(&seen, record), [delivered(1), returned, delivered(2)]);
    }
}
