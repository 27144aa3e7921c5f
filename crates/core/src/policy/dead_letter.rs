use super::RetryPolicy;

/// The next step for a message whose delivery failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterFailure {
    /// Visible again after this delay.
    Retry {
        /// The delay.
        after_ms: u64,
    },
    /// Out of attempts: to the dead letters, or parked if the queue has no dead-letter queue.
    Dead,
}

/// Decides the next step after attempt number `attempt` (from 1) failed. Crashes count too, which limits how often a
/// message can kill its worker.
///
/// `asked_ms` is a delay that the consumer asked for; it replaces the policy's, but not the limit on attempts.
pub fn after_failure(retry: &RetryPolicy, attempt: u32, asked_ms: Option<u64>, random: u64) -> AfterFailure {
    if retry.limit().is_some_and(|max| attempt >= max) {
        return AfterFailure::Dead;
    }
    let after_ms = asked_ms.unwrap_or_else(|| retry.delay_ms(attempt, random));
    AfterFailure::Retry { after_ms: after_ms.min(RetryPolicy::CAP_MS_MAX) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_last_attempt_is_the_one_that_reaches_the_limit() {
        let retry = RetryPolicy::at_once().attempts(3);
        assert_eq!(after_failure(&retry, 2, None, 0), AfterFailure::Retry { after_ms: 0 });
        assert_eq!(after_failure(&retry, 3, None, 0), AfterFailure::Dead);
        assert_eq!(after_failure(&retry, 4, Some(5), 0), AfterFailure::Dead);
    }

    proptest! {
        #[test]
        fn without_a_limit_nothing_dies(attempt in 1u32.., asked in proptest::option::of(0u64..), random in 0u64..) {
            let after = after_failure(&RetryPolicy::exponential(100, 0).attempts(0), attempt, asked, random);
            let AfterFailure::Retry { after_ms } = after else { panic!("died without a limit") };
            prop_assert!(after_ms <= RetryPolicy::CAP_MS_MAX);
            prop_assert!(asked.is_none_or(|asked| after_ms == asked.min(RetryPolicy::CAP_MS_MAX)));
        }
    }
}
