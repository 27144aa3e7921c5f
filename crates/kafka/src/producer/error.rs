//! Errors of the producer, by what their receiver has to do.

use kafka_protocol::error::ResponseError;

use crate::machine::{Identity, Misuse};
use crate::wire::WireError;

/// What the caller has to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The same call again, later.
    Retriable,
    /// Abort the transaction, and begin it again with the same inputs.
    Abortable,
    /// [`super::Producer::recover`]; then the committed offsets say whether the transaction was committed.
    Unknown,
    /// End, and let an operator or a supervisor decide.
    Fatal,
}

/// Why a call of the producer failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProducerError {
    /// A setting that a guarantee does not hold with.
    #[error("{key} = {value:?} is refused: {remedy}")]
    Refused {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// Why, and what to do.
        remedy: String,
    },
    /// The call is not allowed in the producer's state.
    #[error(transparent)]
    Misuse(#[from] Misuse),
    /// A record that cannot be sent; the transaction is not affected.
    #[error("the record cannot be sent: {0}")]
    Record(String),
    /// Not answered in time, or the brokers are busy.
    #[error("{what} did not succeed in time: {cause}")]
    Unavailable {
        /// The call.
        what: &'static str,
        /// The last failure.
        cause: Cause,
    },
    /// The transaction cannot be committed.
    #[error("the transaction has to be aborted: {what}: {cause}")]
    Abort {
        /// What failed.
        what: &'static str,
        /// Why.
        cause: Cause,
    },
    /// The commit was sent, and its outcome is not known.
    #[error("the transaction is committed or aborted, which one is not known: {cause}")]
    Unknown {
        /// The last failure.
        cause: Cause,
    },
    /// Another producer with the same transactional id took over.
    #[error(
        "the transactional id '{transactional_id}' was taken over: this is {ours}, the present one is {}",
        theirs.map_or_else(|| "not known".to_owned(), |theirs| theirs.to_string())
    )]
    Fenced {
        /// The id that both use.
        transactional_id: String,
        /// This producer.
        ours: Identity,
        /// The one that took over, if the coordinator could tell.
        theirs: Option<Identity>,
    },
    /// The brokers refuse this client.
    #[error("{what}: {cause}")]
    Fatal {
        /// The call.
        what: &'static str,
        /// Why.
        cause: Cause,
    },
}

/// The reason behind an error.
#[derive(Debug, thiserror::Error)]
pub enum Cause {
    /// A broker's error.
    #[error("{0}")]
    Broker(ResponseError),
    /// No response.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The user lacks a right.
    #[error(
        "{error}: the user needs the operation {operation} on {resource}; add an access control list (kafka-acls.sh)"
    )]
    Denied {
        /// The operation, as access control lists name it.
        operation: &'static str,
        /// The kind and name of the resource.
        resource: String,
        /// The broker's code.
        error: ResponseError,
    },
    /// Something else.
    #[error("{0}")]
    Other(String),
}

impl ProducerError {
    /// Whether a broker refused the producer's identity.
    pub(super) fn is_stale(&self) -> bool {
        matches!(self, Self::Abort { cause: Cause::Broker(error), .. } if meaning(*error) == Meaning::Stale)
    }

    /// What the caller has to do.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::Unavailable { .. } => ErrorKind::Retriable,
            Self::Abort { .. } | Self::Record(_) => ErrorKind::Abortable,
            Self::Unknown { .. } => ErrorKind::Unknown,
            Self::Refused { .. } | Self::Misuse(_) | Self::Fenced { .. } | Self::Fatal { .. } => {
                ErrorKind::Fatal
            }
        }
    }
}

/// What a broker's error means for a request of a transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Meaning {
    /// Nothing was changed; the same request later.
    Retry,
    /// The same, after a look-up of the leader or coordinator.
    Moved,
    /// The producer's identity is not the present one.
    Stale,
    /// It cannot succeed in this transaction.
    Abort,
    /// The client is not permitted.
    Forbidden,
}

pub(super) fn meaning(error: ResponseError) -> Meaning {
    use ResponseError as E;
    match error {
        E::NotLeaderOrFollower
        | E::UnknownTopicOrPartition
        | E::LeaderNotAvailable
        | E::FencedLeaderEpoch
        | E::UnknownLeaderEpoch
        | E::UnknownTopicId
        | E::ListenerNotFound
        | E::NotCoordinator
        | E::CoordinatorNotAvailable => Meaning::Moved,
        // Not retriable by its definition, yet it says that the coordinator still ends the transaction before.
        E::ConcurrentTransactions => Meaning::Retry,
        E::InvalidProducerEpoch
        | E::ProducerFenced
        | E::InvalidProducerIdMapping
        | E::TransactionCoordinatorFenced => Meaning::Stale,
        E::TransactionalIdAuthorizationFailed
        | E::TopicAuthorizationFailed
        | E::GroupAuthorizationFailed
        | E::ClusterAuthorizationFailed
        | E::SaslAuthenticationFailed
        | E::UnsupportedVersion => Meaning::Forbidden,
        error if error.is_retriable() => Meaning::Retry,
        _ => Meaning::Abort,
    }
}
