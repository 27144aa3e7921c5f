//! Settings as [`Duration`]s, for Rust callers. The fields themselves are milliseconds, as in files and on the wire.

use std::time::Duration;

use crate::message::NewMessage;
use crate::name::QueueName;
use crate::policy::RetryPolicy;
use crate::queue::{DeadLetterPolicy, QueueConfig, Tier};
use crate::store::Receive;

/// Milliseconds. A value that does not fit is longer than any limit allows anyway.
fn ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// ```
/// use std::time::Duration;
/// use hapax_core::policy::RetryPolicy;
/// use hapax_core::{QueueConfig, Tier};
///
/// let config = QueueConfig::default()
///     .tier(Tier::EffectivelyOnce)
///     .lease(Duration::from_mins(1))
///     .retry(RetryPolicy::backoff(Duration::from_secs(2), Duration::from_mins(10)).attempts(5));
/// assert_eq!((config.lease_ms, config.retry.cap_ms, config.retry.max_attempts), (60_000, 600_000, 5));
/// ```
impl QueueConfig {
    /// The guarantee that consumers want.
    #[must_use]
    pub fn tier(self, tier: Tier) -> Self {
        Self { tier, ..self }
    }

    /// How long a delivery is leased, up to 12 h.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease_ms: ms(lease), ..self }
    }

    /// How long a message is kept, 1 min to 14 days.
    #[must_use]
    pub fn retention(self, retention: Duration) -> Self {
        Self { retention_ms: ms(retention), ..self }
    }

    /// How long a new message is invisible, up to 15 min.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay_ms: ms(delay), ..self }
    }

    /// How long a receive waits if it does not set its own wait, up to 20 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait_ms: ms(wait), ..self }
    }

    /// When a failed delivery returns, and how often it is tried.
    #[must_use]
    pub fn retry(self, retry: RetryPolicy) -> Self {
        Self { retry, ..self }
    }

    /// The queue that takes dead letters. It has to exist.
    #[must_use]
    pub fn dead_letters_to(self, queue: QueueName) -> Self {
        Self { dead_letter: Some(DeadLetterPolicy { queue }), ..self }
    }

    /// JSON pointer to the idempotency key in the body, for example `/order/id`.
    #[must_use]
    pub fn key_pointer(self, pointer: impl Into<String>) -> Self {
        Self { key_pointer: Some(pointer.into()), ..self }
    }

    /// How long a deduplication id is remembered, up to the retention.
    #[must_use]
    pub fn dedup_window(mut self, window: Duration) -> Self {
        self.dedup.window_ms = ms(window);
        self
    }
}

impl RetryPolicy {
    /// Exponential backoff with full jitter: the delay after the first attempt is `first`, doubled after each further
    /// one, up to `longest`.
    pub fn backoff(first: Duration, longest: Duration) -> Self {
        Self::exponential(ms(first), ms(longest))
    }
}

impl Receive {
    /// How long each delivery is leased, instead of the queue's own lease.
    #[must_use]
    pub fn lease(self, lease: Duration) -> Self {
        Self { lease_ms: Some(ms(lease)), ..self }
    }

    /// How long to wait for the first message, up to 20 s.
    #[must_use]
    pub fn wait(self, wait: Duration) -> Self {
        Self { wait_ms: Some(ms(wait)), ..self }
    }
}

impl NewMessage {
    /// Hides the message for this long after the send, up to 15 min.
    #[must_use]
    pub fn delay(self, delay: Duration) -> Self {
        Self { delay_ms: Some(ms(delay)), ..self }
    }
}
