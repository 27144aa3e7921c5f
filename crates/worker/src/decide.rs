//! Translates the end of a run into a settle and the end of its claim. A pure function; the crate's documentation has
//! the same table.

use hapax_core::{ClaimEnding, Json, OnDoubt, RecordedOutcome, Settlement, Tier, policy};

use crate::outcome::{OnError, RunResult, StopReason};

/// The settings that the decision depends on.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Policy {
    pub tier: Tier,
    pub on_doubt: OnDoubt,
    pub on_error: OnError,
    pub ttl_ms: u64,
}

/// How a delivery ends, and its claim if it has one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Decision {
    pub settlement: Settlement,
    pub ending: ClaimEnding,
}

fn retry(error: &str, after_ms: Option<u64>) -> Settlement {
    let error = policy::truncate(error, policy::ERROR_BYTES_MAX).to_owned();
    Settlement::Retry { after_ms, error: Some(error) }
}

fn reject(reason: &str) -> Settlement {
    Settlement::Reject { reason: policy::truncate(reason, policy::ERROR_BYTES_MAX).to_owned() }
}

fn park(reason: &str) -> Settlement {
    Settlement::Park { reason: policy::truncate(reason, policy::ERROR_BYTES_MAX).to_owned() }
}

/// How a duplicate of a recorded outcome is settled.
pub(crate) fn replay(outcome: &RecordedOutcome) -> Settlement {
    if !outcome.failed {
        return Settlement::Ack;
    }
    let text =
        outcome.value.as_ref().map(|json| json.get::<String>().unwrap_or_else(|_| json.as_str().into()));
    reject(&text.unwrap_or_else(|| "it was rejected before".into()))
}

pub(crate) fn mismatch(key: &str) -> Settlement {
    reject(&format!(
        "the idempotency key {key:?} was used before for a message with another body; give each effect its own key"
    ))
}

impl Policy {
    fn doubt(&self, error: &str) -> Decision {
        let settlement = match (self.tier, self.on_doubt) {
            (Tier::EffectivelyOnce, OnDoubt::Park) => park(error),
            _ => retry(error, None),
        };
        Decision { settlement, ending: ClaimEnding::Doubt }
    }

    /// A doubt that the message did not cause: the attempt is not counted.
    fn uncounted_doubt(&self, error: &str) -> Decision {
        match self.doubt(error) {
            Decision { settlement: Settlement::Retry { .. }, ending } => {
                Decision { settlement: Settlement::Defer { after_ms: 0 }, ending }
            }
            parked => parked,
        }
    }

    fn rejected(&self, reason: &str) -> Decision {
        let settlement = reject(reason);
        let Settlement::Reject { reason } = &settlement else { unreachable!("just made") };
        let outcome = RecordedOutcome::failed(Json::of(reason).expect("a text is JSON"));
        let ending = ClaimEnding::Complete { outcome, ttl_ms: self.ttl_ms };
        Decision { settlement, ending }
    }

