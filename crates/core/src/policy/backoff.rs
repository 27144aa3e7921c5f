use serde::{Deserialize, Serialize};

use crate::error::AdminError;

/// How much of the computed delay is random.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Jitter {
    /// Anything from zero to the computed delay: spreads a thundering herd best.
    #[default]
    Full,
    /// Exactly the computed delay.
    None,
}

/// When a failed delivery becomes visible again, and how often it is tried: `min(cap, base * 2^(attempt-1))`, then
/// jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct RetryPolicy {
    /// The delay after the first attempt. 0 means at once, always. Default 1 s.
    pub base_ms: u64,
    /// The longest delay. At most 12 h; 0 means 12 h. Default 5 min; on a FIFO queue, where a delayed message holds up
    /// its group, 10 s.
    pub cap_ms: u64,
    /// How much of the delay is random. Default full.
    pub jitter: Jitter,
    /// After this many attempts the message goes to the dead-letter queue, or is parked if there is none. 0 means no
    /// limit; at most 1,000. Default 20. SQS: maxReceiveCount.
    pub max_attempts: u32,
}

impl Default for RetryPolicy {
    fn default() -> Self {
        Self {
            base_ms: 1_000,
            cap_ms: 5 * 60 * 1_000,
            jitter: Jitter::Full,
            max_attempts: Self::MAX_ATTEMPTS_DEFAULT,
        }
    }
}

impl RetryPolicy {
    /// The longest delay of any policy: 12 h.
    pub const CAP_MS_MAX: u64 = super::LEASE_MS_MAX;
    /// Default limit on attempts.
    pub const MAX_ATTEMPTS_DEFAULT: u32 = 20;
    /// The highest limit on attempts.
    pub const MAX_ATTEMPTS_MAX: u32 = 1_000;

    /// The default of FIFO queues: a delayed message holds up its group, so the delays are short.
    pub fn fifo() -> Self {
        Self { cap_ms: 10_000, ..Self::default() }
    }

    /// Visible again at once, without a limit on attempts, as in SQS without a redrive policy.
    pub fn at_once() -> Self {
        Self { base_ms: 0, cap_ms: 0, jitter: Jitter::Full, max_attempts: 0 }
    }

    /// Exponential backoff with full jitter and the default limit on attempts.
    pub fn exponential(base_ms: u64, cap_ms: u64) -> Self {
        Self { base_ms, cap_ms, ..Self::default() }
    }

    /// Limits the attempts; 0 lifts the limit.
    ///
    /// ```
    /// # use hapax_core::policy::RetryPolicy;
    /// assert_eq!(RetryPolicy::at_once().attempts(3).limit(), Some(3));
    /// assert_eq!(RetryPolicy::default().attempts(0).limit(), None);
    /// ```
    #[must_use]
    pub fn attempts(self, max_attempts: u32) -> Self {
        Self { max_attempts, ..self }
    }

    /// The limit on attempts, if there is one.
    pub fn limit(&self) -> Option<u32> {
        (self.max_attempts > 0).then_some(self.max_attempts)
    }

    pub(crate) fn validate(&self) -> Result<(), AdminError> {
        let attempts_max = u64::from(Self::MAX_ATTEMPTS_MAX);
        let fields = [
            ("retry.base_ms", self.base_ms, Self::CAP_MS_MAX),
            ("retry.cap_ms", self.cap_ms, Self::CAP_MS_MAX),
            ("retry.max_attempts", u64::from(self.max_attempts), attempts_max),
        ];
        for (field, value, max) in fields {
            if value > max {
                let problem = format!("{value} is out of range; use 0 to {max}");
                return Err(AdminError::Config { field, problem });
            }
        }
        Ok(())
    }

    /// The delay before jitter, after attempt number `attempt` (from 1) failed.
    pub fn ceiling_ms(&self, attempt: u32) -> u64 {
        let cap_ms = if self.cap_ms == 0 { Self::CAP_MS_MAX } else { self.cap_ms };
        let doublings = attempt.saturating_sub(1);
        // `checked_shl` only checks the width of the shift; the result may overflow before that.
        let factor = 1u64.checked_shl(doublings).unwrap_or(u64::MAX);
        self.base_ms.saturating_mul(factor).min(cap_ms)
    }

    /// The delay after attempt number `attempt` (from 1) failed; `random` is uniform over all of `u64`.
    ///
    /// ```
    /// # use hapax_core::policy::RetryPolicy;
    /// let policy = RetryPolicy::exponential(1_000, 60_000);
    /// assert_eq!(policy.delay_ms(3, u64::MAX), 4_000);
    /// assert_eq!(policy.delay_ms(3, 0), 0);
    /// assert_eq!(policy.delay_ms(4_000_000_000, u64::MAX), 60_000);
    /// ```
    pub fn delay_ms(&self, attempt: u32, random: u64) -> u64 {
        let ceiling = self.ceiling_ms(attempt);
        match self.jitter {
            Jitter::None => ceiling,
            // Scales without modulo bias: floor(random * (ceiling + 1) / 2^64) is uniform over 0..=ceiling.
            Jitter::Full => ((u128::from(random) * (u128::from(ceiling) + 1)) >> 64) as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_delay_is_within_its_ceiling_and_the_ceiling_within_the_cap(
            base_ms in 0u64.., cap_ms in 1u64.., attempt in 0u32.., random in 0u64..
        ) {
            let policy = RetryPolicy::exponential(base_ms, cap_ms);
            prop_assert!(policy.delay_ms(attempt, random) <= policy.ceiling_ms(attempt));
            prop_assert!(policy.ceiling_ms(attempt) <= cap_ms);
        }

        #[test]
        fn ceilings_never_shrink_and_double_until_the_cap(base_ms in 1u64..1 << 40, cap_ms in 1u64.., attempt in 1u32..200) {
            let policy = RetryPolicy { jitter: Jitter::None, ..RetryPolicy::exponential(base_ms, cap_ms) };
            let (this, next) = (policy.ceiling_ms(attempt), policy.ceiling_ms(attempt + 1));
            prop_assert!(next >= this);
            prop_assert!(next == cap_ms || next == this * 2);
        }

        #[test]
        fn full_jitter_reaches_both_ends(base_ms in 1u64..1 << 40) {
            let policy = RetryPolicy::exponential(base_ms, 0);
            prop_assert_eq!(policy.delay_ms(1, 0), 0);
            prop_assert_eq!(policy.delay_ms(1, u64::MAX), policy.ceiling_ms(1));
        }
    }

    #[test]
    fn full_jitter_is_uniform() {
        let policy = RetryPolicy::exponential(9, 0);
        let mut seen = [0u32; 10];
        for step in 0..10_000u64 {
            seen[policy.delay_ms(1, step * (u64::MAX / 10_000)) as usize] += 1;
        }
        assert!(seen.iter().all(|count| (990..=1010).contains(count)), "{seen:?}");
    }

    #[test]
    fn the_defaults_back_off_and_end() {
        let longest = |policy: RetryPolicy| [1, 2, 5, 20].map(|attempt| policy.delay_ms(attempt, u64::MAX));
        assert_eq!(longest(RetryPolicy::default()), [1_000, 2_000, 16_000, 300_000]);
        assert_eq!(longest(RetryPolicy::fifo()), [1_000, 2_000, 10_000, 10_000]);
        assert_eq!(longest(RetryPolicy::at_once()), [0; 4]);
        let limits = [RetryPolicy::default(), RetryPolicy::fifo(), RetryPolicy::at_once()].map(|p| p.limit());
        assert_eq!(limits, [Some(20), Some(20), None]);
    }
}
