//! The ledger: which keys have been claimed, by which owner, and with which outcome.
//!
//! ```text
//!              claim                     end(complete)
//!   absent ------------> processing ------------------> completed | failed
//!     ^                   |      |                           |
//!     |   end(release)    |      | lease lapsed, or          | its time is over
//!     +-------------------+      | end(doubt)                v
//!     |                          v                         absent
//!     +---- resolve(absent) -- in doubt -- resolve(completed), late end(complete) --> completed
//!                                |
//!                                +-- claim with `retry`: processing again, under a new fence (takeover)
//! ```
//!
//! [`protocol`] holds these transitions as pure functions. Every ledger in this repository uses them, and a model
//! checker explores them.

pub mod protocol;

use std::fmt;
use std::sync::{Arc, LazyLock};

use async_trait::async_trait;
use blake3::hazmat::{ContextKey, HasherExt as _, hash_derive_key_context};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use thiserror::Error;

use crate::documents::Documents;
use crate::error::StoreError;
use crate::name::{Fence, Fingerprint, IdempotencyKey, Owner, QueueName, Receipt, Scope, Token};
use crate::store::{Batch, Page, QueueAdmin, RemainingLease};

/// How long an outcome is kept by default: 4 days, as long as a message.
pub const TTL_MS_DEFAULT: u64 = 4 * 24 * 3600 * 1000;
/// The longest that an outcome is kept: 366 days.
pub const TTL_MS_MAX: u64 = 366 * 24 * 3600 * 1000;
/// The shortest that an outcome is kept: 1 s.
pub const TTL_MS_MIN: u64 = 1000;
/// Maximum size of a recorded outcome. Of a larger one, the ledger keeps only the fact that the effect ended.
pub const OUTCOME_BYTES_MAX: usize = 1024 * 1024;
/// How long a lapsed claim is kept if the next claimant may take it over: 14 days.
pub const DOUBT_RETENTION_MS: u64 = 14 * 24 * 3600 * 1000;

/// Lookup key of an entry: a key is unique only within its scope.
///
/// ```
/// use hapax_core::{EntryId, QueueName};
/// let queue = QueueName::new("payments").unwrap();
/// let id = EntryId::of_queue(&queue, "order-7".parse().unwrap());
/// assert_eq!(id.to_string(), "queue/payments order-7");
/// // The same for every attempt, another for every effect: what a third party should see as its idempotency key.
/// assert_eq!(id.derived_key("charge"), id.derived_key("charge"));
/// assert_ne!(id.derived_key("charge"), id.derived_key("receipt"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct EntryId {
    /// The namespace: tenant and route, or queue.
    pub scope: Scope,
    /// Identifies one intended effect within the scope.
    pub key: IdempotencyKey,
}

impl EntryId {
    /// An entry's lookup key.
    pub fn new(scope: Scope, key: IdempotencyKey) -> Self {
        Self { scope, key }
    }

    /// The entry of a message's key in its queue.
    pub fn of_queue(queue: &QueueName, key: IdempotencyKey) -> Self {
        Self { scope: Scope::of_queue(queue), key }
    }

    /// 128-bit hash of scope and key.
    pub fn hash(&self) -> u128 {
        let mut hasher = self.hasher(&ENTRY_CONTEXT);
        u128::from_le_bytes(take16(&mut hasher))
    }

    /// The key for a call to another system on behalf of this entry. `label` distinguishes several such calls.
    pub fn derived_key(&self, label: &str) -> IdempotencyKey {
        let mut hasher = self.hasher(&DERIVED_KEY_CONTEXT);
        hasher.update(label.as_bytes());
        let hex = hasher.finalize().to_hex();
        IdempotencyKey::new(format!("hapax-{}", &hex[..32])).expect("hex digits are a valid key")
    }

    /// Scope and key as arguments of `hapax ledger`, quoted for a shell. They go last on the line, since a key may look like
    /// a flag. Keys are the caller's text, and an operator may paste them.
    ///
    /// ```
    /// use hapax_core::{EntryId, Scope};
    /// let id = |key: &str| EntryId::new(Scope::new("http/shop").unwrap(), key.parse().unwrap());
    /// assert_eq!(id("order-7").shell_words(), "'http/shop' 'order-7'");
    /// assert_eq!(id("it's").shell_words(), r"'http/shop' 'it'\''s'");
    /// assert_eq!(id("--yes").shell_words(), "-- 'http/shop' '--yes'");
    /// ```
    pub fn shell_words(&self) -> String {
        let (scope, key) = (self.scope.as_str(), self.key.as_str());
        let end_of_flags = if [scope, key].iter().any(|word| word.starts_with('-')) { "-- " } else { "" };
        let quoted = |word: &str| format!("'{}'", word.replace('\'', r"'\''"));
        format!("{end_of_flags}{} {}", quoted(scope), quoted(key))
    }