    /// Decides how a run's end is recorded.
    pub fn decide(&self, ended: RunResult) -> Decision {
        match ended {
            RunResult::Done(value) => {
                // A value that cannot be written as JSON leaves a marker: the effect happened, so it must not run
                // again.
                let outcome = RecordedOutcome { failed: false, value, omitted_bytes: None };
                Decision {
                    settlement: Settlement::Ack,
                    ending: ClaimEnding::Complete { outcome, ttl_ms: self.ttl_ms },
                }
            }
            RunResult::Retry { after_ms, error } => {
                Decision { settlement: retry(&error, after_ms), ending: ClaimEnding::Release }
            }
            RunResult::Reject { reason } => self.rejected(&reason),
            RunResult::InDoubt { error } | RunResult::Panicked(error) => self.doubt(&error),
            RunResult::Failed { error } => match self.on_error {
                OnError::Retry => Decision { settlement: retry(&error, None), ending: ClaimEnding::Release },
                OnError::InDoubt => self.doubt(&error),
                OnError::Reject => self.rejected(&error),
            },
            // The claim is not completed: a later version of the handler may be able to parse the body.
            RunResult::Unparsable(reason) => {
                Decision { settlement: reject(&reason), ending: ClaimEnding::Release }
            }
            RunResult::Deferred { after_ms, .. } => {
                Decision { settlement: Settlement::Defer { after_ms }, ending: ClaimEnding::Release }
            }
            RunResult::Interrupted { error } => self.uncounted_doubt(&error),
            RunResult::Stopped(StopReason::Drained) => {
                self.uncounted_doubt("the worker ended while the handler ran")
            }
            RunResult::Stopped(StopReason::TimedOut) => {
                self.doubt("the handler ran for longer than run_ms_max")
            }
            RunResult::Stopped(StopReason::Lost | StopReason::Abandoned) => {
                self.doubt("the lease was lost while the handler ran")
            }
            RunResult::NotStarted(_) => {
                Decision { settlement: Settlement::Defer { after_ms: 0 }, ending: ClaimEnding::Release }
            }
            RunResult::Replayed(outcome) => {
                Decision { settlement: replay(&outcome), ending: ClaimEnding::Release }
            }
            RunResult::ParkedInDoubt(reason) => {
                Decision { settlement: park(&reason), ending: ClaimEnding::Release }
            }
            RunResult::Mismatch(key) => Decision { settlement: mismatch(&key), ending: ClaimEnding::Release },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(on_doubt: OnDoubt, on_error: OnError) -> Policy {
        Policy { tier: Tier::EffectivelyOnce, on_doubt, on_error, ttl_ms: 5_000 }
    }

    fn text(settlement: &Settlement) -> &str {
        match settlement {
            Settlement::Retry { error, .. } => error.as_deref().unwrap(),
            Settlement::Reject { reason } | Settlement::Park { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn only_the_handlers_own_retry_and_reject_say_that_nothing_happened() {
        let policy = policy(OnDoubt::Retry, OnError::Retry);
        let own = policy.decide(RunResult::Retry { after_ms: Some(7), error: "busy".into() });
        assert_eq!(own.ending, ClaimEnding::Release);
        assert_eq!(own.settlement, Settlement::Retry { after_ms: Some(7), error: Some("busy".into()) });
        for ended in [
            RunResult::Panicked("boom".into()),
            RunResult::InDoubt { error: "boom".into() },
            RunResult::Stopped(StopReason::TimedOut),
            RunResult::Stopped(StopReason::Lost),
        ] {
            let decision = policy.decide(ended);
            assert_eq!(decision.ending, ClaimEnding::Doubt);
            assert!(matches!(decision.settlement, Settlement::Retry { after_ms: None, .. }), "{decision:?}");
        }
    }

    #[test]
    fn doubt_is_parked_where_the_worker_says_so() {
        let policy = policy(OnDoubt::Park, OnError::InDoubt);
        for ended in [RunResult::Panicked("boom".into()), RunResult::Failed { error: "boom".into() }] {
            let decision = policy.decide(ended);
            assert!(
                matches!(decision.settlement, Settlement::Park { .. })
                    && text(&decision.settlement).contains("boom")
            );
            assert_eq!(decision.ending, ClaimEnding::Doubt);
        }
        let drained = policy.decide(RunResult::Stopped(StopReason::Drained));
        assert!(matches!(drained.settlement, Settlement::Park { .. }), "a half-done effect is not run again");
    }

    #[test]
    fn a_rejection_is_recorded_and_replayed_as_one() {
        let decision =
            policy(OnDoubt::Retry, OnError::Reject).decide(RunResult::Failed { error: "no account".into() });
        let ClaimEnding::Complete { outcome, ttl_ms: 5_000 } = decision.ending else { panic!() };
        assert!(outcome.failed);
        assert_eq!(replay(&outcome), decision.settlement);
        assert_eq!(replay(&RecordedOutcome::done(Json::of("x").unwrap())), Settlement::Ack);
    }

    #[test]
    fn a_drain_counts_no_attempt() {
        let policy = policy(OnDoubt::Retry, OnError::Retry);
        let running = policy.decide(RunResult::Stopped(StopReason::Drained));
        assert_eq!(
            running,
            Decision { settlement: Settlement::Defer { after_ms: 0 }, ending: ClaimEnding::Doubt }
        );
        let waiting = policy.decide(RunResult::NotStarted(StopReason::Drained));
        assert_eq!(
            waiting,
            Decision { settlement: Settlement::Defer { after_ms: 0 }, ending: ClaimEnding::Release }
        );
    }
}
