use hapax_core::ledger::{ClaimError, ResolveError, TokenError};
use hapax_core::name::{NameError, QueueName};
use hapax_core::{AdminError, DocumentError, InboxError, SendError, SettleError, StoreError};
use thiserror::Error;

use crate::OpenError;
use crate::copy::CopyError;
use crate::transfer::TransferError;

/// Why an operation of this crate failed. Every error of the crate converts into it with `?`.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// async fn main_of_mine() -> Result<(), hapax::Error> {
///     let hapax = hapax::Hapax::open("mongodb://x").await?;
///     hapax.queue::<u64>("charges")?.send(&1999).await?;
///     Ok(())
/// }
/// assert_eq!(main_of_mine().await.unwrap_err().code(), "unknown-store");
/// # }
/// ```
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// The store could not be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// A name is not valid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// The store could not do the operation.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The message was not accepted.
    #[error(transparent)]
    Send(#[from] SendError),
    /// The delivery was not settled or extended.
    #[error(transparent)]
    Settle(#[from] SettleError),
    /// The queue was not created, changed or read.
    #[error(transparent)]
    Admin(#[from] AdminError),
    /// The queue exists with another configuration than the requested one. Nothing was changed.
    #[error(
        "queue {queue} exists with another configuration: its {field} differs; `apply` changes the queue, or ask for \
         what it has"
    )]
    QueueDiffers {
        /// The queue.
        queue: QueueName,
        /// The first field that differs.
        field: String,
    },
    /// The key was not claimed.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// The claim was not ended or renewed.
    #[error(transparent)]
    Token(#[from] TokenError),
    /// The entry in doubt was not resolved.
    #[error(transparent)]
    Resolve(#[from] ResolveError),
    /// The document was not changed.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// The export or import ended early.
    #[error(transparent)]
    Transfer(#[from] TransferError),
    /// The copy ended early.
    #[error(transparent)]
    Copy(#[from] CopyError),
    /// The transaction of a `transactional` effect failed.
    #[error(transparent)]
    Inbox(#[from] InboxError),
    /// A policy of the HTTP layer is not valid.
    #[cfg(feature = "http")]
    #[error(transparent)]
    HttpPolicy(#[from] hapax_http::ConfigError),
    /// The worker could not be built.
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Build(#[from] hapax_worker::BuildError),
    /// The worker stopped because of an error.
    #[cfg(feature = "worker")]
    #[error(transparent)]
    Worker(Box<hapax_worker::Stopped>),
    /// The sink or the outbox of a relay cannot be used as it is configured.
    #[cfg(feature = "relay")]
    #[error(transparent)]
    Sink(#[from] hapax_relay::sink::SinkError),
    /// The value cannot be written as JSON.
    #[error("the value cannot be written as JSON: {0}")]
    Encode(#[source] serde_json::Error),
    /// The body is not valid JSON for the queue's type.
    #[error("the body is not what this queue holds: {0}; reject the delivery or fix its sender")]
    Decode(#[source] serde_json::Error),
}

impl Error {
    /// The error's stable code. Each has a page, `docs/errors/CODE.md`.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Open(error) => error.code(),
            Self::Name(_) => "invalid",
            Self::Store(error) => error.code(),
            Self::Send(error) => error.code(),
            Self::Settle(error) => error.code(),
            Self::Admin(error) => error.code(),
            Self::QueueDiffers { .. } => "queue-exists",
            Self::Claim(error) => error.code(),
            Self::Token(error) => error.code(),
            Self::Resolve(error) => error.code(),
            Self::Document(error) => error.code(),
            Self::Transfer(error) => error.code(),
            Self::Copy(error) => error.code(),
            Self::Inbox(error) => error.code(),
            #[cfg(feature = "http")]
            Self::HttpPolicy(_) => "config",
            #[cfg(feature = "worker")]
            Self::Build(error) => error.code(),
            #[cfg(feature = "worker")]
            Self::Worker(stopped) => stopped.error.code(),
            #[cfg(feature = "relay")]
            Self::Sink(_) => "config",
            Self::Encode(_) => "not-json",
            Self::Decode(_) => "unexpected-body",
        }
    }
}

#[cfg(feature = "worker")]
impl From<hapax_worker::Stopped> for Error {
    fn from(stopped: hapax_worker::Stopped) -> Self {
        Self::Worker(Box::new(stopped))
    }
}