    fn hasher(&self, context: &ContextKey) -> blake3::Hasher {
        let mut hasher = blake3::Hasher::new_from_context_key(context);
        // The length prefixes keep ("ab", "c") and ("a", "bc") distinct.
        hasher.update(&(self.scope.as_str().len() as u64).to_le_bytes());
        hasher.update(self.scope.as_str().as_bytes());
        hasher.update(&(self.key.as_str().len() as u64).to_le_bytes());
        hasher.update(self.key.as_str().as_bytes());
        hasher
    }
}

/// The purposes of hashes of an entry, each hashed once per process: that costs as much as a hash itself.
static ENTRY_CONTEXT: LazyLock<ContextKey> = LazyLock::new(|| hash_derive_key_context("hapax entry"));
static DERIVED_KEY_CONTEXT: LazyLock<ContextKey> =
    LazyLock::new(|| hash_derive_key_context("hapax derived key"));

fn take16(hasher: &mut blake3::Hasher) -> [u8; 16] {
    hasher.finalize().as_bytes()[..16].try_into().expect("16 of 32 bytes")
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.scope, self.key)
    }
}

/// A JSON text, kept as it was written.
///
/// ```
/// use hapax_core::Json;
/// let json = Json::of(&("paid", 7)).unwrap();
/// assert_eq!(json.as_str(), r#"["paid",7]"#);
/// assert_eq!(json.get::<(String, u32)>().unwrap(), ("paid".to_owned(), 7));
/// assert!(Json::parse("{").is_err());
/// ```
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Json(Arc<str>);

impl Json {
    /// The JSON of a value.
    pub fn of(value: &(impl Serialize + ?Sized)) -> serde_json::Result<Self> {
        serde_json::to_string(value).map(|text| Self(text.into()))
    }

    /// Checks that a text is JSON and keeps it.
    pub fn parse(text: &str) -> serde_json::Result<Self> {
        serde_json::from_str::<serde::de::IgnoredAny>(text).map(|_| Self(text.into()))
    }

    /// The JSON text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Parses the text into a value.
    pub fn get<T: DeserializeOwned>(&self) -> serde_json::Result<T> {
        serde_json::from_str(&self.0)
    }
}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let raw: &serde_json::value::RawValue =
            serde_json::from_str(&self.0).map_err(serde::ser::Error::custom)?;
        raw.serialize(to)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let raw = Box::<serde_json::value::RawValue>::deserialize(from)?;
        Ok(Self(raw.get().into()))
    }
}

/// The outcome of an effect: recorded once, returned to every duplicate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedOutcome {
    /// The effect failed permanently; duplicates get the same failure.
    #[serde(default)]
    pub failed: bool,
    /// The handler's return value; `None` if it was too large to keep. In JSON that is an absent field: `null` is a
    /// value like any other.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub value: Option<Json>,
    /// The size of a value that was too large to keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub omitted_bytes: Option<u64>,
}

fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Json>, D::Error> {
    Json::deserialize(from).map(Some)
}

impl RecordedOutcome {
    /// A success.
    pub fn done(value: Json) -> Self {
        Self { failed: false, value: Some(value), omitted_bytes: None }
    }

    /// A permanent failure.
    pub fn failed(value: Json) -> Self {
        Self { failed: true, value: Some(value), omitted_bytes: None }
    }

    /// The form in which a ledger keeps it: an oversize value becomes a marker, so that the effect never runs again.
    #[must_use]
    pub fn without_oversize_value(self) -> Self {
        match self.value {
            Some(json) if json.as_str().len() > OUTCOME_BYTES_MAX => {
                Self { value: None, omitted_bytes: Some(json.as_str().len() as u64), ..self }
            }
            value => Self { value, ..self },
        }
    }
}

/// What a claimant wants done about a lapsed claim whose holder may or may not have caused the effect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OnDoubt {
    /// Take over and run again: right if the effect is idempotent by the derived key, or checks the fence.
    #[default]
    Retry,
    /// Leave it until an operator decides: the effect happens at most once, perhaps never.
    Park,
}

