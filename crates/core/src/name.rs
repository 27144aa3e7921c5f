//! Identifiers. Each is a newtype, so a group cannot be passed for a key and a receipt cannot be passed for an id.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Why a string is not a valid identifier: its kind, its value, and the rule.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind} {value:?} is not valid: {rule}")]
pub struct NameError {
    /// The kind of identifier, for example `queue name`.
    pub kind: &'static str,
    /// The offending value, truncated to 100 characters.
    pub value: String,
    /// The rule that it breaks.
    pub rule: &'static str,
}

impl NameError {
    fn new(kind: &'static str, value: &str, rule: &'static str) -> Self {
        Self { kind, value: value.chars().take(100).collect(), rule }
    }
}

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $rule:literal, $valid:expr) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(Arc<str>);

        impl $name {
            /// Checks the value and wraps it.
            pub fn new(value: impl AsRef<str>) -> Result<Self, NameError> {
                let value = value.as_ref();
                let valid: fn(&str) -> bool = $valid;
                if valid(value) { Ok(Self(value.into())) } else { Err(NameError::new($kind, value, $rule)) }
            }

            /// The identifier as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }

        impl FromStr for $name {
            type Err = NameError;
            fn from_str(value: &str) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl TryFrom<String> for $name {
            type Error = NameError;
            fn try_from(value: String) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl TryFrom<&str> for $name {
            type Error = NameError;
            fn try_from(value: &str) -> Result<Self, NameError> {
                Self::new(value)
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> String {
                value.as_str().to_owned()
            }
        }
    };
}

/// Text of 1 to 255 bytes without control characters.
fn without_controls(value: &str) -> bool {
    // No early exit, so that the compiler checks many bytes at once: this runs for each key and scope.
    let no_ascii_control = || value.bytes().fold(true, |none, byte| none & !byte.is_ascii_control());
    (1..=255).contains(&value.len())
        && if value.is_ascii() { no_ascii_control() } else { !value.chars().any(char::is_control) }
}

/// Letters, digits and ASCII punctuation: the characters that SQS allows in group and deduplication ids.
fn printable(value: &str, max: usize) -> bool {
    !value.is_empty() && value.len() <= max && value.bytes().all(|b| b.is_ascii_graphic())
}

text_id!(
    /// A queue's name: 1 to 80 of `A-Z a-z 0-9 _ -`; a FIFO queue's name ends in `.fifo` (counted in the 80).
    ///
    /// ```
    /// # use hapax_core::QueueName;
    /// assert!(QueueName::new("payments").is_ok());
    /// assert!(QueueName::new("payments.fifo").unwrap().is_fifo());
    /// assert!(QueueName::new("pay ments").is_err());
    /// ```
    QueueName,
    "queue name",
    "use 1 to 80 of A-Z a-z 0-9 _ - (a FIFO queue's name ends in .fifo)",
    |value| {
        let stem = value.strip_suffix(".fifo").unwrap_or(value);
        !stem.is_empty()
            && value.len() <= 80
            && stem.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
    }
);

impl QueueName {
    /// Whether the name is that of a FIFO queue: it ends in `.fifo`.
    pub fn is_fifo(&self) -> bool {
        self.0.ends_with(".fifo")
    }
}

text_id!(
    /// The group of a message: a FIFO queue keeps order within a group, a standard queue shares deliveries fairly
    /// between groups.
    GroupId,
    "group id",
    "use 1 to 128 letters, digits or punctuation marks of ASCII",
    |value| printable(value, 128)
);

text_id!(
    /// Identifies one send: a second send with the same id inside the queue's window is suppressed.
    DedupId,
    "deduplication id",
    "use 1 to 128 letters, digits or punctuation marks of ASCII",
    |value| printable(value, 128)
);

text_id!(
    /// Identifies one intended effect; chosen by the caller.
    IdempotencyKey,
    "idempotency key",
    "use 1 to 255 bytes without control characters",
    without_controls
);

impl From<MessageId> for IdempotencyKey {
    /// The key of a message whose sender gave it none. A UUID needs no check.
    fn from(id: MessageId) -> Self {
        Self(id.text().as_str().into())
    }
}

text_id!(
    /// A document's name: segments of `A-Z a-z 0-9 _ - .` with `/` between them, 1 to 200 bytes together.
    ///
    /// ```
    /// # use hapax_core::DocumentName;
    /// assert!(DocumentName::new("schedules/nightly").is_ok());
    /// assert!(DocumentName::new("schedules//nightly").is_err());
    /// ```
    DocumentName,
    "document name",
    "use 1 to 200 of A-Z a-z 0-9 _ - . with / between segments; no segment is empty, . or ..",
    |value| {
        let plain = |b: u8| b.is_ascii_alphanumeric() || b"_-.".contains(&b);
        let segment = |part: &str| !matches!(part, "" | "." | "..") && part.bytes().all(plain);
        value.len() <= DocumentName::BYTES_MAX && value.split('/').all(segment)
    }
);

impl DocumentName {
    /// Maximum length in bytes.
    pub const BYTES_MAX: usize = 200;
}

impl std::borrow::Borrow<str> for DocumentName {
    fn borrow(&self) -> &str {
        self.as_str()
    }
}

text_id!(
    /// Opaque token of one delivery; needed to settle or extend it, stale once the message is delivered again.
    Receipt,
    "receipt",
    "use the receipt as it was received",
    |value| !value.is_empty() && value.len() <= 1024
);

text_id!(
    /// The namespace of a key: tenant and route, or queue. The same key in another scope is another effect.
    Scope,
    "scope",
    "use 1 to 255 bytes without control characters",
    without_controls
);

impl Scope {
    /// The scope of a queue's messages.
    pub fn of_queue(queue: &QueueName) -> Self {
        Self(format!("queue/{queue}").into())
    }
}

text_id!(
    /// A claimant's nonce: a new one for every run of a handler, but the same one when a claim is repeated because its
    /// answer was lost.
    Owner,
    "owner",
    "use 1 to 128 letters, digits or punctuation marks of ASCII",
    |value| printable(value, 128)
);

text_id!(
    /// A cryptographic hash of a request's content, as text.
    Fingerprint,
    "fingerprint",
    "use 1 to 128 letters, digits or punctuation marks of ASCII",
    |value| printable(value, 128)
);

text_id!(
    /// Opaque token of one claim; needed to renew or end it, stale once the key is granted again.
    Token,
    "token",
    "use the token as it was received",
    |value| printable(value, 256)
);

/// A message's identity, kept across attempts and into the dead letters; written as a UUID.
///
/// ```
/// # use hapax_core::MessageId;
/// let id: MessageId = "0190a3c2-7b1e-8def-8000-0000000000ff".parse().unwrap();
/// assert_eq!(id.to_string(), "0190a3c2-7b1e-8def-8000-0000000000ff");
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MessageId(pub u128);

/// The text of a [`MessageId`]: hex digits and dashes.
struct IdText([u8; 36]);

impl IdText {
    fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("hex digits and dashes are ASCII")
    }
}

impl MessageId {
    /// Written without `core::fmt`, which takes ten times as long: each delivery may need it.
    fn text(self) -> IdText {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        /// Where the two digits of each byte stand.
        const PLACES: [usize; 16] = [0, 2, 4, 6, 9, 11, 14, 16, 19, 21, 24, 26, 28, 30, 32, 34];
        let mut text = [b'-'; 36];
        for (byte, at) in self.0.to_be_bytes().into_iter().zip(PLACES) {
            text[at] = DIGITS[usize::from(byte >> 4)];
            text[at + 1] = DIGITS[usize::from(byte & 15)];
        }
        IdText(text)
    }
}

impl fmt::Display for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text().as_str())
    }
}

