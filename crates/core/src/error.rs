//! One narrow error per operation. Each says what happened, with which value, and what to do; each has a stable code.

use thiserror::Error;

use crate::ledger::TokenError;
use crate::name::{QueueName, Revision};

/// The store as a whole could not do the operation. Nothing was changed, unless the variant says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The queue does not exist.
    #[error("queue {0} does not exist; create it first")]
    NoSuchQueue(QueueName),
    /// The store cannot be reached or has stopped. Nothing was done.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The operation may or may not have taken effect. Repeat it with the same deduplication id or receipt: that is
    /// safe.
    #[error("the outcome is unknown: {0}; repeat with the same deduplication id or receipt")]
    OutcomeUnknown(String),
    /// No room: a disk, a memory limit or the store's quota. The operation was rolled back; retry when there is room.
    #[error("the store is full: {0}; nothing was changed, retry when there is room")]
    Full(String),
    /// Too many operations are waiting. Nothing was done; retry with backoff.
    #[error("the store is overloaded: {0}; retry with backoff")]
    Overloaded(String),
    /// Too many messages of the queue are in flight.
    #[error("queue {queue} has {in_flight} messages in flight, the most it may have; settle some")]
    TooManyInFlight {
        /// The queue.
        queue: QueueName,
        /// How many are in flight.
        in_flight: u64,
    },
    /// The store was restored from a backup and delivers nothing until it is resumed.
    #[error("the store is paused: {0}")]
    Paused(String),
    /// The queue or the ledger is closed, because it is copied to another store or from one.
    #[error("{0}")]
    Moved(String),
    /// Stored data does not match its checksum.
    #[error("stored data is damaged: {0}")]
    Damaged(String),
    /// A value in the request is not acceptable.
    #[error("{0}")]
    Invalid(String),
}

impl StoreError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NoSuchQueue(_) => "no-such-queue",
            Self::Unavailable(_) => "unavailable",
            Self::OutcomeUnknown(_) => "outcome-unknown",
            Self::Full(_) => "full",
            Self::Overloaded(_) => "overloaded",
            Self::TooManyInFlight { .. } => "too-many-in-flight",
            Self::Paused(_) => "paused",
            Self::Moved(_) => "moved",
            Self::Damaged(_) => "damaged",
            Self::Invalid(_) => "invalid",
        }
    }

    /// Whether the same call may succeed later with the request unchanged.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::NoSuchQueue(_) | Self::Damaged(_) | Self::Invalid(_))
    }
}

/// Why one message of a batch was not accepted.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SendError {
    /// Body and attributes are larger than the queue allows.
    #[error(
        "the message has {bytes} bytes, the queue allows {bytes_max}; send a reference to the data instead"
    )]
    TooLarge {
        /// Bytes of body and attributes.
        bytes: u64,
        /// The queue's limit.
        bytes_max: u64,
    },
    /// A quota of the queue or the store is used up. Retry when messages have been settled.
    #[error("{quota} is used up ({used} of {max}); retry when messages have been settled, or raise it")]
    QuotaExceeded {
        /// Which quota, for example `quota.messages_max of queue payments`.
        quota: String,
        /// How much of it is used.
        used: u64,
        /// The quota.
        max: u64,
    },
    /// A value of the message is not acceptable for this queue.
    #[error("{0}")]
    Invalid(String),
}

impl SendError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::TooLarge { .. } => "too-large",
            Self::QuotaExceeded { .. } => "quota-exceeded",
            Self::Invalid(_) => "invalid",
        }
    }
}

/// Why one delivery was not settled or extended. Nothing was changed for it.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum SettleError {
    /// The receipt was not issued by this store for this queue.
    #[error("the receipt is not one of this queue's; pass it on exactly as it was received")]
    Malformed,
    /// A newer delivery holds the message, because the lease of this one ran out.
    #[error("the receipt is stale: the message was delivered again after its lease ran out")]
    Stale,
    /// The lease ran out; on a FIFO queue that ends the right to settle, since its group may have moved on.
    #[error("the receipt has expired: the lease ran out before the delivery was settled")]
    Expired,
    /// The message is not in flight, so there is no lease to change.
    #[error("the message is not in flight: its lease ran out or was given back")]
    NotInFlight,
    /// The message no longer exists: acked, rejected, purged or expired.
    #[error("the message is gone: it was settled before, purged, or its retention ran out")]
    Gone,
    /// The message is out of attempts or was rejected: it is in the dead-letter queue, or parked. An ack has no effect
    /// on it: an operator decides by a redrive or a release whether its effect happens again.
    #[error("the message is dead: it ran out of attempts or was rejected; redrive, release or discard it")]
    Dead,
    /// The extension would exceed the maximum lease, counted since the receive.
    #[error("the lease would last {lease_ms} ms since the receive; the most is {lease_ms_max} ms")]
    LeaseTooLong {
        /// The total that was asked for, counted since the receive.
        lease_ms: u64,
        /// The maximum.
        lease_ms_max: u64,
    },
    /// The claim that the settle was to end no longer belongs to the caller, so the delivery was not settled either.
    #[error("the claim was not ended, so the delivery was not settled: {0}")]
    Claim(TokenError),
}

impl SettleError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Malformed => "malformed-receipt",
            Self::Stale => "stale-receipt",
            Self::Expired => "expired-receipt",
            Self::NotInFlight => "not-in-flight",
            Self::Gone => "gone",
            Self::Dead => "dead",
            Self::LeaseTooLong { .. } => "lease-too-long",
            Self::Claim(error) => error.code(),
        }
    }
}

/// Why an administrative operation was refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum AdminError {
    /// The store could not do it.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A queue of that name exists with another configuration.
    #[error("queue {0} exists with another configuration ({1} differs); use `set` to change it")]
    Exists(QueueName, String),
    /// A field of a queue's configuration is not acceptable.
    #[error("{field}: {problem}")]
    Config {
        /// The field, as it is written in configuration.
        field: &'static str,
        /// What is wrong and what is allowed.
        problem: String,
    },
    /// Another task already moves messages out of this queue.
    #[error("a redrive of queue {0} is already running; cancel it or wait")]
    RedriveRunning(QueueName),
    /// The object was changed between the caller's read and its write. Nothing was changed by this call.
    #[error(
        "{what} has revision {actual}, not {expected}: it was changed meanwhile; read it again and repeat the change"
    )]
    RevisionConflict {
        /// The object to change, for example `queue payments`.
        what: String,
        /// The revision that the caller had read.
        expected: Revision,
        /// The revision that the object has now.
        actual: Revision,
    },
    /// The last such operation was too recent.
    #[error("{what} less than the wanted interval ago; try again in {retry_after_ms} ms")]
    TooSoon {
        /// The earlier operation, for example `queue payments was purged`.
        what: String,
        /// Time until the interval is over.
        retry_after_ms: u64,
    },
    /// No such message, task or group.
    #[error("{0} does not exist")]
    NotFound(String),
    /// The operation is not possible in the present state.
    #[error("{0}")]
    Refused(String),
}

impl AdminError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Store(error) => error.code(),
            Self::Exists(..) => "queue-exists",
            Self::Config { .. } => "config",
            Self::RedriveRunning(_) => "redrive-running",
            Self::RevisionConflict { .. } => "revision-conflict",
            Self::TooSoon { .. } => "too-soon",
            Self::NotFound(_) => "not-found",
            Self::Refused(_) => "refused",
        }
    }
}