/// A request for the right to cause one effect.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimRequest {
    /// The effect's entry.
    pub id: EntryId,
    /// A nonce of the caller. A repeated request with it gets the same claim, so a lost answer does not lock the caller
    /// out.
    pub owner: Owner,
    /// Hash of the request's content. A request with the same key and another hash is refused, in every state.
    pub fingerprint: Option<Fingerprint>,
    /// How long the claim lasts without a renewal. 1 ms to 12 h.
    pub lease_ms: u64,
    /// How long to wait while another owner holds the key. At most 20 s.
    pub wait_ms: u64,
    /// What to do about a lapsed claim.
    pub on_doubt: OnDoubt,
    /// The delivery that the claim is for: the entry is kept as long as this message exists in the same store.
    pub delivery: Option<(QueueName, Receipt)>,
}

impl ClaimRequest {
    /// A claim that does not wait and is not bound to a message.
    pub fn new(id: EntryId, owner: Owner, lease_ms: u64) -> Self {
        Self { id, owner, fingerprint: None, lease_ms, wait_ms: 0, on_doubt: OnDoubt::Retry, delivery: None }
    }

    /// Checks the limits.
    pub fn validate(&self) -> Result<(), ClaimError> {
        let bounds = [
            ("lease_ms", self.lease_ms, 1, crate::policy::LEASE_MS_MAX),
            ("wait_ms", self.wait_ms, 0, crate::policy::WAIT_MS_MAX),
        ];
        for (field, value, min, max) in bounds {
            crate::validate::within(field, value, min, max)
                .map_err(|error| ClaimError::Invalid(error.to_string()))?;
        }
        Ok(())
    }
}

/// A granted claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Needed to renew or end it; stale once the key is granted again.
    pub token: Token,
    /// Grows with every grant of the key.
    pub fence: Fence,
    /// Time left of the lease.
    pub lease_ms: u64,
    /// The claim of an earlier holder lapsed: its effect may have happened.
    pub takeover: bool,
}

/// The result of a claim request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    /// The caller holds the key: it may act.
    Granted(Grant),
    /// The effect ended earlier, with this outcome.
    Completed {
        /// The recorded outcome.
        outcome: RecordedOutcome,
        /// When it ended, in milliseconds since 1970.
        at_ms: u64,
    },
    /// Another owner holds the key.
    InProgress {
        /// Time left of that owner's lease.
        retry_after_ms: u64,
    },
    /// A claim lapsed, its holder may have caused the effect, and the caller asked not to take over.
    InDoubt {
        /// Start of the doubt, in milliseconds since 1970.
        since_ms: u64,
    },
}

/// Why a claim was refused. Nothing was changed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ClaimError {
    /// The key was used for another request.
    #[error("the key was used before for a different request; use a new key for a new request")]
    Mismatch,
    /// A value is out of range.
    #[error("{0}")]
    Invalid(String),
    /// The claim would let more keys of its scope be in doubt than may be. Other scopes are not affected.
    #[error(
        "scope {scope} has {open} open claims, of which {in_doubt} are in doubt, and may have {max}; resolve some that are \
         in doubt, then claim again"
    )]
    TooManyInDoubt {
        /// The scope.
        scope: Scope,
        /// Its open entries: held, so that they may come to be in doubt, or in doubt.
        open: u64,
        /// Those among them that are in doubt.
        in_doubt: u64,
        /// Maximum count of open entries.
        max: u64,
    },
    /// The store could not decide this claim; others of its batch are not affected.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl ClaimError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Mismatch => "fingerprint-mismatch",
            Self::Invalid(_) => "invalid",
            Self::TooManyInDoubt { .. } => "too-many-in-doubt",
            Self::Store(error) => error.code(),
        }
    }

    /// Whether the same claim may succeed later without anyone changing the request.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Mismatch | Self::Invalid(_) => false,
            Self::TooManyInDoubt { .. } => true,
            Self::Store(error) => error.is_retryable(),
        }
    }
}

/// Why a claim was not renewed or ended. Nothing was changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TokenError {
    /// Another owner holds the key, or its holder gave it up.
    #[error("the token is stale: the claim lapsed and passed to another holder")]
    Stale,
    /// There is no such entry.
    #[error("the claim is gone: it was released, resolved, forgotten, or its time was over")]
    Gone,
    /// This claim has ended, in another way than requested now.
    #[error("the claim has already ended with an outcome; it cannot change")]
    Ended,
    /// The entry's stored bytes do not match their checksum.
    #[error(
        "the ledger's entry is damaged: its state cannot be told; `forget` it to let its effect happen again"
    )]
    Damaged,
}

