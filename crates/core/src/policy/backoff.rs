use serde::{Deserialize, Serialize};

use crate::error::AdminError;

/// How much of the computed delay is left to chance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Jitter {
    /// Anything from zero to the computed delay: spreads a thundering herd best.
    #[default]
    Full,
    /// Exactly the computed delay.
    None,
}

/// When a failed delivery becomes visible again: `min(cap, base * 2^(attempt-1))`, then jitter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryPolicy {
    /// The delay after the first attempt. 0 (default) means at once, always.
    pub base_ms: u64,
    /// The longest delay. At most 12 h; 0 (default) means 12 h.
    pub cap_ms: u64,
    /// How much is left to chance. Default full.
    pub jitter: Jitter,
}

impl RetryPolicy {
    /// The longest delay that any policy gives.
    pub const CAP_MS_MAX: u64 = super::LEASE_MS_MAX;

    /// Exponential backoff with full jitter.
    pub fn exponential(base_ms: u64, cap_ms: u64) -> Self {
        Self { base_ms, cap_ms, jitter: Jitter::Full }
    }

    pub(crate) fn validate(&self) -> Result<(), AdminError> {
        let bad = |field, value| {
            let problem = format!("{value} is out of range; use 0 to {}", Self::CAP_MS_MAX);
            Err(AdminError::Config { field, problem })
        };
        match *self {
            Self { base_ms, .. } if base_ms > Self::CAP_MS_MAX => bad("retry.base_ms", base_ms),
            Self { cap_ms, .. } if cap_ms > Self::CAP_MS_MAX => bad("retry.cap_ms", cap_ms),
            _ => Ok(()),
        }
    }

    /// The delay before jitter after attempt number `attempt` (from 1) failed.
    pub fn ceiling_ms(&self, attempt: u32) -> u64 {
        let cap_ms = if self.cap_ms == 0 { Self::CAP_MS_MAX } else { self.cap_ms };
        let doublings = attempt.saturating_sub(1);
        // `checked_shl` only checks the shift's width; the product may overflow before that.
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
            let policy = RetryPolicy { base_ms, cap_ms, jitter: Jitter::Full };
            prop_assert!(policy.delay_ms(attempt, random) <= policy.ceiling_ms(attempt));
            prop_assert!(policy.ceiling_ms(attempt) <= cap_ms);
        }

        #[test]
        fn ceilings_never_shrink_and_double_until_the_cap(base_ms in 1u64..1 << 40, cap_ms in 1u64.., attempt in 1u32..200) {
            let policy = RetryPolicy { base_ms, cap_ms, jitter: Jitter::None };
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
    fn the_default_is_at_once() {
        assert_eq!(RetryPolicy::default().delay_ms(50, u64::MAX), 0);
    }
}
