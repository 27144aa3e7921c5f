use crate::error::SendError;
use crate::queue::QueueConfig;

/// How far ahead a message's delivery time may be: 366 days.
pub const DELIVER_AHEAD_MS_MAX: u64 = 366 * 24 * 3600 * 1000;

/// When a new message becomes visible, and when its retention starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Visibility {
    /// When it can be received; `now_ms` or later.
    pub due_ms: u64,
    /// Start of its retention: the send, or the delivery time if the message has one.
    pub retained_from_ms: u64,
}

/// Decides when a new message becomes visible: at `deliver_at_ms`, after `delay_ms`, or after the queue's delay. A
/// delivery time in the past means at once.
///
/// ```
/// # use hapax_core::{QueueConfig, policy::visibility};
/// let at = visibility(&QueueConfig::default(), 1_000, None, Some(90_000)).unwrap();
/// assert_eq!((at.due_ms, at.retained_from_ms), (90_000, 90_000));
/// ```
pub fn visibility(
    config: &QueueConfig,
    now_ms: u64,
    delay_ms: Option<u64>,
    deliver_at_ms: Option<u64>,
) -> Result<Visibility, SendError> {
    let Some(at_ms) = deliver_at_ms else {
        let due_ms = now_ms.saturating_add(delay_ms.unwrap_or(config.delay_ms));
        return Ok(Visibility { due_ms, retained_from_ms: now_ms });
    };
    let invalid = |problem: String| Err(SendError::Invalid(format!("deliver_at_ms: {problem}")));
    if delay_ms.is_some() {
        return invalid("give a delay or a delivery time, not both".into());
    }
    if config.is_fifo() {
        return invalid("a FIFO queue delivers in order, so its messages have no delivery times".into());
    }
    if at_ms > now_ms.saturating_add(DELIVER_AHEAD_MS_MAX) {
        let last_ms = now_ms.saturating_add(DELIVER_AHEAD_MS_MAX);
        return invalid(format!("{at_ms} is more than 366 days ahead; use at most {last_ms}"));
    }
    let due_ms = at_ms.max(now_ms);
    Ok(Visibility { due_ms, retained_from_ms: due_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_delivery_time_replaces_the_delay_and_moves_the_retention() {
        let queue = QueueConfig { delay_ms: 500, ..QueueConfig::default() };
        let seen = |delay, at| visibility(&queue, 1_000, delay, at).map(|v| (v.due_ms, v.retained_from_ms));
        assert_eq!(seen(None, None), Ok((1_500, 1_000)));
        assert_eq!(seen(Some(7), None), Ok((1_007, 1_000)));
        assert_eq!(seen(Some(u64::MAX), None), Ok((u64::MAX, 1_000)), "its range is checked elsewhere");
        assert_eq!(seen(None, Some(9_000)), Ok((9_000, 9_000)));
        assert_eq!(seen(None, Some(3)), Ok((1_000, 1_000)), "a time in the past means at once");
        assert_eq!(seen(None, Some(1_000 + DELIVER_AHEAD_MS_MAX)).unwrap().0, 1_000 + DELIVER_AHEAD_MS_MAX);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let standard = QueueConfig::default();
        assert!(visibility(&standard, 1_000, Some(1), Some(9_000)).is_err());
        assert!(visibility(&standard, 1_000, None, Some(1_001 + DELIVER_AHEAD_MS_MAX)).is_err());
        assert!(visibility(&standard, 1_000, None, Some(u64::MAX)).is_err());
        assert!(visibility(&QueueConfig::fifo(), 1_000, None, Some(9_000)).is_err());
    }
}