impl TokenError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Stale => "stale-token",
            Self::Gone => "claim-gone",
            Self::Ended => "claim-ended",
            Self::Damaged => "damaged-entry",
        }
    }
}

/// Renews a claim: the heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Renew {
    /// The entry's lookup key.
    pub id: EntryId,
    /// The claim's token.
    pub token: Token,
    /// The new lease, counted from now. 1 ms to 12 h.
    pub lease_ms: u64,
}

/// How a claim ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimEnding {
    /// The effect has ended, with success or with a permanent failure; duplicates get this outcome.
    Complete {
        /// The outcome to record.
        outcome: RecordedOutcome,
        /// How long it is kept. 1 s to 366 days.
        ttl_ms: u64,
    },
    /// The effect did not happen: the key is free again. After a takeover the entry returns to doubt instead, because
    /// the effect of the earlier holder is still unknown.
    Release,
    /// The effect may have happened: the entry is in doubt at once, without waiting for the lease to lapse.
    Doubt,
}

/// Ends one claim.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndClaim {
    /// The entry's lookup key.
    pub id: EntryId,
    /// The claim's token.
    pub token: Token,
    /// How it ends.
    pub ending: ClaimEnding,
}

/// An operator's decision about an entry in doubt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    /// The effect happened: duplicates get this outcome.
    Completed {
        /// The outcome to record.
        outcome: RecordedOutcome,
        /// How long it is kept. 1 s to 366 days.
        ttl_ms: u64,
    },
    /// The effect did not happen: the key is free again.
    Absent,
}

/// Why an entry was not resolved or forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ResolveError {
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// There is no such entry.
    #[error("there is no entry {0}")]
    NotFound(EntryId),
    /// A holder is working on it.
    #[error("the entry is being worked on; its lease ends in {retry_after_ms} ms unless it is renewed")]
    InProgress {
        /// Time left of the holder's lease.
        retry_after_ms: u64,
    },
    /// The effect has ended, so there is nothing to decide.
    #[error("the entry is not in doubt: it has ended; `forget` it to let the effect happen again")]
    NotInDoubt,
    /// A value is out of range.
    #[error("{0}")]
    Invalid(String),
}

impl ResolveError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::NotFound(_) => "no-such-entry",
            Self::InProgress { .. } => "in-progress",
            Self::NotInDoubt => "not-in-doubt",
            Self::Invalid(_) => "invalid",
        }
    }
}

/// An entry's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EntryState {
    /// A holder is working on it.
    Processing,
    /// Its holder's lease lapsed, or the holder gave it up; the effect may have happened.
    InDoubt,
    /// The effect ended with success.
    Completed,
    /// The effect failed permanently.
    Failed,
}

impl EntryState {
    /// The state's name in JSON, output and metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Processing => "processing",
            Self::InDoubt => "in_doubt",
            Self::Completed => "completed",
            Self::Failed => "failed",
        }
    }
}

/// An entry as an operator sees it; without its token.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EntryView {
    /// The entry's lookup key.
    #[serde(flatten)]
    pub id: EntryId,
    /// Its state.
    pub state: EntryState,
    /// The fence of its last grant.
    pub fence: Fence,
    /// The current or last holder.
    pub owner: Owner,
    /// Hash of the request's content.
    pub fingerprint: Option<Fingerprint>,
    /// When the last claim was made.
    pub claimed_ms: u64,
    /// How often a lapsed claim was taken over.
    pub takeovers: u32,
    /// Time left of the lease; 0 unless a holder is working on it.
    pub lease_ms: u64,
    /// When the effect ended, or when the doubt began.
    pub ended_ms: Option<u64>,
    /// When it may be pruned; `None`: not before an operator decides.
    pub prune_ms: Option<u64>,
    /// The recorded outcome, once it has ended.
    pub outcome: Option<RecordedOutcome>,
}

/// Which entries to list, ordered by their last claim.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EntryFilter {
    /// Only entries of this scope.
    pub scope: Option<Scope>,
    /// Only entries in this state. A ledger may list [`EntryState::Processing`] and [`EntryState::InDoubt`] faster than
    /// others.
    pub state: Option<EntryState>,
    /// Continue after an earlier page.
    pub after: Option<u64>,
    /// Maximum count, 1 to 1,000.
    pub limit: usize,
}

