use super::LEASE_MS_MAX;
use crate::error::SettleError;

/// When a lease taken at `now_ms` runs out; no lease is longer than [`LEASE_MS_MAX`].
pub fn lease_deadline(now_ms: u64, lease_ms: u64) -> u64 {
    now_ms.saturating_add(lease_ms.min(LEASE_MS_MAX))
}

/// When a lease taken at `received_ms` and extended at `now_ms` runs out. The limit is on the total since the receive;
/// otherwise a consumer could hold a message indefinitely in small steps.
///
/// ```
/// # use hapax_core::policy::{extend_deadline, LEASE_MS_MAX};
/// assert_eq!(extend_deadline(1_000, 5_000, 10_000), Ok(15_000));
/// assert!(extend_deadline(1_000, 1_001, LEASE_MS_MAX).is_err());
/// ```
pub fn extend_deadline(received_ms: u64, now_ms: u64, lease_ms: u64) -> Result<u64, SettleError> {
    let deadline_ms = now_ms.saturating_add(lease_ms);
    let total_ms = deadline_ms.saturating_sub(received_ms);
    if total_ms > LEASE_MS_MAX {
        return Err(SettleError::LeaseTooLong { lease_ms: total_ms, lease_ms_max: LEASE_MS_MAX });
    }
    Ok(deadline_ms)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_chain_of_extensions_passes_the_bound(received in 0u64..1 << 50, steps in proptest::collection::vec(0u64..LEASE_MS_MAX * 2, 1..20)) {
            let (mut now, mut deadline) = (received, lease_deadline(received, 30_000));
            for step in steps {
                now = (now + step / 3).min(deadline);
                if let Ok(extended) = extend_deadline(received, now, step) {
                    deadline = extended;
                }
                prop_assert!(deadline - received <= LEASE_MS_MAX);
            }
        }

        #[test]
        fn extremes_do_not_overflow(received in 0u64.., now in 0u64.., lease in 0u64..) {
            let _ = extend_deadline(received, now, lease);
            prop_assert!(lease_deadline(now, lease) >= now);
        }
    }
}
