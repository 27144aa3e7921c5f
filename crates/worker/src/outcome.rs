//! The result of a handler's run: a value, not an exception.

use std::fmt::Display;
use std::time::Duration;

pub(crate) use hapax_claim::StopReason;
use hapax_core::{Json, Tier};
use serde::Serialize;

/// The result of a handler's run.
///
/// A handler may return it, or a `Result` of its value, or a `Result` of a `HandlerOutcome` if it needs both `?` and
/// more than success:
///
/// ```
/// use hapax_worker::{Cx, HandlerOutcome};
///
/// async fn parse(text: String, _cx: Cx) -> Result<HandlerOutcome<u32>, std::num::ParseIntError> {
///     if text.is_empty() {
///         return Ok(HandlerOutcome::reject("nothing to parse"));
///     }
///     Ok(HandlerOutcome::Done(text.parse()?))
/// }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HandlerOutcome<R> {
    /// The effect happened. The value is recorded and returned to duplicates (`effectively-once`, `transactional`).
    Done(R),
    /// **Nothing happened**; retry. The key is free again at once.
    Retry {
        /// The delay; that of the queue's policy when `None`.
        after: Option<Duration>,
        /// The error, for the history of the message.
        error: String,
    },
    /// **Nothing happened**, and no retry will change that: to the dead letters. Duplicates are rejected too.
    Reject {
        /// The reason, kept with the dead letter.
        reason: String,
    },
    /// The effect may have happened, for example when a call to a third party timed out. The next run is a takeover, or
    /// the message is parked; see [`OnDoubt`](hapax_core::OnDoubt).
    InDoubt {
        /// The known facts.
        error: String,
    },
    /// **Nothing happened**, and the message is not the cause: put back for a while, without counting the attempt. The
    /// key is free again at once.
    Defer {
        /// How long the message is invisible.
        after: Duration,
        /// The reason, for the log.
        reason: String,
    },
    /// The handler was told to stop, for example because its process ends, and the effect may have happened. As
    /// [`InDoubt`](Self::InDoubt), but the attempt is not counted.
    Interrupted {
        /// The known facts.
        error: String,
    },
    /// An error that tells neither; [`OnError`] decides. An `Err` becomes this.
    Failed {
        /// The error.
        error: String,
    },
}

impl<R> HandlerOutcome<R> {
    /// Nothing happened; retry after the delay of the queue's policy.
    pub fn retry(error: impl Display) -> Self {
        Self::Retry { after: None, error: error.to_string() }
    }

    /// Nothing happened; retry after this delay.
    pub fn retry_after(after: Duration, error: impl Display) -> Self {
        Self::Retry { after: Some(after), error: error.to_string() }
    }

    /// Nothing happened, and no retry will change that.
    pub fn reject(reason: impl Display) -> Self {
        Self::Reject { reason: reason.to_string() }
    }

    /// Nothing happened, and the message is not the cause: put back without counting the attempt.
    pub fn defer(after: Duration, reason: impl Display) -> Self {
        Self::Defer { after, reason: reason.to_string() }
    }

    /// The effect may have happened.
    pub fn in_doubt(error: impl Display) -> Self {
        Self::InDoubt { error: error.to_string() }
    }
}

/// The meaning of a handler's `Err`, which does not tell whether the effect happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnError {
    /// Nothing happened: retried by the queue's policy. The default below `effectively-once`, and at `transactional`,
    /// where an error rolls everything back.
    Retry,
    /// The effect may have happened: the next run is a takeover, or the message is parked. The default at
    /// `effectively-once`, where a wrong assumption would cause a second effect.
    InDoubt,
    /// Nothing happened, and no retry will change that.
    Reject,
}

impl OnError {
    /// The default meaning of an error at a tier.
    pub fn default_at(tier: Tier) -> Self {
        if tier == Tier::EffectivelyOnce { Self::InDoubt } else { Self::Retry }
    }
}

/// The possible return types of a handler: a [`HandlerOutcome`], a `Result` of a value or of an outcome, or nothing.
pub trait IntoOutcome: Send {
    /// The value that is recorded for duplicates.
    type Value: Serialize;

    /// Converts the return value into an outcome.
    fn into_outcome(self) -> HandlerOutcome<Self::Value>;
}

impl IntoOutcome for () {
    type Value = ();

    fn into_outcome(self) -> HandlerOutcome<()> {
        HandlerOutcome::Done(())
    }
}

impl<R: Serialize + Send> IntoOutcome for HandlerOutcome<R> {
    type Value = R;

    fn into_outcome(self) -> HandlerOutcome<R> {
        self
    }
}

impl<R: Serialize + Send, E: Display + Send> IntoOutcome for Result<R, E> {
    type Value = R;

    fn into_outcome(self) -> HandlerOutcome<R> {
        match self {
            Ok(value) => HandlerOutcome::Done(value),
            // The alternate form of widely used error types includes their causes.
            Err(error) => HandlerOutcome::Failed { error: format!("{error:#}") },
        }
    }
}

impl<R: Serialize + Send, E: Display + Send> IntoOutcome for Result<HandlerOutcome<R>, E> {
    type Value = R;

    fn into_outcome(self) -> HandlerOutcome<R> {
        self.unwrap_or_else(|error| HandlerOutcome::Failed { error: format!("{error:#}") })
    }
}

/// An untyped outcome, on which the worker acts.
#[derive(Debug)]
pub(crate) enum RunResult {
    /// The value's JSON, if the tier records it.
    Done(Option<Json>),
    Retry {
        after_ms: Option<u64>,
        error: String,
    },
    Reject {
        reason: String,
    },
    InDoubt {
        error: String,
    },
    Failed {
        error: String,
    },
    /// Nothing happened; the attempt is not counted.
    Deferred {
        after_ms: u64,
        reason: String,
    },
    /// The effect may have happened; the attempt is not counted.
    Interrupted {
        error: String,
    },
    /// The body cannot be parsed as the handler's type; the handler did not run.
    Unparsable(String),
    Panicked(String),
    /// Stopped at an await.
    Stopped(StopReason),
    /// Stopped before the first poll: nothing happened.
    NotStarted(StopReason),
    /// The outcome was recorded earlier; the handler did not run.
    Replayed(hapax_core::RecordedOutcome),
    /// The key was used earlier for another body; the handler did not run.
    Mismatch(String),
    /// An operator has to decide about the key first; the handler did not run.
    ParkedInDoubt(String),
}

impl RunResult {
    /// Whether there was a run, or a claim for a run.
    pub fn ran(&self) -> bool {
        !matches!(self, Self::Replayed(_) | Self::Mismatch(_) | Self::ParkedInDoubt(_))
    }

    /// Removes the type; the value is written as JSON only if `record` is set.
    pub fn of<O: IntoOutcome>(outcome: O, record: bool) -> Self {
        match outcome.into_outcome() {
            HandlerOutcome::Done(value) => Self::Done(record.then(|| Json::of(&value).ok()).flatten()),
            HandlerOutcome::Retry { after, error } => {
                Self::Retry { after_ms: after.map(|after| after.as_millis() as u64), error }
            }
            HandlerOutcome::Reject { reason } => Self::Reject { reason },
            HandlerOutcome::InDoubt { error } => Self::InDoubt { error },
            HandlerOutcome::Failed { error } => Self::Failed { error },
            HandlerOutcome::Defer { after, reason } => {
                Self::Deferred { after_ms: after.as_millis() as u64, reason }
            }
            HandlerOutcome::Interrupted { error } => Self::Interrupted { error },
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("(no message)"))
}
