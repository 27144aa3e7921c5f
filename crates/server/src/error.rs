//! Reasons why the server does not start.

use std::net::SocketAddr;
use std::path::PathBuf;

use thiserror::Error;

/// Why the server did not start.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum ServerError {
    /// The server would listen beyond loopback without keys.
    #[error(
        "refusing to listen on {0} without keys: anyone who reaches it could read and delete messages; \
         configure auth.keys, or set auth.insecure (--insecure) if the network itself is trusted"
    )]
    Exposed(SocketAddr),
    /// The server cannot listen on an address.
    #[error("cannot listen on {address}: {source}")]
    Bind {
        /// The address.
        address: SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The certificate or its key is unusable.
    #[error("TLS: {}: {problem}", file.display())]
    Tls {
        /// The file.
        file: PathBuf,
        /// The problem.
        problem: String,
    },
    /// A configuration value is not acceptable.
    #[error("{field}: {problem}")]
    Config {
        /// The field's name in the configuration.
        field: String,
        /// The problem and the allowed values.
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