impl fmt::Debug for MessageId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for MessageId {
    type Err = NameError;
    fn from_str(value: &str) -> Result<Self, NameError> {
        let bad = || NameError::new("message id", value, "use a UUID as it was returned by send");
        let dashes = [8, 13, 18, 23];
        if value.len() != 36 || !dashes.iter().all(|&at| value.as_bytes()[at] == b'-') {
            return Err(bad());
        }
        let mut id = 0u128;
        for (at, byte) in value.bytes().enumerate() {
            if !dashes.contains(&at) {
                id = id << 4 | u128::from((byte as char).to_digit(16).ok_or_else(bad)?);
            }
        }
        Ok(Self(id))
    }
}

impl TryFrom<String> for MessageId {
    type Error = NameError;
    fn try_from(value: String) -> Result<Self, NameError> {
        value.parse()
    }
}

impl From<MessageId> for String {
    fn from(value: MessageId) -> String {
        value.text().as_str().to_owned()
    }
}

/// Fencing token: a number that grows with every delivery. A system that remembers the largest one it has seen can
/// refuse writes from expired deliveries.
///
/// It stays below 2^53, so it survives a trip through JSON and JavaScript.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Fence(pub u64);

impl Fence {
    /// The largest fence that fits a JSON number without loss.
    pub const MAX: Self = Self((1 << 53) - 1);

