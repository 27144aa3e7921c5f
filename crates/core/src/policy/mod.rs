//! Decisions as pure functions: all inputs are arguments, so that every case can be tested.

mod backoff;
mod dead_letter;
mod dedup;
mod lease;
mod redrive;
pub mod tier;
mod visibility;

pub use backoff::{Jitter, RetryPolicy};
pub use dead_letter::{AfterFailure, after_failure};
pub use dedup::{content_id, dedup_hash, dedup_key, is_duplicate};
pub use lease::{extend_deadline, lease_deadline};
pub use redrive::DeadLetterRef;
pub use visibility::{DELIVER_AHEAD_MS_MAX, Visibility, visibility};

/// The lease if neither queue nor receive sets one: 30 s.
pub const LEASE_MS_DEFAULT: u64 = 30_000;
/// The longest lease, counted since the receive: 12 h.
pub const LEASE_MS_MAX: u64 = 12 * 3600 * 1000;
/// How long a message is kept by default: 4 days.
pub const RETENTION_MS_DEFAULT: u64 = 4 * 24 * 3600 * 1000;
/// The shortest retention: 60 s.
pub const RETENTION_MS_MIN: u64 = 60_000;
/// The longest retention: 14 days.
pub const RETENTION_MS_MAX: u64 = 14 * 24 * 3600 * 1000;
/// The longest delay of a new message: 15 min.
pub const DELAY_MS_MAX: u64 = 15 * 60 * 1000;
/// The longest wait of a receive: 20 s.
pub const WAIT_MS_MAX: u64 = 20_000;
/// The largest message, and the largest batch in total: 1 MiB.
pub const MESSAGE_BYTES_MAX: u64 = 1024 * 1024;
/// Maximum number of messages in one send, receive or settle of a wire protocol.
pub const BATCH_MAX: usize = 10;
/// Maximum number of messages of one queue in flight.
pub const IN_FLIGHT_MAX: u64 = 120_000;
/// How long a receive that names its attempt can be repeated: 5 min.
pub const ATTEMPT_ID_MS: u64 = 5 * 60 * 1000;
/// How long a deduplication id is remembered by default: 5 min.
pub const DEDUP_WINDOW_MS_DEFAULT: u64 = 5 * 60 * 1000;
/// Maximum length of a stored error or reason; longer ones are truncated.
pub const ERROR_BYTES_MAX: usize = 4096;
/// How many failed attempts of a message are kept as its history.
pub const HISTORY_MAX: u32 = 20;

/// Maximum of the interval that can be required between two purges of a queue, or between the deletion of a queue and
/// its next creation: 5 min. SQS has 60 s.
pub const INTERVAL_MS_MAX: u64 = 5 * 60 * 1000;

/// Truncates a text to at most `bytes_max` bytes at a character boundary.
pub fn truncate(text: &str, bytes_max: usize) -> &str {
    &text[..text.floor_char_boundary(bytes_max)]
}
