//! Why a request has no response.

use std::io;

/// Why a request has no response. Except for [`WireError::Connect`] the broker may have received the request.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// No connection, hence no request was sent.
    #[error("no connection to the broker at {address}: {reason}")]
    Connect {
        /// The broker.
        address: String,
        /// The cause.
        reason: String,
    },
    /// The connection ended.
    #[error("the connection to the broker at {address} ended: {source}")]
    Closed {
        /// The broker.
        address: String,
        /// The cause.
        source: io::Error,
    },
    /// No response within the request's time limit.
    #[error("the broker at {address} did not respond within {limit_ms} ms")]
    TimedOut {
        /// The broker.
        address: String,
        /// The limit.
        limit_ms: u128,
    },
    /// The broker announced a response above the limit; it was not read.
    #[error("the broker at {address} announced a response of {bytes} bytes; the limit is {bytes_max}")]
    TooLarge {
        /// The broker.
        address: String,
        /// The announced size.
        bytes: i64,
        /// The limit.
        bytes_max: usize,
    },
    /// The response cannot be read, or belongs to another request.
    #[error("the broker at {address} sent an invalid response: {reason}")]
    Invalid {
        /// The broker.
        address: String,
        /// What is wrong.
        reason: String,
    },
    /// The broker rejected the credentials or the mechanism.
    #[error("the broker at {address} rejected the authentication: {reason}")]
    Authentication {
        /// The broker.
        address: String,
        /// The broker's reason.
        reason: String,
    },
    /// The broker does not know the request in a version that this client speaks.
    #[error("the broker at {address} supports request {api} in versions {broker}, this client in {client}")]
    Unsupported {
        /// The broker.
        address: String,
        /// The request's key.
        api: i16,
        /// The broker's versions.
        broker: String,
        /// Versions of this client.
        client: String,
    },
    /// The configuration for TLS cannot be used.
    #[error("TLS: {0}")]
    Tls(String),
}

impl WireError {
    /// Another attempt can succeed without a change of the configuration.
    pub fn is_transient(&self) -> bool {
        !matches!(self, Self::Authentication { .. } | Self::Unsupported { .. } | Self::Tls(_))
    }
}
