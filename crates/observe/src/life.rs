//! The life of one message, or of one key that belongs to no message: what happened to it, in order.

use std::collections::VecDeque;
use std::fmt;

use hapax_core::policy::truncate;
use hapax_core::store::FailedAttempt;
use hapax_core::{EntryId, IdempotencyKey, MessageId, QueueName};
use serde::{Deserialize, Serialize};

/// Maximum number of events of a life; the first is kept, then the latest.
pub const EVENTS_MAX: usize = 50;

/// An error is kept up to this length.
pub(crate) const ERROR_BYTES_MAX: usize = 300;

/// The length of a shortened error, with the sign that it was longer.
const SHORTENED_BYTES_MAX: usize = ERROR_BYTES_MAX + "…".len();

/// The beginning of an error; the store keeps more of it.
pub(crate) fn shortened(error: &str) -> String {
    let kept = truncate(error, ERROR_BYTES_MAX);
    if kept.len() < error.len() { format!("{kept}…") } else { kept.to_owned() }
}

/// Whose life it is.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Subject {
    /// A message.
    Message(MessageId),
    /// A ledger entry that was claimed without a delivery, for example by a request.
    Entry(EntryId),
}

impl Subject {
    /// A number that is the same in every process.
    pub(crate) fn stable_hash(&self) -> u128 {
        match self {
            Self::Message(id) => id.0,
            Self::Entry(id) => id.hash(),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(id) => id.fmt(f),
            Self::Entry(id) => id.fmt(f),
        }
    }
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "event")]
#[non_exhaustive]
pub enum Event {
    /// A producer sent it again; the copy was suppressed.
    SentAgain,
    /// It was given to a consumer.
    Delivered {
        /// Its number among the deliveries of the message, from 1.
        delivery: u32,
        /// Its number among the attempts, from 1.
        attempt: u32,
        /// The consumer's name, if it has one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        consumer: Option<String>,
        /// The lease that it began with.
        lease_ms: u64,
    },
    /// The lease of a delivery ran out; noticed when the message was delivered again.
    Expired {
        /// The delivery.
        delivery: u32,
        /// How long it was held: from the delivery to the end of its last lease.
        held_ms: u64,
    },
    /// It was delivered again, and why is not known here: the delivery before was made by another process, or before this
    /// one started.
    CauseUnknown,
    /// Done.
    Acked {
        /// The delivery, if it was made by this process.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        delivery: Option<u32>,
        /// How long it was held.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        held_ms: Option<u64>,
    },
    /// The consumer gave it back, and it counts as an attempt.
    Returned {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// How long it stays hidden.
        after_ms: u64,
    },
    /// It was put back uncounted.
    Deferred {
        /// How long it stays hidden.
        after_ms: u64,
    },
    /// It went to the dead letters.
    Died {
        /// The last error.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// It was set aside until an operator decides.
    Parked {
        /// Why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// A settle or an extension was refused: the lease had passed to another delivery, or the message is gone.
    Refused {
        /// The delivery whose receipt it was.
        delivery: u32,
        /// How long it was held by then.
        held_ms: u64,
        /// The code of the refusal.
        code: String,
    },
    /// Its key was claimed: the handler may run.
    Claimed {
        /// An earlier holder's claim lapsed; its effect may have happened.
        takeover: bool,
    },
    /// Its key had a recorded outcome, which was given instead of a run.
    Replayed,
    /// Another holder was at work on its key.
    InProgress,
    /// Its key is in doubt, and the claimant asked not to run then.
    InDoubt,
    /// Its key was used before for another content.
    Mismatch,
    /// The outcome of a run was recorded.
    Completed,
    /// The end of a claim was refused: the key had passed to another holder.
    StaleClaim,
}

/// An event and its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moment {
    /// Milliseconds since 1970, by the clock of the process that observed it.
    pub at_ms: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

/// What happened to one message or key.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Life {
    /// Whose life it is.
    pub subject: Subject,
    /// The message's queue.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<QueueName>,
    /// Identity of the intended effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<IdempotencyKey>,
    /// When the message was sent, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sent_ms: Option<u64>,
    /// What happened, in order.
    pub moments: VecDeque<Moment>,
    /// Events that are left out between the first and the second of `moments`.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub left_out: u64,
    /// The store's own record of failed attempts, as it was when a delivery followed one that another process made. In order
    /// of the deliveries.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub record: Vec<FailedAttempt>,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

impl Life {
    pub(crate) fn new(subject: Subject, queue: Option<QueueName>) -> Self {
        Self {
            subject,
            queue,
            key: None,
            sent_ms: None,
            moments: VecDeque::new(),
            left_out: 0,
            record: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, at_ms: u64, event: Event) {
        // The end of a lease is noticed later than other events.
        let before = self.moments.iter().rposition(|moment| moment.at_ms <= at_ms);
        self.moments.insert(before.map_or(0, |before| before + 1), Moment { at_ms, event });
        if self.moments.len() > EVENTS_MAX {
            self.moments.remove(1);
            self.left_out += 1;
        }
    }

    /// The time of its latest event.
    pub fn last_ms(&self) -> u64 {
        self.moments.iter().map(|moment| moment.at_ms).max().unwrap_or_default()
    }

    /// Adds what another process saw of the same subject.
    pub(crate) fn merge(&mut self, other: Self) {
        // Mostly one of both is an earlier form of the other, and events that one has left out are among those of the
        // other. What two processes have left out of different events is not known: the count is the least that it can be.
        let total = self.total().max(other.total());
        self.queue = self.queue.take().or(other.queue);
        self.key = self.key.take().or(other.key);
        self.sent_ms = self.sent_ms.or(other.sent_ms);
        self.add_record(other.record);
        for moment in other.moments {
            if !self.moments.contains(&moment) {
                self.moments.push_back(moment);
            }
        }
        self.moments.make_contiguous().sort_by_key(|moment| moment.at_ms);
        let total = total.max(self.moments.len() as u64);
        while self.moments.len() > EVENTS_MAX {
            self.moments.remove(1);
        }
        self.left_out = total - self.moments.len() as u64;
    }

    /// Its events in memory, with those that are on record.
    pub(crate) fn kept_events(&self) -> usize {
        self.moments.len() + self.record.len()
    }

    /// Its events, with those that are left out.
    fn total(&self) -> u64 {
        self.moments.len() as u64 + self.left_out
    }

    /// Adds what the store has on record about failed attempts; the latest are kept.
    pub(crate) fn add_record(&mut self, record: Vec<FailedAttempt>) {
        for failed in record {
            if self.record.iter().all(|known| known.deliveries != failed.deliveries) {
                // An error that was shortened before stays as it is.
                let error = failed.error.map(|error| match error.len() {
                    ..=SHORTENED_BYTES_MAX => error,
                    _ => shortened(&error),
                });
                self.record.push(FailedAttempt { error, ..failed });
            }
        }
        self.record.sort_by_key(|failed| failed.deliveries);
        let excess = self.record.len().saturating_sub(EVENTS_MAX);
        self.record.drain(..excess);
    }

    /// The deliveries among its events.
    pub fn deliveries(&self) -> u32 {
        let number = |moment: &Moment| match moment.event {
            Event::Delivered { delivery, .. } => Some(delivery),
            _ => None,
        };
        self.moments.iter().filter_map(number).max().unwrap_or_default()
    }

    /// Whether its latest delivery ended because its consumer, or an operator after it, gave the message back.
    pub(crate) fn was_returned(&self) -> bool {
        let end = self.moments.iter().rev().find_map(|moment| match moment.event {
            Event::Returned { .. } | Event::Deferred { .. } | Event::Parked { .. } | Event::Died { .. } => {
                Some(true)
            }
            Event::Delivered { .. } | Event::Expired { .. } | Event::Refused { .. } => Some(false),
            _ => None,
        });
        end == Some(true)
    }

    /// Whether one of its events has ended it.
    pub(crate) fn has_ended(&self) -> bool {
        self.moments.iter().any(|moment| matches!(moment.event, Event::Acked { .. } | Event::Died { .. }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_that_are_left_out_are_counted_once() {
        let mut life = Life::new(Subject::Message(MessageId(1)), None);
        let mut stored: Option<Life> = None;
        for at_ms in 0..200 {
            life.push(at_ms, Event::InProgress);
            // Written now and then, as a process does.
            if at_ms % 7 == 0 {
                match &mut stored {
                    Some(stored) => stored.merge(life.clone()),
                    None => stored = Some(life.clone()),
                }
            }
        }
        let mut stored = stored.unwrap();
        stored.merge(life.clone());
        assert_eq!((stored.left_out, stored.moments.len()), (150, EVENTS_MAX));
        assert_eq!((life.left_out, life.moments.len()), (150, EVENTS_MAX));
        life.merge(stored);
        assert_eq!(life.left_out, 150, "what a reader is told");
        // Another process saw other events.
        let mut other = Life::new(Subject::Message(MessageId(1)), None);
        other.push(7, Event::Replayed);
        life.merge(other);
        assert_eq!((life.left_out, life.moments.len()), (150, EVENTS_MAX));
    }

    #[test]
    fn an_event_that_is_noticed_late_stands_at_its_time() {
        let mut life = Life::new(Subject::Message(MessageId(1)), None);
        life.push(10, Event::InProgress);
        life.push(30, Event::Replayed);
        life.push(20, Event::InDoubt);
        life.push(30, Event::Completed);
        let events: Vec<_> = life.moments.into_iter().map(|moment| moment.event).collect();
        assert_eq!(events, [Event::InProgress, Event::InDoubt, Event::Replayed, Event::Completed]);
    }
}