/// The features of a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LedgerCapabilities {
    /// The ledger's name, for messages.
    pub name: String,
    /// A confirmed change survives a crash of the process and a power failure.
    pub durable: bool,
    /// Fences only grow, also across restarts and restores.
    pub fence: bool,
    /// Entries may be deleted before their time, for example by eviction.
    pub may_evict: bool,
}

crate::metrics! {
    /// What a ledger has done since it was opened; kept as it changes, never scanned for.
    #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
    pub struct LedgerStats is "hapax_ledger", kept by Store, labels [];
    plain {}
    nested {}
    /// Entries in all.
    gauge entries,
    /// Entries that someone holds or that are in doubt.
    gauge open,
    /// Claims given: the effect runs.
    counter granted,
    /// Claims answered with a recorded outcome: duplicates suppressed.
    counter replayed,
    /// Claims that met someone else at work.
    counter conflicts,
    /// Claims that were left because the entry is in doubt.
    counter in_doubt,
    /// Claims given over a lapsed holder.
    counter takeovers,
    /// Claims refused because the key was used for another request.
    counter mismatches,
    /// Claims that ended with an outcome.
    counter completed,
    /// Renewals and endings refused because their token was stale.
    counter stale,
    /// Entries whose time was over.
    counter pruned,
}

/// The ledger seam.
#[async_trait]
pub trait Ledger: Send + Sync {
    /// The features of this ledger.
    fn ledger_capabilities(&self) -> LedgerCapabilities;

    /// Claims keys, each atomically and durably. Two elements of one batch may have the same key: the second one then
    /// sees the claim of the first. The batch is answered when its last element is: while one waits, the leases of those
    /// that were granted run. Send claims that may wait one by one.
    async fn claim(&self, batch: Vec<ClaimRequest>) -> Batch<Claim, ClaimError>;

    /// Keeps claims from lapsing.
    async fn renew(&self, batch: Vec<Renew>) -> Batch<RemainingLease, TokenError>;

    /// Ends claims. Safe to repeat after an unknown outcome: repeating the same completion is not an error.
    async fn end(&self, batch: Vec<EndClaim>) -> Batch<(), TokenError>;

    /// Reads an entry.
    async fn entry(&self, id: &EntryId) -> Result<Option<EntryView>, StoreError>;

    /// Lists entries, page by page.
    async fn entries(&self, filter: EntryFilter) -> Result<Page<EntryView>, StoreError>;

    /// Decides about an entry in doubt; `by` is kept for the audit. Messages parked because of it are delivered again.
    async fn resolve(&self, id: &EntryId, resolution: Resolution, by: &str) -> Result<(), ResolveError>;

    /// Deletes an entry without a holder, so that the effect may happen again; `by` is kept for the audit.
    async fn forget(&self, id: &EntryId, by: &str) -> Result<(), ResolveError>;

    /// The ledger's counters.
    async fn ledger_stats(&self) -> Result<LedgerStats, StoreError>;
}

/// A store that holds queues and a ledger.
pub trait Store: QueueAdmin + Ledger + Documents {}

impl<T: QueueAdmin + Ledger + Documents + ?Sized> Store for T {}

#[cfg(test)]
mod tests {
    use super::*;

    /// A completion that is repeated after a restart must compare equal to the stored one.
    /// Hashes are on disks, and derived keys at other systems: they stay what they were.
    #[test]
    fn hashes_and_derived_keys_are_fixed() {
        let id = EntryId::of_queue(&QueueName::new("charges").unwrap(), "order-7".parse().unwrap());
        assert_eq!(id.derived_key("charge").as_str(), "hapax-7f45b5656e4e0082c853cd75eff1b153");
        let mut hasher = blake3::Hasher::new_derive_key("hapax entry");
        for part in [id.scope.as_str(), id.key.as_str()] {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
        }
        assert_eq!(id.hash().to_le_bytes(), take16(&mut hasher));
    }

    #[test]
    fn an_outcome_survives_json_even_if_it_is_null() {
        let kept = [
            RecordedOutcome::done(Json::parse("null").unwrap()),
            RecordedOutcome::failed(Json::parse(r#"{"a" : 1.0}"#).unwrap()),
            RecordedOutcome { failed: false, value: None, omitted_bytes: Some(7) },
        ];
        for outcome in kept {
            let json = serde_json::to_string(&outcome).unwrap();
            assert_eq!(serde_json::from_str::<RecordedOutcome>(&json).unwrap(), outcome, "{json}");
        }
    }
}