    /// The fence after this one: `max(previous + 1, store time in microseconds)`.
    ///
    /// ```
    /// # use hapax_core::Fence;
    /// assert_eq!(Fence(7).next(3), Fence(8));
    /// assert_eq!(Fence(7).next(9), Fence(9));
    /// ```
    #[must_use]
    pub fn next(self, store_time_us: u64) -> Self {
        Self((self.0 + 1).max(store_time_us).min(Self::MAX.0))
    }
}

/// The revision of a queue's configuration or of a document: a number that grows with every change.
///
/// A store never gives the same name the same revision twice, not even after it was deleted and created again. So a
/// change that names the revision it read either applies to exactly that version or is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Revision(pub u64);

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_names_follow_sqs() {
        for good in ["a", "A-b_9", "x.fifo", &"q".repeat(80)] {
            assert!(QueueName::new(good).is_ok(), "{good}");
        }
        for bad in ["", ".fifo", "a.b", "a b", "ä", &"q".repeat(81), "x.fifo.fifo"] {
            assert!(QueueName::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_error_names_the_value_and_the_rule() {
        let error = GroupId::new("with space").unwrap_err().to_string();
        assert!(error.contains("group id \"with space\"") && error.contains("128"), "{error}");
    }

    #[test]
    fn message_ids_round_trip_and_refuse_garbage() {
        let id = MessageId(0x0123_4567_89ab_cdef_0123_4567_89ab_cdef);
        assert_eq!(id.to_string().parse::<MessageId>().unwrap(), id);
        for bad in ["", "x", "0123456789abcdef0123456789abcdef", "zz234567-89ab-cdef-0123-456789abcdef"] {
            assert!(bad.parse::<MessageId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_message_id_is_written_as_a_uuid_and_is_a_key() {
        for (id, text) in [
            (0x0123_4567_89ab_cdef_0123_4567_89ab_cdef, "01234567-89ab-cdef-0123-456789abcdef"),
            (0, "00000000-0000-0000-0000-000000000000"),
            (u128::MAX, "ffffffff-ffff-ffff-ffff-ffffffffffff"),
            (0xf0e1_d2c3_0000_0a0b_8000_0000_0000_00ff, "f0e1d2c3-0000-0a0b-8000-0000000000ff"),
        ] {
            let id = MessageId(id);
            assert_eq!(
                (id.to_string(), String::from(id), format!("{id:?}")),
                (text.into(), text.into(), text.into())
            );
            assert_eq!(serde_json::to_string(&id).unwrap(), format!("\"{text}\""));
            assert_eq!(IdempotencyKey::from(id), IdempotencyKey::new(text).unwrap());
        }
    }

    #[test]
    fn keys_and_scopes_have_no_control_characters() {
        let long = "k".repeat(255);
        for good in ["k", "a key, with spaces", "Schlüssel", "\u{a0}", "鍵", &long, "~ !"] {
            assert!(IdempotencyKey::new(good).is_ok() && Scope::new(good).is_ok(), "{good:?}");
        }
        let (too_long, too_many) = ("k".repeat(256), "ü".repeat(128));
        let ascii = (0u8..32).chain([127]).map(|byte| format!("key {} end", char::from(byte)));
        let others = (0x80u8..=0x9f).map(|byte| format!("ü{}", char::from(byte)));
        let bad = ["", &too_long, &too_many].map(str::to_owned).into_iter().chain(ascii).chain(others);
        for bad in bad {
            assert!(IdempotencyKey::new(&bad).is_err() && Scope::new(&bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn ids_refuse_bad_json() {
        assert!(serde_json::from_str::<QueueName>("\"a b\"").is_err());
        assert_eq!(serde_json::to_string(&QueueName::new("q").unwrap()).unwrap(), "\"q\"");
    }
}
