//! Why the server does not start.

use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// Why the server does not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// An address beyond loopback without keys.
    #[error(
        "refusing to listen on {0} without keys: anyone who reaches it could read and delete messages; \
         configure auth.keys, or set auth.insecure (--insecure) if the network itself is trusted"
    )]
    Exposed(SocketAddr),
    /// An address cannot be listened on.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// The certificate or its key cannot be used.
    #[error("TLS: {}: {problem}", file.display())]
    Tls {
        /// The file.
        file: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A value of the configuration is not acceptable.
    #[error("{field}: {problem}")]
    Config {
        /// The field, as it is written in configuration.
        field: String,
        /// What is wrong and what is allowed.
        problem: String,
    },
}

impl ServerError {
    /// The error's stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Exposed(_) => "exposed-without-keys",
            Self::Bind { .. } => "cannot-listen",
            Self::Tls { .. } => "tls",
            Self::Config { .. } => "config",
        }
    }
}
