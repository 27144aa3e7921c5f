//! What a handler says about its run: a value, not an exception.

use std::fmt::Display;
use std::time::Duration;

pub(crate) use hapax_claim::Stop;
use hapax_core::{Json, Tier};
use serde::Serialize;

/// What came of a handler's run.
///
/// A handler may return it, or a `Result` of its value, or a `Result` of a `HandlerOutcome` where it needs both `?` and
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
    /// The effect happened. The value is recorded and given to duplicates (`effectively-once`, `transactional`).
    Done(R),
    /// **Nothing happened**; try again. The key is free again at once.
    Retry {
        /// After so long; by the queue's policy when `None`.
        after: Option<Duration>,
        /// Why, for the history of the message.
        error: String,
    },
    /// **Nothing happened**, and no retry will change that: to the dead letters. Duplicates are rejected alike.
    Reject {
        /// Why.
        reason: String,
    },
    /// Something may have happened, for example when a call to a third party timed out. The next run is told that it
    /// takes over, or the message is parked; see [`OnDoubt`](hapax_core::OnDoubt).
    InDoubt {
        /// What is known.
        error: String,
    },
    /// **Nothing happened**, and it is not the message's fault: put back for a while, without counting the attempt. The
    /// key is free again at once.
    Defer {
        /// How long the message is invisible.
        after: Duration,
        /// Why, for the log.
        reason: String,
    },
    /// The handler was told to stop, by the end of its process for example, and something may have happened. As
    /// [`InDoubt`](Self::InDoubt), but the attempt is not counted.
    Interrupted {
        /// What is known.
        error: String,
    },
    /// An error that says neither; [`OnError`] decides. What an `Err` becomes.
    Failed {
        /// The error.
        error: String,
    },
}

impl<R> HandlerOutcome<R> {
    /// Nothing happened; try again by the queue's policy.
    pub fn retry(error: impl Display) -> Self {
        Self::Retry { after: None, error: error.to_string() }
    }

    /// Nothing happened; try again after so long.
    pub fn retry_after(after: Duration, error: impl Display) -> Self {
        Self::Retry { after: Some(after), error: error.to_string() }
    }

    /// Nothing happened, and nothing will.
    pub fn reject(reason: impl Display) -> Self {
        Self::Reject { reason: reason.to_string() }
    }

    /// Nothing happened, and it is not the message's fault: put back, uncounted.
    pub fn defer(after: Duration, reason: impl Display) -> Self {
        Self::Defer { after, reason: reason.to_string() }
    }

    /// Something may have happened.
    pub fn in_doubt(error: impl Display) -> Self {
        Self::InDoubt { error: error.to_string() }
    }
}

/// What a handler's error, an `Err` that says nothing about its effect, means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum OnError {
    /// Nothing happened: retried by the queue's policy. The default below `effectively-once`, and at `transactional`,
    /// where an error rolls everything back.
    Retry,
    /// Something may have happened: retried, and told so; or parked. The default at `effectively-once`, where a wrong
    /// guess is a second effect.
    InDoubt,
    /// No retry will change it.
    Reject,
}

impl OnError {
    /// What an error means at a tier unless the worker's builder says otherwise.
    pub fn default_at(tier: Tier) -> Self {
        if tier == Tier::EffectivelyOnce { Self::InDoubt } else { Self::Retry }
    }
}

/// What a handler may return: a [`HandlerOutcome`], a `Result` of a value or of an outcome, or nothing.
pub trait IntoOutcome: Send {
    /// What is recorded for duplicates.
    type Value: Serialize;

    /// Says it as an outcome.
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
            // The alternate form of widely used error types has the causes too.
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

/// An outcome without its type: what the worker acts on.
#[derive(Debug)]
pub(crate) enum Ended {
    /// The value's JSON, where the tier records it.
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
    /// Something may have happened; the attempt is not counted.
    Interrupted {
        error: String,
    },
    /// The body does not fit the handler's type; the handler did not run.
    Unparsable(String),
    Panicked(String),
    /// Stopped at an await.
    Stopped(Stop),
    /// Stopped before its first step: nothing happened.
    NotStarted(Stop),
    /// It was done before; the handler did not run.
    Replayed(hapax_core::RecordedOutcome),
    /// The key was used before for another body; the handler did not run.
    Mismatch(String),
    /// An operator has to decide about the key first; the handler did not run.
    Held(String),
}

impl Ended {
    /// Whether there was a run, or a claim for one.
    pub fn ran(&self) -> bool {
        !matches!(self, Self::Replayed(_) | Self::Mismatch(_) | Self::Held(_))
    }

    /// Takes the type off; the value is written as JSON only where `record` asks for it.
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

/// What a panic said.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("the handler panicked: {}", text.unwrap_or("(no message)"))
}
